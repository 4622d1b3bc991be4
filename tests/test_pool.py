"""StatePool: what is allocated, how states go in and out, seeds, and a host that does not wait."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pools import CUDA, fill, is_clean, kept_by, left_by_a_prefill, make_pool, seed_of, tensors_of
from test_pool_requests import KINDS
from torch import Tensor

import flashstate
from flashstate import State, StatePool
from flashstate.launch import Problem, interpreted, override, valid_configs
from flashstate.pool.layers import ssm_of
from flashstate.reference import moving

# What is allocated

FLOAT, HALF, SHORT = torch.float32, torch.float16, torch.bfloat16
MAMBA2 = {"slots": 2, "layers": 2, "heads": 4, "rows": 2, "cols": 6, "stream": 7, "rounds": 8}
DELTA = {"slots": 2, "layers": 2, "heads": 4, "value_dim": 2, "key_dim": 6}
SCALED = {"dtype": torch.int8, "rounding": "stochastic"}
CURSORS = {"start": ((), torch.int32), "count": ((), torch.int32)}
STATE, KV = {"data": ((4, 2, 6), FLOAT)}, {"k": ((1, 4, 6), SHORT), "v": ((4, 2), SHORT)}
ALLOCATED: list[tuple[Callable[..., StatePool[Any]], dict[str, Any], dict[str, Any]]] = [
    (StatePool.mamba2, MAMBA2 | SCALED, {"data": ((4, 2, 6), torch.int8), "scale": ((4, 2), FLOAT)}),
    (StatePool.mamba2, MAMBA2 | {"conv_channels": 5}, STATE | {"window": ((5, 3), SHORT)}),
    (
        StatePool.mamba2, MAMBA2 | {"conv_channels": 5, "conv_width": 2, "drafts": 3, "conv_dtype": FLOAT},
        STATE | {"window": ((5, 4), FLOAT)},
    ),
    (
        StatePool.mamba2, MAMBA2 | {"window": 4, "tokens": 3},
        STATE | {"ring.x": ((4, 7, 2), SHORT), "ring.B": ((1, 7, 6), SHORT), "ring.dt": ((4, 7), FLOAT)},
    ),
    (
        StatePool.gated_delta, DELTA | {"window": 16},
        STATE | {"ring.k": ((4, 17, 6), SHORT), "ring.u": ((4, 17, 2), HALF), "ring.decay": ((4, 17), FLOAT)},
    ),
    (
        StatePool.gated_delta,
        DELTA | {"window": 4, "tokens": 3, "key_heads": 2, "per_channel": True, "ring_dtype": FLOAT, "u_dtype": SHORT},
        STATE | {"ring.k": ((2, 7, 6), FLOAT), "ring.u": ((4, 7, 2), SHORT), "ring.decay": ((4, 7, 6), FLOAT)},
    ),
    (StatePool.mamba3, MAMBA2, STATE | KV),
    (
        StatePool.mamba3, MAMBA2 | {"rank": 3, "angles": 2, "kv_dtype": HALF},
        STATE | {"k": ((3, 4, 6), HALF), "v": ((4, 2), HALF), "angle": ((4, 2), FLOAT)},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("make", "options", "wanted"), ALLOCATED)
def test_layers_have_memory_of_their_own_in_the_documented_shapes_and_dtypes(
    make: Callable[..., StatePool[Any]], options: dict[str, Any], wanted: dict[str, Any]
) -> None:
    pool = make(**options)
    kept = kept_by(pool)
    want = {f"{part} {i}": form for i in range(2) for part, form in wanted.items()}
    want |= CURSORS if pool.has_rings else {}
    want |= {"seed": ((), torch.int64)} if "rounding" in options else {}
    assert {part: (tuple(t.shape[1:]), t.dtype) for part, t in kept.items()} == want
    assert is_clean(pool, [0, 1])
    memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept.values()}
    assert 2 * pool.bytes_per_slot == sum(tensor.nbytes for tensor in kept.values()) == sum(memory.values())
    assert len({tensor.data_ptr() for tensor in kept.values()}) == len(kept)
    assert (pool.has_windows, pool.has_rings, pool.free) == ("conv_channels" in options, "window" in options, 2)
    for i in range(2):
        state = ssm_of(pool.layer(i))
        assert (state.stream, state.rounds) == ((7 + i, 8) if "stream" in options else (i, 10))
        assert pool.layer(i) is pool.layer(i)
        assert not pool.has_windows or pool.window(i).stride(1) == 1  # channels are neighbours
        if pool.has_rings:
            ring = pool.ring(i)
            assert (ring.window, ring.longest_call) == (options["window"], options.get("tokens", 1))
            assert ring is pool.ring(i)
            assert all(getattr(ring, part).data_ptr() == kept[part].data_ptr() for part in CURSORS)


# States that go in and out


@pytest.mark.interpreted
def test_every_config_gives_the_same_bytes() -> None:
    values, memory = torch.randn(2, 2, 9, 20, generator=torch.Generator().manual_seed(0)), []
    for config in valid_configs(Problem("pool_write", 9, 20, "int8", "stochastic", 4, 4))[::9]:
        pool = make_pool("int8", rows=9, cols=20)
        pool.acquire(2, seed=[3, 4])
        with interpreted(), override(config):
            pool.write(1, [1, 0], values)
            memory.append((pool.layer(1).data, pool.layer(1).scale, pool.read(1, [0, 1])))
    assert len(memory) > 2
    assert all(torch.equal(*both) for row in memory for both in zip(row, memory[0], strict=True))


def test_angles_are_stored_from_zero_to_less_than_a_turn() -> None:
    turn = torch.tensor(2 * math.pi)  # more than 2π
    below = torch.nextafter(turn, torch.tensor(0.0)).item()
    given = [0.0, 1.5, -1.5, turn.item(), -turn.item(), below, -1e-9, -1e-30, 1e4, -1e4, 100 * math.pi, math.nan]
    pool = StatePool.mamba3(slots=len(given), layers=1, heads=1, rows=1, cols=2, angles=1)
    k, v, angle = torch.zeros(len(given), 1, 1, 2), torch.zeros(len(given), 1, 1), torch.tensor(given)[:, None, None]
    pool.write_kv(0, pool.acquire(len(given)), k, v, angle)
    *got, nan = kept_by(pool)["angle 0"].flatten().tolist()
    assert math.isnan(nan)
    assert all(0.0 <= a < 2 * math.pi for a in got)
    assert (got[5], got[6:8]) == (below, [0.0, 0.0])
    for one, other in zip(got, angle.flatten().tolist(), strict=False):
        apart = abs(one - math.fmod(math.fmod(other, 2 * math.pi) + 2 * math.pi, 2 * math.pi))
        assert min(apart, 2 * math.pi - apart) <= 2.0**-22


def test_bytes_of_axes_in_another_order_are_turned(device: torch.device) -> None:
    """Of windows with neighbouring channels or entries, and of states that are transposed or not."""
    one = make_pool("bfloat16", "nearest", conv_channels=7, device=device, layers=1)
    one.acquire(3)
    fill(one)
    state = State(torch.zeros(4, 2, 5, 3, dtype=torch.bfloat16, device=device).mT)
    other = StatePool.wrap([state], windows=[torch.zeros(4, 7, 3, dtype=torch.bfloat16, device=device)])
    other.load([3, 1], one.export([0, 2]))
    for part, tensor in kept_by(other).items():
        assert torch.equal(tensor[[3, 1]], kept_by(one)[part][[0, 2]]), part
        assert not tensor[[0, 2]].any()
    one.reset([0, 2])
    one.load([2, 0], other.export([1, 3]))
    assert torch.equal(one.window(0)[[2, 0]], other.window(0)[[1, 3]])


def test_gradients_leave_no_trace() -> None:
    pool, left = make_pool(kind="mamba3"), left_by_a_prefill(1)
    slot = pool.acquire()
    pool.write(0, slot, torch.ones(1, *pool.layer(0).ssm.data.shape[1:], requires_grad=True))
    pool.write_kv(0, slot, **{name: tensor.clone().requires_grad_() for name, tensor in left.items()})
    pool.layer(0).v[0].add_(1.0)
    assert not any(tensor.requires_grad for tensor in (*tensors_of(pool), pool.read(0, slot)))


# Seeds


def test_seeds_are_drawn_from_the_pools_seed() -> None:
    drawn = [seed_of(pool := make_pool(seed=seed))[pool.acquire(3)].tolist() for seed in (1, 1, 2, None, None)]
    assert drawn[0] == drawn[1]
    assert len({seed for seeds in drawn[1:] for seed in seeds}) == 12


def test_seeds_that_the_device_draws_follow_from_the_seed_of_the_pool(device: torch.device) -> None:
    found: dict[int, list[int]] = {1: [], -2: []}
    for seed in found:
        pool, slots = make_pool(seed=seed, device=device), torch.tensor([1, 9, 0], device=device)
        pool.acquire(3, seed=5)
        for call, given in ((pool.reset, [slots]), (pool.reset, [slots]), (pool.copy, [slots, slots.flip(0)])):
            call(*given)
            found[seed] += seed_of(pool)[:2].tolist()
        assert seed_of(pool)[2] == 5
    want = moving.draw_seeds(torch.tensor([1, 0]), 9).tolist()
    assert found[1] == [want[i] for i in (2, 0, 5, 3, 6, 8)]
    assert len({*found[1], *found[-2]}) == 12


# Plans of requests that are gone

ANOTHER_REQUEST: dict[str, Callable[[StatePool, Tensor], Any]] = {
    "acquired": lambda pool, slot: (pool.release(slot), pool.acquire()),
    "reset": lambda pool, slot: pool.reset(slot),
    "copied to": lambda pool, slot: pool.copy(0, slot),
    "loaded": lambda pool, slot: pool.load(slot, pool.export(0)),
    "reset by another pool": lambda pool, slot: StatePool.wrap([pool.layer(0)], rings=[pool.ring(0)]).reset(slot),
    "written": lambda pool, slot: pool.write(1, slot, torch.zeros(1, 4, 3, 5, device=slot.device)),
}


def test_a_commit_leaves_slots_alone_that_have_another_request_since_the_plan(device: torch.device) -> None:
    for name, change in ANOTHER_REQUEST.items():
        pool = make_pool(kind="rings", device=device)
        slots = pool.acquire(3)
        pool.commit(pool.plan(slots, 1))
        plan = pool.plan(slots, 2)
        pool.copy(torch.tensor([-1], device=device), slots[2:])  # from no slot
        change(pool, slots[1:2])
        before = pool.ring(0).count.tolist()
        assert before[1] == (name in ("copied to", "loaded"))
        with flashstate.debug(), pytest.raises(ValueError, match=r"^plan is of requests that are no longer in slot 1,"):
            pool.commit(plan)
        assert pool.ring(0).count.tolist() == before
        pool.commit(plan)
        assert pool.ring(0).count.tolist() == [3, before[1], 3, *before[3:]]


# What a CUDA graph captures


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["states, windows in pages", "mamba3", "rings of both, windows"])
def test_nothing_waits_for_the_device_and_a_graph_captures_all_but_numbers_of_the_host(kind: str) -> None:
    pool = KINDS[kind]("float16", "stochastic", device=CUDA)
    pool.acquire(pool.free - 1 if pool.free else 0, seed=3)
    fill(pool)
    slots, others = torch.tensor([[3, 1], [0, 2]], device=CUDA)
    values, left = torch.ones(2, *ssm_of(pool.layer(0)).data.shape[1:], device=CUDA), {}
    if kind == "mamba3":
        left = left_by_a_prefill(2, device=CUDA)

    def calls(slots: Any = slots, others: Any = others) -> Tensor:
        pool.write(0, slots, values)
        if left:
            pool.write_kv(0, slots, **left)
        if pool.has_rings:
            pool.commit(pool.plan(slots, 2))
            pool.folded(slots)
        pool.copy(slots, others)
        pool.copy(slots, others, keep_seed=True)
        pool.load(others, pool.export(slots))
        pool.reset(slots)
        pool.advance(others)
        return pool.read(0, others)

    for mode in ("default", "error"):  # kernels compile in the first pass
        torch.cuda.set_sync_debug_mode(mode)
        try:
            calls()
            calls([3, 1], [0, 2])
            pool.release(3)
            pool.acquire(1, seed=4)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    pool.release(2)  # so that there is one to acquire
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        read = calls()
        for call in (pool.acquire, lambda: pool.reset(0), lambda: pool.read(0, 0), lambda: pool.copy(0, 1)):
            with pytest.raises(RuntimeError, match="a CUDA graph cannot capture"):
                call()
    seeds = []
    for _ in range(2):
        slots.copy_(slots.flip(0))
        graph.replay()
        assert torch.equal(read, pool.read(0, others))
        assert is_clean(pool, slots.tolist())
        seeds += seed_of(pool)[slots].tolist()
    assert len(set(seeds)) == len(seeds)
