"""The command line, and what it runs: info, check and demo; tests/test_bench.py has bench."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from flashstate.cli import main
from flashstate.demo import BATCH, SLOTS, Traffic, one_thread, run_demo
from flashstate.info import versions
from flashstate.laws import LawBroken
from flashstate.testing import Case

CPU = torch.device("cpu")
TINY = ["--device", "cpu", "--batches", "1", "2", "--heads", "2", "--rows", "4", "--cols", "16"]


@pytest.fixture(autouse=True)
def one_cpu_thread() -> Iterator[None]:
    """Several threads on tensors this small are slow, and very slow where tests run side by side."""
    with one_thread():
        yield


def output_of(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed, without the line breaks of a narrow terminal."""
    return " ".join(capsys.readouterr().out.split())


def test_info_shows_versions_formats_and_the_configs_of_a_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--gpu", "Some GPU", "--format", "float16", "--rounding", "stochastic", "--batch", "3"]) == 0
    out = output_of(capsys)
    assert all(f"{name} {version}" in out for name, version in versions().items())
    assert "bfloat16 2 nearest, stochastic" in out
    assert "64 x 128, float16, stochastic, on Some GPU" in out
    assert "3 48" in out
    assert "heuristic" in out


def test_info_without_a_gpu_shows_the_table_of_another(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["info"]) == 0
    out = output_of(capsys)
    assert "no GPU: ops run the reference on the CPU" in out
    assert "on NVIDIA H200" in out


def test_the_program_runs_without_triton_as_a_module() -> None:
    code = (
        "import sys; sys.modules['triton'] = None; sys.argv = ['flashstate', 'info', '--gpu', 'none']; import runpy; "
    )
    code += "runpy.run_module('flashstate', run_name='__main__')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "triton      not installed" in result.stdout


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0
    assert capsys.readouterr().out == f"flashstate {versions()['flashstate']}\n"


@pytest.mark.parametrize(
    "argv", [[], ["nonsense"], ["info", "--batch", "0"], ["info", "--format", "float7"], ["demo", "--steps", "many"]]
)
def test_what_cannot_be_parsed_exits_with_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(argv)
    assert exit.value.code == 2


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["info", "--rounding", "stochastic"], "float32 has no rounding 'stochastic', only nearest"),
        (["check", "--device", "tpu"], "--device must be cpu, cuda or cuda:N, got 'tpu'"),
        (["check", "--device", "cuda:99"], "--device cuda:99: this machine has"),
        (["bench", *TINY, "--formats", "float7"], "there is no format 'float7'"),
        (["bench", *TINY, "--groups", "3"], "the number of groups must divide the 2 heads, got 3"),
        (["bench", *TINY, "--csv", "no/such/folder/a.csv"], "to write a.csv to"),
        (["bench", "--from-csv", "missing.csv"], "No such file"),
        (["bench", "--from-csv", __file__], "is not a file that flashstate bench wrote"),
    ],
)
def test_a_bad_option_is_one_line_and_exits_with_2(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1


def test_check_proves_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--quick", "--device", "cpu"]) == 0
    out = output_of(capsys)
    assert "laws hold for the reference on the CPU." in out
    assert "broken" not in out


def test_check_reports_broken_laws_and_crashes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(case: Case, device: torch.device) -> None:
        raise LawBroken("3 of [4] elements differ")

    def crashes(case: Case, device: torch.device) -> None:
        raise RuntimeError("out of luck")

    laws = {"fine": lambda case, device: None, "is broken": breaks, "does crash": crashes}
    monkeypatch.setattr("flashstate.check.laws_for", lambda device: laws)
    monkeypatch.setattr("flashstate.check.pairs", itertools.product)
    assert main(["check", "--quick", "--device", "cpu"]) == 1
    out = output_of(capsys)
    assert "fine 5 holds" in out
    assert "is broken 5 broken by 5" in out
    assert f"{Case()} 3 of [4] elements differ" in out
    assert "RuntimeError: out of luck" in out
    assert "2 of 3 laws are broken by the reference on the CPU." in out


def test_requests_wait_for_slots_and_never_share_one() -> None:
    traffic, admitted, fullest, emptiest = Traffic(500, random.Random(0)), 0, 0, BATCH
    for _ in range(500):
        before = set(traffic.left)
        taken = traffic.admit()
        assert not before & set(taken)
        slots = traffic.batch(CPU).tolist()
        running = [slot for slot in slots if slot >= 0]
        assert len(slots) == BATCH
        assert sorted(running) == sorted(before | set(taken))
        admitted, fullest, emptiest = admitted + len(taken), max(fullest, len(running)), min(emptiest, len(running))
        traffic.finish()
    assert admitted > SLOTS == fullest > emptiest


def test_in_the_demo_stochastic_bfloat16_drifts_less_than_nearest() -> None:
    rows = {(row.format, row.rounding): row for row in run_demo(CPU, steps=150, seed=0)}
    assert rows["float32", "nearest"].output_error < 1e-5
    assert rows["bfloat16", "stochastic"].state_error < rows["bfloat16", "nearest"].state_error
    assert rows["bfloat16", "nearest"].bytes_per_request * 2 == rows["float32", "nearest"].bytes_per_request
    assert all(row.tokens_per_second > 0 for row in rows.values())


def test_demo_prints_a_row_per_format_and_repeats_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--device", "cpu", "--steps", "5"]) == 0
    out = output_of(capsys)
    assert all(name in out for name in ("float32 16,384", "bfloat16 stochastic 8,200", "float16 stochastic 8,200"))
    assert "with stochastic rounding than with rounding to nearest" in out
    first, second = (run_demo(CPU, steps=5, seed=1) for _ in range(2))
    assert [row.state_error for row in first] == [row.state_error for row in second]
