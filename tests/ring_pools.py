"""Pools with rings, and steps of a model on them."""

from typing import Any

import torch
from torch import Tensor

import flashstate
from flashstate import Ring, StatePool

SLOTS, LAYERS, HEADS, ROWS, COLS, GROUPS = 6, 2, 4, 3, 5, 2
WINDOW, TOKENS = 4, 3
LENGTH = WINDOW + TOKENS
SHAPES = {"x": (HEADS, LENGTH, ROWS), "B": (GROUPS, LENGTH, COLS), "dt": (HEADS, LENGTH)}  # of a slot
A = -torch.linspace(0.5, 2.0, HEADS)


def make_pool(**options: Any) -> StatePool:
    sizes = {"slots": SLOTS, "layers": LAYERS, "heads": HEADS, "rows": ROWS, "cols": COLS, "groups": GROUPS}
    kinds = {"window": WINDOW, "tokens": TOKENS, "ring_dtype": torch.float32, "stream": 7, "seed": 1}
    return StatePool.mamba2(**{**sizes, **kinds, **options})


def in_format(name: str, rounding: str, **options: Any) -> StatePool:
    return make_pool(dtype=getattr(torch, name), rounding=rounding, **options)


def tokens_for(rows: int, tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Activations of so many tokens for so many rows, and A."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(rows, tokens, *sizes, generator=generator).to(dtype)

    return {"x": normal(HEADS, ROWS), "dt": normal(HEADS), "A": A, "B": normal(GROUPS, COLS), "C": normal(GROUPS, COLS)}


def replay(pool: StatePool, slots: Any, tokens: dict[str, Tensor], accepted: list[int] | None = None) -> list[Tensor]:
    """One step of a model: the outputs of its layers, whose inputs are those of the first, turned around."""
    device = pool.ring(0).start.device
    tokens = {name: tensor.to(device) for name, tensor in tokens.items()}
    plan = pool.plan(torch.as_tensor(slots, device=device), tokens["x"].shape[1])
    outputs = []
    for i in range(pool.layers):
        given = {**tokens, "x": tokens["x"].flip(-1) if i else tokens["x"]}
        outputs.append(flashstate.mamba2_replay(pool.layer(i), pool.ring(i), **given, plan=plan))
    pool.commit(plan, None if accepted is None else torch.tensor(accepted, device=device))
    return outputs


def fill(pool: StatePool, slots: list[int]) -> None:
    """Give these slots states, and rings that have wrapped."""
    for turn in range(5):
        replay(pool, slots, tokens_for(len(slots), TOKENS, turn), [turn % 3 + 1] * len(slots))


def rings_of(shapes: dict[str, tuple[int, ...]], layers: int = LAYERS, kind: torch.dtype = torch.float32) -> list[Ring]:
    """Rings for layers, each with memory of its own but for the cursors."""
    start, count = (torch.zeros(SLOTS, dtype=torch.int32) for _ in range(2))
    dtypes = {"x": kind, "B": kind, "dt": torch.float32}
    return [
        Ring(**{part: torch.zeros(SLOTS, *shapes[part], dtype=dtypes[part]) for part in shapes}, start=start,
             count=count, window=WINDOW)
        for _ in range(layers)
    ]  # fmt: skip
