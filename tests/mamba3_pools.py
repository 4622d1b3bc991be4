"""Small pools with layers of Mamba-3, what their slots hold, and what a prefill leaves for them."""

from typing import Any

import torch
from pools import CPU, POISON, bytes_of, memory_of
from torch import Tensor

from flashstate import State, StatePool
from flashstate.state.mamba3 import Mamba3State

KINDS = [torch.float32, torch.bfloat16, torch.float16]
SLOTS, HEADS, ROWS, COLS, RANK, ANGLES = 6, 2, 3, 8, 2, 3  # as many angles as rows
SHAPES = {"k": (RANK, HEADS, COLS), "v": (HEADS, ROWS), "angle": (HEADS, ANGLES)}
Pool = StatePool[Mamba3State]


def make_pool(**options: Any) -> Pool:
    sizes = {"slots": SLOTS, "layers": 2, "heads": HEADS, "rows": ROWS, "cols": COLS, "rank": RANK, "angles": ANGLES}
    return StatePool.mamba3(**{**sizes, "stream": 7, "seed": 1, **options})


def in_format(name: str, rounding: str, **options: Any) -> Pool:
    return make_pool(dtype=getattr(torch, name), rounding=rounding, **options)


def parts(layer: Any) -> list[Tensor]:
    """What a layer has for every slot: data, scale, k, v and angle, where it has them."""
    if isinstance(layer, State):
        return [tensor for tensor in (layer.data, layer.scale) if tensor is not None]
    return [tensor for tensor in (*parts(layer.ssm), layer.k, layer.v, layer.angle) if tensor is not None]


def parts_of(pool: StatePool[Any]) -> list[Tensor]:
    return [tensor for i in range(pool.layers) for tensor in parts(pool.layer(i))]


def seed_of(pool: Pool) -> Tensor:
    seed = pool.layer(0).ssm.seed
    assert seed is not None
    return seed


def dirty(pool: StatePool[Any]) -> None:
    for tensor in parts_of(pool):
        memory_of(tensor).fill_(POISON)  # NaN in every float format


def is_clean(pool: StatePool[Any], slots: list[int]) -> bool:
    for layer in map(pool.layer, range(pool.layers)):
        scale = (layer.ssm if isinstance(layer, Mamba3State) else layer).scale
        for tensor in parts(layer):
            if not (tensor[slots] == 1).all() if tensor is scale else bytes_of(tensor[slots]).any():
                return False
    return True


def is_poison(pool: StatePool[Any], slots: list[int]) -> bool:
    return all(bool((bytes_of(tensor[slots]) == POISON).all()) for tensor in parts_of(pool))


def fill(pool: Pool) -> None:
    """Other values in every slot of every state, scales among them."""
    generator = torch.Generator().manual_seed(0)
    for tensor in parts_of(pool):
        numbers = torch.randint(1, 100, tensor.shape, generator=generator)
        tensor.copy_(numbers.to(tensor.device).to(tensor.dtype))


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
