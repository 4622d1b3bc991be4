"""What the benchmark measures in a run: all ways to call flashstate and peers, beside the roofs; and whole runs."""

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from benching import CPU, NEEDS_INTERPRETER, STAND_INS, TINY, measure_in_the_interpreter, pretend_all, tiny_job
from printed import output_of

from flashstate import Slots, commands
from flashstate.bench import measure, plot, run, timing
from flashstate.bench.binding import IN_PLACE, Step, Storing
from flashstate.bench.gated_delta import LAYERS, in_split_pool
from flashstate.bench.jobs import Job, Stored
from flashstate.bench.limit import TimeLimit
from flashstate.bench.measure import Report, measure_on_gpu
from flashstate.bench.ops import OPS
from flashstate.bench.peers import MeasurementError, load_peers
from flashstate.bench.results import Row, read_csv, write_csv
from flashstate.cli import main
from flashstate.proof import Inputs, make_inputs

MOVES = "plan and commit"
RESULTS = Path(__file__).parent.parent / "results"
FORMS = ("", ", 3 tokens", ", 3 tokens, every stored")


@pytest.fixture(autouse=True)
def short_timing_on_a_wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "CPU_SECONDS", 0.001)
    monkeypatch.setattr(timing, "CPU_CALLS", 1)
    monkeypatch.setenv("COLUMNS", "160")


def test_every_op_is_measured_with_both_index_types() -> None:
    for name, op in OPS.items():
        given: list[torch.dtype] = []

        def noting(inputs: Inputs, storing: Storing, given: list[torch.dtype] = given) -> Step:
            return lambda slots: lambda: (given.append(slots.read.dtype), inputs.main)[1]

        for bind in (noting, replace(op, bind=noting).ways["int64 slots"].bind):
            inputs = make_inputs(TINY[name], CPU)
            bind(inputs, IN_PLACE)(Slots(inputs.slots))()
        assert given == [torch.int32, torch.int64], name


def test_a_split_pool_has_the_same_states_far_apart() -> None:
    inputs = make_inputs(replace(TINY["gated_delta"], format="int8"), CPU)
    split = in_split_pool(inputs.fresh()).state.data
    assert split.stride() == (LAYERS * inputs.state.data.stride(0), *inputs.state.data.stride()[1:])
    assert torch.equal(split, inputs.state.data)


IMPOSSIBLE: list[tuple[str, str, str, Stored, dict[str, Any]]] = [
    ("gated_delta", "at once", "only for calls of 2 to 16 tokens", "last", {}),
    ("gated_delta", "at once", "only for calls of 2 to 16 tokens", "last", {"tokens": 17}),
    ("gated_delta", "at once", "only where no state between tokens is stored", "every", {"tokens": 3}),
    ("gated_delta_replay", "at once", "only for steps in place: replay always does", "none folds", {}),
    ("gated_delta_replay", "per channel", "only compared where every head has keys of its own", "uniform",
     {"key_heads": 1}),
]  # fmt: skip


def test_a_way_is_another_job_or_is_skipped_with_a_reason() -> None:
    for op, how, reason, stored, changes in IMPOSSIBLE:
        with pytest.raises(MeasurementError, match=f"^{reason}$"):
            OPS[op].variants[how].job(tiny_job(op, stored, **changes))
    for op in ("gated_delta", "gated_delta_replay"):
        assert not OPS[op].variants["at once"].job(tiny_job(op, tokens=2)).case.exact


MEASURED: list[tuple[str, Job, str]] = [  # op, job, and beside what rows of flashstate it is
    ("mamba2", tiny_job("mamba2", "every", tokens=3), "touch read | int64 slots, flashinfer"),
    ("mamba2", tiny_job("mamba2", tokens=3), "touch read | int64 slots, at once, vllm, flashinfer, fla"),
    ("gated_delta", tiny_job("gated_delta"), "touch read | int64 slots, split pool*, vllm, flashinfer, fla"),
    ("gated_delta", tiny_job("gated_delta", "none", tokens=3), "read | int64 slots, at once, flashinfer, fla"),
    ("mamba3", tiny_job("mamba3"), "touch read | int64 slots, turned*, rank 1*, rank 1, turned*, mamba_ssm"),
    ("conv1d", tiny_job("conv1d", tokens=3), "touch read | int64 slots, early, vllm"),
    ("span", tiny_job("span"), "touch read | int64 slots, early"),
    ("mamba2_replay", tiny_job("mamba2_replay", MOVES, tokens=2, format="float16", rounding="stochastic"),
     " | int64 slots"),
    ("gated_delta_replay", tiny_job("gated_delta_replay", "uniform", tokens=2),
     "roof touch read | int64 slots, per channel*"),
    ("gated_delta_replay", tiny_job("gated_delta_replay", tokens=2), "touch read | int64 slots, at once, per channel*"),
]  # fmt: skip


