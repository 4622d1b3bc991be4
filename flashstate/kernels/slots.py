"""Which slots a batch row reads and writes, and which tokens it has; reference/state_io.py has the same in torch.

`slots` is a tuple: how many slots there are, which of them stands for none, and the fault flag. `parents` is one too:
the table, its row stride, and how many entries a row of it has.
"""

import triton
import triton.language as tl

from flashstate.kernels.ptx import per_thread_ptx
from flashstate.state.rounding import SEED_OF_A_SLOT

READ_FAULT = tl.constexpr(0)  # elements of the fault flag, as state/faults.py names them
WRITE_FAULT = tl.constexpr(1)
ACCEPTED_FAULT = tl.constexpr(2)
SNAPSHOT_FAULT = tl.constexpr(3)
FOLD_FAULT = tl.constexpr(4)
FROM_SLOT_TO_SLOT = tl.constexpr(SEED_OF_A_SLOT)


@triton.jit
def resolve_read(
    read, b, slots, PER_THREAD: tl.constexpr = False, NARROW: tl.constexpr = True, AT_LEAST_ONE: tl.constexpr = False
):  # fmt: skip
    """The slot row `b` reads, int64; -1 for a padding row. `read`: table, its row stride and width, accepted counts.
    PER_THREAD: in registers of every thread, not of the warp, if it is a slot of a list. NARROW: see `narrowed`.
    AT_LEAST_ONE: accepted counts below 1 are taken as 1."""
    number = ask_slot(read, b, slots, PER_THREAD, AT_LEAST_ONE)
    return number if read[0] is None else _in_pool(number, slots, READ_FAULT, NARROW)


@triton.jit
def ask_slot(read, b, slots, PER_THREAD: tl.constexpr = False, AT_LEAST_ONE: tl.constexpr = False):
    """The number that the table has for row `b`, not checked yet; what there is to load meanwhile need not wait for it.
    Arguments are those of resolve_read."""
    table_ptr, stride, width, accepted_ptr = read
    if table_ptr is None:
        return b.to(tl.int64)
    elif accepted_ptr is None:
        number = tl.load(table_entry(table_ptr, b, stride, 0))
        return per_thread_ptx(number) if PER_THREAD else number
    else:
        accepted = tl.load(accepted_ptr + b)
        if AT_LEAST_ONE:
            accepted = tl.maximum(accepted, 1)
        tl.store(slots[2] + ACCEPTED_FAULT, accepted.to(tl.int64), mask=accepted > width)
        inside = (accepted >= 1) & (accepted <= width)
        return tl.load(table_entry(table_ptr, b, stride, accepted - 1), mask=inside, other=-1)


@triton.jit
def slot_and_life(number, slots):
    """The slot of that number, int64, and whether the pool has it and it is not null. What else the number may be is
    left in it, so that addresses do not wait for the checks: only masks do."""
    num_slots, null, _ = slots
    return narrowed(number), (number >= 0) & (number < num_slots) & (number != null)


@triton.jit
def note_past(number, slots, FAULT: tl.constexpr):
    """Note a slot past the pool in the fault flag."""
    num_slots, null, fault_ptr = slots
    tl.store(fault_ptr + FAULT, number.to(tl.int64), mask=(number >= num_slots) & (number != null))


@triton.jit
def narrowed(number):
    """A number by way of 32 bits, which every slot fits, so that strides are multiplied with 32 bits of it; int64.
    With lists of int64 `mamba2_step` of one token is 3 to 8 % faster so on an H200, `gated_delta_step` of four 5 %
    (docs/log.md)."""
    return number.to(tl.int32).to(tl.int64)


@triton.jit
def read_slot(
    read, b, slots, seed_ptr, SEEDED: tl.constexpr, SHARED_SEED: tl.constexpr, AT_LEAST_ONE: tl.constexpr = False,
    PER_THREAD: tl.constexpr = False,
):  # fmt: skip
    """The slot row `b` reads, whether there is one, and its seed."""
    slot = resolve_read(read, b, slots, PER_THREAD, AT_LEAST_ONE=AT_LEAST_ONE)
    live = slot >= 0
    return slot, live, load_seed(seed_ptr, slot, live, SEEDED, SHARED_SEED)


@triton.jit
def load_seed(seed_ptr, slot, live, SEEDED: tl.constexpr, SHARED_SEED: tl.constexpr):
    """The seed of a slot, if anything is rounded with it. Loaded before the state, it is there when bits are drawn.
    SHARED_SEED: there is one, of which those of all slots are made."""
    if seed_ptr is None or not SEEDED:
        return 0
    elif SHARED_SEED:
        return tl.load(seed_ptr) + slot * FROM_SLOT_TO_SLOT
    else:
        return tl.load(seed_ptr + slot, mask=live, other=0)


