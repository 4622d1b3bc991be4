"""PTX: functions of state_io.py in half their instructions, or by instructions that Triton does not name; and two that
hide something from the compiler, or tell memory of a later access.

A stochastic or scaled step is bound by instructions, not by memory. Assembly here takes as many values as fill one or
four registers of results, so that they are packed and checked once, and uses what neither Triton nor its compiler would
find: directed rounding instead of floor and compare, bytes picked by one instruction, float32 subnormals that stand for
those of float8.
"""

import triton
import triton.language as tl

LINE = tl.constexpr(128)  # bytes of a cache line


@triton.constexpr_function
def has_ptx(TARGET):
    """Whether a TARGET, as state_io.py says what that is, has the instructions below."""
    return TARGET in ("sm_80", "sm_89")


def _registers(outputs: int, inputs: int) -> tl.constexpr:
    """Constraints of an assembly block that may write a register of its output before it has read all inputs."""
    return tl.constexpr(",".join(["=&r"] * outputs + ["r"] * inputs))


def _block(*lines: str) -> tl.constexpr:
    """A block of assembly, with registers of its own, as device code takes it."""
    return tl.constexpr("\n".join(["{", *lines, "}"]))


def _pack_bytes(out: str, values: list[str], byte: int) -> list[str]:
    """One byte of each of four registers, side by side in one."""
    pair = f"0x{4 + byte}{byte}"
    return [
        f"prmt.b32 low, {values[0]}, {values[1]}, {pair};",
        f"prmt.b32 high, {values[2]}, {values[3]}, {pair};",
        f"prmt.b32 {out}, low, high, 0x5410;",
    ]


def _to_integer(values: int) -> tl.constexpr:
    """`values` products of float32 to int8 (four of them) or int16 (two), to nearest, in one register.

    Operands: the register to write; values, factors; a mask of all bits or none. Adding 1.5 * 2^23 leaves the rounded
    number in the low bits: in [2^23, 2^24) neighbours are 1 apart.
    """
    x = [f"x{i}" for i in range(values)]
    lines = [f".reg .b32 x<{values}>, low, high;"]
    lines += [f"fma.rn.f32 {x[i]}, ${1 + i}, ${1 + values + i}, 0f4B400000;" for i in range(values)]  # 1.5 * 2^23
    lines += _pack_bytes("low", x, 0) if values == 4 else ["prmt.b32 low, x0, x1, 0x5410;"]
    return _block(*lines, f"and.b32 $0, low, ${1 + 2 * values};")


def _to_int16_stochastic() -> tl.constexpr:
    """Two products of float32, each plus a random number and rounded down, to int16 in one register.

    The random number is the fraction of a float32 in [128, 129), and both sums round down, which is what floor does.
    """
    lines = [".reg .b32 x<2>, word;", "or.b32 word, $6, 0x00010001;"]
    for i, half in enumerate(("0x7610", "0x7632")):
        lines += [
            f"prmt.b32 x{i}, word, 0x43000000, {half};",  # 128 + (random | 1) / 65536
            f"fma.rm.f32 x{i}, ${1 + i}, ${3 + i}, x{i};",
            f"add.rm.f32 x{i}, x{i}, 0f4B3FFF80;",  # 1.5 * 2^23 - 128
        ]
    return _block(*lines, "prmt.b32 word, x0, x1, 0x5410;", "and.b32 $0, word, $5;")


def _to_int8_stochastic() -> tl.constexpr:
    """Four products of float32, each rounded to a multiple of 2^-15, plus a random number and rounded down, to int8 in
    one register.

    In [256, 512) neighbours are 2^-15 apart, so in the sum with 384 the whole number plus 128 is the highest eight bits
    of the mantissa. Shifted left by nine it is the highest byte, and the random bits are the fraction.
    """
    lines = [".reg .b32 x<4>, low, high;"]
    for i in range(4):
        lines += [f"fma.rn.f32 x{i}, ${1 + i}, ${5 + i}, 0f43C00000;", f"mad.lo.u32 x{i}, x{i}, 512, ${10 + i};"]
    lines += _pack_bytes("low", [f"x{i}" for i in range(4)], 3)
    return _block(*lines, "lop3.b32 $0, low, 0x80808080, $9, 0x28;")  # 0x28: (first ^ second) & third


