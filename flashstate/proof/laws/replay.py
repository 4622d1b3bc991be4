"""Laws of replay: accuracy, what is written, plans, independence, accepted tokens, CUDA graphs."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from flashstate.launch import Config, machine_of, override, uses_kernels
from flashstate.launch.suspension import suspended
from flashstate.ops.mamba2_replay import parted
from flashstate.proof import Recurrence, ReplayCase, ReplayInputs
from flashstate.proof.laws import registry
from flashstate.proof.laws.require import (
    all_tokens,
    poison,
    require,
    require_equal_bytes,
    require_equal_states,
    require_within_budget,
    rest_of,
    restore,
)
from flashstate.proof.laws.seeds import ENOUGH_VALUES
from flashstate.reference.mamba2 import softplus
from flashstate.state.formats import bits_of

law = partial(registry.law, among=registry.REPLAY_LAWS)
CURSORS = ("start", "count")
OF_RINGS = ("x", "B", "dt", *CURSORS)
# How the op may go about a call: every row decides whether it folds, as a plan says, or one kernel has the rows that
# fold, and another one those that do not.
FORMS = ("decided", "planned", "parted")


def forms_on(device: torch.device) -> tuple[str, ...]:
    """FORMS that differ there: the reference reads no plan."""
    return FORMS if uses_kernels(device) else FORMS[:2]


def call(form: str, inputs: ReplayInputs, options: dict[str, Any] | None = None, **of_slots: Any) -> Tensor:
    """Replay in one of FORMS, with these options of the op and fields of Slots."""
    if form == "decided":
        return inputs.step(slots=inputs.at(**of_slots), **options or {})
    plan = inputs.plan(**of_slots)
    if form == "planned":
        return inputs.step(plan=plan, **options or {})
    with suspended(), parted():
        return inputs.step(plan=plan, **options or {})


@law("replay is as close to the recurrence in float64 as float32 and the format allow, and so is what a fold stores")
def close_to_float64(case: ReplayCase, device: torch.device) -> None:
    inputs = case.make_inputs(device)
    require_close("", inputs, inputs.fresh())


def require_close(what: str, inputs: ReplayInputs, run: ReplayInputs) -> None:
    """Replaying `run`, which is like these inputs, gives outputs and states within their budgets."""
    model, folds, slots = Recurrence.of(inputs), inputs.folds, inputs.slots.long()
    exact, plain = model.exact[slots][folds], model.stored(inputs)[folds]
    y, y_plain = model.step(inputs, inputs.tokens)
    require_within_budget(f"the output{what}", all_tokens(inputs, run.step()), y, y_plain)
    if bool(folds.any()):
        require_within_budget(f"the folded state{what}", run.states[folds], exact, plain)


@law("replay writes no state where it does not fold, and of a ring only rows that are not live, to append its tokens")
def only_what_must_be_written(case: ReplayCase, device: torch.device) -> None:
    inputs = case.make_inputs(device)
    kept, appended = inputs.slots[~inputs.folds].long(), inputs.appended_rows
    want, exact = _appended(inputs)
    for form in forms_on(device):
        run = inputs.fresh()
        call(form, run)
        require_equal_states(f"rows that do not fold, {form}", run.state, inputs.state, kept, besides=OF_RINGS)
        require_equal_states(f"rings, {form}", run.state, want.state, besides=("data", "scale", "dt"))
        after, before, plain = (pool.dt.transpose(1, 2) for pool in (run.state, inputs.state, want.state))
        require_equal_bytes(f"other time steps, {form}", after[~appended], before[~appended])
        steps = exact.transpose(1, 2)[appended]
        require_within_budget(f"time steps, {form}", after[appended], steps, plain[appended])


def _appended(inputs: ReplayInputs) -> tuple[ReplayInputs, Tensor]:
    """The same inputs with their tokens in their rings, and the time steps of these in float64."""
    found = inputs.fresh()
    pool, exact = found.state, found.state.dt.double()
    for t in range(max(inputs.row_lengths)):
        rows = (inputs.tokens > t).nonzero()[:, 0]
        slot, token = inputs.slots[rows].long(), inputs.token(rows, t)
        row = (pool.start + pool.count + t)[slot].long() % pool.ring.length
        pool.x[slot, :, row], pool.B[slot, :, row] = token["x"], token["B"]
        for sizes in (exact, pool.dt):
            dt, bias = token["dt"].to(sizes.dtype), token["dt_bias"]
            dt = dt if bias is None else dt + bias.to(sizes.dtype)
            sizes[slot, :, row] = softplus(dt) if token["dt_softplus"] else dt
    return found, exact


@law("NaN in rows of a ring that are not live changes nothing")
def dead_rows(case: ReplayCase, device: torch.device) -> None:
    inputs = case.make_inputs(device)
    there = (inputs.state.live_rows | inputs.appended_rows)[inputs.slots.long()]
    for form in forms_on(device):
        clean, dead = inputs.fresh(), inputs.fresh()
        for tensor in (clean.state.x, clean.state.B, clean.state.dt):
            require(bool(tensor.isnan().any()), "no row is dead")
            tensor.nan_to_num_(0.0)
        y = call(form, dead)
        require_equal_bytes(f"output, {form}", y, call(form, clean))
        require(not bool(y.isnan().any()), f"NaN came out of a ring, {form}")
        require_equal_states(f"checkpoints, {form}", dead.state, clean.state, besides=OF_RINGS)
        for name in ("x", "B", "dt"):
            got, want = (getattr(run.state, name)[inputs.slots.long()].transpose(1, 2) for run in (dead, clean))
            require_equal_bytes(f"the ring of {name}, {form}", got[there], want[there])


@law("replay leaves checkpoints and rings of slots that no row has as they are, and NaN in them stays there")
def untouched_slots(case: ReplayCase, device: torch.device) -> None:
    inputs = case.make_inputs(device)
    rest, slots = rest_of(inputs), inputs.slots.long()
    for form in forms_on(device):
        clean, run = inputs.fresh(), inputs.fresh()
        poison(run.state, rest)
        before = run.fresh()
        require_equal_bytes(f"output, {form}", call(form, run), call(form, clean))
        require_equal_states(f"the batch, {form}", run.state, clean.state, slots)
        require_equal_states(f"slots outside the batch, {form}", run.state, before.state, rest)


@law("five replays of equal inputs give equal bytes")
def repeatable(case: ReplayCase, device: torch.device) -> None:
    inputs = case.make_inputs(device)
    for form in forms_on(device):
        runs = [inputs.fresh() for _ in range(5)]
        outputs = [call(form, run) for run in runs]
        for run, y in zip(runs[1:], outputs[1:], strict=True):
            require_equal_bytes(f"output, {form}", y, outputs[0])
            require_equal_states(f"the pool, {form}", run.state, runs[0].state)


@law("a replayed row depends neither on the plan, nor on its neighbours, nor on the batch size")
def independence(case: ReplayCase, device: torch.device) -> None:
    inputs = case.make_inputs(device)
    together = inputs.fresh()
    y = call("decided", together)
    for form in forms_on(device)[1:]:
        other = inputs.fresh()
        require_equal_bytes(f"output, {form}", call(form, other), y)
        require_equal_states(f"the pool, {form}", other.state, together.state)
    rows = together.per_row(y)
    for row, form in zip(range(case.batch), 2 * FORMS, strict=False):
        alone = inputs.fresh()
        one = alone.of_rows(torch.tensor([row], device=device))
        require_equal_bytes(f"output of row {row}, {form}", one.per_row(call(form, one))[0], rows[row])
        slot = inputs.slots[row : row + 1].long()
        require_equal_states(f"row {row}, {form}", alone.state, together.state, slot)


@law("permuting the rows of a replayed batch permutes the results")
def permutation(case: ReplayCase, device: torch.device) -> None:
    inputs = case.make_inputs(device)
    order = torch.randperm(case.batch, generator=torch.Generator().manual_seed(1)).to(device)
    straight = inputs.fresh()
    rows = straight.per_row(call("decided", straight))
    for form in forms_on(device):
        shuffled = inputs.fresh()
        other = shuffled.of_rows(order)
        found = other.per_row(call(form, other))
        for position, row in enumerate(order.tolist()):
            require_equal_bytes(f"output of row {row}, {form}", found[position], rows[row])
        require_equal_states(f"the pool, {form}", shuffled.state, straight.state)


@law("the launch config does not change a byte of a replay", needs="kernels")
def configs_agree(case: ReplayCase, device: torch.device) -> None:
    inputs = replace(case, x="float32").make_inputs(device)  # so that the output shows every bit of a sum
    first = inputs.fresh()
    y = call("decided", first)
    problem = case.problem
    # The interpreter sums over lanes in numpy's order.
    lanes = problem.lane_choices if device.type == "cuda" else [problem.heuristic(machine_of(device).gpu).lanes]
    tried = (("decided", 16, 1), ("decided", 32, 2), ("parted", 16, 4), ("planned", 16, 4))
    for (form, rows, tiles), some in zip(tried, cycle(lanes), strict=False):
        again, config = inputs.fresh(), Config(rows, 2, some, tiles=tiles)
        if not problem.valid(config):  # warps of tensor cores multiply alone
            config = replace(config, num_warps=1)
        with override(config):
            require_equal_bytes(f"output with {config}, {form}", call(form, again), y)
        require_equal_states(f"the pool with {config}, {form}", again.state, first.state)


@law("a replay that repeats another, and so starts its kernels directly, gives the same bytes", needs="cuda")
def direct_launches(case: ReplayCase, device: torch.device) -> None:
    inputs = case.make_inputs(device)
    for form, around in (("decided", nullcontext), ("planned", nullcontext), ("planned", parted)):
        ordinary, repeated = inputs.fresh(), inputs.fresh()
        with around():
            with suspended():
                y = call(form, ordinary)
            out = torch.empty_like(y)
            call(form, repeated, {"out": out})
            require(bool(repeated.state.state.launches), "nothing was remembered of the first call")
            restore(repeated.state, inputs.state)
            call(form, repeated, {"out": out.zero_()})
        require_equal_bytes(f"output, {form}", out, y)
        require_equal_states(f"the pool, {form}", repeated.state, ordinary.state)


@law(
    "a fold draws other bits after advance and in another stream",
    includes=lambda case: case.rounding == "stochastic" and math.prod(case.state_axes[1:]) >= ENOUGH_VALUES,
)
def seeds_decide(case: ReplayCase, device: torch.device) -> None:
    base = case.make_inputs(device)
    stepped, streamed, folds = base.fresh(), base.fresh(), base.slots[base.folds].long()
    streamed.state = replace(streamed.state, stream=streamed.state.stream + 1)
    stepped.state.advance(stepped.slots)
    for run in (base, stepped, streamed):
        run.step()
    for name, other in (("after advance", stepped), ("in another stream", streamed)):
        same = (bits_of(other.state.data) == bits_of(base.state.data))[folds].flatten(1).all(1)
        require(not bool(same.any()), f"the bytes {name} are the same")


STEPS = 6


@law("steps of a replay, of which any tokens are accepted, give what the recurrence gives on those")
def accepted_tokens(case: ReplayCase, device: torch.device) -> None:
    inputs = case.make_inputs(device)
    model, generator = Recurrence.of(inputs), torch.Generator().manual_seed(3)
    for turn in range(STEPS):
        tokens = case.make_inputs(device, seed=turn + 1)
        step = inputs.with_tokens_of(tokens)
        accepted = (torch.rand(case.batch, generator=generator).to(device) * (step.tokens + 1)).long()
        plan = step.plan()
        y = all_tokens(step, call(FORMS[turn % len(FORMS)], step))
        require_within_budget(f"the output of step {turn}", y, *model.step(step, accepted))
        step.state.ring.commit(plan, accepted)
        inputs.state.advance(inputs.at())
    require_equal_bytes("live tokens", inputs.state.count.long(), model.live)


@law("a CUDA graph of a plan, a replay and its commit goes on with whatever is accepted", needs="cuda")
def graphs(case: ReplayCase, device: torch.device) -> None:
    inputs = case.make_inputs(device)
    eager, accepted = inputs.fresh(), inputs.tokens
    out, slots = torch.empty_like(inputs.fresh().step()), inputs.at()

    def one_step(run: ReplayInputs) -> None:
        plan = run.state.ring.plan(slots, None if case.packed else case.tokens or 1)
        run.step(plan=plan, out=out)
        run.state.ring.commit(plan, accepted)
        run.state.advance(slots)

    one_step(inputs.fresh())  # compiles
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one_step(inputs)
    for turn in range(4):
        accepted.copy_(inputs.tokens * turn // 3)
        graph.replay()
        replayed = out.clone()
        one_step(eager)
        require_equal_bytes("output of a graph", replayed, out)
        require_equal_states("the pool after a graph", inputs.state, eager.state)


@law("a replay on a second stream works", needs="cuda")
def second_stream(case: ReplayCase, device: torch.device) -> None:
    inputs = case.make_inputs(device)
    other = inputs.fresh()
    want = call("parted", inputs)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        got = call("parted", other)
    torch.cuda.current_stream(device).wait_stream(stream)
    require_equal_bytes("output", got, want)
    require_equal_states("the pool", other.state, inputs.state)
