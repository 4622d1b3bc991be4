"""make_plan, commit_plan and drop_folded: the launches behind Ring.plan, Ring.commit and Ring.folded."""

from __future__ import annotations

import torch
from torch import Tensor

from flashstate.errors import INDEX_DTYPES, check_contiguous, check_int, check_tensor
from flashstate.launch import uses_kernels
from flashstate.launch.arguments import slots_values
from flashstate.launch.config import next_power_of_2
from flashstate.launch.registered import registered
from flashstate.launch.start import Launch, kernel_in, start
from flashstate.reference import rings as reference
from flashstate.state.actions import provide
from flashstate.state.faults import fault_flag
from flashstate.state.ring import FIELDS, Plan, Ring, check_call_length, check_plan, refuse_tables, tokens_to_fold
from flashstate.state.slots import Slots

MOST_ROWS = 1024  # of a batch that a program looks at together
BLOCK = 128  # rows that a program moves the cursors of


@provide
def make_plan(ring: Ring, slots: Slots | None, tokens: int | None) -> Plan:
    """The plan of a step of these slots, with so many tokens each; None where they are packed."""
    batch = check_slots(ring, slots)
    if slots is not None and slots.cu_seqlens is not None:
        if tokens is not None:
            raise ValueError(f"tokens is not for packed tokens, whose number slots.cu_seqlens says, got {tokens}")
        longest = check_call_length(ring, slots.max_len)
    else:
        check_int("tokens", tokens, 1, ring.window)
        longest = check_call_length(ring, tokens)
    with torch.inference_mode(False):  # else only inference mode could fill them again
        rows = torch.empty(batch, FIELDS, dtype=torch.int32, device=ring.count.device)
        parts = torch.empty(2, dtype=torch.int32, device=ring.count.device)
    fill_plan(rows, parts, ring.start, ring.count, ring.window, slots, longest)
    return Plan(slots, longest, rows, parts, ring.count, ring.window)


@provide
def commit_plan(ring: Ring, plan: Plan, accepted: Tensor | None) -> None:
    """Move the cursors of a ring on, by so many tokens of every row of a plan."""
    check_plan(plan, ring)
    if accepted is not None:
        device = ring.count.device
        check_tensor("accepted", accepted, ("batch",), (plan.batch,), dtypes=INDEX_DTYPES, device=device)
        check_contiguous("accepted", accepted)
    move_cursors(ring.start, ring.count, ring.window, ring.length, plan.rows, accepted)


@provide
def drop_folded(ring: Ring, slots: Slots | None, tokens: Tensor | int | None) -> None:
    """Move the cursors of a ring past live rows that were folded."""
    refuse_tables(slots, "folding")
    each, most = tokens_to_fold(tokens, ring, check_slots(ring, slots))
    drop_rows(ring.start, ring.count, ring.length, slots, each, most)


def check_slots(ring: Ring, slots: Slots | None) -> int:
    """How many rows these slots have; raises where they are not for a ring."""
    refuse_tables(slots, "replay")
    if slots is not None:
        slots.check_device(ring.count.device, "ring")
    return len(ring.count) if slots is None else len(slots.read)


@registered("rows", "parts")
def fill_plan(
    rows: Tensor, parts: Tensor, oldest: Tensor, count: Tensor, window: int, slots: Slots | None, tokens: int
) -> None:
    """Fill a plan for rings with these cursors."""
    if not uses_kernels(rows.device):
        reference.make_plan(oldest, count, window, slots, tokens, rows, parts)
        return
    block = min(MOST_ROWS, next_power_of_2(max(len(rows), 1)))
    values = {
        **slots_values(slots), "rows_ptr": rows, "parts_ptr": parts, "start_ptr": oldest, "count_ptr": count,
        "fault_ptr": fault_flag(rows.device), "batch": len(rows), "tokens": tokens, "num_slots": len(count),
        "WINDOW": window, "BLOCK": block,
    }  # fmt: skip
    start(Launch(kernel_in("rings", "make_plan"), (1,), rows.device, values, num_warps=max(1, min(8, block // 128))))


@registered("oldest", "count")
def move_cursors(
    oldest: Tensor, count: Tensor, window: int, length: int, rows: Tensor, accepted: Tensor | None
) -> None:  # fmt: skip
    """Move cursors on as the rows of a plan say."""
    if not uses_kernels(rows.device):
        reference.commit_plan(oldest, count, window, length, rows, accepted)
    elif len(rows):
        values = {
            "start_ptr": oldest, "count_ptr": count, "rows_ptr": rows, "accepted_ptr": accepted, "batch": len(rows),
            "fault_ptr": fault_flag(rows.device), "length": length, "WINDOW": window, "BLOCK": BLOCK,
        }  # fmt: skip
        start(Launch(kernel_in("rings", "commit_plan"), (-(-len(rows) // BLOCK),), rows.device, values, num_warps=1))


@registered("oldest", "count")
def drop_rows(
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
