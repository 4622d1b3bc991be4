"""The benchmark of conv1d_step: its jobs, and its peers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashstate.bench.binding import Step, Storing, TimedCall, bind_op
from flashstate.bench.jobs import BFLOAT16, SPARE_SLOTS, BenchedOp, Grid, Shape, Way
from flashstate.bench.peers import MeasurementError, Peer, packed_bounds
from flashstate.errors import ACTIVATION_DTYPES, dtype_name
from flashstate.ops.conv1d import conv1d_step
from flashstate.proof import ConvCase, Inputs
from flashstate.state.formats import label_of
from flashstate.state.slots import Slots

ACTIVATIONS = tuple(map(dtype_name, ACTIVATION_DTYPES))
GRID = Grid((Shape(1, 1, 1280, 4), Shape(1, 1, 10240, 4)), (BFLOAT16,), stored=("last",))


def case_of(shape: Shape, name: str, rounding: str, tokens: int, batch: int) -> ConvCase:
    """The case of a job of shape (1, 1, channels, width), all in one format; ValueError where there is none."""
    _, _, channels, width = shape
    if name not in ACTIVATIONS or rounding != "nearest":
        raise ValueError(f"windows are {', '.join(ACTIVATIONS)}, rounded to nearest, got {label_of(name, rounding)}")
    return ConvCase(batch, channels, width, tokens=tokens, x=name, parameters=name, slots=batch + SPARE_SLOTS)


def on_windows(inputs: Inputs, bare: bool) -> dict[str, Any]:
    """All arguments of conv1d_step, whose windows are a plain tensor."""
    return {**inputs.arguments, "window": inputs.state.data}


bind_flashstate = partial(bind_op, conv1d_step, on_windows)


def bind_vllm(update: Callable[..., Tensor], inputs: Inputs, storing: Storing) -> Step:
    """vLLM wants several tokens packed, and takes slot 0 for padding unless told otherwise."""
    x, channels = inputs.arguments["x"], inputs.arguments["x"].shape[-1]
    out = torch.empty_like(x)
    arguments = {name: inputs.arguments[name] for name in ("bias", "activation")}
    tokens, flat = x, out
    if x.dim() == 3:
        arguments.update(query_start_loc=packed_bounds(x), max_query_len=x.shape[1])
        tokens, flat = x.view(-1, channels), out.view(-1, channels)
    parameters = inspect.signature(update).parameters
    if "out" not in parameters or "null_block_id" not in parameters:
        raise MeasurementError("this release has no out, or another slot for padding")
    update = partial(update, tokens, inputs.state.data, inputs.arguments["weight"], null_block_id=-1, out=flat)

    def step(slots: Slots) -> TimedCall:
        return lambda: (update(**arguments, conv_state_indices=slots.read), out)[1]

    return step


PEERS = {
    "vllm": Peer("vllm.model_executor.layers.mamba.ops.causal_conv1d", ("causal_conv1d_update",), bind_vllm),
}
CONV1D = BenchedOp(
    "conv1d", bind_flashstate, case_of, (GRID,), PEERS, case_of(Shape(1, 1, 1280, 4), *BFLOAT16, 0, 4),
    {"early": Way(partial(bind_flashstate, early=True))}, sizes={"channels": "rows", "width": "cols"},
)  # fmt: skip
