"""Compile a kernel as a call would, for any architecture and without a GPU: the launch is collected, not run. And what
tests ask of compiled kernels."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from flashstate.launch import Config, Gpu, Machine, collecting, environment, override
from flashstate.launch.environment import pretending
from flashstate.launch.start import Launch
from flashstate.launch.variants import variant_key
from flashstate.proof import AnyCase, Inputs, dtype, make_inputs
from flashstate.state.formats import FORMATS

ARCHITECTURES = (80, 89, 90, 100, 103, 120, "gfx942", "gfx950")
TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "i8", torch.uint8: "u8",
    torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
CPU = torch.device("cpu")
Call = Callable[[Any, Any], object]  # of a case and its inputs


def machine_with(architecture: int | str) -> Machine:
    """One that has no table."""
    if isinstance(architecture, str):
        return Machine(Gpu("a GPU nobody measured", (9, 4)), "portable", warp=64)
    gpu = Gpu("a GPU nobody measured", divmod(architecture, 10))
    return Machine(gpu, "sm_89" if architecture >= 89 else "sm_80", overlaps=architecture >= 90)


@contextmanager
def collected(architecture: int | str) -> Iterator[list[Launch]]:
    """Calls on CPU tensors inside reach their launches as on that architecture, and end there."""
    with pretending(machine_with(architecture)), collecting() as launches:
        yield launches


def by_the_reference() -> AbstractContextManager[Any]:
    """Calls inside run on the CPU, as if nobody stood in for a GPU."""
    return mock.patch.object(environment, "pretended", None)


def chosen(case: AnyCase, architecture: int | str) -> Config:
    """What the heuristic gives a case on that architecture."""
    machine = machine_with(architecture)
    with pretending(machine):
        return case.problem.heuristic(machine.gpu)


def plain(case: AnyCase, inputs: Inputs) -> object:
    return inputs.step()


@cache
def compiled(case: AnyCase, architecture: int | str, call: Call = plain, config: Config | None = None) -> Any:
    """The kernel that a call would start; the heuristic's config if none is given. Of two kernels of a call, the one
    whose rows do what the call is named after."""
    inputs = make_inputs(case, CPU)
    with collected(architecture) as launches, override(config) if config else nullcontext():
        call(case, inputs)
    (launch,) = (one for one in launches if one.constants.get("ROWS_DO", "either") in ("either", call.__name__))
    return compile_launch(launch, architecture)


_compiled: dict[Hashable, Any] = {}


def compile_launch(launch: Launch, architecture: int | str) -> Any:
    """What Triton compiles of a launch, for any architecture; once, however many tests ask for it."""
    key = variant_key(launch), architecture
    if key not in _compiled:
        _compiled[key] = _compile(launch, architecture)
    return _compiled[key]


def _compile(launch: Launch, architecture: int | str) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    nvidia = isinstance(architecture, int)
    target = GPUTarget("cuda", architecture, 32) if nvidia else GPUTarget("hip", architecture, 64)
    arguments = {**dict(zip(launch.kernel.runtime, launch.arguments, strict=True)), **launch.constants}
    signature, constants = {}, {}
    for position, parameter in enumerate(launch.kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[(position,)] = "constexpr", value
        else:
            signature[parameter.name] = type_of(value)
    source = ASTSource(launch.kernel, signature, constants)
    return triton.compile(source, target=target, options=launch.options)


def type_of(value: Any) -> str:
    """Of an argument that Triton does not specialise on."""
    if isinstance(value, Tensor):
        return f"*{TYPES[value.dtype]}"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"


def spilled_bytes(kernel: Any) -> int:
    """What did not fit into registers: the stack of the machine code on NVIDIA, the vector registers spilled on AMD
    (scalar ones go to vector registers, not to memory)."""
    if "amdgcn" in kernel.asm:
        return sum(int(n) for n in re.findall(r"\.vgpr_spill_count:\s+(\d+)", kernel.asm["amdgcn"]))
    import triton

    cuobjdump = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(kernel.asm["cubin"])
        binary.flush()
        command = [cuobjdump, "--dump-resource-usage", binary.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"STACK:(\d+).*?LOCAL:(\d+)", usage)
    assert found, usage
    return sum(int(stack) + int(local) for stack, local in found)


def access_bytes(kernel: Any) -> tuple[set[int], set[int]]:
    """Bytes of the loads and of the stores of state and scales: on NVIDIA those with a hint, on AMD the widest."""
    if "amdgcn" in kernel.asm:
        widths = {"dwordx4": 16, "b128": 16, "dwordx2": 8, "b64": 8, "dword": 4, "b32": 4, "ushort": 2, "short": 2}
        found = re.findall(r"(?:global|buffer)_(load|store)_(\w+)", kernel.asm["amdgcn"])
        loads, stores = ({max(widths.get(w, 1) for kind, w in found if kind == k)} for k in ("load", "store"))
        return loads, stores
    found = re.findall(r"\b(ld|st)\.global\.(?:L1::evict_first|cs\b)[\w:.]*?(?:\.v(\d))?\.b(\d+)\b", kernel.asm["ptx"])
    loads, stores = ({int(n or 1) * int(bits) // 8 for kind, n, bits in found if kind == k} for k in ("ld", "st"))
    return loads, stores


def state_loads(kernel: Any, name: str) -> set[int]:
    """Bytes of the accesses by which threads load a state that no hint tells from others, on NVIDIA: their type does,
    which nothing else has in chunks of this size."""
    ttgir, size = kernel.asm["ttgir"], dtype(name).itemsize
    element = {4: "f32", 2: "f16" if name == "float16" else "i16", 1: "i8"}[size]
    neighbours = dict(re.findall(r"^(#blocked\d*) = #ttg\.blocked<{sizePerThread = \[1, (\d+)\]", ttgir, re.MULTILINE))
    found = re.findall(rf"tt\.load .*tensor<\d+x{64 // size}x!tt\.ptr<{element}>, (#blocked\d*)>", ttgir)
    return {int(neighbours[layout]) * size for layout in found}


def narrows_slots(kernel: Any) -> bool:
    """Whether 32 bits of the only int64 that a kernel loads, the slot of a row, are all that addresses are made of, on
    NVIDIA: then its products with strides need half the instructions."""
    ptx = kernel.asm["ptx"]
    (slot,) = re.findall(r"\bld\.global\.b64 \{ (%rd\d+) \}", ptx)
    uses = re.findall(rf"^\s*([\w.]+)\s+%rd\d+, [^;]*{slot}\b[^;]*;", ptx, re.MULTILINE)
    return uses == ["cvt.s64.s32"]


def expected_accesses(architecture: int | str, name: str) -> set[int]:
    """16 bytes of data, and 4 of a scale where there are some."""
    scaled = isinstance(architecture, int) and FORMATS[dtype(name)].scaled
    return {16, 4} if scaled else {16}


class Layout(NamedTuple):
    """How threads hold a tensor of rows and columns: how many columns a thread has side by side, and how many threads
    and warps lie along the rows and along the columns."""

    vector: int
    threads: tuple[int, int]
    warps: tuple[int, int]


def layouts(kernel: Any, used: str) -> set[Layout]:
    """The layouts of tensors where the compiler's text matches a pattern, whose group names them."""
    text = kernel.asm["ttgir"]
    by_name = dict(re.findall(r"^(#\w+) = #ttg\.blocked<\{(.*)\}>$", text, re.M))
    found = set()
    for name in re.findall(used, text, re.S):
        numbers = re.findall(r"(\w+) = \[(\d+), (\d+)", by_name[name])
        along = {key: (int(rows), int(columns)) for key, rows, columns in numbers}
        found.add(Layout(along["sizePerThread"][1], along["threadsPerWarp"], along["warpsPerCTA"]))
    return found


