"""The bytes of slots cleared, gathered, scattered and copied, in plain torch; kernels/moving.py does it on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashstate.reference.state_io import resolve
from flashstate.state.formats import bits_of
from flashstate.state.parts import OF_SEEDS, ROUNDS, Parts
from flashstate.state.rounding import philox


def slots_of(kind: str, slots: Tensor, parts: Parts, null: int) -> Tensor:
    """The slots that a list names, (n,) int64; -1 where it names none. Those past the pool are noted as faults."""
    return resolve(kind, slots, torch.ones_like(slots, dtype=torch.bool), parts.slots, null)


def clear(parts: Parts, slots: Tensor, null: int, first: int, last: int) -> Tensor:
    """Make these parts of slots clean; returns the slots."""
    found = slots_of("write", slots, parts, null)
    for part in parts.parts[first:last]:
        clean = torch.tensor(part.clean, device=found.device).to(part.tensor.dtype)
        _put(part.tensor, found, [bits_of(clean)] * len(found))
    return found


def gather(parts: Parts, slots: Tensor, null: int, first: int, last: int) -> Tensor:
    """These parts of slots, packed: (n, bytes) uint8; zeros where a list names no slot."""
    found = slots_of("read", slots, parts, null)
    packed = [part.pack(part.tensor[found.clamp(min=0)]) for part in parts.parts[first:last]]
    return torch.where((found >= 0)[:, None], torch.cat(packed, 1), 0)


def scatter(parts: Parts, slots: Tensor, packed: Tensor, null: int, first: int, last: int) -> None:
    """Store these parts of packed slots, (n, bytes) uint8."""
    found = slots_of("write", slots, parts, null)
    start = parts.offsets[first]
    for place in range(first, last):
        part, (at, end) = parts.parts[place], (offset - start for offset in parts.offsets[place : place + 2])
        _put(part.tensor, found, part.unpack(packed[:, at:end]))


def copy(parts: Parts, sources: Tensor, targets: Tensor, null: int, last: int) -> Tensor:
    """Copy the parts before `last` of slots; returns the targets, -1 where nothing is copied. All sources are read
    before a target is written."""
    source, target = slots_of("read", sources, parts, null), slots_of("write", targets, parts, null)
    target = torch.where(source >= 0, target, -1)
    for part in parts.parts[:last]:
        _put(part.tensor, target, [bits_of(part.tensor)[slot].clone() for slot in source.tolist()])
    return target


def _put(tensor: Tensor, slots: Tensor, values: Sequence[Tensor] | Tensor) -> None:
    """Store a value, as whole numbers, in each of these slots but -1: one by one, which is faster than by an index."""
    for slot, value in zip(slots.tolist(), values, strict=True):
        if slot >= 0:
            bits_of(tensor)[slot].copy_(value)


def draw_seeds(draws: Tensor, count: int) -> Tensor:
    """So many new seeds, (count,) int64. `draws`: the key of all seeds, and how many were drawn, which grows."""
    key, drawn = draws
    number = drawn + torch.arange(count, device=draws.device)
    low, high, _, _ = philox(key, number & 0xFFFFFFFF, number >> 32, 0, OF_SEEDS, ROUNDS)
    draws[1] += count
    return low | high << 32
