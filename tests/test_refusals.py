"""State, Slots and advance: wrong input is refused by name and harms nothing."""

from typing import Any

import pytest
import torch
from refusals import (
    META,
    WRONG_INDICES,
    WRONG_SLOTS,
    Change,
    Refusal,
    given,
    on_meta,
    only,
    refuses,
    resized,
    scaled_arguments,
    slots_arguments,
    state_arguments,
    step_arguments,
    strided,
    table,
)
from torch import Tensor

from flashstate import Slots, State

FORMATS = r"float32 or bfloat16 or float16 or int16 or int8 or float8_e4m3fn"
SCALED = (torch.int16, torch.int8, torch.float8_e4m3fn)


def zeros(*shape: int, strides: tuple[int, ...] | None = None) -> Change:
    """Other data: zeros of this shape; with strides, in a memory that has room for them."""
    if strides is None:
        return given(data=torch.zeros(shape))
    return given(data=torch.zeros(4000).as_strided(shape, strides))


STATE_REFUSALS: list[Refusal] = [
    ("data missing", given(data=None), TypeError, r"^data must be a tensor, got NoneType"),
    ("data a list", only("data", Tensor.tolist), TypeError, r"^data must be a tensor, got list"),
    ("data a State", given(data=State(torch.zeros(1, 1, 1, 1))), TypeError, r"^data must be a tensor, got State"),
    ("data sparse", only("data", Tensor.to_sparse), TypeError, r"^data must be a dense tensor, got torch.sparse_coo"),
    *[
        (
            f"data {kind}",
            only("data", lambda t, kind=kind: t.to(getattr(torch, kind))),
            TypeError,
            rf"^data must be {FORMATS}, got {kind}",
        )
        for kind in ("float64", "bool", "complex64", "uint8", "int32", "int64", "float8_e5m2", "float8_e4m3fnuz")
    ],
    ("data of rank 0", only("data", lambda t: t[0, 0, 0, 0]), ValueError, r"^data must have shape .* got \(\)"),
    ("data of rank 3", only("data", lambda t: t[0]), ValueError, r"^data must have shape .* got \(2, 4, 8\)"),
    ("data of rank 6", only("data", lambda t: t[None, None]), ValueError, r"^data must have shape .* got \(1, 1, 3,"),
    *[
        (
            f"data empty along {axis}",
            zeros(*[0 if i == axis else 2 for i in range(4)]),
            ValueError,
            r"^data must not be",
        )
        for axis in range(4)
    ],
    *[
        (
            f"snapshots empty along {axis}",
            zeros(*[0 if i == axis else 2 for i in range(5)]),
            ValueError,
            r"^data must n",
        )
        for axis in range(2, 5)
    ],
    *[
        (
            f"data with axes {i} and {j} swapped",
            given(data=torch.zeros(3, 4, 4, 4).transpose(i, j)),
            ValueError,
            r"^data must be contiguous within a slot: strides \(any, .* 1\), got \(",
        )
        for i, j in ((1, 2), (1, 3), (0, 3), (0, 1))
    ],
    *[
        (f"data {what}", change, ValueError, rf"^data must be contiguous within a slot: strides \({want}\), got \(")
        for what, change, want in (
            ("with strided columns", only("data", strided), "any, 32, 8, 1"),
            ("with gaps between heads", zeros(3, 2, 4, 8, strides=(128, 64, 8, 1)), "any, 32, 8, 1"),
            ("with gaps between rows", zeros(3, 2, 4, 8, strides=(72, 36, 9, 1)), "any, 32, 8, 1"),
            ("transposed with gaps between heads", zeros(3, 2, 4, 8, strides=(128, 64, 1, 4)), "any, 32, 8, 1"),
            ("transposed with gaps between columns", zeros(3, 2, 4, 8, strides=(80, 40, 1, 5)), "any, 32, 8, 1"),
            (
                "of snapshots with gaps between heads",
                zeros(2, 3, 2, 4, 8, strides=(300, 100, 40, 8, 1)),
                "any, any, 32, 8, 1",
            ),
        )
    ],
    *[
        (
            f"data {what}",
            zeros(*shape, strides=(*strides, 32, 8, 1)),
            ValueError,
            rf"^data has overlapping slots: an axis of stride {got}, which must be {want} or more",
        )
        for what, shape, strides, got, want in (
            ("expanded over slots", (3, 2, 4, 8), (0,), 0, 64),
            ("with slots that overlap by one element", (3, 2, 4, 8), (63,), 63, 64),
            ("of snapshots expanded over rows", (3, 5, 2, 4, 8), (0, 64), 0, 64),
            ("of snapshots expanded over tokens", (3, 5, 2, 4, 8), (64, 0), 0, 64),
            ("of snapshots with tokens that overlap", (3, 5, 2, 4, 8), (320, 63), 63, 64),
            ("of snapshots with rows that overlap", (3, 5, 2, 4, 8), (319, 64), 319, 320),
            ("of snapshots with rows inside tokens that overlap", (3, 5, 2, 4, 8), (64, 191), 191, 192),
        )
    ],
    *[
        (
            f"data transposed, {what}",
            zeros(*shape, strides=(*strides, 32, 1, 4)),
            ValueError,
            rf"^data has overlapping slots: an axis of stride {got}, which must be 64 or more",
        )
        for what, shape, strides, got in (
            ("expanded over slots", (3, 2, 4, 8), (0,), 0),
            ("with slots that overlap by one element", (3, 2, 4, 8), (63,), 63),
            ("of snapshots expanded over tokens", (3, 5, 2, 4, 8), (64, 0), 0),
        )
    ],
    (
        "data with 2^31 elements per slot",
        given(data=torch.zeros(3, 1 << 11, 1 << 10, 1 << 10, device=META)),
        ValueError,
        r"^data must have fewer than 2\^31 elements per slot, got 2147483648",
    ),
    ("scale for float16", given(scale=torch.ones(3, 2, 4)), ValueError, r"^scale is not for float16"),
    ("scale a word", given(scale="nearest"), ValueError, r"^scale is not for float16"),
    ("rounding unknown", given(rounding="up"), ValueError, r"^rounding must be one of nearest, .* got 'up'"),
    ("rounding None", given(rounding=None), ValueError, r"^rounding must be one of nearest, .* got None"),
    ("rounding a bool", given(rounding=True), ValueError, r"^rounding must be one of nearest, .* got True"),
    (
        "stochastic on float32",
        only("data", Tensor.float),
        ValueError,
        r"^rounding='stochastic' is not for float32, which has nearest",
    ),
    *[
        (
            f"stochastic_hw on {data.dtype}",
            given(data=data, scale=scale, rounding="stochastic_hw"),
            ValueError,
            r"^rounding='stochastic_hw' is not for \w+, which has nearest, stochastic$",
        )
        for data, scale in (
            (torch.zeros(3, 2, 4, 8).bfloat16(), None),
            *[scaled_arguments(dtype).values() for dtype in (torch.int16, torch.int8)],
        )
    ],
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
    ("seed elsewhere", only("seed", on_meta), ValueError, r"^seed is on meta, but the state is on cpu"),
    ("seed for snapshots", only("data", lambda t: t[None]), ValueError, r"^seed is not for snapshots"),
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


SCALE_REFUSALS: list[Refusal] = [
    ("a list", only("scale", Tensor.tolist), TypeError, r"^scale must be a tensor, got list"),
    ("a float", given(scale=1.0), TypeError, r"^scale must be a tensor, got float"),
    *[
        (
            kind,
            only("scale", lambda t, kind=kind: t.to(getattr(torch, kind))),
            TypeError,
            rf"^scale .* float32, got {kind}",
        )
        for kind in ("float16", "bfloat16", "float64", "int32", "bool")
    ],
    ("of lower rank", only("scale", lambda t: t[0]), ValueError, r"^scale must have shape \(.*\), got \("),
    ("of higher rank", only("scale", lambda t: t[..., None]), ValueError, r"^scale must have shape \(.*\), got \("),
    *[
        (
            f"with axis {axis} {by:+}",
            only("scale", lambda t, axis=axis, by=by: resized(t, axis, by)),
            ValueError,
            r"^scale must have shape \(.*heads=2, rows=4\), got \(",
        )
        for axis in (0, -2, -1)
        for by in (-1, 1)
    ],
    ("elsewhere", only("scale", on_meta), ValueError, r"^scale is on meta, but the state is on cpu"),
    (
        "strided",
        only("scale", strided),
        ValueError,
        r"^scale must be contiguous within a slot: strides \(any,.* 4, 1\),",
    ),
    (
        "with heads and rows swapped",
        only("scale", lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2)),
        ValueError,
        r"^scale must be contiguous within a slot: strides \(any,.* 4, 1\), got \(",
    ),
    (
        "one for all rows",
        only("scale", lambda t: t[..., :1].expand_as(t)),
        ValueError,
        r"^scale must be contiguous within",
    ),
    (
        "one for all slots",
        only("scale", lambda t: t[:1].expand_as(t)),
        ValueError,
        r"^scale has overlapping slots: an axis of stride 0, which must be 8 or more",
    ),
    (
        "overlapping",
        only("scale", lambda t: t.as_strided(t.shape, (7,) * (t.dim() - 2) + (4, 1))),
        ValueError,
        r"^scale has overlapping slots: an axis of stride 7, which must be 8 or more",
    ),
]


