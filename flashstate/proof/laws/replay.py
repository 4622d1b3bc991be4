"""Laws that replay alone has: what is written to checkpoints and rings, dead rows, accepted tokens, graphs."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from flashstate.proof import Recurrence, ReplayCase, ReplayInputs
from flashstate.proof.laws import registry, require
from flashstate.proof.laws.require import all_tokens
from flashstate.proof.laws.seeds import graph_like_eager_steps
from flashstate.reference.mamba2 import time_steps

law = partial(registry.law, includes=lambda case: case.op.rings)
OF_RINGS = ("x", "B", "dt", "start", "count")


@law("replay writes no state where it does not fold, and of a ring only rows that are not live, to append its tokens")
def only_what_must_be_written(case: ReplayCase, device: torch.device, inputs: ReplayInputs) -> None:
    kept, appended = inputs.slots[~inputs.folds].long(), inputs.appended_rows
    want, exact = rings_after(inputs)
    run = inputs.fresh()
    run.step()
    require.equal_states("rows that do not fold", run.state, inputs.state, kept, besides=OF_RINGS)
    require.equal_states("rings", run.state, want.state, besides=("data", "scale", "dt"))
    after, before, plain = (pool.dt.transpose(1, 2) for pool in (run.state, inputs.state, want.state))
    require.equal_bytes("other time steps", after[~appended], before[~appended])
    require.within_budget("time steps", after[appended], exact.transpose(1, 2)[appended], plain[appended])


def rings_after(inputs: ReplayInputs) -> tuple[ReplayInputs, Tensor]:
    """Inputs with their tokens in their rings, and the time steps of these in float64."""
    found = inputs.fresh()
    pool, exact = found.state, found.state.dt.double()
    for t in range(max(inputs.row_lengths)):
        rows = (inputs.tokens > t).nonzero()[:, 0]
        slot, token = inputs.slots[rows].long(), inputs.token(rows, t)
        row = (pool.start + pool.count + t)[slot].long() % pool.ring.length
        pool.x[slot, :, row], pool.B[slot, :, row] = token["x"], token["B"]
        for sizes in (exact, pool.dt):
            dt, bias = token["dt"].to(sizes.dtype), token["dt_bias"]
            bias = None if bias is None else bias.to(sizes.dtype)
            sizes[slot, :, row] = time_steps(dt, bias, token["dt_softplus"], token["dt_limit"])
    return found, exact


@law("NaN in rows of a ring that are not live changes nothing")
def dead_rows(case: ReplayCase, device: torch.device, inputs: ReplayInputs) -> None:
    there = (inputs.state.live_rows | inputs.appended_rows)[inputs.slots.long()]
    clean, dead = inputs.fresh(), inputs.fresh()
    for tensor in (clean.state.x, clean.state.B, clean.state.dt):
        require.that(bool(tensor.isnan().any()), "no row is dead")
        tensor.nan_to_num_(0.0)
    y = dead.step()
    require.equal_bytes("output", y, clean.step())
    require.that(not bool(y.isnan().any()), "NaN came out of a ring")
    require.equal_states("checkpoints", dead.state, clean.state, besides=OF_RINGS)
    for name in ("x", "B", "dt"):
        got, want = (getattr(run.state, name)[inputs.slots.long()].transpose(1, 2) for run in (dead, clean))
        require.equal_bytes(f"the ring of {name}", got[there], want[there])


STEPS = 6


@law("steps of a replay, of which any tokens are accepted, give what the recurrence gives on those")
def accepted_tokens(case: ReplayCase, device: torch.device, inputs: ReplayInputs) -> None:
    model, generator = Recurrence.of(inputs), torch.Generator().manual_seed(3)
    for turn in range(STEPS):
        step = inputs.given(**case.make_inputs(device, seed=turn + 1).activations)
        accepted = (torch.rand(case.batch, generator=generator).to(device) * (step.tokens + 1)).long()
        plan = step.plan()
        y = all_tokens(step, step.step())
        require.within_budget(f"the output of step {turn}", y, *model.step(step, accepted))
        step.state.ring.commit(plan, accepted)
        inputs.state.advance(inputs.at())
    require.equal_bytes("live tokens", inputs.state.count.long(), model.live)


@law("a CUDA graph of a plan, a replay and its commit goes on with whatever is accepted", needs="cuda")
def graphs(case: ReplayCase, device: torch.device, inputs: ReplayInputs) -> None:
    accepted, slots = torch.zeros_like(inputs.tokens), inputs.at()

    def one_step(run: ReplayInputs, out: Tensor) -> None:
        plan = run.plan(slots)
        run.step(plan=plan, out=out)
        run.state.ring.commit(plan, accepted)
        run.state.advance(slots)

    graph_like_eager_steps(inputs, one_step, 4, lambda turn: accepted.copy_(inputs.tokens * turn // 3))


WORDS = [words for words, check in registry.LAWS.items() if check.__module__ == __name__]
