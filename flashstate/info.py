"""`flashstate info`: what is installed, what it can run on, and how it would start a kernel."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from flashstate.bench.jobs import Job
from flashstate.launch import Gpu, Problem, choose_with_reason, machine_of
from flashstate.launch.config import mode_key
from flashstate.state.formats import FORMATS

EXAMPLE_GPU = Gpu("NVIDIA H200", (9, 0))  # whose configs are shown on a machine without a GPU


def show_info(jobs: Sequence[Job], gpu: Gpu | None) -> None:
    """Print versions, devices, formats, and the launch configs of these jobs."""
    console = Console()
    for name, value in versions().items():
        console.print(f"{name:12}{value}", highlight=False)
    for line in device_lines():
        console.print(f"{'device':12}{line}", highlight=False)
    console.print(format_table())
    if gpu is None and not torch.cuda.is_available():
        gpu = EXAMPLE_GPU
        console.print(f"No GPU here, so these are the launch configs of an {gpu.name}; --gpu NAME shows another's.")
    for problems in problems_by_op(jobs):
        console.print(config_table(problems, gpu or machine_of(torch.device("cuda", 0)).gpu))


def versions() -> dict[str, str]:
    """The versions that decide how flashstate behaves."""
    try:
        import triton  # its distribution has other names too
    except ImportError:
        triton = None
    found = {"flashstate": flashstate_version(), "Python": platform.python_version(), "torch": torch.__version__}
    return {**found, "triton": "not installed" if triton is None else triton.__version__}


def flashstate_version() -> str:
    """The version that is installed."""
    try:
        return version("flashstate")
    except PackageNotFoundError:
        return "not installed: run from its sources"


def device_lines() -> list[str]:
    """One line per GPU, or one that says what happens without."""
    if not torch.cuda.is_available():
        return ["no GPU: ops run the reference on the CPU"]
    return [
        f"cuda:{index} {p.name}, compute capability {p.major}.{p.minor}, {p.total_memory / 2**30:.0f} GiB"
        for index, p in enumerate(map(torch.cuda.get_device_properties, range(torch.cuda.device_count())))
    ]


def format_table() -> Table:
    """A line per state format."""
    names = ("format", "bytes per element", "roundings")
    table = Table(*names, title="State formats", title_justify="left", box=SIMPLE_HEAD)
    for format in FORMATS.values():
        table.add_row(format.name, str(format.dtype.itemsize), ", ".join(format.roundings))
    return table


def problems_by_op(jobs: Sequence[Job]) -> list[dict[Problem, int]]:
    """What the configs of all kernels are chosen for that jobs start, with the batch, op by op."""
    by_op: dict[str, dict[Problem, int]] = {}
    for job in jobs:
        for problem in job.problems:
            by_op.setdefault(problem.op, {})[problem] = job.case.batch
    return list(by_op.values())


def config_table(problems: Mapping[Problem, int], gpu: Gpu) -> Table:
    """Which config each problem gets on that GPU, and where it comes from; they differ in batch."""
    one = next(iter(problems))
    where = f"{gpu.name}, compute capability {'.'.join(map(str, gpu.capability))}"
    table = Table(
        "batch", "batch x heads", "rows", "warps", "lanes", "besides", "why", box=SIMPLE_HEAD,
        title=f"Launch configs of {one.op}, {one.rows} x {one.cols}, {one.format}, {mode_key(one)}, on {where}",
        caption="rows per tile, warps, lanes per row, and what else is not as usual",
        title_justify="left", caption_justify="left",
    )  # fmt: skip
    for problem, batch in problems.items():
        config, reason = choose_with_reason(problem, gpu)
        numbers = (batch, problem.batch_heads, config.block_rows, config.num_warps, config.lanes)
        besides = ", ".join(f"{name} {value}" for name, value in config.unusual.items())
        table.add_row(*map(str, numbers), besides, reason)
    return table
