"""plan, commit and folded: the cursors of rings, as a plain model moves them, whatever the batch."""

import pickle
from copy import deepcopy
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import flashstate
from flashstate import DeltaRing, Ring, Slots
from flashstate.state.ring import AnyRing
from flashstate.state.slots import MOST_TOKENS

PAST = 1 << 20  # no slot of a ring
INDICES = (torch.int32, torch.int64)
Row = tuple[int, ...]


def make_ring(window: int, length: int, device: Any = None, slots: int = 9, kind: type[AnyRing] = Ring) -> Any:
    """An empty ring in memory full of NaN."""
    kept = [torch.full((slots, 1, length, *size), torch.nan, device=device) for size in ((1,), (2,), ())]
    return kind(*kept, *torch.zeros(2, slots, dtype=torch.int32, device=device), window)


def faults() -> set[str]:
    """Kinds of numbers out of range since the last look."""
    try:
        flashstate.check_faults()
    except IndexError as error:
        return {kind for kind in ("read slot", "accepted", "tokens to fold") if kind in str(error)}
    return set()


@dataclass
class Model:
    """The cursors of a ring, in lists, and what a step does with them."""

    window: int
    length: int
    start: list[int]
    count: list[int]
    folds: int = 0
    wraps: int = 0

    def holds(self, slot: int, null: int) -> bool:
        return 0 <= slot < len(self.count) and slot != null

    def fault(self, read: list[int], null: int) -> set[str]:
        return {"read slot" for slot in read if slot >= len(self.count) and slot != null}

    def plan(self, read: list[int], first: list[int], tokens: list[int], null: int) -> tuple[list[Row], list[int]]:
        parts: tuple[list[Row], ...] = ([], [], [])  # of rows that fold, that do not, that do nothing
        for b, (slot, at, n) in enumerate(zip(read, first, tokens, strict=True)):
            if not self.holds(slot, null) or n == 0:
                parts[2].append((b, -1, 0, 0, at, n, 0, 0))
                continue
            k = self.count[slot]
            parts[k + n <= self.window].append((b, slot, self.start[slot], k, at, n, 0, 0))
        return [row for part in parts for row in part], [len(parts[0]), len(parts[0]) + len(parts[1])]

    def commit(self, rows: list[Row], accepted: list[int] | None) -> set[str]:
        found = set()
        for b, slot, start, k, _, n, _, _ in rows:
            if slot >= 0:
                given = n if accepted is None else accepted[b]
                kept = min(max(given, 0), n)
                found |= {"accepted"} if kept != given else set()
                folds = k + n > self.window
                self.folds += folds
                self.wraps += folds and start + k >= self.length
                self.start[slot], self.count[slot] = (start + k * folds) % self.length, k * (not folds) + kept
        return found

    def folded(self, read: list[int], tokens: list[int] | None, null: int) -> set[str]:
        found = self.fault(read, null)
        for b, slot in enumerate(read):
            if self.holds(slot, null):
                live = self.count[slot]
                given = live if tokens is None else tokens[b]
                gone = min(max(given, 0), live)
                found |= {"tokens to fold"} if gone != given else set()
                self.start[slot], self.count[slot] = (self.start[slot] + gone) % self.length, live - gone
        return found


# A batch as plan takes it, its slots and tokens, and as the model does: read, first, lengths, null
Step = tuple[Slots | Tensor | None, int | None, list[int], list[int], list[int], int]


@dataclass
class Draws:
    """Random batches, on a device."""

    draw: Random
    device: torch.device
    slots: int
    most: int  # tokens of a row

    def index(self, numbers: list[int]) -> Tensor:
        kind = INDICES[1] if any(abs(n) >> 31 for n in numbers) else self.draw.choice(INDICES)
        return torch.tensor(numbers, dtype=kind, device=self.device)

    def read(self, batch: int, null: int) -> list[int]:
        """Distinct slots, and numbers that name none."""
        numbers = self.draw.sample(range(self.slots), min(batch, self.slots)) + [-1] * (batch - self.slots)
        return [self.draw.choice([-1, -8, null, self.draw.choice([-1, PAST])]) if self.draw.random() < 0.2 else slot
                for slot in numbers]  # fmt: skip

    def step(self, batch: int) -> Step:
        draw, most = self.draw, self.most
        if draw.random() < 0.1:
            tokens = draw.randint(1, most)
            return None, tokens, [*range(self.slots)], [0] * self.slots, [tokens] * self.slots, -1
        null = draw.choice([-1, 0, 3, PAST + 1])
        read = self.read(batch, null)
        table = self.index(read)
        table = torch.stack([table + 1, table], 1)[:, 1] if draw.random() < 0.3 else table
        if draw.random() < 0.5:
            tokens, bare = draw.randint(1, most), null == -1 and draw.random() < 0.5
            return table if bare else Slots(table, null=null), tokens, read, [0] * batch, [tokens] * batch, null
        lengths = [draw.choice([0, 1, most, draw.randint(0, most)]) for _ in read]
        given = [sum(lengths[:b]) for b in range(batch + 1)]
        if draw.random() < 0.2:  # what cannot be is brought into range
            given = [draw.choice([n, -5, 1 << 40, (1 << 31) - 1, -(1 << 31)]) for n in given]
        slots = Slots(table, cu_seqlens=self.index(given), max_len=most, null=null)
        bounds = [min(max(n, 0), MOST_TOKENS) for n in given]
        lengths = [min(max(bounds[b + 1] - bounds[b], 0), most) for b in range(batch)]
        return slots, None, read, bounds[:-1], lengths, null

    def counts(self, most: list[int]) -> list[int] | None:
        """For every row, or for none; few are out of range."""
        wrong = self.draw.choice([0, 0.1])
        right = [self.draw.choice([0, n, self.draw.randint(0, n)]) for n in most]
        some = [self.draw.choice([-1, 99, 1 << 32, -(1 << 32)]) if self.draw.random() < wrong else n for n in right]
        return None if self.draw.random() < 0.25 else some


