"""`flashstate bench --ways`: what is other in a way, that it is timed so, and what explains its time."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from benching import CPU, NEEDS_INTERPRETER, TINY, TWO_MICROSECONDS, measure_in_the_interpreter, spoiled, tiny_job
from printed import output_of
from torch import Tensor

from flashstate.bench import timing, ways
from flashstate.bench.binding import Step, Storing, TimedCall
from flashstate.bench.jobs import BenchedOp
from flashstate.bench.measure import Report, row_of
from flashstate.bench.ops import OPS
from flashstate.bench.peers import MeasurementError
from flashstate.bench.results import write_csv
from flashstate.bench.timing import Captured, Timing
from flashstate.bench.ways import PLAIN, WAYS, WayRow, choose_ways, measure_ways, plain_way, read_ways, rows_of
from flashstate.cli import main
from flashstate.proof import Inputs, interpreted
from flashstate.state.slots import Slots

MAMBA2 = OPS["mamba2"]
OF_ALL = [PLAIN, "again", "int64", "ascending"]
OF_OPS = {
    "mamba2": [*OF_ALL, "no-gate", "float32-dt"], "mamba2_replay": [*OF_ALL, "no-gate", "float32-dt"],
    "gated_delta": [*OF_ALL, "float32-dt"], "gated_delta_replay": [*OF_ALL, "float32-dt"],
    "mamba3": [*OF_ALL, "no-gate"], "conv1d": OF_ALL, "span": [*OF_ALL, "no-gate", "float32-dt"],
}  # fmt: skip


def measured(monkeypatch: pytest.MonkeyPatch, op: BenchedOp, case: Any, names: Sequence[str]) -> list[WayRow]:
    """A small job in these ways, where launches run twice, and take two microseconds."""
    measure_in_the_interpreter(monkeypatch)
    monkeypatch.setattr(ways, "captured", lambda launches: ([launch() for launch in launches[:2]], launches)[1])
    monkeypatch.setattr(ways, "time_by_turns", lambda graphs, flush: [TWO_MICROSECONDS] * len(graphs))
    with interpreted():
        return measure_ways(op, op.job(op.name, case, "last"), names, {}, CPU, Report())


def test_an_op_has_the_ways_that_its_cases_know_and_the_plain_one_comes_first() -> None:
    assert {op: choose_ways(OPS[op], []) for op in OPS} == OF_OPS
    assert choose_ways(MAMBA2, ["ascending"]) == [PLAIN, "ascending"]
    with pytest.raises(ValueError, match=r"^mamba2.* has no way 'fast', only plain, again, "):
        choose_ways(MAMBA2, ["fast"])


def test_graphs_are_timed_by_turns_each_as_it_leaves_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events tell how many graphs were replayed between them; - is a sweep."""
    done: list[str] = []

    def event(enable_timing: bool) -> Any:
        found = SimpleNamespace(synchronize=lambda: None, elapsed_time=lambda end: end.at - found.at)
        found.record = lambda: setattr(found, "at", len(done))
        return found

    monkeypatch.setattr(timing.torch, "empty", lambda *size, **of: SimpleNamespace(zero_=lambda: done.append("-")))
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    replays = [SimpleNamespace(replay=lambda name=name: done.append(name)) for name in "ab"]
    graphs = [Captured(cast("Any", graph), [len] * 4) for graph in replays]
    assert [time.median for time in timing.time_by_turns(graphs, 2, flush=True)] == [250, 250]
    timing.time_by_turns(graphs[:1], 2, flush=True)
    assert "".join(done) == "aaabbb" + "a-ab-b" * 2 + "aaa" + "-a" * 2


@NEEDS_INTERPRETER
@pytest.mark.interpreted
def test_what_is_timed_is_what_a_way_says_on_the_memory_of_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[Any, ...]] = []
    pools: set[int] = set()

    def noting(inputs: Inputs, storing: Storing) -> Step:
        step = MAMBA2.bind(inputs, storing)

        def call(slots: Slots) -> TimedCall:
            ascending, gate = bool((slots.read.diff() == 1).all()), inputs.arguments["z"] is not None
            given.append((slots.read.dtype, ascending, gate, inputs.arguments["dt"].dtype))
            pools.add(inputs.state.data.data_ptr())
            return step(slots)

        return call

    monkeypatch.setattr(ways, "check", lambda bind, inputs, storing: None)
    case, names = replace(TINY["mamba2"], batch=4, slots=9, x="float16", dt="float16"), OF_OPS["mamba2"]
    measured(monkeypatch, replace(MAMBA2, bind=noting), case, names)
    int32, int64, half, wide = torch.int32, torch.int64, torch.float16, torch.float32
    assert list(dict.fromkeys(given)) == [
        (int32, False, True, half), (int64, False, True, half), (int32, True, True, half), (int32, False, False, half),
        (int32, False, True, wide),
    ]  # fmt: skip
    assert len(pools) == 1


