"""What the compiler makes of the kernels of mamba2_replay and mamba2_fold, without a GPU."""

import re
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import (
    ARCHITECTURES,
    access_bytes,
    collected,
    compile_launch,
    expected_accesses,
    spilled_bytes,
)

import flashstate
from flashstate.launch import Config, override
from flashstate.launch.config import measured_sizes
from flashstate.launch.table import load_table
from flashstate.proof import ReplayCase, dtype
from flashstate.ops.mamba2_replay import parted

pytestmark = pytest.mark.compiled

CPU = torch.device("cpu")
REAL = ReplayCase(2, 16, 1, 64, 128, x="bfloat16", dt="bfloat16", slots=3)
ODD = ReplayCase(3, 4, 2, 33, 20, tokens=3, packed=True, x="float16", D="row", window=20, spare=1)


@cache
def compiled(form: str, case: ReplayCase, architecture: int | str, config: Config | None = None) -> Any:
    """The kernel of a call in which every row decides, "either", or of one that is "planned", or those that "fold" or
    "keep" the rows of a plan; or that of a "mamba2_fold" in place. With the heuristic's config if none is given."""
    inputs = case.make_inputs(CPU)
    plan = inputs.plan()  # by the reference, so that no launch of it is collected
    parts = nullcontext() if form == "planned" else parted()
    with collected(architecture) as launches, parts, override(config) if config else nullcontext():
        if form == "mamba2_fold":
            flashstate.mamba2_fold(inputs.state.state, inputs.state.ring, inputs.arguments["A"])
        else:
            inputs.step(**{} if form == "either" else {"plan": plan})
    rows_do = "either" if form == "planned" else form
    (launch,) = (launch for launch in launches if launch.constants.get("ROWS_DO", rows_do) == rows_do)
    return compile_launch(launch, architecture)


TURNS = [
    ("fold", replace(REAL, format="int8", rounding="stochastic")),
    ("keep", replace(REAL, format="bfloat16", tokens=6)),
    ("keep", replace(REAL, format="float16")),
    ("either", replace(ODD, format="float16", rounding="stochastic")),
    ("fold", replace(REAL, format="float16", rounding="stochastic", tokens=16)),
    ("mamba2_fold", replace(REAL, format="float32")),
    ("either", replace(REAL, format="int16", x="float32")),
    ("fold", replace(ODD, format="float8_e4m3fn", window=64)),
]


def state_loads(kernel: Any, name: str) -> set[int]:
    """Bytes of the accesses by which threads load a state. No hint tells them from others, but their type does,
    which nothing else has in chunks of this size."""
    ttgir, size = kernel.asm["ttgir"], dtype(name).itemsize
    element = {4: "f32", 2: "f16" if name == "float16" else "i16", 1: "i8"}[size]
    neighbours = dict(re.findall(r"^(#blocked\d*) = #ttg\.blocked<{sizePerThread = \[1, (\d+)\]", ttgir, re.MULTILINE))
    found = re.findall(rf"tt\.load .*tensor<\d+x{64 // size}x!tt\.ptr<{element}>, (#blocked\d*)>", ttgir)
    return {int(neighbours[layout]) * size for layout in found}


@pytest.mark.parametrize(
    ("architecture", "form", "case"),
    [(architecture, *TURNS[i % len(TURNS)]) for i, architecture in enumerate(ARCHITECTURES)],
    ids=str,
)
def test_every_architecture_has_kernels_with_16_byte_accesses_of_the_state(
    architecture: int | str, form: str, case: ReplayCase
) -> None:
    """Forms, formats and shapes by turns; odd rows are no multiple of 16 bytes."""
    kernel = compiled(form, case, architecture)
    loads, stores = access_bytes(kernel)
    if case.cols == REAL.cols:
        loads = state_loads(kernel, case.format) if isinstance(architecture, int) else loads  # of AMD, the widest
        assert loads == {16}
        assert stores >= expected_accesses(architecture, case.format) or form == "keep"


