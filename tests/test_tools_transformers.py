"""tools.transformers_speed: roofs, rows, clocks and shares of kernels, and a run with tiny models on a CPU."""

from pathlib import Path

import pytest

from tools.transformers_models import MODELS, kernels_of
from tools.transformers_rows import Machine, SpeedRow, measured_row, profile_table, read_speed, speed_table
from tools.transformers_speed import main
from tools.transformers_timing import Measured, Share, group_of, shares_of
from tools.transformers_ways import WAYS, Clock

PLACE = SpeedRow("mamba2", "float32", 4, 2048, 0)
MACHINE = Machine(bytes_per_second=1000.0, memory=100, weights=20, weights_read=10.0)


def measured(tokens_per_step: float = 1.0) -> Measured:
    return Measured(50.0, 2.0, 0.1, tokens_per_step, state_bytes=3, attention_bytes=1, peak_bytes=2**30)


def test_a_row_has_a_roof_of_weights_attention_and_states_and_counts_tokens_of_the_batch() -> None:
    row = measured_row(PLACE, measured(), 1.0, MACHINE)
    assert row.roof_ms == pytest.approx((10 + 4 * (2 * 3 + 1)) / 1000 * 1e3)
    assert row.times_roof == pytest.approx(2.0 / row.roof_ms)
    assert (row.tokens_per_second, row.fits, row.peak_gib) == (2000.0, 20, 1.0)
    assert measured_row(PLACE, measured(), 0.5, MACHINE).roof_ms == pytest.approx((10 + 4 * (1.5 * 3 + 1)) / 1000 * 1e3)
    assert measured_row(PLACE, measured(tokens_per_step=2.5), 1.0, MACHINE).roof_ms is None
    table = speed_table([row, SpeedRow("mamba2", "stock", 4, 2048, 256, "out of memory")])
    assert "2,000" in table
    assert "| 2048 by 256 | out of memory |" in table
    assert {name: way.written for name, way in WAYS.items() if way.written < 1} == {"int8 replay": 1 / 16}


def test_a_clock_has_times_of_segments_behind_the_first_token() -> None:
    plain, drafts = Clock(), Clock()
    plain.times, plain.tokens = [0.0, 5.0, 6.0, 7.0, 9.0, 11.0], [40, 1, 1, 1, 1, 1]
    assert (plain.prompt_seconds, plain.tokens_per_step) == (5.0, 1.0)
    assert (plain.seconds_per_token(2), plain.seconds_per_token(100)) == ([1.0, 2.0], [1.5])
    drafts.times, drafts.tokens = [0.0, 5.0, 6.0, 8.0], [40, 2, 1, 5]
    assert (drafts.tokens_per_step, drafts.seconds_per_token(100)) == (3.0, [0.5])


def test_kernels_are_grouped_by_their_names() -> None:
    names = {"conv1d_step_kernel": "convolution", "rms_norm_kernel": "norms", "fmha_cutlassF": "attention"}
    assert {name: group_of(name) for name in (*names, "argmax")} == {**names, "argmax": "other"}
    shares = shares_of([("mamba2_step_kernel", 1000.0), ("gemm", 5000.0), ("nvjet_tst_64x8", 1000.0)], steps=2)
    assert shares == [Share("matrix products", 3.0, 1.0), Share("recurrence", 0.5, 0.5)]
    assert "| no kernel | 0.500 | 12% | 0 |" in profile_table(4.0, shares)


def test_tiny_models_are_timed_stock_and_on_flashstate_and_ways_that_are_wrong_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "speed.csv"
    common = ["--tiny", "--device", "cpu", "--batches", "1", "--csv", str(path), "--model", "mamba2", "--prompt", "12"]
    common += ["--references", str(tmp_path), "--tokens", "9", "--stock-tokens", "5"]
    main([*common, "--ways", "stock,float32,drafts"])
    provenance, rows = read_speed(path)
    assert provenance["mamba2 is"] == MODELS["mamba2"].title
    assert [(row.way, row.tokens_per_step > 1) for row in rows] == [("stock", 0), ("float32", 0), ("drafts", 1)]
    assert all((row.batch, row.prompt, row.note) == (1, 12, "") for row in rows)
    assert kernels_of("mamba2") == ""
    main([*common, "--ways", "stock", "--profile"])
    assert "| a step |" in capsys.readouterr().out
    monkeypatch.setattr("tools.transformers_timing.SLACK", 0.0)
    main([*common, "--ways", "float32"])
    _, rows = read_speed(path)
    assert [(row.way, row.ms_per_token is None) for row in rows] == [("stock", 0), ("float32", 1), ("drafts", 0)]
    assert rows[1].note.startswith("ValueError: logits are off by")
