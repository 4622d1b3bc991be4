"""The benchmark of mamba3_step: its jobs, and its peer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashstate.bench.binding import Step, Storing, bind_op
from flashstate.bench.jobs import BFLOAT16, FLOAT32, BenchedOp, Grid, Job, Shape, Way, grouped_case
from flashstate.bench.peers import MeasurementError, Peer, require_plain
from flashstate.ops.mamba3 import mamba3_step
from flashstate.proof import Inputs, Mamba3Case, with_rotary
from flashstate.state.slots import Slots

# With float32 gates and parameters, a gate and an output projection; B and C come turned.
COMMON = Mamba3Case(rank=4, angles=0, x="bfloat16", bc="bfloat16", kv="bfloat16")
FORMATS = (FLOAT32, BFLOAT16, ("int8", "nearest"), ("float8_e4m3fn", "nearest"))
GRID = Grid((Shape(48, 1, 64, 128),), FORMATS, stored=("last",), batches=(1, 4, 16, 64, 256))
case_of = partial(grouped_case, COMMON)


def on_four_states(inputs: Inputs, bare: bool) -> dict[str, Any]:
    """All arguments of mamba3_step, which knows no plain tensors of states."""
    return {**with_rotary(inputs.arguments), "state": inputs.state.state}


def with_sizes(job: Job, **sizes: Any) -> Job:
    """The job with other sizes of its case."""
    return replace(job, case=replace(job.case, **sizes))


def turned(job: Job) -> Job:
    """The job with biases, and with columns that are turned, half of them."""
    return with_sizes(job, angles=job.case.state_axes[-1] // 4)


def bind_mamba_ssm(step_all: Callable[..., None], inputs: Inputs, storing: Storing) -> Step:
    """mamba_ssm has no pools and no groups, and leaves k and v to the caller.

    So its step does what its users do: torch gathers the states before the call, and scatters them behind it.
    """
    require_plain(inputs, storing)
    if inputs.has_token_axis or inputs.arguments["angle"] is not None:
        raise MeasurementError("only compared with one token per call, whose B and C come turned")
    pool, heads = inputs.state, inputs.state.data.shape[1]
    given = inputs.arguments
    B, C = (given[name].repeat_interleave(heads // given[name].shape[2], dim=2) for name in ("B", "C"))
    arguments = {name: given[name] for name in ("A", "x", "dt", "trap")} | {"B": B, "C": C, "D": given["D"]}
    arguments |= {"xproj": given["Wx"], "outproj": given["Wo"], "z": given["z"], "zproj": given["Wz"]}
    arguments["out"] = torch.empty_like(inputs.main)

    def call(slots: Slots) -> Tensor:
        rows = slots.read.long()
        state = pool.data[rows]
        step_all(state=state, Bstate=pool.k[rows], Xstate=pool.v[rows], **arguments)
        for kept, after in ((pool.data, state), (pool.k, B), (pool.v, given["x"])):
            kept.index_copy_(0, rows, after)
        return arguments["out"]

    return lambda slots: partial(call, slots)


bind_flashstate = partial(bind_op, mamba3_step, on_four_states)
PEERS = {"mamba_ssm": Peer("mamba_ssm.ops.cute.mamba3.mamba3_step_fn", ("mamba3_step_fn",), bind_mamba_ssm)}
VARIANTS = {
    "turned": Way(bind_flashstate, turned, fresh=True),
    "rank 1": Way(bind_flashstate, partial(with_sizes, rank=1), fresh=True),
    "rank 1, turned": Way(bind_flashstate, lambda job: turned(with_sizes(job, rank=1)), fresh=True),
}
HOST_CASE = case_of(Shape(16, 1, 64, 128), *FLOAT32, 0, 4)
MAMBA3 = BenchedOp("mamba3", bind_flashstate, case_of, (GRID,), PEERS, HOST_CASE, VARIANTS)
