"""The benchmark: what is checked before it is timed, what is skipped and why, and what is left in files."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from flashstate import State
from flashstate.bench import plot, run, timing
from flashstate.bench.peers import PEERS, MeasurementError, Step
from flashstate.bench.results import Row, read_csv
from flashstate.bench.run import Job, bind_flashstate, jobs_of, snapshots_for
from flashstate.bench.timing import Timing, cold_rows, cold_slots
from flashstate.cli import main
from flashstate.ops.mamba2 import mamba2_step
from flashstate.state.formats import FORMATS, PORTABLE_FORMATS, label_of
from flashstate.testing import Case, Inputs, interpreted, make_inputs

CPU = torch.device("cpu")
RESULTS = sorted((Path(__file__).parent.parent / "results").glob("*.csv"))
PEER_MODULES = {
    "vllm": "vllm.model_executor.layers.mamba.ops.mamba_ssm",
    "flashinfer": "flashinfer.mamba",
    "mamba_ssm": "mamba_ssm.ops.triton.selective_state_update",
}
TINY = ["--device", "cpu", "--batches", "1", "2", "--heads", "2", "--rows", "4", "--cols", "16"]
TINY_CASE = Case(batch=2, heads=2, groups=1, rows=4, cols=16, slots=5)
FORMS = ("", ", 3 tokens", ", 3 tokens, snapshots")
SHAPE = (16, 1, 64, 128)
TWO_MICROSECONDS = Timing(2.0, 1.9, 2.2)


@pytest.fixture(autouse=True)
def short_timing_on_a_wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "CPU_SECONDS", 0.001)
    monkeypatch.setenv("COLUMNS", "160")


# Jobs, and what a row says of them


def test_jobs_are_all_formats_tokens_and_batches_and_several_tokens_also_with_snapshots() -> None:
    jobs = jobs_of(PORTABLE_FORMATS, (1, 4), (1, 3), (6, 2, 4, 16))
    assert len(set(jobs)) == len(jobs) == len(PORTABLE_FORMATS) * 3 * 2
    assert tuple(dict.fromkeys((job.case.format, job.case.rounding) for job in jobs)) == PORTABLE_FORMATS
    forms = [(job.case.tokens, job.snapshots, job.stores, job.case.batch) for job in jobs[:6]]
    assert forms == [(*form, batch) for form in ((0, False, 1), (3, False, 1), (3, True, 3)) for batch in (1, 4)]
    for case in (job.case for job in jobs):
        assert (case.heads, case.groups, case.rows, case.cols) == (6, 2, 4, 16)
        assert (case.x, case.bc, case.dt, case.parameters) == (*["bfloat16"] * 3, "float32")
        assert case.z
        assert case.slots > case.batch


@pytest.mark.parametrize(("name", "rounding"), PORTABLE_FORMATS)
def test_a_row_counts_every_byte_of_its_arguments_and_the_roof_those_of_states(name: str, rounding: str) -> None:
    for job, form in zip(jobs_of([(name, rounding)], [2], [1, 3], (2, 1, 4, 16)), FORMS, strict=True):
        inputs = make_inputs(job.case, CPU)
        state, options = inputs.state, [t for t in inputs.options.values() if isinstance(t, Tensor)]
        states = 2 * (1 + job.stores)
        slot, scales = state.data[0].nbytes, 0 if state.scale is None else state.scale[0].nbytes
        moved = sum(t.nbytes for t in (*inputs.arguments.values(), *options, inputs.arguments["x"], inputs.slots))
        moved += states * (slot + scales) + (0 if rounding == "nearest" else 2 * 8)
        ours = run.row_of("flashstate", job, Timing(4.0, 3.0, 5.0), TWO_MICROSECONDS)
        roof = run.row_of("touch", job, TWO_MICROSECONDS, TWO_MICROSECONDS)
        assert (ours.gigabytes_per_second, roof.gigabytes_per_second) == (moved / 4e3, states * slot / 2e3)
        assert (ours.percent_of_touch, ours.spread, roof.percent_of_touch) == (50.0, 0.5, 100.0)
        assert ours.label == roof.label == label_of(name, rounding) + form
        assert (ours.tokens, ours.snapshots) == (job.case.tokens or 1, int(job.snapshots))
        assert run.row_of("reference, CPU", job, TWO_MICROSECONDS, None).percent_of_touch is None


# What is left in files


def test_bench_on_a_cpu_writes_what_it_reads_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    csv_file, image = tmp_path / "cpu.csv", tmp_path / "cpu.png"
    options = ["--formats", "float32", "int8:stochastic", "--tokens", "1", "3", "--commit", "abc"]
    assert main(["bench", *TINY, *options, "--csv", str(csv_file), "--plot", str(image)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    provenance, rows = read_csv(csv_file)
    labels = [name + form for name in ("float32", "int8 stochastic") for form in FORMS]
    assert all(text in shown for text in ("reference, CPU", *labels))
    assert {"flashstate", "commit", "device", "torch", "triton", "date"} <= provenance.keys()
    assert provenance["commit"] == "abc"
    assert [(row.label, row.batch) for row in rows] == [(label, batch) for label in labels for batch in (1, 2)]
    assert all(row.implementation == "reference, CPU" and row.percent_of_touch is None for row in rows)
    assert image.read_bytes().startswith(b"\x89PNG")


def row(implementation: str, name: str, rounding: str, batch: int, tokens: int = 1, snapshots: int = 0) -> Row:
    return Row(implementation, name, rounding, batch, *SHAPE, tokens, snapshots, 3.2 * batch, 0.01, 1310.0, 91.4)


def test_bench_redraws_a_file_without_measuring(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = [row(name, "int8", "nearest", 4, *form) for form in ((), (8, 1)) for name in ("touch", "flashstate")]
    run.write_csv(tmp_path / "gpu.csv", rows, {"device": "Some GPU"})
    monkeypatch.setattr(run, "bench", None)
    assert main(["bench", "--from-csv", str(tmp_path / "gpu.csv"), "--plot", str(tmp_path / "gpu.png")]) == 0
    assert read_csv(tmp_path / "gpu.csv") == ({"device": "Some GPU"}, rows)
    out = " ".join(capsys.readouterr().out.split())
    assert "16 heads, 1 group, 64 x 128, on Some GPU" in out
    assert "int8, 8 tokens, snapshots" in out
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_with_other_columns_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "old.csv").write_text("implementation,format,rounding,batch\nflashstate,float32,nearest,4\n")
    assert main(["bench", "--from-csv", str(tmp_path / "old.csv")]) == 2
    assert "is not a file that flashstate bench wrote: it wants the columns implementation" in capsys.readouterr().err


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_the_results_in_the_tree_can_be_read(path: Path) -> None:
    provenance, rows = read_csv(path)
    assert provenance["device"]
    assert rows


def test_bench_says_before_measuring_how_to_get_matplotlib(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(run, "bench", None)
    assert main(["bench", *TINY, "--plot", str(tmp_path / "a.png")]) == 2
    assert "pip install 'flashstate[plot]'" in capsys.readouterr().err


def lines_drawn(rows: Sequence[Row], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The lines of every panel of the picture of these rows, by label."""
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure))
    plot.draw(rows, {}, Path("not written"))
    return [{line.get_label(): line for line in panel.get_lines()} for panel in figures[0].axes]


