"""What the compiler makes of the kernels, for every architecture, without a GPU."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from compiling import (
    ARCHITECTURES,
    access_bytes,
    chosen,
    collected,
    compile_launch,
    expected_accesses,
    machine_with,
    narrows_slots,
    spilled_bytes,
)
from tables import by_turns, risky_by_turns

from flashstate import State, StatePool
from flashstate.launch import Config, Problem, override, valid_configs
from flashstate.launch.start import Launch
from flashstate.proof import REAL_CASES, Case, Inputs, dtype, make_inputs
from flashstate.proof.laws.tokens import TREE, make_snapshots
from flashstate.state.formats import FORMATS, PORTABLE_FORMATS

pytestmark = pytest.mark.compiled

CPU = torch.device("cpu")
SHAPE = Case(2, 16, 1, 64, 128, x="bfloat16", bc="bfloat16", dt="bfloat16", slots=4)
Call = Callable[[Case, Inputs], object]


def plain(case: Case, inputs: Inputs) -> object:
    return inputs.step()


@cache
def compile_step(case: Case, config: Config, architecture: int | str, call: Call = plain) -> Any:
    """mamba2_step_kernel as a call with this case would compile it."""
    inputs = make_inputs(case, CPU)
    with collected(architecture) as launches, override(config):
        call(case, inputs)
    (launch,) = launches
    assert launch.kernel.__name__ == "mamba2_step_kernel"
    return compile_launch(launch, architecture)


@pytest.mark.parametrize(
    ("architecture", "name", "rounding"),
    [
        (architecture, f.name, f.roundings[:2][-1])
        for i, architecture in enumerate(ARCHITECTURES)
        for j, f in enumerate(FORMATS.values())
        if architecture == 90 or (i + j) % 4 == 0
    ],
)
def test_every_format_compiles_with_16_byte_accesses_and_no_spills(
    architecture: int | str, name: str, rounding: str, tmp_path: Path
) -> None:
    """On the GPU that has a table; on others a quarter of them, by turns."""
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


def with_snapshots(case: Case, inputs: Inputs, name: str = "int8", rounding: str = "stochastic") -> object:
    snapshots = make_snapshots(case, name, rounding, CPU)
    return inputs.step(slots=inputs.at(snapshot_rows=inputs.slots), snapshots=snapshots)


def with_snapshots_alike(case: Case, inputs: Inputs) -> object:
    """In the format and the rounding of the states."""
    return with_snapshots(case, inputs, case.format, case.rounding)


def with_fresh_padding(case: Case, inputs: Inputs) -> object:
    return inputs.step(slots=inputs.at(padding="fresh"))


def with_kept_padding(case: Case, inputs: Inputs) -> object:
    return inputs.step(slots=inputs.at(padding="keep"))


def with_a_tree(case: Case, inputs: Inputs) -> object:
    parents = torch.tensor(TREE[: case.tokens]).repeat(case.batch, 1)
    return inputs.step(slots=inputs.at(parents=parents), update=False)


FLOAT16 = replace(SHAPE, format="float16", rounding="stochastic", D="row")
SEVERAL = replace(SHAPE, tokens=4)
TWO = replace(SHAPE, tokens=2)  # of more the slowest forms take several times as long to compile
FORMS: dict[str, tuple[Case, Call]] = {
    "paged": (replace(SHAPE, format="float16"), paged),
    "without update": (FLOAT16, kept),
    "several tokens": (replace(FLOAT16, tokens=4), plain),
    "packed tokens": (replace(FLOAT16, tokens=4, packed=True), plain),
    "a slot for every token": (replace(TWO, format="int8", rounding="stochastic"), written_per_token),
    "snapshots": (TWO, with_snapshots),
    "a tree": (SEVERAL, with_a_tree),
    "fresh padding": (replace(SEVERAL, format="int16"), with_fresh_padding),
    "kept padding": (replace(FLOAT16, tokens=4), with_kept_padding),
    "Mamba-1": (replace(SHAPE, heads=1, rows=256, cols=16, mamba1=True, D="row"), plain),
}


@pytest.mark.parametrize(
    ("architecture", "form"),
    [(90, form) for form in FORMS] + [(("gfx942", 80)[i % 2], form) for i, form in enumerate([*FORMS][::3])],
)
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


def launches_on_a_transposed_layer(architecture: int | str, name: str, rounding: str) -> list[Launch]:
    """Of a write and a read."""
    data = torch.zeros(4, 2, 128, 64, dtype=dtype(name)).mT
    pool = StatePool.wrap([State(data, rounding=rounding, seed=torch.arange(4))])
    with collected(architecture) as launches:
        pool.write(0, [0, 2], torch.zeros(2, 2, 64, 128))
        pool.read(0, [0, 2])
    return launches


@pytest.mark.parametrize(
    ("architecture", "of_state"), by_turns(ARCHITECTURES, [("float32", "nearest"), ("bfloat16", "stochastic")])
)
def test_every_architecture_compiles_the_kernels_of_a_transposed_layer(
    architecture: int | str, of_state: tuple[str, str], tmp_path: Path
) -> None:
    name, rounding = of_state
    launches = launches_on_a_transposed_layer(architecture, name, rounding)
    write, read = (compile_launch(launch, architecture) for launch in launches)
    assert spilled_bytes(write, tmp_path) == spilled_bytes(read, tmp_path) == 0
    if isinstance(architecture, int):
        assert access_bytes(write) == (set(), {16})
        assert access_bytes(read) == ({16}, set())


@pytest.mark.parametrize(("rounding", "lanes"), [("nearest", 8), ("stochastic", 16)])
def test_a_thread_has_one_column_of_each_chunk_of_a_transposed_layer(rounding: str, lanes: int) -> None:
    launches = launches_on_a_transposed_layer(90, "bfloat16", rounding)
    for launch, access in zip(launches, ("store", "load"), strict=True):
        text = compile_launch(launch, 90).asm["ttgir"]
        (name,) = set(re.findall(rf"tt\.{access} [^\n]* : tensor<\d+x{lanes}x8x!tt\.ptr<\w+>, (#\w+)>", text))
        (layout,) = re.findall(rf"^{name} = #ttg\.blocked<\{{(.*)\}}>$", text, re.M)
        assert f"sizePerThread = [1, 1, 8], threadsPerWarp = [{32 // lanes}, {lanes}, 1]" in layout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0, 1])
def test_plain_states_go_in_and_out_in_16_byte_accesses_where_their_rows_are_aligned(
    dtype: torch.dtype, offset: int
) -> None:
    pool = StatePool.mamba2(slots=4, layers=1, heads=2, rows=64, cols=128, dtype=torch.int8)
    pool.acquire(4)
    with collected(90) as launches:
        pool.write(0, [0, 2], torch.zeros(2, 2, 64, 128 + offset, dtype=dtype)[..., offset:])
        pool.read(0, [0, 2])
    write, read = (compile_launch(launch, 90).asm["ptx"] for launch in launches)
    assert widest_access(write, "ld") == (dtype.itemsize if offset else 16)
    assert widest_access(read, "st") == 16


def widest_access(ptx: str, kind: str) -> int:
    """Bytes of the widest loads or stores of plain values: those of state have a hint, slot numbers 64 bits."""
    found = re.findall(rf"\b{kind}\.global(?:\.v(\d))?\.b(16|32)\b", ptx)
    return max(int(n or 1) * int(bits) // 8 for n, bits in found)


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


@pytest.mark.parametrize("case", ODD_ON_HOPPER[::8], ids=str)
def test_odd_shapes_compile_without_spills(case: Case, tmp_path: Path) -> None:
    assert spilled_bytes(compile_step(case, chosen(case, 90), 90), tmp_path) == 0


@pytest.mark.parametrize("tokens", [0, 2])
def test_strides_are_multiplied_with_32_bits_of_int64_slots(tokens: int) -> None:
    case = replace(SHAPE, index="int64", tokens=tokens)
    assert narrows_slots(compile_step(case, chosen(case, 90), 90))


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
    config = replace(case.problem, vector=vector).heuristic(machine_with(90).gpu)
    assert access_bytes(compile_step(case, config, 90, NARROWED[vector])) == (want, want)


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


ORDERED = [
    (replace(SHAPE, rows=rows, cols=cols, format=name, rounding=rounding, tokens=tokens), vector)
    for rows, cols, name, rounding, tokens, vector in (
        (64, 128, "float32", "nearest", 0, 4),
        (64, 128, "float32", "nearest", 0, 1),  # a pool that is not aligned
        (64, 64, "float16", "stochastic", 4, 2),  # narrow: wider rows of so many chunks take a minute
        (64, 128, "int8", "stochastic", 0, 16),
        (64, 256, "float32", "nearest", 0, 4),  # a row is more than a warp reads at once
        (80, 20, "bfloat16", "stochastic", 0, 4),
        (80, 16, "float8_e4m3fn", "nearest", 0, 16),
        (4, 33, "float16", "nearest", 4, 1),
    )
]


def lanes_by_turns() -> list[list[int]]:
    """For each of these cases every second number of lanes, from the first on or from the second."""
    choices = [replace(case.problem, vector=vector).lane_choices for case, vector in ORDERED]
    found = [of_case[i % 2 :: 2] or of_case for i, of_case in enumerate(choices)]
    assert {lanes for of_case in found for lanes in of_case} == {1, 2, 4, 8, 16, 32}
    return found


@pytest.mark.parametrize(
    ("case", "vector", "lanes_of_case"),
    [(*case, lanes) for case, lanes in zip(ORDERED, lanes_by_turns(), strict=True)],
    ids=str,
)
def test_every_config_sums_a_row_in_the_same_order(case: Case, vector: int, lanes_of_case: list[int]) -> None:
    """A config for each number of lanes, the smallest and one in the middle by turns; of few tokens together, as many
    take long to compile."""
    problem = replace(case.problem, vector=vector)
    call = NARROWED[vector] if case.problem.vector != vector else plain
    for i, lanes in enumerate(lanes_of_case):
        configs = [config for config in valid_configs(problem) if config.lanes == lanes and config.tokens_together <= 2]
        config = configs[i % 2 * len(configs) // 2]
        require_one_order(compile_step(case, config, 90, call), config, vector)


ONE_ORDER: dict[str, tuple[Case, Call]] = {
    "one token": (SHAPE, plain),
    "several": (SEVERAL, plain),
    "a state after each": (TWO, written_per_token),
    "snapshots in another format": (TWO, with_snapshots),
    "a tree": (SEVERAL, with_a_tree),
    "packed": (replace(SEVERAL, packed=True), plain),
}


@pytest.mark.parametrize(
    ("name", "rounding", "form"), [(*of_state, form) for of_state, form in by_turns(PORTABLE_FORMATS, ONE_ORDER)]
)
def test_every_form_and_format_sums_a_row_in_the_same_order(name: str, rounding: str, form: str) -> None:
    case, call = ONE_ORDER[form]
    case = replace(case, format=name, rounding=rounding)
    config = chosen(case, 90)
    require_one_order(compile_step(case, config, 90, call), config, case.problem.vector)


def shuffles(kernel: Any) -> int:
    """Exchanges of any kind between the threads of a warp."""
    return len(re.findall(r"\bshfl\.sync\.", kernel.asm["ptx"]))


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_a_thread_that_walks_along_a_row_sums_it_alone_on_blackwell(name: str) -> None:
    """The butterflies of a sum are those that end it, and a row twice as long has no more shuffles of any kind: so none
    is inside the walk along the columns."""
    case = replace(SHAPE, format=name)
    config = chosen(case, 100)
    kernel = compile_step(case, config, 100)
    assert config.lanes <= 4
    assert len(butterflies(kernel)) == rows_per_thread(config) * int(math.log2(config.lanes))
    assert shuffles(kernel) == shuffles(compile_step(replace(case, cols=256), config, 100))
    most = Config(config.block_rows, 1, max(case.problem.lane_choices))
    assert 2 * len(butterflies(kernel)) < len(butterflies(compile_step(case, most, 100)))


def stored_by(mode: Problem) -> tuple[Call, ...]:
    return (written_per_token, with_snapshots_alike) if mode.stored == "every" else (plain,)


@pytest.mark.parametrize(("mode", "config", "call"), risky_by_turns("mamba2_step", calls=stored_by))
def test_table_entries_that_may_spill_do_not_or_little_where_they_limit_registers(
    mode: Problem, config: Config, call: Call, tmp_path: Path
) -> None:
    assert mode.vector * dtype(mode.format).itemsize == 16
    shape = {"rows": mode.rows, "cols": mode.cols, "tokens": 4 if mode.several_tokens else 0}
    case = replace(SHAPE, **shape, format=mode.format, rounding=mode.rounding)
    spilled = spilled_bytes(compile_step(case, config, 90, call), tmp_path)
    assert spilled <= (64 if config.registers else 0), (config, call.__name__)


def packed_up_to(max_len: int | None) -> Call:
    """Rows of which the longest has at most so many tokens, as far as the call says."""

    def call(case: Case, inputs: Inputs) -> object:
        return inputs.step(slots=replace(inputs.at(), max_len=max_len))

    return call


@pytest.mark.parametrize(
    ("case", "call", "together"),
    [
        (replace(SHAPE, tokens=0), plain, 1),
        (replace(SHAPE, tokens=2), plain, 2),
        (replace(SHAPE, tokens=3), plain, 4),
        (replace(SHAPE, tokens=8), plain, 4),
        (replace(SHAPE, tokens=4), with_a_tree, 1),
        *((replace(SHAPE, tokens=4, packed=True), packed_up_to(max_len), 4) for max_len in (None, 4, 100)),
    ],
    ids=["one token", "two", "three", "eight", "a tree", "packed", "packed up to 4", "packed up to 100"],
)
def test_no_more_tokens_are_loaded_together_than_a_dense_call_has(case: Case, call: Call, together: int) -> None:
    with collected(90) as launches, override(Config(4, 1, 8, tokens_together=4)):
        call(case, make_inputs(case, CPU))
    assert [launch.constants["TOGETHER"] for launch in launches] == [together]


def test_a_place_without_a_token_adds_minus_zero() -> None:
    """Triton 3.6 makes 0.0 of a -0.0, which would change states of -0.0. The first place of a group has a token."""
    minus_zero = re.compile(r"selp\.\w+\s+[^;]*(-2147483648|0f80000000)")
    for together in (1, 2, 4):
        kernel = compile_step(replace(SHAPE, tokens=4), Config(4, 1, 8, tokens_together=together), 90)
        assert len(minus_zero.findall(kernel.asm["ptx"])) == together - 1


@pytest.mark.parametrize("config", [Config(4, 1, 8), Config(8, 1, 16), Config(16, 4, 8), Config(16, 2, 16)], ids=str)
def test_loads_do_not_wait_for_shared_memory(config: Config) -> None:
    """What there is of it, a program uses to put its outputs in order, behind all loads; with several tokens too."""
    one, several = (compile_step(replace(SHAPE, format="bfloat16", tokens=t), config, 90).asm["ptx"] for t in (0, 4))
    stores, stores_of_several = (
        [at.start() for at in re.finditer(r"\b(st\.shared|stmatrix)", ptx)] for ptx in (one, several)
    )
    assert not stores or min(stores) > max(at.start() for at in re.finditer(r"\bld\.global", one))
    assert len(stores_of_several) == len(stores)


def test_a_limit_of_registers_reaches_the_compiler() -> None:
    case = replace(SHAPE, format="float16", rounding="stochastic")
    free, limited = (compile_step(case, Config(4, 1, 16, registers=most), 90) for most in (0, 128))
    assert ".maxnreg 128" in limited.asm["ptx"]
    assert ".maxnreg" not in free.asm["ptx"]


@pytest.mark.parametrize(("cols", "architecture"), [(512, 90), (256, 100)])
def test_several_tokens_of_wide_rows_do_not_spill(cols: int, architecture: int, tmp_path: Path) -> None:
    case = replace(SHAPE, heads=2, cols=cols, tokens=4)
    assert spilled_bytes(compile_step(case, chosen(case, architecture), architecture), tmp_path) == 0
