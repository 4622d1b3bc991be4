"""What tests ask of compiled kernels: what they spill, how wide they access states, in which order they sum."""

import re
from typing import Any, NamedTuple

from flashstate.launch import Config
from flashstate.proof import dtype
from flashstate.state.formats import FORMATS
from tools.cubin import resource_usage


def spilled_bytes(kernel: Any) -> int:
    """What did not fit into registers: the stack of the machine code on NVIDIA, the vector registers spilled on AMD
    (scalar ones go to vector registers, not to memory)."""
    if "amdgcn" in kernel.asm:
        return sum(int(n) for n in re.findall(r"\.vgpr_spill_count:\s+(\d+)", kernel.asm["amdgcn"]))
    usage = resource_usage(kernel)
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
    by = r"(?:tt\.load|ttg\.async_copy_global_to_local)"  # the second to shared memory
    found = re.findall(rf"{by} .*tensor<\d+x{64 // size}x!tt\.ptr<{element}>, (#blocked\d*)>", ttgir)
    return {int(neighbours[layout]) * size for layout in found}


def accesses_and_operations(kernel: Any) -> tuple[int, int]:
    """How many accesses of tensors, and how many operations, the compiler finds where it chooses layouts."""
    lines = [line for line in kernel.asm["ttir"].splitlines() if not line.startswith("#")]
    accesses = sum(bool(re.search(r"\btt\.(load|store)\b.*\btensor<", line)) for line in lines)
    return accesses, sum(" = " in line or "tt.store" in line for line in lines)


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
