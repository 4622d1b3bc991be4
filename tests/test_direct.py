"""Calls that repeat earlier ones reach their kernels directly; a stand-in for Triton shows with which arguments."""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from calls import BY_NAME, DELTA_REPLAY, FORMS, MAMBA2, OPS, REPLAY, Arguments, Form, planned
from compiling import by_the_reference
from launchers import Launcher, launcher
from refusals import at
from torch import Tensor

from flashstate import Slots, debug, mamba2_step
from flashstate.launch import Config, direct, driver, override
from flashstate.launch.call import Op
from flashstate.launch.environment import suspended
from flashstate.launch.registered import Piece
from flashstate.launch.repeat import repeat_function
from flashstate.launch.start import collecting
from flashstate.ops.conv1d import CONV1D_STEP
from flashstate.ops.gated_delta import GATED_DELTA_STEP
from flashstate.ops.gated_delta_replay import GATED_DELTA_REPLAY
from flashstate.ops.mamba2 import MAMBA2_STEP
from flashstate.ops.mamba3 import MAMBA3_STEP
from flashstate.ops.replaying import parted
from flashstate.proof import AnyReplayCase, make_inputs

__all__ = ["launcher"]  # a fixture
EVERY_REPLAY = pytest.mark.parametrize("case", [REPLAY, DELTA_REPLAY], ids=lambda case: case.op.declared.name)


def as_tensor(op: Op, arguments: Arguments) -> Arguments:
    """A call whose states and snapshots are tensors, if the op takes them so: launches of all calls on tensors lie
    together."""
    if not op.takes_state:
        return arguments
    snapshots = arguments.get("snapshots")
    bare = {} if snapshots is None or snapshots.scale is not None else {"snapshots": snapshots.data}
    return {**arguments, "state": arguments["state"].data, **bare}


def of_another_layer(state: Any) -> Any:
    """The same with another stream, which tells no calls apart."""
    return replace(state, ssm=replace(state.ssm, stream=8)) if hasattr(state, "ssm") else replace(state, stream=8)


@pytest.mark.parametrize("name", FORMS)
def test_calls_of_all_forms_are_told_apart_and_repeated_directly_as_ordinary_launches_are_made(
    name: str, launcher: Launcher
) -> None:
    """However many were started before, each starts what it would start alone, the second time on other tensors."""
    op, forms = BY_NAME[name], FORMS[name]
    calls, again = ({form: made.arguments for form, made in forms.items()} for _ in range(2))
    first = calls["plain"].get("state")
    for form, made in forms.items():
        if op.takes_state and made.bare:
            calls[form], again[form] = as_tensor(op, calls[form]), as_tensor(op, again[form])
        elif first is not None:  # states are told apart by being others, but those of one rank have to be by more
            of_one = not op.takes_state and made.bare and calls[form]["state"].rank == first.rank
            calls[form]["state"] = first if of_one else calls[form]["state"]
            again[form]["state"] = of_another_layer(calls[form]["state"])
    for n, each in enumerate((calls, again)):
        for started, (form, arguments) in enumerate(each.items(), 1):
            got = launcher.outcome(lambda a=arguments: op.function(**a))
            assert launcher.counts[1] == n * started, form
            with suspended():
                assert got == launcher.outcome(lambda a=arguments: op.function(**a)), form
    assert op.function(**arguments) is arguments["out"]


WORDS = {"rounding": ("stochastic",), "padding": ("fresh", "keep"), "pairing": ("interleaved", "halved")}


def unaligned(tensor: Tensor) -> Tensor:
    """A tensor of the same shape and strides at an address that is no multiple of 16."""
    memory = torch.zeros(tensor.untyped_storage().nbytes() // tensor.element_size() + 1, dtype=tensor.dtype)
    return memory[1:].as_strided(tensor.shape, tensor.stride(), 1)


def strided(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]]


def of_another_dtype(tensor: Tensor) -> Tensor:
    others = {torch.float32: torch.float16, torch.int32: torch.int64, torch.int64: torch.int32}
    return tensor.to(others.get(tensor.dtype, torch.float32))


