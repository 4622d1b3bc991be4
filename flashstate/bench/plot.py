"""Drawing a benchmark: percent of the roof, and microseconds, over the batch size. Needs matplotlib when called."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flashstate.bench.results import ROOFS, Row, is_roof

OURS = {"color": "#0b5fa5", "marker": "o", "linewidth": 2.4, "markersize": 5, "zorder": 3}
STYLES: dict[str, dict[str, Any]] = {
    "flashstate": OURS,
    "reference, CPU": OURS,
    "flashstate, at once": {**OURS, "color": "#5c9fd6", "marker": "P"},
    "flashstate, early": {**OURS, "color": "#5c9fd6", "marker": "X"},
    "flashstate, int64 slots": {**OURS, "color": "#5c9fd6", "marker": "*", "linestyle": ":", "linewidth": 1.2},
    "flashstate, split pool": {**OURS, "color": "#5c9fd6", "marker": "d", "linestyle": "--", "linewidth": 1.2},
    "vllm": {"color": "#d9480f", "marker": "s"},
    "flashinfer": {"color": "#2b8a3e", "marker": "^"},
    "mamba_ssm": {"color": "#862e9c", "marker": "v"},
    "fla": {"color": "#a07000", "marker": "D"},
    "roof": {"color": "#212529", "linestyle": "--", "linewidth": 1.2},
    "touch": {"color": "#495057", "linestyle": ":", "linewidth": 1.2},
    "read": {"color": "#adb5bd", "linestyle": ":", "linewidth": 1.2},
}
OTHER = {"linewidth": 1.2, "markersize": 3.5}  # what a style does not say; a peer without a style gets a default colour
COLUMNS = 4
PANEL_WIDTH, PANEL_HEIGHT, HEAD_HEIGHT = 2.7, 1.75, 0.75  # inches
Lines = dict[str, list[Row]]  # of one panel: implementation -> rows, in the order of the batch


def require_matplotlib() -> None:
    """Raise an error for people where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("drawing needs matplotlib: pip install 'flashstate[plot]'")


def draw(rows: Sequence[Row], provenance: Mapping[str, str], path: Path) -> None:
    """Write a PNG: for every format a panel of percents of the roof, and one of times, with a line per implementation.
    Without a roof there are only times. Calls with several tokens are left out of a picture that has others, and what
    has no roof of one that has roofs."""
    require_matplotlib()
    from matplotlib.figure import Figure

    rows = [row for row in rows if row.tokens == 1] or rows
    with_roofs = [row for row in rows if row.percent_of_roof is not None]
    rows, kinds = (with_roofs, [_draw_percents, _draw_times]) if with_roofs else (rows, [_draw_times])
    lines = lines_of(rows)
    columns = min(COLUMNS, len(lines))
    height = -(-len(lines) // columns) * PANEL_HEIGHT + HEAD_HEIGHT
    size = (max(columns, 2) * PANEL_WIDTH, height * len(kinds))
    figure = Figure(figsize=size, dpi=150, layout="constrained", facecolor="white")
    parts = figure.subfigures(len(kinds), 1, squeeze=False)[:, 0]
    for part, draw_kind in zip(parts, kinds, strict=True):
        _draw_panels(part, lines, columns, draw_kind)
    figure.suptitle(f"{rows[0].shape}, on {provenance.get('device', 'an unknown device')}", fontsize=12)
    figure.savefig(path, format="png")


def lines_of(rows: Sequence[Row]) -> dict[str, Lines]:
    """The lines of every label."""
    lines: dict[str, Lines] = {row.label: {} for row in rows}
    for row in sorted(rows, key=lambda row: row.batch):
        lines[row.label].setdefault(row.implementation, []).append(row)
    return lines


def _draw_panels(part: Any, lines: Mapping[str, Lines], columns: int, draw_panel: Callable[[Any, Lines], str]) -> None:
    """A panel per label, all with the same axes, under a legend that serves all of them."""
    panels = part.subplots(-(-len(lines) // columns), columns, squeeze=False, sharex=True, sharey=True).flatten()
    legend: dict[str, Any] = {}
    for panel, (label, of_label) in zip(panels, lines.items(), strict=False):
        part.supylabel(draw_panel(panel, of_label), fontsize=9)
        _finish(panel, label, of_label)
        handles, names = panel.get_legend_handles_labels()
        legend.update(zip(names, handles, strict=True))
    for index, panel in enumerate(panels):
        panel.set_visible(index < len(lines))
        panel.tick_params(labelbottom=index + columns >= len(lines))  # also above an empty cell
    names = [*(name for name in STYLES if name in legend), *(name for name in legend if name not in STYLES)]
    part.legend([legend[name] for name in names], names, loc="outside upper center", ncols=8, frameon=False, fontsize=9)
    part.supxlabel("batch size", fontsize=9)


def _draw_percents(panel: Any, lines: Lines) -> str:
    """Draw into a panel, and return what its y axis shows. The roof is a level: the first there is."""
    roof = next((name for name in ROOFS if name in lines), "touch")
    panel.axhline(100, label=roof, **_style(roof))
    for name, line in lines.items():
        if not is_roof(name):
            panel.plot([row.batch for row in line], [row.percent_of_roof for row in line], label=name, **_style(name))
    panel.set_ylim(0, 115)
    panel.set_yticks((0, 25, 50, 75, 100))
    return "percent of the roof"


def _draw_times(panel: Any, lines: Lines) -> str:
    """Draw into a panel, and return what its y axis shows."""
    for name, line in lines.items():
        panel.plot([row.batch for row in line], [row.microseconds for row in line], label=name, **_style(name))
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter("{x:g}")
    return "microseconds per call"


def _style(name: str) -> dict[str, Any]:
    return {**OTHER, **STYLES.get(name, {"marker": "x"})}


def _finish(panel: Any, title: str, lines: Lines) -> None:
    batches = sorted({row.batch for line in lines.values() for row in line})
    panel.set_title(title, fontsize=9)
    panel.set_xscale("log", base=2)
    panel.set_xticks(batches, [str(batch) for batch in batches])
    panel.tick_params(labelsize=8)
    panel.minorticks_off()
    panel.grid(color="#e9ecef", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
