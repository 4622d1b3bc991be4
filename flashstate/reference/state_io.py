"""Slots, tokens and stored states in plain torch; kernels/slots.py and kernels/state_io.py do the same on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from flashstate.state.faults import KINDS, fault_flag
from flashstate.state.formats import decode, encode
from flashstate.state.rounding import SEED_STEP, random_bits
from flashstate.state.slots import Slots
from flashstate.state.state import State


def resolve_read(slots: Slots | None, batch: int, num_slots: int, device: torch.device) -> Tensor:
    """The slot every row reads, (batch,) int64; -1 for padding."""
    if slots is None:
        return torch.arange(batch, device=device)
    read = slots.read.long()
    if slots.accepted is not None:
        n, accepted = read.shape[1], slots.accepted.long()
        inside = (accepted >= 1) & (accepted <= n)
        _note("accepted", accepted[accepted > n], device)
        column = torch.where(inside, accepted - 1, 0)
        read = torch.where(inside, read.gather(1, column[:, None])[:, 0] if n else -1, -1)
    return _in_pool("read", read, num_slots, slots.null, device)


def resolve_write(slots: Slots | None, read: Tensor, num_slots: int) -> Tensor:
    """The slot every row writes, (batch,), or the slots its tokens do, (batch, T); -1 for none."""
    if slots is None or slots.write is None:
        return read
    padding = read < 0 if slots.write.dim() == 1 else (read < 0)[:, None]
    wanted = torch.where(padding, -1, slots.write.long())  # a padding row writes nothing, wherever it points
    return _in_pool("write", wanted, num_slots, slots.null, read.device)


def resolve_snapshot_rows(slots: Slots | None, read: Tensor, num_rows: int) -> Tensor:
    """The row of the snapshots that every row fills, (batch,); -1 for none."""
    if slots is None or slots.snapshot_rows is None:
        wanted = torch.arange(len(read), device=read.device)
    else:
        wanted = slots.snapshot_rows.long()
    return _in_pool("snapshot row", torch.where(read < 0, -1, wanted), num_rows, -1, read.device)


def _in_pool(kind: str, slot: Tensor, num_slots: int, null: int, device: torch.device) -> Tensor:
    _note(kind, slot[(slot >= num_slots) & (slot != null)], device)
    return torch.where((slot < 0) | (slot >= num_slots) | (slot == null), -1, slot)


def _note(kind: str, outside: Tensor, device: torch.device) -> None:
    if outside.numel():
        fault_flag(device)[KINDS.index(kind)] = outside[0]


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
    where, values = tuple(index[goes] for index in where), values[goes]
    random = None
    if state.rounding == "stochastic":
        assert seed is not None
        heads, rows, cols = values.shape[1:]
        random = random_bits(seed[goes], (heads, rows, cols), token[goes], state.stream, state.rounds)
    data, scale = encode(values, state.data.dtype, random)
    state.data[where] = data
    if state.scale is not None and scale is not None:
        state.scale[where] = scale


def advance_seeds(seed: Tensor, slots: Slots | None) -> None:
    """Add SEED_STEP to the seeds of the slots that are read, once for every row that reads them."""
    read = resolve_read(slots, seed.shape[0], seed.shape[0], seed.device)
    read = read[read >= 0]
    seed.index_add_(0, read, torch.full_like(read, SEED_STEP))
