"""Pools and activations of more than 2^31 elements: every op finds its way in 64 bits."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flashstate.proof import CASES, AnyCase, Case, make_inputs, slotted
from flashstate.proof.laws import require

CUDA = torch.device("cuda")
SLOT = (1 << 30) + 64  # elements between slots: three of them reach past 2^31
EVERY_FORM = [form for cases in CASES.values() for case in cases.quick for form in replace(case, slots=3).forms]
DENSE = [case for case in EVERY_FORM if not case.packed and case.batch > 1]
LONG = [replace(case, tokens=max(case.tokens, 3)) for case in DENSE if case.tokens > 1]

pytestmark = [pytest.mark.gpu, pytest.mark.large, pytest.mark.usefixtures("room_on_the_gpu")]


def far_apart(tensor: Tensor, stride: int) -> Tensor:
    """These values with that stride on the first axis."""
    memory = torch.zeros((len(tensor) - 1) * stride + tensor[0].numel(), dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(tensor.shape, (stride, *tensor.stride()[1:])).copy_(tensor)


@pytest.mark.parametrize("case", EVERY_FORM, ids=str)
def test_pools_past_2_31_elements_work(case: AnyCase) -> None:
    """The slots of all that a pool has are as far from each other as those of the largest."""
    small = make_inputs(replace(case, batch=min(case.batch, 3)), CUDA)
    far = {name: far_apart(tensor, SLOT) for name, tensor in slotted(small.state).items() if tensor.dim() > 1}
    large = replace(small, state=replace(small.state, **far))
    require.equal_bytes("output", large.step(), small.step())
    require.equal_states("the pool", large.state, small.state)


@pytest.mark.parametrize(
    ("case", "axis"), [*((case, 0) for case in DENSE), *((case, 1) for case in LONG), (Case(2), 1)], ids=str
)
def test_activations_past_2_31_elements_work(case: AnyCase, axis: int) -> None:
    """Rows, tokens, or of the last case heads, are far from each other."""
    inputs = make_inputs(replace(case, batch=2), CUDA)
    want, stride = inputs.fresh().step(), SLOT if axis else 2 * SLOT
    for name, tensor in inputs.activations.items():
        if case.tokens or axis == 0 or name == "x":
            far = far_apart(tensor.movedim(axis, 0).contiguous(), stride).movedim(0, axis)
            require.equal_bytes(f"output with {name} far apart", inputs.fresh().step(**{name: far}), want)