def test_a_picture_has_a_colour_per_format_and_hollow_markers_for_stochastic_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every = product(("touch", "flashstate", "vllm"), PORTABLE_FORMATS, (4, 1), ((1, 0), (4, 0), (4, 1)))
    rows = [row(name, *fmt, batch, *form) for name, fmt, batch, form in every]
    percents, times = lines_drawn(rows, monkeypatch)
    labels = [f"{name}, {label_of(*fmt)}" for name, fmt in product(("flashstate", "vllm"), PORTABLE_FORMATS)]
    assert times.keys() == {"touch, the roof", *labels}
    assert percents.keys() >= {*labels}
    colours: dict[str, str] = {}
    for panel, (name, rounding) in product((percents, times), PORTABLE_FORMATS):
        ours, theirs = (panel[f"{who}, {label_of(name, rounding)}"] for who in ("flashstate", "vllm"))
        colour = colours.setdefault(name, ours.get_color())
        assert ours.get_color() == theirs.get_color() == colour
        assert ours.get_markerfacecolor() == ("white" if rounding == "stochastic" else colour)
        assert (ours.get_linestyle(), theirs.get_linestyle()) == ("-", "--")
        assert ours.get_marker() != theirs.get_marker()
        assert list(ours.get_xdata()) == [1, 4]
    assert len(set(colours.values())) == len(FORMATS)


