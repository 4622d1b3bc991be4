"""gated_delta_step: wrong input is refused by name and harms nothing, whatever form its tokens and gates have."""

import math
from dataclasses import replace

import pytest
import torch
from refusals import (
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
    refuses,
    resized,
    scaled_arguments,
    step_arguments,
    strided,
    table,
    table_of_forms,
    transposed,
)
from torch import Tensor

import flashstate
from flashstate import Slots, State
from flashstate.testing import DeltaCase

CASE = DeltaCase(3, 4, 2, 6, 5, format="float16", rounding="stochastic", x="float16", qk="float16")
SEVERAL = replace(CASE, tokens=T)
PACKED = replace(SEVERAL, packed=True)
FORMS = {"one token": CASE, "several tokens": SEVERAL, "packed": PACKED}
ALL_FORMS = {**FORMS, **{f"{form} per channel": replace(case, per_channel=True) for form, case in FORMS.items()}}


def refuses_step(arguments: Arguments, change: Change, error: type[Exception], message: str) -> None:
    wrong = {**arguments, **change(arguments)}
    touched = {**arguments, **{f"wrong {name}": value for name, value in wrong.items()}}
    refuses(lambda: flashstate.gated_delta_step(**wrong), error, message, touched)


def token_axes(case: DeltaCase) -> tuple[str, ...]:
    return ("tokens",) if case.packed else ("batch", "T") if case.tokens else ("batch",)


def axes_of(case: DeltaCase) -> dict[str, tuple[str, ...]]:
    """The axes of every tensor but `state`, `slots` and `snapshots`."""
    tokens, channels = token_axes(case), ("K",) if case.per_channel else ()
    return {
        **dict.fromkeys(("v", "out"), (*tokens, "HV", "V")),
        **dict.fromkeys(("q", "k"), (*tokens, "H", "K")),
        "a": (*tokens, "HV", *channels),
        "b": (*tokens, "HV"),
        "A_log": ("HV",),
        "dt_bias": ("HV", *channels),
    }


def ranks(case: DeltaCase, name: str) -> list[Refusal]:
    """Wrong ranks. A v that lacks or has a token axis is of the other dense form, which q is not; and an a or dt_bias
    has one axis more or less per channel."""
    refusals = []
    for what, change, also_dense in (
        ("of lower rank", lambda t: t[0], case.tokens > 0),
        ("of higher rank", lambda t: t[None], case.tokens == 0),
        ("of much higher rank", lambda t: t[None, None, None], False),
    ):
        blamed = "q" if name == "v" and also_dense and not case.packed else name
        message = rf"^{blamed} must have shape \({axes_of(case)[name][0]}.*\), got \("
        refusals.append((f"{name} {what}", only(name, change), ValueError, message))
    return refusals


def wrong_kinds(case: DeltaCase, name: str) -> list[Refusal]:
    """What is wrong for every tensor argument but `state`, `slots` and `snapshots`."""
    allowed = "float16" if name == "out" else "float32 or bfloat16 or float16"
    axes = axes_of(case)[name]
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
    measured_by = {("v", axis) for axis in token_axes(case)} | {("q", "H")}  # others must have these sizes
    for axis, word in enumerate(axes):
        for by in (-1, 1) if (name, word) not in measured_by else ():
            resize = only(name, lambda t, axis=axis, by=by: resized(t, axis, by))
            refusals.append((f"{name} with {word} {by:+}", resize, ValueError, shape))
    return refusals


