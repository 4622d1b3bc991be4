"""Formats with a scale per row (int16, int8, float8): what their definition says, and equal bytes everywhere."""

import math
import re
from bisect import bisect_right
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from test_formats import EVERYWHERE, Form, bits_to_float, codes, forms, require_equal_bytes
from torch import Tensor

from flashstate.launch import machine_of
from flashstate.state.formats import encode
from flashstate.state.rounding import to_int8_stochastic

INT16, INT8, FLOAT8 = torch.int16, torch.int8, torch.float8_e4m3fn
LARGEST = {INT16: 32767, INT8: 127, FLOAT8: 448}
FLOAT8_MAGNITUDES = [
    Fraction(c % 8, 512) if c < 8 else (1 + Fraction(c % 8, 8)) * Fraction(2) ** (c // 8 - 7) for c in range(127)
]
LARGEST_FLOAT32 = (2 - Fraction(1, 1 << 23)) * Fraction(2) ** 127
MAGNITUDES = {INT16: range(32768), INT8: range(128), FLOAT8: FLOAT8_MAGNITUDES}  # of codes 0, 1, 2, ...
DTYPES = pytest.mark.parametrize("dtype", LARGEST, ids=str)
ROUNDINGS = pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
COLS = 64


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def float32_of(bits: Tensor) -> Tensor:
    return bits.int().view(torch.float32)


def rounded_down(quotient: Tensor) -> Tensor:
    """float64 to float32. A quotient of float32 values is no nearer than 2^-48 to a float32 that it is not."""
    near = quotient.float()
    return torch.where(near.double() > quotient, near.nextafter(torch.zeros_like(near)), near)


def factor(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """e = largest / amax, rounded down; float64, so that products with it are exact."""
    return rounded_down(LARGEST[dtype] / amax.double()).double()


def step(w: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance of the format's neighbouring values around `w`, which is in units of the scale; float64."""
    if dtype is not FLOAT8:
        return torch.ones_like(w, dtype=torch.float64)
    return torch.ldexp(torch.ones_like(w, dtype=torch.float64), torch.frexp(w).exponent.clamp(min=-5) - 4)


def finite_rows(dtype: torch.dtype) -> Tensor:
    """Rows (rows, 64) whose amax has every exponent: zeros, subnormals, values within two ulps of ties, ±amax."""
    mantissa = torch.randint(0, 1 << 23, (255, 3), generator=generator())
    mantissa[:, 0], mantissa[:, 1] = 0, (1 << 23) - 1
    every = float32_of((torch.arange(255) << 23)[:, None] + mantissa).flatten()
    exact = LARGEST[dtype] * 2.0 ** torch.arange(-60, 60, 7)  # e is a power of two: ties stay ties
    beside = float32_of(exact.view(torch.int32)[:, None] + torch.tensor([-1, 1])).flatten()
    edges = float32_of(torch.tensor([0x0D800000, 0x7F7FFFFD])[:, None] + torch.arange(-2, 3)).flatten()
    amax = torch.cat([every, exact, beside, edges])[:, None]  # edges: around 2^-100, and up to the largest float32
    n = len(amax)

    grid = torch.tensor([float(m) for m in MAGNITUDES[dtype]]).double()
    index = torch.randint(0, len(grid) - 1, (n, 32), generator=generator())
    index[:, :4], index[:, 4:8] = torch.arange(4), len(grid) - 2 - torch.arange(4)
    tie = ((grid[index] + grid[index + 1]) / 2 / factor(amax, dtype)).float()
    tie = float32_of((tie.view(torch.int32) + torch.randint(-2, 3, tie.shape, generator=generator())).clamp(min=0))
    spread = amax * torch.exp2(-40 * torch.rand(n, 24, generator=generator()))
    fixed = bits_to_float(0x7F7FFFFF, 0, 1, 0x007FFFFF).expand(n, 4)  # amax, 0, subnormals
    magnitudes = torch.minimum(torch.cat([tie, spread, fixed, fixed], 1), amax)
    sign = torch.randint(0, 2, magnitudes.shape, generator=generator()) * 2.0 - 1
    sign[:, -8:-4], sign[:, -4:] = 1.0, -1.0
    order = torch.rand(magnitudes.shape, generator=generator()).argsort(1)
    return (magnitudes * sign).gather(1, order)


def special_rows() -> Tensor:
    """Rows that hold NaNs and infs, one of them or all, at either end and between, and rows of nothing but zeros."""
    rows = torch.randn(11, COLS, generator=generator())
    rows[0, 0], rows[1, 63], rows[2] = torch.nan, torch.nan, torch.nan
    rows[3, 31], rows[4, 7], rows[5] = torch.inf, -torch.inf, -torch.inf
    rows[6, ::9], rows[7, 5], rows[7, 6] = bits_to_float(0xFFFFFFFF), torch.nan, torch.inf
    rows[8], rows[9], rows[10, ::2] = 0.0, -0.0, -0.0
    return rows


def all_rows(dtype: torch.dtype) -> Tensor:
    """Both kinds, mixed, (slots, rows, 64)."""
    rows = torch.cat([finite_rows(dtype), special_rows().repeat(3, 1)])
    rows = torch.cat([rows, rows[: len(rows) % 2]])
    return rows[torch.randperm(len(rows), generator=generator())].view(2, -1, COLS)


def random_for(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Random bits where it matters: around the first at which the rounding of `values` changes; and any others."""
    w = (values.double() * factor(values.abs().amax(-1, keepdim=True), dtype)).nan_to_num(0, 0, 0)
    if dtype is FLOAT8:
        w = w.float().double().abs()  # rounded once, and away from zero
    first = ((1 - w / step(w, dtype) % 1) * 65536).ceil().long()
    near = first + torch.randint(-2, 2, w.shape, generator=generator())
    any_other = torch.randint(0, 65536, w.shape, generator=generator())
    choices = (near, near, near, any_other, torch.zeros_like(near), torch.full_like(near, 65535))
    kind = torch.randint(0, len(choices), w.shape, generator=generator())
    return torch.stack(choices).gather(0, kind[None])[0].clamp(0, 65535)


def random_if(rounding: str, values: Tensor, dtype: torch.dtype) -> Tensor | None:
    return None if rounding == "nearest" else random_for(values, dtype)


def test_the_variance_of_the_sum_of_neighbours_that_share_a_byte_is_at_most_a_128th_more() -> None:
    """Over all values of the byte that they share, and of the other one of each."""
    shared, other = torch.arange(256), torch.arange(256)[:, None]
    several = [2**-16 + 2**-20, 0.001, 0.004, 1408 / 65536, 0.3, 1 / 3, 0.5, 0.7, 0.9, 0.999]
    w = torch.tensor(several, dtype=torch.float64)
    p = (w * 2**15).round() / 2**15
    first = to_int8_stochastic(w[:, None, None], other + 256 * shared).double().mean(1)  # by the byte that they share
    second = to_int8_stochastic(w[:, None, None], shared + 256 * other).double().mean(1)
    assert torch.equal(first.mean(1), p)
    assert torch.equal(second.mean(1), p)
    covariance = (first[:, None] * second[None, :]).mean(-1) - p[:, None] * p[None, :]
    assert (covariance <= (p * (1 - p))[:, None] / 256 + 2.0**-50).all()
    assert (covariance > -(2.0**-50)).all()


def float32(exact: Fraction, rounding: Callable[[Fraction], int] = round) -> Fraction:
    """`exact` as a float32: `round` goes to nearest even, `math.floor` down. Infinity is out of reach here."""
    if exact == 0:
        return exact
    exponent = abs(exact.numerator).bit_length() - exact.denominator.bit_length()
    exponent -= abs(exact) < Fraction(2) ** exponent
    unit = Fraction(2) ** max(exponent - 23, -149)
    return rounding(exact / unit) * unit


def slow_encode(row: list[float], dtype: torch.dtype, random: list[int | None]) -> tuple[list[int], float]:
    """docs/formats.md word for word, a value at a time, by exact fractions."""
    if not all(math.isfinite(v) for v in row):
        return [0] * len(row), math.nan
    amax = Fraction(max(abs(v) for v in row))
    if amax < Fraction(2) ** -100:
        return [0] * len(row), 1.0
    e = float32(LARGEST[dtype] / amax, math.floor)
    assert amax * e <= LARGEST[dtype]
    scale = min(float32(1 / e), float32(LARGEST_FLOAT32 / LARGEST[dtype], math.floor))
    to_code = {INT16: whole_number, INT8: small_number, FLOAT8: float8_code}[dtype]
    return [to_code(v, e, r) for v, r in zip(row, random, strict=True)], float(scale)


def whole_number(v: float, e: Fraction, random: int | None) -> int:
    product = Fraction(v) * e
    return round(product) if random is None else math.floor(product + Fraction(random | 1, 65536))


def small_number(v: float, e: Fraction, random: int | None) -> int:
    product = Fraction(v) * e
    return round(product) if random is None else (2 * round(product * 32768) + random) // 65536


def float8_code(v: float, e: Fraction, random: int | None) -> int:
    magnitude = abs(float32(Fraction(v) * e))
    code = bisect_right(FLOAT8_MAGNITUDES, magnitude) - 1
    fraction = Fraction(0)
    if code + 1 < len(FLOAT8_MAGNITUDES):
        below, above = FLOAT8_MAGNITUDES[code : code + 2]
        fraction = (magnitude - below) / (above - below)
    if random is None:
        code += fraction > Fraction(1, 2) or (fraction == Fraction(1, 2) and code % 2 == 1)
    else:
        code += fraction + Fraction(random, 65536) >= 1  # the addition carries into the kept bits
    return code | (0x80 if math.copysign(1.0, v) < 0 else 0)


@DTYPES
@ROUNDINGS
def test_encode_agrees_with_exact_fractions(dtype: torch.dtype, rounding: str) -> None:
    """With random bits around the first at which a value is rounded up: so it is, as often as its fraction says."""
    values = all_rows(dtype).view(-1, COLS)
    random = random_if(rounding, values, dtype)
    data, scale = encode(values, dtype, random)
    for i, row in enumerate(values.tolist()):
        want, want_scale = slow_encode(row, dtype, [None] * COLS if random is None else random[i].tolist())
        assert codes(data[i]).tolist() == want
        assert scale[i] == want_scale or (scale[i].isnan() and math.isnan(want_scale))


def test_the_conversion_to_float8_takes_the_word_that_its_columns_have_two_bytes_of() -> None:
    """No GPU of the tests has it: four columns have two bytes of a word each, of which prmt makes the word again."""
    from flashstate.kernels import ptx

    (selector,) = re.findall(r"prmt\.b32 word, \$\d+, \$\d+, (\w+);", ptx.TO_FLOAT8_HW.value)
    first, second = ((0xA1D4C3B2A1 >> 8 * i & 0xFFFF) << 8 for i in (0, 2))
    of_both = (second << 32 | first).to_bytes(8, "little")
    assert bytes(of_both[int(selector, 0) >> 4 * i & 7] for i in range(4)) == (0xD4C3B2A1).to_bytes(4, "little")


@EVERYWHERE
@DTYPES
@ROUNDINGS
def test_triton_and_torch_store_equal_bytes(device: torch.device, dtype: torch.dtype, rounding: str) -> None:
    """Every target of the device; contraction of a product with what follows it must not change a byte. Slots of six
    rows in tiles of four: what is beyond the last row or column takes no part."""
    values = all_rows(dtype)
    require_equal_bytes(values, random_if(rounding, values, dtype), dtype, device, forms(device))
    target = machine_of(device).target
    for cols in (7, 20, 33):
        odd = values.view(-1, COLS)[:30, :cols].reshape(5, 6, cols)
        both = [Form(target, True, 8), Form(target, True, None)]
        require_equal_bytes(odd, random_if(rounding, odd, dtype), dtype, device, both)


AMAX_EXPONENTS = (127 - 100, 64, 127, 128, 127 + 63)  # of what a row's largest value is divided as: below 2^64
FACTOR_EXPONENTS = (127 - 121, 64, 127, 128, 127 + 108)  # of the quotients, which scales are the reciprocals of


@pytest.mark.gpu
def test_scales_are_divided_as_correctly_without_branches() -> None:
    """Over all mantissas of the divisor."""
    from device_functions import count_other_quotients_kernel

    count = torch.zeros(1, dtype=torch.int32, device="cuda")
    for dividend, exponents in (*((n, AMAX_EXPONENTS) for n in (127.0, 32767.0, 448.0)), (1.0, FACTOR_EXPONENTS)):
        for exponent in exponents:
            count_other_quotients_kernel[(1 << 13,)](count, dividend, exponent, 1024)
            assert count.item() == 0, (dividend, exponent)
