"""mamba2_step and gated_delta_step: what both refuse by name, whatever form tokens and parameters have."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from refusals import (
    DELTA_FORMS,
    DELTA_FORMS_PER_CHANNEL,
    FORMS,
    FORMS_PER_ROW,
    WRONG_SLOTS,
    Arguments,
    Change,
    Refusal,
    T,
    at,
    both,
    columns,
    given,
    on_meta,
    only,
    refuses_change,
    resized,
    step_arguments,
    strided,
    table_of_forms,
)
from torch import Tensor

from flashstate import Slots, State, gated_delta_step, mamba2_step
from flashstate.proof import Case, DeltaCase

AnyStep = Case | DeltaCase
ONE_TOKEN: dict[str, AnyStep] = {"mamba2": FORMS["one token"], "gated_delta": DELTA_FORMS["one token"]}
PER_HEAD: dict[str, AnyStep] = {
    f"{op}, {form}": case
    for op, forms in (("mamba2", FORMS), ("gated_delta", DELTA_FORMS))
    for form, case in forms.items()
}
ALL: dict[str, AnyStep] = {
    **PER_HEAD,
    **{f"mamba2, {form}": case for form, case in FORMS_PER_ROW.items()},
    **{f"gated_delta, {form}": case for form, case in DELTA_FORMS_PER_CHANNEL.items()},
}


class Words(NamedTuple):
    """What an op calls its arguments and their axes."""

    main: str  # the activation that others must have the tokens of
    per_column: tuple[str, str]  # activations with a value for each column, of which the first has the groups
    heads: str
    groups: str
    divides: str  # how a wrong number of groups is refused
    required: tuple[str, ...]
    optional_rows: tuple[str, ...]  # other activations whose rows must be contiguous
    flags: tuple[str, ...]


MAMBA2 = Words(
    "x", ("B", "C"), "heads", "groups", "number of groups that divides the 4 heads", ("x", "dt", "A", "B", "C"),
    ("z",), ("dt_softplus", "update", "early"),
)  # fmt: skip
GATED_DELTA = Words(
    "v", ("q", "k"), "HV", "H", "number of heads that divides the 4 value heads", ("q", "k", "v", "a", "b"),
    (), ("qk_l2norm", "exact", "update", "early"),
)  # fmt: skip


def words_of(case: AnyStep) -> Words:
    return GATED_DELTA if isinstance(case, DeltaCase) else MAMBA2


def step_of(case: AnyStep) -> Callable[..., Tensor]:
    return gated_delta_step if isinstance(case, DeltaCase) else mamba2_step


def is_refused(case: AnyStep, change: Change, error: type[Exception], message: str) -> None:
    refuses_change(step_of(case), step_arguments(case), change, error, message)


def token_axes(case: AnyStep) -> tuple[str, ...]:
    return ("tokens",) if case.packed else ("batch", "T") if case.tokens else ("batch",)


def axes_of(case: AnyStep) -> dict[str, tuple[str, ...]]:
    """The axes of every tensor but `state`, `slots` and `snapshots`."""
    tokens = token_axes(case)
    if isinstance(case, DeltaCase):
        channels = ("K",) if case.per_channel else ()
        return {
            **dict.fromkeys(("v", "out"), (*tokens, "HV", "V")),
            **dict.fromkeys(("q", "k"), (*tokens, "H", "K")),
            "a": (*tokens, "HV", *channels),
            "b": (*tokens, "HV"),
            "A_log": ("HV",),
            "dt_bias": ("HV", *channels),
        }
    rows = ("rows",) if case.mamba1 else ()
    return {
        **dict.fromkeys(("x", "z", "out"), (*tokens, "heads", "rows")),
        **dict.fromkeys(("B", "C"), (*tokens, "groups", "cols")),
        "dt": (*tokens, "heads", *rows),
        "A": ("heads", *rows, *(("cols",) if case.mamba1 else ())),
        **dict.fromkeys(("D", "dt_bias"), ("heads", *rows)),
    }


def ranks(case: AnyStep, name: str) -> list[Refusal]:
    """Wrong ranks. A main activation that lacks or has a token axis is of the other dense form, which the next one is
    not."""
    words, refusals = words_of(case), []
    for what, change, also_dense in (
        ("of lower rank", lambda t: t[0], case.tokens > 0),
        ("of higher rank", lambda t: t[None], case.tokens == 0),
        ("of much higher rank", lambda t: t[None, None, None], False),
    ):
        blamed = words.per_column[0] if name == words.main and also_dense and not case.packed else name
        message = rf"^{blamed} must have shape \({axes_of(case)[name][0]}.*\), got \("
        refusals.append((f"{name} {what}", only(name, change), ValueError, message))
    return refusals


def wrong_kinds(case: AnyStep, name: str) -> list[Refusal]:
    """What is wrong for every tensor argument but `state`, `slots` and `snapshots`."""
    allowed = "float16" if name == "out" else "float32 or bfloat16 or float16"
    words, axes = words_of(case), axes_of(case)[name]
    shape = rf"^{name} must have shape \({axes[0]}.*\), got \("
    refusals: list[Refusal] = [
        (f"{name} a list", only(name, Tensor.tolist), TypeError, rf"^{name} must be a tensor, got list"),
        (f"{name} a float", given(**{name: 1.0}), TypeError, rf"^{name} must be a tensor, got float"),
        (f"{name} elsewhere", only(name, on_meta), ValueError, rf"^{name} is on meta, but the state is on cpu"),
        (f"{name} sparse", only(name, Tensor.to_sparse), TypeError, rf"^{name} must be a dense tensor"),
        *ranks(case, name),
    ]
    for kind in ("float64", "int32", "bool", "float8_e4m3fn"):
        to = only(name, lambda t, kind=kind: t.to(getattr(torch, kind)))
        refusals.append((f"{name} {kind}", to, TypeError, rf"^{name} must be {allowed}, got {kind}"))
    measured = {(words.main, axis) for axis in token_axes(case)} | {(words.per_column[0], words.groups)}
    for axis, word in enumerate(axes):
        for by in (-1, 1) if (name, word) not in measured else ():  # others must have the sizes that these have
            resize = only(name, lambda t, axis=axis, by=by: resized(t, axis, by))
            refusals.append((f"{name} with {word} {by:+}", resize, ValueError, shape))
    if axes[-1] != words.heads:
        refusals.append((f"{name} of one element a row", only(name, lambda t: t[..., :1]), ValueError, shape))
    return refusals


def wrong_rows(case: AnyStep) -> list[Refusal]:
    """Strides of activations, whose last axis must be contiguous."""
    words = words_of(case)
    message = r" must be contiguous along its last axis, got strides \("
    return [
        (f"{name} {what}", only(name, change), ValueError, f"^{name}{message}")
        for name in (words.main, *words.per_column, *words.optional_rows, "out")
        for what, change in (("strided", strided), ("expanded", lambda t: t[..., :1].expand_as(t)))
    ]


def wrong_out(case: AnyStep) -> list[Refusal]:
    overlaps = r"^out must not overlap itself, got strides \("
    refusals: list[Refusal] = [
        (f"out expanded over {word}", only("out", change), ValueError, overlaps)
        for axis, word in enumerate((*token_axes(case), words_of(case).heads))
        for change in [lambda t, axis=axis: t.narrow(axis, 0, 1).expand_as(t)]
    ]
    overlapping = only("out", lambda t: t.as_strided(t.shape, (*t.stride()[:-2], 3, 1)))
    return [
        *refusals,
        ("out with overlapping heads", overlapping, ValueError, overlaps),
        ("out float32 for float16", only("out", Tensor.float), TypeError, r"^out must be float16, got float32"),
    ]


def wrong_groups(case: AnyStep) -> list[Refusal]:
    words = words_of(case)
    main, (first, second) = words.main, words.per_column
    refusals: list[Refusal] = [
        (
            f"{n} {words.groups} for 4 heads",
            given(**{first: value, second: value}),
            ValueError,
            f"^{first} must have a {words.divides}, got {n}",
        )
        for n in (0, 3, 8)
        for value in [torch.zeros(*case.token_axes, n, 5)]
    ]
    other = rf"^{second} must have shape .*{words.groups}=2.*\), got \("
    refusals.append(
        (f"{second} with other groups than {first}", only(second, lambda t: t[..., :1, :]), ValueError, other)
    )
    for axis, word in enumerate(token_axes(case)):
        resize = only(main, lambda t, axis=axis: resized(t, axis, 1))
        size = case.token_axes[axis] + 1
        refusals.append(
            (f"{main} with {word} +1", resize, ValueError, rf"^{first} must have shape \(.*{word}={size}, ")
        )
    return refusals


def tensor_refusals(case: AnyStep) -> list[Refusal]:
    """Of cases with parameters per row or channel there are only those that have another form then."""
    if isinstance(case, DeltaCase) and case.per_channel:
        names: tuple[str, ...] = ("a", "dt_bias")
    elif isinstance(case, Case) and case.mamba1:
        names = ("dt", "A", "D", "dt_bias")
    else:
        names = tuple(axes_of(case))
    refusals = [refusal for name in names for refusal in wrong_kinds(case, name)]
    if len(names) < len(axes_of(case)):
        return refusals
    missing: list[Refusal] = [
        (f"{name} missing", given(**{name: None}), TypeError, rf"^{name} must be a tensor, got NoneType")
        for name in words_of(case).required
    ]
    return [*refusals, *wrong_rows(case), *missing, *wrong_out(case), *wrong_groups(case)]


@table_of_forms(ALL, tensor_refusals)
def test_a_wrong_tensor_is_refused_by_name(case: AnyStep, change: Change, error: type[Exception], message: str) -> None:
    is_refused(case, change, error, message)


def slots_refusals(case: AnyStep) -> list[Refusal]:
    words = words_of(case)
    tokens = T if case.tokens else 1
    tree = at(parents=columns(tokens))
    refusals: list[Refusal] = [
        ("slots elsewhere", only("slots", on_meta), ValueError, r"^slots are on meta, but the state is on cpu"),
        (
            "update=False with write",
            both(given(update=False), at(write=lambda t: t)),
            ValueError,
            r"^update=False writes no state, so slots must not have write",
        ),
        (
            "update=False with a slot to write for every token",
            both(given(update=False), at(write=columns(tokens))),
            ValueError,
            r"^update=False writes no state, so slots must not have write",
        ),
        (
            "a tree that is stored in place",
            tree,
            ValueError,
            r"^slots.parents .* needs update=False, or write \(batch, T",
        ),
        (
            "a tree whose last state is stored",
            at(parents=columns(tokens), write=lambda t: t),
            ValueError,
            r"^slots.parents makes a tree, .* needs update=False, or write \(batch, T\)",
        ),
        (
            "a tree whose outputs overwrite its inputs",
            both(given(update=False), tree, lambda a: {"out": a[words.main]}),
            ValueError,
            rf"^out must not be {words.main} with slots.parents",
        ),
        *[
            (f"{name} {value!r}", given(**{name: value}), TypeError, rf"^{name} must be True or False, got {value!r}")
            for name in words.flags
            for value in (1, 0, None, "yes")
        ],
        (
            "accepted counts without slots to choose from",
            at(accepted=torch.ones_like),
            ValueError,
            r"^slots.accepted needs read \(batch, n\) to choose from, got read \(3,\)",
        ),
        (
            "everything on meta",
            lambda a: {name: on_meta(value) for name, value in a.items()},
            ValueError,
            r"^state is on meta; flashstate runs on cuda and cpu",
        ),
    ]
    if case.packed:
        return refusals
    entries = rf"must have an entry for each of the {tokens} tokens, got shape \(3, "
    for n in (tokens - 1, tokens + 1):
        refusals.append((f"write for {n} tokens", at(write=columns(n)), ValueError, rf"^slots.write {entries}{n}\)"))
        other_tree = both(given(update=False), at(parents=columns(n)))
        refusals.append((f"parents for {n} tokens", other_tree, ValueError, rf"^slots.parents {entries}{n}\)"))
    few: Arguments = {"accepted": torch.ones(2, dtype=torch.int64)}
    return [
        *refusals,
        ("slots too short", only("slots", lambda t: t[:2]), ValueError, r"^slots must have 3 rows, .* got 2"),
        ("slots too long", only("slots", lambda t: resized(t, 0, 1)), ValueError, r"^slots must have 3 rows, .* got 4"),
        (
            "a Slots too short",
            only("slots", lambda t: Slots(t[:2], write=t[:2])),
            ValueError,
            r"^slots must have 3 rows",
        ),
        (
            "a table too short",
            only("slots", lambda t: Slots(columns(2)(t[:2]), **few)),
            ValueError,
            r"^slots must have 3",
        ),
        ("slots of rank 2", only("slots", columns(2)), ValueError, r"^slots must have shape \(batch\), got \(3, 2\)"),
        (
            "no slots for a batch larger than the pool",
            lambda a: {"slots": None, "state": State(a["state"].data[:2])},
            ValueError,
            r"^slots must be given for a batch of 3 on a pool of 2 slots",
        ),
    ]


@table_of_forms(PER_HEAD, slots_refusals)
def test_wrong_slots_are_refused_by_name(case: AnyStep, change: Change, error: type[Exception], message: str) -> None:
    is_refused(case, change, error, message)


def without_seed(arguments: Arguments) -> Arguments:
    return {"state": replace(arguments["state"], rounding="nearest", seed=None)}


def rounded(rounding: str) -> Change:
    return only("snapshots", lambda t: State(t, rounding=rounding))


def snapshots_refusals(case: AnyStep) -> list[Refusal]:
    tokens = T if case.tokens else 1
    refusals: list[Refusal] = [
        ("a list", only("snapshots", lambda t: [t]), TypeError, r"^snapshots must be a State or a tensor, got list"),
        ("True", given(snapshots=True), TypeError, r"^snapshots must be a State or a tensor, got bool"),
        ("sparse", only("snapshots", Tensor.to_sparse), TypeError, r"^snapshots must be a dense tensor"),
        ("float64", only("snapshots", Tensor.double), TypeError, r"^snapshots must be float32 or .*, got float64"),
        *[
            (
                str(dtype),
                only("snapshots", lambda t, dtype=dtype: t.to(dtype)),
                ValueError,
                r"^snapshots of dtype \w+ needs a scale: pass State\(data, scale\)",
            )
            for dtype in (torch.int16, torch.int8, torch.float8_e4m3fn)
        ],
        ("of rank 4", only("snapshots", lambda t: t[0]), ValueError, r"^snapshots must have shape \(batch, T, heads,"),
        (
            "of rank 6",
            only("snapshots", lambda t: t[None]),
            ValueError,
            r"^snapshots must have shape \(batch, T, heads,",
        ),
        (
            "a pool",
            lambda a: {"snapshots": a["state"]},
            ValueError,
            r"^snapshots must have data \(batch, T, heads, rows, cols\), got \(7, 4, 6, 5\)",
        ),
        *[
            (
                f"{kind} with {word} {by:+}",
                only("snapshots", lambda t, axis=axis, by=by, wrap=wrap: wrap(resized(t, axis, by))),
                ValueError,
                r"^snapshots must be of states \(4, 6, 5\), got \(",
            )
            for kind, wrap in (("tensor", lambda t: t), ("State", State))
            for axis, word in enumerate(("heads", "rows", "cols"), 2)
            for by in (-1, 1)
        ],
        (
            "of too few rows",
            only("snapshots", lambda t: t[:2]),
            ValueError,
            r"^snapshots must have room for 3 rows, got",
        ),
        (
            "of too few tokens",
            only("snapshots", lambda t: t[:, : tokens - 1]),
            ValueError,
            rf"^snapshots must have room for {tokens} tokens, got shape \(5, {tokens - 1}, 4, 6, 5\)",
        ),
        (
            "of too few tokens for rows of their own",
            both(only("snapshots", lambda t: t[:2, : tokens - 1]), at(snapshot_rows=lambda t: t * 0)),
            ValueError,
            rf"^snapshots must have room for {tokens} tokens, got shape \(2, {tokens - 1}, 4, 6, 5\)",
        ),
        ("strided", only("snapshots", strided), ValueError, r"^snapshots must be contiguous within a slot"),
        (
            "one for all rows",
            only("snapshots", lambda t: t[:1].expand_as(t)),
            ValueError,
            r"^snapshots has overlapping",
        ),
        ("one for all tokens", only("snapshots", lambda t: t[:, :1].expand_as(t)), ValueError, r"^snapshots has overl"),
        ("elsewhere", only("snapshots", on_meta), ValueError, r"^snapshots is on meta, but the state is on cpu"),
        (
            "stochastic without seeds",
            both(rounded("stochastic"), without_seed),
            ValueError,
            r"^snapshots .* need a state with a se",
        ),
    ]
    if case.packed:
        message = r"^snapshots of packed tokens need slots.max_len, the most tokens a row has"
        refusals.append(("without max_len", at(max_len=None), ValueError, message))
    return [(f"snapshots {name}", *rest) for name, *rest in refusals]


@table_of_forms(PER_HEAD, snapshots_refusals)
def test_wrong_snapshots_are_refused_by_name(
    case: AnyStep, change: Change, error: type[Exception], message: str
) -> None:
    is_refused(case, change, error, message)


def state_refusals(case: AnyStep) -> list[Refusal]:
    return [
        *WRONG_SLOTS,
        ("state None", given(state=None), TypeError, r"^state must be a State or a tensor, got NoneType"),
        ("state a list", given(state=[1.0]), TypeError, r"^state must be a State or a tensor, got list"),
        *[
            (f"state {what}", lambda a, change=change: {"state": change(a["state"].data)}, error, message)
            for what, change, error, message in (
                (
                    "int8 without scales",
                    Tensor.char,
                    ValueError,
                    r"^state of dtype int8 needs a scale: pass State\(data, sc",
                ),
                ("float64", Tensor.double, TypeError, r"^state must be float32 or .* or float8_e4m3fn, got float64"),
                ("of rank 3", lambda t: t[0], ValueError, r"^state must have shape \(slots, .*\), got \(4, 6, 5\)"),
                (
                    "of rank 5",
                    lambda t: t[None],
                    ValueError,
                    r"^state must have shape \(slots, .*\), got \(1, 7, 4, 6, 5\)",
                ),
                (
                    "of snapshots",
                    lambda t: State(t[None]),
                    ValueError,
                    r"^state must have data \(slots, .*\), got \(1, 7,",
                ),
                ("empty", lambda t: t[:0], ValueError, r"^state must not be empty"),
                ("strided", strided, ValueError, r"^state must be contiguous within a slot"),
                ("expanded", lambda t: t[:1].expand_as(t), ValueError, r"^state has overlapping slots"),
            )
        ],
        (
            "state elsewhere",
            lambda a: {"state": on_meta(a["state"])},
            ValueError,
            rf"^{words_of(case).main} is on cpu, but the state is on meta",
        ),
    ]


@table_of_forms(ONE_TOKEN, state_refusals)
def test_a_wrong_state_is_refused_by_name(case: AnyStep, change: Change, error: type[Exception], message: str) -> None:
    is_refused(case, change, error, message)


@pytest.mark.parametrize("case", ALL.values(), ids=ALL)
def test_the_call_that_refusals_start_from_is_right(case: AnyStep) -> None:
    arguments = step_arguments(case)
    before = arguments["state"].data.clone()
    assert step_of(case)(**arguments) is arguments["out"]
    assert not (arguments["out"] == 7.0).any()
    assert not torch.equal(arguments["state"].data, before)
    assert not (arguments["snapshots"] == 7.0).all()