@triton.jit
def resolve_write(write, b, column, slot, goes, slots):
    """The slot row `b` writes, int64: its entry in that column of the table, or `slot`, which it read, if there is no
    table; -1 for none, and wherever it points unless `goes`. `write`: table and its row stride."""
    table_ptr, stride = write
    if table_ptr is None:
        return slot
    else:
        to = tl.load(table_entry(table_ptr, b, stride, column), mask=goes, other=-1)
        return _in_pool(to, slots, WRITE_FAULT)


@triton.jit
def write_slot(write, b, slot, goes, slots):
    """The slot row `b` writes after its last token, int64, as resolve_write has it; -1 unless `goes`."""
    return tl.where(goes, resolve_write(write, b, 0, slot, goes, slots), -1)


@triton.jit
def slots_of_rows(table, b, exists, slots, FAULT: tl.constexpr = READ_FAULT):
    """The slots of these rows, int64; -1 for padding, and rows that do not exist. `table`: a list, or None where row b
    has slot b, and its stride. FAULT: the element of the flag for slots past the pool."""
    table_ptr, stride = table
    num_slots, null, fault_ptr = slots
    slot = b.to(tl.int64)
    if table_ptr is not None:
        slot = tl.load(table_ptr + slot * stride, mask=exists, other=-1).to(tl.int64)
    past = exists & (slot >= num_slots)
    tl.store(fault_ptr + FAULT + b * 0, slot, mask=past & (slot != null))
    return tl.where(exists & (slot >= 0) & (slot < num_slots) & (slot != null), slot, -1)


@triton.jit
def resolve_snapshot_row(rows, b, goes, fault_ptr):
    """The row of the snapshots that row `b` fills, int64; -1 for none. `rows`: their list, and how many there are."""
    rows_ptr, num_rows = rows
    row = b.to(tl.int64) if rows_ptr is None else tl.load(rows_ptr + b).to(tl.int64)
    return _in_pool(tl.where(goes, row, -1), (num_rows, -1, fault_ptr), SNAPSHOT_FAULT)


@triton.jit
def token_range(cu_seqlens_ptr, b, tokens, ONE_TOKEN: tl.constexpr):
    """The first token of row `b` on the token axis, and how many it has; `tokens` is the length of that axis."""
    if ONE_TOKEN:
        return b * 0, 1
    elif cu_seqlens_ptr is None:
        return b * 0, tokens
    else:
        first = bound(tl.load(cu_seqlens_ptr + b), tokens)
        last = bound(tl.load(cu_seqlens_ptr + b + 1), tokens)
        return first, tl.maximum(last - first, 0)


@triton.jit
def bound(number, tokens):
    """A boundary of packed tokens, int32: the nearest that a token axis of this length has."""
    return tl.minimum(tl.maximum(number, 0), tokens).to(tl.int32)


@triton.jit
def depth_of(parents, b, t):
    """How many tokens lead from the initial state to token t of a tree, itself among them; 0 if a parent is invalid."""
    parent = parent_of(parents, b, t)
    count = t * 0 + 1
    child = t
    while (parent >= 0) & (parent < child):
        child = parent
        parent = parent_of(parents, b, child)
        count += 1
    return tl.where(parent == -1, count, 0)


@triton.jit
def path_to(parents, b, t):
    """How many steps lead to token t from the state at hand, which is the one after token t - 1 if that is its parent
    and the initial one otherwise, and which of both it is; 0 steps if an ancestor's parent is invalid."""
    follows = parent_of(parents, b, t) == t - 1
    depth = depth_of(parents, b, t)
    return tl.where(follows, tl.minimum(depth, 1), depth), follows


@triton.jit
def ancestor(parents, b, t, generations):
    """The token that is so many generations above token t."""
    for _ in range(0, generations):
        t = parent_of(parents, b, t)
    return t


@triton.jit
def parent_of(parents, b, t):
    """The parent of token t; an invalid one past the table, and of a token that is none."""
    table_ptr, stride, longest = parents
    parent = tl.load(table_entry(table_ptr, b, stride, t), mask=(t >= 0) & (t < longest), other=-2)
    return tl.where((parent >= -1) & (parent < longest), parent, -2).to(tl.int32)


@triton.jit
def table_entry(ptr, b, stride, column):
    """Pointer to an entry of row `b` of a table."""
    tl.assume(stride >= 0)
    return ptr + b.to(tl.int64) * stride + column


@triton.jit
def _in_pool(slot, slots, FAULT: tl.constexpr, NARROW: tl.constexpr = True):
    """`slot` if the pool has it and it is not null, else -1, int64; a slot past the pool is noted in the fault flag.
    NARROW: as `narrowed` has it."""
    num_slots, null, _ = slots
    note_past(slot, slots, FAULT)
    slot = tl.where((slot == null) | (slot >= num_slots) | (slot < 0), -1, slot)
    return narrowed(slot) if NARROW else slot.to(tl.int64)
