"""Plans, cursors and folds of replay rings in plain torch; kernels/rings.py and kernels/folding.py do the same on a
GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flashstate.reference.state_io import note_fault, resolve, resolve_read, store_state
from flashstate.reference.steps import Rows, rows_of, states_of
from flashstate.state.ring import AnyRing, Plan
from flashstate.state.slots import MOST_TOKENS, Slots
from flashstate.state.state import State

BEFORE_THE_FIRST_TOKEN = -1  # what random bits of a folded state are drawn for


def make_plan(
    start: Tensor,
    count: Tensor,
    window: int,
    slots: Slots | None,
    tokens: int,
    rows: Tensor,
    parts: Tensor,
    generation: Tensor | None = None,
) -> None:
    """Fill the rows and the parts of a Plan, for rings with these cursors."""
    batch = len(rows)
    slot = resolve_read(slots, batch, len(count), rows.device)
    first, length = torch.zeros_like(slot), torch.full_like(slot, tokens)
    if slots is not None and slots.cu_seqlens is not None:
        bounds = slots.cu_seqlens.long().clamp(0, MOST_TOKENS)
        first, length = bounds[:-1], bounds.diff().clamp(0, tokens)
    goes = (slot >= 0) & (length > 0)
    oldest, live = (torch.where(goes, cursor[slot.clamp(min=0)], 0) for cursor in (start, count))
    fold = goes & (live + length > window)
    part = torch.where(fold, 0, torch.where(goes, 1, 2))
    order = torch.sort(part, stable=True).indices
    place, zero = torch.arange(batch, device=rows.device), torch.zeros_like(slot)
    born = zero if generation is None else torch.where(goes, generation[slot.clamp(min=0)], 0)
    of_row = torch.stack([place, torch.where(goes, slot, -1), oldest, live, first, length, born, zero], 1)
    rows.copy_(of_row[order])
    parts.copy_(torch.stack([fold.sum(), goes.sum()]))


def commit_plan(
    start: Tensor,
    count: Tensor,
    window: int,
    length: int,
    rows: Tensor,
    accepted: Tensor | None,
    generation: Tensor | None = None,
) -> None:
    """Keep the accepted tokens of every row of a plan whose slot still has its generation in the plan, and drop the
    tokens that the row folded. length: of the rings."""
    rows = rows[rows[:, 1] >= 0].long()
    if generation is not None:
        rows = rows[generation[rows[:, 1]] == rows[:, 6]]
    place, slot, oldest, live, _, tokens = rows.unbind(1)[:6]
    kept = tokens if accepted is None else accepted[place].long()
    note_fault("accepted", kept[(kept < 0) | (kept > tokens)])
    kept = kept.clamp(min=0).minimum(tokens)
    fold = live + tokens > window
    start[slot] = torch.where(fold, (oldest + live) % length, oldest).int()
    count[slot] = (torch.where(fold, 0, live) + kept).int()


def renew(generation: Tensor, slots: Tensor, null: int, sources: Tensor | None) -> None:
    """Add 1 to the generation of every slot; with `sources`, of every slot whose source is a slot too."""
    goes = torch.ones_like(slots, dtype=torch.bool)
    if sources is not None:
        goes = resolve("read", sources, goes, len(generation), null) >= 0
    slot = resolve("write", slots, goes, len(generation), null)
    generation[slot[slot >= 0]] += 1


class RingRows(NamedTuple):
    """What the rings of a batch are to the tokens of a call, (batch,) each."""

    start: Tensor  # the oldest live row
    live: Tensor  # how many there are
    fold: Tensor  # whether live and new ones are more than the window


def ring_rows(ring: AnyRing, slot: Tensor, length: Tensor) -> RingRows:
    """The rings of these slots, -1 for none, for so many new tokens of each."""
    known = slot >= 0
    start, live = (torch.where(known, cursor[slot.clamp(min=0)], 0).long() for cursor in (ring.start, ring.count))
    return RingRows(start, live, known & (length > 0) & (live + length > ring.window))


def rows_and_rings(
    ring: AnyRing, plan: Plan | None, slots: Slots | None, out: Tensor, lead: int, longest: int
) -> tuple[Rows, RingRows]:
    """Return the rows of a call and their rings: as the plan says, or without one as the rings are now.

    lead: number of token axes of `out`. longest: the most tokens of a row that are stepped; `at` has the others too.
    """
    rows = rows_of(slots, len(ring.count), out, lead)
    if plan is None:
        return rows, ring_rows(ring, rows.read, (rows.at[:, :longest] >= 0).sum(1))
    slot, start, live, first, length = plan.rows[plan.rows[:, 0].argsort()].long().unbind(1)[1:6]
    if slots is None or slots.cu_seqlens is None:
        first = torch.arange(len(slot), device=slot.device) * (len(rows.y) // max(len(slot), 1))
    known = slot >= 0
    fold = known & (live + length > ring.window)  # as commit_plan has it
    first = first.clamp(max=len(rows.y))
    length = length.minimum(len(rows.y) - first)  # a plan does not know how many tokens there are
    index = torch.arange(longest, device=slot.device)
    at = torch.where(index < length[:, None], first[:, None] + index, -1)
    at = torch.cat([at, rows.at[:, longest:]], 1)
    gives = rows.gives if slots is not None and slots.padding == "fresh" else known
    return Rows(at, rows.y, slot, known, gives), RingRows(start, live, fold)


def live_tokens(count: Tensor, slot: Tensor, tokens: Tensor | int | None) -> Tensor:
    """How many live rows of these slots to fold, (batch,) int64; none where a slot is -1."""
    live = torch.where(slot >= 0, count[slot.clamp(min=0)], 0).long()
    if tokens is None:
        return live
    wanted = torch.where(slot >= 0, torch.as_tensor(tokens, device=slot.device).long(), 0)
    note_fault("tokens to fold", wanted[(wanted < 0) | (wanted > live)])
    return wanted.clamp(min=0).minimum(live)


def store_folded(
    state: State,
    ring: AnyRing,
    after: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    slots: Slots | None,
    tokens: Tensor | int | None,
    into: State | None,
) -> None:
    """Store what `after` gives of states, slots, starts and live rows: the states after so many tokens of each ring."""
    batch = len(ring.count) if slots is None else len(slots.read)
    slot = resolve_read(slots, batch, len(ring.count), ring.count.device)
    folded = live_tokens(ring.count, slot, tokens)
    start = torch.where(slot >= 0, ring.start[slot.clamp(min=0)], 0).long()
    s = after(states_of(state, slot), slot, start, folded)
    to, target = torch.where(folded > 0, slot, -1), state  # what stays as it is need not be rounded again
    if into is not None:
        write, null = (slot, -1) if slots is None or slots.write is None else (slots.write, slots.null)
        to, target = resolve("write", write, slot >= 0, len(into.data), null), into
    store_state(target, s, (to,), state.seeds_of(slot), torch.full_like(slot, BEFORE_THE_FIRST_TOKEN))


def drop_folded(start: Tensor, count: Tensor, length: int, slots: Slots | None, tokens: Tensor | int | None) -> None:
    """Move cursors past live rows that were folded. length: of the rings."""
    batch = len(count) if slots is None else len(slots.read)
    slot = resolve_read(slots, batch, len(count), count.device)
    folded = live_tokens(count, slot, tokens)[slot >= 0]
    slot = slot[slot >= 0]
    start[slot] = ((start[slot] + folded) % length).int()
    count[slot] = (count[slot] - folded).int()


def place_counts(
    slots: Slots,
    counts: Tensor,
    full: Tensor,
    length: int,
    before: Tensor,
    after: Tensor,
    rows: Tensor,
    folding: Tensor,
) -> None:
    """Put the counts of live rows, (batch,), to their slots, before a token and after it; and of each row its slot, -1
    where it has none or no room for a token, and again -1 unless its ring is `full`."""
    batch = len(rows)
    slot, counts = resolve_read(slots, batch, len(before), rows.device), counts[:batch].long()
    outside = (slot >= 0) & ((counts < 0) | (counts >= length))
    note_fault("tokens to fold", counts[outside])
    slot = torch.where(outside, -1, slot)
    goes = slot >= 0
    before[slot[goes]], after[slot[goes]] = counts[goes].int(), counts[goes].int() + 1
    rows.copy_(slot)
    folding.copy_(torch.where(full[:batch] != 0, slot, -1))
