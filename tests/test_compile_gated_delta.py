"""What the compiler makes of the kernels of gated_delta_step, without a GPU."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import (
    ARCHITECTURES,
    access_bytes,
    chosen,
    collected,
    compile_launch,
    expected_accesses,
    narrows_slots,
    spilled_bytes,
)
from tables import risky_by_turns

from flashstate.launch import Config, Problem, override
from flashstate.proof import REAL_DELTA_CASES, DeltaCase, Inputs, dtype, make_inputs
from flashstate.proof.laws.tokens import TREE, make_snapshots
from flashstate.state.formats import FORMATS

pytestmark = pytest.mark.compiled

CPU = torch.device("cpu")
SHAPE = DeltaCase(2, 64, 16, 128, 128, x="bfloat16", qk="bfloat16", gates="bfloat16", slots=4)
SEVERAL = replace(SHAPE, tokens=4)
TWO = replace(SHAPE, tokens=2)  # of more the slowest forms take several times as long to compile
AT_ONCE = replace(SEVERAL, exact=False)
Call = Callable[[DeltaCase, Inputs], object]
WAIT = "griddepcontrol.wait"
WIDE = re.compile(r"\bld\.global[\w:.]*\.v4\.b32\b")  # 16 bytes
TOKENS = re.compile(r"\bld\.global(?:\.v\d)?\.b16\b|" + WIDE.pattern)  # values of 16 bits, one by one or eight at once


def plain(case: DeltaCase, inputs: Inputs) -> object:
    return inputs.step()


def kept(case: DeltaCase, inputs: Inputs) -> object:
    return inputs.step(update=False)


def early(case: DeltaCase, inputs: Inputs) -> object:
    return inputs.step(early=True)


@cache
def compiled(case: DeltaCase, architecture: int | str, call: Call = plain, config: Config | None = None) -> Any:
    """The kernel that such a call would start; with the heuristic's config if none is given."""
    with collected(architecture) as launches, override(config or chosen(case, architecture)):
        call(case, make_inputs(case, CPU))
    (launch,) = launches
    several = case.packed or case.tokens > 1
    form = "one_token" if not several else "step" if case.exact else "at_once"
    assert launch.kernel.__name__ == f"gated_delta_{form}_kernel"
    return compile_launch(launch, architecture)


@pytest.mark.parametrize(
    ("architecture", "case"),
    [
        (architecture, replace(case, format=f.name, rounding=f.roundings[:2][-1]))
        for i, architecture in enumerate(ARCHITECTURES)
        for j, f in enumerate(FORMATS.values())
        for case in ((SHAPE, AT_ONCE) if architecture == 90 else (SHAPE, AT_ONCE)[i % 2 :][: (i + j) % 6 == 0])
    ],
    ids=str,
)
def test_every_format_compiles_with_16_byte_accesses_and_no_spills(
    architecture: int | str, case: DeltaCase, tmp_path: Path
) -> None:
    """One token, and several at once: both on the GPU that has a table; on others one, formats by turns. Loads of
    several tokens have no hint, by which they could be told from those of tokens."""
    want, kernel = expected_accesses(architecture, case.format), compiled(case, architecture)
    loads, stores = access_bytes(kernel)
    assert stores == want
    assert loads == want or (not case.exact and loads == want - {16})
    assert spilled_bytes(kernel, tmp_path) == 0


def paged(case: DeltaCase, inputs: Inputs) -> object:
    """Separate write slots, 64-bit slot numbers and a slot stride past 32 bits."""
    data = inputs.state.data
    far = data[:1].as_strided((1, *data.shape[1:]), ((1 << 31) + 16, *data.stride()[1:]))
    inputs.state = replace(inputs.state, data=far, seed=None)
    slots = inputs.slots.long()
    return inputs.step(slots=inputs.at(read=slots, write=slots))


def written_per_token(case: DeltaCase, inputs: Inputs) -> object:
    read = inputs.slots[:, None].expand(-1, 3).contiguous()
    write = torch.arange(case.batch * case.tokens).reshape(case.batch, case.tokens)
    return inputs.step(slots=inputs.at(read=read, accepted=inputs.slots, write=write))


