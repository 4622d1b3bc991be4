"""Choose launch configs for a GPU that nobody has measured, from the machine code of the kernels. No GPU is needed.

    python -m tools.reasoned_table write [--jobs N] [--output FILE]    writes the table of an NVIDIA B200
    python -m tools.reasoned_table compare [--jobs N] [--only TEXT]    how good the choice is on an H200, as measured

Every candidate is compiled for the chip. What spills, or accesses states less widely than they are aligned, is dropped.
For the others a time is reckoned at every size, from what ptxas says: registers and shared memory (how many programs a
multiprocessor has at once), the instructions of a warp by the pipe they go through, and how long they hold it up when
nothing else runs. The shortest time wins. Such a table says that it is not measured, and so does whoever uses it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported

import torch
import triton
from rich.console import Console
from rich.progress import track

from flashstate.bench.jobs import BFLOAT16, FLOAT32, Grid, Job
from flashstate.bench.ops import OPS
from flashstate.launch import Config, Gpu, Machine, Problem, collecting, override, valid_configs
from flashstate.launch.config import MANY, measured_sizes, mode_key, table_key
from flashstate.launch.environment import pretending
from flashstate.launch.table import (
    COLUMNS,
    NOT_MEASURED,
    TABLES,
    Configs,
    TableFile,
    is_measured,
    load_table,
    table_name,
    write_table_file,
)
from flashstate.proof import make_inputs
from tools.cubin import resource_usage
from tools.frozen_launches import source_of, variant_of

# One token of the two ops that most models have: what has no loop over tokens is one piece of code.
FORMATS = (FLOAT32, BFLOAT16, ("float16", "stochastic"), ("int8", "nearest"), ("float8_e4m3fn", "nearest"))
GRIDS = {"mamba2": Grid(FORMATS), "gated_delta": Grid((FLOAT32, BFLOAT16), batches=(1, 4, 16, 64, 256))}
PER_THREAD, MOST_WARPS_OF_ONE = (8, 64), 2  # elements of state in a thread, and warps of a program, that are tried
REGISTERS, SHARED, THREADS_OF_WARP = 65536, 227 << 10, 32  # of a multiprocessor
MOST_WARPS, MOST_PROGRAMS, SCHEDULERS = 64, 32, 4
MEMORY_SHARE = 0.92  # of its nominal rate that memory reaches
SLOT_NS, STATE_NS = 450.0, 750.0  # from asking for a slot number, and then for a state, until it is there
TILES_ON_THEIR_WAY = 2  # of a program that has several
LINK_BYTES = 64  # per cycle, between a multiprocessor and the L2 cache
# Cycles for which an instruction of a warp holds a pipe of its scheduler.
PIPES = (
    ("special", 8, r"MUFU|F2F\b|F2I|I2F"),
    ("memory", 4, r"LD[GS]|ST[GS]|SHFL|ATOM|RED"),
    ("integer", 2, r"LOP3|SHF|IADD|ISETP|SEL\b|PRMT|LEA|FMNMX|FSETP|FSEL|IMNMX|VIMNMX|PLOP3|SGXT|I2I|F2FP|FCHK"),
)
LINE = re.compile(r"^\S*:(?P<stall>[0-9a-f])\s+(?:@!?U?P\w+ )?(?P<name>[A-Z][\w.]*)(?P<rest>.*)$")


class Chip(NamedTuple):
    """What a time is reckoned from."""

    gpu: Gpu
    processors: int
    memory_rate: float  # bytes per second
    clock: float  # Hz

    @property
    def architecture(self) -> int:
        return 10 * self.gpu.capability[0] + self.gpu.capability[1]

    @property
    def machine(self) -> Machine:
        return Machine(self.gpu, "sm_89", overlaps=True, processors=self.processors)


B200 = Chip(Gpu("NVIDIA B200", (10, 0)), 148, 8.0e12, 1.9e9)
H200 = Chip(Gpu("NVIDIA H200", (9, 0)), 132, 4.8e12, 1.9e9)


@dataclass(frozen=True)
class Code:
    """What ptxas made of a config."""

    registers: int  # of a thread
    spilled: int  # bytes
    shared: int  # bytes of a program
    access: int  # bytes of the widest access of a state
    issue: float  # cycles of a scheduler that a warp takes
    alone: float  # cycles that a warp takes when it never waits for memory and nothing else runs

    def programs_at_once(self, warps: int) -> int:
        """Programs that a multiprocessor has room for."""
        of_warp = -(-self.registers * THREADS_OF_WARP // 256) * 256
        by_registers = REGISTERS // of_warp // warps
        return min(MOST_PROGRAMS, MOST_WARPS // warps, by_registers, SHARED // (self.shared + 1024))


def machine_code(kernel: Any, warps: int, tiles: int) -> Code:
    """What is to be known of a compiled kernel, whose loop is over tiles if it has one."""
    usage = resource_usage(kernel)
    ((registers, stack, local),) = re.findall(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", usage)
    issue, alone = cycles_of(kernel.asm["sass"], tiles)
    shared = kernel.metadata.shared
    return Code(int(registers), int(stack) + int(local), shared, widest_access(kernel.asm["ptx"]), issue, alone)


def cycles_of(sass: str, trips: int) -> tuple[float, float]:
    """Cycles of a scheduler that a warp takes, and those it takes alone: what is between a label and a branch back to
    it counts as often as there are trips."""
    lines = sass.splitlines()
    labels = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
    times = [1] * len(lines)
    found = [LINE.match(line) for line in lines]
    last = max((i for i, one in enumerate(found) if one and one["name"] == "EXIT"), default=len(lines))
    for i, one in enumerate(found[:last]):
        target = labels.get(one["rest"].strip(" ;")) if one and one["name"].startswith("BRA") else None
        if target is not None and target < i:
            times[target:i] = [trips] * (i - target)
    pipes, alone = {name: 0.0 for name, *_ in PIPES} | {"all": 0.0}, 0.0
    for one, often in zip(found[:last], times, strict=False):
        if one is not None:
            pipes["all"] += often
            alone += often * int(one["stall"], 16)
            for name, cycles, names in PIPES:
                pipes[name] += often * cycles * bool(re.match(names, one["name"]))
    return max(pipes.values()), alone


def widest_access(ptx: str) -> int:
    """Bytes of the widest load of a state: those with a hint, or copies to shared memory."""
    loads = re.findall(r"\bld\.global\.L1::evict_first[\w:.]*?(?:\.v(\d))?\.b(\d+)\b", ptx)
    copies = re.findall(r"\bcp\.async\.c[ag]\.shared\.global[^\n]*?, 0x([0-9a-f]+),", ptx)
    return max([*(int(n or 1) * int(bits) // 8 for n, bits in loads), *(int(n, 16) for n in copies)], default=0)


def reckoned(problem: Problem, config: Config, code: Code, chip: Chip) -> float:
    """Microseconds of a launch. One program after the other waits for its slot and its state; as many as there is room
    for do so beside each other. All of them share the memory, those of a multiprocessor its link and its schedulers."""
    programs = problem.programs(config)
    there = code.programs_at_once(config.num_warps)
    moved = 2 * problem.batch_heads * problem.rows * problem.cols * problem.itemsize
    of_one = -(-programs // chip.processors)  # programs of the multiprocessor that has most
    waits = SLOT_NS + STATE_NS * max(1, config.tiles / TILES_ON_THEIR_WAY)
    alone = waits * 1e-9 + code.alone / chip.clock
    by_memory = moved / (MEMORY_SHARE * chip.memory_rate)
    by_link = of_one * moved / programs / 2 / (LINK_BYTES * chip.clock)
    by_issue = of_one * config.num_warps * code.issue / SCHEDULERS / chip.clock
    by_waiting = (programs / (there * chip.processors) - 1) * alone
    return 1e6 * (alone + max(by_memory, by_link, by_issue, by_waiting))


def candidates(problem: Problem, gpu: Gpu) -> list[Config]:
    """Configs worth compiling for a GPU: of one tile, or of as many as its heuristic gives at any size."""
    tiles = {1, *(replace(problem, batch_heads=size).heuristic(gpu).tiles for size in (1, MANY))}
    few, many = PER_THREAD
    found = [
        config for config in valid_configs(problem)
        if config.tiles in tiles and few <= problem.per_thread(config) <= many
        and config.num_warps <= MOST_WARPS_OF_ONE and config.registers == 0
    ]  # fmt: skip
    return found or [problem.heuristic(gpu)]


Mode = tuple[str, str]  # a table key and a mode key


def jobs_by_mode(only: str) -> dict[Mode, list[Job]]:
    """Jobs that configs are chosen for, one per size, where key and mode have this text."""
    modes: dict[Mode, list[Job]] = {}
    with pretending(B200.machine):
        for job in (job for op, grid in GRIDS.items() for job in OPS[op].jobs([grid])):
            modes.setdefault((table_key(job.problem), mode_key(job.problem)), []).append(job)
    return {mode: jobs for mode, jobs in modes.items() if only in ", ".join(mode)}


Compiled = dict[Mode, dict[Config, Code]]
Task = tuple[Job, Config, Chip]


def code_of(task: Task) -> Code | None:
    """What a config becomes on a chip; None where the compiler refuses it."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    job, config, chip = task
    with pretending(chip.machine):
        inputs = make_inputs(replace(job.case, batch=2, slots=4), torch.device("cpu"))
        with collecting() as launches, override(config):
            OPS[job.op].bind(inputs)(inputs.at())()
    (launch,) = launches
    source = ASTSource(*source_of(variant_of(launch, chip.architecture)))
    with suppress(triton.runtime.errors.TritonError):
        kernel = triton.compile(source, target=GPUTarget("cuda", chip.architecture, 32), options=launch.options)
        return machine_code(kernel, config.num_warps, config.tiles)
    return None


