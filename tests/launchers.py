"""A stand-in for Triton and the CUDA driver: it shows which launches were made, in which way, and with what. And calls
that it is shown: forms of one, by what changes its arguments."""

import ctypes
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashstate.launch import direct, driver
from flashstate.launch.driver import LaunchAttribute, LaunchConfig, parameters_of
from flashstate.launch.start import Launch, Started
from flashstate.launch.suspension import suspended
from flashstate.ops import conv1d, gated_delta, mamba2, mamba2_replay, mamba3

Arguments = dict[str, Any]
Form = Callable[[Arguments], Arguments]


def parameters(arguments: Any) -> list[int]:
    """What a kernel gets, with the scratch memory that it does not use."""
    return [*parameters_of(arguments), 0, 0]


def compiled_with(arguments: Any, function: int, early: bool, more: int = 0, **changes: Any) -> Any:
    """What Triton compiled, as far as a launch asks for it."""
    declared = ", ".join([".param .b64 p"] * (len(parameters(arguments)) + more))
    metadata = SimpleNamespace(num_ctas=1, num_warps=2, shared=64)
    flags = {"launch_cooperative_grid": False, "launch_pdl": early, "global_scratch_size": 0, "profile_scratch_size": 0}
    launcher = SimpleNamespace(**{**flags, **changes})
    asm = {"ptx": f".entry step( {declared} ) {{}}"}
    return SimpleNamespace(metadata=metadata, run=launcher, function=function, asm=asm)


class Launcher:
    """Both ways to a kernel: `ordinary` has the launches that went through Triton, `directly` the parameters that the
    driver found in memory."""

    def __init__(self) -> None:
        self.ordinary: list[Started] = []
        self.directly: list[list[int]] = []
        self.configs: list[tuple[Any, ...]] = []
        self.attributes: list[list[LaunchAttribute]] = []

    def start(
        self, kernel: Any, grid: Any, device: torch.device, arguments: Any, constants: Any, *options: int
    ) -> Started:
        launch = Launch(kernel, grid, torch.device("cuda", 0), arguments, constants, *options)
        compiled = compiled_with(arguments, function=len(self.ordinary), early=launch.early)
        self.ordinary.append(Started(launch, compiled))
        return self.ordinary[-1]

    def launch(self, config_at: int, function: int, addresses_at: int, extra: None) -> int:
        """The driver: CUDA_SUCCESS."""
        config = LaunchConfig.from_address(config_at)
        self.configs.append((*config.grid, *config.block, config.shared_memory, config.stream, function))
        self.attributes.append([LaunchAttribute.from_address(config.attributes)] if config.num_attributes else [])
        count = len(parameters(self.ordinary[function].launch.arguments))
        addresses = (ctypes.c_uint64 * count).from_address(addresses_at)
        self.directly.append([ctypes.c_int64.from_address(address).value for address in addresses])
        return 0


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    pytest.importorskip("triton")
    stand_in = Launcher()
    for op in (conv1d, gated_delta, mamba2, mamba2_replay, mamba3):
        monkeypatch.setattr(op, "start", stand_in.start)
        monkeypatch.setattr(op, "uses_kernels", lambda device: True)
    for op in (conv1d, gated_delta, mamba2, mamba2_replay):
        monkeypatch.setattr(op, "lets_next_start", lambda device: True)
    for op in (gated_delta, mamba2, mamba2_replay):
        monkeypatch.setattr(op, "_launches_on_tensors", {})
    monkeypatch.setattr(conv1d, "launches", {})
    monkeypatch.setattr(direct, "available", True)
    monkeypatch.setattr(driver, "_launch_function", lambda: stand_in.launch)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 5, raising=False)
    return stand_in


def require_started_again(launcher: Launcher, op: Callable[..., Tensor], first: Arguments, again: Arguments) -> None:
    """The second of two calls starts the kernel directly, with what an ordinary launch would give it."""
    op(**first)
    assert op(**again) is again["out"]
    assert (len(launcher.ordinary), len(launcher.directly)) == (1, 1)
    with suspended():
        op(**again)
    want = launcher.ordinary[-1]
    assert launcher.configs == [(*want.launch.grid, 1, 1, 64, 1, 1, 64, 5, 0)]
    assert launcher.directly == [parameters(want.launch.arguments)]


def at(**tables: Any) -> Form:
    """With more fields of Slots: values, or what becomes of slot numbers."""

    def change(a: Arguments) -> Arguments:
        changed = {name: value(a["slots"].read) if callable(value) else value for name, value in tables.items()}
        return {**a, "slots": replace(a["slots"], **changed)}

    return change


def given(**values: Any) -> Form:
    return lambda a: {**a, **values}


def plain(a: Arguments) -> Arguments:
    return a


def unaligned(tensor: Tensor) -> Tensor:
    """The same values at an address that is no multiple of 16."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return memory[1:].view(tensor.shape).copy_(tensor)
