"""`flashstate bench`: measures, shows, and keeps what it measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from flashstate.bench.host import host_costs, host_line, host_table
from flashstate.bench.jobs import BenchedOp, Job, check_words
from flashstate.bench.limit import TimeLimit
from flashstate.bench.measure import Report, bench
from flashstate.bench.peers import Peer, load_peers
from flashstate.bench.plot import draw, require_matplotlib
from flashstate.bench.results import HOST_COST, PLAIN_SLOTS, Row, provenance_of, read_csv, require_folder, write_csv

SLOTS = "slots"  # the entry of the provenance that says what slots calls have
LIMIT = "on a CPU"  # the entry of the provenance that says how many jobs were measured before the time was over
NO_HOST_COST = "Host cost is what starting a kernel on a GPU costs the host. Without a GPU there is nothing to measure."


@dataclass(frozen=True)
class Files:
    """Where a measurement is kept; None: not there."""

    csv: Path | None = None
    plot: Path | None = None

    def check(self) -> None:
        """Find out before measuring that a file cannot be written."""
        for path in filter(None, (self.csv, self.plot)):
            require_folder(path)
        if self.plot is not None:
            require_matplotlib()

    def keep(self, rows: Sequence[Row], provenance: Mapping[str, str]) -> None:
        """Write the CSV alone: what a run has that does not come to its end."""
        if self.csv is not None:
            write_csv(self.csv, rows, provenance)


def run_bench(
    op: BenchedOp,
    jobs: list[Job],
    peers: Mapping[str, Peer],
    device: torch.device,
    files: Files,
    commit: str | None,
    limit: TimeLimit | None = None,
) -> None:
    """Measure, with a line on stderr for each job, then print, write and draw. MeasurementError where flashstate is
    wrong. With a limit, small batches come first, and jobs that had no time are counted."""
    check_words(jobs)
    files.check()
    bindings, skipped = load_peers(peers, device)
    provenance = {**provenance_of(device, commit), SLOTS: PLAIN_SLOTS}
    console = Console(stderr=True)
    told: list[Row] = []

    def keep(report: Report) -> None:
        for row in report.rows[len(told) :]:
            console.print(row_line(row), markup=False, highlight=False, soft_wrap=True)
            told.append(row)
        files.keep(report.rows, provenance)

    todo = iter(jobs)
    if limit is not None:
        todo = takewhile(lambda job: not limit.over, sorted(jobs, key=lambda job: job.case.batch))
    tracked = track(todo, "measuring", total=len(jobs), console=console, transient=True)
    report = bench(op, tracked, bindings, device, keep)
    labels = list(dict.fromkeys(row.label for row in report.rows))
    report.rows.sort(key=lambda row: labels.index(row.label))
    if limit is not None:
        provenance[LIMIT] = (
            f"{len(report.rows)} of {len(jobs)} measurements in {limit.used:.0f} s; --batches measures every job"
        )
    report.skipped.update(skipped)
    if bindings:
        provenance["peers"] = ", ".join(f"{name} {peers[name].version}" for name in bindings)
    if device.type == "cuda":
        provenance[HOST_COST] = host_line(host_costs(op, bindings, device, report))
    show(report, provenance, files)


def run_host(op: BenchedOp, peers: Mapping[str, Peer], device: torch.device) -> None:
    """Measure and print what a call costs the host, and nothing else. MeasurementError where flashstate is wrong."""
    console = Console()
    if device.type != "cuda":
        console.print(NO_HOST_COST, highlight=False)
        return
    bindings, skipped = load_peers(peers, device)
    report = Report(skipped=skipped)
    console.print(host_table(host_costs(op, bindings, device, report), op))
    show_skipped(console, report)


def redraw(csv_path: Path, files: Files) -> None:
    """Print a file that an earlier run wrote, and draw it."""
    provenance, rows = read_csv(csv_path)
    files.check()
    show(Report(rows), provenance, files)


def show(report: Report, provenance: Mapping[str, str], files: Files) -> None:
    """Print what was measured, write it and draw it."""
    console = Console()
    console.print(results_table(report.rows, provenance.get("device", "an unknown device")))
    for name in (SLOTS, HOST_COST, LIMIT):
        if name in provenance:
            console.print(f"{name}: {provenance[name]}", markup=False, highlight=False)
    show_skipped(console, report)
    files.keep(report.rows, provenance)
    if files.plot is not None:
        draw(report.rows, provenance, files.plot)


def show_skipped(console: Console, report: Report) -> None:
    """Print what was not measured, and why."""
    for name, reasons in report.skipped.items():
        for reason in sorted(reasons):
            console.print(f"skipped {name}: {reason}", markup=False, highlight=False)


def row_line(row: Row) -> str:
    """Return a measurement as a line of text."""
    return f"{row.label}, batch {row.batch}, {row.implementation}: {row.microseconds:,.2f} µs"


def results_table(rows: Sequence[Row], device: str) -> Table:
    """All rows, a section per format and form. The title has what they share of their shape."""
    numbers = (Column(name, justify="right") for name in ("batch", "µs", "spread", "GB/s", "% of roof"))
    table = Table(
        "format", "implementation", *numbers, title=f"{rows[0].shape}, on {device}", title_justify="left",
        box=SIMPLE_HEAD, collapse_padding=True,
    )  # fmt: skip
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        percent = "" if row.percent_of_roof is None else f"{row.percent_of_roof:.1f}"
        measured = (f"{row.microseconds:.2f}", f"{row.spread:.1%}", f"{row.gigabytes_per_second:,.1f}", percent)
        ends_section = following is not None and following.label != row.label
        table.add_row(row.label, row.implementation, str(row.batch), *measured, end_section=ends_section)
    return table
