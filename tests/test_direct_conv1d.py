"""Calls of conv1d_step that repeat earlier ones reach their kernel directly, and only those; calls that start early."""

from dataclasses import replace

import pytest
import torch
from launchers import Arguments, Form, Launcher, launcher, parameters, unaligned

from flashstate import Slots, conv1d_step, mamba2_step
from flashstate.launch.suspension import suspended
from flashstate.proof import Case, ConvCase, make_inputs

__all__ = ["launcher"]  # a fixture
CPU = torch.device("cpu")
CASE = ConvCase(2, 16, 4, slots=6)
SEVERAL = replace(CASE, tokens=3)


def arguments_of(case: ConvCase) -> Arguments:
    """Of a call with `out`, on tensors of its own."""
    inputs = make_inputs(case, CPU)
    found = {"window": inputs.state.data, **inputs.arguments, **inputs.options, "slots": inputs.at()}
    return {**found, "out": torch.empty_like(inputs.arguments["x"])}


FORMS: dict[str, tuple[ConvCase, Form]] = {
    "plain": (CASE, lambda a: a),
    "without bias": (replace(CASE, bias=False), lambda a: a),
    "bare slots": (CASE, lambda a: {**a, "slots": a["slots"].read}),
    "no slots": (CASE, lambda a: {**a, "slots": None}),
    "null": (CASE, lambda a: {**a, "slots": Slots(a["slots"].read, null=3)}),
    "in place": (CASE, lambda a: {**a, "out": a["x"]}),
    "several tokens": (SEVERAL, lambda a: a),
    "packed": (replace(SEVERAL, packed=True), lambda a: a),
    "longer windows": (replace(CASE, extra=2), lambda a: a),
    "rolled back": (
        replace(SEVERAL, extra=3), lambda a: {**a, "slots": Slots(a["slots"].read, accepted=torch.tensor([1, 2]))}
    ),
    "a ring": (SEVERAL, lambda a: {**a, "positions": torch.tensor([4, 5])}),
    "snapshots": (SEVERAL, lambda a: {**a, "snapshots": torch.zeros(2, 3, 16, 3), "update": False}),
    "a tree": (
        SEVERAL,
        lambda a: {**a, "slots": Slots(a["slots"].read, parents=torch.tensor([[-1, 0, 0]] * 2)), "update": False},
    ),
    "early": (CASE, lambda a: {**a, "early": True}),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_repeated_call_starts_the_kernel_directly_with_the_arguments_of_an_ordinary_launch(
    form: str, launcher: Launcher
) -> None:
    case, change = FORMS[form]
    conv1d_step(**change(arguments_of(case)))
    again = change(arguments_of(case))
    assert conv1d_step(**again) is again["out"]
    assert (len(launcher.ordinary), len(launcher.directly)) == (1, 1)
    with suspended():
        conv1d_step(**again)
    assert launcher.directly == [parameters(launcher.ordinary[-1].launch.arguments)]


UNLIKE: dict[str, Form] = {
    "another batch": lambda a: {**a, "x": a["x"][:1], "out": a["out"][:1], "slots": Slots(a["slots"].read[:1])},
    "other strides": lambda a: {**a, "x": a["x"].t().contiguous().t()},
    "another layout": lambda a: {**a, "window": a["window"].contiguous()},
    "more slots": lambda a: {**a, "window": torch.zeros(9, 3, 16).transpose(1, 2)},
    "another dtype": lambda a: {**a, "weight": a["weight"].half()},
    "no bias": lambda a: {**a, "bias": None},
    "no activation": lambda a: {**a, "activation": None},
    "no update": lambda a: {**a, "update": False},
    "a ring": lambda a: {**a, "positions": torch.tensor([1, 2])},
    "another padding": lambda a: {**a, "slots": Slots(a["slots"].read, padding="fresh")},
    "padding that stays": lambda a: {**a, "slots": Slots(a["slots"].read, padding="keep")},
    "snapshots": lambda a: {**a, "snapshots": torch.zeros(2, 1, 16, 3)},
    "early": lambda a: {**a, "early": True},
    "an unaligned x": lambda a: {**a, "x": unaligned(a["x"])},
    "an unaligned weight": lambda a: {**a, "weight": unaligned(a["weight"])},
    "an unaligned bias": lambda a: {**a, "bias": unaligned(a["bias"])},
}  # fmt: skip


@pytest.mark.parametrize("change", UNLIKE)
def test_a_call_that_differs_takes_the_ordinary_way(change: str, launcher: Launcher) -> None:
    conv1d_step(**arguments_of(CASE))
    conv1d_step(**UNLIKE[change](arguments_of(CASE)))
    assert (len(launcher.ordinary), len(launcher.directly)) == (2, 0)


UNALIGNED = ("x", "out", "weight", "bias", "snapshots")


def test_a_kernel_for_one_unaligned_tensor_is_not_started_for_another(launcher: Launcher) -> None:
    arguments = {**arguments_of(CASE), "snapshots": torch.zeros(2, 1, 16, 3)}
    for name in UNALIGNED:
        for _ in range(2):
            conv1d_step(**{**arguments, name: unaligned(arguments[name])})
    assert (len(launcher.ordinary), len(launcher.directly)) == (len(UNALIGNED), len(UNALIGNED))


def test_wrong_input_is_refused_also_after_calls_that_were_right(launcher: Launcher) -> None:
    for _ in range(2):
        conv1d_step(**arguments_of(CASE))
    for name, wrong in (
        ("update", 1),
        ("early", 1),
        ("activation", "gelu"),
        ("history", 3),
        ("history", True),
        ("weight", None),
    ):
        with pytest.raises((TypeError, ValueError), match=name):
            conv1d_step(**{**arguments_of(CASE), name: wrong})
    assert len(launcher.directly) == 1


@pytest.mark.parametrize("early", [False, True])
def test_only_calls_that_start_early_tell_the_driver_so(early: bool, launcher: Launcher) -> None:
    """Both ways: Triton is told by an option, the driver by an attribute of the launch."""
    inputs = make_inputs(Case(2, 4, 2, 16, 32, slots=6), CPU)
    for _ in range(2):
        conv1d_step(**arguments_of(CASE), early=early)
        mamba2_step(
            inputs.state, **inputs.arguments, **inputs.options, slots=inputs.slots,
            out=torch.empty_like(inputs.arguments["x"]), early=early,
        )  # fmt: skip
    assert [started.launch.constants["EARLY"] for started in launcher.ordinary] == [early] * 2
    assert [started.launch.options.get("launch_pdl", False) for started in launcher.ordinary] == [early] * 2
    assert [[(a.id, a.value) for a in found] for found in launcher.attributes] == [[(6, 1)] if early else []] * 2
