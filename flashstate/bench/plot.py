"""Drawing a benchmark: percent of the roof, and microseconds, over the batch size. Needs matplotlib when called."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashstate.bench.results import Row

COLOURS = ("#0b6e99", "#d9480f", "#2b8a3e", "#862e9c", "#c2255c", "#5c4400")  # one per format
MARKERS = {"flashstate": "o", "reference, CPU": "o", "vllm": "s", "flashinfer": "^", "mamba_ssm": "v"}
ROOF, ROOF_COLOUR = "touch", "#868e96"


def require_matplotlib() -> None:
    """Raise an error for people where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("drawing needs matplotlib: pip install 'flashstate[plot]'")


def draw(rows: Sequence[Row], provenance: Mapping[str, str], path: Path) -> None:
    """Write a PNG with a line per implementation and format; without a roof, only the panel of times.

    Calls with several tokens are left out of a picture that has others.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    rows = [row for row in rows if row.tokens == 1] or rows
    has_roof = any(row.percent_of_touch is not None for row in rows)
    figure = Figure(figsize=(13 if has_roof else 8, 5.2), dpi=150, layout="constrained", facecolor="white")
    panels = figure.subplots(1, 1 + has_roof, squeeze=False)[0]
    if has_roof:
        _draw_percent(panels[0], rows)
    _draw_times(panels[-1], rows)
    handles, labels = panels[-1].get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))  # all roofs share a label
    figure.legend(once.values(), once.keys(), loc="outside right center", frameon=False, fontsize=9)
    device = provenance.get("device", "an unknown device")
    figure.suptitle(f"mamba2_step, {rows[0].shape}, on {device}", fontsize=12, x=0.01, ha="left")
    figure.savefig(path, format="png")


def _draw_percent(panel: Any, rows: Sequence[Row]) -> None:
    panel.axhline(100, color=ROOF_COLOUR, linewidth=1, linestyle=":")
    for key, line in lines_of(rows).items():
        if key[0] != ROOF:
            percents = [row.percent_of_touch for row in line]
            panel.plot([row.batch for row in line], percents, **_style(key, rows))
    panel.set_ylim(bottom=0)
    panel.set_ylabel("percent of the touch roof")
    _finish(panel, rows)


def _draw_times(panel: Any, rows: Sequence[Row]) -> None:
    for key, line in lines_of(rows).items():
        panel.plot([row.batch for row in line], [row.microseconds for row in line], **_style(key, rows))
    panel.set_yscale("log")
    panel.set_ylabel("microseconds per call")
    panel.yaxis.set_major_formatter("{x:g}")
    _finish(panel, rows)


def lines_of(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """The rows of each line, keyed by implementation and format, in the order of the batch."""
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.batch):
        lines.setdefault((row.implementation, row.label), []).append(row)
    return lines


def _style(key: tuple[str, str], rows: Sequence[Row]) -> dict[str, Any]:
    """Colour says the format, a hollow marker stochastic rounding, marker and dash the implementation; flashstate's
    lines are the solid ones."""
    implementation, label = key
    if implementation == ROOF:
        return {"color": ROOF_COLOUR, "label": "touch, the roof", "linewidth": 1, "linestyle": ":"}
    formats = list(dict.fromkeys(row.format for row in rows))
    ours = MARKERS.get(implementation) == "o"
    colour = COLOURS[formats.index(label.replace(",", " ").split()[0]) % len(COLOURS)]
    return {
        "color": colour,
        "markerfacecolor": "white" if "stochastic" in label else colour,
        "label": f"{implementation}, {label}",
        "marker": MARKERS.get(implementation, "D"),
        "linewidth": 2.2 if ours else 1.1,
        "linestyle": "-." if "snapshots" in label else "-" if ours else "--",
        "markersize": 6 if ours else 4.5,
    }


def _finish(panel: Any, rows: Sequence[Row]) -> None:
    batches = sorted({row.batch for row in rows})
    panel.set_xscale("log", base=2)
    panel.set_xticks(batches, [str(batch) for batch in batches])
    panel.set_xlabel("batch size")
    panel.grid(color="#e9ecef", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
