"""plan, commit and folded: the cursors of rings, as a plain model moves them, whatever the batch."""

import pickle
from copy import deepcopy
from itertools import cycle
from random import Random
from typing import Any

import pytest
import torch
from ring_models import (
    INDICES,
    PAST,
    SLOTS,
    Step,
    accepted_of,
    commit,
    index,
    make_ring,
    make_step,
    planned,
    ring_and_model,
    set_cursors,
)
from torch import Tensor

import flashstate
from flashstate import DeltaRing, Ring, Slots
from flashstate.state.ring import AnyRing

CUDA = torch.device("cuda")
SIZES = [(1, 2), (1, 5), (8, 9), (8, 11), (16, 17), (16, 23), (64, 77), (64, 128)]  # windows, and lengths of rings


EVERY_KIND = pytest.mark.parametrize("kind", [Ring, DeltaRing])


# Many steps


@pytest.mark.parametrize(
    ("window", "length", "kind"), [(*size, kind) for size, kind in zip(SIZES, cycle([Ring, DeltaRing]), strict=False)]
)
def test_cursors_are_where_the_model_has_them_after_any_steps(
    window: int, length: int, kind: type[AnyRing], device: torch.device
) -> None:
    ring, model = ring_and_model(window, length, device, kind=kind)
    draw = Random(length)
    count = [draw.randint(0, window) for _ in range(SLOTS)]
    set_cursors(ring, model, [draw.randrange(length) for _ in count], count)
    for turn in range(60 if device.type == "cpu" else 400):
        step = make_step(draw, ring, device, draw.randint(0, SLOTS))
        plan, rows = step.plan(ring, model)
        assert model.agrees(ring)  # planning moves nothing
        accepted = accepted_of(draw, step)
        commit(ring, plan, accepted, device, draw)
        model.commit(rows, accepted)
        assert model.agrees(ring), turn
        if draw.random() < 0.05:
            slot = draw.randrange(SLOTS)
            some = draw.randint(0, model.count[slot])
            ring.folded(index([slot], device, draw), some)
            model.folded([slot], [some], -1)
            assert model.agrees(ring), turn
    assert min(model.folds, model.wraps) > 3
    assert all(getattr(ring, name).isnan().all() for name in ring.written)
    flashstate.check_faults()


@pytest.mark.parametrize("batch", [0, 1, 5, 1500])
def test_batches_of_every_size_are_planned_and_committed(batch: int, device: torch.device) -> None:
    """1500 rows are more than the kernel looks at together."""
    slots = max(batch, 2) + 3
    ring, model = ring_and_model(8, 12, device, slots)
    draw = Random(batch)
    count = [draw.randint(0, 8) for _ in range(slots)]
    set_cursors(ring, model, [draw.randrange(12) for _ in count], count)
    for _ in range(2):
        step = make_step(draw, ring, device, batch)
        plan, rows = step.plan(ring, model)
        accepted = accepted_of(draw, step)
        commit(ring, plan, accepted, device, draw)
        model.commit(rows, accepted)
        assert model.agrees(ring)
        read = draw.sample(range(slots), batch)
        some = [draw.randint(0, model.count[slot]) for slot in read]
        ring.folded(index(read, device, draw), index(some, device, draw))
        model.folded(read, some, -1)
        assert model.agrees(ring)


@pytest.mark.parametrize("length", [0, 1, 5])
@pytest.mark.parametrize("window", [1, 8, 16, 64])
def test_a_full_ring_is_not_folded_and_one_token_more_folds_it(window: int, length: int, device: torch.device) -> None:
    ring = make_ring(window, window + 1 + length, device)
    slot = torch.tensor([4], device=device)
    for k in range(window):
        plan = ring.plan(slot, 1)
        assert plan.parts.tolist() == [0, 1]
        assert plan.rows[0, :6].tolist() == [0, 4, 0, k, 0, 1]
        ring.commit(plan)
    assert ring.count.tolist() == [0] * 4 + [window] + [0] * 4
    plan = ring.plan(slot, 1)
    assert plan.parts.tolist() == [1, 1]
    ring.commit(plan)
    assert ring.start.tolist() == [0] * 4 + [window] + [0] * 4
    assert ring.count.tolist() == [0] * 4 + [1] + [0] * 4


@pytest.mark.parametrize(("live", "tokens", "folds"), [(12, 4, 0), (13, 4, 1), (0, 16, 0), (1, 16, 1), (16, 1, 1)])
def test_a_call_folds_where_live_and_new_tokens_are_more_than_the_window(
    live: int, tokens: int, folds: int, device: torch.device
) -> None:
    """How many of them stay is not known then, and does not matter."""
    ring, model = ring_and_model(16, 32, device)
    set_cursors(ring, model, [30] * SLOTS, [live] * SLOTS)
    plan = ring.plan(torch.tensor([2], device=device), tokens)
    assert plan.parts.tolist() == [folds, 1]
    ring.commit(plan, torch.tensor([0], device=device))
    assert ring.start[2] == ((30 + live) % 32 if folds else 30)
    assert ring.count[2] == (0 if folds else live)


