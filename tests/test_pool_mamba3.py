"""StatePool with layers of Mamba-3: four states that come clean, stay apart, go in and are copied together."""

import math
from typing import Any

import pytest
import torch
from mamba3_pools import (
    ANGLES,
    COLS,
    HEADS,
    KINDS,
    RANK,
    ROWS,
    SHAPES,
    SLOTS,
    dirty,
    fill,
    in_format,
    is_clean,
    is_poison,
    left_by_a_prefill,
    make_pool,
    parts,
    parts_of,
    seed_of,
)
from pools import CPU, CUDA, EVERY_FORMAT, POISON, bytes_of, same
from torch import Tensor

from flashstate import State, StatePool
from flashstate.state.formats import FORMATS
from flashstate.state.mamba3 import Mamba3State
from flashstate.state.rounding import SEED_STEP

DEVICES = pytest.mark.parametrize("device", [CPU, pytest.param(CUDA, marks=pytest.mark.gpu)], ids=str)


# What is allocated


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("rank", "angles"), [(1, 0), (1, 4), (3, 3)])
def test_layers_have_four_states_of_zeros_in_the_shapes_asked_for(rank: int, angles: int, kind: torch.dtype) -> None:
    pool = make_pool(rank=rank, angles=angles, kv_dtype=kind, dtype=torch.int8)
    for layer in map(pool.layer, range(2)):
        assert layer.ssm.data.shape == (SLOTS, HEADS, ROWS, COLS)
        assert layer.k.shape == (SLOTS, rank, HEADS, COLS)
        assert layer.v.shape == (SLOTS, HEADS, ROWS)
        assert layer.ssm.data.dtype is torch.int8
        assert layer.k.dtype is layer.v.dtype is kind
        if angles:
            assert layer.angle is not None
            assert layer.angle.shape == (SLOTS, HEADS, angles)
            assert layer.angle.dtype is torch.float32
        else:
            assert layer.angle is None
    assert is_clean(pool, list(range(SLOTS)))
    assert len({tensor.data_ptr() for tensor in parts_of(pool)}) == len(parts_of(pool))
    assert (pool.slots, pool.layers, pool.free, pool.has_windows) == (SLOTS, 2, SLOTS, False)


def test_rank_is_one_and_there_are_no_angles_unless_asked_for() -> None:
    layer = StatePool.mamba3(slots=2, layers=1, heads=1, rows=2, cols=4).layer(0)
    assert (layer.rank, layer.angle, layer.ssm.seed) == (1, None, None)
    assert (layer.ssm.data.dtype, layer.k.dtype, layer.v.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)


def test_layers_are_the_same_states_every_time_with_streams_of_their_own() -> None:
    pool = in_format("float16", "stochastic", rounds=7)
    layers = [pool.layer(0), pool.layer(1)]
    assert all(isinstance(layer, Mamba3State) for layer in layers)
    assert layers[0] is pool.layer(0)
    assert layers[1] is pool.layer(1) is not layers[0]
    assert [layer.ssm.stream for layer in layers] == [7, 8]
    assert all(layer.ssm.seed is seed_of(pool) and layer.ssm.rounds == 7 for layer in layers)


@EVERY_FORMAT
@pytest.mark.parametrize("angles", [0, ANGLES])
def test_bytes_per_slot_are_all_that_was_allocated(name: str, rounding: str, angles: int) -> None:
    pool = in_format(name, rounding, angles=angles)
    seed = 8 if rounding == "stochastic" else 0
    tensors = parts_of(pool) + ([seed_of(pool)] if seed else [])
    assert pool.bytes_per_slot == sum(tensor[0].nbytes for tensor in tensors)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    assert SLOTS * pool.bytes_per_slot == sum(storages.values())
    assert pool.bytes_per_slot == sum(pool.layer(i).bytes_per_slot for i in range(2)) - seed
    row = COLS * getattr(torch, name).itemsize + (4 if FORMATS[getattr(torch, name)].scaled else 0)
    kv = 2 * (RANK * HEADS * COLS + HEADS * ROWS) + 4 * HEADS * angles
    assert pool.bytes_per_slot == 2 * (HEADS * ROWS * row + kv) + seed


# Slots


