"""The command line: flashstate COMMAND. It parses options without torch; commands.py runs them."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from flashstate.basics import (
    ACTIVATIONS,
    BENCH_SECONDS,
    BENCHED,
    CPU_BENCH_SECONDS,
    ENGINES,
    FAMILIES,
    FAMILY,
    LARGEST_NUMBER,
    LARGEST_WINDOW,
    NO_PEERS,
    PEER_NAMES,
    ROUNDINGS,
    ROUNDINGS_OF,
    TUNE_SECONDS,
    WAYS,
    WINDOW,
    check_device_name,
    did_you_mean,
    flashstate_version,
    listed,
    name_among,
    parse_format,
    parse_memory,
    wrapped,
)
from flashstate.models import DEFAULT_PRESET, KINDS, PRESETS

T = TypeVar("T")
PROMPT = "A state is all that a model remembers of what it has read. A state is"


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status: 0 well, 1 something is wrong with flashstate, 2 a bad option."""
    options = parse(sys.argv[1:] if argv is None else argv)
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch says so without NumPy, which none needs
    status: int = importlib.import_module("flashstate.commands").run(options)
    return status


class Help(argparse.HelpFormatter):
    """Help texts that leave no word alone on a line."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrapped(text, width)


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse a command and its options; exits with a hint where a name is misspelt."""
    parser, commands = build_parser()
    name = argv[0] if argv else ""
    of, words, known = parser, argv[:1], ["--version"]
    if name in commands:
        of, words, known = commands[name], argv[1:], [*COMMANDS[name].options, *COMMANDS[name].shape]
    elif name and not name.startswith("-"):
        parser.error(f"there is no command {name!r}{did_you_mean(name, COMMANDS) or f', only {listed(COMMANDS)}'}")
    known = ["-h", "--help", *(option for option in known if option.startswith("--"))]
    for word in takewhile(lambda word: word != "--", words):
        given = re.fullmatch(r"(--?[A-Za-z][^\s=]*)(=\S*)?", word)
        if given and not any(option.startswith(given[1]) for option in known):
            of.error(f"there is no option {given[1]}{did_you_mean(given[1], known)}")
    return parser.parse_args(argv)