# The rows of a plan


def test_rows_that_fold_come_first_and_every_part_is_in_the_order_of_the_batch(device: torch.device) -> None:
    ring, model = ring_and_model(8, 11, device)
    set_cursors(ring, model, [10, 1, 2, 3, 4, 5, 6, 7, 8], [8, 0, 7, 3, 8, 6, 5, 8, 1])
    read, bounds = [3, 0, -1, 2, 8, 4, 6, 1, 5], [0, 3, 4, 6, 8, 11, 11, 14, 17, 18]
    slots = Slots(torch.tensor(read, device=device), cu_seqlens=torch.tensor(bounds, device=device), max_len=3, null=6)
    plan = ring.plan(slots)
    assert plan.slots is slots
    assert plan.tokens == 3
    assert plan.parts.tolist() == [2, 6]
    assert plan.rows.tolist() == [
        [1, 0, 10, 8, 3, 1, 0, 0],
        [3, 2, 2, 7, 6, 2, 0, 0],
        [0, 3, 3, 3, 0, 3, 0, 0],
        [4, 8, 8, 1, 8, 3, 0, 0],
        [7, 1, 1, 0, 14, 3, 0, 0],
        [8, 5, 5, 6, 17, 1, 0, 0],
        [2, -1, 0, 0, 4, 2, 0, 0],  # a negative slot
        [5, -1, 0, 0, 11, 0, 0, 0],  # no tokens
        [6, -1, 0, 0, 11, 3, 0, 0],  # the null slot
    ]


def test_boundaries_of_packed_tokens_that_cannot_be_are_brought_into_range(device: torch.device) -> None:
    ring, model = ring_and_model(8, 11, device)
    largest = (1 << 31) - 1
    for kind, bounds, first, lengths in (
        (torch.int64, [-5, 2, 9, 4, 1 << 40, 1 << 41], [0, 2, 9, 4, largest], [2, 3, 0, 3, 0]),
        (torch.int64, [1 << 32, (1 << 32) + 2, 0, 1, 1, -1], [largest, largest, 0, 1, 1], [0, 0, 1, 0, 0]),
        (torch.int32, [largest - 1, largest, -largest - 1, 3, 3, 4], [largest - 1, largest, 0, 3, 3], [1, 0, 3, 0, 1]),
    ):
        cu_seqlens = torch.tensor(bounds, dtype=kind, device=device)
        slots = Slots(torch.arange(5, device=device), cu_seqlens=cu_seqlens, max_len=3)
        Step(slots, None, list(range(5)), first, lengths, -1).plan(ring, model)
    empty = Slots(torch.arange(5, device=device), cu_seqlens=torch.arange(6, device=device), max_len=0)
    Step(empty, None, list(range(5)), list(range(5)), [0] * 5, -1).plan(ring, model)


# Commits


def test_a_commit_without_counts_keeps_all_tokens_of_every_row(device: torch.device) -> None:
    ring = make_ring(8, 11, device)
    slots = Slots(torch.arange(4, device=device), cu_seqlens=torch.tensor([0, 3, 3, 4, 6], device=device), max_len=3)
    ring.commit(ring.plan(slots))
    assert ring.count.tolist() == [3, 0, 1, 2, 0, 0, 0, 0, 0]
    assert not ring.start.any()


def test_the_last_commit_of_a_plan_is_the_one_that_counts(device: torch.device) -> None:
    ring, model = ring_and_model(8, 11, device)
    set_cursors(ring, model, [9] * SLOTS, [7, 2, 8, 0, 5, 1, 1, 1, 1])
    plan, rows = Step(torch.arange(5, device=device), 3, list(range(5)), [0] * 5, [3] * 5, -1).plan(ring, model)
    model.commit(rows, [1, 2, 3, 0, 1])
    for accepted in ([1, 2, 3, 0, 1], [1, 2, 3, 0, 1], [3, 3, 0, 2, 3], [1, 2, 3, 0, 1]):
        ring.commit(plan, torch.tensor(accepted, device=device))
    assert model.agrees(ring)


