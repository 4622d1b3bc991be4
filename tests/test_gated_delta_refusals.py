"""gated_delta_step: what it alone refuses by name: gates, numbers, tokens that cannot go at once, scaled states."""

import math
from dataclasses import replace

import pytest
import torch
from refusals import (
    DELTA_CASE,
    DELTA_FORMS,
    DELTA_FORMS_PER_CHANNEL,
    Arguments,
    Change,
    Refusal,
    T,
    at,
    both,
    columns,
    given,
    only,
    refuses_change,
    scaled_arguments,
    step_arguments,
    strided,
    table,
    table_of_forms,
    transposed,
)
from torch import Tensor

from flashstate import Slots, debug, gated_delta_step
from flashstate.proof import DeltaCase

PACKED = DELTA_FORMS["packed"]


def refuses_step(arguments: Arguments, change: Change, error: type[Exception], message: str) -> None:
    refuses_change(gated_delta_step, arguments, change, error, message)


def wrong_gates(case: DeltaCase) -> list[Refusal]:
    """Parameters are contiguous, or expanded from one value per head; a per channel has rows as activations have."""
    expanded = r"^dt_bias must be contiguous, or expanded from contiguous values per head, got strides \("
    along_rows = r"^a must be contiguous along its last axis, got strides \("
    one_value = r"^dt_bias must have shape \(HV=4\) where a has one value per head, got \(4, 5\)"
    wider = only("dt_bias", lambda t: t[:, None].repeat(1, 5))
    per_channel: list[Refusal] = [("a strided", only("a", strided), ValueError, along_rows)]
    per_head: list[Refusal] = [("dt_bias per channel where a is per head", wider, ValueError, one_value)]
    return [
        ("A_log strided", only("A_log", strided), ValueError, r"^A_log must be contiguous, got strides \("),
        ("dt_bias strided", only("dt_bias", strided), ValueError, expanded),
        ("dt_bias of one value for all heads", only("dt_bias", lambda t: t[:1].expand_as(t)), ValueError, expanded),
        ("dt_bias without A_log", given(A_log=None), ValueError, r"^dt_bias must come with A_log"),
        *(per_channel if case.per_channel else per_head),
    ]


@table_of_forms({**DELTA_FORMS, **DELTA_FORMS_PER_CHANNEL}, wrong_gates)
def test_wrong_gates_are_refused_by_name(case: DeltaCase, change: Change, error: type[Exception], message: str) -> None:
    refuses_step(step_arguments(case), change, error, message)


OTHER_REFUSALS: list[Refusal] = [
    *[
        (f"scale {value!r}", given(scale=value), TypeError, r"^scale must be a number, got ")
        for value in (True, "1", [1.0], torch.ones(1))
    ],
    *[
        (f"scale {value!r}", given(scale=value), ValueError, r"^scale must be finite in float32, got ")
        for value in (math.inf, -math.inf, math.nan, 1e39, 10**400)
    ],
    (
        "a transposed state of int8",
        lambda a: {"state": transposed(scaled_arguments(torch.int8)["data"])},
        ValueError,
        r"^state of dtype int8 must not be transposed within a slot, because its rows have scales",
    ),
    (
        "a state with heads last",
        lambda a: {"state": a["state"].data.movedim(1, -1).contiguous().movedim(-1, 1)},
        ValueError,
        r"^state must be contiguous within a slot",
    ),
]


@table(OTHER_REFUSALS)
def test_other_wrong_arguments_are_refused_by_name(change: Change, error: type[Exception], message: str) -> None:
    refuses_step(step_arguments(DELTA_CASE), change, error, message)


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


@table_of_forms({form: DELTA_FORMS[form] for form in ("several tokens", "packed")}, at_once_refusals)
def test_what_cannot_go_at_once_is_refused(
    case: DeltaCase, change: Change, error: type[Exception], message: str
) -> None:
    refuses_step(step_arguments(case), change, error, message)


def test_more_than_16_tokens_cannot_go_at_once() -> None:
    many = {**step_arguments(replace(DELTA_CASE, tokens=17)), "snapshots": None}
    refuses_step(many, given(exact=False), ValueError, r"^exact=False is for up to 16 tokens per row, got 17")


@pytest.mark.parametrize("case", DELTA_FORMS.values(), ids=DELTA_FORMS)
def test_the_call_at_once_that_refusals_start_from_is_right(case: DeltaCase) -> None:
    arguments = {**step_arguments(case), **WITHOUT_SNAPSHOTS({})}
    gated_delta_step(**arguments)
    assert not (arguments["out"] == 7.0).any()


@pytest.mark.parametrize(
    "case", [DELTA_CASE, replace(DELTA_CASE, tokens=1), replace(DELTA_CASE, per_channel=True)], ids=str
)
def test_one_token_does_not_care_whether_tokens_may_go_at_once(case: DeltaCase) -> None:
    exact, at_once = (step_arguments(replace(case, qk="float32", exact=exact)) for exact in (True, False))
    for arguments in (exact, at_once):
        gated_delta_step(**arguments)
    for name in ("out", "snapshots"):
        assert torch.equal(exact[name], at_once[name])
    assert torch.equal(exact["state"].data, at_once["state"].data)


def test_rows_longer_than_max_len_are_found_by_debug() -> None:
    arguments = {**step_arguments(PACKED), **WITHOUT_SNAPSHOTS({})}
    slots = arguments["slots"]
    cut = Slots(slots.read, cu_seqlens=slots.cu_seqlens, max_len=2)
    with debug():
        refuses_step(arguments, given(slots=cut), ValueError, r"^slots.cu_seqlens has a row of 3 tokens")
