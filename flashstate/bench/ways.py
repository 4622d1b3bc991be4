"""`flashstate bench --ways`: an op as users call it, on slots and with arguments of other kinds than those that it is
measured with. What this costs is held to what the bytes explain. Needs a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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

from flashstate.bench.binding import Binding
from flashstate.bench.jobs import BenchedOp, Job, check_words, with_int64
from flashstate.bench.measure import ColdBatch, Report, check, inputs_of, on_cold_slots, row_of, storing_for, time_roofs
from flashstate.bench.peers import MeasurementError, Peer, load_peers
from flashstate.bench.results import PLAIN_SLOTS, Row, provenance_of, read_rows, require_folder, write_csv
from flashstate.bench.run import show_skipped
from flashstate.bench.timing import Captured, Timing, captured, cold_slots, time_by_turns
from flashstate.proof import AnyCase, Inputs

TOLERANCE = 2.0  # percent of the plain time that a difference may be away from what explains it
PLAIN = "plain"


@dataclass(frozen=True)
class UserWay:
    """What is other than in the plain way: fields of a case, as far as its op has them, and the order of slots."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    ascending: bool = False

    def of(self, case: AnyCase) -> AnyCase:
        """The case in this way."""
        return replace(case, **{name: value for name, value in self.fields.items() if hasattr(case, name)})


WAYS = {
    PLAIN: UserWay(),
    "again": UserWay(),  # the plain way once more: what differs is noise
    "int64": UserWay({"index": "int64"}),
    "ascending": UserWay(ascending=True),
    "no-gate": UserWay({"z": False}),
    "float32-dt": UserWay({"dt": "float32", "gates": "float32"}),
}


@dataclass(frozen=True)
class WayRow(Row):
    """One measurement of a way, beside the plain way of the same implementation."""

    way: str
    bytes: int  # that a call must move at least
    roof_microseconds: float | None  # None where no states move
    difference: float  # from the time of the plain way, percent of it; so are the two below from its bytes and roof
    by_bytes: float
    by_roof: float  # 0 where slots have the order of the plain way

    @property
    def held(self) -> bool:
        """Whether bytes, and no more of the order of slots than there is in the roof, explain the difference."""
        least, most = sorted((self.by_bytes, self.by_bytes + self.by_roof))
        return least - TOLERANCE <= self.difference <= most + TOLERANCE


read_ways = partial(read_rows, kind=WayRow, command="flashstate bench --ways")


def choose_ways(op: BenchedOp, names: Sequence[str]) -> list[str]:
    """The plain way, and these or all others that the op has; ValueError for a name that is none of them."""
    known = [name for name, way in WAYS.items() if way.ascending or not way.fields or way.of(op.case) != op.case]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"{op.name} has no way {unknown[0]!r}, only {', '.join(known)}")
    return list(dict.fromkeys([PLAIN, *(names or known)]))


def run_ways(
    op: BenchedOp, jobs: list[Job], names: Sequence[str], peers: Mapping[str, Peer], device: torch.device,
    csv_path: Path | None, commit: str | None,
) -> None:  # fmt: skip
    """Measure all jobs in these ways, then print and write. MeasurementError where flashstate is wrong."""
    if device.type != "cuda":
        raise ValueError("--ways compares times of kernels: it needs a GPU")
    check_words(jobs)
    ways = choose_ways(op, names)
    if csv_path is not None:
        require_folder(csv_path)
    bindings, skipped = load_peers(peers, device)
    provenance = {**provenance_of(device, commit), PLAIN: plain_way(op)}
    if bindings:
        provenance["peers"] = ", ".join(f"{name} {peers[name].version}" for name in bindings)
    report, rows = Report(skipped=skipped), []
    for job in track(jobs, "measuring", console=Console(stderr=True), transient=True):
        rows += measure_ways(op, job, ways, bindings, device, report)
        if csv_path is not None:
            write_csv(csv_path, rows, provenance)
    show_ways(rows, provenance)
    show_skipped(Console(), report)


def show_file(path: Path) -> None:
    """Print a file that an earlier run wrote."""
    provenance, rows = read_ways(path)
    show_ways(rows, provenance)


def plain_way(op: BenchedOp) -> str:
    """The plain way of an op, in words."""
    case = op.case
    gate = {True: ", a gate", False: ", no gate", None: ""}[getattr(case, "z", None)]
    dt = next((f", {name} in {getattr(case, name)}" for name in ("dt", "gates") if hasattr(case, name)), "")
    return f"{PLAIN_SLOTS}{gate}{dt}"


