"""Whether flashstate knows what a release of vLLM does with the layers that it serves, read from vLLM's sources.

A fact is one thing that such a source says: the parameters of a function, a call that is given a state, a fingerprint
of a definition. known.json holds the facts of every release that was compared with flashstate. A kind of layers is
recognised where all of its facts are among them. Nothing of vLLM is imported, and no version is compared.
"""

from __future__ import annotations

import ast
import copy
import functools
import json
import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, TypeAlias

from flashstate.integrations.fingerprints import fingerprint_of, statements
from flashstate.integrations.vllm.kinds import CHOOSING, KINDS, PAGES, Kind

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
KNOWN = Path(__file__).with_name("known.json")
PAGES_OF_A_LAYER = "kv_cache"  # the attribute that holds them
REPLACED = ("get_state_shape", "get_state_dtype", "get_kv_cache_spec", "get_prefill_checkpoint_alignment")


class Fact(NamedTuple):
    """One thing that a source of vLLM says of a name."""

    symbol: str
    says: str

    def __str__(self) -> str:
        return f"{self.symbol} {self.says}"


class Sources:
    """The sources of a release of vLLM, in the folder of its package."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._trees: dict[str, ast.Module] = {}
        self._imports: dict[str, list[ast.ImportFrom]] = {}
        self._prints: dict[str, str] = {}  # they take milliseconds, and kinds share places

    @functools.cached_property
    def version(self) -> str:
        """The version that the sources state, without what follows a plus sign."""
        found = re.search(r"^__version__ = .*?'([^'+]+)", self.text("_version.py"), re.MULTILINE)
        return found[1] if found else "of an unknown version"

    def text(self, file: str) -> str:
        """The text of a file, empty where there is none."""
        path = self.root / file
        return path.read_text() if path.is_file() else ""

    def tree(self, file: str) -> ast.Module:
        """The syntax tree of a file."""
        if file not in self._trees:
            try:
                self._trees[file] = ast.parse(self.text(file))
            except SyntaxError:  # of a newer Python: all in it counts as missing
                self._trees[file] = ast.Module([], [])
        return self._trees[file]

    def definition(self, place: str) -> ast.stmt | None:
        """The definition at a place, or None."""
        file, _, name = place.partition("::")
        node: ast.AST | None = self.tree(file)
        for part in name.split("."):
            node = next((n for n in getattr(node, "body", ()) if isinstance(n, DEFINED) and n.name == part), None)
        return node if isinstance(node, ast.stmt) else None

    def fingerprint(self, place: str) -> str:
        """A fingerprint of the definition at a place, empty where there is none."""
        if place not in self._prints:
            node = self.definition(place)
            lines = self.text(place.partition("::")[0]).splitlines()[node.lineno - 1 : node.end_lineno] if node else []
            source = textwrap.dedent("\n".join([*lines, ""]))
            self._prints[place] = fingerprint_of(statements(source)) if node else ""
        return self._prints[place]

    def origins(self, file: str, name: str) -> list[str]:
        """The places that define a function which a file defines or imports by this name."""
        if self.definition(f"{file}::{name}") is not None:
            return [f"{file}::{name}"]
        if file not in self._imports:
            self._imports[file] = [node for node in ast.walk(self.tree(file)) if isinstance(node, ast.ImportFrom)]
        named = [node for node in self._imports[file] if any(alias.name == name for alias in node.names)]
        return list(dict.fromkeys(place for node in named for place in self.origins(self._file_of(node, file), name)))

    def _file_of(self, node: ast.ImportFrom, file: str) -> str:
        """The file that an import statement in `file` reads from."""
        package = [] if not node.level else list(Path(file).parts[: -node.level])
        return self.file_of(".".join([*package, *filter(None, [node.module])]))

    def file_of(self, module: str) -> str:
        """The file of a module, which may be a package."""
        path = module.removeprefix("vllm.").replace(".", "/")
        return f"{path}.py" if (self.root / f"{path}.py").is_file() else f"{path}/__init__.py"


@functools.cache
def installed() -> Sources | None:
    """The sources of the installed vLLM, or None."""
    spec = find_spec("vllm")
    return None if spec is None or spec.origin is None else Sources(Path(spec.origin).parent)


@functools.cache
def known() -> Mapping[str, Mapping[str, str]]:
    """The releases in which each symbol says something, by symbol and by what it says."""
    table: dict[str, dict[str, str]] = json.loads(KNOWN.read_text())
    return table


@functools.cache
def unknown(sources: Sources, of: Kind | tuple[str, ...]) -> tuple[Fact, ...]:
    """The facts of a kind of layers, or of some places, that are not known."""
    facts = facts_of_kind(sources, of) if isinstance(of, Kind) else facts_of_places(sources, of)
    return tuple(dict.fromkeys(fact for fact in facts if fact.says not in known().get(fact.symbol, ())))


def changes(sources: Sources, of: Kind | tuple[str, ...]) -> str:
    """Say what is not known of a kind of layers, or of some places; empty where all is known."""
    first, *others = [*unknown(sources, of), ""]
    more = f", and {len(others) - 1} more that `flashstate info vllm` lists" if len(others) > 1 else ""
    return f"{first}{more}"


def all_facts(sources: Sources) -> Iterator[Fact]:
    """Everything that flashstate depends on in a release."""
    yield from facts_of_places(sources, (*CHOOSING, *PAGES))
    for kind in KINDS:
        yield from facts_of_kind(sources, kind)


def facts_of_places(sources: Sources, places: Iterable[str]) -> Iterator[Fact]:
    """A fingerprint of the definition at each place."""
    for place in places:
        found = sources.fingerprint(place)
        yield Fact(place.partition("::")[2], f"has the source {found}" if found else "is missing")


def facts_of_kind(sources: Sources, kind: Kind) -> Iterator[Fact]:
    """What a release says of a class of layers, of what it calls, and of what these calls depend on."""
    yield from facts_of_places(sources, kind.sources)
    answered = {call.name for call in kind.calls}
    called: set[str] = set()
    for name, function in functions_with_states(sources, kind).items():
        yield Fact(name, f"takes {parameters_of(function)}")
        for callee, call in calls_with_states(function, answered):
            called.add(callee)
            yield Fact(name, f"calls {call}")
    needed = [call.name for call in kind.calls if call.needed] + ["selective_state_update"] * kind.ssu
    for name in needed:
        if name not in called:
            yield Fact(kind.name, f"does not call {name}")
    for name in sorted(answered):
        for place in sources.origins(kind.file, name):
            node = sources.definition(place)
            assert isinstance(node, Function)
            yield Fact(name, f"takes {parameters_of(node)}")


def functions_with_states(sources: Sources, kind: Kind) -> dict[str, Function]:
    """The functions in the file of a kind that hold its states, or that flashstate replaces, by qualified name."""
    found: dict[str, Function] = {}
    for node in sources.tree(kind.file).body:
        inside = isinstance(node, ast.ClassDef) and node.name == kind.name
        for function in node.body if inside and isinstance(node, ast.ClassDef) else [node]:
            if isinstance(function, Function) and function.name not in ("__init__", *kind.elsewhere):
                held = any(isinstance(n, ast.Attribute) and n.attr == PAGES_OF_A_LAYER for n in ast.walk(function))
                if held or (inside and function.name in (*kind.methods, *REPLACED)):
                    found[f"{kind.name}.{function.name}" if inside else function.name] = function
    return found


def parameters_of(function: Function) -> str:
    """The parameters of a function, with their defaults and without their types."""
    given = copy.deepcopy(function.args)
    for node in ast.walk(given):
        if isinstance(node, ast.arg):
            node.annotation = None
    return f"({ast.unparse(given)})"


def calls_with_states(function: Function, named: Collection[str]) -> Iterator[tuple[str, str]]:
    """The calls in a function that are given a state, and those of the named functions: the callee, and the call with
    `state` for each state, `_` for other positional arguments, and keywords in order."""
    states = names_of_states(function)
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            callee = ast.unparse(node.func)
            method = isinstance(node.func, ast.Attribute) and is_state(node.func.value, states)
            given = [holds_state(value, states) for value in (*node.args, *(word.value for word in node.keywords))]
            if method or any(given) or callee in named:
                words = [
                    *("state" if held else "_" for held in given[: len(node.args)]),
                    *sorted(
                        f"{word.arg or '**'}{'=state' * held}"
                        for word, held in zip(node.keywords, given[len(node.args) :], strict=True)
                    ),
                ]
                name = f"state.{node.func.attr}" if method and isinstance(node.func, ast.Attribute) else callee
                yield name, f"{name}({', '.join(words)})"


def names_of_states(function: Function) -> set[str]:
    """The local names of states: of what a layer keeps in its pages, and of views of that."""
    names: set[str] = set()
    assigned = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
    before = -1
    while len(names) > before:
        before = len(names)
        for node in assigned:
            if is_state(node.value, names):
                targets = (target for target in node.targets if not isinstance(target, (ast.Subscript, ast.Attribute)))
                names.update(n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))
    return names


def is_state(node: ast.expr, names: Collection[str]) -> bool:
    """Whether an expression is a state: a layer's pages, an entry, or the outcome of a method of these."""
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.Attribute):
        return node.attr == PAGES_OF_A_LAYER
    if isinstance(node, ast.Subscript):
        return is_state(node.value, names)
    if isinstance(node, ast.IfExp):
        return is_state(node.body, names) or is_state(node.orelse, names)
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_state(node.func.value, names)


def holds_state(node: ast.AST, names: Collection[str]) -> bool:
    """Whether a state is in an expression; its dtype, say, is none."""
    if isinstance(node, ast.expr) and is_state(node, names):
        return True
    if isinstance(node, ast.Attribute) and is_state(node.value, names):
        return False
    return any(holds_state(child, names) for child in ast.iter_child_nodes(node))
