"""Other libraries' one-token step of Mamba-2, called through their public functions with the arguments of ours.

A binding takes inputs and returns a step: it advances the state of the slots it is given, in place, and returns the
output. What a peer needs in another shape or dtype is converted when it is bound, so that it costs the step nothing.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashstate.testing import Inputs

Step = Callable[[Any], Tensor]  # of slots
Binding = Callable[[Inputs], Step]


class MeasurementError(Exception):
    """Why an implementation is not timed."""


def bind_mamba_ssm(inputs: Inputs) -> Step:
    update = _public_function("mamba_ssm.ops.triton.selective_state_update", inputs)
    if inputs.state.data.numel() >= 1 << 31:
        raise MeasurementError("it has 32-bit offsets, and this pool is larger")
    arguments = expanded(inputs)
    return lambda slots: update(**arguments, state_batch_indices=slots)


def bind_flashinfer(inputs: Inputs) -> Step:
    """It wants dt in the dtype of D and dt_bias: dt is widened, which changes no value."""
    update = _public_function("flashinfer.mamba", inputs)
    arguments = expanded(inputs, dt=inputs.arguments["dt"].to(inputs.options["dt_bias"].dtype))
    arguments["out"] = torch.empty_like(inputs.arguments["x"])
    return lambda slots: update(**arguments, state_batch_indices=slots)


def bind_vllm(inputs: Inputs) -> Step:
    """Newer releases take slot 0 for padding unless told otherwise, older ones know only -1."""
    update = _public_function("vllm.model_executor.layers.mamba.ops.mamba_ssm", inputs)
    arguments = expanded(inputs)
    arguments["out"] = out = torch.empty_like(inputs.arguments["x"])
    if "null_block_id" in inspect.signature(update).parameters:
        update = partial(update, null_block_id=-1)

    def step(slots: Tensor) -> Tensor:
        update(**arguments, state_batch_indices=slots)
        return out

    return step


PEERS: dict[str, Binding] = {"vllm": bind_vllm, "flashinfer": bind_flashinfer, "mamba_ssm": bind_mamba_ssm}


def _public_function(module: str, inputs: Inputs) -> Callable[..., Tensor]:
    """The module's selective_state_update; MeasurementError without one, or where states are not rounded to nearest."""
    if inputs.arguments["x"].dim() != 3:
        raise MeasurementError("only compared with one token per call")
    if inputs.state.scale is not None:
        raise MeasurementError("only compared where states have no scales")
    if inputs.state.rounding != "nearest":
        raise MeasurementError(f"only compared where states are rounded to nearest, not {inputs.state.rounding}")
    try:
        update: Callable[..., Tensor] = importlib.import_module(module).selective_state_update
    except Exception as error:  # a broken installation may raise anything
        raise MeasurementError(f"cannot be imported: {error}") from error
    return update


def expanded(inputs: Inputs, dt: Tensor | None = None) -> dict[str, Any]:
    """All arguments but the slots, with what is one per head expanded along it, as all peers want them."""
    _, heads, rows, cols = inputs.state.data.shape
    dt = inputs.arguments["dt"] if dt is None else dt
    per_head = {name: inputs.options[name][:, None].expand(heads, rows) for name in ("D", "dt_bias")}
    return {
        **inputs.arguments,
        **inputs.options,
        **per_head,
        "state": inputs.state.data,
        "dt": dt[..., None].expand(-1, heads, rows),
        "A": inputs.arguments["A"][:, None, None].expand(heads, rows, cols),
    }
