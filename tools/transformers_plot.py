"""Drawing how fast models of Transformers generate: a column of panels per model. Needs matplotlib when called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flashstate.bench.plot import require_matplotlib
from tools.transformers_rows import SpeedRow

OURS = {"marker": "o", "linewidth": 2.0, "markersize": 4.5, "zorder": 3}
THEIRS = {"marker": "s", "linewidth": 1.2, "markersize": 4}
STYLES: dict[str, dict[str, Any]] = {
    "stock": {**THEIRS, "color": "#868e96"},
    "stock compiled": {**THEIRS, "color": "#343a40", "marker": "D"},
    "stock+mamba_ssm": {**THEIRS, "color": "#862e9c", "marker": "v"},
    "stock+fla": {**THEIRS, "color": "#a07000", "marker": "v"},
    "enable": {**OURS, "color": "#2b8a3e", "linestyle": "--"},
    "float32": {**OURS, "color": "#0b5fa5"},
    "bfloat16": {**OURS, "color": "#5c9fd6"},
    "float16 stochastic": {**OURS, "color": "#5c9fd6", "linestyle": ":"},
    "int8 replay": {**OURS, "color": "#d9480f"},
    "int8 stochastic": {**OURS, "color": "#d9480f", "linestyle": ":"},
    "drafts": {**OURS, "color": "#0b5fa5", "marker": "*", "markersize": 9, "linestyle": "none"},
    "drafts static": {**OURS, "color": "#d9480f", "marker": "*", "markersize": 9, "linestyle": "none"},
}
PANEL_WIDTH, PANEL_HEIGHT, HEAD_HEIGHT = 3.6, 2.9, 1.0  # inches


def draw_speed(rows: Sequence[SpeedRow], provenance: Mapping[str, str], path: Path) -> None:
    """Write a PNG: models across; above tokens per second, below the time of a token as a multiple of its roof."""
    require_matplotlib()
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(row.model for row in rows))
    size = (len(models) * PANEL_WIDTH + 0.4, 2 * PANEL_HEIGHT + HEAD_HEIGHT)
    figure = Figure(figsize=size, dpi=150, layout="constrained", facecolor="white")
    part = figure.subfigures(1, 1, squeeze=False)[0, 0]  # so that its legend is below the title
    panels = part.subplots(2, len(models), squeeze=False, sharex=True)
    legend: dict[str, Any] = {}
    for (above, below), model in zip(panels.T, models, strict=True):
        of_model = [row for row in rows if row.model == model]
        draw_lines(above, of_model, lambda row: row.tokens_per_second)
        draw_lines(below, of_model, lambda row: row.times_roof)
        above.set_title(provenance.get(f"{model} is", model), fontsize=9)
        below.axhline(1, color="#212529", linestyle="--", linewidth=1.2)
        below.set_xlabel("batch", fontsize=9)
        handles, names = above.get_legend_handles_labels()
        legend.update(zip(names, handles, strict=True))
        for panel in (above, below):
            finish(panel, sorted({row.batch for row in rows}))
    panels[0, 0].set_ylabel("tokens per second", fontsize=9)
    panels[1, 0].set_ylabel("time of a token / its roof", fontsize=9)
    part.legend(legend.values(), legend.keys(), loc="outside upper center", ncols=5, frameon=False, fontsize=8)
    figure.suptitle(
        f"Models of Transformers that generate, on {provenance.get('device', 'an unknown device')}", fontsize=11
    )
    figure.savefig(path, format="png")


def draw_lines(panel: Any, rows: Sequence[SpeedRow], value: Callable[[SpeedRow], float | None]) -> None:
    """A line per way over the batch sizes it was measured at."""
    for way in dict.fromkeys(row.way for row in rows):
        points = {row.batch: value(row) for row in rows if row.way == way and value(row) is not None}
        if points:
            across = sorted(points)
            panel.plot(across, [points[batch] for batch in across], label=way, **STYLES.get(way, THEIRS))


def finish(panel: Any, batches: Sequence[int]) -> None:
    """Both axes by powers, and the look of all pictures."""
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(batches, list(map(str, batches)))
    panel.tick_params(labelsize=8)
    panel.minorticks_off()
    panel.grid(color="#e9ecef", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
