"""The benchmark of mamba3_step: its jobs, and its peer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashstate.bench.binding import Step, Storing, bind_op
from flashstate.bench.jobs import BFLOAT16, FLOAT32, Grid, Job, Way, benched
from flashstate.bench.peers import MeasurementError, Peer, require_plain
from flashstate.proof import Inputs
from flashstate.state.slots import Slots

FORMATS = (FLOAT32, BFLOAT16, ("int8", "nearest"), ("float8_e4m3fn", "nearest"))


def with_sizes(job: Job, **sizes: Any) -> Job:
    """The job with other sizes of its case."""
    return replace(job, case=replace(job.case, **sizes))


def turned(job: Job) -> Job:
    """The job with biases, and with columns that are turned, half of them."""
    return with_sizes(job, angles=job.case.state_axes[-1] // 4)


def bind_mamba_ssm(step_all: Callable[..., None], inputs: Inputs, storing: Storing) -> Step:
    """mamba_ssm has no pools and no groups, and leaves k and v to the caller. So its step does what its users do: torch
    gathers the states before the call, and scatters them behind it."""
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


PEERS = {"mamba_ssm": Peer("mamba_ssm.ops.cute.mamba3.mamba3_step_fn", ("mamba3_step_fn",), bind_mamba_ssm)}
VARIANTS = {
    "turned": Way(bind_op, turned, fresh=True),
    "rank 1": Way(bind_op, partial(with_sizes, rank=1), fresh=True),
    "rank 1, turned": Way(bind_op, lambda job: turned(with_sizes(job, rank=1)), fresh=True),
}
MAMBA3 = benched(
    "mamba3_step",
    changes={"angles": 0},  # B and C come turned
    grids=(Grid(FORMATS, stored=("last",), batches=(1, 4, 16, 64, 256)),),
    peers=PEERS,
    variants=VARIANTS,
)
