"""An op, declared once: its signature says which tensors it takes and with which axes, and everything follows.

    def step(state: State | Tensor, x: Annotated[Tensor, "tokens heads | rows"], *, slots: Slots | Tensor | None = None,
             update: bool = True, out: Tensor | None = None) -> Tensor:
        return STEP.call(state, x, slots, update, out)

    STEP = Op(step, main="x", state_axes="slots heads rows cols", problems=..., values=...)

`STEP.call` checks what it is given (launch/axes.py has the words for axes), starts a kernel or runs the reference, and
where a call repeats an earlier one goes straight to the kernel (launch/repeat.py). torch.compile sees a registered op,
whose flat arguments launch/registered.py makes of the same signature. What kernels are given is found by its name
(launch/arguments.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import torch
from torch import Tensor

from flashstate.errors import (
    check_device,
    check_flag,
    check_no_overlap,
    check_number,
    check_row_contiguous,
    check_tensor,
    checked_range,
)
from flashstate.launch import registered
from flashstate.launch.arguments import values_of
from flashstate.launch.axes import Axes, Tokens, check_main, tokens_of
from flashstate.launch.config import Problem, choose
from flashstate.launch.direct import Launches, Likeness, remember
from flashstate.launch.environment import Machine, machine_of, uses_kernels
from flashstate.launch.repeat import new_out, repeat_function
from flashstate.launch.start import Launch, check_programs, start
from flashstate.state.places import Place
from flashstate.state.signature import Describes
from flashstate.state.slots import Slots, as_slots
from flashstate.state.state import State, as_snapshots, as_state, refuse_transposed

OPS: dict[str, Op] = {}  # all that are declared, by name


class Given:
    """The arguments of a call by their names, checked, and what was found out about them: its `tokens`, the tensor of
    its state, `pool`, and `sizes` of axes where they are checked, and the `machine` where a kernel is started."""

    tokens: Tokens
    pool: Tensor
    sizes: dict[str, int]
    machine: Machine

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def __init__(self, names: Iterable[str], values: Iterable[Any]) -> None:
        for name, value in zip(names, values, strict=True):
            setattr(self, name, value)

    @property
    def stores(self) -> str:
        """After which tokens a kernel writes the pool: "last", "every" or "none"."""
        return "none" if not self.update else "every" if self.slots is not None and self.slots.per_token else "last"

    @property
    def stored(self) -> str:
        """Which states after several tokens a config is chosen for: "last", "every", also as snapshots, or "none"."""
        if self.tokens.one_token:
            return "last"
        return "every" if getattr(self, "snapshots", None) is not None else self.stores


@dataclass(eq=False)
class Op:
    """An op. Its functions are told what a call was given."""

    function: Callable[..., Any]  # the public one, whose signature is the declaration
    main: str  # the tensor argument whose tokens others must have, and whose dtype an output has that is not given
    state_axes: str  # names of the axes of a state
    problems: Callable[[Given], Sequence[Problem]]  # what configs are chosen for, one per kernel of a call
    debug: Callable[[Given], None]  # raises where numbers in tensors are wrong, inside debug()
    kernel: Callable[[Given, Any], Any] | None = None  # the kernel for one of these problems; None: that of its name
    values: Callable[[Given, Any, Any], dict[str, Any]] = lambda *call: {}  # what kernels take and no argument says
    reference: Mapping[str, Callable[[Given], Any]] = field(default_factory=dict)  # what it takes and no argument says
    sizes: Callable[[Any], dict[str, int]] = lambda state: {}  # of axes that a state says beside its own
    slots: Callable[[Given], Slots | None] = lambda given: as_slots(given.slots)
    divides: Mapping[str, str] = field(default_factory=dict)  # free axes, and the axis whose size theirs must divide
    words: Mapping[str, str] = field(default_factory=dict)  # what errors call axes whose names are letters
    check: Callable[[Given], None] = lambda given: None  # raises for what axes cannot say; may replace arguments
    writes: tuple[str, ...] = ()  # tensor arguments that are written, beside states, rings and `out`
    aligned: tuple[str, ...] = ()  # tensors whose rows a kernel accesses widely only if all of them are aligned
    aligned_each: tuple[str, ...] = ()  # tensors whose alignment a kernel is told of one by one
    aliases: Mapping[str, str] = field(default_factory=dict)  # names that kernels have for tensors, where these differ
    transposed: bool = False  # states may be transposed within a slot
    rolls_back: bool = False  # slots.accepted may come without a table of slots
    ignored: tuple[str, ...] = ()  # tables of slots that its kernels do not take
    like_main: str = "True"  # an expression of arguments: whether the output has the shape of the main one
    launches: Launches = field(default_factory=dict)  # started before

    def __post_init__(self) -> None:
        """Find out what the signature says."""
        hints = get_type_hints(self.function, include_extras=True)
        self.hints = {name: hints[name] for name in inspect.signature(self.function).parameters}  # types, in order
        kinds = {name: {hint, *get_args(hint)} for name, hint in self.hints.items()}
        axes = {name: found for name, hint in self.hints.items() if (found := axes_in(hint)) is not None}
        self.takes_state = next(iter(self.hints.values())) == State | Tensor  # as the first argument
        self.takes_snapshots = self.hints.get("snapshots") == State | Tensor | None
        self.tensors: dict[str, Axes] = {self.main: axes[self.main], **axes}  # of tensor arguments, the main one first
        self.optional = frozenset(name for name in kinds if type(None) in kinds[name])  # arguments that may be None
        self.flags = tuple(name for name in kinds if bool in kinds[name])  # arguments that are True or False; or None
        self.numbers = tuple(name for name in kinds if float in kinds[name])  # arguments that are a number, or None
        self.ranges = tuple(name for name in kinds if tuple[float, float] in kinds[name])  # arguments that are two
        self.inputs = {name: axes for name, axes in self.tensors.items() if name not in self.writes}  # that are read
        self.options = tuple(name for name in kinds if kinds[name] & {bool, int, float, str, tuple[float, float]})
        self.inner = tuple(self.state_axes.split()[1:])  # names of the axes of a state within a slot
        self.pieces = registered.register(self.name, self.hints, self._run_registered, self.writes)  # flat arguments
        # Takes all arguments, in the order of the signature. Another function, once it is known what a call needs.
        self.call: Callable[..., Any] = self.first_call
        OPS[self.name] = self

    @property
    def name(self) -> str:
        return self.function.__name__

    def module_in(self, room: str) -> Any:
        """The module of another room that has the name of its own."""
        return import_module(self.function.__module__.replace(".ops.", f".{room}."))

    @cached_property
    def own_kernel(self) -> Any:
        """The kernel of its name; any others take the same arguments."""
        return getattr(self.module_in("kernels"), f"{self.name}_kernel")

    @cached_property
    def _taken_by_reference(self) -> tuple[str, ...]:
        return tuple(inspect.signature(getattr(self.module_in("reference"), self.name)).parameters)

    def run_reference(self, given: Given) -> None:
        """Fill `out` and update states in plain torch, by the function of its name."""
        found = {name: find(given) for name, find in self.reference.items()}
        values = [found[name] if name in found else getattr(given, name) for name in self._taken_by_reference]
        getattr(self.module_in("reference"), self.name)(*values)

    def first_call(self, *values: Any) -> Any:
        """Make a call; from the first one on that starts kernels, calls are those of the function for repeated ones."""
        main = values[list(self.hints).index(self.main)]
        known = isinstance(main, Tensor) and main.device.type in ("cpu", "cuda")
        if torch.compiler.is_compiling() or not known or not uses_kernels(main.device):
            return self.ordinary(values, None)
        self.call = repeat_function(self, self.own_kernel)
        return self.call(*values)

    def ordinary(self, values: Sequence[Any], likeness: Likeness | None) -> Any:
        """Check a call and carry it out; remember what it started, if it can be repeated."""
        given = self.checked(values)
        if torch.compiler.is_compiling():
            registered.call(self.name, self.pieces, {name: getattr(given, name) for name in self.hints})
            return given.out
        started = self.run(given)
        if started and likeness is not None:
            remember(*likeness, started)
        return given.out

    def checked(self, values: Sequence[Any]) -> Given:
        """The arguments, with states, slots and snapshots as objects; raises where any of them is wrong."""
        given = Given(self.hints, values)
        given.pool = state = self._check_state(given)
        device = state.device
        given.slots = self.slots(given)
        sizes = dict(zip(self.inner, state.shape[1:], strict=True)) | self.sizes(getattr(given, next(iter(self.hints))))
        main, packed = getattr(given, self.main), given.slots is not None and given.slots.cu_seqlens is not None
        check_main(self.main, main, self.tensors[self.main], sizes, device, packed)
        given.sizes = sizes
        given.tokens = tokens = tokens_of(main, self.tensors[self.main], given.slots)
        given.inputs = self.inputs
        sizes["batch"] = tokens.batch
        for name, axes in self.tensors.items():
            tensor = getattr(given, name)
            if tensor is None and name in self.optional:
                continue
            tensor = axes.check(name, tensor, tokens, sizes, device)
            if axes.tokens:
                refuse_grad(self.name, name, tensor)
            setattr(given, name, tensor)
            for axis, size in zip(axes.names, tensor.shape[len(tokens.axes) if axes.tokens else 0 :], strict=False):
                if axis not in sizes:  # as no state says it, and no tensor did before
                    self._bind(name, axis, size, sizes)
        for name in self.flags:
            if getattr(given, name) is not None or name not in self.optional:
                check_flag(name, getattr(given, name))
        for name in self.numbers:
            if getattr(given, name) is not None:
                check_number(name, getattr(given, name))
        for name in self.ranges:
            if getattr(given, name) is not None:
                setattr(given, name, checked_range(name, getattr(given, name)))
        self.check(given)
        check_slots(given, self.rolls_back)
        if self.takes_snapshots and given.snapshots is not None:
            given.snapshots = as_snapshots(given.snapshots, given.state)
            if not self.transposed:
                refuse_transposed("snapshots", given.snapshots)
            check_snapshots(given, given.snapshots.data, tuple(state.shape[1:]))
        self._check_out(given)
        self.debug(given)
        return given

    def _check_state(self, given: Given) -> Tensor:
        """Check the state, whose tensor this returns: a State, or what else the first argument is declared to be."""
        name, hint = next(iter(self.hints.items()))
        value = getattr(given, name)
        if self.takes_state:
            state = as_state(value)
            if not self.transposed:
                refuse_transposed(name, state)
            setattr(given, name, state)
            return state.data
        if name in self.tensors:
            axes = tuple(self.state_axes.split())
            check_tensor(name, value, axes, (None,) * len(axes))
            if value.numel() == 0:
                raise ValueError(f"{name} must not be empty, got shape {tuple(value.shape)}")
            check_no_overlap(name, value)
            return value
        if not isinstance(value, hint):
            raise TypeError(f"{name} must be a {hint.__name__}, got {type(value).__name__}")
        return value.ssm.data

    def _bind(self, name: str, axis: str, size: int, sizes: dict[str, int]) -> None:
        """Note the size of an axis that no state says; raise where it must divide another and does not."""
        of = self.divides.get(axis)
        if of is not None and (size == 0 or sizes[of] % size):
            divisors, whole = (self.words.get(one, one) for one in (axis, of))
            raise ValueError(
                f"{name} must have a number of {divisors} that divides the {sizes[of]} {whole}, got {size}"
            )
        sizes[axis] = size

    def _check_out(self, given: Given) -> None:
        """Make an output, or check the one that was given: with the axes of the main argument, or those that `check`
        named, and any dtype of activations."""
        main, axes = getattr(given, self.main), self.tensors[self.main]
        names = getattr(given, "out_axes", axes.names)
        shape = (*given.tokens.sizes, *(given.sizes[axis] for axis in names))
        if given.out is None:
            given.out = new_out(shape, main, given.slots)
            return
        named = (*given.tokens.axes, *names)
        check_tensor("out", given.out, named, shape, device=main.device)
        if axes.dense:
            check_row_contiguous("out", given.out)
        check_no_overlap("out", given.out)
        if not torch.compiler.is_compiling() and given.out.data_ptr():  # else tensors have no addresses
            self._check_apart(given)

    def _check_apart(self, given: Given) -> None:
        """Raise where `out` shares memory with a state, a ring, snapshots, slots or a plan."""
        held = {name: getattr(given, name) for name in self.hints if name in self.writes or name not in self.tensors}
        for name, tensor in tensors_in(held):
            if name != "out" and tensor.numel() and Place.of(given.out).overlaps(Place.of(tensor)):
                raise ValueError(f"out must not share memory with {name}")

    def _run_registered(self, arguments: Mapping[str, Any]) -> None:
        """What torch.compile calls: with arguments that were checked."""
        given = Given(arguments, arguments.values())
        given.tokens = tokens_of(getattr(given, self.main), self.tensors[self.main], given.slots)
        self.run(given)

    def run(self, given: Given) -> list[Launch]:
        """Carry out a call that was checked; the launches that Triton compiled, none of the reference."""
        main, slots = getattr(given, self.main), given.slots
        if main.numel() == 0 or given.tokens.batch == 0:
            given.out.zero_()
            return []
        if slots is not None and slots.parents is not None and given.out.data_ptr() == main.data_ptr():
            words = f"out must not be {self.main} with slots.parents: a token's {self.main} is read again for those"
            raise ValueError(f"{words} that follow it")
        if not uses_kernels(main.device):
            self.run_reference(given)
            return []
        given.machine = machine_of(main.device)
        started = [self._start(given, problem) for problem in self.problems(given)]
        return [one for one in started if one is not None]

    def _start(self, given: Given, problem: Problem) -> Launch | None:
        main, config = getattr(given, self.main), choose(problem, given.machine.gpu)
        programs = problem.programs(config)
        check_programs(self.main, programs, f"shape {tuple(main.shape)}")
        values = values_of(self, given, problem, config)
        kernel = self.own_kernel if self.kernel is None else self.kernel(given, problem)
        options = config.num_warps, config.registers, values["EARLY"]
        return start(Launch(kernel, (programs,), main.device, values, *options))


def one_kernel(given: Given, kind: type[Problem], op: str) -> tuple[Problem]:
    """What a config is chosen for where one kernel steps all tokens."""
    state, several = getattr(given.state, "ssm", given.state), not given.tokens.one_token
    return (kind.of(op, state, given.tokens.batch, several_tokens=several, stored=given.stored),)


def tensors_in(values: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors among these values and in the dataclasses among them, each with its name."""
    for name, value in values.items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, Describes):
            yield from tensors_in({f"{name}.{one.name}": getattr(value, one.name) for one in fields(value)})  # type: ignore[arg-type]


