"""Pools with rings, what their slots hold, and steps of a model on them."""

from typing import Any

import torch
from pools import POISON, bytes_of, memory_of
from torch import Tensor

import flashstate
from flashstate import Ring, State, StatePool
from flashstate.state.formats import FORMATS

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


def parts_of(pool: StatePool) -> dict[str, Tensor]:
    """All that a pool keeps for slots, by name; cursors, which layers share, once."""
    states = [(i, pool.layer(i)) for i in range(pool.layers)]
    kept = {f"{name} {i}": getattr(state, name) for i, state in states for name in ("data", "scale")}
    kept |= {f"{name} {i}": getattr(pool.ring(i), name) for i in range(pool.layers) for name in ("x", "B", "dt")}
    kept |= {"start": pool.ring(0).start, "count": pool.ring(0).count, "seed": pool.layer(0).seed}
    return {name: tensor for name, tensor in kept.items() if tensor is not None}


def dirty(pool: StatePool) -> None:
    """Poison all memory of a pool: NaN in every float."""
    for tensor in parts_of(pool).values():
        memory_of(tensor).fill_(POISON)


def is_clean(pool: StatePool, slots: list[int]) -> bool:
    clean = {name: tensor[slots] for name, tensor in parts_of(pool).items() if name != "seed"}
    ones = all(bool((tensor == 1).all()) for name, tensor in clean.items() if "scale" in name)
    return ones and not any(bytes_of(tensor).any() for name, tensor in clean.items() if "scale" not in name)


def is_poison(pool: StatePool, slots: list[int]) -> bool:
    return all(bool((bytes_of(tensor[slots]) == POISON).all()) for tensor in parts_of(pool).values())


def tokens_for(rows: int, tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Activations of so many tokens for so many rows, and A."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(rows, tokens, *sizes, generator=generator).to(dtype)

    return {"x": normal(HEADS, ROWS), "dt": normal(HEADS), "A": A, "B": normal(GROUPS, COLS), "C": normal(GROUPS, COLS)}


def replay(pool: StatePool, slots: Any, tokens: dict[str, Tensor], accepted: list[int] | None = None) -> list[Tensor]:
    """One step of a model: the outputs of its layers, whose inputs are those of the first, turned around."""
    plan = pool.plan(torch.as_tensor(slots), tokens["x"].shape[1])
    outputs = []
    for i in range(pool.layers):
        given = {**tokens, "x": tokens["x"].flip(-1) if i else tokens["x"]}
        outputs.append(flashstate.mamba2_replay(pool.layer(i), pool.ring(i), **given, plan=plan))
    pool.commit(plan, None if accepted is None else torch.tensor(accepted))
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


def in_pages(pages: Tensor, start: int, dtype: torch.dtype, cursors: tuple[Tensor, Tensor]) -> tuple[State, Ring]:
    """The state and the ring of a layer, one after the other, from this byte of every page (a row of bytes) on."""
    kinds = {"data": ((HEADS, ROWS, COLS), dtype), "scale": ((HEADS, ROWS), torch.float32)}
    kinds |= {part: (shape, torch.float32 if part == "dt" else torch.bfloat16) for part, shape in SHAPES.items()}
    if not FORMATS[dtype].scaled:
        del kinds["scale"]
    tensors = {}
    for part, (shape, kind) in kinds.items():
        size = torch.Size(shape).numel() * kind.itemsize
        tensors[part] = pages[:, start : start + size].view(kind).unflatten(1, shape)
        start += -(-size // 8) * 8
    state = State(tensors.pop("data"), tensors.pop("scale", None))
    return state, Ring(**tensors, start=cursors[0], count=cursors[1], window=WINDOW)
