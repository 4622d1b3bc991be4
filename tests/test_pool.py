"""StatePool: slots that come clean and stay apart, states that go in and out, and a host that does not wait."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pools import (
    CPU,
    CUDA,
    DEVICES,
    EVERY_FORMAT,
    POISON,
    WITHOUT_SCALES,
    bytes_of,
    dirty,
    gaps_are_poison,
    in_pages,
    is_clean,
    make_pool,
    same,
    seed_of,
    tensors_of,
)
from torch import Tensor

from flashstate import Slots, State, StatePool
from flashstate.launch import Problem, interpreted, override, valid_configs
from flashstate.state.formats import decode, encode
from flashstate.state.rounding import SEED_STEP, random_bits

KERNELS = [
    pytest.param(CPU, interpreted, marks=pytest.mark.interpreted, id="interpreter"),
    pytest.param(CUDA, contextlib.nullcontext, marks=pytest.mark.gpu, id="gpu"),
]


# What write stores and read gives


def odd_values(n: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Rows of every magnitude, zeros, and one row each with an inf and a NaN.

    A view with strides on every axis but the last. No subnormal bfloat16, which the interpreter reads wrongly.
    """
    generator = torch.Generator().manual_seed(n)
    heads, rows, cols = shape
    values = torch.randn(heads, n, rows, cols + 2, generator=generator)
    values *= 2.0 ** torch.randint(-12, 12, (heads, n, rows, 1), generator=generator)
    values.view(-1, cols + 2)[:: n + 2, ::2] = 0.0
    values.view(-1, cols + 2)[-1, 0] = torch.inf
    values.view(-1, cols + 2)[-2, 0] = torch.nan
    return values.to(dtype).transpose(0, 1)[..., :cols]


@EVERY_FORMAT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_write_encodes_with_the_bits_of_token_minus_one_and_read_decodes(
    name: str, rounding: str, dtype: torch.dtype
) -> None:
    pool = StatePool.wrap(in_pages([(name, rounding)] * 2, 6, (2, 3, 20), CPU))
    state, values, slots = pool.layer(1), odd_values(3, (2, 3, 20), dtype), [4, 0, 2]
    pool.write(1, slots, values)
    random = None
    if rounding != "nearest":
        random = random_bits(seed_of(pool)[slots], (2, 3, 20), 0xFFFFFFFF, 41, 10, state.data.dtype)
    data, scale = encode(values.float(), state.data.dtype, random)
    assert same(state.data[slots], data)
    assert scale is None or (state.scale is not None and same(state.scale[slots], scale))
    assert same(pool.read(1, [2, 4, 2]), decode(data, scale)[[2, 0, 2]])
    for tensor, untouched in ((state.data, [1, 3, 5]), (pool.layer(0).data, range(6))):
        assert (bytes_of(tensor[list(untouched)]) == POISON).all()


@EVERY_FORMAT
@pytest.mark.parametrize(("device", "implementation"), KERNELS)
def test_kernels_and_reference_write_and_read_equal_bytes(
    name: str, rounding: str, device: torch.device, implementation: Callable[[], Any]
) -> None:
    shapes = [(1, 1, 1), (2, 5, 20), (1, 3, 33), (1, 2, 130)]
    dtypes = [torch.float32, torch.float16, torch.bfloat16]
    for i, shape in enumerate(shapes if device.type == "cpu" else [*shapes, (4, 64, 128), (3, 128, 256), (80, 64, 16)]):
        values, slots = odd_values(2, shape, dtypes[i % 3]), [5, 2]
        want, got = (StatePool.wrap(in_pages([(name, rounding)], 6, shape, where)) for where in (CPU, device))
        want.write(0, slots, values)
        with implementation():
            got.write(0, slots, values.to(device))
            read = got.read(0, [2, 5])
        for one, other in zip(tensors_of(got), tensors_of(want), strict=True):
            assert same(one, other), shape
        assert gaps_are_poison(got)
        assert same(read, want.read(0, [2, 5]))


@pytest.mark.interpreted
def test_every_config_gives_the_same_bytes() -> None:
    values, memory = torch.randn(2, 2, 9, 20, generator=torch.Generator().manual_seed(0)), []
    for config in valid_configs(Problem("pool_write", 9, 20, "int8", "stochastic", 4, 4))[::5]:
        pool = make_pool("int8", rows=9, cols=20)
        pool.acquire(2, seed=[3, 4])
        with interpreted(), override(config):
            pool.write(1, [1, 0], values)
            memory.append((pool.layer(1).data, pool.layer(1).scale, pool.read(1, [0, 1])))
    assert len(memory) > 2
    assert all(same(one, other) for row in memory for one, other in zip(row, memory[0], strict=True))


# Transposed layers


