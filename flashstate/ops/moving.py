"""clear, copy, gather, scatter, store and draw_seeds: the launches behind what a StatePool does to slots in all layers.

Lists of slots are int32 or int64 on the device of the parts; nothing waits for it. Numbers past the pool are skipped
and noted in the fault flag, negative ones and null are skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashstate.launch import uses_kernels
from flashstate.launch.start import Launch, check_programs, kernel_in, start
from flashstate.reference import moving as reference
from flashstate.state.faults import fault_flag
from flashstate.state.parts import PIECE, Parts

TILE = 4096  # elements that a program copies; of more slots than that one of each
GROWTH = 16  # from one number of slots that a kernel copies to the next: few variants
SEEDS_AT_ONCE = 256


@torch.no_grad()
def clear(parts: Parts, slots: Tensor, null: int, seed: Tensor | None = None, seeds: Tensor | None = None) -> None:
    """Make slots clean in all parts but the last, if that is the seed; it gets these seeds, one for each slot."""
    last = len(parts.parts) - (seed is not None)
    if uses_kernels(slots.device):
        _move("clear", parts, slots, null, 0, last, seed_ptr=seed, seeds_ptr=seeds)
        return
    found = reference.clear(parts, slots, null, 0, last)
    if seed is not None and seeds is not None:
        seed[found[found >= 0]] = seeds[found >= 0]


@torch.no_grad()
def gather(parts: Parts, slots: Tensor, null: int) -> Tensor:
    """Slots of all parts, packed: (n, bytes) uint8; zeros where a list names no slot."""
    last = len(parts.parts)
    with torch.inference_mode(False):  # else only inference mode could change it
        if not uses_kernels(slots.device):
            return reference.gather(parts, slots, null, 0, last)
        packed = torch.empty((len(slots), parts.offsets[-1]), dtype=torch.uint8, device=slots.device)
    _move("gather", parts, slots, null, 0, last, packed_ptr=packed)
    return packed


@torch.no_grad()
def scatter(parts: Parts, slots: Tensor, packed: Tensor, null: int, first: int = 0, last: int | None = None) -> None:
    """Store parts of packed slots, (n, bytes) uint8; parts from `first` on, before `last`."""
    last = len(parts.parts) if last is None else last
    if not uses_kernels(slots.device):
        reference.scatter(parts, slots, packed, null, first, last)
        return
    packed = packed.contiguous()
    packed = packed.clone() if packed.data_ptr() % parts.width else packed
    _move("scatter", parts, slots, null, first, last, packed_ptr=packed)


@torch.no_grad()
def store(parts: Parts, slots: Tensor, null: int, first: str, values: Sequence[Tensor]) -> None:
    """Store values, (n, ...) each in the dtype of its part, in the part of that name and in those behind it."""
    place = parts.places[first]
    last = place + len(values)
    packed = [part.pack(of_part) for part, of_part in zip(parts.parts[place:last], values, strict=True)]
    scatter(parts, slots, torch.cat(packed, 1), null, place, last)


def _move(do: str, parts: Parts, slots: Tensor, null: int, first: int, last: int, **tensors: Tensor | None) -> None:
    """Start the kernel that does this to slots of these parts, with a program for each piece of each slot."""
    pieces = parts.pieces[last] - parts.pieces[first]
    programs = pieces * len(slots)
    check_programs("slots", programs, f"{len(slots)} slots")
    if programs == 0:
        return
    start_of, end_of = parts.offsets[first] // parts.width, parts.offsets[last] // parts.width
    values = {
        **_values(parts, null, tensors), "slots_ptr": slots, "first": parts.pieces[first], "pieces": pieces,
        "packed_start": start_of, "packed_stride": end_of - start_of, "DO": do,
    }  # fmt: skip
    start(Launch(kernel_in("moving", "move_slots"), (programs,), slots.device, values, num_warps=4))


@torch.no_grad()
def copy(
    parts: Parts, sources: Tensor, targets: Tensor, null: int, seed: Tensor | None = None, seeds: Tensor | None = None
) -> None:
    """Copy slots in all parts; with seeds, one for each target, in all but the last, which is the seed and gets them.
    A slot may be a source and a target: everything is read before it is overwritten."""
    last = len(parts.parts) - (seeds is not None)
    if not uses_kernels(sources.device):
        found = reference.copy(parts, sources, targets, null, last)
        if seed is not None and seeds is not None:
            seed[found[found >= 0]] = seeds[found >= 0]
        return
    if len(sources) == 0:
        return
    many = copied_at_once(len(sources))[-1]
    block = min(PIECE, max(1, TILE // many))
    programs = parts.pieces[last] * (PIECE // block)
    check_programs("src", programs, f"{len(sources)} slots")
    values = {
        **_values(parts, null, {"seed_ptr": seed, "seeds_ptr": seeds}), "sources_ptr": sources, "targets_ptr": targets,
        "count": len(sources), "N": many, "BLOCK": block,
    }  # fmt: skip
    start(Launch(kernel_in("moving", "copy_slots"), (programs,), sources.device, values, num_warps=8))


def copied_at_once(slots: int) -> list[int]:
    """The numbers of slots that kernels which copy so many or fewer have room for; a larger one has fewer bytes of
    each."""
    sizes = [1]
    while sizes[-1] < slots:
        sizes.append(sizes[-1] * GROWTH)
    return sizes


def _values(parts: Parts, null: int, tensors: dict[str, Tensor | None]) -> dict[str, Any]:
    """What both kernels take."""
    return {
        "packed_ptr": None, "seed_ptr": None, "seeds_ptr": None, **tensors, "table_ptr": parts.table,
        "fault_ptr": fault_flag(parts.device), "num_slots": parts.slots, "null": null, "WIDTH": parts.width,
        "STRIDED": parts.strided,
    }  # fmt: skip


@torch.no_grad()
def draw_seeds(draws: Tensor, count: int) -> Tensor:
    """So many new seeds, (count,) int64. `draws`: (2,) int64, the key of all seeds, and how many were drawn, which
    grows on the device: a CUDA graph that captured this draws others at every replay."""
    if not uses_kernels(draws.device):
        return reference.draw_seeds(draws, count)
    seeds = torch.empty(count, dtype=torch.int64, device=draws.device)
    values = {"seeds_ptr": seeds, "draws_ptr": draws, "count": count, "BLOCK": SEEDS_AT_ONCE}
    start(Launch(kernel_in("moving", "draw_seeds"), (1,), draws.device, values, num_warps=4))
    return seeds
