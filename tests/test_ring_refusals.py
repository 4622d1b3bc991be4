"""Ring, Plan, plan, commit, folded, and pools with rings: wrong input is refused by name, and nothing changes."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from refusals import (
    WRONG_SLOTS,
    Arguments,
    Change,
    Refusal,
    at,
    columns,
    given,
    on_meta,
    only,
    refuses,
    refuses_change,
    resized,
    ring_arguments,
    strided,
    table,
    transposed,
)
from ring_pools import LAYERS, SHAPES, make_pool, rings_of
from torch import Tensor

from flashstate import Plan, Ring, State, StatePool

READ = torch.tensor([5, 0, 3])
BOUNDS = torch.tensor([0, 2, 2, 5])
MAMBA3 = [StatePool.mamba3(slots=6, layers=LAYERS, heads=4, rows=3, cols=5).layer(i) for i in range(LAYERS)]
HUGE = torch.zeros(7, 4, 7, 1 << 27, device="meta")


# Ring and Plan

RINGS: list[Refusal] = [
    *[
        (f"{name} {what}", only(name, change), error, message.format(name=name))
        for name in ("x", "B", "dt", "start", "count")
        for what, change, error, message in (
            ("missing", lambda t: None, TypeError, "^{name} must be a tensor, got NoneType"),
            ("a list", Tensor.tolist, TypeError, "^{name} must be a tensor, got list"),
            ("sparse", Tensor.to_sparse, TypeError, "^{name} must be a dense tensor"),
            ("float64", Tensor.double, TypeError, "^{name} must be .*, got float64"),
            ("int64", Tensor.long, TypeError, "^{name} must be .*, got int64"),
            ("of lower rank", lambda t: t[0], ValueError, r"^{name} must have shape \(slots.*\), got \("),
            ("of higher rank", lambda t: t[None], ValueError, r"^{name} must have shape \(slots.*\), got \("),
        )
    ],
    *[
        (f"{name} of fewer slots", only(name, lambda t: t[:6]), ValueError, rf"^{name} must have shape \(slots=7")
        for name in ("B", "dt", "start", "count")
    ],
    *[
        (f"{name} elsewhere", only(name, on_meta), ValueError, f"^{name} is on meta, but x is on cpu")
        for name in ("B", "dt", "start", "count")
    ],
    ("x elsewhere", only("x", on_meta), ValueError, "^B is on cpu, but x is on meta"),
    *[
        (f"{name} {what}", only(name, change), ValueError, message.format(name=name))
        for name in ("x", "B", "dt")
        for what, change, message in (
            ("strided", strided, r"^{name} must be contiguous within a slot: strides \(any, "),
            ("transposed", transposed, r"^{name} must be contiguous within a slot: strides \(any, "),
            ("one slot for all", lambda t: t[:1].expand_as(t), "^{name} has overlapping slots: an axis of stride 0"),
        )
    ],
    *[
        (f"{name} of another length", only(name, lambda t: resized(t, 2, -1)), ValueError, message)
        for name, message in (("B", r"^B must have shape \(.*length=7"), ("dt", r"^dt must have shape \(.*length=7"))
    ],
    ("dt of other heads", only("dt", lambda t: t[:, :3]), ValueError, r"^dt must have shape \(slots=7, heads=4, "),
    ("dt float16", only("dt", Tensor.half), TypeError, "^dt must be float32, got float16"),
    *[
        (f"{name} strided", only(name, strided), ValueError, rf"^{name} must be contiguous, got strides \(2,\)")
        for name in ("start", "count")
    ],
    *[
        (
            f"{n} groups",
            only("B", lambda t, n=n: t[:, :1].repeat(1, n, 1, 1)),
            ValueError,
            f"divides the 4 heads, got {n}",
        )
        for n in (3, 8)
    ],
    ("one cursor twice", lambda a: {"start": a["count"]}, ValueError, "^start and count must be two tensors, got one"),
    ("huge", lambda a: {n: HUGE if n == "x" else on_meta(t) for n, t in a.items()}, ValueError, r"fewer than 2\^31"),
    ("no groups", only("B", lambda t: t[:, :0]), ValueError, r"^B must not be empty, got shape \(7, 0, 7, 8\)"),
    ("no columns", only("B", lambda t: t[..., :0]), ValueError, "^B must not be empty"),
    ("no rows", only("x", lambda t: t[..., :0]), ValueError, "^x must not be empty"),
    *[(f"window {w}", given(window=w), ValueError, f"^window must be from 1 to 64, got {w}$") for w in (0, -1, 65)],
    *[
        (f"window {w!r}", given(window=w), TypeError, "^window must be an int, got ")
        for w in (True, 1.5, None, "4", torch.tensor(4))
    ],
    *[
        (f"window {w} of 7 rows", given(window=w), ValueError, f"^x must have a length of more than .* {w}, ")
        for w in (7, 8)
    ],
]


@table(RINGS)
def test_a_wrong_ring_is_refused_by_name(change: Change, error: type[Exception], message: str) -> None:
    refuses_change(Ring, ring_arguments(), change, error, message)


def plan_arguments() -> Arguments:
    plan = Ring(**ring_arguments()).plan(READ, 2)
    return {field.name: getattr(plan, field.name) for field in fields(plan)}


PLANS: list[Refusal] = [
    ("slots a tensor", only("slots", lambda s: s.read), TypeError, "^slots must be a Slots or None, got Tensor"),
    ("no slots for a batch of 3", given(slots=None), ValueError, r"^rows must have shape \(batch=7, numbers=8\)"),
    *[(f"tokens {n!r}", given(tokens=n), TypeError, "^tokens must be an int") for n in (None, True, 1.0)],
    *[(f"tokens {n}", given(tokens=n), ValueError, "^tokens must be from 0 to 4") for n in (-1, 5)],
    *[(f"window {n}", given(window=n), ValueError, "^window must be from 1 to 64") for n in (0, 65)],
    *[
        (f"{name} {what}", only(name, change), error, message.format(name=name))
        for name in ("rows", "parts", "count")
        for what, change, error, message in (
            ("a list", Tensor.tolist, TypeError, "^{name} must be a tensor, got list"),
            ("int64", Tensor.long, TypeError, "^{name} must be int32, got int64"),
            ("of higher rank", lambda t: t[None], ValueError, r"^{name} must have shape \("),
        )
    ],
    ("rows of fewer numbers", only("rows", lambda t: t[:, :6]), ValueError, r"^rows must have shape \(batch=3, num"),
    ("rows of four", only("rows", lambda t: resized(t, 0, 1)), ValueError, r"^rows must have shape .*got \(4, 8\)"),
    ("three parts", only("parts", lambda t: resized(t, 0, 1)), ValueError, r"^parts must have shape \(numbers=2\)"),
    ("rows strided", only("rows", strided), ValueError, "^rows must be contiguous, got strides"),
    ("parts strided", only("parts", strided), ValueError, "^parts must be contiguous, got strides"),
    ("rows elsewhere", only("rows", on_meta), ValueError, "^rows is on meta, but count is on cpu"),
    ("parts elsewhere", only("parts", on_meta), ValueError, "^parts is on meta, but count is on cpu"),
]


@table(PLANS)
def test_a_wrong_plan_is_refused_by_name(change: Change, error: type[Exception], message: str) -> None:
    refuses_change(Plan, plan_arguments(), change, error, message)


# plan, commit and folded


NOT_FOR_REPLAY = "is not for replay, which keeps tokens in the slot it reads"
NO_TOKENS = "is not for folding, which has no new tokens"


def call_arguments() -> Arguments:
    """A ring, and what its methods take."""
    ring = Ring(**ring_arguments())
    accepted, tokens = torch.tensor([1, 0, 2]), torch.tensor([1, 2, 0])
    return {"ring": ring, "slots": READ, "plan": ring.plan(READ, 2), "accepted": accepted, "tokens": tokens}


def of_ring(refusals: list[Refusal]) -> list[Refusal]:
    """The same refusals by a ring, which has no state."""
    return [(*refusal[:3], refusal[3].replace("the state", "the ring")) for refusal in refusals]


def as_packed(max_len: int | None) -> Change:
    return at(cu_seqlens=BOUNDS, max_len=max_len)


PLANNED: list[Refusal] = [
    *of_ring(WRONG_SLOTS),
    ("no tokens", given(tokens=None), TypeError, "^tokens must be an int, got None"),
    *[(f"tokens {n!r}", given(tokens=n), TypeError, "^tokens must be an int, got ") for n in (True, 2.0, "2")],
    *[(f"tokens {n}", given(tokens=n), ValueError, f"^tokens must be from 1 to 4, got {n}") for n in (0, -1, 5)],
    ("4 tokens", given(tokens=4), ValueError, "^the ring has 7 rows, so beside its window of 4 a call may have 3 tok"),
    ("tokens of packed", as_packed(2), ValueError, "^tokens is not for packed tokens, whose number slots.cu_seqlens"),
    *[
        (f"slots.{name}", at(**{name: table}), ValueError, f"^slots.{name} {NOT_FOR_REPLAY}")
        for name, table in (
            ("write", lambda t: t),
            ("accepted", torch.ones_like),
            ("parents", columns(2)),
            ("snapshot_rows", lambda t: t),
        )
    ],
    (
        "everything elsewhere",
        lambda a: {"ring": on_meta(a["ring"]), "slots": None},
        ValueError,
        "^state is on meta; flashstate runs on cuda and cpu",
    ),
]


@table(PLANNED)
def test_a_wrong_plan_of_a_ring_is_refused_by_name(change: Change, error: type[Exception], message: str) -> None:
    arguments = {**call_arguments(), "tokens": 2}
    wrong = {**arguments, **change(arguments)}
    refuses(lambda: wrong["ring"].plan(wrong["slots"], wrong["tokens"]), error, message, arguments)


PACKED: list[Refusal] = [
    ("no max_len", as_packed(None), ValueError, "^packed tokens need slots.max_len, the most tokens a row has"),
    ("max_len 4", as_packed(4), ValueError, "^the ring has 7 rows, so .* a call may have 3 tokens per row, got 4"),
    ("max_len 5", as_packed(5), ValueError, "^a call may have as many tokens per row as the window, 4, got 5"),
]


@table(PACKED)
def test_a_wrong_plan_of_packed_tokens_is_refused_by_name(change: Change, error: type[Exception], message: str) -> None:
    arguments = call_arguments()
    slots = change(arguments)["slots"]
    refuses(lambda: arguments["ring"].plan(slots), error, message, arguments)


OTHER_RING = "^plan was made for rings of other slots: their start and count are not those of this ring"
COMMITTED: list[Refusal] = [
    ("no plan", given(plan=None), TypeError, "^plan must be a Plan, got NoneType"),
    ("plan a tensor", only("plan", lambda p: p.rows), TypeError, "^plan must be a Plan, got Tensor"),
    ("plan of another ring", given(plan=Ring(**ring_arguments()).plan(READ, 2)), ValueError, OTHER_RING),
    ("plan elsewhere", only("plan", on_meta), ValueError, OTHER_RING),
    (
        "plan of another window",
        only("ring", lambda r: replace(r, window=3)),
        ValueError,
        "^plan was made for .* of 4, ",
    ),
    ("accepted a list", only("accepted", Tensor.tolist), TypeError, "^accepted must be a tensor, got list"),
    ("accepted an int", given(accepted=1), TypeError, "^accepted must be a tensor, got int"),
    ("accepted bool", only("accepted", Tensor.bool), TypeError, "^accepted must be int32 or int64, got bool"),
    ("accepted float32", only("accepted", Tensor.float), TypeError, "^accepted must be int32 or int64, got float32"),
    ("accepted short", only("accepted", lambda t: t[:2]), ValueError, r"^accepted must have shape \(batch=3\), got"),
    (
        "accepted of rank 2",
        only("accepted", lambda t: t[:, None]),
        ValueError,
        r"^accepted must have shape \(batch=3\)",
    ),
    ("accepted strided", only("accepted", strided), ValueError, r"^accepted must be contiguous, got strides \(2,\)"),
    ("accepted elsewhere", only("accepted", on_meta), ValueError, "^accepted is on meta, but the state is on cpu"),
]


@table(COMMITTED)
def test_a_wrong_commit_is_refused_by_name(change: Change, error: type[Exception], message: str) -> None:
    arguments = call_arguments()
    wrong = {**arguments, **change(arguments)}
    refuses(lambda: wrong["ring"].commit(wrong["plan"], wrong["accepted"]), error, message, arguments)


FOLDED: list[Refusal] = [
    *of_ring(WRONG_SLOTS),
    *[(f"tokens {n!r}", given(tokens=n), TypeError, "^tokens must be an int, got ") for n in (True, 1.0, [1, 2, 0])],
    *[(f"tokens {n}", given(tokens=n), ValueError, f"^tokens must be from 0 to 4, got {n}") for n in (-1, 5)],
    ("tokens float32", only("tokens", Tensor.float), TypeError, "^tokens must be int32 or int64, got float32"),
    ("tokens of fewer rows", only("tokens", lambda t: t[:2]), ValueError, r"^tokens must have shape \(batch=3\), got"),
    ("tokens of all slots", given(slots=None), ValueError, r"^tokens must have shape \(batch=7\), got \(3,\)"),
    ("tokens strided", only("tokens", strided), ValueError, r"^tokens must be contiguous, got strides \(2,\)"),
    ("tokens elsewhere", only("tokens", on_meta), ValueError, "^tokens is on meta, but the state is on cpu"),
    ("slots.write", at(write=lambda t: t), ValueError, f"^slots.write {NOT_FOR_REPLAY}"),
    ("slots.cu_seqlens", as_packed(3), ValueError, f"^slots.cu_seqlens {NO_TOKENS}"),
    ("slots.accepted", at(accepted=torch.ones_like), ValueError, f"^slots.accepted {NO_TOKENS}"),
]


@table(FOLDED)
def test_a_wrong_call_of_folded_is_refused_by_name(change: Change, error: type[Exception], message: str) -> None:
    arguments = call_arguments()
    wrong = {**arguments, **change(arguments)}
    refuses(lambda: wrong["ring"].folded(wrong["slots"], wrong["tokens"]), error, message, arguments)


# Pools


ACTIVATIONS = "float32 or bfloat16 or float16"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        *[({"window": w}, ValueError, f"^window must be from 0 to 64, got {w}$") for w in (-1, 65)],
        *[({"window": w}, TypeError, "^window must be an int, got ") for w in (True, False, None, 1.5, 0.0, "4")],
        *[({"tokens": n}, ValueError, f"^tokens must be from 1 to 4, got {n}") for n in (0, 5)],
        *[({"tokens": n}, TypeError, "^tokens must be an int, got ") for n in (True, None, 2.0)],
        ({"window": 0}, ValueError, "^tokens are for rings: window must be given too, got tokens=3"),
        *[({"groups": n}, ValueError, f"^groups must be from 1 to 4, got {n}") for n in (0, 5)],
        ({"groups": 3}, ValueError, "^groups must divide the 4 heads, got 3"),
        ({"groups": 2.0}, TypeError, "^groups must be an int, got 2.0"),
        ({"ring_dtype": torch.int8}, TypeError, f"^ring_dtype must be {ACTIVATIONS}, got int8"),
        ({"ring_dtype": torch.float64}, TypeError, f"^ring_dtype must be {ACTIVATIONS}, got float64"),
        ({"ring_dtype": "float16"}, TypeError, f"^ring_dtype must be {ACTIVATIONS}, got 'float16'"),
        ({"device": "meta"}, ValueError, "^state is on meta"),
    ],
)
def test_rings_that_cannot_be_are_not_allocated(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_pool(**options)


def wrap_arguments() -> Arguments:
    """The arguments of StatePool.wrap that are right."""
    seed = torch.arange(6)
    data = (torch.zeros(6, 4, 3, 5, dtype=torch.float16) for _ in range(LAYERS))
    return {"states": [State(d, rounding="stochastic", seed=seed) for d in data], "rings": rings_of(SHAPES)}


def second(**changes: Callable[[Ring], Any]) -> Change:
    """The second ring with other fields, of the first."""

    def change(a: Arguments) -> Arguments:
        one, two = a["rings"]
        return {"rings": [one, replace(two, **{name: value(one) for name, value in changes.items()})]}

    return change


SHARED = r"^rings\[1\]\.{0} must not share the memory of another layer or of a state"
PER_LAYER = "^rings must be a sequence with one Ring per layer, 2, got"
ALIKE = r"^rings must have one window and one length, but rings\[1\] has"
WRAPPED: list[Refusal] = [
    ("one ring", only("rings", lambda r: r[:1]), ValueError, f"{PER_LAYER} 1"),
    ("no rings", given(rings=[]), ValueError, f"{PER_LAYER} 0"),
    ("a Ring", only("rings", lambda r: r[0]), ValueError, f"{PER_LAYER} Ring"),
    ("a tensor", only("rings", lambda r: [r[0], r[0].x]), TypeError, r"^rings\[1\] must be a Ring, got Tensor"),
    ("None", only("rings", lambda r: [None, r[1]]), TypeError, r"^rings\[0\] must be a Ring, got NoneType"),
    ("of Mamba-3", given(states=MAMBA3), TypeError, "^rings are for states of Mamba-2, each a State, got Mamba3State"),
    (
        "of another pool",
        only("rings", lambda r: [r[0], rings_of(SHAPES)[1]]),
        ValueError,
        r"^rings must share start and count, but rings\[1\] has others than rings\[0\]",
    ),
    ("another start", second(start=lambda r: r.start.clone()), ValueError, "^rings must share start and count"),
    ("another count", second(count=lambda r: r.count.clone()), ValueError, "^rings must share start and count"),
    ("another window", second(window=lambda r: 3), ValueError, rf"{ALIKE} 3 and 7, rings\[0\] has 4 and 7"),
    (
        "another length",
        second(**{n: lambda r, n=n: resized(getattr(r, n), 2, 1) for n in ("x", "B", "dt")}),
        ValueError,
        rf"{ALIKE} 4 and 8, rings\[0\] has 4 and 7",
    ),
    (
        "other rows",
        second(x=lambda r: resized(r.x, 3, 1)),
        ValueError,
        r"^rings\[1\].x must have shape \(.*rows=3\)",
    ),
    ("other columns", second(B=lambda r: resized(r.B, 3, 1)), ValueError, r"^rings\[1\].B must .*cols=5\), got"),
    (
        "elsewhere",
        only("rings", lambda r: [r[0], on_meta(r[1])]),
        ValueError,
        r"^rings\[1\].x is on meta, but the state",
    ),
    ("x of another layer", second(x=lambda r: r.x), ValueError, SHARED.format("x")),
    ("dt of another layer", second(dt=lambda r: r.dt), ValueError, SHARED.format("dt")),
]


@table(WRAPPED)
def test_rings_that_do_not_fit_are_not_wrapped(change: Change, error: type[Exception], message: str) -> None:
    arguments = wrap_arguments()
    wrong = {**arguments, **change(arguments)}
    held = {f"{n} {i}": value for n, values in arguments.items() for i, value in enumerate(values)}
    refuses(lambda: StatePool.wrap(**wrong), error, message, held)


def test_rings_take_turns_with_states_but_share_no_memory() -> None:
    """With states, scales, seeds, windows and each other."""
    pages, seed, cursors = torch.zeros(6, 400), torch.zeros(6, dtype=torch.int64), torch.zeros(12, dtype=torch.int32)

    def page(start: int, *shape: int) -> Tensor:
        return pages[:, start : start + torch.Size(shape).numel()].unflatten(1, shape)

    def wrap(state: State | None = None, windows: Any = None, **tensors: Tensor) -> StatePool:
        own = {"x": page(60, 4, 7, 3), "B": page(144, 2, 7, 5), "dt": page(214, 4, 7)}
        shared = {"start": cursors[:6], "count": cursors[6:]}
        ring = Ring(**{**own, **shared, **tensors}, window=4)
        return StatePool.wrap([state or State(page(0, 4, 3, 5), seed=seed)], windows=windows, rings=[ring])

    assert wrap().has_rings
    scale = page(0, 4, 3)
    scaled = State(torch.zeros(6, 4, 3, 5, dtype=torch.int8), scale)
    assert wrap(scaled).has_rings
    for name, call in (
        ("x", lambda: wrap(x=page(59, 4, 7, 3))),
        ("B", lambda: wrap(B=page(143, 2, 7, 5))),
        ("dt", lambda: wrap(dt=page(213, 4, 7))),
        ("dt", lambda: wrap(scaled, dt=page(11, 4, 7))),
        ("x", lambda: wrap(windows=[page(60, 2, 3)])),
        ("start", lambda: wrap(start=seed.view(torch.int32)[6:])),
        ("count", lambda: wrap(count=cursors[5:11])),
        ("count", lambda: wrap(count=cursors[:6])),
    ):
        with pytest.raises(ValueError, match=rf"^rings(\[0\])?\.{name} must not share the memory of another layer"):
            call()


def test_what_refusals_start_from_is_right() -> None:
    arguments = call_arguments()
    ring, plan = arguments["ring"], arguments["plan"]
    assert Plan(**plan_arguments()).batch == 3
    ring.commit(plan, arguments["accepted"])
    assert ring.count.tolist() == [0, 0, 4, 3, 2, 1, 3]
    ring.folded(READ, torch.tensor([1, 0, 2]))
    assert ring.count.tolist() == [0, 0, 4, 1, 2, 0, 3]
    assert StatePool.wrap(**wrap_arguments()).has_rings
