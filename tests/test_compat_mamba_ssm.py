"""flashstate.compat.mamba_ssm keeps the contract of mamba_ssm's selective_state_update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models_of_peers
import pytest
import torch
from peer_calls import (
    CPU,
    HEADS,
    LAYOUTS,
    REFERENCE_AND_GPU,
    Implementation,
    compare,
    copied,
    laid_out,
    make_arguments,
    require_equal_results,
    signature_of,
)
from torch import Tensor

from flashstate.compat.mamba_ssm import selective_state_update
from flashstate.proof import interpreted

FORMS: dict[str, dict[str, Any]] = {
    "headless, per channel": {"heads": None, "tied": False},
    "headless, tied": {"heads": None, "x": torch.float16},
    "per channel": {"tied": False, "x": torch.float16},
    "tied": {"state": torch.float16},
    "nothing optional": {"optional": False, "state": torch.bfloat16},
    "no softplus": {"dt_softplus": False, "weights": torch.float16},
    "no softplus, per channel": {"dt_softplus": False, "tied": False},
}


def slots(device: torch.device, *numbers: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device=device)


@REFERENCE_AND_GPU
@pytest.mark.parametrize("indexed", [True, False], ids=["indexed", "in order"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_arguments_gives_what_the_contract_says(
    form: str, indexed: bool, device: torch.device, implementation: Implementation
) -> None:
    arguments = make_arguments(device, **FORMS[form])
    arguments["state_batch_indices"] = slots(device, 5, 0, 9) if indexed else None
    compare(selective_state_update, models_of_peers.mamba_ssm, arguments, implementation)


@pytest.mark.interpreted
@pytest.mark.parametrize("form", ["headless, per channel", "tied"])
def test_kernels_in_the_interpreter_do_the_same(form: str) -> None:
    arguments = {**make_arguments(CPU, **FORMS[form]), "state_batch_indices": slots(CPU, 5, -1, 9)}
    compare(selective_state_update, models_of_peers.mamba_ssm, arguments, interpreted)


@REFERENCE_AND_GPU
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bfloat16_activations_on_every_state(
    state: torch.dtype, device: torch.device, implementation: Implementation
) -> None:
    arguments = make_arguments(device, state=state, x=torch.bfloat16, weights=torch.bfloat16)
    arguments["state_batch_indices"] = slots(device, 5, 0, 9, dtype=torch.int64)
    compare(selective_state_update, models_of_peers.mamba_ssm, arguments, implementation)


@REFERENCE_AND_GPU
def test_rows_with_a_negative_index_give_zero_and_touch_nothing(
    device: torch.device, implementation: Implementation
) -> None:
    arguments = make_arguments(device, (4,), state=torch.bfloat16)
    arguments["state_batch_indices"] = slots(device, 5, -1, 9, -7)
    arguments["x"][[1, 3]] = torch.nan
    compare(selective_state_update, models_of_peers.mamba_ssm, arguments, implementation)


@REFERENCE_AND_GPU
@LAYOUTS
@pytest.mark.parametrize("heads", [HEADS, None])
def test_strides_change_no_byte(
    heads: int | None, layout: Callable[[Tensor], Tensor], device: torch.device, implementation: Implementation
) -> None:
    arguments = make_arguments(device, heads=heads, tied=False)
    arguments["state_batch_indices"] = slots(device, 5, 0, 9)
    require_equal_results(selective_state_update, copied(arguments), laid_out(arguments, layout), implementation)


def test_a_headless_call_takes_tensors_with_a_head_axis_too() -> None:
    arguments = make_arguments(CPU, heads=None)
    headed = {**copied(arguments), "state": arguments["state"][:, None].clone(), "D": arguments["D"][None]}
    y = selective_state_update(**arguments)
    assert torch.equal(y, selective_state_update(**headed))
    assert torch.equal(arguments["state"], headed["state"][:, 0])


def test_the_signature_is_mamba_ssms() -> None:
    assert signature_of(selective_state_update) == (
        "state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None"
    )
