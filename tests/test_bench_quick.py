"""flashstate bench --quick: what is in its file, that it stops in time, and that nothing unchecked has a time."""

import re
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from benching import CPU, NEEDS_INTERPRETER, TINY, TWO_MICROSECONDS, Clock, measure_in_the_interpreter, tiny_job
from printed import output_of

from flashstate.basics import CPU_BENCH_SECONDS
from flashstate.bench import measure, quick, timing
from flashstate.bench.binding import IN_PLACE
from flashstate.bench.jobs import Way
from flashstate.bench.limit import TimeLimit
from flashstate.bench.ops import OPS
from flashstate.bench.quick import NO_MEMORY, Cell, measured, prepared, quick_cells
from flashstate.bench.quick_file import CORRECT, NO_TIME, TIMES, QuickFile, read_quick
from flashstate.bench.results import Row, is_roof
from flashstate.cli import main
from flashstate.launch import Gpu, Machine, collecting, interpreted
from flashstate.launch.environment import pretending
from flashstate.proof import Inputs


@pytest.fixture(autouse=True)
def short_timing_on_a_wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "CPU_SECONDS", 0.001)
    monkeypatch.setattr(timing, "CPU_CALLS", 1)
    monkeypatch.setenv("COLUMNS", "160")


def tiny_cells(*ops: str) -> list[Cell]:
    """A small cell of each of these ops."""
    return [Cell(OPS[op], tiny_job(op), Way(OPS[op].bind), "flashstate") for op in ops]


ENDLESS = TimeLimit(1e9)


