"""Recognition of vLLM's layers by the source code of the installed release.

A fact is a statement about one symbol of vLLM: the parameters of a function, a call that is given a state, a
fingerprint of a definition. known.json holds the facts of every release that was compared with flashstate. A kind of
layers is recognised if all of its facts are among them. Nothing of vLLM is imported, and no version is compared.
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
from flashstate.integrations.vllm.kinds import CHOOSING, DRAFTS, KINDS, PAGES, Kind

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
KNOWN = Path(__file__).with_name("known.json")
STATES = "kv_cache"  # the attribute of a layer that holds its states
REPLACED = ("get_state_shape", "get_state_dtype", "get_kv_cache_spec", "get_prefill_checkpoint_alignment")
NO_STATE = ("dtype", "device", "shape", "ndim", "size", "stride", "dim", "numel")  # attributes that tell of a state


class Fact(NamedTuple):
    """A statement about one symbol of vLLM, such as its parameters or a fingerprint."""

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
        self._prints: dict[str, str] = {}  # a fingerprint takes milliseconds, and kinds share places

    @functools.cached_property
    def version(self) -> str:
        """The version that the sources state, up to a plus sign."""
        found = re.search(r"^__version__ = .*?'([^'+]+)", self.text("_version.py"), re.MULTILINE)
        return found[1] if found else "of an unknown version"

    def text(self, file: str) -> str:
        """Return the text of a file, empty if there is none."""
        path = self.root / file
        return path.read_text("utf-8") if path.is_file() else ""

    def tree(self, file: str) -> ast.Module:
        """Return the syntax tree of a file, empty if this version of Python cannot read it."""
        if file not in self._trees:
            try:
                self._trees[file] = ast.parse(self.text(file))
            except SyntaxError:
                self._trees[file] = ast.Module([], [])
        return self._trees[file]

    def definition(self, place: str) -> ast.stmt | None:
        """Return the function, class or assignment at a place, or None."""
        file, _, name = place.partition("::")
        node: ast.AST | None = self.tree(file)
        for part in name.split("."):
            node = next((n for n in getattr(node, "body", ()) if part in _names_of(n)), None)
        return node if isinstance(node, ast.stmt) else None

    def fingerprint(self, place: str) -> str:
        """Return a fingerprint of the definition at a place with its decorators, empty if there is none."""
        if place not in self._prints:
            node, lines = self.definition(place), self.text(place.partition("::")[0]).splitlines()
            if node is not None:
                first = min(n.lineno for n in (node, *getattr(node, "decorator_list", ())))
                source = textwrap.dedent("\n".join([*lines[first - 1 : node.end_lineno], ""]))
                self._prints[place] = fingerprint_of(statements(source))
            else:
                self._prints[place] = ""
        return self._prints[place]

    def imports_of(self, file: str, name: str) -> list[ast.ImportFrom]:
        """Return the import statements of a file that bind this name."""
        if file not in self._imports:
            self._imports[file] = [node for node in ast.walk(self.tree(file)) if isinstance(node, ast.ImportFrom)]
        return [node for node in self._imports[file] if any(name == (a.asname or a.name) for a in node.names)]

    def origins(self, file: str, name: str) -> list[str]:
        """Return the places that define a function which a file defines or imports by this name."""
        found: dict[str, None] = {}
        seen, todo = set(), [(file, name)]
        while todo:
            file, name = todo.pop()
            if self.definition(f"{file}::{name}") is not None:
                found[f"{file}::{name}"] = None
            elif (file, name) not in seen:
                for node in self.imports_of(file, name):
                    todo += [(self.source_of(node, file), a.name) for a in node.names if name == (a.asname or a.name)]
            seen.add((file, name))
        return list(found)

    def source_of(self, node: ast.ImportFrom, file: str) -> str:
        """Return the file that an import statement in `file` reads from."""
        package = [] if not node.level else list(Path(file).parts[: -node.level])
        return self.file_of(".".join([*package, *filter(None, [node.module])]))

    def file_of(self, module: str) -> str:
        """Return the file of a module, which may be a package."""
        path = module.removeprefix("vllm.").replace(".", "/")
        return f"{path}.py" if (self.root / f"{path}.py").is_file() else f"{path}/__init__.py"


def _names_of(node: ast.AST) -> list[str]:
    """Return the names that a statement defines."""
    if isinstance(node, DEFINED):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


@functools.cache
def installed() -> Sources | None:
    """Return the sources of the installed vLLM, or None."""
    spec = find_spec("vllm")
    return None if spec is None or spec.origin is None else Sources(Path(spec.origin).parent)


@functools.cache
def known() -> Mapping[str, Mapping[str, str]]:
    """Load known.json: for each symbol its facts, with the releases that state them."""
    table: dict[str, dict[str, str]] = json.loads(KNOWN.read_text("utf-8"))
    return table


@functools.cache
def unknown(sources: Sources, of: Kind | tuple[str, ...]) -> tuple[Fact, ...]:
    """Return the facts of a kind of layers, or of some places, that known.json lacks."""
    facts = facts_of_kind(sources, of) if isinstance(of, Kind) else facts_of_places(sources, of)
    return tuple(dict.fromkeys(fact for fact in facts if fact.says not in known().get(fact.symbol, ())))


def changes(sources: Sources, of: Kind | tuple[str, ...]) -> str:
    """Describe the first unknown fact and count them; return an empty string if all are known."""
    facts = unknown(sources, of)
    count = f" (the first of {len(facts)} unknown facts, which `flashstate info vllm` lists)" if len(facts) > 1 else ""
    return f"{facts[0]}{count}" if facts else ""


def all_facts(sources: Sources) -> Iterator[Fact]:
    """Yield every fact that flashstate depends on in a release."""
    yield from facts_of_places(sources, (*CHOOSING, *PAGES, *DRAFTS))
    for kind in KINDS:
        yield from facts_of_kind(sources, kind)


def facts_of_places(sources: Sources, places: Iterable[str]) -> Iterator[Fact]:
    """Yield a fingerprint of the definition at each place."""
    for place in places:
        found = sources.fingerprint(place)
        yield Fact(place.partition("::")[2], f"has the source {found}" if found else "is missing")


def facts_of_kind(sources: Sources, kind: Kind) -> Iterator[Fact]:
    """Yield the facts of a class of layers: its sources, its uses of states, and the functions that answer for it."""
    yield from facts_of_places(sources, kind.sources)
    functions = functions_with_states(sources, kind)
    if not functions:
        yield Fact(kind.name, f"is not in {kind.file}")
    node = sources.definition(f"{kind.file}::{kind.name}")
    bases = [ast.unparse(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []
    yield Fact(kind.name, f"is based on {', '.join(bases) or 'no class'}")
    answered = {call.name for call in kind.calls}
    named = {*answered, *(f"self.{function.name}" for function in functions.values())}
    called: set[str] = set()
    for name, function in functions.items():
        yield Fact(name, f"takes {parameters_of(function)}")
        states = names_of_states(function)
        for store in stores_of_states(function, states):
            yield Fact(name, f"stores {store}")
        for callee, call in calls_with_states(function, states, named):
            called.add(callee)
            yield Fact(name, f"calls {call}")
    for name in [call.name for call in kind.calls if call.needed] + ["selective_state_update"] * kind.ssu:
        if name not in called:
            yield Fact(kind.name, f"does not call {name}")
    for name in sorted(answered & called):
        yield from facts_of_callee(sources, kind, name)


def facts_of_callee(sources: Sources, kind: Kind, name: str) -> Iterator[Fact]:
    """Yield the parameters of a function that flashstate answers, and the modules that a method imports it from."""
    functions = [sources.definition(place) for place in sources.origins(kind.file, name)]
    for node in functions:
        yield Fact(name, f"takes {parameters_of(node)}" if isinstance(node, Function) else "is no function")
    if not functions:
        yield Fact(name, "is defined nowhere")
    for node in sources.imports_of(kind.file, name):
        if node not in sources.tree(kind.file).body:  # a name of the method, which only its module can change
            yield Fact(kind.name, f"imports {name} from {sources.source_of(node, kind.file)}")


def functions_with_states(sources: Sources, kind: Kind) -> dict[str, Function]:
    """Return the functions in the file of a kind that name its states, or that flashstate replaces, by name."""
    found: dict[str, Function] = {}
    todo: list[tuple[str, ast.stmt]] = [("", node) for node in sources.tree(kind.file).body]
    while todo:
        owner, node = todo.pop(0)
        if not isinstance(node, Function):
            prefix = f"{owner}{node.name}." if isinstance(node, ast.ClassDef) else owner
            todo += [(prefix, child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
        elif node.name not in ("__init__", *kind.elsewhere):
            own = owner == f"{kind.name}." and node.name in (*kind.methods, *REPLACED)
            if own or any(_names_states(inner) for inner in ast.walk(node)):
                found[f"{owner}{node.name}"] = node
    return found


def _names_states(node: ast.AST) -> bool:
    """Return whether a node is the attribute that holds states, or its name as a string."""
    return getattr(node, "attr", None) == STATES or getattr(node, "value", None) == STATES


def parameters_of(function: Function) -> str:
    """Return the parameters of a function, with their defaults and without their types."""
    given = copy.deepcopy(function.args)
    for node in ast.walk(given):
        if isinstance(node, ast.arg):
            node.annotation = None
    return f"({ast.unparse(given)})"


def names_of_states(function: Function) -> set[str]:
    """Return the local names that refer to a layer's states or to views of them."""
    names: set[str] = set()
    bound: list[tuple[ast.expr, ast.expr]] = []
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            bound += [(target, node.value) for target in node.targets]
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            bound.append((node.target, node.value))
        elif isinstance(node, (ast.For, ast.comprehension)):
            bound.append((node.target, node.iter))
    inner = {node.name: node.args.args for node in ast.walk(function) if isinstance(node, Function)}
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            given = zip(inner.get(node.func.id, ()), node.args, strict=False)
            bound += [(ast.Name(parameter.arg), value) for parameter, value in given]
    before = -1
    while len(names) > before:
        before = len(names)
        for target, value in bound:
            if is_state(value, names) and not isinstance(target, (ast.Subscript, ast.Attribute)):
                names.update(node.id for node in ast.walk(target) if isinstance(node, ast.Name))
    return names


