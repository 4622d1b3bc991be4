"""The benchmark of gated_delta_replay: decays per channel, and what goes at once beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benching import tiny_job

from flashstate.bench.gated_delta_replay import GATED_DELTA_REPLAY
from flashstate.bench.jobs import Stored
from flashstate.bench.peers import MeasurementError

AT_ONCE, PER_CHANNEL = (GATED_DELTA_REPLAY.variants[how] for how in ("at once", "per channel"))


@pytest.mark.parametrize("stored", ["none folds", "last"])
def test_decays_per_channel_are_those_of_the_same_job_where_every_head_has_keys_of_its_own(stored: Stored) -> None:
    job = tiny_job("gated_delta_replay", stored, tokens=3)
    found = PER_CHANNEL.job(job)
    assert found == replace(job, case=replace(job.case, per_channel=True))
    assert found.counted_bytes > job.counted_bytes
    with pytest.raises(MeasurementError, match=r"^only compared where every head has keys of its own$"):
        PER_CHANNEL.job(tiny_job("gated_delta_replay", stored, key_heads=1))


def test_steps_in_place_go_at_once_and_replay_always_does() -> None:
    assert not AT_ONCE.job(tiny_job("gated_delta_replay", tokens=3)).case.exact
    with pytest.raises(MeasurementError, match=r"^only for calls of 2 to 16 tokens$"):
        AT_ONCE.job(tiny_job("gated_delta_replay"))
    with pytest.raises(MeasurementError, match=r"^only for steps in place: replay always does$"):
        AT_ONCE.job(tiny_job("gated_delta_replay", "none folds", tokens=3))


def test_no_configs_are_tuned_as_for_mamba2_replay() -> None:
    with pytest.raises(ValueError, match=r"^tune finds no configs of gated_delta_replay yet$"):
        _ = GATED_DELTA_REPLAY.tuned_grids
