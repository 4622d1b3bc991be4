"""The benchmark of mamba2_step: its jobs, and its peers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flashstate.bench.at_once import AT_ONCE
from flashstate.bench.binding import Step, Storing
from flashstate.bench.jobs import benched
from flashstate.bench.peers import MeasurementError, Peer, packed_bounds, require_plain
from flashstate.proof import Inputs
from flashstate.state.slots import Slots

FLASHINFER_ROUNDINGS = {
    torch.float32: ("nearest",),
    torch.bfloat16: ("nearest",),
    torch.float16: ("nearest", "stochastic"),
    torch.int16: ("nearest",),
}


def bind_mamba_ssm(update: Callable[..., Tensor], inputs: Inputs, storing: Storing) -> Step:
    """mamba_ssm takes one token, and states within 2^31 elements of the first."""
    require_plain(inputs, storing)
    if inputs.has_token_axis:
        raise MeasurementError("only compared with one token per call")
    if inputs.state.data.numel() >= 1 << 31:
        raise MeasurementError("it has 32-bit offsets, and this pool is larger")
    arguments = expanded(inputs)
    return lambda slots: lambda: update(**arguments, state_batch_indices=slots.read)


def bind_vllm(update: Callable[..., object], inputs: Inputs, storing: Storing) -> Step:
    """vLLM wants several tokens packed. Newer releases take slot 0 for padding unless told otherwise, older ones -1."""
    require_plain(inputs, storing)
    out = torch.empty_like(inputs.main)
    arguments = {**expanded(inputs), "out": out}
    if inputs.has_token_axis:
        tokens = [name for name in ("x", "dt", "B", "C", "z", "out") if arguments[name] is not None]
        packed = {name: arguments[name].flatten(0, 1) for name in tokens}
        arguments.update(packed, cu_seqlens=packed_bounds(out))
    if "null_block_id" in inspect.signature(update).parameters:
        arguments["null_block_id"] = -1
    return lambda slots: lambda: (update(**arguments, state_batch_indices=slots.read), out)[1]


def bind_flashinfer(update: Callable[..., Tensor], inputs: Inputs, storing: Storing) -> Step:
    """FlashInfer wants dt in the dtype of D and dt_bias: dt is widened, which changes no value."""
    state, x, kept = inputs.state, inputs.main, storing.snapshots
    if state.rounding not in FLASHINFER_ROUNDINGS.get(state.data.dtype, ()):
        raise MeasurementError(f"it has no {state.format.name} states rounded {state.rounding}")
    arguments = expanded(inputs, dt=inputs.arguments["dt"].to(inputs.arguments["dt_bias"].dtype))
    arguments.update(out=torch.empty_like(x), disable_state_update=not storing.update)
    if state.scale is not None:
        arguments["state_scale"] = state.scale
    if state.rounding == "stochastic":
        seed = torch.zeros(1, dtype=torch.int64, device=x.device)  # one for all slots
        arguments.update(rand_seed=seed, philox_rounds=state.rounds)
    if inputs.has_token_axis:
        arguments["cache_steps"] = x.shape[1]
    if kept is None:
        return lambda slots: lambda: update(**arguments, state_batch_indices=slots.read)
    arguments["intermediate_states_buffer"] = kept.data
    if kept.scale is not None:
        arguments["intermediate_state_scales"] = kept.scale
    return lambda slots: (
        lambda: update(**arguments, state_batch_indices=slots.read, intermediate_state_indices=slots.snapshot_rows)
    )


def bind_fla(attend: Callable[..., tuple[Tensor, Tensor]], inputs: Inputs, storing: Storing) -> Step:
    """fla's linear attention with a decay per head is the recurrence of Mamba-2: q = C, k = B, v = dt x, g = dt A. It
    has no pool, no groups, no softplus, no skip and no gate, so its step does what its users do: torch around the
    call."""
    require_plain(inputs, storing)
    if "state_v_first" not in inspect.signature(attend).parameters:
        raise MeasurementError("this release has no state_v_first, which gives states our layout")
    pool, heads = inputs.state.data, inputs.state.data.shape[1]
    A, D, dt_bias = inputs.arguments["A"], inputs.arguments["D"], inputs.arguments["dt_bias"]
    tokens = inputs.changed(lambda t: t if inputs.has_token_axis else t[:, None]).activations
    x, dt, B, C = (tokens[name] for name in ("x", "dt", "B", "C"))
    z = tokens.get("z")

    def per_head(t: Tensor) -> Tensor:
        return t.repeat_interleave(heads // t.shape[2], dim=2)  # (batch, T, G, N) -> (batch, T, H, N)

    def call(slots: Slots) -> Tensor:
        rows = slots.read.long()
        sizes = functional.softplus(dt + dt_bias)  # (batch, T, H), float32
        y, after = attend(
            per_head(C), per_head(B), sizes[..., None] * x, sizes * A, scale=1.0,
            initial_state=pool[rows], output_final_state=True, state_v_first=True,
        )  # fmt: skip
        pool.index_copy_(0, rows, after.to(pool.dtype))
        y = y + D[:, None] * x
        return (y if z is None else y * functional.silu(z.float())).to(x.dtype)

    return lambda slots: partial(call, slots)


def expanded(inputs: Inputs, dt: Tensor | None = None) -> dict[str, Any]:
    """All arguments but the slots, the limits of dt and `exact`, with what is one per head expanded along it, as
    selective_state_update wants it."""
    _, heads, rows, cols = inputs.state.data.shape
    dt = inputs.arguments["dt"] if dt is None else dt
    return {
        **{name: value for name, value in inputs.arguments.items() if name not in ("dt_limit", "exact")},
        "state": inputs.state.data,
        **{name: inputs.arguments[name][:, None].expand(heads, rows) for name in ("D", "dt_bias")},
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
MAMBA2 = benched("mamba2_step", peers=PEERS, variants={"at once": AT_ONCE})
