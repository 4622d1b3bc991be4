"""What laws demand of results, and what they need to ask it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from flashstate.proof import Expected, Inputs, Pool, carried_errors, encoded, error_ratio, slotted
from flashstate.proof.laws.registry import LawBroken
from flashstate.state.faults import check_faults
from flashstate.state.formats import bits_of


def that(condition: bool, message: str) -> None:
    if not condition:
        raise LawBroken(message)


def equal_bytes(what: str, got: Tensor, want: Tensor) -> None:
    """Raise unless both hold the same bytes; a NaN equals any NaN."""
    that(got.shape == want.shape and got.dtype == want.dtype, f"{what}: {got.shape} {got.dtype} is not comparable")
    differs = bits_of(got) != bits_of(want)
    if got.is_floating_point():
        differs &= ~(got.isnan() & want.isnan())
    that(not bool(differs.any()), f"{what}: {int(differs.sum())} of {got.numel()} elements differ")


def equal_states(
    what: str, got: Pool, want: Pool, slots: Any = None, wanted: Tensor | None = None, besides: Collection[str] = ()
) -> None:
    """Raise unless the states in these slots (None: in all), or entries of snapshots, have equal bytes, scales and all
    that a pool has for them, with those in the slots `wanted` of the other (None: the same slots). Not of tensors
    `besides`."""
    here = ... if slots is None else slots
    there = here if wanted is None else wanted
    others = slotted(want)
    for name, tensor in slotted(got).items():
        if name in others and name not in besides:
            equal_bytes(f"{name} of {what}", tensor[here], others[name][there])


def alike(how: str, got: Inputs, y: Tensor, want: Inputs, y_want: Tensor) -> None:
    """Raise unless two calls gave the same output and left the same pool, byte for byte."""
    equal_bytes(f"output{how}", y, y_want)
    equal_states(f"the pool{how}", got.state, want.state)


def within_budget(what: str, got: Tensor, exact: Tensor, plain: Tensor) -> None:
    ratio = error_ratio(got, exact, plain)
    that(ratio <= 1.0, f"{what} is {ratio:.2f} times its error budget away from float64")


def close(what: str, inputs: Inputs, y: Tensor, want: Expected) -> None:
    """Raise unless the output of a call, its states, and all that goes with them are within their budgets."""
    within_budget(f"the output of {what}", all_tokens(inputs, y), want.y, want.y_plain)
    within_budget(f"the state of {what}", inputs.states, want.state, want.state_plain)
    for name, ratio in carried_errors(inputs, want).items():
        that(ratio <= 1.0, f"{name} of {what} is {ratio:.2f} times its error budget away from float64")


def rest_of(inputs: Inputs) -> Tensor:
    """The slots no row of the batch reads."""
    slots = torch.arange(inputs.state.data.shape[0], device=inputs.slots.device)
    return slots[~torch.isin(slots, inputs.slots.long())]


def poison(state: Pool, slots: Tensor) -> None:
    """Fill slots with what must not get out: NaN, in data that can hold it and in all else."""
    for tensor in slotted(state).values():
        bits_of(tensor)[slots] = {1: 0x7F, 2: 0x7FFF, 4: 0x7FFFFFFF}[tensor.element_size()]


def restore(state: Pool, before: Pool) -> None:
    """Give every slot the bytes that it has in another pool."""
    for tensor, kept in zip(slotted(state).values(), slotted(before).values(), strict=True):
        bits_of(tensor).copy_(bits_of(kept))


def all_tokens(inputs: Inputs, y: Tensor) -> Tensor:
    """The outputs (tokens, ...) of all tokens that a row has."""
    return torch.cat([row.reshape(-1, *y.shape[inputs.token_axes :]) for row in inputs.per_row(y)])


def fault(kind: str | None) -> None:
    """The fault flag is set for numbers out of range of this kind, and for nothing else."""
    try:
        check_faults()
    except IndexError as error:
        that(kind is not None and kind in str(error), f"unexpected fault: {error}")
    else:
        that(kind is None, f"a {kind} number out of range went unnoticed")


def stored(what: str, got: Pool, where: Any, values: Tensor, keyed: Pool, read: Tensor, token: int) -> None:
    """Raise unless the entries `where` of `got` are the encoding of these float32 states, with the bits of the slots
    `read` of the state `keyed` at this token."""
    data, scale = encoded(values, got, keyed, read, token)
    equal_bytes(f"data of {what}", got.data[where], data)
    if scale is not None and got.scale is not None:
        equal_bytes(f"scale of {what}", got.scale[where], scale)
