"""Reading and writing stored states: the only device code that knows a format or a rounding.

The functions to_* and random_bits have twins in state/rounding.py that give the same bytes. bfloat16 is read and
written through its bits: exact everywhere, and right in Triton's interpreter, whose own conversions are not.
"""

import triton
import triton.language as tl

from flashstate.kernels.ptx import TO_FLOAT16_STOCHASTIC, TO_FLOAT16_STOCHASTIC_REGISTERS

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def load_state(ptrs, mask):
    """The float32 values of a tile of stored state; undefined where masked."""
    if ptrs.dtype.element_ty == tl.bfloat16:
        code = tl.load(ptrs.to(tl.pointer_type(tl.uint16), bitcast=True), mask=mask, eviction_policy="evict_first")
        return (code.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return tl.load(ptrs, mask=mask, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def store_state(ptrs, v, mask, random, ROUNDING: tl.constexpr):
    """Round the float32 tile `v` and store it.

    ROUNDING is the state's, or "stochastic_ptx", which gives the bytes of "stochastic" and is for NVIDIA GPUs.
    """
    dtype: tl.constexpr = ptrs.dtype.element_ty
    if ROUNDING == "nearest":
        code = to_nearest(v, dtype, not INTERPRETED)
    elif dtype == tl.bfloat16:
        code = to_bfloat16_stochastic(v, random)
    elif ROUNDING == "stochastic_hw":
        code = to_float16_stochastic_hw(v, random)
    elif ROUNDING == "stochastic_ptx":
        code = to_float16_stochastic_ptx(v, random)
    else:
        code = to_float16_stochastic(v, random)
    tl.store(ptrs.to(tl.pointer_type(code.dtype), bitcast=True), code, mask=mask, eviction_policy="evict_first")


@triton.jit
def load_seed(seed_ptr, slot, live):
    """The seed of a slot. Load it before the state: random bits are then drawn while the state is on its way."""
    if seed_ptr is None:
        return 0
    else:
        return tl.load(seed_ptr + slot, mask=live, other=0)


@triton.jit
def random_bits(
    seed, rows, token, stream,
    COLS: tl.constexpr, BLOCK_COLS: tl.constexpr, ROUNDING: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Sixteen random bits for every element of a (BLOCK_ROWS, BLOCK_COLS) tile, as uint32; 0 if none are needed.

    `rows` (BLOCK_ROWS,) counts rows within the slot: head * ROWS + row. One Philox call serves eight consecutive
    columns; word i of it holds columns 2i (low half) and 2i + 1. A thread then holds eight neighbouring columns, the
    layout of a 16-byte access of a 16-bit format.
    """
    if ROUNDING == "nearest":
        return 0
    else:
        calls: tl.constexpr = (COLS + 7) // 8  # per row
        c0 = (rows[:, None] * calls + tl.arange(0, BLOCK_COLS // 8)[None, :]).to(tl.uint32)
        r0, r1, r2, r3 = philox(seed, c0, token, stream, 0, ROUNDS)
        words = tl.join(tl.join(r0, r2), tl.join(r1, r3))  # (rows, calls, 2, 2): r0 r1 r2 r3
        halves = tl.join(words & 0xFFFF, words >> 16)  # (rows, calls, 2, 2, 2)
        return tl.reshape(halves, (rows.shape[0], BLOCK_COLS))


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
def to_nearest(v, dtype: tl.constexpr, HARDWARE: tl.constexpr):
    """float32 to a float format, to nearest, ties to even."""
    if dtype == tl.bfloat16 and not HARDWARE:
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
def to_float16_stochastic_ptx(v, random):
    """to_float16_stochastic for NVIDIA GPUs: the same bytes, fewer instructions."""
    return tl.inline_asm_elementwise(
        TO_FLOAT16_STOCHASTIC,
        TO_FLOAT16_STOCHASTIC_REGISTERS,
        [v, random.to(tl.uint16)],
        tl.float16,
        is_pure=True,
        pack=8,
    )


@triton.jit
def to_bfloat16_stochastic(v, random):
    """float32 to bfloat16, away from zero with the probability of the discarded fraction."""
    bits = v.to(tl.uint32, bitcast=True)
    random = tl.where((bits & 0x7FFFFFFF) < 0x7F7F0000, random, 0)  # from the largest finite value on: truncate
    return tl.where(v == v, (bits + random) >> 16, 0x7FC0).to(tl.uint16)


@triton.jit
def to_float16_stochastic_hw(v, random):
    """float32 to float16 by the conversion instruction of sm_100 and sm_103, which takes 13 random bits per value."""
    return tl.inline_asm_elementwise(
        "cvt.rs.f16x2.f32 $0, $2, $1, $3;", "=r,r,r,r", [v, random.to(tl.uint16)], tl.float16, is_pure=True, pack=2
    )
