"""Small kernels that show one device function each; importing this imports triton."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, globaltimer

from flashstate.kernels.mamba2_at_once import in_copies
from flashstate.kernels.ptx import divide_ptx, has_ptx, per_thread_ptx
from flashstate.kernels.state_io import (
    EVICT_FIRST,
    largest_stored,
    load_state,
    store_slot,
    to_code,
    to_float,
    to_nearest,
)
from flashstate.kernels.tiles import form_of, tile_at


@triton.jit
def per_thread_kernel(given_ptr, found_ptr):
    i, offs = tl.program_id(0), tl.arange(0, 64)
    found = per_thread_ptx(tl.load(given_ptr + i))
    tl.store(found_ptr + i * 64 + offs, tl.full([64], 0, found.dtype) + found)


@triton.jit
def encode_kernel(
    stored_ptr, scale_ptr, value_ptr, random_ptr,
    ROWS: tl.constexpr, COLS: tl.constexpr, ROUNDING: tl.constexpr, TARGET: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """store_slot on (slots, ROWS, COLS): one program per tile and slot. The last slot is none."""
    slot = tl.program_id(1)
    FORM: tl.constexpr = form_of(
        ROWS, COLS, BLOCK_ROWS, BLOCK_COLS, CHUNK, 1, EVICT_FIRST, TARGET, False, ROUNDING
    )  # fmt: skip
    tile = tile_at(0, tl.program_id(0) * BLOCK_ROWS, FORM)
    offs = slot * ROWS * COLS + tile.first + tile.offsets
    v, random = (), ()  # of chunks; Triton's compiler appends to a tuple only by a sum
    for k in tl.static_range(len(tile.masks)):
        v = v + (tl.load(value_ptr + offs + k * CHUNK, mask=tile.masks[k], other=0.0),)  # noqa: RUF005
        bits = tl.load(random_ptr + offs + k * CHUNK, mask=tile.masks[k], other=0).to(tl.uint32)
        random = random + (arranged(bits, stored_ptr.dtype.element_ty, TARGET),)  # noqa: RUF005
    to = tl.where(slot < tl.num_programs(1) - 1, slot, -1)
    store_slot((stored_ptr, scale_ptr, ROWS * COLS, ROWS), to, tile, v, random, FORM)


@triton.jit
def arranged(random, dtype: tl.constexpr, TARGET: tl.constexpr):
    """Sixteen random bits as random_bits gives them for this format and this target."""
    return random << 8 if dtype.primitive_bitwidth == 8 and has_ptx(TARGET) else random


@triton.jit
def decode_kernel(
    value_ptr, stored_ptr, scale_ptr, ROWS: tl.constexpr, COLS: tl.constexpr,
    TARGET: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """load_state of (slots, ROWS, COLS): one program per tile and slot."""
    slot = tl.program_id(1)
    FORM: tl.constexpr = form_of(ROWS, COLS, BLOCK_ROWS, BLOCK_COLS, CHUNK, 1, EVICT_FIRST, TARGET)
    tile = tile_at(0, tl.program_id(0) * BLOCK_ROWS, FORM)
    pool = (stored_ptr, scale_ptr, ROWS * COLS, ROWS)
    scale, v = load_state(pool, slot, slot >= 0, tile, FORM)
    offs = slot * ROWS * COLS + tile.first + tile.offsets
    for k in tl.static_range(len(v)):
        tl.store(value_ptr + offs + k * CHUNK, v[k] * scale, mask=tile.masks[k])


@triton.jit
def count_differences_kernel(
    count_ptr, E: tl.constexpr, dtype: tl.constexpr, ROUNDING: tl.constexpr, TARGET: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """How many float32 values the instructions of TARGET round to other bytes than portable arithmetic does.

    One program per BLOCK values, in the order of their bits, each with random bits of its own. To formats without a
    scale all but NaN. To formats with one (uint8 is float8) the product of E, at most 1, with every value up to the
    format's largest.
    """
    bits = tl.program_id(0).to(tl.uint32) * BLOCK + tl.arange(0, BLOCK).to(tl.uint32)
    v = bits.to(tl.float32, bitcast=True)
    random = (bits * 0x9E3779B1) >> 16  # neighbours draw bits far apart
    if dtype == tl.bfloat16 and ROUNDING == "nearest":
        v = tl.where(v == v, v, 0.0)
        hardware = to_nearest(v, dtype, "portable").to(tl.uint16, bitcast=True)
        integer = to_nearest(v, dtype, "interpreter")
    elif dtype == tl.bfloat16 or dtype == tl.float16:
        v = tl.where(v == v, v, 0.0)
        hardware = to_float(v, random, dtype, ROUNDING, TARGET).to(tl.uint16, bitcast=True)
        integer = to_float(v, random, dtype, ROUNDING, "portable")
    else:
        v = tl.where(tl.abs(v) <= largest_stored(dtype), v, 0.0)
        e, stored = tl.full([BLOCK], E, tl.float32), v == v
        hardware = to_code(v, e, stored, arranged(random, dtype, TARGET), dtype, ROUNDING, TARGET)
        integer = to_code(v, e, stored, random, dtype, ROUNDING, "portable")
    different = tl.sum((hardware != integer).to(tl.int32), axis=0)
    tl.atomic_add(count_ptr, different, mask=different > 0)


@triton.jit
def count_other_quotients_kernel(count_ptr, a, exponent, BLOCK: tl.constexpr):
    """How many divisors with this exponent divide_ptx divides `a` by otherwise than div_rn does: one per mantissa."""
    mantissa = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b = ((exponent << 23) + mantissa).to(tl.float32, bitcast=True)
    a = tl.zeros([BLOCK], tl.float32) + a
    different = tl.sum((divide_ptx(a, b) != tl.div_rn(a, b)).to(tl.int32), axis=0)
    tl.atomic_add(count_ptr, different, mask=different > 0)


@triton.jit
def copies_kernel(packed_ptr, x_ptr, TERMS: tl.constexpr):
    """What stands for two copies of eight tokens, (16, 16), in so many terms."""
    place = tl.arange(0, 16)
    x = tl.load(x_ptr + (place % 8)[:, None] * 16 + place[None, :])
    packed = in_copies(x, 0, 8, TERMS, "portable")
    for i in tl.static_range(len(packed)):
        tl.store(packed_ptr + i * 256 + place[:, None] * 16 + place[None, :], packed[i].to(tl.float32))


@triton.jit
def late_copy_kernel(from_ptr, to_ptr, count, NANOSECONDS: tl.constexpr, BLOCK: tl.constexpr):
    """Let the next kernel start at once, and copy `count` elements after NANOSECONDS."""
    gdc_launch_dependents()
    begin = globaltimer()
    now = begin
    while now - begin < NANOSECONDS:
        now = globaltimer()
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(to_ptr + at, tl.load(from_ptr + at, mask=at < count), mask=at < count)