def test_the_cells_are_of_every_op_and_each_comes_once_the_most_telling_first() -> None:
    with pretending(Machine(Gpu("a GPU nobody measured", (9, 0)), "sm_89")):
        cells, of_one = ([(c.op.name, c.name, str(c.job)) for c in quick_cells(CPU, op)] for op in (None, "conv1d"))
    assert len(set(cells)) == len(cells)
    assert of_one == [cell for cell in cells if cell[0] == "conv1d"]
    assert {"flashstate", "flashstate, at once", "flashstate, early", "flashstate, rank 1"} == {c[1] for c in cells}
    for some in (cells, cells[: len(cells) // 3]):  # a slow machine measures some of every op
        assert {op for op, *_ in some} == OPS.keys() - {"span"}


@NEEDS_INTERPRETER
@pytest.mark.interpreted
def test_a_cell_has_its_roofs_its_verdict_and_the_configs_of_its_launches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measure_in_the_interpreter(monkeypatch)
    cells = tiny_cells("mamba2", "conv1d")
    with interpreted():
        kept = QuickFile({"device": "a CPU"}, 300, 2, 1.5, list(measured(cells, CPU, ENDLESS)))
        for cell, entry in zip(cells, kept.cells, strict=True):
            inputs = cell.job.case.make_inputs(CPU)
            with collecting() as launches:
                cell.way.bind(inputs, IN_PLACE)(measure.slots_of(inputs, IN_PLACE))()
            (config,) = entry["configs"]
            (launch,) = launches
            assert launch.num_warps == config["num_warps"]
            assert config["block_rows"] in launch.constants.values()
            assert config["from"].startswith("heuristic: no table")
    assert [entry["verdict"] for entry in kept.cells] == [CORRECT] * 2
    assert [row.implementation for row in kept.rows] == ["touch", "read", "flashstate"] * 2
    kept.write(tmp_path / "quick.json")
    assert read_quick(tmp_path / "quick.json") == kept


def test_cells_are_not_begun_once_the_time_is_used_up() -> None:
    limit = TimeLimit(3, Clock())  # asked twice before the first cell, and once before every other
    kept = QuickFile({}, 3, 3, cells=list(measured(tiny_cells("mamba2", "conv1d", "mamba3"), CPU, limit)))
    assert [entry["verdict"] for entry in kept.cells] == [CORRECT, CORRECT, NO_TIME]
    assert not kept.complete
    assert not kept.cells[-1].keys() & {*TIMES, "roofs"}
    assert {row.op for row in kept.rows} == {"mamba2", "conv1d"}


def test_what_is_wrong_or_fails_has_a_reason_and_no_time_and_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cells, errors = tiny_cells("mamba2", "conv1d"), (RuntimeError("no such instruction"), torch.OutOfMemoryError())
    failing = [replace(cells[0], way=Way(Mock(side_effect=error))) for error in errors]
    found = list(measured([*failing, cells[1]], CPU, ENDLESS))
    verdicts = ["failed: RuntimeError: no such instruction", NO_MEMORY, CORRECT]
    assert [entry["verdict"] for entry in found] == verdicts
    for there in range(4):
        QuickFile({}, 300, 3, cells=found[:there]).write(tmp_path / "quick.json")
        assert read_quick(tmp_path / "quick.json").complete == (there == 3)
    monkeypatch.setattr(measure, "error_ratio", lambda *tensors: 7.0)
    (wrong,) = measured(cells[:1], CPU, ENDLESS)
    assert wrong["verdict"].startswith("wrong: its output is 7 times the error budget away")
    for entry in (*found[:2], wrong):
        assert not entry.keys() & {*TIMES, "roofs"}


@NEEDS_INTERPRETER
@pytest.mark.interpreted
def test_where_memory_is_short_what_is_prepared_for_other_cells_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[weakref.ref[Inputs]] = []
    tries: list[str] = []

    def noting(cells: Sequence[Cell], device: torch.device) -> dict[int, Inputs]:
        ready = prepared(cells, device)
        waiting.extend(weakref.ref(inputs) for i, inputs in ready.items() if i > 0)
        return ready

    def in_little_memory(cell: Cell, inputs: Inputs, *others: Any) -> list[Row]:
        tries.append(cell.op.name)
        if any(prepared_inputs() is not None for prepared_inputs in waiting) or cell.op.name == "mamba3":
            raise torch.OutOfMemoryError
        return [measure.row_of(cell.name, cell.job, TWO_MICROSECONDS, 8, None)]

    monkeypatch.setattr(quick, "prepared", noting)
    monkeypatch.setattr(quick, "checked_rows", in_little_memory)
    with interpreted():
        found = list(measured(tiny_cells("mamba2", "conv1d", "mamba3"), CPU, ENDLESS))
    assert len(waiting) == 2
    assert tries == ["mamba2", "mamba2", "conv1d", "mamba3"], "once more where others had room"
    assert [entry["verdict"] for entry in found] == [CORRECT, CORRECT, NO_MEMORY]


def test_the_command_writes_one_file_that_can_be_shown_and_drawn_elsewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for op in ("mamba2", "conv1d"):
        monkeypatch.setitem(OPS, op, replace(OPS[op], case=TINY[op]))
    parts = [replace(part, grid=replace(part.grid, sizes={})) for part in (quick.PARTS[0], quick.PARTS[2])]
    monkeypatch.setattr(quick.quick_cells, "__defaults__", (None, parts))
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "--quick", "--device", "cpu", "--commit", "abc"]) == 0
    out, said = capsys.readouterr()
    shown = " ".join(out.split())
    assert re.findall(r"(?m)^(\w+), reference, CPU, .*, batch 1: [\d,.]+ µs$", said) == ["mamba2", "mamba2", "conv1d"]
    path = tmp_path / "flashstate-cpu.json"
    found = read_quick(path)
    assert (found.complete, found.limit, found.where["commit"]) == (True, CPU_BENCH_SECONDS, "abc")

    assert [row.implementation for row in found.rows] == ["reference, CPU"] * 3
    assert main(["bench", "--from-json", str(path), "--plot", str(tmp_path / "a.png")]) == 0
    again = output_of(capsys)
    assert again == shown.replace(" wrote flashstate-cpu.json: this one file has everything", "")
    assert all(
        text in again
        for text in ("conv1d, width 4", "mamba2, 2 heads", "reference, CPU", f"of {CPU_BENCH_SECONDS} seconds")
    )
    assert {path.name for path in tmp_path.glob("*.png")} == {"a-mamba2.png", "a-conv1d.png"}
    monkeypatch.setattr(measure, "error_ratio", lambda *tensors: 7.0)
    assert main(["bench", "--quick", "--device", "cpu", "conv1d"]) == 1
    assert {entry["op"] for entry in read_quick(path).cells} == {"conv1d"}
    assert "batch 1: wrong: its output is 7 times" in output_of(capsys)


@pytest.mark.gpu
def test_a_quick_run_on_a_gpu_keeps_its_time_and_says_what_it_ran_on(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    assert main(["bench", "--quick", "--seconds", "20", "--json", str(path)]) == 0
    found = read_quick(path)
    assert {"capability", "processors", "driver", "CUDA"} <= found.where.keys()
    assert found.used < 60
    assert {"touch", "read"} <= found.roofs.keys()
    assert all(entry["configs"] for entry in found.cells)
    ours = [row for row in found.rows if not is_roof(row.implementation)]
    assert ours
    assert all(row.percent_of_roof is not None for row in ours)
