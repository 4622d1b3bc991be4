"""Slots whose numbers are on the device, requests that leave a pool as bytes, and pools that grow."""

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mamba3_pools
import pools
import pytest
import ring_pools
import torch
from compiling import by_the_reference
from pools import CPU, CUDA, fill, gaps_are_poison, in_pages, is_clean, kept_by, same, seed_of
from torch import Tensor

import flashstate
from flashstate import Mamba3State, State, StatePool
from flashstate.pool.layers import ssm_of
from flashstate.reference import moving as reference

SLOTS, NULL = 6, 5
WINDOWS = {"conv_channels": 7, "drafts": 2, "conv_dtype": torch.float16}


def beside_other_memory(device: torch.device) -> StatePool:
    """In pages of odd bytes, transposed states, and windows whose entries are neighbours of nothing."""
    states = in_pages([("int8", "stochastic")], SLOTS, (2, 3, 5), device)
    turned = in_pages([("bfloat16", "nearest")], SLOTS, (2, 3, 5), device, transposed=True)[0]
    states.append(replace(turned, seed=states[0].seed))
    windows = [torch.zeros(SLOTS, 4, 2, 9, dtype=torch.bfloat16, device=device)[:, 1, :, 1:7:2] for _ in range(2)]
    return StatePool.wrap(states, windows=windows, null=NULL, seed=0)


ONE: dict[str, Any] = {"layers": 1, "null": NULL}
MAKERS: dict[str, Callable[[torch.device], StatePool[Any]]] = {
    "rings and windows": lambda device: ring_pools.in_format("int8", "stochastic", device=device, **ONE, **WINDOWS),
    "rings per channel": lambda device: ring_pools.in_format(
        "bfloat16", "nearest", "per channel", device=device, **ONE
    ),
    "mamba3": lambda device: mamba3_pools.in_format("float16", "stochastic", device=device, **ONE),
    "nearest": lambda device: pools.make_pool("float8_e4m3fn", "nearest", device=device, null=NULL),
    "in pages": beside_other_memory,
}
INDEX = {kind: torch.int64 if kind in ("mamba3", "nearest") else torch.int32 for kind in MAKERS}
EVERY_POOL = pytest.mark.parametrize("kind", MAKERS)


def filled(kind: str, device: torch.device) -> StatePool[Any]:
    """A pool whose slots are all held, but null."""
    pool = MAKERS[kind](device)
    if pool.free:
        pool.acquire(SLOTS - 1, seed=range(SLOTS - 1))
    fill(pool)
    return pool


def use(pool: StatePool[Any], slots: Any, others: Any, rows: list[int]) -> list[Tensor]:
    """All that a pool does to slots, each with one of these rows of values; returns what it gives."""
    last = pool.layers - 1
    data, generator = ssm_of(pool.layer(last)).data, torch.Generator().manual_seed(1)

    def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(5, *shape, generator=generator)[rows].to(data.device, dtype)

    pool.write(last, slots, values(*data.shape[1:]))
    if pool.has_windows:
        pool.write_window(0, slots, values(pool.window(0).shape[1], 2, dtype=pool.window(0).dtype))
    if isinstance(pool.layer(last), Mamba3State):
        left = mamba3_pools.left_by_a_prefill(5, device=data.device)
        pool.write_kv(last, slots, **{name: tensor[rows] for name, tensor in left.items()})
    given = [pool.read(last, slots), pool.export(slots)["bytes"]]
    pool.copy(slots, others, keep_seed=True)
    exported = pool.export(others)
    pool.reset(slots, seed=7)
    pool.load(slots, exported)
    pool.reset(others, seed=8)
    return given


@EVERY_POOL
def test_numbers_on_the_device_do_what_those_of_the_host_do_and_others_are_skipped(
    kind: str, device: torch.device
) -> None:
    """Those past the pool, negative ones and null; of a copy those that name no source or no target."""
    index, host, there = INDEX[kind], filled(kind, CPU), filled(kind, device)
    slots = torch.tensor([3, SLOTS, -1, 1, NULL], dtype=index, device=device)
    others = torch.tensor([1, -1, 9, 4, NULL], dtype=index, device=device)
    with by_the_reference():
        want = use(host, [3, 1], [1, 4], [0, 3])
    got = use(there, slots, others, [0, 1, 2, 3, 4])
    for one, other in zip(want, got, strict=True):
        assert same(one, other[[0, 3]])
        assert not other[[1, 2, 4]].any()
    for part, tensor in kept_by(there).items():
        assert same(tensor, kept_by(host)[part]), part
    assert gaps_are_poison(there)
    with pytest.raises(IndexError, match=r"^out of range: read slot 9 on .*, write slot 9 on"):
        flashstate.check_faults()
    there.reset(torch.tensor([-1, NULL], device=device))
    flashstate.check_faults()