@pytest.mark.parametrize(("name", "rounding"), WITHOUT_SCALES)
def test_a_transposed_layer_holds_and_gives_what_a_contiguous_one_does(
    name: str, rounding: str, device: torch.device
) -> None:
    shapes = [(2, 5, 20), (3, 8, 3), (2, 1, 7)]
    for shape in shapes if device.type == "cpu" else [*shapes, (4, 64, 128), (3, 128, 256), (8, 16, 512)]:
        values, slots = odd_values(2, shape, torch.float32).to(device), [5, 2]
        pools = [StatePool.wrap(in_pages([(name, rounding)], 6, shape, device, flipped)) for flipped in (False, True)]
        assert [pool.layer(0).transposed for pool in pools] == [False, min(shape[1:]) > 1]
        for pool in pools:
            pool.write(0, slots, values)
            pool.copy([5], [3], keep_seed=True)
            pool.reset([2])
        one, other = (pool.layer(0).data for pool in pools)
        assert same(one, other), shape
        assert gaps_are_poison(pools[1]), shape
        assert same(pools[1].read(0, [3, 2, 5, 3]), pools[0].read(0, [3, 2, 5, 3])), shape


def test_layers_of_a_pool_may_be_transposed_or_not() -> None:
    """In pages of one size, after each other; slots come clean, and layers stay apart."""
    flat, flipped = torch.zeros(5, 2, 2 * 3 * 5).unbind(1)
    states = [State(flat.unflatten(1, (2, 3, 5))), State(flipped.unflatten(1, (2, 5, 3)).mT)]
    pool = StatePool.wrap(states)
    dirty(pool)
    pool.release(range(5))
    slots = pool.acquire(2)
    assert is_clean(pool, slots.tolist())
    pool.write(1, slots, torch.ones(2, 2, 3, 5))
    assert not pool.read(0, slots).any()
    assert (pool.read(1, slots) == 1).all()
    assert pool.bytes_per_slot == 2 * 30 * 4
    with pytest.raises(ValueError, match=r"^states\[1\] must not share the memory of another layer"):
        StatePool.wrap([states[1], State(states[1].data.mT)])


# Slots


def test_slots_released_last_come_first_and_are_counted() -> None:
    pool = make_pool()
    assert pool.acquire(4).tolist() == [0, 1, 2, 3]
    pool.release(2)
    pool.release([3, 0])
    assert pool.free == 5
    with pytest.raises(ValueError, match=r"^slots must be held, but slot 0 is free"):
        pool.release([1, 0])
    assert pool.free == 5
    assert pool.acquire(4).tolist() == [3, 0, 2, 4]
    assert pool.acquire(0).tolist() == []
    assert (pool.free, pool.slots, pool.layers) == (1, 6, 2)


def test_all_or_nothing_is_acquired() -> None:
    pool = make_pool()
    pool.acquire(4)
    with pytest.raises(RuntimeError, match=r"^acquire needs 3 free slots, but only 2 of 6 are free"):
        pool.acquire(3)
    assert pool.acquire(2).tolist() == [4, 5]


@pytest.mark.parametrize("null", [0, 3, 5])
def test_the_null_slot_is_never_handed_out(null: int) -> None:
    pool = make_pool(null=null)
    assert pool.free == 5
    assert null not in pool.acquire(5).tolist()
    for call in (pool.release, pool.reset):
        with pytest.raises(ValueError, match=rf"^slots must be held, but slot {null} is the null slot"):
            call(null)
    wrapped = StatePool.wrap([pool.layer(0)], null=null)
    with pytest.raises(ValueError, match=rf"^slots must be held, but slot {null} is the null slot"):
        wrapped.release(null)


@pytest.mark.parametrize(
    "kind",
    [int, lambda s: [s], lambda s: (s,), lambda s: range(s, s + 1), torch.tensor, lambda s: torch.tensor([s]).int()],
    ids=["int", "list", "tuple", "range", "scalar tensor", "int32 tensor"],
)
def test_slots_are_an_int_a_sequence_or_a_tensor(kind: Callable[[int], Any]) -> None:
    pool = make_pool()
    pool.acquire(6)
    pool.write(0, kind(4), torch.ones(1, 2, 3, 5))
    assert pool.read(0, kind(4)).sum() == 30
    pool.copy(kind(4), kind(5))
    assert pool.read(0, [5]).sum() == 30
    pool.reset(kind(4))
    pool.release(kind(4))
    assert pool.acquire().tolist() == [4]


def test_seeds_are_given_or_drawn_from_the_pools_seed() -> None:
    pool, twin, other, two = make_pool(), make_pool(), make_pool(seed=2), [make_pool(seed=None) for _ in range(2)]
    drawn = [p.layer(0).seed[p.acquire(3)].tolist() for p in (pool, twin, other, *two)]  # type: ignore[index]
    assert drawn[0] == drawn[1]
    assert len({seed for seeds in drawn[1:] for seed in seeds}) == 12
    largest = (1 << 63) - 1
    for given, want in (
        (5, [5, 5]),
        ([-largest - 1, largest], [-largest - 1, largest]),
        (torch.tensor([8, 9]), [8, 9]),
    ):
        pool.reset([2, 0], seed=given)
        assert seed_of(pool)[[2, 0]].tolist() == want
    assert seed_of(pool)[pool.acquire(1, seed=range(4, 5))].tolist() == [4]
    pool.reset(1)
    assert seed_of(pool)[1].item() not in drawn[0]