def test_a_picture_of_several_tokens_only_shows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row("flashstate", "int8", "stochastic", 1, 4, snapshots) for snapshots in (0, 1)]
    for panel in lines_drawn(rows, monkeypatch):
        assert panel.keys() >= {f"flashstate, int8 stochastic, 4 tokens{form}" for form in ("", ", snapshots")}


# What is checked


def test_bench_times_nothing_when_flashstate_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "error_ratio", lambda *tensors: 7.0)
    assert main(["bench", *TINY]) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "flashstate is wrong: its output is 7 times the error budget away from float64, for b1-h2g1-4x16" in error


def check_spoiled(name: str, rounding: str, spoil: Callable[[State], object]) -> None:
    """Check snapshots of three tokens that are spoiled after the step."""
    job = Job(replace(TINY_CASE, format=name, rounding=rounding, tokens=3), snapshots=True)
    kept = snapshots_for(job, job.case.batch, CPU)
    assert kept is not None

    def bind(inputs: Inputs, snapshots: State) -> Step:
        step = bind_flashstate(inputs, snapshots)
        return lambda slots: (step(slots), spoil(snapshots))[0]

    run.check(partial(bind, snapshots=kept), make_inputs(job.case, CPU), kept)


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


# Peers


def selective_state_update(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor, z: Tensor, dt_bias: Tensor, dt_softplus: bool,
    state_batch_indices: Tensor, out: Tensor | None = None, null_block_id: int = 0,
) -> Tensor:  # fmt: skip
    """What a peer does, with the shapes it insists on."""
    assert x.shape == dt.shape == z.shape
    assert A.shape == state.shape[1:]
    assert D.shape == dt_bias.shape == state.shape[1:3]
    slots = torch.where(state_batch_indices == null_block_id, -1, state_batch_indices)
    options: dict[str, Any] = {"D": D, "z": z, "dt_bias": dt_bias, "dt_softplus": dt_softplus}
    return mamba2_step(state, x, dt, A, B, C, **options, slots=slots, out=out)


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, update: Callable[..., Tensor]) -> None:
    """Install a library with this selective_state_update."""
    module = ModuleType(PEER_MODULES[name])
    module.selective_state_update = update  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, PEER_MODULES[name], module)


def without_null_block(**arguments: Any) -> Tensor:
    return selective_state_update(**arguments, null_block_id=-1)


def time_peer(name: str, inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> Timing:
    monkeypatch.setattr(run, "time_launches", run_twice)
    return run.time_peer(PEERS[name], inputs, inputs.fresh(), [inputs.slots] * 3)


def run_twice(launches: Sequence[Callable[[], object]]) -> Timing:
    """In the place of a CUDA graph."""
    for launch in launches[:2]:
        launch()
    return TWO_MICROSECONDS


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_that_is_right_is_timed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, name, selective_state_update if name == "vllm" else without_null_block)
    inputs = make_inputs(replace(TINY_CASE, dt="bfloat16", batch=5), CPU)  # all slots, so slot 0 too
    assert time_peer(name, inputs, monkeypatch).median == 2.0


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_that_is_wrong_is_not_timed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets_the_state(state: Tensor, **arguments: Any) -> Tensor:
        return without_null_block(state=state.clone(), **arguments)

    def doubles_the_output(**arguments: Any) -> Tensor:
        return without_null_block(**arguments).mul_(2)

    for update, part in ((forgets_the_state, "state"), (doubles_the_output, "output")):
        pretend(monkeypatch, name, update)
        with pytest.raises(MeasurementError, match=f"wrong: its {part} is .* times the error budget"):
            time_peer(name, make_inputs(TINY_CASE, CPU), monkeypatch)


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_is_skipped_with_a_reason(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(**arguments: Any) -> Tensor:
        raise AssertionError("only for batches of 8")

    monkeypatch.setitem(sys.modules, PEER_MODULES[name], None)
    with pytest.raises(MeasurementError, match=r"cannot be imported: .*" + PEER_MODULES[name].split(".")[0]):
        time_peer(name, make_inputs(TINY_CASE, CPU), monkeypatch)
    pretend(monkeypatch, name, refuses)
    with pytest.raises(MeasurementError, match="failed: AssertionError: only for batches of 8"):
        time_peer(name, make_inputs(TINY_CASE, CPU), monkeypatch)
    for change, reason in (
        ({"format": "float16", "rounding": "stochastic"}, "where states are rounded to nearest, not stochastic"),
        ({"format": "int8"}, "where states have no scales"),
        ({"format": "float8_e4m3fn", "rounding": "stochastic"}, "where states have no scales"),
        ({"tokens": 3}, "with one token per call"),
        ({"tokens": 1}, "with one token per call"),
    ):
        with pytest.raises(MeasurementError, match=f"^only compared {reason}$"):
            time_peer(name, make_inputs(replace(TINY_CASE, **change), CPU), monkeypatch)


# The roof


def test_launches_meet_cold_slots_and_cold_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "COLD_BYTES", 1000)
    size, slots = cold_slots(3, 40, CPU)
    rows = cold_rows(3, 10, len(slots), CPU)
    assert (size, len(slots), len(rows)) == (25, timing.MIN_LAUNCHES, timing.MIN_LAUNCHES)
    for numbers, count in ((slots, size), (rows, 10)):
        assert {(len(launch), launch.dtype) for launch in numbers} == {(3, torch.int32)}
        flat = torch.cat(numbers).tolist()
        assert sorted(flat[:count]) == list(range(count))
        assert flat == [flat[i % count] for i in range(len(flat))]


