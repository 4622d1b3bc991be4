"""Outputs of another dtype than the inputs: float32 results, rounded once."""

from dataclasses import replace

import pytest
import torch
from calls import DELTA, MAMBA3, REPLAY, SMALL, shaped
from torch import Tensor

from flashstate.launch import uses_kernels
from flashstate.proof import AnyCase, make_inputs

TINY = {"batch": 1, "heads": 2, "groups": 1, "rows": 3, "cols": 8, "channels": 5, "slots": 2}
CASES: dict[str, AnyCase] = {
    **{name: shaped(case, **TINY) for name, case in SMALL.items()},
    "gated_delta_step at once": shaped(replace(DELTA, tokens=2, exact=False), **TINY),
    "mamba3_step of rank 4": shaped(replace(MAMBA3, angles=2), **TINY),
    "mamba2_replay of several tokens": shaped(replace(REPLAY, tokens=2), **TINY),
}


def rounded(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 results in another dtype. Triton's interpreter cuts bfloat16 off."""
    if dtype is torch.bfloat16 and exact.device.type == "cpu" and uses_kernels(exact.device):
        exact = (exact.view(torch.int32) & -(1 << 16)).view(torch.float32)
    return exact.to(dtype)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_output_of_any_dtype_is_that_of_float32_rounded_once(case: AnyCase, device: torch.device) -> None:
    inputs = make_inputs(replace(case, x="bfloat16"), device)
    exact = torch.empty_like(inputs.main, dtype=torch.float32)
    states = inputs.fresh()
    assert states.step(out=exact) is exact
    for out in (None, torch.empty_like(exact, dtype=torch.float16)):
        run = inputs.fresh()
        y = run.step(out=out)
        assert y.dtype == (inputs.main.dtype if out is None else out.dtype)
        assert torch.equal(y, rounded(exact, y.dtype))
        assert torch.equal(run.state.data, states.state.data)
