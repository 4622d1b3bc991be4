"""`flashstate info`: what is installed, what it can run on, and how it would start a kernel."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from flashstate.basics import flashstate_version, wrapped
from flashstate.bench.jobs import Job
from flashstate.launch import Gpu, Problem, choose_with_reason, machine_of
from flashstate.launch.config import mode_key
from flashstate.state.formats import FORMATS

EXAMPLE_GPU = Gpu("NVIDIA H200", (9, 0))  # whose configs are shown on a machine without a GPU
COLUMNS_OF_CONFIGS = (
    "Rows are those of a tile, and lanes those of a row. An entry is the batch x heads that a config of a table is "
    "for. Besides: what is not as in a plain config."
)
NOT_RECOGNISED = (
    "vLLM itself runs layers that are not recognised, and refuses the state option for models that have some. Without "
    "the choice of the backend the whole plugin is inert. A newer flashstate may know these facts."
)
PAYS = (
    "Replay reads rings beside states and computes more, so it pays from some batch size on. As measured on an H200 in "
    "the shapes of `flashstate bench`, beside a step in place:"
)


def show_info(jobs: Sequence[Job], gpu: Gpu | None, pays: Mapping[str, int]) -> None:
    """Print versions, devices, formats, the launch configs of these jobs, and from which batch size on they pay."""
    console = Console(highlight=False)

    def say(text: str) -> None:
        console.print("\n".join(wrapped(text, console.width)), markup=False)

    for name, value in versions().items():
        console.print(f"{name:12}{value}")
    for line in device_lines():
        console.print(f"{'device':12}{line}")
    console.print(format_table())
    if gpu is None and not torch.cuda.is_available():
        gpu = EXAMPLE_GPU
        say(f"No GPU here, so these are the launch configs of an {gpu.name}; --gpu NAME shows another's.")
    on = gpu or machine_of(torch.device("cuda", 0)).gpu
    said = ""
    for problems in problems_by_op(jobs):
        say(config_title(problems, on))
        why = f"Why: {'; '.join(reasons(problems, on))}."
        if why != said:
            say(why)
        said = why
        console.print(config_table(problems, on))
    say(COLUMNS_OF_CONFIGS)
    if pays:
        say(PAYS)
        console.print(pays_table(pays))


def show_vllm() -> None:
    """Print which layers of the installed vLLM flashstate recognises, and the facts of the others that are unknown."""
    from flashstate.integrations.vllm import contract
    from flashstate.integrations.vllm.kinds import CHOOSING, KINDS, PAGES

    sources = contract.installed()
    if sources is None:
        raise ValueError("vLLM is not installed: no layers to look at")
    console = Console(highlight=False)
    console.print(f"vLLM {sources.version} in {sources.root}", soft_wrap=True)
    table = Table("part", "on", "recognised", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    rows: list[tuple[str, str, Any]] = [("choice of the backend", "", CHOOSING)]
    rows += [(kind.name, "all devices" if kind.everywhere else "NVIDIA GPUs", kind) for kind in KINDS]
    rows.append(("pages for the state option", "", PAGES))
    for name, devices, of in rows:
        table.add_row(name, devices, "no" if contract.unknown(sources, of) else "yes")
    console.print(table)
    for name, _, of in rows:
        for fact in contract.unknown(sources, of):
            console.print(f"{name}: {fact}", markup=False, soft_wrap=True)
    if any(contract.unknown(sources, of) for _, _, of in rows):
        console.print("\n".join(wrapped(NOT_RECOGNISED, console.width)), markup=False)


def versions() -> dict[str, str]:
    """The versions that decide how flashstate behaves."""
    try:
        import triton  # its distribution has other names too
    except ImportError:
        triton = None
    found = {"flashstate": flashstate_version(), "Python": platform.python_version(), "torch": torch.__version__}
    return {**found, "triton": "not installed" if triton is None else triton.__version__}


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
    """Which config each problem gets on that GPU; the problems differ in batch."""
    numbers = ("batch", "x heads", "rows", "warps", "lanes", "entry")
    table = Table(
        *(Column(name, justify="right") for name in numbers), "besides", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for problem, batch in problems.items():
        config, _, measured_at = choose_with_reason(problem, gpu)
        entry = "-" if measured_at is None else measured_at
        shown = (batch, problem.batch_heads, config.block_rows, config.num_warps, config.lanes, entry)
        table.add_row(*map(str, shown), ", ".join(f"{name} {value}" for name, value in config.unusual.items()))
    return table


def pays_table(pays: Mapping[str, int]) -> Table:
    """From which batch size on replay is faster, by what was measured; 0: at none."""
    table = Table("measured", Column("faster from batch", justify="right"), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for what, batch in pays.items():
        table.add_row(what, str(batch) if batch else "none")
    return table


def config_title(problems: Mapping[Problem, int], gpu: Gpu) -> str:
    """What a table of configs is about."""
    one = next(iter(problems))
    what = f"{one.op}, {one.rows} x {one.cols}, {one.format}, {mode_key(one)}"
    where = f"{gpu.name}, compute capability {'.'.join(map(str, gpu.capability))}"
    return f"Launch configs of {what}, on {where}"


def reasons(problems: Iterable[Problem], gpu: Gpu) -> list[str]:
    """Where the configs of these problems come from, each place once."""
    return list(dict.fromkeys(choose_with_reason(problem, gpu).reason for problem in problems))