def wrong_strides(case: DeltaCase) -> list[Refusal]:
    """Of activations, whose last axis must be contiguous, and of parameters, which are as a whole or are expanded from
    one value per head."""
    along_rows = r" must be contiguous along its last axis, got strides \("
    expanded = r" must be contiguous, or expanded from contiguous values per head, got strides \("
    rows = ("q", "k", "v", "out", *(("a",) if case.per_channel else ()))
    refusals: list[Refusal] = [
        *[(f"{name} strided", only(name, strided), ValueError, f"^{name}{along_rows}") for name in rows],
        *[
            (f"{name} expanded", only(name, lambda t: t[..., :1].expand_as(t)), ValueError, f"^{name}{along_rows}")
            for name in ("q", "k", "v", "out")
        ],
        ("A_log strided", only("A_log", strided), ValueError, r"^A_log must be contiguous, got strides \("),
        ("dt_bias strided", only("dt_bias", strided), ValueError, f"^dt_bias{expanded}"),
        (
            "dt_bias of one value for all heads",
            only("dt_bias", lambda t: t[:1].expand_as(t)),
            ValueError,
            f"^dt_bias{expanded}",
        ),
    ]
    for axis, word in enumerate((*token_axes(case), "HV")):
        over = only("out", lambda t, axis=axis: t.narrow(axis, 0, 1).expand_as(t))
        refusals.append(
            (f"out expanded over {word}", over, ValueError, r"^out must not overlap itself, got strides \(")
        )
    overlapping = only("out", lambda t: t.as_strided(t.shape, (*t.stride()[:-2], 3, 1)))
    refusals.append(("out with overlapping heads", overlapping, ValueError, r"^out must not overlap itself, got str"))
    return refusals


def wrong_heads(case: DeltaCase) -> list[Refusal]:
    divides = r"^q must have a number of heads that divides the 4 value heads, got "
    refusals: list[Refusal] = [
        (f"{n} key heads for 4 value heads", given(q=value, k=value), ValueError, f"{divides}{n}")
        for n in (0, 3, 8)
        for value in [torch.zeros(*case.token_axes, n, 5)]
    ]
    fewer = only("k", lambda t: t[..., :1, :])
    refusals.append(("k with other heads than q", fewer, ValueError, r"^k must have shape .*H=2.*\), got \("))
    for axis, word in enumerate(token_axes(case)):
        resize = only("v", lambda t, axis=axis: resized(t, axis, 1))
        size = case.token_axes[axis] + 1
        refusals.append((f"v with {word} +1", resize, ValueError, rf"^q must have shape \(.*{word}={size}, "))
    return refusals


def tensor_refusals(case: DeltaCase) -> list[Refusal]:
    """Of gates per channel there are only those that have another form then."""
    names = ("a", "dt_bias") if case.per_channel else tuple(axes_of(case))
    missing: list[Refusal] = [
        (f"{name} missing", given(**{name: None}), TypeError, rf"^{name} must be a tensor, got NoneType")
        for name in ("q", "k", "v", "a", "b")
    ]
    return [
        *[refusal for name in names for refusal in wrong_kinds(case, name)],
        *wrong_strides(case),
        *([] if case.per_channel else missing + wrong_heads(case)),
    ]


@table_of_forms(ALL_FORMS, tensor_refusals)
def test_a_wrong_tensor_is_refused_by_name(
    case: DeltaCase, change: Change, error: type[Exception], message: str
) -> None:
    refuses_step(step_arguments(case), change, error, message)