needs_interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None,
    reason="needs triton and TRITON_INTERPRET=1",
)


def random_bytes(*shape: int, dtype: torch.dtype) -> Tensor:
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).view(dtype)


@needs_interpreter
@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_touch_flips_sign_bits_of_words_in_the_slots_it_is_given_and_no_other(dtype: torch.dtype) -> None:
    from flashstate.bench.roofs import touch

    data = random_bytes(6, 2, 5, 28, dtype=dtype)
    want = data.view(torch.int32).clone()
    want[[4, 1]] ^= -(1 << 31)
    touch(data, torch.tensor([4, 1], dtype=torch.int32), None, None, 32, 4)
    assert torch.equal(data.view(torch.int32), want)


@needs_interpreter
@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_touch_copies_slots_to_every_token_of_their_rows_and_nothing_else(dtype: torch.dtype) -> None:
    from flashstate.bench.roofs import touch

    data, copies = random_bytes(6, 2, 5, 28, dtype=dtype), random_bytes(4, 3, 2, 5, 28, dtype=dtype)
    before, want = data.view(torch.int32).clone(), copies.view(torch.int32).clone()
    want[[3, 0]] = before[[4, 1]][:, None]
    touch(data, torch.tensor([4, 1], dtype=torch.int32), copies, torch.tensor([3, 0], dtype=torch.int32), 32, 4)
    assert torch.equal(copies.view(torch.int32), want)
    assert torch.equal(data.view(torch.int32), before)


@needs_interpreter
@pytest.mark.interpreted
@pytest.mark.parametrize("form", FORMS)
def test_on_a_gpu_flashstate_and_right_peers_are_measured_beside_the_roof(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashstate.bench import roofs

    for module in (run, timing):
        monkeypatch.setattr(module, "COLD_BYTES", 1 << 12)
    for module in (run, roofs):
        monkeypatch.setattr(module, "time_launches", run_twice)
    for module_name in PEER_MODULES.values():
        monkeypatch.setitem(sys.modules, module_name, None)
    pretend(monkeypatch, "mamba_ssm", without_null_block)
    case = replace(TINY_CASE, tokens=3 if form else 0)
    report = run.Report()
    with interpreted():
        run.measure_on_gpu(Job(case, snapshots="snapshots" in form), CPU, report)
    measured = ("touch", "flashstate") if form else ("touch", "flashstate", "mamba_ssm")
    assert [(row.implementation, row.percent_of_touch) for row in report.rows] == [(name, 100.0) for name in measured]
    assert {row.label for row in report.rows} == {f"float32{form}"}
    assert report.skipped.keys() == PEERS.keys() - set(measured)
