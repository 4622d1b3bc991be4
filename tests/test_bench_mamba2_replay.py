"""The benchmark of mamba2_replay: what a model step has around its layers, and roofs that jobs share."""

from __future__ import annotations

from typing import Any

import pytest
from benching import CPU, NEEDS_INTERPRETER, measure_in_the_interpreter, spoiled, tiny_job

from flashstate.bench.mamba2_replay import MAMBA2_REPLAY, bind_flashstate, check
from flashstate.bench.measure import Report, inputs_of, measure_on_gpu
from flashstate.bench.peers import MeasurementError
from flashstate.bench.timing import Timing


def test_plans_and_cursors_are_checked_bit_for_bit() -> None:
    spoils: dict[str, Any] = {
        "rows of the plan": lambda pool, slot, rows: rows[0].add_(1),
        "start": lambda pool, slot, rows: pool.start[slot[0]].add_(1),
        "count": lambda pool, slot, rows: pool.count[0].add_(1),
        "seed": lambda pool, slot, rows: pool.seed[slot[1]].add_(1),
    }
    job = tiny_job("mamba2_replay", "plan and commit", tokens=6, format="float16", rounding="stochastic")
    inputs = inputs_of(job.case, CPU)
    check(bind_flashstate, inputs)
    for name, spoil in spoils.items():
        wrong = spoiled(bind_flashstate, lambda run, storing, at, y, by=spoil: by(run.state, at.read.long(), y))
        with pytest.raises(MeasurementError, match=f"^wrong: it leaves {name} other than it must be$"):
            check(wrong, inputs)


@pytest.mark.interpreted
@NEEDS_INTERPRETER
def test_jobs_that_differ_in_live_rows_alone_share_what_their_roofs_are_made_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measure_in_the_interpreter(monkeypatch, cold_bytes=1 << 10)
    from flashstate.bench import roofs

    times = iter(Timing(t, t, t) for t in map(float, range(2, 100)))
    for roof in ("time_touch", "time_read"):
        monkeypatch.setattr(roofs, roof, lambda *arguments: next(times))
    report = Report()
    for stored in ("none folds", "all fold", "last"):
        measure_on_gpu(MAMBA2_REPLAY, tiny_job("mamba2_replay", stored, tokens=2), {}, CPU, report)
    found = [(row.implementation, row.microseconds) for row in report.rows if row.implementation in ("touch", "read")]
    assert found == [("touch", 2.0), ("read", 3.0)] * 2 + [("touch", 4.0), ("read", 5.0)]
