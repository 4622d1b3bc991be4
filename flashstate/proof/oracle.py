"""What a call must give, and how far from it a result may be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flashstate.proof.inputs import Inputs, Pool
from flashstate.state.formats import Encoded, decode, encode
from flashstate.state.rounding import random_bits

# A kernel may be this many times as wrong as the same computation in plain float32 and the format. exp and log of GPUs
# and of the interpreter are a few ulp off where torch's are one: the largest seen is 1.7 on an H200, 2.8 interpreted.
BUDGET = 4.0


class Carried(NamedTuple):
    """What a call must leave for every row in a tensor beside the states."""

    exact: Tensor
    plain: Tensor  # in float64 where it is exact, so that no bit may differ


@dataclass(frozen=True)
class Expected:
    """What a call must give: exactly, and as plain float32 arithmetic and the formats give it."""

    y: Tensor  # of all tokens that a row has, one after the other
    y_plain: Tensor
    state: Tensor  # of the batch
    state_plain: Tensor
    carried: dict[str, Carried]  # what else a token continues from, by its name in the pool


def oracle(inputs: Inputs) -> Expected:
    """Outputs and new states of the batch: in float64, and in float32 rounded to the output's dtype and the format."""
    op, before = inputs.op, inputs.states
    if op.expects is not None:
        return op.expects(inputs)
    others = [getattr(inputs.state, name)[inputs.slots.long()] for name in op.carried]
    y, after, *exact = _recurrence(inputs, before.double(), others)
    y_plain, after_plain, *plain = _recurrence(inputs, before, others)
    after_plain = after if op.copies else _stored(inputs, before, after_plain)
    carried = {}
    for name, *tensors in zip(op.carried, others, exact, plain, strict=True):
        kept, want, got = tensors
        want = (kept if name in op.left_alone else want).double()
        carried[name] = Carried(want, want if name in op.left_alone or torch.equal(got.double(), want) else got)
    return Expected(y, y_plain.to(inputs.main.dtype), after, after_plain, carried)


def up_to_turns(angle: Tensor, near: Tensor) -> Tensor:
    """Angles, in their own dtype, that are whole turns away from these, and next to others."""
    turns = torch.round((near - angle.double()) / math.tau)
    return (angle.double() + turns * math.tau).to(angle.dtype)


def two_terms(values: Tensor) -> Tensor:
    """Float32 as the sum of two bfloat16 numbers, which operands of tensor cores are."""
    high = values.bfloat16().float()
    return high + (values - high).bfloat16().float()


def _stored(inputs: Inputs, before: Tensor, after: Tensor) -> Tensor:
    """The states as the pool stores them; rows without tokens keep theirs."""
    stored = decode(*encoded(after, inputs.state, inputs.state, inputs.slots.long(), inputs.tokens - 1))
    stepped = inputs.stores.reshape(-1, *[1] * (stored.dim() - 1))
    return torch.where(stepped, stored, before)


def encoded(values: Tensor, into: Pool, keyed: Pool, read: Tensor, token: Tensor | int) -> Encoded:
    """float32 states as `into` stores them, with the random bits of the slots `read` of `keyed` at this token."""
    random = None
    if into.rounding == "stochastic" and keyed.seed is not None:
        _, heads, rows, cols = values.shape
        random = random_bits(
            keyed.seeds_of(read), (heads, rows, cols), token, keyed.stream, keyed.rounds, into.data.dtype
        )
    return encode(values, into.data.dtype, random)


def _recurrence(inputs: Inputs, s: Tensor, others: list[Tensor]) -> tuple[Tensor, ...]:
    """The outputs (tokens, ...) of all rows, the states after them, computed in the dtype of `s`, and what else is
    carried from token to token."""
    if inputs.lengths is not None:
        of_row = [[t[row : row + 1] for t in (s, *others)] for row in range(len(s))]
        rows = [_recurrence(inputs.dense_row(row), first, rest) for row, (first, *rest) in enumerate(of_row)]
        return tuple(torch.cat(parts) for parts in zip(*rows, strict=True))
    outputs = []
    for run in [inputs.of_tokens(t) for t in range(inputs.main.shape[1])] if inputs.has_token_axis else [inputs]:
        y, s, *others = inputs.op.token(s, *others, **run.arguments)
        outputs.append(y)
    y = torch.stack(outputs, 1).flatten(0, 1) if outputs else s.new_empty(0)  # which torch.cat passes over
    return y, s, *others


def error_ratio(got: Tensor, exact: Tensor, plain: Tensor) -> float:
    """The error of `got` as a fraction of its budget: it passes at 1 and below. Inf where it is NaN and should not be.

    Both the largest error and the root mean square count. What the dtype of `plain` cannot resolve is not held against
    `got`: half a unit in the last place of the largest value.
    """
    resolution = torch.finfo(plain.dtype).eps / 2 * exact.abs().max().item()
    errors, plain_errors = (got.double() - exact).abs(), (plain.double() - exact).abs()
    largest = errors.max().item() / (BUDGET * max(plain_errors.max().item(), resolution))
    rms, plain_rms = errors.square().mean().sqrt().item(), plain_errors.square().mean().sqrt().item()
    mean = rms / (BUDGET * max(plain_rms, resolution / math.sqrt(exact.numel())))
    return math.inf if math.isnan(largest) else max(largest, mean)


def carried_errors(inputs: Inputs, want: Expected) -> dict[str, float]:
    """The errors of all that goes with the states of a batch after a call, as fractions of their budgets, by name."""
    errors = {}
    for name, (exact, plain) in want.carried.items():
        got = getattr(inputs.state, name)[inputs.slots.long()]
        if name in inputs.op.angles:
            got, plain = up_to_turns(got, exact), up_to_turns(plain, exact)
        errors[name] = error_ratio(got, exact, plain)
    return errors
