"""Measuring jobs: a step beside the roofs and its peers. Only what was checked in the same run is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashstate.bench.jobs import BenchedOp, Job
from flashstate.bench.peers import Binding, MeasurementError, Step
from flashstate.bench.results import Row
from flashstate.bench.timing import COLD_BYTES, Timing, cold_rows, cold_slots, need_flush, time_launches, time_on_cpu
from flashstate.state.formats import decode
from flashstate.state.slots import Slots
from flashstate.testing import Expected, Inputs, Pool, error_ratio, make_inputs, oracle


@dataclass
class Report:
    """What was measured, and what was not and why: implementation -> reasons."""

    rows: list[Row] = field(default_factory=list)
    skipped: dict[str, set[str]] = field(default_factory=dict)

    def skip(self, name: str, reason: MeasurementError) -> None:
        self.skipped.setdefault(name, set()).add(str(reason))


def bench(
    op: BenchedOp,
    jobs: Sequence[Job],
    peers: Mapping[str, Binding],
    device: torch.device,
    tracked: Callable[[Sequence[Job]], Iterable[Job]] = iter,
    keep: Callable[[Sequence[Row]], None] = lambda rows: None,
) -> Report:
    """Check and measure every job, and hand all rows so far to `keep` after each; MeasurementError where flashstate's
    own result is wrong."""
    report = Report()
    on_gpu = device.type == "cuda"
    with torch.cuda.device(device) if on_gpu else nullcontext():
        for job in tracked(jobs):
            try:
                if on_gpu:
                    measure_on_gpu(op, job, peers, device, report)
                else:
                    measure_on_cpu(op, job, device, report)
            except MeasurementError as reason:
                raise MeasurementError(f"{reason}, for {job.case}") from reason
            keep(report.rows)
    return report


def measure_on_gpu(op: BenchedOp, job: Job, peers: Mapping[str, Binding], device: torch.device, report: Report) -> None:
    """flashstate, every peer that is right, and the roofs, all on the same cold slots."""
    from flashstate.bench.roofs import time_read, time_touch

    inputs = make_inputs(job.case, device)
    small = snapshots_for(job, job.case.batch, device)
    check(op.bind, inputs, small)
    timed, snapshots, slots = on_cold_slots(job, inputs, device)
    flush = need_flush(len(slots), job.read_bytes)
    x = timed.arguments["x"] if job.case.token_bytes else None
    roof = time_touch(timed.state.data, slots, None if snapshots is None else snapshots.data, x, flush)
    only_read = time_read(timed.state.data, slots, flush)
    ours = time_on_slots(op.bind(timed, snapshots), slots, flush)
    report.rows += [
        row_of("touch", job, roof, job.touched_bytes, roof),
        row_of("read", job, only_read, job.read_bytes, roof),
        row_of("flashstate", job, ours, job.counted_bytes, roof),
    ]
    ways = {f"flashstate, {how}": bind for how, bind in op.variants.items()}
    for name, bind in {**ways, **peers}.items():
        try:
            with failures_as_reasons():
                check(bind, inputs, small)
                timing = time_on_slots(bind(timed, snapshots), slots, flush)
        except MeasurementError as reason:
            report.skip(name, reason)
        else:
            report.rows.append(row_of(name, job, timing, job.counted_bytes, roof))


def measure_on_cpu(op: BenchedOp, job: Job, device: torch.device, report: Report) -> None:
    """The reference by the wall clock, on whatever the caches hold: a CPU has no kernels to compare."""
    inputs = make_inputs(job.case, device)
    snapshots = snapshots_for(job, job.case.batch, device)
    check(op.bind, inputs, snapshots)
    timing = time_on_cpu(partial(op.bind(inputs, snapshots), Slots(inputs.slots)))
    report.rows.append(row_of("reference, CPU", job, timing, job.counted_bytes, None))


def check(bind: Binding, inputs: Inputs, snapshots: Pool | None = None) -> None:
    """Raise MeasurementError unless a step on a copy of `inputs` gives an output, and in the pool or the snapshots
    states, within their budgets."""
    want, copy, batch = oracle(inputs), inputs.fresh(), len(inputs.slots)
    y = bind(copy, snapshots)(slots_of(copy, snapshots)).reshape(want.y.shape)
    ratios = {"output": error_ratio(y, want.y, want.y_plain)}
    if snapshots is None:
        ratios["state"] = state_error(copy.state, (copy.slots.long(),), want)
    else:
        for t in range(snapshots.data.shape[1]):
            ends_there = oracle(inputs.of_tokens(slice(0, t + 1)))
            ratios[f"snapshot of token {t}"] = state_error(snapshots, (slice(0, batch), t), ends_there)
    for what, ratio in ratios.items():
        if not ratio <= 1:
            raise MeasurementError(f"wrong: its {what} is {ratio:.3g} times the error budget away from float64")


def slots_of(inputs: Inputs, snapshots: Pool | None) -> Slots:
    """The slots of a batch, whose row b fills row b of the snapshots if there are any."""
    rows = None if snapshots is None else torch.arange(len(inputs.slots)).to(inputs.slots)
    return Slots(inputs.slots, snapshot_rows=rows)


def state_error(stored: Pool, where: tuple[Any, ...], want: Expected) -> float:
    """The error of the states in these entries as a fraction of its budget."""
    states = decode(stored.data[where], None if stored.scale is None else stored.scale[where])
    return error_ratio(states, want.state, want.state_plain)


@contextmanager
def failures_as_reasons() -> Iterator[None]:
    """Whatever another library raises becomes a MeasurementError: it must not end the run."""
    try:
        yield
    except MeasurementError:
        raise
    except Exception as error:
        raise MeasurementError(f"failed: {type(error).__name__}: {error}") from error


def on_cold_slots(job: Job, inputs: Inputs, device: torch.device) -> tuple[Inputs, Pool | None, list[Slots]]:
    """The same batch on a larger pool, room for snapshots if the job takes them, and the slots of every launch."""
    pool, numbers = cold_slots(job.case.batch, job.case.slot_bytes, device)
    return inputs.on_larger_pool(pool), *with_cold_snapshots(job, numbers, device)


def with_cold_snapshots(job: Job, numbers: Sequence[Tensor], device: torch.device) -> tuple[Pool | None, list[Slots]]:
    """Room for snapshots that are not in the cache, if the job takes them, and the slots of launches on these."""
    case = job.case
    snapshots = snapshots_for(job, max(case.batch, COLD_BYTES // (case.slot_bytes * job.stores)), device)
    if snapshots is None:
        return None, [Slots(at) for at in numbers]
    rows = cold_rows(case.batch, snapshots.data.shape[0], len(numbers), device)
    return snapshots, [Slots(at, snapshot_rows=to) for at, to in zip(numbers, rows, strict=True)]


def snapshots_for(job: Job, rows: int, device: torch.device) -> Pool | None:
    """Room for the snapshots of so many batch rows, in the format of the pool; None if the job takes none."""
    if not job.snapshots:
        return None
    return job.case.snapshots(rows, job.stores, job.case.format, job.case.rounding, device)


def time_on_slots(step: Step, slots: Sequence[Slots], flush: bool = False) -> Timing:
    return time_launches([partial(step, of_launch) for of_launch in slots], flush=flush)


def row_of(implementation: str, job: Job, timing: Timing, moved: int, roof: Timing | None) -> Row:
    """A measurement of something that moves so many bytes, as a row."""
    case = job.case
    return Row(
        job.op,
        implementation,
        case.format,
        case.rounding,
        case.batch,
        *case.measured_axes,
        case.tokens or 1,
        int(job.snapshots),
        timing.median,
        timing.spread,
        moved / timing.median / 1e3,
        None if roof is None else 100 * roof.median / timing.median,
    )
