"""StatePool: slots that come clean and stay apart, states that go in and out, and wrong calls that change nothing."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

import flashstate
from flashstate import Slots, State, StatePool
from flashstate.launch import Problem, interpreted, override, valid_configs
from flashstate.state.formats import FORMATS, PORTABLE_FORMATS, decode, encode
from flashstate.state.rounding import SEED_STEP, random_bits

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
EVERY_FORMAT = pytest.mark.parametrize(("name", "rounding"), PORTABLE_FORMATS)
DEVICES = pytest.mark.parametrize("device", [CPU, pytest.param(CUDA, marks=pytest.mark.gpu)], ids=str)
SHAPE = {"heads": 2, "rows": 3, "cols": 5}
GAP = 3  # elements between the slots of a pool in pages
POISON = 0x7F


def make_pool(name: str = "float16", rounding: str = "stochastic", **options: Any) -> StatePool:
    sizes = {"slots": 6, "layers": 2, **SHAPE, "stream": 7, "seed": 1}
    return StatePool.mamba2(**{**sizes, "dtype": getattr(torch, name), "rounding": rounding, **options})


def in_pages(formats: list[tuple[str, str]], slots: int, shape: tuple[int, ...], device: torch.device) -> list[State]:
    """States of these formats that share a seed, with gaps between their slots; every byte is poison."""
    seed = torch.arange(slots, device=device) * 0x5851F42D4C957F2D
    states = []
    for i, (name, rounding) in enumerate(formats):
        dtype = getattr(torch, name)
        scale = poisoned(slots, shape[:-1], torch.float32, device) if FORMATS[dtype].scaled else None
        data = poisoned(slots, shape, dtype, device)
        states.append(State(data, scale, rounding=rounding, seed=seed, stream=40 + i))
    return states


def poisoned(slots: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """(slots, *shape) with gaps between slots, all of it bytes that no clean slot has: NaN in every float format."""
    size = torch.Size(shape).numel()
    memory = torch.empty(slots, size + GAP, dtype=dtype, device=device)
    memory.view(torch.uint8).fill_(POISON)
    return memory[:, :size].unflatten(1, shape)


def tensors_of(pool: StatePool) -> list[Tensor]:
    """The tensors of a pool."""
    states = [pool.layer(i) for i in range(pool.layers)]
    tensors = [tensor for state in states for tensor in (state.data, state.scale)]
    return [tensor for tensor in (*tensors, states[0].seed) if tensor is not None]


def memory_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's storage, gaps between slots among them."""
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
    return torch.equal(bytes_of(one), bytes_of(other))


def seed_of(pool: StatePool) -> Tensor:
    seed = pool.layer(0).seed
    assert seed is not None
    return seed


def dirty(pool: StatePool) -> None:
    """Poison all memory of a pool."""
    for tensor in tensors_of(pool):
        memory_of(tensor).fill_(POISON)


def is_clean(pool: StatePool, slots: list[int]) -> bool:
    states = [pool.layer(i) for i in range(pool.layers)]
    zero = all(not bytes_of(state.data[slots]).any() for state in states)
    return zero and all(bool((state.scale[slots] == 1).all()) for state in states if state.scale is not None)


# What write stores and read gives