def changed_values(piece: Piece, value: Any) -> Iterator[tuple[str, Any]]:
    """What may come in the place of one flat argument that a call has, right or wrong, each with a name."""
    yield "nothing", None
    yield "something else", [1.0]
    if isinstance(value, Tensor):
        yield "not aligned", unaligned(value)
        yield "other strides", strided(value)
        yield "another dtype", of_another_dtype(value)
        yield "another length", value[:-1]
        yield "of a graph", value.detach().clone().requires_grad_(value.is_floating_point())
        yield "transposed", value if value.dim() < 2 else value.mT.contiguous().mT
        yield "one axis more", value[..., None].repeat_interleave(32, -1)
    elif piece.kind is bool:
        yield from {"the other": not value, "a number": int(bool(value))}.items()
    elif piece.kind is int:
        yield from {"more": (value or 2) + 1, "a flag": True}.items()
    elif piece.kind is float:
        yield from {"a number": 0.5, "a whole number": 1, "a flag": True, "none": float("inf")}.items()
    elif piece.kind is tuple:
        pairs = {"two numbers": (0.25, 2.0), "others": (0.25, 3.0), "whole numbers": (0, 1), "flags": (False, True)}
        yield from {**pairs, "a list": [0.25, 2.0], "the wrong order": (2.0, 0.25), "one": (0.25,)}.items()
    else:
        yield from ((word, word) for word in (*WORDS.get(piece.path[-1], ()), "a word"))


def with_piece(holder: Any, path: tuple[str, ...], value: Any) -> Any:
    """An argument with another value of what its path leads to."""
    return value if not path else replace(holder, **{path[0]: with_piece(getattr(holder, path[0]), path[1:], value)})


def changed_calls(op: Op, arguments: Arguments) -> Iterator[tuple[str, Arguments]]:
    """Calls that differ from this one in one thing that an op declares: a tensor, a flag, a word, a number, also inside
    of a State, Slots and the like, or such an object itself."""
    for piece in op.pieces:
        first, *rest = piece.path
        value: Any = arguments[first]
        if isinstance(value, Tensor) and rest:  # bare, in the place of a State or of Slots
            rest = [] if rest in (["data"], ["read"]) else ["absent"]
        for attribute in rest:
            value = None if value is None else getattr(value, attribute, None)
        if value is None and rest:
            continue
        for what, changed in changed_values(piece, value):
            with suppress(AttributeError, RuntimeError, TypeError, ValueError):  # there is no such State
                made = with_piece(arguments[first], rest, changed)
                yield f"{'.'.join(piece.path)}: {what}", {**arguments, first: made}
    for what, out in (("what it is made of", arguments[op.main]), ("the memory of that", arguments[op.main][:])):
        yield f"out: {what}", {**arguments, "out": out}  # which is refused of trees
    for name, holder in arguments.items():
        if hasattr(holder, "written"):
            bare = {"tensor": getattr(holder, "data", getattr(holder, "read", None))}
            changes = {"nothing": None, "a word": "all", "another": replace(holder), **bare}
            yield from ((f"{name}: {what}", {**arguments, name: changed}) for what, changed in changes.items())


CHANGED: dict[str, tuple[str, ...]] = {  # forms of which everything is changed; every second one with bare tensors
    "mamba2_step": ("plain", "snapshots", "int8", "a tree"),
    "gated_delta_step": ("a scale", "at once, packed", "transposed", "a tree"),
    "mamba3_step": ("plain", "slots to choose from", "an output per rank"),
    "conv1d_step": ("plain", "snapshots", "rolled back", "a tree"),
    "mamba2_replay": ("a plan of packed tokens", "plain", "float16", "a plan"),
    "gated_delta_replay": ("a plan of packed tokens", "KDA", "a scale"),
}


@pytest.mark.parametrize(
    ("name", "form", "bare"), [(name, form, i % 2 == 1) for name in CHANGED for i, form in enumerate(CHANGED[name])]
)
def test_whatever_a_call_has_in_place_of_what_was_right_before_it_does_what_it_would_do_alone(
    name: str, form: str, bare: bool, launcher: Launcher
) -> None:
    """It is refused, or starts what an ordinary call starts, twice; and the call before it still goes directly."""
    op, arguments = BY_NAME[name], FORMS[name][form].arguments
    arguments = as_tensor(op, arguments) if bare else arguments
    op.function(**arguments)
    refused, different, repeated = 0, 0, 0
    for what, changed in changed_calls(op, arguments):
        ordinary, directly = launcher.counts
        got = [launcher.outcome(lambda a=changed: op.function(**a)) for _ in range(2)]
        started = launcher.counts[0] - ordinary
        with suspended():
            want = launcher.outcome(lambda a=changed: op.function(**a))
        assert got == [want, want], what
        op.function(**arguments)
        assert launcher.counts[1] > directly, what
        refused += isinstance(want, tuple)
        different += isinstance(want, list) and started > 0
        repeated += isinstance(want, list) and started < 2
    assert min(refused, different, repeated) > 10


