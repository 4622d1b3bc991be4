"""The benchmark of mamba2_replay: its jobs, what is checked, and what it takes the place of: steps of mamba2_step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashstate.bench import mamba2
from flashstate.bench.jobs import BenchedOp, Grid, Live
from flashstate.bench.measure import check as check_step
from flashstate.bench.measure import require_within_budgets, slots_of
from flashstate.bench.peers import IN_PLACE, Binding, Launch, MeasurementError, Peer, Step, Storing
from flashstate.bench.replay_case import CursorInputs, RingCase, job_of
from flashstate.ops.mamba2_replay import mamba2_replay
from flashstate.proof import Inputs, ReplayInputs, ReplayPool, encoded, error_ratio, slotted
from flashstate.reference import rings as reference
from flashstate.reference.mamba2 import softplus
from flashstate.reference.mamba2_replay import BEFORE_THE_FIRST_TOKEN, replayed
from flashstate.reference.state_io import advance_seeds
from flashstate.state.formats import bits_of, decode
from flashstate.state.slots import Slots

TOKENS = 6  # of a step that drafts
LIVE: tuple[Live, ...] = ("none folds", "stationary", "uniform", "all fold")
LIVE_BY_ONE: tuple[Live, ...] = ("none folds", "a 16th folds")
FLOAT32, BFLOAT16 = ("float32", "nearest"), ("bfloat16", "nearest")
FLOAT16, INT8, FLOAT8 = (("float16", "stochastic"), ("int8", "stochastic"), ("float8_e4m3fn", "stochastic"))
DRAFTING = Grid(
    (mamba2.SHAPE,), (FLOAT32, FLOAT16, BFLOAT16, INT8, FLOAT8), (TOKENS,),
    (*LIVE, "snapshots", "last"), by_one=(*LIVE_BY_ONE, "last"),
)  # fmt: skip
PLAIN = replace(DRAFTING, formats=(FLOAT32, BFLOAT16, FLOAT16, INT8), tokens=(1,))
CURSORS = Grid((mamba2.SHAPE,), (FLOAT16,), (1, TOKENS), ("plan and commit",), by_one=("plan and commit",))
HOST_CASE = RingCase(**vars(mamba2.HOST_CASE))


def bind_flashstate(inputs: Inputs, storing: Storing = IN_PLACE, *, bare: bool = False) -> Step:
    """A call with a plan that was made before, as all layers of a model but the first have it; with `bare` without one.
    On a pool without rings the step of mamba2_step."""
    if not isinstance(inputs, ReplayInputs):
        return mamba2.bind_flashstate(inputs, storing, bare=bare)
    if isinstance(inputs, CursorInputs):
        return bind_cursors(inputs)
    pool, ring = inputs.state, inputs.state.ring
    arguments = {**inputs.arguments, **inputs.options, "state": pool.data if bare else pool.state, "ring": ring}
    arguments["out"] = torch.empty_like(inputs.main)

    def step(slots: Slots) -> Launch:
        if bare:
            return lambda: mamba2_replay(**arguments, slots=slots.read)
        plan = ring.plan(slots, inputs.row_lengths[0])
        return lambda: mamba2_replay(**arguments, plan=plan)

    return step


def bind_cursors(inputs: CursorInputs) -> Step:
    """What a model step has around its layers: it gives the rows of the plan."""
    state, ring = inputs.state.state, inputs.state.ring

    def launch(slots: Slots) -> Tensor:
        plan = ring.plan(slots, inputs.row_lengths[0])
        ring.commit(plan, inputs.accepted)
        if state.rounding != "nearest":
            state.advance(slots)
        return plan.rows

    return lambda slots: lambda: launch(slots)


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
        require_replayed(inputs, copy.state, result)


@dataclass(frozen=True)
class Replayed:
    """What a call of replay must give: exactly, and as plain float32 arithmetic and the formats give it."""

    y: Tensor  # (tokens, ...), those of a row one after the other
    y_plain: Tensor
    state: Tensor  # of rows that fold, with their live tokens
    state_plain: Tensor


def expected(inputs: ReplayInputs, folds: Tensor) -> Replayed:
    """By the recurrence, over live rows and then over the new tokens."""
    pool, slot = inputs.state, inputs.slots.long()
    start, live = pool.start[slot].long(), pool.count[slot].long()
    exact, plain = (
        replayed(pool.ring, s, slot, start, live, inputs.arguments["A"])
        for s in (inputs.states.double(), inputs.states)
    )
    stored = decode(*encoded(plain[folds], pool, pool, slot[folds], BEFORE_THE_FIRST_TOKEN))
    return Replayed(outputs(inputs, exact), outputs(inputs, plain).to(inputs.main.dtype), exact[folds], stored)


def outputs(inputs: Inputs, s: Tensor) -> Tensor:
    """The outputs of all tokens from states s, in their dtype: (tokens, ...)."""
    y = []
    for run in [inputs.of_tokens(t) for t in range(inputs.row_lengths[0])] if inputs.has_token_axis else [inputs]:
        of_token, s = inputs.op.token(s, **run.arguments, **run.options)
        y.append(of_token)
    return torch.stack(y, 1).flatten(0, 1)


def require_replayed(inputs: ReplayInputs, got: ReplayPool, y: Tensor) -> None:
    """Raise MeasurementError unless outputs, states that were folded and new time steps are within their budgets, and
    the pool has all else, bit for bit, as it was, but for x and B of the new tokens."""
    slot, want = inputs.slots.long(), inputs.fresh().state
    length, folds = inputs.row_lengths[0], inputs.folds
    right, into = expected(inputs, folds), slot[folds]
    ratios = {"output": error_ratio(y.reshape(right.y.shape), right.y, right.y_plain)}
    if folds.any():
        states = decode(got.data[into], None if got.scale is None else got.scale[into])
        ratios["state"] = error_ratio(states, right.state, right.state_plain)
    for kept, stored in ((want.data, got.data), (want.scale, got.scale)):
        if kept is not None and stored is not None:
            bits_of(kept)[into] = bits_of(stored)[into]
    rows = (want.start + want.count)[slot, None] + torch.arange(length, device=slot.device)
    new = slot[:, None], slice(None), rows.long() % want.ring.length  # (batch, T, heads or groups, ...) of a ring
    dt = time_steps(inputs, torch.float64), time_steps(inputs, torch.float32)
    ratios["dt in the ring"] = error_ratio(got.dt[new], *dt)
    want.x[new], want.B[new], want.dt[new] = of_tokens(inputs, "x"), of_tokens(inputs, "B"), got.dt[new]
    require_within_budgets(ratios)
    require_equal(slotted(want), slotted(got))


def of_tokens(inputs: Inputs, name: str) -> Tensor:
    """An activation with a token axis, whether or not it has one: (batch, T, ...)."""
    return inputs.arguments[name] if inputs.has_token_axis else inputs.arguments[name][:, None]


def time_steps(inputs: Inputs, dtype: torch.dtype) -> Tensor:
    """dt of new tokens as it counts: (batch, T, heads)."""
    return softplus(of_tokens(inputs, "dt").to(dtype) + inputs.options["dt_bias"].to(dtype))


def require_moved(inputs: CursorInputs, got: ReplayPool, rows: Tensor) -> None:
    """Raise MeasurementError unless a plan, the cursors and the seeds are those of plain torch, bit for bit."""
    pool, slots = inputs.fresh().state, Slots(inputs.slots.cpu())
    start, count = pool.start.cpu(), pool.count.cpu()
    of_plan, parts = torch.empty(rows.shape, dtype=rows.dtype), torch.empty(2, dtype=torch.int32)
    reference.make_plan(start, count, pool.window, slots, inputs.row_lengths[0], of_plan, parts)
    reference.commit_plan(start, count, pool.window, pool.ring.length, of_plan, inputs.accepted.cpu())
    want = {"rows of the plan": of_plan, "start": start, "count": count}
    found = {"rows of the plan": rows, "start": got.start, "count": got.count}
    if pool.seed is not None and got.seed is not None:
        want["seed"], found["seed"] = pool.seed.cpu(), got.seed
        if pool.rounding != "nearest":
            advance_seeds(want["seed"], slots)
    require_equal(want, {name: tensor.cpu() for name, tensor in found.items()})


def require_equal(want: dict[str, Tensor], got: dict[str, Tensor]) -> None:
    """Raise MeasurementError where bytes differ."""
    for name, tensor in want.items():
        if not torch.equal(bits_of(tensor), bits_of(got[name])):
            raise MeasurementError(f"wrong: it leaves {name} other than it must be")


PEERS: dict[str, Peer] = {}  # none is called yet
MAMBA2_REPLAY = BenchedOp(
    "mamba2_replay", bind_flashstate, mamba2.case_of, (DRAFTING, PLAIN, CURSORS), PEERS, HOST_CASE,
    tuned=None, job=job_of, check=check, shown=LIVE[:1],
)  # fmt: skip
