"""`flashstate bench`: mamba2_step beside the roof and its peers. Only what was checked in the same run is timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table
from torch import Tensor

from flashstate.bench.peers import PEERS, Binding, MeasurementError, Step
from flashstate.bench.plot import draw, require_matplotlib
from flashstate.bench.results import Row, provenance_of, read_csv, write_csv
from flashstate.bench.timing import COLD_BYTES, Timing, cold_rows, cold_slots, time_launches
from flashstate.state.formats import decode
from flashstate.state.slots import Slots
from flashstate.state.state import State
from flashstate.testing import Case, Expected, Inputs, dtype, error_ratio, make_inputs, oracle

SPARE_SLOTS = 3  # of the small pool results are checked on
CPU_SECONDS = 0.3  # per measurement
CPU_CALLS = 5  # per measurement, at least


@dataclass(frozen=True)
class Job:
    """One measurement: a case, updated in place, or with snapshots of every token and the pool only read."""

    case: Case
    snapshots: bool = False

    @property
    def stores(self) -> int:
        """States stored per row."""
        return (self.case.tokens or 1) if self.snapshots else 1


@dataclass
class Report:
    """What was measured, and what was not and why: implementation -> reasons."""

    rows: list[Row] = field(default_factory=list)
    skipped: dict[str, set[str]] = field(default_factory=dict)


def jobs_of(
    formats: Sequence[tuple[str, str]], batches: Sequence[int], tokens: Sequence[int], shape: tuple[int, int, int, int]
) -> list[Job]:
    """For every format, number of tokens and batch size of a shape (heads, groups, rows, cols): bfloat16 activations,
    float32 parameters, a gate. Several tokens once with the last state stored, once with all as snapshots."""
    heads, groups, rows, cols = shape
    if heads % groups:
        raise ValueError(f"the number of groups must divide the {heads} heads, got {groups}")
    if heads * rows * cols % 4:
        raise ValueError(f"a state of {heads} heads of {rows} x {cols} is not whole 32-bit words in every format")
    common = Case(1, heads, groups, rows, cols, x="bfloat16", bc="bfloat16", dt="bfloat16")
    return [
        Job(
            replace(
                common,
                batch=batch,
                format=name,
                rounding=rounding,
                slots=batch + SPARE_SLOTS,
                tokens=0 if count == 1 else count,
            ),
            snapshots,
        )
        for name, rounding in formats
        for count in tokens
        for snapshots in ((False,) if count == 1 else (False, True))
        for batch in batches
    ]


def bench(
    jobs: Sequence[Job], device: torch.device, tracked: Callable[[Sequence[Job]], Iterable[Job]] = iter
) -> Report:
    """Check and measure every job; MeasurementError where flashstate's own result is wrong."""
    report = Report()
    on_gpu = device.type == "cuda"
    measure = measure_on_gpu if on_gpu else measure_on_cpu
    with torch.cuda.device(device) if on_gpu else nullcontext():
        for job in tracked(jobs):
            try:
                measure(job, device, report)
            except MeasurementError as reason:
                raise MeasurementError(f"{reason}, for {job.case}") from reason
    return report