def compile_all(chip: Chip, modes: Mapping[Mode, Sequence[Job]], jobs: int) -> Compiled:
    """The code of every candidate of these modes, compiled by so many processes."""
    tasks = [(mode, (job, config, chip)) for mode, (job, *_) in modes.items() for config in tried(chip, job)]
    compiled: Compiled = {}
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        found = pool.imap(code_of, [task for _, task in tasks])
        console = Console(stderr=True)
        tracked = track(found, "compiling", len(tasks), console=console, transient=True)
        for (mode, (_, config, _)), code in zip(tasks, tracked, strict=True):
            if code is not None:
                compiled.setdefault(mode, {})[config] = code
    return compiled


def tried(chip: Chip, job: Job) -> list[Config]:
    """Candidates of a job, and what a table of the chip has for it."""
    with pretending(chip.machine):
        known = measured_sizes(load_table(chip.gpu.name), job.problem) if is_measured(chip.gpu.name) else {}
        return list(dict.fromkeys([*candidates(job.problem, chip.gpu), *known.values()]))


def fit(problem: Problem, codes: dict[Config, Code]) -> dict[Config, Code]:
    """What spills nothing and accesses states as widely as can be; all, if nothing is like that."""
    wide = {config: code for config, code in codes.items() if code.access == problem.vector * problem.itemsize}
    return {config: code for config, code in wide.items() if code.spilled == 0} or wide or codes


