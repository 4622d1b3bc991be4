"""Reading and writing stored states: the only device code that knows a format or a rounding.

The functions to_* and random_bits have twins in state/formats.py and state/rounding.py that give the same bytes.
Formats that Triton's interpreter converts wrongly (bfloat16, float8) are read and written through their bits, or by an
instruction that does the same. A float8 pool is passed as uint8: a float8 pointer does not compile for sm_80.

TARGET says which instructions there are: "interpreter", "portable", "sm_80" (NVIDIA: PTX, pairs of float16) or "sm_89"
(also float8 conversions).

States are not read again before many others have been, so their lines need not stay in the caches. HINT says how that
is said: EVICT_FIRST, of loads and of stores, or STREAMING, of stores alone and without an eviction policy, which takes
instructions. For `gated_delta_step` on an H200 the first is faster for one token per call, the second for several
(docs/log.md).

A pool is a tuple: its data and its scales, which may be None, and their strides between slots. `drawing` is what
random bits are drawn for: seed, token and stream.
"""

import triton
import triton.language as tl

from flashstate.kernels import ptx
from flashstate.kernels.functions import divide, maximum_or_nan, philox, product_exceeds
from flashstate.kernels.ptx import LINE
from flashstate.kernels.tensor_cores import terms_of
from flashstate.kernels.tiles import as_accessed, as_rows, chunk_at, first_element

EVICT_FIRST, STREAMING = tl.constexpr("evict_first"), tl.constexpr("streaming")
BEFORE_THE_FIRST_TOKEN = tl.constexpr(0xFFFFFFFF)  # token -1 in the counter of random bits: no step draws them


@triton.constexpr_function
def state_bytes(dtype, elements):
    """Bytes of so many stored elements, without scales."""
    return elements * dtype.primitive_bitwidth // 8


@triton.constexpr_function
def update_terms(dtype, x_dtype):
    """How many bfloat16 stand for each value that tensor cores add to a state, of inputs of that dtype: as much as
    float32 has, or enough for 16 bits."""
    return 3 if dtype == tl.float32 or dtype == tl.int16 or x_dtype == tl.float32 else 2


@triton.constexpr_function
def operand_width(dtype, AT_ONCE, TARGET=""):
    """The WIDTH of as_operand for what is stored. AT_ONCE: it is multiplied as it was loaded; with a TARGET, by way of
    opaque_terms."""
    opaque = TARGET in ("sm_80", "sm_89")
    return 4 if dtype.primitive_bitwidth == 8 and AT_ONCE and not opaque else 2


@triton.jit
def opaque_terms(code, dtype: tl.constexpr, TERMS: tl.constexpr, TARGET: tl.constexpr):
    """What terms_of_code gives, but of 8 bits such that the compiler does not see of how many it comes."""
    if dtype == tl.int8 and ptx.has_ptx(TARGET) and TERMS > 0:
        return (ptx.int8_to_bfloat16_ptx(code),)
    elif dtype == tl.uint8 and ptx.has_ptx(TARGET):
        return terms_of_code(ptx.hidden_ptx(code), dtype, TERMS, TARGET)
    else:
        return terms_of_code(code, dtype, TERMS, TARGET)


@triton.jit
def terms_of_code(code, dtype: tl.constexpr, TERMS: tl.constexpr, TARGET: tl.constexpr):
    """What is stored, without its scale, as operands of tensor cores: at most TERMS, and no more than it has bits."""
    if dtype == tl.bfloat16 and TARGET != "interpreter" and TERMS > 0:
        return (code.to(tl.bfloat16, bitcast=True),)
    else:
        few: tl.constexpr = min(TERMS, 1) if dtype.primitive_bitwidth == 8 else TERMS
        return terms_of(from_code(code, dtype, TARGET), few, TARGET)


@triton.jit
def tile_ptr(ptr, offset, tile, FORM: tl.constexpr):
    """Pointer to the first element of a tile of the slot at `offset`, where accesses of VECTOR elements are aligned."""
    return tl.multiple_of(ptr + offset, state_bytes(ptr.dtype.element_ty, FORM.VECTOR)) + tile.first


