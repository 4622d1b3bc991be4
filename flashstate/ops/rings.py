"""make_plan, commit_plan, drop_folded and renew: the launches behind plan, commit and folded of rings and pools."""

from __future__ import annotations

import torch
from torch import Tensor

from flashstate.launch import uses_kernels
from flashstate.launch.arguments import slots_values
from flashstate.launch.config import next_power_of_2
from flashstate.launch.registered import registered
from flashstate.launch.start import Launch, kernel_in, start
from flashstate.ops.debug import check_commit
from flashstate.reference import rings as reference
from flashstate.state.actions import provide
from flashstate.state.faults import fault_flag
from flashstate.state.ring import AnyRing, Plan
from flashstate.state.slots import Slots

MOST_ROWS = 1024  # of a batch that a program looks at together
BLOCK = 128  # rows that a program moves the cursors of


@provide
@registered("rows", "parts")
def make_plan(
    rows: Tensor,
    parts: Tensor,
    oldest: Tensor,
    count: Tensor,
    window: int,
    slots: Slots | None,
    tokens: int,
    generation: Tensor | None,
) -> None:
    """Fill a plan for rings with these cursors, in slots of these generations."""
    if not uses_kernels(rows.device):
        reference.make_plan(oldest, count, window, slots, tokens, rows, parts, generation)
        return
    block = min(MOST_ROWS, next_power_of_2(max(len(rows), 1)))
    values = {
        **slots_values(slots), "rows_ptr": rows, "parts_ptr": parts, "start_ptr": oldest, "count_ptr": count,
        "generation_ptr": generation, "fault_ptr": fault_flag(rows.device), "batch": len(rows), "tokens": tokens,
        "num_slots": len(count), "WINDOW": window, "BLOCK": block,
    }  # fmt: skip
    start(Launch(kernel_in("rings", "make_plan"), (1,), rows.device, values, num_warps=max(1, min(8, block // 128))))


@provide
def commit(ring: AnyRing, plan: Plan, accepted: Tensor | None) -> None:
    """Keep the accepted tokens of a step that was planned for this ring."""
    check_commit(ring, plan)
    commit_plan(ring.start, ring.count, ring.window, ring.length, plan.rows, accepted, plan.generation)


@registered("oldest", "count")
def commit_plan(
    oldest: Tensor,
    count: Tensor,
    window: int,
    length: int,
    rows: Tensor,
    accepted: Tensor | None,
    generation: Tensor | None,
) -> None:
    """Move the cursors of every row of a plan whose slot still has its generation in the plan."""
    if not uses_kernels(rows.device):
        reference.commit_plan(oldest, count, window, length, rows, accepted, generation)
    elif len(rows):
        values = {
            "start_ptr": oldest, "count_ptr": count, "rows_ptr": rows, "accepted_ptr": accepted,
            "generation_ptr": generation, "fault_ptr": fault_flag(rows.device), "batch": len(rows), "length": length,
            "WINDOW": window, "BLOCK": BLOCK,
        }  # fmt: skip
        start(Launch(kernel_in("rings", "commit_plan"), (-(-len(rows) // BLOCK),), rows.device, values, num_warps=1))


@provide
@registered("oldest", "count")
def drop_folded(
    oldest: Tensor, count: Tensor, length: int, slots: Slots | None, tokens: Tensor | None, most: int
) -> None:
    """Drop so many live rows of every slot: as `tokens` says, or `most`; -1: all."""
    if not uses_kernels(count.device):
        given = tokens if tokens is not None else None if most < 0 else most
        reference.drop_folded(oldest, count, length, slots, given)
        return
    batch = len(count) if slots is None else len(slots.read)
    if batch == 0:
        return
    values = {
        **slots_values(slots), "start_ptr": oldest, "count_ptr": count, "tokens_ptr": tokens,
        "fault_ptr": fault_flag(count.device), "batch": batch, "most": most, "length": length, "num_slots": len(count),
        "BLOCK": BLOCK,
    }  # fmt: skip
    start(Launch(kernel_in("rings", "drop_folded"), (-(-batch // BLOCK),), count.device, values, num_warps=1))


@torch.no_grad()
def renew(generation: Tensor, slots: Tensor, null: int, sources: Tensor | None = None) -> None:
    """Add 1 to the generation of slots, (n,) on the device, so that `commit` of earlier plans leaves them alone.

    sources: (n,) slots that they were copied from; a slot whose source is no slot keeps its generation.
    """
    if not uses_kernels(generation.device):
        reference.renew(generation, slots, null, sources)
    elif len(slots):
        values = {
            "generation_ptr": generation, "slots_ptr": slots, "sources_ptr": sources,
            "fault_ptr": fault_flag(generation.device), "count": len(slots), "num_slots": len(generation),
            "null": null, "BLOCK": BLOCK,
        }  # fmt: skip
        start(Launch(kernel_in("rings", "renew"), (-(-len(slots) // BLOCK),), slots.device, values, num_warps=1))


@registered("before", "after", "rows", "folding")
def place_counts(
    slots: Slots,
    counts: Tensor,
    full: Tensor,
    length: int,
    before: Tensor,
    after: Tensor,
    rows: Tensor,
    folding: Tensor,
) -> None:
    """Make cursors of rings, by slot, of counts that rows of a batch have; reference/rings.py says what goes where."""
    if not uses_kernels(rows.device):
        reference.place_counts(slots, counts, full, length, before, after, rows, folding)
    elif len(rows):
        values = {
            **slots_values(slots), "counts_ptr": counts, "full_ptr": full, "before_ptr": before, "after_ptr": after,
            "rows_ptr": rows, "folding_ptr": folding, "fault_ptr": fault_flag(rows.device), "batch": len(rows),
            "length": length, "num_slots": len(before), "BLOCK": BLOCK,
        }  # fmt: skip
        start(Launch(kernel_in("rings", "place_counts"), (-(-len(rows) // BLOCK),), rows.device, values, num_warps=1))
