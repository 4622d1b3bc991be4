"""Steps of a StatePool with rings that are not as they should be: what plans hold on to, and what debug() finds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ring_pools import HEADS, LAYERS, A, fold, make_pool, replay, step, tokens_for
from torch import Tensor

import flashstate
from flashstate import Slots, StatePool

ANOTHER_REQUEST: dict[str, Callable[[StatePool, Tensor], Any]] = {
    "acquired": lambda pool, slot: (pool.release(slot), pool.acquire()),
    "reset": lambda pool, slot: pool.reset(slot),
    "copied to": lambda pool, slot: pool.copy(0, slot),
    "loaded": lambda pool, slot: pool.load(slot, pool.export(0)),
    "written": lambda pool, slot: pool.write(1, slot, torch.zeros(1, HEADS, 3, 5, device=slot.device)),
}


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


@pytest.mark.parametrize(("rule", "packed"), [("mamba2", True), ("gated_delta", False)])
def test_replay_goes_by_its_plan_and_debug_finds_one_of_an_earlier_step(
    rule: str, packed: bool, device: torch.device
) -> None:
    pool, twin = (make_pool(rule, device=device) for _ in range(2))
    tokens = {name: t.to(device) for name, t in tokens_for(*((5, 1) if packed else (3, 2))).items()}
    tokens = {name: t[:, 0] for name, t in tokens.items()} if packed else tokens
    outputs = []
    for one in (pool, twin):
        slots, bounds = one.acquire(3).clone(), torch.tensor([0, 2, 3, 5], device=device)
        plan = one.plan(Slots(slots, cu_seqlens=bounds, max_len=2)) if packed else one.plan(slots, 2)
        if one is twin:  # what the plan was made of changes
            for cursor in (one.ring(0).start, one.ring(0).count):
                cursor.add_(1)
            slots.sub_(9)
        outputs.append(step(one, 0, tokens, plan=plan))
    assert torch.equal(*outputs)
    assert all(torch.equal(getattr(pool.ring(0), part), getattr(twin.ring(0), part)) for part in pool.ring(0).written)
    with flashstate.debug(), pytest.raises(ValueError, match=r"^plan is of an earlier step: start and count of slot 0"):
        twin.commit(plan)


@pytest.mark.parametrize("rule", ["mamba2", "gated_delta"])
def test_debug_finds_steps_that_were_not_committed_and_states_that_lag(rule: str) -> None:
    pool, x = make_pool(rule), tokens_for(2, 1)
    slots = pool.acquire(2)
    with flashstate.debug():
        replay(pool, slots, x)
        plan = pool.plan(slots, 1)
        for i in range(LAYERS):
            step(pool, i, x, plan=plan)
        with pytest.raises(ValueError, match=r"^the step before was not committed, .* slots 0, 1: commit the plan"):
            step(pool, 0, x, plan=plan)
        pool.commit(plan, torch.zeros(2, dtype=torch.int32))
        replay(pool, slots, x)
        given = {name: x[name][:, 0] for name in (("x", "dt", "B", "C") if rule == "mamba2" else ("q", "k", "v", "b"))}
        plain = flashstate.mamba2_step if rule == "mamba2" else flashstate.gated_delta_step
        given |= {"A": A} if rule == "mamba2" else {"a": -x["a"][:, 0, :, 0].abs()}
        with pytest.raises(ValueError, match=r"^state lags behind its ring, which has live rows in slots 0, 1: fold"):
            plain(pool.layer(1), **given, slots=slots)
        fold(pool, 1, slots=slots)
        pool.folded(slots)
        plain(pool.layer(1), **given, slots=slots)
