"""`flashstate bench`: measures, shows, and keeps what it measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from flashstate.bench.host import host_costs, host_line, host_table
from flashstate.bench.jobs import BenchedOp, Job, check_words
from flashstate.bench.measure import Report, bench
from flashstate.bench.peers import MeasurementError, Peer, load_peers, versions_of
from flashstate.bench.plot import draw, require_matplotlib
from flashstate.bench.results import HOST_COST, Row, provenance_of, read_csv, write_csv

NO_HOST_COST = "Host cost is what starting a kernel on a GPU costs the host. Without a GPU there is nothing to measure."


@dataclass(frozen=True)
class Files:
    """Where a measurement is kept; None: not there."""

    csv: Path | None = None
    plot: Path | None = None

    def check(self) -> None:
        """Find out before measuring that a file cannot be written."""
        for path in (self.csv, self.plot):
            if path is not None and not path.absolute().parent.is_dir():
                raise ValueError(f"there is no folder {path.absolute().parent} to write {path.name} to")
        if self.plot is not None:
            require_matplotlib()

    def keep(self, rows: Sequence[Row], provenance: Mapping[str, str]) -> None:
        """Write the measurements alone: what a run has that does not come to its end."""
        if self.csv is not None:
            write_csv(self.csv, rows, provenance)

    def write(self, rows: Sequence[Row], provenance: Mapping[str, str]) -> None:
        self.keep(rows, provenance)
        if self.plot is not None:
            draw(rows, provenance, self.plot)


def run_bench(
    op: BenchedOp,
    jobs: Sequence[Job],
    peers: Mapping[str, Peer],
    device: torch.device,
    files: Files,
    commit: str | None = None,
) -> int:
    """Measure with a progress bar, then print, write and draw. Exit status 1 where flashstate is wrong."""
    check_words(jobs)
    files.check()
    errors = Console(stderr=True)
    bindings, skipped = load_peers(peers, device)
    provenance = provenance_of(device, commit)
    try:
        tracked = partial(track, description="measuring", console=errors, transient=True)
        report = bench(op, jobs, bindings, device, tracked, lambda rows: files.keep(rows, provenance))
        report.skipped.update(skipped)
        if bindings:
            provenance["peers"] = versions_of(peers, bindings)
        if device.type == "cuda":
            provenance[HOST_COST] = host_line(host_costs(op, bindings, device, report))
    except MeasurementError as reason:
        errors.print(f"flashstate is {reason}; nothing is timed", style="red")
        return 1
    show(Console(), report, provenance)
    files.write(report.rows, provenance)
    return 0


def run_host(op: BenchedOp, peers: Mapping[str, Peer], device: torch.device) -> int:
    """Measure and print what a call costs the host, and nothing else. Exit status 1 where flashstate is wrong."""
    console = Console()
    if device.type != "cuda":
        console.print(NO_HOST_COST, highlight=False)
        return 0
    bindings, skipped = load_peers(peers, device)
    report = Report(skipped=skipped)
    try:
        costs = host_costs(op, bindings, device, report)
    except MeasurementError as reason:
        Console(stderr=True).print(f"flashstate is {reason}; nothing is timed", style="red")
        return 1
    console.print(host_table(costs, op))
    show_skipped(console, report)
    return 0


def redraw(csv_path: Path, files: Files) -> int:
    """Print a file that an earlier run wrote, and draw it."""
    provenance, rows = read_csv(csv_path)
    files.check()
    show(Console(), Report(rows), provenance)
    files.write(rows, provenance)
    return 0


def show(console: Console, report: Report, provenance: Mapping[str, str]) -> None:
    console.print(results_table(report.rows, provenance.get("device", "an unknown device")))
    if HOST_COST in provenance:
        console.print(f"{HOST_COST}: {provenance[HOST_COST]}", markup=False, highlight=False)
    show_skipped(console, report)


def show_skipped(console: Console, report: Report) -> None:
    for name, reasons in report.skipped.items():
        for reason in sorted(reasons):
            console.print(f"skipped {name}: {reason}", markup=False, highlight=False)


def results_table(rows: Sequence[Row], device: str) -> Table:
    """All rows, a section per format and form. The title has what they share of their shape."""
    numbers = (Column(name, justify="right") for name in ("batch", "µs", "spread", "GB/s", "% of roof"))
    table = Table(
        "format",
        "implementation",
        *numbers,
        title=f"{rows[0].shape}, on {device}",
        title_justify="left",
        box=SIMPLE_HEAD,
        collapse_padding=True,
    )
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        percent = "" if row.percent_of_roof is None else f"{row.percent_of_roof:.1f}"
        measured = (f"{row.microseconds:.2f}", f"{row.spread:.1%}", f"{row.gigabytes_per_second:,.1f}", percent)
        ends_section = following is not None and following.label != row.label
        table.add_row(row.label, row.implementation, str(row.batch), *measured, end_section=ends_section)
    return table
