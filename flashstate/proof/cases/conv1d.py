"""The cases of conv1d_step: their inputs, what they move, and their tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from flashstate.errors import ACTIVATION_DTYPES, dtype_name
from flashstate.ops import conv1d
from flashstate.ops.conv1d import ChannelProblem
from flashstate.proof.case import CASES, AnyCase, Cases
from flashstate.proof.inputs import Inputs, ProvenOp, Source, dtype, in_projection
from flashstate.reference.conv1d import conv1d_token
from flashstate.state.formats import label_of
from flashstate.state.signature import ACCESS_BYTES


@dataclass(frozen=True, eq=False)
class Windows:
    """Windows (slots, channels, length), or snapshots of them, as laws see states: one format, no scales, no seeds."""

    data: Tensor
    scale: None = None
    seed: None = None
    rounding: str = "nearest"
    rounds: int = 0
    stream: int = 0


def _bare(windows: Windows, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of conv1d_step, whose windows are bare tensors."""
    bare = {name: value.data if isinstance(value, Windows) else value for name, value in given.items()}
    return {"window": windows.data, **bare}


def _token(s: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> tuple[Tensor, Tensor]:
    """The output of one token (batch, channels), and the windows after it, in the dtype of those before it."""
    u = torch.cat([s, x[..., None].to(s.dtype)], 2)  # (batch, channels, length + 1)
    return conv1d_token(u[..., -weight.shape[1] :], weight, bias, activation), u[..., 1:]


CONV1D = ProvenOp(conv1d.CONV1D_STEP, _token, remembered=("x",), sizes={"width": "width"}, copies=True, takes=_bare)


@dataclass(frozen=True)
class ConvCase(AnyCase):
    """One problem for conv1d_step. `x` is the dtype of x, `parameters` that of weight and bias."""

    channels: int = 5
    width: int = 4  # K, inputs that an output depends on
    extra: int = 0  # entries of a window beyond K - 1
    window: str = "same"  # dtype of windows: "same" as that of x, or "float32"
    bias: bool = True
    activation: str | None = "silu"
    layout: str = "channels_last"  # of a window in memory, or "channels_first"
    sizes: ClassVar[Mapping[str, str]] = {"channels": "channels", "width": "width"}

    @property
    def format(self) -> str:
        return self.x if self.window == "same" else self.window

    @property
    def state_axes(self) -> tuple[int, int]:
        return self.channels, self.width - 1 + self.extra

    def in_format(self, name: str, rounding: str) -> ConvCase:
        """All tensors in one format."""
        known = tuple(map(dtype_name, ACTIVATION_DTYPES))
        if name not in known or rounding != "nearest":
            raise ValueError(f"windows are {', '.join(known)}, rounded to nearest, got {label_of(name, rounding)}")
        return replace(self, x=name, parameters=name, window="same")

    @property
    def problem(self) -> ChannelProblem:
        rows = [self.channels * dtype(name).itemsize for name in (self.x, self.format)]  # bytes of x and of an entry
        wide = self.layout == "channels_last" and not any(size % ACCESS_BYTES for size in rows)
        vector, shape = ACCESS_BYTES // dtype(self.x).itemsize if wide else 1, (self.channels, self.width)
        return ChannelProblem("conv1d_step", *shape, self.format, self.rounding, vector, self.batch, self.several)

    @property
    def token_bytes(self) -> int:
        return 2 * sum(self.lengths) * self.channels * dtype(self.x).itemsize

    @property
    def op(self) -> ProvenOp:
        return replace(CONV1D, every_token=self.extra == 0)

    @property
    def dtypes(self) -> dict[str, Any]:
        return {"x": self.x, "weight": self.parameters, "bias": self.bias and self.parameters}

    def snapshot_of(self, states: Tensor) -> Tensor:
        return states[..., self.extra :]

    def newest_of(self, states: Tensor) -> Tensor:
        return states[..., -1]

    def make_pool(self, source: Source) -> Windows:
        return Windows(self._laid_out(source.normal(self.slots, *self.state_axes, name=self.format)))

    def snapshots(self, rows: int, tokens: int, name: str, rounding: str, device: torch.device) -> Windows:
        shape = (rows, tokens, self.channels, self.width - 1)
        return Windows(self._laid_out(torch.ones(shape, dtype=dtype(name), device=device)))

    def _laid_out(self, windows: Tensor) -> Tensor:
        """Windows (..., channels, length) in the memory layout of the case."""
        return windows.mT.contiguous().mT if self.layout == "channels_last" else windows

    def as_views(self, inputs: Inputs) -> Inputs:
        """Channels far from each other, with other memory between them."""
        return inputs.changed(lambda x: in_projection(x.transpose(0, -1)).transpose(0, -1))


# In every group one token, several, and packed ones.
_GROUPS = (
    (
        ConvCase(3, 5, 4, x="float16", index="int64"),
        ConvCase(2, 70, 4, tokens=5),
        ConvCase(4, 33, 4, tokens=3, packed=True, x="float16", parameters="float16"),
    ),
    (
        ConvCase(1, 1, 2, bias=False, activation=None, slots=2),
        ConvCase(2, 33, 2, tokens=4, x="float16", window="float32", activation=None, index="int64"),
        ConvCase(4, 5, 5, extra=4, tokens=2, packed=True, x="float16", window="float32", layout="channels_first"),
    ),
    (
        ConvCase(3, 33, 3, extra=2, x="float16", window="float32", layout="channels_first"),
        ConvCase(2, 5, 7, tokens=3, x="float16", parameters="float16", layout="channels_first", bias=False),
        ConvCase(4, 70, 2, tokens=4, packed=True, layout="channels_first", activation=None, index="int64"),
    ),
    (
        ConvCase(2, 70, 6, extra=1, bias=False, slots=3),
        ConvCase(3, 1, 3, extra=3, tokens=4, x="float16"),
        ConvCase(3, 5, 8, extra=1, tokens=9, packed=True, bias=False, slots=4),
    ),
)
# Channels of real models, and a number of them that nothing divides, for compiled kernels.
_REAL = (
    ConvCase(4, 10240, 4, x="bfloat16", parameters="bfloat16", slots=16),
    ConvCase(64, 1280, 4, x="bfloat16", parameters="bfloat16", slots=200, tokens=4),
    ConvCase(64, 8448, 4, x="bfloat16", parameters="bfloat16", slots=80, tokens=6, packed=True, index="int64"),
    ConvCase(64, 10240, 4, x="bfloat16", slots=70, layout="channels_first"),
    ConvCase(4, 8448, 4, extra=6, x="bfloat16", window="float32", slots=16, tokens=6),
    ConvCase(4, 1283, 4, x="bfloat16", parameters="bfloat16", slots=9, tokens=4, bias=False),
    ConvCase(5, 1283, 4, extra=3, x="bfloat16", slots=9, tokens=6, packed=True, layout="channels_first"),
    ConvCase(5, 1280, 2, x="float16", window="float32", slots=9, tokens=6, packed=True, activation=None),
    ConvCase(4, 2048, 7, extra=5, x="bfloat16", parameters="bfloat16", slots=9, tokens=4, activation=None, bias=False),
)
CASES["conv1d_step"] = Cases(_GROUPS, _REAL)