def _to_float8() -> tl.constexpr:
    """Four products of float32, each rounded to float32 and then to float8_e4m3fn to nearest, in one register."""
    lines = [".reg .b32 w<4>, packed;", ".reg .b16 low, high;"]
    lines += [f"mul.rn.f32 w{i}, ${1 + i}, ${5 + i};" for i in range(4)]
    return _block(
        *lines,
        "cvt.rn.satfinite.e4m3x2.f32 low, w1, w0;",
        "cvt.rn.satfinite.e4m3x2.f32 high, w3, w2;",
        "mov.b32 packed, {low, high};",
        "and.b32 $0, packed, $9;",
    )


def _to_float8_stochastic() -> tl.constexpr:
    """Four products of float32, each rounded to float32 and then stochastically to float8_e4m3fn, in one register:
    random bits are added below the three kept bits of the mantissa, and the rest dropped.

    Times 2^-120 the exponent is that of float8, and float8 subnormals become float32 subnormals, so that one sum serves
    both. Shifted left by four the code is the highest byte, without its sign.
    """
    lines = [".reg .b32 w<4>, sign, low, high;"]
    for i in range(4):
        lines += [
            f"mul.rn.f32 w{i}, ${1 + i}, ${5 + i};",
            f"mul.rz.f32 w{i}, w{i}, 0f03800000;",  # 2^-120
            f"mad.lo.u32 w{i}, w{i}, 16, ${10 + i};",
        ]
    lines += [*_pack_bytes("sign", ["$1", "$2", "$3", "$4"], 3), *_pack_bytes("low", ["w0", "w1", "w2", "w3"], 3)]
    return _block(*lines, "lop3.b32 low, low, sign, 0x80808080, 0xD8;", "and.b32 $0, low, $9;")  # 0xD8: third chooses


def _add_halves(sums: list[str], values: list[str], word: str) -> list[str]:
    """Two registers, plus the low and the high half of a third."""
    return [
        f"dp2a.lo.u32.u32 {sums[0]}, {word}, 0x0001, {values[0]};",
        f"dp2a.lo.u32.u32 {sums[1]}, {word}, 0x0100, {values[1]};",
    ]


PAIRS = 4  # a register holds two values of 16 bits; one 16-byte access holds four registers


def _operands_of_pairs() -> tuple[list[str], list[str], list[str]]:
    """PAIRS registers of results, twice as many float32 values, PAIRS words of random bits."""
    values = 2 * PAIRS
    operands = [f"${i}" for i in range(PAIRS + values + PAIRS)]
    return operands[:PAIRS], operands[PAIRS : PAIRS + values], operands[PAIRS + values :]


def _to_float16_stochastic() -> tl.constexpr:
    """Eight values at a time are rounded as if all were normal (add 13 random bits below the kept mantissa, truncate),
    which is one comparison of the result away from being known to be right. Only a thread that holds a subnormal, an
    overflow or a NaN does the rest.
    """
    out, value, random = _operands_of_pairs()
    rounded = [f"t{i}" for i in range(2 * PAIRS)]
    convert = [f"cvt.rz.f16x2.f32 {out[i]}, {rounded[2 * i + 1]}, {rounded[2 * i]};" for i in range(PAIRS)]
    lines = [f".reg .b32 t<{2 * PAIRS}>, word, bits, least, most;", ".reg .f32 mag, sum;", ".reg .pred p, q;"]
    for i in range(PAIRS):
        pair = slice(2 * i, 2 * i + 2)
        lines += [f"and.b32 word, {random[i]}, 0x1FFF1FFF;", *_add_halves(rounded[pair], value[pair], "word")]
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
    return _block(*lines, *convert, "done:")


