"""Slots and stored states in plain torch; kernels/state_io.py and kernels/slots.py do the same on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from flashstate.state.faults import KINDS, fault_flag
from flashstate.state.formats import decode, encode
from flashstate.state.rounding import SEED_STEP, random_bits
from flashstate.state.slots import Slots
from flashstate.state.state import State


def resolve_slots(slots: Slots | None, batch: int, num_slots: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The slot every row reads and the slot it writes, (batch,) int64 each; -1 where it does neither."""
    if slots is None:
        read = torch.arange(batch, device=device)
        return read, read
    read = _resolve("read", slots.read.long(), num_slots, slots.null, device)
    if slots.write is None:
        return read, read
    wanted = torch.where(read < 0, -1, slots.write.long())  # a padding row writes nothing, wherever it points
    return read, _resolve("write", wanted, num_slots, slots.null, device)


def _resolve(kind: str, slot: Tensor, num_slots: int, null: int, device: torch.device) -> Tensor:
    outside = slot[(slot >= num_slots) & (slot != null)]
    if outside.numel():
        fault_flag(device)[KINDS.index(kind)] = outside[0]
    return torch.where((slot < 0) | (slot >= num_slots) | (slot == null), -1, slot)


def load_state(state: State, read: Tensor) -> Tensor:
    """The states of the rows that are not padding: (live rows, heads, rows, cols) float32."""
    return decode(state.data[read[read >= 0]])


def store_state(state: State, values: Tensor, read: Tensor, write: Tensor, token: int = 0) -> None:
    """Round `values`, the float32 states of the live rows, and store those that have a slot to go to."""
    live_write, live_read = write[read >= 0], read[read >= 0]
    goes = live_write >= 0
    random = None
    if state.rounding == "stochastic":
        assert state.seed is not None
        shape = (values.shape[1], values.shape[2], values.shape[3])
        random = random_bits(state.seed[live_read[goes]], shape, token, state.stream, state.rounds)
    state.data[live_write[goes]] = encode(values[goes], state.data.dtype, random)


def advance_seeds(seed: Tensor, slots: Slots | None) -> None:
    """Add SEED_STEP to the seeds of the slots that are read, once for every row that reads them."""
    read, _ = resolve_slots(slots, seed.shape[0], seed.shape[0], seed.device)
    read = read[read >= 0]
    seed.index_add_(0, read, torch.full_like(read, SEED_STEP))
