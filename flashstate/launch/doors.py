"""Functions over ops that remember what their calls started: a call like an earlier one starts that again.

What a function with another library's signature does beside its op, checks and views and Slots, costs the host several
times what the op does. The first call of a kind is watched: which views it takes of which argument, what memory it
makes, which kernels it starts. If it did nothing else, all that a call like it needs is addresses.

    @remembering(main="x")
    def selective_state_update(state: Tensor, x: Tensor, D: Tensor | None = None, dt_softplus: bool = False): ...

Calls are alike that have tensors of the same dtypes, shapes, strides, device and alignment, at different addresses, and
equal numbers, flags and words. Anything else, an argument of another type too, takes the ordinary way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial, update_wrapper
from operator import itemgetter
from textwrap import indent
from types import NoneType
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flashstate.launch import direct, environment
from flashstate.launch.direct import MOST_ALIKE, MOST_KEYS, DirectLaunch
from flashstate.launch.driver import DriverLaunch
from flashstate.launch.environment import suspended
from flashstate.launch.start import Launch, recording
from flashstate.state.faults import fault_flag
from flashstate.state.signature import ACCESS_BYTES
from flashstate.state.state import State

F = TypeVar("F", bound=Callable[..., Any])
MOST_WATCHED = 2  # calls of a kind: the first one may make what flashstate keeps
PLAIN = (NoneType, bool, int, float, str)  # types of what a key may have beside tensors
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}

FRAME = """
def {name}({parameters}):
    if environment.suspensions or not direct.available or is_compiling() or not (
        environment.pretended or getattr({main}, "is_cuda", False)
    ):
        return door({passed})
    try:
{body}
        for kind in kinds.get(key, ()):
            if kind.same_tensors(*tensors):
                break
        else:
            kind = None
    except (AttributeError, TypeError, RuntimeError):  # the last from tensors without memory
        return door({passed})
    if kind is not None and kind.again is not None and kind.again.usable():
        return kind.again.start(tensors, addresses)
    return seldom(kinds, key, kind, tensors, partial(door, {passed}))
