"""The command line: flashstate COMMAND. It parses options; other modules do the work."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from rich.console import Console

from flashstate.bench.jobs import Grid, Stored
from flashstate.bench.ops import OPS
from flashstate.bench.peers import MeasurementError, choose_peers
from flashstate.bench.quick import SECONDS, run_quick, show_quick_file
from flashstate.bench.run import Files, redraw, run_bench, run_host
from flashstate.bench.ways import WAYS, run_ways, show_file
from flashstate.check import run_check
from flashstate.demo import show_demo
from flashstate.errors import ACTIVATION_DTYPES, dtype_name
from flashstate.generate import FAMILY, WINDOW, Task, show_generate
from flashstate.info import flashstate_version, show_info, wrapped
from flashstate.launch import Gpu
from flashstate.models import DEFAULT_PRESET, KINDS, PRESETS, ModelShape, choose_shape
from flashstate.plan import show_plan
from flashstate.state.formats import FORMATS, ROUNDINGS
from flashstate.state.ring import LARGEST_WINDOW
from flashstate.tune import QUICK_SECONDS, run_tune, run_tune_quick

ROUNDINGS_OF = {format.name: format.roundings for format in FORMATS.values()}
ACTIVATIONS = tuple(map(dtype_name, ACTIVATION_DTYPES))
CPU_BATCHES = (1, 4, 16)
PROMPT = "A state is all that a model remembers of what it has read. A state is"


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status: 0 well, 1 something is wrong with flashstate, 2 a bad option."""
    options = build_parser().parse_args(argv)
    errors = partial(Console(stderr=True).print, style="red", markup=False, highlight=False, soft_wrap=True)
    try:
        return options.run(options) or 0
    except MeasurementError as wrong:
        errors(f"flashstate is {wrong}; nothing is timed")
        return 1
    except (ValueError, OSError) as error:
        errors(f"flashstate: {error}")
        return 2


class Help(argparse.HelpFormatter):
    """Help texts that leave no word alone on a line."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrapped(text, width)


def build_parser() -> argparse.ArgumentParser:
    """A parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="flashstate",
        description="Step the recurrent state of language models while they generate.",
        formatter_class=Help,
    )
    parser.add_argument("--version", action="version", version=f"flashstate {flashstate_version()}")
    commands = parser.add_subparsers(title="commands", required=True, metavar=" | ".join(COMMANDS))
    for name, command in COMMANDS.items():
        usage = f"flashstate {name} [options]{' [OP]' if 'op' in command.options else ''}"
        of_command = commands.add_parser(name, help=command.help, usage=usage, formatter_class=Help)
        of_command.set_defaults(run=command.run)
        for option, given in command.options.items():
            of_command.add_argument(option, **given)
        if command.shape:
            shape = of_command.add_argument_group("shape", "Instead of a model, or to change one.")
            for option, given in command.shape.items():
                shape.add_argument(option, **given)
    return parser


def _info(options: argparse.Namespace) -> None:
    options.op = options.op or DEFAULT_OP
    op = OPS[options.op]
    formats = [check_format(options.format or op.grids[0].formats[0][0], options.rounding)]
    if op.shown and options.snapshots:
        raise ValueError(f"{options.op} has no --snapshots")
    stored: Sequence[Stored] = op.shown or ("every" if options.snapshots else "last",)
    grid = replace(op.small_grid(*stored), formats=formats)
    jobs = op.jobs(_changed(options, [grid]))
    if options.at_once:
        if "at once" not in op.variants:
            raise ValueError(f"{options.op} has no --at-once")
        try:
            jobs = [op.variants["at once"].job(job) for job in jobs]
        except MeasurementError as reason:
            raise ValueError(f"--at-once: {reason}") from reason
    show_info(jobs, None if options.gpu is None else Gpu(options.gpu, options.capability), op.pays)


def _bench(options: argparse.Namespace) -> int:
    if options.from_json is not None:
        require_only(options, "from_json", ("plot",))
        show_quick_file(options.from_json, options.plot)
        return 0
    if options.quick:
        require_only(options, "quick", ("op", "device", "seconds", "json", "commit"))
        device = find_device(options.device)
        return run_quick(options.op, device, options.seconds or SECONDS, options.json, options.commit)
    require_quick(options, ("seconds", "json"))
    options.op = options.op or DEFAULT_OP
    _bench_op(options)
    return 0


