"""What pools keep per request, allocated for all layers at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from flashstate.basics import LARGEST_WINDOW
from flashstate.errors import LARGEST_INT32, check_dtype, check_flag, check_int
from flashstate.launch import uses_kernels
from flashstate.ops.conv1d import LARGEST_WIDTH, SMALLEST_WIDTH
from flashstate.state.formats import FORMATS
from flashstate.state.mamba3 import Mamba3State
from flashstate.state.ring import AnyRing, DeltaRing, Ring
from flashstate.state.state import State

RingT = TypeVar("RingT", bound=AnyRing)


@dataclass(frozen=True)
class Allocator:
    """Makes tensors of all layers, for all slots."""

    layers: int
    slots: int
    device: torch.device | str | None

    @torch.inference_mode(False)  # else only inference mode could change them
    def __call__(self, *shape: int, dtype: torch.dtype, clean: int = 0, layers: int | None = None) -> Tensor:
        """(layers, slots, ...), all 0, or all 1 if that is what a clean slot has."""
        filled = torch.ones if clean else torch.zeros
        return filled(layers or self.layers, self.slots, *shape, dtype=dtype, device=self.device)

    @torch.inference_mode(False)  # else only inference mode could change them
    def states(self, sizes: dict[str, int], dtype: torch.dtype, rounding: str, rounds: int, stream: int) -> list[State]:
        """States of zeros, one per layer, which share seeds if they need some. `sizes`: of a slot."""
        for name, size in {"slots": self.slots, "layers": self.layers, **sizes}.items():
            check_int(name, size, 1, LARGEST_INT32)
        check_int("stream", stream, 0, (1 << 32) - self.layers)
        check_dtype("dtype", dtype, tuple(FORMATS))
        heads, rows, cols = sizes.values()
        uses_kernels(torch.get_default_device() if self.device is None else torch.device(self.device))  # or refuses it
        data = self(heads, rows, cols, dtype=dtype)
        scale = self(heads, rows, dtype=torch.float32, clean=1) if FORMATS[dtype].scaled else [None] * self.layers
        seed = None if rounding == "nearest" else torch.zeros(self.slots, dtype=torch.int64, device=self.device)
        return [
            State(data[i], scale[i], rounding=rounding, rounds=rounds, seed=seed, stream=stream + i)
            for i in range(self.layers)
        ]

    def mamba3(self, states: Sequence[State], rank: int, angles: int, dtype: torch.dtype) -> list[Mamba3State]:
        """Layers of Mamba-3 with these states, and with k, v and, unless there are none, angles of zeros."""
        _, heads, rows, cols = states[0].data.shape
        check_int("rank", rank, 1, LARGEST_INT32)
        check_int("angles", angles, 0, cols // 2)
        check_dtype("kv_dtype", dtype)
        kept = [self(rank, heads, cols, dtype=dtype), self(heads, rows, dtype=dtype)]
        if angles:
            kept.append(self(heads, angles, dtype=torch.float32))
        return [Mamba3State(*of_layer) for of_layer in zip(states, *kept, strict=True)]

    def windows(self, channels: int, width: int, drafts: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Windows of zeros, (slots, channels, length) each, with room to roll back so many tokens; or none."""
        check_int("conv_channels", channels, 0, LARGEST_INT32)
        check_int("conv_width", width, SMALLEST_WIDTH, LARGEST_WIDTH)
        check_int("drafts", drafts, 0, LARGEST_INT32)
        if drafts and not channels:
            raise ValueError(f"drafts are for windows: conv_channels must be given too, got drafts={drafts}")
        check_dtype("conv_dtype", dtype)
        return self(width - 1 + drafts, channels, dtype=dtype).transpose(2, 3).unbind() if channels else ()

    def rings(
        self, states: Sequence[State], window: int, tokens: int, groups: int | None, dtype: torch.dtype | None
    ) -> list[Ring]:
        """Empty rings of Mamba-2 for layers of these states; none without a window."""
        _, heads, rows, cols = states[0].data.shape
        length = ring_length(window, tokens, groups=groups, ring_dtype=dtype)
        if length == 0:
            return []
        groups = 1 if groups is None else groups
        dtype = torch.bfloat16 if dtype is None else dtype
        check_shared("groups", groups, heads)
        check_dtype("ring_dtype", dtype)
        x, B = self(heads, length, rows, dtype=dtype), self(groups, length, cols, dtype=dtype)
        return self._with_cursors(Ring, window, x, B, self(heads, length, dtype=torch.float32))

    def delta_rings(
        self,
        states: Sequence[State],
        window: int,
        tokens: int,
        key_heads: int | None,
        per_channel: bool | None,
        dtype: torch.dtype | None,
        u_dtype: torch.dtype | None,
    ) -> list[DeltaRing]:
        """Empty rings of the delta rule for layers of these states; none without a window."""
        _, heads, rows, cols = states[0].data.shape
        of_rings = {"key_heads": key_heads, "per_channel": per_channel, "ring_dtype": dtype, "u_dtype": u_dtype}
        length = ring_length(window, tokens, **of_rings)
        if length == 0:
            return []
        key_heads = heads if key_heads is None else key_heads
        per_channel = False if per_channel is None else per_channel
        dtype = torch.bfloat16 if dtype is None else dtype
        u_dtype = torch.float16 if u_dtype is None else u_dtype
        check_shared("key_heads", key_heads, heads)
        check_flag("per_channel", per_channel)
        check_dtype("ring_dtype", dtype)
        check_dtype("u_dtype", u_dtype)
        k, u = self(key_heads, length, cols, dtype=dtype), self(heads, length, rows, dtype=u_dtype)
        decay = self(heads, length, cols, dtype=dtype) if per_channel else self(heads, length, dtype=torch.float32)
        return self._with_cursors(DeltaRing, window, k, u, decay)

    @torch.inference_mode(False)  # else only inference mode could change them
    def _with_cursors(self, kind: Callable[..., RingT], window: int, *kept: Tensor) -> list[RingT]:
        """Rings over these tensors, one per layer, which share cursors."""
        start, count = (self(dtype=torch.int32, layers=1)[0] for _ in range(2))
        return [kind(*of_layer, start, count, window) for of_layer in zip(*kept, strict=True)]


def ring_length(window: int, tokens: int, **given: Any) -> int:
    """Rows of a ring with room for its window and for so many tokens of a call; 0 without a window. Raises where other
    arguments that only rings have a use for were given without one."""
    check_int("window", window, 0, LARGEST_WINDOW)
    if window == 0 and tokens != 1:
        raise ValueError(f"tokens are for rings: window must be given too, got tokens={tokens}")
    if window == 0:
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name} is for rings: window must be given too, got {name}={value}")
        return 0
    check_int("tokens", tokens, 1, window)
    return window + tokens


def check_shared(name: str, number: int, heads: int) -> None:
    """Raise unless heads can share so many of something evenly."""
    check_int(name, number, 1, heads)
    if heads % number:
        raise ValueError(f"{name} must divide the {heads} heads, got {number}")
