"""The figures of a measurement as a table in a document, between two marks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from flashstate.bench.results import HOST_COST, Row

OURS = "flashstate"
START, END = "<!-- figures: make figures writes this -->", "<!-- end of figures -->"
ORIGIN = ("torch", "triton", "commit", "date", "peers")  # of a provenance
MARKED = re.compile(f"(?<={START}\n).*?(?={END})", re.DOTALL)


def figures(rows: Sequence[Row], provenance: Mapping[str, str]) -> str:
    """Microseconds and percent of the roof of flashstate: formats and ways to call it down, batch sizes across."""
    ours = [row for row in rows if row.implementation.split(", ")[0] == OURS]
    found = {(row.label + row.implementation.removeprefix(OURS), row.batch): row for row in ours}
    if not found:
        raise ValueError("there are no figures of flashstate on a GPU to make a table of")
    labels, batches = (list(dict.fromkeys(keys)) for keys in zip(*found, strict=True))
    head = " | ".join(["µs (percent of touch), by batch size", *map(str, batches)])
    lines = [f"| {head} |", "|---" * (1 + len(batches)) + "|"]
    for label in labels:
        cells = [_cell(found.get((label, batch))) for batch in batches]
        lines.append(f"| {' | '.join([label, *cells])} |")
    if HOST_COST in provenance:
        lines += ["", f"Host cost of an eager call: {provenance[HOST_COST]}."]
    lines += ["", f"Measured on: {', '.join(_origin(provenance))}."]
    return "\n".join(["", *lines, "", ""])


def _origin(provenance: Mapping[str, str]) -> list[str]:
    """The device, and with their names the things that its figures depend on most."""
    named = [f"{name} {provenance[name]}" for name in ORIGIN if name in provenance]
    return [provenance.get("device", "an unknown device"), *named]


def _cell(row: Row | None) -> str:
    if row is None or row.percent_of_touch is None:
        return ""
    digits = 2 if row.microseconds < 10 else 1 if row.microseconds < 100 else 0
    return f"{row.microseconds:.{digits}f} ({row.percent_of_touch:.0f})"


def with_figures(document: Path, text: str) -> str:
    """What the document holds with this text between its marks; ValueError where it has none."""
    held = document.read_text(encoding="utf-8")
    if len(MARKED.findall(held)) != 1:
        raise ValueError(f"{document} has no place for figures: it wants the lines {START} and {END}, once")
    return MARKED.sub(lambda _: text, held)