@DEVICES
@EVERY_FORMAT
def test_an_acquired_slot_is_clean_in_all_four_states_and_others_stay(
    name: str, rounding: str, device: torch.device
) -> None:
    pool = in_format(name, rounding, device=device)
    dirty(pool)
    slots = pool.acquire(3).tolist()
    assert is_clean(pool, slots)
    assert is_poison(pool, [3, 4, 5])
    dirty(pool)
    pool.release(slots[1])
    assert pool.acquire().tolist() == [slots[1]]
    assert is_clean(pool, [slots[1]])
    pool.reset(slots[2])
    assert is_clean(pool, slots[1:])
    assert is_poison(pool, [slots[0], 3, 4, 5])


@DEVICES
@EVERY_FORMAT
@pytest.mark.parametrize("keep_seed", [False, True])
def test_copy_clones_all_four_states_and_reads_before_it_writes(
    name: str, rounding: str, keep_seed: bool, device: torch.device
) -> None:
    pool = in_format(name, rounding, device=device)
    pool.acquire(SLOTS, seed=range(SLOTS))
    fill(pool)
    before = [tensor.clone() for tensor in parts_of(pool)]
    src, dst = [1, 0, 0, 4], [0, 1, 2, 4]  # a swap, a fan-out, a copy onto itself
    pool.copy(src, dst, keep_seed=keep_seed)
    for tensor, old in zip(parts_of(pool), before, strict=True):
        assert same(tensor[dst], old[src])
        assert same(tensor[[3, 5]], old[[3, 5]])
    if rounding == "stochastic":
        seeds = seed_of(pool)[dst].tolist()
        assert seeds == src if keep_seed else not set(seeds) & set(range(SLOTS))
        assert seed_of(pool)[[3, 5]].tolist() == [3, 5]


def test_seeds_are_given_or_drawn_and_advance_moves_those_that_are_read() -> None:
    pool, twin = (in_format("float16", "stochastic") for _ in range(2))
    slots = pool.acquire(2)
    assert seed_of(pool)[slots].tolist() == seed_of(twin)[twin.acquire(2)].tolist()
    assert len(set(seed_of(pool)[:3].tolist())) == 3
    pool.reset([0, 1], seed=[5, -6])
    pool.advance(slots[1:])
    assert seed_of(pool)[slots].tolist() == [5, -6 + SEED_STEP]
    nearest = in_format("float16", "nearest")
    nearest.advance(nearest.acquire(2, seed=[1, 2]))


# What write, read and write_kv do


@EVERY_FORMAT
def test_write_and_read_are_of_the_ssm_state_as_in_other_pools(name: str, rounding: str) -> None:
    pool = in_format(name, rounding)
    plain = StatePool.mamba2(
        slots=SLOTS, layers=2, heads=HEADS, rows=ROWS, cols=COLS,
        dtype=getattr(torch, name), rounding=rounding, stream=7, seed=1,
    )  # fmt: skip
    values = torch.randn(2, HEADS, ROWS, COLS, generator=torch.Generator().manual_seed(0))
    for each in (pool, plain):
        each.acquire(3, seed=[3, 4, 5])
        each.write(1, [2, 0], values)
    for one, other in zip(parts(pool.layer(1).ssm), parts(plain.layer(1)), strict=True):
        assert same(one, other)
    assert same(pool.read(1, [0, 2, 0]), plain.read(1, [0, 2, 0]))
    assert pool.read(1, [0, 2]).any()
    pool.write(1, [2, 0], torch.zeros_like(values))
    assert is_clean(pool, [1, 3, 4, 5])
    assert not any(bytes_of(tensor).any() for tensor in parts(pool.layer(1))[-3:])


@DEVICES
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("kv_dtype", KINDS, ids=str)
def test_what_a_prefill_left_is_stored_in_the_dtypes_of_the_pool(
    dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
) -> None:
    pool, left = make_pool(kv_dtype=kv_dtype, device=device), left_by_a_prefill(3, dtype, device)
    pool.acquire(5)
    dirty(pool)
    pool.write_kv(1, [4, 0, 2], **left)
    layer = pool.layer(1)
    assert layer.angle is not None
    assert same(layer.k[[4, 0, 2]], left["k"].to(kv_dtype))
    assert same(layer.v[[4, 0, 2]], left["v"].to(kv_dtype))
    assert same(layer.angle[[4, 0, 2]], left["angle"])
    assert all((bytes_of(tensor[[1, 3, 5]]) == POISON).all() for tensor in (layer.k, layer.v, layer.angle))
    assert all((bytes_of(tensor) == POISON).all() for tensor in (*parts(pool.layer(0)), layer.ssm.data))


