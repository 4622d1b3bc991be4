"""Small pools with layers of Mamba-3, and what a prefill leaves for them."""

from typing import Any

import torch
from pools import CPU, dirty, kept_by
from torch import Tensor

from flashstate import State, StatePool
from flashstate.state.mamba3 import Mamba3State

__all__ = ["dirty"]  # of all pools

SLOTS, HEADS, ROWS, COLS, RANK, ANGLES = 6, 2, 3, 8, 2, 3  # as many angles as rows
SHAPES = {"k": (RANK, HEADS, COLS), "v": (HEADS, ROWS), "angle": (HEADS, ANGLES)}
Pool = StatePool[Mamba3State]


def make_pool(**options: Any) -> Pool:
    sizes = {"slots": SLOTS, "layers": 2, "heads": HEADS, "rows": ROWS, "cols": COLS, "rank": RANK, "angles": ANGLES}
    return StatePool.mamba3(**{**sizes, "stream": 7, "seed": 1, **options})


def in_format(name: str, rounding: str, **options: Any) -> Pool:
    return make_pool(dtype=getattr(torch, name), rounding=rounding, **options)


def beside_others(name: str, rounding: str, device: torch.device = CPU) -> StatePool[Any]:
    """A pool of a layer of Mamba-3 without angles, and of one that has a State alone; all slots are free."""
    layer = in_format(name, rounding, layers=1, angles=0, kv_dtype=torch.float16, device=device).layer(0)
    other = State(torch.zeros(SLOTS, 4, 2, 2, device=device), stream=3)
    pool = StatePool.wrap([layer, other], null=0)
    pool.release(range(1, SLOTS))
    return pool


def parts_of(pool: StatePool[Any]) -> list[Tensor]:
    """What layers have for every slot: data, scale, k, v and angle, where they have them."""
    return [tensor for part, tensor in kept_by(pool).items() if part != "seed"]


def left_by_a_prefill(n: int, device: torch.device = CPU) -> dict[str, Tensor]:
    """k, v and angle for n slots, as views with strides on every axis."""
    generator = torch.Generator().manual_seed(n)
    left = {}
    for name, shape in SHAPES.items():
        values = torch.rand(*shape[::-1], 2 * n, generator=generator).to(device)[..., ::2]
        left[name] = values.permute(*range(values.dim())[::-1])
    return left
