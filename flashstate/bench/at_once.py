"""Calls with all tokens of a row at once, beside exact ones."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, cast

from flashstate.bench.binding import bind_op
from flashstate.bench.jobs import Job, Way
from flashstate.bench.peers import MeasurementError
from flashstate.ops.at_once import MOST_AT_ONCE


def at_once(job: Job) -> Job:
    """The job with all tokens of a row at once; MeasurementError where there is no such call."""
    if not 1 < job.case.tokens <= MOST_AT_ONCE:
        raise MeasurementError(f"only for calls of 2 to {MOST_AT_ONCE} tokens")
    if job.stored == "every":
        raise MeasurementError("only where no state between tokens is stored")
    return replace(job, case=replace(cast(Any, job.case), exact=False))


AT_ONCE = Way(partial(bind_op, exact=False), at_once)
