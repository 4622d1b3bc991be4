"""From which batch size on replay is faster than what it takes the place of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flashstate.bench.results import Row

REPLAYED = ("stationary", "a 16th folds")  # rows of batches as a server has them: of several tokens, and of one
OTHERS = {"every": "than snapshots", "last": "than a step in place"}
NEVER = "at none"
Times = Mapping[int, float]  # microseconds, by batch size


def pays(rows: Sequence[Row]) -> list[str]:
    """The lines of a table with the batch sizes from which on replay is faster than other ways.

    Formats and tokens are down. There are no lines where nothing was replayed.
    """
    lines = []
    for format, rounding, tokens in dict.fromkeys((row.format, row.rounding, row.tokens) for row in rows):
        alike = [row for row in rows if (row.format, row.rounding, row.tokens) == (format, rounding, tokens)]
        replayed = [row for row in alike if row.stored in REPLAYED]
        if replayed:
            name = replayed[0].label.removesuffix(f", {replayed[0].stored}")
            cells = [first_faster(_times(replayed), _times([r for r in alike if r.stored == way])) for way in OTHERS]
            lines.append(f"| {' | '.join([name, *cells])} |")
    head = " | ".join(["replay is faster from batch size", *OTHERS.values()])
    return [f"| {head} |", "|---" * (1 + len(OTHERS)) + "|", *lines] if lines else []


def first_faster(ours: Times, others: Times) -> str:
    """The batch size from which on, as far as both were measured, ours are the shorter times; "" where none was."""
    batches = sorted(ours.keys() & others.keys())
    slower = [batch for batch in batches if ours[batch] >= others[batch]]
    faster = [batch for batch in batches if not slower or batch > slower[-1]]
    return str(faster[0]) if faster else NEVER if batches else ""


def _times(rows: Sequence[Row]) -> dict[int, float]:
    """Microseconds of flashstate itself, by batch size."""
    return {row.batch: row.microseconds for row in rows if row.implementation == "flashstate"}
