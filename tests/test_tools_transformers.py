"""tools.transformers_speed: roofs, rows, tables, clocks and pictures, and a run with tiny models on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tools.transformers_models import MODELS, kernels_of, make_model, weight_bytes, weights_read
from tools.transformers_plot import draw_speed
from tools.transformers_rows import (
    HEAD,
    Machine,
    SpeedRow,
    add_rows,
    line_of,
    measured_row,
    merged_provenance,
    profile_table,
    read_speed,
    speed_table,
)
from tools.transformers_speed import applies, chosen, main
from tools.transformers_timing import (
    EDITED,
    GROUPS,
    Measured,
    Share,
    edited,
    group_of,
    random_tokens,
    shares_of,
    warming,
)
from tools.transformers_ways import WAYS, Chosen, Clock, Prompt

CPU = torch.device("cpu")
PLACE = SpeedRow("mamba2", "float32", 4, 2048, 0)
MACHINE = Machine(bytes_per_second=1000.0, memory=100, weights=20, weights_read=10.0)


def measured(tokens_per_step: float = 1.0) -> Measured:
    return Measured(50.0, 2.0, 0.1, tokens_per_step, state_bytes=3, attention_bytes=1, peak_bytes=2**30)


def clock(times: list[float], tokens: list[int]) -> Clock:
    made = Clock()
    made.times, made.tokens = times, tokens
    return made


def test_a_roof_reads_weights_and_attention_and_reads_and_writes_states() -> None:
    row = measured_row(PLACE, measured(), 1.0, MACHINE)
    assert row.roof_ms == pytest.approx((10 + 4 * (2 * 3 + 1)) / 1000 * 1e3)
    assert row.times_roof == pytest.approx(2.0 / row.roof_ms)
    assert measured_row(PLACE, measured(), 0.5, MACHINE).roof_ms == pytest.approx((10 + 4 * (1.5 * 3 + 1)) / 1000 * 1e3)
    assert measured_row(PLACE, measured(tokens_per_step=2.5), 1.0, MACHINE).roof_ms is None


def test_a_row_counts_tokens_of_the_batch_and_requests_beside_the_weights() -> None:
    row = measured_row(PLACE, measured(), 1.0, MACHINE)
    assert (row.tokens_per_second, row.fits, row.peak_gib) == (2000.0, 20, 1.0)


def test_ways_of_replay_write_a_state_once_in_a_window() -> None:
    assert WAYS["int8 replay"].written == 1 / 16
    assert all(way.written == 1 for name, way in WAYS.items() if "replay" not in name)


def test_rows_are_added_to_a_file_in_place_of_their_like(tmp_path: Path) -> None:
    path = tmp_path / "speed.csv"
    first, other = measured_row(PLACE, measured(), 1.0, MACHINE), SpeedRow("mamba2", "stock", 4, 32, 0, "out of memory")
    add_rows(path, [first], {"commit": "a", "GPU": "x"})
    add_rows(path, [other], {"commit": "b", "GPU": "x"})
    assert read_speed(path)[1] == [first, other]
    add_rows(path, [SpeedRow(*first.key, 32, 0, "out of memory")], {"commit": "b"})
    provenance, rows = read_speed(path)
    assert provenance == {"commit": "a; b", "GPU": "x"}
    assert rows[1] == other
    assert [(row.way, row.prompt, row.note) for row in rows] == [
        ("float32", 32, "out of memory"), ("stock", 32, "out of memory"),
    ]  # fmt: skip
    assert merged_provenance({"commit": "a; b"}, {"commit": "b"}) == {"commit": "a; b"}


def test_tables_have_all_columns_and_notes_instead_of_numbers() -> None:
    rows = [measured_row(PLACE, measured(), 1.0, MACHINE), SpeedRow("mamba2", "stock", 4, 2048, 256, "out of memory")]
    assert all(len(line_of(row)) == len(HEAD) for row in rows)
    table = speed_table(rows)
    assert "| 2048 by 256 | out of memory |" in table
    assert "2,000" in table


def test_a_clock_has_times_of_segments_behind_the_first_token() -> None:
    plain = clock([0.0, 5.0, 6.0, 7.0, 9.0, 11.0], [40, 1, 1, 1, 1, 1])
    assert (plain.prompt_seconds, plain.tokens_per_step) == (5.0, 1.0)
    assert plain.seconds_per_token(2) == [1.0, 2.0]
    assert plain.seconds_per_token(100) == [1.5]
    drafts = clock([0.0, 5.0, 6.0, 8.0], [40, 2, 1, 5])
    assert (drafts.tokens_per_step, drafts.seconds_per_token(100)) == (3.0, [0.5])


def test_given_tokens_are_chosen_and_no_other_score_changes() -> None:
    chooses = Chosen(torch.tensor([[3, 1]]), prompt=2)
    for length, token in ((2, 3), (3, 1), (9, 1)):
        scores = chooses(torch.zeros(1, length, dtype=torch.int64), torch.zeros(1, 5))
        assert scores.argmax() == token
        assert scores.isfinite().sum() == 4


def test_an_edited_copy_differs_from_the_prompt_in_some_tokens() -> None:
    model = make_model("mamba2", CPU, tiny=True)
    ids = random_tokens(model, 2, 500, CPU)
    text = edited(ids, 1000, model)
    assert text.shape == (2, 1000)
    assert (text != ids.repeat(1, 2)).float().mean() == pytest.approx(EDITED, abs=0.03)


def test_experts_are_read_as_far_as_a_batch_uses_them() -> None:
    model = make_model("qwen3_next", CPU, tiny=True)
    assert weights_read(model, 1) < weights_read(model, 16) < weight_bytes(model)
    tied = make_model("mamba2", CPU, tiny=True)
    embeddings = tied.get_input_embeddings().weight.numel() * 2
    assert weights_read(tied, 1) == weight_bytes(tied) - embeddings


def test_kernels_are_grouped_by_their_names() -> None:
    names = {
        "mamba2_step_kernel": "recurrence", "conv1d_step_kernel": "convolution", "nvjet_tst_64x8": "matrix products",
        "rms_norm_kernel": "norms", "fmha_cutlassF": "attention", "vectorized_elementwise_kernel": list(GROUPS)[-1],
        "argmax": "other",
    }  # fmt: skip
    assert {name: group_of(name) for name in names} == names
    shares = shares_of([("mamba2_step_kernel", 1000.0), ("gemm", 5000.0), ("gemm", 1000.0)], steps=2)
    assert shares == [Share("matrix products", 3.0, 1.0), Share("recurrence", 0.5, 0.5)]
    assert "| no kernel | 0.500 | 12% | 0 |" in profile_table(4.0, shares)


def test_drafts_are_for_one_row() -> None:
    assert applies("drafts", 1)
    assert not applies("drafts", 16)
    assert applies("int8 replay", 16)


def test_long_prompts_are_warmed_up_with_by_their_beginning() -> None:
    assert warming(Prompt(torch.zeros(16, 2048), 256)).ids.shape == (16, 2048)
    assert warming(Prompt(torch.zeros(64, 2048), 256)).ids.shape == (64, 256)


def test_a_prompt_that_does_not_fit_is_cut_and_then_short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tried: list[tuple[int, int]] = []

    def measure(model: object, way: object, prompt: Prompt, tokens: int) -> Measured:
        tried.append((prompt.ids.shape[1], prompt.chunk))
        if prompt.ids.shape[1] > 32:
            raise torch.OutOfMemoryError
        return measured()

    monkeypatch.setattr("tools.transformers_speed.measure", measure)
    monkeypatch.setattr("tools.transformers_speed.Timed.verdict", lambda timed, way: "")
    path = tmp_path / "speed.csv"
    for model in ("mamba2", "nemotron_h"):
        main(["--tiny", "--device", "cpu", "--csv", str(path), "--model", model, "--batches", "1", "--ways", "stock"])
    assert tried == [(2048, 0), (32, 0), (2048, 0), (2048, 256), (32, 0)]
    assert [(row.prompt, row.chunk, row.note) for row in read_speed(path)[1]] == [(32, 0, "")] * 2


def test_unknown_names_are_refused() -> None:
    assert chosen("stock,int8 replay", WAYS, "way") == ["stock", "int8 replay"]
    with pytest.raises(ValueError, match="there is no way 'stack'"):
        chosen("stack", WAYS, "way")


def test_the_picture_has_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: drawn.append(figure))
    rows = [
        SpeedRow(model, way, batch, 32, 0, tokens_per_second=100.0 * batch, ms_per_token=2.0, roof_ms=1.0)
        for model in MODELS for way in ("stock", "float32") for batch in (1, 64)
    ]  # fmt: skip
    draw_speed([*rows, SpeedRow("mamba2", "enable", 64, 32, 0, "out of memory")], {}, Path("not written"))
    above, below = drawn[0].axes[: len(MODELS)], drawn[0].axes[len(MODELS) :]
    assert [len(panel.get_lines()) for panel in above] == [2] * len(MODELS)
    assert [len(panel.get_lines()) for panel in below] == [3] * len(MODELS)  # and the roof


def test_tiny_models_are_timed_stock_and_on_flashstate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "speed.csv"
    model = ["--tiny", "--device", "cpu", "--csv", str(path), "--model", "mamba2", "--batches", "1", "--prompt", "12"]
    common = [*model, "--references", str(tmp_path), "--tokens", "9", "--stock-tokens", "5"]
    main([*common, "--ways", "stock,float32,drafts"])
    provenance, rows = read_speed(path)
    assert provenance["mamba2 is"] == MODELS["mamba2"].title
    assert [(row.way, row.batch, row.prompt, row.note) for row in rows] == [
        ("stock", 1, 12, ""), ("float32", 1, 12, ""), ("drafts", 1, 12, ""),
    ]  # fmt: skip
    assert [row.tokens_per_step > 1 for row in rows] == [False, False, True]
    assert kernels_of("mamba2") == ""
    main([*common, "--ways", "stock", "--profile"])
    assert "| a step |" in capsys.readouterr().out


def test_a_way_that_is_wrong_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "speed.csv"
    monkeypatch.setattr("tools.transformers_timing.SLACK", 0.0)
    model = ["--tiny", "--device", "cpu", "--csv", str(path), "--model", "mamba2", "--batches", "1", "--prompt", "12"]
    main([*model, "--ways", "stock"])
    _, (row,) = read_speed(path)
    assert row.ms_per_token is None
    assert row.note.startswith("ValueError: logits are off by")