def butterflies(kernel: Any) -> list[int]:
    """Over which distances the threads of a warp exchange values to sum them, in the order of the code."""
    found = re.findall(r"\bshfl\.sync\.bfly\.b32\s+[^,]+, [^,]+, (\d+),", kernel.asm["ptx"])
    return list(map(int, found))


def rows_per_thread(config: Config) -> int:
    return config.block_rows * config.lanes // (32 * config.num_warps)


def require_one_order(kernel: Any, config: Config, vector: int) -> None:
    """As many threads as the config has lanes share a row, and no warps; each has VECTOR neighbours of every chunk.
    Sums over them begin with the largest distance: they fold halves of a row onto each other, as a thread does with
    the chunks it has."""
    lanes = config.lanes
    shared = (32 // lanes, lanes), (config.num_warps, 1)
    loads = r"tt\.load [^\n]*evict_first[^\n]* : tensor<\d+x\d+x!tt\.ptr<\w+>, (#\w+)>"
    sums = r'"tt\.reduce".*?\}\) : \(tensor<\d+x\d+xf32, (?:#ttg\.slice<\{dim = 2, parent = )?(#\w+)[>}]'
    assert layouts(kernel, loads) == {Layout(vector, *shared)}
    assert {layout[1:] for layout in layouts(kernel, sums)} == {shared}
    folds = [lanes >> k for k in range(1, lanes.bit_length())]  # half of them, a quarter, ..., 1
    found, least = butterflies(kernel), rows_per_thread(config) * len(folds)
    assert len(found) >= least
    assert found == folds * (len(found) // max(1, len(folds)))
