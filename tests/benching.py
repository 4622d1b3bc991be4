"""What tests of the benchmark share: small cases, and what stands in for a CUDA graph and for other libraries."""

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from flashstate import Slots, gated_delta_step
from flashstate.bench import measure, plot, timing
from flashstate.bench.binding import Binding, Step, Storing
from flashstate.bench.jobs import Job, Stored
from flashstate.bench.ops import OPS
from flashstate.bench.peers import Peer
from flashstate.bench.results import Row
from flashstate.bench.span import SpanCase
from flashstate.bench.timing import Timing
from flashstate.compat import flashinfer, mamba_ssm, vllm
from flashstate.proof import CASES, AnyCase, Case, ConvCase, DeltaCase, Inputs, Mamba3Case
from flashstate.reference.gated_delta import gated_delta_token

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


def measure_in_the_interpreter(monkeypatch: pytest.MonkeyPatch, cold_bytes: int = 1 << 10) -> None:
    """Let few slots be cold, and run twice what a GPU would replay."""
    from flashstate.bench import roofs

    for module in (measure, timing):
        monkeypatch.setattr(module, "COLD_BYTES", cold_bytes)
    for module in (measure, roofs):
        monkeypatch.setattr(module, "time_launches", run_twice)


def spoiled(bind: Binding, spoil: Callable[[Inputs, Storing, Slots, Tensor], object]) -> Binding:
    """A binding whose pool, snapshots or output are spoiled after the call."""

    def bind_and_spoil(inputs: Inputs, storing: Storing) -> Step:
        step = bind(inputs, storing)

        def call(slots: Slots) -> Tensor:
            y = step(slots)()
            spoil(inputs, storing, slots, y)
            return y

        return lambda slots: lambda: call(slots)

    return bind_and_spoil


def panels_drawn(rows: Sequence[Row], monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """The title and the lines, by label, of every panel in the picture of these rows."""
    from matplotlib.figure import Figure

    figures: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure))
    plot.draw(rows, {}, Path("not written"))
    panels = [panel for panel in figures[0].axes if panel.get_visible()]
    return [(panel.get_title(), {line.get_label(): line for line in panel.get_lines()}) for panel in panels]


# Other libraries: by our doors with their signatures, or by their contracts


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


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor, initial_state: Tensor,
    output_final_state: bool, use_qk_l2norm_in_kernel: bool, use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool, state_v_first: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """As fla: a token axis always, a state per row of the batch, and a new one in float32 where it is asked for."""
    assert use_gate_in_kernel
    assert use_beta_sigmoid_in_kernel
    assert state_v_first
    s, outputs = initial_state.float(), []
    for t in range(q.shape[1]):
        token = (x[:, t] for x in (q, k, v, g, beta))
        o, s = gated_delta_token(s, *token, A_log, dt_bias, None, None, use_qk_l2norm_in_kernel)
        outputs.append(o)
    return torch.stack(outputs, 1).to(v.dtype), s if output_final_state else None


def packed_decode(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, scale: float, initial_state: Tensor,
    out: Tensor, ssm_state_indices: Tensor, use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As vLLM: q, k and v of a token side by side, and slot 0 is padding."""
    _, HV, V, K = initial_state.shape
    keys = (mixed_qkv.shape[1] - HV * V) // 2
    q, k, v = mixed_qkv.split([keys, keys, HV * V], dim=1)
    q, k, v = q.reshape(-1, keys // K, K), k.reshape(-1, keys // K, K), v.reshape(-1, HV, V)
    gated_delta_step(
        initial_state, q, k, v, a, b, A_log=A_log, dt_bias=dt_bias, scale=scale, qk_l2norm=use_qk_l2norm_in_kernel,
        slots=Slots(ssm_state_indices, null=0), out=out[:, 0],
    )  # fmt: skip
    return out, initial_state


def sigmoid_gating_update(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, initial_state: Tensor,
    ssm_state_indices: Tensor, num_accepted_tokens: Tensor, use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As vLLM: the state after every token is stored in its slot, unless that is 0; a row reads the last accepted."""
    slots = Slots(ssm_state_indices, accepted=num_accepted_tokens, write=ssm_state_indices, null=0)
    gates = {"A_log": A_log, "dt_bias": dt_bias, "qk_l2norm": use_qk_l2norm_in_kernel}
    return gated_delta_step(initial_state, q, k, v, a, b, **gates, slots=slots), initial_state


def decode_pretranspose(
    q: Tensor, k: Tensor, v: Tensor, state: None, A_log: Tensor, a: Tensor, dt_bias: Tensor, b: Tensor,
    initial_state: Tensor, initial_state_indices: Tensor, output: Tensor | None = None, use_qk_l2norm: bool = True,
    intermediate_states_buffer: Tensor | None = None, disable_state_update: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As newer releases of FlashInfer: a token axis always, and several tokens only of bfloat16 states."""
    assert v.shape[1] == 1 or initial_state.dtype == torch.bfloat16
    assert v.shape[1] > 1 or not disable_state_update
    y = gated_delta_step(
        initial_state, q, k, v, a, b, A_log=A_log, dt_bias=dt_bias, qk_l2norm=use_qk_l2norm, out=output,
        slots=initial_state_indices, snapshots=intermediate_states_buffer, update=not disable_state_update,
    )  # fmt: skip
    return y, initial_state


STAND_INS: dict[str, dict[str, list[Callable[..., Any]]]] = {
    "mamba2": {
        "vllm": [vllm.selective_state_update],
        "flashinfer": [flashinfer.selective_state_update],
        "mamba_ssm": [mamba_ssm.selective_state_update],
        "fla": [simple_gla],
    },
    "gated_delta": {
        "vllm": [packed_decode, sigmoid_gating_update],
        "flashinfer": [decode_pretranspose, flashinfer.gated_delta_rule_mtp],
        "fla": [gated_delta_rule],
    },
    "mamba3": {"mamba_ssm": [mamba_ssm.mamba3_step_fn]},
    "conv1d": {"vllm": [vllm.causal_conv1d_update]},
}


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


def pretend_all(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """Install a stand-in for every peer of an op."""
    for name, functions in STAND_INS.get(op, {}).items():
        pretend(monkeypatch, OPS[op].peers[name], functions)
