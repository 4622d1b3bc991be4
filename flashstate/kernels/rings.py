"""Plans and cursors of replay rings; reference/rings.py has the same in torch. One program each: they are small."""

import triton
import triton.language as tl

from flashstate.kernels.slots import ACCEPTED_FAULT, FOLD_FAULT, WRITE_FAULT, bound, slots_of_rows
from flashstate.launch.kernel import kernel

FIELDS = tl.constexpr(8)  # numbers that a plan has of a row
MOST_TOKENS = tl.constexpr((1 << 31) - 1)  # on a token axis


@triton.jit
def planned(b, batch, read, cursors, cu_seqlens_ptr, tokens, slots, WINDOW: tl.constexpr):
    """What a plan says of these rows: slot, start, live count, first token, length; and whether it goes, and folds."""
    start_ptr, count_ptr = cursors
    exists = b < batch
    slot = slots_of_rows(read, b, exists, slots)
    first, length = b * 0, b * 0 + tokens
    if cu_seqlens_ptr is not None:
        first = bound(tl.load(cu_seqlens_ptr + b, mask=exists, other=0), MOST_TOKENS)
        last = bound(tl.load(cu_seqlens_ptr + b + 1, mask=exists, other=0), MOST_TOKENS)
        length = tl.minimum(tl.maximum(last - first, 0), tokens)
    goes = (slot >= 0) & (length > 0)
    start = tl.load(start_ptr + slot, mask=goes, other=0)
    live = tl.load(count_ptr + slot, mask=goes, other=0)
    folds = goes & (live + length > WINDOW)
    return tl.where(goes, slot, -1).to(tl.int32), start, live, first, length, goes, folds


