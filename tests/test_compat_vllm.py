"""flashstate.compat.vllm keeps the contract of vLLM's selective_state_update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models_of_peers
import pytest
import torch
from models_of_peers import Arguments
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
    packed,
    require_equal_results,
    signature_of,
)
from torch import Tensor

from flashstate.compat.vllm import selective_state_update
from flashstate.proof import interpreted

READ, WRITE = [[5, 1, 2], [9, 3, 4], [8, 6, 7]], [[10, 11, 12], [3, 9, 13], [8, 1, 6]]
LENGTHS = [3, 2, 1]


def tables(device: torch.device, dtype: torch.dtype = torch.int32, **numbers: Any) -> Arguments:
    return {name: torch.tensor(entries, dtype=dtype, device=device) for name, entries in numbers.items()}


def first(table: list[list[int]]) -> list[int]:
    return [row[0] for row in table]


MODES: dict[str, tuple[list[int] | None, dict[str, Any]]] = {
    "in order": (None, {}),
    "in place": (None, {"state_batch_indices": first(READ)}),
    "elsewhere": (None, {"state_batch_indices": first(READ), "dst_state_batch_indices": first(WRITE)}),
    "first columns": (None, {"state_batch_indices": READ, "dst_state_batch_indices": WRITE}),
    "one accepted token": (None, {"state_batch_indices": READ, "num_accepted_tokens": [3, 1, 2]}),
    "packed in order": (LENGTHS, {}),
    "packed in place": (LENGTHS, {"state_batch_indices": first(READ)}),
    "packed, first columns": (LENGTHS, {"state_batch_indices": READ, "dst_state_batch_indices": WRITE}),
    "accepted tokens in place": (LENGTHS, {"state_batch_indices": READ, "num_accepted_tokens": [1, 3, 2]}),
    "accepted tokens elsewhere": (
        LENGTHS,
        {"state_batch_indices": READ, "dst_state_batch_indices": WRITE, "num_accepted_tokens": [2, 1, 1]},
    ),
    "a row without tokens": ([2, 0, 3], {"state_batch_indices": READ, "num_accepted_tokens": [1, 2, 3]}),
    "more rows than the batch has": (
        LENGTHS[:2],
        {"state_batch_indices": READ, "dst_state_batch_indices": WRITE, "num_accepted_tokens": [2, 1]},
    ),
    "tokens of no row": ([3, 1], {"state_batch_indices": first(READ)[:2]}),
}


def arguments_of(mode: str, device: torch.device, **options: Any) -> Arguments:
    lengths, numbers = MODES[mode]
    unused = 2 if mode == "tokens of no row" else 0
    made = make_arguments(device, **options) if lengths is None else packed(device, lengths, unused, **options)
    return {**made, **tables(device, **numbers)}


@REFERENCE_AND_GPU
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_what_the_contract_says(
    mode: str, device: torch.device, implementation: Implementation
) -> None:
    compare(selective_state_update, models_of_peers.vllm, arguments_of(mode, device), implementation)


@pytest.mark.interpreted
@pytest.mark.parametrize("mode", ["elsewhere", "packed, first columns", "accepted tokens elsewhere"])
def test_kernels_in_the_interpreter_do_the_same(mode: str) -> None:
    arguments = {**arguments_of(mode, CPU, state=torch.float16), "enable_stochastic_rounding": True}
    arguments["state_batch_indices"][1] = 0
    compare(selective_state_update, models_of_peers.vllm, arguments, interpreted)


FORMS: dict[str, dict[str, Any]] = {
    "headless, per channel": {"heads": None, "tied": False},
    "per channel": {"tied": False, "dt_softplus": False},
    "no z": {"optional": False},
    "float16": {"state": torch.float16, "x": torch.float16, "weights": torch.float16},
    "bfloat16": {"state": torch.bfloat16, "x": torch.bfloat16, "weights": torch.bfloat16},
}


@REFERENCE_AND_GPU
@pytest.mark.parametrize("mode", ["in place", "accepted tokens elsewhere"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_arguments_gives_what_the_contract_says(
    form: str, mode: str, device: torch.device, implementation: Implementation
) -> None:
    compare(selective_state_update, models_of_peers.vllm, arguments_of(mode, device, **FORMS[form]), implementation)


@REFERENCE_AND_GPU
@pytest.mark.parametrize("null", [0, 9])
@pytest.mark.parametrize("mode", ["in place", "elsewhere", "packed in place", "accepted tokens elsewhere"])
def test_the_null_block_is_neither_read_nor_written_and_its_rows_give_zero(
    mode: str, null: int, device: torch.device, implementation: Implementation
) -> None:
    arguments = arguments_of(mode, device)
    arguments["null_block_id"] = null
    arguments["state_batch_indices"][1] = null  # where it is not already
    if "dst_state_batch_indices" in arguments:
        arguments["dst_state_batch_indices"][0, ...] = null
    arguments["state"][null] = torch.nan
    arguments["x"][1 if arguments.get("cu_seqlens") is None else 3] = torch.nan
    compare(selective_state_update, models_of_peers.vllm, arguments, implementation)


@REFERENCE_AND_GPU
def test_accepted_counts_out_of_range_are_padding(device: torch.device, implementation: Implementation) -> None:
    arguments = arguments_of("accepted tokens elsewhere", device)
    arguments["num_accepted_tokens"] = torch.tensor([0, 4, 2], dtype=torch.int32, device=device)
    y = compare(selective_state_update, models_of_peers.vllm, arguments, implementation)
    assert not y[:5].any()
    assert y[5].any()


@REFERENCE_AND_GPU
@LAYOUTS
@pytest.mark.parametrize("mode", ["in place", "accepted tokens in place"])
def test_strides_change_no_byte(
    mode: str, layout: Callable[[Tensor], Tensor], device: torch.device, implementation: Implementation
) -> None:
    arguments = arguments_of(mode, device, tied=False)
    other = laid_out(arguments, layout)
    other["state_batch_indices"] = layout(arguments["state_batch_indices"])
    require_equal_results(selective_state_update, copied(arguments), other, implementation)


@REFERENCE_AND_GPU
@pytest.mark.parametrize("heads", [HEADS, None])
def test_out_is_filled_and_returned(heads: int | None, device: torch.device, implementation: Implementation) -> None:
    arguments = make_arguments(device, heads=heads)
    again = {**copied(arguments), "out": torch.full_like(arguments["x"], torch.nan)}
    with implementation():
        y = selective_state_update(**again)
        assert y is again["out"]
        assert torch.equal(y, selective_state_update(**arguments))


@REFERENCE_AND_GPU
@pytest.mark.parametrize("rounds", [0, 5])
@pytest.mark.parametrize("mode", ["in place", "packed in place", "accepted tokens elsewhere"])
def test_stochastic_rounding_is_within_budget_in_every_mode(
    mode: str, rounds: int, device: torch.device, implementation: Implementation
) -> None:
    arguments = arguments_of(mode, device, state=torch.float16)
    options = {"enable_stochastic_rounding": True, "cache_philox_rounds": rounds}
    compare(selective_state_update, models_of_peers.vllm, {**arguments, **options}, implementation)


@REFERENCE_AND_GPU
@pytest.mark.parametrize("mode", ["in place", "packed in place", "accepted tokens elsewhere"])
def test_stochastic_rounding_draws_new_bits_at_every_call_and_other_bits_in_every_slot(
    mode: str, device: torch.device, implementation: Implementation
) -> None:
    arguments = arguments_of(mode, device, state=torch.float16)
    arguments["state"][:] = arguments["state"][5]
    for name in ("x", "dt", "B", "C", "z"):
        arguments[name] = arguments[name][:1].expand(arguments[name].shape).clone()
    states = []
    for seed in (1, 1, None):
        run = copied(arguments)
        if seed is not None:
            torch.manual_seed(seed)
        with implementation():
            selective_state_update(**run, enable_stochastic_rounding=True)
        states.append(run["state"])
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[1], states[2])
    written = arguments.get("dst_state_batch_indices", arguments["state_batch_indices"])
    one, other = (states[0][int(written[row].flatten()[0])] for row in (0, 1))
    assert not torch.equal(one, other)


def test_ten_rounds_are_the_default_and_a_blackwell_changes_nothing() -> None:
    arguments = {**make_arguments(CPU, state=torch.float16), "enable_stochastic_rounding": True}
    runs = []
    for options in ({}, {"cache_philox_rounds": 10}, {"is_blackwell": True}, {"cache_philox_rounds": 9}):
        run = copied(arguments)
        torch.manual_seed(3)
        selective_state_update(**run, **options)
        runs.append(run["state"])
    assert [torch.equal(runs[0], run) for run in runs] == [True, True, True, False]


def test_the_signature_is_vllms() -> None:
    assert signature_of(selective_state_update) == (
        "state, x, dt, A, B, C, D, dt_bias, z=None, dt_softplus=False, state_batch_indices=None, "
        "dst_state_batch_indices=None, null_block_id=0, out=None, num_accepted_tokens=None, cu_seqlens=None, "
        "is_blackwell=False, enable_stochastic_rounding=False, cache_philox_rounds=0"
    )
