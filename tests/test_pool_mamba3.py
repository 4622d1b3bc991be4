"""StatePool with layers of Mamba-3: four states that come clean, stay apart, go in and are copied together."""

import math

import pytest
import torch
from mamba3_pools import COLS, HEADS, KINDS, ROWS, SLOTS, in_format, left_by_a_prefill, make_pool, parts_of
from pools import DEVICES, EVERY_FORMAT, POISON, bytes_of, dirty, fill, is_clean, kept_by, same

from flashstate import State, StatePool

# What is allocated


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("rank", "angles"), [(1, 0), (1, 4), (3, 3)])
def test_layers_have_four_states_of_zeros_in_the_shapes_asked_for(rank: int, angles: int, kind: torch.dtype) -> None:
    pool = make_pool(rank=rank, angles=angles, kv_dtype=kind, dtype=torch.int8)
    wanted = {"data": ((HEADS, ROWS, COLS), torch.int8), "scale": ((HEADS, ROWS), torch.float32)}
    wanted |= {"k": ((rank, HEADS, COLS), kind), "v": ((HEADS, ROWS), kind)}
    wanted |= {"angle": ((HEADS, angles), torch.float32)} if angles else {}
    kept = {part: (tuple(tensor.shape[1:]), tensor.dtype) for part, tensor in kept_by(pool).items()}
    assert kept == {f"{part} {i}": form for i in range(2) for part, form in wanted.items()}
    assert is_clean(pool, list(range(SLOTS)))


def test_rank_is_one_and_there_are_no_angles_unless_asked_for() -> None:
    layer = StatePool.mamba3(slots=2, layers=1, heads=1, rows=2, cols=4).layer(0)
    assert (layer.rank, layer.angle, layer.ssm.seed) == (1, None, None)
    assert (layer.ssm.data.dtype, layer.k.dtype, layer.v.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)


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
    for part, tensor in kept_by(plain).items():
        assert same(kept_by(pool)[part], tensor), part
    assert same(pool.read(1, [0, 2, 0]), plain.read(1, [0, 2, 0]))
    assert pool.read(1, [0, 2]).any()
    assert is_clean(pool, [1, 3, 4, 5])
    assert not any(bytes_of(getattr(pool.layer(1), part)).any() for part in ("k", "v", "angle"))


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
    for part, tensor in kept_by(pool).items():
        stays = [1, 3, 5] if part in ("k 1", "v 1", "angle 1") else range(SLOTS)
        assert (bytes_of(tensor[list(stays)]) == POISON).all(), part


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
    beside = [turn.item(), -turn.item(), below.item()]
    given = [0.0, 1.5, -1.5, *beside, -1e-9, -1e-30, 1e4, -1e4, 100 * math.pi, 6.2831855]
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


def test_gradients_leave_no_trace() -> None:
    pool, left = make_pool(), left_by_a_prefill(1)
    pool.write_kv(0, pool.acquire(), **{name: tensor.clone().requires_grad_() for name, tensor in left.items()})
    pool.layer(0).v[0].add_(1.0)
    assert not any(tensor.requires_grad for tensor in parts_of(pool))


def test_layers_of_mamba3_and_others_share_a_pool_and_their_seed() -> None:
    seed = torch.arange(SLOTS)
    other = State(torch.ones(SLOTS, 4, 2, 2, dtype=torch.float16), rounding="stochastic", seed=seed)
    layer = make_pool(layers=1).layer(0)
    pool = StatePool.wrap([other, layer], windows=[torch.ones(SLOTS, 4, 3), torch.ones(SLOTS, 28, 4)])
    dirty(pool)
    assert pool.layer(0) is other
    assert pool.layer(1) is layer
    pool.write_kv(1, 2, **left_by_a_prefill(1))
    pool.write(0, 2, torch.ones(1, 4, 2, 2))
    with pytest.raises(ValueError, match=r"^write_kv is for layers of Mamba-3, which layer 0 is not"):
        pool.write_kv(0, 2, **left_by_a_prefill(1))
    pool.reset([2, 4], seed=9)
    assert is_clean(pool, [2, 4])
    assert seed.tolist() == [-1, -1, 9, -1, 9, -1]
    assert pool.bytes_per_slot == sum(tensor[0].nbytes for tensor in parts_of(pool)) + 8
