"""tools.figures: the tables of results/ in documents, and that the documents in the tree have them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from flashstate.bench.ops import OPS as BENCHED
from flashstate.bench.results import Row, read_csv, write_csv
from flashstate.launch.call import OPS
from flashstate.state.formats import PORTABLE_FORMATS
from tools import figures as tool
from tools.figures import END, MARKED, RESULTS, ROOT, documents, figures, merged, with_tables
from tools.format_costs import costs_table
from tools.replay_pays import NEVER, faster_from, pays

MOVES = "plan and commit"


def row(
    implementation: str, name: str, rounding: str, batch: int, tokens: int = 1, stored: str = "last",
    microseconds: float | None = None, op: str = "mamba2",
) -> Row:  # fmt: skip
    time, percent = microseconds or 3.2 * batch, None if stored == MOVES else 91.4
    return Row(op, implementation, name, rounding, batch, 16, 1, 64, 128, tokens, stored, time, 0.01, 1310.0, percent)


def mark(table: str) -> str:
    return f"<!-- {table}; make figures writes this -->\n"


def test_a_table_has_formats_down_and_batches_across() -> None:
    names, batches = ("touch", "flashstate"), (1, 16, 256)
    rows = [row(name, *fmt, batch) for name, fmt, batch in product(names, PORTABLE_FORMATS[:3], batches)]
    rows += [row("flashstate", "float32", "nearest", 1, tokens=4), row("flashstate, early", "float32", "nearest", 16)]
    rows.append(row("flashstate, int64 slots", "float32", "nearest", 16))
    provenance = {"commit": "abc", "device": "Some GPU", "host cost": "torch.add_ 8.0 µs"}
    assert figures(rows, provenance).split("\n") == [
        "",
        "| µs (percent of the roof), by batch size | 1 | 16 | 256 |",
        "|---|---|---|---|",
        "| float32 | 3.20 (91) | 51.2 (91) | 819 (91) |",
        "| bfloat16 | 3.20 (91) | 51.2 (91) | 819 (91) |",
        "| bfloat16 stochastic | 3.20 (91) | 51.2 (91) | 819 (91) |",
        "| float32, 4 tokens | 3.20 (91) |  |  |",
        "| float32, early |  | 51.2 (91) |  |",
        "",
        "Host cost of an eager call: torch.add_ 8.0 µs.",
        "",
        "Measured on: Some GPU, commit abc.",
        "",
        "",
    ]
    with pytest.raises(ValueError, match="no figures of flashstate on a GPU"):
        figures(rows[:1], {})


def test_a_table_of_some_labels_has_other_libraries_beside_flashstate() -> None:
    names = ("touch", "read", "flashstate", "flashstate, at once", "vllm")
    forms, labels = ((1, "last"), (4, "last"), (4, "none")), ["bfloat16", "bfloat16, 4 tokens, none stored"]
    rows = [row(name, "bfloat16", "nearest", batch, *form) for name, form, batch in product(names, forms, (1, 16))]
    lines = figures(rows, {"host cost": "not shown"}, labels).split("\n")
    found = [line.split(" | ")[0] for line in lines if line.startswith("| bf")]
    assert found == [f"| {label}: {name}" for name in names[2:] for label in labels]
    assert lines[-3:] == ["Measured on: an unknown device.", "", ""]
    assert "host" not in "".join(lines)


def replay_rows(implementation: str = "flashstate", op: str = "mamba2_replay", **times: Any) -> list[Row]:
    """Rows of six tokens at batches 1, 4 and 16; `last=(2, 3, 4)` has these times."""
    return [
        row(implementation, "float32", "nearest", batch, 6, stored, time, op)
        for stored, found in times.items()
        for batch, time in zip((1, 4, 16), found, strict=True)
    ]


@pytest.mark.parametrize(
    ("times", "cells"),
    [
        ({"stationary": (3, 4, 5), "every": (4, 5, 6), "last": (2, 4, 6)}, "1 | 16"),
        ({"stationary": (3, 4, 5), "every": (4, 3, 6), "last": (4, 5, 5)}, f"16 | {NEVER}"),
        ({"stationary": (3, 4, 5), "last": (4, 5, 6), "uniform": (9, 9, 9)}, " | 1"),
    ],
)
def test_replay_pays_from_the_batch_size_on_at_which_it_is_always_faster(times: Any, cells: str) -> None:
    rows = [*replay_rows(**times), row("touch", "float32", "nearest", 1, 6, "last", 0.1, "mamba2_replay")]
    assert pays(rows) == [
        "| replay is faster from batch size | than snapshots | than a step in place |",
        "|---|---|---|",
        f"| float32, 6 tokens | {cells} |",
    ]


def test_replay_is_compared_with_the_faster_step_in_place_and_per_channel_with_its_like() -> None:
    of_delta = partial(replay_rows, op="gated_delta_replay")
    rows = of_delta(stationary=(3, 4, 5), last=(4, 5, 6)) + of_delta("flashstate, at once", last=(2, 4, 6))
    rows += of_delta("flashstate, per channel", stationary=(3, 4, 5), last=(4, 5, 6))
    assert pays(rows)[2:] == [
        "| 16 heads, float32, 6 tokens |  | 16 |",
        "| 16 heads, float32, 6 tokens, per channel |  | 1 |",
    ]
    others = [replace(row, heads=32, microseconds=2 * row.microseconds) for row in rows if row.stored == "last"]
    assert pays([*rows, *others]) == pays(rows)


@pytest.mark.parametrize("op", [name for name, op in BENCHED.items() if op.pays])
def test_info_says_from_which_batch_size_on_replay_pays_as_results_do(op: str) -> None:
    _, rows = read_csv(RESULTS[op])
    want = {name: 0 if cells["last"] == NEVER else int(cells["last"]) for name, cells in faster_from(rows).items()}
    assert BENCHED[op].pays == want


def test_tables_of_replay_have_every_form_what_has_no_roof_and_where_it_pays() -> None:
    rows = replay_rows(stationary=(3, 4, 5), every=(4, 5, 6))
    others = (("a 16th folds", 1, 2.5), ("last", 1, 2.6), (MOVES, 6, 1.5))
    rows += [row("flashstate", "float32", "nearest", 1, n, how, time, "mamba2_replay") for how, n, time in others]
    rows.append(row("roof", "float32", "nearest", 1, 6, "stationary", 1.0, "mamba2_replay"))
    lines = figures(rows, {"host cost": "little"}).split("\n")
    assert lines[3:-6] == [
        "| float32, 6 tokens, stationary | 3.00 (91) | 4.00 (91) | 5.00 (91) |",
        "| float32, 6 tokens, every stored | 4.00 (91) | 5.00 (91) | 6.00 (91) |",
        "| float32, a 16th folds | 2.50 (91) |  |  |",
        "| float32, in place | 2.60 (91) |  |  |",
        "| float32, 6 tokens, plan and commit | 1.50 |  |  |",
        "",
        *pays(rows)[:2],
        "| float32, 6 tokens | 1 |  |",
        "| float32 |  | 1 |",
    ]
    assert "replay is faster" not in figures(rows, {}, ["float32, 6 tokens, stationary"])


def test_tables_go_between_their_marks_and_nothing_else_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_csv(tmp_path / "gpu.csv", [row("flashstate", "int8", "nearest", 4)], {"device": "Some GPU"})
    monkeypatch.setitem(RESULTS, "a new op", tmp_path / "gpu.csv")
    whole, some = mark("figures of a new op"), mark("figures of a new op: int8")
    text = f"before\n{whole}old\n{END}\nbetween\n{some}{END}\nafter\n"
    head, end = "\n| µs (percent of the roof), by batch size | 4 |\n|---|---|\n", f"\nMeasured on: Some GPU.\n\n{END}\n"
    written = f"before\n{whole}{head}| int8 | 12.8 (91) |\n{end}"
    written += f"between\n{some}{head}| int8: flashstate | 12.8 (91) |\n{end}after\n"
    assert with_tables(text) == written
    for unknown, complaint in (
        ("figures of mamba4", "no results of mamba4"),
        ("errors of heads", "no table 'errors of"),
    ):
        with pytest.raises(ValueError, match=complaint):
            with_tables(f"{mark(unknown)}{END}")


def test_a_table_of_costs_has_formats_down_and_the_bytes_of_a_state() -> None:
    rows = [row("flashstate", "float32", "nearest", batch) for batch in (1, 16, 256)]
    rows += [row("vllm", "float32", "nearest", 1), row("flashstate", "float32", "nearest", 1, tokens=4)]
    errors = {("float32", "nearest"): (1e-7, 2e-7), ("int8", "stochastic"): (1e-3, 2e-3)}
    assert costs_table("mamba2", rows, errors) == [
        "| format | KiB of a state | error of states | error of outputs | µs, batch 1 | µs, batch 16 | µs, batch 256 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| float32 | 512 | 1.0e-07 | 2.0e-07 | 3.20 | 51.2 | 819 |",
        "| int8 stochastic | 132 | 1.0e-03 | 2.0e-03 |  |  |  |",
    ]


def test_what_several_provenances_do_not_share_stands_side_by_side() -> None:
    provenances = [{"device": "a GPU", "commit": "abc"}, {"device": "a GPU", "commit": "def", "peers": "vllm 1"}]
    assert merged(provenances) == {"device": "a GPU", "commit": "abc / def", "peers": "vllm 1"}


def test_documents_have_the_tables_of_the_results() -> None:
    found = {path.relative_to(ROOT).as_posix() for path in documents()}
    pages = {f"docs/ops/{op}.md" for op in OPS}
    shared = {
        "docs/launching.md",
        "docs/measuring.md",
        "docs/numerics.md",
        "docs/serving.md",
        "docs/choosing-a-format.md",
    }
    assert found >= {"README.md", *shared, *pages}
    texts = [document.read_text(encoding="utf-8") for document in documents()]
    for text in texts:
        assert text == with_tables(text), "run make figures"
    shown = {match["table"].split(":")[0] for text in texts for match in MARKED.finditer(text)}
    assert shown >= {f"figures of {op}" for op in RESULTS}
    assert {op: {row.op for row in tool.measured(op)[1]} for op in RESULTS} == {op: {op} for op in RESULTS}


@pytest.mark.parametrize(
    ("document", "table", "old", "new"),
    [
        ("README.md", "peers", " / ", " + "),
        ("docs/measuring.md", "figures of mamba2", "| 4 |", "| 5 |"),
        ("docs/measuring.md", "figures of mamba2", " (9", " (8"),
        ("docs/measuring.md", "figures of mamba2", "float16 stoch", "float64 stoch"),
        ("docs/ops/mamba2_step.md", "formats of mamba2", "| 512 |", "| 256 |"),
        ("docs/ops/mamba2_replay.md", "where mamba2_replay pays", "| 4 |", "| 1 |"),
        ("docs/numerics.md", "errors of long heads", "e-0", "e-1"),
        ("docs/choosing-a-format.md", "costs of formats", "| 0.50 |", "| 0.25 |"),
    ],
)
def test_a_figure_that_differs_is_seen(document: str, table: str, old: str, new: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    start = text.index(mark(table))
    changed = text[:start] + text[start:].replace(old, new, 1)
    assert with_tables(changed) == text != changed


def test_the_command_writes_every_document_and_draws_every_picture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn: list[Path] = []
    for draw in ("draw", "draw_errors", "draw_choice", "draw_speed"):
        monkeypatch.setattr(tool, draw, lambda rows, beside, path: drawn.append(path))
    (tmp_path / "README.md").write_text(f"{mark('figures of mamba2')}{END}\n", encoding="utf-8")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    tool.main()
    assert "| float32 | " in (tmp_path / "README.md").read_text(encoding="utf-8")
    pictures = ("h200", "numerics", "choosing-a-format", "transformers")
    assert drawn == [tmp_path / "docs" / f"{name}.png" for name in pictures]
    assert "$(PYTHON) -m tools.figures\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