def other_refusals(case: DeltaCase) -> list[Refusal]:
    """Wrong numbers, flags and slots."""
    tokens = T if case.tokens else 1
    tree = at(parents=columns(tokens))
    refusals: list[Refusal] = [
        *[
            (f"scale {value!r}", given(scale=value), TypeError, r"^scale must be a number, got ")
            for value in (True, "1", [1.0], torch.ones(1))
        ],
        *[
            (f"scale {value!r}", given(scale=value), ValueError, r"^scale must be finite in float32, got ")
            for value in (math.inf, -math.inf, math.nan, 1e39, 10**400)
        ],
        *[
            (f"{name} {value!r}", given(**{name: value}), TypeError, rf"^{name} must be True or False, got {value!r}")
            for name in ("qk_l2norm", "exact", "update", "early")
            for value in (1, 0, None, "yes")
        ],
        ("dt_bias without A_log", given(A_log=None), ValueError, r"^dt_bias must come with A_log"),
        (
            "dt_bias per channel where a is per head",
            only("dt_bias", lambda t: t[:, None].repeat(1, 5)),
            ValueError,
            r"^dt_bias must have shape \(HV=4\) where a has one value per head, got \(4, 5\)",
        ),
        (
            "update=False with write",
            both(given(update=False), at(write=lambda t: t)),
            ValueError,
            r"^update=False writes no state, so slots must not have write",
        ),
        ("a tree that is stored in place", tree, ValueError, r"^slots.parents .* needs update=False, or write \(batch"),
        (
            "a tree whose outputs overwrite its inputs",
            both(given(update=False), tree, lambda a: {"out": a["v"]}),
            ValueError,
            r"^out must not be v with slots.parents",
        ),
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
        (
            "snapshots of other states",
            only("snapshots", lambda t: resized(t, 3, 1)),
            ValueError,
            r"^snapshots must be of states \(4, 6, 5\), got \(4, 7, 5\)",
        ),
        (
            "snapshots of too few tokens",
            only("snapshots", lambda t: t[:, : tokens - 1]),
            ValueError,
            rf"^snapshots must have room for {tokens} tokens, got shape",
        ),
    ]
    if case.packed:
        unknown = r"^snapshots of packed tokens need slots.max_len, the most tokens a row has"
        return [*refusals, ("snapshots without max_len", at(max_len=None), ValueError, unknown)]
    entries = rf"must have an entry for each of the {tokens} tokens, got shape \(3, "
    wide = tokens + 1
    return [
        *refusals,
        ("slots too short", only("slots", lambda t: t[:2]), ValueError, r"^slots must have 3 rows, .* got 2"),
        ("write for more tokens", at(write=columns(wide)), ValueError, rf"^slots.write {entries}{wide}\)"),
        (
            "no slots for a batch larger than the pool",
            lambda a: {"slots": None, "state": State(a["state"].data[:2])},
            ValueError,
            r"^slots must be given for a batch of 3 on a pool of 2 slots",
        ),
    ]


@table_of_forms(FORMS, other_refusals)
def test_wrong_numbers_flags_and_slots_are_refused_by_name(
    case: DeltaCase, change: Change, error: type[Exception], message: str
) -> None:
    refuses_step(step_arguments(case), change, error, message)


NO_STATES = r"^exact=False has no states between tokens, so "
WITHOUT_SNAPSHOTS = given(exact=False, snapshots=None)


def at_once_refusals(case: DeltaCase) -> list[Refusal]:
    halves = r"^exact=False needs q and k that are both bfloat16 or both float16, got "
    refusals: list[Refusal] = [
        (
            "float32",
            both(WITHOUT_SNAPSHOTS, only("q", Tensor.float), only("k", Tensor.float)),
            ValueError,
            f"{halves}float32 and float32",
        ),
        (
            "float32 k",
            both(WITHOUT_SNAPSHOTS, only("k", Tensor.float)),
            ValueError,
            f"{halves}float16 and float32",
        ),
        ("mixed", both(WITHOUT_SNAPSHOTS, only("q", Tensor.bfloat16)), ValueError, f"{halves}bfloat16 and float16"),
        (
            "per channel",
            both(WITHOUT_SNAPSHOTS, only("a", lambda t: t[..., None].repeat_interleave(5, -1))),
            ValueError,
            r"^exact=False needs one a per head, not one per channel, got shape \(",
        ),
        ("snapshots", given(exact=False), ValueError, f"{NO_STATES}there are no snapshots"),
        (
            "a slot for every token",
            both(WITHOUT_SNAPSHOTS, at(write=columns(T))),
            ValueError,
            rf"{NO_STATES}slots must not have write \(batch, T\)",
        ),
        (
            "a tree",
            both(WITHOUT_SNAPSHOTS, given(update=False), at(parents=columns(T))),
            ValueError,
            f"{NO_STATES}slots must not have parents",
        ),
    ]
    if case.packed:
        refusals += [
            (
                "rows of unknown length",
                both(WITHOUT_SNAPSHOTS, at(max_len=None)),
                ValueError,
                r"^exact=False with packed tokens needs slots.max_len, the most tokens a row has",
            ),
            (
                "rows of 17 tokens",
                both(WITHOUT_SNAPSHOTS, at(max_len=17)),
                ValueError,
                r"^exact=False is for up to 16 tokens per row, got 17",
            ),
        ]
    return refusals


@table_of_forms({"several tokens": SEVERAL, "packed": PACKED}, at_once_refusals)
def test_what_cannot_go_at_once_is_refused(
    case: DeltaCase, change: Change, error: type[Exception], message: str
) -> None:
    refuses_step(step_arguments(case), change, error, message)


