"""The formats a state can be stored in, and how float32 values become their bytes; docs/formats.md has the words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flashstate.basics import ROUNDINGS_OF
from flashstate.state import rounding

SMALLEST_AMAX = 2.0**-100  # a row whose largest magnitude is below is stored as zeros


@dataclass(frozen=True)
class Format:
    """How one dtype stores a state."""

    name: str
    dtype: torch.dtype
    to_stochastic: Callable[[Tensor, Tensor], Tensor] | None = None
    largest: int | None = None  # of block-scaled formats: the stored value that a row's largest magnitude becomes

    @property
    def roundings(self) -> tuple[str, ...]:
        """The roundings that this format knows."""
        return ROUNDINGS_OF[self.name]

    @property
    def scaled(self) -> bool:
        """Whether every row has a float32 scale beside it."""
        return self.largest is not None

    @property
    def whole(self) -> bool:
        """Whether whole numbers are stored."""
        return not self.dtype.is_floating_point

    @property
    def largest_scale(self) -> float:
        """The largest scale with which `largest` decodes to a finite value: that of a row up to the largest float32."""
        assert self.largest is not None
        exact = torch.tensor(torch.finfo(torch.float32).max / self.largest, dtype=torch.float64)
        scale = exact.float()
        return float(scale if scale.double() <= exact else scale.nextafter(torch.zeros_like(scale)))


FORMATS = {
    f.dtype: f
    for f in (
        Format("float32", torch.float32),
        Format("bfloat16", torch.bfloat16, rounding.to_bfloat16_stochastic),
        Format("float16", torch.float16, rounding.to_float16_stochastic),
        Format("int16", torch.int16, rounding.to_integer_stochastic, 32767),
        Format("int8", torch.int8, rounding.to_int8_stochastic, 127),
        Format("float8_e4m3fn", torch.float8_e4m3fn, rounding.to_float8_stochastic, 448),
    )
}

DTYPES = {format.name: dtype for dtype, format in FORMATS.items()}

# Every format with every rounding that runs on any device.
PORTABLE_FORMATS = tuple((f.name, r) for f in FORMATS.values() for r in f.roundings if r != "stochastic_hw")


def label_of(name: str, rounding: str) -> str:
    """A format and its rounding in one word or two."""
    return name if rounding == "nearest" else f"{name} {rounding}"


class Encoded(NamedTuple):
    """Values as they are stored: the data, and the scale of every row where the format has scales."""

    data: Tensor
    scale: Tensor | None


def decode(data: Tensor, scale: Tensor | None = None) -> Tensor:
    """The float32 values (..., cols) that stored data (..., cols) and its scale (...) stand for."""
    return data.float() if scale is None else data.float() * scale[..., None]


def encode(values: Tensor, dtype: torch.dtype, random: Tensor | None = None) -> Encoded:
    """float32 values in the format `dtype`: to nearest even, or stochastically where 16 random bits each are given."""
    fmt = FORMATS[dtype]
    if fmt.largest is None:
        return Encoded(_rounded(values, fmt, random), None)
    amax = values.abs().amax(-1)  # NaN where a row holds one
    normal = amax.isfinite() & (amax >= SMALLEST_AMAX)
    e = _factor(torch.where(normal, amax, fmt.largest), fmt.largest)
    scale = (torch.ones_like(e) / e).clamp(max=fmt.largest_scale)  # number / tensor is not a division
    scale = torch.where(normal, scale, torch.where(amax.isfinite(), 1.0, torch.nan))
    product = torch.where(normal[..., None], values.double() * e[..., None].double(), 0.0)  # exact: 48 bits
    return Encoded(_rounded(product if fmt.whole else product.float(), fmt, random), scale)


def _factor(amax: Tensor, largest: int) -> Tensor:
    """largest / amax, rounded down: times it no magnitude up to amax exceeds `largest`, so nothing is clamped."""
    e = torch.full_like(amax, largest) / amax
    return torch.where(e.double() * amax.double() > largest, e.nextafter(torch.zeros_like(e)), e)


def _rounded(values: Tensor, fmt: Format, random: Tensor | None) -> Tensor:
    if random is None:
        return (values.round() if fmt.whole else values).to(fmt.dtype)
    assert fmt.to_stochastic is not None, f"{fmt.name} is not rounded"
    return fmt.to_stochastic(values, random).to(fmt.dtype)


def bits_of(tensor: Tensor) -> Tensor:
    """A tensor as whole numbers in the same memory: what copies them changes no bit, not even of a NaN."""
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
