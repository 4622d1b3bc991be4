"""What the compiler makes of conv1d_step's kernel, and of kernels that start early, without a GPU."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import ARCHITECTURES, collected, compile_launch, spilled_bytes
from tables import H200_TABLE, configs_by_mode

from flashstate import Slots
from flashstate.launch import override
from flashstate.ops.conv1d import ChannelProblem
from flashstate.proof import Case, ConvCase, Inputs, make_inputs

pytestmark = pytest.mark.compiled

CPU = torch.device("cpu")
SHAPE = ConvCase(2, 1280, 4, x="bfloat16", parameters="bfloat16", slots=4)
SEVERAL = replace(SHAPE, tokens=4)
Call = Callable[[Inputs], object]


def plain(inputs: Inputs) -> object:
    return inputs.step()


def early(inputs: Inputs) -> object:
    return inputs.step(early=True)


@cache
def compiled(case: ConvCase | Case, architecture: int | str, call: Call = plain) -> Any:
    """The kernel that such a call would start."""
    with collected(architecture) as launches:
        call(make_inputs(case, CPU))
    (launch,) = launches
    return compile_launch(launch, architecture)


def accesses(kernel: Any) -> set[int]:
    """Bytes of the loads and stores of windows, on NVIDIA: those with a hint."""
    found = re.findall(r"\b(?:ld|st)\.global\.L1::evict_first[\w:.]*?(?:\.v(\d))?\.b(\d+)\b", kernel.asm["ptx"])
    return {int(n or 1) * int(bits) // 8 for n, bits in found}


ACCESSED = [SHAPE, SEVERAL, replace(SHAPE, window="float32"), replace(SEVERAL, packed=True)]


@pytest.mark.parametrize(
    ("architecture", "case"),
    [
        (architecture, case)
        for i, architecture in enumerate(ARCHITECTURES)
        for j, case in enumerate(ACCESSED)
        if architecture == 90 or (i + j) % 2 == 0
    ],
    ids=str,
)
def test_windows_are_accessed_widely_where_channels_are_neighbours(
    architecture: int | str, case: ConvCase, tmp_path: Path
) -> None:
    """The four channels of a thread at once, or 16 bytes of them. All on the GPU that has a table; on others half of
    them, by turns."""
    kernel = compiled(case, architecture)
    assert spilled_bytes(kernel, tmp_path) == 0
    if isinstance(architecture, int):
        assert accesses(kernel) == {16 if case.window == "float32" else 8}


def test_windows_whose_channels_are_apart_are_accessed_one_by_one() -> None:
    assert accesses(compiled(replace(SHAPE, layout="channels_first"), 90)) == {2}
    assert accesses(compiled(replace(SHAPE, channels=1283), 90)) == {2}


def rolled_back(inputs: Inputs) -> object:
    return inputs.step(slots=Slots(inputs.slots, accepted=torch.zeros_like(inputs.slots)))


def in_a_ring(inputs: Inputs) -> object:
    return inputs.step(positions=inputs.slots + 0)


def with_snapshots(inputs: Inputs) -> object:
    return inputs.step(snapshots=torch.zeros(2, 4, 1280, 3, dtype=torch.bfloat16))


def with_a_tree(inputs: Inputs) -> object:
    return inputs.step(slots=inputs.at(parents=torch.tensor([[-1, 0, 0, 1]] * 2)), update=False)


def with_kept_padding(inputs: Inputs) -> object:
    return inputs.step(slots=inputs.at(padding="keep"))


def with_slots_for_tokens(inputs: Inputs) -> object:
    return inputs.step(slots=inputs.at(write=torch.zeros(2, 4, dtype=torch.int64)))


FORMS: dict[str, tuple[ConvCase, Call]] = {
    "longer windows": (replace(SHAPE, extra=2), plain),
    "rolled back": (replace(SEVERAL, extra=4), rolled_back),
    "a ring": (replace(SEVERAL, extra=1), in_a_ring),
    "snapshots": (SEVERAL, with_snapshots),
    "a tree": (SEVERAL, with_a_tree),
    "a slot for every token": (SEVERAL, with_slots_for_tokens),
    "kept padding": (SEVERAL, with_kept_padding),
    "width 6, no bias": (replace(SHAPE, width=6, bias=False, activation=None), plain),
    "width 3": (replace(SEVERAL, width=3, parameters="float32"), plain),
}


@pytest.mark.parametrize(
    ("architecture", "form"),
    [(90, form) for form in FORMS] + [(("gfx942", 80)[i % 2], form) for i, form in enumerate(FORMS)],
)
def test_every_form_compiles_without_spills(architecture: int | str, form: str, tmp_path: Path) -> None:
    case, call = FORMS[form]
    assert spilled_bytes(compiled(case, architecture, call), tmp_path) == 0


STATES = Case(2, 16, 1, 64, 128, x="bfloat16", bc="bfloat16", dt="bfloat16", slots=4)
WAIT, LET = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


@pytest.mark.parametrize("architecture", [80, 89, 90, 100, 120])
def test_only_gpus_that_can_let_the_next_kernel_start_early(architecture: int) -> None:
    can = architecture >= 90
    for case in (SHAPE, STATES) if architecture in (89, 90) else (SHAPE,):
        ordinary, starts_early = (compiled(case, architecture, call).asm["ptx"] for call in (plain, early))
        assert WAIT not in ordinary
        assert (WAIT in starts_early) == can
        assert (LET in ordinary) == (LET in starts_early) == (can and case is SHAPE)


TOKENS = re.compile(r"\bld\.global(?:\.v\d)?\.b16\b|\bld\.global\.v[24]\.b32\b")  # 16-bit values; states have a hint
WIDE_PARAMETERS = re.compile(r"\bld\.global\.v4\.b32\b")  # four of them in float32


@pytest.mark.parametrize(
    "case",
    [
        replace(SHAPE, parameters="float32"),
        replace(SEVERAL, parameters="float32"),
        STATES,
        replace(STATES, format="int8"),
        replace(STATES, tokens=4),
    ],
    ids=str,
)
def test_states_are_on_their_way_before_a_kernel_that_starts_early_waits(case: ConvCase | Case) -> None:
    """All loads of state come before the wait, all of tokens behind it; and a convolution lets the next one start only
    when all before it has ended."""
    ptx = compiled(case, 90, early).asm["ptx"]
    wait = ptx.index(WAIT)
    states = [found.start() for found in re.finditer(r"\bld\.global\.L1::evict_first", ptx)]
    assert states
    assert max(states) < wait
    of_parameters = WIDE_PARAMETERS.findall(ptx[:wait]) if isinstance(case, ConvCase) else []
    assert TOKENS.findall(ptx[:wait]) == of_parameters
    assert TOKENS.findall(ptx[wait:])
    stores = [found.start() for found in re.finditer(r"\bst\.global(?!\.b64)", ptx)]  # all but those of the fault flag
    assert min(stores) > wait
    assert LET not in ptx or ptx.index(LET) > wait


def table_configs() -> list[tuple[ChannelProblem, Any]]:
    """Every entry of the H200's table for convolutions."""
    modes = configs_by_mode(H200_TABLE).items()
    found = [(mode, config) for mode, configs in modes if isinstance(mode, ChannelProblem) for config in configs]
    assert found
    return found


@pytest.mark.parametrize(("problem", "config"), table_configs(), ids=str)
def test_no_entry_of_the_table_spills(problem: ChannelProblem, config: Any, tmp_path: Path) -> None:
    tokens = 6 if problem.several_tokens else 0
    case = ConvCase(2, problem.rows, problem.cols, tokens=tokens, x="bfloat16", parameters="bfloat16", slots=4)
    with collected(90) as launches, override(config):
        make_inputs(case, CPU).step()
    assert spilled_bytes(compile_launch(launches[0], 90), tmp_path) == 0