@pytest.mark.parametrize("kind", ["nearest", "in pages"])
def test_many_slots_are_copied_in_a_ring_as_one_by_one(kind: str, device: torch.device) -> None:
    pool = filled(kind, device)
    before = {part: tensor.clone() for part, tensor in kept_by(pool).items()}
    slots = torch.tensor([0, 1, 2, 3, 4, *[-1] * 12], device=device)
    pool.copy(slots, torch.tensor([1, 2, 3, 4, 0, *[-1] * 12], device=device), keep_seed=True)
    for part, tensor in kept_by(pool).items():
        assert same(tensor, before[part][[4, 0, 1, 2, 3, 5]]), part


WRONG_THERE = [
    ([1, SLOTS], "must be from 0 to 5, got 6"),
    ([1, 4, -1], "must be held, but slot 4 is free"),
    ([1, NULL, 1], "must be distinct, got slot 1 more than once"),
]


@pytest.mark.parametrize(("numbers", "message"), WRONG_THERE)
def test_inside_debug_wrong_numbers_on_the_device_raise_and_change_nothing(numbers: list[int], message: str) -> None:
    pool, slots = filled("nearest", CPU), torch.tensor(numbers)
    pool.release(4)
    before, states = [tensor.clone() for tensor in kept_by(pool).values()], torch.ones(len(slots), 2, 3, 5)
    calls: dict[str, Callable[[], object]] = {
        "slots": lambda: pool.write(0, slots, states),
        " slots": lambda: pool.reset(slots),
        "  slots": lambda: pool.load(slots, pool.export(torch.zeros_like(slots))),
        "dst": lambda: pool.copy(torch.zeros_like(slots), slots),
    }
    if "distinct" not in message:
        calls |= {"   slots": lambda: pool.read(0, slots), "src": lambda: pool.copy(slots, [0, 2, 3][: len(slots)])}
    for name, call in calls.items():
        with flashstate.debug(), pytest.raises(ValueError, match=f"^{name.strip()} {message}"):
            call()
    assert all(map(torch.equal, before, kept_by(pool).values()))
    with flashstate.debug():
        pool.reset(torch.tensor([-1, NULL, 2]))  # padding is no mistake
    assert is_clean(pool, [2])


def test_seeds_that_the_device_draws_are_new_every_time_and_follow_from_the_seed_of_the_pool(
    device: torch.device,
) -> None:
    def drawn(seed: int) -> list[int]:
        pool, slots = pools.make_pool(seed=seed, device=device), torch.tensor([1, 9, 0], device=device)
        pool.acquire(3, seed=5)
        found = []
        for call in (pool.reset, pool.reset, lambda slots: pool.copy(slots, slots.flip(0))):
            call(slots)
            found += seed_of(pool)[:2].tolist()
        assert seed_of(pool)[2] == 5
        return found

    found, want = drawn(1), reference.draw_seeds(torch.tensor([1, 0]), 9).tolist()
    assert found == [want[i] for i in (2, 0, 5, 3, 6, 8)]
    assert len({*found, *drawn(-2)}) == 12


# Bytes of requests


def saved(exported: dict[str, Any]) -> dict[str, Any]:
    """What another process would load."""
    memory = io.BytesIO()
    torch.save(exported, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=True)


ALLOCATED = pytest.mark.parametrize("kind", [kind for kind in MAKERS if kind != "in pages"])


@ALLOCATED
def test_a_request_goes_on_in_another_pool_from_its_bytes(kind: str, device: torch.device) -> None:
    pool = filled(kind, device)
    larger = pool.resized(11)
    larger.acquire(3)
    exported = saved(pool.export([4, 0]))
    assert exported["bytes"].shape == (2, pool.bytes_per_slot)
    larger.load(torch.tensor([6, 7], device=device), exported)
    for part, tensor in kept_by(larger).items():
        assert same(tensor[[6, 7]], kept_by(pool)[part][[4, 0]]), part
    assert torch.equal(larger.export([6, 7])["bytes"], exported["bytes"].to(device))


