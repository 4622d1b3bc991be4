"""Freeze what the library launches, and hold it against that later: no refactoring may change a launch unseen.

    python -m tools.frozen_launches write FILE [--jobs N]
    python -m tools.frozen_launches compare FILE [--jobs N] [--no-compile] [--thorough]

Of every launch the file has a line: the call it is of, kernel, grid, constants, options, types of arguments, and, on
one architecture by turns, hashes of the TTIR and the PTX that the installed Triton makes of it. Hashes do not depend on
the names of a kernel's parameters, of device functions or of files. What has the TTIR of the file has its PTX too, so a
comparison compiles to PTX only what changed, and an interrupted `write` goes on where it was. No GPU is needed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import multiprocessing
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # before triton is imported
os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from rich.console import Console
from rich.progress import track
from torch import Tensor

from flashstate.launch import Gpu, Machine, collecting
from flashstate.launch.environment import pretending
from flashstate.launch.start import Launch
from tools.frozen_calls import MEASURED, Call, portable_calls, table_calls

TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "i8", torch.uint8: "u8",
    torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
UNCHANGED: dict[str, str] = {}  # in processes that compile: PTX by TTIR, as the file has it
COMPARED = ("kernel", "grid", "constants", "options", "types")
Line = dict[str, Any]  # one launch, as the file has it
NOTHING: dict[str, Any] = {"triton": None, "launches": []}  # what is in a file that is not there
SAVED_EVERY = 60  # seconds


class Variant(NamedTuple):
    """All that decides the PTX of a launch."""

    module: str
    kernel: str
    types: tuple[str | None, ...]
    constants: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]
    architecture: int


@contextmanager
def calls_on(gpu: Gpu) -> Iterator[list[Launch]]:
    """Calls on CPU tensors inside reach their launches as on that GPU, and end there."""
    machine = Machine(gpu, "sm_89", overlaps=True)
    with pretending(machine), collecting() as launches:
        yield launches


def type_of(value: Any) -> str | None:
    """The type that Triton compiles an argument as, which is not specialised on; None of one that is left out."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        return f"*{TYPES[value.dtype]}"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"


def variant_of(launch: Launch, architecture: int) -> Variant:
    """What a launch is compiled from."""
    types = tuple(type_of(value) for value in launch.arguments)
    constants, options = (tuple(sorted(given.items())) for given in (launch.constants, launch.options))
    return Variant(launch.kernel.fn.__module__, launch.kernel.__name__, types, constants, options, architecture)


Found = tuple[Line, Variant | None]  # a launch, and what is to be compiled for its hashes


class Hashes(NamedTuple):
    """Hashes of what Triton makes of a variant."""

    ttir: str
    ptx: str


def collect(calls: Sequence[Call], gpu: Gpu | None = None) -> Iterator[Found]:
    """Every launch of these calls as a line without hashes, and what they are made from, if they are. Without a GPU
    that has a table, on one of each architecture that has none."""
    for call in track(calls, "collecting", console=Console(stderr=True), transient=True):
        for architecture in call.architectures:
            with calls_on(gpu or Gpu("a GPU nobody measured", divmod(architecture, 10))) as launches:
                call.make()
            assert launches, f"{call.name} launches nothing"
            for i, launch in enumerate(launches):
                variant = variant_of(launch, architecture)
                line = line_of(f"{call.name}, sm_{architecture}, launch {i}", launch, variant)
                yield line, variant if architecture == call.compiled_on else None


def line_of(name: str, launch: Launch, variant: Variant) -> Line:
    """A launch as the file has it, without hashes."""
    constants, options = dict(variant.constants), dict(variant.options)
    return {
        "call": name, "kernel": variant.kernel, "grid": list(launch.grid), "constants": constants, "options": options,
        "types": list(variant.types),
    }  # fmt: skip


def remember(unchanged: dict[str, str]) -> None:
    """Tell a process that compiles the PTX of TTIR that the file has."""
    UNCHANGED.update(unchanged)


