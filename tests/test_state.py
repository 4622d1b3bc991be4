"""State, Slots, advance and mamba2_step: wrong input is refused by name and harms nothing; seeds move; faults show."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
import torch
from torch import Tensor

import flashstate
from flashstate import Slots, State
from flashstate.state.faults import fault_flag
from flashstate.testing import Case, interpreted, make_inputs

CPU = torch.device("cpu")
META = torch.device("meta")
SEED_STEP = 0x9E3779B97F4A7C15

Arguments = dict[str, Any]
Change = Callable[[Arguments], Arguments]  # all arguments of a call that is right: those to change to make it wrong
Refusal = tuple[str, Change, type[Exception], str]


def only(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda arguments: {name: change(arguments[name])}


def given(**values: Any) -> Change:
    return lambda arguments: values


def table(refusals: list[Refusal]) -> pytest.MarkDecorator:
    names = [refusal[0] for refusal in refusals]
    assert len(set(names)) == len(names)
    return pytest.mark.parametrize(("change", "error", "message"), [r[1:] for r in refusals], ids=names)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Every tensor with memory in an argument, a State or a Slots."""
    if isinstance(value, Tensor):
        if not value.is_meta:
            yield value
    elif isinstance(value, (State, Slots)):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))


def memory_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's storage, so that memory around a view counts too."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def refuses(call: Callable[[], Any], error: type[Exception], message: str, touched: Arguments) -> None:
    """The call raises this, and no tensor that it could reach changes."""
    memory = [memory_of(tensor) for value in touched.values() for tensor in tensors_of(value)]
    before = [region.clone() for region in memory]
    with pytest.raises(error, match=message):
        call()
    assert all(map(torch.equal, memory, before))


def strided(tensor: Tensor) -> Tensor:
    """The same values, every second element of longer rows."""
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


def resized(tensor: Tensor, axis: int, by: int) -> Tensor:
    size = tensor.shape[axis] + by
    return torch.cat([tensor, tensor], axis).narrow(axis, 0, size).clone()


def state_arguments() -> Arguments:
    data = torch.randn(3, 2, 4, 8, generator=torch.Generator().manual_seed(0)).half()
    return {"data": data, "rounding": "stochastic", "rounds": 10, "seed": torch.tensor([5, -6, 7]), "stream": 3}


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


