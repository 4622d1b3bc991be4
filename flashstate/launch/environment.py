"""Where calls run, on what and which way: what kernels and configs know of a device. Tests replace this one place."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from flashstate.state.actions import provide

WALKING_CAPABILITY = (10, 0)  # from here on sums over lanes are the bottleneck


class Gpu(NamedTuple):
    """What decides a config: the name that tables are filed under, and the compute capability."""

    name: str
    capability: tuple[int, int]


@dataclass(frozen=True)
class Machine:
    """What kernels run on. Stored states have the same bytes with every target."""

    gpu: Gpu
    target: str  # the instructions that kernels may use: "interpreter", "portable", "sm_80" or "sm_89"
    nvidia: bool = True
    warp: int = 32  # threads; those AMD GPUs that have 32 are content with rows for 64
    overlaps: bool = False  # a kernel can let the next one start before it ends: programmatic dependent launch
    processors: int = 2  # multiprocessors there are; few, so that programs walk


# An interpreted CPU stands for a GPU without a table, and for one whose lanes do not depend on the tokens: the
# interpreter sums over lanes as numpy does, and so not in the order of fewer lanes.
INTERPRETER = Machine(Gpu("interpreter", WALKING_CAPABILITY), "interpreter", nvidia=False)

pretended: Machine | None = None  # what calls on CPU tensors run kernels on; None: they run the reference
suspensions = 0  # of the direct way to a kernel: above 0 every call takes the ordinary way
_lock = threading.Lock()


@contextmanager
def replaced(names: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    """Give a name of a module, whose globals these are, another value inside."""
    before, names[name] = names[name], value
    try:
        yield
    finally:
        names[name] = before


def pretending(machine: Machine) -> AbstractContextManager[None]:
    """Send ops on CPU tensors to kernels, as if on this machine: for those who collect launches or stand in for one."""
    return replaced(globals(), "pretended", machine)


@contextmanager
def suspended() -> Iterator[None]:
    """Let every call inside take the ordinary way, to be checked, collected or configured otherwise; those of other
    threads too."""
    global suspensions
    with _lock:
        suspensions += 1
    try:
        yield
    finally:
        with _lock:
            suspensions -= 1


@contextmanager
def interpreted() -> Iterator[None]:
    """Send ops on CPU tensors through the Triton kernels, run by Triton's interpreter."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("the interpreter needs TRITON_INTERPRET=1 in the environment before triton is imported")
    with pretending(INTERPRETER), suspended():
        yield


def uses_kernels(device: torch.device) -> bool:
    """True where a call on `device` runs kernels/, False where it runs reference/."""
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"state is on {device}; flashstate runs on cuda and cpu devices")
    return device.type == "cuda" or pretended is not None


def machine_of(device: torch.device) -> Machine:
    """What kernels run on for tensors on `device`."""
    if device.type == "cuda":
        return _cuda_machine(device)
    return INTERPRETER if pretended is None else pretended


@provide
def nvidia_capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of what calls run on for tensors on `device`; None: it is no GPU of NVIDIA."""
    machine = machine_of(device)
    return machine.gpu.capability if machine.nvidia else None


def warp_size() -> int:
    """Threads of a warp, where no device is named."""
    return pretended.warp if pretended is not None else 32 if torch.version.hip is None else 64


@functools.cache
def _cuda_machine(device: torch.device) -> Machine:
    capability = torch.cuda.get_device_capability(device)
    nvidia = torch.version.cuda is not None
    target = "sm_89" if capability >= (8, 9) else "sm_80" if capability >= (8, 0) else "portable"
    return Machine(
        Gpu(torch.cuda.get_device_name(device), capability),
        target if nvidia else "portable",
        nvidia,
        warp=32 if torch.version.hip is None else 64,
        overlaps=nvidia and capability >= (9, 0),
        processors=torch.cuda.get_device_properties(device).multi_processor_count,
    )