def test_more_than_16_tokens_cannot_go_at_once() -> None:
    many = {**step_arguments(replace(CASE, tokens=17)), "snapshots": None}
    refuses_step(many, given(exact=False), ValueError, r"^exact=False is for up to 16 tokens per row, got 17")


def scaled_and_transposed(arguments: Arguments) -> Arguments:
    data = scaled_arguments(torch.int8)["data"]
    return {"state": transposed(data)}


STATE_REFUSALS: list[Refusal] = [
    *WRONG_SLOTS,
    ("state None", given(state=None), TypeError, r"^state must be a State or a tensor, got NoneType"),
    (
        "a transposed state of int8",
        scaled_and_transposed,
        ValueError,
        r"^state of dtype int8 must not be transposed within a slot, because its rows have scales",
    ),
    *[
        (f"state {what}", lambda a, change=change: {"state": change(a["state"].data)}, error, message)
        for what, change, error, message in (
            ("int8 without scales", Tensor.char, ValueError, r"^state of dtype int8 needs a scale"),
            ("float64", Tensor.double, TypeError, r"^state must be float32 or .* or float8_e4m3fn, got float64"),
            ("of rank 3", lambda t: t[0], ValueError, r"^state must have shape \(slots, .*\), got \(4, 6, 5\)"),
            ("of snapshots", lambda t: State(t[None]), ValueError, r"^state must have data \(slots, .*\), got \(1, 7,"),
            ("empty", lambda t: t[:0], ValueError, r"^state must not be empty"),
            ("strided", strided, ValueError, r"^state must be contiguous within a slot"),
            (
                "with heads last",
                lambda t: t.movedim(1, -1).contiguous().movedim(-1, 1),
                ValueError,
                r"^state must be c",
            ),
            ("expanded", lambda t: t[:1].expand_as(t), ValueError, r"^state has overlapping slots"),
        )
    ],
    (
        "state elsewhere",
        lambda a: {"state": on_meta(a["state"])},
        ValueError,
        r"^v is on cpu, but the state is on meta",
    ),
]


@table(STATE_REFUSALS)
def test_a_wrong_state_is_refused_by_name(change: Change, error: type[Exception], message: str) -> None:
    refuses_step(step_arguments(CASE), change, error, message)


@pytest.mark.parametrize("case", ALL_FORMS.values(), ids=ALL_FORMS)
def test_the_call_that_refusals_start_from_is_right(case: DeltaCase) -> None:
    arguments = step_arguments(case)
    before = arguments["state"].data.clone()
    assert flashstate.gated_delta_step(**arguments) is arguments["out"]
    assert not (arguments["out"] == 7.0).any()
    assert not torch.equal(arguments["state"].data, before)
    assert not (arguments["snapshots"] == 7.0).all()


@pytest.mark.parametrize("case", FORMS.values(), ids=FORMS)
def test_the_call_at_once_that_refusals_start_from_is_right(case: DeltaCase) -> None:
    arguments = {**step_arguments(case), **WITHOUT_SNAPSHOTS({})}
    flashstate.gated_delta_step(**arguments)
    assert not (arguments["out"] == 7.0).any()


@pytest.mark.parametrize("case", [CASE, replace(CASE, tokens=1), replace(CASE, per_channel=True)], ids=str)
def test_one_token_does_not_care_whether_tokens_may_go_at_once(case: DeltaCase) -> None:
    exact, at_once = (step_arguments(replace(case, qk="float32", exact=exact)) for exact in (True, False))
    for arguments in (exact, at_once):
        flashstate.gated_delta_step(**arguments)
    for name in ("out", "snapshots"):
        assert torch.equal(exact[name], at_once[name])
    assert torch.equal(exact["state"].data, at_once["state"].data)


def test_rows_longer_than_max_len_are_found_by_debug() -> None:
    arguments = {**step_arguments(PACKED), **WITHOUT_SNAPSHOTS({})}
    slots = arguments["slots"]
    cut = Slots(slots.read, cu_seqlens=slots.cu_seqlens, max_len=2)
    with flashstate.debug():
        refuses_step(arguments, given(slots=cut), ValueError, r"^slots.cu_seqlens has a row of 3 tokens")
