"""`flashstate bench --quick`: a few minutes on any GPU, with the cells of all ops that tell most, and one file of them.

Every cell is checked before it is timed, as every measurement is. A cell that is wrong or fails is in the file with the
reason and without a time, and the others are measured all the same: on a GPU that nobody has tried, that is worth most.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from flashstate.bench.jobs import BFLOAT16, FLOAT32, BenchedOp, Grid, Job, Way
from flashstate.bench.limit import TimeLimit
from flashstate.bench.measure import check, inputs_of, on_cold_slots, row_of, slots_of, storing_for, time_roofs
from flashstate.bench.ops import OPS
from flashstate.bench.peers import MeasurementError
from flashstate.bench.plot import draw, require_matplotlib
from flashstate.bench.quick_file import CORRECT, NO_TIME, Entry, QuickFile, entry_of, identity_of, read_quick
from flashstate.bench.results import PLAIN_SLOTS, Row, provenance_of, require_folder
from flashstate.bench.run import SLOTS, results_table
from flashstate.bench.timing import Timing, time_on_cpu
from flashstate.launch import choose_with_reason, collecting, machine_of, uses_kernels
from flashstate.launch.config import mode_key, table_key
from flashstate.launch.start import Launch
from flashstate.launch.table import table_name
from flashstate.launch.variants import compile_variants, variants_of
from flashstate.proof import Inputs

TOGETHER = 8  # cells whose kernels are compiled side by side, before the first of them is timed
CPU_BATCH = 1  # the largest on a CPU, which has no kernels to measure
NO_MEMORY = "not measured: this GPU has not enough memory"
Roofs = dict[Hashable, tuple[Timing, Timing]]


@dataclass(frozen=True)
class Part:
    """Jobs of an op, and the way to call it: one of its variants, or plainly."""

    op: str
    grid: Grid
    way: str = ""


INT8, FLOAT8, FLOAT16_S = ("int8", "nearest"), ("float8_e4m3fn", "nearest"), ("float16", "stochastic")
SMALL, LARGE = (1, 64, 256), (1, 16, 64)  # batch sizes for small states and for large ones
CHANNELS = {"channels": (10240,)}
PARTS = (  # what tells most comes first: a slow machine does not reach the end
    Part("mamba2", Grid((FLOAT32, BFLOAT16), batches=SMALL)),
    Part("gated_delta", Grid((BFLOAT16, FLOAT32), batches=LARGE)),
    Part("conv1d", Grid((BFLOAT16,), batches=SMALL, sizes=CHANNELS)),
    Part("mamba3", Grid((BFLOAT16,), batches=LARGE)),
    Part("gated_delta", Grid((BFLOAT16,), (4,), ("last",), LARGE), "at once"),
    Part("mamba2_replay", Grid((BFLOAT16,), (6,), ("stationary",), SMALL)),
    Part("gated_delta_replay", Grid((BFLOAT16,), (4,), ("stationary",), LARGE)),
    Part("mamba2", Grid((FLOAT16_S, INT8, ("int8", "stochastic")), batches=SMALL)),
    Part("gated_delta", Grid((INT8, FLOAT8), batches=LARGE)),
    Part("mamba2", Grid((BFLOAT16,), (4,), ("last", "every"), SMALL)),
    Part("gated_delta", Grid((BFLOAT16,), (4,), ("last", "every"), LARGE)),
    Part("mamba2_replay", Grid((FLOAT32, BFLOAT16), batches=SMALL, by_one=("a 16th folds",))),
    Part("gated_delta_replay", Grid((BFLOAT16, INT8), batches=LARGE, by_one=("a 16th folds",))),
    Part("mamba3", Grid((FLOAT32, INT8), batches=LARGE)),
    Part("mamba3", Grid((BFLOAT16,), batches=LARGE), "rank 1"),
    Part("conv1d", Grid((BFLOAT16,), batches=SMALL, sizes=CHANNELS), "early"),
    Part("conv1d", Grid((BFLOAT16,), (4,), ("last",), SMALL, sizes=CHANNELS)),
    Part("mamba2", Grid((("bfloat16", "stochastic"), ("int16", "nearest"), FLOAT8), batches=SMALL)),
)


@dataclass(frozen=True)
class Cell:
    """One measurement: a job of an op, and how it is called."""

    op: BenchedOp
    job: Job  # as it is called
    way: Way
    name: str  # the implementation that rows say

    @property
    def identity(self) -> Entry:
        """What tells it apart, in the file."""
        return identity_of(row_of(self.name, self.job, Timing(1, 1, 1), 0, None))

    def configs(self, device: torch.device) -> list[Entry]:
        """What its kernels are launched with, and where that comes from; nothing where there are no kernels."""
        if not uses_kernels(device):
            return []
        gpu, found = machine_of(device).gpu, []
        for problem in self.job.problems:
            config, reason, measured_at = choose_with_reason(problem, gpu)
            told = {"of": table_key(problem), "mode": mode_key(problem), "batch x heads": problem.batch_heads}
            found.append({**told, **asdict(config), "from": reason, "entry": measured_at})
        return found


def quick_cells(device: torch.device, op: str | None = None, parts: Iterable[Part] = PARTS) -> list[Cell]:
    """The cells to measure on a device, of all ops or of one."""
    found, on_gpu = [], uses_kernels(device)
    for part in parts:
        benched, name = OPS[part.op], "flashstate" if on_gpu else "reference, CPU"
        way = benched.variants[part.way] if part.way else Way(benched.bind)
        if op in (None, part.op):
            jobs = [way.job(job) for job in benched.jobs([part.grid])]
            found += [Cell(benched, job, way, ", ".join(filter(None, (name, part.way)))) for job in jobs]
    return found if on_gpu else [cell for cell in found if cell.job.case.batch <= CPU_BATCH]


def run_quick(op: str | None, device: torch.device, seconds: float, path: Path | None, commit: str | None) -> int:
    """Measure, with a line on stderr and the file written anew for every cell, and print the file. Exit status 1 where
    a cell is wrong or fails."""
    limit = TimeLimit(seconds)
    where = {**provenance_of(device, commit), **facts_of(device), SLOTS: PLAIN_SLOTS}
    path = path or Path(f"flashstate-{table_name(where['device'] if device.type == 'cuda' else 'cpu')}")
    require_folder(path)
    cells = quick_cells(device, op)
    if not cells:
        raise ValueError(f"--quick measures nothing of {op}")
    kept = QuickFile(where, seconds, len(cells))
    console, entries = Console(stderr=True), measured(cells, device, limit)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        for entry in track(entries, "measuring", len(cells), console=console, transient=True):
            if entry["verdict"] != NO_TIME:
                console.print(entry_line(entry), markup=False, highlight=False, soft_wrap=True)
            kept.cells.append(entry)
            kept.used = round(limit.used, 1)
            kept.write(path)
    show_quick(kept)
    Console().print(f"wrote {path}: this one file has everything", highlight=False)
    return int(any(entry["verdict"].startswith(("wrong", "failed")) for entry in kept.cells))


def facts_of(device: torch.device) -> dict[str, Any]:
    """What numbers depend on beside versions and names."""
    if device.type != "cuda":
        return {}
    known = torch.cuda.get_device_properties(device)
    found = {
        "capability": f"{known.major}.{known.minor}", "processors": known.multi_processor_count,
        "memory": known.total_memory, "L2 cache": getattr(known, "L2_cache_size", "unknown"),
        "threads of a warp": machine_of(device).warp,
    }  # fmt: skip
    if torch.version.hip is None:
        return found
    amdgpu = Path("/sys/module/amdgpu/version")  # of the driver in use, where it is not the kernel's own
    driver = amdgpu.read_text().strip() if amdgpu.is_file() else "unknown"
    return {**found, "architecture": known.gcnArchName, "driver": driver}


def measured(cells: Sequence[Cell], device: torch.device, limit: TimeLimit) -> Iterator[Entry]:
    """Every cell as the file has it. Once the time is used up, no cell is begun. Where memory is short, a cell is tried
    once more without what is prepared for others."""
    roofs: Roofs = {}
    for first in range(0, len(cells), TOGETHER):
        group = cells[first : first + TOGETHER]
        ready = prepared(group, device) if uses_kernels(device) and not limit.over else {}
        for i, cell in enumerate(group):
            if limit.over:
                yield entry_of(cell.identity, NO_TIME, cell.configs(device))
            else:
                entry = measure_cell(cell, ready.pop(i, None), device, roofs)
                if entry["verdict"] == NO_MEMORY and ready:
                    ready.clear()  # so that there is room for this one
                    entry = measure_cell(cell, None, device, roofs)
                yield entry


def prepared(cells: Sequence[Cell], device: torch.device) -> dict[int, Inputs]:
    """Inputs of cells, by their places, whose kernels are then compiled side by side. What fails is left to the cell
    that needs it, to say so."""
    ready: dict[int, Inputs] = {}
    launches: list[Launch] = []
    for i, cell in enumerate(cells):
        with suppress(Exception), collecting() as found:
            inputs = cell.way.inputs(inputs_of(cell.job.case, device))
            storing = storing_for(cell.job, cell.job.case.batch, device)
            cell.way.bind(inputs, storing)(slots_of(inputs, storing))()
            ready[i] = inputs
            launches += variants_of(found)
    if device.type == "cuda":
        with suppress(Exception):
            compile_variants(variants_of(launches))
    return ready


def measure_cell(cell: Cell, inputs: Inputs | None, device: torch.device, roofs: Roofs) -> Entry:
    """A cell with its verdict, and with its times if its result is right. No failure ends the run."""
    configs, rows = cell.configs(device), list[Row]()
    try:
        inputs = cell.way.inputs(inputs_of(cell.job.case, device)) if inputs is None else inputs
        rows, verdict = checked_rows(cell, inputs, device, roofs), CORRECT
    except MeasurementError as reason:
        verdict = str(reason)
    except torch.OutOfMemoryError:
        verdict = NO_MEMORY
    except Exception as error:
        verdict = f"failed: {type(error).__name__}: {error}"
    del inputs
    if device.type == "cuda":
        with suppress(RuntimeError):  # after a kernel that failed, every call of CUDA does
            torch.cuda.empty_cache()
    return entry_of(cell.identity, verdict, configs, rows)


def checked_rows(cell: Cell, inputs: Inputs, device: torch.device, known: Roofs) -> list[Row]:
    """The roofs and the cell, timed on the same cold slots after its result was checked; MeasurementError where that is
    wrong. On a CPU the reference alone."""
    job, bind = cell.job, cell.way.bind
    small = storing_for(job, job.case.batch, device)
    (cell.op.check or check)(bind, inputs, small)
    if not uses_kernels(device):
        timing = time_on_cpu(bind(inputs, small)(slots_of(inputs, small)))
        return [row_of(cell.name, job, timing, job.counted_bytes, None)]
    cold = on_cold_slots(job, inputs, device)
    roofs = time_roofs(job, cold, known)
    roof, _ = next(iter(roofs.values()))
    rows = [row_of(name, job, timing, moved, roof) for name, (timing, moved) in roofs.items()]
    return [*rows, row_of(cell.name, job, cold.time(bind), job.counted_bytes, roof)]


def show_quick_file(path: Path, plot: Path | None) -> None:
    """Print a file that an earlier run wrote, maybe elsewhere, and draw a picture per op."""
    found = read_quick(path)
    if plot is not None:
        require_folder(plot)
        require_matplotlib()
    show_quick(found)
    for op, rows in by_shape(found.rows) if plot is not None else ():
        assert plot is not None
        draw(rows, found.where, plot.with_stem(f"{plot.stem}-{op.split(',')[0]}"))


def show_quick(found: QuickFile) -> None:
    """Print where it was measured, a table per op, where configs come from, and what has no time and why."""
    console = Console(highlight=False)
    for name, value in found.where.items():
        console.print(f"{name:18}{value}", markup=False)
    device = found.where.get("device", "an unknown device")
    for _, rows in by_shape(found.rows):
        console.print(results_table(rows, device))
    for line in (*config_lines(found.cells), *untimed_lines(found.cells)):
        console.print(line, markup=False)
    console.print(f"{found.used:.0f} of {found.limit:.0f} seconds were used")


def by_shape(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    """Rows of every op and shape, those with one label side by side."""
    first = {row.label: place for place, row in reversed(list(enumerate(rows)))}
    ordered = sorted(rows, key=lambda row: (row.shape, first[row.label]))
    return [(shape, list(of_shape)) for shape, of_shape in groupby(ordered, lambda row: row.shape)]


def config_lines(cells: Iterable[Entry]) -> list[str]:
    """How many configs come from where."""
    sources = [config["from"] for cell in cells for config in cell["configs"]]
    return [f"{sources.count(source)} configs: {source}" for source in dict.fromkeys(sources)]


def entry_line(cell: Entry) -> str:
    """Return a cell as a line of text: its time, or why it has none."""
    return (
        f"{cell['op']}, {cell['implementation']}, {cell['format']} {cell['rounding']}, {cell['tokens']} tokens, "
        f"{cell['stored']} stored, batch {cell['batch']}: "
        + (f"{cell['microseconds']:,.2f} µs" if cell["verdict"] == CORRECT else cell["verdict"])
    )


def untimed_lines(cells: Iterable[Entry]) -> list[str]:
    """What was not timed, and why."""
    untimed = [cell for cell in cells if cell["verdict"] != CORRECT]
    late = sum(cell["verdict"] == NO_TIME for cell in untimed)
    lines = [entry_line(cell) for cell in untimed if cell["verdict"] != NO_TIME]
    return [*lines, *([f"{late} of {len(list(cells))} cells: {NO_TIME}"] if late else [])]
