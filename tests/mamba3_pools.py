"""Small pools with layers of Mamba-3, and what a prefill leaves for them."""

from typing import Any

import torch
from pools import CPU, dirty, kept_by
from torch import Tensor

from flashstate import StatePool
from flashstate.state.mamba3 import Mamba3State

__all__ = ["dirty"]  # of all pools

KINDS = [torch.float32, torch.bfloat16, torch.float16]
SLOTS, HEADS, ROWS, COLS, RANK, ANGLES = 6, 2, 3, 8, 2, 3  # as many angles as rows
SHAPES = {"k": (RANK, HEADS, COLS), "v": (HEADS, ROWS), "angle": (HEADS, ANGLES)}
Pool = StatePool[Mamba3State]


def make_pool(**options: Any) -> Pool:
    sizes = {"slots": SLOTS, "layers": 2, "heads": HEADS, "rows": ROWS, "cols": COLS, "rank": RANK, "angles": ANGLES}
    return StatePool.mamba3(**{**sizes, "stream": 7, "seed": 1, **options})


def in_format(name: str, rounding: str, **options: Any) -> Pool:
    return make_pool(dtype=getattr(torch, name), rounding=rounding, **options)


def parts_of(pool: StatePool[Any]) -> list[Tensor]:
    """What layers have for every slot: data, scale, k, v and angle, where they have them."""
    return [tensor for part, tensor in kept_by(pool).items() if part != "seed"]


def left_by_a_prefill(n: int, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> dict[str, Tensor]:
    """k, v and angle for n slots, as views with strides on every axis."""
    generator = torch.Generator().manual_seed(n)
    left = {}
    for name, shape in SHAPES.items():
        axes = (*shape, n)[::-1]
        kind = torch.float32 if name == "angle" else dtype
        values = torch.rand(*axes[:-1], 2 * axes[-1], generator=generator).to(device, kind)[..., ::2]
        left[name] = values.permute(0, *range(values.dim() - 1, 0, -1))
        assert left[name].shape == (n, *shape)
    return left
