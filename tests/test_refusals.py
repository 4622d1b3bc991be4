"""State, Slots, advance and mamba2_step: wrong input is refused by name and harms nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from refusals import (
    CASE,
    Change,
    Refusal,
    given,
    only,
    refuses,
    resized,
    state_arguments,
    step_arguments,
    strided,
    table,
)
from torch import Tensor

import flashstate
from flashstate import Slots, State

CPU = torch.device("cpu")
META = torch.device("meta")


def empty_along(axis: int) -> tuple[int, ...]:
    return tuple(0 if i == axis else size for i, size in enumerate((3, 2, 4, 8)))


STATE_REFUSALS: list[Refusal] = [
    ("data missing", given(data=None), TypeError, r"^data must be a tensor, got NoneType"),
    ("data a list", only("data", Tensor.tolist), TypeError, r"^data must be a tensor, got list"),
    ("data a State", given(data=State(torch.zeros(1, 1, 1, 1))), TypeError, r"^data must be a tensor, got State"),
    *[
        (
            f"data {kind}",
            only("data", lambda t, kind=kind: t.to(getattr(torch, kind))),
            TypeError,
            rf"^data must be float32 or bfloat16 or float16, got {kind}",
        )
        for kind in ("int8", "int16", "float64", "bool", "complex64", "float8_e4m3fn")
    ],
    ("data of rank 3", only("data", lambda t: t[0]), ValueError, r"^data must have shape .* got \(2, 4, 8\)"),
    ("data of rank 5", only("data", lambda t: t[None]), ValueError, r"^data must have shape .* got \(1, 3, 2, 4, 8\)"),
    ("data of rank 0", only("data", lambda t: t[0, 0, 0, 0]), ValueError, r"^data must have shape .* got \(\)"),
    *[
        (f"data empty along {axis}", given(data=torch.zeros(size)), ValueError, r"^data must not be empty, got shape")
        for axis in range(4)
        for size in [empty_along(axis)]
    ],
    *[
        (
            f"data with axes {i} and {j} swapped",
            given(data=torch.zeros(3, 4, 4, 4).transpose(i, j)),
            ValueError,
            r"^data must be contiguous within a slot: strides .* got \(",
        )
        for i, j in ((1, 2), (1, 3), (2, 3), (0, 3), (0, 1))
    ],
    ("data with strided columns", only("data", strided), ValueError, r"^data must be contiguous within a slot"),
    (
        "data with gaps between heads",
        given(data=torch.zeros(3, 4, 4, 8)[:, ::2]),
        ValueError,
        r"^data must be contiguous within a slot",
    ),
    (
        "data with gaps between rows",
        given(data=torch.zeros(3, 2, 4, 9)[..., :8]),
        ValueError,
        r"^data must be contiguous within a slot",
    ),
    (
        "data expanded over slots",
        given(data=torch.zeros(1, 2, 4, 8).expand(3, 2, 4, 8)),
        ValueError,
        r"^data has overlapping slots: slot stride 0, slot size 64",
    ),
    (
        "data with slots that overlap by one element",
        given(data=torch.zeros(200).as_strided((3, 2, 4, 8), (63, 32, 8, 1))),
        ValueError,
        r"^data has overlapping slots: slot stride 63, slot size 64",
    ),
    (
        "data with 2^31 elements per slot",
        given(data=torch.zeros(3, 1 << 11, 1 << 10, 1 << 10, device=META)),
        ValueError,
        r"^data must have fewer than 2\^31 elements per slot, got 2147483648",
    ),
    ("rounding unknown", given(rounding="up"), ValueError, r"^rounding must be one of nearest, .* got 'up'"),
    ("rounding None", given(rounding=None), ValueError, r"^rounding must be one of nearest, .* got None"),
    ("rounding a bool", given(rounding=True), ValueError, r"^rounding must be one of nearest, .* got True"),
    (
        "stochastic on float32",
        only("data", Tensor.float),
        ValueError,
        r"^rounding='stochastic' is not for float32, which has nearest",
    ),
    (
        "stochastic_hw on bfloat16",
        lambda a: {"data": a["data"].bfloat16(), "rounding": "stochastic_hw"},
        ValueError,
        r"^rounding='stochastic_hw' is not for bfloat16, which has nearest, stochastic",
    ),
    (
        "stochastic_hw on a CPU",
        given(rounding="stochastic_hw"),
        ValueError,
        r"^rounding='stochastic_hw' needs an NVIDIA GPU .* got cpu",
    ),
    ("stochastic without seed", given(seed=None), ValueError, r"^rounding='stochastic' needs seed: \(slots,\) int64"),
    (
        "stochastic_hw without seed",
        given(seed=None, rounding="stochastic_hw"),
        ValueError,
        r"^rounding='stochastic_hw' needs",
    ),
    ("seed a list", given(seed=[5, -6, 7]), TypeError, r"^seed must be a tensor, got list"),
    ("seed an int", given(seed=5), TypeError, r"^seed must be a tensor, got int"),
    ("seed int32", only("seed", Tensor.int), TypeError, r"^seed must be int64, got int32"),
    ("seed float32", only("seed", Tensor.float), TypeError, r"^seed must be int64, got float32"),
    ("seed too short", only("seed", lambda t: t[:2]), ValueError, r"^seed must have shape \(slots=3\), got \(2,\)"),
    (
        "seed too long",
        only("seed", lambda t: resized(t, 0, 1)),
        ValueError,
        r"^seed must have shape \(slots=3\), got \(4,\)",
    ),
    ("seed of rank 0", only("seed", lambda t: t[0]), ValueError, r"^seed must have shape \(slots=3\), got \(\)"),
    ("seed of rank 2", only("seed", lambda t: t[:, None]), ValueError, r"^seed must have shape \(slots=3\)"),
    ("seed strided", only("seed", strided), ValueError, r"^seed must be contiguous, got stride 2"),
    ("seed expanded", only("seed", lambda t: t[:1].expand(3)), ValueError, r"^seed must be contiguous, got stride 0"),
    ("seed elsewhere", only("seed", lambda t: t.to(META)), ValueError, r"^seed is on meta, but the state is on cpu"),
    *[
        (f"{name} {value!r}", given(**{name: value}), TypeError, rf"^{name} must be an int, got {value!r}")
        for name in ("rounds", "stream")
        for value in ("10", 10.0, None, True)
    ],
    *[
        (f"{name} {value}", given(**{name: value}), ValueError, rf"^{name} must be from {allowed}, got {value}")
        for name, allowed, values in (("rounds", "1 to 16", (-1, 0, 17)), ("stream", "0 to 4294967295", (-1, 1 << 32)))
        for value in values
    ],
]


@table(STATE_REFUSALS)
def test_state_refuses_by_name_and_changes_nothing(change: Change, error: type[Exception], message: str) -> None:
    arguments = state_arguments()
    wrong = {**arguments, **change(arguments)}
    refuses(lambda: State(**wrong), error, message, {**arguments, "wrong": wrong["data"]})


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_state_takes_the_extremes_it_allows(rounding: str) -> None:
    for rounds, stream in ((1, 0), (16, (1 << 32) - 1)):
        state = State(**{**state_arguments(), "rounding": rounding, "rounds": rounds, "stream": stream})
        assert (state.rounding, state.rounds, state.stream) == (rounding, rounds, stream)
    largest = torch.zeros(1, 1, (1 << 31) - 1, 1, dtype=torch.float16, device=META)
    assert State(largest).bytes_per_slot == (1 << 32) - 2


def test_state_refuses_what_is_positional_but_data() -> None:
    with pytest.raises(TypeError, match="positional"):
        State(torch.zeros(1, 1, 1, 1), "nearest")  # type: ignore[misc]


WRONG_INDICES = (
    ("int16", Tensor.short, TypeError, r"^{name} must be int32 or int64, got int16"),
    ("float32", Tensor.float, TypeError, r"^{name} must be int32 or int64, got float32"),
    ("bool", Tensor.bool, TypeError, r"^{name} must be int32 or int64, got bool"),
    ("of rank 0", lambda t: t[0], ValueError, r"^{name} must have shape \(batch.*\), got \(\)"),
    ("of rank 2", lambda t: t[:, None], ValueError, r"^{name} must have shape \(batch.*\), got \(3, 1\)"),
)

SLOTS_REFUSALS: list[Refusal] = [
    *[
        (f"{name} {what}", only(name, change), error, message.format(name=name))
        for name in ("read", "write")
        for what, change, error, message in (
            ("a list", Tensor.tolist, TypeError, r"^{name} must be a tensor, got list"),
            ("an int", lambda t: 3, TypeError, r"^{name} must be a tensor, got int"),
            *WRONG_INDICES,
        )
    ],
    ("read missing", given(read=None), TypeError, r"^read must be a tensor, got NoneType"),
    ("write too short", only("write", lambda t: t[:2]), ValueError, r"^write must have shape \(batch=3\), got \(2,\)"),
    ("write too long", only("write", lambda t: resized(t, 0, 1)), ValueError, r"^write must have shape \(batch=3\)"),
    ("write elsewhere", only("write", lambda t: t.to(META)), ValueError, r"^write is on meta, read on cpu"),
    ("read elsewhere", only("read", lambda t: t.to(META)), ValueError, r"^write is on cpu, read on meta"),
    *[
        (f"null {null!r}", given(null=null), TypeError, r"^null must be an int, got ")
        for null in (None, 1.0, "0", True, torch.tensor(0))
    ],
    *[
        (f"null {name}", given(null=null), ValueError, rf"^null must be from -9223372036854775808 to .* got {null}")
        for name, null in (("2^63", 1 << 63), ("-2^63 - 1", -(1 << 63) - 1))
    ],
]


@table(SLOTS_REFUSALS)
def test_slots_refuses_by_name_and_changes_nothing(change: Change, error: type[Exception], message: str) -> None:
    arguments = {"read": torch.tensor([2, 0, 1]), "write": torch.tensor([4, 5, 3]), "null": -1}
    wrong = {**arguments, **change(arguments)}
    refuses(lambda: Slots(wrong["read"], write=wrong["write"], null=wrong["null"]), error, message, arguments)


def test_a_sparse_tensor_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"^read must be a dense tensor"):
        Slots(torch.tensor([1, 0]).to_sparse())


def test_slots_takes_both_index_types_and_every_64_bit_null() -> None:
    for null in (-(1 << 63), -1, 0, (1 << 63) - 1):
        slots = Slots(torch.tensor([1], dtype=torch.int32), write=torch.tensor([2]), null=null)
        assert slots.null == null


STATE_SLOTS = (
    ("a list", Tensor.tolist, TypeError, r"^slots must be a Slots, an index tensor or None, got list"),
    ("an int", lambda t: 1, TypeError, r"^slots must be a Slots, an index tensor or None, got int"),
    *WRONG_INDICES,
    ("elsewhere", lambda t: t.to(META), ValueError, r"^slots (is|are) on meta, but the state is on cpu"),
    ("a Slots elsewhere", lambda t: Slots(t.to(META)), ValueError, r"^slots (is|are) on meta, but the state is on cpu"),
)
WRONG_SLOTS: list[Refusal] = [
    (f"slots {what}", only("slots", change), error, message.format(name="slots"))
    for what, change, error, message in STATE_SLOTS
]

ADVANCE_REFUSALS: list[Refusal] = [
    *WRONG_SLOTS,
    ("state without seed", lambda a: {"state": State(a["state"].data)}, ValueError, r"^advance needs .* seed"),
    (
        "state on meta",
        lambda a: {"state": on_meta(a["state"]), "slots": None},
        ValueError,
        r"^state is on meta; flashstate runs on cuda and cpu",
    ),
]


def on_meta(value: Any) -> Any:
    if isinstance(value, State):
        seed = None if value.seed is None else value.seed.to(META)
        return State(value.data.to(META), rounding=value.rounding, seed=seed)
    return value.to(META) if isinstance(value, Tensor) else value


@table(ADVANCE_REFUSALS)
def test_advance_refuses_by_name_and_changes_nothing(change: Change, error: type[Exception], message: str) -> None:
    arguments = step_arguments()
    wrong = {**arguments, **change(arguments)}
    refuses(lambda: wrong["state"].advance(wrong["slots"]), error, message, arguments)


POOL = CASE.slots
AXES = {
    "x": ("batch", "heads", "rows"),
    "z": ("batch", "heads", "rows"),
    "out": ("batch", "heads", "rows"),
    "B": ("batch", "groups", "cols"),
    "C": ("batch", "groups", "cols"),
    "dt": ("batch", "heads"),
    "A": ("heads",),
    "D": ("heads",),
    "dt_bias": ("heads",),
}
FREE = {("x", "batch"), ("B", "groups")}  # the axes that others are measured by


def expanded_to(*sizes: int) -> Callable[[Tensor], Tensor]:
    """Own values along axes that the argument must be tied along."""
    return lambda t: t.reshape(*t.shape, *[1] * len(sizes)).expand(*t.shape, *sizes).contiguous()


def tied_to(*sizes: int) -> Callable[[Tensor], Tensor]:
    return lambda t: t.reshape(*t.shape, *[1] * len(sizes)).expand(*t.shape, *sizes)


def wrong_kinds(name: str) -> list[Refusal]:
    """What is wrong for every tensor argument but `state` and `slots`."""
    allowed = "float16" if name == "out" else "float32 or bfloat16 or float16"
    shape = rf"^{name} must have shape \({AXES[name][0]}.*\), got \("
    refusals: list[Refusal] = [
        (f"{name} a list", only(name, Tensor.tolist), TypeError, rf"^{name} must be a tensor, got list"),
        (f"{name} a float", given(**{name: 1.0}), TypeError, rf"^{name} must be a tensor, got float"),
        (f"{name} of lower rank", only(name, lambda t: t[0]), ValueError, shape),
        (f"{name} of higher rank", only(name, lambda t: t[None]), ValueError, shape),
        (f"{name} of much higher rank", only(name, lambda t: t[None, None, None]), ValueError, shape),
        (f"{name} elsewhere", only(name, on_meta), ValueError, rf"^{name} is on meta, but the state is on cpu"),
    ]
    for kind in ("float64", "int32", "bool"):
        to = only(name, lambda t, kind=kind: t.to(getattr(torch, kind)))
        refusals.append((f"{name} {kind}", to, TypeError, rf"^{name} must be {allowed}, got {kind}"))
    for axis, word in enumerate(AXES[name]):
        for by in (-1, 1) if (name, word) not in FREE else ():
            resize = only(name, lambda t, axis=axis, by=by: resized(t, axis, by))
            refusals.append((f"{name} with {word} {by:+}", resize, ValueError, shape))
    return refusals


def wrong_out(change: Callable[[Tensor], Tensor]) -> Change:
    return only("out", change)


STEP_REFUSALS: list[Refusal] = [
    *[refusal for name in AXES for refusal in wrong_kinds(name)],
    *[
        (f"{name} missing", given(**{name: None}), TypeError, rf"^{name} must be a tensor, got NoneType")
        for name in ("x", "dt", "A", "B", "C")
    ],
    *[
        (f"{name} strided along its last axis", only(name, strided), ValueError, rf"^{name} must be contiguous along")
        for name in ("x", "z", "B", "C", "out")
    ],
    *[
        (f"{name} expanded along its last axis", only(name, change), ValueError, rf"^{name} must be contiguous along")
        for name in ("x", "z", "B", "C", "out")
        for change in [lambda t: t[..., :1].expand_as(t)]
    ],
    *[
        (f"{name} not contiguous", only(name, strided), ValueError, rf"^{name} must be contiguous, got strides \(2,\)")
        for name in ("A", "D", "dt_bias")
    ],
    *[
        (f"{name} one value for all heads", only(name, lambda t: t[:1].expand(4)), ValueError, rf"^{name} must be cont")
        for name in ("A", "D", "dt_bias")
    ],
    *[
        (f"{name} expanded from a strided tensor", only(name, change), ValueError, rf"^{name} must be contiguous")
        for name, change in (
            ("A", lambda t: tied_to(6, 5)(strided(t))),
            ("D", lambda t: tied_to(6)(strided(t))),
            ("dt_bias", lambda t: tied_to(6)(strided(t))),
        )
    ],
    (
        "D of one value per row, transposed",
        given(D=torch.zeros(6, 4).t()),
        ValueError,
        r"^D must be contiguous, got strides \(1, 4\)",
    ),
    *[
        (
            f"{name} with own values along {axis}",
            only(name, change),
            ValueError,
            rf"^{name} must be \({AXES[name][0]}.*\), or expanded from it: got its own values along {axis}",
        )
        for name, axis, change in (
            ("dt", "rows", expanded_to(6)),
            ("A", "rows", expanded_to(6, 5)),
            ("A", "cols", lambda t: expanded_to(5)(t)[:, None].expand(4, 6, 5)),
            ("dt_bias", "rows", expanded_to(6)),
        )
    ],
    *[
        (
            f"{name} expanded to other sizes, {sizes}",
            only(name, tied_to(*sizes)),
            ValueError,
            rf"^{name} must have shap",
        )
        for name, sizes in (("dt", (7,)), ("A", (7, 5)), ("A", (6, 4)), ("A", (6,)), ("D", (5,)), ("dt_bias", (7,)))
    ],
    ("D per row with other rows", given(D=torch.zeros(4, 5)), ValueError, r"^D must have shape .* got \(4, 5\)"),
    *[
        (
            f"{groups} groups for 4 heads",
            given(B=torch.zeros(3, groups, 5), C=torch.zeros(3, groups, 5)),
            ValueError,
            rf"^B must have a number of groups that divides the 4 heads, got {groups}",
        )
        for groups in (0, 3, 8)
    ],
    (
        "C with other groups than B",
        only("C", lambda t: t[:, :1]),
        ValueError,
        r"^C must have shape \(batch=3, groups=2, cols=5\), got \(3, 1, 5\)",
    ),
    ("x with another batch", only("x", lambda t: resized(t, 0, 1)), ValueError, r"^B must have shape \(batch=4, "),
    (
        "out expanded over heads",
        wrong_out(lambda t: t[:, :1].expand_as(t)),
        ValueError,
        r"^out must not overlap itself, got strides \(24, 0, 1\)",
    ),
    ("out expanded over the batch", wrong_out(lambda t: t[:1].expand_as(t)), ValueError, r"^out must not overlap"),
    (
        "out with overlapping heads",
        wrong_out(lambda t: t.as_strided(t.shape, (24, 3, 1))),
        ValueError,
        r"^out must not",
    ),
    ("out of another dtype than x", wrong_out(Tensor.float), TypeError, r"^out must be float16, got float32"),
    *[
        (f"{name} {value!r}", given(**{name: value}), TypeError, rf"^{name} must be True or False, got {value!r}")
        for name in ("dt_softplus", "update")
        for value in (1, 0, None, "yes")
    ],
    *WRONG_SLOTS,
    ("slots too short", only("slots", lambda t: t[:2]), ValueError, r"^slots must have shape \(batch=3\), got \(2,\)"),
    ("slots too long", only("slots", lambda t: resized(t, 0, 1)), ValueError, r"^slots must have shape \(batch=3\)"),
    (
        "a Slots too short",
        only("slots", lambda t: Slots(t[:2], write=t[:2])),
        ValueError,
        r"^slots must have shape \(batch=3\), got \(2,\)",
    ),
    (
        "update=False with write",
        lambda a: {"update": False, "slots": Slots(a["slots"], write=a["slots"])},
        ValueError,
        r"^update=False writes no state, so slots must not have write",
    ),
    (
        "no slots for a batch larger than the pool",
        lambda a: {"slots": None, "state": State(a["state"].data[:2])},
        ValueError,
        r"^slots must be given for a batch of 3 on a pool of 2 slots",
    ),
    ("state None", given(state=None), TypeError, r"^state must be a State or a tensor, got NoneType"),
    ("state a list", given(state=[1.0]), TypeError, r"^state must be a State or a tensor, got list"),
    *[
        (f"state {what}", lambda a, change=change: {"state": change(a["state"].data)}, error, message)
        for what, change, error, message in (
            ("int8", Tensor.char, TypeError, r"^state must be float32 or bfloat16 or float16, got int8"),
            ("float64", Tensor.double, TypeError, r"^state must be float32 or bfloat16 or float16, got float64"),
            ("of rank 3", lambda t: t[0], ValueError, r"^state must have shape \(slots, .*\), got \(4, 6, 5\)"),
            ("empty", lambda t: t[:0], ValueError, r"^state must not be empty"),
            ("strided", strided, ValueError, r"^state must be contiguous within a slot"),
            ("expanded", lambda t: t[:1].expand_as(t), ValueError, r"^state has overlapping slots"),
        )
    ],
    (
        "state elsewhere",
        lambda a: {"state": on_meta(a["state"])},
        ValueError,
        r"^x is on cpu, but the state is on meta",
    ),
    (
        "everything on meta",
        lambda a: {name: on_meta(value) for name, value in a.items()},
        ValueError,
        r"^state is on meta; flashstate runs on cuda and cpu",
    ),
]


@table(STEP_REFUSALS)
def test_mamba2_step_refuses_by_name_and_changes_nothing(change: Change, error: type[Exception], message: str) -> None:
    arguments = step_arguments()
    wrong = {**arguments, **change(arguments)}
    touched = {**arguments, **{f"wrong {name}": value for name, value in wrong.items()}}
    refuses(lambda: flashstate.mamba2_step(**wrong), error, message, touched)


def test_the_call_that_refusals_start_from_is_right() -> None:
    arguments = step_arguments()
    assert flashstate.mamba2_step(**arguments) is arguments["out"]
    assert not (arguments["out"] == 7.0).all()
    State(**state_arguments()).advance(torch.tensor([2, 0, 1]))