@pytest.mark.parametrize("axes", [(3,), (3, 2)], ids=["pool", "snapshots"])
@pytest.mark.parametrize("dtype", SCALED, ids=str)
def test_data_with_scales_is_refused_if_it_is_transposed(dtype: torch.dtype, axes: tuple[int, ...]) -> None:
    arguments = scaled_arguments(dtype, *axes)
    data = arguments["data"].view(torch.uint8 if dtype.itemsize == 1 else dtype)
    wrong = {**arguments, "data": data.mT.contiguous().mT.view(dtype)}
    message = r"^data of dtype \w+ must not be transposed within a slot, because its rows have scales, got strides \("
    refuses(lambda: State(**wrong), ValueError, message, {**arguments, "wrong": wrong["data"]})


@table(SCALE_REFUSALS)
@pytest.mark.parametrize("axes", [(3,), (3, 2)], ids=["pool", "snapshots"])
@pytest.mark.parametrize("dtype", SCALED, ids=str)
def test_scale_is_refused_by_name_and_nothing_changes(
    dtype: torch.dtype, axes: tuple[int, ...], change: Change, error: type[Exception], message: str
) -> None:
    arguments = scaled_arguments(dtype, *axes)
    wrong = {**arguments, **change(arguments)}
    refuses(lambda: State(**wrong), error, message, {**arguments, "wrong": wrong["scale"]})