def test_bytes_of_axes_in_another_order_are_turned(device: torch.device) -> None:
    """Of windows with neighbouring channels or entries, and of states that are transposed or not."""
    one = pools.make_pool("bfloat16", "nearest", conv_channels=7, device=device, layers=1)
    one.acquire(3)
    fill(one)
    state = State(torch.zeros(4, 2, 5, 3, dtype=torch.bfloat16, device=device).mT)
    other = StatePool.wrap([state], windows=[torch.zeros(4, 7, 3, dtype=torch.bfloat16, device=device)])
    other.load([3, 1], one.export([0, 2]))
    for part, tensor in kept_by(other).items():
        assert same(tensor[[3, 1]], kept_by(one)[part][[0, 2]]), part
        assert not tensor[[0, 2]].any()
    one.reset([0, 2])
    one.load([2, 0], other.export([1, 3]))
    assert same(one.window(0)[[2, 0]], other.window(0)[[1, 3]])


# Pools that grow


@pytest.mark.parametrize("slots", [4, 9])
@ALLOCATED
def test_a_resized_pool_has_the_same_requests_under_their_numbers(kind: str, slots: int) -> None:
    pool = filled(kind, CPU)
    pool.release([4, 1])
    other = pool.resized(slots)
    assert (other.slots, other.layers, other.null, other.drafts) == (slots, pool.layers, NULL, pool.drafts)
    assert other.bytes_per_slot == pool.bytes_per_slot
    for part, tensor in kept_by(other).items():
        assert same(tensor[[0, 2, 3]], kept_by(pool)[part][[0, 2, 3]]), part
        assert tensor.stride()[1:] == kept_by(pool)[part].stride()[1:]
        assert tensor.data_ptr() != kept_by(pool)[part].data_ptr()
    assert all(ssm_of(other.layer(i)).stream == ssm_of(pool.layer(i)).stream for i in range(pool.layers))
    others = [1] if slots == 4 else [4, 1, 6, 7, 8]
    assert other.acquire(other.free).tolist() == others
    assert is_clean(other, others)
    if "seed" in kept_by(pool):
        pool.acquire(2)
        assert len({*seed_of(pool).tolist(), *seed_of(other).tolist()}) == 5 + len(others)
    with pytest.raises(RuntimeError, match="resized"):
        other.acquire()


# What else is new of states that go in and out


@pytest.mark.parametrize("name", ["bfloat16", "int8", "float8_e4m3fn"])
def test_states_of_any_strides_are_written_alike(name: str, device: torch.device) -> None:
    given = torch.randn(2, 5, 3, 2, generator=torch.Generator().manual_seed(0)).to(device)
    turned, spread = given.permute(0, 3, 2, 1), given.half().permute(0, 3, 2, 1)[..., :1].expand(2, 2, 3, 5)
    kept = []
    for values in (turned, turned.contiguous(), spread, spread.contiguous()):
        pool = pools.make_pool(name, "nearest", device=device, layers=1)
        pool.acquire(2)
        pool.write(0, [1, 0], values)
        kept.append(list(kept_by(pool).values()))
    for one, other in zip(kept[::2], kept[1::2], strict=True):
        assert all(map(same, one, other))


def test_acquire_hands_out_int32_unless_asked() -> None:
    pool = pools.make_pool()
    assert [pool.acquire(**kind).dtype for kind in ({}, {"dtype": torch.int64})] == [torch.int32, torch.int64]


@pytest.mark.gpu
@EVERY_POOL
def test_a_graph_captures_what_is_done_to_slots_on_the_device(kind: str) -> None:
    pool = filled(kind, CUDA)
    slots, others = torch.tensor([[3, 1], [0, 2]], device=CUDA)
    values = torch.ones(2, *ssm_of(pool.layer(0)).data.shape[1:], device=CUDA)

    def calls() -> Tensor:
        pool.write(0, slots, values)
        pool.copy(slots, others)
        pool.copy(slots, others, keep_seed=True)
        pool.load(others, pool.export(slots))
        pool.reset(slots)
        return pool.read(0, others)

    calls()  # which compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        calls()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        read = calls()
    seeds = []
    for _ in range(2):
        slots.copy_(slots.flip(0))
        graph.replay()
        assert torch.equal(read, pool.read(0, others))
        assert is_clean(pool, slots.tolist())
        seeds += seed_of(pool)[slots].tolist() if "seed" in kept_by(pool) else []
    assert len(set(seeds)) == len(seeds)
