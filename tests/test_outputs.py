"""Outputs of another dtype than the inputs: float32 results, rounded once."""

from dataclasses import replace

import pytest
import torch
from calls import DELTA, FORMS, MAMBA3, REPLAY, SMALL, shaped
from torch import Tensor

from flashstate import State
from flashstate.launch import uses_kernels
from flashstate.launch.call import tensors_in
from flashstate.proof import AnyCase, Case, make_inputs

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


@pytest.mark.parametrize("name", FORMS)
def test_an_output_in_the_memory_of_what_holds_states_is_refused_before_anything_is_written(name: str) -> None:
    form = FORMS[name]["a plan" if "replay" in name else "plain"]
    op, arguments = form.op, form.arguments
    out = arguments.pop("out")
    held = {one: value for one, value in arguments.items() if one in op.writes or one not in op.tensors}
    for part, tensor in tensors_in(held):
        memory = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,)).view(
            torch.uint8
        )
        before, needed = memory.clone(), out.numel() * out.element_size()
        if len(memory) >= needed and memory.data_ptr() % out.element_size() == 0:
            with pytest.raises(ValueError, match=f"^out must not share memory with {part}"):
                op.function(**arguments, out=memory[len(memory) - needed :].view(out.dtype).reshape(out.shape))
            assert torch.equal(memory, before)


@pytest.mark.parametrize("axis", range(3), ids=("rows", "tokens", "heads"))
def test_an_output_may_take_turns_with_slots_in_pages(axis: int) -> None:
    near = make_inputs(Case(2, 2, 1, 3, 8, tokens=2, slots=4), torch.device("cpu"))
    pages, strides = torch.zeros(4, 100), [12, 6, 3, 1]
    strides[axis] = pages.stride(0)
    far = replace(near, state=State(pages[:, :48].view(4, 2, 3, 8).copy_(near.state.data)))
    inside, behind = (pages.view(-1)[first:].as_strided((2, 2, 2, 3), strides) for first in (47, 48))
    with pytest.raises(ValueError, match=r"^out must not share memory with state\.data"):
        far.step(out=inside)
    assert torch.equal(far.step(out=behind), near.step())
    assert torch.equal(far.state.data, near.state.data)
    far.of_rows(torch.tensor([0])).step(out=behind[:1])


@pytest.mark.parametrize("name", FORMS)
def test_an_activation_that_requires_grad_is_refused_with_grad_mode_on(name: str) -> None:
    form = FORMS[name]["plain"]
    op, arguments = form.op, form.arguments
    arguments = {**arguments, op.main: arguments[op.main].clone().requires_grad_()}
    with pytest.raises(ValueError, match=rf"^{op.main} must not require grad, .* inside torch.no_grad\(\)"):
        op.function(**arguments)
    with torch.no_grad():
        op.function(**arguments)
