"""The benchmark of conv1d_step: its jobs, and its peers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from flashstate.bench.jobs import SPARE_SLOTS, BenchedOp, Formats, Job, Shape
from flashstate.bench.peers import MeasurementError, Peer, Step
from flashstate.ops.conv1d import conv1d_step
from flashstate.state.slots import Slots
from flashstate.testing import ConvCase, Inputs, Pool

FORMATS: Formats = (("bfloat16", "nearest"),)  # of windows, inputs and parameters
HOST_CASE = ConvCase(4, 1280, 4, x="bfloat16", parameters="bfloat16", slots=16)


def jobs_of(formats: Formats, batches: Sequence[int], tokens: Sequence[int], shape: Shape) -> list[Job]:
    """Every dtype, number of tokens and batch size, windows updated in place; the shape is (1, 1, channels, width)."""
    _, _, channels, width = shape
    if channels % 2:
        raise ValueError(f"the number of channels must be even, for whole 32-bit words in every dtype, got {channels}")

    def job(name: str, count: int, batch: int) -> Job:
        slots = batch + SPARE_SLOTS
        case = ConvCase(batch, channels, width, tokens=0 if count == 1 else count, x=name, parameters=name, slots=slots)
        return Job("conv1d", case)

    return [job(name, count, batch) for name, _ in formats for count in tokens for batch in batches]


def bind_flashstate(inputs: Inputs, snapshots: Pool | None = None, *, bare: bool = False, early: bool = False) -> Step:
    arguments = {**inputs.arguments, **inputs.options, "window": inputs.state.data}
    arguments["out"] = torch.empty_like(inputs.arguments["x"])
    return lambda slots: conv1d_step(**arguments, slots=slots.read if bare else slots, early=early)


def bind_vllm(update: Callable[..., Tensor], inputs: Inputs, snapshots: Pool | None) -> Step:
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

    def step(slots: Slots) -> Tensor:
        update(
            tokens, inputs.state.data, inputs.arguments["weight"], **arguments, conv_state_indices=slots.read,
            null_block_id=-1, out=flat,
        )  # fmt: skip
        return out

    return step


PEERS = {
    "vllm": Peer("vllm.model_executor.layers.mamba.ops.causal_conv1d", "causal_conv1d_update", bind_vllm),
}
CONV1D = BenchedOp(
    bind_flashstate, jobs_of, PEERS, HOST_CASE, FORMATS, {"early": partial(bind_flashstate, early=True)}
)  # fmt: skip