def rows_beside(rows: Sequence[Row]) -> str:
    """The roofs before rows of flashstate, and the ways and peers after them, with a star if they have their own."""
    names = [row.implementation for row in rows]
    before, after = names[: names.index("flashstate")], names[names.index("flashstate") + 1 :]
    starred = {name.partition(", ")[2] for name in after if re.match("(touch|roof), ", name)}
    ways = (name.removeprefix("flashstate, ") for name in after if not re.match("(touch|roof), ", name))
    return f"{' '.join(before)} | {', '.join(f'{way}*' if way in starred else way for way in ways)}"


@NEEDS_INTERPRETER
@pytest.mark.interpreted
@pytest.mark.parametrize(("op", "job", "beside"), MEASURED, ids=lambda value: getattr(value, "stored", value))
def test_all_ways_and_right_peers_are_measured_beside_the_roofs(
    op: str, job: Job, beside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_in_the_interpreter(monkeypatch)
    pretend_all(monkeypatch, op)
    bindings, _ = load_peers(OPS[op].peers, torch.device("cuda"))
    exact: list[bool] = []
    oracle = measure.oracle
    monkeypatch.setattr(measure, "oracle", lambda i: (exact.append(i.arguments.get("exact", True)), oracle(i))[1])
    report = Report()
    measure_on_gpu(OPS[op], job, bindings, CPU, report)
    assert rows_beside(report.rows) == beside
    assert all((row.percent_of_roof is None) == (job.stored == MOVES) for row in report.rows)
    possible = {*(f"flashstate, {how}" for how in OPS[op].ways), *STAND_INS.get(op, {})}
    assert report.skipped.keys() == possible.difference(row.implementation for row in report.rows)
    assert (False in exact) == ("at once" in beside)  # checked with a budget of its own


def test_bench_on_a_cpu_says_rows_as_they_come_and_ends_when_its_time_is_over(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ticks = iter((0.0, 1.0, 2.0, 3.0, *[31.0] * 3))
    monkeypatch.setattr(commands, "TimeLimit", partial(TimeLimit, clock=lambda: next(ticks)))
    monkeypatch.setattr(commands, "CPU_BATCHES", (2, 1))
    asked = ["bench", "--device", "cpu", "--formats", "float32", "int8", "--csv", str(tmp_path / "cpu.csv")]
    assert main([*asked, "--heads", "2", "--rows", "4", "--cols", "16"]) == 0
    out, said = capsys.readouterr()
    said_of = re.findall(r"(\w+, batch \d), reference, CPU: ", said)
    assert said_of == ["float32, batch 1", "int8, batch 1", "float32, batch 2"]
    assert "on a CPU: 3 of 4 measurements in 31 s; --batches measures every job" in " ".join(out.split())
    _, rows = read_csv(tmp_path / "cpu.csv")
    assert [(row.format, row.batch) for row in rows] == [("float32", 1), ("float32", 2), ("int8", 1)]


def test_bench_on_a_cpu_measures_the_reference_writes_draws_and_is_shown_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    csv_file, image = tmp_path / "cpu.csv", tmp_path / "cpu.png"
    sizes = "--heads 2 --rows 4 --cols 16 --batches 1 2 --tokens 1 3 --formats float32 int8:stochastic"
    files = ["--csv", str(csv_file), "--plot", str(image), "--commit", "abc"]
    assert main(["bench", "mamba2", "--device", "cpu", *sizes.split(), *files]) == 0
    shown, (provenance, rows) = output_of(capsys), read_csv(csv_file)
    labels = [f"{name}{form}" for name in ("float32", "int8 stochastic") for form in FORMS]
    skipped = [f"skipped {peer}: only compared on a GPU" for peer in OPS["mamba2"].peers]
    assert all(text in shown for text in ("mamba2, 2 heads, 1 group, 4 x 16, on CPU", *labels, *skipped))
    assert {"flashstate", "device", "torch", "triton", "date"} < provenance.keys()
    assert provenance["commit"] == "abc"
    assert [(row.label, row.batch) for row in rows] == [(label, n) for label in labels for n in (1, 2)]
    assert {(row.op, row.implementation, row.percent_of_roof) for row in rows} == {("mamba2", "reference, CPU", None)}
    assert image.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(run, "bench", None)  # nothing is measured
    assert main(["bench", "--from-csv", str(csv_file)]) == 0
    again = output_of(capsys)
    assert all(f" {row.microseconds:.2f} {row.spread:.1%} {row.gigabytes_per_second:,.1f} " in again for row in rows)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "--device", "cpu", "--plot", str(tmp_path / "a.png")]) == 2
    assert "pip install 'flashstate[plot]'" in capsys.readouterr().err
    assert main(["bench", "--host", "--device", "cpu"]) == 0
    assert run.NO_HOST_COST in output_of(capsys)
    monkeypatch.undo()
    monkeypatch.setattr(measure, "error_ratio", lambda *tensors: 7.0)
    assert main(["bench", "--device", "cpu", *sizes.split()]) == 1
    wrong = " ".join(capsys.readouterr().err.split())
    assert "flashstate is wrong: its output is 7 times the error budget away from float64, for " in wrong
    assert "rows=4" in wrong


