"""Mixers that are a short convolution between two gates and have no other state: LFM2, LFM2-MoE and LFM3."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashstate.integrations.transformers.memory import Memory, Sizes
from flashstate.integrations.transformers.mixers.tokens import masked


class ShortConv:
    """Kind of the mixers whose convolution is all they keep."""

    def sizes(self, mixer: Any) -> Sizes:
        return Sizes(mixer.conv.in_channels, mixer.conv_kernel_size)

    def view(self, recurrent: Tensor) -> Tensor:
        raise TypeError("mixers with only a convolution have no recurrent state")

    def forward(self, mixer: Any, hidden: Tensor, memory: Memory, mask: Tensor | None, prompt: bool) -> Tensor:
        before, behind, x = mixer.in_proj(masked(hidden, mask)).chunk(3, dim=-1)
        return mixer.out_proj(behind * memory.convolve(before * x, mixer.conv.weight, mixer.conv.bias, None))


SHORT_CONV = ShortConv()
