"""Functions that several kernels need: of numbers, of angles, Philox, entries of matrices, a choice between tuples."""

import triton
import triton.language as tl

from flashstate.kernels.ptx import divide_ptx, exp_ptx, has_ptx, log2_ptx, silu_ptx


@triton.jit
def softplus(x):
    """log(1 + exp(x)), the identity above 20. Where exp(x) < 1 the bits that 1 + exp(x) lost are added back."""
    e = tl.exp(x)
    w = 1.0 + e
    log1p = tl.log(w) + tl.where(e < 1.0, e - (w - 1.0), 0.0)
    return tl.where(x > 20.0, x, log1p)


@triton.jit
def softplus_in_short(x, TARGET: tl.constexpr):
    """softplus within 4e-6 of itself, in a third of its instructions: for decays of every column of states whose
    products have operands of 16 bits."""
    if has_ptx(TARGET):
        e = exp_ptx(x)
        series = e * tl.fma(e, tl.fma(e, tl.fma(e, -0.25, 0.3333333333), -0.5), 1.0)
        short = tl.where(e < 0.0625, series, log2_ptx(1.0 + e) * 0.6931471805599453)
        return tl.where(x > 20.0, x, short)
    else:
        return softplus(x)


@triton.jit
def exp_in_short(x, TARGET: tl.constexpr):
    """exp, where what is below 2^-126 does not matter."""
    return exp_ptx(x) if has_ptx(TARGET) else tl.exp(x)


@triton.jit
def within_limits(x, limits):
    """x, or the nearer of both limits where it is not between them; NaN as it is. Without limits, (None, None): x."""
    low, high = limits
    if low is not None:
        x = tl.where(x < low, low, x)
        x = tl.where(x > high, high, x)
    return x


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    """x sigmoid(x)."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gate(x, TARGET: tl.constexpr):
    """silu, in as few instructions as there are."""
    return silu_ptx(x) if has_ptx(TARGET) else silu(x)


@triton.jit
def divide(a: tl.constexpr, b, TARGET: tl.constexpr):
    """a / b, rounded to nearest, where b, its reciprocal and the quotient are normal."""
    a = tl.full(b.shape, a, tl.float32)
    return divide_ptx(a, b) if has_ptx(TARGET) else tl.div_rn(a, b)


@triton.jit
def maximum_or_nan(a, b):
    """The larger of two numbers; NaN if one of them is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def product_exceeds(a, b, bound: tl.constexpr, TARGET: tl.constexpr):
    """Whether the exact product of two float32 is above a bound."""
    if TARGET == "interpreter":  # whose fma rounds twice
        return a.to(tl.float64) * b.to(tl.float64) > bound
    else:
        return tl.fma(a, b, -bound) > 0.0


@triton.jit
def tanh(x):
    """tanh with an absolute accuracy, that of float32 near 1: what is tiny comes out with few bits. exp by a Taylor
    series, because the GPU's, a few units off, would make angles drift."""
    y = -2.0 * tl.minimum(tl.abs(x), 20.0)
    n = tl.floor(y * 1.4426950408889634 + 0.5)
    r = tl.fma(n, -LN2_LOW, tl.fma(n, -LN2_HIGH, y))
    series = tl.fma(r, 1.0 / 5040.0, 1.0 / 720.0)
    series = tl.fma(r, tl.fma(r, series, 1.0 / 120.0), 1.0 / 24.0)
    series = tl.fma(r, tl.fma(r, series, 1.0 / 6.0), 0.5)
    e = tl.fma(r, tl.fma(r, series, 1.0), 1.0) * tl.exp2(n)
    inverse = 1.0 / (1.0 + e)  # approximately, so that the quotient is mended
    magnitude = (1.0 - e) * inverse
    magnitude = tl.fma(tl.fma(-magnitude, 1.0 + e, 1.0 - e), inverse, magnitude)
    return tl.where(x == x, tl.where(x < 0.0, -magnitude, magnitude), x)


LN2_HIGH = tl.constexpr(0.693359375)  # ten bits of it, so that products with whole numbers are exact, and
LN2_LOW = tl.constexpr(-0.00021219444005469057)
TURN = tl.constexpr(6.283185307179586)
TURN_HIGH = tl.constexpr(6.28125)  # eight bits of it, so that products with whole turns are exact, and
TURN_LOW = tl.constexpr(0.0019353071795864769)
PI_HIGH = tl.constexpr(3.140625)  # halves of these: with float32's π angles would drift
PI_LOW = tl.constexpr(0.00096765358979323845)
LARGEST_ANGLE = tl.constexpr(6.2831849)  # the last float32 below a turn


