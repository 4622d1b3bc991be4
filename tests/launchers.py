"""A stand-in for Triton and the CUDA driver: it shows which launches were made, in which way, and with what."""

import ctypes
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calls import OPS
from torch import Tensor

from flashstate.launch import direct, doors, driver
from flashstate.launch import start as starting
from flashstate.launch.driver import LaunchAttribute, LaunchConfig
from flashstate.launch.environment import Gpu, Machine, pretending
from flashstate.launch.start import Launch


def parameters(arguments: Any) -> list[int]:
    """What a kernel gets: addresses, numbers, the bits of float32, and the scratch memory that it does not use."""
    words = [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments]
    bits = [struct.unpack("<q", struct.pack("<f4x", word))[0] if isinstance(word, float) else word for word in words]
    return [*(word for word in bits if word is not None), 0, 0]


@dataclass
class Launcher:
    """Both ways to a kernel: `ordinary` has the launches that went through Triton, `directly` the parameters that the
    driver found in memory."""

    ordinary: list[Launch] = field(default_factory=list)
    directly: list[list[int]] = field(default_factory=list)
    configs: list[tuple[Any, ...]] = field(default_factory=list)
    attributes: list[list[LaunchAttribute]] = field(default_factory=list)
    changes: dict[str, Any] = field(default_factory=dict)  # of what Triton says of a kernel
    more: int = 0  # parameters than a kernel should have

    def start(self, launch: Launch) -> Launch:
        launch = launch._replace(device=torch.device("cuda", 0))
        self.ordinary.append(launch._replace(compiled=self.compiled(launch)))
        return self.ordinary[-1]

    def compiled(self, launch: Launch) -> Any:
        """What Triton compiled, as far as a launch asks for it."""
        declared = ", ".join([".param .b64 p"] * (len(parameters(launch.arguments)) + self.more))
        flags = {"launch_cooperative_grid": False, "global_scratch_size": 0, "profile_scratch_size": 0}
        return SimpleNamespace(
            metadata=SimpleNamespace(num_ctas=1, num_warps=2, shared=64),
            run=SimpleNamespace(**{**flags, "launch_pdl": launch.early, **self.changes}),
            function=len(self.ordinary),
            asm={"ptx": f".entry step( {declared} ) {{}}"},
        )

    def launch(self, config_at: int, function: int, addresses_at: int, extra: None) -> int:
        """The driver: CUDA_SUCCESS."""
        config = LaunchConfig.from_address(config_at)
        self.configs.append((*config.grid, *config.block, config.shared_memory, config.stream, function))
        self.attributes.append([LaunchAttribute.from_address(config.attributes)] if config.num_attributes else [])
        count = len(parameters(self.ordinary[function].arguments))
        addresses = (ctypes.c_uint64 * count).from_address(addresses_at)
        self.directly.append([ctypes.c_int64.from_address(address).value for address in addresses])
        return 0

    @property
    def counts(self) -> tuple[int, int]:
        """How many launches went either way."""
        return len(self.ordinary), len(self.directly)

    def outcome(self, make: Callable[[], Any]) -> Any:
        """What a call does, whichever way it takes: the kernels it starts and what each is given, with a word for the
        address of the result; or the error that it raises."""
        ordinary, directly = self.counts
        try:
            result = make()
        except (RuntimeError, TypeError, ValueError) as error:
            return type(error), str(error)
        found = [(one, one.grid, parameters(one.arguments)) for one in self.ordinary[ordinary:]]
        result = result[0] if isinstance(result, tuple) else result
        for config, given in zip(self.configs[directly:], self.directly[directly:], strict=True):
            assert config[1:8] == (1, 1, 64, 1, 1, 64, 5)
            found.append((self.ordinary[config[-1]], config[:1], given))
        return [
            (
                launch.kernel.__name__, grid, dict(launch.constants), launch.options,
                ["the result" if value == result.data_ptr() else value for value in given],
            )
            for launch, grid, given in found
        ]  # fmt: skip


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    pytest.importorskip("triton")
    stand_in = Launcher()
    for remembered in (*(op.launches for op in OPS), *doors.KINDS.values()):
        remembered.clear()
    monkeypatch.setattr(starting, "run", stand_in.start)
    monkeypatch.setattr(direct, "available", True)
    monkeypatch.setattr(driver, "_launch_function", lambda: stand_in.launch)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 5, raising=False)
    with pretending(Machine(Gpu("a GPU nobody measured", (9, 0)), "sm_89", overlaps=True)):
        yield stand_in
