"""Reading and writing stored states: the only device code that knows a format or a rounding.

The functions to_* and random_bits have twins in state/formats.py and state/rounding.py that give the same bytes.
Formats that Triton's interpreter converts wrongly (bfloat16, float8) are read and written through their bits, or by an
instruction that does the same. A float8 pool is passed as uint8: a float8 pointer does not compile for sm_80.

TARGET says which instructions there are: "interpreter", "portable", "sm_80" (NVIDIA: PTX, pairs of float16) or "sm_89"
(also float8 conversions).

States are not read again before many others have been, so their lines need not stay in the caches. HINT says how that
is said: "evict_first", of loads and of stores, or "streaming", of stores alone and without an eviction policy, which
takes instructions. For `gated_delta_step` on an H200 the first is faster for one token per call, the second for several
(docs/log.md).
"""

import triton
import triton.language as tl

from flashstate.kernels.ptx import (
    divide_ptx,
    from_bfloat16_ptx,
    prefetch_ptx,
    to_bfloat16_stochastic_ptx,
    to_float8_ptx,
    to_float8_stochastic_hw,
    to_float8_stochastic_ptx,
    to_float16_stochastic_hw,
    to_float16_stochastic_ptx,
    to_integer_ptx,
    to_integer_stochastic_ptx,
)

LINE = tl.constexpr(128)  # bytes of a cache line


