"""Adapters remember what their calls started: a stand-in for Triton shows when they start the same again."""

import inspect
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from launchers import Launcher, launcher
from models_of_peers import Arguments
from peer_calls import Adapter
from peer_selective import FLASHINFER, SSM, VLLM
from test_compat_contracts import EACH_ADAPTER
from test_direct import on_another_device, profiled, unaligned
from torch import Tensor

from flashstate import State, debug
from flashstate.compat import causal_conv1d, fla, flashinfer, mamba_ssm, sglang, vllm, vllm_kda
from flashstate.launch import Config, direct, doors, override
from flashstate.launch.doors import KINDS, remembering
from flashstate.launch.environment import suspended
from flashstate.launch.start import collecting

__all__ = ["launcher"]  # a fixture
COMPUTED = {  # calls of adapters in which torch computes, and which therefore take the ordinary way
    "vllm.selective_state_update": ("stochastic",),
    "flashinfer.selective_state_update": ("accepted, a buffer",),
    "sglang.selective_state_update": ("stochastic", "a tree"),
    "vllm_replay.selective_state_update_replayssm_flashinfer": ("stochastic",),
    "vllm_replay.selective_state_update_replayssm_output_only": ("stochastic",),
    "vllm_delta.fused_recurrent_gated_delta_rule": ("no beta",),
    "vllm_kda.fused_recurrent_kda": ("a lower bound",),
    "vllm_kda.fused_recurrent_kda_packed_decode": ("a lower bound",),
    "sglang_delta.fused_sigmoid_gating_delta_rule_update": ("a tree",),
    "sglang_delta.fused_recurrent_gated_delta_rule_update": ("a tree", "no beta"),
    "flashinfer_delta.gated_delta_rule_mtp": ("also elsewhere",),
    "mamba_ssm.mamba3_step_fn": ("elsewhere", "no rows"),
    "vllm.causal_conv1d_update": ("blocks to",),
    "sglang.causal_conv1d_update": ("a tree",),
    "fla.fused_recurrent_gated_delta_rule": ("several tokens", "packed", "no states given", "no gates"),
    "fla.fused_recurrent_kda": ("several tokens", "packed"),
}


def elsewhere(arguments: Arguments) -> Arguments:
    """Arguments of the same strides in other memory."""
    return {name: moved(value) if isinstance(value, Tensor) else value for name, value in arguments.items()}


def moved(tensor: Tensor) -> Tensor:
    memory = torch.zeros(tensor.untyped_storage().nbytes() + 16, dtype=torch.uint8)
    start = (tensor.untyped_storage().data_ptr() - memory.data_ptr()) % 16
    made = memory[start : start + tensor.untyped_storage().nbytes()].view(tensor.dtype)
    return made.as_strided(tensor.shape, tensor.stride(), made.storage_offset() + tensor.storage_offset())


def outcome(adapter: Adapter, arguments: Arguments, launcher: Launcher) -> Any:
    """What a call does: which kernels it starts, what each is given but for memory that the call makes, and what comes
    back; or the error that it raises."""
    results: list[Any] = []
    found = launcher.outcome(lambda: results.append(adapter.function(**arguments)) or results[0])
    if isinstance(found, tuple):
        return found
    given = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    memory = [(at.data_ptr(), at.nbytes()) for at in (value.untyped_storage() for value in given.values())]

    def known(number: Any) -> Any:
        made = isinstance(number, int) and number >= 1 << 32 and not any(0 <= number - at < n for at, n in memory)
        return "made" if made else str(number)

    launches = sorted((name, grid, f"{constants} {more}", [*map(known, n)]) for name, grid, constants, more, n in found)
    result = results[0] if isinstance(results[0], tuple) else results
    names = {id(value): name for name, value in given.items()}
    looks = [one is not None and (one.shape, one.stride(), one.dtype) for one in result]
    return launches, [names.get(id(one), look) for one, look in zip(result, looks, strict=True)]


def remembered(adapter: Adapter) -> bool:
    """Whether its calls, all of one kind, start again what one of them started."""
    (kinds,) = KINDS[adapter.function.__wrapped__].values()
    return kinds[0].again is not None


@EACH_ADAPTER
def test_a_repeated_call_starts_what_an_ordinary_one_starts_unless_torch_computes_in_it(
    adapter: Adapter, launcher: Launcher
) -> None:
    for call in [*adapter.calls, *adapter.edges]:
        first = adapter.arguments(call)
        again = elsewhere(first)
        for _ in range(2):
            adapter.function(**first)
        ordinary, _ = launcher.counts
        got = outcome(adapter, again, launcher)
        computes = any(words in call for words in COMPUTED.get(adapter.name, ()))
        assert not KINDS[adapter.function.__wrapped__] or remembered(adapter) != computes, call
        assert computes or launcher.counts[0] == ordinary, call
        with suspended():
            assert got == outcome(adapter, again, launcher), call
        KINDS[adapter.function.__wrapped__].clear()


def test_every_door_remembers() -> None:
    modules = (causal_conv1d, fla, flashinfer, mamba_ssm, sglang, vllm, vllm_kda)
    functions = [f for module in modules for f in vars(module).values() if inspect.isfunction(f)]
    there = [f for f in functions if "flashstate.compat" in f.__module__ and "docs/compat.md" in (f.__doc__ or "")]
    assert len(there) > 20
    assert all(getattr(adapter, "__wrapped__", None) in KINDS for adapter in there)