@triton.jit
def wrapped(angle):
    """Angles in [0, 2π), as reference/mamba3.py has them."""
    turns = tl.floor(angle / TURN)
    whole = turns * -TURN_HIGH
    total = angle + whole
    part = total - angle
    lost = (angle - (total - part)) + (whole - part)
    angle = total + (lost - turns * TURN_LOW)
    angle = tl.where(angle < 0.0, angle + TURN, angle)
    return tl.where(angle > LARGEST_ANGLE, 0.0, angle)


QUARTER = tl.constexpr(1.5707963267948966)
QUARTER_HIGH = tl.constexpr(1.5703125)  # of which products with whole quarters are exact, and
QUARTER_LOW = tl.constexpr(0.0004838267948966192)


@triton.jit
def cos_and_sin(angle):
    """Cosine and sine of angles in [0, 2π): Taylor series at the nearest quarter, as far as float32 can tell."""
    quarter = tl.floor(angle / QUARTER + 0.5)
    x = (angle - quarter * QUARTER_HIGH) - quarter * QUARTER_LOW
    square = x * x
    odd = tl.fma(square, 1.0 / 362880.0, -1.0 / 5040.0)
    odd = tl.fma(square, tl.fma(square, odd, 1.0 / 120.0), -1.0 / 6.0)
    sin = tl.fma(x * square, odd, x)
    even = tl.fma(square, -1.0 / 3628800.0, 1.0 / 40320.0)
    even = tl.fma(square, tl.fma(square, even, -1.0 / 720.0), 1.0 / 24.0)
    cos = tl.fma(square, tl.fma(square, even, -0.5), 1.0)
    turned = quarter.to(tl.int32) & 1 == 1
    c, s = tl.where(turned, sin, cos), tl.where(turned, cos, sin)
    c = tl.where((quarter == 1.0) | (quarter == 2.0), -c, c)
    return c, tl.where((quarter == 2.0) | (quarter == 3.0), -s, s)


@triton.jit
def either(choose_first, first, second):
    """The values of one tuple or of the other."""
    chosen = ()
    for k in tl.static_range(len(first)):
        chosen = chosen + (tl.where(choose_first, first[k], second[k]),)
    return chosen


@triton.jit
def entry_of(vector, i):
    """Entry i of a vector; exactly, in whatever order it is summed."""
    return tl.sum(tl.where(tl.arange(0, vector.shape[0]) == i, vector, 0.0), 0)


@triton.jit
def row_of(matrix, i):
    """Row i of a matrix; exactly, in whatever order it is summed."""
    return tl.sum(tl.where((tl.arange(0, matrix.shape[0]) == i)[:, None], matrix, 0.0), 0)


@triton.jit
def column_of(matrix, i):
    """Column i of a matrix; exactly, in whatever order it is summed."""
    return tl.sum(tl.where((tl.arange(0, matrix.shape[1]) == i)[None, :], matrix, 0.0), 1)


@triton.jit
def philox(seed, c0, c1, c2, c3, ROUNDS: tl.constexpr, IN_LOOP: tl.constexpr = False):
    """Philox-4x32: four words per counter c0. The same words as tl.philox, with one wide multiply for each product
    where that has two: a float16 stochastic step is bound by instructions, and this saves one in eight. IN_LOOP: rounds
    are not unrolled before layouts are chosen, which takes long where a kernel has many calls."""
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    zero = tl.zeros(c0.shape, tl.uint32)
    w0, w1, w2, w3 = c0, (zero + c1).to(tl.uint32), (zero + c2).to(tl.uint32), (zero + c3).to(tl.uint32)
    for _ in tl.range(ROUNDS if IN_LOOP else 1, num_stages=1):
        for _ in tl.static_range(1 if IN_LOOP else ROUNDS):
            p = w0.to(tl.uint64) * 0xD2511F53
            q = w2.to(tl.uint64) * 0xCD9E8D57
            w0 = (q >> 32).to(tl.uint32) ^ w1 ^ k0
            w2 = (p >> 32).to(tl.uint32) ^ w3 ^ k1
            w1 = q.to(tl.uint32)
            w3 = p.to(tl.uint32)
            k0 += 0x9E3779B9
            k1 += 0xBB67AE85
    return w0, w1, w2, w3