def _bench_op(options: argparse.Namespace) -> None:
    files = Files(options.csv, options.plot)
    if options.host and (files != Files() or options.from_csv is not None):
        raise ValueError("--host measures only what a call costs the host: it reads, writes and draws no file")
    if options.ways is not None and (options.host or options.plot):
        raise ValueError("--ways has a table of its own: it draws nothing, and takes no --host")
    if options.from_csv is not None:
        return redraw(options.from_csv, files) if options.ways is None else show_file(options.from_csv)
    op, device = OPS[options.op], find_device(options.device)
    peers = choose_peers(op.peers, options.peers)
    if options.host:
        return run_host(op, peers, device)
    if device.type == "cpu":
        options.batches = options.batches or CPU_BATCHES
    if options.ways is not None:
        jobs = op.jobs(_changed(options, op.grids))
        return run_ways(op, jobs, options.ways, peers, device, options.csv, options.commit)
    return run_bench(op, op.jobs(_changed(options, op.grids)), peers, device, files, options.commit)


def require_only(options: argparse.Namespace, flag: str, allowed: Sequence[str]) -> None:
    """Raise ValueError where somebody gave options that one of them, which says all else, goes without."""
    others = [name for name in vars(options) if name not in ("run", flag, *allowed)]
    given = [name for name in others if getattr(options, name) not in (None, False)]
    if given:
        one, other = (name.replace("_", "-") for name in (flag, given[0]))
        raise ValueError(f"--{one} goes without {other if other == 'op' else '--' + other}")


def require_quick(options: argparse.Namespace, names: Sequence[str]) -> None:
    """Raise ValueError where somebody gave options that only go with --quick."""
    given = _given(options, names)
    if given:
        raise ValueError(f"--{min(given)} goes with --quick only")


def _tune(options: argparse.Namespace) -> int:
    if options.quick:
        require_only(options, "quick", ("op", "device", "seconds", "output"))
        return run_tune_quick(options.op, find_device(options.device), options.seconds or QUICK_SECONDS, options.output)
    require_quick(options, ("seconds",))
    options.op = options.op or DEFAULT_OP
    op, device = OPS[options.op], find_device(options.device)
    return run_tune(op, op.jobs(_changed(options, op.tuned_grids)), device, options.output, options.resume)


def _changed(options: argparse.Namespace, grids: Sequence[Grid]) -> list[Grid]:
    """Grids of an op with what options say in the place of its defaults."""
    given, known = _given(options, SIZES), OPS[options.op].case.sizes
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ValueError(f"{options.op} has no --{unknown[0]}, only {_listed(f'--{name}' for name in known)}")
    changes = _given(options, ("tokens", "batches", "formats"))
    if "formats" in changes:
        changes["formats"] = [parse_format(text) for text in options.formats]
    return [replace(grid, sizes={**grid.sizes, **given}, **changes) for grid in grids]


def _plan(options: argparse.Namespace) -> None:
    changes = _given(options, (field.name for field in fields(ModelShape)))
    if "activations" in changes:
        changes["activations"] = getattr(torch, changes["activations"])
    name, shape = choose_shape(options.model, options.config, changes)
    show_plan(name, shape, options.memory, options.tensor_parallel)


def _generate(options: argparse.Namespace) -> None:
    check_format(options.state, options.rounding)
    given = _given(options, (field.name for field in fields(Task)))
    for name in given.keys() & {"dtype", "state"}:
        given[name] = getattr(torch, given[name])
    show_generate(Task(**{**given, "device": find_device(options.device)}))


