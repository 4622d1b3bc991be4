"""Measuring jobs: a step beside the roofs and its peers. Only what was checked in the same run is timed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from flashstate.bench.binding import IN_PLACE, Binding, Storing
from flashstate.bench.jobs import BenchedOp, Job, Way
from flashstate.bench.peers import MeasurementError
from flashstate.bench.results import Row
from flashstate.bench.timing import COLD_BYTES, MAX_LAUNCHES, Timing, cold_rows, cold_slots, time_launches, time_on_cpu
from flashstate.proof import AnyCase, Expected, Inputs, Pool, carried_errors, error_ratio, make_inputs, oracle, slotted
from flashstate.proof.inputs import AnyInputs
from flashstate.state.formats import bits_of, decode
from flashstate.state.slots import Slots


@dataclass
class Report:
    """What was measured, and what was not and why."""

    rows: list[Row] = field(default_factory=list)
    skipped: dict[str, set[str]] = field(default_factory=dict)  # implementation -> reasons
    roofs: dict[Hashable, tuple[Timing, Timing]] = field(default_factory=dict)  # `touch` and `read`, by Job.touched

    @contextmanager
    def skipping(self, name: str) -> Iterator[None]:
        """Keep why an implementation is not timed: whatever another library raises must not end the run."""
        try:
            yield
        except Exception as error:
            known = isinstance(error, MeasurementError)
            reason = str(error) if known else f"failed: {type(error).__name__}: {error}"
            self.skipped.setdefault(name, set()).add(reason)


def bench(
    op: BenchedOp, jobs: Iterable[Job], peers: dict[str, Binding], device: torch.device, keep: Callable[[Report], None]
) -> Report:
    """Check and measure every job, and have the report kept after each; MeasurementError where flashstate is wrong."""
    report, on_gpu = Report(), device.type == "cuda"
    measure = partial(measure_on_gpu, peers=peers) if on_gpu else measure_on_cpu
    with torch.cuda.device(device) if on_gpu else nullcontext():
        for job in jobs:
            try:
                measure(op, job, device=device, report=report)
            except MeasurementError as reason:
                raise MeasurementError(f"{reason}, for {job.case}") from reason
            keep(report)
    return report


@dataclass(frozen=True)
class ColdBatch:
    """A batch on a pool so large that every launch meets slots that are not in the cache."""

    inputs: Inputs
    storing: Storing
    slots: Sequence[Slots]  # of every launch
    flush: bool  # launches touch so little that the cache has it when their graph comes again: it is swept before each

    def time(self, bind: Binding) -> Timing:
        """The time of a step, after its results were checked."""
        step = bind(self.inputs, self.storing)
        return time_launches([step(of_launch) for of_launch in self.slots], flush=self.flush)

    def time_touch(self, job: Job) -> Timing:
        """`touch` of the pool of a job that stores something, and of its snapshots, or of its tokens."""
        from flashstate.bench import roofs

        x = self.inputs.main if job.case.token_bytes else None
        copies = None if self.storing.snapshots is None else self.storing.snapshots.data
        return roofs.time_touch(self.inputs.state.data, self.slots, copies, x, self.flush)

    def time_read(self) -> Timing:
        """`read` of the pool."""
        from flashstate.bench import roofs

        return roofs.time_read(self.inputs.state.data, self.slots, self.flush)


def measure_on_gpu(op: BenchedOp, job: Job, peers: Mapping[str, Binding], device: torch.device, report: Report) -> None:
    """Measure the roofs, flashstate, and every other way and peer that is right, all on the same cold slots."""
    inputs, small = inputs_of(job.case, device), storing_for(job, job.case.batch, device)
    check_of_op = op.check or check
    check_of_op(op.bind, inputs, small)
    cold = on_cold_slots(job, inputs, device)
    roofs = time_roofs(job, cold, report.roofs)
    roof, _ = next(iter(roofs.values()), (None, 0))
    report.rows += [row_of(name, job, timing, moved, roof) for name, (timing, moved) in roofs.items()]
    report.rows.append(row_of("flashstate", job, cold.time(op.bind), job.counted_bytes, roof))
    ways = {f"flashstate, {how}": way for how, way in op.ways.items()}
    for name, way in {**ways, **{name: Way(bind) for name, bind in peers.items()}}.items():
        with report.skipping(name):
            as_called = way.job(job)
            checked = inputs if as_called == job else inputs_of(as_called.case, device)
            check_of_op(way.bind, way.inputs(checked), small)
            laid = way.inputs(on_cold_slots(as_called, checked, device).inputs if way.fresh else cold.inputs)
            there, own = replace(cold, inputs=laid), roof
            timing = there.time(way.bind)
            if laid is not cold.inputs:  # other memory has a roof of its own
                ((kind, (own, moved)), *_) = time_roofs(as_called, there, {}).items()
                report.rows.append(row_of(f"{kind}, {name.removeprefix('flashstate, ')}", job, own, moved, own))
            report.rows.append(row_of(name, job, timing, as_called.counted_bytes, own))


def time_roofs(
    job: Job, cold: ColdBatch, known: dict[Hashable, tuple[Timing, Timing]]
) -> dict[str, tuple[Timing, int]]:
    """The roofs with the bytes that each moves; first the one that counts. That is `touch`, or `read` if no state is
    stored, or `roof`, made of both, if some are. Plans move no states. `known` has `touch` and `read` of jobs that were
    measured before."""
    if job.stored == "plan and commit":
        return {}
    if job.stored == "none":
        return {"read": (cold.time_read(), job.read_bytes)}
    if job.touched not in known:
        known[job.touched] = cold.time_touch(job), cold.time_read()
    touch, read = known[job.touched]
    both = {"touch": (touch, job.touched_bytes), "read": (read, job.read_bytes)}
    roof = job.roof_of_both(touch, read)
    return both if roof is None else {"roof": (roof, job.counted_bytes), **both}


def measure_on_cpu(op: BenchedOp, job: Job, device: torch.device, report: Report) -> None:
    """Measure the reference by the wall clock, on whatever the caches hold: a CPU has no kernels to compare."""
    inputs, storing = inputs_of(job.case, device), storing_for(job, job.case.batch, device)
    (op.check or check)(op.bind, inputs, storing)
    timing = time_on_cpu(op.bind(inputs, storing)(slots_of(inputs, storing)))
    report.rows.append(row_of("reference, CPU", job, timing, job.counted_bytes, None))


def inputs_of(case: AnyCase, device: torch.device) -> Inputs:
    """The inputs of a case, with a copy of slot 0 in its place: some libraries take that one for padding."""
    inputs = make_inputs(case, device)
    spare = min(set(range(1, len(inputs.state.data))).difference(inputs.slots.tolist()))
    for tensor in slotted(inputs.state).values():
        bits_of(tensor)[spare] = bits_of(tensor)[0]
    return replace(inputs, slots=torch.where(inputs.slots == 0, spare, inputs.slots))


def check(bind: Binding, inputs: AnyInputs, storing: Storing = IN_PLACE) -> AnyInputs:
    """The copy of `inputs` that a step was made on; MeasurementError unless output and states are within their budgets.
    States are in the pool, with all that goes with them, or in snapshots; a pool that is only read stays as it was."""
    want, copy, batch = oracle(inputs), inputs.fresh(), len(inputs.slots)
    y = bind(copy, storing)(slots_of(copy, storing))().reshape(want.y.shape)
    ratios = {"output": error_ratio(y, want.y, want.y_plain)}
    if storing.update:
        ratios |= {"state": state_error(copy.state, (copy.slots.long(),), want), **carried_errors(copy, want)}
    elif any(not torch.equal(bits_of(t), bits_of(slotted(inputs.state)[n])) for n, t in slotted(copy.state).items()):
        raise MeasurementError("wrong: it changes states that are only to be read")
    if storing.snapshots is not None:
        for t in range(storing.snapshots.data.shape[1]):
            ends_there = oracle(inputs.of_tokens(slice(0, t + 1)))
            ratios[f"snapshot of token {t}"] = state_error(storing.snapshots, (slice(0, batch), t), ends_there)
    require_within_budgets(ratios)
    return copy


def require_within_budgets(ratios: Mapping[str, float]) -> None:
    """Raise MeasurementError where an error, by what is wrong, is more than its budget, which it is a fraction of."""
    for what, ratio in ratios.items():
        if not ratio <= 1:
            raise MeasurementError(f"wrong: its {what} is {ratio:.3g} times the error budget away from float64")


def slots_of(inputs: Inputs, storing: Storing) -> Slots:
    """The slots of a batch, whose row b fills row b of the snapshots if there are any."""
    rows = None if storing.snapshots is None else torch.arange(len(inputs.slots)).to(inputs.slots)
    return Slots(inputs.slots, snapshot_rows=rows)


def state_error(stored: Pool, where: tuple[Any, ...], want: Expected) -> float:
    """The error of the states in these entries as a fraction of its budget."""
    states = decode(stored.data[where], None if stored.scale is None else stored.scale[where])
    return error_ratio(states, want.state, want.state_plain)


def on_cold_slots(job: Job, inputs: Inputs, device: torch.device, most: int = MAX_LAUNCHES) -> ColdBatch:
    """The batch of a job on cold slots, and on cold rows of snapshots if there are any, for `most` launches at most."""
    case = job.case
    pool, numbers = cold_slots(case.batch, case.slot_bytes, device, most)
    storing = storing_for(job, max(case.batch, COLD_BYTES // (case.slot_bytes * max(job.stores, 1))), device)
    slots = [Slots(at) for at in numbers]
    if storing.snapshots is not None:
        rows = cold_rows(case.batch, len(storing.snapshots.data), len(slots), device)
        slots = [replace(at, snapshot_rows=to) for at, to in zip(slots, rows, strict=True)]
    return ColdBatch(inputs.on_larger_pool(pool), storing, slots, len(slots) * job.read_bytes < COLD_BYTES)


def storing_for(job: Job, rows: int, device: torch.device) -> Storing:
    """Where a job stores states; snapshots have room for so many rows of a batch, in the format of the pool."""
    if job.stored != "every":
        return Storing(update=job.stored != "none")
    return Storing(job.case.snapshots(rows, job.stores, job.case.format, job.case.rounding, device), update=False)


def row_of(implementation: str, job: Job, timing: Timing, moved: int, roof: Timing | None) -> Row:
    """A measurement of something that moves so many bytes, as a row."""
    case = job.case
    told = (job.op, implementation, case.format, case.rounding, case.batch, *case.measured_axes, case.tokens or 1)
    percent = None if roof is None else 100 * roof.median / timing.median
    return Row(*told, job.stored, timing.median, timing.spread, moved / timing.median / 1e3, percent)
