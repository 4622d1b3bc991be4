"""mamba2_replay and mamba2_fold: wrong input is refused by name, and states, rings and cursors keep their bytes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from refusals import (
    WRONG_SLOTS,
    Arguments,
    Change,
    Refusal,
    at,
    both,
    columns,
    given,
    on_meta,
    only,
    refuses_change,
    resized,
    ring_arguments,
    strided,
    table,
    tensors_of,
    transposed,
)
from torch import Tensor

from flashstate import Ring, Slots, State, debug, mamba2_fold, mamba2_replay

BATCH, T, H, G, D, N, SLOTS = 3, 2, 4, 2, 6, 8, 7
FORMS = {"one token": ("batch",), "several tokens": ("batch", "T"), "packed": ("tokens",)}
SIZES = {"one token": (BATCH,), "several tokens": (BATCH, T), "packed": (5,)}
BOUNDS = torch.tensor([0, 2, 2, 5])
SHAPES = {**dict.fromkeys(("x", "z", "out"), (H, D)), **dict.fromkeys(("B", "C"), (G, N)), "dt": (H,)}  # of a token
PARAMETERS = {"A": (H,), "D": (H, D), "dt_bias": (H,)}
READ = torch.tensor([5, 0, 3])


def normal(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def make_state() -> State:
    return State(normal(SLOTS, H, D, N).half(), rounding="stochastic", seed=torch.arange(SLOTS))


def arguments_of(form: str = "one token") -> Arguments:
    """All arguments of a call of mamba2_replay that is right."""
    tensors = {name: normal(*SIZES[form], *shape, seed=i).half() for i, (name, shape) in enumerate(SHAPES.items())}
    parameters = {name: -normal(*shape, seed=9).abs() for name, shape in PARAMETERS.items()}
    slots = Slots(READ, cu_seqlens=BOUNDS, max_len=3) if form == "packed" else READ
    ring = Ring(**ring_arguments())
    return {"state": make_state(), "ring": ring, **tensors, **parameters, "plan": None, "slots": slots, "update": True}


def fold_arguments() -> Arguments:
    """All arguments of a call of mamba2_fold that is right."""
    state, ring, into = make_state(), Ring(**ring_arguments()), State(normal(SLOTS, H, D, N, seed=1))
    return {
        "state": state, "ring": ring, "A": -torch.ones(H), "slots": READ, "tokens": torch.tensor([1, 2, 0]),
        "into": into,
    }  # fmt: skip


def planned(tokens: int | None = 1, read: Any = READ, beside: Any = None) -> Change:
    """A plan of the ring of the call, and these slots beside it."""
    return lambda a: {"plan": a["ring"].plan(read, tokens), "slots": beside}


def other_ring(**changes: Any) -> Change:
    """A ring with other fields: values, or what becomes of those there are."""

    def change(arguments: Arguments) -> Arguments:
        ring = arguments["ring"]
        new = {name: value(getattr(ring, name)) if callable(value) else value for name, value in changes.items()}
        return {"ring": replace(ring, **new)}

    return change


# mamba2_replay


def wrong_tensors(form: str) -> list[Refusal]:
    """What is wrong for every tensor of a call but those of states and slots."""
    refusals: list[Refusal] = []
    names = [*SHAPES, *(PARAMETERS if form == "one token" else ())]
    for name in names:
        allowed = "float16" if name == "out" else "float32 or bfloat16 or float16"
        changes: list[tuple[str, Callable[[Tensor], Any], type[Exception], str]] = [
            ("a list", Tensor.tolist, TypeError, f"^{name} must be a tensor, got list"),
            ("sparse", Tensor.to_sparse, TypeError, f"^{name} must be a dense tensor"),
            ("float64", Tensor.double, TypeError, f"^{name} must be {allowed}, got float64"),
            ("int32", Tensor.int, TypeError, f"^{name} must be {allowed}, got int32"),
            ("elsewhere", on_meta, ValueError, f"^{name} is on meta, but the state is on cpu"),
            ("of much higher rank", lambda t: t[None, None, None], ValueError, f"^{name} must have shape "),
        ]
        lead = len(SIZES[form]) if name in SHAPES else 0
        for axis in range(lead + len(SHAPES.get(name) or PARAMETERS[name])):
            if (name == "x" and axis < lead) or (name == "B" and axis == lead):
                continue  # others must have the sizes that these have
            for by in (-1, 1):
                resize = lambda t, axis=axis, by=by: resized(t, axis, by)  # noqa: E731
                changes.append((f"with axis {axis} {by:+}", resize, ValueError, f"^{name} must have shape "))
        if name not in ("dt", *PARAMETERS):
            changes.append(("strided", strided, ValueError, f"^{name} must be contiguous along its last axis"))
        refusals += [(f"{form}: {name} {what}", only(name, change), *rest) for what, change, *rest in changes]
    return refusals


TENSORS = [refusal for form in FORMS for refusal in wrong_tensors(form)]


@table(TENSORS)
def test_a_wrong_tensor_is_refused_by_name(
    request: pytest.FixtureRequest, change: Change, error: type[Exception], message: str
) -> None:
    form = request.node.callspec.id.partition(":")[0]
    refuses_change(mamba2_replay, arguments_of(form), change, error, message)


PER_HEAD = (
    r"must have one value per head, as Mamba-2 has, or be expanded from such, got shape \(.*replay is not for Mamba-1"
)
NOT_FOR_REPLAY = "is not for replay, which keeps tokens in the slot it reads"
LEFT_OUT = "^slots must be left out with a plan"
CALLS: list[Refusal] = [
    *WRONG_SLOTS,
    *[
        (f"{name} missing", given(**{name: None}), TypeError, f"^{name} must be ")
        for name in ("state", "ring", "x", "dt", "A", "B", "C")
    ],
    *[
        (f"{name} {value!r}", given(**{name: value}), TypeError, f"^{name} must be True or False, got {value!r}")
        for name in ("dt_softplus", "update")
        for value in (1, None, "yes")
    ],
    ("snapshots", given(snapshots=torch.zeros(3, 1, H, D, N)), TypeError, "unexpected keyword argument 'snapshots'"),
    ("dt per channel", only("dt", lambda t: normal(BATCH, H, D)), ValueError, f"^dt {PER_HEAD}"),
    ("dt_bias per channel", given(dt_bias=normal(H, D)), ValueError, f"^dt_bias {PER_HEAD}"),
    ("A per element", given(A=-torch.ones(H, D, N)), ValueError, f"^A {PER_HEAD}"),
    ("A strided", only("A", strided), ValueError, "^A must be contiguous, or expanded from contiguous values per head"),
    (
        "x of another dtype",
        only("x", Tensor.float),
        TypeError,
        "^x must have the dtype of ring.x, float16, got float32",
    ),
    ("B of another dtype", only("B", Tensor.bfloat16), TypeError, "^B must have the dtype of ring.B, float16, got bfl"),
    (
        "a ring of another dtype",
        other_ring(x=Tensor.bfloat16),
        TypeError,
        "^x must have the dtype of ring.x, bfloat16, got float16",
    ),
    *[
        (
            f"{n} groups",
            lambda a, n=n: {name: a[name][:, :1].repeat(1, n, 1) for name in ("B", "C")},
            ValueError,
            f"^B must have the groups of ring.B, 2, got {n}",
        )
        for n in (1, 4)
    ],
    ("3 groups", lambda a: {"B": a["B"][:, [0, 0, 0]]}, ValueError, "^B must have a number of groups that divides"),
    ("out one row for all", only("out", lambda t: t[:1].expand_as(t)), ValueError, "^out must not overlap itself"),
    ("out one head for all", only("out", lambda t: t[:, :1].expand_as(t)), ValueError, "^out must not overlap itself"),
    ("out float32", only("out", Tensor.float), TypeError, "^out must be float16, got float32"),
    ("state transposed", only("state", lambda s: transposed(s.data)), ValueError, "^state must be contiguous within"),
    ("state of snapshots", only("state", lambda s: State(s.data[None])), ValueError, "^state must have data "),
    ("int8 without scales", only("state", lambda s: s.data.char()), ValueError, "^state of dtype int8 needs a scale"),
    ("state elsewhere", only("state", on_meta), ValueError, "^ring.x is on cpu, but the state is on meta"),
    ("ring elsewhere", only("ring", on_meta), ValueError, "^ring.x is on meta, but the state is on cpu"),
    (
        "everything elsewhere",
        lambda a: {name: on_meta(value) for name, value in a.items()},
        ValueError,
        "^state is on meta; flashstate runs on cuda and cpu",
    ),
    ("ring a tensor", only("ring", lambda r: r.x), TypeError, "^ring must be a Ring, got Tensor"),
    (
        "ring of fewer slots",
        only("ring", lambda r: Ring(*(t[:6] for t in (r.x, r.B, r.dt, r.start, r.count)), r.window)),
        ValueError,
        r"^ring.x must have shape \(slots=7, heads=4, length=7, rows=6\), got \(6, ",
    ),
    ("ring of other rows", other_ring(x=lambda t: resized(t, 3, 1)), ValueError, r"^ring.x must have shape \(.*rows=6"),
    ("ring of other columns", other_ring(B=lambda t: resized(t, 3, 1)), ValueError, r"^ring.B must .*cols=8\), got"),
    (
        "ring of other heads",
        other_ring(x=lambda t: t[:, :2].clone(), dt=lambda t: t[:, :2].clone()),
        ValueError,
        r"^ring.x must have shape \(slots=7, heads=4, ",
    ),
    ("slots too short", only("slots", lambda t: t[:2]), ValueError, "^slots must have 3 rows, .* got 2"),
    (
        "a batch larger than the pool",
        lambda a: {n: a[n].repeat_interleave(3, 0) for n in SHAPES} | {"slots": None},
        ValueError,
        "^slots must be given for a batch of 9 on a pool of 7 slots",
    ),
    ("slots.write", at(write=lambda t: t), ValueError, f"^slots.write {NOT_FOR_REPLAY}"),
    ("slots.write per token", at(write=columns(1)), ValueError, f"^slots.write {NOT_FOR_REPLAY}"),
    ("slots.accepted", at(accepted=torch.ones_like), ValueError, f"^slots.accepted {NOT_FOR_REPLAY}"),
    ("a table", at(read=columns(2), accepted=torch.ones_like), ValueError, f"^slots.accepted {NOT_FOR_REPLAY}"),
    ("slots.parents", at(parents=columns(1)), ValueError, f"^slots.parents {NOT_FOR_REPLAY}"),
    ("slots.snapshot_rows", at(snapshot_rows=lambda t: t), ValueError, f"^slots.snapshot_rows {NOT_FOR_REPLAY}"),
    ("plan a list", lambda a: {"plan": [a["ring"].plan(READ, 1)]}, TypeError, "^plan must be a Plan, got list"),
    ("plan True", given(plan=True, slots=None), TypeError, "^plan must be a Plan, got bool"),
    ("plan of fewer rows", planned(read=READ[:2]), ValueError, "^slots must have 3 rows, as the batch has, got 2"),
    ("plan of all slots", planned(read=None), ValueError, "^plan is for 7 rows of up to 1 tokens, but x has 3 of up"),
    ("plan of two tokens", planned(2), ValueError, "^plan is for 3 rows of up to 2 tokens, but x has 3 of up to 1"),
    ("plan and other slots", planned(beside=READ.clone()), ValueError, LEFT_OUT),
    ("plan and a Slots", planned(beside=Slots(READ)), ValueError, LEFT_OUT),
    ("plan of all and slots", planned(read=None, beside=READ), ValueError, LEFT_OUT),
    (
        "plan of another ring",
        lambda a: {"plan": Ring(**ring_arguments()).plan(READ, 1), "slots": None},
        ValueError,
        "^plan was made for rings of other slots: their start and count are not those of this ring",
    ),
]


@table(CALLS)
def test_a_wrong_call_is_refused_by_name(change: Change, error: type[Exception], message: str) -> None:
    refuses_change(mamba2_replay, arguments_of(), change, error, message)


def with_tokens(n: int) -> Change:
    """A call of so many tokens per row."""
    return lambda a: {name: a[name][:, :1].repeat_interleave(n, 1) for name in SHAPES}


def in_window(window: int, length: int) -> Change:
    """A ring with another window, and so many rows."""
    return other_ring(window=window, **dict.fromkeys(("x", "B", "dt"), lambda t: t[:, :, torch.arange(length) % 7]))


ROOM = "^the ring has 7 rows, so beside its window of"
SEVERAL: list[Refusal] = [
    ("5 tokens", both(in_window(4, 10), with_tokens(5)), ValueError, "as many tokens per row as the window, 4, got 5"),
    ("65 tokens", both(in_window(64, 129), with_tokens(65)), ValueError, "as the window, 64, got 65"),
    ("4 tokens", with_tokens(4), ValueError, f"{ROOM} 4 a call may have 3 tokens per row, got 4"),
    ("2 tokens", in_window(6, 7), ValueError, f"{ROOM} 6 a call may have 1 tokens per row, got 2"),
    ("plan of one token", planned(1), ValueError, "^plan is for 3 rows of up to 1 tokens, but x has 3 of up to 2"),
    (
        "plan of packed tokens",
        planned(None, Slots(READ, cu_seqlens=BOUNDS, max_len=3)),
        ValueError,
        r"^x must have shape \(tokens, heads=4, rows=6\), got \(3, 2, 4, 6\)",
    ),
    (
        "slots.parents, no update",
        both(given(update=False), at(parents=columns(2))),
        ValueError,
        "^slots.parents is not",
    ),
]


@table(SEVERAL)
def test_a_wrong_call_of_several_tokens_is_refused_by_name(
    change: Change, error: type[Exception], message: str
) -> None:
    refuses_change(mamba2_replay, arguments_of("several tokens"), change, error, message)


PACKED: list[Refusal] = [
    ("no max_len", at(max_len=None), ValueError, "^packed tokens need slots.max_len, the most tokens a row has"),
    ("max_len 4", at(max_len=4), ValueError, f"{ROOM} 4 a call may have 3 tokens per row, got 4"),
    ("max_len 5", at(max_len=5), ValueError, "^a call may have as many tokens per row as the window, 4, got 5"),
    ("x dense", only("x", lambda t: t[None]), ValueError, r"^x must have shape \(tokens, heads=4, rows=6\), got \(1, "),
    ("plan and slots", lambda a: {"plan": a["ring"].plan(replace(a["slots"], max_len=2))}, ValueError, LEFT_OUT),
    ("plan of dense tokens", planned(2), ValueError, "^slots must have 5 rows, as the batch has, got 3"),
]


@table(PACKED)
def test_a_wrong_call_of_packed_tokens_is_refused_by_name(change: Change, error: type[Exception], message: str) -> None:
    refuses_change(mamba2_replay, arguments_of("packed"), change, error, message)


# mamba2_fold


ONE_EACH = "^slots.write is for mamba2_fold with into, whose slots it names, one per row"
NO_TOKENS = "is not for folding, which has no new tokens"
AS_IN_REPLAY = (
    "state missing", "state transposed", "state of snapshots", "state elsewhere", "int8 without scales", "ring missing",
    "ring elsewhere", "ring a tensor", "ring of fewer slots", "ring of other rows", "ring of other columns",
    "ring of other heads", "everything elsewhere", "A missing", "A strided",
)  # fmt: skip
FOLDS: list[Refusal] = [
    *WRONG_SLOTS,
    *[refusal for refusal in CALLS if refusal[0] in AS_IN_REPLAY],
    ("A elsewhere", only("A", on_meta), ValueError, "^A is on meta, but the state is on cpu"),
    ("A float64", only("A", Tensor.double), TypeError, "^A must be float32 or bfloat16 or float16, got float64"),
    ("A of other heads", only("A", lambda t: t[:3]), ValueError, r"^A must have shape \(heads=4\) or .* got \(3,\)"),
    ("A per element", given(A=-torch.ones(H, D, N)), ValueError, "^A must have one value per head, .* got shape"),
    *[(f"tokens {n!r}", given(tokens=n), TypeError, "^tokens must be an int, got ") for n in (True, 1.0, [1, 2, 0])],
    *[(f"tokens {n}", given(tokens=n), ValueError, f"^tokens must be from 0 to 4, got {n}") for n in (-1, 5)],
    ("tokens float32", only("tokens", Tensor.float), TypeError, "^tokens must be int32 or int64, got float32"),
    ("tokens of fewer rows", only("tokens", lambda t: t[:2]), ValueError, r"^tokens must have shape \(batch=3\), got"),
    ("tokens strided", only("tokens", strided), ValueError, "^tokens must be contiguous, got strides"),
    ("tokens elsewhere", only("tokens", on_meta), ValueError, "^tokens is on meta, but the state is on cpu"),
    ("write in place", both(given(into=None), at(write=lambda t: t)), ValueError, ONE_EACH),
    ("write per token", at(write=columns(2)), ValueError, ONE_EACH),
    ("slots.accepted", at(accepted=torch.ones_like), ValueError, f"^slots.accepted {NO_TOKENS}"),
    ("slots.parents", at(parents=columns(1)), ValueError, f"^slots.parents {NO_TOKENS}"),
    ("slots.snapshot_rows", at(snapshot_rows=lambda t: t), ValueError, f"^slots.snapshot_rows {NO_TOKENS}"),
    ("slots.cu_seqlens", at(cu_seqlens=BOUNDS), ValueError, f"^slots.cu_seqlens {NO_TOKENS}"),
    ("into a list", given(into=[1]), TypeError, "^into must be a State or a tensor, got list"),
    ("into of snapshots", only("into", lambda s: State(s.data[None])), ValueError, r"^into must have data \(slots, "),
    ("into int8, no scales", only("into", lambda s: s.data.char()), ValueError, "^into of dtype int8 needs a scale"),
    ("into transposed", only("into", lambda s: transposed(s.data)), ValueError, "^into must be contiguous within a"),
    (
        "into of other rows",
        only("into", lambda s: resized(s.data, 2, 1)),
        ValueError,
        r"^into must have states \(4, 6, 8\), got \(4, 7, 8\)",
    ),
    ("into elsewhere", only("into", on_meta), ValueError, "^into is on meta, but the state is on cpu"),
    (
        "into stochastic and no seeds",
        lambda a: {
            "state": State(a["state"].data),
            "into": State(a["into"].data.half(), rounding="stochastic", seed=torch.arange(SLOTS)),
        },
        ValueError,
        "^into with rounding='stochastic' needs a state with a seed, got seed=None",
    ),
]


@table(FOLDS)
def test_a_wrong_fold_is_refused_by_name(change: Change, error: type[Exception], message: str) -> None:
    refuses_change(mamba2_fold, fold_arguments(), change, error, message)


# Rows that meet, and calls that are right


def with_cursor(name: str, value: int) -> Callable[[Ring], Ring]:
    """A ring with another number in slot 0."""
    at_slot_0 = torch.tensor([0])
    return lambda ring: replace(ring, **{name: getattr(ring, name).index_fill(0, at_slot_0, value)})


DEBUGGED: list[Refusal] = [
    ("two rows", only("slots", lambda t: t[[0, 1, 1]]), ValueError, "^slots write slot 0 more than once: rows 1, 2"),
    ("a slot past the pool", only("slots", lambda t: t + SLOTS), IndexError, "read slot 12"),
    *[
        (f"{name} {value}", only("ring", with_cursor(name, value)), ValueError, "^ring.start must be below .* slot 0 ")
        for name, value in (("start", -1), ("start", 99), ("count", -1), ("count", 99))
    ],
]


@table(DEBUGGED)
def test_rows_that_meet_and_wrong_cursors_are_found_by_debug(
    change: Change, error: type[Exception], message: str
) -> None:
    in_place = {**fold_arguments(), "into": None}
    with debug():
        refuses_change(mamba2_replay, arguments_of(), change, error, message)
        refuses_change(mamba2_fold, in_place, change, error, message)
        mamba2_fold(**in_place)
        mamba2_fold(**fold_arguments())


def bytes_in(arguments: Arguments) -> dict[str, Tensor]:
    """A copy of every tensor of the arguments, by name."""
    named = ((f"{name}.{i}", t) for name, value in arguments.items() for i, t in enumerate(tensors_of(value)))
    return {name: tensor.clone() for name, tensor in named}


@pytest.mark.parametrize("form", FORMS)
def test_the_calls_that_refusals_start_from_are_right(form: str) -> None:
    """And write what they should: outputs, states of rows that fold, rows of the ring, and nothing else."""
    for call, arguments, writes in (
        (mamba2_replay, arguments_of(form), {"state.0", "ring.0", "ring.1", "ring.2", "out.0"}),
        (mamba2_fold, fold_arguments(), {"into.0"}),
        (mamba2_fold, {**fold_arguments(), "slots": Slots(READ, write=torch.tensor([1, 2, 9]), null=9)}, {"into.0"}),
        (mamba2_fold, {**fold_arguments(), "into": None}, {"state.0"}),
    ):
        before = bytes_in(arguments)
        result = call(**arguments)  # type: ignore[operator]
        assert result is arguments.get("out")
        after = bytes_in(arguments)
        assert {name for name in before if not torch.equal(before[name], after[name])} == writes
        assert all(tensor.isfinite().all() for tensor in after.values())


@pytest.mark.parametrize("form", FORMS)
def test_parameters_expanded_from_one_value_per_head_and_plans_are_taken(form: str) -> None:
    want, ways = arguments_of(form), [arguments_of(form) for _ in range(2)]
    ways[0] |= {"A": want["A"][:, None, None].expand(H, D, N), "dt_bias": want["dt_bias"][:, None].expand(H, D)}
    ways[0]["dt"] = want["dt"].unsqueeze(-1).expand(*want["dt"].shape, D)
    tokens = {"one token": 1, "several tokens": T, "packed": None}[form]
    ways[1]["plan"] = ways[1]["ring"].plan(ways[1]["slots"], tokens)  # with the slots beside it that it was made for
    mamba2_replay(**want)
    for way in ways:
        mamba2_replay(**way)
        for name in ("state", "ring", "out"):
            assert all(map(torch.equal, tensors_of(way[name]), tensors_of(want[name]))), name
