"""Root-mean-square norms of rows, gated or not."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, gate: Tensor | None = None, *, silu: bool = True) -> Tensor:
    """The norm of every head of every row, x: (rows, heads, n), in float32, rounded once to the dtype of x.

    weight: (n,), or (heads, n).
    gate: as x; outputs are multiplied with silu(gate), or with sigmoid(gate).
    """
    wide = x.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()  # (rows, heads, n)
    if gate is not None:
        wide = gate.float()
        y = y * (torch.nn.functional.silu(wide) if silu else torch.sigmoid(wide))
    return y.to(x.dtype)