@pytest.mark.parametrize("name", ["float32", "float16", "int8"])
def test_a_row_that_does_not_fold_is_read_in_16_bytes_not_written_and_kept_in_registers(
    name: str, tmp_path: Path
) -> None:
    kernel = compiled("keep", replace(REAL, format=name, tokens=2), 90, Config(16, 1, 4, tiles=8))
    assert state_loads(kernel, name) == {16}
    assert not access_bytes(kernel)[1]
    assert spilled_bytes(kernel, tmp_path) == 0


@pytest.mark.parametrize("name", ["float32", "float16"])
def test_the_config_that_was_measured_fastest_does_not_spill_much(name: str, tmp_path: Path) -> None:
    """Larger tiles, or so few registers that an SM has 16 warps, are worth a few on the stack."""
    assert spilled_bytes(compiled("keep", replace(REAL, format=name, tokens=2), 90), tmp_path) <= 128


def test_products_are_of_tensor_cores_of_one_warp() -> None:
    """Products of a warp group would sum in another order."""
    ptx = compiled("keep", replace(REAL, format="float16"), 90).asm["ptx"]
    assert "mma.sync.aligned.m16n8k16" in ptx
    assert "wgmma" not in ptx


@pytest.mark.parametrize(
    ("architecture", "form"),
    [(architecture, ("either", "keep", "fold")[i % 3]) for i, architecture in enumerate(ARCHITECTURES[1::2])],
)
def test_one_token_of_odd_shapes_compiles(architecture: int | str, form: str, tmp_path: Path) -> None:
    kernel = compiled(form, replace(ODD, tokens=1, packed=False, window=9), architecture)
    assert spilled_bytes(kernel, tmp_path) <= 64


@pytest.mark.parametrize("form", ["either", "planned", "keep", "fold"])
def test_one_token_of_float32_states_needs_no_tensor_cores_and_few_barriers(form: str, tmp_path: Path) -> None:
    """Warps share what a window weighs, so they wait for each other, but not for tiles of state."""
    kernel = compiled(form, REAL, 90)
    assert "mma" not in kernel.asm["ptx"]
    assert len(re.findall(r"\bbar\.sync\b", kernel.asm["ptx"])) <= 12
    loads, stores = access_bytes(kernel)
    assert loads == {16}
    assert stores == (set() if form == "keep" else {16})
    assert spilled_bytes(kernel, tmp_path) <= 64


def test_threads_have_as_much_of_a_row_where_other_tiles_have_the_shape_of_the_state() -> None:
    """x of the tokens of a window: in the layout of its wider accesses rows would be summed in another order."""
    assert state_loads(compiled("keep", REAL, 90, Config(16, 1, 4)), "float32") == {16}


def test_entries_for_one_token_do_not_spill_much(tmp_path: Path) -> None:
    """Registers for 16 warps, or 20, of a multiprocessor are worth a few on the stack."""
    for form in ("either", "keep", "fold"):
        sizes = measured_sizes(load_table("NVIDIA H200"), replace(REAL.problem, op=f"mamba2_replay {form}"))
        assert sizes
        for config in set(sizes.values()):
            assert spilled_bytes(compiled(form, REAL, 90, config), tmp_path) <= 128, (form, config)


@pytest.mark.parametrize("case", [REAL, replace(REAL, tokens=2)], ids=["one token", "two"])
@pytest.mark.parametrize(("padding", "update"), [("fresh", True), ("keep", False)])
def test_every_padding_compiles_and_so_do_calls_that_store_nothing(
    case: ReplayCase, padding: str, update: bool
) -> None:
    inputs = case.make_inputs(CPU)
    with collected(90) as launches:
        inputs.step(slots=inputs.at(padding=padding), update=update)
    (launch,) = launches
    stores = access_bytes(compile_launch(launch, 90))[1]
    assert stores == ({16} if update else set())