@kernel
def make_plan_kernel(
    rows_ptr, parts_ptr, start_ptr, count_ptr, generation_ptr, read_ptr, cu_seqlens_ptr, fault_ptr, read_stride,
    batch, tokens, num_slots, null,
    WINDOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The rows that fold, then those that do not, then those that do nothing, each part in the order of the batch."""
    read, cursors, slots = (read_ptr, read_stride), (start_ptr, count_ptr), (num_slots, null, fault_ptr)
    folding, going = tl.program_id(0) * 0, tl.program_id(0) * 0
    for block in range(0, batch, BLOCK):
        b = block + tl.arange(0, BLOCK)
        _, _, _, _, _, goes, folds = planned(b, batch, read, cursors, cu_seqlens_ptr, tokens, slots, WINDOW)
        folding += tl.sum(folds.to(tl.int32), 0)
        going += tl.sum(goes.to(tl.int32), 0)
    tl.store(parts_ptr, folding)
    tl.store(parts_ptr + 1, going)

    to_fold, to_keep, to_idle = folding * 0, folding, going  # where the next row of each part goes
    for block in range(0, batch, BLOCK):
        b = block + tl.arange(0, BLOCK)
        slot, start, live, first, length, goes, folds = planned(
            b, batch, read, cursors, cu_seqlens_ptr, tokens, slots, WINDOW
        )  # fmt: skip
        exists = b < batch
        keeps, idles = goes & (folds == 0), exists & (goes == 0)
        place = tl.where(folds, to_fold + tl.cumsum(folds.to(tl.int32), 0), 0)
        place += tl.where(keeps, to_keep + tl.cumsum(keeps.to(tl.int32), 0), 0)
        place += tl.where(idles, to_idle + tl.cumsum(idles.to(tl.int32), 0), 0)
        entry = rows_ptr + (place - 1) * FIELDS
        generation = b * 0
        if generation_ptr is not None:
            generation = tl.load(generation_ptr + slot, mask=goes, other=0)
        fields = b, slot, start, live, first, length, generation, b * 0
        for i in tl.static_range(FIELDS):
            tl.store(entry + i, fields[i], mask=exists)
        to_fold += tl.sum(folds.to(tl.int32), 0)
        to_keep += tl.sum(keeps.to(tl.int32), 0)
        to_idle += tl.sum(idles.to(tl.int32), 0)


@kernel
def commit_plan_kernel(
    start_ptr, count_ptr, rows_ptr, accepted_ptr, generation_ptr, fault_ptr, batch, length,
    WINDOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Keep so many tokens of every row whose slot has the generation of the plan; where it folded, drop the tokens that
    it folded."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    entry, exists = rows_ptr + i * FIELDS, i < batch
    slot = tl.load(entry + 1, mask=exists, other=-1).to(tl.int64)
    goes = slot >= 0
    if generation_ptr is not None:
        planned_in = tl.load(entry + 6, mask=goes, other=0)
        goes &= tl.load(generation_ptr + slot, mask=goes, other=0) == planned_in
    start = tl.load(entry + 2, mask=goes, other=0)
    live = tl.load(entry + 3, mask=goes, other=0)
    tokens = tl.load(entry + 5, mask=goes, other=0)
    kept = tokens
    if accepted_ptr is not None:
        b = tl.load(entry, mask=goes, other=0)
        given = tl.load(accepted_ptr + b, mask=goes, other=0)
        tl.store(fault_ptr + ACCEPTED_FAULT + i * 0, given.to(tl.int64), mask=goes & ((given < 0) | (given > tokens)))
        kept = tl.minimum(tl.maximum(given, 0), tokens).to(tl.int32)
    folds = live + tokens > WINDOW
    tl.store(start_ptr + slot, tl.where(folds, (start + live) % length, start), mask=goes)
    tl.store(count_ptr + slot, tl.where(folds, 0, live) + kept, mask=goes)


@kernel
def renew_kernel(
    generation_ptr, slots_ptr, sources_ptr, fault_ptr, count, num_slots, null, BLOCK: tl.constexpr
):  # fmt: skip
    """Count on the generations of these slots, or of those that have a source, from which they were copied."""
    n, slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), (num_slots, null, fault_ptr)
    slot = slots_of_rows((slots_ptr, 1), n, n < count, slots, WRITE_FAULT)
    goes = slot >= 0
    if sources_ptr is not None:
        goes &= slots_of_rows((sources_ptr, 1), n, n < count, slots) >= 0
    tl.store(generation_ptr + slot, tl.load(generation_ptr + slot, mask=goes, other=0) + 1, mask=goes)


@triton.jit
def tokens_to_fold(tokens_ptr, most, b, goes, count, fault_ptr):
    """How many of `count` live rows to fold: what the row's entry says, or `most`, or all where that is negative."""
    given = tl.where(most < 0, count, most) if tokens_ptr is None else tl.load(tokens_ptr + b, mask=goes, other=0)
    outside = goes & ((given < 0) | (given > count))
    tl.store(fault_ptr + FOLD_FAULT + b * 0, given.to(tl.int64), mask=outside)
    return tl.minimum(tl.maximum(given, 0), count).to(tl.int32)


@kernel
def drop_folded_kernel(
    start_ptr, count_ptr, read_ptr, tokens_ptr, fault_ptr, read_stride, batch, most, length, num_slots, null,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Move the cursors of these slots past live rows that were folded."""
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = slots_of_rows((read_ptr, read_stride), b, b < batch, (num_slots, null, fault_ptr))
    goes = slot >= 0
    start = tl.load(start_ptr + slot, mask=goes, other=0)
    count = tl.load(count_ptr + slot, mask=goes, other=0)
    folded = tokens_to_fold(tokens_ptr, most, b, goes, count, fault_ptr)
    tl.store(start_ptr + slot, (start + folded) % length, mask=goes)
    tl.store(count_ptr + slot, count - folded, mask=goes)


@kernel
def place_counts_kernel(
    read_ptr, counts_ptr, full_ptr, before_ptr, after_ptr, rows_ptr, folding_ptr, fault_ptr, read_stride, batch, length,
    num_slots, null, BLOCK: tl.constexpr,
):  # fmt: skip
    """Counts of live rows, which rows of a batch have, to the slots of these: before a token and after it. And of each
    row its slot, where it has one and room for a token, and again where its ring is then folded; else -1."""
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = b < batch
    slot = slots_of_rows((read_ptr, read_stride), b, exists, (num_slots, null, fault_ptr))
    count = tl.load(counts_ptr + b, mask=exists, other=0)
    outside = (slot >= 0) & ((count < 0) | (count >= length))
    tl.store(fault_ptr + FOLD_FAULT + b * 0, count.to(tl.int64), mask=outside)
    goes = (slot >= 0) & (outside == 0)
    full = tl.load(full_ptr + b, mask=goes, other=0) != 0
    tl.store(before_ptr + slot, count, mask=goes)
    tl.store(after_ptr + slot, count + 1, mask=goes)
    tl.store(rows_ptr + b, tl.where(goes, slot, -1).to(tl.int32), mask=exists)
    tl.store(folding_ptr + b, tl.where(goes & full, slot, -1).to(tl.int32), mask=exists)
