"""Calls that repeat earlier ones reach their kernel directly; a stand-in for Triton shows with which arguments."""

import copy
import pickle
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import launchers
import pytest
import torch
from launchers import Arguments, Launcher, compiled_with, launcher, parameters, require_started_again, unaligned
from torch import Tensor

from flashstate import Slots, State, debug, mamba2_step
from flashstate.launch import Config, driver, override
from flashstate.launch.start import collecting
from flashstate.launch.suspension import suspended
from flashstate.ops import mamba2
from flashstate.proof import Case, Inputs, make_inputs
from flashstate.proof.laws.tokens import make_snapshots

__all__ = ["launcher"]  # a fixture
CPU = torch.device("cpu")
CASE = Case(2, 4, 2, 16, 32, slots=6)


def arguments_of(inputs: Inputs, **changes: Any) -> Arguments:
    """Of a call with `out`, on tensors of its own."""
    found = {**inputs.arguments, **inputs.options, "slots": inputs.at(), "out": torch.empty_like(inputs.arguments["x"])}
    found = {name: t.clone() if isinstance(t, Tensor) else t for name, t in found.items()}
    return {"state": inputs.state, **found, **changes}


def per_token(case: Case, inputs: Inputs) -> Arguments:
    read = inputs.slots[:, None].expand(-1, 3).contiguous()
    write = torch.arange(case.batch * case.tokens).reshape(case.batch, case.tokens)
    return arguments_of(inputs, slots=inputs.at(read=read, accepted=inputs.slots, write=write))


def snapshots(case: Case, inputs: Inputs) -> Arguments:
    copies = make_snapshots(case, "int8", "stochastic", CPU)
    return arguments_of(inputs, slots=inputs.at(snapshot_rows=inputs.slots), snapshots=copies)


def tree(case: Case, inputs: Inputs) -> Arguments:
    parents = torch.tensor([[-1, 0, 0]]).repeat(case.batch, 1)
    return arguments_of(inputs, slots=inputs.at(parents=parents), update=False)


def bare(case: Case, inputs: Inputs) -> Arguments:
    return arguments_of(inputs, state=inputs.state.data, slots=inputs.slots)


def in_place(case: Case, inputs: Inputs) -> Arguments:
    arguments = arguments_of(inputs)
    return {**arguments, "out": arguments["x"]}


def no_slots(case: Case, inputs: Inputs) -> Arguments:
    return arguments_of(inputs, slots=None)


def plain(case: Case, inputs: Inputs) -> Arguments:
    return arguments_of(inputs)


SEVERAL = replace(CASE, tokens=3, slots=12)
FORMS: dict[str, tuple[Case, Callable[[Case, Inputs], Arguments]]] = {
    "plain": (CASE, plain),
    "without options": (replace(CASE, z=False, D=None, dt_bias=False), plain),
    "scaled, stochastic": (replace(CASE, format="int8", rounding="stochastic"), plain),
    "float8": (replace(CASE, format="float8_e4m3fn"), plain),
    "bare tensors": (CASE, bare),
    "no slots": (CASE, no_slots),
    "in place": (CASE, in_place),
    "Mamba-1": (replace(CASE, heads=1, groups=1, mamba1=True, D="row"), plain),
    "several tokens": (SEVERAL, plain),
    "packed": (replace(SEVERAL, packed=True), plain),
    "a slot for every token": (SEVERAL, per_token),
    "snapshots": (replace(SEVERAL, rounding="stochastic", format="float16"), snapshots),
    "a tree": (SEVERAL, tree),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_repeated_call_starts_the_kernel_directly_with_the_arguments_of_an_ordinary_launch(
    form: str, launcher: Launcher
) -> None:
    case, arguments = FORMS[form]
    inputs = make_inputs(case, CPU)
    require_started_again(launcher, mamba2_step, arguments(case, inputs), arguments(case, inputs))


def test_the_stream_of_a_layer_is_passed_on(launcher: Launcher) -> None:
    inputs = make_inputs(CASE, CPU)
    layer = replace(inputs.state, stream=3)
    for _ in range(2):
        mamba2_step(**arguments_of(inputs, state=layer))
    pointers = [at for at in launcher.ordinary[0].launch.arguments[: mamba2.POINTERS] if at is not None]
    assert launcher.directly[0][len(pointers)] == 3


def strided(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]]