def with_snapshots(case: DeltaCase, inputs: Inputs) -> object:
    """In another format."""
    snapshots = make_snapshots(case, "int8", "stochastic", CPU)
    return inputs.step(slots=inputs.at(snapshot_rows=inputs.slots), snapshots=snapshots)


def with_snapshots_alike(case: DeltaCase, inputs: Inputs) -> object:
    """In the format and the rounding of the states."""
    return inputs.step(snapshots=make_snapshots(case, case.format, case.rounding, CPU))


def with_other_snapshots(case: DeltaCase, inputs: Inputs) -> object:
    """In the other layout."""
    other = replace(case, transposed=not case.transposed)
    return inputs.step(snapshots=make_snapshots(other, case.format, "nearest", CPU))


def with_a_tree(case: DeltaCase, inputs: Inputs) -> object:
    parents = torch.tensor(TREE[: case.tokens]).repeat(case.batch, 1)
    return inputs.step(slots=inputs.at(parents=parents), update=False)


def with_fresh_padding(case: DeltaCase, inputs: Inputs) -> object:
    return inputs.step(slots=inputs.at(padding="fresh"))


def with_kept_padding(case: DeltaCase, inputs: Inputs) -> object:
    return inputs.step(slots=inputs.at(padding="keep"))


def a_tree_of_one_token(case: DeltaCase, inputs: Inputs) -> object:
    """A slot of its own and a snapshot in another format beside it."""
    numbers = inputs.slots[:, None]
    slots = inputs.at(write=numbers.contiguous(), parents=torch.full_like(numbers, -1), padding="fresh")
    return inputs.step(slots=slots, snapshots=make_snapshots(replace(case, tokens=1), "int8", "stochastic", CPU))


FLOAT16 = replace(SEVERAL, format="float16", rounding="stochastic")
TRANSPOSED = replace(TWO, format="bfloat16", rounding="stochastic", transposed=True)
FORMS: dict[str, tuple[DeltaCase, Call]] = {
    "paged": (replace(SHAPE, format="float16"), paged),
    "without update": (FLOAT16, kept),
    "several tokens": (FLOAT16, plain),
    "packed tokens": (replace(FLOAT16, packed=True), plain),
    "KDA": (replace(SHAPE, per_channel=True), plain),
    "KDA, several tokens": (replace(SEVERAL, per_channel=True, raw=False, format="int8"), plain),
    "one token of a tree": (replace(SHAPE, format="float16", rounding="stochastic"), a_tree_of_one_token),
    "one token, kept padding": (replace(SHAPE, format="int8"), with_kept_padding),
    "log-decay": (replace(SHAPE, raw=False, qk_l2norm=False, format="bfloat16"), plain),
    "a slot for every token": (replace(TWO, format="int8", rounding="stochastic"), written_per_token),
    "snapshots": (TWO, with_snapshots),
    "a tree": (replace(SEVERAL, format="int8"), with_a_tree),
    "fresh padding": (replace(SEVERAL, format="int16"), with_fresh_padding),
    "kept padding": (FLOAT16, with_kept_padding),
    "transposed": (replace(SHAPE, transposed=True), plain),
    "transposed, several tokens": (TRANSPOSED, plain),
    "transposed, snapshots that are not": (TRANSPOSED, with_other_snapshots),
    "transposed snapshots": (TWO, with_other_snapshots),
    "at once": (replace(AT_ONCE, format="float16"), plain),
    "at once, 16 tokens": (replace(AT_ONCE, tokens=16), plain),
    "at once, without update": (replace(AT_ONCE, format="bfloat16"), kept),
    "at once, 16 tokens, without update": (replace(AT_ONCE, tokens=16, format="bfloat16"), kept),
    "at once, packed": (replace(AT_ONCE, tokens=16, packed=True, format="int16"), plain),
    "at once, fresh padding": (replace(AT_ONCE, format="int8", rounding="stochastic", raw=False), with_fresh_padding),
    "at once, kept padding": (replace(AT_ONCE, format="bfloat16", rounding="stochastic"), with_kept_padding),
    "at once, transposed": (replace(AT_ONCE, format="bfloat16", transposed=True), plain),
}


