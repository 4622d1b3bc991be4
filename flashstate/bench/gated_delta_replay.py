"""The benchmark of gated_delta_replay: its jobs, and steps of gated_delta_step beside them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from flashstate.bench.at_once import AT_ONCE
from flashstate.bench.gated_delta import BATCHES, GATED_DELTA
from flashstate.bench.jobs import BFLOAT16, FLOAT32, BenchedOp, Grid, Job, Way
from flashstate.bench.peers import MeasurementError
from flashstate.bench.replaying import LIVE_BY_ONE, RingCase, RingJob, bind_flashstate, check, job_of
from flashstate.proof import DeltaCase, DeltaReplayCase

INT8, FLOAT16 = ("int8", "nearest"), ("float16", "nearest")
# One token in four formats; drafts of three tokens behind the last one, and of seven.
PLAIN = Grid((BFLOAT16, INT8, FLOAT32, FLOAT16), batches=BATCHES, by_one=(*LIVE_BY_ONE, "last"))
DRAFTING = replace(PLAIN, formats=(BFLOAT16, INT8), tokens=(4,), stored=("none folds", "stationary", "last", "every"))
LONGER = replace(DRAFTING, formats=(BFLOAT16,), tokens=(8,), stored=("none folds", "stationary", "last"))
KDA = replace(LONGER, formats=(BFLOAT16, INT8), tokens=(1, 4), sizes={"heads": (32,), "groups": (32,)})
PAYS = {
    "64 heads, bfloat16": 16, "64 heads, int8": 64, "64 heads, float32": 16, "64 heads, float16": 16,
    "64 heads, bfloat16, 4 tokens": 64, "64 heads, int8, 4 tokens": 16, "64 heads, bfloat16, 8 tokens": 256,
    "32 heads, bfloat16": 64, "32 heads, bfloat16, per channel": 256, "32 heads, bfloat16, 4 tokens": 16,
    "32 heads, bfloat16, 4 tokens, per channel": 16, "32 heads, int8": 256, "32 heads, int8, per channel": 0,
    "32 heads, int8, 4 tokens": 64, "32 heads, int8, 4 tokens, per channel": 16,
}  # fmt: skip


@dataclass(frozen=True)
class DeltaRingCase(RingCase, DeltaReplayCase):
    """A case of gated_delta_replay whose rings have as many live rows as a measurement wants."""


def at_once(job: Job) -> Job:
    """The step in place with all tokens of a row at once; MeasurementError where there is no such call."""
    if isinstance(job, RingJob):
        raise MeasurementError("only for steps in place: replay always does")
    return AT_ONCE.job(job)


def per_channel(job: Job) -> Job:
    """The job with a decay for every column, as KDA has it; MeasurementError where heads share keys, as there none
    do."""
    case = cast(DeltaCase, job.case)
    if case.heads != case.key_heads:
        raise MeasurementError("only compared where every head has keys of its own")
    return replace(job, case=replace(case, per_channel=True))


GATED_DELTA_REPLAY = BenchedOp(
    "gated_delta_replay", GATED_DELTA.case, (PLAIN, DRAFTING, LONGER, KDA), tuned=None, bind=bind_flashstate,
    variants={
        "at once": replace(AT_ONCE, job=at_once),
        "per channel": Way(bind_flashstate, per_channel, fresh=True),
    },
    job=partial(job_of, DeltaRingCase), check=check, shown=LIVE_BY_ONE[:1], pays=PAYS,
)  # fmt: skip
