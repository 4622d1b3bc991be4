"""The benchmark of mamba2_replay: its jobs, steps of mamba2_step beside them, and what a model step has around its
layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from flashstate.bench import replaying
from flashstate.bench.binding import IN_PLACE, Binding, Step, Storing
from flashstate.bench.jobs import BFLOAT16, FLOAT32, BenchedOp, Grid, Job, Live, Stored
from flashstate.bench.mamba2 import MAMBA2
from flashstate.bench.measure import slots_of
from flashstate.bench.replaying import LIVE_BY_ONE, RingCase, RingJob, accepted_tokens, given_to_rings, require_equal
from flashstate.proof import AnyCase, Inputs, ReplayCase, ReplayInputs, ReplayPool, dtype
from flashstate.reference import rings as reference
from flashstate.reference.state_io import advance_seeds
from flashstate.state.ring import FIELDS
from flashstate.state.slots import Slots

TOKENS = 6  # of a step that drafts
LIVE: tuple[Live, ...] = ("none folds", "stationary", "uniform", "all fold")
FLOAT16, INT8, FLOAT8 = (("float16", "stochastic"), ("int8", "stochastic"), ("float8_e4m3fn", "stochastic"))
DRAFTING = Grid(
    (FLOAT32, FLOAT16, BFLOAT16, INT8, FLOAT8), (TOKENS,), (*LIVE, "every", "last"), by_one=(*LIVE_BY_ONE, "last")
)
PLAIN = replace(DRAFTING, formats=(FLOAT32, BFLOAT16, FLOAT16, INT8), tokens=(1,))
PAYS = {
    "float32, 6 tokens": 16, "float16 stochastic, 6 tokens": 16, "bfloat16, 6 tokens": 4,
    "int8 stochastic, 6 tokens": 16, "float8_e4m3fn stochastic, 6 tokens": 16,
    "float32": 64, "bfloat16": 256, "float16 stochastic": 256, "int8 stochastic": 256,
}  # fmt: skip
CURSORS = Grid((FLOAT16,), (1, TOKENS), ("plan and commit",), by_one=("plan and commit",))


@dataclass(frozen=True)
class Mamba2RingCase(RingCase, ReplayCase):
    """A case of mamba2_replay whose rings have as many live rows as a measurement wants."""


@dataclass
class CursorInputs(ReplayInputs):
    """The inputs of a call of replay, and how many of its tokens are accepted."""

    accepted: Tensor  # (batch,)


@dataclass(frozen=True)
class CursorCase(Mamba2RingCase):
    """What a model step has around its layers: a plan, its commit, and new random bits where states need some."""

    def make_inputs(self, device: torch.device, seed: int = 0) -> CursorInputs:
        generator = torch.Generator().manual_seed(seed)
        accepted = accepted_tokens(self.batch, self.tokens or 1, generator).int().to(device)
        return CursorInputs(**vars(super().make_inputs(device, seed)), accepted=accepted)

    def counted_bytes(self, stores: int = 1) -> int:
        """Bytes of the slot of every row, its cursors in and out, its row of the plan, what it accepts, its seed."""
        of_row = dtype(self.index).itemsize + 2 * 2 * 4 + 2 * 4 * FIELDS + 4 + (0 if self.rounding == "nearest" else 16)
        return self.batch * of_row


def job_of(op: str, case: AnyCase, stored: Stored) -> Job:
    """The job of replay where live rows say what is stored, and that of cursors; else that of mamba2_step."""
    if stored == "plan and commit":
        return RingJob(op, CursorCase(**given_to_rings(case)), stored)
    return replaying.job_of(Mamba2RingCase, op, case, stored)


def bind_flashstate(inputs: Inputs, storing: Storing = IN_PLACE, *, bare: bool = False) -> Step:
    """Make a step of replay, of mamba2_step, or of what is around the layers of a model."""
    if isinstance(inputs, CursorInputs):
        return bind_cursors(inputs)
    return replaying.bind_flashstate(inputs, storing, bare=bare)


def bind_cursors(inputs: CursorInputs) -> Step:
    """Make what a model step has around its layers; it gives the rows of the plan."""
    state, ring = inputs.state.state, inputs.state.ring

    def call(slots: Slots) -> Tensor:
        plan = ring.plan(slots, inputs.row_lengths[0])
        ring.commit(plan, inputs.accepted)
        if state.rounding != "nearest":
            state.advance(slots)
        return plan.rows

    return lambda slots: lambda: call(slots)


def check(bind: Binding, inputs: Inputs, storing: Storing = IN_PLACE) -> None:
    """Raise MeasurementError unless a call on a copy of `inputs` gives what it must, and leaves it in the pool."""
    if isinstance(inputs, CursorInputs):
        copy = inputs.fresh()
        require_moved(inputs, copy.state, bind(copy, storing)(slots_of(copy, storing))())
        return
    replaying.check(bind, inputs, storing)


def require_moved(inputs: CursorInputs, got: ReplayPool, rows: Tensor) -> None:
    """Raise MeasurementError unless a plan, the cursors and the seeds are those of plain torch, bit for bit."""
    pool, slots = inputs.fresh().state, Slots(inputs.slots.cpu())
    start, count, seed = pool.start.cpu(), pool.count.cpu(), cast(Tensor, pool.seed).cpu()
    of_plan, parts = torch.empty(rows.shape, dtype=rows.dtype), torch.empty(2, dtype=torch.int32)
    reference.make_plan(start, count, pool.window, slots, inputs.row_lengths[0], of_plan, parts)
    reference.commit_plan(start, count, pool.window, pool.ring.length, of_plan, inputs.accepted.cpu())
    if pool.rounding != "nearest":
        advance_seeds(seed, slots)
    found = {"rows of the plan": rows, "start": got.start, "count": got.count, "seed": cast(Tensor, got.seed)}
    want = dict(zip(found, (of_plan, start, count, seed), strict=True))
    require_equal(want, {name: tensor.cpu() for name, tensor in found.items()})


MAMBA2_REPLAY = BenchedOp(
    "mamba2_replay", MAMBA2.case, (DRAFTING, PLAIN, CURSORS), tuned=None, bind=bind_flashstate, job=job_of, check=check,
    shown=LIVE[:1], pays=PAYS,
)  # fmt: skip
