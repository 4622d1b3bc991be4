"""The benchmark: what is checked before it is timed, what is skipped and why, and what is left in files."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from flashstate.bench import run, timing
from flashstate.bench.peers import PEERS, MeasurementError
from flashstate.bench.results import Row, read_csv
from flashstate.bench.timing import Timing
from flashstate.cli import main
from flashstate.ops.mamba2 import mamba2_step
from flashstate.testing import Case, Inputs, interpreted, make_inputs

CPU = torch.device("cpu")
PEER_MODULES = {
    "vllm": "vllm.model_executor.layers.mamba.ops.mamba_ssm",
    "flashinfer": "flashinfer.mamba",
    "mamba_ssm": "mamba_ssm.ops.triton.selective_state_update",
}
TINY = ["--device", "cpu", "--batches", "1", "2", "--heads", "2", "--rows", "4", "--cols", "16"]
TINY_CASE = Case(batch=2, heads=2, groups=1, rows=4, cols=16, slots=5)


@pytest.fixture(autouse=True)
def short_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "CPU_SECONDS", 0.001)


def test_bench_on_a_cpu_writes_what_it_reads_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    csv_file, image = tmp_path / "cpu.csv", tmp_path / "cpu.png"
    formats = ["--formats", "float32", "float16:stochastic"]
    assert main(["bench", *TINY, *formats, "--csv", str(csv_file), "--plot", str(image)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    provenance, rows = read_csv(csv_file)
    assert "reference, CPU" in shown
    assert {"flashstate", "commit", "device", "torch", "triton", "date"} <= provenance.keys()
    assert [(row.label, row.batch) for row in rows] == [
        (label, batch) for label in ("float32", "float16 stochastic") for batch in (1, 2)
    ]
    assert all(row.implementation == "reference, CPU" and row.percent_of_touch is None for row in rows)
    assert image.read_bytes().startswith(b"\x89PNG")


def test_bench_redraws_a_file_without_measuring(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shape = (4, 16, 1, 64, 128)
    rows = [
        Row("touch", "float32", "nearest", *shape, 3.2, 0.01, 1310.0, 100.0),
        Row("flashstate", "float32", "nearest", *shape, 3.5, 0.01, 1206.0, 91.4),
    ]
    run.write_csv(tmp_path / "gpu.csv", rows, {"device": "Some GPU"})
    monkeypatch.setattr(run, "bench", None)
    assert main(["bench", "--from-csv", str(tmp_path / "gpu.csv"), "--plot", str(tmp_path / "gpu.png")]) == 0
    assert read_csv(tmp_path / "gpu.csv") == ({"device": "Some GPU"}, rows)
    assert "16 heads, 1 group, 64 x 128, on Some GPU" in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")


def test_bench_says_before_measuring_how_to_get_matplotlib(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(run, "bench", None)
    assert main(["bench", *TINY, "--plot", str(tmp_path / "a.png")]) == 2
    assert "pip install 'flashstate[plot]'" in capsys.readouterr().err


def test_bench_times_nothing_when_flashstate_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "error_ratio", lambda *tensors: 7.0)
    assert main(["bench", *TINY]) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "flashstate is wrong: its output is 7 times the error budget away from float64, for b1-h2g1-4x16" in error


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
    return Timing(2.0, 1.9, 2.2)


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
    stochastic = replace(TINY_CASE, format="float16", rounding="stochastic")
    with pytest.raises(MeasurementError, match="rounded to nearest, not stochastic"):
        time_peer(name, make_inputs(stochastic, CPU), monkeypatch)


needs_interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None,
    reason="needs triton and TRITON_INTERPRET=1",
)


@needs_interpreter
@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_touch_negates_the_slots_it_is_given_and_no_other(dtype: torch.dtype) -> None:
    from flashstate.bench.roofs import touch

    data = torch.randn(6, 2, 5, 30).to(dtype)
    want = data.clone()
    want[[4, 1]] *= -1
    touch(data, 128, 4, torch.tensor([4, 1], dtype=torch.int32))
    assert torch.equal(data, want)


@needs_interpreter
@pytest.mark.interpreted
def test_on_a_gpu_flashstate_and_right_peers_are_measured_beside_the_roof(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashstate.bench import roofs

    monkeypatch.setattr(timing, "COLD_BYTES", 1 << 12)
    for module in (run, roofs):
        monkeypatch.setattr(module, "time_launches", run_twice)
    for module_name in PEER_MODULES.values():
        monkeypatch.setitem(sys.modules, module_name, None)
    pretend(monkeypatch, "mamba_ssm", without_null_block)
    report = run.Report()
    with interpreted():
        run.measure_on_gpu(TINY_CASE, CPU, report)
    assert [(row.implementation, row.percent_of_touch) for row in report.rows] == [
        (name, 100.0) for name in ("touch", "flashstate", "mamba_ssm")
    ]
    assert report.rows[0].gigabytes_per_second == 2 * TINY_CASE.batch * TINY_CASE.slot_bytes / 2e3
    assert report.skipped.keys() == {"vllm", "flashinfer"}
