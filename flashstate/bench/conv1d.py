"""The benchmark of conv1d_step: its jobs, and its peers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from flashstate.bench.jobs import SPARE_SLOTS, BenchedOp, Grid, Shape, Variant
from flashstate.bench.peers import IN_PLACE, Launch, MeasurementError, Peer, Step, Storing, step_of
from flashstate.errors import ACTIVATION_DTYPES, dtype_name
from flashstate.ops.conv1d import conv1d_step
from flashstate.proof import ConvCase, Inputs
from flashstate.state.formats import label_of
from flashstate.state.slots import Slots

ACTIVATIONS = tuple(map(dtype_name, ACTIVATION_DTYPES))
GRID = Grid((Shape(1, 1, 1280, 4), Shape(1, 1, 10240, 4)), (("bfloat16", "nearest"),), stored=("last",))
HOST_CASE = ConvCase(4, 1280, 4, x="bfloat16", parameters="bfloat16", slots=16)


def case_of(shape: Shape, name: str, rounding: str, tokens: int, batch: int) -> ConvCase:
    """The case of a job, whose shape is (1, 1, channels, width) and whose format is that of inputs and parameters too;
    ValueError where there is none."""
    _, _, channels, width = shape
    if name not in ACTIVATIONS or rounding != "nearest":
        raise ValueError(f"windows are {', '.join(ACTIVATIONS)}, rounded to nearest, got {label_of(name, rounding)}")
    return ConvCase(batch, channels, width, tokens=tokens, x=name, parameters=name, slots=batch + SPARE_SLOTS)


def bind_flashstate(inputs: Inputs, storing: Storing = IN_PLACE, *, bare: bool = False, early: bool = False) -> Step:
    arguments = {**inputs.arguments, **inputs.options, "window": inputs.state.data}
    arguments.update(out=torch.empty_like(inputs.arguments["x"]), early=early)
    return step_of(conv1d_step, arguments, bare)


def bind_vllm(update: Callable[..., Tensor], inputs: Inputs, storing: Storing) -> Step:
    """Several tokens are packed. It takes slot 0 for padding unless told otherwise."""
    x, channels = inputs.arguments["x"], inputs.arguments["x"].shape[-1]
    out = torch.empty_like(x)
    arguments = {"bias": inputs.options.get("bias"), "activation": inputs.options["activation"]}
    tokens, flat = x, out
    if x.dim() == 3:
        batch, count = x.shape[:2]
        bounds = torch.arange(batch + 1, dtype=torch.int32, device=x.device) * count
        arguments.update(query_start_loc=bounds, max_query_len=count)
        tokens, flat = x.view(-1, channels), out.view(-1, channels)
    parameters = inspect.signature(update).parameters
    if "out" not in parameters or "null_block_id" not in parameters:
        raise MeasurementError("this release has no out, or another slot for padding")

    def step(slots: Slots) -> Launch:
        def launch() -> Tensor:
            update(
                tokens, inputs.state.data, inputs.arguments["weight"], **arguments, conv_state_indices=slots.read,
                null_block_id=-1, out=flat,
            )  # fmt: skip
            return out

        return launch

    return step


PEERS = {
    "vllm": Peer("vllm.model_executor.layers.mamba.ops.causal_conv1d", ("causal_conv1d_update",), bind_vllm),
}
CONV1D = BenchedOp(
    "conv1d", bind_flashstate, case_of, (GRID,), PEERS, HOST_CASE,
    {"early": Variant(partial(bind_flashstate, early=True))}, sizes={"channels": "rows", "width": "cols"},
)  # fmt: skip
