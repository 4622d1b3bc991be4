"""A pool and the arguments of one call on it, parts of a batch, and the random numbers they are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from flashstate.launch.axes import Axes
from flashstate.launch.call import Op
from flashstate.state.formats import bits_of, decode
from flashstate.state.slots import Slots
from flashstate.state.state import State

if TYPE_CHECKING:
    from flashstate.proof.case import AnyCase
    from flashstate.proof.oracle import Expected


def dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


Pool = Any  # stored states, in slots or as snapshots: a State, or a dataclass that has what a State has, and more


def slotted(pool: Pool) -> dict[str, Tensor]:
    """The tensors of a pool that steps may write, by name: all that have slots but the seeds."""
    named = ((field.name, getattr(pool, field.name)) for field in fields(pool))
    return {name: tensor for name, tensor in named if isinstance(tensor, Tensor) and name != "seed"}


@dataclass(frozen=True, eq=False)
class BesideStates(State):
    """A State with what an op keeps beside it, as laws see them: side by side."""

    @classmethod
    def of(cls: type[P], *kept: Any) -> P:
        """Put a State and what is beside it, which are dataclasses, side by side."""
        return cls(**{own.name: getattr(one, own.name) for one in kept for own in fields(one)})

    @cached_property
    def state(self) -> Any:
        """What the op is given: the State without the rest."""
        return State(**{own.name: getattr(self, own.name) for own in fields(State)})


P = TypeVar("P", bound=BesideStates)


@dataclass(frozen=True)
class ProvenOp:
    """What inputs, the oracle and laws know of an op beside its declaration."""

    declared: Op
    # Of states, what else is carried, and the arguments of a token: its output, and all of that after it.
    token: Callable[..., tuple[Tensor, ...]]
    remembered: tuple[str, ...]  # activations that reach the state
    sizes: Mapping[str, str]  # the fields of a case that say how long the axes are that no state has
    more: Mapping[str, str] = field(default_factory=dict)  # axes of tensors within arguments that are no tensors
    uniform: tuple[str, ...] = ()  # arguments drawn from 0 to 1; others are normally distributed
    copies: bool = False  # whether a state is made of copies, so that nothing in it is rounded
    sums: bool = False  # whether sums along rows, whose order alignment decides, reach the state
    summed: tuple[str, ...] = ()  # tensors beside the state that they reach too
    carried: tuple[str, ...] = ()  # tensors of a pool, beside data and scale, that a token continues from
    left_alone: tuple[str, ...] = ()  # those of them that a call does not write
    angles: tuple[str, ...] = ()  # those of them that count up to whole turns
    # The arguments of the public function, of a pool and everything else by its name.
    takes: Callable[[Pool, dict[str, Any]], dict[str, Any]] = lambda pool, given: {"state": pool, **given}
    # What a call must give, where tokens do not continue from the states alone.
    expects: Callable[[Any], Expected] | None = None
    # What laws cannot demand of every op, or of every call.
    rings: bool = False  # tokens wait in a ring: a row has one slot, and its state is stored when they no longer fit
    between_tokens: bool = True  # there are states between tokens, for snapshots and trees
    every_token: bool = True  # the state after every token can go to a slot of its own
    exact_at_once: bool = True  # several tokens give, bit for bit, the outputs of single ones on float32 states
    stored_at_once: bool = True  # and leave, bit for bit, what those leave, encoded
    one_order: bool = True  # the interpreter, which multiplies matrices as numpy does, sums alike with every config

    @property
    def step(self) -> Callable[..., Tensor]:
        """The public function."""
        return self.declared.function

    @cached_property
    def tensors(self) -> dict[str, Axes]:
        """The axes of tensor arguments."""
        return {**self.declared.tensors, **{name: Axes.parse(words) for name, words in self.more.items()}}

    @property
    def activations(self) -> tuple[str, ...]:
        """The arguments that have tokens."""
        return tuple(name for name, axes in self.tensors.items() if axes.tokens)


AnyInputs = TypeVar("AnyInputs", bound="Inputs")


@dataclass
class Inputs:
    """A state pool and the arguments of one call on it."""

    op: ProvenOp
    state: Pool
    arguments: dict[str, Any]  # beside the pool and its slots; None: left out
    slots: Tensor  # (batch,)
    lengths: list[int] | None  # of packed rows

    def step(self, **changes: Any) -> Tensor:
        """Call the op, with some arguments changed or added."""
        if "slots" not in changes:
            changes["slots"] = self.slots if self.lengths is None else self.at()
        return self.op.step(**self.op.takes(self.state, {**self.arguments, **changes}))

    def at(self, **fields: Any) -> Slots:
        """The slots of the batch with more fields of Slots, or others."""
        if self.lengths is not None:
            bounds = torch.tensor([0, *self.lengths]).cumsum(0).to(self.slots)
            fields = {"cu_seqlens": bounds, "max_len": max(self.lengths, default=0), **fields}
        return Slots(fields.pop("read", self.slots), **fields)

    def fresh(self: AnyInputs, extra: int = 0) -> AnyInputs:
        """These inputs on a copy of the pool and its seeds, with the same strides, and `extra` more slots."""
        slots = torch.arange(len(self.state.data) + extra, device=self.slots.device)
        slots[len(self.state.data) :] = 0
        return self.of_slots(slots)

    def on_larger_pool(self: AnyInputs, slots: int) -> AnyInputs:
        """The batch on a pool of that many slots, filled with the states of this one, and seeds of its own."""
        larger = self.of_slots(torch.arange(slots, device=self.slots.device) % len(self.state.data))
        if larger.state.seed is not None:
            larger.state = replace(larger.state, seed=torch.randint(1 << 62, (slots,), device=self.slots.device))
        return larger

    def of_slots(self: AnyInputs, slots: Tensor) -> AnyInputs:
        """The batch on a pool that has copies of these slots, with the strides of this one."""

        def copied(tensor: Tensor) -> Tensor:
            size, strides = (len(slots), *tensor.shape[1:]), tensor.stride()
            new = torch.empty_strided(size, strides, dtype=tensor.dtype, device=tensor.device)
            bits_of(new).copy_(bits_of(tensor)[slots])
            return new

        tensors, seed = slotted(self.state), self.state.seed
        tensors |= {} if seed is None else {"seed": seed}
        return replace(self, state=replace(self.state, **{name: copied(t) for name, t in tensors.items()}))

    def of_rows(self: AnyInputs, rows: Tensor) -> AnyInputs:
        """The pool with some rows of the batch, in some order."""
        if self.lengths is None:
            index, lengths = rows, None
        else:
            lengths = [self.lengths[row] for row in rows.tolist()]
            pieces = torch.arange(sum(self.lengths)).split(self.lengths)
            index = torch.cat([pieces[row] for row in rows.tolist()]).to(rows.device)
        return replace(self.changed(lambda t: t[index]), slots=self.slots[rows], lengths=lengths)

    def of_tokens(self: AnyInputs, tokens: slice | list[int] | int) -> AnyInputs:
        """The pool and its rows, which are not packed, with some of the tokens; with an int one, without its axis."""
        assert self.lengths is None
        return self.changed(lambda t: t[:, tokens])

    def dense_row(self: AnyInputs, row: int) -> AnyInputs:
        """One row of a packed batch alone, its tokens on an axis of their own."""
        alone = self.of_rows(torch.tensor([row], device=self.slots.device))
        return replace(alone.changed(lambda t: t[None]), lengths=None)

    def changed(self: AnyInputs, change: Callable[[Tensor], Tensor]) -> AnyInputs:
        """The pool and the parameters, with what `change` makes of every argument that has tokens."""
        return self.given(**{name: change(tensor) for name, tensor in self.activations.items()})

    def given(self: AnyInputs, **changes: Any) -> AnyInputs:
        """The pool and its slots, with some arguments changed."""
        return replace(self, arguments={**self.arguments, **changes})

    @property
    def activations(self) -> dict[str, Tensor]:
        """The arguments that have tokens."""
        given = {name: self.arguments.get(name) for name in self.op.activations}
        return {name: tensor for name, tensor in given.items() if tensor is not None}

    @property
    def main(self) -> Tensor:
        """The activation whose dtype the output has, and as a rule its shape."""
        main: Tensor = self.arguments[self.op.declared.main]
        return main

    @property
    def token_axes(self) -> int:
        """How many axes of activations tokens have."""
        return self.main.dim() - len(self.op.tensors[self.op.declared.main].names)

    @property
    def has_token_axis(self) -> bool:
        """Whether the tokens of rows, which are not packed, have an axis of their own."""
        return self.lengths is None and self.token_axes == 2

    @property
    def row_lengths(self) -> list[int]:
        """Tokens of every row."""
        rows, *rest = self.main.shape
        return self.lengths or [rest[0] if self.has_token_axis else 1] * rows

    @property
    def tokens(self) -> Tensor:
        """How many tokens every row has, (batch,)."""
        return torch.tensor(self.row_lengths, device=self.slots.device)

    @property
    def stores(self) -> Tensor:
        """Which rows store a state, (batch,): those that have tokens."""
        return self.tokens > 0

    def per_row(self, y: Tensor) -> list[Tensor]:
        """The outputs of every row."""
        return list(y) if self.lengths is None else list(y[: sum(self.lengths)].split(self.lengths))

    @property
    def states(self) -> Tensor:
        """What the slots of the batch hold, as float32: (batch, ...)."""
        slots, scale = self.slots.long(), self.state.scale
        return decode(self.state.data[slots], None if scale is None else scale[slots])


class Source:
    """Random numbers, the same on every device."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *size: int, name: str = "float32") -> Tensor:
        """Normally distributed, in the dtype of that name."""
        return torch.randn(*size, generator=self.generator).to(dtype(name)).to(self.device)

    def uniform(self, *size: int, name: str = "float32") -> Tensor:
        """Uniformly distributed between 0 and 1, in the dtype of that name."""
        return torch.rand(*size, generator=self.generator).to(dtype(name)).to(self.device)

    def seeds(self, count: int) -> Tensor:
        return torch.randint(-(1 << 62), 1 << 62, (count,), generator=self.generator).to(self.device)

    def states_of(self, case: AnyCase) -> Tensor:
        """Normally distributed states for every slot; of a large pool, the first of them again and again."""
        return repeated(self.normal(min(case.slots, case.different), *case.state_axes), case.slots)

    def slots_of(self, case: AnyCase) -> Tensor:
        """Distinct slots for the batch, in random order."""
        return torch.randperm(case.slots, generator=self.generator)[: case.batch].to(dtype(case.index)).to(self.device)


def repeated(values: Tensor, slots: int) -> Tensor:
    """These values for so many slots, again and again."""
    return values[torch.arange(slots, device=values.device) % len(values)]


def in_projection(tensor: Tensor) -> Tensor:
    """These values as a slice of wider rows, one element off alignment, NaN around them."""
    *lead, heads, width = tensor.shape
    wide = torch.full((*lead, 2 * heads, width + 3), torch.nan, dtype=tensor.dtype, device=tensor.device)
    wide[..., heads:, 1 : width + 1] = tensor
    return wide[..., heads:, 1 : width + 1]


def first_axis_innermost(tensor: Tensor) -> Tensor:
    """These values with the first axis innermost in memory, where the last one was."""
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)