@triton.jit
def prefetch_rows(ptr, offset, live, h, first_row, COUNT: tl.constexpr, FORM: tl.constexpr):
    """Ask for COUNT rows of head h from `first_row` on, of the slot at `offset`, to come to the L2 cache; on NVIDIA."""
    if ptx.has_ptx(FORM.TARGET):
        per_line: tl.constexpr = LINE // state_bytes(ptr.dtype.element_ty, 1)
        lines = tl.arange(0, triton.next_power_of_2(triton.cdiv(COUNT * FORM.COLS, per_line))) * per_line
        exists = live & (lines < tl.minimum(COUNT, FORM.ROWS - first_row) * FORM.COLS)
        ptx.prefetch_ptx(ptr + offset + first_element(h, first_row, FORM) + lines, exists)


@triton.jit
def load_codes(pool, slot, live, tile, FORM: tl.constexpr, WHOLE: tl.constexpr = False):
    """What the rows of a tile of a slot are to be multiplied with once they are decoded, (rows, 1) or 1, and what is
    stored in it, bfloat16 as its bits: undefined in rows where masked, zero in columns that do not exist. WHOLE: the
    slot is live, and all rows and columns exist."""
    ptr, scale_ptr, slot_stride, scale_stride = pool
    factor = 1.0
    if scale_ptr is not None:
        offset, mask = slot * scale_stride, tl.where(live, tile.mask_rows, False)
        factor = tl.load(scale_ptr + offset + tile.rows, mask=mask, eviction_policy="evict_first")[:, None]
    tile_start = tile_ptr(ptr, slot * slot_stride, tile, FORM)
    if ptr.dtype.element_ty == tl.bfloat16:
        tile_start = tile_start.to(tl.pointer_type(tl.uint16), bitcast=True)
    policy: tl.constexpr = "evict_first" if FORM.HINT == "evict_first" else ""
    codes = ()
    for k in tl.static_range(len(tile.masks)):
        ptrs, mask = chunk_at(tile_start, tile, k, FORM)
        exists = None if WHOLE else tl.where(live, mask, False)
        code = as_rows(tl.load(ptrs, mask=exists, eviction_policy=policy))
        if FORM.COLS < (k + 1) * FORM.CHUNK:
            code = tl.where(tile.masks[k], code, 0).to(code.dtype)
        codes = codes + (code,)
    return factor, codes


@triton.jit
def load_state(pool, slot, live, tile, FORM: tl.constexpr):
    """What load_codes gives of a tile of a slot, but in float32."""
    dtype: tl.constexpr = pool[0].dtype.element_ty
    factor, codes = load_codes(pool, slot, live, tile, FORM)
    return factor, decoded(codes, dtype, FORM.WIDENING if dtype == tl.bfloat16 else FORM.TARGET)


