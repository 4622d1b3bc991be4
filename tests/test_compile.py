"""What the compiler makes of the kernels, for every architecture, without a GPU."""

import math
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from compiling import collected, compile_launch

from flashstate import StatePool
from flashstate.launch import Config, Gpu, choose, override, valid_configs
from flashstate.launch.config import config_at
from flashstate.launch.table import load_table
from flashstate.laws.tokens import TREE, make_snapshots
from flashstate.state.formats import FORMATS, PORTABLE_FORMATS
from flashstate.testing import REAL_CASES, Case, Inputs, dtype, make_inputs

pytestmark = pytest.mark.compiled

CPU = torch.device("cpu")
ARCHITECTURES = (80, 89, 90, 100, 103, 120, "gfx942", "gfx950")
SHAPE = Case(2, 16, 1, 64, 128, x="bfloat16", bc="bfloat16", dt="bfloat16", slots=4)
Call = Callable[[Case, Inputs], object]


def plain(case: Case, inputs: Inputs) -> object:
    return inputs.step()


def chosen(case: Case, architecture: int | str) -> Config:
    """What the heuristic gives a case on that architecture."""
    if isinstance(architecture, int):
        return choose(case.problem, Gpu("a GPU nobody measured", divmod(architecture, 10)))
    with mock.patch("flashstate.launch.config.WARP", 64):
        return choose(case.problem, Gpu("an AMD GPU nobody measured", (9, 4)))


