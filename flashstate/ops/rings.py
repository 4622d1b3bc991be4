"""make_plan, commit_plan and drop_folded: the launches behind Ring.plan, Ring.commit and Ring.folded."""

from __future__ import annotations

import torch
from torch import Tensor

from flashstate.errors import INDEX_DTYPES, check_contiguous, check_int, check_tensor
from flashstate.launch import start, uses_kernels
from flashstate.launch.arguments import row_stride
from flashstate.launch.config import next_power_of_2
from flashstate.launch.registered import define
from flashstate.reference import rings as reference
from flashstate.state.actions import provide
from flashstate.state.faults import fault_flag
from flashstate.state.ring import (
    FIELDS,
    Plan,
    Ring,
    check_call_length,
    check_folded_slots,
    check_plan,
    check_replayed_slots,
    check_tokens_to_fold,
)
from flashstate.state.slots import Slots

MOST_ROWS = 1024  # of a batch that a program looks at together


@provide
def make_plan(ring: Ring, slots: Slots | None, tokens: int | None) -> Plan:
    """The plan of a step of these slots, with so many tokens each; None where they are packed."""
    check_replayed_slots(slots)
    batch = len(ring.count) if slots is None else len(slots.read)
    if slots is not None and slots.read.device != ring.count.device:
        raise ValueError(f"slots are on {slots.read.device}, but the ring is on {ring.count.device}")
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
    read, cu_seqlens, null = (None, None, -1) if slots is None else (slots.read, slots.cu_seqlens, slots.null)
    run = torch.ops.flashstate.make_plan if torch.compiler.is_compiling() else _make_plan
    run(rows, parts, ring.start, ring.count, ring.window, read, cu_seqlens, longest, null)
    return Plan(slots, longest, rows, parts, ring.count, ring.window)


@provide
def commit_plan(ring: Ring, plan: Plan, accepted: Tensor | None) -> None:
    """Move the cursors of a ring on, by so many tokens of every row of a plan."""
    check_plan(plan, ring)
    if accepted is not None:
        device = ring.count.device
        check_tensor("accepted", accepted, ("batch",), (plan.batch,), dtypes=INDEX_DTYPES, device=device)
        check_contiguous("accepted", accepted)
    run = torch.ops.flashstate.commit_plan if torch.compiler.is_compiling() else _commit_plan
    run(ring.start, ring.count, ring.window, ring.length, plan.rows, accepted)


@provide
def drop_folded(ring: Ring, slots: Slots | None, tokens: Tensor | int | None) -> None:
    """Move the cursors of a ring past live rows that were folded."""
    check_folded_slots(slots)
    check_replayed_slots(slots)
    batch = len(ring.count) if slots is None else len(slots.read)
    if slots is not None and slots.read.device != ring.count.device:
        raise ValueError(f"slots are on {slots.read.device}, but the ring is on {ring.count.device}")
    check_tokens_to_fold(tokens, ring, batch)
    read, null = (None, -1) if slots is None else (slots.read, slots.null)
    each, most = (tokens, -1) if isinstance(tokens, Tensor) else (None, -1 if tokens is None else tokens)
    run = torch.ops.flashstate.drop_folded if torch.compiler.is_compiling() else _drop_folded
    run(ring.start, ring.count, ring.length, read, each, most, null)


def _make_plan(
    rows: Tensor, parts: Tensor, oldest: Tensor, count: Tensor, window: int,
    read: Tensor | None, cu_seqlens: Tensor | None, tokens: int, null: int,
) -> None:  # fmt: skip
    if not uses_kernels(rows.device):
        slots = None
        if read is not None:
            max_len = None if cu_seqlens is None else tokens
            slots = Slots(read, cu_seqlens=cu_seqlens, max_len=max_len, null=null)
        reference.make_plan(oldest, count, window, slots, tokens, rows, parts)
        return
    from flashstate.kernels.rings import make_plan_kernel

    batch = len(rows)
    block = min(MOST_ROWS, next_power_of_2(max(batch, 1)))
    arguments = (
        rows, parts, oldest, count, read, cu_seqlens, fault_flag(rows.device), row_stride(read),
        batch, tokens, len(count), null,
    )  # fmt: skip
    constants = {"WINDOW": window, "BLOCK": block}
    start(make_plan_kernel, (1,), rows.device, arguments, constants, num_warps=max(1, min(8, block // 128)))


def _commit_plan(
    oldest: Tensor, count: Tensor, window: int, length: int, rows: Tensor, accepted: Tensor | None
) -> None:  # fmt: skip
    if not uses_kernels(rows.device):
        reference.commit_plan(oldest, count, window, length, rows, accepted)
        return
    from flashstate.kernels.rings import commit_plan_kernel

    if len(rows) == 0:
        return
    arguments = (oldest, count, rows, accepted, fault_flag(rows.device), len(rows), length)
    constants = {"WINDOW": window, "BLOCK": 128}
    start(commit_plan_kernel, (-(-len(rows) // 128),), rows.device, arguments, constants, num_warps=1)


def _drop_folded(
    oldest: Tensor, count: Tensor, length: int, read: Tensor | None, tokens: Tensor | None, most: int, null: int
) -> None:  # fmt: skip
    """`most`: how many of every slot, where `tokens` does not say it; -1: all."""
    if not uses_kernels(count.device):
        slots = None if read is None else Slots(read, null=null)
        given = tokens if tokens is not None else None if most < 0 else most
        reference.drop_folded(oldest, count, length, slots, given)
        return
    from flashstate.kernels.rings import drop_folded_kernel

    batch = len(count) if read is None else len(read)
    if batch == 0:
        return
    arguments = (
        oldest, count, read, tokens, fault_flag(count.device), row_stride(read), batch, most, length, len(count), null
    )  # fmt: skip
    start(drop_folded_kernel, (-(-batch // 128),), count.device, arguments, {"BLOCK": 128}, num_warps=1)


define(
    "make_plan(Tensor(a!) rows, Tensor(b!) parts, Tensor start, Tensor count, SymInt window, Tensor? read, "
    "Tensor? cu_seqlens, SymInt tokens, SymInt null) -> ()",
    _make_plan,
)
CURSORS = "Tensor(a!) start, Tensor(b!) count"
define(f"commit_plan({CURSORS}, SymInt window, SymInt length, Tensor rows, Tensor? accepted) -> ()", _commit_plan)
define(
    f"drop_folded({CURSORS}, SymInt length, Tensor? read, Tensor? tokens, SymInt most, SymInt null) -> ()",
    _drop_folded,
)
