"""tools.format_choice: what it takes from results, and that these show what docs/choosing-a-format.md says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flashstate.bench.results import Row
from flashstate.state.formats import PORTABLE_FORMATS
from tools.figures import of_families
from tools.format_choice import BATCH, FAMILIES, Family, choice_table, draw_choice, shares_of_bytes, shares_of_time

FLOAT32, INT8 = ("float32", "nearest"), ("int8", "nearest")


def row(name: str, microseconds: float, by: str = "flashstate", stored: str = "last", batch: int = BATCH) -> Row:
    return Row("mamba2", by, name, "nearest", batch, 16, 1, 64, 128, 1, stored, microseconds, 0.0, 1.0, 1.0)


def test_times_are_shares_of_a_float32_step_in_place_at_one_batch_size() -> None:
    rows = [row("float32", 8.0), row("int8", 2.0), row("int8", 9.0, batch=1), row("int8", 9.0, by="vllm")]
    rows += [row("float32", 4.0, stored="a 16th folds")]
    assert shares_of_time(Family("any", "mamba2", "red"), rows) == {FLOAT32: 1.0, INT8: 0.25}
    assert shares_of_time(Family("any", "mamba2", "red", stored="a 16th folds"), rows) == {FLOAT32: 0.5}
    assert shares_of_bytes(rows) == {FLOAT32: 1.0, INT8: (128 + 4) / 512}


def test_the_table_has_every_format_and_leaves_empty_what_was_not_timed() -> None:
    head, _, *lines = choice_table(*of_families())
    assert len(lines) == len(PORTABLE_FORMATS)
    assert all(line.count("|") == head.count("|") for line in lines)
    assert {"|  |" in line for line in lines} == {True, False}


def test_the_picture_has_errors_of_every_format_and_the_times_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: drawn.append(figure))
    measured, errors = of_families()
    draw_choice(measured, errors, Path("not written"))
    above, below = drawn[0].axes
    assert [len(line.get_ydata()) for line in above.get_lines()] == [len(PORTABLE_FORMATS)] * len(FAMILIES)
    timed = [len(shares_of_time(family, measured[family.op])) for family in FAMILIES]
    assert [len(container) for container in below.containers] == timed


def test_the_results_show_what_the_document_says() -> None:
    measured, errors = of_families()
    times = {family.op: shares_of_time(family, measured[family.op]) for family in FAMILIES}

    def error(op: str, label: str) -> float:
        name, _, rounding = label.partition(" ")
        return errors[op][name, rounding or "nearest"][1]

    assert 0.45 < times["mamba2"]["float16", "nearest"] < times["mamba2"]["int16", "nearest"] < 0.6
    assert times["mamba2_replay"][FLOAT32] < 0.65
    for op in ("mamba2", "mamba3", "gated_delta"):
        assert 8 * error(op, "float16") < 1.001 * min(error(op, "bfloat16"), error(op, "bfloat16 stochastic"))
        assert 1 / 11 < error(op, "int16") / error(op, "float16") < 1 / 7.5
        assert 0.01 < min(error(op, "int8"), error(op, "int8 stochastic")) < 0.03
        assert min(error(op, "float8_e4m3fn"), error(op, "float8_e4m3fn stochastic")) > 0.04
    for form in PORTABLE_FORMATS[1:]:
        assert errors["mamba2"][form][1] / errors["mamba2_replay"][form][1] > 3
        if form[1] == "stochastic":  # of the delta rule, and by replay, random bits only add noise
            nearest = (form[0], "nearest")
            for op in ("mamba2_replay", "gated_delta"):
                assert errors[op][form][1] / errors[op][nearest][1] == pytest.approx(1.4, abs=0.15)
    assert error("mamba2_replay", "int8") < error("mamba2", "bfloat16 stochastic")
    for op in ("mamba2", "mamba3"):
        assert error(op, "int8") == pytest.approx(error(op, "int8 stochastic"), rel=0.1)
        assert error(op, "bfloat16 stochastic") < 0.5 * error(op, "bfloat16")
    assert times["mamba2"][INT8] < 0.7 * times["mamba2"]["int8", "stochastic"]
    few = {(name, "nearest") for name in ("float32", "bfloat16", "int8", "float8_e4m3fn")}
    assert times["mamba3"].keys() == times["gated_delta"].keys() == few
    by_replay = {FLOAT32, ("bfloat16", "nearest"), ("float16", "stochastic"), ("int8", "stochastic")}
    assert times["mamba2_replay"].keys() == by_replay
