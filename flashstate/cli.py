"""The command line: flashstate COMMAND. It parses options; other modules do the work."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from flashstate.errors import ACTIVATION_DTYPES, dtype_name
from flashstate.state.formats import FORMATS, ROUNDINGS

if TYPE_CHECKING:
    from flashstate.bench.jobs import Grid, Job, Stored

FORMAT_NAMES = tuple(format.name for format in FORMATS.values())
CPU_BATCHES = (1, 4, 16)
SIZES = {
    "heads": "of a state; of gated_delta: value heads",
    "groups": "of B and C; of gated_delta: key heads",
    "rows": "of a head; of gated_delta: the value dimension",
    "cols": "of a head; of gated_delta: the key dimension",
    "channels": "of convolutions",
    "width": "of convolutions",
}
ACTIVATIONS = tuple(map(dtype_name, ACTIVATION_DTYPES))
PLAN_HELP = {
    "layers": "those with a state",
    "heads": "of a state; of the delta rule: value heads",
    "rows": "of a head; of the delta rule: the value dimension",
    "cols": "of a head, the state dimension; of the delta rule: the key dimension",
    "groups": "of B and C; of the delta rule: key heads",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status: 0 well, 1 something is wrong with flashstate, 2 a bad option."""
    options = build_parser().parse_args(argv)
    try:
        status: int = options.run(options)
    except (ValueError, OSError) as error:
        Console(stderr=True).print(f"flashstate: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    return status


def build_parser() -> argparse.ArgumentParser:
    from flashstate.info import flashstate_version

    parser = argparse.ArgumentParser(
        prog="flashstate", description="Step the recurrent state of language models while they generate."
    )
    parser.add_argument("--version", action="version", version=f"flashstate {flashstate_version()}")
    commands = parser.add_subparsers(
        title="commands", required=True, metavar="info | check | demo | bench | tune | plan"
    )
    for add in (_add_info, _add_check, _add_demo, _add_bench, _add_tune, _add_plan):
        add(commands)
    return parser


Commands = argparse._SubParsersAction  # what add_subparsers returns; argparse has no public name for it


def _add_info(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("info", help="versions, devices, formats, and which launch config a case gets and why")
    _add_op(parser, sizes_each=1)
    parser.add_argument("--format", choices=FORMAT_NAMES, help="default: the first that bench measures")
    parser.add_argument("--rounding", choices=ROUNDINGS, default="nearest")
    batches = "default: those that bench measures"
    parser.add_argument("--batch", type=positive, nargs="+", dest="batches", metavar="N", help=batches)
    parser.add_argument(
        "--tokens", type=positive, nargs=1, default=[1], metavar="N", help="per row and call (default: 1)"
    )
    parser.add_argument("--snapshots", action="store_true", help="with the state after each of several tokens stored")
    parser.add_argument("--at-once", action="store_true", help="with several tokens of gated_delta and exact=False")
    parser.add_argument("--gpu", metavar="NAME", help="show the configs of this GPU instead of yours")
    what = "of that GPU, for the heuristic where there is no table (default: %(default)s)"
    parser.add_argument("--capability", type=capability, default="9.0", metavar="X.Y", help=what)
    parser.set_defaults(run=_info, formats=None)


def _add_check(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("check", help="prove the laws every op obeys, on your device")
    _add_device(parser)
    parser.add_argument("--quick", action="store_true", help="one case per format, and few of ops without formats")
    parser.set_defaults(run=_check)


def _add_demo(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("demo", help="serve requests from one pool per format and compare with float64")
    _add_device(parser)
    parser.add_argument("--steps", type=positive, default=150, metavar="N", help="model steps (default: %(default)s)")
    tokens = "per request and step, all but the first speculative (default: %(default)s)"
    parser.add_argument("--tokens", type=positive, default=4, metavar="N", help=tokens)
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.set_defaults(run=_demo)


def _add_bench(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("bench", help="time an op beside the roofs of memory and other libraries")
    _add_measured(parser)
    several = "per row and call; several are timed for every kind of store the op is measured with"
    parser.add_argument("--tokens", type=positive, nargs="+", metavar="N", help=several)
    peers = "libraries to compare with, or none (default: all that can be imported)"
    parser.add_argument("--peers", nargs="+", metavar="NAME", help=peers)
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the measurements there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them there, as a PNG")
    parser.add_argument("--commit", metavar="TEXT", help="what the CSV says of the sources where git cannot tell")
    parser.add_argument("--from-csv", type=Path, metavar="FILE", help="measure nothing: show and draw this file")
    parser.add_argument("--host", action="store_true", help="measure only what a call costs the host")
    parser.set_defaults(run=_bench)


def _add_tune(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("tune", help="find the launch configs of your GPU, and write them as a table")
    _add_measured(parser)
    tokens = "per row and call: 1, and one number that stands for several (default: 1 4)"
    parser.add_argument("--tokens", type=positive, nargs="+", metavar="N", help=tokens)
    parser.add_argument("--output", type=Path, metavar="FILE", help="the table (default: named after the GPU, here)")
    resume = "keep the entries that the table has, and find the others"
    parser.add_argument("--resume", action="store_true", help=resume)
    parser.set_defaults(run=_tune)


def _add_plan(commands: Commands[argparse.ArgumentParser]) -> None:
    from flashstate.models import DEFAULT_PRESET, KINDS, PRESETS
    from flashstate.state.ring import LARGEST_WINDOW

    parser = commands.add_parser("plan", help="how many requests fit in memory, for every format of their states")
    models = f"one of {_listed(tuple(PRESETS))} (default: {DEFAULT_PRESET})"
    parser.add_argument("--model", choices=tuple(PRESETS), metavar="NAME", help=models)
    parser.add_argument("--config", type=Path, metavar="PATH", help="a Transformers config.json, or its folder")
    shape = parser.add_argument_group(
        "shape", "Instead of a model, or to change one.", argument_default=argparse.SUPPRESS
    )
    shape.add_argument("--kind", choices=KINDS, help="default: mamba2")
    for name in ("layers", "heads", "rows", "cols", "groups"):
        shape.add_argument(f"--{name}", type=positive, metavar="N", help=PLAN_HELP[name])
    shape.add_argument("--conv-width", type=int, metavar="N", help="0: no convolution (default: 4)")
    shape.add_argument("--dtype", dest="activations", choices=ACTIVATIONS, help="of activations (default: bfloat16)")
    ring = f"of the replay ring of mamba2, up to {LARGEST_WINDOW} (default: 0, no ring)"
    shape.add_argument("--window", type=int, metavar="N", help=ring)
    shape.add_argument("--tokens", type=positive, metavar="N", help="the longest call a ring takes (default: 1)")
    parser.add_argument(
        "--memory", default="40GiB", metavar="SIZE", help="such as 512MiB or 40GB (default: %(default)s)"
    )
    ranks = "ranks that share the heads; the memory is that of one (default: %(default)s)"
    parser.add_argument("--tensor-parallel", type=positive, default=1, metavar="N", help=ranks)
    parser.set_defaults(run=_plan)


def _add_measured(parser: argparse.ArgumentParser) -> None:
    """What is measured: an op, on a device, of some shapes, in some formats, at some batch sizes."""
    _add_op(parser)
    _add_device(parser)
    formats = "such as float16:stochastic (default: those of the op)"
    parser.add_argument("--formats", nargs="+", metavar="FORMAT[:ROUNDING]", help=formats)
    batches = "default: those of the op; bench on a CPU takes fewer"
    parser.add_argument("--batches", type=positive, nargs="+", metavar="N", help=batches)


def _add_op(parser: argparse.ArgumentParser, sizes_each: int | str = "+") -> None:
    """An op, and sizes of its states, of each as many as `nargs` means; the op has defaults for what is not given."""
    from flashstate.bench.ops import OPS

    what = "span is conv1d_step and mamba2_step behind it (default: %(default)s)"
    parser.add_argument("op", nargs="?", choices=tuple(OPS), default="mamba2", help=what)
    for name, help in SIZES.items():
        parser.add_argument(f"--{name}", type=positive, nargs=sizes_each, metavar="N", help=help)


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", metavar="DEVICE", help="cpu, cuda or cuda:N (default: cuda if there is one)")


def _info(options: argparse.Namespace) -> int:
    from flashstate.bench.ops import OPS
    from flashstate.info import show_info
    from flashstate.launch import Gpu

    op = OPS[options.op]
    first = op.grids[0]
    formats = [check_format(options.format or first.formats[0][0], options.rounding)]
    if op.shown and options.snapshots:
        raise ValueError(f"{options.op} has no --snapshots")
    stored: Sequence[Stored] = op.shown or ("every" if options.snapshots else "last",)
    grid = replace(first, shapes=first.shapes[:1], formats=formats, stored=stored, by_one=op.shown or first.by_one)
    jobs = op.jobs(_changed(options, [grid]))
    if options.at_once:
        jobs = _at_once(options.op, jobs)
    show_info(jobs, None if options.gpu is None else Gpu(options.gpu, options.capability))
    return 0


def _at_once(name: str, jobs: list[Job]) -> list[Job]:
    """The jobs with all tokens of a row at once."""
    from flashstate.bench.ops import OPS
    from flashstate.bench.peers import MeasurementError

    variant = OPS[name].variants.get("at once")
    if variant is None:
        raise ValueError(f"{name} has no --at-once")
    try:
        return [variant.job(job) for job in jobs]
    except MeasurementError as reason:
        raise ValueError(f"--at-once: {reason}") from reason


def _check(options: argparse.Namespace) -> int:
    from flashstate.check import run_check

    return run_check(find_device(options.device), options.quick)


def _demo(options: argparse.Namespace) -> int:
    from flashstate.demo import show_demo

    show_demo(find_device(options.device), options.steps, options.tokens, options.seed)
    return 0


def _bench(options: argparse.Namespace) -> int:
    from flashstate.bench.ops import OPS
    from flashstate.bench.peers import choose_peers
    from flashstate.bench.run import Files, redraw, run_bench, run_host

    files = Files(options.csv, options.plot)
    if options.host and (files != Files() or options.from_csv is not None):
        raise ValueError("--host measures only what a call costs the host: it reads, writes and draws no file")
    if options.from_csv is not None:
        return redraw(options.from_csv, files)
    op, device = OPS[options.op], find_device(options.device)
    peers = choose_peers(op.peers, options.peers)
    if options.host:
        return run_host(op, peers, device)
    if device.type == "cpu":
        options.batches = options.batches or CPU_BATCHES
    return run_bench(op, op.jobs(_changed(options, op.grids)), peers, device, files, options.commit)


def _tune(options: argparse.Namespace) -> int:
    from flashstate.bench.ops import OPS
    from flashstate.tune import run_tune

    op, device = OPS[options.op], find_device(options.device)
    return run_tune(op, op.jobs(_changed(options, op.tuned_grids)), device, options.output, options.resume)


def _changed(options: argparse.Namespace, grids: Sequence[Grid]) -> list[Grid]:
    """Grids of an op with what options say in the place of its defaults."""
    from flashstate.bench.ops import OPS

    given = {name: getattr(options, name) for name in SIZES if getattr(options, name) is not None}
    known = OPS[options.op].sizes
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ValueError(f"{options.op} has no --{unknown[0]}, only {_listed(tuple(f'--{name}' for name in known))}")
    changes = {"formats": options.formats, "tokens": options.tokens, "batches": options.batches}
    if options.formats is not None:
        changes["formats"] = [parse_format(text) for text in options.formats]
    changes = {name: change for name, change in changes.items() if change is not None}
    sizes = {known[name]: numbers for name, numbers in given.items()}
    return [replace(grid.with_sizes(sizes), **changes) for grid in grids]


def _plan(options: argparse.Namespace) -> int:
    from flashstate.models import ModelShape, choose_shape
    from flashstate.plan import show_plan

    changes = {field.name: getattr(options, field.name) for field in fields(ModelShape) if hasattr(options, field.name)}
    if "activations" in changes:
        changes["activations"] = getattr(torch, changes["activations"])
    name, shape = choose_shape(options.model, options.config, changes)
    show_plan(name, shape, options.memory, options.tensor_parallel)
    return 0


def positive(text: str) -> int:
    """An argparse type: an int above zero."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def capability(text: str) -> tuple[int, int]:
    """An argparse type: a compute capability, such as 10.0."""
    major, minor = text.split(".")
    return int(major), int(minor)


def find_device(name: str | None) -> torch.device:
    """The device an option names, or the best there is; ValueError where there is no such device."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu") if name is None else _parse_device(name)
    if device.type == "cpu":
        return device
    index = 0 if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise ValueError(f"--device {name}: this machine has {torch.cuda.device_count()} GPUs that torch can use")
    return torch.device("cuda", index)


def _parse_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu, cuda or cuda:N, got {name!r}")
    return device


def parse_format(text: str) -> tuple[str, str]:
    """Format and rounding of "float16:stochastic"; without a rounding it is to nearest."""
    name, _, rounding = text.partition(":")
    return check_format(name, rounding or "nearest")


def check_format(name: str, rounding: str) -> tuple[str, str]:
    """Raise ValueError unless the format exists and knows the rounding; returns both."""
    roundings = {format.name: format.roundings for format in FORMATS.values()}
    if name not in roundings:
        raise ValueError(f"there is no format {name!r}, only {_listed(FORMAT_NAMES)}")
    if rounding not in roundings[name]:
        raise ValueError(f"{name} has no rounding {rounding!r}, only {_listed(roundings[name])}")
    return name, rounding


def _listed(items: tuple[object, ...]) -> str:
    return ", ".join(map(str, items))