def test_what_a_server_makes_anew_for_every_call_repeats_it(launcher: Launcher) -> None:
    for n, op in enumerate(OPS, 1):
        arguments = FORMS[op.name]["several tokens"].arguments
        for _ in range(2):
            anew = {**arguments, **{name: replace(a) for name, a in arguments.items() if hasattr(a, "written")}}
            with by_the_reference():
                anew |= planned(anew) if "ring" in anew else {}
            op.function(**anew)
        assert launcher.counts == (n, n)


@EVERY_REPLAY
def test_a_plan_is_for_its_own_rings_also_after_calls_that_were_right(case: AnyReplayCase, launcher: Launcher) -> None:
    made = Form(case.op.declared, replace(case, tokens=3))
    replay = case.op.step
    arguments, others = made.arguments, made.arguments
    with by_the_reference():
        right, wrong = arguments | planned(arguments), planned({**others, "ring": replace(others["ring"])})
        shorter = planned({**arguments, "ring": replace(arguments["ring"], window=7)})
    replay(**right)
    replay(**{**right, "slots": right["plan"].slots})  # which says nothing new
    for plan, message in ((wrong, "rings of other slots"), (shorter, "rings with a window of 7")):
        with pytest.raises(ValueError, match=f"plan was made for {message}"):
            replay(**{**right, "plan": plan["plan"]})
    with pytest.raises(ValueError, match="slots must be left out with a plan"):
        replay(**{**right, "slots": arguments["slots"].read.clone()})
    assert launcher.counts == (1, 1)


@EVERY_REPLAY
def test_both_kernels_of_a_large_batch_are_started_again(case: AnyReplayCase, launcher: Launcher) -> None:
    arguments = FORMS[case.op.declared.name]["int8"].arguments
    with by_the_reference():
        arguments |= planned(arguments)
    with parted():
        got = [launcher.outcome(lambda: case.op.step(**arguments)) for _ in range(2)]
    assert launcher.counts == (2, 2)
    assert got[0] == got[1]
    assert [len(attributes) for attributes in launcher.attributes] == [0, 1]  # the second does not wait for the first
    assert [constants["ROWS_DO"] for _, _, constants, *_ in got[0]] == ["keep", "fold"]
    assert [constants["PLACE"] for _, _, constants, *_ in got[0]] == ["first", "second"]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("op", [MAMBA2_STEP, GATED_DELTA_STEP, CONV1D_STEP, GATED_DELTA_REPLAY], ids=lambda op: op.name)
def test_only_calls_that_start_early_tell_the_driver_so(op: Op, early: bool, launcher: Launcher) -> None:
    """Both ways: Triton is told by an option, the driver by an attribute of the launch."""
    arguments = {**FORMS[op.name]["plain"].arguments, "early": early}
    for _ in range(2):
        op.function(**arguments)
    (started,) = launcher.ordinary
    told = started.constants["WAITS" if op is GATED_DELTA_REPLAY else "EARLY"]
    assert told == started.options.get("launch_pdl", False) == early
    assert [[(a.id, a.value) for a in found] for found in launcher.attributes] == [[(6, 1)] if early else []]