@pytest.mark.parametrize("dtype", SCALED, ids=str)
def test_a_format_with_scales_is_refused_without_them(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(ValueError, match=rf"^{name} needs scale: \(slots, heads, rows\) float32, one per row"):
        State(scaled_arguments(dtype)["data"])
    with pytest.raises(ValueError, match=rf"^{name} needs scale: \(batch, T, heads, rows\) float32, one per row"):
        State(scaled_arguments(dtype, 3, 2)["data"])


def test_state_refuses_what_is_positional_but_data_and_scale() -> None:
    with pytest.raises(TypeError, match="positional"):
        State(torch.zeros(1, 1, 1, 1), None, "nearest")  # type: ignore[misc]


TABLES = ("read", "write", "parents")
LISTS = ("accepted", "snapshot_rows", "cu_seqlens")


def without(*names: str) -> Change:
    return given(**dict.fromkeys(names))


SLOTS_REFUSALS: list[Refusal] = [
    *[
        (f"{name} {what}", only(name, change), error, message.format(name=name))
        for name in TABLES + LISTS
        for what, change, error, message in (
            ("a list", Tensor.tolist, TypeError, r"^{name} must be a tensor, got list"),
            ("an int", lambda t: 3, TypeError, r"^{name} must be a tensor, got int"),
            ("sparse", Tensor.to_sparse, TypeError, r"^{name} must be a dense tensor, got torch.sparse_coo"),
            *WRONG_INDICES,
        )
    ],
    *[
        (f"{name} with {by:+} rows", only(name, lambda t, by=by: resized(t, 0, by)), ValueError, message)
        for name in ("write", "parents", *LISTS)
        for by in (-1, 1)
        for message in [rf"^{name} must have shape \(batch.*=\d.*\), got \("]
    ],
    *[
        (f"{name} of rank 2", only(name, lambda t: t[:, None]), ValueError, rf"^{name} must have shape \(batch")
        for name in LISTS
    ],
    ("parents of rank 1", only("parents", lambda t: t[:, 0]), ValueError, r"^parents must have shape \(batch=3, T\)"),
    *[
        (
            f"{name} strided",
            only(name, strided),
            ValueError,
            rf"^{name} must be contiguous along its last axis, got str",
        )
        for name in TABLES
    ],
    *[
        (f"{name} transposed", only(name, lambda t: t.t().contiguous().t()), ValueError, rf"^{name} must be contiguous")
        for name in TABLES
    ],
    *[
        (f"{name} strided", only(name, strided), ValueError, rf"^{name} must be contiguous, got strides \(2,\)")
        for name in LISTS
    ],
    *[
        (f"{name} elsewhere", only(name, on_meta), ValueError, rf"^{name} is on meta, read on cpu")
        for name in ("write", "parents", *LISTS)
    ],
    ("read elsewhere", only("read", on_meta), ValueError, r"^write is on cpu, read on meta"),
    ("read missing", given(read=None), TypeError, r"^read must be a tensor, got NoneType"),
    (
        "read of rank 2 without accepted",
        without("accepted"),
        ValueError,
        r"^accepted must be given for read \(batch, n\)",
    ),
    *[
        (
            f"{name} for {n} tokens where max_len is 4",
            only(name, lambda t, n=n: resized(t, 1, n - 4)),
            ValueError,
            rf"^{name} must have an entry for each of the 4 tokens, got shape \(3, {n}\)",
        )
        for name in ("write", "parents")
        for n in (0, 3, 5)
    ],
    (
        "write and parents for different numbers of tokens",
        lambda a: {"max_len": None, "cu_seqlens": None, "parents": a["parents"][:, :3]},
        ValueError,
        r"^parents must have an entry for each of the 4 tokens, got shape \(3, 3\)",
    ),
    ("max_len without cu_seqlens", without("cu_seqlens"), ValueError, r"^max_len is for packed .* with cu_seqlens"),
    *[
        (f"max_len {value!r}", given(max_len=value), TypeError, r"^max_len must be an int, got ")
        for value in (True, 4.0, "4", torch.tensor(4))
    ],
    *[
        (f"max_len {value}", given(max_len=value), ValueError, rf"^max_len must be from 0 to 2147483647, got {value}")
        for value in (-1, 1 << 31)
    ],
    *[
        (f"null {null!r}", given(null=null), TypeError, r"^null must be an int, got ")
        for null in (None, 1.0, "0", True, torch.tensor(0))
    ],
    *[
        (f"null {name}", given(null=null), ValueError, rf"^null must be from -9223372036854775808 to .* got {null}")
        for name, null in (("2^63", 1 << 63), ("-2^63 - 1", -(1 << 63) - 1))
    ],
    *[
        (f"padding {value!r}", given(padding=value), ValueError, r"^padding must be one of zero, fresh, keep, got ")
        for value in ("ones", "", None, 0, False)
    ],
]


@table(SLOTS_REFUSALS)
def test_slots_refuses_by_name_and_changes_nothing(change: Change, error: type[Exception], message: str) -> None:
    arguments = slots_arguments()
    wrong = {**arguments, **change(arguments)}
    refuses(lambda: Slots(**wrong), error, message, {**arguments, **{f"wrong {n}": v for n, v in wrong.items()}})


def test_slots_refuses_what_is_positional_but_read() -> None:
    with pytest.raises(TypeError, match="positional"):
        Slots(torch.tensor([1]), torch.tensor([2]))  # type: ignore[misc]


def without_seed(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"state": State(arguments["state"].data)}


ADVANCE_REFUSALS: list[Refusal] = [
    *WRONG_SLOTS,
    ("state without seed", without_seed, ValueError, r"^advance needs a state with a seed"),
    ("snapshots", given(state=State(torch.ones(1, 1, 1, 1, 1))), ValueError, r"^advance needs a state with a seed"),
    (
        "state on meta",
        lambda a: {"state": on_meta(a["state"]), "slots": None},
        ValueError,
        r"^state is on meta; flashstate runs on cuda and cpu",
    ),
]


@table(ADVANCE_REFUSALS)
def test_advance_refuses_by_name_and_changes_nothing(change: Change, error: type[Exception], message: str) -> None:
    arguments = step_arguments()
    wrong = {**arguments, **change(arguments)}
    refuses(lambda: wrong["state"].advance(wrong["slots"]), error, message, arguments)
