"""Pools for tests: small ones of every kind, and ones in pages full of poison that shows what was written."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashstate import Mamba3State, State, StatePool
from flashstate.state.formats import FORMATS, bits_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GAP = 3  # elements between the slots of a pool in pages
POISON = 0xFF
RINGS = {"heads": 4, "window": 4, "tokens": 3, "ring_dtype": torch.float32}
OF_DELTA_RINGS = {**RINGS, "value_dim": 3, "key_dim": 5, "key_heads": 2, "u_dtype": torch.float32}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "states": (StatePool.mamba2, {"heads": 2, "rows": 3, "cols": 5}),
    "mamba3": (StatePool.mamba3, {"heads": 2, "rows": 3, "cols": 8, "rank": 2, "angles": 3}),
    "rings": (StatePool.mamba2, {**RINGS, "rows": 3, "cols": 5, "groups": 2}),
    "rings of the delta rule": (StatePool.gated_delta, OF_DELTA_RINGS),
}


def make_pool(
    name: str = "float16", rounding: str = "stochastic", kind: str = "states", **options: Any
) -> StatePool[Any]:
    make, sizes = KINDS[kind]
    common = {"slots": 6, "layers": 2, "stream": 7, "seed": 1, "dtype": getattr(torch, name), "rounding": rounding}
    return make(**{**common, **sizes, **options})


def mamba3_beside_others(name: str, rounding: str, device: torch.device = CPU) -> StatePool[Any]:
    """A pool of a layer of Mamba-3 without angles, and of one that has a State alone; all slots are free."""
    options = {"layers": 1, "angles": 0, "kv_dtype": torch.float16, "device": device}
    other = State(torch.zeros(6, 4, 2, 2, device=device), stream=3)
    pool = StatePool.wrap([make_pool(name, rounding, "mamba3", **options).layer(0), other], null=0)
    pool.release(range(1, 6))
    return pool


def rings_of_both(name: str, rounding: str, **options: Any) -> StatePool[Any]:
    """A pool over memory of two others, of Mamba-2 and of the delta rule; all slots are free."""
    one, other = (make_pool(name, rounding, kind, **{**options, "layers": 1}) for kind in [*KINDS][2:])
    rings = [one.ring(0), replace(other.ring(0), start=one.ring(0).start, count=one.ring(0).count)]
    states = [one.layer(0), replace(other.layer(0), seed=one.layer(0).seed, stream=8)]
    windows = [pool.window(0) for pool in (one, other)]
    pool = StatePool.wrap(states, rings=rings, windows=windows, drafts=one.drafts, null=one.null, seed=1)
    pool.release([slot for slot in range(6) if slot != one.null])
    return pool


def left_by_a_prefill(n: int, device: torch.device = CPU) -> dict[str, Tensor]:
    """k, v and angle for n slots of Mamba-3, as views with strides on every axis."""
    generator = torch.Generator().manual_seed(n)
    left = {}
    for name, shape in {"k": (2, 2, 8), "v": (2, 3), "angle": (2, 3)}.items():
        values = torch.rand(*shape[::-1], 2 * n, generator=generator).to(device)[..., ::2]
        left[name] = values.permute(*range(values.dim())[::-1])
    return left


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


def gaps_are_poison(pool: StatePool[Any]) -> bool:
    """Whether all memory that is no slot of a pool is as `dirty` left it."""
    memory = {t.untyped_storage().data_ptr(): memory_of(t).clone() for t in tensors_of(pool)}
    for t in tensors_of(pool):
        storage = memory[t.untyped_storage().data_ptr()].untyped_storage()
        view = torch.empty(0, dtype=t.dtype, device=t.device).set_(storage, t.storage_offset(), t.shape, t.stride())
        bits_of(view).fill_(-1)
    return all(bool((bytes == POISON).all()) for bytes in memory.values())


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def seed_of(pool: StatePool[Any]) -> Tensor:
    return kept_by(pool)["seed"]


def dirty(pool: StatePool[Any]) -> None:
    """Poison all memory of a pool: NaN in every float format."""
    for tensor in tensors_of(pool):
        memory_of(tensor).fill_(POISON)


def poison(pool: StatePool[Any], slots: list[int]) -> None:
    """Poison what a pool has of these slots."""
    for tensor in tensors_of(pool):
        for slot in slots:
            bits_of(tensor)[slot].fill_(-1)


def beside_other_memory(name: str, rounding: str, device: torch.device = CPU) -> StatePool[Any]:
    """A pool in pages, whose second layer is transposed, with windows whose entries are neighbours of nothing."""
    dtype, seed = getattr(torch, name), torch.arange(6, device=device) * 0x5851F42D4C957F2D
    scale = poisoned(6, (2, 3), torch.float32, device) if FORMATS[dtype].scaled else None
    states = [State(poisoned(6, (2, 3, 5), dtype, device), scale, rounding=rounding, seed=seed, stream=40)]
    states.append(State(poisoned(6, (2, 5, 3), torch.bfloat16, device).mT, seed=seed, stream=40))
    windows = [poisoned(6, (4, 2, 9), torch.bfloat16, device)[:, 1, :, 1:7:2] for _ in range(2)]
    return StatePool.wrap(states, windows=windows, null=5, seed=0)


def is_clean(pool: StatePool[Any], slots: list[int]) -> bool:
    """Whether slots hold zeros, with scales of one and any seeds."""
    kept = [(part, tensor[slots]) for part, tensor in kept_by(pool).items() if part != "seed"]
    return all((t == 1).all() if "scale" in part else not bytes_of(t).any() for part, t in kept)


def fill(pool: StatePool[Any]) -> None:
    """Other values in every slot of all that a pool keeps but seeds."""
    generator = torch.Generator().manual_seed(0)
    for part, tensor in kept_by(pool).items():
        if part != "seed":
            tensor.copy_(torch.randint(1, 100, tensor.shape, generator=generator).to(tensor.dtype))
