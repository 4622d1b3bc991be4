"""StatePool: wrong calls are refused by name and change nothing, and pools that cannot be are not made."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pools import dirty, make_pool, memory_of, tensors_of

from flashstate import State, StatePool


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


BYTES, SCALES = torch.zeros(2, 4, 2, 3, 5, dtype=torch.int8), torch.ones(4, 2, 3)
PAGES = torch.zeros(4, 70)


def in_page(start: int) -> torch.Tensor:
    """The states of one layer, from this element of every page on."""
    return PAGES[:, start : start + 30].view(4, 2, 3, 5)


def test_layers_may_take_turns_in_a_page_or_follow_one_another() -> None:
    assert StatePool.wrap([State(in_page(0)), State(in_page(40)), State(BYTES[0], SCALES)]).layers == 3
    assert StatePool.wrap([State(BYTES[i], scale) for i, scale in enumerate(torch.ones(2, 4, 2, 3))]).layers == 2


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
        (layers(State(BYTES[0], SCALES), State(BYTES[1], SCALES)), ValueError, r"^states\[1\] must not share"),
        (layers(State(in_page(0)), State(in_page(29))), ValueError, r"^states\[1\] must not share"),
        (layers(State(in_page(30)), State(in_page(1))), ValueError, r"^states\[1\] must not share"),
        (layers(State(WHOLE.to("meta"))), ValueError, "^state is on meta"),
        (layers(SEEDED, State(WHOLE, seed=torch.zeros(4).long())), ValueError, "^states must share one seed tensor"),
        (layers(State(WHOLE), null=0.5), TypeError, "^null must be an int"),
        (layers(State(WHOLE), seed=1 << 64), ValueError, "^seed must be from"),
    ],
)
def test_pools_that_cannot_be_are_refused(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
