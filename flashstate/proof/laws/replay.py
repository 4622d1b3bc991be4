"""Laws that replay alone has: what is written to checkpoints and rings, dead rows, accepted tokens, graphs."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from flashstate.proof import AnyReplayCase, Recurrence, ReplayInputs
from flashstate.proof.laws import registry, require
from flashstate.proof.laws.require import all_tokens
from flashstate.proof.laws.seeds import graph_like_eager_steps
from flashstate.proof.replaying import CURSORS, rings_after

law = partial(registry.law, includes=lambda case: case.op.rings)


@law("replay writes no state where it does not fold, and of a ring only rows that are not live, to append its tokens")
def only_what_must_be_written(case: AnyReplayCase, device: torch.device, inputs: ReplayInputs) -> None:
    others, appended = inputs.slots[~inputs.folds].long(), inputs.appended_rows
    want, exact = rings_after(inputs)
    run = inputs.fresh()
    run.step()
    of_rings = (*inputs.state.kept, *CURSORS)
    require.equal_states("rows that do not fold", run.state, inputs.state, others, besides=of_rings)
    require.equal_states("rings", run.state, want.state, besides=("data", "scale", *exact))
    for name, finely in exact.items():
        after, before, plain = (pool.kept[name].transpose(1, 2) for pool in (run.state, inputs.state, want.state))
        require.equal_bytes(f"{name} of other tokens", after[~appended], before[~appended])
        require.within_budget(
            f"{name} of new tokens", after[appended], finely.transpose(1, 2)[appended], plain[appended]
        )


@law("NaN in rows of a ring that are not live changes nothing")
def dead_rows(case: AnyReplayCase, device: torch.device, inputs: ReplayInputs) -> None:
    there = (inputs.state.live_rows | inputs.appended_rows)[inputs.slots.long()]
    clean, dead = inputs.fresh(), inputs.fresh()
    for tensor in clean.state.kept.values():
        require.that(bool(tensor.isnan().any()), "no row is dead")
        tensor.nan_to_num_(0.0)
    y = dead.step()
    require.equal_bytes("output", y, clean.step())
    require.that(not bool(y.isnan().any()), "NaN came out of a ring")
    require.equal_states("checkpoints", dead.state, clean.state, besides=(*inputs.state.kept, *CURSORS))
    for name in inputs.state.kept:
        got, want = (run.state.kept[name][inputs.slots.long()].transpose(1, 2) for run in (dead, clean))
        require.equal_bytes(f"the ring of {name}", got[there], want[there])


@law(
    "a ring that is folded before a call gives the bytes of one that the call folds",
    includes=lambda case: case.op.rings and case.op.from_stored,
)
def folded_before(case: AnyReplayCase, device: torch.device, inputs: ReplayInputs) -> None:
    """Output, checkpoints and rings."""
    ahead, slots = inputs.fresh(), inputs.slots[inputs.folds]
    ahead.fold(slots=slots)
    ahead.state.ring.folded(slots)
    require.that(not bool(ahead.folds.any()), "a call folds what was folded before")
    require.equal_bytes("output", ahead.step(), inputs.step())
    require.equal_states("the pool", ahead.state, inputs.state, besides=CURSORS)


STEPS = 6


@law("steps of a replay, of which any tokens are accepted, give what the recurrence gives on those")
def accepted_tokens(case: AnyReplayCase, device: torch.device, inputs: ReplayInputs) -> None:
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
def graphs(case: AnyReplayCase, device: torch.device, inputs: ReplayInputs) -> None:
    accepted, slots = torch.zeros_like(inputs.tokens), inputs.at()

    def one_step(run: ReplayInputs, out: Tensor) -> None:
        plan = run.plan(slots)
        run.step(plan=plan, out=out)
        run.state.ring.commit(plan, accepted)
        run.state.advance(slots)

    graph_like_eager_steps(inputs, one_step, 4, lambda turn: accepted.copy_(inputs.tokens * turn // 3))


WORDS = [words for words, check in registry.LAWS.items() if check.__module__ == __name__]
