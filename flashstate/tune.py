"""`flashstate tune`: measures configs on synthetic state, and writes the table of a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from itertools import groupby, product
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from flashstate.bench.binding import TimedCall
from flashstate.bench.jobs import BenchedOp, Job, with_int64
from flashstate.bench.limit import TimeLimit
from flashstate.bench.measure import on_cold_slots, slots_of, storing_for
from flashstate.bench.peers import MeasurementError
from flashstate.bench.quick import Cell, quick_cells
from flashstate.bench.results import require_folder
from flashstate.bench.timing import time_launches
from flashstate.info import versions
from flashstate.launch import Config, Gpu, Problem, collecting, machine_of, override
from flashstate.launch.config import measured_sizes, mode_key, table_key
from flashstate.launch.search import Point, Stopwatch, search
from flashstate.launch.table import (
    COLUMNS,
    NOT_MEASURED,
    TABLES,
    Configs,
    TableFile,
    read_table_file,
    table_name,
    write_table_file,
)
from flashstate.launch.variants import compile_variants, variants_of
from flashstate.proof import Pool, make_inputs
from flashstate.proof.laws import LawBroken, require
from flashstate.state.slots import Slots

REPLAYS = 5
MAX_LAUNCHES = 1024  # in a graph: of 8-bit states still more than twice what the cache holds
CHECKED_ROWS = 16  # of the batch on which configs must give equal bytes
FEW_SLOTS = 8  # whose states fill a pool that is only timed


def run_tune(op: BenchedOp, jobs: Sequence[Job], device: torch.device, output: Path | None, resume: bool) -> int:
    """Tune for the GPU of a device, and say where the table is. Exit status 1 where configs disagree."""
    if device.type != "cuda":
        raise ValueError("tune measures kernels on a GPU, and there is none")
    gpu, by_problem = machine_of(device).gpu, jobs_by_problem(with_variants(op, jobs))
    path = output or Path(table_name(gpu.name))
    console = Console(stderr=True)
    try:
        with torch.cuda.device(device):
            tune(list(by_problem), GpuStopwatch(op, by_problem, device), gpu, path, resume, console)
    except LawBroken as reason:
        console.print(f"configs that must not change a byte do: {reason}", style="red", highlight=False)
        return 1
    Console().print(f"wrote {path}; flashstate reads tables in {TABLES}")
    return 0


def run_tune_quick(op: str | None, device: torch.device, seconds: float, output: Path | None) -> int:
    """Find configs of what `bench --quick` measures, in its order, of all ops or of one, in so much time; where the
    library reads tables, unless told otherwise. Exit status 1 where configs disagree."""
    if device.type != "cuda":
        raise ValueError("tune measures kernels on a GPU, and there is none")
    gpu, groups = machine_of(device).gpu, quick_groups(quick_cells(device, op))
    if not groups:
        raise ValueError(f"{op} has no configs to tune")
    path = output or TABLES / table_name(gpu.name)
    require_folder(path)
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"{path.parent} cannot be written to: --output FILE writes the table elsewhere")
    try:
        with torch.cuda.device(device):
            words = tune_quick(groups, partial(GpuStopwatch, device=device), gpu, path, TimeLimit(seconds))
    except LawBroken as reason:
        Console(stderr=True).print(f"configs that must not change a byte do: {reason}", style="red", highlight=False)
        return 1
    Console().print(f"{path}: {words}", highlight=False)
    return 0


Group = tuple[BenchedOp, dict[Problem, Job]]  # jobs of an op, by what their configs are looked up by


def quick_groups(cells: Iterable[Cell]) -> list[Group]:
    """The jobs of cells whose ops can be tuned, op by op, in their order."""
    tunable = [cell for cell in cells if cell.op.tuned is not None]
    by_op = groupby(tunable, lambda cell: cell.op.name)
    groups = [list(of_op) for _, of_op in by_op]
    return [(group[0].op, jobs_by_problem([cell.job for cell in group])) for group in groups]


def tune_quick(
    groups: Sequence[Group], stopwatch: Callable[..., Stopwatch], gpu: Gpu, path: Path, limit: TimeLimit
) -> str:
    """Find configs group by group until the time is used up, keep what a table has, and say how far this came: in the
    file too, unless nothing was found."""
    console, before = Console(stderr=True), open_table(path, gpu, ()).configs
    for op, by_problem in groups:
        if not limit.over:
            tune(list(by_problem), stopwatch(op, by_problem), gpu, path, True, console, limit)
    table, problems = open_table(path, gpu, ()), list(dict.fromkeys(p for _, by_problem in groups for p in by_problem))
    there = sum(p.batch_heads in measured_sizes(table.configs, p) for p in problems)
    words = f"{there} of {len(problems)} entries of --quick are there, after {limit.used:.0f} seconds"
    if table.configs != before:
        table.header["measured"] = f"{today()}, {words}"
        write_table_file(path, table)
    return words


def with_variants(op: BenchedOp, jobs: Sequence[Job]) -> list[Job]:
    """Jobs, and what they are where flashstate is called in other ways: some of these have configs of their own."""
    found = dict.fromkeys(jobs)
    for way, job in product(op.variants.values(), jobs):
        with suppress(MeasurementError):  # it cannot be called so
            found[way.job(job)] = None
    return list(found)


def jobs_by_problem(jobs: Sequence[Job]) -> dict[Problem, Job]:
    """Jobs by what their configs are looked up by."""
    by_problem: dict[Problem, Job] = {}
    for job in jobs:
        if by_problem.setdefault(job.problem, job) != job:
            raise ValueError("a table has one entry for several tokens, one after the other: give one number above 1")
    return by_problem


def tune(
    problems: Sequence[Problem], stopwatch: Stopwatch, gpu: Gpu, path: Path, resume: bool, console: Console,
    limit: TimeLimit | None = None,
) -> None:  # fmt: skip
    """Find the configs of these problems and write them to a file after every one, with a progress bar; none is begun
    once the time is used up."""
    table = open_table(path, gpu, () if resume else problems)
    missing = [p for p in problems if p.batch_heads not in measured_sizes(table.configs, p)]
    found = search(problems, stopwatch, gpu, table.configs)
    for problem, config in track(found, "tuning", len(missing), console=console, transient=True):
        modes = table.configs.setdefault(table_key(problem), {})
        modes.setdefault(mode_key(problem), {})[problem.batch_heads] = config
        write_table_file(path, table)
        if limit is not None and limit.over:
            return


def open_table(path: Path, gpu: Gpu, again: Collection[Problem]) -> TableFile:
    """The table to fill: a new one, or the one in the file with all it has but the entries to measure again. Nothing
    stays of a table that is not measured."""
    made_with = {name: versions()[name] for name in ("torch", "triton")}
    header = {"gpu": gpu.name, **made_with, "measured": today(), "columns": COLUMNS}
    require_folder(path)
    old = read_table_file(path) if path.exists() else TableFile(header, {})
    if old.header["measured"].startswith(NOT_MEASURED):
        return TableFile(header, {})
    kept = entries_without(old.configs, {(table_key(p), mode_key(p), p.batch_heads) for p in again})
    for name in ("gpu", "triton"):
        if kept and old.header[name] != header[name]:
            raise ValueError(f"{path} was measured with {name} {old.header[name]}, and here is {header[name]}")
    return TableFile(header, kept)


def today() -> str:
    return datetime.now(timezone.utc).date().isoformat()


def entries_without(configs: Configs, dropped: Collection[tuple[str, str, int]]) -> Configs:
    """A table without the entries of some keys, modes and sizes."""
    kept: Configs = {}
    for key, modes in configs.items():
        for mode, sizes in modes.items():
            left = {size: config for size, config in sizes.items() if (key, mode, size) not in dropped}
            if left:
                kept.setdefault(key, {})[mode] = left
    return kept


class GpuStopwatch:
    """Times steps on cold slots, each config after a check that it gives the bytes of all others."""

    def __init__(self, op: BenchedOp, jobs: Mapping[Problem, Job], device: torch.device) -> None:
        self._op, self._jobs, self._device = op, jobs, device
        self._modes: dict[tuple[str, str], _Mode] = {}
        self._prepared: set[tuple[_Mode, Config]] = set()
        self._timed: tuple[Problem, list[TimedCall], bool] | None = None  # of one problem: its memory is large

    def prepare(self, points: Sequence[Point]) -> None:
        new = {(self._mode(problem), config) for problem, config in points} - self._prepared
        self._prepared |= new
        with collecting() as launches:
            for mode, config in new:
                mode.step(config)
                mode.step(config, slots=with_int64)
        compile_variants(variants_of(launches))

    def microseconds(self, problem: Problem, config: Config) -> float:
        self._mode(problem).check(config)
        if self._timed is None or self._timed[0] != problem:
            self._timed = None  # frees what it holds first
            self._timed = problem, *self._on_cold_slots(self._jobs[problem])
        _, launches, flush = self._timed
        with override(config):
            return time_launches(launches, REPLAYS, flush).median

    def _mode(self, problem: Problem) -> _Mode:
        key = table_key(problem), mode_key(problem)
        if key not in self._modes:
            self._modes[key] = _Mode(self._op, self._jobs[problem], self._device)
        return self._modes[key]

    def _on_cold_slots(self, job: Job) -> tuple[list[TimedCall], bool]:
        """Steps of a job, each on cold slots, and whether the cache must be swept before they come again."""
        few = make_inputs(replace(job.case, slots=FEW_SLOTS), self._device)
        cold = on_cold_slots(job, few, self._device, MAX_LAUNCHES)
        step = self._op.bind(cold.inputs, cold.storing)
        # Every second launch has slots of int64: a config serves both index types.
        return [step(with_int64(at) if i % 2 else at) for i, at in enumerate(cold.slots)], cold.flush


class _Mode:
    """A format, rounding, number of tokens and what is stored, on a small pool: what configs must agree on."""

    def __init__(self, op: BenchedOp, job: Job, device: torch.device) -> None:
        self._op, self._job = op, job
        self._inputs = make_inputs(replace(job.case, batch=CHECKED_ROWS, slots=2 * CHECKED_ROWS), device)
        self._first: tuple[Tensor, Pool] | None = None  # output, and pool or snapshots, with the first config
        self._checked: set[Config] = set()

    def step(self, config: Config, slots: Callable[[Slots], Slots] = lambda slots: slots) -> tuple[Tensor, Pool]:
        """The output of one call on a copy of the pool, and where it stored states."""
        inputs = self._inputs.fresh()
        storing = storing_for(self._job, CHECKED_ROWS, inputs.state.data.device)
        with override(config):
            y = self._op.bind(inputs, storing)(slots(slots_of(inputs, storing)))()
        return y, storing.snapshots or inputs.state

    def check(self, config: Config) -> None:
        """LawBroken unless a call gives the bytes that it gives with other configs."""
        if config in self._checked:
            return
        y, stored = self.step(config)
        first_y, first_stored = self._first = self._first or (y, stored)
        require.equal_bytes(f"output with {config}", y, first_y)
        require.equal_states(f"states stored with {config}", stored, first_stored)
        self._checked.add(config)
