"""Pools, activations, snapshots and folds of more than 2^31 elements: every op finds its way in 64 bits."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from flashstate.proof import CASES, AnyCase, Case, make_inputs, slotted
from flashstate.proof.laws import require

CUDA = torch.device("cuda")
BETWEEN = 4 * ((1 << 30) + 64)  # bytes from slot to slot: the third is 2^31 elements of 4 bytes behind the first
OWN = 16 << 20  # bytes of each tensor's part of a slot
ROOM = 2 * BETWEEN + 16 * OWN
EVERY_FORM = [
    form for cases in CASES.values() for case in cases.quick for form in replace(case, batch=3, slots=3).forms
]
LONG = [replace(case, tokens=3) for case in EVERY_FORM if case.tokens > 1 and not case.packed]
SNAPPED = [(case, 0) for case in EVERY_FORM if case.op.between_tokens]
SNAPPED += [(case, 1) for case in LONG if case.op.between_tokens]
FOLDED = [case for case in EVERY_FORM if case.op.rings and case == case.forms[0]]

FarApart = Callable[..., Tensor]

pytestmark = [pytest.mark.gpu, pytest.mark.large]


@pytest.fixture(scope="module")
def memory() -> Tensor:
    free, _ = torch.cuda.mem_get_info()
    if free < ROOM:
        pytest.skip(f"needs {ROOM / (1 << 30):.1f} GiB of GPU memory, {free / (1 << 30):.1f} are free")
    return torch.empty(ROOM, dtype=torch.uint8, device=CUDA)


@pytest.fixture
def far_apart(memory: Tensor) -> FarApart:
    """Copy tensors so that their slots, rows or tokens, on the axis given, are far from each other. All of them share
    one memory, as layers share pages."""
    first = count(0, OWN)

    def copy(tensor: Tensor, axis: int = 0) -> Tensor:
        strides = list(tensor.stride())
        strides[axis] = BETWEEN // tensor.element_size()
        return memory[next(first) :].view(tensor.dtype).as_strided(tensor.shape, strides).copy_(tensor)

    return copy


def slots_apart(stored: Any, far_apart: FarApart, axis: int = 0) -> Any:
    """A pool or snapshots whose entries are far from each other."""
    tensors: Mapping[str, Tensor] = slotted(stored)
    return replace(stored, **{name: far_apart(tensor, axis) for name, tensor in tensors.items() if tensor.dim() > 1})


@pytest.mark.parametrize(
    ("case", "axis"),
    [*((case, 0) for case in EVERY_FORM), *((case, 1) for case in LONG), (Case(3, 3, 1, 5, 20, slots=3), 1)],
    ids=str,
)
def test_pools_and_activations_past_2_31_elements_work(case: AnyCase, axis: int, far_apart: FarApart) -> None:
    """Rows, tokens, or of the last case heads, are far from each other; of packed calls only slots."""
    small = make_inputs(case, CUDA)
    large, more = replace(small, state=slots_apart(small.state, far_apart)), {}
    y = small.step()
    if not case.packed:
        large = large.changed(lambda tensor: far_apart(tensor, axis))
        more["out"] = far_apart(torch.empty_like(y), axis)
    require.alike(" far apart", large, large.step(**more), small, y)


@pytest.mark.parametrize(("case", "axis"), SNAPPED, ids=str)
def test_snapshots_past_2_31_elements_work(case: AnyCase, axis: int, far_apart: FarApart) -> None:
    inputs = make_inputs(case, CUDA)
    near = case.snapshots(3, case.tokens or 1, case.format, case.rounding, CUDA)
    far = slots_apart(near, far_apart, axis)
    for taken in (near, far):
        inputs.step(snapshots=taken, update=False)
    require.equal_states("snapshots", far, near)


@pytest.mark.parametrize("case", FOLDED, ids=str)
def test_folds_past_2_31_elements_work(case: Any, far_apart: FarApart) -> None:
    small = case.make_inputs(CUDA)
    large = replace(small, state=slots_apart(small.state, far_apart))
    near = slots_apart(small.state.state, lambda tensor, axis: torch.zeros_like(tensor))
    far = slots_apart(near, far_apart)
    for inputs, into in ((small, near), (large, far)):
        inputs.fold(into=into)
        inputs.fold()
    require.equal_states("states", far, near)
    require.equal_states("the pool", large.state, small.state)