SLOTS_REFUSALS: list[Refusal] = [
    *[
        (f"{name} {what}", only(name, change), error, message.format(name=name))
        for name in ("read", "write")
        for what, change, error, message in (
            ("a list", Tensor.tolist, TypeError, r"^{name} must be a tensor, got list"),
            ("an int", lambda t: 3, TypeError, r"^{name} must be a tensor, got int"),
            ("int16", Tensor.short, TypeError, r"^{name} must be int32 or int64, got int16"),
            ("float32", Tensor.float, TypeError, r"^{name} must be int32 or int64, got float32"),
            ("bool", Tensor.bool, TypeError, r"^{name} must be int32 or int64, got bool"),
            ("of rank 0", lambda t: t[0], ValueError, r"^{name} must have shape \(batch.*\), got \(\)"),
            ("of rank 2", lambda t: t[:, None], ValueError, r"^{name} must have shape \(batch.*\), got \(3, 1\)"),
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
    ("int16", Tensor.short, TypeError, r"^slots must be int32 or int64, got int16"),
    ("float32", Tensor.float, TypeError, r"^slots must be int32 or int64, got float32"),
    ("bool", Tensor.bool, TypeError, r"^slots must be int32 or int64, got bool"),
    ("of rank 0", lambda t: t[0], ValueError, r"^slots must have shape \(batch.*\), got \(\)"),
    ("of rank 2", lambda t: t[:, None], ValueError, r"^slots must have shape \(batch.*\), got \(3, 1\)"),
    ("elsewhere", lambda t: t.to(META), ValueError, r"^slots (is|are) on meta, but the state is on cpu"),
    ("a Slots elsewhere", lambda t: Slots(t.to(META)), ValueError, r"^slots (is|are) on meta, but the state is on cpu"),
)
WRONG_SLOTS: list[Refusal] = [
    (f"slots {what}", only("slots", change), error, message) for what, change, error, message in STATE_SLOTS
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


CASE = Case(batch=3, heads=4, groups=2, rows=6, cols=5, format="float16", rounding="stochastic", x="float16")
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


def step_arguments() -> Arguments:
    """All arguments of a call that is right, `out` and the slots no row has among them."""
    inputs = make_inputs(CASE, CPU)
    out = torch.full_like(inputs.arguments["x"], 7.0)
    return {
        "state": inputs.state,
        **inputs.arguments,
        **inputs.options,
        "slots": inputs.slots,
        "update": True,
        "out": out,
    }


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


def test_state_and_slots_are_frozen() -> None:
    for value in (State(**state_arguments()), Slots(torch.tensor([1]), write=torch.tensor([2]))):
        for field in fields(value):
            with pytest.raises(FrozenInstanceError):
                setattr(value, field.name, getattr(value, field.name))


def test_state_and_slots_keep_the_tensors_they_are_given() -> None:
    arguments = state_arguments()
    state = State(**arguments)
    assert state.data is arguments["data"]
    assert state.seed is arguments["seed"]
    read, write = torch.tensor([1]), torch.tensor([2])
    slots = Slots(read, write=write)
    assert slots.read is read
    assert slots.write is write
    assert Slots(read).write is None
    assert Slots(read).null == -1


def test_a_bare_tensor_is_a_state_and_an_index_tensor_is_slots() -> None:
    runs = []
    for wrap, wrap_slots in ((State, Slots), (lambda t: t, lambda t: t)):
        arguments = step_arguments()
        data = arguments["state"].data
        y = flashstate.mamba2_step(**{**arguments, "state": wrap(data), "slots": wrap_slots(arguments["slots"])})
        runs.append((y, data))
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2), (torch.float16, 2)], ids=str)
def test_bytes_per_slot_counts_state_and_seed_but_not_gaps(dtype: torch.dtype, size: int) -> None:
    data = torch.zeros(3, 100, dtype=dtype)[:, :64].unflatten(1, (2, 4, 8))
    assert State(data).bytes_per_slot == 64 * size
    assert State(data, seed=torch.zeros(3, dtype=torch.int64)).bytes_per_slot == 64 * size + 8


@pytest.fixture
def no_faults() -> Iterator[None]:
    with contextlib.suppress(IndexError):
        flashstate.check_faults()
    yield
    with contextlib.suppress(IndexError):
        flashstate.check_faults()


EVERYWHERE = pytest.mark.parametrize(
    ("device", "implementation"),
    [
        pytest.param(CPU, contextlib.nullcontext, id="reference"),
        pytest.param(CPU, interpreted, id="interpreter", marks=pytest.mark.interpreted),
        pytest.param(torch.device("cuda"), contextlib.nullcontext, id="gpu", marks=pytest.mark.gpu),
    ],
)
Implementation = Callable[[], contextlib.AbstractContextManager[None]]

SEEDS = (0, -1, 1 << 62, -(1 << 63), (1 << 63) - 1, 12345)


def advanced(times: dict[int, int]) -> list[int]:
    """SEEDS after so many steps of each slot, in arithmetic modulo 2^64."""
    words = [(seed + times.get(slot, 0) * SEED_STEP) % (1 << 64) for slot, seed in enumerate(SEEDS)]
    return [word - (1 << 64) if word >> 63 else word for word in words]


def state_with_seeds(device: torch.device) -> State:
    data = torch.full((len(SEEDS), 1, 1, 8), 1.5, dtype=torch.float16, device=device)
    return State(data, rounding="stochastic", seed=torch.tensor(SEEDS, device=device))


@pytest.mark.usefixtures("no_faults")
@EVERYWHERE
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("read", "null", "times"),
    [
        pytest.param([4, 1], -1, {4: 1, 1: 1}, id="exactly the read slots"),
        pytest.param([2, 0, 5, 3, 1, 4], -1, dict.fromkeys(range(6), 1), id="every slot"),
        pytest.param([2, 3, 2, 2], -1, {2: 3, 3: 1}, id="a slot once for every row that reads it"),
        pytest.param([0, 3, 0], 0, {3: 1}, id="not the null slot"),
        pytest.param([-1, -7, 5], -1, {5: 1}, id="not a negative slot"),
        pytest.param([-1, -7, 5], 2, {5: 1}, id="not a negative slot where null is another"),
        pytest.param([1000, 5], 1000, {5: 1}, id="not a null slot past the pool"),
        pytest.param([], -1, {}, id="nothing"),
    ],
)
def test_advance_moves(
    device: torch.device,
    implementation: Implementation,
    index: torch.dtype,
    read: list[int],
    null: int,
    times: dict[int, int],
) -> None:
    state = state_with_seeds(device)
    with implementation():
        state.advance(Slots(torch.tensor(read, dtype=index, device=device), null=null))
    assert state.seed is not None
    assert state.seed.tolist() == advanced(times)
    assert (state.data == 1.5).all()
    flashstate.check_faults()


