"""Pools of every kind, with states alone, windows, rings or the states of Mamba-3: what a slot has stays together."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import mamba3_pools
import pools
import pytest
import ring_pools
import torch
from pools import (
    CPU,
    CUDA,
    DEVICES,
    EVERY_FORMAT,
    POISON,
    dirty,
    fill,
    gaps_are_poison,
    in_pages,
    is_clean,
    is_poison,
    kept_by,
    same,
    seed_of,
)
from torch import Tensor

from flashstate import Mamba3State, State, StatePool

SLOTS, LAYERS = 6, 2
Slots = list[int]


class Kind(NamedTuple):
    """make: a pool of a format and a rounding. use: what pools of this kind alone do to requests in slots."""

    make: Callable[..., StatePool[Any]]
    use: Callable[[StatePool[Any], Slots], object] = lambda pool, slots: None


def in_poisoned_pages(name: str, rounding: str, device: torch.device = CPU, **options: Any) -> StatePool:
    """A pool in pages, with one layer of the format and one of float32; all its slots are free."""
    pool = StatePool.wrap(in_pages([(name, rounding), ("float32", "nearest")], SLOTS, (2, 3, 5), device), seed=0)
    pool.release(range(SLOTS))
    return pool


def write_windows(pool: StatePool, slots: Slots) -> None:
    left = torch.arange(len(slots) * 7 * 3.0, device=pool.window(0).device).view(len(slots), 7, 3)
    pool.write_window(1, slots, left.to(pool.window(0).dtype))


def write_kv(pool: StatePool[Mamba3State], slots: Slots) -> None:
    pool.write_kv(1, slots, **mamba3_pools.left_by_a_prefill(len(slots), device=pool.layer(0).k.device))


def replay(pool: StatePool, slots: Slots) -> None:
    ring_pools.replay(pool, slots, ring_pools.tokens_for(len(slots), ring_pools.TOKENS))


WINDOWS = {"conv_channels": 7, "drafts": 2, "conv_dtype": torch.float32}
KINDS = {
    "states": Kind(pools.make_pool),
    "states in pages": Kind(in_poisoned_pages),
    "windows": Kind(partial(pools.make_pool, **WINDOWS), write_windows),
    "mamba3": Kind(mamba3_pools.in_format, write_kv),
    "mamba3 without angles": Kind(partial(mamba3_pools.in_format, angles=0)),
    "rings and windows": Kind(partial(ring_pools.in_format, **WINDOWS), replay),
    **{f"rings of {rule}": Kind(partial(ring_pools.in_format, rule=rule), replay) for rule in ring_pools.RULES},
    "rings of both and windows": Kind(partial(ring_pools.in_format, rule="both", **WINDOWS), replay),
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
ALLOCATED = pytest.mark.parametrize("kind", [kind for kind in KINDS if "pages" not in kind])


def ones_for(pool: StatePool[Any], slots: Slots) -> Tensor:
    data = kept_by(pool)["data 0"]
    return torch.ones(len(slots), *data.shape[1:], device=data.device)


@DEVICES
@EVERY_KIND
@EVERY_FORMAT
def test_an_acquired_slot_is_clean_with_a_seed_of_its_own_and_others_stay(
    name: str, rounding: str, kind: str, device: torch.device
) -> None:
    pool = KINDS[kind].make(name, rounding, device=device)
    dirty(pool)
    slots = pool.acquire(3)
    assert (slots.dtype, slots.device.type, slots.tolist()) == (torch.int32, device.type, [0, 1, 2])
    assert is_clean(pool, [0, 1, 2])
    assert is_poison(pool, [3, 4, 5])
    assert rounding == "nearest" or len(set(seed_of(pool)[:4].tolist())) == 4
    dirty(pool)
    pool.release(1)
    assert is_poison(pool, list(range(SLOTS)))  # what is released is cleared when it is handed out
    assert pool.acquire().tolist() == [1]
    assert is_clean(pool, [1])
    pool.reset(2)
    assert is_clean(pool, [1, 2])
    assert is_poison(pool, [0, 3, 4, 5])


@DEVICES
@EVERY_KIND
@EVERY_FORMAT
@pytest.mark.parametrize("keep_seed", [False, True])
def test_copy_clones_all_that_a_slot_has_and_reads_before_it_writes(
    name: str, rounding: str, keep_seed: bool, kind: str, device: torch.device
) -> None:
    pool = KINDS[kind].make(name, rounding, device=device)
    pool.acquire(SLOTS, seed=range(SLOTS))
    fill(pool)
    before = {part: tensor.clone() for part, tensor in kept_by(pool).items()}
    src, dst = [1, 0, 0, 4], [0, 1, 2, 4]  # a swap, a fan-out, a copy onto itself
    pool.copy(src, dst, keep_seed=keep_seed)
    for part, tensor in kept_by(pool).items():
        assert same(tensor[[3, 5]], before[part][[3, 5]]), part
        if part != "seed" or keep_seed:
            assert same(tensor[dst], before[part][src]), part
        else:
            assert not set(tensor[dst].tolist()) & set(range(SLOTS))
    assert gaps_are_poison(pool)


@ALLOCATED
@EVERY_FORMAT
def test_bytes_per_slot_are_all_that_was_allocated(name: str, rounding: str, kind: str) -> None:
    pool = KINDS[kind].make(name, rounding)
    kept = kept_by(pool)
    assert pool.bytes_per_slot == sum(tensor[0].nbytes for tensor in kept.values())
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept.values()}
    assert SLOTS * pool.bytes_per_slot == sum(storages.values())
    of_states = [t[0].nbytes for part, t in kept.items() if part.split()[0] in ("data", "scale", "k", "v", "angle")]
    seeds = LAYERS * 8 if rounding == "stochastic" else 0
    assert sum(of_states) + seeds == sum(pool.layer(i).bytes_per_slot for i in range(LAYERS))


@ALLOCATED
def test_layers_are_the_same_every_time_with_streams_and_memory_of_their_own(kind: str) -> None:
    pool = KINDS[kind].make("float16", "stochastic", rounds=7)
    assert (pool.slots, pool.layers, pool.free) == (SLOTS, LAYERS, SLOTS)
    assert (pool.has_windows, pool.has_rings) == ("windows" in kind, "rings" in kind)
    for i in range(LAYERS):
        assert pool.layer(i) is pool.layer(i)
        assert not pool.has_rings or pool.ring(i) is pool.ring(i)
        state = pool.layer(i).ssm if "mamba3" in kind else pool.layer(i)
        assert (state.stream, state.rounds, state.seed is seed_of(pool)) == (7 + i, 7, True)
    places = [tensor.data_ptr() for tensor in kept_by(pool).values()]
    assert len(set(places)) == len(places)


@DEVICES
@ALLOCATED
def test_a_pool_crosses_in_and_out_of_inference_mode(kind: str, device: torch.device) -> None:
    make, use = KINDS[kind]
    outside = make("float16", "stochastic", device=device)
    with torch.inference_mode():
        inside = make("float16", "stochastic", device=device)
        slots = [pool.acquire(2) for pool in (inside, outside)]
        for pool in (inside, outside):
            pool.write(0, [0], ones_for(pool, [0]))
            use(pool, [0, 1])
    for pool, index in zip((inside, outside), slots, strict=True):
        for tensor in (index, *kept_by(pool).values()):
            tensor.copy_(tensor.clone())
        pool.copy(0, 1)
        assert same(pool.read(0, [0]), pool.read(0, [1]))
        pool.reset(0)
        pool.advance(index)
        use(pool, [1])
        pool.release(index)
        pool.acquire(3)
    with torch.inference_mode():
        for pool in (inside, outside):
            pool.copy(2, 1)
            use(pool, [0])
            pool.reset([0, 1, 2])


def in_pages_of_bytes(like: StatePool[Any], pages: Tensor) -> StatePool[Any]:
    """A pool that has in pages, rows of bytes, what another has in memory of its own, layer after layer."""
    cursors = {part: torch.zeros_like(t) for part, t in kept_by(like).items() if part in ("seed", "start", "count")}
    states: list[State | Mamba3State] = []
    rings, windows, start = [], [], 8
    for i in range(LAYERS):
        tensors = {}
        for part, tensor in kept_by(like).items():
            if part.endswith(f" {i}"):
                size = tensor[0].nbytes
                tensors[part.split()[0]] = (
                    pages[:, start : start + size].view(tensor.dtype).unflatten(1, tensor.shape[1:])
                )
                start += -(-size // 8) * 8
        ssm = getattr(like.layer(i), "ssm", like.layer(i))
        state = State(
            tensors["data"], tensors.get("scale"), rounding=ssm.rounding, seed=cursors.get("seed"), stream=7 + i
        )
        states.append(Mamba3State(state, tensors["k"], tensors["v"], tensors.get("angle")) if "k" in tensors else state)
        windows += [tensors["window"]] if "window" in tensors else []
        if like.has_rings:
            parts = {part: tensors[f"ring.{part}"] for part in like.ring(i).written}
            rings.append(replace(like.ring(i), **parts, start=cursors["start"], count=cursors["count"]))
    drafts = like.drafts if windows else 0
    return StatePool.wrap(states, rings=rings or None, windows=windows or None, drafts=drafts)


@DEVICES
@ALLOCATED
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "float8_e4m3fn"])
def test_a_pool_in_pages_does_what_an_allocated_one_does_and_nothing_between(
    dtype: str, kind: str, device: torch.device
) -> None:
    make, use = KINDS[kind]
    plain = make(dtype, "nearest" if dtype == "float32" else "stochastic", device=device)
    pages = torch.full((SLOTS, 4096), POISON, dtype=torch.uint8, device=device)
    pool = in_pages_of_bytes(plain, pages)
    assert (pool.free, pool.slots, pool.layers, pool.bytes_per_slot) == (0, SLOTS, LAYERS, plain.bytes_per_slot)
    kept = torch.zeros(4096, dtype=torch.bool, device=device)
    for part, tensor in kept_by(pool).items():
        if part[-1].isdigit():
            first = tensor.storage_offset() * tensor.element_size()
            kept[first : first + tensor[0].nbytes] = True
    pool.release([2, 3, 5])
    assert pool.acquire(2, seed=[8, 9]).tolist() == [2, 3]
    twins = plain.acquire(2, seed=[8, 9]).tolist()
    assert is_clean(pool, [2, 3])
    for each, slots in ((pool, [2, 3]), (plain, twins)):
        each.write(1, slots, ones_for(each, slots) / 3)
        for _ in range(3):
            use(each, slots)
    for part, tensor in kept_by(pool).items():
        assert same(tensor[[2, 3]], kept_by(plain)[part][twins]), part
    pool.copy(3, 4)
    assert torch.equal(pages[4, kept], pages[3, kept])
    assert (pages[[0, 1, 5]] == POISON).all()
    assert (pages[:, ~kept] == POISON).all()


@pytest.mark.gpu
@EVERY_FORMAT
@ALLOCATED
def test_nothing_waits_for_the_device_when_slots_are_ints(name: str, rounding: str, kind: str) -> None:
    make, use = KINDS[kind]
    pool = make(name, rounding, device=CUDA)
    values, left = ones_for(pool, [0, 1]), mamba3_pools.left_by_a_prefill(2, device=CUDA)
    for mode in ("default", "error"):  # kernels compile in the first pass
        torch.cuda.set_sync_debug_mode(mode)
        try:
            slots = pool.acquire(3, seed=[1, 2, 3])
            pool.write(1, [0, 1], values)
            if use is write_kv:
                pool.write_kv(1, [2, 0], **left)
            elif use is replay:
                pool.commit(pool.plan(slots, ring_pools.TOKENS))
                pool.folded(slots)
            pool.read(1, [1, 0])
            pool.copy([0, 1], [1, 2])
            pool.copy([0, 1], [1, 2], keep_seed=True)
            pool.reset(2)
            pool.advance(slots)
            pool.release([0, 1, 2])
        finally:
            torch.cuda.set_sync_debug_mode("default")