"""


@dataclass
class Kind:
    """Calls alike but for addresses: how one is known, how many were watched, and what starts one again."""

    same_tensors: Callable[..., bool]
    watched: int = 0
    again: DirectLaunch | None = None


Kinds = dict[Hashable, list[Kind]]
KINDS: dict[Callable[..., Any], Kinds] = {}  # of every door


def remembering(main: str) -> Callable[[F], F]:
    """Make a function start again what an earlier call of it started. main: the tensor whose shape tells most."""

    def decorate(door: F) -> F:
        names = {
            "door": door, "kinds": KINDS.setdefault(door, {}), "seldom": seldom, "direct": direct, "State": State,
            "environment": environment, "is_compiling": torch.compiler.is_compiling, "partial": partial,
            **{f"default_{p.name}": p.default for p in inspect.signature(door).parameters.values()},
        }  # fmt: skip
        exec(compile(source_of(door, main), f"<repeated calls of {door.__name__}>", "exec"), names)
        return update_wrapper(names[door.__name__], door)  # type: ignore[return-value]

    return decorate


def source_of(door: Callable[..., Any], main: str) -> str:
    """The source of the function in the place of a door."""
    given = inspect.signature(door).parameters.values()
    parameters = [p.name if p.default is p.empty else f"{p.name}=default_{p.name}" for p in given]
    passed, more = [p.name for p in given], [p.name for p in given if p.kind is p.VAR_KEYWORD]
    if more:
        parameters[-1] = passed[-1] = f"**{passed[-1]}"
    by_name = [p.name for p in given if p.kind is p.KEYWORD_ONLY]
    if by_name:
        first = passed.index(by_name[0])
        parameters.insert(first, "*")
        passed[first : first + len(by_name)] = [f"{name}={name}" for name in by_name]
    body = indent("\n".join(body_of(door, main, more)), " " * 8)
    every, name = ", ".join(parameters), door.__name__
    return FRAME.format(name=name, parameters=every, passed=", ".join(passed), main=main, body=body)


def body_of(door: Callable[..., Any], main: str, more: Sequence[str]) -> list[str]:
    """Lines that collect tensors, their addresses, and the key."""
    hints = {name: hint for name, hint in get_type_hints(door).items() if name not in ("return", *more)}
    kinds = {name: {hint, *get_args(hint)} for name, hint in hints.items()}
    given = [name for name in hints if Tensor in kinds[name]]
    always = [name for name in given if not kinds[name] & {NoneType, State}]
    options = [name for name in hints if name not in given]
    lines = [f"{name}_at = {name}.data_ptr()" if name in always else f"{name}_at = 0" for name in given]
    lines += [f"tensors = [{', '.join(always)}]", f"addresses = [{', '.join(f'{name}_at' for name in always)}]"]
    lines += ["present = 0", *(f"{name}_like = None" for name in given if State in kinds[name])]
    for bit, name in enumerate(name for name in given if name not in always):
        present = [
            f"    {name}_at = {name}.data_ptr()", f"    present += {1 << bit}",
            f"    tensors.append({name})", f"    addresses.append({name}_at)",
        ]  # fmt: skip
        if State in kinds[name]:
            lines += [
                f"if {name}.__class__ is State:",
                f"    {name}_like = {name}.signature, {name}.stream",
                f"    parts = [part for part in ({name}.data, {name}.scale, {name}.seed) if part is not None]",
                "    tensors += parts",
                "    addresses += [part.data_ptr() for part in parts]",
            ]
        lines += [f"{'elif' if State in kinds[name] else 'if'} {name} is not None:", *present]
    lines += ["if len({*addresses}) < len(addresses): raise TypeError  # one memory twice: who reads what is not known"]
    odd = f"({' | '.join(f'{name}_at' for name in given)}) % {ACCESS_BYTES}"
    others = [f"len({name}) and (*{name}.items(), *map(type, {name}.values()))" for name in more]
    key = [
        f"{main}.shape", "present", *others, *(f"{name}_like" for name in given if State in kinds[name]), *options,
        *(f"{name}.__class__" for name in options if hints[name] is not str),  # 1 and True are equal
        f"{odd} and (*[at % {ACCESS_BYTES} for at in addresses],)",
    ]  # fmt: skip
    return [*lines, f"key = {', '.join(key)}"]


def seldom(
    kinds: Kinds, key: tuple[Any, ...], kind: Kind | None, tensors: list[Tensor], call: Callable[[], Any]
) -> Any:
    """Make a call that does not start as one before it did, and watch it if that may be worth while."""
    known = kinds.get(key, ())
    if not is_plain(key) or (len(known) >= MOST_ALIKE if kind is None else kind.watched >= MOST_WATCHED):
        return call()
    fault_flag(tensors[0].device)  # made at its first use
    with suspended(), recording() as started, Watch(tensors) as watch:
        result = call()
    with direct.as_expected():
        if kind is None:
            kind = Kind(direct.guard(tensors))
            if len(kinds) >= MOST_KEYS:
                kinds.clear()
            kinds.setdefault(key, []).append(kind)
        kind.watched += MOST_WATCHED if watch.computes else 1
        kind.again = repetition(kind, result, watch, started)
    return result


def is_plain(value: Any) -> bool:
    """Whether this is a number, a word or a type, or a tuple of such."""
    return type(value) in PLAIN or isinstance(value, type) or (isinstance(value, tuple) and all(map(is_plain, value)))


class Watch(TorchDispatchMode):
    """What torch does in a call: which memory it makes, and which of that and of what was given each tensor views."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.tensors = [*given]  # and those that were made
        self.given = len(given)
        self.harmless = True  # nothing but views and memory was made
        self.computes = False  # from tensors, as it will every time; without any it may make what flashstate keeps
        self._sources: dict[Hashable, set[int]] = {}
        for i, tensor in enumerate(given):
            self._note(tensor, {i})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = result if isinstance(result, (tuple, list)) else [result]
        inputs = [tensor for tensor in args if isinstance(tensor, Tensor)]
        if func.overloadpacket.__name__ in ALLOCATIONS:
            self.tensors.append(result)
            self._note(result, {len(self.tensors) - 1})
        elif func._schema.is_mutable or not all(is_view(output, inputs) for output in outputs):
            self.harmless = False
            self.computes |= bool(inputs)
        else:
            for output in outputs:
                self._note(output, set().union(*(self.sources(tensor) for tensor in inputs)))
        return result

    def _note(self, tensor: Tensor, sources: set[int]) -> None:
        self._sources.setdefault(looks(tensor), set()).update(sources)

    def sources(self, tensor: Tensor) -> set[int]:
        """Which of `tensors` this may be a view of; none of what is flashstate's own, such as numbers of slots."""
        return self._sources.get(looks(tensor), set())

    def met(self, tensor: Tensor) -> bool:
        """Whether this is in memory that was given or made."""
        return any(memory_of(tensor) == memory_of(other) for other in self.tensors)


def looks(tensor: Tensor) -> Hashable:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def is_view(output: Any, inputs: Iterable[Tensor]) -> bool:
    """Whether this is a tensor in the memory of one of these."""
    return isinstance(output, Tensor) and any(memory_of(output) == memory_of(tensor) for tensor in inputs)


def is_dense(tensor: Tensor) -> bool:
    """Whether this is all of its memory."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class UnrepeatableError(Exception):
    """A call did more than what its tensors' addresses say."""


