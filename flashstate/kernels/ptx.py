"""Stochastic rounding to float16 in PTX: the function of state_io.to_float16_stochastic in half its instructions.

A step in this format is bound by instructions, not by memory. Eight values at a time are rounded as if all were normal
(add 13 random bits below the kept mantissa, truncate), which is one comparison of the result away from being known to
be right. Only a thread that holds a subnormal, an overflow or a NaN does the rest.
"""

import triton.language as tl

PAIRS = 4  # a register holds two float16 values; one 16-byte access holds four registers


def _rounding() -> str:
    """PTX operands: PAIRS registers of float16 to write, twice as many float32 values, PAIRS words of random bits."""
    out = [f"${i}" for i in range(PAIRS)]
    value = [f"${PAIRS + i}" for i in range(2 * PAIRS)]
    random = [f"${3 * PAIRS + i}" for i in range(PAIRS)]
    rounded = [f"t{i}" for i in range(2 * PAIRS)]
    convert = [f"cvt.rz.f16x2.f32 {out[i]}, {rounded[2 * i + 1]}, {rounded[2 * i]};" for i in range(PAIRS)]
    lines = [f".reg .b32 t<{2 * PAIRS}>, word, bits, least, most;", ".reg .f32 mag, sum;", ".reg .pred p, q;"]
    for i in range(PAIRS):
        lines += [
            f"and.b32 word, {random[i]}, 0x1FFF1FFF;",
            "and.b32 bits, word, 0xFFFF;",
            f"add.u32 {rounded[2 * i]}, {value[2 * i]}, bits;",
            "shr.u32 bits, word, 16;",
            f"add.u32 {rounded[2 * i + 1]}, {value[2 * i + 1]}, bits;",
        ]
    lines += [*convert, f"abs.f16x2 least, {out[0]};", "mov.b32 most, least;"]
    for i in range(1, PAIRS):
        lines += [f"abs.f16x2 bits, {out[i]};", "min.f16x2 least, least, bits;", "max.NaN.f16x2 most, most, bits;"]
    lines += [
        "mov.b32 bits, 0x04000400;",  # 2^-14 twice: subnormals, and NaNs whose sum wrapped around, are not above
        "setp.gt.f16x2 p|q, least, bits;",
        "and.pred p, p, q;",
        "@!p bra special;",
        "mov.b32 bits, 0x7BFF7BFF;",  # 65504 twice, the largest float16: anything beyond is not below
        "setp.lt.f16x2 p|q, most, bits;",
        "and.pred p, p, q;",
        "@p bra done;",
        "special:",
    ]
    for i in range(2 * PAIRS):
        half = "0x7632" if i % 2 else "0x7610"
        lines += [
            f"abs.f32 mag, {value[i]};",
            # subnormal: |v| + random * 2^-40, truncated; the conversion then truncates to a multiple of 2^-24
            f"prmt.b32 bits, {random[i // 2]}, 0x4B000000, {half};",  # the float 2^23 + random
            "fma.rn.f32 sum, bits, 0f2B800000, 0fB7000000;",  # times 2^-40, less 2^-17
            "add.rz.f32 sum, mag, sum;",
            f"copysign.f32 sum, {value[i]}, sum;",
            "setp.lt.f32 p, mag, 0f38800000;",  # 2^-14
            f"@p mov.b32 {rounded[i]}, sum;",
            # 2^16 and above: times 2^112 is inf in float32 too; NaN stays NaN
            f"mul.f32 sum, {value[i]}, 0f77800000;",
            "setp.geu.f32 p, mag, 0f47800000;",
            f"@p mov.b32 {rounded[i]}, sum;",
        ]
    return "\n".join(["{", *lines, *convert, "done:", "}"])


TO_FLOAT16_STOCHASTIC = tl.constexpr(_rounding())
# "&": a register of the output is written before all inputs are read.
TO_FLOAT16_STOCHASTIC_REGISTERS = tl.constexpr(",".join(["=&r"] * PAIRS + ["r"] * (3 * PAIRS)))
