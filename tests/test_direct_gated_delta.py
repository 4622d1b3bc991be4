"""Calls of gated_delta_step that repeat earlier ones reach their kernel directly, and only those."""

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from launchers import Arguments, Form, Launcher, at, given, launcher, plain, require_started_again, unaligned
from torch import Tensor

from flashstate import Slots, State, gated_delta_step
from flashstate.ops.gated_delta import POINTERS
from flashstate.proof import DeltaCase, make_inputs
from flashstate.proof.laws.tokens import make_snapshots

__all__ = ["launcher"]  # a fixture
CPU = torch.device("cpu")
CASE = DeltaCase(2, 4, 2, 16, 32, x="float16", qk="float16", slots=12)
SEVERAL = replace(CASE, tokens=3)
AT_ONCE = replace(SEVERAL, exact=False)


def arguments_of(case: DeltaCase) -> Arguments:
    """Of a call with `out`, on tensors of its own."""
    inputs = make_inputs(case, CPU)
    found = {"state": inputs.state, **inputs.arguments, **inputs.options, "slots": inputs.at()}
    return {**found, "out": torch.empty_like(inputs.main)}


PER_TOKEN = torch.arange(6).reshape(2, 3)
TREE = torch.tensor([[-1, 0, 0]] * 2)
FORMS: dict[str, tuple[DeltaCase, Form]] = {
    "plain": (CASE, plain),
    "without A_log": (replace(CASE, raw=False), plain),
    "without dt_bias": (replace(CASE, dt_bias=False), plain),
    "KDA": (replace(CASE, per_channel=True), plain),
    "a scale": (CASE, given(scale=0.7)),
    "scaled, stochastic": (replace(CASE, format="int8", rounding="stochastic"), plain),
    "float8": (replace(CASE, format="float8_e4m3fn"), plain),
    "transposed": (replace(CASE, transposed=True), plain),
    "bare tensors": (CASE, lambda a: {**a, "state": a["state"].data, "slots": a["slots"].read}),
    "no slots": (CASE, given(slots=None)),
    "in place": (CASE, lambda a: {**a, "out": a["v"]}),
    "early": (CASE, given(early=True)),
    "several tokens": (SEVERAL, plain),
    "packed": (replace(SEVERAL, packed=True), plain),
    "a slot for every token": (SEVERAL, at(write=PER_TOKEN)),
    "slots to choose from": (
        SEVERAL,
        at(read=PER_TOKEN, accepted=torch.tensor([1, 3]), write=lambda read: read.clone()),
    ),
    "snapshots": (
        replace(SEVERAL, rounding="stochastic", format="float16"),
        lambda a: {
            **at(snapshot_rows=torch.tensor([1, 0]))(a),
            "snapshots": make_snapshots(SEVERAL, "int8", "stochastic", CPU),
        },
    ),
    "a tree": (SEVERAL, lambda a: {**at(parents=TREE)(a), "update": False}),
    "at once": (AT_ONCE, plain),
    "at once, packed": (replace(AT_ONCE, packed=True), plain),
    "at once, without update": (AT_ONCE, given(update=False)),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_repeated_call_starts_the_kernel_directly_with_the_arguments_of_an_ordinary_launch(
    form: str, launcher: Launcher
) -> None:
    case, change = FORMS[form]
    first = change(arguments_of(case))
    again = {**change(arguments_of(case)), "state": first["state"]}
    require_started_again(launcher, gated_delta_step, first, again)


def test_the_scale_of_queries_reaches_the_kernel_as_the_bits_of_a_float32(launcher: Launcher) -> None:
    arguments = arguments_of(CASE)
    for _ in range(2):
        gated_delta_step(**arguments, scale=0.7)
    (q_scale,) = [value for value in launcher.ordinary[0].launch.arguments if isinstance(value, float)]
    assert q_scale == 0.7
    *_, q_scale_bits, scratch, more_scratch = launcher.directly[0]
    assert struct.pack("<q", q_scale_bits) == struct.pack("<f", 0.7) + bytes(4)
    assert scratch == more_scratch == 0


def test_the_stream_of_a_layer_is_passed_on(launcher: Launcher) -> None:
    arguments = arguments_of(CASE)
    for _ in range(2):
        gated_delta_step(**arguments)
    pointers = [at for at in launcher.ordinary[0].launch.arguments[:POINTERS] if at is not None]
    assert all(isinstance(pointer, Tensor) for pointer in pointers)
    assert launcher.directly[0][len(pointers)] == arguments["state"].stream


UNLIKE: dict[str, Form] = {
    "another scale": given(scale=0.5),
    "the default scale, given": given(scale=32**-0.5),
    "not exact": given(exact=False),
    "no l2norm": given(qk_l2norm=False),
    "no update": given(update=False),
    "early": given(early=True),
    "no A_log": given(A_log=None, dt_bias=None),
    "no dt_bias": given(dt_bias=None),
    "A_log of another dtype": lambda a: {**a, "A_log": a["A_log"].half()},
    "a per channel": lambda a: {**a, "a": a["a"][..., None].repeat_interleave(32, -1)},
    "k of another dtype": lambda a: {**a, "k": a["k"].float()},
    "fewer key heads": lambda a: {**a, "q": a["q"][..., :1, :], "k": a["k"][..., :1, :]},
    "q with other strides": lambda a: {**a, "q": torch.cat([a["q"], a["q"]], -1)[..., :32]},
    "out is v": lambda a: {**a, "out": a["v"]},
    "no out": given(out=None),
    "no slots": given(slots=None),
    "slots as a tensor": lambda a: {**a, "slots": a["slots"].read},
    "64-bit slots": at(read=Tensor.long),
    "slots to write": at(write=lambda read: read),
    "another padding": at(padding="fresh"),
    "padding that stays": at(padding="keep"),
    "another null": at(null=0),
    "snapshots": given(snapshots=make_snapshots(CASE, "float32", "nearest", CPU)),
    "transposed snapshots": given(snapshots=State(torch.zeros(2, 1, 4, 32, 16).mT)),
    "a state as a tensor": lambda a: {**a, "state": a["state"].data},
    "a state of another dtype": lambda a: {**a, "state": State(a["state"].data.half())},
    "an unaligned state": lambda a: {**a, "state": State(unaligned(a["state"].data))},
    "a transposed state": lambda a: {**a, "state": State(a["state"].data.mT.contiguous().mT)},
    **{
        f"an unaligned {name}": lambda a, name=name: {**a, name: unaligned(a[name])}
        for name in ("q", "k", "v", "out")
    },
}  # fmt: skip


@pytest.mark.parametrize("change", UNLIKE)
@pytest.mark.parametrize("wrap", [lambda state: state, lambda state: state.data], ids=["a State", "a tensor"])
def test_a_call_that_differs_takes_the_ordinary_way(
    wrap: Callable[[State], Any], change: str, launcher: Launcher
) -> None:
    arguments = arguments_of(CASE)
    first, second = arguments, UNLIKE[change](arguments)
    if wrap(arguments["state"]) is not arguments["state"] and change != "a state as a tensor":
        first, second = ({**a, "state": wrap(a["state"])} for a in (first, second))
    gated_delta_step(**first)
    gated_delta_step(**second)
    assert (len(launcher.ordinary), len(launcher.directly)) == (2, 0)
    gated_delta_step(**first)
    assert len(launcher.directly) == 1


def test_unaligned_tensors_do_not_meet_a_kernel_for_aligned_ones_but_their_own(launcher: Launcher) -> None:
    arguments = arguments_of(CASE)
    for _ in range(2):
        gated_delta_step(**{**arguments, "k": unaligned(arguments["k"])})
        gated_delta_step(**arguments)
    assert [started.launch.constants["ALIGNED"] for started in launcher.ordinary] == [False, True]
    assert len(launcher.directly) == 2


def test_packed_calls_of_another_longest_row_are_told_apart(launcher: Launcher) -> None:
    """Room for 8 tokens and for 16 is in other kernels."""
    arguments = arguments_of(replace(AT_ONCE, packed=True))
    for _ in range(2):
        for longest in (3, 9):
            gated_delta_step(**{**arguments, "slots": replace(arguments["slots"], max_len=longest)})
    assert [started.launch.constants["TOKENS"] for started in launcher.ordinary] == [8, 16]
    assert len(launcher.directly) == 2


WRONG: dict[str, Arguments] = {
    "q": {"q": [1.0]},
    "dt_bias": {"A_log": None},
    "scale must be a number": {"scale": True},
    "scale must be finite": {"scale": float("inf")},
    "exact must": {"exact": 0},
    "qk_l2norm": {"qk_l2norm": 1},
    "update": {"update": None},
    "slots": {"slots": "all"},
    "state": {"state": None},
    "out": {"out": torch.zeros(2, 4, 16, dtype=torch.float64)},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_input_is_refused_also_after_calls_that_were_right(message: str, launcher: Launcher) -> None:
    arguments = arguments_of(CASE)
    for _ in range(2):
        gated_delta_step(**arguments)
    with pytest.raises((TypeError, ValueError), match=message):
        gated_delta_step(**{**arguments, **WRONG[message]})
    assert (len(launcher.ordinary), len(launcher.directly)) == (1, 1)


def test_a_tree_is_not_written_over_its_tokens_also_after_calls_that_were_right(launcher: Launcher) -> None:
    arguments = {**at(parents=TREE)(arguments_of(SEVERAL)), "update": False}
    for _ in range(2):
        gated_delta_step(**arguments)
    with pytest.raises(ValueError, match="out must not be v"):
        gated_delta_step(**{**arguments, "out": arguments["v"]})


@pytest.mark.parametrize("early", [False, True])
def test_only_calls_that_start_early_tell_the_driver_so(early: bool, launcher: Launcher) -> None:
    """Both ways: Triton is told by an option, the driver by an attribute of the launch."""
    for _ in range(2):
        for arguments in [arguments_of(CASE), arguments_of(AT_ONCE)]:
            data = arguments["state"].data
            gated_delta_step(**{**arguments, "state": data}, early=early)
    assert [started.launch.constants["EARLY"] for started in launcher.ordinary] == [early] * 2
    assert [started.launch.options.get("launch_pdl", False) for started in launcher.ordinary] == [early] * 2
    assert [[(a.id, a.value) for a in found] for found in launcher.attributes] == [[(6, 1)] if early else []] * 2


def test_slots_that_are_made_anew_repeat_a_call(launcher: Launcher) -> None:
    arguments = arguments_of(CASE)
    for _ in range(2):
        gated_delta_step(**{**arguments, "slots": Slots(arguments["slots"].read.clone())})
    assert (len(launcher.ordinary), len(launcher.directly)) == (1, 1)
