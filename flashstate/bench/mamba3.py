"""The benchmark of mamba3_step: its jobs, and its peer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from flashstate.bench.jobs import BenchedOp, Grid, Job, Shape, Variant, grouped_case
from flashstate.bench.peers import (
    IN_PLACE,
    MeasurementError,
    Peer,
    Step,
    Storing,
    require_in_place,
    require_plain_states,
    step_of,
)
from flashstate.ops.mamba3 import mamba3_step
from flashstate.proof import Inputs, Mamba3Case, with_rotary
from flashstate.state.slots import Slots

# With float32 gates and parameters, a gate and an output projection; B and C come turned.
COMMON = Mamba3Case(rank=4, angles=0, x="bfloat16", bc="bfloat16", kv="bfloat16")
HOST_CASE = replace(COMMON, batch=4, heads=16, groups=1, rows=64, cols=128, slots=16)
SHAPE = Shape(48, 1, 64, 128)
FORMATS = tuple((name, "nearest") for name in ("float32", "bfloat16", "int8", "float8_e4m3fn"))
GRID = Grid((SHAPE,), FORMATS, stored=("last",), batches=(1, 4, 16, 64, 256))
case_of = partial(grouped_case, COMMON)


def bind_flashstate(inputs: Inputs, storing: Storing = IN_PLACE, *, bare: bool = False) -> Step:
    if storing.snapshots is not None:
        raise MeasurementError("it takes no snapshots")
    arguments = with_rotary({**inputs.arguments, **inputs.options})
    arguments.update(state=inputs.state.state, out=torch.empty_like(inputs.main), update=storing.update)
    return step_of(mamba3_step, arguments, bare)


def turned(job: Job) -> Job:
    """The job with biases, and with columns that are turned, half of them."""
    assert isinstance(job.case, Mamba3Case)
    return replace(job, case=replace(job.case, angles=job.case.cols // 4))


def of_rank_one(job: Job) -> Job:
    """The job with one rank, which is SISO."""
    assert isinstance(job.case, Mamba3Case)
    return replace(job, case=replace(job.case, rank=1))


def bind_mamba_ssm(step_all: Callable[..., None], inputs: Inputs, storing: Storing) -> Step:
    """It has no pools and no groups, and leaves k and v to the caller. So its step does what its users do: torch
    gathers the states before the call, and scatters them behind it."""
    require_plain_states(inputs)
    require_in_place(storing)
    if inputs.has_token_axis or "angle" in inputs.options:
        raise MeasurementError("only compared with one token per call, whose B and C come turned")
    pool, heads = inputs.state, inputs.state.data.shape[1]
    given, options = inputs.arguments, inputs.options
    B, C = (given[name].repeat_interleave(heads // given[name].shape[2], dim=2) for name in ("B", "C"))
    arguments = {name: given[name] for name in ("A", "x", "dt", "trap")} | {"B": B, "C": C, "D": options["D"]}
    arguments |= {"xproj": options["Wx"], "outproj": options["Wo"], "z": options["z"], "zproj": options["Wz"]}
    arguments["out"] = torch.empty_like(inputs.main)

    def launch(slots: Slots) -> Tensor:
        rows = slots.read.long()
        state = pool.data[rows]
        step_all(state=state, Bstate=pool.k[rows], Xstate=pool.v[rows], **arguments)
        pool.data.index_copy_(0, rows, state)
        pool.k.index_copy_(0, rows, B)
        pool.v.index_copy_(0, rows, given["x"])
        return arguments["out"]

    return lambda slots: partial(launch, slots)


PEERS = {"mamba_ssm": Peer("mamba_ssm.ops.cute.mamba3.mamba3_step_fn", ("mamba3_step_fn",), bind_mamba_ssm)}
VARIANTS = {
    "turned": Variant(bind_flashstate, turned, fresh=True),
    "rank 1": Variant(bind_flashstate, of_rank_one, fresh=True),
    "rank 1, turned": Variant(bind_flashstate, lambda job: turned(of_rank_one(job)), fresh=True),
}
MAMBA3 = BenchedOp("mamba3", bind_flashstate, case_of, (GRID,), PEERS, HOST_CASE, VARIANTS)
