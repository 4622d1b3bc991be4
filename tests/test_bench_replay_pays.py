"""The tables of the benchmark of mamba2_replay, and from which batch size on it pays."""

from pathlib import Path
from typing import Any

import pytest

from flashstate.bench import plot
from flashstate.bench.figures import END, figures, start_of
from flashstate.bench.replay_pays import NEVER, pays
from flashstate.bench.results import Row, write_csv
from flashstate.cli import main

MOVES = "plan and commit"


def row(stored: str, batch: int, microseconds: float, tokens: int = 6, implementation: str = "flashstate") -> Row:
    percent = None if stored == MOVES else 88.4
    shape = (16, 1, 64, 128, tokens, stored)
    return Row("mamba2_replay", implementation, "float32", "nearest", batch, *shape, microseconds, 0.01, 9.0, percent)


def rows_of_ways(**times: tuple[float, ...]) -> list[Row]:
    """Rows of six tokens at batches 1, 4 and 16; `last=(2, 3, 4)` has these times."""
    return [
        row(stored, batch, t) for stored, found in times.items() for batch, t in zip((1, 4, 16), found, strict=True)
    ]


@pytest.mark.parametrize(
    ("times", "cells"),
    [
        ({"stationary": (3, 4, 5), "snapshots": (4, 5, 6), "last": (2, 4, 6)}, "1 | 16"),
        ({"stationary": (3, 4, 5), "snapshots": (4, 3, 6), "last": (4, 5, 5)}, f"16 | {NEVER}"),
        ({"stationary": (3, 4, 5), "last": (4, 5, 6), "uniform": (9, 9, 9)}, " | 1"),
    ],
)
def test_replay_pays_from_the_batch_size_on_at_which_it_is_always_faster(times: Any, cells: str) -> None:
    rows = [*rows_of_ways(**times), row("last", 1, 0.1, implementation="touch")]
    assert pays(rows) == [
        "| replay is faster from batch size | than snapshots | than a step in place |",
        "|---|---|---|",
        f"| float32, 6 tokens | {cells} |",
    ]


def test_tables_have_every_form_what_has_no_roof_and_where_replay_pays() -> None:
    rows = [*rows_of_ways(stationary=(3, 4, 5), snapshots=(4, 5, 6)), row("a 16th folds", 1, 2.5, 1)]
    rows += [row("last", 1, 2.6, 1), row(MOVES, 1, 1.5), row("stationary", 1, 1.0, implementation="roof")]
    assert figures(rows, {"host cost": "little"}).split("\n")[1:] == [
        "| µs (percent of the roof), by batch size | 1 | 4 | 16 |",
        "|---|---|---|---|",
        "| float32, 6 tokens, stationary | 3.00 (88) | 4.00 (88) | 5.00 (88) |",
        "| float32, 6 tokens, snapshots | 4.00 (88) | 5.00 (88) | 6.00 (88) |",
        "| float32, a 16th folds | 2.50 (88) |  |  |",
        "| float32, in place | 2.60 (88) |  |  |",
        "| float32, 6 tokens, plan and commit | 1.50 |  |  |",
        "",
        "| replay is faster from batch size | than snapshots | than a step in place |",
        "|---|---|---|",
        "| float32, 6 tokens | 1 |  |",
        "| float32 |  | 1 |",
        "",
        "Host cost of an eager call: little.",
        "",
        "Measured on: an unknown device.",
        "",
        "",
    ]


def test_a_table_of_some_labels_does_not_say_where_replay_pays() -> None:
    rows = rows_of_ways(stationary=(3, 4, 5), snapshots=(4, 5, 6))
    assert "replay is faster" not in figures(rows, {}, ["float32, 6 tokens, stationary"])


def test_documents_get_the_tables_of_a_file(tmp_path: Path) -> None:
    document, csv_file = tmp_path / "measuring.md", tmp_path / "gpu.csv"
    document.write_text(f"before\n{start_of('mamba2_replay')}\n{END}\nafter\n", encoding="utf-8")
    rows = rows_of_ways(stationary=(3, 4, 5), snapshots=(4, 5, 6))
    write_csv(csv_file, rows, {"device": "Some GPU"})
    assert main(["bench", "--from-csv", str(csv_file), "--markdown", str(document)]) == 0
    assert figures(rows, {"device": "Some GPU"}) in document.read_text(encoding="utf-8")


def test_a_picture_leaves_out_what_has_no_roof(monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: drawn.append(figure))
    rows = [row("stationary", 1, 2.0), row("stationary", 1, 1.0, implementation="roof"), row(MOVES, 1, 1.5)]
    plot.draw(rows, {}, Path("not written"))
    panels = [panel for panel in drawn[0].axes if panel.get_visible()]
    assert [panel.get_title() for panel in panels] == ["float32, 6 tokens, stationary"] * 2
    assert {line.get_label() for line in panels[0].get_lines()} == {"roof", "flashstate"}
