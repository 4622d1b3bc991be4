"""What a benchmark leaves behind: the CSV and the picture."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import pytest
from benching import panels_drawn
from printed import output_of

from flashstate.bench import run
from flashstate.bench.results import Row, read_csv, write_csv
from flashstate.cli import main
from flashstate.state.formats import PORTABLE_FORMATS, label_of

RESULTS = Path(__file__).parent.parent / "results"


def row(implementation: str, name: str, rounding: str, batch: int, tokens: int = 1, stored: str = "last") -> Row:
    shape = (16, 1, 64, 128, tokens, stored)
    percent = None if stored == "plan and commit" else 91.4
    return Row("mamba2", implementation, name, rounding, batch, *shape, 3.2 * batch, 0.01, 1310.0, percent)


def test_bench_redraws_a_file_without_measuring(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = [row(name, "int8", "nearest", 4, *form) for form in ((), (8, "every")) for name in ("touch", "flashstate")]
    provenance = {"device": "Some GPU", "host cost": "torch.add_ 8.0 µs"}
    write_csv(tmp_path / "gpu.csv", rows, provenance)
    monkeypatch.setattr(run, "bench", None)
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["bench", "--from-csv", str(tmp_path / "gpu.csv"), "--plot", str(tmp_path / "gpu.png")]) == 0
    assert read_csv(tmp_path / "gpu.csv") == (provenance, rows)
    out = output_of(capsys)
    assert "mamba2, 16 heads, 1 group, 64 x 128, on Some GPU" in out
    assert "int8, 8 tokens, every stored" in out
    assert "host cost: torch.add_ 8.0 µs" in out
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_with_other_columns_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "old.csv").write_text("implementation,format,rounding,batch\nflashstate,float32,nearest,4\n")
    assert main(["bench", "--from-csv", str(tmp_path / "old.csv")]) == 2
    complaint = "is not a file that flashstate bench wrote: it wants the columns op, implementation"
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(RESULTS.glob("h200*.csv")), ids=lambda p: p.name)
def test_the_results_in_the_tree_can_be_read_and_written_byte_for_byte(path: Path, tmp_path: Path) -> None:
    provenance, rows = read_csv(path)
    assert provenance["device"]
    assert not {row.stored for row in rows} & {"snapshots", "nothing", "each"}
    write_csv(tmp_path / "again.csv", rows, provenance)
    assert (tmp_path / "again.csv").read_bytes() == path.read_bytes()


def test_bench_says_before_measuring_how_to_get_matplotlib(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(run, "bench", None)
    assert main(["bench", "--device", "cpu", "--plot", str(tmp_path / "a.png")]) == 2
    assert "pip install 'flashstate[plot]'" in capsys.readouterr().err


def test_a_picture_has_a_panel_per_format_and_a_line_per_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("touch", "read", "flashstate", "flashstate, int64 slots", "vllm", "somebody")
    every = product(names, PORTABLE_FORMATS, (4, 1), ((1, "last"), (4, "last"), (4, "every")))
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


def test_a_picture_of_several_tokens_only_shows_them_and_leaves_out_what_has_no_roof(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forms = {"last": "", "every": ", every stored", "none": ", none stored", "stationary": ", stationary"}
    rows = [row("flashstate", "int8", "stochastic", 1, 4, stored) for stored in (*forms, "plan and commit")]
    roofs = {"last": "touch", "none": "read", "stationary": "roof"}
    rows += [row(roof, "int8", "stochastic", 1, 4, stored) for stored, roof in roofs.items()]
    panels = panels_drawn(rows, monkeypatch)
    assert [title for title, _ in panels] == [f"int8 stochastic, 4 tokens{form}" for form in forms.values()] * 2
    assert [next(iter(lines)) for _, lines in panels[:4]] == [roofs.get(stored, "touch") for stored in forms]
