"""The formats a state can be stored in, and how float32 values become their bytes; docs/formats.md has the words."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flashstate.state.rounding import to_bfloat16_stochastic, to_float16_stochastic

ROUNDINGS = ("nearest", "stochastic", "stochastic_hw")


@dataclass(frozen=True)
class Format:
    """How one dtype stores a state, and which roundings it knows."""

    name: str
    dtype: torch.dtype
    roundings: tuple[str, ...]
    to_stochastic: Callable[[Tensor, Tensor], Tensor] | None = None


FORMATS = {
    f.dtype: f
    for f in (
        Format("float32", torch.float32, ("nearest",)),
        Format("bfloat16", torch.bfloat16, ("nearest", "stochastic"), to_bfloat16_stochastic),
        Format("float16", torch.float16, ROUNDINGS, to_float16_stochastic),
    )
}

# Every format with every rounding that runs on any device.
PORTABLE_FORMATS = tuple((f.name, r) for f in FORMATS.values() for r in f.roundings if r != "stochastic_hw")


def label_of(name: str, rounding: str) -> str:
    """A format and its rounding in one word or two."""
    return name if rounding == "nearest" else f"{name} {rounding}"


def decode(stored: Tensor) -> Tensor:
    """The float32 values that stored bytes stand for."""
    return stored.float()


def encode(values: Tensor, dtype: torch.dtype, random: Tensor | None = None) -> Tensor:
    """float32 values in the format `dtype`: to nearest even, or stochastically where 16 random bits each are given."""
    if random is None:
        return values.to(dtype)
    to_stochastic = FORMATS[dtype].to_stochastic
    assert to_stochastic is not None, f"{dtype} is not rounded"
    return to_stochastic(values, random)
