"""What flashstate reads in the sources of vLLM, on small ones that are made up; tests_vllm/ reads vLLM's own."""

import inspect
import re
import textwrap
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
from flashstate.integrations.vllm.pages import AROUND
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
            fill(x, states=state, dtype=state.dtype, zero=True)
        return step(x, rows, slots=self.slots, out=out)

    def prepare(self, rows: list[int]) -> None:
        self.slots = rows

    def forward_cpu(self, x):
        return slow(self.kv_cache, x)
'''
OPS = "from .steps import step as step\nfrom .steps import fill\n"
STEPS = "def step(x, state, slots=None, out: int = 0): ...\n\n\ndef fill(x, states): ...\n"
BUILDER = '''
NULL = 0


class Builder:
    """Builds."""

    def build(self, rows):
        # in order
        return [row for row in rows if row > 0]
'''
FILES = {"layers/layer.py": LAYER, "layers/ops.py": OPS, "layers/steps.py": STEPS, "builder.py": BUILDER}
KIND = Kind(
    "layers/layer.py",
    "Layer",
    ("forward",),
    (Call("step", "state"),),
    ("builder.py::Builder.build", "builder.py::NULL"),
    ("forward_cpu",),
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
    sources = {fact for fact in facts if re.fullmatch(r"(NULL|Builder\.build) has the source [0-9a-f]{12}", fact)}
    assert len(sources) == 2
    assert set(facts) - sources == {
        "Layer is based on no class",
        "Layer.forward takes (self, x, *, out=None)",
        "Layer.forward calls state.transpose(_, _)",
        "Layer.forward calls fill(_, dtype, states=state, zero=True)",
        "Layer.forward calls step(_, state, out, slots)",
        "step takes (x, state, slots=None, out=0)",
    }


# Lines at the end of Layer.forward, and the fact of that method that is then not known.
INSERTED = {
    "a new call with a state": ("warm(window)", "calls warm(state)"),
    "a state by another name": ("if x:\n    b, *_ = pages\na = b[x:]\nwarm(a=a)", "calls warm(a=state)"),
    "a state with a type": ("a: int = pages[0]\nwarm(a)", "calls warm(state)"),
    "a state named in an expression": ("if x and (a := pages):\n    warm(a)", "calls warm(state)"),
    "states one by one": ("for a in pages:\n    warm(a)", "calls warm(state)"),
    "a state among others": ("a, b = pages[0], 3\nwarm(a)", "calls warm(state)"),
    "a state in a list": ("warm([x, window])", "calls warm(state)"),
    "a state in a dictionary": ("a = {'a': rows}\nwarm(**a)", "calls warm(**=state)"),
    "another view of a state": ("warm(rows.mT)", "calls warm(state)"),
    "a new method of a state": ("rows.copy_(x)", "calls state.copy_(_)"),
    "the layer": ("warm(self)", "calls warm(state)"),
    "a function inside": ("def inner(a):\n    warm(a)\n\ninner(rows)", "calls warm(state)"),
    "a call of another method with states": ("self.forward(x)", "calls self.forward(_)"),
    "a state that is kept": ("self.rows = rows", "stores self.rows = rows"),
    "a store into a state": ("window[x] = x.mT", "stores window[x] = x.mT"),
    "a change of a state": ("window[x, 0] *= 2", "stores window[x, 0] *= 2"),
}
RETURN, PREPARE = "        return step(", "    def prepare("

# An edit of a file, and the fact that is then not known.
EDITS = {
    "a renamed keyword": (
        "layers/layer.py", "slots=self.slots", "rows=self.slots", "Layer.forward calls step(_, state, out, rows)",
    ),
    "another constant": (
        "layers/layer.py", "zero=True", "zero=False", "Layer.forward calls fill(_, dtype, states=state, zero=False)",
    ),
    "another base": ("layers/layer.py", "class Layer:", "class Layer(Base):", "Layer is based on Base"),
    "a state as another argument": (
        "layers/layer.py", "step(x, rows,", "step(rows, x,", "Layer.forward calls step(state, _, out, slots)",
    ),
    "a new method with states": (
        "layers/layer.py", PREPARE, f"    def fold(self):\n        self.kv_cache = None\n\n{PREPARE}",
        "Layer.fold takes (self)",
    ),
    "a method that asks for states by name": (
        "layers/layer.py", PREPARE, f"    def fold(self):\n        return getattr(self, 'kv_cache')\n\n{PREPARE}",
        "Layer.fold takes (self)",
    ),
    "a new function with states": (
        "layers/layer.py", "class Layer:", "def fold(layer, /):\n    layer.kv_cache = None\n\nclass Layer:",
        "fold takes (layer, /)",
    ),
    "another class with states": (
        "layers/layer.py", "class Layer:", "class Other:\n    def fold(self): return self.kv_cache\n\nclass Layer:",
        "Other.fold takes (self)",
    ),
    "an unknown override of a method that flashstate replaces": (
        "layers/layer.py", PREPARE, f"    def get_state_shape(self, rank): ...\n\n{PREPARE}",
        "Layer.get_state_shape takes (self, rank)",
    ),
    "a parameter of a method": (
        "layers/layer.py", "x: int, *, out", "x: int, z, *, out", "Layer.forward takes (self, x, z, *, out=None)",
    ),
    "the order of parameters of a function that flashstate answers": (
        "layers/steps.py", "slots=None, out: int = 0", "out=0, slots=None", "step takes (x, state, out=0, slots=None)",
    ),
    "another function under the name of one that flashstate answers": (
        "layers/layer.py", "import step, fill", "import step2 as step, fill", "step is defined nowhere",
    ),
    "a class in place of a function that flashstate answers": (
        "layers/steps.py", "def step(", "class step: ...\ndef step2(", "step is no function",
    ),
    "an import in a method": (
        "layers/layer.py", RETURN, f"        from .steps import step\n{RETURN}",
        "Layer imports step from layers/steps.py",
    ),
    "no call of a function that flashstate answers": (
        "layers/layer.py", "return step(", "return other(", "Layer does not call step",
    ),
    "no states": ("layers/layer.py", LAYER, "class Layer: ...\n", "Layer is not in layers/layer.py"),
    "a builder that builds otherwise": ("builder.py", "row > 0", "row >= 0", "Builder.build has the source "),
    "a decorator": ("builder.py", "    def build", "    @staticmethod\n    def build", "Builder.build has the source "),
    "a constant": ("builder.py", "NULL = 0", "NULL = 1", "NULL has the source "),
    "no builder": ("builder.py", "def build(", "def make(", "Builder.build is missing"),
    "a file of a newer Python": ("builder.py", "class Builder", "klass Builder", "Builder.build is missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_named(written: Any, name: str) -> None:
    *edit, says = EDITS[name]
    assert any(str(fact).startswith(says) for fact in contract.unknown(written(*edit), KIND))


@pytest.mark.parametrize("name", INSERTED)
def test_a_new_use_of_states_is_named(written: Any, name: str) -> None:
    lines, says = INSERTED[name]
    edit = "layers/layer.py", RETURN, f"{textwrap.indent(lines, 8 * ' ')}\n{RETURN}"
    assert contract.Fact("Layer.forward", says) in contract.unknown(written(*edit), KIND)


# Edits that change nothing for flashstate.
SAME = {
    "a comment and a docstring": ("builder.py", "        # in order\n", '        """Build."""\n'),
    "the layout": ("builder.py", "row for row in rows if", "\n            row for row in rows  if"),
    "a type": ("layers/layer.py", "x: int, *", "x: float, *"),
    "a method without states": ("layers/layer.py", "self.slots = rows", "self.slots = rows.copy(1)"),
    "a function that never runs on flashstate": ("layers/layer.py", "slow(self", "slower(1, self"),
    "what tells of a state": ("layers/layer.py", "dtype=state.dtype", "dtype=state.size(0)"),
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
        "Layer.forward calls other(_, state, out, slots) (the first of 2 unknown facts, which `flashstate info vllm` "
        "lists)"
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
    for call in (*kind.calls, Call("selective_state_update", "state"))
    if symbol.startswith(f"{kind.name}.") and says.startswith(f"calls {call.name}(")
]


@pytest.mark.parametrize(("call", "says"), CALLS, ids=lambda value: value if isinstance(value, str) else value.name)
def test_what_answers_a_call_takes_every_call_that_is_known(call: Call, says: str) -> None:
    """Positional arguments and keywords of the calls in known.json fit the functions of flashstate."""
    answers = [table[call.name] for table in (OURS, AROUND) if call.name in table] or [
        getattr(module, call.name) for module in (compat, vllm_kda) if hasattr(module, call.name)
    ]
    positional = ["stock"] if call.name in AROUND else []
    keywords = {}
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
    assert "vLLM itself runs layers that are not recognised" in " ".join(printed.split())
    assert main(["info", "vllm", "--heads", "4"]) == 2
    assert "info vllm takes no --heads" in capsys.readouterr().err
