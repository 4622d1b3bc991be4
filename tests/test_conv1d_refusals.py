"""conv1d_step and the windows of pools: wrong input is refused by name and harms nothing."""

from dataclasses import replace

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
    refuses,
    refuses_change,
    resized,
    strided,
    table,
)
from torch import Tensor

import flashstate
from flashstate import Slots, State, StatePool
from flashstate.proof import ConvCase, make_inputs

CPU = torch.device("cpu")
BATCH, CHANNELS, WIDTH, T = 3, 5, 4, 2
CASE = ConvCase(BATCH, CHANNELS, WIDTH, x="float16", tokens=T)


def step_arguments(case: ConvCase = CASE) -> Arguments:
    """All arguments of a call that is right."""
    inputs = make_inputs(case, CPU)
    return {
        "window": inputs.state.data,
        **inputs.arguments,
        **inputs.options,
        "slots": inputs.at() if case.packed else inputs.slots,
        "snapshots": torch.full((5, 6, CHANNELS, WIDTH - 1), 7.0, dtype=torch.float16),
        "update": True,
        "out": torch.full_like(inputs.arguments["x"], 7.0),
        "early": False,
    }


AXES = {
    "window": "slots, channels, length",
    "x": "batch, T, channels=5",
    "weight": "channels=5, width",
    "bias": "channels=5",
    "out": "batch=3, T=2, channels=5",
    "snapshots": "batch, T, channels, width - 1",
}


def wrong_kinds(name: str) -> list[Refusal]:
    """What is wrong for every tensor."""
    only_float16 = name in ("out", "snapshots")
    allowed = "float16" if only_float16 else "float32 or bfloat16 or float16"
    shape = rf"^{name} must have shape \({AXES[name]}\)"
    return [
        (f"{name} a list", only(name, Tensor.tolist), TypeError, rf"^{name} must be a tensor, got list"),
        (f"{name} of int32", only(name, Tensor.int), TypeError, rf"^{name} must be {allowed}, got int32"),
        (f"{name} of higher rank", only(name, lambda t: t[None]), ValueError, shape),
        (f"{name} sparse", only(name, Tensor.to_sparse), TypeError, rf"^{name} must be a dense tensor"),
    ]