def _given(options: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """The options of these names that the command has and that somebody gave."""
    return {name: getattr(options, name) for name in names if getattr(options, name, None) is not None}


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
    best = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(best if name is None else name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cpu":
        return device
    index = 0 if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise ValueError(f"--device {name}: this machine has {torch.cuda.device_count()} GPUs that torch can use")
    return torch.device("cuda", index)


def parse_format(text: str) -> tuple[str, str]:
    """Format and rounding of "float16:stochastic"; without a rounding it is to nearest."""
    name, _, rounding = text.partition(":")
    return check_format(name, rounding or "nearest")


def check_format(name: str, rounding: str) -> tuple[str, str]:
    """Raise ValueError unless the format exists and knows the rounding; returns both."""
    if name not in ROUNDINGS_OF:
        raise ValueError(f"there is no format {name!r}, only {_listed(ROUNDINGS_OF)}")
    if rounding not in ROUNDINGS_OF[name]:
        raise ValueError(f"{name} has no rounding {rounding!r}, only {_listed(ROUNDINGS_OF[name])}")
    return name, rounding


def _listed(items: Iterable[object]) -> str:
    return ", ".join(map(str, items))


Option = dict[str, Any]  # what add_argument is given beside the name


class Command(NamedTuple):
    """What a command says of itself, what runs it, its options, and those that make up the shape of a model."""

    help: str
    run: Callable[[argparse.Namespace], int | None]  # gives an exit status, if it is not 0
    options: Mapping[str, Option]
    shape: Mapping[str, Option] = MappingProxyType({})


def option(help: str, metavar: str | None = None, **more: Any) -> Option:
    """An option that is told so in help texts."""
    return {"help": help, "metavar": metavar, **more}


number = partial(option, metavar="N", type=positive)
numbers = partial(number, nargs="+")
file = partial(option, metavar="FILE", type=Path)
flag: Callable[..., Option] = partial(dict, action="store_true")
TOLD = "(default: %(default)s)"
DEFAULT_OP = "mamba2"
OP = option(
    f"{_listed(OPS)}, which is conv1d_step and mamba2_step behind it (default: {DEFAULT_OP})",
    "OP", nargs="?", choices=OPS,
)  # fmt: skip
SIZES = {
    "heads": "of a state; of gated_delta: value heads",
    "groups": "of B and C; of gated_delta: key heads",
    "rows": "of a head; of gated_delta: the value dimension",
    "cols": "of a head; of gated_delta: the key dimension",
    "channels": "of convolutions",
    "width": "of convolutions",
}
DEVICE = {"--device": option("cpu, cuda or cuda:N (default: cuda if there is one)", "DEVICE")}
ROUNDING = option(f"{_listed(ROUNDINGS)} {TOLD}", "ROUNDING", choices=ROUNDINGS, default="nearest")
MEASURED = {
    "op": OP,
    **{f"--{name}": numbers(help) for name, help in SIZES.items()},
    **DEVICE,
    "--formats": option("such as float16:stochastic (default: those of the op)", "FORMAT", nargs="+"),
    "--batches": numbers("default: those of the op; bench on a CPU takes fewer"),
}
INFO = {
    "op": OP,
    **{f"--{name}": number(help, nargs=1) for name, help in SIZES.items()},
    "--format": option(
        f"{_listed(ROUNDINGS_OF)} (default: the first that bench measures)", "FORMAT", choices=ROUNDINGS_OF
    ),
    "--rounding": ROUNDING,
    "--batch": numbers("default: those that bench measures", dest="batches"),
    "--tokens": number("per row and call (default: 1)", nargs=1, default=[1]),
    "--snapshots": flag(help="with the state after each of several tokens stored"),
    "--at-once": flag(help="with several tokens of mamba2 or gated_delta and exact=False"),
    "--gpu": option("show the configs of this GPU instead of yours", "NAME"),
    "--capability": option(
        f"of that GPU, for the heuristic where there is no table {TOLD}", "X.Y", type=capability, default="9.0"
    ),
}
CHECK = {**DEVICE, "--quick": flag(help="one case per format, and few of ops without formats")}
DEMO = {
    **DEVICE,
    "--steps": number(f"model steps {TOLD}", default=150),
    "--tokens": number(f"per request and step, all but the first speculative {TOLD}", default=4),
    "--seed": option(f"of requests, weights and tokens {TOLD}", "N", type=int, default=0),
}
BENCH = {
    **MEASURED,
    "--tokens": numbers("per row and call; several are timed for every kind of store the op is measured with"),
    "--ways": option(f"measure also calls as users make them: {_listed(WAYS)} (default: all)", "WAY", nargs="*"),
    "--peers": option("libraries to compare with, or none (default: all that can be imported)", "NAME", nargs="+"),
    "--csv": file("write the measurements there"),
    "--plot": file("draw them there, as a PNG"),
    "--commit": option("what the CSV says of the sources where git cannot tell", "TEXT"),
    "--from-csv": file("measure nothing: show and draw this file"),
    "--host": flag(help="measure only what a call costs the host"),
    "--quick": flag(help="measure a few cells of all ops, or of OP, and write one file to send back"),
    "--seconds": number(f"with --quick: that measuring may take (default: {SECONDS})"),
    "--json": file("with --quick: the file (default: named after the GPU, here)"),
    "--from-json": file("measure nothing: show and draw the file of a quick run"),
}
TUNE = {
    **MEASURED,
    "--tokens": numbers("per row and call: 1, and one number that stands for several (default: 1 4)"),
    "--output": file("the table (default: named after the GPU, here)"),
    "--resume": flag(help="keep the entries that the table has, and find the others"),
    "--quick": flag(
        help="find configs of what bench --quick measures, of all ops, or of OP, and keep entries that the table has; "
        "the table is written where flashstate reads it"
    ),
    "--seconds": number(f"with --quick: that it may take (default: {QUICK_SECONDS})"),
}
PLAN = {
    "--model": option(f"one of {_listed(PRESETS)} (default: {DEFAULT_PRESET})", "NAME", choices=tuple(PRESETS)),
    "--config": option("a Transformers config.json, or its folder", "PATH", type=Path),
    "--memory": option(f"such as 512MiB or 40GB {TOLD}", "SIZE", default="40GiB"),
    "--tensor-parallel": number(f"ranks that share the heads; the memory is that of one {TOLD}", default=1),
}
SHAPE = {
    "--kind": option("default: mamba2", choices=KINDS),
    "--layers": number("those with a state"),
    "--heads": number("of a state; of the delta rule: value heads"),
    "--rows": number("of a head; of the delta rule: the value dimension"),
    "--cols": number("of a head, the state dimension; of the delta rule: the key dimension"),
    "--groups": number("of B and C; of the delta rule: key heads"),
    "--per-channel": flag(default=None, help="with a decay per channel, as KDA has it"),
    "--conv-width": option("0: no convolution (default: 4)", "N", type=int),
    "--dtype": option("of activations (default: bfloat16)", dest="activations", choices=ACTIVATIONS),
    "--window": option(f"of the replay ring, up to {LARGEST_WINDOW} (default: 0, no ring)", "N", type=int),
    "--tokens": number("the longest call a ring takes (default: 1)"),
}
GENERATE = {
    "--model": option("a folder, or a name on the hub (default: a tiny random model)", "PATH"),
    "--family": option(f"of the random model, such as qwen3_next (default: {FAMILY})", "NAME"),
    "--dtype": option("of weights (default: that of the model; float32, if it is random)", choices=ACTIVATIONS),
    **DEVICE,
    "--prompt": option("what is continued (default: a sentence and a half)", "TEXT", default=PROMPT),
    "--tokens": number(f"how many to generate {TOLD}", default=64),
    "--batch": number(f"rows, all with the same prompt {TOLD}", default=1),
    "--state": option(f"{_listed(ROUNDINGS_OF)} {TOLD}", "FORMAT", choices=ROUNDINGS_OF, default="float32"),
    "--rounding": ROUNDING,
    "--replay": option(
        f"window of replay; 0: none (default: {WINDOW} for int8 states that can be replayed, else 0)", "N", type=int
    ),
    "--drafts": number("tokens per step that prompt lookup proposes (default: none)", default=0),
    "--seed": option(f"of stochastic rounding and of random weights {TOLD}", "N", type=int, default=0),
    "--static": flag(help="a cache of fixed size, and on a GPU one CUDA graph per step"),
}
COMMANDS = {
    "info": Command("versions, devices, formats, and which launch config a case gets and why", _info, INFO),
    "check": Command(
        "prove the laws every op obeys, on your device",
        lambda options: run_check(find_device(options.device), options.quick),
        CHECK,
    ),
    "demo": Command(
        "serve requests from one pool per format and compare with float64",
        lambda options: show_demo(find_device(options.device), options.steps, options.tokens, options.seed),
        DEMO,
    ),
    "generate": Command("run a model of Transformers, alone and then on flashstate", _generate, GENERATE),
    "bench": Command("time an op beside the roofs of memory and other libraries", _bench, BENCH),
    "tune": Command("find the launch configs of your GPU, and write them as a table", _tune, TUNE),
    "plan": Command("how many requests fit in memory, for every format of their states", _plan, PLAN, SHAPE),
}
