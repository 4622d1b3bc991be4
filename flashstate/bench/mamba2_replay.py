"""The benchmark of mamba2_replay: its jobs, what is checked, and what it takes the place of: steps of mamba2_step."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from flashstate.bench import mamba2
from flashstate.bench.binding import IN_PLACE, Binding, Step, Storing, TimedCall
from flashstate.bench.jobs import BFLOAT16, FLOAT32, BenchedOp, Grid, Live
from flashstate.bench.measure import check as check_step
from flashstate.bench.measure import require_within_budgets, slots_of
from flashstate.bench.peers import MeasurementError, Peer
from flashstate.bench.replay_case import CursorInputs, job_of
from flashstate.ops.mamba2_replay import mamba2_replay
from flashstate.proof import Inputs, Recurrence, ReplayInputs, ReplayPool, error_ratio, slotted
from flashstate.reference import rings as reference
from flashstate.reference.mamba2 import softplus
from flashstate.reference.state_io import advance_seeds
from flashstate.state.formats import bits_of
from flashstate.state.slots import Slots

TOKENS = 6  # of a step that drafts
LIVE: tuple[Live, ...] = ("none folds", "stationary", "uniform", "all fold")
LIVE_BY_ONE: tuple[Live, ...] = ("none folds", "a 16th folds")
FLOAT16, INT8, FLOAT8 = (("float16", "stochastic"), ("int8", "stochastic"), ("float8_e4m3fn", "stochastic"))
DRAFTING = Grid(
    (mamba2.SHAPE,), (FLOAT32, FLOAT16, BFLOAT16, INT8, FLOAT8), (TOKENS,),
    (*LIVE, "every", "last"), by_one=(*LIVE_BY_ONE, "last"),
)  # fmt: skip
PLAIN = replace(DRAFTING, formats=(FLOAT32, BFLOAT16, FLOAT16, INT8), tokens=(1,))
CURSORS = Grid((mamba2.SHAPE,), (FLOAT16,), (1, TOKENS), ("plan and commit",), by_one=("plan and commit",))
PEERS: dict[str, Peer] = {}  # none is called yet


def bind_flashstate(inputs: Inputs, storing: Storing = IN_PLACE, *, bare: bool = False) -> Step:
    """Make a step with a plan that was made before, as all layers of a model but the first have it; `bare`: with none.

    On a pool without rings it is a step of mamba2_step.
    """
    if not isinstance(inputs, ReplayInputs):
        return mamba2.bind_flashstate(inputs, storing, bare=bare)
    if isinstance(inputs, CursorInputs):
        return bind_cursors(inputs)
    pool, ring = inputs.state, inputs.state.ring
    arguments = {**inputs.arguments, "state": pool.data if bare else pool.state, "ring": ring}
    arguments["out"] = torch.empty_like(inputs.main)

    def step(slots: Slots) -> TimedCall:
        if bare:
            return lambda: mamba2_replay(**arguments, slots=slots.read)
        plan = ring.plan(slots, inputs.row_lengths[0])
        return lambda: mamba2_replay(**arguments, plan=plan)

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
    if not isinstance(inputs, ReplayInputs):
        check_step(bind, inputs, storing)
        return
    copy = inputs.fresh()
    result = bind(copy, storing)(slots_of(copy, storing))()
    if isinstance(inputs, CursorInputs):
        require_moved(inputs, copy.state, result)
    else:
        require_replayed(inputs, copy, result)


def require_replayed(inputs: ReplayInputs, after: ReplayInputs, y: Tensor) -> None:
    """Raise MeasurementError unless outputs, folded states and new time steps are within their budgets.

    The pool must have all else, bit for bit, as it was, but for x and B of the new tokens.
    """
    slots, folds, want, got = inputs.slots.long(), inputs.folds, inputs.fresh().state, after.state
    alone = inputs.of_slots(slots)  # in a pool
    batch = replace(alone, slots=torch.arange(len(slots)).to(slots))
    model = Recurrence.of(batch)
    exact, plain = model.exact[folds], model.stored(batch)[folds]
    right, right_plain = model.step(batch, torch.zeros_like(batch.tokens))
    ratios = {"output": error_ratio(y.reshape(right.shape), right, right_plain)}
    if folds.any():
        ratios["state"] = error_ratio(after.states[folds], exact, plain)
    for name, kept in slotted(want).items():
        if name in ("data", "scale"):
            bits_of(kept)[slots[folds]] = bits_of(slotted(got)[name])[slots[folds]]
    rows = (want.start + want.count)[slots, None] + torch.arange(inputs.row_lengths[0], device=slots.device)
    new = slots[:, None], slice(None), rows.long() % want.ring.length  # (batch, T, heads or groups, ...) of a ring
    x, B, dt = (inputs.arguments[name] for name in ("x", "B", "dt"))
    x, B, dt = (x, B, dt) if inputs.has_token_axis else (x[:, None], B[:, None], dt[:, None])
    steps = (softplus(dt.to(kind) + inputs.arguments["dt_bias"].to(kind)) for kind in (torch.float64, torch.float32))
    ratios["dt in the ring"] = error_ratio(got.dt[new], *steps)
    want.x[new], want.B[new], want.dt[new] = x, B, got.dt[new]
    require_within_budgets(ratios)
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
    "mamba2_replay", bind_flashstate, mamba2.case_of, (DRAFTING, PLAIN, CURSORS), PEERS,
    job_of("", mamba2.HOST_CASE, "stationary").case, tuned=None, job=job_of, check=check, shown=LIVE[:1],
)  # fmt: skip
