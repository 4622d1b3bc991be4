"""The benchmark of conv1d_step: its jobs, and its peers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from flashstate.bench.binding import Step, Storing, TimedCall, bind_op
from flashstate.bench.jobs import BFLOAT16, Grid, Way, benched
from flashstate.bench.peers import MeasurementError, Peer, packed_bounds
from flashstate.proof import Inputs
from flashstate.state.slots import Slots


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


PEERS = {"vllm": Peer("vllm.model_executor.layers.mamba.ops.causal_conv1d", ("causal_conv1d_update",), bind_vllm)}
CONV1D = benched(
    "conv1d_step",
    grids=(Grid((BFLOAT16,), stored=("last",), sizes={"channels": (1280, 10240)}),),
    peers=PEERS,
    variants={"early": Way(partial(bind_op, early=True))},
)
