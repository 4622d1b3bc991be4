"""Small kernels that show one device function each; importing this imports triton."""

import triton
import triton.language as tl

from flashstate.kernels.state_io import load_state, philox, store_state, tile_at, to_float8, to_nearest


@triton.jit
def philox_kernel(ours_ptr, tritons_ptr, counter_ptr, seed_ptr, c1, c2, ROUNDS: tl.constexpr):
    offs = tl.arange(0, 64)
    seed = tl.load(seed_ptr)
    c0 = tl.load(counter_ptr + offs).to(tl.uint32)
    o0, o1, o2, o3 = philox(seed, c0, c1, c2, 0, ROUNDS)
    zero = tl.zeros([64], tl.uint32)
    t0, t1, t2, t3 = tl.philox(seed, c0, (zero + c1).to(tl.uint32), (zero + c2).to(tl.uint32), zero, ROUNDS)
    _store_words(ours_ptr, offs, o0, o1, o2, o3)
    _store_words(tritons_ptr, offs, t0, t1, t2, t3)


@triton.jit
def _store_words(ptr, offs, w0, w1, w2, w3):
    tl.store(ptr + offs, w0.to(tl.int64))
    tl.store(ptr + 64 + offs, w1.to(tl.int64))
    tl.store(ptr + 128 + offs, w2.to(tl.int64))
    tl.store(ptr + 192 + offs, w3.to(tl.int64))


@triton.jit
def encode_kernel(
    stored_ptr, scale_ptr, value_ptr, random_ptr, rows,
    COLS: tl.constexpr, ROUNDING: tl.constexpr, TARGET: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """store_state on (slots, rows, COLS): one program per tile and slot. The last slot is not live."""
    slot = tl.program_id(1)
    tile = tile_at(tl.program_id(0) * BLOCK_ROWS, rows, COLS, BLOCK_ROWS, BLOCK_COLS, CHUNK)
    offs = slot * rows * COLS + tile[0] + tile[1]
    v, random = (), ()
    for k in tl.static_range(len(tile[3])):
        v = v + (tl.load(value_ptr + offs + k * CHUNK, mask=tile[3][k], other=0.0),)
        random = random + (tl.load(random_ptr + offs + k * CHUNK, mask=tile[3][k], other=0).to(tl.uint32),)
    live = slot < tl.num_programs(1) - 1
    store_state(
        stored_ptr, scale_ptr, slot * rows * COLS, slot * rows, live, tile, v, random, ROUNDING, 1, TARGET,
    )  # fmt: skip


@triton.jit
def decode_kernel(
    value_ptr, stored_ptr, scale_ptr, rows,
    COLS: tl.constexpr, TARGET: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """load_state of (slots, rows, COLS): one program per tile and slot."""
    slot = tl.program_id(1)
    tile = tile_at(tl.program_id(0) * BLOCK_ROWS, rows, COLS, BLOCK_ROWS, BLOCK_COLS, CHUNK)
    v = load_state(stored_ptr, scale_ptr, slot * rows * COLS, slot * rows, slot >= 0, tile, COLS, 1, TARGET)
    for k in tl.static_range(len(v)):
        tl.store(value_ptr + slot * rows * COLS + tile[0] + k * CHUNK + tile[1], v[k], mask=tile[3][k])


@triton.jit
def count_differences_kernel(count_ptr, FLOAT8: tl.constexpr, BLOCK: tl.constexpr):
    """How many float32 values the hardware rounds to nearest as other bytes than integer arithmetic does.

    One program per BLOCK values, in the order of their bits. To float8 only those that to_float8 is for.
    """
    bits = tl.program_id(0).to(tl.uint32) * BLOCK + tl.arange(0, BLOCK).to(tl.uint32)
    v = bits.to(tl.float32, bitcast=True)
    if FLOAT8:
        v = tl.where(tl.abs(v) <= 448.0, v, 0.0)
        one, stored = tl.full([BLOCK], 1.0, tl.float32), bits >= 0
        hardware = to_float8(v, one, stored, 0, "nearest", "sm_89")
        integer = to_float8(v, one, stored, 0, "nearest", "portable")
    else:
        v = tl.where(v == v, v, 0.0)
        hardware = to_nearest(v, tl.bfloat16, "portable").to(tl.uint16, bitcast=True)
        integer = to_nearest(v, tl.bfloat16, "interpreter")
    different = tl.sum((hardware != integer).to(tl.int32), axis=0)
    tl.atomic_add(count_ptr, different, mask=different > 0)
