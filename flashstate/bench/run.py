"""`flashstate bench`: mamba2_step beside the roof and its peers. Only what was checked in the same run is timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table
from torch import Tensor

from flashstate.bench.peers import PEERS, Binding, MeasurementError, Step
from flashstate.bench.plot import draw, require_matplotlib
from flashstate.bench.results import Row, provenance_of, read_csv, write_csv
from flashstate.bench.timing import Timing, cold_slots, time_launches
from flashstate.state.formats import decode
from flashstate.testing import Case, Inputs, error_ratio, make_inputs, oracle

SPARE_SLOTS = 3  # of the small pool results are checked on
CPU_SECONDS = 0.3  # per measurement
CPU_CALLS = 5  # per measurement, at least


@dataclass
class Report:
    """What was measured, and what was not and why: implementation -> reasons."""

    rows: list[Row] = field(default_factory=list)
    skipped: dict[str, set[str]] = field(default_factory=dict)


def cases_of(
    formats: Sequence[tuple[str, str]], batches: Sequence[int], heads: int, groups: int, rows: int, cols: int
) -> list[Case]:
    """One case per format and batch size: bfloat16 activations, float32 parameters, a gate."""
    if heads % groups:
        raise ValueError(f"the number of groups must divide the {heads} heads, got {groups}")
    common = Case(heads=heads, groups=groups, rows=rows, cols=cols, x="bfloat16", bc="bfloat16", dt="bfloat16")
    return [
        replace(common, batch=batch, format=name, rounding=rounding, slots=batch + SPARE_SLOTS)
        for name, rounding in formats
        for batch in batches
    ]


def bench(
    cases: Sequence[Case], device: torch.device, tracked: Callable[[Sequence[Case]], Iterable[Case]] = iter
) -> Report:
    """Check and measure every case; MeasurementError where flashstate's own result is wrong."""
    report = Report()
    on_gpu = device.type == "cuda"
    measure = measure_on_gpu if on_gpu else measure_on_cpu
    with torch.cuda.device(device) if on_gpu else nullcontext():
        for case in tracked(cases):
            try:
                measure(case, device, report)
            except MeasurementError as reason:
                raise MeasurementError(f"{reason}, for {case}") from reason
    return report


def measure_on_gpu(case: Case, device: torch.device, report: Report) -> None:
    """flashstate, every peer that is there and right, and the roof, all on the same cold slots."""
    from flashstate.bench.roofs import time_touch

    inputs = make_inputs(case, device)
    check(bind_flashstate, inputs)
    pool, slots = cold_slots(case.batch, case.slot_bytes, device)
    timed = on_larger_pool(inputs, pool)
    roof = time_touch(timed.state.data, slots)
    ours = time_on_slots(bind_flashstate(timed), slots)
    report.rows += [row_of("touch", case, roof, roof), row_of("flashstate", case, ours, roof)]
    for name, bind in PEERS.items():
        try:
            timing = time_peer(bind, inputs, timed, slots)
        except MeasurementError as reason:
            report.skipped.setdefault(name, set()).add(str(reason))
        else:
            report.rows.append(row_of(name, case, timing, roof))


def measure_on_cpu(case: Case, device: torch.device, report: Report) -> None:
    """The reference by the wall clock, on whatever the caches hold: a CPU has no kernels to compare."""
    inputs = make_inputs(case, device)
    check(bind_flashstate, inputs)
    timing = time_on_cpu(partial(bind_flashstate(inputs), inputs.slots))
    report.rows.append(row_of("reference, CPU", case, timing, None))


def bind_flashstate(inputs: Inputs) -> Step:
    out = torch.empty_like(inputs.arguments["x"])
    return lambda slots: inputs.step(slots=slots, out=out)


def check(bind: Binding, inputs: Inputs) -> None:
    """Raise MeasurementError unless a step on a copy of `inputs` gives an output and states within their budgets."""
    want, copy = oracle(inputs), inputs.fresh()
    y = bind(copy)(copy.slots)
    states = decode(copy.state.data[copy.slots.long()])
    ratios = {
        "output": error_ratio(y, want.y, want.y_plain),
        "state": error_ratio(states, want.state, want.state_plain),
    }
    for what, ratio in ratios.items():
        if ratio > 1:
            raise MeasurementError(f"wrong: its {what} is {ratio:.3g} times the error budget away from float64")


def on_larger_pool(inputs: Inputs, pool: int) -> Inputs:
    """The same batch on a pool of that many slots, with random states."""
    small = inputs.state
    data = torch.empty(pool, *small.data.shape[1:], dtype=small.data.dtype, device=small.data.device).normal_()
    seed = torch.randint(1 << 62, (pool,), device=small.data.device)
    return replace(inputs, state=replace(small, data=data, seed=seed))


def time_peer(bind: Binding, inputs: Inputs, timed: Inputs, slots: Sequence[Tensor]) -> Timing:
    """Check a peer on the small pool, then time it on the large one; MeasurementError if either does not go well."""
    try:
        check(bind, inputs)
        return time_on_slots(bind(timed), slots)
    except MeasurementError:
        raise
    except Exception as error:  # whatever another library raises must not end the run
        raise MeasurementError(f"failed: {type(error).__name__}: {error}") from error


def time_on_slots(step: Step, slots: Sequence[Tensor]) -> Timing:
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


def row_of(implementation: str, case: Case, timing: Timing, roof: Timing | None) -> Row:
    """A measurement as a row. The roof moves the state and nothing else, so its bytes are fewer."""
    moved = 2 * case.batch * case.slot_bytes if timing is roof else case.counted_bytes
    return Row(
        implementation,
        case.format,
        case.rounding,
        case.batch,
        case.heads,
        case.groups,
        case.rows,
        case.cols,
        timing.median,
        timing.spread,
        moved / timing.median / 1e3,
        None if roof is None else 100 * roof.median / timing.median,
    )


def run_bench(
    cases: Sequence[Case],
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
        report = bench(cases, device, partial(track, description="measuring", console=errors, transient=True))
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
