"""What the benchmark measures in a run: all ways to call flashstate and peers, beside the roofs; and whole runs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from benching import CPU, NEEDS_INTERPRETER, STAND_INS, TINY, measure_in_the_interpreter, pretend_all, tiny_job
from printed import output_of

from flashstate import Slots, commands
from flashstate.bench import measure, run, timing
from flashstate.bench.binding import IN_PLACE, Step, Storing
from flashstate.bench.gated_delta import LAYERS, in_split_pool
from flashstate.bench.jobs import Job, Stored, benched
from flashstate.bench.limit import TimeLimit
from flashstate.bench.mamba2_replay import LIVE, LIVE_BY_ONE
from flashstate.bench.measure import Report, measure_on_gpu
from flashstate.bench.ops import OPS
from flashstate.bench.peers import MeasurementError, load_peers
from flashstate.bench.results import read_csv, write_csv
from flashstate.cli import main
from flashstate.proof import CASES, Inputs, interpreted, make_inputs
from flashstate.state.formats import bits_of

GATED_DELTA, MAMBA3 = OPS["gated_delta"], OPS["mamba3"]
MOVES = "plan and commit"
REPLAYS = ("mamba2_replay", "gated_delta_replay")


@pytest.fixture(autouse=True)
def short_timing_on_a_wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "CPU_SECONDS", 0.001)
    monkeypatch.setattr(timing, "CPU_CALLS", 1)
    monkeypatch.setenv("COLUMNS", "160")


# Ways to call flashstate, and peers, beside the roofs


def test_every_op_is_measured_with_both_index_types() -> None:
    for name, op in OPS.items():
        given: list[torch.dtype] = []

        def noting(inputs: Inputs, storing: Storing, given: list[torch.dtype] = given) -> Step:
            return lambda slots: lambda: (given.append(slots.read.dtype), inputs.main)[1]

        for bind in (noting, replace(op, bind=noting).ways["int64 slots"].bind):
            inputs = make_inputs(TINY[name], CPU)
            bind(inputs, IN_PLACE)(Slots(inputs.slots))()
        assert given == [torch.int32, torch.int64], name


def test_what_cannot_go_at_once_is_skipped_with_a_reason() -> None:
    few, between = "only for calls of 2 to 16 tokens", "only where no state between tokens is stored"
    for tokens, stored, reason in ((0, "last", few), (17, "last", few), (3, "every", between)):
        with pytest.raises(MeasurementError, match=f"^{reason}$"):
            GATED_DELTA.variants["at once"].job(tiny_job("gated_delta", stored, tokens=tokens))
    assert not GATED_DELTA.variants["at once"].job(tiny_job("gated_delta", tokens=2)).case.exact


def test_a_split_pool_has_the_same_states_far_apart_and_a_step_changes_nothing_around_them() -> None:
    inputs = make_inputs(replace(TINY["gated_delta"], format="int8"), CPU)
    split = in_split_pool(inputs.fresh())
    assert split.state.data.stride() == (LAYERS * inputs.state.data.stride(0), *inputs.state.data.stride()[1:])
    assert torch.equal(split.state.data, inputs.state.data)
    size, page = inputs.state.data[0].numel(), split.state.data.stride(0)
    around = bits_of(split.state.data.as_strided((len(split.state.data), page - size), (page, 1), 0))
    before = around.clone()
    assert torch.equal(split.step(), inputs.step())
    assert torch.equal(split.state.data, inputs.state.data)
    assert torch.equal(around, before)


def test_other_ways_of_mamba3_are_its_job_with_turned_columns_or_one_rank() -> None:
    job = tiny_job("mamba3")
    cases = {how: way.job(job).case for how, way in MAMBA3.variants.items()}
    want = {"turned": {"angles": 4}, "rank 1": {"rank": 1}, "rank 1, turned": {"rank": 1, "angles": 4}}
    assert cases == {how: replace(job.case, **change) for how, change in want.items()}


SLOTS = "int64 slots"
TURNED = [f"{part}, {how}" for how in ("turned", "rank 1", "rank 1, turned") for part in ("touch", "flashstate")]
MEASURED: list[tuple[str, Job, str]] = [  # op, job, and beside what rows of flashstate it is
    ("mamba2", tiny_job("mamba2"), "touch read | vllm flashinfer mamba_ssm fla"),
    ("mamba2", tiny_job("mamba2", tokens=3), "touch read | once vllm flashinfer fla"),
    ("mamba2", tiny_job("mamba2", "every", tokens=3), "touch read | flashinfer"),
    ("mamba2", tiny_job("mamba2", "none", tokens=3), "read | once flashinfer"),
    ("gated_delta", tiny_job("gated_delta"), "touch read | split vllm flashinfer fla"),
    ("gated_delta", tiny_job("gated_delta", tokens=3), "touch read | once vllm flashinfer fla"),
    ("gated_delta", tiny_job("gated_delta", "every", tokens=3), "touch read | flashinfer"),
    ("gated_delta", tiny_job("gated_delta", "none", tokens=3), "read | once flashinfer fla"),
    ("mamba3", tiny_job("mamba3"), "touch read | turned mamba_ssm"),
    ("conv1d", tiny_job("conv1d", tokens=3), "touch read | early vllm"),
    ("span", tiny_job("span"), "touch read | early"),
    ("mamba2_replay", tiny_job("mamba2_replay", "uniform", tokens=2), "roof touch read |"),
    ("mamba2_replay", tiny_job("mamba2_replay", MOVES, tokens=2, format="float16", rounding="stochastic"), "|"),
    ("mamba2_replay", tiny_job("mamba2_replay", "every", tokens=2), "touch read |"),
    ("gated_delta_replay", tiny_job("gated_delta_replay", "uniform", tokens=2), "roof touch read | replayed"),
    ("gated_delta_replay", tiny_job("gated_delta_replay", tokens=2), "touch read | once stepped"),
]
WORDS = {
    "once": ["flashstate, at once"], "split": ["touch, split pool", "flashstate, split pool"], "turned": TURNED,
    "early": ["flashstate, early"],
    "replayed": ["roof, per channel", "flashstate, per channel"],
    "stepped": ["touch, per channel", "flashstate, per channel"],
}  # fmt: skip


@NEEDS_INTERPRETER
@pytest.mark.interpreted
@pytest.mark.parametrize(("op", "job", "beside"), MEASURED, ids=lambda value: str(getattr(value, "stored", value)))
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
    before, _, after = beside.partition("|")
    others = [row for word in after.split() for row in WORDS.get(word, [word])]
    found = [row.implementation for row in report.rows]
    assert found == [*before.split(), "flashstate", f"flashstate, {SLOTS}", *others]
    assert all((row.percent_of_roof is None) == (job.stored == MOVES) for row in report.rows)
    possible = {*(f"flashstate, {how}" for how in OPS[op].ways), *STAND_INS.get(op, {})}
    assert report.skipped.keys() == possible.difference(found)
    assert (False in exact) == ("once" in beside)  # checked with a budget of its own


@NEEDS_INTERPRETER
@pytest.mark.interpreted
@pytest.mark.parametrize("op", OPS)
def test_kernels_are_called_in_all_ways(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_in_the_interpreter(monkeypatch)
    stored: Stored = "uniform" if op in REPLAYS else "last"
    job, report = tiny_job(op, stored, batch=1, tokens=0 if op == "span" else 2), Report()
    with interpreted():
        measure_on_gpu(OPS[op], job, {}, CPU, report)
    skipped = {"gated_delta": {"flashstate, split pool"}, "gated_delta_replay": {"flashstate, at once"}}.get(op, set())
    assert report.skipped.keys() == skipped
    ours = [row.implementation for row in report.rows if row.implementation.startswith("flashstate, ")]
    assert ours == [f"flashstate, {how}" for how in OPS[op].ways if f"flashstate, {how}" not in skipped]


@pytest.mark.parametrize("op", CASES)
def test_what_follows_from_the_cases_of_an_op_alone_passes_the_check(op: str) -> None:
    usual, small = benched(op), next(case for case in CASES[op].quick if not case.packed and case.tokens <= 1)
    assert usual.name in OPS
    assert OPS[usual.name].case.sizes == usual.case.sizes
    jobs = replace(usual, case=small).jobs([replace(usual.grids[0], formats=[(small.format, small.rounding)])])
    for bind in (usual.bind, partial(usual.bind, bare=True)):
        measure.check(bind, measure.inputs_of(jobs[1].case, CPU))


# Whole runs

TWO = ("float32", "int8 stochastic")
THREE = ("", ", 3 tokens", ", 3 tokens, every stored")
RUNS: dict[str, tuple[list[str], list[str]]] = {
    "mamba2": (["--heads", "2", "--tokens", "1", "3"], [name + form for name in TWO for form in THREE]),
    "gated_delta_replay": (
        ["--heads", "2", "--groups", "2"],
        [
            f"2 heads, {name}{form}"
            for name in TWO
            for form in (
                *(f", {stored}" for stored in (*LIVE_BY_ONE, "in place")),
                *(f", {n} tokens, {stored}" for n in (4, 8) for stored in ("none folds", "stationary", "in place")),
                ", 4 tokens, every stored",
            )
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("op", RUNS)
def test_bench_on_a_cpu_measures_the_reference_and_says_so(
    op: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    csv_file, image = tmp_path / "cpu.csv", tmp_path / "cpu.png"
    sizes, labels = RUNS[op]
    sizes = [*sizes, "--rows", "4", "--cols", "16", "--batches", "1", "2", "--formats", "float32", "int8:stochastic"]
    files = ["--csv", str(csv_file), "--plot", str(image), "--commit", "abc"]
    assert main(["bench", op, "--device", "cpu", *sizes, *files]) == 0
    shown = output_of(capsys)
    provenance, rows = read_csv(csv_file)
    assert all(text in shown for text in ("reference, CPU", *labels))
    assert all(f"skipped {peer}: only compared on a GPU" in shown for peer in OPS[op].peers)
    assert {"flashstate", "commit", "device", "torch", "triton", "date"} <= provenance.keys()
    assert provenance["commit"] == "abc"
    assert sorted((row.label, row.batch) for row in rows) == sorted((label, n) for label in labels for n in (1, 2))
    assert {(row.op, row.implementation, row.percent_of_roof) for row in rows} == {(op, "reference, CPU", None)}
    assert image.read_bytes().startswith(b"\x89PNG")
    write_csv(tmp_path / "again.csv", rows, provenance)
    assert (tmp_path / "again.csv").read_bytes() == csv_file.read_bytes()


def test_bench_on_a_cpu_says_rows_as_they_come_and_ends_when_its_time_is_over(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ticks = iter((0.0, 1.0, 2.0, 3.0, *[31.0] * 3))
    monkeypatch.setattr(commands, "TimeLimit", partial(TimeLimit, clock=lambda: next(ticks)))
    monkeypatch.setattr(commands, "CPU_BATCHES", (2, 1))
    asked = ["bench", "--device", "cpu", "--formats", "float32", "int8", "--csv", str(tmp_path / "cpu.csv")]
    assert main([*asked, "--heads", "2", "--rows", "4", "--cols", "16"]) == 0
    out, said = capsys.readouterr()
    at = [said.index(f"{name}, reference, CPU: ") for name in ("float32, batch 1", "int8, batch 1", "float32, batch 2")]
    assert at == sorted(at)
    assert "int8, batch 2" not in said
    assert "on a CPU: 3 of 4 measurements in 31 s; --batches measures all of its own" in " ".join(out.split())
    _, rows = read_csv(tmp_path / "cpu.csv")
    assert [(row.format, row.batch) for row in rows] == [("float32", 1), ("float32", 2), ("int8", 1)]


def test_bench_times_nothing_when_flashstate_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "error_ratio", lambda *tensors: 7.0)
    sizes = ["--heads", "2", "--groups", "1", "--rows", "4", "--cols", "16", "--batches", "1"]
    assert main(["bench", "mamba2", "--device", "cpu", *sizes]) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "flashstate is wrong: its output is 7 times the error budget away from float64, for " in error
    assert "rows=4" in error


def test_bench_says_that_a_cpu_has_no_host_cost(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--host", "--device", "cpu"]) == 0
    assert run.NO_HOST_COST in output_of(capsys)


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_bench_on_a_gpu_measures_roofs_all_ways_and_the_cost_on_the_host(op: str, tmp_path: Path) -> None:
    sizes = ["--channels", "64"] if op == "conv1d" else ["--heads", "16", "--rows", "16"]
    sizes += ["--groups", "16"] if op == "gated_delta_replay" else []
    options = ["--device", "cuda", "--peers", "none", "--batches", "1", "64", "--formats", "bfloat16"]
    tokens = [] if op in ("span", *REPLAYS) else ["--tokens", "1", "4"]
    assert main(["bench", op, *sizes, *options, *tokens, "--csv", str(tmp_path / "gpu.csv")]) == 0
    provenance, rows = read_csv(tmp_path / "gpu.csv")
    assert provenance["host cost"].startswith("torch.add_ ")
    assert "; flashstate " in provenance["host cost"]
    live = (*LIVE, *LIVE_BY_ONE)
    for row in rows:
        found = [r.implementation for r in rows if (r.label, r.batch) == (row.label, row.batch)]
        states = {MOVES: [], "none": ["read"], **{how: ["roof", "touch", "read"] for how in live}}
        roofs = states.get(row.stored, ["touch", "read"])
        assert found[: len(roofs) + 2] == [*roofs, "flashstate", f"flashstate, {SLOTS}"]
        assert row.microseconds > 0
        assert (row.percent_of_roof is None) == (row.stored == MOVES)
        at_once = "at once" in OPS[op].variants and row.tokens > 1 and row.stored in ("last", "none")
        assert ("flashstate, at once" in found) == at_once


@pytest.mark.gpu
def test_the_cost_on_the_host_is_measured_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--host", "--device", "cuda", "--peers", "none"]) == 0
    shown = output_of(capsys)
    assert all(name in shown for name in ("torch.add_", "flashstate", "flashstate, plain tensors"))