ELSEWHERE: list[Refusal] = [
    (f"{name} elsewhere", only(name, on_meta), ValueError, rf"^{name} is on meta, but the state is on cpu")
    for name in ("x", "weight", "bias", "out", "snapshots")
]
ROLLBACK = at(accepted=torch.zeros_like)
RING = given(positions=torch.tensor([1, 2, 3]))
WRONG_STEPS: list[Refusal] = [
    *(refusal for name in AXES for refusal in wrong_kinds(name)),
    *ELSEWHERE,
    *WRONG_SLOTS,
    ("an empty window", only("window", lambda t: t[:0]), ValueError, r"^window must not be empty, got shape \(0"),
    ("overlapping windows", only("window", lambda t: t[:1].expand(7, -1, -1)), ValueError, r"^window must not overlap"),
    ("a short window", only("window", lambda t: t[..., :2]), ValueError, r"^window must have 3 entries or more .*2"),
    ("a window of bfloat16", only("window", Tensor.bfloat16), TypeError, r"^window must be float16 or float32, .*bf"),
    ("a window of other channels", only("window", lambda t: resized(t, 1, 1)), ValueError, r"^weight must have shape"),
    ("x of other channels", only("x", lambda t: resized(t, 2, 1)), ValueError, r"^x must have shape \(.*channels=5\)"),
    ("weight of other channels", only("weight", lambda t: resized(t, 0, 1)), ValueError, r"^weight must have shape"),
    ("width 1", only("weight", lambda t: t[:, :1].clone()), ValueError, r"^weight must have a width from 2 to 6, .*1"),
    ("width 7", only("weight", lambda t: resized(t, 1, 3)), ValueError, r"^weight must have a width from 2 to 6, .*7"),
    ("strided weight", only("weight", strided), ValueError, r"^weight must be contiguous, got strides"),
    ("strided bias", only("bias", strided), ValueError, r"^bias must be contiguous, got strides"),
    ("another activation", given(activation="gelu"), ValueError, r"^activation must be one of silu, None, got 'gelu'"),
    ("a flag as activation", given(activation=True), ValueError, r"^activation must be one of silu, None, got True"),
    ("update as an int", given(update=1), TypeError, r"^update must be True or False, got 1"),
    ("early as an int", given(early=1), TypeError, r"^early must be True or False, got 1"),
    ("out of another shape", only("out", lambda t: t[:, :1].clone()), ValueError, r"^out must have shape"),
    ("overlapping out", only("out", lambda t: t[:1].expand_as(t)), ValueError, r"^out must not overlap itself"),
    ("snapshots of float32", only("snapshots", Tensor.float), TypeError, r"^snapshots must be float16, got float32"),
    ("few snapshots", only("snapshots", lambda t: t[:2]), ValueError, r"^snapshots must have room for 3 rows"),
    ("short snapshots", only("snapshots", lambda t: t[:, :1]), ValueError, r"^snapshots must have room for 2 tokens"),
    ("narrow snapshots", only("snapshots", lambda t: t[..., :2]), ValueError, r"^snapshots must be of states \(5, 3\)"),
    (
        "overlapping snapshots", only("snapshots", lambda t: t[:1].expand_as(t)), ValueError,
        r"^snapshots must not overlap itself",
    ),
    ("no slots", both(given(slots=None), only("window", lambda t: t[:2])), ValueError, r"^slots must be given for"),
    ("too few rows", only("slots", lambda t: t[:2]), ValueError, r"^slots must have 3 rows, as the batch has, got 2"),
    ("write without update", both(at(write=torch.clone), given(update=False)), ValueError, r"^update=False writes no"),
    ("history that is not used", given(history=3), ValueError, r"^history is for windows that roll back"),
    ("no room to roll back", ROLLBACK, ValueError, r"^window must have 5 entries or more to roll back 2 tokens, got 3"),
    ("little history", both(ROLLBACK, given(history=1)), ValueError, r"^history must be from 2 to 3, got 1"),
    ("much history", both(ROLLBACK, given(history=4)), ValueError, r"^history must be from 2 to 3, got 4"),
    ("history as a float", both(ROLLBACK, given(history=3.0)), TypeError, r"^history must be an int, got 3.0"),
    ("a ring that rolls back", both(ROLLBACK, RING), ValueError, r"^positions make a ring, which rolls back by lower"),
    ("few positions", given(positions=torch.tensor([1])), ValueError, r"^positions must have shape \(batch=3\), got"),
    ("float positions", given(positions=torch.ones(3)), TypeError, r"^positions must be int32 or int64, got float32"),
    ("strided positions", given(positions=torch.arange(6)[::2]), ValueError, r"^positions must be contiguous"),
    ("a ring that moves", both(at(write=torch.clone), RING), ValueError, r"^positions make a ring, which is kept"),
    ("a ring per token", both(at(write=columns(T)), RING), ValueError, r"^positions make a ring, which is kept"),
    (
        "a slot per token of longer windows", both(at(write=columns(T)), only("window", lambda t: resized(t, 2, 1))),
        ValueError, r"^slots.write \(batch, T\) needs windows of 3 entries, .* got 4 entries",
    ),
    (
        "a tree with an end", at(parents=lambda t: torch.tensor([-1, 0]).repeat(3, 1)), ValueError,
        r"^slots.parents makes a tree, which has no last state",
    ),
    (
        "a tree in place",
        both(
            at(parents=lambda t: torch.tensor([-1, 0]).repeat(3, 1)), given(update=False),
            lambda arguments: {"out": arguments["x"]},
        ),
        ValueError, r"^out must not be x with slots.parents",
    ),
]  # fmt: skip


@table(WRONG_STEPS)
def test_wrong_input_is_refused(change: Change, error: type[Exception], message: str) -> None:
    refuses_change(flashstate.conv1d_step, step_arguments(), change, error, message)


def test_the_call_that_is_changed_is_right() -> None:
    flashstate.conv1d_step(**step_arguments())


def test_packed_rows_that_roll_back_need_their_longest() -> None:
    arguments = step_arguments(replace(CASE, packed=True))
    unknown = both(at(max_len=None, accepted=torch.zeros_like), given(snapshots=None))
    refuses_change(
        flashstate.conv1d_step, arguments, unknown, ValueError, r"^windows that roll back need slots.max_len"
    )


