"""flashstate.compat.flashinfer keeps the contract of FlashInfer's selective_state_update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models_of_peers
import pytest
import torch
from models_of_peers import Arguments
from peer_calls import (
    CPU,
    DIM,
    HEADS,
    LAYOUTS,
    REFERENCE_AND_GPU,
    SLOTS,
    Implementation,
    compare,
    copied,
    equal_bytes,
    laid_out,
    make_arguments,
    packed,
    require_equal_results,
    signature_of,
)
from torch import Tensor

from flashstate.compat.flashinfer import selective_state_update
from flashstate.proof import interpreted

READ, WRITE = [[5, 1, 2], [9, 3, 4], [8, 6, 7]], [[10, 11, 12], [3, 9, 13], [8, 1, 6]]
LENGTHS = [3, 1, 2]
ONE, SEVERAL, PACKED = "one token", "several tokens", "packed"
PER_TOKEN = "a slot for every token"


def numbers(device: torch.device, **entries: Any) -> Arguments:
    """Tables of indices, and counts, which have a dtype of their own."""
    return {
        name: torch.tensor(entry, dtype=torch.int64 if "accepted" in name else torch.int32, device=device)
        for name, entry in entries.items()
    }


def first(table: list[list[int]]) -> list[int]:
    return [row[0] for row in table]


def of_form(form: str, device: torch.device, **options: Any) -> Arguments:
    if form == PACKED:
        return {**packed(device, LENGTHS, unused=1, **options), "cache_steps": 3}
    return make_arguments(device, (3,) if form == ONE else (3, 3), **options)


def with_buffer(arguments: Arguments, rows: int = SLOTS, steps: int = 4) -> Arguments:
    """With a buffer for the state after every token, in the format of the state, filled with something."""
    state = arguments["state"]
    buffer = {"intermediate_states_buffer": state.new_ones(rows, steps, *state.shape[1:])}
    if "state_scale" in arguments:
        buffer["intermediate_state_scales"] = arguments["state_scale"].new_ones(rows, steps, *state.shape[1:-1])
    return {**arguments, **buffer}


IN_PLACE = {"state_batch_indices": first(READ)}
MODES: dict[str, dict[str, Any]] = {
    "in order": {},
    "in place": IN_PLACE,
    "first column": {"state_batch_indices": READ},
    "accepted": {"state_batch_indices": READ, "num_accepted_tokens": [2, 1, 3]},
    "elsewhere": {**IN_PLACE, "dst_state_batch_indices": first(WRITE)},
    PER_TOKEN: {**IN_PLACE, "dst_state_batch_indices": WRITE},
    "some tokens skipped": {**IN_PLACE, "dst_state_batch_indices": [[10, -1, 12], [-1, -1, 3], [8, 1, -1]]},
    "accepted, a slot for every token": {
        "state_batch_indices": READ, "dst_state_batch_indices": READ, "num_accepted_tokens": [2, 1, 3],
    },
    "out of order, elsewhere": {"dst_state_batch_indices": first(WRITE)},
}  # fmt: skip
FORMS = pytest.mark.parametrize("form", [ONE, SEVERAL, PACKED])


@REFERENCE_AND_GPU
@FORMS
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_what_the_contract_says(
    mode: str, form: str, device: torch.device, implementation: Implementation
) -> None:
    arguments = {**of_form(form, device), **numbers(device, **MODES[mode])}
    compare(selective_state_update, models_of_peers.flashinfer, arguments, implementation)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("mode", "form", "state"),
    [
        ("elsewhere", ONE, torch.float16),
        (PER_TOKEN, SEVERAL, torch.int16),
        ("accepted, a slot for every token", PACKED, torch.float32),
        ("buffer", PACKED, torch.int16),
    ],
)
def test_kernels_in_the_interpreter_do_the_same(mode: str, form: str, state: torch.dtype) -> None:
    arguments = {**of_form(form, CPU, state=state), **numbers(CPU, **MODES.get(mode, IN_PLACE))}
    arguments = with_buffer(arguments) if mode == "buffer" else arguments
    arguments["state_batch_indices"][1] = -1
    compare(selective_state_update, models_of_peers.flashinfer, arguments, interpreted)


@REFERENCE_AND_GPU
@FORMS
@pytest.mark.parametrize("mode", ["in order", "in place", "accepted", "rows of their own"])
def test_with_a_buffer_every_state_goes_there_and_the_pool_stays(
    mode: str, form: str, device: torch.device, implementation: Implementation
) -> None:
    own = {**IN_PLACE, "intermediate_state_indices": [4, 0, 2]}
    arguments = {**with_buffer(of_form(form, device)), **numbers(device, **(MODES | {"rows of their own": own})[mode])}
    compare(selective_state_update, models_of_peers.flashinfer, arguments, implementation)


@REFERENCE_AND_GPU
@FORMS
@pytest.mark.parametrize("buffer", [True, False], ids=["a buffer", "no buffer"])
def test_a_disabled_update_gives_the_output_and_leaves_the_pool(
    buffer: bool, form: str, device: torch.device, implementation: Implementation
) -> None:
    arguments = {**of_form(form, device), **numbers(device, **IN_PLACE), "disable_state_update": True}
    if not buffer:
        arguments |= numbers(device, dst_state_batch_indices=WRITE)
    arguments = with_buffer(arguments) if buffer else arguments
    compare(selective_state_update, models_of_peers.flashinfer, arguments, implementation)


OPTIONS: dict[str, dict[str, Any]] = {
    "per channel": {"tied": False},
    "nothing optional": {"optional": False},
    "no softplus": {"dt_softplus": False},
    "float16": {"state": torch.float16, "x": torch.float16, "weights": torch.float16},
    "bfloat16": {"state": torch.bfloat16, "x": torch.bfloat16},
    "bfloat16 weights": {"x": torch.bfloat16, "weights": torch.bfloat16},
    "int16": {"state": torch.int16, "x": torch.bfloat16},
}


@REFERENCE_AND_GPU
@FORMS
@pytest.mark.parametrize("mode", ["in place", PER_TOKEN, "buffer"])
@pytest.mark.parametrize("options", OPTIONS)
def test_every_form_of_the_arguments_gives_what_the_contract_says(
    options: str, mode: str, form: str, device: torch.device, implementation: Implementation
) -> None:
    arguments = of_form(form, device, **OPTIONS[options])
    arguments |= numbers(device, **MODES.get(mode, IN_PLACE))
    arguments = with_buffer(arguments) if mode == "buffer" else arguments
    compare(selective_state_update, models_of_peers.flashinfer, arguments, implementation)


@REFERENCE_AND_GPU
@pytest.mark.parametrize("mode", ["in place", "buffer"])
def test_scaled_states_have_a_scale_for_every_row(
    mode: str, device: torch.device, implementation: Implementation
) -> None:
    arguments = {**of_form(SEVERAL, device, state=torch.int16), **numbers(device, **IN_PLACE)}
    arguments = with_buffer(arguments) if mode == "buffer" else arguments
    again = copied(arguments)
    compare(selective_state_update, models_of_peers.flashinfer, arguments, implementation)
    scale = again["state_scale"]
    again["state_scale"] = scale[..., None]
    with implementation():
        selective_state_update(**again)
    assert equal_bytes(scale, arguments["state_scale"])
    assert equal_bytes(again["state"], arguments["state"])


@REFERENCE_AND_GPU
@FORMS
@pytest.mark.parametrize(("mode", "pad"), [("in place", -1), ("elsewhere", 9), ("buffer", SLOTS + 5), (PER_TOKEN, 9)])
def test_padding_rows_give_what_a_zero_state_gives_and_store_nothing(
    mode: str, pad: int, form: str, device: torch.device, implementation: Implementation
) -> None:
    state = torch.int16 if mode == "in place" else torch.float32
    arguments = {**of_form(form, device, state=state), **numbers(device, **MODES.get(mode, IN_PLACE))}
    arguments = with_buffer(arguments) if mode == "buffer" else arguments
    arguments |= {"pad_slot_id": pad}
    arguments["state_batch_indices"][1] = pad
    compare(selective_state_update, models_of_peers.flashinfer, arguments, implementation)


@REFERENCE_AND_GPU
def test_accepted_counts_out_of_range_are_padding(device: torch.device, implementation: Implementation) -> None:
    arguments = {**of_form(PACKED, device), **numbers(device, **MODES["accepted, a slot for every token"])}
    arguments |= numbers(device, num_accepted_tokens=[0, 4, 2])
    compare(selective_state_update, models_of_peers.flashinfer, arguments, implementation)


@REFERENCE_AND_GPU
def test_one_token_may_lack_its_axis_and_one_head_too(device: torch.device, implementation: Implementation) -> None:
    arguments = {**make_arguments(device, heads=None), **numbers(device, **IN_PLACE)}
    compare(selective_state_update, models_of_peers.flashinfer, copied(arguments), implementation)
    compare(selective_state_update, models_of_peers.flashinfer, {**arguments, "cache_steps": 1}, implementation)


@REFERENCE_AND_GPU
@FORMS
@LAYOUTS
def test_strides_change_no_byte(
    layout: Callable[[Tensor], Tensor], form: str, device: torch.device, implementation: Implementation
) -> None:
    arguments = {**of_form(form, device, tied=False), **numbers(device, **MODES[PER_TOKEN])}
    other = laid_out(arguments, layout)
    other |= {name: layout(arguments[name]) for name in ("state_batch_indices", "dst_state_batch_indices")}
    require_equal_results(selective_state_update, copied(arguments), other, implementation)


PER_ROW = ("x", "dt", "B", "C", "z", "state_batch_indices")


@REFERENCE_AND_GPU
@pytest.mark.parametrize("state", [torch.float32, torch.int16], ids=str)
def test_a_row_alone_gives_what_it_gives_in_a_batch(
    state: torch.dtype, device: torch.device, implementation: Implementation
) -> None:
    arguments = {**of_form(SEVERAL, device, state=state), **numbers(device, **IN_PLACE)}
    alone = {name: t[1:2] if name in PER_ROW else t for name, t in copied(arguments).items()}
    with implementation():
        y, y_alone = selective_state_update(**arguments), selective_state_update(**alone)
    assert equal_bytes(y[1:2], y_alone)
    slot = int(arguments["state_batch_indices"][1])
    assert equal_bytes(arguments["state"][slot], alone["state"][slot])


@REFERENCE_AND_GPU
def test_more_tokens_than_a_row_needs_change_nothing_about_those_before(
    device: torch.device, implementation: Implementation
) -> None:
    arguments = {**of_form(SEVERAL, device), **numbers(device, **MODES[PER_TOKEN])}
    fewer = {name: t[:, :2] if name in PER_ROW[:-1] else t for name, t in copied(arguments).items()}
    with implementation():
        y, y_fewer = selective_state_update(**arguments), selective_state_update(**fewer)
    assert equal_bytes(y[:, :2], y_fewer)
    for slot in arguments["dst_state_batch_indices"][:, :2].flatten().tolist():
        assert equal_bytes(arguments["state"][slot], fewer["state"][slot])


@REFERENCE_AND_GPU
@pytest.mark.parametrize("form", [ONE, PACKED])
def test_out_is_filled_and_returned(form: str, device: torch.device, implementation: Implementation) -> None:
    arguments = {**of_form(form, device), **numbers(device, **IN_PLACE)}
    again = {**copied(arguments), "out": torch.full_like(arguments["x"], torch.nan)}
    with implementation():
        y = selective_state_update(**again)
        assert y is again["out"]
        assert equal_bytes(y, selective_state_update(**arguments))


def stochastic(device: torch.device, form: str, mode: str = "in place") -> Arguments:
    arguments = {**of_form(form, device, state=torch.float16), **numbers(device, **MODES.get(mode, IN_PLACE))}
    arguments = with_buffer(arguments) if mode == "buffer" else arguments
    return {**arguments, "rand_seed": torch.tensor([12345], device=device)}


@REFERENCE_AND_GPU
@pytest.mark.parametrize("form", [ONE, PACKED])
@pytest.mark.parametrize("mode", ["in place", PER_TOKEN, "buffer"])
def test_stochastic_rounding_is_within_budget(
    mode: str, form: str, device: torch.device, implementation: Implementation
) -> None:
    compare(selective_state_update, models_of_peers.flashinfer, stochastic(device, form, mode), implementation)


@REFERENCE_AND_GPU
def test_random_bits_follow_from_the_seed_and_differ_from_slot_to_slot(
    device: torch.device, implementation: Implementation
) -> None:
    arguments = stochastic(device, ONE)
    arguments["state"][:] = arguments["state"][5]
    for name in ("x", "dt", "B", "C", "z"):
        arguments[name] = arguments[name][:1].expand(arguments[name].shape).clone()
    runs = []
    for change in ({}, {"rand_seed": torch.tensor(12345, device=device)}, {"rand_seed": arguments["rand_seed"] + 1}):
        run = {**copied(arguments), **change}
        with implementation():
            selective_state_update(**run)
        runs.append(run["state"])
    assert equal_bytes(runs[0], runs[1])
    assert not equal_bytes(runs[0], runs[2])
    assert not equal_bytes(runs[0][5], runs[0][9])


def test_torch_compile_makes_one_graph_of_a_call() -> None:
    arguments = stochastic(CPU, PACKED, "buffer")
    again = copied(arguments)
    y = torch.compile(selective_state_update, fullgraph=True, backend="aot_eager")(**arguments)
    assert equal_bytes(y, selective_state_update(**again))
    assert equal_bytes(arguments["intermediate_states_buffer"], again["intermediate_states_buffer"])


@pytest.mark.gpu
def test_a_cuda_graph_reads_the_seed_when_it_is_replayed() -> None:
    arguments = {**stochastic(torch.device("cuda"), ONE), "out": torch.empty(3, HEADS, DIM, device="cuda")}
    eager, start = copied(arguments), arguments["state"].clone()
    eager["rand_seed"] += 1
    selective_state_update(**eager)
    selective_state_update(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        selective_state_update(**arguments)
    arguments["state"].copy_(start)
    arguments["rand_seed"] += 1
    graph.replay()
    assert equal_bytes(arguments["state"], eager["state"])
    assert equal_bytes(arguments["out"], eager["out"])


@pytest.mark.parametrize("algorithm", ["auto", "simple", "vertical", "horizontal", "async_horizontal"])
@pytest.mark.parametrize("backend", ["auto", "flashinfer", "cake"])
def test_known_algorithms_and_backends_change_nothing(algorithm: str, backend: str) -> None:
    arguments = of_form(ONE, CPU)
    again = {**copied(arguments), "algorithm": algorithm, "backend": backend}
    assert equal_bytes(selective_state_update(**arguments), selective_state_update(**again))


def test_the_signature_is_flashinfers() -> None:
    assert signature_of(selective_state_update) == (
        "state, x, dt, A, B, C, D, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None, pad_slot_id=-1, "
        "state_scale=None, out=None, disable_state_update=False, intermediate_states_buffer=None, "
        "intermediate_state_indices=None, intermediate_state_scales=None, rand_seed=None, philox_rounds=10, "
        "cache_steps=0, algorithm='auto', dst_state_batch_indices=None, cu_seqlens=None, num_accepted_tokens=None, "
        "backend='auto'"
    )