@pytest.mark.parametrize(
    ("window", "length", "slots", "kind"),
    [(1, 2, 9, Ring), (8, 11, 9, DeltaRing), (16, 17, 9, Ring), (64, 128, 9, DeltaRing), (8, 12, 1503, Ring)],
)
def test_cursors_are_where_the_model_has_them_after_any_steps(
    window: int, length: int, slots: int, kind: type[AnyRing], device: torch.device
) -> None:
    """1500 rows are more than the kernel looks at together."""
    ring, draw = make_ring(window, length, device, slots, kind), Random(length)
    start, count = ([draw.randrange(n) for _ in range(slots)] for n in (length, window + 1))
    model, draws = Model(window, length, start, count), Draws(draw, device, slots, ring.longest_call)
    for cursor, numbers in ((ring.start, start), (ring.count, count)):
        cursor.copy_(torch.tensor(numbers))

    def require(found: set[str]) -> None:
        assert faults() == found
        assert (ring.start.tolist(), ring.count.tolist()) == (model.start, model.count)

    turns = 40 if slots < 10 else 2
    for _ in range(turns):
        where, tokens, *of_rows = draws.step(draw.randint(0, slots) if turns > 2 else slots - 3)
        plan = ring.plan(where, tokens)
        rows, parts = model.plan(*of_rows)
        assert ([*map(tuple, plan.rows.tolist())], plan.parts.tolist()) == (rows, parts)
        assert (plan.batch, plan.rows.dtype, plan.parts.dtype) == (len(rows), torch.int32, torch.int32)
        require(model.fault(of_rows[0], of_rows[-1]))  # planning moves nothing
        for _ in range(draw.choice([1, 1, 2])):  # the last commit counts
            accepted = draws.counts(of_rows[2])
            ring.commit(plan, None if accepted is None else draws.index(accepted))
            require(model.commit(rows, accepted))
        if draw.random() < 0.2 or turns == 2:
            null = draw.choice([-1, 4])
            read = draws.read(draw.randint(0, 6) if turns > 2 else slots - 3, null)
            gone = draws.counts([model.count[slot] if model.holds(slot, null) else 0 for slot in read])
            most = draw.choice([None, 1, 0]) if gone is None else None
            where = draws.index(read) if null < 0 else Slots(draws.index(read), null=null)
            ring.folded(where, most if gone is None else draws.index(gone))
            require(model.folded(read, gone if most is None else [most] * len(read), null))
    assert turns == 2 or min(model.folds, model.wraps) > 1
    assert all(getattr(ring, name).isnan().all() for name in ring.written)
    ring.folded()
    require(model.folded([*range(slots)], None, -1))


@pytest.mark.parametrize("kind", [Ring, DeltaRing])
def test_rings_and_plans_are_told_apart_by_their_signatures_and_survive_copies(kind: type[AnyRing]) -> None:
    ring, other = make_ring(8, 11, kind=kind), DeltaRing if kind is Ring else Ring
    plan = ring.plan(torch.arange(3), 2)
    assert ring.signature == make_ring(8, 11, kind=kind).signature
    differing = make_ring(7, 11, kind=kind), make_ring(8, 12, kind=kind), make_ring(8, 11, kind=other)
    assert len({ring.signature, *(one.signature for one in differing)}) == 4
    assert plan.signature == ring.plan(torch.arange(3), 2).signature
    others = ring.plan(torch.arange(2), 2), ring.plan(torch.arange(3), 1), ring.plan(None, 2)
    assert len({plan.signature, *(one.signature for one in others)}) == 4
    for copy in (deepcopy, lambda both: pickle.loads(pickle.dumps(both))):
        twin, copied = copy((ring, plan))
        twin.commit(copied)
        assert (twin.count.tolist()[:4], ring.count.any().item()) == ([2, 2, 2, 0], False)