def test_states_cannot_be_read_at_an_offset() -> None:
    slots = torch.tensor([0, 1])
    x = torch.zeros(2, 1, 2)
    state, B = torch.zeros(2, 1, 2, 3), torch.zeros(2, 1, 3)
    at_offset = Slots(slots, accepted=slots)
    arguments = {"state": state, "x": x, "dt": x[..., 0], "A": -torch.ones(1), "B": B, "C": B, "slots": at_offset}
    message = r"^slots.accepted needs read \(batch, n\) to choose from, got read \(2,\)"
    refuses(lambda: flashstate.mamba2_step(**arguments), ValueError, message, arguments)


def make_pool(**options: object) -> StatePool:
    sizes = {"slots": 4, "layers": 2, "heads": 1, "rows": 2, "cols": 3, "conv_channels": CHANNELS}
    return StatePool.mamba2(**{**sizes, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"conv_channels": -1}, ValueError, r"^conv_channels must be from 0 to"),
        ({"conv_width": 1}, ValueError, r"^conv_width must be from 2 to 6, got 1"),
        ({"conv_width": 7}, ValueError, r"^conv_width must be from 2 to 6, got 7"),
        ({"drafts": -1}, ValueError, r"^drafts must be from 0 to"),
        ({"drafts": 2, "conv_channels": 0}, ValueError, r"^drafts are for windows: conv_channels must be given too"),
        ({"conv_dtype": torch.int8}, TypeError, r"^conv_dtype must be float32 or bfloat16 or float16, got int8"),
        ({"conv_dtype": "float16"}, TypeError, r"^conv_dtype must be .* got 'float16'"),
    ],
)
def test_pools_refuse_wrong_windows(options: Arguments, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_pool(**options)


def test_writing_wrong_windows_is_refused_and_changes_nothing() -> None:
    pool = make_pool()
    slots = pool.acquire(2).tolist()
    right = torch.ones(2, CHANNELS, WIDTH - 1, dtype=torch.bfloat16)
    touched = {"window": pool.window(1)}
    for values, error, message in (
        (right.half(), TypeError, r"^windows must be bfloat16, got float16"),
        (right[:1], ValueError, r"^windows must have shape \(slots=2, channels=5, n\)"),
        (right[:, :2], ValueError, r"^windows must have shape \(slots=2, channels=5, n\)"),
        (torch.ones(2, CHANNELS, 9, dtype=torch.bfloat16), ValueError, r"^windows must have 3 entries or fewer"),
    ):
        refuses(lambda values=values: pool.write_window(1, slots, values), error, message, touched)
    refuses(lambda: pool.write_window(2, slots, right), IndexError, r"^layer must be from 0 to 1, got 2", touched)
    refuses(lambda: pool.write_window(1, [3], right[:1]), ValueError, r"^slots must be held", touched)


def test_a_pool_without_windows_says_so() -> None:
    pool = make_pool(conv_channels=0)
    assert not pool.has_windows
    with pytest.raises(ValueError, match=r"^this pool has no windows"):
        pool.window(0)


def test_wrapping_wrong_windows_is_refused() -> None:
    memory = torch.zeros(3, 40)
    state = State(memory[:, :8].unflatten(1, (1, 2, 4)))
    windows = [memory[:, 8:23].unflatten(1, (5, 3))]
    StatePool.wrap([state], windows=windows)
    with pytest.raises(ValueError, match=r"^drafts are for windows, which must be given too, got drafts=1"):
        StatePool.wrap([state], drafts=1)
    with pytest.raises(ValueError, match=r"^windows\[0\] must have more than 3 entries, which drafts take, got 3"):
        StatePool.wrap([state], windows=windows, drafts=3)
    for wrong, error, message in (
        ([*windows, *windows], ValueError, r"^windows must be a sequence with one tensor per layer, 1, got 2"),
        (windows[0], ValueError, r"^windows must be a sequence with one tensor per layer"),
        ([windows[0][:2]], ValueError, r"^windows\[0\] must have shape \(slots=3, channels, length\)"),
        ([windows[0].int()], TypeError, r"^windows\[0\] must be float32 or bfloat16 or float16, got int32"),
        ([windows[0].to("meta")], ValueError, r"^windows\[0\] is on meta"),
        ([memory[:, 7:22].unflatten(1, (5, 3))], ValueError, r"^windows\[0\] must not share the memory"),
        ([memory[:1, 8:23].unflatten(1, (5, 3)).expand(3, -1, -1)], ValueError, r"^windows\[0\] must not overlap"),
    ):
        with pytest.raises(error, match=message):
            StatePool.wrap([state], windows=wrong)  # type: ignore[arg-type]
