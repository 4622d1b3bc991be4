"""What flashstate reads in the sources of vLLM, on small ones that are made up; tests_vllm/ reads vLLM's own."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashstate.cli import main
from flashstate.compat import vllm as compat
from flashstate.compat import vllm_kda
from flashstate.integrations.vllm import contract
from flashstate.integrations.vllm.contract import Sources
from flashstate.integrations.vllm.kinds import CHOOSING, KDA, KINDS, PAGES, Call, Kind
from flashstate.integrations.vllm.upstream import OURS

LAYER = '''
from .ops import step, fill

class Layer:
    """A layer."""

    def forward(self, x: int, *, out=None):
        pages = self.kv_cache
        window, state = pages
        rows = state.transpose(1, 2)
        if x:
            fill(x, states=state, dtype=state.dtype)
        return step(x, rows, slots=self.slots, out=out)

    def prepare(self, rows: list[int]) -> None:
        self.slots = rows

    def forward_cpu(self, x):
        return slow(self.kv_cache, x)
'''
OPS = "from .steps import step as step\nfrom .steps import fill\n"
STEPS = "def step(x, state, slots=None, out: int = 0): ...\n\n\ndef fill(x, states): ...\n"
BUILDER = '''
class Builder:
    """Builds."""

    def build(self, rows):
        # in order
        return [row for row in rows if row > 0]
'''
FILES = {"layers/layer.py": LAYER, "layers/ops.py": OPS, "layers/steps.py": STEPS, "builder.py": BUILDER}
KIND = Kind(
    "layers/layer.py", "Layer", ("forward",), (Call("step", "state"),), ("builder.py::Builder.build",), ("forward_cpu",)
)


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Sources]:
    """Write the files, with an edit of one, into a folder of their own; what they say without an edit is known."""

    def write(file: str = "", before: str = "", after: str = "") -> Sources:
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        for name, text in FILES.items():
            if name == file:
                assert before in text
                text = text.replace(before, after)
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        return Sources(root)

    table: dict[str, dict[str, str]] = {}
    for fact in contract.facts_of_kind(write(), KIND):
        table.setdefault(fact.symbol, {})[fact.says] = "0.1"
    monkeypatch.setattr(contract, "known", lambda: table)
    return write


def test_facts_are_parameters_calls_with_states_and_fingerprints(written: Any) -> None:
    facts = dict.fromkeys(map(str, contract.facts_of_kind(written(), KIND)))
    (source,) = [fact for fact in facts if " has the source " in fact]
    assert re.fullmatch(r"Builder\.build has the source [0-9a-f]{12}", source)
    assert set(facts) - {source} == {
        "Layer.forward takes (self, x, *, out=None)",
        "Layer.forward calls state.transpose(_, _)",
        "Layer.forward calls fill(_, dtype, states=state)",
        "Layer.forward calls step(_, state, out, slots)",
        "step takes (x, state, slots=None, out=0)",
    }


# An edit of a file, and what then is not known.
EDITS = {
    "a renamed keyword": (
        "layers/layer.py", "slots=self.slots", "rows=self.slots", "Layer.forward calls step(_, state, out, rows)",
    ),
    "a state as another argument": (
        "layers/layer.py", "step(x, rows,", "step(rows, x,", "Layer.forward calls step(state, _, out, slots)",
    ),
    "a new call with a state": (
        "layers/layer.py", "        return step(", "        warm(window)\n        return step(",
        "Layer.forward calls warm(state)",
    ),
    "a new call with a state by another name": (
        "layers/layer.py", "        return step(",
        "        if x:\n            b, *_ = pages\n        a = b[x:]\n        warm(a=a)\n        return step(",
        "Layer.forward calls warm(a=state)",
    ),
    "a state in a list": (
        "layers/layer.py", "        return step(", "        warm([x, window])\n        return step(",
        "Layer.forward calls warm(state)",
    ),
    "a new method of a state": (
        "layers/layer.py", "        return step(", "        state.copy_(x)\n        return step(",
        "Layer.forward calls state.copy_(_)",
    ),
    "a new method with states": (
        "layers/layer.py", "    def prepare(", "    def fold(self):\n        self.kv_cache = None\n\n    def prepare(",
        "Layer.fold takes (self)",
    ),
    "a new function with states": (
        "layers/layer.py", "class Layer:", "def fold(layer, /):\n    layer.kv_cache = None\n\nclass Layer:",
        "fold takes (layer, /)",
    ),
    "an unknown override of a method that flashstate replaces": (
        "layers/layer.py", "    def prepare(", "    def get_state_shape(self, rank): ...\n\n    def prepare(",
        "Layer.get_state_shape takes (self, rank)",
    ),
    "a parameter of a method": ("layers/layer.py", "x: int, *, out", "x: int, z, *, out",
                                "Layer.forward takes (self, x, z, *, out=None)"),
    "the order of parameters of what is answered": (
        "layers/steps.py", "slots=None, out: int = 0", "out=0, slots=None", "step takes (x, state, out=0, slots=None)",
    ),
    "no call of what is answered": (
        "layers/layer.py", "return step(", "return other(", "Layer does not call step",
    ),
    "a builder that builds otherwise": ("builder.py", "row > 0", "row >= 0", "Builder.build has the source "),
    "no builder": ("builder.py", "def build(", "def make(", "Builder.build is missing"),
    "a file of a newer Python": ("builder.py", "class Builder", "klass Builder", "Builder.build is missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_named(written: Any, name: str) -> None:
    *edit, says = EDITS[name]
    assert any(str(fact).startswith(says) for fact in contract.unknown(written(*edit), KIND))


# Edits that change nothing for flashstate.
SAME = {
    "a comment and a docstring": ("builder.py", "        # in order\n", '        """Build."""\n'),
    "the layout": ("builder.py", "row for row in rows if", "\n            row for row in rows  if"),
    "a type": ("layers/layer.py", "x: int, *", "x: float, *"),
    "a method without states": ("layers/layer.py", "self.slots = rows", "self.slots = rows.copy(1)"),
    "a function that never runs on flashstate": ("layers/layer.py", "slow(self", "slower(1, self"),
    "what of a state is none": ("layers/layer.py", "dtype=state.dtype", "dtype=state.shape[0]"),
    "where a function is defined": ("layers/ops.py", OPS, STEPS),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_an_edit_without_meaning_changes_no_fact(written: Any, name: str) -> None:
    assert not contract.unknown(written(*SAME[name]), KIND)


def test_a_change_is_said_in_one_line_with_the_number_of_others(written: Any) -> None:
    assert contract.changes(written(), KIND) == ""
    one, two = (written("layers/layer.py", "step(x, rows,", call) for call in ("step(x, 1, rows,", "other(x, rows,"))
    assert contract.changes(one, KIND) == "Layer.forward calls step(_, _, state, out, slots)"
    assert contract.changes(two, KIND) == (
        "Layer.forward calls other(_, state, out, slots), and 1 more that `flashstate info vllm` lists"
    )


@pytest.mark.parametrize(
    ("text", "version"),
    [("__version__ = version = '0.34.1'\n", "0.34.1"), ("__version__ = '0.33.0+cpu'\n", "0.33.0"),
     ("", "of an unknown version")],
)  # fmt: skip
def test_the_version_is_that_of_the_sources(tmp_path: Path, text: str, version: str) -> None:
    (tmp_path / "_version.py").write_text(text)
    assert Sources(tmp_path).version == version


CALLS = [
    (call, says.removeprefix("calls "))
    for kind in KINDS
    for symbol, said in contract.known().items()
    for says in said
    for call in kind.calls
    if symbol.startswith((f"{kind.name}.", "_")) and says.startswith(f"calls {call.name}(")
]


@pytest.mark.parametrize(("call", "says"), CALLS, ids=lambda value: value if isinstance(value, str) else value.name)
def test_what_answers_a_call_takes_every_call_that_is_known(call: Call, says: str) -> None:
    """Positional arguments and keywords of the calls in known.json fit the functions of flashstate."""
    answers = [OURS[call.name]] if call.name in OURS else [
        getattr(module, call.name) for module in (compat, vllm_kda) if hasattr(module, call.name)
    ]  # fmt: skip
    positional, keywords = [], {}
    for word in re.fullmatch(r"\w+\((.*)\)", says)[1].split(", "):  # type: ignore[index]
        name, _, _ = word.partition("=")
        if word in ("_", "state"):
            positional.append(word)
        else:
            keywords[name] = word
    fits = []
    for answer in answers:
        try:
            bound = inspect.signature(answer).bind(*positional, **keywords)
        except TypeError:
            continue
        arguments = {**bound.arguments, **bound.arguments.get("more", {})}
        fits.append(call.state is None or arguments.get(call.state) in ("state", f"{call.state}=state"))
    assert fits == [True]


def test_every_kind_is_in_the_table_from_the_oldest_release_to_the_newest() -> None:
    said = {symbol: " ".join(releases.values()) for symbol, releases in contract.known().items()}
    for kind in KINDS:
        for method in kind.methods:
            assert {"0.26.0", "0.33.0"} <= set(said[f"{kind.name}.{method}"].split())
    for place in (*CHOOSING, *PAGES):
        assert "0.33.0" in said[place.partition("::")[2]]
    assert all(module.startswith("vllm.") for module in KDA)


def test_info_tells_of_a_release_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(contract, "installed", lambda: None)
    assert main(["info", "vllm"]) == 2
    assert "vLLM is not installed" in capsys.readouterr().err
    (tmp_path / "_version.py").write_text("__version__ = '0.99.0'\n")
    monkeypatch.setattr(contract, "installed", lambda: Sources(tmp_path))
    assert main(["info", "vllm"]) == 0
    printed = capsys.readouterr().out
    assert f"vLLM 0.99.0 in {tmp_path}" in printed
    assert re.search(r"MambaMixer2 +all devices +no", printed)
    assert "MambaMixer2: MambaBase is missing" in printed
    assert "vLLM runs layers that are not recognised" in " ".join(printed.split())
    assert main(["info", "vllm", "--heads", "4"]) == 2
    assert "info vllm takes no --heads" in capsys.readouterr().err