class Repetition(NamedTuple):
    """What a call does, told as what is to be done with the addresses of one like it."""

    makes: list[Callable[[list[Tensor]], Tensor]]  # functions of all tensors before that make memory
    kept: list[Tensor]  # flashstate's own, such as numbers of slots
    constants: list[int]  # addresses of these
    launches: list[tuple[DriverLaunch, Callable[[list[int]], Sequence[int]], int]]  # which addresses, and a number
    give: Callable[[list[Tensor]], Any]  # the result

    def start(self, tensors: list[Tensor], addresses: list[int]) -> Any:
        """Make what is to be made, start the kernels, and return the result."""
        for make in self.makes:
            made = make(tensors)
            tensors.append(made)
            addresses.append(made.data_ptr())
        addresses += self.constants
        for launch, pick, number in self.launches:
            launch(pick(addresses), number)
        return self.give(tensors)


def repetition(kind: Kind, result: Any, watch: Watch, started: Sequence[Launch]) -> DirectLaunch | None:
    """What starts a call again that was watched; None where it did more than views, memory and launches."""
    kept: list[Tensor] = []
    try:
        if not watch.harmless or not started:
            raise UnrepeatableError
        made = watch.tensors[watch.given :]
        give = giving(result, watch, made)
        picks = [picking([place_of(pointer, watch, kept) for pointer in pointers_of(one)]) for one in started]
        numbers = [number_of(one, watch) for one in started]
    except UnrepeatableError:
        return None
    makes = [making(one, watch.tensors[: watch.given]) for one in made]
    constants = [tensor.data_ptr() for tensor in kept]
    launches = list(zip(map(DriverLaunch, started), picks, numbers, strict=True))
    again = Repetition(makes, kept, constants, launches, give)
    return DirectLaunch(kind.same_tensors, started[0].device.index, direct.hooks(), again.start)


def pointers_of(launch: Launch) -> list[Tensor]:
    """The tensors in front of the arguments of a kernel; of addresses that the host wrote down nothing is known."""
    found = [pointer for pointer in launch.arguments[: len(launch.kernel.pointers)] if pointer is not None]
    if not all(isinstance(pointer, Tensor) for pointer in found):
        raise UnrepeatableError
    return found


def number_of(launch: Launch, watch: Watch) -> int:
    """The number behind these. What follows it stays, so no tensor of the call may be there."""
    number, *others = launch.arguments[len(launch.kernel.pointers) :]
    if not isinstance(number, int) or any(isinstance(one, Tensor) and watch.met(one) for one in others):
        raise UnrepeatableError
    return number


def place_of(tensor: Tensor, watch: Watch, kept: list[Tensor]) -> tuple[int, int]:
    """Which of given, made and kept tensors this one views, and how many bytes behind its start."""
    sources = [*watch.sources(tensor)]
    if len(sources) == 1:
        return sources[0], tensor.data_ptr() - watch.tensors[sources[0]].data_ptr()
    if watch.met(tensor):
        raise UnrepeatableError
    kept.append(tensor)
    return len(watch.tensors) + len(kept) - 1, 0


def making(made: Tensor, given: Sequence[Tensor]) -> Callable[[list[Tensor]], Tensor]:
    """A function that makes memory like this; if a tensor like it was given, in half the time."""
    like = partial(torch.empty_like, memory_format=torch.contiguous_format)
    shape, strides, dtype, device = made.shape, made.stride(), made.dtype, made.device
    for i, tensor in enumerate(given):
        if made.is_contiguous() and (tensor.shape, tensor.dtype, tensor.device) == (shape, dtype, device):
            return lambda tensors: like(tensors[i])
    return lambda tensors: torch.empty_strided(shape, strides, dtype=dtype, device=device)


def picking(places: Sequence[tuple[int, int]]) -> Callable[[list[int]], Sequence[int]]:
    """A function that finds pointers among addresses."""
    if len(places) < 2 or any(offset for _, offset in places):
        return lambda addresses: [addresses[i] + offset for i, offset in places]
    return itemgetter(*(i for i, _ in places))


def giving(result: Any, watch: Watch, made: list[Tensor]) -> Callable[[list[Tensor]], Any]:
    """A function that finds the result among tensors. Memory that is returned is made with the axes of the result."""
    if not isinstance(result, tuple):
        place = place_of_result(result, watch, made)
        return (lambda tensors: None) if place is None else itemgetter(place)
    places = [place_of_result(one, watch, made) for one in result]
    if len(places) > 1 and None not in places:
        return itemgetter(*places)
    return lambda tensors: tuple([None if place is None else tensors[place] for place in places])


def place_of_result(result: Any, watch: Watch, made: list[Tensor]) -> int | None:
    if result is None:
        return None
    for i, tensor in enumerate(watch.tensors[: watch.given]):
        if result is tensor:
            return i
    sources = [*watch.sources(result)] if isinstance(result, Tensor) else []
    if len(sources) != 1 or sources[0] < watch.given:
        raise UnrepeatableError
    whole = watch.tensors[sources[0]]
    if result.shape != whole.shape and not (result.is_contiguous() and is_dense(whole)):
        raise UnrepeatableError
    if (result.data_ptr(), result.numel(), result.dtype) != (whole.data_ptr(), whole.numel(), whole.dtype):
        raise UnrepeatableError
    made[sources[0] - watch.given] = result
    return sources[0]
