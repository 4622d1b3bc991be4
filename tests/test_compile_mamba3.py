"""What the compiler makes of the kernel of mamba3_step, without a GPU."""

import re
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
    spilled_bytes,
)

from flashstate.launch import Config, override
from flashstate.launch.config import measured_sizes
from flashstate.launch.table import load_table
from flashstate.proof import Mamba3Case, make_inputs
from flashstate.state.formats import FORMATS

pytestmark = pytest.mark.compiled

CPU = torch.device("cpu")
MIMO = Mamba3Case(
    2, 48, 1, 64, 128, rank=4, angles=0, x="bfloat16", bc="bfloat16", kv="bfloat16", parameters="float32", slots=4
)
TURNED = replace(MIMO, angles=32)
SISO = replace(MIMO, rank=1)
FORMS = (MIMO, TURNED, SISO, replace(SISO, angles=32))


@cache
def compiled(case: Mamba3Case, architecture: int | str, config: Config | None = None) -> Any:
    """The kernel that a call would start; with the heuristic's config if none is given."""
    with collected(architecture) as launches, override(config or chosen(case, architecture)):
        make_inputs(case, CPU).step()
    (launch,) = launches
    return compile_launch(launch, architecture)


@pytest.mark.parametrize(
    ("architecture", "case"),
    [
        (architecture, replace(FORMS[(i + j) % len(FORMS)], format=f.name, rounding=f.roundings[:2][-1]))
        for i, architecture in enumerate(ARCHITECTURES)
        for j, f in enumerate(FORMATS.values())
        if architecture == 90 or (i % 2 == 1 and (i + j) % 6 == 0)
    ],
    ids=str,
)
def test_every_format_compiles_with_16_byte_accesses(architecture: int | str, case: Mamba3Case) -> None:
    """The four forms by turns: all formats on the GPU that has a table, one on every other architecture."""
    want = expected_accesses(architecture, case.format)
    loads, stores = access_bytes(compiled(case, architecture))
    assert stores >= want
    assert loads >= want or isinstance(architecture, int)  # loads have no hint, by which they could be told from others


@pytest.mark.parametrize(
    "case",
    [
        replace(form, format=name)
        for form, name in zip(FORMS, ("float32", "int8", "bfloat16", "float8_e4m3fn"), strict=True)
    ],
    ids=str,
)
def test_configs_of_the_table_do_not_spill_much(case: Mamba3Case, tmp_path: Path) -> None:
    """A few registers on the stack were faster than fewer programs at once. Every form has a format."""
    configs = set(measured_sizes(load_table("NVIDIA H200"), case.problem).values())
    assert configs
    for config in configs:
        assert spilled_bytes(compiled(case, 90, config), tmp_path) <= 64


@pytest.mark.parametrize("case", [MIMO, TURNED], ids=str)
def test_ranks_are_multiplied_by_tensor_cores_of_every_warp_alone(case: Mamba3Case) -> None:
    """Products of a warp group would sum in another order, and with them bytes would depend on the config."""
    ptx = compiled(case, 90).asm["ptx"]
    assert "mma.sync.aligned.m16n8k16" in ptx
    assert "wgmma" not in ptx


@pytest.mark.parametrize("case", [MIMO, TURNED], ids=str)
def test_the_read_out_is_two_sums_that_do_not_wait_for_each_other(case: Mamba3Case) -> None:
    """Which the compiler would make one, if it saw that both begin with zero."""
    ttir = compiled(case, 90).asm["ttir"]
    products = set(re.findall(r"(%\w+) = tt\.dot ", ttir))
    sums = re.findall(r"arith\.addf (%\w+), (%\w+)", ttir)
    assert any(products >= {one, other} for one, other in sums)


def test_rank_one_needs_no_tensor_cores() -> None:
    assert "mma.sync" not in compiled(SISO, 90).asm["ptx"]


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8"])
def test_threads_step_the_rows_that_they_load(name: str) -> None:
    """Else tiles go through shared memory, with 28 barriers or more; the vectors of a token do, with ten."""
    barriers = re.findall(r"\bbar\.sync\b", compiled(replace(SISO, format=name), 90).asm["ptx"])
    assert len(barriers) <= 12


def test_states_of_a_later_program_are_asked_for() -> None:
    config = Config(64, 4, 4, ahead=256)
    assert "prefetch.global.L2" in compiled(MIMO, 90, config).asm["ptx"]
    assert "prefetch.global.L2" not in compiled(MIMO, 90, replace(config, ahead=0)).asm["ptx"]


def test_the_state_is_asked_for_before_anything_waits_for_weights() -> None:
    """A barrier behind its loads keeps what is stored to shared memory, which waits, from going in front of them."""
    ptx = compiled(MIMO, 90).asm["ptx"]
    first_barrier = re.search(r"\bbar\.sync\b", ptx)
    assert first_barrier is not None
    before = ptx[: first_barrier.start()]
    assert len(re.findall(r"ld\.global[\w:.]*\.v4\.b32", before)) >= 16
    assert "st.shared" not in before


ODD = (
    Mamba3Case(3, 4, 2, 33, 20, rank=3, angles=7, tokens=3, x="float16", kv="float16"),
    Mamba3Case(3, 2, 1, 40, 36, rank=1, angles=18, tokens=2, packed=True, trap_logit=True),
)


@pytest.mark.parametrize(
    ("architecture", "case"), [(architecture, ODD[i % 2]) for i, architecture in enumerate(ARCHITECTURES[::2])], ids=str
)
def test_odd_shapes_and_several_tokens_compile(architecture: int | str, case: Mamba3Case) -> None:
    """On the architectures between those above."""
    compiled(case, architecture)


def test_wide_rows_of_float32_calls_need_no_more_shared_memory_than_gpus_have() -> None:
    """Their outputs are made without tensor cores, of a tile in shared memory: 99 KB are what the smallest GPU has. Of
    still wider rows a tile has fewer."""
    wide = replace(MIMO, heads=2, cols=256, x="float32", bc="float32", kv="float32")
    assert compiled(wide, 90).metadata.shared <= 99 << 10
