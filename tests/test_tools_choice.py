"""tools.format_choice: what it takes from results, and that these show what docs/choosing-a-format.md says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flashstate.bench.results import Row
from flashstate.state.formats import PORTABLE_FORMATS
from tools.figures import ERRORS, of_families
from tools.format_choice import BATCH, FAMILIES, Family, choice_table, draw_choice, shares_of_bytes, shares_of_time
from tools.numerics import at_the_end, read_errors

PLAIN, REPLAY, MAMBA3, DELTA = FAMILIES


@pytest.fixture(scope="module")
def measured() -> dict[str, list[Row]]:
    return of_families()[1]


@pytest.fixture(scope="module")
def errors() -> Any:
    return at_the_end(read_errors(ERRORS)[1])


def row(name: str, microseconds: float, **more: Any) -> Row:
    stored, batch = more.get("stored", "last"), more.get("batch", BATCH)
    return Row(
        "mamba2",
        more.get("by", "flashstate"),
        name,
        "nearest",
        batch,
        16,
        1,
        64,
        128,
        1,
        stored,
        microseconds,
        0.0,
        1.0,
        1.0,
    )


def test_times_are_shares_of_a_float32_step_in_place_at_one_batch_size() -> None:
    rows = [row("float32", 8.0), row("int8", 2.0), row("int8", 9.0, batch=1), row("int8", 9.0, by="vllm")]
    rows += [row("float32", 4.0, stored="a 16th folds")]
    assert shares_of_time(Family("any", "mamba2"), rows) == {("float32", "nearest"): 1.0, ("int8", "nearest"): 0.25}
    assert shares_of_time(Family("any", "mamba2", stored="a 16th folds"), rows) == {("float32", "nearest"): 0.5}
    assert shares_of_bytes(rows) == {("float32", "nearest"): 1.0, ("int8", "nearest"): (128 + 4) / 512}


def test_the_table_has_every_format_and_leaves_empty_what_was_not_measured(measured: Any, errors: Any) -> None:
    head, _, *lines = choice_table(measured, errors)
    assert len(lines) == len(PORTABLE_FORMATS)
    assert all(line.count("|") == head.count("|") for line in lines)
    assert {line.count("|  |") > 0 for line in lines} == {True, False}


def test_the_picture_has_a_point_per_format_and_bars_per_family(
    measured: Any, errors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    drawn: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: drawn.append(figure))
    draw_choice(measured, errors, Path("not written"))
    points, bars = drawn[0].axes
    shares = [shares_of_time(family, measured[family.op]) for family in FAMILIES]
    assert len(points.texts) == len(shares[0]) + len(shares[1])
    assert [len(container) for container in bars.containers] == [len(found) for found in shares]


def test_the_results_show_what_the_document_says(measured: Any, errors: Any) -> None:
    def error(label: str, way: str = "plain", memory: str = "all") -> float:
        name, _, rounding = label.partition(" ")
        return errors[name, rounding or "nearest", way, memory].output_error

    times = shares_of_time(PLAIN, measured["mamba2"])
    replayed = shares_of_time(REPLAY, measured["mamba2_replay"])
    assert 0.45 < times["float16", "nearest"] < 0.6
    assert times["float16", "nearest"] < times["int16", "nearest"] < times["float16", "stochastic"] < 0.65
    assert 10 * error("float16") < error("bfloat16 stochastic") < error("bfloat16")
    assert error("int16") == pytest.approx(error("float16") / 10, rel=0.1)
    assert replayed["float32", "nearest"] < 0.65
    for name, rounding in PORTABLE_FORMATS[1:]:
        assert (
            errors[name, rounding, "plain", "all"].output_error
            > 3 * errors[name, rounding, "replay", "all"].output_error
        )
    for memory in ("all", "short", "medium", "long"):
        assert error("int8", "replay", memory) < 1.05 * error("bfloat16", "plain", memory)
    assert error("int8") == pytest.approx(error("int8 stochastic"), rel=0.1)
    assert error("int8", memory="long") > 1.2 * error("int8 stochastic", memory="long")
    assert times["int8", "nearest"] < 0.7 * times["int8", "stochastic"]
    assert min(error("float8_e4m3fn"), error("float8_e4m3fn stochastic")) > 3 * error("bfloat16")
    timed = {name for family in (MAMBA3, DELTA) for name in shares_of_time(family, measured[family.op])}
    assert timed == {(name, "nearest") for name in ("float32", "bfloat16", "int8", "float8_e4m3fn")}
    assert {rounding for name, rounding in replayed if name not in ("float32", "bfloat16")} == {"stochastic"}