def build_parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Make a parser of all commands, and one for the options of each."""
    parser = argparse.ArgumentParser(
        prog="flashstate",
        description="Step the recurrent state of language models while they generate.",
        formatter_class=Help,
    )
    parser.add_argument("--version", action="version", version=f"flashstate {flashstate_version()}")
    commands = parser.add_subparsers(title="commands", required=True, metavar=" | ".join(COMMANDS), dest="command")
    for name, command in COMMANDS.items():
        usage = f"flashstate {name} [options]{' [OP]' if 'op' in command.options else ''}"
        of_command = commands.add_parser(name, help=command.help, usage=usage, formatter_class=Help)
        for option, given in command.options.items():
            of_command.add_argument(option, **given)
        if command.shape:
            shape = of_command.add_argument_group("shape", "Instead of a model, or to change one.")
            for option, given in command.shape.items():
                shape.add_argument(option, **given)
    return parser, commands.choices


def told(check: Callable[[str], T]) -> Callable[[str], T]:
    """An argparse type that shows the words of a ValueError."""

    def parse(text: str) -> T:
        try:
            return check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def whole(text: str, least: int, most: int) -> int:
    """Return a whole number in this range; ValueError where it is none."""
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        raise ValueError(f"must be a whole number, got {text!r}")
    if not least <= (number := int(text)) <= most:
        raise ValueError(f"must be from {least} to {most}, got {number}")
    return number


def memory(text: str) -> str:
    """Return a size as it was given; ValueError where it is none."""
    parse_memory(text)
    return text


def capability(text: str) -> tuple[int, int]:
    """Return a compute capability, such as 10.0."""
    if not re.fullmatch(r"[0-9]{1,2}\.[0-9]", text):
        raise ValueError(f"must be two numbers, as in 10.0, got {text!r}")
    major, minor = text.split(".")
    return int(major), int(minor)


Option = dict[str, Any]  # what add_argument is given beside the name


class Command(NamedTuple):
    """A command: its line of help, its options, and its options for the shape of a model."""

    help: str
    options: Mapping[str, Option]
    shape: Mapping[str, Option] = MappingProxyType({})


def option(help: str, metavar: str | None = None, **more: Any) -> Option:
    """An option that is told so in help texts."""
    return {"help": help, "metavar": metavar, **more}


def named(names: Collection[str], help: str, metavar: str, **more: Any) -> Option:
    """An option that takes one of these names, or the beginning of one."""
    return option(help, metavar, type=told(partial(name_among, names=names)), **more)


def number(help: str, least: int = 1, most: int = LARGEST_NUMBER, **more: Any) -> Option:
    """An option that takes a whole number in this range."""
    return option(help, "N", type=told(partial(whole, least=least, most=most)), **more)


seed = partial(number, least=-(1 << 63), most=(1 << 63) - 1, default=0)
numbers = partial(number, nargs="+")
file = partial(option, metavar="FILE", type=Path)
flag: Callable[..., Option] = partial(dict, action="store_true")
TOLD = "(default: %(default)s)"
OP = named(
    BENCHED, f"{listed(BENCHED)}, which is conv1d_step and mamba2_step behind it (default: mamba2)", "OP", nargs="?"
)
SIZES = {
    "heads": "of a state; of gated_delta: value heads",
    "groups": "of B and C; of gated_delta: key heads",
    "rows": "of a head; of gated_delta: the value dimension",
    "cols": "of a head; of gated_delta: the key dimension",
    "channels": "of convolutions",
    "width": "of convolutions",
}
DEVICE = {
    "--device": option("cpu, cuda or cuda:N (default: cuda if there is one)", "DEVICE", type=told(check_device_name))
}
ROUNDING = named(ROUNDINGS, f"{listed(ROUNDINGS)} {TOLD}", "ROUNDING", default="nearest")
MEASURED = {
    "op": OP,
    **{f"--{name}": numbers(help) for name, help in SIZES.items()},
    **DEVICE,
    "--formats": option(
        "such as float16:stochastic (default: those of the op)", "FORMAT", nargs="+", type=told(parse_format)
    ),
    "--batches": numbers("default: those of the op; on a CPU bench takes 1 and 4, and at most a minute"),
}
INFO = {
    "op": named(
        (*BENCHED, *ENGINES),
        f"{OP['help']}; or {listed(ENGINES)}: which of its layers flashstate recognises in the installed release",
        "OP",
        nargs="?",
    ),
    **{f"--{name}": number(help, nargs=1) for name, help in SIZES.items()},
    "--format": named(ROUNDINGS_OF, f"{listed(ROUNDINGS_OF)} (default: the first that bench measures)", "FORMAT"),
    "--rounding": ROUNDING,
    "--batch": numbers("default: those that bench measures", dest="batches"),
    "--tokens": number("per row and call (default: 1)", nargs=1, default=[1]),
    "--snapshots": flag(help="with the state after each of several tokens stored"),
    "--at-once": flag(help="with several tokens of mamba2 or gated_delta and exact=False"),
    "--gpu": option("show the configs of this GPU instead of yours", "NAME"),
    "--capability": option(
        f"of that GPU, for the heuristic where there is no table {TOLD}", "X.Y", type=told(capability), default="9.0"
    ),
}
CHECK = {**DEVICE, "--quick": flag(help="one case per format, and few of ops without formats")}
DEMO = {
    **DEVICE,
    "--steps": number(f"model steps {TOLD}", default=150),
    "--tokens": number(f"per request and step, all but the first speculative {TOLD}", most=LARGEST_WINDOW, default=4),
    "--seed": seed(f"of requests, weights and tokens {TOLD}"),
}
BENCH = {
    **MEASURED,
    "--tokens": numbers("per row and call; several are timed for every kind of store the op is measured with"),
    "--ways": named(WAYS, f"measure also calls as users make them: {listed(WAYS)} (default: all)", "WAY", nargs="*"),
    "--peers": named(
        (*PEER_NAMES, NO_PEERS),
        "libraries to compare with, or none (default: all that can be imported)",
        "NAME",
        nargs="+",
    ),
    "--csv": file("write the measurements there"),
    "--plot": file("draw them there, as a PNG"),
    "--commit": option("what the CSV says of the sources where git cannot tell", "TEXT"),
    "--from-csv": file("measure nothing: show and draw this file"),
    "--host": flag(help="measure only what a call costs the host"),
    "--quick": flag(help="measure a few cells of all ops, or of OP, and write one file to send back"),
    "--seconds": number(
        f"with --quick: that measuring may take (default: {BENCH_SECONDS}, {CPU_BENCH_SECONDS} on a CPU)"
    ),
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
    "--seconds": number(f"with --quick: that it may take (default: {TUNE_SECONDS})"),
}
PLAN = {
    "--model": named(PRESETS, f"one of {listed(PRESETS)} (default: {DEFAULT_PRESET})", "NAME"),
    "--config": option("a Transformers config.json, or its folder", "PATH", type=Path),
    "--memory": option(f"such as 512MiB or 40GB {TOLD}", "SIZE", type=told(memory), default="40GiB"),
    "--tensor-parallel": number(f"ranks that share the heads; the memory is that of one {TOLD}", default=1),
}
SHAPE = {
    "--kind": named(KINDS, f"{listed(KINDS)} (default: mamba2)", "KIND"),
    "--layers": number("those with a state"),
    "--heads": number("of a state; of the delta rule: value heads"),
    "--rows": number("of a head; of the delta rule: the value dimension"),
    "--cols": number("of a head, the state dimension; of the delta rule: the key dimension"),
    "--groups": number("of B and C; of the delta rule: key heads"),
    "--per-channel": flag(default=None, help="with a decay per channel, as KDA has it"),
    "--conv-width": number("0: no convolution (default: 4)", least=0),
    "--dtype": named(
        ACTIVATIONS, f"of activations: {listed(ACTIVATIONS)} (default: bfloat16)", "DTYPE", dest="activations"
    ),
    "--window": number(
        f"of the replay ring, up to {LARGEST_WINDOW} (default: 0, no ring)", least=0, most=LARGEST_WINDOW
    ),
    "--tokens": number("the longest call a ring takes (default: 1)"),
}
GENERATE = {
    "--model": option("a folder, or a name on the hub (default: a tiny random model)", "PATH"),
    "--family": named(FAMILIES, f"of the random model, such as qwen3_next (default: {FAMILY})", "NAME"),
    "--dtype": named(
        ACTIVATIONS,
        f"of weights: {listed(ACTIVATIONS)} (default: that of the model; float32, if it is random)",
        "DTYPE",
    ),
    **DEVICE,
    "--prompt": option("what is continued (default: a sentence and a half)", "TEXT", default=PROMPT),
    "--tokens": number(f"how many to generate {TOLD}", default=64),
    "--batch": number(f"rows, all with the same prompt {TOLD}", default=1),
    "--state": named(ROUNDINGS_OF, f"{listed(ROUNDINGS_OF)} {TOLD}", "FORMAT", default="float32"),
    "--rounding": ROUNDING,
    "--replay": number(
        f"window of replay; 0: none (default: {WINDOW} for int8 states that can be replayed, else 0)",
        least=0,
        most=LARGEST_WINDOW,
    ),
    "--drafts": number(
        "tokens per step that prompt lookup proposes (default: none)", least=0, most=LARGEST_WINDOW - 1, default=0
    ),
    "--seed": seed(f"of stochastic rounding and of random weights {TOLD}"),
    "--static": flag(help="a cache of fixed size, and on a GPU one CUDA graph per step"),
}
COMMANDS = {
    "info": Command(
        "versions, devices, formats, and which launch config a case gets and why; which layers of vLLM are served", INFO
    ),
    "check": Command("prove the laws every op obeys, on your device", CHECK),
    "demo": Command("serve requests from one pool per format and compare with float64", DEMO),
    "generate": Command("run a model of Transformers, alone and then on flashstate", GENERATE),
    "bench": Command("time an op beside the roofs of memory and other libraries", BENCH),
    "tune": Command("find the launch configs of your GPU, and write them as a table", TUNE),
    "plan": Command("how many requests fit in memory, for every format of their states", PLAN, SHAPE),
}