UNLIKE: dict[str, Callable[[Arguments], Arguments]] = {
    "x is not aligned": lambda a: {**a, "x": unaligned(a["x"])},
    "z is not aligned": lambda a: {**a, "z": unaligned(a["z"])},
    "out is not aligned": lambda a: {**a, "out": unaligned(a["out"])},
    "the state is not aligned": lambda a: {**a, "state": State(unaligned(a["state"].data))},
    "x has other strides": lambda a: {**a, "x": strided(a["x"])},
    "B has another dtype": lambda a: {**a, "B": a["B"].half()},
    "dt is per channel": lambda a: {**a, "dt": a["dt"][..., None].repeat(1, 1, 16)},
    "A is another vector": lambda a: {**a, "A": a["A"].half()},
    "no z": lambda a: {**a, "z": None},
    "no D": lambda a: {**a, "D": None},
    "no bias": lambda a: {**a, "dt_bias": None},
    "no softplus": lambda a: {**a, "dt_softplus": False},
    "no update": lambda a: {**a, "update": False},
    "64-bit slots": lambda a: {**a, "slots": Slots(a["slots"].read.long())},
    "another padding": lambda a: {**a, "slots": Slots(a["slots"].read, padding="fresh")},
    "padding that stays": lambda a: {**a, "slots": Slots(a["slots"].read, padding="keep")},
    "another null": lambda a: {**a, "slots": Slots(a["slots"].read, null=0)},
    "slots to write": lambda a: {**a, "slots": Slots(a["slots"].read, write=a["slots"].read)},
    "slots as a tensor": lambda a: {**a, "slots": a["slots"].read},
    "the state has another dtype": lambda a: {**a, "state": State(a["state"].data.half())},
    "a state as a tensor": lambda a: {**a, "state": a["state"].data},
    "no out": lambda a: {**a, "out": None},
}


@pytest.mark.parametrize("change", UNLIKE)
def test_a_call_that_differs_takes_the_ordinary_way(change: str, launcher: Launcher) -> None:
    inputs = make_inputs(CASE, CPU)
    arguments = arguments_of(inputs)
    mamba2_step(**arguments)
    mamba2_step(**UNLIKE[change](arguments))
    assert (len(launcher.ordinary), len(launcher.directly)) == (2, 0)
    mamba2_step(**arguments)
    assert len(launcher.directly) == 1


@pytest.mark.parametrize("wrap", [State, lambda tensor: tensor], ids=["a State", "a tensor"])
def test_a_transposed_state_is_refused_also_behind_a_call_that_was_right(
    wrap: Callable[[Tensor], Any], launcher: Launcher
) -> None:
    arguments = arguments_of(make_inputs(CASE, CPU))
    data = arguments["state"].data
    mamba2_step(**{**arguments, "state": wrap(data)})
    with pytest.raises(ValueError, match=r"^state must be contiguous within a slot"):
        mamba2_step(**{**arguments, "state": wrap(data.mT.contiguous().mT)})
    assert (len(launcher.ordinary), len(launcher.directly)) == (1, 0)


def test_unaligned_tensors_do_not_meet_a_kernel_for_aligned_ones_but_their_own(launcher: Launcher) -> None:
    arguments = arguments_of(make_inputs(CASE, CPU))
    for _ in range(2):
        mamba2_step(**{**arguments, "x": unaligned(arguments["x"])})
        mamba2_step(**arguments)
    assert [started.launch.constants["ALIGNED"] for started in launcher.ordinary] == [False, True]
    assert len(launcher.directly) == 2