def stores_of_states(function: Function, states: Collection[str]) -> Iterator[str]:
    """Yield the statements of a function that write into a state by an index, or keep one in an attribute."""
    for node in ast.walk(function):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        for target in targets:
            into = isinstance(target, ast.Subscript) and is_state(target.value, states)
            kept = isinstance(target, ast.Attribute) and isinstance(value, ast.expr) and is_state(value, states)
            if into or kept:
                yield ast.unparse(node)


def calls_with_states(function: Function, states: Collection[str], named: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the callee and the form of each call that is given a state or the layer, and of the named functions.

    The form has `state` for a state, `_` for another positional argument, and the keywords in order, with constants.
    """
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            callee, of_state = ast.unparse(node.func), False
            if isinstance(node.func, ast.Attribute) and is_state(node.func.value, states):
                callee, of_state = f"state.{node.func.attr}", node.func.attr not in NO_STATE
            places = [holds_state(value, states) for value in node.args]
            words = {word.arg or "**": word.value for word in node.keywords}
            kept = [name for name, value in words.items() if holds_state(value, states)]
            if of_state or any(places) or kept or callee in named:
                form = ["state" if held else "_" for held in places]
                for name, value in sorted(words.items()):
                    constant = f"={value.value!r}" if isinstance(value, ast.Constant) else ""
                    form.append(f"{name}=state" if name in kept else f"{name}{constant}")
                yield callee, f"{callee}({', '.join(form)})"


def is_state(node: ast.expr, names: Collection[str]) -> bool:
    """Return whether an expression is a layer's states, one of them, a view, or a collection with one."""
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.Attribute):
        return node.attr == STATES or (node.attr not in NO_STATE and is_state(node.value, names))
    if isinstance(node, (ast.Subscript, ast.Starred, ast.NamedExpr)):
        return is_state(node.value, names)
    if isinstance(node, ast.IfExp):
        return is_state(node.body, names) or is_state(node.orelse, names)
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return any(is_state(entry, names) for entry in node.elts)
    if isinstance(node, ast.Dict):
        return any(is_state(entry, names) for entry in node.values)
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_state(node.func, names)


def holds_state(node: ast.AST, names: Collection[str]) -> bool:
    """Return whether an argument holds a state or the layer itself; the dtype of a state holds none."""
    if isinstance(node, ast.Name):
        return node.id in (*names, "self")
    if isinstance(node, ast.Attribute):
        return is_state(node, names) or (not isinstance(node.value, ast.Name) and holds_state(node.value, names))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in NO_STATE:
        return False
    return any(holds_state(child, names) for child in ast.iter_child_nodes(node))