def measure_ways(
    op: BenchedOp, job: Job, names: Sequence[str], peers: Mapping[str, Binding], device: torch.device, report: Report
) -> list[WayRow]:
    """Measure a job in all of these ways, of which the first is the plain one, in the same memory and by turns."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        called = {name: replace(job, case=WAYS[name].of(job.case)) for name in names}
        made = {case: inputs_of(case, device) for case in {of_way.case for of_way in called.values()}}
        cold = on_cold_slots(job, made[job.case], device)
        graphs: dict[tuple[str, str], Captured] = {}
        roofs: dict[bool, Timing | None] = {}  # of slots that ascend, and of others
        for name, of_way in called.items():
            inputs = made[of_way.case]
            there, ascending = in_way(name, of_way, inputs, cold), WAYS[name].ascending
            if ascending not in roofs:
                roofs[ascending] = next((roof for roof, _ in time_roofs(of_way, there, {}).values()), None)
            for implementation, bind in {"flashstate": op.bind, **peers}.items():
                with nullcontext() if implementation == "flashstate" else report.skipping(implementation):
                    require_right(op, bind, of_way, inputs)
                    step = bind(there.inputs, there.storing)
                    graphs[implementation, name] = captured([step(of_launch) for of_launch in there.slots])
        timings = dict(zip(graphs, time_by_turns(list(graphs.values()), flush=cold.flush), strict=True))
    return rows_of(called, timings, roofs)


def in_way(name: str, job: Job, inputs: Inputs, cold: ColdBatch) -> ColdBatch:
    """The plain batch with the arguments and the slots of a way; its pool stays."""
    case, device, slots = job.case, inputs.slots.device, cold.slots
    if WAYS[name].ascending:
        _, numbers = cold_slots(case.batch, case.slot_bytes, device, len(slots), ascending=True)
        slots = [replace(of_launch, read=read) for of_launch, read in zip(slots, numbers, strict=True)]
    if case.index == "int64":
        wide = torch.cat([of_launch.read for of_launch in slots]).long().split(case.batch)  # side by side, as others
        slots = [replace(with_int64(of_launch), read=read) for of_launch, read in zip(slots, wide, strict=True)]
    return replace(cold, inputs=replace(inputs, state=cold.inputs.state), slots=slots)


def require_right(op: BenchedOp, bind: Binding, job: Job, inputs: Inputs) -> None:
    """Raise MeasurementError where the results of a step are wrong."""
    try:
        (op.check or check)(bind, inputs, storing_for(job, job.case.batch, inputs.slots.device))
    except MeasurementError as reason:
        raise MeasurementError(f"{reason}, for {job.case}") from reason


def rows_of(
    called: Mapping[str, Job], timings: Mapping[tuple[str, str], Timing], roofs: Mapping[bool, Timing | None]
) -> list[WayRow]:
    """The rows of all implementations that can be called in the plain way."""
    rows, usual = [], called[PLAIN]
    for (implementation, name), timing in sorted(timings.items(), key=lambda found: found[0][0] != "flashstate"):
        plain, job = timings.get((implementation, PLAIN)), called[name]
        if plain is None:
            continue
        roof, other = roofs[WAYS[name].ascending], roofs[WAYS[PLAIN].ascending]
        told: dict[str, Any] = {**vars(row_of(implementation, job, timing, job.counted_bytes, roof))}
        told |= {"way": name, "bytes": job.counted_bytes, "roof_microseconds": roof and roof.median}
        told |= {"difference": percent_more(timing.median, plain.median)}
        told |= {"by_bytes": percent_more(job.counted_bytes, usual.counted_bytes)}
        told |= {"by_roof": percent_more(roof.median, other.median) if roof and other else 0.0}
        rows.append(WayRow(**told))
    return rows


def percent_more(one: float, other: float) -> float:
    return 100 * (one / other - 1)


def show_ways(rows: Sequence[WayRow], provenance: Mapping[str, str]) -> None:
    """Print what was measured, and which differences nothing explains."""
    console = Console()
    console.print(ways_table(rows, provenance.get("device", "an unknown device")))
    for line in (f"{PLAIN}: {provenance.get(PLAIN, 'unknown')}", *unexplained(rows)):
        console.print(line, markup=False, highlight=False)


def ways_table(rows: Sequence[WayRow], device: str) -> Table:
    """All rows, a section per call."""
    numbers = ("batch", "µs", "spread", "bytes", "roof µs", "% of roof", "difference", "by bytes", "by roof")
    columns = (Column(name, justify="right") for name in numbers)
    table = Table(
        "format", "implementation", "way", *columns, title=f"{rows[0].shape}, on {device}", title_justify="left",
        box=SIMPLE_HEAD, collapse_padding=True,
    )  # fmt: skip
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        of_roof = (row.roof_microseconds, "2f"), (row.percent_of_roof, "1f")
        roof = ("" if value is None else f"{value:.{digits}}" for value, digits in of_roof)
        measured = (f"{row.microseconds:.2f}", f"{row.spread:.1%}", f"{row.bytes:,}", *roof)
        apart = (
            f"{row.difference:+.1f} %{'' if row.held else ' !'}",
            f"{row.by_bytes:+.1f} %",
            f"{row.by_roof:+.1f} %",
        )
        ends = following is not None and (following.label, following.batch) != (row.label, row.batch)
        table.add_row(row.label, row.implementation, row.way, str(row.batch), *measured, *apart, end_section=ends)
    return table


def unexplained(rows: Iterable[WayRow]) -> list[str]:
    """What to say of differences that bytes and roofs do not explain."""
    found = [row for row in rows if not row.held]
    lines = [
        f"! {row.label}, batch {row.batch}, {row.implementation}, {row.way}: {row.difference:+.1f} %, but bytes "
        f"explain {row.by_bytes:+.1f} % and the roof {row.by_roof:+.1f} %"
        for row in found
    ]
    return lines or [f"Every difference is within {TOLERANCE:g} % of what bytes and roofs explain."]
