"""The benchmark of mamba2_step: its jobs, and its peers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flashstate.bench.jobs import SPARE_SLOTS, BenchedOp, Formats, Job, Shape
from flashstate.bench.peers import MeasurementError, Peer, Step
from flashstate.ops.mamba2 import mamba2_step
from flashstate.state.slots import Slots
from flashstate.testing import Case, Inputs, Pool

COMMON = Case(x="bfloat16", bc="bfloat16", dt="bfloat16")  # with float32 parameters and a gate
HOST_CASE = replace(COMMON, batch=4, heads=16, groups=1, rows=64, cols=128, slots=16)
FLASHINFER_ROUNDINGS = {
    torch.float32: ("nearest",),
    torch.bfloat16: ("nearest",),
    torch.float16: ("nearest", "stochastic"),
    torch.int16: ("nearest",),
}


def jobs_of(formats: Formats, batches: Sequence[int], tokens: Sequence[int], shape: Shape) -> list[Job]:
    """Every format, number of tokens and batch size. Several tokens once with the last state stored, once with all as
    snapshots."""
    heads, groups, rows, cols = shape
    if heads % groups:
        raise ValueError(f"the number of groups must divide the {heads} heads, got {groups}")
    if heads * rows * cols % 4:
        raise ValueError(f"a state of {heads} heads of {rows} x {cols} is not whole 32-bit words in every format")
    common = replace(COMMON, heads=heads, groups=groups, rows=rows, cols=cols)

    def job(name: str, rounding: str, count: int, snapshots: bool, batch: int) -> Job:
        case = replace(common, format=name, rounding=rounding, batch=batch, slots=batch + SPARE_SLOTS)
        return Job("mamba2", replace(case, tokens=0 if count == 1 else count), snapshots)

    return [
        job(name, rounding, count, snapshots, batch)
        for name, rounding in formats
        for count in tokens
        for snapshots in ((False,) if count == 1 else (False, True))
        for batch in batches
    ]


def bind_flashstate(inputs: Inputs, snapshots: Pool | None = None, *, bare: bool = False) -> Step:
    arguments = {**inputs.arguments, **inputs.options, "state": inputs.state.data if bare else inputs.state}
    arguments["out"] = torch.empty_like(inputs.arguments["x"])
    if snapshots is not None:
        arguments.update(snapshots=snapshots, update=False)
    return lambda slots: mamba2_step(**arguments, slots=slots.read if bare else slots)


def bind_mamba_ssm(update: Callable[..., Tensor], inputs: Inputs, snapshots: Pool | None) -> Step:
    _only_plain_states(inputs, snapshots)
    if inputs.arguments["x"].dim() != 3:
        raise MeasurementError("only compared with one token per call")
    if inputs.state.data.numel() >= 1 << 31:
        raise MeasurementError("it has 32-bit offsets, and this pool is larger")
    arguments = expanded(inputs)
    return lambda slots: update(**arguments, state_batch_indices=slots.read)


def bind_vllm(update: Callable[..., None], inputs: Inputs, snapshots: Pool | None) -> Step:
    """Several tokens are packed. Newer releases take slot 0 for padding unless told otherwise, older ones only -1."""
    _only_plain_states(inputs, snapshots)
    out = torch.empty_like(inputs.arguments["x"])
    arguments = {**expanded(inputs), "out": out}
    if out.dim() == 4:
        packed = {name: arguments[name].flatten(0, 1) for name in ("x", "dt", "B", "C", "z", "out")}
        batch, tokens = out.shape[:2]
        bounds = torch.arange(batch + 1, dtype=torch.int32, device=out.device) * tokens
        arguments.update(packed, cu_seqlens=bounds)
    if "null_block_id" in inspect.signature(update).parameters:
        update = partial(update, null_block_id=-1)

    def step(slots: Slots) -> Tensor:
        update(**arguments, state_batch_indices=slots.read)
        return out

    return step


def bind_flashinfer(update: Callable[..., Tensor], inputs: Inputs, snapshots: Pool | None) -> Step:
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
    if snapshots is None:
        return lambda slots: update(**arguments, state_batch_indices=slots.read)
    arguments.update(disable_state_update=True, intermediate_states_buffer=snapshots.data)
    if snapshots.scale is not None:
        arguments["intermediate_state_scales"] = snapshots.scale
    return lambda slots: update(
        **arguments, state_batch_indices=slots.read, intermediate_state_indices=slots.snapshot_rows
    )


def bind_fla(attend: Callable[..., tuple[Tensor, Tensor]], inputs: Inputs, snapshots: Pool | None) -> Step:
    """Linear attention with a decay per head is the recurrence of Mamba-2: q = C, k = B, v = dt x, g = dt A. It has no
    pool, no groups, no softplus, no skip and no gate, so its step does what its users do: torch around the call."""
    _only_plain_states(inputs, snapshots)
    if "state_v_first" not in inspect.signature(attend).parameters:
        raise MeasurementError("this release has no state_v_first, which gives states our layout")
    pool, heads = inputs.state.data, inputs.state.data.shape[1]
    A, D, dt_bias = inputs.arguments["A"], inputs.options["D"], inputs.options["dt_bias"]
    tokens = {**inputs.arguments, "z": inputs.options["z"]}
    has_axis = tokens["x"].dim() == 4
    x, z, dt, B, C = (tokens[name] if has_axis else tokens[name][:, None] for name in ("x", "z", "dt", "B", "C"))

    def per_head(t: Tensor) -> Tensor:
        return t.repeat_interleave(heads // t.shape[2], dim=2)  # (batch, T, G, N) -> (batch, T, H, N)

    def step(slots: Slots) -> Tensor:
        rows = slots.read.long()
        sizes = functional.softplus(dt + dt_bias)  # (batch, T, H), float32
        y, after = attend(
            per_head(C), per_head(B), sizes[..., None] * x, sizes * A, scale=1.0,
            initial_state=pool[rows], output_final_state=True, state_v_first=True,
        )  # fmt: skip
        pool.index_copy_(0, rows, after.to(pool.dtype))
        return ((y + D[:, None] * x) * functional.silu(z.float())).to(x.dtype)

    return step


def _only_plain_states(inputs: Inputs, snapshots: Pool | None) -> None:
    """Raise MeasurementError where states have scales, are not rounded to nearest, or go to snapshots."""
    if inputs.state.scale is not None:
        raise MeasurementError("only compared where states have no scales")
    if inputs.state.rounding != "nearest":
        raise MeasurementError(f"only compared where states are rounded to nearest, not {inputs.state.rounding}")
    if snapshots is not None:
        raise MeasurementError("only compared without snapshots")


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
    "vllm": Peer("vllm.model_executor.layers.mamba.ops.mamba_ssm", UPDATE, bind_vllm),
    "flashinfer": Peer("flashinfer.mamba", UPDATE, bind_flashinfer),
    "mamba_ssm": Peer("mamba_ssm.ops.triton.selective_state_update", UPDATE, bind_mamba_ssm),
    "fla": Peer("fla.ops.simple_gla", "fused_recurrent_simple_gla", bind_fla),
}
MAMBA2 = BenchedOp(bind_flashstate, jobs_of, PEERS, HOST_CASE)