@pytest.mark.parametrize(
    ("architecture", "form"),
    [(90, form) for form in FORMS] + [(("gfx942", 80)[i % 2], form) for i, form in enumerate([*FORMS][::12])],
)
def test_every_form_compiles_without_spills(architecture: int | str, form: str, tmp_path: Path) -> None:
    case, call = FORMS[form]
    kernel = compiled(case, architecture, call)
    assert spilled_bytes(kernel, tmp_path) == 0
    if isinstance(architecture, int) and call not in (kept, with_a_tree):
        assert 16 in access_bytes(kernel)[1]


COPY = re.compile(r"\bcp\.async\.cg\.shared\.global[^\n]*, 0x10,")  # 16 bytes


def require_staged(kernel: Any, tile_bytes: int, call: Call, tmp_path: Path) -> None:
    """Tiles come by asynchronous copies, the first two before the loop; with `early`, after it has waited."""
    ptx, accesses = kernel.asm["ptx"], tile_bytes // (16 * 32)
    assert spilled_bytes(kernel, tmp_path) == 0
    assert len(COPY.findall(ptx)) == 3 * accesses
    assert len(COPY.findall(ptx.split("cp.async.wait_group")[0])) == 2 * accesses
    if call is early:
        assert not COPY.search(ptx.split(WAIT)[0])


@pytest.mark.parametrize(
    ("name", "tiles", "call"),
    [("float32", 16, plain), ("bfloat16", 2, plain), ("bfloat16", 16, early), ("int8", 2, early), ("int8", 16, plain)],
)
def test_tiles_wait_in_shared_memory_while_others_are_stepped(
    name: str, tiles: int, call: Call, tmp_path: Path
) -> None:
    case, config = replace(SHAPE, format=name), Config(8, 1, 16 if name == "float32" else 8, tiles=tiles)
    kernel, tile_bytes = compiled(case, 90, call, config), config.block_rows * case.cols * dtype(name).itemsize
    require_staged(kernel, tile_bytes, call, tmp_path)
    assert not re.search(r"\bld\.global\.L1::evict_first[\w:.]*\.v4", kernel.asm["ptx"])
    assert 2 * tile_bytes <= kernel.metadata.shared < 3 * tile_bytes  # two at most


@pytest.mark.parametrize(
    ("name", "tiles", "call"),
    [("bfloat16", 2, kept), ("bfloat16", 8, plain), ("bfloat16", 4, early), ("int8", 4, plain), ("float32", 8, kept)],
)
def test_tiles_of_tokens_at_once_wait_in_shared_memory_while_others_are_stepped(
    name: str, tiles: int, call: Call, tmp_path: Path
) -> None:
    case, config = replace(AT_ONCE, format=name), Config(16, 1, 4, tiles=tiles)
    kernel, tile_bytes = compiled(case, 90, call, config), config.block_rows * case.cols * dtype(name).itemsize
    require_staged(kernel, tile_bytes, call, tmp_path)
    ptx, of_tokens = kernel.asm["ptx"], 2 * 8 * case.cols * 2  # bytes of k and q, with room for 8 tokens
    asked_for = ptx.count("prefetch.global.L2") * 32 * 128  # bytes, by every thread of a warp
    assert asked_for == (tiles * tile_bytes if call is not kept and tiles * tile_bytes <= 16 << 10 else 0)
    first, *_ = re.split(r"\bprefetch\.global|\bcp\.async", ptx)
    if name != "float32":  # of which accesses have four columns, so that those of k and q have 8 bytes
        assert len(WIDE.findall(first)) == of_tokens // (16 * 32)  # they wait for no state


@pytest.mark.parametrize(
    ("name", "tiles"), [("float32", 1), ("bfloat16", 1), ("bfloat16", 2), ("float16", 1), ("int16", 1), ("int8", 1)]
)
def test_only_single_tiles_of_16_bit_floats_have_the_slot_in_every_thread(name: str, tiles: int) -> None:
    ptx = compiled(replace(SHAPE, format=name), 90, plain, Config(8, 1, 8 if name == "int8" else 16, tiles=tiles)).asm["ptx"]
    assert ("%lanemask_lt" in ptx) == (name in ("bfloat16", "float16") and tiles == 1)


