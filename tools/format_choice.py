"""What a format costs and saves in every family of ops: the table and the picture of docs/choosing-a-format.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flashstate.bench.plot import require_matplotlib
from flashstate.bench.results import Row
from flashstate.state.formats import PORTABLE_FORMATS, label_of
from tools.format_costs import HEADS, state_bytes, table_of

BATCH = 256
EXACT = ("float32", "nearest")  # what times and bytes are shares of, stepped in place
Format = tuple[str, str]  # and rounding
Errors = Mapping[str, Mapping[Format, tuple[float, float]]]  # of states and of outputs, by op


class Family(NamedTuple):
    """Ops whose formats are shown side by side: of which results, what their calls store, and a colour."""

    name: str
    op: str
    colour: str
    stored: str = "last"


FAMILIES = (
    Family("Mamba-2", "mamba2", "#0b5fa5"),
    Family("Mamba-2 by replay", "mamba2_replay", "#5c9fd6", stored="a 16th folds"),
    Family("Mamba-3", "mamba3", "#2b8a3e"),
    Family("delta rule", "gated_delta", "#a07000"),
    Family("delta rule by replay", "gated_delta_replay", "#d9b04c", stored="a 16th folds"),
)
BAR = 0.8 / len(FAMILIES)  # of the distance of two formats


def choice_table(measured: Mapping[str, Sequence[Row]], errors: Errors) -> list[str]:
    """The lines of a table: formats down; bytes, errors of outputs and times of every family across."""
    size = shares_of_bytes(measured[FAMILIES[0].op])
    times = [shares_of_time(family, measured[family.op]) for family in FAMILIES]
    lines = []
    for form in PORTABLE_FORMATS:
        wrong = [f"{errors[family.op][form][1]:.1e}" for family in FAMILIES]
        shares = [f"{of_family[form]:.2f}" if form in of_family else "" for of_family in times]
        lines.append([label_of(*form), f"{size[form]:.2f}", *wrong, *shares])
    across = [f"{what}: {family.name}" for what in ("error", "time") for family in FAMILIES]
    return table_of(["format", "bytes", *across], lines)


def shares_of_time(family: Family, rows: Sequence[Row]) -> dict[Format, float]:
    """The time of a call of one token with each format, as a share of that of a float32 step in place."""
    at_size = [row for row in rows if (row.implementation, row.tokens, row.batch) == ("flashstate", 1, BATCH)]
    at_size = [row for row in at_size if row.heads == HEADS.get(row.op, row.heads)]
    whole = next(row for row in at_size if (row.format, row.rounding, row.stored) == (*EXACT, "last"))
    found = (row for row in at_size if row.stored == family.stored)
    return {(row.format, row.rounding): row.microseconds / whole.microseconds for row in found}


def shares_of_bytes(rows: Sequence[Row]) -> dict[Format, float]:
    """The bytes of a state in each format, scales among them, as a share of float32."""
    every = {(row.format, row.rounding): state_bytes(row.format, row.heads, row.rows, row.cols) for row in rows}
    return {form: size / every[EXACT] for form, size in every.items()}


def draw_choice(measured: Mapping[str, Sequence[Row]], errors: Errors, path: Path) -> None:
    """Write a PNG: formats across; above the errors of every family, below the times and the bytes."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), dpi=150, layout="constrained", facecolor="white")
    above, below = figure.subplots(2, 1, sharex=True)
    for place, family in zip(_places(), FAMILIES, strict=True):
        found = [errors[family.op][form][1] for form in PORTABLE_FORMATS]
        across = [index + place for index in range(len(PORTABLE_FORMATS))]
        above.plot(across, found, "o", markersize=5, color=family.colour, label=family.name)
        shares = shares_of_time(family, measured[family.op])
        there = {at: shares[form] for at, form in zip(across, PORTABLE_FORMATS, strict=True) if form in shares}
        below.bar(there.keys(), there.values(), BAR, color=family.colour)
    size = shares_of_bytes(measured[FAMILIES[0].op])
    for index, form in enumerate(PORTABLE_FORMATS):
        label = None if index else "bytes of a state"
        below.plot([index - 0.45, index + 0.45], [size[form]] * 2, color="#212529", linewidth=1.4, label=label)
    above.set_yscale("log")
    above.set_title("Error of outputs, relative to float64, at the end of 4096 tokens", fontsize=10)
    above.legend(frameon=False, fontsize=8, loc="lower right", ncols=2)
    below.set_title(f"Time of a step, batch {BATCH}, where it was measured; a float32 step in place is 1", fontsize=10)
    below.legend(frameon=False, fontsize=8, loc="upper right")
    names = [label_of(*form).replace(" ", "\n").replace("_e4m3fn", "") for form in PORTABLE_FORMATS]
    below.set_xticks(range(len(names)), names)
    for panel in (above, below):
        _finish(panel)
    figure.savefig(path, format="png")


def _places() -> list[float]:
    """Where the mark of each family is, from the middle of its format."""
    return [(index - (len(FAMILIES) - 1) / 2) * BAR for index in range(len(FAMILIES))]


def _finish(panel: Any) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize=8)
    panel.set_axisbelow(True)
    panel.grid(axis="y", color="#e9ecef", linewidth=0.8)
