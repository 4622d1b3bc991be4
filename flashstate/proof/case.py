"""What the cases of all ops share: fields, what laws ask of them, and the registry of every op's tables."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from flashstate.launch import Problem
from flashstate.proof.inputs import Inputs, Pool, ProvenOp, Source, dtype, first_axis_innermost, in_projection
from flashstate.state.formats import FORMATS, PORTABLE_FORMATS, encode
from flashstate.state.signature import ACCESS_BYTES
from flashstate.state.state import State

C = TypeVar("C", bound="AnyCase")


@dataclass(frozen=True)
class AnyCase(ABC):
    """One problem for an op: a shape, its tokens, the dtypes of its arguments, and which optional ones it has."""

    batch: int = 3
    _: KW_ONLY
    x: str = "float32"  # dtype of the main activation, and so of the output
    parameters: str = "float32"  # dtype of what all tokens share
    index: str = "int32"  # dtype of slot numbers
    slots: int = 7
    tokens: int = 0  # per row, on an axis of their own; 0: one, without that axis
    packed: bool = False  # rows of different lengths, up to `tokens`, one after the other
    sizes: ClassVar[Mapping[str, str]]  # of a state, as options name them, and the fields that have them
    different: ClassVar[int] = 64  # states of a pool, at most

    def __str__(self) -> str:
        """The call that makes it, without what is as usual; the shape first."""
        told = sorted((f for f in fields(self) if getattr(self, f.name) != f.default), key=lambda f: bool(f.kw_only))
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)}' for f in told)})"

    @property
    @abstractmethod
    def format(self) -> str: ...  # of the pool

    @property
    def rounding(self) -> str:
        return "nearest"

    @property
    @abstractmethod
    def state_axes(self) -> tuple[int, ...]: ...  # sizes of the axes of one slot

    @property
    def measured_axes(self) -> tuple[int, int, int, int]:
        """Heads, groups, rows and columns, as measurements list them; 1 where there are no heads and groups."""
        heads, groups, rows, cols = [1, 1, *(getattr(self, name) for name in self.sizes.values())][-4:]
        return heads, groups, rows, cols

    @abstractmethod
    def in_format(self: C, name: str, rounding: str) -> C:
        """The case with a pool of this format; ValueError where its op has none."""

    @property
    @abstractmethod
    def problem(self) -> Problem: ...  # what its config is chosen for

    @property
    @abstractmethod
    def op(self) -> ProvenOp: ...  # what it is a problem for

    @property
    @abstractmethod
    def dtypes(self) -> dict[str, Any]:
        """Names of the dtypes of tensor arguments, in the order in which these are drawn; of those left out none."""

    @abstractmethod
    def make_pool(self, source: Source) -> Pool: ...  # with every slot filled

    @property
    def snapshot_formats(self) -> list[tuple[str, str]]:
        """Formats and roundings that snapshots are tried in; first the most exact one."""
        return [(self.format, self.rounding)] * 2

    @abstractmethod
    def snapshots(self, rows: int, tokens: int, name: str, rounding: str, device: torch.device) -> Pool:
        """Snapshots for so many rows and tokens, in this format, filled with something."""

    def adjust(self, arguments: dict[str, Any]) -> None:  # noqa: B027  (not every op needs it)
        """Give drawn arguments the scales of a trained model."""

    def is_whole(self, name: str) -> bool:
        """Whether an argument has the axes that its op lets it leave out."""
        return False

    def make_inputs(self, device: torch.device, seed: int = 0) -> Inputs:
        """Random inputs, the batch on distinct slots in random order."""
        source = Source(device, seed)
        return self.inputs_of(self.make_pool(source), self.draw(source), source.slots_of(self))

    def draw(self, source: Source) -> dict[str, Any]:
        """The arguments of a call."""
        op = self.op
        arguments = {name: getattr(self, name) for name in op.declared.options if hasattr(self, name)}
        for name, number in self.dtypes.items():
            lead = self.token_axes if op.tensors[name].tokens else ()
            draw = source.uniform if name in op.uniform else source.normal
            arguments[name] = draw(*lead, *self.shape_of(name), name=number) if number else None
        self.adjust(arguments)
        return arguments

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Sizes of all axes but those of tokens, by their names."""
        of_state = dict(zip(self.op.declared.inner, self.state_axes, strict=True))
        return of_state | {axis: getattr(self, own) for axis, own in self.op.sizes.items()}

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Sizes of the axes of an argument, without those of tokens."""
        axes, sizes = self.op.tensors[name], self.axis_sizes
        return tuple(sizes[axis] for axis in (*axes.names, *(axes.optional if self.is_whole(name) else ())))

    def inputs_of(self, pool: Pool, arguments: dict[str, Any], slots: Tensor) -> Inputs:
        """Inputs with these tensors, and NaN in tokens that no row has."""
        inputs = Inputs(self.op, pool, arguments, slots, self.lengths if self.packed else None)
        for tensor in inputs.activations.values() if self.packed else ():
            tensor[sum(self.lengths) :] = torch.nan
        return inputs

    def as_views(self, inputs: Inputs) -> Inputs:
        """Inputs with other strides: activations among other memory, and expanded where axes can be left out."""
        views = inputs.changed(in_projection)
        for name, axes in self.op.tensors.items():
            tensor = inputs.arguments.get(name)
            if axes.optional and tensor is not None and not self.is_whole(name):
                tensor = first_axis_innermost(tensor) if axes.tokens else tensor
                for axis in axes.optional:
                    tensor = tensor[..., None].expand(*tensor.shape, self.axis_sizes[axis])
                views.arguments[name] = tensor
        return views

    @property
    def forms(self: C) -> tuple[C, ...]:
        """The case in every form that a call of its op has."""
        return (self,)

    def same_when_packed(self, tokens: int) -> bool:
        """Whether a packed row of so many gives, bit for bit, what it gives on a token axis of its own."""
        return True

    def snapshot_of(self, states: Tensor) -> Tensor:
        """What snapshots hold of states."""
        return states

    def newest_of(self, states: Tensor) -> Tensor:
        """The part of states that depends on every token's input."""
        return states

    @property
    def several(self) -> bool:
        """Whether a row may have more tokens than one."""
        return self.packed or self.tokens > 1

    @property
    def lengths(self) -> list[int]:
        """Tokens of every row. Packed rows count down from `tokens` to none, and start again."""
        if not self.packed:
            return [self.tokens or 1] * self.batch
        return [self.tokens - row % (self.tokens + 1) for row in range(self.batch)]

    @property
    def token_axes(self) -> tuple[int, ...]:
        """Sizes of the leading axes of activations. Packed tokens have two more than there are rows for."""
        if self.packed:
            return (sum(self.lengths) + 2,)
        return (self.batch, self.tokens) if self.tokens else (self.batch,)

    @property
    def token_bytes(self) -> int:
        """Bytes of activations that roofs count too; 0 where they are little beside the states."""
        return 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of state in one slot, without its scales."""
        return math.prod(self.state_axes) * dtype(self.format).itemsize

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales in one slot."""
        return 4 * math.prod(self.state_axes[:-1]) if FORMATS[dtype(self.format)].scaled else 0

    def counted_bytes(self, stores: int = 1) -> int:
        """Bytes one call must move at least: the state of every row read once and stored `stores` times (once in place;
        with snapshots once per token), everything else once."""
        states = (1 + stores) * (self.slot_bytes + self.scale_bytes)
        counted = self.batch * (states + dtype(self.index).itemsize + (0 if self.rounding == "nearest" else 8))  # seeds
        for name, number in self.dtypes.items():
            times = sum(self.lengths) if self.op.tensors[name].tokens else 1
            times *= 2 if name == self.op.declared.main else 1  # as many outputs
            counted += times * math.prod(self.shape_of(name)) * dtype(number).itemsize if number else 0
        return counted