@EVERYWHERE
def test_advance_takes_an_index_tensor_strided_slots_or_none_for_all(
    device: torch.device, implementation: Implementation
) -> None:
    table = torch.tensor([[3, 0], [1, 0]], device=device)
    for slots, times in ((table[0, :1], {3: 1}), (table[:, 0], {3: 1, 1: 1}), (None, dict.fromkeys(range(6), 1))):
        state = state_with_seeds(device)
        with implementation():
            state.advance(slots)
        assert state.seed is not None
        assert state.seed.tolist() == advanced(times)


@pytest.mark.usefixtures("no_faults")
@EVERYWHERE
@pytest.mark.parametrize("past", [len(SEEDS), 1 << 30])
def test_advance_skips_and_reports_a_slot_past_the_pool(
    device: torch.device, implementation: Implementation, past: int
) -> None:
    state = state_with_seeds(device)
    with implementation():
        state.advance(torch.tensor([2, past, 3], device=device))
    assert state.seed is not None
    assert state.seed.tolist() == advanced({2: 1, 3: 1})
    with pytest.raises(IndexError, match=rf"read slot {past} on {device.type}"):
        flashstate.check_faults()
    flashstate.check_faults()


@EVERYWHERE
def test_a_step_reads_seeds_and_leaves_them(device: torch.device, implementation: Implementation) -> None:
    state, one = state_with_seeds(device), torch.ones(6, 1, 1, device=device)
    cols = torch.ones(6, 1, 8, device=device)
    with implementation():
        flashstate.mamba2_step(state, one, one[..., 0], -one[0, 0], cols, cols)
    assert state.seed is not None
    assert state.seed.tolist() == list(SEEDS)
    assert not (state.data == 1.5).any()


@pytest.mark.usefixtures("no_faults")
@EVERYWHERE
def test_check_faults_raises_once_and_names_what_it_found(device: torch.device, implementation: Implementation) -> None:
    one, cols = torch.ones(3, 1, 1, device=device), torch.ones(3, 1, 8, device=device)
    flashstate.check_faults()
    for read, write, found in (
        ([0, 77, 1], [2, 3, 4], ["read slot 77"]),
        ([0, 2, 1], [5, 3, 88], ["write slot 88"]),
        ([0, 77, 1], [2, 3, 88], ["read slot 77", "write slot 88"]),
        ([-1, 77, -1], [2, 99, 3], ["read slot 77"]),
    ):
        slots = Slots(torch.tensor(read, device=device), write=torch.tensor(write, device=device))
        with implementation():
            flashstate.mamba2_step(state_with_seeds(device), one, one[..., 0], -one[0, 0], cols, cols, slots=slots)
        with pytest.raises(IndexError) as error:
            flashstate.check_faults()
        assert [kind for kind in ("read slot 77", "write slot 88") if kind in str(error.value)] == found
        assert "99" not in str(error.value)
        flashstate.check_faults()


@pytest.mark.usefixtures("no_faults")
def test_the_fault_flag_of_a_cpu_is_one_tensor_that_sticks() -> None:
    flag = fault_flag(CPU)
    assert flag is fault_flag(torch.device("cpu"))
    assert (flag.dtype, flag.tolist()) == (torch.int64, [0, 0])
    state = state_with_seeds(CPU)
    state.advance(torch.tensor([50]))
    state.advance(torch.tensor([1]))
    assert flag.tolist() == [50, 0]
    with pytest.raises(IndexError, match="read slot 50 on cpu"):
        flashstate.check_faults()
    assert flag.tolist() == [0, 0]