def _to_bfloat16_stochastic() -> tl.constexpr:
    """Eight values at a time: sixteen random bits are added, and the upper half is kept, which is right below the
    largest bfloat16. Only a thread that holds something else truncates it, and makes every NaN the same.
    """
    out, value, random = _operands_of_pairs()
    rounded = [f"t{i}" for i in range(2 * PAIRS)]
    keep = [f"prmt.b32 {out[i]}, {rounded[2 * i]}, {rounded[2 * i + 1]}, 0x7632;" for i in range(PAIRS)]
    lines = [f".reg .b32 t<{2 * PAIRS}>;", ".reg .f32 mag, most;", ".reg .pred p;", f"abs.f32 most, {value[0]};"]
    for i in range(1, 2 * PAIRS):
        lines += [f"abs.f32 mag, {value[i]};", "max.NaN.f32 most, most, mag;"]
    for i in range(PAIRS):
        pair = slice(2 * i, 2 * i + 2)
        lines += _add_halves(rounded[pair], value[pair], random[i])
    lines += [*keep, "setp.lt.f32 p, most, 0f7F7F0000;", "@p bra done;"]
    for i in range(2 * PAIRS):
        lines += [
            f"abs.f32 mag, {value[i]};",
            "setp.geu.f32 p, mag, 0f7F7F0000;",
            f"@p mov.b32 {rounded[i]}, {value[i]};",
            "setp.nan.f32 p, mag, mag;",
            f"@p mov.b32 {rounded[i]}, 0x7FC00000;",
        ]
    return _block(*lines, *keep, "done:")


TO_INT8 = _to_integer(values=4)
TO_INT16 = _to_integer(values=2)
TO_INT8_STOCHASTIC = _to_int8_stochastic()
TO_INT16_STOCHASTIC = _to_int16_stochastic()
TO_FLOAT8 = _to_float8()
TO_FLOAT8_STOCHASTIC = _to_float8_stochastic()
TO_FLOAT16_STOCHASTIC = _to_float16_stochastic()
TO_BFLOAT16_STOCHASTIC = _to_bfloat16_stochastic()
FOUR_PRODUCTS, FOUR_PRODUCTS_RANDOM = _registers(1, 9), _registers(1, 13)
TWO_PRODUCTS, TWO_PRODUCTS_RANDOM = _registers(1, 5), _registers(1, 6)
PAIRS_RANDOM = _registers(PAIRS, 3 * PAIRS)
EIGHT_INPUTS = _registers(1, 8)


SPLIT = _block(
    ".reg .b32 low, high;",
    "cvt.rn.bf16x2.f32 $0, $4, $3;",
    "shl.b32 low, $0, 16;",
    "and.b32 high, $0, 0xFFFF0000;",
    "sub.rn.f32 $1, $3, low;",
    "sub.rn.f32 $2, $4, high;",
)
TWO_BYTES = tl.constexpr(tuple(f"prmt.b32 $0, $1, 0, 0x4{(i + 1) % 4}{i}4;" for i in range(4)))
FROM_BFLOAT16 = tl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;")
DIVIDE = _block(
    ".reg .f32 r, e, q;",
    "rcp.approx.ftz.f32 r, $2;",
    "neg.f32 e, $2;",
    "fma.rn.f32 q, e, r, 0f3F800000;",
    "fma.rn.f32 r, q, r, r;",
    "mul.rn.f32 q, $1, r;",
    "fma.rn.f32 $0, e, q, $1;",
    "fma.rn.f32 q, $0, r, q;",
    "fma.rn.f32 $0, e, q, $1;",
    "fma.rn.f32 $0, $0, r, q;",
)
EXP = _block(".reg .f32 e;", "mul.ftz.f32 e, $1, 0f3FB8AA3B;", "ex2.approx.ftz.f32 $0, e;")  # log2(e)

SILU = _block(
    ".reg .f32 e;",
    "mul.ftz.f32 e, $1, 0fBFB8AA3B;",  # -log2(e)
    "ex2.approx.ftz.f32 e, e;",
    "add.ftz.f32 e, e, 0f3F800000;",
    "rcp.approx.ftz.f32 e, e;",
    "mul.f32 $0, $1, e;",
)

