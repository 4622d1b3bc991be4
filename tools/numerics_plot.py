"""Drawing how errors grow: a panel per format, stepped plainly and by replay. Needs matplotlib when called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashstate.bench.plot import require_matplotlib
from tools.numerics_experiment import ErrorRow

COLOURS = {"nearest": "#0b5fa5", "stochastic": "#d9480f"}
LINES = {"plain": {"linestyle": "--", "linewidth": 1.2}, "replay": {"linestyle": "-", "linewidth": 2.0}}
WORDS = {"plain": "stepped plainly", "replay": "by replay"}
SHOWN = (  # a row of panels each: what is wrong, of which heads
    ("state_error", "all", "state,\nall heads"),
    ("output_error", "all", "output,\nall heads"),
    ("output_error", "long", "output,\nheads of long memory"),
)
PANEL_WIDTH, PANEL_HEIGHT, HEAD_HEIGHT = 2.0, 1.9, 0.8  # inches
SMALLEST_ERROR = 1e-7  # where the axes begin: about what float32 gets wrong


def draw_errors(rows: Sequence[ErrorRow], provenance: Mapping[str, str], path: Path) -> None:
    """Write a PNG: relative errors over decoded tokens, formats across, and down what is wrong."""
    require_matplotlib()
    from matplotlib.figure import Figure

    formats = list(dict.fromkeys(row.format for row in rows))
    size = (len(formats) * PANEL_WIDTH + 0.6, len(SHOWN) * PANEL_HEIGHT + HEAD_HEIGHT)
    figure = Figure(figsize=size, dpi=150, layout="constrained", facecolor="white")
    part = figure.subfigures(1, 1, squeeze=False)[0, 0]  # so that its legend is below the title
    panels = part.subplots(len(SHOWN), len(formats), squeeze=False, sharex=True, sharey=True)
    legend: dict[str, Any] = {}
    for (kind, memory, words), across in zip(SHOWN, panels, strict=True):
        across[0].set_ylabel(words, fontsize=9)
        for panel, name in zip(across, formats, strict=True):
            _draw_lines(panel, [row for row in rows if (row.format, row.memory) == (name, memory)], kind)
            _finish(panel)
            handles, names = panel.get_legend_handles_labels()
            legend.update(zip(names, handles, strict=True))
    for panel, name in zip(panels[0], formats, strict=True):
        panel.set_title(name, fontsize=9)
    part.legend(legend.values(), legend.keys(), loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    part.supxlabel("tokens decoded", fontsize=9)
    figure.suptitle(f"Errors relative to float64: {provenance.get('decoded', 'of an unknown run')}", fontsize=11)
    figure.savefig(path, format="png")


def _draw_lines(panel: Any, rows: Sequence[ErrorRow], kind: str) -> None:
    """A line per rounding and way."""
    for rounding, way in dict.fromkeys((row.rounding, row.way) for row in rows):
        line = [row for row in rows if (row.rounding, row.way) == (rounding, way)]
        errors = [getattr(row, kind) for row in line]
        label = f"{rounding}, {WORDS[way]}"
        panel.plot([row.tokens for row in line], errors, label=label, color=COLOURS[rounding], **LINES[way])


def _finish(panel: Any) -> None:
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_ylim(SMALLEST_ERROR / 2, 1.0)
    panel.set_xticks((16, 128, 1024, 4096), ("16", "128", "1024", "4096"))
    panel.set_yticks([10.0**-power for power in range(7, -1, -1)])
    panel.tick_params(labelsize=8)
    panel.minorticks_off()
    panel.grid(color="#e9ecef", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
