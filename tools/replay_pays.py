"""From which batch size on replay is faster than what it takes the place of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from flashstate.bench.results import Row

REPLAYED = ("stationary", "a 16th folds")  # rows of batches as a server has them: of several tokens, and of one
OTHERS = {"every": "than snapshots", "last": "than a step in place"}
OURS = {"": ("flashstate", "flashstate, at once"), ", per channel": ("flashstate, per channel",)}  # the faster counts
NEVER = "at none"
Times = Mapping[int, float]  # microseconds, by batch size


def pays(rows: Sequence[Row]) -> list[str]:
    """The lines of a table with the batch sizes from which on replay is faster than other ways.

    Heads, formats and tokens are down. There are no lines where nothing was replayed.
    """
    lines = [f"| {' | '.join([name, *cells.values()])} |" for name, cells in faster_from(rows).items()]
    head = " | ".join(["replay is faster from batch size", *OTHERS.values()])
    return [f"| {head} |", "|---" * (1 + len(OTHERS)) + "|", *lines] if lines else []


def faster_from(rows: Sequence[Row]) -> dict[str, dict[str, str]]:
    """The batch sizes from which on replay is faster, by what was replayed, and by what others store."""
    found = {}
    for alike, (how, ours) in product(_alike(rows), OURS.items()):
        times = {
            stored: _times([row for row in alike if row.stored == stored], ours) for stored in (*REPLAYED, *OTHERS)
        }
        replayed = next((stored for stored in REPLAYED if times[stored]), None)
        if replayed:
            name = next(row.label for row in alike if row.stored == replayed).removesuffix(f", {replayed}")
            found[name + how] = {stored: first_faster(times[replayed], times[stored]) for stored in OTHERS}
    return found


def first_faster(ours: Times, others: Times) -> str:
    """The batch size from which on, as far as both were measured, ours are the shorter times; "" where none was."""
    batches = sorted(ours.keys() & others.keys())
    slower = [batch for batch in batches if ours[batch] >= others[batch]]
    faster = [batch for batch in batches if not slower or batch > slower[-1]]
    return str(faster[0]) if faster else NEVER if batches else ""


def _alike(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows by what they share but for what is stored: heads, format and tokens."""
    found: dict[object, list[Row]] = {}
    for row in rows:
        found.setdefault((row.heads, row.format, row.rounding, row.tokens), []).append(row)
    return list(found.values())


def _times(rows: Sequence[Row], implementations: Sequence[str]) -> dict[int, float]:
    """Microseconds of the faster of these, by batch size."""
    times: dict[int, float] = {}
    for row in rows:
        if row.implementation in implementations:
            times[row.batch] = min(row.microseconds, times.get(row.batch, row.microseconds))
    return times
