"""tools.figures: the tables of results/ in documents, that documents have them, and what these say of formats."""

from __future__ import annotations

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
from tools.figures import END, MARKED, RESULTS, ROOT, documents, figures, merged, of_families, with_tables
from tools.format_choice import BATCH, FAMILIES, Family, shares_of_bytes, shares_of_time
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


def replay_rows(implementation: str = "flashstate", op: str = "mamba2_replay", **times: Any) -> list[Row]:
    """Rows of six tokens at batches 1, 4 and 16; `last=(2, 3, 4)` has these times."""
    return [
        row(implementation, "float32", "nearest", batch, 6, stored, time, op)
        for stored, found in times.items()
        for batch, time in zip((1, 4, 16), found, strict=True)
    ]


def test_replay_pays_from_the_batch_size_on_at_which_it_is_always_faster() -> None:
    for times, cells in (
        ({"stationary": (3, 4, 5), "every": (4, 5, 6), "last": (2, 4, 6)}, "1 | 16"),
        ({"stationary": (3, 4, 5), "every": (4, 3, 6), "last": (4, 5, 5)}, f"16 | {NEVER}"),
        ({"stationary": (3, 4, 5), "last": (4, 5, 6), "uniform": (9, 9, 9)}, " | 1"),
    ):
        rows = [*replay_rows(**times), row("touch", "float32", "nearest", 1, 6, "last", 0.1, "mamba2_replay")]
        assert pays(rows)[2:] == [f"| float32, 6 tokens | {cells} |"]
    of_delta = partial(replay_rows, op="gated_delta_replay")
    rows = of_delta(stationary=(3, 4, 5), last=(4, 5, 6)) + of_delta("flashstate, at once", last=(2, 4, 6))
    rows += of_delta("flashstate, per channel", stationary=(3, 4, 5), last=(4, 5, 6))
    assert pays(rows)[2:] == [  # beside the faster step in place, and per channel beside its like
        "| 16 heads, float32, 6 tokens |  | 16 |",
        "| 16 heads, float32, 6 tokens, per channel |  | 1 |",
    ]


def test_info_says_from_which_batch_size_on_replay_pays_as_results_do() -> None:
    for name in (name for name, op in BENCHED.items() if op.pays):
        last = {of: cells["last"] for of, cells in faster_from(read_csv(RESULTS[name])[1]).items()}
        assert BENCHED[name].pays == {of: 0 if cell == NEVER else int(cell) for of, cell in last.items()}


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


def test_documents_have_the_tables_of_the_results() -> None:
    provenances = [{"device": "a GPU", "commit": "abc"}, {"device": "a GPU", "commit": "def", "peers": "vllm 1"}]
    assert merged(provenances) == {"device": "a GPU", "commit": "abc / def", "peers": "vllm 1"}
    found = {path.relative_to(ROOT).as_posix() for path in documents()}
    assert found >= {"README.md", *(f"docs/ops/{op}.md" for op in OPS)}
    texts = [document.read_text(encoding="utf-8") for document in documents()]
    for text in texts:
        assert text == with_tables(text), "run make figures"
    shown = {match["table"].split(":")[0] for text in texts for match in MARKED.finditer(text)}
    assert shown >= {f"figures of {op}" for op in RESULTS}
    assert {op: {row.op for row in tool.measured(op)[1]} for op in RESULTS} == {op: {op} for op in RESULTS}


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


# What docs/choosing-a-format.md says

FLOAT32, INT8 = ("float32", "nearest"), ("int8", "nearest")


def of_batch(name: str, microseconds: float, stored: str = "last") -> Row:
    return row("flashstate", name, "nearest", BATCH, stored=stored, microseconds=microseconds)


def test_times_are_shares_of_a_float32_step_in_place_at_one_batch_size() -> None:
    rows = [of_batch("float32", 8.0), of_batch("int8", 2.0), row("flashstate", "int8", "nearest", 1)]
    rows += [row("vllm", "int8", "nearest", BATCH), of_batch("float32", 4.0, stored="a 16th folds")]
    assert shares_of_time(Family("any", "mamba2", "red"), rows) == {FLOAT32: 1.0, INT8: 0.25}
    assert shares_of_time(Family("any", "mamba2", "red", stored="a 16th folds"), rows) == {FLOAT32: 0.5}
    assert shares_of_bytes(rows) == {FLOAT32: 1.0, INT8: (128 + 4) / 512}


def test_the_results_show_what_the_document_says() -> None:
    measured, errors = of_families()
    times = {family.op: shares_of_time(family, measured[family.op]) for family in FAMILIES}

    def error(op: str, label: str) -> float:
        name, _, rounding = label.partition(" ")
        return errors[op][name, rounding or "nearest"][1]

    assert 0.45 < times["mamba2"]["float16", "nearest"] < times["mamba2"]["int16", "nearest"] < 0.6
    assert times["mamba2_replay"][FLOAT32] < 0.65
    for op in ("mamba2", "mamba3", "gated_delta"):
        assert 8 * error(op, "float16") < 1.001 * min(error(op, "bfloat16"), error(op, "bfloat16 stochastic"))
        assert 1 / 11 < error(op, "int16") / error(op, "float16") < 1 / 7.5
        assert 0.01 < min(error(op, "int8"), error(op, "int8 stochastic")) < 0.03
        assert min(error(op, "float8_e4m3fn"), error(op, "float8_e4m3fn stochastic")) > 0.04
    for form in PORTABLE_FORMATS[1:]:
        assert errors["mamba2"][form][1] / errors["mamba2_replay"][form][1] > 3
    assert error("mamba2_replay", "int8") < error("mamba2", "bfloat16 stochastic") < 0.5 * error("mamba2", "bfloat16")
    assert times["mamba2"][INT8] < 0.7 * times["mamba2"]["int8", "stochastic"]