def changes(value: Any) -> Iterator[tuple[str, Any]]:
    """What may come in the place of an argument, right or wrong."""
    if isinstance(value, Tensor):
        yield "not aligned", unaligned(value)
        yield "other strides", torch.cat([value, value], -1)[..., : value.shape[-1]]
        yield "another dtype", value.to(torch.float16 if value.is_floating_point() else torch.float32)
        yield "shorter", value[:-1]
        yield "one axis more", value[..., None]
        yield "a list", [1.0]
    elif isinstance(value, bool):
        yield from {"the other": not value, "a number": int(value)}.items()
    elif isinstance(value, int):
        yield from {"one more": value + 1, "a flag": bool(value), "a tensor": torch.tensor(value)}.items()
    elif isinstance(value, str):
        yield "another word", "a word"
    if value is not None:
        yield "nothing", None


@EACH_ADAPTER
def test_whatever_comes_in_the_place_of_what_was_right_before_does_what_it_would_do_alone(
    adapter: Adapter, launcher: Launcher
) -> None:
    defaults = {p.name: p.default for p in inspect.signature(adapter.function).parameters.values()}
    options = {name: value for name, value in defaults.items() if isinstance(value, (bool, int, str))}
    arguments = {**options, **adapter.arguments(next(iter(adapter.calls)))}
    refused, repeated = 0, 0
    for name, value in arguments.items():
        for what, other in changes(value):
            for _ in range(2):
                adapter.function(**arguments)
            changed, (ordinary, _) = {**arguments, name: other}, launcher.counts
            got = [outcome(adapter, changed, launcher) for _ in range(3)]
            repeated += launcher.counts[0] < ordinary + 3
            with suspended():
                want = outcome(adapter, changed, launcher)
            assert got == [want] * 3, f"{name}: {what}"
            refused += isinstance(want[0], type)
    assert min(refused, repeated) > 5


def test_a_state_that_is_an_object_is_known_by_its_form(launcher: Launcher) -> None:
    arguments = VLLM.arguments("in place")
    data = arguments.pop("state").to(torch.int8)
    for scale, stream in ((torch.ones(data.shape[:-1]), 0), (torch.ones(data.shape[:-1]), 3)):
        for _ in range(2):
            state = State(data, scale, stream=stream)
            got = outcome(VLLM, {**arguments, "state": state}, launcher)
        with suspended():
            assert got == outcome(VLLM, {**arguments, "state": state}, launcher)
    assert launcher.counts == (4, 2)


@pytest.mark.parametrize(
    "context", [debug, collecting, suspended, lambda: override(Config(16, 1, 2)), profiled, on_another_device]
)
def test_calls_in_a_context_that_looks_at_them_take_the_ordinary_way(context: Any, launcher: Launcher) -> None:
    arguments = SSM.arguments(next(iter(SSM.calls)))
    for _ in range(3):
        SSM.function(**arguments)
    _, directly = launcher.counts
    with context():
        SSM.function(**arguments)
    assert launcher.counts[1] == directly > 0
    SSM.function(**arguments)
    assert launcher.counts[1] == directly + 1


def test_no_tensor_of_a_user_is_kept_alive(launcher: Launcher) -> None:
    arguments = FLASHINFER.arguments(next(iter(FLASHINFER.calls)))
    watched = [weakref.ref(value) for value in arguments.values() if isinstance(value, Tensor)]
    for _ in range(3):
        FLASHINFER.function(**arguments)
    assert remembered(FLASHINFER)
    launcher.ordinary.clear()  # what stands in for Triton keeps all it saw
    del arguments
    assert [reference() for reference in watched] == [None] * len(watched)


def test_a_tensor_in_the_place_of_another_and_memory_given_twice_are_other_calls(launcher: Launcher) -> None:
    arguments = SSM.arguments(next(iter(SSM.calls)))
    exchanged = {"D": None, "dt_bias": arguments["D"]}
    arguments["dt_bias"] = None
    for change in (exchanged, {"z": arguments["x"]}, {"z": arguments["x"][:]}):
        for _ in range(2):
            SSM.function(**arguments)
        got = [outcome(SSM, {**arguments, **change}, launcher) for _ in range(2)]
        with suspended():
            assert got == [outcome(SSM, {**arguments, **change}, launcher)] * 2
    assert len(KINDS[SSM.function.__wrapped__]) == 2  # memory that is given twice is not remembered


def test_kinds_are_forgotten_where_there_are_too_many(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = SSM.arguments(next(iter(SSM.calls)))
    monkeypatch.setattr(doors, "MOST_KEYS", 2)
    monkeypatch.setattr(doors, "MOST_ALIKE", 1)
    known = KINDS[SSM.function.__wrapped__]
    for name in ("B", "B", "D", "z"):
        SSM.function(**arguments)
        SSM.function(**{**arguments, name: None if name != "B" else arguments[name].half()})
        assert len(known) <= 2
        assert all(len(alike) == 1 for alike in known.values())


def add(x: Tensor, y: Tensor | None = None, often: int = 1, **more: Any) -> Tensor:
    """An adapter whose calls start no kernel."""
    return x if y is None else x + y


def test_a_function_that_starts_no_kernel_is_called_every_time(launcher: Launcher) -> None:
    adapter, x = remembering(main="x")(add), torch.ones(3)
    for n in range(4):
        assert torch.equal(adapter(x, torch.full((3,), n), often=n), x + n)
        assert adapter(x, often=2, word=["a list"]) is x
        assert adapter(x) is x
    assert inspect.signature(adapter) == inspect.signature(add)
    assert adapter.__name__ == "add"


def test_where_triton_is_not_as_expected_it_is_said_once(launcher: Launcher) -> None:
    launcher.more = 1
    arguments = SSM.arguments(next(iter(SSM.calls)))
    with pytest.warns(UserWarning, match="the ordinary way"):
        SSM.function(**arguments)
    assert not direct.available
    SSM.function(**arguments)
    assert launcher.counts == (2, 0)
