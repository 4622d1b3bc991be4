"""What ops declare of their arguments, and every kind of axis and of option that a declaration can name."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from refusals import CPU, META, expanded, given, only, refuses, refuses_all, strided, wrong
from torch import Tensor

from flashstate.errors import (
    ACTIVATION_DTYPES,
    check_choice,
    check_flag,
    check_int,
    check_list,
    check_no_overlap,
    check_number,
    check_tensor,
    checked_range,
    dtype_name,
)
from flashstate.launch.axes import Axes, Tokens, check_main
from flashstate.launch.call import OPS, Op

GATES = "A_log?: | HV; dt_bias?: | HV [K]; b_logit?: flag; scale?: number; qk_l2norm: flag"
OF_DELTA = (
    "slots HV V K; H divides HV; q: tokens H | K; k: tokens H | K; v: tokens HV | V; a: tokens HV | [K]; "
    f"b: tokens HV |; {GATES}; "
)
OF_MAMBA2 = (
    "slots heads rows cols; groups divides heads; x: tokens heads | rows; dt: tokens heads | [rows]; "
    "A: | heads [rows cols]; B: tokens groups | cols; C: tokens groups | cols; D?: | heads [rows]; "
    "z?: tokens heads | rows; dt_bias?: | heads [rows]; dt_softplus: flag; dt_limit?: range; "
)
DECLARED = {
    "mamba2_step": f"{OF_MAMBA2}exact: flag; update: flag; early: flag",
    "gated_delta_step": f"transposed; {OF_DELTA}exact: flag; update: flag; early: flag",
    "mamba3_step": (
        "slots H D N; G divides H; x: tokens H | D; A: tokens H |; dt: tokens H |; trap: tokens H |; "
        "B: tokens R G | N; C: tokens R G | N; Wx?: | R H D; Wz?: | R H D; Wo?: | R H D; D?: | H; z?: tokens H | D; "
        "trap_logit: flag; update_kv: flag; update: flag"
    ),
    "conv1d_step": (
        "rolls_back; slots channels length; window: slots channels length |; x: tokens channels |; "
        "weight: | channels width; bias?: | channels; positions?: | batch of int32 or int64; "
        "snapshots?: rows steps channels entries |; update: flag; early: flag"
    ),
    "mamba2_replay": f"{OF_MAMBA2}update: flag",
    "gated_delta_replay": f"{OF_DELTA}update: flag; early: flag",
}


def declared(op: Op) -> str:
    """What an op declares: of its states, which axes divide others, its tensors and its options."""
    kinds = {"flag": op.flags, "number": op.numbers, "range": op.ranges}
    options = {name: kind for kind, names in kinds.items() for name in names}
    told = [op.state_axes, *(f"{axis} divides {whole}" for axis, whole in op.divides.items())]
    for name in op.hints:
        words = told_of(op.tensors[name]) if name in op.tensors else options.get(name)
        told += [f"{name}{'?' * (name in op.optional)}: {words}"] if words else []
    return "; ".join([*(word for word in ("transposed", "rolls_back") if getattr(op, word)), *told])


def told_of(axes: Axes) -> str:
    """The words that an Axes was made of."""
    lead, optional = ["tokens"] * axes.tokens, [f"[{' '.join(axes.optional)}]"] * bool(axes.optional)
    of = "" if axes.dtypes == ACTIVATION_DTYPES else f" of {' or '.join(map(dtype_name, axes.dtypes))}"
    return " ".join([*lead, *axes.strided, "|", *axes.dense, *optional]) + of


def test_ops_declare_these_arguments() -> None:
    assert {name: declared(op) for name, op in OPS.items()} == DECLARED


# Every kind of axis

SIZES = {"heads": 4, "rows": 6, "cols": 5, "slots": 3}  # groups have any
TOKENS = {
    "one token": Tokens(("batch",), (3,), 3, 1),
    "several tokens": Tokens(("batch", "T"), (3, 2), 3, 2),
    "packed": Tokens(("tokens",), (8,), 3, None),
}
LAYOUTS = {  # of every kind of axes, as `wrong` has them
    "tokens heads | rows": "rows",
    "tokens groups | cols": "rows",
    "tokens heads |": "",
    "tokens heads | [rows]": "rows",
    "| heads": "whole",
    "| heads rows cols": "whole",
    "| heads [rows]": "whole",
    "| heads [rows cols]": "whole",
    "slots heads rows |": "",
}
KINDS = [(words, form) for words in LAYOUTS for form in TOKENS if words.startswith("tokens") or form == "one token"]


@pytest.mark.parametrize(("words", "form"), KINDS)
def test_a_tensor_that_has_not_the_axes_that_are_declared_is_refused(words: str, form: str) -> None:
    axes, tokens = Axes.parse(words), TOKENS[form]
    lead = tokens.axes if axes.tokens else ()
    known = {**SIZES, "groups": 2, **dict(zip(lead, tokens.sizes, strict=False))}
    more = {axis: known[axis] for axis in axes.optional}

    def check(t: Any) -> Tensor:
        return axes.check("t", t, tokens, SIZES, CPU)

    for named in {(*lead, *axes.names), (*lead, *axes.names, *axes.optional)}:
        right, whole = torch.randn([known[axis] for axis in named]), len(named) > len(lead + axes.names)
        assert check(right) is right
        if axes.strided or lead:  # of any stride
            assert check(expanded(right)).shape == right.shape
        layout = LAYOUTS[words] if whole or not (more and lead) else ""
        refuses_all(check, {"t": right}, wrong("t", " ".join(named), "groups", layout=layout))
        if whole:
            few = right[(..., *(0 for _ in more))].clone()
            assert torch.equal(check(few[(..., *(None for _ in more))].expand_as(right)), few)


def test_values_that_are_expanded_along_one_axis_alone_or_from_others_that_lie_apart_are_refused() -> None:
    heads = torch.randn(5, 4).T[:, None].expand(4, 6, 5)  # are side by side, as where one value is for each
    for values in (heads, strided(torch.randn(4))[:, None, None].expand(4, 6, 5), expanded(torch.randn(4, 6, 5), 2)):
        with pytest.raises(ValueError, match=r"^A must be contiguous, or expanded from contiguous values per head"):
            Axes.parse("| heads [rows cols]").check("A", values, TOKENS["one token"], SIZES, CPU)


@pytest.mark.parametrize("packed", [False, True])
def test_the_argument_whose_tokens_others_have_is_refused_in_every_form(packed: bool) -> None:
    one, several, flat = (rf"\({lead}, heads=4, rows=6\)" for lead in ("batch", "batch, T", "tokens"))
    for sizes, dense in (((4, 5), several), ((3, 4, 5), f"{one} or {several}"), ((3, 2, 5, 6), f"{several} or {one}")):
        message = rf"^x must have shape {flat if packed else dense}.*, got \({sizes[0]}, "
        with pytest.raises(ValueError, match=message):
            check_main("x", torch.ones(sizes), Axes.parse("tokens heads | rows"), SIZES, CPU, packed)
    check_main("x", torch.ones(3, 4, 6), Axes.parse("tokens heads | rows"), SIZES, CPU, packed)


# Checks of one voice


def test_a_tensor_is_refused_for_its_kind_its_dtype_its_shape_and_its_device() -> None:
    def check(t: Any) -> None:
        check_tensor("t", t, ("a", "b"), (3, None), device=CPU, also=(("a",), (3,)))

    dtypes = (torch.float64, torch.float8_e4m3fn, torch.int64, torch.bool)
    shape, kinds = r"^t must have shape \(a=3, b\) or \(a=3\), got \(", "^t must be float32 or bfloat16 or float16"
    refuses_all(check, {"t": torch.ones(3, 4)}, [
        (only("t", Tensor.tolist), "^t must be a tensor, got list: torch.tensor", TypeError),
        (given(t=1.0), "^t must be a tensor, got float", TypeError),
        (given(t=None), "^t must be a tensor, got NoneType", TypeError),
        (only("t", Tensor.to_sparse), "^t must be a dense tensor, got torch.sparse_coo", TypeError),
        (only("t", lambda t: t.to(META)), "^t is on meta, but the state is on cpu"),
        *[(given(t=torch.ones(3).to(kind)), f"{kinds}, got {dtype_name(kind)}", TypeError) for kind in dtypes],
        *[(given(t=torch.ones(sizes)), shape) for sizes in ((), (1, 3, 4), (1, 1, 3, 4), (2, 4))],
    ])  # fmt: skip


Check = Callable[[str, Any], Any]
NUMBERS: list[tuple[Check, list[Any], str, type[Exception]]] = [
    (check_flag, [1, 0, "yes", None], "True or False, got ", TypeError),
    (check_number, [True, "1", [1.0], torch.ones(1)], "a number, got ", TypeError),
    (check_number, [math.inf, -math.inf, math.nan, 1e39, 10**40], "finite in float32, got ", ValueError),
    (
        checked_range,
        [1.0, True, "01", (1.0,), (0.0, 1.0, 2.0), (True, 2.0), (0.0, "1"), (None, 1.0), torch.ones(2)],
        r"two numbers, \(lo, hi\), got ",
        TypeError,
    ),
    (checked_range, [(1.0, 0.5), [1, 0], (math.nan, 1.0), (0.0, math.nan)], r"\(lo, hi\) with lo <= hi, ", ValueError),
    (checked_range, [(0.0, 1e39), (-(10**400), 1.0)], "of numbers that are finite in float32 or inf", ValueError),
    (lambda name, n: check_int(name, n, 2, 4), ["4", 4.0, True, None], "an int, got ", TypeError),
    (lambda name, n: check_int(name, n, 2, 4), [1, 5, 1 << 64], "from 2 to 4, got ", ValueError),
    (lambda name, one: check_choice(name, one, ("silu", None)), ["gelu", "", True, 1], "one of silu, None", ValueError),
    (lambda name, t: check_list(name, t, 3), [torch.ones(3), torch.ones(3) > 0], "int32 or int64, got ", TypeError),
    (lambda name, t: check_list(name, t, 3), [torch.arange(4)], r"have shape \(batch=3\), got \(4,\)", ValueError),
    (lambda name, t: check_list(name, t, 3), [torch.arange(6)[::2]], r"be contiguous, got strides \(2,\)", ValueError),
]


@pytest.mark.parametrize(("check", "values", "words", "error"), NUMBERS)
def test_numbers_and_lists_are_refused_by_name(
    check: Check, values: list[Any], words: str, error: type[Exception]
) -> None:
    for value in values:
        refuses(lambda value=value: check("n", value), error, f"^n must (be )?{words}", {"n": value})


def test_tensors_that_overlap_themselves_are_refused() -> None:
    right = torch.ones(3, 4, 6)
    check_no_overlap("t", right.movedim(0, 2))
    for t in (expanded(right), expanded(right, 1), expanded(right, 2), right.as_strided((3, 4, 6), (24, 3, 1))):
        with pytest.raises(ValueError, match=r"^t must not overlap itself, got strides \("):
            check_no_overlap("t", t)
