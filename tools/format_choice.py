"""What a format costs and saves in every family of ops: the table and the picture of docs/choosing-a-format.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flashstate.bench.plot import require_matplotlib
from flashstate.bench.results import Row
from flashstate.state.formats import label_of
from tools.format_costs import state_bytes, table_of
from tools.numerics_experiment import ErrorRow

BATCH = 256
HEADS = {"gated_delta": 64}  # of the rows shown, where several numbers were measured
EXACT = ("float32", "nearest")  # what times and bytes are shares of, stepped in place
COLOURS = {"nearest": "#0b5fa5", "stochastic": "#d9480f"}
MARKERS = {"float32": "o", "bfloat16": "s", "float16": "D", "int16": "^", "int8": "v", "float8_e4m3fn": "X"}
BARS = ("#0b5fa5", "#5c9fd6", "#2b8a3e", "#a07000")
Format = tuple[str, str]  # and rounding
Errors = Mapping[tuple[str, str, str, str], ErrorRow]  # by format, rounding, way and memory


class Family(NamedTuple):
    """Ops whose formats are shown side by side: of which results, what calls store, and the way of their errors."""

    name: str
    op: str
    stored: str = "last"
    way: str | None = None


FAMILIES = (
    Family("Mamba-2", "mamba2", way="plain"),
    Family("Mamba-2, replay", "mamba2_replay", stored="a 16th folds", way="replay"),
    Family("Mamba-3", "mamba3"),
    Family("delta rule", "gated_delta"),
)
MEASURED_ERRORS = [family for family in FAMILIES if family.way]


def choice_table(measured: Mapping[str, Sequence[Row]], errors: Errors) -> list[str]:
    """The lines of a table: formats down; bytes, errors of outputs where they were measured, and times across."""
    first = shares_of_time(FAMILIES[0], measured[FAMILIES[0].op])
    bytes_of = shares_of_bytes(measured[FAMILIES[0].op])
    times = [shares_of_time(family, measured[family.op]) for family in FAMILIES]
    lines = []
    for name, rounding in first:
        found = [
            errors[name, rounding, str(family.way), memory] for memory in ("all", "long") for family in MEASURED_ERRORS
        ]
        shares = [f"{of_op[name, rounding]:.2f}" if (name, rounding) in of_op else "" for of_op in times]
        wrong = [f"{row.output_error:.1e}" for row in found]
        lines.append([label_of(name, rounding), f"{bytes_of[name, rounding]:.2f}", *wrong, *shares])
    of_memory = [f"error: {family.name}{memory}" for memory in ("", ", long memory") for family in MEASURED_ERRORS]
    return table_of(["format", "bytes", *of_memory, *(f"time: {family.name}" for family in FAMILIES)], lines)


def shares_of_time(family: Family, rows: Sequence[Row]) -> dict[Format, float]:
    """The time of a call of one token with each format, as a share of that of a float32 step in place."""
    at_size = [row for row in rows if (row.implementation, row.tokens, row.batch) == ("flashstate", 1, BATCH)]
    at_size = [row for row in at_size if row.heads == HEADS.get(row.op, row.heads)]
    whole = next(row for row in at_size if (row.format, row.rounding, row.stored) == (*EXACT, "last"))
    found = (row for row in at_size if row.stored == family.stored)
    return {(row.format, row.rounding): row.microseconds / whole.microseconds for row in found}


def shares_of_bytes(rows: Sequence[Row]) -> dict[Format, float]:
    """The bytes of a state in each format, scales among them, as a share of float32."""
    every = {(row.format, row.rounding): state_bytes(row) for row in rows}
    return {form: size / every[EXACT] for form, size in every.items()}


def draw_choice(measured: Mapping[str, Sequence[Row]], errors: Errors, path: Path) -> None:
    """Write a PNG: errors over times of Mamba-2, and beside it the times of every family."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), dpi=150, layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2)
    _draw_errors(left, measured, errors)
    _draw_times(right, measured)
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=8)
        panel.set_axisbelow(True)
    figure.savefig(path, format="png")


def _draw_errors(panel: Any, measured: Mapping[str, Sequence[Row]], errors: Errors) -> None:
    """A point per format of every family whose errors were measured; hollow ones are by replay."""
    for family in MEASURED_ERRORS:
        for (name, rounding), share in shares_of_time(family, measured[family.op]).items():
            error = errors[name, rounding, str(family.way), "all"].output_error
            face = COLOURS[rounding] if family.way == "plain" else "white"
            panel.plot(share, error, MARKERS[name], color=COLOURS[rounding], markerfacecolor=face, markersize=7)
            # Labels of one rounding stand left of their points and those of the other right, those of replay lower.
            side = {"xytext": (-7, 0), "ha": "right"} if rounding == "nearest" else {"xytext": (7, 0), "ha": "left"}
            side["va"] = "center" if family.way == "plain" else "top"
            panel.annotate(name, (share, error), textcoords="offset points", fontsize=7, **side)
    for rounding, colour in COLOURS.items():
        panel.plot([], [], "s", color=colour, label=rounding)
    panel.plot([], [], "s", color="#495057", label="a step at a time")
    panel.plot([], [], "s", color="#495057", markerfacecolor="white", label="by replay, window 16")
    panel.set_yscale("log")
    panel.set_xlim(0.2, 1.1)
    panel.set_xlabel(f"time of a call, batch {BATCH}; a float32 step is 1", fontsize=9)
    panel.set_ylabel("error of outputs, relative to float64", fontsize=9)
    panel.set_title("Mamba-2: what a format costs and saves", fontsize=10)
    panel.grid(color="#e9ecef", linewidth=0.8)
    panel.legend(frameon=False, fontsize=8, loc="center right")


def _draw_times(panel: Any, measured: Mapping[str, Sequence[Row]]) -> None:
    """A group of bars per format: its times in every family that has them, and a mark where its bytes are."""
    bytes_of = shares_of_bytes(measured[FAMILIES[0].op])
    width = 0.8 / len(FAMILIES)
    for index, (family, colour) in enumerate(zip(FAMILIES, BARS, strict=True)):
        shares = shares_of_time(family, measured[family.op])
        places = [place + (index - 1.5) * width for place, form in enumerate(bytes_of) if form in shares]
        panel.bar(places, [shares[form] for form in bytes_of if form in shares], width, color=colour, label=family.name)
    for place, share in enumerate(bytes_of.values()):
        label = "bytes of a state" if place == 0 else None
        panel.plot([place - 0.45, place + 0.45], [share, share], color="#212529", linewidth=1.4, label=label)
    names = [label_of(*form).replace(" ", "\n").replace("_e4m3fn", "") for form in bytes_of]
    panel.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor")
    panel.set_title(f"Time of a call, batch {BATCH}; a float32 step is 1", fontsize=10)
    panel.grid(axis="y", color="#e9ecef", linewidth=0.8)
    panel.legend(frameon=False, fontsize=8)
