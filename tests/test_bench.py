"""The benchmark: jobs, what is checked before it is timed, cold slots, roofs, and a whole run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benching import NEEDS_INTERPRETER, TWO_MICROSECONDS
from torch import Tensor

from flashstate import Slots, State
from flashstate.bench import measure, run, timing
from flashstate.bench.jobs import Grid, Job, Shape, Stored
from flashstate.bench.mamba2 import MAMBA2, bind_flashstate
from flashstate.bench.measure import inputs_of, row_of, storing_for
from flashstate.bench.peers import Launch, MeasurementError, Step, Storing
from flashstate.bench.results import read_csv
from flashstate.bench.timing import Timing, cold_rows, cold_slots
from flashstate.cli import main
from flashstate.proof import Case, Inputs, make_inputs
from flashstate.state.formats import FORMATS, PORTABLE_FORMATS, label_of

CPU = torch.device("cpu")
TINY_SHAPE = ["--batches", "1", "2", "--heads", "2", "--rows", "4", "--cols", "16"]
TINY = ["--device", "cpu", *TINY_SHAPE]
TINY_CASE = Case(batch=2, heads=2, groups=1, rows=4, cols=16, slots=5)
FORMS = ("", ", 3 tokens", ", 3 tokens, snapshots")


@pytest.fixture(autouse=True)
def short_timing_on_a_wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "CPU_SECONDS", 0.001)
    monkeypatch.setenv("COLUMNS", "160")


# Jobs, and what a row says of them


def test_jobs_are_all_formats_tokens_and_batches_and_several_tokens_also_with_snapshots() -> None:
    jobs = MAMBA2.jobs([Grid((Shape(6, 2, 4, 16),), PORTABLE_FORMATS, (1, 3), batches=(1, 4))])
    assert len(set(jobs)) == len(jobs) == len(PORTABLE_FORMATS) * 3 * 2
    assert tuple(dict.fromkeys((job.case.format, job.case.rounding) for job in jobs)) == PORTABLE_FORMATS
    forms = [(job.case.tokens, job.stored, job.stores, job.case.batch) for job in jobs[:6]]
    assert forms == [(*form, n) for form in ((0, "last", 1), (3, "last", 1), (3, "snapshots", 3)) for n in (1, 4)]
    for case in (job.case for job in jobs):
        assert (case.heads, case.groups, case.rows, case.cols) == (6, 2, 4, 16)
        assert (case.x, case.bc, case.dt, case.parameters) == (*["bfloat16"] * 3, "float32")
        assert case.z
        assert case.slots > case.batch


@pytest.mark.parametrize(("name", "rounding"), PORTABLE_FORMATS)
def test_a_row_counts_every_byte_of_its_arguments_and_roofs_those_of_states(name: str, rounding: str) -> None:
    stored: tuple[Stored, ...] = ("last", "snapshots", "nothing")
    jobs = MAMBA2.jobs([Grid((Shape(2, 1, 4, 16),), [(name, rounding)], (1, 3), stored, (2,))])
    for job, form in zip(jobs, (*FORMS, ", 3 tokens, nothing stored"), strict=True):
        inputs = make_inputs(job.case, CPU)
        state, options = inputs.state, [t for t in inputs.options.values() if isinstance(t, Tensor)]
        states = 2 * (1 + job.stores)
        slot, scales = state.data[0].nbytes, 0 if state.scale is None else state.scale[0].nbytes
        moved = sum(t.nbytes for t in (*inputs.arguments.values(), *options, inputs.arguments["x"], inputs.slots))
        moved += states * (slot + scales) + (0 if rounding == "nearest" else 2 * 8)
        assert (job.counted_bytes, job.touched_bytes, job.read_bytes) == (moved, states * slot, 2 * slot)
        ours = row_of("flashstate", job, Timing(4.0, 3.0, 5.0), job.counted_bytes, TWO_MICROSECONDS)
        roof = row_of("touch", job, TWO_MICROSECONDS, job.touched_bytes, TWO_MICROSECONDS)
        assert (ours.gigabytes_per_second, roof.gigabytes_per_second) == (moved / 4e3, states * slot / 2e3)
        assert (ours.percent_of_roof, ours.spread, roof.percent_of_roof) == (50.0, 0.5, 100.0)
        assert ours.label == roof.label == label_of(name, rounding) + form
        assert (ours.op, ours.tokens, ours.stored) == ("mamba2", job.case.tokens or 1, job.stored)
        assert row_of("reference, CPU", job, TWO_MICROSECONDS, moved, None).percent_of_roof is None


def test_grids_that_overlap_and_take_other_sizes_give_every_job_once() -> None:
    grid = Grid((Shape(6, 2, 4, 16), Shape(6, 2, 8, 16)), (("int8", "nearest"),), (1, 3), ("last", "nothing"), (2,))
    jobs = MAMBA2.jobs([grid, grid.with_sizes({"heads": (2, 6), "rows": (4,)})])
    forms = [(*job.case.measured_axes, job.case.tokens, job.stored) for job in jobs]
    each = ((0, "last"), (3, "last"), (3, "nothing"))
    assert forms == [(*axes, *form) for axes in ((6, 2, 4, 16), (6, 2, 8, 16), (2, 2, 4, 16)) for form in each]


# What is checked


def test_bench_times_nothing_when_flashstate_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "error_ratio", lambda *tensors: 7.0)
    assert main(["bench", *TINY]) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "flashstate is wrong: its output is 7 times the error budget away from float64, for b1-h2g1-4x16" in error


def check_spoiled(name: str, rounding: str, spoil: Callable[[State], object]) -> None:
    """Check snapshots of three tokens that are spoiled after the step."""
    job = Job("mamba2", replace(TINY_CASE, format=name, rounding=rounding, tokens=3), "snapshots")

    def bind(inputs: Inputs, storing: Storing) -> Step:
        step = bind_flashstate(inputs, storing)
        return lambda slots: lambda: (step(slots)(), spoil(storing.snapshots))[0]

    measure.check(bind, make_inputs(job.case, CPU), storing_for(job, job.case.batch, CPU))


@pytest.mark.parametrize(("name", "rounding"), PORTABLE_FORMATS)
def test_snapshots_that_are_right_pass_the_check(name: str, rounding: str) -> None:
    check_spoiled(name, rounding, lambda snapshots: None)


@pytest.mark.parametrize("name", ["float32", "int8"])
@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda s: s.data.zero_(), id="not stored"),
        pytest.param(lambda s: s.data[:, -1].copy_(s.data[:, -2]), id="the state before"),
        pytest.param(lambda s: s.data.copy_(s.data.flip(0)), id="rows of others"),
        pytest.param(lambda s: s.data[-1, -1, -1, -1].zero_(), id="the last row of a state not stored"),
        pytest.param(lambda s: s.data[:, 0].zero_(), id="an earlier token not stored"),
    ],
)
def test_snapshots_that_are_wrong_fail_the_check(name: str, spoil: Callable[[State], object]) -> None:
    with pytest.raises(MeasurementError, match=r"^wrong: its snapshot of token \d is .* times the error budget"):
        check_spoiled(name, "nearest", spoil)


def test_snapshots_with_wrong_scales_fail_the_check() -> None:
    with pytest.raises(MeasurementError, match=r"^wrong: its snapshot of token \d is .* times the error budget"):
        check_spoiled("int16", "stochastic", lambda snapshots: snapshots.scale.mul_(1.01))


@pytest.mark.parametrize("stored", ["nothing", "snapshots"])
def test_a_step_that_stores_where_it_should_only_read_fails_the_check(stored: Stored) -> None:
    job = Job("mamba2", replace(TINY_CASE, tokens=3), stored)
    storing = storing_for(job, job.case.batch, CPU)
    measure.check(bind_flashstate, make_inputs(job.case, CPU), storing)

    def bind(inputs: Inputs, storing: Storing) -> Step:
        def step(slots: Slots) -> Launch:
            launch = bind_flashstate(inputs, storing)(slots)
            return lambda: (launch(), inputs.state.data[-1].neg_())[0]

        return step

    with pytest.raises(MeasurementError, match=r"^wrong: it changes states that are only to be read$"):
        measure.check(bind, make_inputs(job.case, CPU), storing)


def test_results_are_checked_on_slots_that_no_library_takes_for_padding() -> None:
    for spare in range(1, 6):
        inputs = inputs_of(replace(TINY_CASE, batch=4, slots=4 + spare), CPU)
        slots = inputs.slots.tolist()
        assert 0 not in slots
        assert len(set(slots)) == 4
        assert inputs.slots.dtype == torch.int32
        measure.check(bind_flashstate, inputs)


# Cold slots and roofs


def test_launches_meet_cold_slots_and_cold_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "COLD_BYTES", 1000)
    size, slots = cold_slots(3, 40, CPU)
    rows = cold_rows(3, 10, len(slots), CPU)
    assert (size, len(slots), len(rows)) == (1 + 25, timing.MIN_LAUNCHES, timing.MIN_LAUNCHES)
    for numbers, first, count in ((slots, 1, 25), (rows, 0, 10)):
        assert {(len(launch), launch.dtype) for launch in numbers} == {(3, torch.int32)}
        flat = torch.cat(numbers).tolist()
        assert sorted(flat[:count]) == list(range(first, first + count))
        assert flat == [flat[i % count] for i in range(len(flat))]


def random_bytes(*shape: int, dtype: torch.dtype) -> Tensor:
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).view(dtype)


@NEEDS_INTERPRETER
@pytest.mark.interpreted
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_touch_flips_sign_bits_of_words_in_the_slots_it_is_given_and_no_other(dtype: torch.dtype, layers: int) -> None:
    from flashstate.bench.roofs import touch

    pages = random_bytes(6, layers, 2, 5, 28, dtype=dtype)
    want = pages.view(torch.int32).clone()
    want[[4, 1], -1] ^= -(1 << 31)
    touch(pages[:, -1], Slots(torch.tensor([4, 1])), None, 32, 4)
    assert torch.equal(pages.view(torch.int32), want)


@NEEDS_INTERPRETER
@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_touch_copies_slots_to_every_token_of_their_rows_and_nothing_else(dtype: torch.dtype) -> None:
    from flashstate.bench.roofs import touch

    data, copies = random_bytes(6, 2, 5, 28, dtype=dtype), random_bytes(4, 3, 2, 5, 28, dtype=dtype)
    before, want = data.view(torch.int32).clone(), copies.view(torch.int32).clone()
    want[[3, 0]] = before[[4, 1]][:, None]
    touch(data, Slots(torch.tensor([4, 1]), snapshot_rows=torch.tensor([3, 0])), copies, 32, 4)
    assert torch.equal(copies.view(torch.int32), want)
    assert torch.equal(data.view(torch.int32), before)


@NEEDS_INTERPRETER
@pytest.mark.interpreted
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_read_sees_every_word_of_the_slots_it_is_given_and_writes_no_slot(dtype: torch.dtype, layers: int) -> None:
    from flashstate.bench.roofs import read

    data = random_bytes(6, layers, 2, 5, 28, dtype=dtype)[:, -1]
    words = data.view(torch.int32).clone()
    blocks = [block for slot in (4, 1) for block in words[slot].flatten().split(32)]  # the last of a slot is shorter
    largest = torch.zeros(len(blocks), dtype=torch.int32)
    read(data, Slots(torch.tensor([4, 1])), largest, 32, 4)
    assert torch.equal(largest, torch.stack([block.max() for block in blocks]))
    assert torch.equal(data.view(torch.int32), words)


# A whole run


def test_bench_on_a_cpu_measures_the_reference_and_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    csv_file, image = tmp_path / "cpu.csv", tmp_path / "cpu.png"
    options = ["--formats", "float32", "int8:stochastic", "--tokens", "1", "3", "--commit", "abc", "--peers", "fla"]
    assert main(["bench", "mamba2", *TINY, *options, "--csv", str(csv_file), "--plot", str(image)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    provenance, rows = read_csv(csv_file)
    labels = [name + form for name in ("float32", "int8 stochastic") for form in FORMS]
    assert all(text in shown for text in ("reference, CPU", "skipped fla: only compared on a GPU", *labels))
    assert {"flashstate", "commit", "device", "torch", "triton", "date"} <= provenance.keys()
    assert provenance["commit"] == "abc"
    assert [(row.label, row.batch) for row in rows] == [(label, batch) for label in labels for batch in (1, 2)]
    assert all((row.op, row.implementation) == ("mamba2", "reference, CPU") for row in rows)
    assert all(row.percent_of_roof is None for row in rows)
    assert image.read_bytes().startswith(b"\x89PNG")


def test_bench_says_that_a_cpu_has_no_host_cost(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--host", "--device", "cpu"]) == 0
    assert run.NO_HOST_COST in " ".join(capsys.readouterr().out.split())


@pytest.mark.gpu
def test_bench_on_a_gpu_measures_both_roofs_flashstate_and_the_cost_on_the_host(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ["--device", "cuda", "--formats", "float32", "int8:stochastic", "--tokens", "1", "2", "--peers", "none"]
    assert main(["bench", *TINY_SHAPE, *options, "--csv", str(tmp_path / "gpu.csv")]) == 0
    provenance, rows = read_csv(tmp_path / "gpu.csv")
    names = ("touch", "read", "flashstate")
    assert [row.implementation for row in rows] == [*names] * 2 * 3 * 2  # formats, forms, batches
    assert all(row.microseconds > 0 and row.percent_of_roof is not None for row in rows)
    assert provenance["host cost"].startswith("torch.add_ ")
    assert "; flashstate " in provenance["host cost"]
    assert "skipped" not in capsys.readouterr().out


@pytest.mark.gpu
def test_the_cost_on_the_host_is_measured_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--host", "--device", "cuda", "--peers", "none"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert all(name in shown for name in ("torch.add_", "flashstate", "flashstate, plain tensors"))
