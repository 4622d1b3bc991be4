"""The cursors of rings as a plain model moves them, and random steps for both."""

from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor

from flashstate import Plan, Ring, Slots
from flashstate.state.ring import AnyRing

CPU = torch.device("cpu")
SLOTS = 9
PAST = SLOTS + 90  # no slot of the pool
INDICES = (torch.int32, torch.int64)

Row = tuple[int, int, int, int, int, int, int, int]


@dataclass
class PlainRing:
    """The cursors of a ring, in lists, and what a step does with them."""

    window: int
    length: int
    slots: int = SLOTS
    start: list[int] = field(default_factory=list)
    count: list[int] = field(default_factory=list)
    folds: int = 0
    wraps: int = 0

    def __post_init__(self) -> None:
        self.start, self.count = [0] * self.slots, [0] * self.slots

    def holds(self, slot: int, null: int) -> bool:
        return 0 <= slot < self.slots and slot != null

    def plan(self, read: list[int], first: list[int], tokens: list[int], null: int) -> tuple[list[Row], list[int]]:
        parts: tuple[list[Row], ...] = ([], [], [])  # of rows that fold, that do not, that do nothing
        for b, (slot, at, n) in enumerate(zip(read, first, tokens, strict=True)):
            if not self.holds(slot, null) or n == 0:
                parts[2].append((b, -1, 0, 0, at, n, 0, 0))
                continue
            k = self.count[slot]
            parts[k + n <= self.window].append((b, slot, self.start[slot], k, at, n, 0, 0))
        return [row for part in parts for row in part], [len(parts[0]), len(parts[0]) + len(parts[1])]

    def commit(self, rows: list[Row], accepted: list[int] | None) -> None:
        for b, slot, start, k, _, n, _, _ in rows:
            if slot < 0:
                continue
            kept = n if accepted is None else min(max(accepted[b], 0), n)
            if k + n > self.window:
                self.folds += 1
                self.wraps += start + k >= self.length
                self.start[slot], self.count[slot] = (start + k) % self.length, kept
            else:
                self.start[slot], self.count[slot] = start, k + kept

    def folded(self, read: list[int], tokens: list[int] | None, null: int) -> None:
        for b, slot in enumerate(read):
            if self.holds(slot, null):
                live = self.count[slot]
                gone = live if tokens is None else min(max(tokens[b], 0), live)
                self.start[slot] = (self.start[slot] + gone) % self.length
                self.count[slot] = live - gone

    def agrees(self, ring: AnyRing) -> bool:
        return (ring.start.tolist(), ring.count.tolist()) == (self.start, self.count)


def make_ring(
    window: int, length: int, device: torch.device = CPU, slots: int = SLOTS, kind: type[AnyRing] = Ring
) -> Any:
    """An empty ring in memory full of NaN."""
    kept = [torch.full((slots, 1, length, *size), torch.nan, device=device) for size in ((1,), (2,), ())]
    start, count = (torch.zeros(slots, dtype=torch.int32, device=device) for _ in range(2))
    return kind(*kept, start, count, window)


def ring_and_model(
    window: int, length: int, device: torch.device, slots: int = SLOTS, kind: type[AnyRing] = Ring
) -> tuple[Any, PlainRing]:
    return make_ring(window, length, device, slots, kind), PlainRing(window, length, slots)


def set_cursors(ring: AnyRing, model: PlainRing, start: list[int], count: list[int]) -> None:
    ring.start.copy_(torch.tensor(start))
    ring.count.copy_(torch.tensor(count))
    model.start, model.count = list(start), list(count)


def index(numbers: list[int], device: torch.device, draw: Random) -> Tensor:
    return torch.tensor(numbers, dtype=draw.choice(INDICES), device=device)


def column(numbers: Tensor) -> Tensor:
    """These numbers as a column of a table of others."""
    return torch.stack([torch.full_like(numbers, PAST), numbers, torch.full_like(numbers, PAST)], 1)[:, 1]


def planned(plan: Plan) -> tuple[list[Row], list[int]]:
    return [tuple(row) for row in plan.rows.tolist()], plan.parts.tolist()  # type: ignore[misc]


@dataclass
class Step:
    """A batch, as plan takes it and as the model does."""

    slots: Slots | Tensor | None
    tokens: int | None
    read: list[int]
    first: list[int]
    lengths: list[int]
    null: int

    def plan(self, ring: AnyRing, model: PlainRing) -> tuple[Plan, list[Row]]:
        """Plans of both, which are equal."""
        plan = ring.plan(self.slots, self.tokens)
        rows, parts = model.plan(self.read, self.first, self.lengths, self.null)
        assert planned(plan) == (rows, parts)
        assert (plan.batch, plan.rows.dtype, plan.parts.dtype) == (len(rows), torch.int32, torch.int32)
        return plan, rows


def make_step(draw: Random, ring: AnyRing, device: torch.device, batch: int) -> Step:
    """Rows of distinct slots in random order, some of them padding; dense or packed, with room for what a call has."""
    slots, most = len(ring.count), ring.longest_call
    if draw.random() < 0.15:
        tokens = draw.randint(1, most)
        return Step(None, tokens, list(range(slots)), [0] * slots, [tokens] * slots, -1)
    null = draw.choice([-1, 0, 3, PAST])
    read = draw.sample(range(slots), min(batch, slots)) + [-1] * (batch - slots)
    read = [draw.choice([-1, -8, null]) if draw.random() < 0.2 else slot for slot in read]
    table = index(read, device, draw)
    table = column(table) if draw.random() < 0.3 else table
    if draw.random() < 0.5:
        tokens = draw.randint(1, most)
        bare = null == -1 and draw.random() < 0.5
        return Step(table if bare else Slots(table, null=null), tokens, read, [0] * batch, [tokens] * batch, null)
    lengths = [draw.choice([0, 1, most, draw.randint(0, most)]) for _ in read]
    bounds = [sum(lengths[:b]) for b in range(batch + 1)]
    packed = Slots(table, cu_seqlens=index(bounds, device, draw), max_len=most, null=null)
    return Step(packed, None, read, bounds[:-1], lengths, null)


def accepted_of(draw: Random, step: Step) -> list[int] | None:
    if draw.random() < 0.25:
        return None
    return [draw.choice([0, n, draw.randint(0, n)]) for n in step.lengths]


def commit(ring: AnyRing, plan: Plan, accepted: list[int] | None, device: torch.device, draw: Random) -> None:
    ring.commit(plan, None if accepted is None else index(accepted, device, draw))
