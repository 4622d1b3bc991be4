"""The benchmark of mamba2_replay: its jobs, what is checked, and what it takes the place of: steps of mamba2_step."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from flashstate.bench.binding import IN_PLACE, Binding, Step, Storing, TimedCall, arguments_of, bind_op
from flashstate.bench.jobs import BFLOAT16, FLOAT32, BenchedOp, Grid, Live
from flashstate.bench.mamba2 import MAMBA2
from flashstate.bench.measure import check as check_step
from flashstate.bench.measure import require_within_budgets, slots_of
from flashstate.bench.peers import MeasurementError
from flashstate.bench.replay_case import CursorInputs, job_of
from flashstate.proof import Inputs, ReplayInputs, ReplayPool, error_ratio, slotted
from flashstate.proof.laws.replay import rings_after
from flashstate.reference import rings as reference
from flashstate.reference.state_io import advance_seeds
from flashstate.state.formats import bits_of
from flashstate.state.slots import Slots

TOKENS = 6  # of a step that drafts
LIVE: tuple[Live, ...] = ("none folds", "stationary", "uniform", "all fold")
LIVE_BY_ONE: tuple[Live, ...] = ("none folds", "a 16th folds")
FLOAT16, INT8, FLOAT8 = (("float16", "stochastic"), ("int8", "stochastic"), ("float8_e4m3fn", "stochastic"))
DRAFTING = Grid(
    (FLOAT32, FLOAT16, BFLOAT16, INT8, FLOAT8), (TOKENS,), (*LIVE, "every", "last"), by_one=(*LIVE_BY_ONE, "last")
)
PLAIN = replace(DRAFTING, formats=(FLOAT32, BFLOAT16, FLOAT16, INT8), tokens=(1,))
CURSORS = Grid((FLOAT16,), (1, TOKENS), ("plan and commit",), by_one=("plan and commit",))


def bind_flashstate(inputs: Inputs, storing: Storing = IN_PLACE, *, bare: bool = False) -> Step:
    """Make a step with a plan that was made before, as all layers of a model but the first have it; `bare`: with none.

    On a pool without rings it is a step of mamba2_step.
    """
    if isinstance(inputs, CursorInputs):
        return bind_cursors(inputs)
    if bare or not isinstance(inputs, ReplayInputs):
        return bind_op(inputs, storing, bare=bare)
    replayed, op, given = inputs, inputs.op.step, arguments_of(inputs)

    def step(slots: Slots) -> TimedCall:
        plan = replayed.plan(slots)
        return lambda: op(**given, plan=plan)

    return step


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
    after = check_step(bind, inputs, storing)
    if isinstance(inputs, ReplayInputs):
        require_appended(inputs, after.state)


def require_appended(inputs: ReplayInputs, got: ReplayPool) -> None:
    """Raise MeasurementError unless rings have the new tokens, time steps within their budget, and the pool has all
    else but folded states, bit for bit, as it was."""
    filled, exact = rings_after(inputs)
    want, rows, folded = filled.state, inputs.appended_rows, inputs.slots[inputs.folds].long()
    new, *expected = (dt.transpose(1, 2)[rows] for dt in (got.dt, exact, want.dt))
    require_within_budgets({"dt in the ring": error_ratio(new, *expected)})
    want.dt.transpose(1, 2)[rows] = new
    for name, tensor in slotted(want).items():
        if name in ("data", "scale"):
            bits_of(tensor)[folded] = bits_of(slotted(got)[name])[folded]
    require_equal(slotted(want), slotted(got))


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


def require_equal(want: dict[str, Tensor], got: dict[str, Tensor]) -> None:
    """Raise MeasurementError where bytes differ."""
    for name, tensor in want.items():
        if not torch.equal(bits_of(tensor), bits_of(got[name])):
            raise MeasurementError(f"wrong: it leaves {name} other than it must be")


MAMBA2_REPLAY = BenchedOp(
    "mamba2_replay", MAMBA2.case, (DRAFTING, PLAIN, CURSORS), tuned=None, bind=bind_flashstate, job=job_of, check=check,
    shown=LIVE[:1],
)  # fmt: skip
