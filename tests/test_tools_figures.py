"""tools.figures: the tables of results/ in documents, that documents have them, and what these say of formats."""

from pathlib import Path

import pytest

from flashstate.bench.ops import OPS as BENCHED
from flashstate.bench.results import Row, read_csv, write_csv
from flashstate.launch.call import OPS
from tools import figures as tool
from tools.figures import END, MARKED, RESULTS, ROOT, documents, merged, of_families, with_tables
from tools.format_choice import FAMILIES, shares_of_time
from tools.replay_pays import NEVER, faster_from

FLOAT32, INT8 = ("float32", "nearest"), ("int8", "nearest")


def mark(table: str) -> str:
    return f"<!-- {table}; make figures writes this -->\n"


def test_info_says_from_which_batch_size_on_replay_pays_as_results_do() -> None:
    for name in (name for name, op in BENCHED.items() if op.pays):
        last = {of: cells["last"] for of, cells in faster_from(read_csv(RESULTS[name])[1]).items()}
        assert BENCHED[name].pays == {of: 0 if cell == NEVER else int(cell) for of, cell in last.items()}


def test_tables_go_between_their_marks_and_nothing_else_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shape = "int8", "nearest", 4, 16, 1, 64, 128, 1, "last"
    row = Row("mamba2", "flashstate", *shape, 12.8, 0.01, 1310.0, 91.4)
    write_csv(tmp_path / "gpu.csv", [row], {"device": "Some GPU"})
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
    assert [path.stem for path in drawn] == ["h200", "numerics", "choosing-a-format", "transformers"]


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
        assert 0.01 < min(error(op, "int8"), error(op, "int8 stochastic")) < 0.03 < 0.04 < error(op, "float8_e4m3fn")

    assert error("mamba2_replay", "int8") < error("mamba2", "bfloat16 stochastic") < 0.5 * error("mamba2", "bfloat16")
    assert times["mamba2"][INT8] < 0.7 * times["mamba2"]["int8", "stochastic"]