@triton.jit
def load_tile(pool, slot, live, tile, drawing, FORM: tl.constexpr):
    """What load_codes gives of a tile, and the random bits it is rounded with later, drawn while it is on its way."""
    factor, codes = load_codes(pool, slot, live, tile, FORM)
    return factor, codes, random_bits(drawing, tile, pool[0].dtype.element_ty, FORM)


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
    if dtype == tl.bfloat16 and ptx.has_ptx(TARGET):
        return ptx.from_bfloat16_ptx(code)
    elif dtype == tl.bfloat16:
        return (code.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return from_float8(code, TARGET) if dtype == tl.uint8 else code.to(tl.float32)


@triton.jit
def store_slot(pool, slot, tile, v, random, FORM: tl.constexpr):
    """Round the float32 tile `v`, zero in columns that do not exist, and store it in a slot unless that is -1."""
    _, _, slot_stride, scale_stride = pool
    store_state(pool, (slot * slot_stride, slot * scale_stride), slot >= 0, tile, v, random, FORM)


@triton.jit
def store_state(pool, offsets, live, tile, v, random, FORM: tl.constexpr):
    """Round the float32 tile `v`, zero in columns that do not exist, and store it at these offsets."""
    offset, scale_offset = offsets
    e, stored = None, None
    if pool[1] is not None:
        e, stored = store_scale(pool, scale_offset, live, tile, v, FORM)
    for k in tl.static_range(len(v)):
        store_chunk(pool[0], offset, live, tile, k, v[k], e, stored, random[k], FORM)


@triton.jit
def store_scale(pool, offset, live, tile, v, FORM: tl.constexpr):
    """Store the scales of the rows of a tile; what store_chunk needs of them."""
    e, scale, stored = to_scaled(v, pool[0].dtype.element_ty, FORM.TARGET)
    store_hinted(pool[1] + offset + tile.rows, scale, FORM, mask=tl.where(live, tile.mask_rows, False))
    return e[:, None], stored[:, None]


@triton.jit
def store_chunk(ptr, offset, live, tile, k: tl.constexpr, v, e, stored, random, FORM: tl.constexpr):
    """Round chunk k of a tile, and store it. `e` and `stored`: from store_scale; None in formats without scales."""
    code = to_code(v, e, stored, random, ptr.dtype.element_ty, FORM.ROUNDING, FORM.TARGET)
    store_code(ptr, offset, live, tile, k, code, FORM)


@triton.jit
def store_code(ptr, offset, live, tile, k: tl.constexpr, code, FORM: tl.constexpr):
    """Store chunk k of a tile that was rounded."""
    ptrs, mask = chunk_at(tile_ptr(ptr, offset, tile, FORM), tile, k, FORM)
    ptrs, code = ptrs.to(tl.pointer_type(code.dtype), bitcast=True), as_accessed(code, ptrs.shape)
    store_hinted(ptrs, code, FORM, mask=tl.where(live, mask, False))


@triton.jit
def store_rounded(pool, slot, goes, tile, v, drawing, FORM: tl.constexpr):
    """Round the float32 tile `v`, zero in columns that do not exist, and store it in a slot where it `goes`. What
    load_codes gives of that, stored or not; random bits are drawn chunk by chunk."""
    ptr, scale_ptr, slot_stride, scale_stride = pool
    dtype: tl.constexpr = ptr.dtype.element_ty
    factor, e, stored = 1.0, None, None
    if scale_ptr is not None:
        e, scale, stored = to_scaled(v, dtype, FORM.TARGET)
        mask = tl.where(goes, tile.mask_rows, False)
        store_hinted(scale_ptr + slot * scale_stride + tile.rows, scale, FORM, mask=mask)
        factor, e, stored = scale[:, None], e[:, None], stored[:, None]
    codes = ()
    for k in tl.static_range(len(v)):
        random = bits_of_chunk(drawing, tile, k, dtype, FORM)
        code = to_code(v[k], e, stored, random, dtype, FORM.ROUNDING, FORM.TARGET)
        store_code(ptr, slot * slot_stride, goes, tile, k, code, FORM)
        if FORM.ROUNDING != "nearest" and ptx.has_ptx(FORM.TARGET):  # random bits would change the order of sums
            code = ptx.hidden_ptx(code)
        codes = codes + (as_loaded(code, dtype),)
    return factor, codes


@triton.jit
def as_loaded(code, dtype: tl.constexpr):
    """A chunk that was rounded, as load_codes gives it."""
    if dtype == tl.bfloat16:
        return code.to(tl.uint16, bitcast=True)
    elif dtype == tl.float16:
        return code.to(tl.float16, bitcast=True)
    else:
        return code


@triton.jit
def store_hinted(ptrs, values, FORM: tl.constexpr, mask):
    """Store values that are not needed soon."""
    policy: tl.constexpr = "evict_first" if FORM.HINT == "evict_first" else ""
    modifier: tl.constexpr = ".cs" if FORM.HINT == "streaming" else ""
    tl.store(ptrs, values, mask=mask, cache_modifier=modifier, eviction_policy=policy)


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
def random_bits(drawing, tile, dtype: tl.constexpr, FORM: tl.constexpr, IN_LOOP: tl.constexpr = False):
    """Sixteen random bits for every element of a tile that is stored in `dtype`, as bits_of_words has them; 0 if none
    are needed. IN_LOOP: see philox."""
    bits = ()
    for k in tl.static_range(len(tile.masks)):
        bits = bits + (bits_of_chunk(drawing, tile, k, dtype, FORM, IN_LOOP),)
    return bits


@triton.jit
def bits_of_chunk(
    drawing, tile, k: tl.constexpr, dtype: tl.constexpr, FORM: tl.constexpr, IN_LOOP: tl.constexpr = False
):  # fmt: skip
    """Sixteen random bits for every element of chunk k of a tile that is stored in `dtype`, as bits_of_words has them;
    0 if none are needed.

    Rows count within the slot: head * ROWS + row. One Philox call serves eight consecutive columns, or sixteen in
    formats of 8 bits. A thread makes the calls for as many neighbouring columns as it accesses at once.
    """
    seed, token, stream = drawing
    per_call: tl.constexpr = 16 if dtype.primitive_bitwidth == 8 else 8
    calls: tl.constexpr = (FORM.COLS + per_call - 1) // per_call  # per row
    per_thread: tl.constexpr = max(1, FORM.PER_COLUMNS // per_call)
    per_chunk: tl.constexpr = max(1, FORM.CHUNK // per_call)
    if FORM.ROUNDING == "nearest":
        return 0
    else:
        call = k * FORM.CHUNK // per_call + tl.arange(0, per_chunk // per_thread) * per_thread
        c0 = (tile.rows[:, None] * calls + call[None, :]).to(tl.uint32)
        r0, r1, r2, r3 = philox(seed, c0, token, stream, 0, FORM.ROUNDS, IN_LOOP)
        if per_thread == 2:
            n0, n1, n2, n3 = philox(seed, c0 + 1, token, stream, 0, FORM.ROUNDS, IN_LOOP)
            r0, r1, r2, r3 = tl.join(r0, n0), tl.join(r1, n1), tl.join(r2, n2), tl.join(r3, n3)
        if FORM.CHUNK < per_call:  # half a call
            words = tl.join(r2, r3) if k % 2 == 1 else tl.join(r0, r1)
        else:
            words = tl.join(tl.join(r0, r2), tl.join(r1, r3))  # (rows, calls, ..., 2, 2): r0 r1 r2 r3
        return tl.reshape(bits_of_words(words, dtype, FORM.TARGET), tile.offsets.shape)


@triton.jit
def bits_of_words(words, dtype: tl.constexpr, TARGET: tl.constexpr):
    """Sixteen random bits, as uint32, for each column that a word serves: (..., 2), of its halves; in formats of 8 bits
    (..., 2, 2), from each of its bytes on, after the last of which comes the first. Where instructions round to 8 bits
    they are shifted left by eight, as those take them."""
    if dtype.primitive_bitwidth != 8:
        return tl.join(words & 0xFFFF, words >> 16)
    elif ptx.has_ptx(TARGET):
        first, second = ptx.two_bytes_ptx(words, 0), ptx.two_bytes_ptx(words, 1)
        third, fourth = ptx.two_bytes_ptx(words, 2), ptx.two_bytes_ptx(words, 3)
        return tl.join(tl.join(first, third), tl.join(second, fourth))
    else:
        return tl.join(tl.join(words, words >> 16), tl.join(words >> 8, words >> 24 | words << 8)) & 0xFFFF


@triton.jit
def to_float(v, random, dtype: tl.constexpr, ROUNDING: tl.constexpr, TARGET: tl.constexpr):
    """float32 to float32, bfloat16 or float16."""
    if ROUNDING == "nearest":
        return to_nearest(v, dtype, TARGET)
    elif dtype == tl.float16 and ROUNDING == "stochastic_hw":
        return ptx.to_stochastic_hw(v, random, dtype)
    elif ptx.has_ptx(TARGET):
        return ptx.to_float_stochastic_ptx(v, random, dtype)
    else:
        return to_bfloat16_stochastic(v, random) if dtype == tl.bfloat16 else to_float16_stochastic(v, random)


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


@triton.constexpr_function
def largest_stored(dtype):
    """The largest value that a format with scales stores."""
    return 32767.0 if dtype == tl.int16 else 127.0 if dtype == tl.int8 else 448.0


@triton.constexpr_function
def largest_scale(dtype):
    """The largest scale with which the format's largest value decodes to a finite one."""
    of_integers = 1.0384909391779673e34 if dtype == tl.int16 else 2.6793883890187504e36
    return 7.595588094610019e35 if dtype == tl.uint8 else of_integers


@triton.jit
def to_scaled(v, dtype: tl.constexpr, TARGET: tl.constexpr):
    """What rows are stored with, (rows,) each: the factor e that makes a row's largest magnitude the format's, rounded
    down so that no product exceeds it; the scale 1/e that undoes it; and whether the row is stored at all.

    A row below 2^-100 becomes zeros with scale 1, a row with a NaN or inf zeros with scale NaN.
    """
    largest: tl.constexpr = largest_stored(dtype)
    amax = tl.abs(v[0])
    for k in tl.static_range(1, len(v)):
        amax = maximum_or_nan(amax, tl.abs(v[k]))
    amax = tl.reduce(amax, 1, maximum_or_nan)
    finite = amax < float("inf")
    normal = finite & (amax >= 7.888609052210118e-31)  # 2^-100
    amax = tl.where(normal, amax, largest)
    huge = tl.where(amax >= 18446744073709551616.0, 5.421010862427522e-20, 1.0)  # 2^64, 2^-64: no reciprocal is tiny
    e = divide(largest, amax * huge, TARGET) * huge
    exceeds = product_exceeds(e, amax, largest, TARGET)
    e = tl.where(exceeds, (e.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True), e)  # the next smaller one
    scale = tl.minimum(divide(1.0, e, TARGET), largest_scale(dtype))
    return e, tl.where(normal, scale, tl.where(finite, 1.0, float("nan"))), normal


@triton.jit
def to_integer(v, e, stored, random, dtype: tl.constexpr, ROUNDING: tl.constexpr, TARGET: tl.constexpr):
    """v * e to a whole number, from the exact product: to nearest even, or floor(v * e + (random | 1) / 65536), or in
    int8 floor(v * e + random / 65536) where v * e was rounded to a multiple of 2^-15."""
    if ptx.has_ptx(TARGET):
        return ptx.to_scaled_ptx(v, e, stored, random, dtype, ROUNDING != "nearest")
    else:
        product = tl.where(stored, v.to(tl.float64) * e, 0.0)
        if ROUNDING == "nearest":
            return to_nearest_even(product).to(dtype)
        elif dtype == tl.int8:
            return ((to_nearest_even(product * 32768.0).to(tl.int64) * 2 + random) >> 16).to(dtype)
        else:
            return ((tl.floor(product * 65536.0).to(tl.int64) + (random | 1)) >> 16).to(dtype)


@triton.jit
def to_nearest_even(x):
    """float64 below 2^51 to a whole number: in [2^52, 2^53) neighbours are 1 apart, so adding 1.5 * 2^52 rounds."""
    return (x + 6755399441055744.0) - 6755399441055744.0


@triton.jit
def to_float8(v, e, stored, random, ROUNDING: tl.constexpr, TARGET: tl.constexpr):
    """v * e, rounded to float32, to the bits of float8_e4m3fn."""
    if ROUNDING == "stochastic_hw":
        return ptx.to_stochastic_hw(tl.where(stored, v * e, 0.0), random, tl.uint8)
    elif TARGET == "sm_89" or (TARGET == "sm_80" and ROUNDING == "stochastic"):
        return ptx.to_scaled_ptx(v, e, stored, random, tl.uint8, ROUNDING == "stochastic")
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
