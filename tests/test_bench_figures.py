"""What a benchmark leaves behind: the CSV, the picture, the table in the README; and that the README agrees with it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from flashstate.bench import plot, run
from flashstate.bench.figures import END, MARKED, figures, start_of, with_figures
from flashstate.bench.results import Row, read_csv, write_csv
from flashstate.cli import main
from flashstate.state.formats import PORTABLE_FORMATS, label_of

ROOT = Path(__file__).parent.parent
RESULTS = sorted({*(ROOT / "results").glob("*.csv")} - {ROOT / "results" / "numerics.csv"})  # errors, no times
README = ROOT / "README.md"
SHAPE = (16, 1, 64, 128)
# The documents that have tables of a file, by the op they are of. A file may be missing before it is measured.
TABLES = {
    "h200.csv": ("mamba2", ["README.md"]),
    "h200-conv1d.csv": ("conv1d", ["docs/measuring.md"]),
    "h200-span.csv": ("conv1d + mamba2", ["docs/launching.md"]),
    "h200-gated-delta.csv": ("gated_delta", ["README.md", "docs/measuring.md"]),
    "h200-mamba3.csv": ("mamba3", ["README.md", "docs/measuring.md"]),
    "h200-replay.csv": ("mamba2_replay", ["docs/measuring.md"]),
}
MEASURED = [name for name in TABLES if (ROOT / "results" / name).exists()]


def row(implementation: str, name: str, rounding: str, batch: int, tokens: int = 1, stored: str = "last") -> Row:
    shape = (*SHAPE, tokens, stored)
    return Row("mamba2", implementation, name, rounding, batch, *shape, 3.2 * batch, 0.01, 1310.0, 91.4)


# The CSV


def test_bench_redraws_a_file_without_measuring(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = [
        row(name, "int8", "nearest", 4, *form) for form in ((), (8, "snapshots")) for name in ("touch", "flashstate")
    ]
    provenance = {"device": "Some GPU", "host cost": "torch.add_ 8.0 µs"}
    write_csv(tmp_path / "gpu.csv", rows, provenance)
    monkeypatch.setattr(run, "bench", None)
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["bench", "--from-csv", str(tmp_path / "gpu.csv"), "--plot", str(tmp_path / "gpu.png")]) == 0
    assert read_csv(tmp_path / "gpu.csv") == (provenance, rows)
    out = " ".join(capsys.readouterr().out.split())
    assert "mamba2, 16 heads, 1 group, 64 x 128, on Some GPU" in out
    assert "int8, 8 tokens, snapshots" in out
    assert "host cost: torch.add_ 8.0 µs" in out
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_with_other_columns_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "old.csv").write_text("implementation,format,rounding,batch\nflashstate,float32,nearest,4\n")
    assert main(["bench", "--from-csv", str(tmp_path / "old.csv")]) == 2
    complaint = "is not a file that flashstate bench wrote: it wants the columns op, implementation"
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_the_results_in_the_tree_can_be_read(path: Path) -> None:
    provenance, rows = read_csv(path)
    assert provenance["device"]
    assert rows


# The picture


def test_bench_says_before_measuring_how_to_get_matplotlib(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(run, "bench", None)
    assert main(["bench", "--device", "cpu", "--plot", str(tmp_path / "a.png")]) == 2
    assert "pip install 'flashstate[plot]'" in capsys.readouterr().err


def panels_drawn(rows: Sequence[Row], monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """The title and the lines, by label, of every panel in the picture of these rows."""
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure))
    plot.draw(rows, {}, Path("not written"))
    panels = [panel for panel in figures[0].axes if panel.get_visible()]
    return [(panel.get_title(), {line.get_label(): line for line in panel.get_lines()}) for panel in panels]


def test_a_picture_has_a_panel_per_format_and_a_line_per_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("touch", "read", "flashstate", "vllm", "somebody")
    every = product(names, PORTABLE_FORMATS, (4, 1), ((1, "last"), (4, "last"), (4, "snapshots")))
    panels = panels_drawn([row(name, *fmt, batch, *form) for name, fmt, batch, form in every], monkeypatch)
    titles = [label_of(*fmt) for fmt in PORTABLE_FORMATS]
    assert [title for title, _ in panels] == titles * 2
    for index, (_, lines) in enumerate(panels):
        assert lines.keys() == {*names} - ({"read"} if index < len(titles) else set())
        assert all(list(lines[name].get_xdata()) == [1, 4] for name in ("flashstate", "vllm", "somebody"))
        assert lines["flashstate"].get_linewidth() > lines["vllm"].get_linewidth()
        assert len({(lines[name].get_color(), lines[name].get_marker()) for name in lines}) == len(lines)
    for name in ("flashstate", "vllm"):
        assert len({(lines[name].get_color(), lines[name].get_marker()) for _, lines in panels}) == 1


def test_a_picture_of_several_tokens_only_shows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = {"last": "", "snapshots": ", snapshots", "nothing": ", nothing stored"}
    rows = [row("flashstate", "int8", "stochastic", 1, 4, stored) for stored in forms]
    rows += [row("touch", "int8", "stochastic", 1, 4), row("read", "int8", "stochastic", 1, 4, "nothing")]
    panels = panels_drawn(rows, monkeypatch)
    assert [title for title, _ in panels] == [f"int8 stochastic, 4 tokens{form}" for form in forms.values()] * 2
    assert [next(iter(lines)) for _, lines in panels[:3]] == ["touch", "touch", "read"]  # the roofs of each


# The table


def test_a_table_has_formats_down_and_batches_across() -> None:
    names, batches = ("touch", "flashstate"), (1, 16, 256)
    rows = [row(name, *fmt, batch) for name, fmt, batch in product(names, PORTABLE_FORMATS[:3], batches)]
    rows += [row("flashstate", "float32", "nearest", 1, tokens=4), row("flashstate, early", "float32", "nearest", 16)]
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
    names, forms = (
        ("touch", "read", "flashstate", "flashstate, at once", "vllm"),
        ((1, "last"), (4, "last"), (4, "nothing")),
    )
    rows = [row(name, "bfloat16", "nearest", batch, *form) for name, form, batch in product(names, forms, (1, 16))]
    lines = figures(rows, {"host cost": "not shown"}, ["bfloat16", "bfloat16, 4 tokens, nothing stored"]).split("\n")
    assert [line.split(" | ")[0] for line in lines if line.startswith("| bf")] == [
        f"| {label}: {name}" for name in names[2:] for label in ("bfloat16", "bfloat16, 4 tokens, nothing stored")
    ]
    assert lines[-3:] == ["Measured on: an unknown device.", "", ""]
    assert "host" not in "".join(lines)


def test_tables_go_between_the_marks_of_their_op_and_change_nothing_else(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    documents, csv_file = [tmp_path / "README.md", tmp_path / "more.md"], tmp_path / "gpu.csv"
    write_csv(csv_file, [row("flashstate", "int8", "nearest", 4)], {"device": "Some GPU"})
    other = f"{start_of('conv1d')}\nnot mine\n{END}\n"
    whole, some = start_of("mamba2"), start_of("mamba2", ["int8"])
    text = f"before\n{other}{whole}\nold\n{END}\nbetween\n{some}\n{END}\nafter\n"
    for document in documents:
        document.write_text(text, encoding="utf-8")
    command = ["bench", "--from-csv", str(csv_file), "--markdown", *map(str, documents)]
    assert main(command) == 0
    head, end = "\n| µs (percent of the roof), by batch size | 4 |\n|---|---|\n", f"\nMeasured on: Some GPU.\n\n{END}\n"
    written = f"before\n{other}{whole}\n{head}| int8 | 12.8 (91) |\n{end}"
    written += f"between\n{some}\n{head}| int8: flashstate | 12.8 (91) |\n{end}after\n"
    assert [document.read_text(encoding="utf-8") for document in documents] == [written] * 2
    documents[1].write_text(other, encoding="utf-8")
    assert main(command) == 2
    assert "has no place for figures: it wants the lines <!-- figures of mamba2; make" in capsys.readouterr().err


@pytest.mark.parametrize("name", MEASURED)
def test_documents_have_the_figures_of_the_results(name: str) -> None:
    provenance, rows = read_csv(ROOT / "results" / name)
    op, documents = TABLES[name]
    assert {row.op for row in rows} == {op}
    for document in (ROOT / path for path in documents):
        assert document.read_text(encoding="utf-8") == with_figures(document, rows, provenance), "run make figures"


def test_every_place_for_figures_has_results_or_is_empty() -> None:
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    places = [(path, match) for path in documents for match in MARKED.finditer(path.read_text(encoding="utf-8"))]
    known = {(op, path): name for name, (op, paths) in TABLES.items() for path in paths}
    assert {(match["op"], path.relative_to(ROOT).as_posix()) for path, match in places} == known.keys()
    for path, match in places:
        measured = known[match["op"], path.relative_to(ROOT).as_posix()] in MEASURED
        assert measured == (match[0] != match["start"]), path


def test_make_writes_every_table() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name, (_, documents) in TABLES.items():
        (line,) = [line for line in makefile.splitlines() if f"--from-csv results/{name} " in line]
        assert line.endswith(f"--markdown {' '.join(documents)}")


@pytest.mark.parametrize(("old", "new"), [("| 4 |", "| 5 |"), (" (9", " (8"), ("float16 stoch", "float64 stoch")])
def test_a_figure_that_differs_is_seen(old: str, new: str, tmp_path: Path) -> None:
    provenance, rows = read_csv(ROOT / "results" / "h200.csv")
    text = README.read_text(encoding="utf-8")
    start = text.index(start_of("mamba2"))
    changed = tmp_path / "README.md"
    changed.write_text(text[:start] + text[start:].replace(old, new, 1), encoding="utf-8")
    assert changed.read_text(encoding="utf-8") not in (text, with_figures(changed, rows, provenance))