def odd_values(n: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Rows of every magnitude, zeros, and one row each with an inf and a NaN, as a view with strides on every axis but
    the last. No subnormal bfloat16, which the interpreter reads wrongly."""
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
    random = random_bits(seed_of(pool)[slots], (2, 3, 20), 0xFFFFFFFF, 41, 10) if rounding != "nearest" else None
    data, scale = encode(values.float(), state.data.dtype, random)
    assert same(state.data[slots], data)
    assert scale is None or (state.scale is not None and same(state.scale[slots], scale))
    assert same(pool.read(1, [2, 4, 2]), decode(data, scale)[[2, 0, 2]])
    for tensor, untouched in ((state.data, [1, 3, 5]), (pool.layer(0).data, range(6))):
        assert (bytes_of(tensor[list(untouched)]) == POISON).all()


@pytest.mark.parametrize(
    ("device", "implementation"),
    [
        pytest.param(CPU, interpreted, marks=pytest.mark.interpreted, id="interpreter"),
        pytest.param(CUDA, contextlib.nullcontext, marks=pytest.mark.gpu, id="gpu"),
    ],
)
@EVERY_FORMAT
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


# Slots


@DEVICES
@EVERY_FORMAT
def test_an_acquired_slot_is_zero_with_scale_one_and_a_seed_of_its_own(
    name: str, rounding: str, device: torch.device
) -> None:
    pool = make_pool(name, rounding, device=device)
    dirty(pool)
    before = [memory_of(tensor).clone() for tensor in tensors_of(pool)]
    slots = pool.acquire(3)
    assert (slots.dtype, slots.device.type, slots.tolist()) == (torch.int64, device.type, [0, 1, 2])
    assert is_clean(pool, [0, 1, 2])
    assert rounding == "nearest" or len(set(seed_of(pool)[:4].tolist())) == 4
    for tensor, memory in zip(tensors_of(pool), before, strict=True):
        dead = tensor[3:]
        assert torch.equal(bytes_of(dead).flatten(), memory[: dead.nbytes])
    pool.release(slots)
    dirty(pool)
    assert is_clean(pool, pool.acquire(2).tolist())


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


@DEVICES
@EVERY_FORMAT
@pytest.mark.parametrize("keep_seed", [False, True])
def test_copy_clones_all_layers_and_reads_before_it_writes(
    name: str, rounding: str, keep_seed: bool, device: torch.device
) -> None:
    shape = (2, 3, 5)
    pool = StatePool.wrap(in_pages([(name, rounding), ("float32", "nearest")], 6, shape, device))
    for i in range(2):
        pool.write(i, range(6), torch.randn(6, *shape, device=device))
    before = [tensor.clone() for tensor in tensors_of(pool)]
    src, dst = [1, 0, 0, 4], [0, 1, 2, 4]  # a swap, a fan-out, a copy onto itself
    pool.copy(src, dst, keep_seed=keep_seed)
    for tensor, old in zip(tensors_of(pool)[:-1], before, strict=False):
        assert same(tensor[dst], old[src])
        assert same(tensor[[3, 5]], old[[3, 5]])
    assert gaps_are_poison(pool)
    seed, old = tensors_of(pool)[-1].tolist(), before[-1].tolist()
    assert (seed[3], seed[5]) == (old[3], old[5])
    if keep_seed:
        assert [seed[d] for d in dst] == [old[s] for s in src]
    else:
        assert not {seed[d] for d in dst} & set(old)


# Layers


def test_layers_are_the_same_states_every_time_with_streams_of_their_own() -> None:
    pool = make_pool("int8", "stochastic", rounds=7)
    states = [pool.layer(0), pool.layer(1)]
    assert states[0] is pool.layer(0)
    assert [state.stream for state in states] == [7, 8]
    assert all(state.seed is seed_of(pool) and state.rounds == 7 for state in states)
    assert [tuple(state.data.shape) for state in states] == [(6, 2, 3, 5)] * 2
    assert states[0].data.data_ptr() != states[1].data.data_ptr()
    for i in (-1, 2):
        with pytest.raises(IndexError, match=rf"^layer must be from 0 to 1, got {i}"):
            pool.layer(i)
    for wrong in (True, 0.0, "0", None):
        with pytest.raises(TypeError, match=r"^layer must be an int"):
            pool.layer(wrong)  # type: ignore[arg-type]


@EVERY_FORMAT
def test_bytes_per_slot_are_all_that_was_allocated(name: str, rounding: str) -> None:
    dtype = getattr(torch, name)
    scale = 4 if name in ("int16", "int8", "float8_e4m3fn") else 0
    want = 2 * 6 * (5 * dtype.itemsize + scale) + (8 if rounding == "stochastic" else 0)
    pool = make_pool(name, rounding)
    assert pool.bytes_per_slot == want
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_of(pool)}
    assert sum(storages.values()) == 6 * want
    pages = StatePool.wrap(in_pages([(name, rounding)] * 2, 6, (2, 3, 5), CPU))
    assert pages.bytes_per_slot == want + (8 if rounding == "nearest" else 0)


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
        ([0, 3, -1, 5], [3, 5]),  # with the pool's null
        (Slots(torch.tensor([0, 3], device=device)), [0, 3]),  # with its own
    ):
        pool = make_pool(null=0, device=device)
        pool.acquire(5)
        before = seed_of(pool).clone()
        pool.advance(torch.tensor(slots, device=device) if isinstance(slots, list) else slots)
        steps = (seed_of(pool) - before).tolist()
        assert steps == [SEED_STEP if slot in moved else 0 for slot in range(6)]


@DEVICES
def test_a_pool_crosses_in_and_out_of_inference_mode(device: torch.device) -> None:
    outside = make_pool(device=device)
    with torch.inference_mode():
        inside = make_pool(device=device)
        slots = [pool.acquire(2) for pool in (inside, outside)]
        for pool in (inside, outside):
            pool.write(0, [0], torch.ones(1, 2, 3, 5, device=device))
    for pool, index in zip((inside, outside), slots, strict=True):
        index.add_(0)
        pool.copy(0, 1)
        pool.reset(0)
        pool.advance(index)
        assert pool.read(0, [0, 1]).sum() == 30
        pool.release(index)
        pool.acquire(3)
    with torch.inference_mode():
        inside.copy(2, 1)
        outside.reset([0, 1, 2])


def test_states_that_require_gradients_leave_no_trace() -> None:
    pool = make_pool("float32", "nearest")
    pool.acquire(2)
    pool.write(0, [0, 1], torch.ones(2, 2, 3, 5, requires_grad=True))
    assert not pool.layer(0).data.requires_grad
    assert not pool.read(0, 0).requires_grad


# Wrong calls


def wrong_slots(name: str, call: Callable[[StatePool, Any], Any]) -> list[tuple[Any, ...]]:
    """What every method refuses as slots, on a pool whose slots 0 to 3 are held and whose null is 5."""
    wrong: list[tuple[Any, type[Exception], str]] = [
        (4, ValueError, "must be held, but slot 4 is free"),
        ([0, 4], ValueError, "must be held, but slot 4 is free"),
        (5, ValueError, "must be held, but slot 5 is the null slot"),
        (6, ValueError, "must be from 0 to 5, got 6"),
        ([1, -1], ValueError, "must be from 0 to 5, got -1"),
        (torch.tensor([1 << 40]), ValueError, "must be from 0 to 5, got 1099511627776"),
        (True, TypeError, "must be an int, got True"),
        ([1, 2.0], TypeError, "must be an int, got 2.0"),
        (1.0, TypeError, "must be an int, a sequence of ints or an integer tensor, got float"),
        (None, TypeError, "must be an int, a sequence of ints or an integer tensor, got NoneType"),
        ("1", TypeError, "must be an int, a sequence of ints or an integer tensor, got str"),
        (torch.tensor([1.0]), TypeError, "must be int32 or int64, got float32"),
        (torch.tensor(True), TypeError, "must be int32 or int64, got bool"),
        (torch.tensor([[1]]), ValueError, r"must have shape \(slots\), got \(1, 1\)"),
    ]
    return [
        (lambda pool, slots=slots: call(pool, slots), error, f"^{name} {message}") for slots, error, message in wrong
    ]


ONE = torch.ones(1, 2, 3, 5)
TWO = torch.ones(2, 2, 3, 5)
TWICE = "must be distinct, got slot 1 more than once"
REFUSALS: list[tuple[Any, ...]] = [
    *wrong_slots("slots", lambda pool, slots: pool.release(slots)),
    *wrong_slots("slots", lambda pool, slots: pool.reset(slots)),
    *wrong_slots("slots", lambda pool, slots: pool.write(0, slots, ONE)),
    *wrong_slots("slots", lambda pool, slots: pool.read(0, slots)),
    *wrong_slots("src", lambda pool, slots: pool.copy(slots, 1)),
    *wrong_slots("dst", lambda pool, slots: pool.copy(1, slots)),
    (lambda pool: pool.release([1, 2, 1]), ValueError, f"^slots {TWICE}"),
    (lambda pool: pool.reset([1, 1]), ValueError, f"^slots {TWICE}"),
    (lambda pool: pool.write(0, [1, 1], TWO), ValueError, f"^slots {TWICE}"),
    (lambda pool: pool.copy([0, 2], [1, 1]), ValueError, f"^dst {TWICE}"),
    (lambda pool: pool.copy([0, 2], [1]), ValueError, "^dst must have as many slots as src, 2, got 1"),
    (lambda pool: pool.copy(0, 1, keep_seed=1), TypeError, "^keep_seed must be True or False, got 1"),
    (lambda pool: pool.acquire(2), RuntimeError, "^acquire needs 2 free slots, but only 1 of 6 are free"),
    (lambda pool: pool.acquire(-1), ValueError, "^n must be from 0"),
    (lambda pool: pool.acquire(1.0), TypeError, "^n must be an int, got 1.0"),
    (lambda pool: pool.acquire(True), TypeError, "^n must be an int, got True"),
    (lambda pool: pool.acquire(1, seed=[1, 2]), ValueError, "^seed must be one int, or one for each of 1 slots, got 2"),
    (lambda pool: pool.acquire(1, seed=1.5), TypeError, "^seed must be an int, a sequence"),
    (lambda pool: pool.acquire(1, seed=True), TypeError, "^seed must be an int, got True"),
    (lambda pool: pool.acquire(1, seed=1 << 63), ValueError, "^seed must be from -9223372036854775808 to"),
    (lambda pool: pool.reset([0, 1], seed=[1, "2"]), TypeError, "^seed must be an int, got '2'"),
    (lambda pool: pool.reset([0, 1], seed=torch.tensor([1.0, 2.0])), TypeError, "^seed must be int32 or int64"),
    (lambda pool: pool.reset([0, 1], seed=torch.tensor([1])), ValueError, r"^seed must have shape \(slots=2\)"),
    (
        lambda pool: pool.reset(0, seed=torch.tensor([1]).to("meta")),
        ValueError,
        "^seed is on meta, but the state is on",
    ),
    (lambda pool: pool.write(2, 0, ONE), IndexError, "^layer must be from 0 to 1, got 2"),
    (lambda pool: pool.read(-1, 0), IndexError, "^layer must be from 0 to 1, got -1"),
    (lambda pool: pool.write(0, 0, ONE.double()), TypeError, "^states must be float32 or bfloat16 or float16"),
    (
        lambda pool: pool.write(0, 0, ONE[0]),
        ValueError,
        r"^states must have shape \(slots=1, heads=2, rows=3, cols=5\)",
    ),
    (lambda pool: pool.write(0, [0, 1], ONE), ValueError, r"^states must have shape \(slots=2, "),
    (lambda pool: pool.write(0, 0, ONE.tolist()), TypeError, "^states must be a tensor, got list"),
    (
        lambda pool: pool.write(0, 0, ONE.mT.contiguous().mT),
        ValueError,
        "^states must be contiguous along its last axis",
    ),
    (lambda pool: pool.write(0, 0, ONE.to("meta")), ValueError, "^states is on meta, but the state is on cpu"),
    (lambda pool: pool.advance(2), TypeError, "^slots must be a Slots, an index tensor or None, got int"),
    (lambda pool: pool.advance(torch.tensor([0.5])), TypeError, "^slots must be int32 or int64"),
]


def everything(pool: StatePool) -> tuple[Any, ...]:
    """All that a call could change."""
    memory = [memory_of(tensor).tolist() for tensor in tensors_of(pool)]
    return memory, list(pool._free), set(pool._held), pool._generator.get_state().tolist()


@pytest.mark.parametrize("name", ["float16", "int8"])
def test_wrong_calls_are_refused_by_name_and_change_nothing(name: str) -> None:
    pool = make_pool(name, null=5)
    pool.acquire(4)
    dirty(pool)
    before = everything(pool)
    for call, error, message in REFUSALS:
        with pytest.raises(error, match=message):
            call(pool)
        assert everything(pool) == before, message


def layers(*states: Any, **options: Any) -> Callable[[], StatePool]:
    return lambda: StatePool.wrap(list(states), **options)


HALF, WHOLE = torch.zeros(4, 2, 3, 5, dtype=torch.float16), torch.zeros(4, 2, 3, 5)
SEEDED = State(HALF, seed=torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: make_pool(slots=0), ValueError, "^slots must be from 1 to"),
        (lambda: make_pool(layers=2.0), TypeError, "^layers must be an int, got 2.0"),
        (lambda: make_pool(rows=-1), ValueError, "^rows must be from 1 to"),
        (lambda: make_pool("float64"), TypeError, "^dtype must be float32 or .* got float64"),
        (lambda: make_pool(dtype="float16"), TypeError, "^dtype must be float32 or .* got 'float16'"),
        (lambda: make_pool("float32"), ValueError, "^rounding='stochastic' is not for float32"),
        (lambda: make_pool(rounding="up"), ValueError, "^rounding must be one of"),
        (lambda: make_pool(rounding="stochastic_hw"), ValueError, "^rounding='stochastic_hw' needs an NVIDIA GPU"),
        (lambda: make_pool(rounds=0), ValueError, "^rounds must be from 1 to 16"),
        (lambda: make_pool(stream=(1 << 32) - 1), ValueError, "^stream must be from 0 to 4294967294"),
        (lambda: make_pool(seed="a"), TypeError, "^seed must be an int"),
        (lambda: make_pool(null=None), TypeError, "^null must be an int"),
        (lambda: make_pool(device="meta"), ValueError, "^state is on meta"),
        (
            lambda: StatePool.gated_delta(slots=1, layers=1, heads=1, value_dim=0, key_dim=1),
            ValueError,
            "^value_dim must",
        ),
        (layers(), ValueError, "^states must have one State per layer, got none"),
        (lambda: StatePool.wrap(State(WHOLE)), TypeError, "^states must be a sequence of States, got State"),  # type: ignore[arg-type]
        (layers(State(WHOLE), HALF), TypeError, r"^states\[1\] must be a State, got Tensor"),
        (layers(State(WHOLE), State(HALF[:3])), ValueError, r"^states\[1\].data must have shape \(slots=4, "),
        (layers(State(WHOLE), State(HALF[None])), ValueError, r"^states\[1\].data must have shape \(slots=4, "),
        (layers(State(WHOLE), State(WHOLE)), ValueError, r"^states\[1\] must not share the memory of another layer"),
        (layers(State(WHOLE.to("meta"))), ValueError, "^state is on meta"),
        (layers(SEEDED, State(WHOLE, seed=torch.zeros(4).long())), ValueError, "^states must share one seed tensor"),
        (layers(State(WHOLE), null=0.5), TypeError, "^null must be an int"),
        (layers(State(WHOLE), seed=1 << 64), ValueError, "^seed must be from"),
    ],
)
def test_pools_that_cannot_be_are_refused(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.gpu
@EVERY_FORMAT
def test_nothing_waits_for_the_device_when_slots_are_ints(name: str, rounding: str) -> None:
    pool, values = make_pool(name, rounding, device=CUDA), torch.ones(2, 2, 3, 5, device=CUDA)
    for mode in ("default", "error"):  # kernels compile in the first pass
        torch.cuda.set_sync_debug_mode(mode)
        try:
            slots = pool.acquire(3, seed=[1, 2, 3])
            pool.write(1, [0, 1], values)
            pool.read(1, [1, 0])
            pool.copy([0, 1], [1, 2])
            pool.copy([0, 1], [1, 2], keep_seed=True)
            pool.reset(2)
            pool.advance(slots)
            pool.release([0, 1, 2])
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_graph_captures_advance_and_nothing_else() -> None:
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


# Requests that come and go


@dataclass
class Request:
    """A request as it would be on its own: single-slot states that no pool has seen, and its seed."""

    states: list[State]
    seed: Tensor | None  # (1,)

    @classmethod
    def new(cls, pool: StatePool, slot: int) -> "Request":
        """A clean request with the seed that the pool gave this slot."""
        layers = [pool.layer(i) for i in range(pool.layers)]
        seed = None if layers[0].seed is None else layers[0].seed[slot : slot + 1].clone()
        states = [
            replace(
                layer,
                data=torch.zeros_like(layer.data[:1].contiguous()),
                scale=None if layer.scale is None else torch.ones_like(layer.scale[:1].contiguous()),
                seed=None if layer.seed is None else seed,
            )
            for layer in layers
        ]
        return cls(states, seed)

    def take(self, i: int, data: Tensor, scale: Tensor | None) -> None:
        """Make these the state of layer i."""
        bytes_of(self.states[i].data).copy_(bytes_of(data))
        if scale is not None:
            self.states[i].scale.copy_(scale)


class Requests(RuleBasedStateMachine):
    """A pool under requests in any order, beside the same requests each on its own: they never differ by a bit."""

    implementation: ClassVar[Callable[[], Any]] = contextlib.nullcontext

    @initialize(
        formats=st.tuples(*[st.sampled_from(PORTABLE_FORMATS)] * 2),
        kind=st.sampled_from(["own", "null inside", "pages"]),
    )
    def make(self, formats: tuple[tuple[str, str], tuple[str, str]], kind: str) -> None:
        null = 2 if kind == "null inside" else -1
        if kind == "pages":
            self.pool = StatePool.wrap(in_pages(list(formats), 6, (2, 3, 5), CPU), seed=0)
            self.pool.release(range(6))
        else:
            self.pool = make_pool(*formats[0], null=null)
        dirty(self.pool)
        self.requests: dict[int, Request] = {}
        self.acquire(3, None)

    def some(self, data: st.DataObject, repeat: bool = False, size: int | None = None) -> list[int]:
        """Slots that are held."""
        slots = st.sampled_from(sorted(self.requests))
        return data.draw(st.lists(slots, unique=not repeat, min_size=size or 1, max_size=size or 3), label="slots")

    @rule(n=st.integers(1, 3), seed=st.none() | st.integers(-(1 << 63), (1 << 63) - 1))
    def acquire(self, n: int, seed: int | None) -> None:
        if n > self.pool.free:
            with pytest.raises(RuntimeError, match=r"^acquire needs"):
                self.pool.acquire(n, seed)
            return
        others = [None if request.seed is None else request.seed.item() for request in self.requests.values()]
        for slot in self.pool.acquire(n, seed).tolist():
            assert slot not in (*self.requests, self.pool.null)
            self.requests[slot] = request = Request.new(self.pool, slot)
            if request.seed is not None:
                assert request.seed == seed if seed is not None else request.seed not in others

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slots = self.some(data)
        self.pool.release(slots)
        for slot in slots:
            del self.requests[slot]
            for tensor in tensors_of(self.pool):
                tensor[slot : slot + 1].view(torch.uint8).fill_(POISON)
            with pytest.raises(ValueError, match=f"^slots must be held, but slot {slot} is free"):
                self.pool.release(slot)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        slots = self.some(data)
        self.pool.reset(slots)
        self.requests.update({slot: Request.new(self.pool, slot) for slot in slots})

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), keep_seed=st.booleans())
    def copy(self, data: st.DataObject, keep_seed: bool) -> None:
        targets = self.some(data)
        sources = self.some(data, repeat=True, size=len(targets))
        self.pool.copy(sources, targets, keep_seed)
        clones = [[(s.data, s.scale) for s in self.requests[source].states] for source in sources]
        seeds = [self.requests[source].seed for source in sources]
        for target, clone, seed in zip(targets, clones, seeds, strict=True):
            self.requests[target] = request = Request.new(self.pool, target)
            assert not keep_seed or seed is None or torch.equal(seed, request.seed)
            for i, (state, scale) in enumerate(clone):
                request.take(i, state, scale)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), i=st.integers(0, 1), number=st.integers(0, 99), half=st.booleans())
    def write(self, data: st.DataObject, i: int, number: int, half: bool) -> None:
        slots = self.some(data)
        values = torch.randn(len(slots), 2, 3, 5, generator=torch.Generator().manual_seed(number))
        values = values.half() if half else values
        with self.implementation():
            self.pool.write(i, slots, values)
        for slot, value in zip(slots, values.split(1), strict=True):
            request, state = self.requests[slot], self.requests[slot].states[i]
            random = None
            if state.rounding == "stochastic":
                random = random_bits(request.seed, (2, 3, 5), -1, state.stream, state.rounds)
            request.take(i, *encode(value.float(), state.data.dtype, random))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), i=st.integers(0, 1), number=st.integers(0, 99), elsewhere=st.booleans())
    def step(self, data: st.DataObject, i: int, number: int, elsewhere: bool) -> None:
        """Rows in some slots and one padding row; the new states go back, or to other slots that are held."""
        slots = self.some(data)
        others = [slot for slot in sorted(self.requests) if slot not in slots]
        targets = others[: len(slots)] if elsewhere and len(others) >= len(slots) else slots
        arguments = step_arguments(len(slots) + 1, number)
        padding = self.pool.null
        where = Slots(
            torch.tensor([*slots, padding]),
            write=None if targets is slots else torch.tensor([*targets, padding]),
            null=self.pool.null,
        )
        with self.implementation():
            y = flashstate.mamba2_step(self.pool.layer(i), **arguments, slots=where)
        assert not y[-1].any()
        for row, (slot, target) in enumerate(zip(slots, targets, strict=True)):
            alone = self.requests[slot].states[i]
            if target != slot:
                alone = replace(
                    alone, data=alone.data.clone(), scale=None if alone.scale is None else alone.scale.clone()
                )
            own = {name: t if name == "A" else t[row : row + 1] for name, t in arguments.items()}
            with self.implementation():
                assert same(flashstate.mamba2_step(alone, **own), y[row : row + 1])
            self.requests[target].take(i, alone.data, alone.scale)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), everyone=st.booleans())
    def advance(self, data: st.DataObject, everyone: bool) -> None:
        slots = sorted(self.requests) if everyone else self.some(data)
        with self.implementation():
            self.pool.advance(None if everyone else torch.tensor([*slots, self.pool.null]))
        for slot in slots:
            seed = self.requests[slot].seed
            if seed is not None:
                seed += SEED_STEP

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), i=st.integers(0, 1))
    def read(self, data: st.DataObject, i: int) -> None:
        slots = self.some(data, repeat=True)
        with self.implementation():
            values = self.pool.read(i, slots)
        states = [self.requests[slot].states[i] for slot in slots]
        assert values.isfinite().all()
        assert same(values, torch.cat([decode(state.data, state.scale) for state in states]))

    @invariant()
    def every_request_is_as_on_its_own_and_the_rest_is_poison(self) -> None:
        for i in range(self.pool.layers):
            layer = self.pool.layer(i)
            for name in ("data", "scale"):
                tensor = getattr(layer, name)
                if tensor is not None:
                    want = bytes_of(torch.empty_like(tensor, memory_format=torch.contiguous_format)).fill_(POISON)
                    for slot, request in self.requests.items():
                        want[slot] = bytes_of(getattr(request.states[i], name))[0]
                    assert torch.equal(bytes_of(tensor), want)
        for slot, request in self.requests.items():
            assert request.seed is None or seed_of(self.pool)[slot] == request.seed
        assert self.pool.free == 6 - (self.pool.null >= 0) - len(self.requests)
        assert gaps_are_poison(self.pool)


def step_arguments(batch: int, number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    shapes = {"x": (batch, 2, 3), "dt": (batch, 2), "A": (2,), "B": (batch, 1, 5), "C": (batch, 1, 5)}
    arguments = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {**arguments, "A": -arguments["A"].abs()}


class InterpretedRequests(Requests):
    implementation = staticmethod(interpreted)


@pytest.mark.parametrize(
    ("machine", "examples", "steps"),
    [(Requests, 60, 30), pytest.param(InterpretedRequests, 4, 12, marks=pytest.mark.interpreted)],
)
def test_requests_live_in_a_pool_as_on_their_own(machine: type[Requests], examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            deadline=None,
            derandomize=True,
            print_blob=True,
            max_examples=examples,
            stateful_step_count=steps,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large),
        ),
    )