def test_a_pool_without_angles_takes_k_and_v_alone() -> None:
    pool, left = make_pool(angles=0, kv_dtype=torch.float32), left_by_a_prefill(1)
    slot = pool.acquire()
    pool.write_kv(0, slot, left["k"], left["v"])
    assert same(pool.layer(0).k[slot], left["k"])
    assert same(pool.layer(0).v[slot], left["v"])
    pool.write_kv(0, [], left["k"][:0], left["v"][:0])
    assert same(pool.layer(0).k[slot], left["k"])


def test_what_is_stored_is_read_before_it_is_overwritten() -> None:
    pool = make_pool(kv_dtype=torch.float32)
    pool.acquire(4)
    fill(pool)
    layer = pool.layer(0)
    assert layer.angle is not None
    layer.angle.remainder_(6.0)
    before = [tensor[:3].clone() for tensor in (layer.k, layer.v, layer.angle)]
    pool.write_kv(0, [1, 2, 3], layer.k[:3], layer.v[:3], layer.angle[:3])
    for tensor, old in zip((layer.k, layer.v, layer.angle), before, strict=True):
        assert same(tensor[1:4], old)


@DEVICES
def test_angles_are_stored_from_zero_to_less_than_a_turn(device: torch.device) -> None:
    turn = torch.tensor(2 * math.pi)  # more than 2π
    below = torch.nextafter(turn, torch.tensor(0.0))
    given = [
        0.0,
        1.5,
        -1.5,
        turn.item(),
        -turn.item(),
        below.item(),
        -1e-9,
        -1e-30,
        1e4,
        -1e4,
        100 * math.pi,
        6.2831855,
    ]
    angle = torch.tensor(given)[:, None, None].to(device)
    pool = StatePool.mamba3(slots=len(given), layers=1, heads=1, rows=1, cols=2, angles=1, device=device)
    k, v = torch.zeros(len(given), 1, 1, 2, device=device), torch.zeros(len(given), 1, 1, device=device)
    pool.write_kv(0, pool.acquire(len(given)), k, v, angle)
    stored = pool.layer(0).angle
    assert stored is not None
    want = [math.fmod(math.fmod(float(a), 2 * math.pi) + 2 * math.pi, 2 * math.pi) for a in angle.flatten().cpu()]
    got = stored.flatten().tolist()
    assert all(0.0 <= a < 2 * math.pi for a in got)
    assert got[6:8] == [0.0, 0.0]
    assert got[5] == below.item()  # as it was
    for one, other in zip(got, want, strict=True):
        apart = abs(one - other)
        assert min(apart, 2 * math.pi - apart) <= 2.0**-22
    pool.write_kv(0, 3, k[:1], v[:1], torch.full((1, 1, 1), math.nan, device=device))
    assert stored[3].isnan().all()


@DEVICES
def test_a_pool_crosses_in_and_out_of_inference_mode_and_gradients_leave_no_trace(device: torch.device) -> None:
    outside, left = make_pool(device=device), left_by_a_prefill(1, device=device)
    with torch.inference_mode():
        inside = make_pool(device=device)
        for pool in (inside, outside):
            pool.acquire(2)
            pool.write_kv(0, 0, **left)
    for pool in (inside, outside):
        pool.copy(0, 1)
        pool.reset(0)
        assert same(pool.layer(0).v[[1]], left["v"].bfloat16())
        pool.write_kv(0, 0, **{name: tensor.clone().requires_grad_() for name, tensor in left.items()})
        pool.layer(0).v[0].add_(1.0)
        assert not any(tensor.requires_grad for tensor in parts_of(pool))


@pytest.mark.gpu
def test_nothing_waits_for_the_device_when_slots_are_ints() -> None:
    pool, left = make_pool(device=CUDA), left_by_a_prefill(2, device=CUDA)
    torch.cuda.set_sync_debug_mode("error")
    try:
        pool.acquire(3)
        pool.write_kv(1, [2, 0], **left)
        pool.copy([0, 2], [2, 1])
        pool.reset(2)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Wrapped


