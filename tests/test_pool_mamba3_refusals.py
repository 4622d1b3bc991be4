"""StatePool with layers of Mamba-3 refuses by name what cannot be, and nothing changes."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mamba3_pools import dirty, in_format, left_by_a_prefill, make_pool, parts_of
from pools import memory_of
from torch import Tensor

from flashstate import State, StatePool
from flashstate.state.mamba3 import Mamba3State


def alone(**shared: Any) -> Mamba3State:
    """A layer with memory of its own but for these tensors."""
    tensors = {"ssm": torch.zeros(4, 2, 3, 8), "k": torch.zeros(4, 1, 2, 8), "v": torch.zeros(4, 2, 3), **shared}
    return Mamba3State(**tensors)


KEYS, VALUES, TURNS = torch.zeros(4, 1, 2, 8), torch.zeros(4, 2, 3), torch.zeros(4, 2, 3)
CACHE = torch.zeros(4, 64)
SEED = torch.zeros(16, dtype=torch.int64)


def page(start: int, *shape: int) -> Tensor:
    return CACHE[:, start : start + math.prod(shape)].unflatten(1, shape)


def wrap(*states: Any, **options: Any) -> Callable[[], Any]:
    return lambda: StatePool.wrap(states, **options)


def test_layers_may_take_turns_in_a_page_in_any_order() -> None:
    layer = Mamba3State(page(16, 1, 1, 12), page(28, 1, 1, 12), page(0, 1, 1), page(1, 1, 6))
    assert StatePool.wrap([layer, alone()], windows=[page(40, 2, 3), torch.zeros(4, 2, 3)]).layers == 2


ANOTHER = "must not share the memory of another layer"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (wrap(alone(k=KEYS), alone(k=KEYS)), ValueError, rf"^states\[1\] {ANOTHER}"),
        (wrap(alone(v=VALUES), State(torch.ones(4, 1, 1, 1)), alone(v=VALUES)), ValueError, r"^states\[2\] must not"),
        (wrap(alone(angle=TURNS), alone(v=TURNS)), ValueError, rf"^states\[1\] {ANOTHER}"),
        (wrap(alone(k=page(0, 1, 2, 8)), State(page(15, 1, 7, 7))), ValueError, rf"^states\[1\] {ANOTHER}"),
        (
            wrap(alone(v=VALUES, angle=VALUES)),
            ValueError,
            r"^states\[0\] must not share memory between its tensors, but v and angle overlap",
        ),
        (
            wrap(alone(), alone(ssm=page(0, 2, 3, 8), k=page(47, 1, 2, 8))),
            ValueError,
            r"^states\[1\] must not share memory between its tensors, but data and k overlap",
        ),
        (
            wrap(
                alone(
                    ssm=State(torch.zeros(4, 2, 3, 8), seed=SEED[8:12]), v=SEED.view(torch.float32)[:24].view(4, 2, 3)
                )
            ),
            ValueError,
            "^states must not share the memory of their seed",
        ),
        (wrap(alone(k=KEYS), windows=[KEYS.squeeze(1)]), ValueError, r"^windows\[0\] must not share the memory"),
        (wrap(alone(angle=TURNS), windows=[TURNS]), ValueError, r"^windows\[0\] must not share the memory"),
        (wrap(alone(), alone(), windows=[TURNS, TURNS]), ValueError, r"^windows\[1\] must not share the memory"),
        (wrap(alone(), State(torch.zeros(3, 1, 1, 1))), ValueError, r"^states\[1\].data must have shape \(slots=4, "),
        (wrap(State(torch.zeros(3, 1, 1, 1)), alone()), ValueError, r"^states\[1\].data must have shape \(slots=3, "),
        (wrap(alone(), KEYS), TypeError, r"^states\[1\] must be a State, got Tensor; .* has a Mamba3State"),
        (lambda: StatePool.wrap(alone()), TypeError, "^states must be a sequence of States, got Mamba3State"),  # type: ignore[arg-type]
        (
            wrap(Mamba3State(*(torch.zeros(1, *shape, device="meta") for shape in ((2, 3, 8), (1, 2, 8), (2, 3))))),
            ValueError,
            "^state is on meta",
        ),
        (lambda: make_pool(rank=0), ValueError, "^rank must be from 1 to"),
        (lambda: make_pool(rank=1.0), TypeError, "^rank must be an int, got 1.0"),
        (lambda: make_pool(angles=5), ValueError, "^angles must be from 0 to 4, got 5"),
        (lambda: make_pool(angles=-1), ValueError, "^angles must be from 0 to 4, got -1"),
        (lambda: make_pool(angles=None), TypeError, "^angles must be an int, got None"),
        (lambda: make_pool(cols=7, angles=4), ValueError, "^angles must be from 0 to 3, got 4"),
        (lambda: make_pool(kv_dtype=torch.int8), TypeError, "^kv_dtype must be float32 or bfloat16 or .* got int8"),
        (lambda: make_pool(kv_dtype=torch.float64), TypeError, "^kv_dtype must be .* got float64"),
        (lambda: make_pool(kv_dtype="float16"), TypeError, "^kv_dtype must be .* got 'float16'"),
        (lambda: make_pool(dtype=torch.float64), TypeError, "^dtype must be float32 or .* got float64"),
        (lambda: make_pool(rows=0), ValueError, "^rows must be from 1 to"),
        (lambda: make_pool(rounding="stochastic"), ValueError, "^rounding='stochastic' is not for float32"),
        (lambda: make_pool(stream=(1 << 32) - 1), ValueError, "^stream must be from 0 to 4294967294"),
        (lambda: make_pool(device="meta"), ValueError, "^state is on meta"),
        (lambda: make_pool(null=0.5), TypeError, "^null must be an int"),
        (lambda: make_pool(seed="a"), TypeError, "^seed must be an int"),
    ],
)
def test_pools_that_cannot_be_are_refused(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


ONE, TWO = left_by_a_prefill(1), left_by_a_prefill(2)
WRONG_SLOTS: list[tuple[Any, type[Exception], str]] = [
    (4, ValueError, "^slots must be held, but slot 4 is free"),
    (5, ValueError, "^slots must be held, but slot 5 is the null slot"),
    (6, ValueError, "^slots must be from 0 to 5, got 6"),
    (None, TypeError, "^slots must be an int, a sequence of ints or an integer tensor, got NoneType"),
    (torch.tensor([1.0]), TypeError, "^slots must be int32 or int64, got float32"),
]
WRONG_VALUES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"k": ONE["k"].double()}, TypeError, "^k must be float32 or bfloat16 or float16, got float64"),
    ({"k": ONE["k"].tolist()}, TypeError, "^k must be a tensor, got list"),
    ({"k": None}, TypeError, "^k must be a tensor, got NoneType"),
    ({"k": ONE["k"][:, 0]}, ValueError, r"^k must have shape \(slots=1, R=2, H=2, N=8\), got \(1, 2, 8\)"),
    ({"k": ONE["k"][:, :1]}, ValueError, r"^k must have shape \(slots=1, R=2, H=2, N=8\), got \(1, 1, 2, 8\)"),
    ({"k": TWO["k"]}, ValueError, r"^k must have shape \(slots=1, "),
    ({"k": ONE["k"].to("meta")}, ValueError, "^k is on meta, but the state is on cpu"),
    ({"v": ONE["v"].to(torch.int8)}, TypeError, "^v must be float32 or bfloat16 or float16, got int8"),
    ({"v": ONE["v"].mT}, ValueError, r"^v must have shape \(slots=1, H=2, D=3\), got \(1, 3, 2\)"),
    ({"v": ONE["v"].to("meta")}, ValueError, "^v is on meta, but the state is on cpu"),
    ({"angle": None}, ValueError, r"^a layer with angles needs angle: \(slots=1, H=2, S=3\) float32"),
    ({"angle": ONE["angle"].half()}, TypeError, "^angle must be float32, got float16"),
    ({"angle": ONE["angle"][:, :1]}, ValueError, r"^angle must have shape \(slots=1, H=2, S=3\), got \(1, 1, 3\)"),
    ({"angle": 1.0}, TypeError, "^angle must be a tensor, got float"),
    ({"angle": ONE["angle"].to("meta")}, ValueError, "^angle is on meta, but the state is on cpu"),
]
REFUSALS: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    *((lambda pool, s=s: pool.write_kv(0, s, **ONE), error, message) for s, error, message in WRONG_SLOTS),
    *((lambda pool, c=c: pool.write_kv(1, 2, **{**ONE, **c}), error, message) for c, error, message in WRONG_VALUES),
    (lambda pool: pool.write_kv(0, [1, 1], **TWO), ValueError, "^slots must be distinct, got slot 1 more than once"),
    (lambda pool: pool.write_kv(0, [0, 1], **ONE), ValueError, r"^k must have shape \(slots=2, "),
    (lambda pool: pool.write_kv(2, 0, **ONE), IndexError, "^layer must be from 0 to 1, got 2"),
    (lambda pool: pool.write_kv(True, 0, **ONE), TypeError, "^layer must be an int, got True"),
    (lambda pool: pool.write_kv(0, 0, ONE["k"]), TypeError, "v"),
    (lambda pool: pool.write(0, 0, torch.ones(1, 2, 3, 7)), ValueError, r"^states must have shape \(slots=1, "),
    (lambda pool: pool.copy(0, 4), ValueError, "^dst must be held, but slot 4 is free"),
    (lambda pool: pool.reset([1, 4]), ValueError, "^slots must be held, but slot 4 is free"),
    (lambda pool: pool.acquire(2), RuntimeError, "^acquire needs 2 free slots, but only 1 of 6 are free"),
    (lambda pool: pool.window(0), ValueError, "^this pool has no windows"),
]


def everything(pool: StatePool[Any]) -> tuple[Any, ...]:
    """All that a call could change."""
    seeds = [] if pool._seed is None else [pool._seed]
    memory = [memory_of(tensor).tolist() for tensor in (*parts_of(pool), *seeds)]
    return memory, list(pool._free), set(pool._held), pool._generator.get_state().tolist()


def test_wrong_calls_are_refused_by_name_and_change_nothing() -> None:
    pool = in_format("int8", "stochastic", null=5)
    pool.acquire(4)
    dirty(pool)
    before = everything(pool)
    for call, error, message in REFUSALS:
        with pytest.raises(error, match=message):
            call(pool)
        assert everything(pool) == before, message


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (make_pool(angles=0), "^angle is not for a layer without angles"),
        (StatePool.mamba2(slots=6, layers=2, heads=2, rows=3, cols=8), "^write_kv is for layers of Mamba-3, which"),
        (StatePool.gated_delta(slots=6, layers=2, heads=2, value_dim=3, key_dim=8), "^write_kv is for layers of"),
    ],
)
def test_what_a_pool_has_no_place_for_is_refused(pool: StatePool[Any], message: str) -> None:
    pool.acquire(6)
    dirty(pool)
    before = everything(pool)
    for slots in ([1], []):
        with pytest.raises(ValueError, match=message):
            pool.write_kv(0, slots, **ONE)
    assert everything(pool) == before
