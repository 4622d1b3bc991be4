"""StatePool: wrong calls are refused by name and change nothing, and pools that cannot be are not made."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pools
import pytest
import torch
from refusals import wrong
from torch import Tensor

import flashstate
from flashstate import Mamba3State, Ring, State, StatePool

Refused = tuple[Any, ...]  # a call or options, the message, and the error, if it is no ValueError
NOT_HELD, WRONG_KIND = "must be held, but slot", "must be an int, a sequence of ints or an integer tensor, got"
TWICE, MAKE_ONE = "must be distinct, got slot 1 more than once", r": torch.tensor\(...\) makes a tensor of it"
WRONG_SLOTS: list[Refused] = [  # of a pool whose slots 0 to 3 are held and whose null is 5
    (4, f"{NOT_HELD} 4 is free"),
    (5, f"{NOT_HELD} 5 is the null slot"),
    (6, "must be from 0 to 5, got 6"),
    ([1, -1], "must be from 0 to 5, got -1"),
    ([1, 2.0], "must be an int, got 2.0", TypeError),
    (1.0, f"{WRONG_KIND} float", TypeError),
    ("0", f"{WRONG_KIND} str", TypeError),
    (np.arange(2), f"{WRONG_KIND} ndarray{MAKE_ONE}", TypeError),
    (torch.tensor([1.0]), "must be int32 or int64, got float32", TypeError),
    (torch.tensor([[1]]), r"must have shape \(slots\), got \(1, 1\)"),
]
ONE, TWO = torch.ones(1, 2, 3, 5), torch.ones(2, 2, 3, 5)
LEFT, TWO_LEFT = pools.left_by_a_prefill(1), pools.left_by_a_prefill(2)
CHANNELS = torch.ones(2, 5, 3, dtype=torch.bfloat16)


def parts(change: Callable[[list[Any]], Any], **others: Any) -> Callable[[Any], Any]:
    """Bytes whose layout has other parts."""
    return lambda given: {"layout": {**given["layout"], "parts": change(given["layout"]["parts"]), **others}}


HAS, FIRST = r"^exported\['layout'\] must have", r"states\[0\]\.data \w+ \(2, 3, 5\)"
BYTES_REFUSED: list[Refused] = [
    (lambda given: {"version": 2}, "^exported must be of version 1, got 2"),
    (lambda given: {"bytes": given["bytes"].char()}, r"^exported\['bytes'\] must be uint8, got int8", TypeError),
    (lambda given: {"bytes": given["bytes"][:, 1:]}, r"^exported\['bytes'\] must have shape \(slots=1, bytes="),
    (lambda given: {"layout": []}, r"^exported\['layout'\] must be a dict with parts, got \[\]", TypeError),
    (parts(list, drafts=1), f"{HAS} drafts 0, which this pool has, got 1"),
    (parts(list, window=4), f"{HAS} window 0, which this pool has, got 4"),
    (parts(lambda parts: parts[1:]), f"{HAS} {FIRST}, which this pool has, got "),
    (parts(lambda parts: parts[:-1]), rf"{HAS} seed int64 \(\), which this pool has, got nothing"),
    (parts(lambda parts: [*parts, parts[0]]), f"{HAS} nothing, which this pool has, got {FIRST}"),
    (parts(lambda parts: [[*parts[0][:2], [2, 3, 4], [0, 1, 2]], *parts[1:]]), rf"{HAS} {FIRST}.* \(2, 3, 4\)$"),
    (parts(lambda parts: [[*parts[0][:3], [0, 0, 1]], *parts[1:]]), f"{HAS} name, dtype, shape and", TypeError),
    (parts(lambda parts: ["data", *parts[1:]]), f"{HAS} name, dtype, shape and order", TypeError),
]
STATES: list[Refused] = [
    *[(lambda pool, slots=slots: pool.release(slots), f"^slots {end}", *error) for slots, end, *error in WRONG_SLOTS],
    *[(call, f"^{name} {NOT_HELD} 4 is free") for name, call in (
        ("slots", lambda pool: pool.reset(4)), ("slots", lambda pool: pool.write(0, 4, ONE)),
        ("slots", lambda pool: pool.read(0, 4)), ("slots", lambda pool: pool.export(4)),
        ("slots", lambda pool: pool.load(4, pool.export(0))), ("slots", lambda pool: pool.advance(4)),
        ("src", lambda pool: pool.copy(4, 1)), ("dst", lambda pool: pool.copy(1, 4)))],
    *[(call, f"^{name} {TWICE}") for name, call in (
        ("slots", lambda pool: pool.release([1, 2, 1])), ("slots", lambda pool: pool.reset([1, 1])),
        ("slots", lambda pool: pool.write(0, [1, 1], TWO)), ("slots", lambda pool: pool.advance([1, 1])),
        ("slots", lambda pool: pool.load([1, 1], pool.export([0, 2]))),
        ("dst", lambda pool: pool.copy([0, 2], [1, 1])))],
    (lambda pool: pool.copy([0, 2], [1]), "^dst must have as many slots as src, 2, got 1"),
    (lambda pool: pool.copy(0, 1, keep_seed=1), "^keep_seed must be True or False, got 1", TypeError),
    (lambda pool: pool.acquire(2), r"^acquire needs 2 .* only 1 of 6 are free; resized\(slots\) gives", RuntimeError),
    (lambda pool: pool.acquire(1, dtype=torch.int16), "^dtype must be int32 or int64, got int16", TypeError),
    (lambda pool: pool.acquire(-1), "^n must be from 0"),
    (lambda pool: pool.acquire(1, seed=[1, 2]), "^seed must be one int, or one for each of 1 slots, got 2"),
    (lambda pool: pool.acquire(1, seed=1.5), "^seed must be an int, a sequence", TypeError),
    (lambda pool: pool.acquire(1, seed=1 << 63), "^seed must be from -9223372036854775808 to"),
    (lambda pool: pool.reset([0, 1], seed=[1, "2"]), "^seed must be an int, got '2'", TypeError),
    (lambda pool: pool.reset([0, 1], seed=torch.ones(2)), "^seed must be int32 or int64", TypeError),
    (lambda pool: pool.reset([0, 1], seed=torch.tensor([1])), r"^seed must have shape \(slots=2\)"),
    (lambda pool: pool.reset(0, seed=torch.tensor([1]).to("meta")), "^seed is on meta, but the state is on"),
    (lambda pool: pool.write(2, 0, ONE), "^layer must be from 0 to 1, got 2", IndexError),
    (lambda pool: pool.read(-1, 0), "^layer must be from 0 to 1, got -1", IndexError),
    (lambda pool: pool.layer(True), "^layer must be an int, got True", TypeError),
    (lambda pool: pool.write(0, 0, ONE.double()), "^states must be float32 or bfloat16 or float16", TypeError),
    (lambda pool: pool.write(0, 0, ONE.tolist()), f"^states must be a tensor, got list{MAKE_ONE}", TypeError),
    (lambda pool: pool.write(0, 0, ONE[0]), r"^states must have shape \(slots=1, heads=2, rows=3, cols=5\)"),
    (lambda pool: pool.write(0, 0, ONE.to("meta")), "^states is on meta, but the state is on cpu"),
    (lambda pool: pool.resized(3), "^slots must be more than 3, the largest slot that is held, got 3"),
    (lambda pool: pool.resized(0), "^slots must be from 1 to"),
    (lambda pool: StatePool.wrap([pool.layer(0)]).resized(9), "^resized is not for a wrapped pool"),
    (lambda pool: StatePool.wrap([pool.layer(0)]).acquire(), "; wrap a pool over more memory", RuntimeError),
    (lambda pool: pool.load([1, 2], pool.export(0)), r"^exported\['bytes'\] must have shape \(slots=2, bytes="),
    (lambda pool: pool.load(1, 7), "^exported must be what export returns, a dict with version, .* got int", TypeError),
    (lambda pool: pool.load(1, {"version": 1}), r"^exported must be .* got \['version'\]", TypeError),
    *[(lambda pool, change=change: pool.load(1, {**pool.export(0), **change(pool.export(0))}), *rest)
      for change, *rest in BYTES_REFUSED],
    (lambda pool: pool.layer(0).advance([1]), f"None, got list{MAKE_ONE}", TypeError),
    (lambda pool: pool.window(0), "^this pool has no windows"),
    *[(call, "^this pool has no rings: it was made without a window")
      for call in (lambda pool: pool.ring(0), StatePool.plan, StatePool.folded)],
    (lambda pool: pool.write_kv(0, 1, **LEFT), "^write_kv is for layers of Mamba-3, which"),
]  # fmt: skip
THERE = [(torch.tensor([1, 6]), "from 0 to 5, got 6"), (torch.tensor([1, 4, -1]), "held, but slot 4 is free")]
EACH_ONCE = [*THERE, (torch.tensor([1, 5, 1]), "distinct, got slot 1 more than once")]
IN_DEBUG: list[Refused] = [
    (lambda pool, call=call, at=numbers: flashstate.debug()(call)(pool, at), f"^{name} must be {end}")
    for name, wrong, call in (
        ("slots", EACH_ONCE, lambda pool, at: pool.write(0, at, ONE.expand(len(at), -1, -1, -1))),
        ("slots", EACH_ONCE, lambda pool, at: pool.reset(at)), ("slots", THERE, lambda pool, at: pool.read(0, at)),
        ("slots", EACH_ONCE, lambda pool, at: pool.load(at, pool.export(at * 0))),
        ("dst", EACH_ONCE, lambda pool, at: pool.copy(at * 0, at)),
        ("src", THERE, lambda pool, at: pool.copy(at, [0, 2, 3][: len(at)])))
    for numbers, end in wrong
]  # fmt: skip
KV: list[Refused] = [
    (lambda pool: pool.write_kv(0, 4, **LEFT), f"^slots {NOT_HELD} 4 is free"),
    *[(lambda pool, change=change: pool.write_kv(1, 2, **{**LEFT, **change(LEFT)}), *rest)
      for name, axes, dtypes in (("k", "slots R H N", {}), ("v", "slots H D", {}),
                                 ("angle", "slots H S", {"dtypes": (torch.float32,)}))
      for change, *rest in wrong(name, axes, **dtypes)],
    (lambda pool: pool.write_kv(1, 2, **{**LEFT, "angle": None}), r"^a layer with angles needs angle: \(slots=1, H=2"),
    (lambda pool: pool.write_kv(0, [1, 1], **TWO_LEFT), f"^slots {TWICE}"),
]  # fmt: skip
WINDOWS: list[Refused] = [
    (lambda pool: pool.write_window(1, 4, CHANNELS[:1]), f"^slots {NOT_HELD} 4 is free"),
    (lambda pool: pool.write_window(1, [0, 1], CHANNELS.half()), "^windows must be bfloat16, got float16", TypeError),
    (lambda pool: pool.write_window(1, [0, 1], CHANNELS[:1]), r"^windows must have shape \(slots=2, channels=5, n\)"),
    (lambda pool: pool.write_window(1, [0, 1], CHANNELS.repeat(1, 1, 3)), "^windows must have 3 entries or fewer"),
    (lambda pool: pool.write_window(2, [0, 1], CHANNELS), "^layer must be from 0 to 1, got 2", IndexError),
]
WITH_WINDOWS = {"slots": 6, "layers": 2, "heads": 1, "rows": 2, "cols": 3, "conv_channels": 5}
POOLS: dict[str, tuple[Callable[[], Any], list[Refused]]] = {
    "states": (lambda: pools.make_pool("float16", null=5), [*STATES, *IN_DEBUG]),
    "Mamba-3": (lambda: pools.make_pool("int8", kind="mamba3", null=5), KV),
    "Mamba-3 without angles": (
        lambda: pools.make_pool(kind="mamba3", angles=0),
        [(lambda pool: pool.write_kv(0, 1, **LEFT), "^angle is not for a layer without angles")],
    ),
    "windows": (lambda: StatePool.mamba2(**WITH_WINDOWS, null=5), WINDOWS),
}


def everything(pool: StatePool[Any]) -> tuple[Any, ...]:
    """All that a call could change."""
    holding, memory = pool._holding, [pools.memory_of(tensor).tolist() for tensor in pools.tensors_of(pool)]
    drawn = holding.generator.get_state().tolist(), holding.draws.tolist()
    return memory, list(holding.free), set(holding.held), *drawn


@pytest.mark.parametrize("kind", POOLS)
def test_wrong_calls_are_refused_by_name_and_change_nothing(kind: str) -> None:
    make, calls = POOLS[kind]
    pool = make()
    pool.acquire(4)
    pools.dirty(pool)
    before = everything(pool)
    for call, message, *error in calls:
        with pytest.raises(error[0] if error else ValueError, match=message):
            call(pool)
        assert everything(pool) == before, message


# Options that pools cannot be made of

KIND = "must be float32 or bfloat16 or float16, got"
OF_ANY: list[Refused] = [
    ({"slots": 0}, "^slots must be from 1 to"),
    ({"dtype": torch.float64}, "^dtype must be float32 or .* got float64", TypeError),
    ({"stream": (1 << 32) - 1}, "^stream must be from 0 to 4294967294"),
    ({"seed": "a"}, "^seed must be an int", TypeError),
    ({"null": None}, "^null must be an int", TypeError),
    ({"device": "meta"}, "^state is on meta"),
    ({"device": "mps"}, "^state is on mps; .* runs on cuda and cpu"),
    ({"groups": 1}, "^groups is for rings: window must be given too, got groups=1$"),
    ({"ring_dtype": torch.half}, "^ring_dtype is for rings: window must be given too, got ring_dtype=torch.f"),
]
OF_MAMBA3: list[Refused] = [
    ({"rank": 0}, "^rank must be from 1 to"),
    ({"cols": 7, "angles": 4}, "^angles must be from 0 to 3, got 4"),
    ({"kv_dtype": torch.int8}, f"^kv_dtype {KIND} int8", TypeError),
]
OF_WINDOWS: list[Refused] = [
    ({"conv_width": 9}, "^conv_width must be from 2 to 8, got 9"),
    ({"drafts": 2, "conv_channels": 0}, "^drafts are for windows: conv_channels must be given too"),
    ({"conv_dtype": torch.int8}, f"^conv_dtype {KIND} int8", TypeError),
]
OF_RINGS: list[Refused] = [
    ({"window": 65}, "^window must be from 0 to 64, got 65$"),
    ({"tokens": 5}, "^tokens must be from 1 to 4, got 5"),
    ({"window": 0}, "^tokens are for rings: window must be given too, got tokens=3"),
    ({"ring_dtype": "float16"}, f"^ring_dtype {KIND} ", TypeError),
    ({"groups": 3}, "^groups must divide the 4 heads, got 3"),
]
OF_DELTA_RINGS: list[Refused] = [
    ({"key_heads": 3}, "^key_heads must divide the 4 heads, got 3"),
    ({"ring_dtype": torch.int8}, f"^ring_dtype {KIND} ", TypeError),
    ({"u_dtype": torch.int8}, f"^u_dtype {KIND} ", TypeError),
    ({"per_channel": "KDA"}, "^per_channel must be True or False, got", TypeError),
]
DELTA_SIZES = {"slots": 1, "layers": 1, "heads": 2, "value_dim": 4, "key_dim": 8}
OF_DELTA: list[Refused] = [({"value_dim": 0}, "^value_dim must")] + [
    ({name: value}, f"^{name} is for rings: window must be given too, got {name}={value}$")
    for name, value in {"key_heads": 2, "per_channel": False, "u_dtype": torch.float16}.items()
]
MAKERS: dict[str, tuple[Callable[..., Any], list[Refused]]] = {
    "mamba2": (pools.make_pool, OF_ANY),
    "mamba3": (partial(pools.make_pool, kind="mamba3"), OF_MAMBA3),
    "gated_delta": (lambda **options: StatePool.gated_delta(**{**DELTA_SIZES, **options}), OF_DELTA),
    "windows": (lambda **options: StatePool.mamba2(**{**WITH_WINDOWS, **options}), OF_WINDOWS),
    "rings of Mamba-2": (partial(pools.make_pool, kind="rings"), OF_RINGS),
    "rings of the delta rule": (partial(pools.make_pool, kind="rings of the delta rule"), OF_DELTA_RINGS),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_pools_that_cannot_be_are_not_allocated(kind: str) -> None:
    make, refusals = MAKERS[kind]
    for options, message, *error in refusals:
        with pytest.raises(error[0] if error else ValueError, match=message):
            make(**options)


# Layers that cannot be wrapped

PAGES, SEED = torch.zeros(4, 250), torch.zeros(16, dtype=torch.int64)
HALF, WHOLE = torch.zeros(4, 2, 3, 5, dtype=torch.float16), torch.zeros(4, 2, 3, 5)
BYTES, SCALES = torch.zeros(2, 4, 2, 3, 5, dtype=torch.int8), torch.ones(4, 2, 3)
TURNS = torch.zeros(4, 2, 3)


def page(start: int, *shape: int) -> Tensor:
    """So many elements of every page, from this one on."""
    return PAGES[:, start : start + math.prod(shape)].unflatten(1, shape)


def alone(**shared: Any) -> Mamba3State:
    """A layer of Mamba-3 with memory of its own but for these tensors."""
    tensors = {"ssm": torch.zeros(4, 2, 3, 8), "k": torch.zeros(4, 1, 2, 8), "v": torch.zeros(4, 2, 3), **shared}
    return Mamba3State(**tensors)


def wrap(*states: Any, **options: Any) -> Callable[[], Any]:
    return lambda: StatePool.wrap(states, **options)


SLOTS_3, STATE, WINDOW = State(torch.zeros(3, 1, 1, 1)), State(page(0, 1, 2, 4)), page(8, 5, 3)
BESIDE_SEED = {"ssm": State(torch.zeros(4, 2, 3, 8), seed=SEED[8:12]), "v": SEED.view(torch.float32)[:24].view(4, 2, 3)}
SHARED_SEED = State(HALF, rounding="stochastic", seed=torch.tensor([3]))
APART = r"^states\[1\] must not share the memory of another layer"
WITHIN = r"^states\[{}\] must not share memory between its tensors, but {} overlap"
ONE_RING, OTHER_RING = map(pools.make_pool(kind="rings").ring, range(2))
CURSORS = torch.zeros(8, dtype=torch.int32)
FIT = [State(data) for data in torch.zeros(2, 6, 4, 3, 5)]


def rings(**changes: Any) -> Callable[[], Any]:
    """Two layers whose second ring has other fields."""
    return wrap(*FIT, rings=[ONE_RING, replace(OTHER_RING, **changes)])


def in_pages(state: State | None = None, windows: Any = None, **tensors: Tensor) -> Callable[[], Any]:
    """A ring that takes turns with its state, whose seed and cursors lie together too, but for these tensors."""
    own = {"x": page(60, 4, 7, 3), "B": page(144, 2, 7, 5), "dt": page(214, 4, 7), "start": CURSORS[:4]}
    ring = Ring(**{**own, "count": CURSORS[4:], **tensors}, window=4)
    return wrap(state or State(page(0, 4, 3, 5), seed=SEED[:4]), windows=windows, rings=[ring])


LONGER = {name: torch.zeros(6, n, 8, *size) for name, n, *size in (("x", 4, 3), ("B", 2, 5), ("dt", 4))}
MAMBA3 = [StatePool.mamba3(slots=6, layers=2, heads=4, rows=3, cols=5).layer(i) for i in range(2)]
SCALED = State(torch.zeros(4, 4, 3, 5, dtype=torch.int8), page(0, 4, 3))
ALIKE, SHARES = r"^rings must have one window and one length, but rings\[1\] has", "must not share the memory of"
WRAPPED: list[Refused] = [
    (wrap(), "^states must have one State per layer, got none"),
    (lambda: StatePool.wrap(State(WHOLE)), "^states must be a sequence of States, got State", TypeError),
    (wrap(State(WHOLE), HALF), r"^states\[1\] must be a State, got Tensor; .* has a Mamba3State", TypeError),
    (wrap(alone(), SLOTS_3), r"^states\[1\].data must have shape \(slots=4, "),
    (wrap(State(WHOLE), State(WHOLE)), APART),
    (wrap(State(BYTES[0], SCALES), State(BYTES[1], SCALES)), APART),
    (wrap(State(page(0, 2, 3, 5)), State(page(29, 2, 3, 5))), APART),
    (wrap(alone(angle=TURNS), alone(v=TURNS)), APART),
    (wrap(alone(k=page(0, 1, 2, 8)), State(page(15, 1, 7, 7))), APART),
    (wrap(alone(v=TURNS, angle=TURNS)), WITHIN.format(0, "v and angle")),
    (wrap(alone(), alone(ssm=page(0, 2, 3, 8), k=page(47, 1, 2, 8))), WITHIN.format(1, "data and k")),
    (wrap(alone(**BESIDE_SEED)), "^states must not share the memory of their seed"),
    (wrap(State(WHOLE.to("meta"))), "^state is on meta"),
    (wrap(*(State(data, seed=SEED[:4].clone()) for data in (HALF, WHOLE))), "^states must share one seed tensor"),
    (wrap(SHARED_SEED), r"^states\[0\] must have a seed for every slot, .* got one for all"),
    (wrap(State(WHOLE), null=0.5), "^null must be an int", TypeError),
    (wrap(STATE, drafts=1), "^drafts are for windows, which must be given too, got drafts=1"),
    (wrap(STATE, windows=[WINDOW], drafts=3), r"^windows\[0\] must have more than 3 entries, which drafts take, got 3"),
    (wrap(STATE, windows=[WINDOW, WINDOW]), "^windows must be a sequence with one tensor per layer, 1, got 2"),
    (wrap(STATE, windows=[WINDOW[:2]]), r"^windows\[0\] must have shape \(slots=4, channels, length\)"),
    (wrap(STATE, windows=[WINDOW[:, :0]]), r"^windows\[0\] must not be empty"),
    (wrap(STATE, windows=[WINDOW.int()]), rf"^windows\[0\] {KIND} int32", TypeError),
    (wrap(STATE, windows=[WINDOW.to("meta")]), r"^windows\[0\] is on meta"),
    (wrap(STATE, windows=[page(7, 5, 3)]), r"^windows\[0\] must not share the memory"),
    (wrap(STATE, windows=[WINDOW[:1].expand(4, -1, -1)]), r"^windows\[0\] must not overlap"),
    (wrap(alone(), alone(), windows=[TURNS, TURNS]), r"^windows\[1\] must not share the memory"),
    (wrap(*FIT, rings=[ONE_RING]), "^rings must be a sequence with one ring per layer, 2, got 1"),
    (wrap(*FIT, rings=ONE_RING), "^rings must be a sequence with one ring per layer, 2, got Ring"),
    (wrap(*FIT, rings=[ONE_RING, CURSORS]), r"^rings\[1\] must be a Ring or a DeltaRing, got Tensor", TypeError),
    (wrap(*MAMBA3, rings=[ONE_RING, OTHER_RING]), "^rings are for layers that are each a State, got Mam", TypeError),
    (rings(start=OTHER_RING.start.clone()), "^rings must share start and count"),
    (rings(count=OTHER_RING.count.clone()), "^rings must share start and count"),
    (rings(window=3), f"{ALIKE} 3 and 7, rings.0. has 4 and 7"),
    (rings(**LONGER), f"{ALIKE} 4 and 8, rings.0. has 4 and 7"),
    (rings(x=torch.zeros(6, 4, 7, 4)), r"^rings\[1\].x must have shape \(.*rows=3\)"),
    (rings(B=ONE_RING.B), rf"^rings\[1\].B {SHARES}"),
    (in_pages(x=page(59, 4, 7, 3)), rf"^rings\[0\].x {SHARES}"),
    (in_pages(SCALED, dt=page(11, 4, 7)), rf"^rings\[0\].dt {SHARES}"),
    (in_pages(windows=[page(60, 2, 3)]), rf"^rings\[0\].x {SHARES}"),
    (in_pages(start=SEED.view(torch.int32)[4:8]), f"^rings.start {SHARES}"),
    (in_pages(count=CURSORS[3:7]), f"^rings.count {SHARES}"),
]


def test_layers_that_do_not_go_together_are_not_wrapped() -> None:
    for call, message, *error in WRAPPED:
        with pytest.raises(error[0] if error else ValueError, match=message):
            call()


def test_layers_may_take_turns_in_a_page_or_head_by_head_or_follow_one_another() -> None:
    assert StatePool.wrap([State(page(0, 2, 3, 5)), State(page(40, 2, 3, 5)), State(BYTES[0], SCALES)]).layers == 3
    assert StatePool.wrap([State(BYTES[i], scale) for i, scale in enumerate(torch.ones(2, 4, 2, 3))]).layers == 2
    layer = Mamba3State(page(16, 1, 1, 12), page(28, 1, 1, 12), page(0, 1, 1), page(1, 1, 6))
    assert StatePool.wrap([layer, alone()], windows=[page(40, 2, 3), torch.zeros(4, 2, 3)]).layers == 2
    assert StatePool.wrap([STATE], windows=[WINDOW]).has_windows
    assert in_pages()().has_rings
    assert in_pages(SCALED)().has_rings
    wide = torch.zeros(4, 5, 3, 8)  # five heads, so that the next slot begins with another layer's turn
    assert StatePool.wrap([State(wide[:, ::2]), State(wide[:, 1::2])]).layers == 2
    assert StatePool.wrap([State(wide[:, ::3]), State(wide[:, 1:2]), State(wide[:, 2:3])]).layers == 3
    for one, other in ((wide[:, ::2], wide[:, ::3]), (wide[:, ::2], wide[:, 1:3]), (wide[:, 1::2], wide[:, 3:4])):
        with pytest.raises(ValueError, match=APART):
            StatePool.wrap([State(one), State(other)])
