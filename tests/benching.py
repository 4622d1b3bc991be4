"""What tests of the benchmark share: small cases, and what stands in for a CUDA graph and for other libraries."""

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashstate import Slots
from flashstate.bench import measure, timing
from flashstate.bench.binding import Binding, Step, Storing
from flashstate.bench.jobs import Job, Stored
from flashstate.bench.ops import OPS
from flashstate.bench.peers import Peer
from flashstate.bench.span import SpanCase
from flashstate.bench.timing import Timing
from flashstate.compat import fla, flashinfer, mamba_ssm, vllm
from flashstate.proof import CASES, AnyCase, Case, ConvCase, DeltaCase, Inputs, Mamba3Case

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NEEDS_INTERPRETER = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None,
    reason="needs triton and TRITON_INTERPRET=1",
)
TWO_MICROSECONDS = Timing(2.0, 1.9, 2.2)
# The interpreter's bfloat16 is wrong. Of ops that are not named here it is the first small case.
TINY: dict[str, AnyCase] = {
    **{op.removesuffix("_step"): replace(cases.quick[0], index="int32") for op, cases in CASES.items()},
    "mamba2": Case(batch=2, heads=2, groups=1, rows=4, cols=16, slots=5, x="float16", bc="float16"),
    "mamba2_replay": Case(batch=2, heads=1, groups=1, rows=16, cols=16, slots=5),
    "gated_delta": DeltaCase(2, 4, 2, 4, 16, slots=5, x="float16", qk="float16", gates="float16"),
    "gated_delta_replay": DeltaCase(2, 2, 2, 4, 16, slots=5, x="float16", qk="float16", gates="float16"),
    "mamba3": Mamba3Case(2, 2, 1, 16, 16, rank=2, angles=0, slots=5),
    "conv1d": ConvCase(2, 8, 4, slots=5),
    "span": SpanCase(2, 2, 1, 4, 8, slots=4),
}


def tiny_job(op: str, stored: Stored = "last", **changes: Any) -> Job:
    """A small job of an op."""
    return OPS[op].job(OPS[op].name, replace(TINY[op], **changes), stored)


def run_twice(launches: Sequence[Callable[[], object]], replays: int = 0, flush: bool = False) -> Timing:
    """Run two launches, in the place of a CUDA graph."""
    for launch in launches[:2]:
        launch()
    return TWO_MICROSECONDS


class Clock:
    """Seconds that pass by one with every look at them."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def measure_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let few slots be cold, and run twice what a GPU would replay."""
    from flashstate.bench import roofs

    for module in (measure, timing):
        monkeypatch.setattr(module, "COLD_BYTES", 1 << 10)
    for module in (measure, roofs):
        monkeypatch.setattr(module, "time_launches", run_twice)


def spoiled(bind: Binding, spoil: Callable[[Inputs, Storing, Slots, Tensor], object]) -> Binding:
    """A binding whose pool, snapshots or output are spoiled after the call."""

    def bind_and_spoil(inputs: Inputs, storing: Storing) -> Step:
        def call(slots: Slots) -> Tensor:
            y = bind(inputs, storing)(slots)()
            spoil(inputs, storing, slots, y)
            return y

        return lambda slots: partial(call, slots)

    return bind_and_spoil


# Other libraries: adapters with their signatures, or their contracts


def simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, initial_state: Tensor, output_final_state: bool,
    state_v_first: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As fla: (batch, T, heads, ...), and states that are rows x columns only when asked."""
    assert output_final_state
    assert q.shape == k.shape == (*v.shape[:3], initial_state.shape[3 if state_v_first else 2])
    s, outputs = initial_state.float(), []
    for t in range(q.shape[1]):
        s = s * g[:, t, :, None, None].exp() + v[:, t, :, :, None] * k[:, t, :, None, :].float()
        outputs.append(scale * (s * q[:, t, :, None, :].float()).sum(-1))
    return torch.stack(outputs, 1).to(q.dtype), s


ADAPTERS = {"vllm": vllm, "flashinfer": flashinfer, "mamba_ssm": mamba_ssm, "fla": fla}
STAND_INS: dict[str, dict[str, list[Callable[..., Any]]]] = {
    name: {
        peer: [getattr(ADAPTERS[peer], function, simple_gla) for function in op.peers[peer].functions]
        for peer in op.peers
    }
    for name, op in OPS.items()
    if op.peers
}


def pretend(monkeypatch: pytest.MonkeyPatch, peer: Peer, functions: Sequence[Callable[..., Any]] | None) -> None:
    """Install a library with these functions; with None one that cannot be imported."""
    if functions is None:
        monkeypatch.setitem(sys.modules, peer.module, None)
        return
    module = SimpleNamespace(**dict(zip(peer.functions, functions, strict=True)))
    monkeypatch.setitem(sys.modules, peer.module.split(".")[0], SimpleNamespace(__version__="1.2"))
    monkeypatch.setitem(sys.modules, peer.module, module)


def pretend_all(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """Install a stand-in for every peer of an op."""
    for name, functions in STAND_INS.get(op, {}).items():
        pretend(monkeypatch, OPS[op].peers[name], functions)