@cache
def compile_step(case: Case, config: Config, architecture: int | str, call: Call = plain) -> Any:
    """mamba2_step_kernel as a call with this case would compile it."""
    inputs = make_inputs(case, CPU)
    with collected(architecture) as launches, override(config):
        call(case, inputs)
    (launch,) = launches
    assert launch.kernel.__name__ == "mamba2_step_kernel"
    return compile_launch(launch, architecture)


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
    found = re.findall(r"\b(ld|st)\.global\.L1::evict_first[\w:.]*?(?:\.v(\d))?\.b(\d+)\b", kernel.asm["ptx"])
    loads, stores = ({int(n or 1) * int(bits) // 8 for kind, n, bits in found if kind == k} for k in ("ld", "st"))
    return loads, stores


def expected_accesses(architecture: int | str, name: str) -> set[int]:
    """16 bytes of data, and 4 of a scale where there are some."""
    scaled = isinstance(architecture, int) and FORMATS[dtype(name)].scaled
    return {16, 4} if scaled else {16}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("name", "rounding"), [(f.name, f.roundings[:2][-1]) for f in FORMATS.values()])
def test_every_format_compiles_with_16_byte_accesses_and_no_spills(
    architecture: int | str, name: str, rounding: str, tmp_path: Path
) -> None:
    case = replace(SHAPE, format=name, rounding=rounding)
    kernel = compile_step(case, chosen(case, architecture), architecture)
    want = expected_accesses(architecture, name)
    assert access_bytes(kernel) == (want, want)
    assert spilled_bytes(kernel, tmp_path) == 0


def paged(case: Case, inputs: Inputs) -> object:
    """Separate write slots, 64-bit slot numbers and a slot stride past 32 bits."""
    data = inputs.state.data
    stride = (1 << 31) + 16
    far = torch.empty(0, dtype=data.dtype).set_(data.untyped_storage(), 0, (1, *data.shape[1:]), data.stride())
    inputs.state = replace(inputs.state, data=far.as_strided(far.shape, (stride, *far.stride()[1:])), seed=None)
    slots = inputs.slots.long()
    return inputs.step(slots=inputs.at(read=slots, write=slots))


def kept(case: Case, inputs: Inputs) -> object:
    return inputs.step(update=False)


def written_per_token(case: Case, inputs: Inputs) -> object:
    read = inputs.slots[:, None].expand(-1, 3).contiguous()
    write = torch.arange(case.batch * case.tokens).reshape(case.batch, case.tokens)
    return inputs.step(slots=inputs.at(read=read, accepted=inputs.slots, write=write))


def with_snapshots(case: Case, inputs: Inputs) -> object:
    snapshots = make_snapshots(case, "int8", "stochastic", CPU)
    return inputs.step(slots=inputs.at(snapshot_rows=inputs.slots), snapshots=snapshots)


def with_a_tree(case: Case, inputs: Inputs) -> object:
    parents = torch.tensor(TREE[: case.tokens]).repeat(case.batch, 1)
    return inputs.step(slots=inputs.at(parents=parents), update=False)


FLOAT16 = replace(SHAPE, format="float16", rounding="stochastic", D="row")
SEVERAL = replace(SHAPE, tokens=4)
FORMS: dict[str, tuple[Case, Call]] = {
    "paged": (replace(SHAPE, format="float16"), paged),
    "without update": (FLOAT16, kept),
    "several tokens": (replace(FLOAT16, tokens=4), plain),
    "packed tokens": (replace(FLOAT16, tokens=4, packed=True), plain),
    "a slot for every token": (replace(SEVERAL, format="int8", rounding="stochastic"), written_per_token),
    "snapshots": (SEVERAL, with_snapshots),
    "a tree": (SEVERAL, with_a_tree),
    "Mamba-1": (replace(SHAPE, heads=1, rows=256, cols=16, mamba1=True, D="row"), plain),
}


@pytest.mark.parametrize("architecture", [80, 90, "gfx942"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_compiles_without_spills(architecture: int | str, form: str, tmp_path: Path) -> None:
    case, call = FORMS[form]
    kernel = compile_step(case, chosen(case, architecture), architecture, call)
    assert spilled_bytes(kernel, tmp_path) == 0
    if isinstance(architecture, int):
        loads, stores = access_bytes(kernel)
        assert loads == expected_accesses(architecture, case.format)
        assert 16 in stores or call in (kept, with_a_tree)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_compiles_the_small_kernels(architecture: int | str, tmp_path: Path) -> None:
    pool = StatePool.mamba2(
        slots=4, layers=1, heads=2, rows=64, cols=128, dtype=torch.int8, rounding="stochastic", seed=0
    )
    slots = [0, 2]
    pool.acquire(4)
    with collected(architecture) as launches:
        pool.advance(torch.tensor(slots))
        pool.write(0, slots, torch.zeros(2, 2, 64, 128))
        pool.read(0, slots)
    names = [launch.kernel.__name__ for launch in launches]
    assert names == ["advance_seeds_kernel", "write_states_kernel", "read_states_kernel"]
    for launch in launches:
        assert spilled_bytes(compile_launch(launch, architecture), tmp_path) == 0


@pytest.mark.parametrize("architecture", [100, 103])
@pytest.mark.parametrize(
    ("name", "instruction", "values"), [("float16", "f16x2", 2), ("float8_e4m3fn", "satfinite.e4m3x4", 4)]
)
def test_hardware_rounding_is_one_instruction_where_there_is_one(
    architecture: int, name: str, instruction: str, values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashstate.state.state._check_hardware_rounding", lambda device: None)
    case = replace(SHAPE, format=name, rounding="stochastic_hw")
    config = chosen(case, architecture)
    kernel = compile_step(case, config, architecture)
    assert kernel.asm["ptx"].count(f"cvt.rs.{instruction}.f32") == config.block_rows * 128 // 32 // values
    assert 16 in access_bytes(kernel)[1]


ODD_ON_HOPPER = [c for c in REAL_CASES if c.batch < 64 and c.heads <= 16 and c.cols != 128]


@pytest.mark.parametrize("case", ODD_ON_HOPPER[::3], ids=str)
def test_odd_shapes_compile_without_spills(case: Case, tmp_path: Path) -> None:
    assert spilled_bytes(compile_step(case, chosen(case, 90), 90), tmp_path) == 0


def narrowed(vector: int) -> Call:
    """A pool whose slots lie so that accesses of `vector` elements are aligned, and no wider ones."""

    def call(case: Case, inputs: Inputs) -> object:
        data = inputs.state.data
        size = data[0].numel()
        pages = torch.zeros(case.slots, size + vector, dtype=data.dtype)
        inputs.state = replace(inputs.state, data=pages[:, :size].view(data.shape))
        return inputs.step()

    return cache(lambda: call)()


NARROWED = {vector: narrowed(vector) for vector in (1, 2, 4, 8, 16)}


@pytest.mark.parametrize(("name", "vector", "width"), [
    ("bfloat16", 8, 16), ("bfloat16", 4, 8), ("bfloat16", 2, 4), ("bfloat16", 1, 2),
    ("int8", 16, 16), ("int8", 8, 8),
])  # fmt: skip
def test_a_pool_is_accessed_as_widely_as_its_alignment_allows(name: str, vector: int, width: int) -> None:
    case = replace(SHAPE, format=name)
    want = {width} if name == "bfloat16" else {width, 4}
    config = choose(replace(case.problem, vector=vector), Gpu("a GPU nobody measured", (9, 0)))
    assert access_bytes(compile_step(case, config, 90, NARROWED[vector])) == (want, want)


class Layout(NamedTuple):
    """How threads hold a chunk when it is summed over its columns: its width, how many columns a thread holds side by
    side, and how many threads and warps lie along its rows and along its columns."""

    width: int
    vector: int
    threads: tuple[int, int]
    warps: tuple[int, int]


def summed_layout(kernel: Any) -> Layout:
    """The layout of what is summed first: products with C, which a thread has added up over the chunks of its rows."""
    text = kernel.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = #ttg\.blocked<\{(.*)\}>$", text, re.M))
    reduce = re.search(r'"tt\.reduce".*?\}\) : \(tensor<\d+x(\d+)xf32, (#\w+)>\)', text, re.S)
    assert reduce, text
    found = re.findall(r"(\w+) = \[(\d+), (\d+)\]", layouts[reduce[2]])
    along = {key: (int(rows), int(columns)) for key, rows, columns in found}
    return Layout(int(reduce[1]), along["sizePerThread"][1], along["threadsPerWarp"], along["warpsPerCTA"])


def layout_of(config: Config, vector: int) -> Layout:
    """What a config promises."""
    lanes = config.lanes
    return Layout(lanes * vector, vector, (32 // lanes, lanes), (config.num_warps, 1))


ORDERED = [
    (replace(SHAPE, rows=rows, cols=cols, format=name, rounding=rounding, tokens=tokens), vector)
    for rows, cols, name, rounding, tokens, vector in (
        (64, 128, "float32", "nearest", 0, 4),
        (64, 128, "float32", "nearest", 0, 1),  # a pool that is not aligned
        (64, 128, "float16", "stochastic", 4, 2),
        (64, 128, "int8", "stochastic", 0, 16),
        (64, 256, "float32", "nearest", 0, 4),  # a row is more than a warp reads at once
        (80, 20, "bfloat16", "stochastic", 0, 4),
        (80, 16, "float8_e4m3fn", "nearest", 0, 16),
        (4, 33, "float16", "nearest", 4, 1),
    )
]


@pytest.mark.parametrize(("case", "vector"), ORDERED, ids=str)
def test_threads_share_a_row_as_the_lanes_of_a_config_say_and_warps_do_not(case: Case, vector: int) -> None:
    problem = replace(case.problem, vector=vector)
    call = NARROWED[vector] if case.problem.vector != vector else plain
    for lanes in problem.lane_choices[::2]:
        configs = valid_configs(problem, lanes)
        for config in {configs[0], configs[-1]}:
            assert summed_layout(compile_step(case, config, 90, call)) == layout_of(config, vector), config


@pytest.mark.parametrize(("name", "rounding"), PORTABLE_FORMATS[::3])
def test_every_form_sums_a_row_in_the_same_order(name: str, rounding: str) -> None:
    """One token, several, a state after each of them, snapshots in another format, a tree: the same layout."""
    one = replace(SHAPE, format=name, rounding=rounding)
    several = replace(one, tokens=4)
    forms = [(one, plain), (several, plain), (several, written_per_token), (several, with_snapshots)]
    forms += [(several, with_a_tree), (replace(several, packed=True), plain)]
    config = chosen(one, 90)
    for case, call in forms:
        layout = summed_layout(compile_step(case, config, 90, call))
        assert layout == layout_of(config, case.problem.vector), (case, call)


def shuffles(kernel: Any, kind: str = "") -> int:
    """Exchanges between the threads of a warp; a sum over them takes those of kind "bfly"."""
    return len(re.findall(rf"\bshfl\.sync\.{kind}", kernel.asm["ptx"]))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_a_thread_that_walks_along_a_row_sums_it_alone_on_blackwell(name: str) -> None:
    """The shuffles of a sum are those that end it, and a row twice as long has no more of any kind: so none is inside
    the walk along the columns."""
    case = replace(SHAPE, format=name)
    config = chosen(case, 100)
    rows_per_thread = config.block_rows * config.lanes // 32
    kernel = compile_step(case, config, 100)
    assert shuffles(kernel, "bfly") == rows_per_thread * int(math.log2(config.lanes))
    assert shuffles(kernel) == shuffles(compile_step(replace(case, cols=256), config, 100))
    most = Config(config.block_rows, 1, max(case.problem.lane_choices))
    assert 2 * shuffles(kernel, "bfly") < shuffles(compile_step(case, most, 100), "bfly")


def test_every_table_entry_compiles_without_spills(tmp_path: Path) -> None:
    tables = load_table("NVIDIA H200")
    assert tables
    for key, table in tables.items():
        op, shape, name, _, vector = key.split()
        rows, cols = map(int, shape.split("x"))
        assert op == "mamba2_step"
        assert int(vector) * dtype(name).itemsize == 16
        for mode, sizes in table.modes.items():
            rounding, tokens = mode.split(", ")
            count = 4 if tokens == "several tokens" else 0
            case = replace(SHAPE, rows=rows, cols=cols, format=name, rounding=rounding, tokens=count)
            for entry in set(sizes.values()):
                assert spilled_bytes(compile_step(case, config_at(entry, table.lanes), 90), tmp_path) == 0
