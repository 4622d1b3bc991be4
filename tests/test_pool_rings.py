"""Steps of rings that are not as they should be: what plans hold on to, and what debug() finds."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from ring_pools import HEADS, make_pool
from torch import Tensor

import flashstate
from flashstate import StatePool
from flashstate.proof import AnyReplayCase, DeltaReplayCase, ReplayCase
from flashstate.proof.laws import require

ANOTHER_REQUEST: dict[str, Callable[[StatePool, Tensor], Any]] = {
    "acquired": lambda pool, slot: (pool.release(slot), pool.acquire()),
    "reset": lambda pool, slot: pool.reset(slot),
    "copied to": lambda pool, slot: pool.copy(0, slot),
    "loaded": lambda pool, slot: pool.load(slot, pool.export(0)),
    "written": lambda pool, slot: pool.write(1, slot, torch.zeros(1, HEADS, 3, 5, device=slot.device)),
}
CASES = ReplayCase(3, 2, 1, 3, 5, window=4), DeltaReplayCase(3, 2, 1, 3, 5, raw=False, window=4)
EITHER = pytest.mark.parametrize("case", CASES, ids=["mamba2", "gated_delta"])


def test_a_commit_leaves_slots_alone_that_have_another_request_since_the_plan(device: torch.device) -> None:
    for change in ANOTHER_REQUEST.values():
        pool = make_pool(device=device)
        slots = pool.acquire(3)
        plan = pool.plan(slots, 2)
        pool.copy(torch.tensor([-1], device=device), slots[2:])  # from no slot
        change(pool, slots[1:2])
        before = pool.ring(0).count.tolist()
        with flashstate.debug(), pytest.raises(ValueError, match=r"^plan is of requests that are no longer in slot 1,"):
            pool.commit(plan)
        assert pool.ring(0).count.tolist() == before
        pool.commit(plan)
        assert pool.ring(0).count.tolist() == [2, before[1], 2, *before[3:]]


@EITHER
def test_replay_goes_by_its_plan_and_debug_finds_one_of_an_earlier_step(
    case: AnyReplayCase, device: torch.device
) -> None:
    case = replace(case, tokens=2, packed=isinstance(case, ReplayCase))
    (inputs, plan), (twin, other) = ((made, made.plan()) for made in (case.make_inputs(device) for _ in range(2)))
    for numbers in (twin.state.start, twin.state.count, twin.slots):  # what the plan was made of
        numbers.add_(1)
    require.equal_bytes("output", twin.step(plan=other), inputs.step(plan=plan))
    for name, kept in {**inputs.state.kept, "data": inputs.state.data}.items():
        require.equal_bytes(name, getattr(twin.state, name), kept)
    with flashstate.debug(), pytest.raises(ValueError, match=r"^plan is of an earlier step: start and count of slot "):
        twin.state.ring.commit(other)


@EITHER
def test_debug_finds_steps_that_were_not_committed_and_states_that_lag(case: AnyReplayCase) -> None:
    first, last = (case.make_inputs(torch.device("cpu")) for _ in range(2))
    last.state = replace(last.state, **{name: getattr(first.state, name) for name in ("start", "count", "seed")})
    StatePool.wrap([layer.state.state for layer in (first, last)], rings=[layer.state.ring for layer in (first, last)])
    ring, plain = first.state.ring, getattr(flashstate, case.op.declared.name.replace("replay", "step"))

    def step_without_ring() -> None:
        plain(last.state.state, **last.arguments, slots=last.slots)

    with flashstate.debug():
        for accepted in (None, torch.zeros(3, dtype=torch.int32)):
            plan = first.plan()
            for layer in (first, last):
                layer.step(plan=plan)
            with pytest.raises(ValueError, match=r"^the step before was not committed, .* slots .*: commit the plan"):
                first.step(plan=plan)
            ring.commit(plan, accepted)
        with pytest.raises(ValueError, match=r"^state lags behind its ring, which has live rows in slots? .*: fold"):
            step_without_ring()
        last.fold(slots=last.slots)
        ring.folded(last.slots)
        step_without_ring()
