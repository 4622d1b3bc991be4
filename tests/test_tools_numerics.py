"""tools.numerics: what it decodes, measures and leaves behind; and that the results show what docs/numerics.md says."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from flashstate.bench.results import write_csv
from flashstate.reference.mamba2 import softplus
from flashstate.state.formats import PORTABLE_FORMATS
from tools import numerics_plot
from tools.numerics import at_the_end, error_table, main, read_errors
from tools.numerics_experiment import (
    A_RANGE,
    DT_RANGE,
    HEADS,
    MEMORIES,
    ErrorRow,
    NewMamba2,
    Sums,
    ends_of_periods,
    measure_errors,
)

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "numerics.csv"
CPU = torch.device("cpu")
TOKENS = 64
COARSE = [("bfloat16", "nearest"), ("int8", "nearest"), ("int8", "stochastic"), ("float8_e4m3fn", "stochastic")]
FORMATS = [("float32", "nearest"), *COARSE]
WAYS, ROUNDINGS = ("plain", "replay"), ("nearest", "stochastic")


@pytest.fixture(scope="module")
def rows() -> list[ErrorRow]:
    """The rows of a short run."""
    return measure_errors(CPU, TOKENS, FORMATS)


@pytest.fixture(scope="module")
def results() -> dict[tuple[str, str, str, str], ErrorRow]:
    """The end of the run in the tree, by format, rounding, way and memory."""
    return at_the_end(read_errors(RESULTS)[1])


# What is decoded


def test_heads_are_those_of_a_new_mamba2_and_have_one_memory_each() -> None:
    model = NewMamba2(CPU)
    A, dt = -model.parameters["A"], softplus(model.parameters["dt_bias"])
    for drawn, (low, high) in ((A, A_RANGE), (dt, DT_RANGE)):
        assert low <= drawn.min() < low + (high - low) / 8
        assert high - (high - low) / 4 < drawn.max() <= high * (1 + 1e-5)
    torch.testing.assert_close(model.memory, 1 / (A * dt), rtol=1e-4, atol=0)
    counts = torch.stack([model.heads_of(memory) for memory in MEMORIES if memory != "all"]).sum(0)
    assert counts.eq(1).all()
    assert model.heads_of("all").all()
    assert [int(model.heads_of(memory).sum()) for memory in MEMORIES] == [64, 32, 26, 6]  # the document says so
    assert [round(model.memory.min().item()), round(model.memory.max().item())] == [1, 395]


def test_tokens_are_bfloat16_values_in_float32_and_the_same_in_every_run() -> None:
    one, other = NewMamba2(CPU), NewMamba2(CPU)
    before = one.token()
    assert all(torch.equal(before[name], again) for name, again in other.token().items())
    after = one.token()
    for name in ("x", "B", "C"):
        assert before[name].dtype == torch.float32
        assert torch.equal(before[name], before[name].bfloat16().float())
        assert not torch.equal(before[name], after[name])


def test_periods_are_whole_windows_and_the_last_is_a_quarter() -> None:
    assert ends_of_periods(128) == [16, 32, 48, 64, 96, 128]
    assert ends_of_periods(4096)[-2:] == [3072, 4096]
    assert ends_of_periods(80) == [16, 32, 48, 64, 80]
    with pytest.raises(ValueError, match="tokens must be whole windows of 16, got 40"):
        ends_of_periods(40)


# What is measured


def test_errors_are_relative_to_the_exact_values_of_the_heads_that_are_asked_for() -> None:
    exact = torch.randn(2, HEADS, 3, 5, dtype=torch.float64)
    wrong = torch.arange(HEADS) < 4
    got = torch.where(wrong[:, None, None], 1.5 * exact, exact)
    sums = Sums(CPU)
    for half in (0, 1):
        sums.add(got[half : half + 1], exact[half : half + 1])
    assert sums.error(wrong) == pytest.approx(0.5)
    assert sums.size(wrong) == pytest.approx(1.5)
    assert sums.error(~wrong) == 0.0
    assert sums.size(~wrong) == pytest.approx(1.0)
    share = exact[:, :4].square().sum() / exact.square().sum()
    assert sums.error(wrong | ~wrong) == pytest.approx(0.5 * math.sqrt(share))


def test_there_is_a_row_for_every_format_way_memory_and_period(rows: list[ErrorRow]) -> None:
    found = [((row.format, row.rounding), row.way, row.memory, row.tokens) for row in rows]
    assert found == list(product(FORMATS, WAYS, MEMORIES, ends_of_periods(TOKENS)))


def test_float32_is_right_but_for_its_own_rounding(rows: list[ErrorRow]) -> None:
    for row in rows:
        if row.format == "float32":
            assert 1e-9 < row.state_error < 1e-6
            assert 1e-9 < row.output_error < 1e-6
            assert row.state_size == pytest.approx(1, abs=1e-6)


def test_replay_rounds_nothing_before_the_first_fold_and_less_than_plain_steps_after_it(rows: list[ErrorRow]) -> None:
    found = {((row.format, row.rounding), row.way, row.memory, row.tokens): row for row in rows}
    for fmt, memory, tokens in product(COARSE, MEMORIES, ends_of_periods(TOKENS)):
        plain, replay = (found[fmt, way, memory, tokens] for way in WAYS)
        exact = found[FORMATS[0], "replay", memory, tokens]
        assert (replay.state_error == exact.state_error) == (tokens == 16)
        assert (replay.output_error == exact.output_error) == (tokens == 16)
        assert 1000 * exact.output_error < plain.output_error
        assert 2 * replay.state_error < plain.state_error
        assert 2 * replay.output_error < plain.output_error


def test_stochastic_rounding_draws_new_bits_in_every_step(rows: list[ErrorRow]) -> None:
    """With the same bits at every step errors of slow heads would add up in one direction."""
    last = at_the_end(rows)
    for way in WAYS:
        nearest, stochastic = (last["int8", rounding, way, "long"] for rounding in ("nearest", "stochastic"))
        assert nearest.state_error < stochastic.state_error < 2.5 * nearest.state_error
        assert stochastic.state_size == pytest.approx(1, abs=0.02)


# What a run leaves behind


def test_the_command_measures_prints_and_writes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    csv_file, again = tmp_path / "a.csv", tmp_path / "again.csv"
    main(["--csv", str(csv_file), "--device", "cpu", "--commit", "abc"], tokens=16)
    provenance, rows = read_errors(csv_file)
    assert provenance["commit"] == "abc"
    assert provenance["device"].startswith("CPU")
    assert provenance["decoded"].startswith("16 tokens of 2 requests, one per call")
    assert provenance["heads"] == "64 of 2 x 128: 32 short, 26 medium, 6 long"
    assert list(dict.fromkeys((row.format, row.rounding) for row in rows)) == list(PORTABLE_FORMATS)
    out = capsys.readouterr().out
    assert "errors of long heads:\n\n| format | plain: state | " in out
    assert "Averages of tokens 1 to 16. Measured on: CPU" in out
    write_csv(again, rows, provenance)
    assert again.read_bytes() == csv_file.read_bytes()
    with pytest.raises(ValueError, match=r"to write a\.csv to"):
        main(["--csv", "no/such/folder/a.csv"])
    with pytest.raises(ValueError, match=r"is not a file that tools\.numerics wrote"):
        read_errors(ROOT / "results" / "h200.csv")


def test_tables_have_errors_and_sizes_of_the_end_of_a_run(rows: list[ErrorRow]) -> None:
    of_float32 = rows[: len(rows) // len(FORMATS)]
    long = at_the_end(rows)["float32", "nearest", "plain", "long"]
    cells = f"{long.state_error:.1e} | {long.output_error:.1e}"
    below = "\nAverages of tokens 49 to 64. Measured on: Some GPU.\n\n"
    assert error_table("errors of long heads", of_float32, "Some GPU") == (
        "\n| format | plain: state | plain: output | replay: state | replay: output "
        f"| plain / replay: state | plain / replay: output |\n|{' --- |' * 7}\n"
        f"| float32 | {cells} | {cells} | 1.0 | 1.0 |\n{below}"
    )
    assert error_table("sizes of states", of_float32, "Some GPU") == (
        "\n| format | plain: short | plain: medium | plain: long | replay: short | replay: medium | replay: long |\n"
        f"|{' --- |' * 7}\n| float32 |{' 1.000 |' * 6}\n{below}"
    )


def test_a_picture_has_a_panel_per_format_with_plain_steps_dashed(
    rows: list[ErrorRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    drawn: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: drawn.append(figure))
    numerics_plot.draw_errors(rows, {}, Path("not written"))
    shown = list(product(numerics_plot.SHOWN, dict.fromkeys(name for name, _ in FORMATS)))
    assert [panel.get_title() for panel in drawn[0].axes[: len(shown) // 3]] == [
        name for _, name in shown[: len(shown) // 3]
    ]
    for panel, ((kind, memory, _), name) in zip(drawn[0].axes, shown, strict=True):
        lines = {line.get_label(): line for line in panel.get_lines()}
        roundings = [rounding for other, rounding in FORMATS if other == name]
        assert list(lines) == [f"{r}, {way}" for r in roundings for way in ("stepped plainly", "by replay")]
        for rounding in roundings:
            plain, replay = lines[f"{rounding}, stepped plainly"], lines[f"{rounding}, by replay"]
            assert (plain.get_linestyle(), replay.get_linestyle()) == ("--", "-")
            assert plain.get_color() == replay.get_color()
            key = (name, rounding, "replay", memory)
            of_line = [row for row in rows if (row.format, row.rounding, row.way, row.memory) == key]
            want = [(row.tokens, getattr(row, kind)) for row in of_line]
            assert list(zip(replay.get_xdata(), replay.get_ydata(), strict=True)) == want


# What the document says


def test_the_results_have_the_formats_and_tokens_that_the_document_speaks_of() -> None:
    provenance, rows = read_errors(RESULTS)
    assert provenance["decoded"] == "4096 tokens of 2 requests, one per call; replay with a window of 16"
    keys = [((row.format, row.rounding), row.way, row.memory, row.tokens) for row in rows]
    assert keys == list(product(PORTABLE_FORMATS, WAYS, MEMORIES, ends_of_periods(4096)))


def test_the_results_show_what_the_document_says(results: dict[tuple[str, str, str, str], ErrorRow]) -> None:
    def ratios(name: str, rounding: str, memory: str) -> tuple[float, float]:
        plain, replay = (results[name, rounding, way, memory] for way in WAYS)
        return plain.state_error / replay.state_error, plain.output_error / replay.output_error

    def output(label: str, way: str, memory: str) -> float:
        name, _, rounding = label.partition(" ")
        return results[name, rounding or "nearest", way, memory].output_error

    def size(name: str, way: str) -> float:
        return results[name, "nearest", way, "long"].state_size

    independent = [("bfloat16", "stochastic"), ("int8", "stochastic"), *product(("float16", "int16"), ROUNDINGS)]
    for fmt, memory in product(independent, ("all", "medium", "long")):
        assert ratios(*fmt, memory) == pytest.approx((4, 4), abs=0.4)
    for fmt in PORTABLE_FORMATS[1:]:
        assert ratios(*fmt, "short") == pytest.approx((5, 5), abs=0.4)
    assert ratios("float32", "nearest", "all") == pytest.approx((1, 1), abs=0.02)
    assert ratios("float8_e4m3fn", "stochastic", "long") == pytest.approx((2.7, 2.7), abs=0.2)

    assert size("bfloat16", "plain") > 1.01
    assert size("float8_e4m3fn", "plain") > 1.4
    assert size("int8", "plain") < 0.99
    for name in ("float16", "int16"):
        assert size(name, "plain") == pytest.approx(1, abs=5e-4)
    for name in ("bfloat16", "float8_e4m3fn"):
        assert ratios(name, "nearest", "long")[1] > 20
        assert size(name, "replay") == pytest.approx(1, abs=0.01)

    for name, memory in product(("bfloat16", "float16", "int16", "int8", "float8_e4m3fn"), MEMORIES):
        both = (output(label, "replay", memory) for label in (f"{name} stochastic", name))
        assert next(both) / next(both) == pytest.approx(1.4, abs=0.15)

    for memory in ("short", "medium"):
        assert output("int8", "replay", memory) < 1.05 * output("bfloat16", "plain", memory)
        assert 2.9 < output("float8_e4m3fn", "replay", memory) / output("bfloat16", "plain", memory) < 4
    assert 5 * output("int8", "replay", "long") < output("bfloat16", "plain", "long")
    assert output("int8", "replay", "all") == pytest.approx(2**-9, rel=0.1)
    assert 5 * output("float16", "plain", "all") < output("int8", "replay", "all")
    assert output("float8_e4m3fn", "replay", "all") == pytest.approx(0.01, rel=0.2)
    assert output("float8_e4m3fn stochastic", "plain", "all") > 0.04
    assert output("float8_e4m3fn", "plain", "all") > 0.04
    assert output("bfloat16", "plain", "all") == pytest.approx(0.01, rel=0.25)
    assert output("int8", "replay", "all") / output("float8_e4m3fn", "replay", "all") == pytest.approx(0.2, abs=0.02)


def test_states_that_swallow_their_decay_go_on_growing() -> None:
    _, rows = read_errors(RESULTS)
    for name in ("bfloat16", "float8_e4m3fn"):
        of_format = [row for row in rows if (row.format, row.rounding, row.way) == (name, "nearest", "plain")]
        sizes = [row.state_size for row in of_format if row.memory == "long" and row.tokens >= 512]
        assert sizes == sorted(sizes)
        assert sizes[0] < sizes[-1] - 0.01
