"""Pools for tests: small ones, and ones in pages full of poison that shows what was written."""

from typing import Any

import pytest
import torch
from torch import Tensor

from flashstate import Mamba3State, State, StatePool
from flashstate.state.formats import FORMATS, PORTABLE_FORMATS

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DEVICES = pytest.mark.parametrize("device", [CPU, pytest.param(CUDA, marks=pytest.mark.gpu)], ids=str)
EVERY_FORMAT = pytest.mark.parametrize(("name", "rounding"), PORTABLE_FORMATS)
WITHOUT_SCALES = [(name, rounding) for name, rounding in PORTABLE_FORMATS if not FORMATS[getattr(torch, name)].scaled]
SHAPE = {"heads": 2, "rows": 3, "cols": 5}
GAP = 3  # elements between the slots of a pool in pages
POISON = 0xFF


def make_pool(name: str = "float16", rounding: str = "stochastic", **options: Any) -> StatePool:
    sizes = {"slots": 6, "layers": 2, **SHAPE, "stream": 7, "seed": 1}
    return StatePool.mamba2(**{**sizes, "dtype": getattr(torch, name), "rounding": rounding, **options})


def in_pages(
    formats: list[tuple[str, str]], slots: int, shape: tuple[int, ...], device: torch.device, transposed: bool = False
) -> list[State]:
    """States of these formats that share a seed, with gaps between their slots; every byte is poison."""
    seed = torch.arange(slots, device=device) * 0x5851F42D4C957F2D
    states = []
    for i, (name, rounding) in enumerate(formats):
        dtype = getattr(torch, name)
        scale = poisoned(slots, shape[:-1], torch.float32, device) if FORMATS[dtype].scaled else None
        heads, rows, cols = shape
        data = poisoned(slots, (heads, cols, rows) if transposed else shape, dtype, device)
        data = data.mT if transposed else data
        states.append(State(data, scale, rounding=rounding, seed=seed, stream=40 + i))
    return states


def poisoned(slots: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """(slots, *shape) with gaps between slots, all of it bytes that no clean slot has: NaN in every float format."""
    size = torch.Size(shape).numel()
    memory = torch.empty(slots, size + GAP, dtype=dtype, device=device)
    memory.view(torch.uint8).fill_(POISON)
    return memory[:, :size].unflatten(1, shape)


def kept_by(pool: StatePool[Any]) -> dict[str, Tensor]:
    """All that a pool keeps for slots, by name; what layers share, once."""
    kept: dict[str, Tensor | None] = {}
    for i in range(pool.layers):
        layer = pool.layer(i)
        state = layer.ssm if isinstance(layer, Mamba3State) else layer
        kept |= {f"data {i}": state.data, f"scale {i}": state.scale}
        if isinstance(layer, Mamba3State):
            kept |= {f"{part} {i}": getattr(layer, part) for part in ("k", "v", "angle")}
        if pool.has_rings:
            kept |= {f"ring.{part} {i}": getattr(pool.ring(i), part) for part in pool.ring(i).written}
            kept |= {"start": pool.ring(i).start, "count": pool.ring(i).count}
        if pool.has_windows:
            kept[f"window {i}"] = pool.window(i)
        kept["seed"] = kept.get("seed") if state.seed is None else state.seed
    return {part: tensor for part, tensor in kept.items() if tensor is not None}


def tensors_of(pool: StatePool[Any]) -> list[Tensor]:
    return list(kept_by(pool).values())


def memory_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's storage, so that those around a view count too."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def gaps_are_poison(pool: StatePool) -> bool:
    """Whether the memory between the slots of a pool in pages is as it was."""
    pages = [t for t in tensors_of(pool) if t.stride(0) == t[0].numel() + GAP]
    return all(bool((memory_of(t).view(len(t), -1)[:, t[0].nbytes :] == POISON).all()) for t in pages)


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def same(one: Tensor, other: Tensor) -> bool:
    """Equal bytes; a NaN is equal to any NaN."""
    one, other = one.detach().cpu(), other.detach().cpu()
    if one.dtype in (torch.float32, torch.bfloat16, torch.float16):
        if not torch.equal(one.isnan(), other.isnan()):
            return False
        one, other = (torch.where(t.isnan(), torch.zeros_like(t), t) for t in (one, other))
    return torch.equal(*(bytes_of(t.clone(memory_format=torch.contiguous_format)) for t in (one, other)))


def seed_of(pool: StatePool[Any]) -> Tensor:
    return kept_by(pool)["seed"]


def dirty(pool: StatePool[Any]) -> None:
    """Poison all memory of a pool: NaN in every float format."""
    for tensor in tensors_of(pool):
        memory_of(tensor).fill_(POISON)


def is_clean(pool: StatePool[Any], slots: list[int]) -> bool:
    """Whether slots hold zeros, with scales of one and any seeds."""
    kept = [(part, tensor[slots]) for part, tensor in kept_by(pool).items() if part != "seed"]
    return all((t == 1).all() if "scale" in part else not bytes_of(t).any() for part, t in kept)


def is_poison(pool: StatePool[Any], slots: list[int]) -> bool:
    return all(bool((bytes_of(tensor[slots]) == POISON).all()) for tensor in tensors_of(pool))


def fill(pool: StatePool[Any]) -> None:
    """Other values in every slot of all that a pool keeps but seeds."""
    generator = torch.Generator().manual_seed(0)
    for part, tensor in kept_by(pool).items():
        if part != "seed":
            tensor.copy_(torch.randint(1, 100, tensor.shape, generator=generator).to(tensor.dtype))