def test_a_pool_without_stochastic_rounding_has_no_seeds_and_needs_no_other_code() -> None:
    pool = make_pool("bfloat16", "nearest")
    assert pool.layer(0).seed is None
    assert pool.acquire(2, seed=[3, 4]).tolist() == [0, 1]
    pool.reset(0, seed=1)
    pool.copy(0, 1, keep_seed=True)
    pool.copy(1, 0)
    pool.advance(torch.tensor([0, 1]))
    pool.advance()
    with pytest.raises(TypeError, match=r"^slots must be a Slots"):
        pool.advance([0, 1])  # type: ignore[arg-type]


# Layers


def test_layers_have_the_shape_asked_for_and_are_as_many() -> None:
    pool = make_pool("int8")
    assert [tuple(pool.layer(i).data.shape) for i in range(2)] == [(6, 2, 3, 5)] * 2
    for i in (-1, 2):
        with pytest.raises(IndexError, match=rf"^layer must be from 0 to 1, got {i}"):
            pool.layer(i)
    for wrong in (True, 0.0, "0", None):
        with pytest.raises(TypeError, match=r"^layer must be an int"):
            pool.layer(wrong)  # type: ignore[arg-type]


def test_a_pool_for_the_gated_delta_rule_has_rows_of_keys() -> None:
    pool = StatePool.gated_delta(slots=4, layers=3, heads=2, value_dim=5, key_dim=7, dtype=torch.int8)
    scale = pool.layer(2).scale
    assert tuple(pool.layer(2).data.shape) == (4, 2, 5, 7)
    assert scale is not None
    assert tuple(scale.shape) == (4, 2, 5)


def test_a_wrapped_pool_holds_every_slot_until_it_is_released() -> None:
    pool = StatePool.wrap(in_pages([("int8", "stochastic"), ("float32", "nearest")], 5, (2, 3, 5), CPU), null=0)
    assert (pool.free, pool.slots, pool.layers) == (0, 5, 2)
    assert [pool.layer(i).stream for i in range(2)] == [40, 41]
    with pytest.raises(RuntimeError, match=r"^acquire needs 1 free slots, but only 0 of 5 are free"):
        pool.acquire()
    pool.write(1, [4], torch.ones(1, 2, 3, 5))
    pool.release([3, 4])
    assert pool.acquire(2).tolist() == [3, 4]
    assert is_clean(pool, [3, 4])
    assert (bytes_of(pool.layer(0).data[[1, 2]]) == POISON).all()


@DEVICES
def test_advance_moves_the_seeds_of_the_slots_that_are_read(device: torch.device) -> None:
    for slots, moved in (
        (None, range(6)),
        ([0, 3, -1, 5], [0, 3, 5]),  # a bare tensor has no null but negatives
        (Slots(torch.tensor([0, 3], device=device), null=0), [3]),
        (
            Slots(
                torch.tensor([[1, 2, 9], [3, 4, 0], [5, 5, 5]], device=device),
                accepted=torch.tensor([2, 1, 0], device=device),
                null=0,
            ),
            [1, 2, 3, 4],  # all slots of a request, not those of padding
        ),
        (Slots(torch.tensor([2, 3], device=device), cu_seqlens=torch.tensor([0, 0, 4], device=device)), [3]),
    ):
        pool = make_pool(null=0, device=device)
        pool.acquire(5)
        before = seed_of(pool).clone()
        pool.advance(torch.tensor(slots, device=device) if isinstance(slots, list) else slots)
        steps = (seed_of(pool) - before).tolist()
        assert steps == [SEED_STEP if slot in moved else 0 for slot in range(6)]


def test_states_that_require_gradients_leave_no_trace() -> None:
    pool = make_pool("float32", "nearest")
    pool.acquire(2)
    pool.write(0, [0, 1], torch.ones(2, 2, 3, 5, requires_grad=True))
    assert not pool.layer(0).data.requires_grad
    assert not pool.read(0, 0).requires_grad


# GPUs


@pytest.mark.gpu
def test_a_graph_captures_advance_and_no_numbers_of_the_host() -> None:
    pool = make_pool(device=CUDA)
    slots = pool.acquire(2)
    pool.advance(slots)
    before = seed_of(pool).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pool.advance(slots)
        for call in (pool.acquire, lambda: pool.reset(0), lambda: pool.read(0, 0), lambda: pool.copy(0, 1)):
            with pytest.raises(RuntimeError, match="a CUDA graph cannot capture"):
                call()
    graph.replay()
    graph.replay()
    assert (seed_of(pool) - before).tolist() == (2 * torch.tensor([SEED_STEP] * 2 + [0] * 4)).tolist()
