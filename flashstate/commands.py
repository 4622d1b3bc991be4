"""The commands of the command line: they turn options into calls of the modules that do the work."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from rich.console import Console

from flashstate.basics import BENCH_SECONDS, CPU_BENCH_SECONDS, TUNE_SECONDS, check_device_name, check_format, listed
from flashstate.bench.jobs import Grid, Stored
from flashstate.bench.limit import TimeLimit
from flashstate.bench.ops import OPS
from flashstate.bench.peers import MeasurementError, choose_peers
from flashstate.bench.quick import run_quick, show_quick_file
from flashstate.bench.run import Files, redraw, run_bench, run_host
from flashstate.bench.ways import run_ways, show_file
from flashstate.check import run_check
from flashstate.demo import show_demo
from flashstate.generate import Task, show_generate
from flashstate.info import show_info, show_vllm
from flashstate.launch import Gpu
from flashstate.models import ModelShape, choose_shape
from flashstate.plan import show_plan
from flashstate.tune import run_tune, run_tune_quick

DEFAULT_OP = "mamba2"
NO_ROOM = r"can't allocate memory|(calculation|multiplication) overflow"  # in what torch raises of tensors on a CPU
CPU_BATCHES = (1, 4)  # of `bench` without --batches


def run(options: argparse.Namespace) -> int:
    """Run the command that was parsed and return its exit status: 0 well, 1 flashstate is wrong, 2 a bad option."""
    errors = partial(Console(stderr=True).print, style="red", markup=False, highlight=False, soft_wrap=True)
    try:
        return COMMANDS[options.command](options) or 0
    except MeasurementError as wrong:
        errors(f"flashstate is {wrong}; nothing is timed")
        return 1
    except (ValueError, OSError) as error:
        errors(f"flashstate: {error}")
        return 2
    except (MemoryError, RuntimeError) as error:
        if not re.search(NO_ROOM, str(error)) and not isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            raise
        errors(f"flashstate: there is not enough memory: {str(error).partition(chr(10))[0]}")
        return 2


def _info(options: argparse.Namespace) -> None:
    if options.op == "vllm":
        words = ("format", "batches", "gpu", *(name for op in OPS.values() for name in op.case.sizes))
        if given := _given(options, words):
            raise ValueError(f"info vllm takes no --{min(given)}")
        return show_vllm()
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
        seconds = options.seconds or (CPU_BENCH_SECONDS if device.type == "cpu" else BENCH_SECONDS)
        return run_quick(options.op, device, seconds, options.json, options.commit)
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
    limit = None
    if device.type == "cpu" and options.batches is None:
        options.batches, limit = CPU_BATCHES, TimeLimit(CPU_BENCH_SECONDS)
    if options.ways is not None:
        jobs = op.jobs(_changed(options, op.grids))
        return run_ways(op, jobs, options.ways, peers, device, options.csv, options.commit)
    return run_bench(op, op.jobs(_changed(options, op.grids)), peers, device, files, options.commit, limit)


def require_only(options: argparse.Namespace, flag: str, allowed: Sequence[str]) -> None:
    """Raise ValueError where options other than the allowed ones were given beside this flag."""
    others = [name for name in vars(options) if name not in ("command", flag, *allowed)]
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
        return run_tune_quick(options.op, find_device(options.device), options.seconds or TUNE_SECONDS, options.output)
    require_quick(options, ("seconds",))
    options.op = options.op or DEFAULT_OP
    op, device = OPS[options.op], find_device(options.device)
    return run_tune(op, op.jobs(_changed(options, op.tuned_grids)), device, options.output, options.resume)


def _changed(options: argparse.Namespace, grids: Sequence[Grid]) -> list[Grid]:
    """Return grids of an op with the options in place of its defaults."""
    every = dict.fromkeys(size for op in OPS.values() for size in op.case.sizes)
    given, known = _given(options, every), OPS[options.op].case.sizes
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ValueError(f"{options.op} has no --{unknown[0]}, only {listed(f'--{name}' for name in known)}")
    changes = _given(options, ("tokens", "batches", "formats"))
    return [replace(grid, sizes={**grid.sizes, **given}, **changes) for grid in grids]


def _plan(options: argparse.Namespace) -> None:
    changes = _given(options, (field.name for field in fields(ModelShape)))
    name, shape = choose_shape(options.model, options.config, changes)
    show_plan(name, shape, options.memory, options.tensor_parallel)


def _generate(options: argparse.Namespace) -> None:
    check_format(options.state, options.rounding)
    given = _given(options, (field.name for field in fields(Task)))
    for name in given.keys() & {"dtype", "state"}:
        given[name] = getattr(torch, given[name])
    show_generate(Task(**{**given, "device": find_device(options.device)}))


def _given(options: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return the options of these names that were given."""
    return {name: getattr(options, name) for name in names if getattr(options, name, None) is not None}


def find_device(name: str | None) -> torch.device:
    """The device an option names, or the best there is; ValueError where there is no such device."""
    best = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = (best if name is None else check_device_name(name)).partition(":")
    if kind == "cpu":
        return torch.device("cpu")
    index = int(number or 0)
    if index >= torch.cuda.device_count():
        raise ValueError(f"--device {name}: this machine has {torch.cuda.device_count()} GPUs that torch can use")
    return torch.device("cuda", index)


def _check(options: argparse.Namespace) -> int:
    return run_check(find_device(options.device), options.quick)


def _demo(options: argparse.Namespace) -> None:
    show_demo(find_device(options.device), options.steps, options.tokens, options.seed)


COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "info": _info, "check": _check, "demo": _demo, "generate": _generate, "bench": _bench, "tune": _tune,
    "plan": _plan,
}  # fmt: skip