def test_the_results_in_the_tree_can_be_read_and_written_byte_for_byte(tmp_path: Path) -> None:
    for path in sorted(RESULTS.glob("h200*.csv")):
        provenance, rows = read_csv(path)
        assert provenance["device"]
        write_csv(tmp_path / "again.csv", rows, provenance)
        assert (tmp_path / "again.csv").read_bytes() == path.read_bytes()


def test_a_picture_has_a_panel_per_label_and_a_line_per_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    figures: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure))
    rows = [row for row in read_csv(RESULTS / "h200.csv")[1] if row.tokens == 1 and row.rounding == "stochastic"]
    plot.draw(rows, {}, Path("not written"))
    panels = [panel for panel in figures[0].axes if panel.get_visible()]
    labels = list(dict.fromkeys(row.label for row in rows))
    assert [panel.get_title() for panel in panels] == 2 * labels  # percents of the roof, and times
    for panel in panels[len(labels) :]:
        for line in panel.get_lines():
            where = (panel.get_title(), line.get_label())
            here = {row.batch: row.microseconds for row in rows if (row.label, row.implementation) == where}
            assert dict(zip(line.get_xdata(), line.get_ydata(), strict=True)) == here


ON_A_GPU = [  # an op for each way to call flashstate, and for each roof
    ("mamba2", "--tokens 4", "touch read | int64 slots, at once"),
    ("conv1d", "--channels 64", "touch read | int64 slots, early"),
    ("mamba3", "", "touch read | int64 slots, turned*, rank 1*, rank 1, turned*"),
    ("mamba2_replay", "--tokens 6", "roof touch read | int64 slots"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "sizes", "rows_of_a_call"), ON_A_GPU, ids=[op for op, *_ in ON_A_GPU])
def test_bench_on_a_gpu_measures_roofs_all_ways_and_the_cost_on_the_host(
    op: str, sizes: str, rows_of_a_call: str, tmp_path: Path
) -> None:
    sizes = sizes if op == "conv1d" else f"--heads 16 --rows 16 {sizes}"
    options = f"--device cuda --peers none --batches 4 --formats bfloat16 {sizes} --csv {tmp_path / 'gpu.csv'}"
    assert main(["bench", op, *options.split()]) == 0
    provenance, rows = read_csv(tmp_path / "gpu.csv")
    assert provenance["host cost"].startswith("torch.add_ ")
    assert "; flashstate " in provenance["host cost"]
    stored = {"mamba2_replay": "stationary"}.get(op, "last")
    assert rows_beside([row for row in rows if row.stored == stored]) == rows_of_a_call
    assert all(row.microseconds > 0 for row in rows)
    assert all((row.percent_of_roof is None) == (row.stored == MOVES) for row in rows)