TO_FLOAT16_HW = tl.constexpr("cvt.rs.f16x2.f32 $0, $2, $1, $3;")
TO_FLOAT8_HW = _block(
    ".reg .b32 word;",
    "prmt.b32 word, $5, $7, 0x6521;",  # of the first and the third
    "cvt.rs.satfinite.e4m3x4.f32 $0, {$4, $3, $2, $1}, word;",
)
PREFETCH = _block(".reg .pred p;", "setp.ne.b32 p, $2, 0;", "@p prefetch.global.L2 [$1];", "mov.b32 $0, 0;")
NO_BIT = ".reg .b32 none; mov.u32 none, %lanemask_lt; shr.u32 none, none, 31;"  # 0: lane 31 is below no other
HIDE_SHARED = _block(NO_BIT, "or.b32 $0, $1, none;")
HIDE_SHARED_WIDE = _block(NO_BIT, ".reg .b64 wide; cvt.u64.u32 wide, none;", "or.b64 $0, $1, wide;")


@triton.jit
def from_bfloat16_ptx(code):
    """The float32 values of bfloat16 bits, in one instruction each, where the compiler spends three on two."""
    return tl.inline_asm_elementwise(FROM_BFLOAT16, "=&f,=&f,r", [code], tl.float32, is_pure=True, pack=2)


