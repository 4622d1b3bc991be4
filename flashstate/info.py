"""`flashstate info`: what is installed, what it can run on, and how it would start a kernel."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from flashstate.launch import choose_with_reason
from flashstate.state.formats import FORMATS
from flashstate.testing import Case

EXAMPLE_GPU = "NVIDIA H200"  # whose configs are shown on a machine without a GPU


def show_info(cases: Sequence[Case], gpu: str | None) -> None:
    """Print versions, devices, formats, and the launch configs of these cases."""
    console = Console()
    for name, value in versions().items():
        console.print(f"{name:12}{value}", highlight=False)
    for line in device_lines():
        console.print(f"{'device':12}{line}", highlight=False)
    console.print(format_table())
    if gpu is None and not torch.cuda.is_available():
        console.print(f"No GPU here, so these are the launch configs of an {EXAMPLE_GPU}; --gpu NAME shows another's.")
    console.print(config_table(cases, gpu or own_gpu()))


def versions() -> dict[str, str]:
    """The versions that decide how flashstate behaves."""
    return {
        "flashstate": flashstate_version(),
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _triton_version(),
    }


def flashstate_version() -> str:
    try:
        return version("flashstate")
    except PackageNotFoundError:
        return "not installed: run from its sources"


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "not installed"
    return str(triton.__version__)


def device_lines() -> list[str]:
    """One line per GPU, or one that says what happens without."""
    if not torch.cuda.is_available():
        return ["no GPU: ops run the reference on the CPU"]
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        f"cuda:{index} {p.name}, compute capability {p.major}.{p.minor}, {p.total_memory / 2**30:.0f} GiB"
        for index, p in enumerate(properties)
    ]


def own_gpu() -> str:
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else EXAMPLE_GPU


def format_table() -> Table:
    table = Table(
        "format", "bytes per element", "roundings", title="State formats", title_justify="left", box=SIMPLE_HEAD
    )
    for format in FORMATS.values():
        table.add_row(format.name, str(format.dtype.itemsize), ", ".join(format.roundings))
    return table


def config_table(cases: Sequence[Case], gpu: str) -> Table:
    """Which config each case gets on the GPU of that name, and where it comes from; they differ in batch."""
    one = cases[0].problem
    title = f"Launch configs of {one.op}, {one.rows} x {one.cols}, {one.format}, {one.rounding}, on {gpu}"
    columns = ("batch", "batch x heads", "rows per program", "warps", "why")
    table = Table(*columns, title=title, title_justify="left", box=SIMPLE_HEAD)
    for case in cases:
        config, reason = choose_with_reason(case.problem, gpu)
        table.add_row(*map(str, (case.batch, case.batch * case.heads, config.block_rows, config.num_warps)), reason)
    return table
