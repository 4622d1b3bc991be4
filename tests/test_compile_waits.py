"""What waits for what in kernels: loads that are on their way before anything waits, tiles in shared memory, barriers,
and kernels that start early. Without a GPU."""

import re
from dataclasses import replace
from typing import Any

import pytest
from asking import spilled_bytes
from compiling import CPU, Call, chosen, collected, compile_launch, compiled, plain
from kernel_forms import (
    AT_ONCE,
    CONV,
    DELTA,
    MAMBA2,
    MAMBA2_AT_ONCE,
    MIMO,
    WIDE,
    early,
    kept,
    written_per_token,
)  # fmt: skip

from flashstate.launch import Config, valid_configs
from flashstate.proof import Case, ConvCase, DeltaCase, Mamba3Case, dtype, make_inputs

pytestmark = pytest.mark.compiled
WAIT, LET = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
WIDE_LOAD = re.compile(r"\bld\.global[\w:.]*\.v4\.b32\b")  # 16 bytes
TOKENS = re.compile(r"\bld\.global(?:\.v\d)?\.b16\b|\bld\.global\.v[24]\.b32\b")  # 16-bit values; states have a hint
WIDE_PARAMETERS = re.compile(r"\bld\.global\.v4\.b32\b")  # four of them in float32
STORES = re.compile(r"\bst\.global(?!\.b64)")  # all but those of the fault flag
COPY = re.compile(r"\bcp\.async\.cg\.shared\.global[^\n]*, 0x10,")  # 16 bytes


@pytest.mark.parametrize("config", [Config(4, 1, 8), Config(16, 4, 8), Config(16, 2, 16)], ids=str)
def test_loads_do_not_wait_for_shared_memory(config: Config) -> None:
    """What there is of it, a program uses to put its outputs in order, behind all loads; with several tokens too."""
    case = replace(MAMBA2, format="bfloat16", **WIDE)
    one, several = (compiled(replace(case, tokens=t), 90, plain, config).asm["ptx"] for t in (0, 2))
    stores, stores_of_several = (
        [at.start() for at in re.finditer(r"\b(st\.shared|stmatrix)", ptx)] for ptx in (one, several)
    )
    assert not stores or min(stores) > max(at.start() for at in re.finditer(r"\bld\.global", one))
    assert len(stores_of_several) == len(stores)


@pytest.mark.parametrize(
    ("case", "call", "barriers"),
    [
        (replace(MIMO, rank=1, cols=16, angles=8), plain, 2),
        (replace(MIMO, cols=16, tokens=3), plain, 2),
        (replace(MIMO, cols=16, tokens=3), written_per_token, 1),
    ],
)
def test_warps_wait_for_each_other_before_they_overwrite_what_all_of_them_read(
    case: Mamba3Case, call: Call, barriers: int
) -> None:
    """A barrier before k and the angles are stored, and one before v is; after every token one for all of them.
    Launches do not show that one is missing: 200 on a busy H200 left equal bytes without both."""
    configs = (each for each in valid_configs(case.problem) if each.num_warps > 1 and each.block_rows < case.rows)
    assert compiled(case, 90, call, next(configs)).asm["ttgir"].count(".barrier ") == barriers


@pytest.mark.parametrize("architecture", [89, 90, 100])
def test_only_gpus_that_can_let_the_next_kernel_start_early(architecture: int) -> None:
    """Convolutions let the next kernel start; all ops wait for it, and their kernels are told so by a constant."""
    can = architecture >= 90
    for case in (MAMBA2, DELTA, AT_ONCE, CONV):
        with collected(architecture) as launches:
            for call in (plain, early):
                call(case, make_inputs(case, CPU))
        assert [launch.constants["EARLY"] for launch in launches] == [False, can]
        if case is CONV or architecture == 90:
            ordinary, starts_early = (compile_launch(launch, architecture).asm["ptx"] for launch in launches)
            assert WAIT not in ordinary
            assert (WAIT in starts_early) == can
            assert (LET in ordinary) == (LET in starts_early) == (can and case is CONV)


@pytest.mark.parametrize(
    "case",
    [
        replace(CONV, parameters="float32"),
        replace(CONV, tokens=4, parameters="float32"),
        MAMBA2,
        replace(MAMBA2, format="int8"),
        replace(MAMBA2, tokens=4),
    ],
    ids=str,
)
def test_states_are_on_their_way_before_a_kernel_that_starts_early_waits(case: ConvCase | Case) -> None:
    """All loads of state come before the wait, all of tokens behind it; and a convolution lets the next one start only
    when all before it has ended."""
    ptx = compiled(case, 90, early).asm["ptx"]
    before, behind = ptx.split(WAIT)
    states = re.compile(r"\bld\.global\.L1::evict_first")
    assert states.search(before)
    assert not states.search(behind)
    assert TOKENS.findall(before) == (WIDE_PARAMETERS.findall(before) if isinstance(case, ConvCase) else [])
    assert TOKENS.findall(behind)
    assert not STORES.search(before)
    assert LET not in before


@pytest.mark.parametrize(
    ("name", "rounding", "ahead"),
    [
        ("float32", "nearest", True),
        ("bfloat16", "nearest", True),
        ("int8", "nearest", False),
        ("float16", "stochastic", False),
    ],
)
def test_what_one_token_brings_is_asked_for_before_the_state_of_a_float_format(
    name: str, rounding: str, ahead: bool
) -> None:
    """That waits for its slot. What has random bits or a scale has no registers for tokens meanwhile."""
    case = replace(MAMBA2, format=name, rounding=rounding)
    before, _, behind = compiled(case, 90).asm["ptx"].partition("ld.global.L1::evict_first")
    assert behind
    assert bool(TOKENS.search(before)) == ahead
    assert bool(TOKENS.search(behind)) != ahead


