"""Starting a kernel: the one place from which launches leave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from importlib import import_module
from typing import Any, NamedTuple

import torch

from flashstate.launch.environment import suspended

# Contraction would save an instruction per element in a sum, but what it contracts differs between compiled variants: a
# token of a tree would not give the bytes it gives in a chain. FMAs are written where they are meant.
FP_FUSION = False
MOST_PROGRAMS = 1 << 31


class Launch(NamedTuple):
    """A kernel, and what it is started with."""

    kernel: Any
    grid: tuple[int, ...]  # how many programs there are
    device: torch.device
    values: Mapping[str, Any]  # what parameters of the kernel, and perhaps of others, are given, by their names
    num_warps: int
    registers: int = 0  # the most a thread may have; 0: as many as the compiler likes
    early: bool = False  # may start before the kernel in front of it on the stream has ended, for which it waits itself
    compiled: Any = None  # what Triton compiled for it, once it was started

    @property
    def arguments(self) -> list[Any]:
        """Runtime arguments, in the order of the kernel."""
        return [self.values[name] for name in self.kernel.runtime]

    @property
    def constants(self) -> dict[str, Any]:
        return {name: self.values[name] for name in self.kernel.constants}

    @property
    def options(self) -> dict[str, int | bool]:
        """What the compiler is told beside constants."""
        limit = {"maxnreg": self.registers} if self.registers else {}
        early = {"launch_pdl": True} if self.early else {}
        return {"num_warps": self.num_warps, "enable_fp_fusion": FP_FUSION, **limit, **early}


def kernel_in(module: str, name: str | None = None) -> Any:
    """The kernel of this name, or of that of its file, in kernels/, which is imported only now: that imports triton."""
    return getattr(import_module(f"flashstate.kernels.{module}"), f"{name or module}_kernel")


_collected: ContextVar[list[Launch] | None] = ContextVar("collected launches", default=None)
_recorded: ContextVar[list[Launch] | None] = ContextVar("recorded launches", default=None)


def start(launch: Launch) -> Launch | None:
    """Launch a kernel on the current stream of its device; None where it is not launched, or not compiled."""
    collected = _collected.get()
    if collected is not None:
        collected.append(launch)
        return None
    started, recorded = run(launch), _recorded.get()
    if started is not None and recorded is not None:
        recorded.append(started)
    return started


def run(launch: Launch) -> Launch | None:
    """Launch a kernel as Triton does; None where it did not compile it, but interpreted."""
    with torch.cuda.device(launch.device) if launch.device.type == "cuda" else nullcontext():
        compiled = launch.kernel[launch.grid](*launch.arguments, **launch.constants, **launch.options)
    return None if compiled is None else launch._replace(compiled=compiled)


def check_programs(name: str, programs: int, of: str) -> None:
    """Raise where an argument needs more programs than a launch can have."""
    if programs >= MOST_PROGRAMS:
        raise ValueError(f"{name} must need fewer than 2^31 programs, got {programs} for {of}")


@contextmanager
def collecting() -> Iterator[list[Launch]]:
    """Collect what calls of this thread would launch inside, and launch nothing."""
    launches: list[Launch] = []
    before = _collected.set(launches)
    try:
        with suspended():
            yield launches
    finally:
        _collected.reset(before)


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Note what calls of this thread launch inside the ordinary way, all of it in their order."""
    launches: list[Launch] = []
    before = _recorded.set(launches)
    try:
        yield launches
    finally:
        _recorded.reset(before)