@pytest.mark.parametrize("alias", [("out", "x"), ("C", "B"), ("dt_bias", "D")], ids=str)
def test_a_tensor_may_be_given_twice(alias: tuple[str, str], launcher: Launcher) -> None:
    arguments = FORMS["mamba2_step"]["plain"].arguments
    twice = {**arguments, alias[0]: arguments[alias[1]]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            got = launcher.outcome(lambda: mamba2_step(**twice))
            mamba2_step(**arguments)
    assert len(launcher.directly) == (2 if alias == ("out", "x") else 1)  # others are rare, and take the ordinary way
    with suspended():
        assert got == launcher.outcome(lambda: mamba2_step(**twice))


def test_a_new_output_is_zero_where_padding_keeps_it(launcher: Launcher) -> None:
    arguments = {**FORMS["mamba2_step"]["plain"].arguments, "out": None}
    arguments |= at(padding="keep")(arguments)
    assert not any(mamba2_step(**arguments).any() for _ in range(2))
    assert launcher.counts == (1, 1)


def test_packed_calls_of_many_lengths_all_become_direct(launcher: Launcher) -> None:
    arguments = FORMS["mamba2_step"]["packed"].arguments
    tokens = {name: torch.cat([arguments[name]] * 5) for name in ("x", "dt", "B", "C", "z", "out")}
    calls = [{**arguments, **{name: tensor[:n] for name, tensor in tokens.items()}} for n in range(6, 26)]
    for call in calls * 2:
        mamba2_step(**call)
    assert launcher.counts == (20, 20)


def test_launches_are_forgotten_where_there_are_too_many(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = FORMS["mamba2_step"]["plain"].arguments
    monkeypatch.setattr(direct, "MOST_KEYS", 2)
    monkeypatch.setattr(direct, "MOST_ALIKE", 1)
    mamba2_step(**arguments)
    for _ in range(2):  # alike but for a tensor: not remembered
        mamba2_step(**{**arguments, "B": arguments["B"].half()})
    assert launcher.counts == (3, 0)
    for padding in ("fresh", "keep"):
        mamba2_step(**{**arguments, **at(padding=padding)(arguments)})
    for _ in range(2):
        mamba2_step(**arguments)
    assert launcher.counts == (6, 1)


def test_calls_with_tables_that_a_kernel_does_not_take_never_start_directly(launcher: Launcher) -> None:
    arguments = FORMS["mamba3_step"]["plain"].arguments
    arguments |= at(snapshot_rows=torch.tensor([1, 0]))(arguments)
    for _ in range(3):
        MAMBA3_STEP.function(**arguments)
    assert launcher.counts == (3, 0)


@contextmanager
def profiled() -> Iterator[None]:
    """A profiler wants to see launches."""
    from triton import knobs

    def hook(metadata: object) -> None:
        """What a profiler would add."""

    knobs.runtime.launch_enter_hook.add(hook)
    yield
    knobs.runtime.launch_enter_hook.remove(hook)


def on_another_device() -> Any:
    return mock.patch.object(torch._C, "_cuda_getDevice", return_value=1, create=True)


@pytest.mark.parametrize(
    "context", [debug, collecting, suspended, lambda: override(Config(8, 1, 8)), profiled, on_another_device]
)
def test_calls_in_a_context_that_looks_at_them_take_the_ordinary_way(
    context: Callable[[], Any], launcher: Launcher
) -> None:
    arguments = FORMS["mamba2_step"]["plain"].arguments
    mamba2_step(**arguments)
    with context():
        mamba2_step(**arguments)
    ordinary = 1 if context is collecting else 2  # which starts nothing
    assert launcher.counts == (ordinary, 0)
    mamba2_step(**arguments)
    assert launcher.counts == (ordinary, 1)


@pytest.mark.parametrize("change", [{"launch_pdl": True}, {"global_scratch_size": 8}, {}], ids=str)
def test_where_triton_is_not_as_expected_launches_are_ordinary_and_it_is_said_once(
    change: dict[str, Any], launcher: Launcher
) -> None:
    launcher.changes, launcher.more = change, int(not change)
    arguments = FORMS["mamba2_step"]["plain"].arguments
    with pytest.warns(UserWarning, match="the ordinary way"):
        mamba2_step(**arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            mamba2_step(**arguments)
    assert launcher.counts == (3, 0)


@pytest.mark.parametrize("broken", ["parameters_of", "code_of"])
def test_an_error_of_our_own_is_raised_and_the_direct_way_stays(
    broken: str, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, broken, mock.Mock(side_effect=KeyError("ours")))
    with pytest.raises(KeyError, match="ours"):
        mamba2_step(**FORMS["mamba2_step"]["plain"].arguments)
    assert direct.available


def test_a_driver_that_fails_is_reported_and_a_thread_without_a_context_gets_one(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors, chosen = [201, 0, 700], []
    monkeypatch.setattr(driver, "_launch_function", lambda: lambda *arguments: errors.pop(0))
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    arguments = FORMS["mamba2_step"]["plain"].arguments
    for _ in range(2):
        mamba2_step(**arguments)
    assert (errors, chosen) == ([700], [0])
    with pytest.raises(RuntimeError, match="error 700"):
        mamba2_step(**arguments)


def test_a_call_on_the_cpu_does_not_try_the_direct_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the first one, nor one behind calls that started kernels: no key is made, nothing is remembered."""
    pytest.importorskip("triton")
    op, arguments = MAMBA2_STEP, FORMS["mamba2_step"]["plain"].arguments
    op.launches.clear()
    monkeypatch.setattr(Slots, "signature", property(lambda slots: pytest.fail("a key was made")))
    for call in (op.first_call, repeat_function(op, op.own_kernel)):
        monkeypatch.setattr(op, "call", call)
        op.function(**arguments)
        assert op.call == call
    assert not op.launches


@pytest.mark.gpu
def test_a_new_thread_repeats_a_call() -> None:
    inputs = make_inputs(MAMBA2, torch.device("cuda", 0))
    out = torch.empty_like(inputs.main)
    want = inputs.step(out=out, update=False).clone()
    out.zero_()
    thread = threading.Thread(target=lambda: inputs.step(out=out, update=False))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(out, want)