@NEEDS_INTERPRETER
@pytest.mark.interpreted
def test_a_way_that_is_wrong_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def double(inputs: Inputs, storing: Storing, slots: Slots, y: Tensor) -> None:
        if inputs.arguments["z"] is None:
            y.mul_(2)

    wrong = replace(MAMBA2, bind=spoiled(MAMBA2.bind, double))
    with pytest.raises(MeasurementError, match=r"^wrong: its output .* for Case\(.*z=False"):
        measured(monkeypatch, wrong, TINY["mamba2"], [PLAIN, "no-gate"])


def a_row(way: str, difference: float, by_bytes: float, by_roof: float = 0.0) -> WayRow:
    row = row_of("flashstate", tiny_job("mamba2", format="bfloat16"), Timing(2.0, 2.0, 2.0), 8000, None)
    return WayRow(
        **vars(row), way=way, bytes=8, roof_microseconds=2.0, difference=difference, by_bytes=by_bytes, by_roof=by_roof
    )


def test_a_difference_is_explained_by_bytes_and_by_the_roof_of_the_same_slots() -> None:
    names = [PLAIN, "ascending", "no-gate"]
    job = tiny_job("mamba2", batch=1)
    called = {name: replace(job, case=WAYS[name].of(job.case)) for name in names}
    times = dict(zip(names, (10.0, 9.6, 9.4), strict=True))
    timings = {("flashstate", name): Timing(time, time, time) for name, time in times.items()}
    rows = rows_of(called, timings, {False: Timing(8.0, 8.0, 8.0), True: Timing(7.6, 7.6, 7.6)})
    fewer = 1 - called["no-gate"].counted_bytes / called[PLAIN].counted_bytes
    assert [row.difference for row in rows] == pytest.approx([0, -4, -6])
    assert [row.by_bytes for row in rows] == pytest.approx([0, 0, -100 * fewer])
    assert [row.by_roof for row in rows] == pytest.approx([0, -5, 0])
    assert [row.percent_of_roof for row in rows] == pytest.approx([80, 100 * 7.6 / 9.6, 100 * 8 / 9.4])
    assert [row.bytes for row in rows] == [called[name].counted_bytes for name in names]
    other = {("vllm", "ascending"): Timing(9.0, 9.0, 9.0)}  # it cannot be called plainly
    assert len(rows_of(called, timings | other, {False: None, True: None})) == len(rows)


def test_differences_that_nothing_explains_are_flagged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [a_row(PLAIN, 0, 0), a_row("int64", 1.9, 0), *(a_row("ascending", d, 0, -5) for d in (-6.9, 1.9, -7.1, 2.1))]
    rows += [a_row("no-gate", -2.9, -0.5)]
    assert [row.held for row in rows] == [True] * 4 + [False] * 3
    assert ways.unexplained(rows[:4]) == ["Every difference is within 2 % of what bytes and roofs explain."]
    path, provenance = tmp_path / "ways.csv", {"device": "Some GPU", PLAIN: plain_way(MAMBA2)}
    write_csv(path, rows, provenance)
    assert read_ways(path) == (provenance, rows)
    assert main(["bench", "--ways", "--from-csv", str(path)]) == 0
    shown = output_of(capsys)
    assert "! bfloat16, batch 2, flashstate, no-gate: -2.9 %, but bytes explain -0.5 % and the roof +0.0 %" in shown
    assert shown.count("!") == 6
    assert f"plain: {plain_way(MAMBA2)}" in shown
    assert main(["bench", "--from-csv", str(path)]) == 2


@pytest.mark.gpu
def test_ways_are_measured_on_a_gpu(tmp_path: Path) -> None:
    options = ["--formats", "bfloat16", "--batches", "4", "--peers", "none", "--csv", str(tmp_path / "ways.csv")]
    assert main(["bench", "mamba2", "--ways", *options]) == 0
    _, rows = read_ways(tmp_path / "ways.csv")
    assert [row.way for row in rows] == OF_OPS["mamba2"]
    assert all(row.microseconds > 0 for row in rows)