def hashes_of(variant: Variant) -> tuple[Variant, Hashes]:
    """A variant, and hashes of its TTIR and PTX; that of the file if it has the TTIR."""
    stages = texts_of(variant)
    ttir = digest(f"{variant.architecture} {variant.options}\n{normalised_ttir(next(stages))}")
    return variant, Hashes(ttir, UNCHANGED.get(ttir) or digest(normalised_ptx(next(stages))))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def texts_of(variant: Variant) -> Iterator[str]:
    """The TTIR of a variant, then its PTX, without Triton's cache, and without ptxas, which would come next."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    target = GPUTarget("cuda", variant.architecture, 32)
    compiler = make_backend(target)
    source = ASTSource(*source_of(variant))
    options = compiler.parse_options({**dict(variant.options), **source.parse_options()})
    context = ir.context()
    ir.load_dialects(context)
    compiler.load_dialects(context)
    stages: dict[str, Any] = {}
    compiler.add_stages(stages, options, source.language)
    made_of = (target, options, compiler.get_codegen_implementation(options), compiler.get_module_map(), context)
    module, metadata = source.make_ir(*made_of), {"target": target, **options.__dict__}
    for name, stage in stages.items():
        module = stage(module, metadata)
        if name in ("ttir", "ptx"):
            yield str(module)


def source_of(variant: Variant) -> tuple[Any, dict[str, str], dict[tuple[int, ...], Any]]:
    """The kernel of a variant, the types of its parameters, and the values of those that are constants."""
    kernel = getattr(importlib.import_module(variant.module), variant.kernel)
    given: dict[str, Any] = dict(variant.constants)
    types: dict[str, str] = {}
    values: dict[tuple[int, ...], Any] = {}
    for position, parameter in enumerate(kernel.params):
        type_given = variant.types[position] if position < len(variant.types) else None
        types[parameter.name] = type_given or "constexpr"
        if type_given is None:
            values[(position,)] = None if position < len(variant.types) else given[parameter.name]
    return kernel, types, values


def normalised_ttir(text: str) -> str:
    """TTIR without locations, with numbers for names that are not inside of strings, as those of inline PTX are."""
    text = re.sub(r"^#loc.*$|\bloc\((?:[^()\"]|\"[^\"]*\"|\([^()]*\))*\)", "", text, flags=re.MULTILINE)
    names: dict[str, str] = {}

    def numbered(found: re.Match[str]) -> str:
        return found[0] if found[0][0] == '"' else names.setdefault(found[0], f"%{len(names)}")

    return re.sub(r'"(?:[^"\\]|\\.)*"|[%@][\w$.-]+', numbered, text)


def normalised_ptx(ptx: str) -> str:
    """PTX without names of kernels and files, comments, blank lines, and what is there for debuggers."""
    (entry,) = re.findall(r"\.entry\s+(\w+)", ptx)
    ptx = re.sub(rf"\b{entry}(?=\b|_param_)", "kernel", ptx)
    ptx = re.sub(r"/\*.*?\*/|//[^\n]*", "", ptx, flags=re.DOTALL)
    ptx = re.sub(r"^\s*\.section\b[^{]*\{.*?\}", "", ptx, flags=re.DOTALL | re.MULTILINE)
    ptx = re.sub(r"^\s*\.(?:file|loc)\b[^\n]*", "", ptx, flags=re.MULTILINE)
    return "\n".join(line.strip() for line in ptx.splitlines() if line.strip())


def add_hashes(found: Sequence[Found], unchanged: dict[str, str], jobs: int, save: Callable[[], None]) -> None:
    """Compile what is found, by so many processes, and add hashes to its lines. Lines are saved once a minute, so that
    what was compiled is not lost. `unchanged`: PTX by TTIR."""
    lines: defaultdict[Variant, list[Line]] = defaultdict(list)
    for line, variant in found:
        if variant is not None:
            lines[variant].append(line)
    mixed = sorted(lines, key=lambda variant: digest(repr(variant)))  # so that a part of them is a bit of everything
    saved = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(jobs, remember, (unchanged,)) as pool:
        results = pool.imap_unordered(hashes_of, mixed)
        console = Console(stderr=True)
        for variant, hashes in track(results, "compiling", total=len(mixed), console=console, transient=True):
            for line in lines[variant]:
                line.update(hashes._asdict())
            if time.monotonic() > saved + SAVED_EVERY:
                save()
                saved = time.monotonic()


def collect_all(only: str) -> list[Found]:
    """What all calls launch whose name has this text."""
    portable, measured = ([call for call in calls if only in call.name] for calls in (portable_calls(), table_calls()))
    found = [*collect(portable), *collect(measured, MEASURED)]
    assert len({line["call"] for line, _ in found}) == len(found), "names of calls are not distinct"
    calls, different = len(portable) + len(measured), len({variant for _, variant in found} - {None})
    print(f"{len(found)} launches of {calls} calls, {different} different ones to compile", file=sys.stderr)
    return found


def save_lines(path: Path, lines: Iterable[Line]) -> None:
    """Write a file of these launches, one per line, so that a reader meets either the old file or the new one."""
    beside = path.with_name(path.name + ".new")
    listed = ",\n".join(json.dumps(line) for line in lines)
    beside.write_text(f'{{"triton": {json.dumps(triton.__version__)}, "launches": [\n{listed}\n]}}\n', encoding="utf-8")
    beside.replace(path)


def ptx_by_ttir(lines: Iterable[Line]) -> dict[str, str]:
    """Hashes that lines have."""
    return {line["ttir"]: line["ptx"] for line in lines if "ptx" in line}


def differences(before: Line, now: Line, fields: Sequence[str]) -> Iterator[str]:
    """What differs between two lines of one name."""
    now = json.loads(json.dumps(now))
    for field in fields:
        old, new = before.get(field), now.get(field)
        if isinstance(old, dict) and isinstance(new, dict):
            pairs = {name: (old.get(name, "absent"), new.get(name, "absent")) for name in {**old, **new}}
            yield from (f"{field}: {name} {was} -> {is_}" for name, (was, is_) in pairs.items() if was != is_)
        elif old != new:
            yield f"{field}: {old} -> {new}"


def compare(frozen: dict[str, Line], now: dict[str, Line], fields: Sequence[str]) -> int:
    """Print what differs between frozen launches and those of now; how many differ."""
    different = 0
    for name in {**frozen, **now}:
        if name not in now or name not in frozen:
            told = ["missing"] if name not in now else ["not in the file"]
        else:
            told = list(differences(frozen[name], now[name], fields))
        different += bool(told)
        for what in told:
            print(f"{name}: {what}")
    print(f"{len({**frozen, **now}) - different} launches are equal, {different} differ")
    return different


def arguments_of(given: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(prog="python -m tools.frozen_launches", description="Freeze launches of kernels.")
    parser.add_argument("command", choices=("write", "compare"))
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes that compile (2)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only calls whose name has this text")
    parser.add_argument("--no-compile", action="store_true", help="compare all but PTX, which is fast")
    parser.add_argument("--thorough", action="store_true", help="compile to PTX what has the TTIR of the file too")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Write a file of launches, or compare one; 1 if anything differs."""
    options = arguments_of(given)
    content = json.loads(options.file.read_text(encoding="utf-8")) if options.file.exists() else NOTHING
    same = content["triton"] == triton.__version__
    unchanged = ptx_by_ttir(content["launches"]) if same and not options.thorough else {}
    if options.command == "write":
        found = collect_all(options.only)
        save = partial(save_lines, options.file, [line for line, _ in found])
        if not options.no_compile:
            add_hashes(found, unchanged, options.jobs, save)
        save()
        return 0
    if not same and not options.no_compile:
        print(f"{options.file} is of Triton {content['triton']}: compare with that, or --no-compile", file=sys.stderr)
        return 2
    frozen = {line["call"]: line for line in content["launches"] if options.only in line["call"]}
    found = collect_all(options.only)
    if not options.no_compile:
        hashed = [(line, variant) for line, variant in found if "ptx" in frozen.get(line["call"], {})]
        add_hashes(hashed, unchanged, options.jobs, save=lambda: None)
    fields = COMPARED if options.no_compile else (*COMPARED, "ptx")
    return int(compare(frozen, {line["call"]: line for line, _ in found}, fields) > 0)


if __name__ == "__main__":
    sys.exit(main())