@triton.jit
def tile_at(
    h, first_row,
    ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNK: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """The tile of whole rows of head h from `first_row` on: what load_state and store_state need to know of it. A slot
    has fewer than 2^31 elements; TRANSPOSED: those of a column are neighbours in it.

    A tile is a tuple of its chunks, (BLOCK_ROWS, CHUNK) each: threads share a row only within a chunk, and every thread
    walks along its rows from chunk to chunk.
    """
    first, end = h * ROWS + first_row, h * ROWS + ROWS  # rows, within the slot
    rows = first + tl.arange(0, BLOCK_ROWS)
    mask_rows = rows < end
    cols = tl.arange(0, CHUNK)
    masks = ()
    for k in tl.static_range(BLOCK_COLS // CHUNK):
        masks = masks + (mask_rows[:, None] & (k * CHUNK + cols < COLS)[None, :],)
    if TRANSPOSED:
        offsets = tl.arange(0, BLOCK_ROWS)[:, None] + cols[None, :] * ROWS  # of a chunk, from its first element
        return h * (ROWS * COLS) + first_row, offsets, rows, masks, mask_rows, (first_row, ROWS, COLS)
    else:
        offsets = tl.arange(0, BLOCK_ROWS)[:, None] * COLS + cols[None, :]
        return first * COLS, offsets, rows, masks, mask_rows, ()


@triton.jit
def tile_ptr(ptr, offset, tile, VECTOR: tl.constexpr):
    """Pointer to the first element of a tile of the slot at `offset`, where accesses of VECTOR elements are aligned."""
    slot_ptr = tl.multiple_of(ptr + offset, VECTOR * ptr.dtype.element_ty.primitive_bitwidth // 8)
    return slot_ptr + tile[0]


@triton.jit
def chunk_at(tile_start, tile, k, VECTOR: tl.constexpr):
    """Pointers to chunk k of a tile that starts there, and which of them exist: rows and columns as the tile has them,
    or of a transposed state (groups, columns, VECTOR rows of each group). So a thread has the rows of a group and its
    neighbours have other columns; of rows and columns the compiler would split rows over warps."""
    _, offsets, _, masks, _, transposed = tile
    BLOCK_ROWS: tl.constexpr = offsets.shape[0]
    CHUNK: tl.constexpr = offsets.shape[1]
    if len(transposed) == 0:
        return tile_start + k * CHUNK + offsets, masks[k]
    else:
        first_row, ROWS, COLS = transposed
        group: tl.constexpr = min(VECTOR, BLOCK_ROWS)
        rows = (tl.arange(0, BLOCK_ROWS // group) * group)[:, None, None] + tl.arange(0, group)[None, None, :]
        cols = k * CHUNK + tl.arange(0, CHUNK)[None, :, None]
        return tile_start + (rows + cols * ROWS), (first_row + rows < ROWS) & (cols < COLS)


@triton.jit
def as_rows(chunk):
    """A chunk of rows and columns, from one as chunk_at has it."""
    if len(chunk.shape) == 2:
        return chunk
    else:
        return tl.reshape(tl.permute(chunk, (0, 2, 1)), (chunk.shape[0] * chunk.shape[2], chunk.shape[1]))


@triton.jit
def as_accessed(chunk, shape: tl.constexpr):
    """The inverse of as_rows, for a chunk of that shape."""
    if len(shape) == 2:
        return chunk
    else:
        return tl.permute(tl.reshape(chunk, (shape[0], shape[2], shape[1])), (0, 2, 1))


@triton.jit
def prefetch_rows(
    ptr, offset, live, h, first_row, COUNT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, TARGET: tl.constexpr
):  # fmt: skip
    """Ask for COUNT rows of head h from `first_row` on, of the slot at `offset`, to come to the L2 cache; on NVIDIA."""
    if TARGET == "sm_80" or TARGET == "sm_89":
        per_line: tl.constexpr = LINE // (ptr.dtype.element_ty.primitive_bitwidth // 8)
        lines = tl.arange(0, triton.next_power_of_2(triton.cdiv(COUNT * COLS, per_line))) * per_line
        exists = live & (lines < tl.minimum(COUNT, ROWS - first_row) * COLS)
        prefetch_ptx(ptr + offset + (h * ROWS + first_row) * COLS + lines, exists)


@triton.jit
def load_scale(ptr, offset, live, tile):
    """What the rows of a tile that load_state gives are to be multiplied with: (rows, 1), or 1."""
    _, _, rows, _, mask_rows, _ = tile
    if ptr is None:
        return 1.0
    else:
        mask_rows = tl.where(live, mask_rows, False)
        return tl.load(ptr + offset + rows, mask=mask_rows, eviction_policy="evict_first")[:, None]


@triton.jit
def load_state(
    ptr, offset, live, tile,
    COLS: tl.constexpr, VECTOR: tl.constexpr, TARGET: tl.constexpr, HINT: tl.constexpr, WIDENING: tl.constexpr,
):  # fmt: skip
    """What is stored in a tile of the slot at `offset`, in float32 and without its scale: undefined in rows where
    masked, zero in columns that do not exist. WIDENING: the TARGET by whose instructions bfloat16 is converted."""
    dtype: tl.constexpr = ptr.dtype.element_ty
    codes = load_codes(ptr, offset, live, tile, COLS, VECTOR, HINT)
    return decoded(codes, dtype, WIDENING if dtype == tl.bfloat16 else TARGET)


@triton.jit
def load_codes(
    ptr, offset, live, tile, COLS: tl.constexpr, VECTOR: tl.constexpr, HINT: tl.constexpr, WHOLE: tl.constexpr = False
):  # fmt: skip
    """The same as it is stored, bfloat16 as its bits. WHOLE: the slot is live, and all rows and columns exist."""
    _, offsets, _, masks, _, _ = tile
    CHUNK: tl.constexpr = offsets.shape[1]
    tile_start = tile_ptr(ptr, offset, tile, VECTOR)
    if ptr.dtype.element_ty == tl.bfloat16:
        tile_start = tile_start.to(tl.pointer_type(tl.uint16), bitcast=True)
    policy: tl.constexpr = "evict_first" if HINT == "evict_first" else ""
    codes = ()
    for k in tl.static_range(len(masks)):
        ptrs, mask = chunk_at(tile_start, tile, k, VECTOR)
        if WHOLE:
            code = as_rows(tl.load(ptrs, eviction_policy=policy))
        else:
            code = as_rows(tl.load(ptrs, mask=tl.where(live, mask, False), eviction_policy=policy))
        if COLS < (k + 1) * CHUNK:
            code = tl.where(masks[k], code, 0).to(code.dtype)
        codes = codes + (code,)
    return codes


@triton.jit
def decoded(codes, dtype: tl.constexpr, TARGET: tl.constexpr):
    """A tile in float32, of what is stored."""
    values = ()
    for k in tl.static_range(len(codes)):
        values = values + (from_code(codes[k], dtype, TARGET),)
    return values


@triton.jit
def from_code(code, dtype: tl.constexpr, TARGET: tl.constexpr):
    """A chunk in float32, of what is stored."""
    if dtype == tl.bfloat16 and (TARGET == "sm_80" or TARGET == "sm_89"):
        return from_bfloat16_ptx(code)
    elif dtype == tl.bfloat16:
        return (code.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return from_float8(code, TARGET) if dtype == tl.uint8 else code.to(tl.float32)


@triton.jit
def store_state(
    ptr, scale_ptr, offset, scale_offset, live, tile, v, random,
    ROUNDING: tl.constexpr, VECTOR: tl.constexpr, TARGET: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    """Round the float32 tile `v`, which is zero in columns that do not exist, and store it."""
    e, stored = None, None
    if scale_ptr is not None:
        e, stored = store_scale(scale_ptr, scale_offset, live, tile, v, ptr.dtype.element_ty, TARGET, HINT)
    for k in tl.static_range(len(v)):
        store_chunk(ptr, offset, live, tile, k, v[k], e, stored, random[k], ROUNDING, VECTOR, TARGET, HINT)


@triton.jit
def store_scale(
    ptr, offset, live, tile, v, dtype: tl.constexpr, TARGET: tl.constexpr, HINT: tl.constexpr
):  # fmt: skip
    """Store the scales of the rows of a tile; what store_chunk needs of them."""
    _, _, rows, _, mask_rows, _ = tile
    policy: tl.constexpr = "evict_first" if HINT == "evict_first" else ""
    modifier: tl.constexpr = ".cs" if HINT == "streaming" else ""
    e, scale, stored = to_scaled(v, dtype, TARGET)
    mask = tl.where(live, mask_rows, False)
    tl.store(ptr + offset + rows, scale, mask=mask, cache_modifier=modifier, eviction_policy=policy)
    return e[:, None], stored[:, None]


@triton.jit
def store_chunk(
    ptr, offset, live, tile, k: tl.constexpr, v, e, stored, random,
    ROUNDING: tl.constexpr, VECTOR: tl.constexpr, TARGET: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    """Round chunk k of a tile, and store it. `e` and `stored`: from store_scale; None in formats without scales."""
    policy: tl.constexpr = "evict_first" if HINT == "evict_first" else ""
    modifier: tl.constexpr = ".cs" if HINT == "streaming" else ""
    code = to_code(v, e, stored, random, ptr.dtype.element_ty, ROUNDING, TARGET)
    ptrs, mask = chunk_at(tile_ptr(ptr, offset, tile, VECTOR), tile, k, VECTOR)
    ptrs, code = ptrs.to(tl.pointer_type(code.dtype), bitcast=True), as_accessed(code, ptrs.shape)
    tl.store(ptrs, code, mask=tl.where(live, mask, False), cache_modifier=modifier, eviction_policy=policy)


@triton.jit
def to_code(v, e, stored, random, dtype: tl.constexpr, ROUNDING: tl.constexpr, TARGET: tl.constexpr):
    """A chunk as it is stored."""
    if e is None:
        return to_float(v, random, dtype, ROUNDING, TARGET)
    elif dtype == tl.uint8:
        return to_float8(v, e, stored, random, ROUNDING, TARGET)
    else:
        return to_integer(v, e, stored, random, dtype, ROUNDING, TARGET)


@triton.jit
def load_seed(seed_ptr, slot, live, STOCHASTIC: tl.constexpr):
    """The seed of a slot, if anything is rounded with it. Load it before the state: it is there when random bits are to
    be drawn."""
    if seed_ptr is None or not STOCHASTIC:
        return 0
    else:
        return tl.load(seed_ptr + slot, mask=live, other=0)


@triton.jit
def random_bits(
    seed, tile, token, stream,
    COLS: tl.constexpr, VECTOR: tl.constexpr, ROUNDING: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Sixteen random bits for every element of a tile, as uint32; 0 if none are needed."""
    _, _, _, masks, _, _ = tile
    bits = ()
    for k in tl.static_range(len(masks)):
        bits = bits + (bits_of_chunk(seed, tile, k, token, stream, COLS, VECTOR, ROUNDING, ROUNDS),)
    return bits


@triton.jit
def bits_of_chunk(
    seed, tile, k: tl.constexpr, token, stream,
    COLS: tl.constexpr, VECTOR: tl.constexpr, ROUNDING: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Those of chunk k.

    Rows count within the slot: head * ROWS + row. One Philox call serves eight consecutive columns; word i of it holds
    columns 2i (low half) and 2i + 1. A thread makes the calls for as many neighbouring columns as it accesses at once.
    """
    _, offsets, rows, _, _, _ = tile
    calls: tl.constexpr = (COLS + 7) // 8  # per row
    per_thread: tl.constexpr = 2 if VECTOR == 16 else 1
    per_chunk: tl.constexpr = offsets.shape[1] // 8
    if ROUNDING == "nearest":
        return 0
    else:
        call = k * per_chunk + tl.arange(0, per_chunk // per_thread) * per_thread
        c0 = (rows[:, None] * calls + call[None, :]).to(tl.uint32)
        r0, r1, r2, r3 = philox(seed, c0, token, stream, 0, ROUNDS)
        if per_thread == 2:
            n0, n1, n2, n3 = philox(seed, c0 + 1, token, stream, 0, ROUNDS)
            r0, r1, r2, r3 = tl.join(r0, n0), tl.join(r1, n1), tl.join(r2, n2), tl.join(r3, n3)
        words = tl.join(tl.join(r0, r2), tl.join(r1, r3))  # (rows, calls, ..., 2, 2): r0 r1 r2 r3
        halves = tl.join(words & 0xFFFF, words >> 16)  # (rows, calls, ..., 2, 2, 2)
        return tl.reshape(halves, offsets.shape)


@triton.jit
def load_tile(
    pool, slot, live, tile, drawing, COLS: tl.constexpr, VECTOR: tl.constexpr, PER_COLUMNS: tl.constexpr,
    ROUNDING: tl.constexpr, ROUNDS: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    """What load_codes and load_scale give of a tile of a slot, and the random bits that it is rounded with later, drawn
    while it is on its way. `pool`: data, scales, and their strides between slots; `drawing`: seed, token and stream."""
    data_ptr, scale_ptr, slot_stride, scale_stride = pool
    seed, t, stream = drawing
    factor = load_scale(scale_ptr, slot * scale_stride, live, tile)
    codes = load_codes(data_ptr, slot * slot_stride, live, tile, COLS, VECTOR, HINT)
    return codes, factor, random_bits(seed, tile, t, stream, COLS, PER_COLUMNS, ROUNDING, ROUNDS)


@triton.jit
def philox(seed, c0, c1, c2, c3, ROUNDS: tl.constexpr):
    """Philox-4x32: four words per counter c0. The same words as tl.philox, with one wide multiply for each product
    where that has two: a float16 stochastic step is bound by instructions, and this saves one in eight."""
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    zero = tl.zeros(c0.shape, tl.uint32)
    w0, w1, w2, w3 = c0, (zero + c1).to(tl.uint32), (zero + c2).to(tl.uint32), (zero + c3).to(tl.uint32)
    for _ in tl.static_range(ROUNDS):
        p = w0.to(tl.uint64) * 0xD2511F53
        q = w2.to(tl.uint64) * 0xCD9E8D57
        w0 = (q >> 32).to(tl.uint32) ^ w1 ^ k0
        w2 = (p >> 32).to(tl.uint32) ^ w3 ^ k1
        w1 = q.to(tl.uint32)
        w3 = p.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return w0, w1, w2, w3


@triton.jit
def to_float(v, random, dtype: tl.constexpr, ROUNDING: tl.constexpr, TARGET: tl.constexpr):
    """float32 to float32, bfloat16 or float16."""
    if ROUNDING == "nearest":
        return to_nearest(v, dtype, TARGET)
    elif dtype == tl.bfloat16 and (TARGET == "sm_80" or TARGET == "sm_89"):
        return to_bfloat16_stochastic_ptx(v, random)
    elif dtype == tl.bfloat16:
        return to_bfloat16_stochastic(v, random)
    elif ROUNDING == "stochastic_hw":
        return to_float16_stochastic_hw(v, random)
    elif TARGET == "sm_80" or TARGET == "sm_89":
        return to_float16_stochastic_ptx(v, random)
    else:
        return to_float16_stochastic(v, random)


@triton.jit
def to_nearest(v, dtype: tl.constexpr, TARGET: tl.constexpr):
    """float32 to a float format, to nearest, ties to even."""
    if dtype == tl.bfloat16 and TARGET == "interpreter":
        bits = v.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return tl.where(v == v, rounded, 0x7FC0).to(tl.uint16)
    else:
        return v.to(dtype)


@triton.jit
def to_float16_stochastic(v, random):
    """float32 to float16, away from zero with the probability of the discarded fraction."""
    magnitude = tl.abs(v)
    bits = magnitude.to(tl.uint32, bitcast=True)
    code = ((bits + (random & 0x1FFF)) >> 13) - (112 << 10)  # 13 mantissa bits fewer, exponent bias 15
    subnormal = magnitude < 6.103515625e-05  # 2^-14; multiples of 2^-24: the code is the multiple; 16 bits of fraction
    fixed_point = (tl.where(subnormal, magnitude, 0.0) * 1099511627776.0).to(tl.uint32)  # 2^40
    code = tl.where(subnormal, (fixed_point + random) >> 16, code)
    code = tl.where(magnitude > 65504.0, 0x7BFF, code)  # rounding never makes an inf,
    code = tl.where(magnitude >= 65536.0, 0x7C00, code)  # but what is too large by a whole step is one
    code = tl.where(v == v, code, 0x7E00)
    sign = v.to(tl.uint32, bitcast=True) >> 16 & 0x8000
    return (code | sign).to(tl.uint16)


@triton.jit
def to_bfloat16_stochastic(v, random):
    """float32 to bfloat16, away from zero with the probability of the discarded fraction."""
    bits = v.to(tl.uint32, bitcast=True)
    random = tl.where((bits & 0x7FFFFFFF) < 0x7F7F0000, random, 0)  # from the largest finite value on: truncate
    return tl.where(v == v, (bits + random) >> 16, 0x7FC0).to(tl.uint16)


@triton.jit
def to_scaled(v, dtype: tl.constexpr, TARGET: tl.constexpr):
    """What rows are stored with, (rows,) each: the factor e that makes a row's largest magnitude the format's, rounded
    down so that no product exceeds it; the scale 1/e that undoes it; and whether the row is stored at all.

    A row below 2^-100 becomes zeros with scale 1, a row with a NaN or inf zeros with scale NaN.
    """
    largest: tl.constexpr = 32767.0 if dtype == tl.int16 else 127.0 if dtype == tl.int8 else 448.0
    amax = tl.abs(v[0])
    for k in tl.static_range(1, len(v)):
        amax = maximum_or_nan(amax, tl.abs(v[k]))
    amax = tl.reduce(amax, 1, maximum_or_nan)
    finite = amax < float("inf")
    normal = finite & (amax >= 7.888609052210118e-31)  # 2^-100
    amax = tl.where(normal, amax, largest)
    huge = tl.where(amax >= 18446744073709551616.0, 5.421010862427522e-20, 1.0)  # 2^64, 2^-64: no reciprocal is tiny
    e = divide(largest, amax * huge, TARGET) * huge
    e = tl.where(product_exceeds(e, amax, largest, TARGET), next_below(e), e)
    scale = tl.minimum(divide(1.0, e, TARGET), largest_scale(dtype))
    return e, tl.where(normal, scale, tl.where(finite, 1.0, float("nan"))), normal


@triton.jit
def divide(a: tl.constexpr, b, TARGET: tl.constexpr):
    """a / b, rounded to nearest, where b, its reciprocal and the quotient are normal."""
    a = tl.full(b.shape, a, tl.float32)
    if TARGET == "sm_80" or TARGET == "sm_89":
        return divide_ptx(a, b)
    else:
        return tl.div_rn(a, b)


@triton.jit
def maximum_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def product_exceeds(a, b, bound: tl.constexpr, TARGET: tl.constexpr):
    """Whether the exact product of two float32 is above a bound."""
    if TARGET == "interpreter":  # whose fma rounds twice
        return a.to(tl.float64) * b.to(tl.float64) > bound
    else:
        return tl.fma(a, b, -bound) > 0.0


@triton.jit
def next_below(v):
    """The next smaller of positive float32 values."""
    return (v.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True)


@triton.jit
def largest_scale(dtype: tl.constexpr):
    """The largest with which the format's largest value decodes to a finite one."""
    if dtype == tl.int16:
        return 1.0384909391779673e34
    elif dtype == tl.int8:
        return 2.6793883890187504e36
    else:
        return 7.595588094610019e35


@triton.jit
def to_integer(v, e, stored, random, dtype: tl.constexpr, ROUNDING: tl.constexpr, TARGET: tl.constexpr):
    """v * e to a whole number, from the exact product: to nearest even, or floor(v * e + (random | 1) / 65536)."""
    if TARGET == "sm_80" or TARGET == "sm_89":
        if ROUNDING == "nearest":
            return to_integer_ptx(v, e, stored, dtype)
        else:
            return to_integer_stochastic_ptx(v, e, stored, random, dtype)
    else:
        product = tl.where(stored, v.to(tl.float64) * e, 0.0)
        if ROUNDING == "nearest":
            # In [2^52, 2^53) neighbours are 1 apart: adding 1.5 * 2^52 rounds to nearest even.
            return ((product + 6755399441055744.0) - 6755399441055744.0).to(dtype)
        else:
            return ((tl.floor(product * 65536.0).to(tl.int64) + (random | 1)) >> 16).to(dtype)


@triton.jit
def to_float8(v, e, stored, random, ROUNDING: tl.constexpr, TARGET: tl.constexpr):
    """v * e, rounded to float32, to the bits of float8_e4m3fn."""
    if ROUNDING == "stochastic_hw":
        return to_float8_stochastic_hw(tl.where(stored, v * e, 0.0), random)
    elif ROUNDING == "stochastic" and (TARGET == "sm_80" or TARGET == "sm_89"):
        return to_float8_stochastic_ptx(v, e, stored, random)
    elif ROUNDING == "nearest" and TARGET == "sm_89":
        return to_float8_ptx(v, e, stored)
    else:
        w = tl.where(stored, v * e, 0.0)
        magnitude = tl.abs(w)
        bits = magnitude.to(tl.uint32, bitcast=True)
        subnormal = magnitude < 0.015625  # 2^-6; multiples of 2^-9: the code is the multiple
        if ROUNDING == "nearest":
            code = ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120 << 3)  # 20 mantissa bits fewer, exponent bias 7
            multiple = (magnitude + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000  # 2^14: neighbours 2^-9 apart
        else:
            code = ((bits + (random << 4)) >> 20) - (120 << 3)
            fixed_point = (tl.where(subnormal, magnitude, 0.0) * 33554432.0).to(tl.uint32)  # 2^25
            multiple = (fixed_point + random) >> 16
        sign = w.to(tl.uint32, bitcast=True) >> 24 & 0x80
        return (tl.where(subnormal, multiple, code) | sign).to(tl.uint8)


@triton.jit
def from_float8(code, TARGET: tl.constexpr):
    """The float32 values of float8_e4m3fn bits."""
    if TARGET == "sm_89":
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        bits = code.to(tl.uint32)
        value = ((bits & 0x80) << 24 | (bits & 0x7F) << 20).to(tl.float32, bitcast=True)
        value *= 1329227995784915872903807060280344576.0  # 2^120: the difference of the exponent biases
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), value)