def axes_in(hint: Any) -> Axes | None:
    """The axes that a type hint says: Annotated[Tensor, words], or that or None."""
    found = (getattr(one, "__metadata__", None) for one in (hint, *get_args(hint)))
    return next((Axes.parse(*words) for words in found if words), None)


def refuse_grad(op: str, name: str, activation: Tensor) -> None:
    """Raise where an activation of an op requires grad and grad mode is on."""
    if activation.requires_grad and torch.is_grad_enabled():
        remedy = f"call {op} inside torch.no_grad() or torch.inference_mode(), or give {name}.detach()"
        raise ValueError(f"{name} must not require grad, as nothing here is differentiable: {remedy}")


def check_slots(given: Given, rolls_back: bool) -> None:
    """Raise unless the slots are for the tokens of a call, on the state's device, and write what `update` allows."""
    tokens, slots, update = given.tokens, given.slots, given.update
    if slots is None:
        if tokens.batch > len(given.pool):
            raise ValueError(f"slots must be given for a batch of {tokens.batch} on a pool of {len(given.pool)} slots")
        return
    slots.check_device(given.pool.device)
    if slots.read.shape[0] != tokens.batch:
        raise ValueError(f"slots must have {tokens.batch} rows, as the batch has, got {slots.read.shape[0]}")
    slots.check_entries(tokens.longest, "slots.")
    if slots.write is not None and not update:
        raise ValueError("update=False writes no state, so slots must not have write")
    if slots.parents is not None and update and not slots.per_token:
        needs = "it needs update=False, or write (batch, T)"
        raise ValueError(f"slots.parents makes a tree, which has no last state: {needs}")
    if slots.rolls_back and not rolls_back:
        got = f"got read {tuple(slots.read.shape)}: only windows of conv1d_step can be read at an offset"
        raise ValueError(f"slots.accepted needs read (batch, n) to choose from, {got}")


def check_snapshots(given: Given, snapshots: Tensor, of: tuple[int, ...]) -> None:
    """Raise unless the snapshots, of states of this shape, have room for every token of every row."""
    tokens, slots = given.tokens, given.slots
    if tokens.longest is None:
        raise ValueError("snapshots of packed tokens need slots.max_len, the most tokens a row has")
    shape = tuple(snapshots.shape)
    if shape[2:] != of:
        raise ValueError(f"snapshots must be of states {of}, got shape {shape}")
    check_device("snapshots", snapshots, given.pool.device)
    if shape[1] < tokens.longest:
        raise ValueError(f"snapshots must have room for {tokens.longest} tokens, got shape {shape}")
    if shape[0] < tokens.batch and (slots is None or slots.snapshot_rows is None):
        raise ValueError(f"snapshots must have room for {tokens.batch} rows, got shape {shape}")
