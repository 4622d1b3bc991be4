"""What the compiler makes of the kernels, for every architecture, without a GPU."""

import os
import re
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from flashstate.launch.config import Config, load_table, valid_configs
from flashstate.state.formats import PORTABLE_FORMATS
from flashstate.testing import REAL_CASES, Case, dtype

pytestmark = pytest.mark.compiled

NVIDIA = (80, 89, 90, 100, 103, 120)
AMD = ("gfx942", "gfx950")
TRITON_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
SHAPE = Case(4, 16, 1, 64, 128, x="bfloat16", bc="bfloat16", dt="bfloat16")
CONFIGS = (Config(4, 1), Config(8, 1))


@cache
def compile_step(
    case: Case,
    config: Config,
    architecture: int | str,
    rounding: str = "",
    vector: int = 0,
    paged: bool = False,
    update: bool = True,
) -> Any:
    """mamba2_step_kernel as a call with this case would compile it; `rounding` and `vector` as kernels know them.

    `paged`: separate write slots, 64-bit slot numbers and a slot stride past 32 bits.
    """
    from flashstate.kernels.mamba2 import UNSPECIALIZED, mamba2_step_kernel

    problem = case.problem
    stochastic = case.rounding != "nearest"
    constants = {
        "H": case.heads, "HEADS_PER_GROUP": case.heads // case.groups, "ROWS": case.rows, "COLS": case.cols,
        "VECTOR": vector or problem.vector, "D_PER_ROW": case.D == "row", "DT_SOFTPLUS": case.dt_softplus,
        "UPDATE": update, "ROUNDING": rounding or case.rounding, "ROUNDS": 10,
        "BLOCK_ROWS": config.block_rows, "BLOCK_COLS": problem.block_cols,
        **({} if paged else {"write_ptr": None}),
        **({} if stochastic else {"seed_ptr": None}),
        **({} if case.D else {"D_ptr": None}),
        **({} if case.z else {"z_ptr": None}),
        **({} if case.dt_bias else {"dt_bias_ptr": None}),
    }  # fmt: skip
    pointers = {"state_ptr": case.format, "A_ptr": case.parameters, "D_ptr": case.parameters, "dt_ptr": case.dt,
                "dt_bias_ptr": case.parameters, "B_ptr": case.bc, "C_ptr": case.bc}  # fmt: skip
    index = "*i64" if paged else "*i32"
    integers = {"seed_ptr": "*i64", "read_ptr": index, "write_ptr": index, "fault_ptr": "*i64"}
    signature, attributes = {}, {}
    for position, name in enumerate(mamba2_step_kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = integers.get(name) or f"*{TRITON_NAMES[pointers.get(name, case.x)]}"
            if name != "state_ptr" or constants["VECTOR"] > 1:
                attributes[(position,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i64" if paged and name == "slot_stride" else "i32"
            if name not in UNSPECIALIZED and name != "slot_stride":
                attributes[(position,)] = [["tt.divisibility", 16]]
    return compile_for(architecture, mamba2_step_kernel, signature, constants, attributes, config.num_warps)


def compile_for(
    architecture: int | str,
    kernel: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    attributes: dict[tuple[int], Any],
    num_warps: int,
) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    nvidia = isinstance(architecture, int)
    target = GPUTarget("cuda", architecture, 32) if nvidia else GPUTarget("hip", architecture, 64)
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options={"num_warps": num_warps, "enable_fp_fusion": True})


def kernel_rounding(case: Case, architecture: int | str) -> str:
    return "stochastic_ptx" if case.rounding == "stochastic" and isinstance(architecture, int) else case.rounding


def spilled_bytes(kernel: Any, tmp_path: Path) -> int:
    """Bytes of registers that did not fit: the stack of the machine code on NVIDIA, the spill counts on AMD."""
    if "amdgcn" in kernel.asm:
        return sum(int(n) for n in re.findall(r"\.[sv]gpr_spill_count:\s+(\d+)", kernel.asm["amdgcn"]))
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


def access_bytes(kernel: Any) -> tuple[int, ...]:
    """Bytes of a load and of a store of state: on NVIDIA of those with a hint, which must all be equal; on AMD the
    widest there are."""
    if "amdgcn" in kernel.asm:
        widths = {"dwordx4": 16, "b128": 16, "dwordx2": 8, "b64": 8, "dword": 4, "b32": 4, "ushort": 2, "short": 2}
        found = re.findall(r"(?:global|buffer)_(load|store)_(\w+)", kernel.asm["amdgcn"])
        return tuple(max(widths.get(w, 1) for kind, w in found if kind == wanted) for wanted in ("load", "store"))
    found = re.findall(r"\b(ld|st)\.global\.L1::evict_first[\w:.]*?(?:\.v(\d))?\.b(\d+)\b", kernel.asm["ptx"])
    (load,), (store,) = ({int(n or 1) * int(bits) // 8 for kind, n, bits in found if kind == k} for k in ("ld", "st"))
    return load, store


@pytest.mark.parametrize("architecture", [*NVIDIA, *AMD])
@pytest.mark.parametrize(("name", "rounding"), PORTABLE_FORMATS)
def test_every_architecture_compiles_with_16_byte_accesses_and_no_spills(
    architecture: int | str, name: str, rounding: str, tmp_path: Path
) -> None:
    case = replace(SHAPE, format=name, rounding=rounding)
    for config in CONFIGS:
        kernel = compile_step(case, config, architecture, kernel_rounding(case, architecture))
        assert access_bytes(kernel) == (16, 16)
        assert spilled_bytes(kernel, tmp_path) == 0


@pytest.mark.parametrize("architecture", [*NVIDIA, *AMD])
def test_every_architecture_compiles_the_other_forms(architecture: int | str, tmp_path: Path) -> None:
    from flashstate.kernels.seeds import advance_seeds_kernel

    case = replace(SHAPE, format="float16", rounding="stochastic", D="row")
    rounding = kernel_rounding(case, architecture)
    paged = compile_step(case, Config(8, 1), architecture, rounding, paged=True)
    assert access_bytes(paged) == (16, 16)
    assert spilled_bytes(paged, tmp_path) == 0
    assert spilled_bytes(compile_step(case, Config(8, 1), architecture, rounding, update=False), tmp_path) == 0
    names = advance_seeds_kernel.arg_names
    types = ("*i64", "*i32", "*i64", "i32", "i32", "i32", "i64")
    seeds = compile_for(architecture, advance_seeds_kernel, dict(zip(names, types, strict=True)), {}, {}, 1)
    assert spilled_bytes(seeds, tmp_path) == 0


@pytest.mark.parametrize("architecture", [100, 103])
def test_hardware_rounding_is_one_instruction_where_there_is_one(architecture: int) -> None:
    case = replace(SHAPE, format="float16", rounding="stochastic")
    kernel = compile_step(case, Config(8, 1), architecture, "stochastic_hw")
    assert kernel.asm["ptx"].count("cvt.rs.f16x2.f32") == 8 * 128 // 32 // 2
    assert access_bytes(kernel) == (16, 16)


@pytest.mark.parametrize("case", [c for c in REAL_CASES if c.batch != 64 and c.heads <= 16], ids=str)
def test_odd_shapes_compile_without_spills(case: Case, tmp_path: Path) -> None:
    config = Config(max(1, case.problem.rows_per_warp), 1)
    assert spilled_bytes(compile_step(case, config, 90, kernel_rounding(case, 90)), tmp_path) == 0


@pytest.mark.parametrize(("vector", "width"), [(8, 16), (4, 8), (2, 4), (1, 2)])
def test_a_pool_is_accessed_as_widely_as_its_alignment_allows(vector: int, width: int) -> None:
    case = replace(SHAPE, format="bfloat16")
    assert access_bytes(compile_step(case, Config(8, 1), 90, vector=vector)) == (width, width)


def reduced_layout(kernel: Any) -> tuple[list[int], list[int]]:
    """Columns per thread and warps along the columns, of the tile that is summed over its columns."""
    text = kernel.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = #ttg\.blocked<\{(.*)\}>$", text, re.M))
    name = re.search(r'"tt\.reduce".*?\}\) : \(tensor<\d+x\d+xf32, (#\w+)>\)', text, re.S)
    assert name, text
    layout = layouts[name[1]]
    per_thread, warps = (re.search(rf"{key} = \[([\d, ]+)\]", layout) for key in ("sizePerThread", "warpsPerCTA"))
    assert per_thread
    assert warps
    return [int(n) for n in per_thread[1].split(",")], [int(n) for n in warps[1].split(",")]


ORDERED = [
    (replace(SHAPE, rows=rows, cols=cols, format=name, rounding=rounding), vector)
    for rows, cols, name, rounding, vector in (
        (64, 128, "float32", "nearest", 4),
        (64, 128, "float32", "nearest", 1),  # a pool that is not aligned
        (64, 128, "bfloat16", "nearest", 8),
        (64, 128, "float16", "stochastic", 8),
        (64, 128, "float16", "stochastic", 2),
        (64, 256, "float32", "nearest", 4),  # a row is more than a warp reads at once
        (80, 20, "bfloat16", "stochastic", 4),
        (80, 16, "float16", "nearest", 8),
        (4, 33, "float16", "nearest", 1),
    )
]


@pytest.mark.parametrize(("case", "vector"), ORDERED, ids=str)
def test_no_valid_config_splits_a_row_over_warps(case: Case, vector: int) -> None:
    """The order of a row's sum is the layout of its columns: it must be the same for all configs of a problem."""
    problem = replace(case.problem, vector=vector)
    configs = valid_configs(problem)
    assert len(configs) > 2
    columns = set()
    for config in configs:
        per_thread, warps = reduced_layout(compile_step(case, config, 90, kernel_rounding(case, 90), vector))
        assert warps[1] == 1
        columns.add(per_thread[1])
    assert columns == {vector}


def test_every_table_entry_compiles_without_spills(tmp_path: Path) -> None:
    table = load_table("NVIDIA H200")
    assert table
    for key, entries in table.items():
        op, shape, name, rounding, _, vector = key.split()
        rows, cols = map(int, shape.split("x"))
        assert op == "mamba2_step"
        assert int(vector) * dtype(name).itemsize == 16
        case = replace(SHAPE, rows=rows, cols=cols, format=name, rounding=rounding)
        for config in set(entries.values()):
            assert spilled_bytes(compile_step(case, config, 90, kernel_rounding(case, 90)), tmp_path) == 0
