"""What instructions the compiler makes of kernels: how wide they access memory, in which order they sum rows, and what
moves between threads. Without a GPU."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from asking import (
    access_bytes,
    accesses_and_operations,
    butterflies,
    narrows_slots,
    require_one_order,
    rows_per_thread,
    spilled_bytes,
    state_loads,
)
from compiling import CPU, Call, chosen, collected, compiled, machine_with, plain
from kernel_forms import (
    AT_ONCE,
    DELTA,
    DELTA_REPLAY,
    MAMBA2,
    MAMBA2_AT_ONCE,
    MIMO,
    REPLAY,
    WIDE,
    Form,
    fold,
    keep,
    kept,
    with_a_tree,
    with_snapshots,
    with_snapshots_alike,
    written_per_token,
)  # fmt: skip

from flashstate.launch import Config, override, valid_configs
from flashstate.launch.environment import pretending
from flashstate.proof import AnyCase, Case, DeltaCase, Inputs, Mamba3Case, dtype, make_inputs

pytestmark = pytest.mark.compiled
COLUMNS = MAMBA2.cols
TURNED, SISO = replace(MIMO, angles=32), replace(MIMO, rank=1)


@pytest.mark.parametrize(
    ("architecture", "name", "instruction", "values"),
    [(100, "float16", "f16x2", 2), (103, "float8_e4m3fn", "satfinite.e4m3x4", 4)],
)
def test_hardware_rounding_is_one_instruction_where_there_is_one(
    architecture: int, name: str, instruction: str, values: int
) -> None:
    case = replace(MAMBA2, format=name, rounding="stochastic_hw")
    config = chosen(case, architecture)
    with pretending(machine_with(architecture)):
        kernel = compiled(case, architecture, plain, config)
    assert kernel.asm["ptx"].count(f"cvt.rs.{instruction}.f32") == config.block_rows * COLUMNS // 32 // values
    assert 16 in access_bytes(kernel)[1]


@pytest.mark.parametrize("case", [MAMBA2, replace(DELTA, tokens=2)], ids=str)
def test_strides_are_multiplied_with_32_bits_of_int64_slots(case: AnyCase) -> None:
    assert narrows_slots(compiled(replace(case, index="int64"), 90))


def narrowed(vector: int) -> Call:
    """A pool whose slots lie so that accesses of `vector` elements are aligned, and no wider ones."""

    def call(case: Case, inputs: Inputs) -> object:
        data = inputs.state.data
        size = data[0].numel()
        pages = torch.zeros(case.slots, size + vector, dtype=data.dtype)
        inputs.state = replace(inputs.state, data=pages[:, :size].view(data.shape))
        return inputs.step()

    return call


NARROWED = {vector: narrowed(vector) for vector in (1, 2, 4, 8, 16)}


@pytest.mark.parametrize(("name", "vector", "width"), [
    ("bfloat16", 8, 16), ("bfloat16", 4, 8), ("bfloat16", 2, 4), ("bfloat16", 1, 2),
    ("int8", 16, 16), ("int8", 8, 8),
])  # fmt: skip
def test_a_pool_is_accessed_as_widely_as_its_alignment_allows(name: str, vector: int, width: int) -> None:
    case = replace(MAMBA2, format=name)
    want = {width} if name == "bfloat16" else {width, 4}
    config = replace(case.problem, vector=vector).heuristic(machine_with(90).gpu)
    assert access_bytes(compiled(case, 90, NARROWED[vector], config)) == (want, want)


def every_second_head(case: AnyCase, inputs: Inputs) -> object:
    """A pool that has every second head of a wider one."""
    inputs.state = replace(inputs.state, data=inputs.state.data.repeat_interleave(2, 1)[:, ::2])
    return inputs.step()


def test_heads_that_are_apart_are_accessed_as_widely_as_dense_ones() -> None:
    assert access_bytes(compiled(replace(DELTA, format="bfloat16"), 90, every_second_head)) == ({16}, {16})


ORDERED = [
    (replace(MAMBA2, rows=rows, cols=cols, format=name, rounding=rounding, tokens=tokens), vector)
    for rows, cols, name, rounding, tokens, vector in (
        (64, 64, "float32", "nearest", 0, 4),
        (64, 128, "float32", "nearest", 0, 1),  # a pool that is not aligned
        (64, 32, "float16", "stochastic", 4, 2),  # narrow: wider rows of so many chunks take a minute
        (64, 128, "int8", "stochastic", 0, 16),
        (64, 256, "float32", "nearest", 0, 4),  # a row is more than a warp reads at once
        (80, 20, "bfloat16", "stochastic", 0, 4),
        (80, 16, "float8_e4m3fn", "nearest", 0, 16),
        (4, 33, "float16", "nearest", 4, 1),
    )
]


def lanes_by_turns() -> list[list[int]]:
    """For each of these cases two numbers of lanes that are far apart, other ones by turns."""
    choices = [replace(case.problem, vector=vector).lane_choices for case, vector in ORDERED]
    found = [sorted({of_case[i % 2 :][0], of_case[-1 - i // 2 % 2 :][0]}) for i, of_case in enumerate(choices)]
    assert {lanes for of_case in found for lanes in of_case} == {1, 2, 4, 8, 16, 32}
    return found


@pytest.mark.parametrize(
    ("case", "vector", "lanes_of_case"),
    [(*case, lanes) for case, lanes in zip(ORDERED, lanes_by_turns(), strict=True)],
    ids=str,
)
def test_every_config_sums_a_row_in_the_same_order(case: Case, vector: int, lanes_of_case: list[int]) -> None:
    """A config for each number of lanes, the smallest and one in the middle by turns; of few tokens together, as many
    take long to compile. test_compile.py asks kernels of all forms and formats, with the heuristic's config."""
    problem = replace(case.problem, vector=vector)
    call = NARROWED[vector] if case.problem.vector != vector else plain
    for i, lanes in enumerate(lanes_of_case):
        configs = [config for config in valid_configs(problem) if config.lanes == lanes and config.tokens_together <= 2]
        config = configs[i % 2 * len(configs) // 2]
        require_one_order(compiled(case, 90, call, config), config, vector)


def shuffles(kernel: Any) -> int:
    """Exchanges of any kind between the threads of a warp."""
    return len(re.findall(r"\bshfl\.sync\.", kernel.asm["ptx"]))


def test_a_thread_that_walks_along_a_row_sums_it_alone_on_blackwell() -> None:
    """The butterflies of a sum are those that end it, and a row twice as long has no more shuffles of any kind: so none
    is inside the walk along the columns."""
    case = replace(MAMBA2, format="bfloat16")
    config = chosen(case, 100)
    kernel = compiled(case, 100)
    assert config.lanes <= 4
    assert len(butterflies(kernel)) == rows_per_thread(config) * int(math.log2(config.lanes))
    assert shuffles(kernel) == shuffles(compiled(replace(case, cols=2 * COLUMNS), 100, plain, config))
    most = Config(config.block_rows, 1, max(case.problem.lane_choices))
    assert 2 * len(butterflies(kernel)) < len(butterflies(compiled(case, 100, plain, most)))


KDA = replace(DELTA, heads=32, key_heads=32, per_channel=True, tokens=8, batch=1)
MINUTES = {  # forms that took one or more to compile
    "KDA, snapshots": Form(replace(KDA, format="int16", rounding="stochastic"), with_snapshots_alike),
    "Mamba-2, snapshots": Form(replace(MAMBA2, tokens=8, batch=1), with_snapshots),
    "transposed, snapshots": Form(
        replace(
            DELTA, heads=8, key_heads=8, tokens=8, batch=1, transposed=True, format="bfloat16", rounding="stochastic"
        ),
        with_snapshots_alike,
    ),
}


@pytest.mark.parametrize("name", MINUTES)
def test_no_form_takes_a_minute_to_compile(name: str) -> None:
    """A pass of the compiler looks, for every access, at all that it hangs together with, and from each of that again
    at all: accesses times the square of operations. At 40 million it takes two to four seconds."""
    form = MINUTES[name]
    accesses, operations = accesses_and_operations(compiled(form.case, 90, form.call))
    assert accesses * operations**2 < 200e6, (accesses, operations)


def test_products_of_float32_keys_are_not_unrolled() -> None:
    """Without tensor cores they were most of the code of replay with a decay per channel: 15 600 lines of PTX here,
    56 000 where rows may fold too and have 128 columns, which took a minute to compile."""
    case = replace(DELTA_REPLAY, heads=32, key_heads=32, tokens=16, per_channel=True, qk="float32")
    ptx = compiled(replace(case, u="float32"), 90, keep).asm["ptx"]
    assert len(re.findall(r"^\t[^.]", ptx, re.MULTILINE)) < 9000


def test_fewer_tokens_are_loaded_together_where_random_bits_are_drawn_for_each() -> None:
    """At most half as many as a config may say: of Mamba-2 two, and of the delta rule one."""
    of_mamba2 = replace(MAMBA2, tokens=8, format="int8", rounding="stochastic", **WIDE)
    for call, together in ((plain, [1, 2, 4]), (kept, [1, 2, 4]), (with_snapshots_alike, [1, 2, 2])):
        assert [loaded_together(of_mamba2, call, n) for n in (1, 2, 4)] == together, call
    of_delta = replace(DELTA, tokens=8, format="int8", rounding="stochastic", **WIDE)
    for call, together in ((plain, [1, 2]), (written_per_token, [1, 1])):
        assert [loaded_together(of_delta, call, n) for n in (1, 2)] == together, call


def loaded_together(case: AnyCase, call: Call, together: int) -> int:
    """How many tokens a call loads together where its config says so many."""
    with collected(90) as launches, override(Config(4, 1, 8, tokens_together=together)):
        call(case, make_inputs(case, CPU))
    (launch,) = launches
    return int(launch.constants["TOGETHER"])


def test_decays_of_channels_are_found_once_in_a_warp() -> None:
    """And not in every thread that has a row. softplus and exp take two exponentials; one more is of exp(A_log), and
    one of the sigmoid."""
    for gates in ("float32", "bfloat16", "float16"):
        for case in (
            replace(KDA, tokens=2, gates=gates),
            replace(KDA, tokens=0, gates=gates),
        ):
            config = chosen(case, 90)
            kernel = compiled(case, 90, plain, replace(config, tokens_together=1))
            assert kernel.asm["ptx"].count("ex2.approx") == 2 * COLUMNS // 32 + 2, case


@pytest.mark.parametrize(("tokens", "together"), [(0, 1), (2, 2), (3, 4), (8, 4)])
def test_no_more_tokens_are_loaded_together_than_a_dense_call_has(tokens: int, together: int) -> None:
    assert loaded_together(replace(MAMBA2, tokens=tokens), plain, 4) == together


def test_trees_load_token_by_token_and_packed_rows_as_many_tokens_however_long_they_are() -> None:
    case = replace(MAMBA2, tokens=4)
    inputs, packed = make_inputs(case, CPU), make_inputs(replace(case, packed=True), CPU)
    with collected(90) as launches, override(Config(4, 1, 8, tokens_together=4)):
        with_a_tree(case, inputs)
        for max_len in (None, 4, 100):
            packed.step(slots=replace(packed.at(), max_len=max_len))
    assert [launch.constants["TOGETHER"] for launch in launches] == [1, 4, 4, 4]


def test_a_place_without_a_token_adds_minus_zero() -> None:
    """Triton 3.6 makes 0.0 of a -0.0, which would change states of -0.0. The first place of a group has a token."""
    minus_zero = re.compile(r"selp\.\w+\s+[^;]*(-2147483648|0f80000000)")
    for together in (1, 4):
        case = replace(MAMBA2, tokens=4)
        kernel = compiled(case, 90, plain, Config(4, 1, 8, tokens_together=together))
        assert len(minus_zero.findall(kernel.asm["ptx"])) == together - 1


def test_a_limit_of_registers_reaches_the_compiler() -> None:
    free, limited = (compiled(MAMBA2, 90, plain, Config(4, 1, 16, registers=most)) for most in (0, 128))
    assert ".maxnreg 128" in limited.asm["ptx"]
    assert ".maxnreg" not in free.asm["ptx"]


def products(ptx: str) -> int:
    """Instructions of tensor cores, each of 16 rows, 8 columns and a sum over 16."""
    found = re.findall(r"\bmma\.sync\.aligned\.m16n8k16\.[\w.]*f32\.bf16\.bf16\.f32", ptx)
    assert len(found) == ptx.count("mma.sync")
    return len(found)


def expected_products(case: DeltaCase, rows: int, update: bool) -> int:
    """With a state of one term or two: its products with every k and q, these with each other, those of the steps on
    unit vectors with what every row brings, of three terms where the state is finer than 16 bits, else two, and the
    update, whose weights have two terms. Where there is room, two of the last ones go side by side."""
    terms = 2 if case.format in ("float32", "float16", "int16") else 1
    fine = case.format in ("float32", "int16")
    room = 8 if case.tokens <= 8 else 16
    with_state = terms * (rows // 16) * (2 * room // 8) * (case.cols // 16)
    with_each_other = (2 * room // 16) * (2 * room // 8) * (case.cols // 16)
    pairs_of_terms = (3 if fine else 2) if room == 8 else (6 if fine else 4)
    of_steps = pairs_of_terms * (rows // 16) * (2 * room // 8)
    of_update = (rows // 16) * (case.cols // 8) * (2 * room // 16)
    return with_state + with_each_other + of_steps + update * of_update


@pytest.mark.parametrize(
    ("name", "tokens", "update"),
    [("float32", 4, True), ("bfloat16", 4, True), ("bfloat16", 4, False), ("bfloat16", 16, False), ("int8", 4, True)],
)
def test_tensor_cores_make_no_more_products_than_they_need(name: str, tokens: int, update: bool) -> None:
    case = replace(AT_ONCE, format=name, tokens=tokens)
    ptx = compiled(case, 90, plain if update else kept).asm["ptx"]
    assert products(ptx) == expected_products(case, chosen(case, 90).block_rows, update)


def moved_bytes(ptx: str) -> int:
    """Bytes that a warp hands from thread to thread, or through shared memory."""
    stores = re.findall(r"\bst\.shared(?:\.v(\d))?\.b(\d+)\b", ptx)
    matrices = re.findall(r"\bstmatrix\.[\w.]*?\.x(\d)\b", ptx)
    per_thread = sum(int(n or 1) * int(bits) // 8 for n, bits in stores) + sum(4 * int(n) for n in matrices)
    return 32 * (per_thread + 4 * len(re.findall(r"\bshfl\.sync\.", ptx)))


@pytest.mark.parametrize(
    ("base", "name", "update"),
    [(AT_ONCE, "float32", True), (AT_ONCE, "bfloat16", False), (MAMBA2_AT_ONCE, "float32", True)],
)
def test_nothing_of_a_state_moves_between_threads_on_its_way_through_tensor_cores(
    base: Case | DeltaCase, name: str, update: bool
) -> None:
    """Sixteen rows more cost less than these rows have bytes, so they stay where they were loaded, and are stored from
    there."""
    case, call = replace(base, format=name, **WIDE), plain if update else kept
    few, more = (moved_bytes(compiled(case, 90, call, Config(rows, 1, 4)).asm["ptx"]) for rows in (16, 32))
    assert 0 <= more - few < 16 * case.cols * dtype(name).itemsize // 2


@pytest.mark.parametrize(("name", "tokens"), [("float32", 0), ("float32", 2), ("float16", 2), ("int8", 2)])
def test_a_row_that_does_not_fold_is_read_in_16_bytes_not_written_and_kept_in_registers(name: str, tokens: int) -> None:
    """Also where x of the tokens of a window has the shape of a tile of state: in the layout of its wider accesses rows
    would be summed in another order."""
    kernel = compiled(replace(REPLAY, format=name, tokens=tokens), 90, keep, Config(16, 1, 4, tiles=8 if tokens else 1))
    assert state_loads(kernel, name) == {16}
    assert not access_bytes(kernel)[1]
    assert spilled_bytes(kernel) == 0


@pytest.mark.parametrize("call", [plain, fold], ids=lambda call: call.__name__)
def test_one_token_of_float32_states_needs_no_tensor_cores_and_few_barriers(call: Call) -> None:
    """Warps share what a window weighs, so they wait for each other, but not for tiles of state."""
    kernel = compiled(REPLAY, 90, call)
    assert "mma" not in kernel.asm["ptx"]
    assert len(re.findall(r"\bbar\.sync\b", kernel.asm["ptx"])) <= 12
    assert access_bytes(kernel) == ({16}, set() if call is keep else {16})


@pytest.mark.parametrize(
    "form", [Form(MIMO), Form(TURNED), Form(replace(REPLAY, format="float16", tokens=2), keep)], ids=str
)
def test_products_are_of_tensor_cores_of_every_warp_alone(form: Form) -> None:
    """Products of a warp group would sum in another order, and with them bytes would depend on the config."""
    ptx = compiled(form.case, 90, form.call).asm["ptx"]
    assert "mma.sync.aligned.m16n8k16" in ptx
    assert "wgmma" not in ptx


@pytest.mark.parametrize("case", [MIMO, TURNED], ids=str)
def test_the_read_out_is_two_sums_that_do_not_wait_for_each_other(case: Mamba3Case) -> None:
    """Which the compiler would make one, if it saw that both begin with zero."""
    ttir = compiled(case, 90).asm["ttir"]
    products = set(re.findall(r"(%\w+) = tt\.dot ", ttir))
    sums = re.findall(r"arith\.addf (%\w+), (%\w+)", ttir)
    assert any(products >= {one, other} for one, other in sums)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8"])
def test_threads_of_rank_one_step_the_rows_that_they_load_without_tensor_cores(name: str) -> None:
    """Else tiles go through shared memory, with 28 barriers or more; the vectors of a token do, with ten."""
    ptx = compiled(replace(SISO, format=name, **WIDE), 90).asm["ptx"]
    assert len(re.findall(r"\bbar\.sync\b", ptx)) <= 12
    assert "mma.sync" not in ptx


def test_wide_rows_of_float32_calls_need_no_more_shared_memory_than_gpus_have() -> None:
    """Their outputs are made without tensor cores, of a tile in shared memory: 99 KB are what the smallest GPU has. Of
    still wider rows a tile has fewer."""
    wide = replace(MIMO, heads=2, cols=256, x="float32", bc="float32", kv="float32")
    assert compiled(wide, 90).metadata.shared <= 99 << 10
