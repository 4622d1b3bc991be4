"""Watch calls of every kernel with compute-sanitizer, and first two planted mistakes, which it must find.

    python -m tools.sanitize

memcheck looks for accesses outside of memory, racecheck for races in shared memory. It does not see global memory, so
every call is also made many times, and must leave the same bytes. Kernels are compiled before anything is watched, and
with the most warps too that a config has. Calls are shared out to processes. Needs a GPU, and compute-sanitizer, which
comes with CUDA.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashstate import Slots, StatePool, kernels
from flashstate.launch import Config, collecting, override, valid_configs
from flashstate.launch.start import Launch
from flashstate.launch.variants import compile_variants, variants_of
from flashstate.ops.norms import rms_norm
from flashstate.ops.rings import place_counts
from flashstate.proof import AnyCase, Case, ConvCase, DeltaCase, DeltaReplayCase, Mamba3Case, ReplayCase, slotted
from flashstate.proof.replaying import FORMS
from flashstate.state.formats import bits_of

LAUNCHES = 50  # of a call, which must all leave the same bytes
FOUND = 9  # exit status of compute-sanitizer where it finds something
SECONDS = 480  # after which a watched process is ended
TOOLS = {"memcheck": "bounds", "racecheck": "race"}  # of compute-sanitizer, each with the planted mistake it must find
PADDING = {"memcheck": ("--padding", "32768")}  # bytes between allocations: a read past an end would hit the next one
NOTHING_FOUND = re.compile(r"^=+ (?:ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards)", re.MULTILINE)
HALF: dict[str, Any] = {"x": "bfloat16", "slots": 5}
MAMBA2 = Case(3, 2, 1, 64, 128, bc="bfloat16", dt="bfloat16", **HALF)
DELTA = DeltaCase(3, 4, 2, 64, 128, qk="bfloat16", gates="bfloat16", **HALF)
MIMO = Mamba3Case(3, 2, 1, 64, 128, rank=4, angles=32, bc="bfloat16", kv="bfloat16", **HALF)
CONV = ConvCase(3, 320, 4, parameters="bfloat16", **HALF)
REPLAY = ReplayCase(3, 2, 1, 64, 128, dt="bfloat16", **HALF)
DELTA_REPLAY = DeltaReplayCase(3, 4, 2, 64, 128, qk="bfloat16", gates="bfloat16", **HALF)
INT8: dict[str, Any] = {"format": "int8", "rounding": "stochastic"}
STEPPED: tuple[AnyCase, ...] = (
    MAMBA2,
    replace(MAMBA2, tokens=3, packed=True, **INT8),
    replace(MAMBA2, tokens=6, exact=False),
    DELTA,
    replace(DELTA, tokens=3, packed=True, **INT8),
    replace(DELTA, tokens=3, per_channel=True, transposed=True),
    replace(DELTA, tokens=4, exact=False, **INT8),
    MIMO,
    replace(MIMO, angles=0, format="bfloat16"),
    replace(MIMO, groups=2, rows=40, cols=48, rank=1, angles=24, tokens=2),
    replace(MIMO, rows=80, cols=64, rank=2, angles=20, tokens=3, packed=True, **INT8),
    CONV,
    replace(CONV, tokens=3, packed=True),
    *(replace(REPLAY, form=form) for form in FORMS),
    replace(REPLAY, **INT8),
    replace(REPLAY, tokens=4, form="parted"),
    DELTA_REPLAY,
    replace(DELTA_REPLAY, tokens=4, form="parted", **INT8),
)
Results = list[Tensor]


class Watched(NamedTuple):
    """A call under a name, which makes its inputs, and gives all that it has written."""

    name: str
    call: Callable[[torch.device], Results]


def stepped(case: AnyCase, config: Config | None, device: torch.device) -> Results:
    """Step a batch whose first row is padding; the output, and what is in the pool."""
    inputs = case.make_inputs(device)
    inputs.slots[0] = -1
    with override(config) if config else nullcontext():
        y = inputs.step()
    return [y, *slotted(inputs.state).values()]


def widest(case: AnyCase) -> Config | None:
    """The config with the most warps, of those with the most threads in a row; None if there is none with several."""
    config = max(valid_configs(case.problem), key=lambda config: (config.num_warps, config.lanes))
    return config if config.num_warps > 1 else None


def folded(case: AnyCase, device: torch.device) -> Results:
    """Fold all rings into another State, and then in place."""
    inputs: Any = case.make_inputs(device)
    state = inputs.state.state
    other = replace(state, **{name: torch.zeros_like(tensor) for name, tensor in slotted(state).items()})
    inputs.fold(into=other)
    inputs.fold()
    return [*slotted(other).values(), *slotted(inputs.state).values()]


def normed(device: torch.device) -> Results:
    """Normalise heads that several warps share."""
    x, gate = torch.arange(6.0 * 4096, device=device).view(2, 3, 2, 2048).unbind()
    weight = torch.linspace(-1.0, 1.0, 2048, device=device)
    return [rms_norm(x, weight, 1e-6), rms_norm(x, weight, 1e-6, gate)]


def placed(device: torch.device) -> Results:
    """Put counts that rows have to their slots."""
    before, after, rows, folding = (torch.zeros(4, dtype=torch.int32, device=device) for _ in range(4))
    counts, full = (torch.tensor(given, device=device) for given in ([0, 1, 2, 3], [0, 1, 0, 1]))
    slots = Slots(torch.tensor([2, 0, 3, -1], dtype=torch.int32, device=device))
    place_counts(slots, counts.int(), full.to(torch.int8), 4, before, after, rows, folding)
    return [before, after, rows, folding]


def pooled(device: torch.device) -> Results:
    """Let requests come, step, move and go in a pool with windows, rings and seeds."""
    pool = StatePool.mamba2(
        slots=300, layers=2, heads=2, rows=16, cols=32, groups=1, window=4, tokens=2, dtype=torch.int8,
        rounding="stochastic", ring_dtype=torch.float32, device=device, seed=1,
    )  # fmt: skip
    slots = pool.acquire(280)
    pool.write(0, slots[:3], torch.ones(3, 2, 16, 32, device=device))
    for accepted in (None, torch.ones_like(slots)):
        pool.commit(pool.plan(slots, 2), accepted)
        pool.advance(slots)
    pool.copy(slots[:100], slots[100:200])
    pool.folded(slots[:5], 1)
    pool.load(slots[10:20], pool.export(slots[:10]))
    read = pool.read(0, slots[:3])
    pool.release(slots[:7])
    pool.reset(slots[7:20])
    kept = [tensor for i in range(2) for part in (pool.layer(i), pool.ring(i)) for tensor in slotted(part).values()]
    return [read, *kept]


def watched() -> Iterator[Watched]:
    """All calls, which together start every kernel."""
    for case in STEPPED:
        yield Watched(str(case), partial(stepped, case, None))
        if (config := widest(case)) is not None:
            yield Watched(f"{case}, {config}", partial(stepped, case, config))
    for case in (REPLAY, replace(REPLAY, **INT8), DELTA_REPLAY, replace(DELTA_REPLAY, per_channel=True, key_heads=4)):
        yield Watched(f"{case}, folded", partial(folded, case))
    yield Watched("norms", normed)
    yield Watched("counts of rows", placed)
    yield Watched("a pool", pooled)


def every_kernel() -> set[str]:
    """Return the names of all kernels of the library."""
    found = (
        importlib.import_module(f"{kernels.__name__}.{each.name}") for each in pkgutil.iter_modules(kernels.__path__)
    )
    return {value.__name__ for module in found for value in vars(module).values() if hasattr(value, "constants")}


def launches_of(calls: Iterable[Watched], device: torch.device) -> list[Launch]:
    """Collect what these calls launch, without launching it."""
    with collecting() as launches:
        for each in calls:
            each.call(device)
    return launches


def compile_and_repeat(share: slice) -> None:
    """Compile all that these calls launch, then make each many times; raise where one leaves other bytes."""
    device = torch.device("cuda")
    calls = list(watched())[share]
    compile_variants(variants_of(launches_of(calls, device)))
    for name, call in calls:
        want, different = call(device), torch.zeros((), dtype=torch.int64, device=device)
        for _ in range(LAUNCHES - 1):
            for got, wanted in zip(call(device), want, strict=True):
                different += (bits_of(got) != bits_of(wanted)).sum()
        if different:
            raise SystemExit(f"{LAUNCHES} launches on equal inputs differ in {int(different)} elements: {name}")


def make_calls(share: slice) -> None:
    """Make each of these calls once."""
    for _, call in list(watched())[share]:
        call(torch.device("cuda"))
    torch.cuda.synchronize()


def read_out_of_bounds(share: slice) -> None:
    """Give a norm fewer weights than it reads: the mistake that memcheck must find."""
    x, weight = torch.ones(2, 1, 4096, device="cuda"), torch.ones(1024, device="cuda")
    rms_norm(x, weight, 1e-6)
    torch.cuda.synchronize()


def race_in_shared_memory(share: slice) -> None:
    """Run a norm without the barriers between its warps: the mistake that racecheck must find."""
    from triton.backends.nvidia.compiler import CUDABackend

    make_ptx = CUDABackend.make_ptx

    def without_barriers(*given: Any) -> str:
        return re.sub(r"^\s*bar\.sync[^;]*;", "", make_ptx(*given), flags=re.MULTILINE)

    CUDABackend.make_ptx = without_barriers
    normed(torch.device("cuda"))
    torch.cuda.synchronize()


PARTS = {"repeat": compile_and_repeat, "calls": make_calls, "bounds": read_out_of_bounds, "race": race_in_shared_memory}


class Part(NamedTuple):
    """A process that runs a part for its share of the calls, in a session of its own with all that it starts."""

    process: subprocess.Popen[bytes]
    log: Path

    def end(self, since: float) -> tuple[int, str]:
        """Wait for the process; its exit status and its output."""
        try:
            status, more = self.process.wait(max(1.0, since + SECONDS - time.monotonic())), ""
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            status, more = -1, f"\nended {SECONDS} s after the start of all"
        return status, self.log.read_text(errors="replace") + more


def started(part: str, folder: Path, of: int, *sanitizer: str) -> list[Part]:
    """Start processes that run a part, each for one of so many shares of the calls, perhaps watched; all with the
    kernels in `folder`, but planted mistakes with their own."""
    cache = folder / (part if part in TOOLS.values() else "kernels")
    # Every tensor is an allocation of its own, so that memcheck knows where it ends.
    given = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTORCH_NO_CUDA_MEMORY_CACHING": str(int(bool(sanitizer)))}
    parts = []
    for i in range(of):
        command = [*sanitizer, sys.executable, "-m", "tools.sanitize", part, str(i), str(of)]
        log = folder / f"{part} {i} {' '.join(sanitizer[1:3])}"
        with log.open("wb") as output:
            process = subprocess.Popen(command, env=given, stdout=output, stderr=output, start_new_session=True)
        parts.append(Part(process, log))
    return parts


def told(what: str, parts: list[Part], is_right: Callable[[int, str], bool], since: float) -> bool:
    """Wait for the processes of a part and print a line about it, and the end of their output where it is not as it
    must be; whether it is."""
    ended = [part.end(since) for part in parts]
    wrong = [output for status, output in ended if not is_right(status, output)]
    print(f"{'WRONG' if wrong else 'ok':6} {what}, {time.monotonic() - since:.0f} s", flush=True)
    for output in wrong:
        print(output[-6000:])
    return not wrong


def found_nothing(status: int, output: str) -> bool:
    return status == 0 and NOTHING_FOUND.search(output) is not None


def main() -> int:
    """Run all parts; 1 where something is found, or a planted mistake is not, and 2 where nothing can be watched."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    sanitizer = shutil.which("compute-sanitizer", path=path)
    if sanitizer is None:
        print(
            "needs compute-sanitizer, which comes with CUDA: it is not in PATH or /usr/local/cuda/bin", file=sys.stderr
        )
        return 2
    if not torch.cuda.is_available():
        print("needs a GPU", file=sys.stderr)
        return 2
    since, shares = time.monotonic(), max(1, (os.cpu_count() or 1) // 3)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        repeated = started("repeat", folder, 2 * shares)
        if not told(f"{LAUNCHES} launches of every call leave the same bytes", repeated, lambda s, _: s == 0, since):
            return 1
        right, watching = [], {}
        for tool, planted in TOOLS.items():
            watched_by = sanitizer, "--tool", tool, *PADDING.get(tool, ()), "--error-exitcode", str(FOUND)
            watching[tool] = started("calls", folder, shares, *watched_by), started(planted, folder, 1, *watched_by)
        for tool, (calls, mistake) in watching.items():
            right.append(told(f"{tool} finds nothing", calls, found_nothing, since))
            right.append(told(f"{tool} finds a planted mistake", mistake, lambda status, _: status == FOUND, since))
    return int(not all(right))


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(main())
    PARTS[sys.argv[1]](slice(int(sys.argv[2]), None, int(sys.argv[3])))