def in_pages(pages: Tensor, dtype: torch.dtype = torch.float16, start: int = 0, **options: Any) -> Mamba3State:
    """The states of one layer, one after the other, from this byte of every page (a row of bytes) on."""
    kinds = {"data": ((HEADS, ROWS, COLS), dtype), "scale": ((HEADS, ROWS), torch.float32)}
    kinds |= {name: (shape, torch.float32 if name == "angle" else torch.bfloat16) for name, shape in SHAPES.items()}
    if not FORMATS[dtype].scaled:
        del kinds["scale"]
    tensors = {}
    for name, (shape, kind) in kinds.items():
        size = torch.Size(shape).numel() * kind.itemsize
        tensors[name] = pages[:, start : start + size].view(kind).unflatten(1, shape)
        start += -(-size // 8) * 8
    ssm = State(tensors["data"], tensors.get("scale"), **options)
    return Mamba3State(ssm, tensors["k"], tensors["v"], tensors["angle"])


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_wrapped_pool_cleans_writes_and_copies_in_pages_and_nothing_between(
    dtype: torch.dtype, device: torch.device
) -> None:
    pages = torch.full((SLOTS, 1024), POISON, dtype=torch.uint8, device=device)
    seed = torch.arange(SLOTS, device=device)
    layers = [in_pages(pages, dtype, start, seed=seed, rounding="stochastic", stream=start) for start in (8, 512)]
    pool = StatePool.wrap(layers)
    assert all(pool.layer(i) is layer for i, layer in enumerate(layers))
    assert (pool.free, pool.slots, pool.layers) == (0, SLOTS, 2)
    assert pool.bytes_per_slot == sum(tensor[0].nbytes for tensor in parts_of(pool)) + 8
    kept = torch.zeros(1024, dtype=torch.bool, device=device)
    for tensor in parts_of(pool):
        first = tensor.storage_offset() * tensor.element_size()
        kept[first : first + tensor[0].nbytes] = True
    pool.release([2, 3])
    assert pool.acquire(2).tolist() == [2, 3]
    assert is_clean(pool, [2, 3])
    assert (pages[[0, 1, 4, 5]] == POISON).all()
    left = left_by_a_prefill(1, device=device)
    pool.write_kv(1, 3, **left)
    pool.write(1, 3, torch.ones(1, HEADS, ROWS, COLS, device=device))
    pool.copy(3, 5)
    assert torch.equal(pages[5, kept], pages[3, kept])
    assert same(layers[1].k[[5]], left["k"].bfloat16())
    assert (pool.read(1, 5) == 1).all()
    assert not pool.read(0, 5).any()
    assert (pages[[0, 1, 4]] == POISON).all()
    assert (pages[:, ~kept] == POISON).all()


def test_layers_of_mamba3_and_others_share_a_pool_and_their_seed() -> None:
    seed = torch.arange(SLOTS)
    other = State(torch.ones(SLOTS, 4, 2, 2, dtype=torch.float16), rounding="stochastic", seed=seed)
    pages = torch.zeros(SLOTS, 1024, dtype=torch.uint8)
    window = pages[:, 800:].view(torch.float16).unflatten(1, (28, 4))
    states: list[State | Mamba3State] = [other, in_pages(pages)]
    pool = StatePool.wrap(states, windows=[torch.ones(SLOTS, 4, 3), window])
    dirty(pool)
    assert pool.layer(0) is other
    assert isinstance(pool.layer(1), Mamba3State)
    pool.write_kv(1, 2, **left_by_a_prefill(1))
    pool.write(0, 2, torch.ones(1, 4, 2, 2))
    with pytest.raises(ValueError, match=r"^write_kv is for layers of Mamba-3, which layer 0 is not"):
        pool.write_kv(0, 2, **left_by_a_prefill(1))
    pool.reset([2, 4], seed=9)
    assert is_clean(pool, [2, 4])
    assert seed.tolist() == [0, 1, 9, 3, 9, 5]
    assert pool.bytes_per_slot == 16 * 2 + sum(t[0].nbytes for t in parts(pool.layer(1))) + 12 * 4 + 224 + 8
