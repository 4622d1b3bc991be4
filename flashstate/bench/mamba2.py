"""The benchmark of mamba2_step: its jobs, and its peers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flashstate.bench.jobs import BenchedOp, Grid, Shape, grouped_case
from flashstate.bench.peers import (
    IN_PLACE,
    Launch,
    MeasurementError,
    Peer,
    Step,
    Storing,
    require_in_place,
    require_plain_states,
    step_of,
)
from flashstate.ops.mamba2 import mamba2_step
from flashstate.proof import Case, Inputs
from flashstate.state.slots import Slots

COMMON = Case(x="bfloat16", bc="bfloat16", dt="bfloat16")  # with float32 parameters and a gate
HOST_CASE = replace(COMMON, batch=4, heads=16, groups=1, rows=64, cols=128, slots=16)
case_of = partial(grouped_case, COMMON)
FLASHINFER_ROUNDINGS = {
    torch.float32: ("nearest",),
    torch.bfloat16: ("nearest",),
    torch.float16: ("nearest", "stochastic"),
    torch.int16: ("nearest",),
}


def bind_flashstate(inputs: Inputs, storing: Storing = IN_PLACE, *, bare: bool = False) -> Step:
    arguments = {**inputs.arguments, **inputs.options, "state": inputs.state.data if bare else inputs.state}
    arguments["out"] = torch.empty_like(inputs.arguments["x"])
    arguments.update(snapshots=storing.snapshots, update=storing.update)
    return step_of(mamba2_step, arguments, bare)


def bind_mamba_ssm(update: Callable[..., Tensor], inputs: Inputs, storing: Storing) -> Step:
    require_plain_states(inputs)
    require_in_place(storing)
    if inputs.arguments["x"].dim() != 3:
        raise MeasurementError("only compared with one token per call")
    if inputs.state.data.numel() >= 1 << 31:
        raise MeasurementError("it has 32-bit offsets, and this pool is larger")
    arguments = expanded(inputs)
    return lambda slots: lambda: update(**arguments, state_batch_indices=slots.read)


def bind_vllm(update: Callable[..., None], inputs: Inputs, storing: Storing) -> Step:
    """Several tokens are packed. Newer releases take slot 0 for padding unless told otherwise, older ones only -1."""
    require_plain_states(inputs)
    require_in_place(storing)
    out = torch.empty_like(inputs.arguments["x"])
    arguments = {**expanded(inputs), "out": out}
    if out.dim() == 4:
        packed = {name: arguments[name].flatten(0, 1) for name in ("x", "dt", "B", "C", "z", "out")}
        batch, tokens = out.shape[:2]
        bounds = torch.arange(batch + 1, dtype=torch.int32, device=out.device) * tokens
        arguments.update(packed, cu_seqlens=bounds)
    if "null_block_id" in inspect.signature(update).parameters:
        update = partial(update, null_block_id=-1)

    def step(slots: Slots) -> Launch:
        def launch() -> Tensor:
            update(**arguments, state_batch_indices=slots.read)
            return out

        return launch

    return step


def bind_flashinfer(update: Callable[..., Tensor], inputs: Inputs, storing: Storing) -> Step:
    """It wants dt in the dtype of D and dt_bias: dt is widened, which changes no value."""
    state, x = inputs.state, inputs.arguments["x"]
    if state.rounding not in FLASHINFER_ROUNDINGS.get(state.data.dtype, ()):
        raise MeasurementError(f"it has no {state.format.name} states rounded {state.rounding}")
    arguments = expanded(inputs, dt=inputs.arguments["dt"].to(inputs.options["dt_bias"].dtype))
    arguments["out"] = torch.empty_like(x)
    if state.scale is not None:
        arguments["state_scale"] = state.scale
    if state.rounding == "stochastic":
        seed = torch.zeros(1, dtype=torch.int64, device=x.device)  # one for all slots
        arguments.update(rand_seed=seed, philox_rounds=state.rounds)
    if x.dim() == 4:
        arguments["cache_steps"] = x.shape[1]
    if storing.snapshots is None:
        arguments["disable_state_update"] = not storing.update
        return lambda slots: lambda: update(**arguments, state_batch_indices=slots.read)
    arguments.update(disable_state_update=True, intermediate_states_buffer=storing.snapshots.data)
    if storing.snapshots.scale is not None:
        arguments["intermediate_state_scales"] = storing.snapshots.scale
    return lambda slots: (
        lambda: update(**arguments, state_batch_indices=slots.read, intermediate_state_indices=slots.snapshot_rows)
    )


def bind_fla(attend: Callable[..., tuple[Tensor, Tensor]], inputs: Inputs, storing: Storing) -> Step:
    """Linear attention with a decay per head is the recurrence of Mamba-2: q = C, k = B, v = dt x, g = dt A. It has no
    pool, no groups, no softplus, no skip and no gate, so its step does what its users do: torch around the call."""
    require_plain_states(inputs)
    require_in_place(storing)
    if "state_v_first" not in inspect.signature(attend).parameters:
        raise MeasurementError("this release has no state_v_first, which gives states our layout")
    pool, heads = inputs.state.data, inputs.state.data.shape[1]
    A, D, dt_bias = inputs.arguments["A"], inputs.options["D"], inputs.options["dt_bias"]
    tokens = {**inputs.arguments, "z": inputs.options["z"]}
    has_axis = tokens["x"].dim() == 4
    x, z, dt, B, C = (tokens[name] if has_axis else tokens[name][:, None] for name in ("x", "z", "dt", "B", "C"))

    def per_head(t: Tensor) -> Tensor:
        return t.repeat_interleave(heads // t.shape[2], dim=2)  # (batch, T, G, N) -> (batch, T, H, N)

    def launch(slots: Slots) -> Tensor:
        rows = slots.read.long()
        sizes = functional.softplus(dt + dt_bias)  # (batch, T, H), float32
        y, after = attend(
            per_head(C), per_head(B), sizes[..., None] * x, sizes * A, scale=1.0,
            initial_state=pool[rows], output_final_state=True, state_v_first=True,
        )  # fmt: skip
        pool.index_copy_(0, rows, after.to(pool.dtype))
        return ((y + D[:, None] * x) * functional.silu(z.float())).to(x.dtype)

    return lambda slots: partial(launch, slots)


def expanded(inputs: Inputs, dt: Tensor | None = None) -> dict[str, Any]:
    """All arguments but the slots, with what is one per head expanded along it, as selective_state_update wants it."""
    _, heads, rows, cols = inputs.state.data.shape
    dt = inputs.arguments["dt"] if dt is None else dt
    per_head = {name: inputs.options[name][:, None].expand(heads, rows) for name in ("D", "dt_bias")}
    return {
        **inputs.arguments,
        **inputs.options,
        **per_head,
        "state": inputs.state.data,
        "dt": dt[..., None].expand(*dt.shape, rows),
        "A": inputs.arguments["A"][:, None, None].expand(heads, rows, cols),
    }


UPDATE = "selective_state_update"
PEERS = {
    "vllm": Peer("vllm.model_executor.layers.mamba.ops.mamba_ssm", (UPDATE,), bind_vllm),
    "flashinfer": Peer("flashinfer.mamba", (UPDATE,), bind_flashinfer),
    "mamba_ssm": Peer("mamba_ssm.ops.triton.selective_state_update", (UPDATE,), bind_mamba_ssm),
    "fla": Peer("fla.ops.simple_gla", ("fused_recurrent_simple_gla",), bind_fla),
}
SHAPE = Shape(16, 1, 64, 128)
MAMBA2 = BenchedOp("mamba2", bind_flashstate, case_of, (Grid((SHAPE,)),), PEERS, HOST_CASE)