def ranked(chip: Chip, only: str, jobs: int) -> Iterator[tuple[Problem, dict[Config, float]]]:
    """The reckoned times of every problem's candidates, the shortest first."""
    modes = jobs_by_mode(only)
    compiled = compile_all(chip, modes, jobs)
    for mode, of_mode in modes.items():
        for job in of_mode:
            with pretending(chip.machine):
                problem = job.problem
            times = {c: reckoned(problem, c, code, chip) for c, code in fit(problem, compiled[mode]).items()}
            yield problem, dict(sorted(times.items(), key=lambda item: item[1]))


def write(chip: Chip, only: str, jobs: int, path: Path) -> None:
    """Write the table of a chip, marked as not measured."""
    configs: Configs = {}
    for problem, times in ranked(chip, only, jobs):
        modes = configs.setdefault(table_key(problem), {})
        modes.setdefault(mode_key(problem), {})[problem.batch_heads] = next(iter(times))
    words = f"{NOT_MEASURED}: chosen by tools/reasoned_table.py from code compiled for sm_{chip.architecture}"
    header = {"gpu": chip.gpu.name, "torch": torch.__version__, "triton": triton.__version__, "measured": words}
    write_table_file(path, TableFile({**header, "columns": COLUMNS}, configs))


def compare(chip: Chip, only: str, jobs: int) -> None:
    """Print, for every entry of a measured table, the best config as measured and as reckoned, with reckoned times."""
    ratios = []
    for problem, times in ranked(chip, only, jobs):
        entry = measured_sizes(load_table(chip.gpu.name), problem).get(problem.batch_heads)
        if entry in times:
            best, place = next(iter(times)), list(times).index(entry)
            ratios.append(times[entry] / times[best])
            told = f"{times[best]:7.2f} µs {short(best)}, measured best {short(entry)} {times[entry]:7.2f} µs"
            print(f"{table_key(problem)}, {mode_key(problem)}, {problem.batch_heads}: {told}, place {place + 1}")
    print(f"{len(ratios)} entries: the best as measured is reckoned {statistics.median(ratios):.3f} times the shortest")


def short(config: Config) -> str:
    return str([config.block_rows, config.num_warps, config.lanes, *([config.unusual] if config.unusual else [])])


def main(given: Sequence[str] | None = None) -> int:
    """Write the table of a B200, or compare with that of an H200."""
    parser = argparse.ArgumentParser(prog="python -m tools.reasoned_table", description="Choose configs by reckoning.")
    parser.add_argument("command", choices=("write", "compare"))
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes that compile (2)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only what has this text in its key and mode")
    parser.add_argument("--output", type=Path, default=TABLES / table_name(B200.gpu.name), metavar="FILE")
    options = parser.parse_args(given)
    if options.command == "write":
        write(B200, options.only, options.jobs, options.output)
    else:
        compare(H200, options.only, options.jobs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