def measure_on_gpu(job: Job, device: torch.device, report: Report) -> None:
    """flashstate, every peer that is there and right, and the roof, all on the same cold slots."""
    from flashstate.bench.roofs import time_touch

    case = job.case
    inputs = make_inputs(case, device)
    small = snapshots_for(job, case.batch, device)
    check(partial(bind_flashstate, snapshots=small), inputs, small)
    pool, slots = cold_slots(case.batch, case.slot_bytes, device)
    timed = on_larger_pool(inputs, pool)
    snapshots = snapshots_for(job, max(case.batch, COLD_BYTES // (case.slot_bytes * job.stores)), device)
    if snapshots is None:
        roof = time_touch(timed.state.data, slots)
        ours = time_on_slots(bind_flashstate(timed), slots)
    else:
        rows = cold_rows(case.batch, snapshots.data.shape[0], len(slots), device)
        roof = time_touch(timed.state.data, slots, snapshots.data, rows)
        both = [Slots(at, snapshot_rows=to) for at, to in zip(slots, rows, strict=True)]
        ours = time_on_slots(bind_flashstate(timed, snapshots), both)
    report.rows += [row_of("touch", job, roof, roof), row_of("flashstate", job, ours, roof)]
    for name, bind in PEERS.items():
        try:
            timing = time_peer(bind, inputs, timed, slots)
        except MeasurementError as reason:
            report.skipped.setdefault(name, set()).add(str(reason))
        else:
            report.rows.append(row_of(name, job, timing, roof))


def measure_on_cpu(job: Job, device: torch.device, report: Report) -> None:
    """The reference by the wall clock, on whatever the caches hold: a CPU has no kernels to compare."""
    inputs = make_inputs(job.case, device)
    snapshots = snapshots_for(job, job.case.batch, device)
    bind = partial(bind_flashstate, snapshots=snapshots)
    check(bind, inputs, snapshots)
    timing = time_on_cpu(partial(bind(inputs), inputs.slots))
    report.rows.append(row_of("reference, CPU", job, timing, None))


def snapshots_for(job: Job, rows: int, device: torch.device) -> State | None:
    """Room for the snapshots of so many batch rows, in the format of the pool; None if the job takes none."""
    case = job.case
    if not job.snapshots:
        return None
    shape = (rows, job.stores, case.heads, case.rows, case.cols)
    data = torch.zeros(shape, dtype=dtype(case.format), device=device)
    scale = torch.ones(shape[:-1], device=device) if case.scale_bytes else None
    return State(data, scale, rounding=case.rounding)


def bind_flashstate(inputs: Inputs, snapshots: State | None = None) -> Step:
    out = torch.empty_like(inputs.arguments["x"])
    if snapshots is None:
        return lambda slots: inputs.step(slots=slots, out=out)
    return lambda slots: inputs.step(slots=slots, out=out, snapshots=snapshots, update=False)


def check(bind: Binding, inputs: Inputs, snapshots: State | None = None) -> None:
    """Raise MeasurementError unless a step on a copy of `inputs` gives an output, and in the pool or the snapshots
    states, within their budgets."""
    want, copy = oracle(inputs), inputs.fresh()
    y = bind(copy)(copy.slots).reshape(want.y.shape)
    ratios = {"output": error_ratio(y, want.y, want.y_plain)}
    if snapshots is None:
        ratios["state"] = state_error(copy.state, (copy.slots.long(),), want)
    else:
        x = inputs.arguments["x"]
        for t in range(x.shape[1]):
            ends_there = oracle(inputs.of_tokens(slice(0, t + 1)))
            ratios[f"snapshot of token {t}"] = state_error(snapshots, (slice(0, len(x)), t), ends_there)
    for what, ratio in ratios.items():
        if not ratio <= 1:
            raise MeasurementError(f"wrong: its {what} is {ratio:.3g} times the error budget away from float64")


def state_error(stored: State, where: tuple[Any, ...], want: Expected) -> float:
    """The error of the states in these entries as a fraction of its budget."""
    states = decode(stored.data[where], None if stored.scale is None else stored.scale[where])
    return error_ratio(states, want.state, want.state_plain)


def on_larger_pool(inputs: Inputs, pool: int) -> Inputs:
    """The same batch on a pool of that many slots, filled with the states of the small one."""
    small = inputs.state
    slots = torch.arange(pool, device=small.data.device) % small.data.shape[0]
    scale = None if small.scale is None else small.scale[slots]
    seed = torch.randint(1 << 62, (pool,), device=small.data.device)
    return replace(inputs, state=replace(small, data=small.data[slots], scale=scale, seed=seed))


def time_peer(bind: Binding, inputs: Inputs, timed: Inputs, slots: Sequence[Tensor]) -> Timing:
    """Check a peer on the small pool, then time it on the large one; MeasurementError if either does not go well."""
    try:
        check(bind, inputs)
        return time_on_slots(bind(timed), slots)
    except MeasurementError:
        raise
    except Exception as error:  # whatever another library raises must not end the run
        raise MeasurementError(f"failed: {type(error).__name__}: {error}") from error


def time_on_slots(step: Step, slots: Sequence[Tensor] | Sequence[Slots]) -> Timing:
    return time_launches([partial(step, of_launch) for of_launch in slots])


def time_on_cpu(call: Callable[[], object]) -> Timing:
    """Microseconds of a call by the wall clock, after one that is not counted."""
    call()
    times: list[float] = []
    while len(times) < CPU_CALLS or sum(times) < CPU_SECONDS * 1e6:
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return Timing(statistics.median(times), min(times), max(times))


def row_of(implementation: str, job: Job, timing: Timing, roof: Timing | None) -> Row:
    """A measurement as a row. The roof moves the state and nothing else, so its bytes are fewer."""
    case = job.case
    state = (1 + job.stores) * case.batch * case.slot_bytes
    moved = state if timing is roof else case.counted_bytes(job.stores)
    return Row(
        implementation,
        case.format,
        case.rounding,
        case.batch,
        case.heads,
        case.groups,
        case.rows,
        case.cols,
        case.tokens or 1,
        int(job.snapshots),
        timing.median,
        timing.spread,
        moved / timing.median / 1e3,
        None if roof is None else 100 * roof.median / timing.median,
    )


def run_bench(
    jobs: Sequence[Job],
    device: torch.device,
    csv_path: Path | None,
    plot_path: Path | None,
    commit: str | None = None,
) -> int:
    """Measure with a progress bar, print, write and draw. Exit status 1 where flashstate is wrong."""
    for path in (csv_path, plot_path):
        check_folder(path)
    if plot_path is not None:
        require_matplotlib()
    console, errors = Console(), Console(stderr=True)
    try:
        report = bench(jobs, device, partial(track, description="measuring", console=errors, transient=True))
    except MeasurementError as reason:
        errors.print(f"flashstate is {reason}; nothing is timed", style="red")
        return 1
    provenance = provenance_of(device, commit)
    show(console, report, provenance)
    if csv_path is not None:
        write_csv(csv_path, report.rows, provenance)
    if plot_path is not None:
        draw(report.rows, provenance, plot_path)
    return 0


def redraw(csv_path: Path, plot_path: Path | None) -> int:
    """Print a file that an earlier run wrote, and draw it."""
    provenance, rows = read_csv(csv_path)
    show(Console(), Report(rows), provenance)
    if plot_path is not None:
        check_folder(plot_path)
        draw(rows, provenance, plot_path)
    return 0


def check_folder(path: Path | None) -> None:
    """Find out before measuring that a file cannot be written."""
    if path is not None and not path.absolute().parent.is_dir():
        raise ValueError(f"there is no folder {path.absolute().parent} to write {path.name} to")


def show(console: Console, report: Report, provenance: Mapping[str, str]) -> None:
    console.print(results_table(report.rows, provenance.get("device", "an unknown device")))
    for name, reasons in report.skipped.items():
        for reason in sorted(reasons):
            console.print(f"skipped {name}: {reason}", markup=False, highlight=False)


def results_table(rows: Sequence[Row], device: str) -> Table:
    """All rows, a section per format. The title has the shape of the first: a run has one shape."""
    title = f"mamba2_step, {rows[0].shape}, on {device}"
    numbers = (Column(name, justify="right") for name in ("batch", "µs", "spread", "GB/s", "% of touch"))
    table = Table(
        "format", "implementation", *numbers, title=title, title_justify="left", box=SIMPLE_HEAD, collapse_padding=True
    )
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        percent = "" if row.percent_of_touch is None else f"{row.percent_of_touch:.1f}"
        measured = (f"{row.microseconds:.2f}", f"{row.spread:.1%}", f"{row.gigabytes_per_second:,.1f}", percent)
        ends_section = following is not None and following.label != row.label
        table.add_row(row.label, row.implementation, str(row.batch), *measured, end_section=ends_section)
    return table