def test_plans_of_other_slots_do_not_meet(device: torch.device) -> None:
    """Two batches in flight: both planned before one is committed."""
    ring, model = ring_and_model(8, 11, device)
    set_cursors(ring, model, [10] * SLOTS, [7, 2, 8, 0, 5, 6, 7, 8, 1])
    one = Step(torch.tensor([6, 0, 2], device=device), 2, [6, 0, 2], [0] * 3, [2] * 3, -1)
    other = Step(torch.tensor([1, 5, 7, 3], device=device), 3, [1, 5, 7, 3], [0] * 4, [3] * 4, -1)
    (first, rows), (second, more) = one.plan(ring, model), other.plan(ring, model)
    ring.commit(second, torch.tensor([0, 1, 2, 3], device=device))
    ring.commit(first)
    model.commit(rows, None)
    model.commit(more, [0, 1, 2, 3])
    assert model.agrees(ring)


# Numbers out of range


@pytest.mark.parametrize("kind", INDICES, ids=str)
def test_a_slot_past_the_pool_is_padding_and_a_fault(kind: torch.dtype, device: torch.device) -> None:
    ring, model = ring_and_model(8, 11, device)
    set_cursors(ring, model, [4] * SLOTS, [8] * SLOTS)
    read = [3, PAST, 5, SLOTS]
    slots = torch.tensor(read, dtype=kind, device=device)
    plan, rows = Step(slots, 2, read, [0] * 4, [2] * 4, -1).plan(ring, model)
    with pytest.raises(IndexError, match=rf"read slot ({PAST}|{SLOTS}) on"):
        flashstate.check_faults()
    ring.commit(plan, torch.tensor([1, 77, 2, -3], device=device))  # padding accepts nothing, whatever it says
    flashstate.check_faults()
    model.commit(rows, [1, 0, 2, 0])
    assert model.agrees(ring)
    ring.folded(slots)
    model.folded(read, None, -1)
    assert model.agrees(ring)
    with pytest.raises(IndexError, match=rf"read slot ({PAST}|{SLOTS}) on"):
        flashstate.check_faults()


@pytest.mark.parametrize("kind", INDICES, ids=str)
@pytest.mark.parametrize("wrong", [4, -1, 2**31 - 1, -(2**31)])
def test_counts_out_of_range_keep_none_or_all_and_are_faults(
    wrong: int, kind: torch.dtype, device: torch.device
) -> None:
    ring, model = ring_and_model(8, 11, device)
    set_cursors(ring, model, [10] * SLOTS, [7, 2, 8, 0, 5, 6, 7, 8, 1])
    for accepted in ([2, wrong, 3], [wrong, 0, 1], [1, 1, wrong]):
        plan, rows = Step(torch.arange(3, device=device), 3, [0, 1, 2], [0] * 3, [3] * 3, -1).plan(ring, model)
        flashstate.check_faults()
        ring.commit(plan, torch.tensor(accepted, dtype=kind, device=device))
        with pytest.raises(IndexError, match=f"accepted {wrong} on"):
            flashstate.check_faults()
        model.commit(rows, accepted)
        assert model.agrees(ring)


def test_counts_past_32_bits_are_not_cut_off(device: torch.device) -> None:
    ring = make_ring(8, 11, device)
    plan = ring.plan(torch.arange(2, device=device), 2)
    ring.commit(plan, torch.tensor([1 << 32, -(1 << 32)], device=device))
    assert ring.count[:2].tolist() == [2, 0]
    ring.folded(torch.arange(2, device=device), torch.tensor([1 << 32, -(1 << 32)], device=device))
    assert (ring.start[:2].tolist(), ring.count[:2].tolist()) == ([2, 0], [0, 0])


# What was folded


@pytest.mark.parametrize("kind", [*INDICES, int, None], ids=str)
def test_folded_drops_the_oldest_tokens_of_the_slots_it_names(kind: Any, device: torch.device) -> None:
    ring, model = ring_and_model(8, 11, device)
    set_cursors(ring, model, [10, 3, 10, 5, 10, 0, 8, 0, 0], [8, 3, 5, 4, 7, 8, 4, 0, 3])
    read = [4, 0, -1, 2, 6, 3]
    for slots, null in ((torch.tensor(read, device=device), -1), (Slots(torch.tensor(read, device=device), null=4), 4)):
        some = [2, 1, 7, 0, 2, 1]
        given = {int: 2, None: None}.get(kind, torch.tensor(some, dtype=kind if kind in INDICES else None))
        ring.folded(slots, given.to(device) if isinstance(given, Tensor) else given)
        model.folded(read, None if kind is None else [2] * 6 if kind is int else some, null)
        assert model.agrees(ring)
    flashstate.check_faults()
    ring.folded()
    model.folded(list(range(SLOTS)), None, -1)
    assert model.agrees(ring)
    assert not ring.count.any()