@pytest.mark.parametrize(
    "case",
    [
        DELTA,
        replace(DELTA, format="bfloat16", tokens=2),
        AT_ONCE,
        replace(AT_ONCE, format="bfloat16", transposed=True),
        replace(MAMBA2_AT_ONCE, format="bfloat16"),
    ],
    ids=str,
)
def test_tiles_of_tensor_cores_and_of_the_delta_rule_are_on_their_way_before_a_kernel_waits(
    case: Case | DeltaCase,
) -> None:
    """Before it waits a kernel loads its tile of states, 16 bytes at a time, and nothing that tokens bring; it stores
    nothing before."""
    ptx, rows = compiled(case, 90, early).asm["ptx"], chosen(case, 90).block_rows
    before, behind = ptx.split(WAIT)
    tokens = re.compile(r"\bld\.global(?:\.v\d)?\.b16\b|" + WIDE_LOAD.pattern)  # one by one or eight at once
    assert len(WIDE_LOAD.findall(before)) == rows * case.cols * dtype(case.format).itemsize // (16 * 32)
    assert len(tokens.findall(before)) == len(WIDE_LOAD.findall(before))
    assert tokens.findall(behind)
    assert not STORES.search(before)


def require_staged(kernel: Any, tile_bytes: int, call: Call) -> None:
    """Tiles come by asynchronous copies, the first two before the loop; with `early`, after it has waited."""
    ptx, accesses = kernel.asm["ptx"], tile_bytes // (16 * 32)
    assert spilled_bytes(kernel) == 0
    assert len(COPY.findall(ptx)) == 3 * accesses
    assert len(COPY.findall(ptx.split("cp.async.wait_group")[0])) == 2 * accesses
    if call is early:
        assert not COPY.search(ptx.split(WAIT)[0])


@pytest.mark.parametrize(
    ("name", "tiles", "call"),
    [("float32", 16, plain), ("bfloat16", 2, early), ("int8", 16, plain)],
)
def test_tiles_wait_in_shared_memory_while_others_are_stepped(name: str, tiles: int, call: Call) -> None:
    case, config = replace(DELTA, format=name, **WIDE), Config(8, 1, 16 if name == "float32" else 8, tiles=tiles)
    kernel, tile_bytes = compiled(case, 90, call, config), config.block_rows * case.cols * dtype(name).itemsize
    require_staged(kernel, tile_bytes, call)
    assert not re.search(r"\bld\.global\.L1::evict_first[\w:.]*\.v4", kernel.asm["ptx"])
    assert 2 * tile_bytes <= kernel.metadata.shared < 3 * tile_bytes  # two at most


@pytest.mark.parametrize(
    ("name", "tiles", "call"),
    [("bfloat16", 2, kept), ("bfloat16", 4, early), ("int8", 4, plain)],
)
def test_tiles_of_tokens_at_once_wait_in_shared_memory_while_others_are_stepped(
    name: str, tiles: int, call: Call
) -> None:
    case, config = replace(AT_ONCE, format=name), Config(16, 1, 4, tiles=tiles)
    kernel, tile_bytes = compiled(case, 90, call, config), config.block_rows * case.cols * dtype(name).itemsize
    require_staged(kernel, tile_bytes, call)
    ptx, of_tokens = kernel.asm["ptx"], 2 * 8 * case.cols * 2  # bytes of k and q, with room for 8 tokens
    asked_for = ptx.count("prefetch.global.L2") * 32 * 128  # bytes, by every thread of a warp
    assert asked_for == (tiles * tile_bytes if call is not kept and tiles * tile_bytes <= 16 << 10 else 0)
    first, *_ = re.split(r"\bprefetch\.global|\bcp\.async", ptx)
    if name != "float32":  # of which accesses have four columns, so that those of k and q have 8 bytes
        assert len(WIDE_LOAD.findall(first)) == of_tokens // (16 * 32)  # they wait for no state


@pytest.mark.parametrize(("name", "tiles"), [("float32", 1), ("bfloat16", 1), ("bfloat16", 2), ("int8", 1)])
def test_only_single_tiles_of_16_bit_floats_have_the_slot_in_every_thread(name: str, tiles: int) -> None:
    ptx = compiled(replace(DELTA, format=name), 90, plain, Config(8, 1, 4, tiles=tiles)).asm["ptx"]
    assert ("%lanemask_lt" in ptx) == (name in ("bfloat16", "float16") and tiles == 1)


def test_states_of_a_later_program_are_asked_for() -> None:
    case, config = MIMO, Config(64, 4, 4, ahead=256)
    assert "prefetch.global.L2" in compiled(case, 90, plain, config).asm["ptx"]
    assert "prefetch.global.L2" not in compiled(case, 90, plain, replace(config, ahead=0)).asm["ptx"]


def test_the_state_is_asked_for_before_anything_waits_for_weights() -> None:
    """A barrier behind its loads keeps what is stored to shared memory, which waits, from going in front of them."""
    ptx = compiled(replace(MIMO, **WIDE), 90).asm["ptx"]
    first_barrier = re.search(r"\bbar\.sync\b", ptx)
    assert first_barrier is not None
    before = ptx[: first_barrier.start()]
    assert len(re.findall(r"ld\.global[\w:.]*\.v4\.b32", before)) >= 16
    assert "st.shared" not in before
