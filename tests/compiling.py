"""Compile a kernel as a call would, for any architecture and without a GPU: the launch is collected, not run."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashstate.launch import Config, Gpu, Machine, collecting
from flashstate.launch.environment import pretending
from flashstate.launch.start import Launch
from flashstate.proof import AnyCase, dtype
from flashstate.state.formats import FORMATS

ARCHITECTURES = (80, 89, 90, 100, 103, 120, "gfx942", "gfx950")
TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "i8", torch.uint8: "u8",
    torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip


def machine_with(architecture: int | str) -> Machine:
    """One that has no table."""
    if isinstance(architecture, str):
        return Machine(Gpu("a GPU nobody measured", (9, 4)), "portable", warp=64)
    gpu = Gpu("a GPU nobody measured", divmod(architecture, 10))
    return Machine(gpu, "sm_89" if architecture >= 89 else "sm_80", overlaps=architecture >= 90)


def chosen(case: AnyCase, architecture: int | str) -> Config:
    """What the heuristic gives a case on that architecture."""
    machine = machine_with(architecture)
    with pretending(machine):
        return case.problem.heuristic(machine.gpu)


@contextmanager
def collected(architecture: int | str) -> Iterator[list[Launch]]:
    """Calls on CPU tensors inside reach their launches as on that architecture, and end there."""
    with pretending(machine_with(architecture)), collecting() as launches:
        yield launches


def compile_launch(launch: Launch, architecture: int | str) -> Any:
    """What Triton compiles of a launch, for any architecture."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    nvidia = isinstance(architecture, int)
    target = GPUTarget("cuda", architecture, 32) if nvidia else GPUTarget("hip", architecture, 64)
    arguments = {**dict(zip(launch.kernel.arg_names, launch.arguments, strict=False)), **launch.constants}
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


def spilled_bytes(kernel: Any, tmp_path: Path) -> int:
    """What did not fit into registers: the stack of the machine code on NVIDIA, the vector registers spilled on AMD
    (scalar ones go to vector registers, not to memory)."""
    if "amdgcn" in kernel.asm:
        return sum(int(n) for n in re.findall(r"\.vgpr_spill_count:\s+(\d+)", kernel.asm["amdgcn"]))
    import triton

    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(kernel.asm["cubin"])
    cuobjdump = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    usage = subprocess.run(
        [cuobjdump, "--dump-resource-usage", binary], capture_output=True, text=True, check=True
    ).stdout
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