@dataclass(frozen=True)
class StateCase(AnyCase):
    """One problem for an op whose states are (heads, rows, cols), in any of the formats."""

    _: KW_ONLY
    format: str = "float32"
    rounding: str = "nearest"
    sizes: ClassVar[Mapping[str, str]] = {name: name for name in ("heads", "groups", "rows", "cols")}

    def in_format(self: S, name: str, rounding: str) -> S:
        return replace(self, format=name, rounding=rounding)

    @property
    def state_axes(self) -> tuple[int, int, int]:
        heads, _, rows, cols = self.measured_axes
        return heads, rows, cols

    @property
    @abstractmethod
    def kind(self) -> tuple[Callable[..., Problem], str]: ...  # of its problem, and the op that tables have it under

    @property
    def problem(self) -> Problem:
        (kind, op), (heads, rows, cols) = self.kind, self.state_axes
        vector = math.gcd(rows if self.transposed else cols, ACCESS_BYTES // dtype(self.format).itemsize)
        return kind(op, rows, cols, self.format, self.rounding, vector, self.batch * heads, self.several)

    @property
    def transposed(self) -> bool:
        """Whether states are (cols, rows) in memory."""
        return False

    @property
    def snapshot_formats(self) -> list[tuple[str, str]]:
        return [("float32", "nearest"), (self.format, self.rounding), ("int8", "stochastic"), ("float16", "nearest")]

    def snapshots(self, rows: int, tokens: int, name: str, rounding: str, device: torch.device) -> State:
        """Snapshots of ones, in the layout of the pool if they have its format."""
        data, scale = encode(torch.ones(rows, tokens, *self.state_axes, device=device), dtype(name))
        return State(self.laid_out(data) if name == self.format else data, scale, rounding=rounding)

    def make_pool(self, source: Source) -> Pool:
        data, scale = encode(source.states_of(self), dtype(self.format))
        return State(self.laid_out(data), scale, rounding=self.rounding, seed=source.seeds(self.slots), stream=3)

    def laid_out(self, states: Tensor) -> Tensor:
        """States in the memory layout of the case."""
        return states.mT.contiguous().mT if self.transposed else states


S = TypeVar("S", bound=StateCase)


def make_inputs(case: AnyCase, device: torch.device, seed: int = 0) -> Inputs:
    """The random inputs of a case."""
    return case.make_inputs(device, seed)


def by_turns(cases: Sequence[S], formats: Sequence[tuple[str, str]], count: int) -> tuple[S, ...]:
    """Each case in so many formats, the next case beginning with the format behind them."""
    turns = ((case, formats[(count * i + j) % len(formats)]) for i, case in enumerate(cases) for j in range(count))
    return tuple(case.in_format(*known) for case, known in turns)


def in_every_format(shapes: Mapping[str, Sequence[S]]) -> tuple[tuple[S, ...], ...]:
    """For every format a case of every form; the shapes of a form take turns."""
    return tuple(
        tuple(of_form[i % len(of_form)].in_format(*known) for of_form in shapes.values())
        for i, known in enumerate(PORTABLE_FORMATS)
    )


@dataclass(frozen=True)
class Cases:
    """The tables of an op. Its file in proof/cases/ puts them into CASES, where tests and `flashstate check` find them.

    groups: small and odd cases, for the interpreter, whose bfloat16 activations are wrong: float32 and float16 stand in
        for them. Every group has each form of a call once; those of an op that has formats have one each.
    real: shapes of real models and of none, for compiled kernels.
    besides: small cases of forms that no group has.
    """

    groups: Sequence[Sequence[AnyCase]]
    real: Sequence[AnyCase]
    besides: Sequence[AnyCase] = ()

    @cached_property
    def odd(self) -> tuple[AnyCase, ...]:
        return tuple(case for group in self.groups for case in group)

    @cached_property
    def quick(self) -> tuple[AnyCase, ...]:
        """One case per group, the forms taking turns."""
        return tuple(group[i % len(group)] for i, group in enumerate(self.groups))


CASES: dict[str, Cases] = {}  # by the name of the op
