"""What tests of the benchmark share: when kernels can run, and what stands in for a CUDA graph and other libraries."""

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest

from flashstate.bench import measure, timing
from flashstate.bench.peers import Peer
from flashstate.bench.timing import Timing

NEEDS_INTERPRETER = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None,
    reason="needs triton and TRITON_INTERPRET=1",
)
TWO_MICROSECONDS = Timing(2.0, 1.9, 2.2)


def run_twice(launches: Sequence[Callable[[], object]], flush: bool) -> Timing:
    """In the place of a CUDA graph."""
    for launch in launches[:2]:
        launch()
    return TWO_MICROSECONDS


def measure_in_the_interpreter(monkeypatch: pytest.MonkeyPatch, cold_bytes: int = 1 << 12) -> None:
    """Let few slots be cold, and run twice what a GPU would replay."""
    from flashstate.bench import roofs

    for module in (measure, timing):
        monkeypatch.setattr(module, "COLD_BYTES", cold_bytes)
    for module in (measure, roofs):
        monkeypatch.setattr(module, "time_launches", run_twice)


def pretend(monkeypatch: pytest.MonkeyPatch, peer: Peer, functions: Sequence[Callable[..., Any]] | None) -> None:
    """Install a library with these functions; with None one that cannot be imported."""
    if functions is None:
        monkeypatch.setitem(sys.modules, peer.module, None)
        return
    package = peer.module.split(".")[0]
    module, parent = ModuleType(peer.module), ModuleType(package)
    for name, function in zip(peer.functions, functions, strict=True):
        setattr(module, name, function)
    parent.__version__ = "1.2"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package, parent)
    monkeypatch.setitem(sys.modules, peer.module, module)
