"""Slots, tokens and stored states in plain torch; kernels/slots.py and kernels/state_io.py do the same on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from flashstate.state.faults import KINDS, fault_flag
from flashstate.state.formats import Encoded, decode, encode
from flashstate.state.rounding import SEED_STEP, random_bits
from flashstate.state.slots import MOST_TOKENS, Slots
from flashstate.state.state import State


def resolve_read(slots: Slots | None, batch: int, num_slots: int, device: torch.device) -> Tensor:
    """The slot every row reads, (batch,) int64; -1 for padding."""
    if slots is None:
        return torch.arange(batch, device=device)
    if slots.read.dim() == 1 or slots.accepted is None:
        return resolve("read", slots.read, torch.ones_like(slots.read, dtype=torch.bool), num_slots, slots.null)
    n, accepted = slots.read.shape[1], slots.accepted.long()
    if slots.at_least_one:
        accepted = accepted.clamp(min=1)
    note_fault("accepted", accepted[accepted > n])
    inside = (accepted >= 1) & (accepted <= n)
    column = torch.where(inside, accepted - 1, 0)
    read = slots.read.gather(1, column[:, None])[:, 0] if n else torch.full_like(accepted, -1)
    return resolve("read", read, inside, num_slots, slots.null)


def resolve(kind: str, numbers: Tensor, goes: Tensor, limit: int, null: int = -1) -> Tensor:
    """Slots, or rows of snapshots, as int64: -1 where they are null, negative or past the limit, and unless `goes`."""
    numbers = torch.where(goes, numbers.long(), -1)
    note_fault(kind, numbers[(numbers >= limit) & (numbers != null)])
    return torch.where((numbers < 0) | (numbers >= limit) | (numbers == null), -1, numbers)


def note_fault(kind: str, outside: Tensor) -> None:
    """Leave one of these numbers, if there are any, in the fault flag."""
    if outside.numel():
        fault_flag(outside.device)[KINDS.index(kind)] = outside[0]


def token_positions(slots: Slots | None, batch: int, tokens: int, device: torch.device) -> Tensor:
    """Where each row's tokens are, (batch, T): positions in the flattened token axis of `tokens`; -1 where it ended."""
    if slots is None or slots.cu_seqlens is None:
        return torch.arange(tokens, device=device).reshape(batch, tokens // max(batch, 1))
    bounds = slots.cu_seqlens.long().clamp(0, tokens)
    first, length = bounds[:-1], bounds.diff().clamp(min=0)
    index = torch.arange(int(length.max()) if batch else 0, device=device)
    return torch.where(index < length[:, None], first[:, None] + index, -1)


def load_state(state: State, slots: Tensor) -> Tensor:
    """The states in these slots: (slots, heads, rows, cols) float32."""
    return decode(state.data[slots], None if state.scale is None else state.scale[slots])


def store_state(state: State, values: Tensor, where: tuple[Tensor, ...], seed: Tensor | None, token: Tensor) -> None:
    """Round the float32 states `values` and store them at the entries `where` whose first index is not negative.

    `seed` and `token` (one each per state) decide the random bits of stochastic rounding.
    """
    goes = where[0] >= 0
    stored = encoded(state, values[goes], None if seed is None else seed[goes], token[goes])
    put(state, stored, tuple(index[goes] for index in where))


def put(state: State, stored: Encoded, where: tuple[Tensor, ...]) -> None:
    """Put states as they are stored to these entries."""
    state.data[where] = stored.data
    if state.scale is not None and stored.scale is not None:
        state.scale[where] = stored.scale


def encoded(state: State, values: Tensor, seed: Tensor | None, token: Tensor) -> Encoded:
    """The float32 states `values` as `state` stores them. `seed` and `token`: as store_state has them."""
    random = None
    if state.rounding == "stochastic":
        assert seed is not None
        heads, rows, cols = values.shape[1:]
        random = random_bits(seed, (heads, rows, cols), token, state.stream, state.rounds, state.data.dtype)
    return encode(values, state.data.dtype, random)


def store_output(out: Tensor, y: Tensor, at: Tensor, live: Tensor, slots: Slots | None) -> None:
    """Round `y`, which has all tokens on its first axis, to `out`, where padding rows keep what they have if they are
    to. `at`: where each row's tokens are, (batch, T)."""
    rounded = y.reshape(out.shape).to(out.dtype)
    if slots is not None and slots.padding == "keep":
        padding, kept = at[~live], torch.zeros(len(y), dtype=torch.bool, device=y.device)
        kept[padding[padding >= 0]] = True
        token_axes = out.shape[: out.dim() - y.dim() + 1]
        rounded = torch.where(kept.reshape(*token_axes, *(1,) * (y.dim() - 1)), out, rounded)
    out.copy_(rounded)


def advance_seeds(seed: Tensor, slots: Slots | None) -> None:
    """Add SEED_STEP to the seeds of the slots that rows with tokens have to read, once for each; with a table of slots
    to all of a row's, so that the slots of a request move on together."""
    read = resolve_read(slots, seed.shape[0], seed.shape[0], seed.device)
    goes = read >= 0
    if slots is not None and slots.cu_seqlens is not None:
        goes &= slots.cu_seqlens.long().clamp(0, MOST_TOKENS).diff() > 0
    read = read[goes]
    if slots is not None and slots.read.dim() == 2:
        read = slots.read[goes].long().flatten()
        read = read[(read >= 0) & (read < seed.shape[0]) & (read != slots.null)]
    seed.index_add_(0, read, torch.full_like(read, SEED_STEP))
