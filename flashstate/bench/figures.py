"""The figures of a measurement as tables in a document, each between two marks that say what it shows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from flashstate.bench.replay_pays import pays
from flashstate.bench.results import HOST_COST, Row, is_roof

OURS = "flashstate"
ORIGIN = ("torch", "triton", "commit", "date", "peers")  # of a provenance
END = "<!-- end of figures -->"
MARKED = re.compile(
    rf"(?P<start><!-- figures of (?P<op>[^:;]+)(: (?P<labels>[^;]+))?; make figures writes this -->\n).*?(?={END})",
    re.DOTALL,
)


def figures(rows: Sequence[Row], provenance: Mapping[str, str], labels: Sequence[str] = ()) -> str:
    """Microseconds and percent of the roof, if there is one, batch sizes across. Down are the formats and ways to call
    flashstate; with `labels` only these, and other libraries beside it."""
    shown = [row for row in rows if not is_roof(row.implementation)]
    shown = [row for row in shown if (row.label in labels if labels else _is_ours(row))]
    found = {(_name(row, labels), row.batch): row for row in shown if row.percent_of_roof is not None or _is_ours(row)}
    if not any(_is_ours(row) for row in found.values()):
        raise ValueError("there are no figures of flashstate on a GPU to make a table of")
    names, batches = (list(dict.fromkeys(keys)) for keys in zip(*found, strict=True))
    head = " | ".join(["µs (percent of the roof), by batch size", *map(str, batches)])
    lines = [f"| {head} |", "|---" * (1 + len(batches)) + "|"]
    for name in names:
        cells = [_cell(found.get((name, batch))) for batch in batches]
        lines.append(f"| {' | '.join([name, *cells])} |")
    if not labels and pays(rows):
        lines += ["", *pays(rows)]
    if HOST_COST in provenance and not labels:
        lines += ["", f"Host cost of an eager call: {provenance[HOST_COST]}."]
    lines += ["", f"Measured on: {', '.join(origin(provenance))}."]
    return "\n".join(["", *lines, "", ""])


def _is_ours(row: Row) -> bool:
    return row.implementation.split(", ")[0] == OURS


def _name(row: Row, beside_others: Sequence[str]) -> str:
    """What a line is called: flashstate itself goes without saying where there is nothing else."""
    return f"{row.label}: {row.implementation}" if beside_others else row.label + row.implementation.removeprefix(OURS)


def origin(provenance: Mapping[str, str]) -> list[str]:
    """The device, and with their names the things that its figures depend on most."""
    named = [f"{name} {provenance[name]}" for name in ORIGIN if name in provenance]
    return [provenance.get("device", "an unknown device"), *named]


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    digits = 2 if row.microseconds < 10 else 1 if row.microseconds < 100 else 0
    percent = "" if row.percent_of_roof is None else f" ({row.percent_of_roof:.0f})"
    return f"{row.microseconds:.{digits}f}{percent}"


def start_of(op: str, labels: Sequence[str] = ()) -> str:
    """The mark in front of a table of an op, with `labels` of these alone."""
    chosen = f": {' | '.join(labels)}" if labels else ""
    return f"<!-- figures of {op}{chosen}; make figures writes this -->"


def check_marks(document: Path, op: str) -> None:
    """Raise ValueError where a document has no place for figures of this op."""
    if all(mark["op"] != op for mark in MARKED.finditer(document.read_text(encoding="utf-8"))):
        raise ValueError(f"{document} has no place for figures: it wants the lines {start_of(op)} and {END}")


def with_figures(document: Path, rows: Sequence[Row], provenance: Mapping[str, str]) -> str:
    """What the document holds with the figures of these rows in their places; ValueError where it has none."""
    op = rows[0].op
    check_marks(document, op)

    def filled(mark: re.Match[str]) -> str:
        if mark["op"] != op:
            return mark[0]
        labels = mark["labels"].split(" | ") if mark["labels"] else ()
        return mark["start"] + figures(rows, provenance, labels)

    return MARKED.sub(filled, document.read_text(encoding="utf-8"))
