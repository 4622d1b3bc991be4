"""Plain tensors into the slots of a pool and back: one program per (slot, head, block of rows).

Slots are distinct where they are written; numbers past the pool are skipped and noted in the fault flag. Nothing is
compiled for the value of an argument: what a compiler may assume about alignment is said by VECTOR and ALIGNED.
"""

import triton
import triton.language as tl

from flashstate.kernels.addressing import this_program
from flashstate.kernels.slots import load_seed, resolve_read, resolve_write
from flashstate.kernels.state_io import BEFORE_THE_FIRST_TOKEN, EVICT_FIRST, load_state, random_bits, store_state
from flashstate.kernels.tiles import form_of, tile_at
from flashstate.launch.kernel import kernel


@triton.jit
def plain_chunk(row_ptrs, stride, k, CHUNK: tl.constexpr, ALIGNED: tl.constexpr, STRIDED: tl.constexpr = False):
    """Pointers to chunk k of plain rows that start at `row_ptrs`, (rows, 1); ALIGNED: at multiples of 16 bytes.
    STRIDED: entries of a row are `stride` apart, and no neighbours."""
    offs = (k * CHUNK + tl.arange(0, CHUNK))[None, :]
    ptrs = row_ptrs + (offs.to(tl.int64) * stride if STRIDED else offs)
    if ALIGNED:  # said of what is computed here: of arguments the compiler forgets it
        ptrs = tl.multiple_of(ptrs, (1, 16))
    return ptrs


@kernel
def write_states_kernel(
    data_ptr, scale_ptr, slot_stride, scale_stride,
    values_ptr, stride_n, stride_h, stride_row, stride_col,
    slots_ptr, seed_ptr, stream,
    count_ptr,  # of rings, which are empty afterwards
    fault_ptr, num_slots, null,
    H: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, VECTOR: tl.constexpr,
    ALIGNED: tl.constexpr,  # every row of the values starts at a multiple of 16 bytes
    STRIDED: tl.constexpr,  # entries of such a row are no neighbours
    ROUNDING: tl.constexpr, ROUNDS: tl.constexpr, SHARED_SEED: tl.constexpr, TARGET: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNK: tl.constexpr,
    TRANSPOSED: tl.constexpr,  # whether the elements of a column are neighbours in the pool
    HEAD_STRIDE: tl.constexpr,  # from head to head of the pool; None: they lie side by side
):  # fmt: skip
    n, h, first_row = this_program(H, ROWS, BLOCK_ROWS)
    FORM: tl.constexpr = form_of(
        ROWS, COLS, BLOCK_ROWS, BLOCK_COLS, CHUNK, VECTOR, EVICT_FIRST, TARGET, TRANSPOSED, ROUNDING, ROUNDS,
        HEAD_STRIDE=HEAD_STRIDE,
    )  # fmt: skip
    slot = resolve_write((slots_ptr, 1), n, 0, n, True, (num_slots, null, fault_ptr))
    live = slot >= 0
    seed = load_seed(seed_ptr, slot, live, ROUNDING != "nearest", SHARED_SEED)
    tile = tile_at(h, first_row, FORM)

    rows = (first_row + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    row_ptrs = values_ptr + n.to(tl.int64) * stride_n + h.to(tl.int64) * stride_h + rows[:, None] * stride_row
    v = ()
    for k in tl.static_range(len(tile.masks)):
        ptrs = plain_chunk(row_ptrs, stride_col, k, CHUNK, ALIGNED, STRIDED)
        v = v + (tl.load(ptrs, mask=tile.masks[k], other=0.0).to(tl.float32),)

    random = random_bits((seed, BEFORE_THE_FIRST_TOKEN, stream), tile, data_ptr.dtype.element_ty, FORM)
    pool, offsets = (data_ptr, scale_ptr, slot_stride, scale_stride), (slot * slot_stride, slot * scale_stride)
    store_state(pool, offsets, live, tile, v, random, FORM)
    if count_ptr is not None:
        tl.store(count_ptr + slot, 0, mask=live & (h == 0) & (first_row == 0))


@kernel
def read_states_kernel(
    data_ptr, scale_ptr, slot_stride, scale_stride,
    out_ptr,  # float32, contiguous, at a multiple of 16 bytes
    slots_ptr, fault_ptr, num_slots, null,
    H: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, VECTOR: tl.constexpr, TARGET: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNK: tl.constexpr,
    TRANSPOSED: tl.constexpr,  # whether the elements of a column are neighbours in the pool
    HEAD_STRIDE: tl.constexpr,  # from head to head of the pool; None: they lie side by side
):  # fmt: skip
    n, h, first_row = this_program(H, ROWS, BLOCK_ROWS)
    FORM: tl.constexpr = form_of(
        ROWS, COLS, BLOCK_ROWS, BLOCK_COLS, CHUNK, VECTOR, EVICT_FIRST, TARGET, TRANSPOSED, HEAD_STRIDE=HEAD_STRIDE
    )
    slot = resolve_read((slots_ptr, 1, 1, None), n, (num_slots, null, fault_ptr))
    live = slot >= 0
    tile = tile_at(h, first_row, FORM)
    pool = (data_ptr, scale_ptr, slot_stride, scale_stride)
    scale, v = load_state(pool, slot, live, tile, FORM)
    row_ptrs = out_ptr + (n.to(tl.int64) * (H * ROWS) + tile.rows)[:, None] * COLS
    for k in tl.static_range(len(v)):
        values = tl.where(live, v[k] * scale, 0.0)
        tl.store(plain_chunk(row_ptrs, 1, k, CHUNK, COLS % 4 == 0), values, mask=tile.masks[k])