@pytest.mark.parametrize("case", [SHAPE, TWO], ids=str)
def test_strides_are_multiplied_with_32_bits_of_int64_slots(case: DeltaCase) -> None:
    assert narrows_slots(compiled(replace(case, index="int64"), 90))


ODD_ON_HOPPER = [c for c in REAL_DELTA_CASES if c.rows != 128 and c.format in ("float32", "bfloat16", "int8")]


@pytest.mark.parametrize("case", ODD_ON_HOPPER[::2], ids=str)
def test_odd_shapes_compile_without_spills(case: DeltaCase, tmp_path: Path) -> None:
    assert spilled_bytes(compiled(case, 90), tmp_path) == 0


@pytest.mark.parametrize(
    "case",
    [
        SHAPE,
        replace(SHAPE, format="int8"),
        replace(TWO, format="bfloat16"),
        AT_ONCE,
        replace(AT_ONCE, format="bfloat16", tokens=16),
        replace(AT_ONCE, format="bfloat16", transposed=True),
    ],
    ids=str,
)
def test_states_are_on_their_way_before_a_kernel_that_starts_early_waits(case: DeltaCase) -> None:
    """Before it waits a kernel loads its tile of states, 16 bytes at a time, and nothing that tokens bring; it stores
    nothing before."""
    ptx, rows = compiled(case, 90, early).asm["ptx"], chosen(case, 90).block_rows
    assert WAIT not in compiled(case, 90).asm["ptx"]
    before, after = ptx.split(WAIT)
    assert len(WIDE.findall(before)) == rows * case.cols * dtype(case.format).itemsize // (16 * 32)
    assert len(TOKENS.findall(before)) == len(WIDE.findall(before))
    assert TOKENS.findall(after)
    assert not re.search(r"\bst\.global(?!\.b64)", before)  # all but those of the fault flag


@pytest.mark.parametrize("architecture", [80, 89, 90, 100, 120])
def test_only_gpus_that_can_start_a_kernel_early(architecture: int) -> None:
    for case in (SHAPE, AT_ONCE) if architecture in (89, 90) else (SHAPE,):
        assert (WAIT in compiled(case, architecture, early).asm["ptx"]) == (architecture >= 90)


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


@pytest.mark.parametrize("update", [True, False])
@pytest.mark.parametrize(("name", "tokens"), [("float32", 4), ("bfloat16", 4), ("bfloat16", 16), ("int8", 4)])
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


@pytest.mark.parametrize(("name", "update"), [("float32", True), ("bfloat16", False)])
def test_nothing_of_a_state_moves_between_threads_on_its_way_through_tensor_cores(name: str, update: bool) -> None:
    """Sixteen rows more cost less than these rows have bytes, so they stay where they were loaded, and are stored from
    there."""
    case, call = replace(AT_ONCE, format=name), plain if update else kept
    few, more = (moved_bytes(compiled(case, 90, call, Config(rows, 1, 4)).asm["ptx"]) for rows in (16, 32))
    assert 0 <= more - few < 16 * case.cols * dtype(name).itemsize // 2


def stored_by(mode: Problem) -> tuple[Call, ...]:
    return {"last": (plain,), "every": (written_per_token, with_snapshots_alike), "none": (kept,)}[mode.stored]


@pytest.mark.parametrize(
    ("mode", "config", "call"), risky_by_turns("gated_delta_step", "gated_delta_at_once", calls=stored_by)
)
def test_no_entry_of_the_table_that_may_spill_spills_more_than_a_few_bytes(
    mode: Problem, config: Config, call: Call, tmp_path: Path
) -> None:
    case = replace(
        SHAPE, rows=mode.rows, cols=mode.cols, format=mode.format, rounding=mode.rounding,
        transposed=mode.transposed, tokens=4 if mode.several_tokens else 0, exact=mode.op == "gated_delta_step",
    )  # fmt: skip
    assert case.problem.vector == mode.vector
    assert spilled_bytes(compiled(case, 90, call, config), tmp_path) <= 64, (config, call.__name__)