WRONG: dict[str, Arguments] = {
    "x": {"x": [1.0]},
    "z": {"z": torch.zeros(2, 4, 15)},
    "dt_softplus": {"dt_softplus": 1},
    "update": {"update": None},
    "slots": {"slots": "all"},
    "state": {"state": None},
    "out": {"out": torch.zeros(2, 4, 16, dtype=torch.float64)},
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_refused_also_after_calls_that_were_right(name: str, launcher: Launcher) -> None:
    arguments = arguments_of(make_inputs(CASE, CPU))
    for _ in range(2):
        mamba2_step(**arguments)
    with pytest.raises((TypeError, ValueError), match=name):
        mamba2_step(**{**arguments, **WRONG[name]})
    assert (len(launcher.ordinary), len(launcher.directly)) == (1, 1)


@pytest.mark.parametrize("alias", [("out", "x"), ("C", "B"), ("dt_bias", "D")], ids=str)
def test_a_tensor_may_be_given_twice(alias: tuple[str, str], launcher: Launcher) -> None:
    arguments = arguments_of(make_inputs(CASE, CPU))
    twice = {**arguments, alias[0]: arguments[alias[1]]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            mamba2_step(**twice)
            mamba2_step(**arguments)
    assert len(launcher.directly) == (2 if alias == ("out", "x") else 1)  # others are rare, and take the ordinary way
    with suspended():
        mamba2_step(**twice)
    if alias == ("out", "x"):
        assert launcher.directly[0] == parameters(launcher.ordinary[-1].launch.arguments)


def test_packed_calls_of_many_lengths_all_become_direct(launcher: Launcher) -> None:
    case = replace(SEVERAL, packed=True)
    inputs = make_inputs(case, CPU)
    state, slots = inputs.state, inputs.at()
    calls = []
    for tokens in range(6, 26):
        x, B = torch.zeros(tokens, case.heads, case.rows), torch.zeros(tokens, case.groups, case.cols)
        dt = torch.zeros(tokens, case.heads)
        fixed = {"A": inputs.arguments["A"], **{**inputs.options, "z": None}}
        calls.append(
            {**fixed, "state": state, "x": x, "dt": dt, "B": B, "C": B.clone(), "slots": slots, "out": x.clone()}
        )
    for call in calls * 2:
        mamba2_step(**call)
    assert (len(launcher.ordinary), len(launcher.directly)) == (20, 20)


def test_states_and_slots_that_were_used_can_be_copied(launcher: Launcher) -> None:
    arguments = arguments_of(make_inputs(CASE, CPU))
    for _ in range(2):
        mamba2_step(**arguments)
    state, slots = copy.deepcopy(arguments["state"]), pickle.loads(pickle.dumps(arguments["slots"]))
    assert torch.equal(state.data, arguments["state"].data)
    assert not state.launches
    assert torch.equal(slots.read, arguments["slots"].read)


def test_a_thread_without_a_context_gets_one(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    errors, chosen = [201, 0], []
    monkeypatch.setattr(driver, "_launch_function", lambda: lambda *arguments: errors.pop(0))
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    arguments = arguments_of(make_inputs(CASE, CPU))
    for _ in range(2):
        mamba2_step(**arguments)
    assert (errors, chosen) == ([], [0])


def test_a_tree_is_not_written_over_its_tokens_also_after_calls_that_were_right(launcher: Launcher) -> None:
    arguments = tree(SEVERAL, make_inputs(SEVERAL, CPU))
    for _ in range(2):
        mamba2_step(**arguments)
    with pytest.raises(ValueError, match="out must not be x"):
        mamba2_step(**{**arguments, "out": arguments["x"]})


@pytest.mark.parametrize("context", [debug, collecting, suspended, lambda: override(Config(8, 1, 8))])
def test_calls_in_a_context_that_looks_at_them_take_the_ordinary_way(
    context: Callable[[], Any], launcher: Launcher
) -> None:
    arguments = arguments_of(make_inputs(CASE, CPU))
    mamba2_step(**arguments)
    with context():
        mamba2_step(**arguments)
    assert (len(launcher.ordinary), len(launcher.directly)) == (2, 0)


def test_another_current_device_takes_the_ordinary_way(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = arguments_of(make_inputs(CASE, CPU))
    mamba2_step(**arguments)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    mamba2_step(**arguments)
    assert (len(launcher.ordinary), len(launcher.directly)) == (2, 0)


def test_a_profiler_sees_launches(launcher: Launcher) -> None:
    from triton import knobs

    def hook(metadata: object) -> None:
        """What a profiler would add."""

    arguments = arguments_of(make_inputs(CASE, CPU))
    mamba2_step(**arguments)
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        mamba2_step(**arguments)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert (len(launcher.ordinary), len(launcher.directly)) == (2, 0)


@pytest.mark.parametrize("change", [{"launch_pdl": True}, {"global_scratch_size": 8}, {"more": 1}], ids=str)
def test_where_triton_is_not_as_expected_launches_are_ordinary_and_it_is_said_once(
    change: dict[str, Any], launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launchers, "compiled_with", partial(compiled_with, **change))
    arguments = arguments_of(make_inputs(CASE, CPU))
    with pytest.warns(UserWarning, match="the ordinary way"):
        mamba2_step(**arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            mamba2_step(**arguments)
    assert (len(launcher.ordinary), len(launcher.directly)) == (3, 0)


def test_a_driver_that_fails_is_reported(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_launch_function", lambda: lambda *arguments: 700)
    arguments = arguments_of(make_inputs(CASE, CPU))
    mamba2_step(**arguments)
    with pytest.raises(RuntimeError, match="error 700"):
        mamba2_step(**arguments)


@pytest.mark.gpu
def test_a_new_thread_repeats_a_call() -> None:
    inputs = make_inputs(CASE, torch.device("cuda", 0))
    arguments = {**arguments_of(inputs), "update": False}
    want = mamba2_step(**arguments).clone()
    arguments["out"].zero_()
    thread = threading.Thread(target=lambda: mamba2_step(**arguments))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(arguments["out"], want)