@triton.jit
def from_float16_ptx(x):
    """The float32 values of float16."""
    return tl.inline_asm_elementwise("cvt.f32.f16 $0, $1;", "=f,h", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def split_ptx(x):
    """float32 to bfloat16, to nearest, and what is left of it."""
    return tl.inline_asm_elementwise(SPLIT, "=&r,=&f,=&f,f,f", [x], (tl.bfloat16, tl.float32), True, 2)


@triton.jit
def two_bytes_ptx(word, FIRST: tl.constexpr):
    """Sixteen bits of a word from byte FIRST on, after the last of which comes the first; shifted left by eight."""
    block: tl.constexpr = TWO_BYTES[FIRST]
    return tl.inline_asm_elementwise(block, "=r,r", [word], tl.uint32, is_pure=True, pack=1)


@triton.jit
def divide_ptx(a, b):
    """a / b, rounded to nearest, where b, its reciprocal and the quotient are normal: nine instructions, and no branch
    for those that are not. A test compares it with div_rn over all mantissas."""
    return tl.inline_asm_elementwise(DIVIDE, "=&f,f,f", [a, b], tl.float32, is_pure=True, pack=1)


@triton.jit
def to_scaled_ptx(v, e, stored, random, dtype: tl.constexpr, STOCHASTIC: tl.constexpr):
    """v * e to int8, int16 or float8_e4m3fn, which is uint8, to nearest or stochastically; zero unless stored.
    Random bits of 8-bit formats are two_bytes_ptx's."""
    keep = tl.where(stored, -1, 0).to(tl.int16 if dtype == tl.int16 else tl.int8)
    operands = [v, e, keep]
    if STOCHASTIC:
        operands = [v, e, keep, random.to(tl.uint16) if dtype == tl.int16 else random]
    two: tl.constexpr = TWO_PRODUCTS_RANDOM if STOCHASTIC else TWO_PRODUCTS
    four: tl.constexpr = FOUR_PRODUCTS_RANDOM if STOCHASTIC else FOUR_PRODUCTS
    if dtype == tl.int16:
        block: tl.constexpr = TO_INT16_STOCHASTIC if STOCHASTIC else TO_INT16
        return tl.inline_asm_elementwise(block, two, operands, tl.int16, True, 2)
    elif dtype == tl.int8:
        block: tl.constexpr = TO_INT8_STOCHASTIC if STOCHASTIC else TO_INT8
        return tl.inline_asm_elementwise(block, four, operands, tl.int8, True, 4)
    else:
        block: tl.constexpr = TO_FLOAT8_STOCHASTIC if STOCHASTIC else TO_FLOAT8
        return tl.inline_asm_elementwise(block, four, operands, tl.uint8, True, 4)


@triton.jit
def to_float_stochastic_ptx(v, random, dtype: tl.constexpr):
    """float32 to float16, or to the bits of bfloat16, stochastically."""
    operands = [v, random.to(tl.uint16)]
    if dtype == tl.float16:
        return tl.inline_asm_elementwise(TO_FLOAT16_STOCHASTIC, PAIRS_RANDOM, operands, tl.float16, True, 8)
    else:
        return tl.inline_asm_elementwise(TO_BFLOAT16_STOCHASTIC, PAIRS_RANDOM, operands, tl.uint16, True, 8)


@triton.jit
def to_stochastic_hw(v, random, dtype: tl.constexpr):
    """float32 to float16 or float8_e4m3fn, which is uint8, stochastically, by the conversion instruction of sm_100 and
    sm_103: 13 random bits for each value, or one word of them for four."""
    if dtype == tl.float16:
        return tl.inline_asm_elementwise(TO_FLOAT16_HW, "=r,r,r,r", [v, random.to(tl.uint16)], tl.float16, True, 2)
    else:
        return tl.inline_asm_elementwise(TO_FLOAT8_HW, EIGHT_INPUTS, [v, random], tl.uint8, True, 4)


@triton.jit
def per_thread_ptx(x):
    """An integer that all threads share, where the compiler does not see that they do: what it sees goes to registers
    of the warp, and on from there to those of threads."""
    if x.dtype == tl.int64:
        return tl.inline_asm_elementwise(HIDE_SHARED_WIDE, "=l,l", [x], tl.int64, is_pure=True, pack=1)
    else:
        return tl.inline_asm_elementwise(HIDE_SHARED, "=r,r", [x], tl.int32, is_pure=True, pack=1)


@triton.jit
def exp_ptx(x):
    """exp as the GPU has it, zero where it is below 2^-126: Triton's spends three more instructions on that."""
    return tl.inline_asm_elementwise(EXP, "=&f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def log2_ptx(x):
    """The logarithm to base 2 as the GPU has it: of numbers from 1 on within 2^-22, which Triton's mends."""
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def silu_ptx(x):
    """x / (1 + exp(-x)) in five instructions: exponential and reciprocal as the GPU has them, where Triton's versions
    spend twice as many on results below 2^-126, which do not matter beside 1, or are lost at x below -87."""
    return tl.inline_asm_elementwise(SILU, "=&f,f", [x], tl.float32, is_pure=True, pack=1)


def _int8_to_bfloat16() -> tl.constexpr:
    """Four int8 in one register to bfloat16 in two. Beside 0x43 a byte without its sign is 128 and its value; with its
    sign alone 128, or of negative ones 256: their difference is exact."""
    lines = [".reg .b32 low, high, sign, minus;", "mov.b32 minus, 0xBF80BF80;"]  # -1, twice
    lines += ["prmt.b32 low, $2, 0x43434343, 0x4140;", "prmt.b32 high, $2, 0x43434343, 0x4342;"]
    for out, pair in (("$0", "low"), ("$1", "high")):
        lines += [f"and.b32 sign, {pair}, 0xFF80FF80;", f"and.b32 {pair}, {pair}, 0xFF7FFF7F;"]
        lines += [f"fma.rn.bf16x2 {out}, sign, minus, {pair};"]
    return _block(*lines)


INT8_TO_BFLOAT16 = _int8_to_bfloat16()


@triton.jit
def int8_to_bfloat16_ptx(code):
    """int8 as bfloat16. The compiler is not to see that it comes of 8 bits: it would want operands of tensor cores in
    another order than others have, and move those that they are multiplied with between threads, in every tile."""
    return tl.inline_asm_elementwise(INT8_TO_BFLOAT16, "=r,=r,r", [code], tl.bfloat16, is_pure=False, pack=4)


@triton.jit
def hidden_ptx(code):
    """Values of 8 or 16 bits, where the compiler does not see what they were made of. By that it chooses the order in
    which tensor cores sum products: it is to be one, whether values were just rounded or are loaded."""
    PACK: tl.constexpr = 32 // code.dtype.primitive_bitwidth
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [code], code.dtype, is_pure=False, pack=PACK)


@triton.jit
def prefetch_ptx(ptrs, exists):
    """Ask for the lines of these addresses, as far as they exist, to come to the L2 cache."""
    tl.inline_asm_elementwise(PREFETCH, "=r,l,r", [ptrs, exists.to(tl.int32)], tl.int32, is_pure=False, pack=1)
