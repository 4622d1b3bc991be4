"""The bytes of slots cleared, gathered, scattered and copied, in all tensors of a pool at once; reference/moving.py has
the same in torch.

A table, state/parts.py has its fields, says where the bytes of slot 0 are, piece by piece, and how far slots are apart.
Elements are WIDTH bytes each.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashstate.kernels.functions import philox
from flashstate.kernels.slots import READ_FAULT, WRITE_FAULT, slots_of_rows
from flashstate.launch.kernel import kernel
from flashstate.state import parts

FIELDS = tl.constexpr(8)  # numbers in a row of a table
PIECE, ROUNDS, OF_SEEDS = tl.constexpr(parts.PIECE), tl.constexpr(parts.ROUNDS), tl.constexpr(parts.OF_SEEDS)


class Piece(NamedTuple):
    """Elements of every slot."""

    ptrs: Any  # of those of slot 0
    exists: Any
    stride: Any  # from slot to slot
    packed: Any  # where they are in a packed slot
    clean: Any  # what they are in a clean one


@triton.constexpr_function
def element_of(WIDTH):
    """The type of an element of so many bytes."""
    return {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}[WIDTH]


@triton.jit
def load_piece(table_ptr, row, block, BLOCK: tl.constexpr, WIDTH: tl.constexpr, STRIDED: tl.constexpr):
    """So many elements, from that block on, of what a row of the table stands for, (BLOCK,). STRIDED: not all of them
    are neighbours."""
    entry = table_ptr + row.to(tl.int64) * FIELDS
    address, stride, first, end = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    offs = first + block * BLOCK + tl.arange(0, BLOCK)
    start = address.to(tl.pointer_type(element_of(WIDTH)))
    if STRIDED:
        run, pitch = tl.load(entry + 5), tl.load(entry + 6)
        ptrs = start + offs // run * pitch + offs % run
    else:
        ptrs = start + offs
    clean = tl.load(entry + 7) >> (offs % (8 // WIDTH)) * (8 * WIDTH)
    return Piece(ptrs, offs < end, stride, tl.load(entry + 4) + offs, clean.to(element_of(WIDTH)))


@triton.jit
def starts_before_the_end(table_ptr, row, block, BLOCK: tl.constexpr):
    """Whether anything is left in that block of what a row of the table stands for."""
    entry = table_ptr + row.to(tl.int64) * FIELDS
    return tl.load(entry + 2) + block * BLOCK < tl.load(entry + 3)


@triton.jit
def give_seeds(seed_ptr, seeds_ptr, n, slot, goes):
    """Give slots new seeds, if there are some."""
    if seeds_ptr is not None:
        tl.store(seed_ptr + slot, tl.load(seeds_ptr + n, mask=goes, other=0), mask=goes)


@kernel
def move_slots_kernel(
    table_ptr, slots_ptr, packed_ptr, seed_ptr, seeds_ptr, fault_ptr,
    first, pieces, packed_start, packed_stride, num_slots, null,
    DO: tl.constexpr,  # "clear", "gather" into packed slots, or "scatter" from them
    WIDTH: tl.constexpr, STRIDED: tl.constexpr,
):  # fmt: skip
    """One program per slot and piece, of those from `first` on. Of slots that are none zeros are gathered."""
    pid = tl.program_id(0)
    n, row = pid // pieces, pid % pieces
    FAULT: tl.constexpr = READ_FAULT if DO == "gather" else WRITE_FAULT
    slot = slots_of_rows((slots_ptr, 1), n, n >= 0, (num_slots, null, fault_ptr), FAULT)
    piece = load_piece(table_ptr, first + row, 0, PIECE, WIDTH, STRIDED)
    ptrs, goes = piece.ptrs + slot * piece.stride, tl.where(slot >= 0, piece.exists, False)
    if DO == "clear":
        tl.store(ptrs, piece.clean, mask=goes)
        give_seeds(seed_ptr, seeds_ptr, n, slot, (slot >= 0) & (row == 0))
    else:
        elements = packed_ptr.to(tl.pointer_type(element_of(WIDTH)), bitcast=True)
        elements += n.to(tl.int64) * packed_stride + piece.packed - packed_start
        if DO == "gather":
            tl.store(elements, tl.load(ptrs, mask=goes, other=0), mask=piece.exists)
        else:
            tl.store(ptrs, tl.load(elements, mask=goes, other=0), mask=goes)


@kernel
def copy_slots_kernel(
    table_ptr, sources_ptr, targets_ptr, seed_ptr, seeds_ptr, fault_ptr, count, num_slots, null,
    N: tl.constexpr,  # as many as there are slots to copy, or more
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, STRIDED: tl.constexpr,
):  # fmt: skip
    """One program per block of a piece, for all slots: it has read all sources before it writes any target."""
    pid = tl.program_id(0)
    blocks: tl.constexpr = PIECE // BLOCK
    row, block = pid // blocks, pid % blocks
    if starts_before_the_end(table_ptr, row, block, BLOCK):
        n, slots = tl.arange(0, N), (num_slots, null, fault_ptr)
        source = slots_of_rows((sources_ptr, 1), n, n < count, slots)
        target = slots_of_rows((targets_ptr, 1), n, n < count, slots, WRITE_FAULT)
        goes = (source >= 0) & (target >= 0)
        piece = load_piece(table_ptr, row, block, BLOCK, WIDTH, STRIDED)
        mask = goes[:, None] & piece.exists[None, :]
        values = tl.load(piece.ptrs[None, :] + (source * piece.stride)[:, None], mask=mask, other=0)
        if N > 1:
            tl.debug_barrier()
        tl.store(piece.ptrs[None, :] + (target * piece.stride)[:, None], values, mask=mask)
        give_seeds(seed_ptr, seeds_ptr, n, target, tl.where(pid == 0, goes, False))


@kernel
def draw_seeds_kernel(seeds_ptr, draws_ptr, count, BLOCK: tl.constexpr):
    """One program. `draws`: the key of all seeds, and how many were drawn, which grows: no two launches draw the same,
    those of one CUDA graph neither."""
    key, drawn = tl.load(draws_ptr), tl.load(draws_ptr + 1)
    for block in range(0, count, BLOCK):
        i = block + tl.arange(0, BLOCK)
        number = drawn + i
        low, high, _, _ = philox(key, number.to(tl.uint32), (number >> 32).to(tl.uint32), 0, OF_SEEDS, ROUNDS)
        tl.store(seeds_ptr + i, (low.to(tl.uint64) | high.to(tl.uint64) << 32).to(tl.int64), mask=i < count)
    tl.debug_barrier()
    tl.store(draws_ptr + 1, drawn + count)