@pytest.mark.parametrize("wrong", [9, -1])
def test_folding_what_a_ring_does_not_have_is_a_fault_and_takes_the_nearest(wrong: int, device: torch.device) -> None:
    ring, model = ring_and_model(8, 11, device)
    set_cursors(ring, model, [10] * SLOTS, [8, 3, 5, 0, 7, 8, 4, 0, 3])
    ring.folded(torch.tensor([1, 2, -1], device=device), torch.tensor([3, wrong, 77], device=device))
    with pytest.raises(IndexError, match=f"tokens to fold {wrong} on"):
        flashstate.check_faults()
    model.folded([1, 2, -1], [3, wrong, 77], -1)
    assert model.agrees(ring)


# Objects, graphs, compilers


@EVERY_KIND
def test_rings_and_plans_are_told_apart_by_their_signatures_and_survive_copies(kind: type[AnyRing]) -> None:
    ring = make_ring(8, 11, kind=kind)
    plan = ring.plan(torch.arange(3), 2)
    assert ring.signature == make_ring(8, 11, kind=kind).signature
    differing = [make_ring(*sizes, kind=kind) for sizes in ((7, 11), (8, 12))] + [
        make_ring(8, 11, kind=other) for other in (Ring, DeltaRing) if other is not kind
    ]
    assert len({ring.signature, *(other.signature for other in differing)}) == 4
    assert plan.signature == ring.plan(torch.arange(3), 2).signature
    others = (ring.plan(torch.arange(2), 2), ring.plan(torch.arange(3), 1), ring.plan(None, 2))
    assert len({plan.signature, *(other.signature for other in others)}) == 4
    for copy in (deepcopy, lambda both: pickle.loads(pickle.dumps(both))):
        twin, copied = copy((ring, plan))
        twin.commit(copied)
        assert (twin.count.tolist()[:4], ring.count.any().item()) == ([2, 2, 2, 0], False)


@EVERY_KIND
def test_plans_and_commits_are_registered_ops_that_a_compiled_step_has(kind: type[AnyRing]) -> None:
    ring, twin = make_ring(8, 11, kind=kind), make_ring(8, 11, kind=kind)

    def step(ring: AnyRing, read: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor]:
        plan = ring.plan(Slots(read, null=0), 3)
        ring.commit(plan, accepted)
        ring.folded(read[:1], 1)
        return plan.rows + 1, plan.parts * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for turn in range(6):
        read, accepted = torch.arange(6).roll(turn), torch.tensor([3, 1, 0, 2, 3, 2])
        for one, other in zip(step(ring, read, accepted), compiled(twin, read, accepted), strict=True):
            assert torch.equal(one, other)
        assert torch.equal(ring.start, twin.start)
        assert torch.equal(ring.count, twin.count)
    assert ring.start.any()


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
def test_a_graph_replays_plan_and_commit_with_other_slots_and_counts(packed: bool) -> None:
    ring, model = ring_and_model(16, 21, CUDA)
    read, accepted = torch.zeros(6, dtype=torch.int64, device=CUDA), torch.zeros(6, dtype=torch.int32, device=CUDA)
    bounds = torch.zeros(7, dtype=torch.int32, device=CUDA)
    slots = Slots(read, cu_seqlens=bounds, max_len=5, null=8) if packed else Slots(read, null=8)
    read.fill_(8)
    ring.commit(ring.plan(slots, None if packed else 5), accepted)  # a warm-up on null slots
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = ring.plan(slots, None if packed else 5)
        ring.commit(plan, accepted)
    draw = Random(0)
    for turn in range(50):
        rows = [slot if draw.random() < 0.8 else draw.choice([-1, 8]) for slot in draw.sample(range(8), 6)]
        lengths = [draw.randint(0, 5) if packed else 5 for _ in rows]
        first = [sum(lengths[:b]) if packed else 0 for b in range(6)]
        counts = [draw.randint(0, n) for n in lengths]
        for tensor, numbers in ((read, rows), (accepted, counts), (bounds, [*first, sum(lengths)])):
            tensor.copy_(torch.tensor(numbers))
        graph.replay()
        want, parts = model.plan(rows, first, lengths, 8)
        assert planned(plan) == (want, parts)
        model.commit(want, counts)
        assert model.agrees(ring), turn
    assert min(model.folds, model.wraps) > 3
    flashstate.check_faults()


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    ring, read = make_ring(8, 11, CUDA), torch.arange(6, device=CUDA)
    for mode in ("default", "error"):  # kernels compile in the first pass
        torch.cuda.set_sync_debug_mode(mode)
        try:
            plan = ring.plan(read, 3)
            ring.commit(plan, read % 4)
            ring.folded(read, 1)
            ring.folded(read)
        finally:
            torch.cuda.set_sync_debug_mode("default")
