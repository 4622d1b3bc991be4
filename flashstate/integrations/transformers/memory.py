"""Where a mixer finds its windows and states during one call: in a pool, in a stock cache, or in scratch tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from flashstate.ops.conv1d import conv1d_step
from flashstate.ops.gated_delta import gated_delta_step
from flashstate.ops.gated_delta_replay import gated_delta_replay
from flashstate.ops.mamba2 import mamba2_step
from flashstate.ops.mamba2_replay import mamba2_replay
from flashstate.state.ring import AnyRing, DeltaRing, Plan, Ring
from flashstate.state.slots import Slots
from flashstate.state.state import State


class Sizes(NamedTuple):
    """What a mixer keeps for every row of a batch."""

    channels: int  # of its convolution
    width: int
    state: tuple[int, int, int] | None = None  # heads, rows and columns, as ops have them; None: only a convolution


@dataclass(frozen=True)
class Memory:
    """The windows and states of one mixer in one call, and which of them the rows of the batch have.

    window, window_slots: of its convolution.
    history: inputs before the tokens of the call before, in a window that rolls back.
    state, slots: recurrent, in whatever format; None for a mixer that has none.
    ring, plan: for replay.
    """

    window: Tensor
    window_slots: Slots | None = None
    history: int | None = None
    state: State | None = None
    slots: Slots | None = None
    ring: AnyRing | None = None
    plan: Plan | None = None

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        """`conv1d_step` of tokens x, (batch, T, channels), whose result has that shape; weight: (channels, 1, K)."""
        return conv1d_step(
            self.window, x, weight.squeeze(1), bias, activation=activation, history=self.history,
            slots=self.window_slots,
        )  # fmt: skip

    def select(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **more: Any) -> Tensor:
        """`mamba2_step` behind `convolve`, or `mamba2_replay` where there is a ring; tokens are (batch, T, ...)."""
        assert self.state is not None
        if isinstance(self.ring, Ring):
            return mamba2_replay(self.state, self.ring, x, dt, A, B, C, plan=self.plan, **more)
        return mamba2_step(self.state, x, dt, A, B, C, slots=self.slots, early=True, **more)

    def correct(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, **more: Any) -> Tensor:
        """`gated_delta_step` behind `convolve`, or `gated_delta_replay` where there is a ring; tokens are (batch, T,
        ...). A ring keeps decays per channel in the dtype of keys, though some gates give them in float32."""
        assert self.state is not None
        if isinstance(self.ring, DeltaRing):
            a = a.to(self.ring.decay.dtype) if self.ring.per_channel else a
            return gated_delta_replay(self.state, self.ring, q, k, v, a, b, plan=self.plan, early=True, **more)
        return gated_delta_step(self.state, q, k, v, a, b, slots=self.slots, early=True, **more)
