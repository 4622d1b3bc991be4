"""flashstate.compat.flashinfer keeps the contracts of FlashInfer's gated delta rules, for one token and for several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models_of_peers
import pytest
import torch
from launchers import Launcher, launcher, parameters
from models_of_peers import Arguments
from peer_calls import (
    CPU,
    LAYOUTS,
    REFERENCE_AND_GPU,
    SLOTS,
    Door,
    Implementation,
    compare_delta,
    copied,
    equal_bytes,
    in_pages,
    make_delta_arguments,
    require_equal_results,
    signature_of,
)
from torch import Tensor

from flashstate.compat.flashinfer import gated_delta_rule_decode_pretranspose, gated_delta_rule_mtp
from flashstate.launch.suspension import suspended
from flashstate.ops import gated_delta
from flashstate.proof import interpreted

__all__ = ["launcher"]  # a fixture
READ, WRITE = [12, 7, 9], [8, 13, 9]  # in the upper half of the pool
EVERY = [[10, 0, 1, 2, 3], [7, 4, 5, 11, 6], [13, 8, -1, -1, -1]]
SKIPPED = [12, -1, 9]
DECODE: dict[str, dict[str, Any]] = {
    "in order": {},
    "in place": {"initial_state_indices": READ},
    "elsewhere": {"initial_state_indices": READ, "output_state_indices": WRITE},
    "a row skipped": {"initial_state_indices": SKIPPED},
    "a row skipped, elsewhere": {"initial_state_indices": SKIPPED, "output_state_indices": WRITE},
    "a row not written": {"initial_state_indices": READ, "output_state_indices": [8, 13, -5]},
    "rows skipped and not written": {"initial_state_indices": SKIPPED, "output_state_indices": [-1, 13, 9]},
}
UPDATE = {"disable_state_update": False}
BUFFER = "intermediate_states_buffer"
MTP: dict[str, dict[str, Any]] = {
    "output alone": {"initial_state_indices": READ},
    "update disabled": {"initial_state_indices": READ, "disable_state_update": True, "output_state_indices": WRITE},
    "in place": {"initial_state_indices": READ, **UPDATE},
    "elsewhere": {"initial_state_indices": READ, "output_state_indices": WRITE, **UPDATE},
    "a row skipped": {"initial_state_indices": SKIPPED, "output_state_indices": WRITE, **UPDATE},
    "a row not written": {"initial_state_indices": READ, "output_state_indices": [8, -1, 9], **UPDATE},
    "a buffer": {"initial_state_indices": SKIPPED, BUFFER: (3, 0)},
    "a large buffer": {"initial_state_indices": READ, BUFFER: (5, 2), "disable_state_update": True},
    "a buffer, in place": {"initial_state_indices": SKIPPED, BUFFER: (4, 0), **UPDATE},
    "a buffer, elsewhere": {
        "initial_state_indices": READ, "output_state_indices": [8, -1, 9], BUFFER: (3, 1), **UPDATE,
    },
    "every token": {"initial_state_indices": READ, "ssm_state_indices": EVERY, **UPDATE},
    "every token, a row skipped": {"initial_state_indices": SKIPPED, "ssm_state_indices": EVERY, **UPDATE},
    "every token, unless disabled by default": {"initial_state_indices": READ, "ssm_state_indices": EVERY},
    "every token, unless disabled": {
        "initial_state_indices": READ, "ssm_state_indices": EVERY, "disable_state_update": True,
    },
    "every token, and nothing elsewhere": {
        "initial_state_indices": READ, "ssm_state_indices": EVERY, "output_state_indices": [11, 6, 12], **UPDATE,
    },
}  # fmt: skip
TOKENS = (1, 2, 3, 4, 5)
OUTPUTS = pytest.mark.parametrize("given", [True, False], ids=["output given", "no output given"])


def of_mode(
    door: Door, mode: str, device: torch.device, tokens: int = 1, indices: torch.dtype = torch.int32, **options: Any
) -> Arguments:
    """Arguments of a call. A buffer is described by its rows, and by how many more steps than tokens it has. What rows
    that are skipped bring is NaN, and their states are not there to be read."""
    decodes = door is gated_delta_rule_decode_pretranspose
    chosen = dict((DECODE if decodes else MTP)[mode])
    arguments = make_delta_arguments(device, tokens, pool=bool(chosen), **options)
    if decodes and chosen:
        arguments["state"] = None
    if BUFFER in chosen:
        rows, more = chosen.pop(BUFFER)
        states = arguments["initial_state"]
        arguments[BUFFER] = states.new_full((rows, tokens + more, *states.shape[1:]), 7.0)
    for name, numbers in chosen.items():
        if name.endswith("indices"):
            chosen[name] = torch.tensor(numbers, dtype=indices, device=device)
    if "ssm_state_indices" in chosen:
        chosen["ssm_state_indices"] = chosen["ssm_state_indices"][:, :tokens].contiguous()
    if chosen.get("initial_state_indices") is not None:
        for name in ("q", "k", "v", "a", "b"):
            arguments[name][chosen["initial_state_indices"] < 0] = torch.nan
    return {**arguments, **chosen}


def with_output(arguments: Arguments) -> Arguments:
    """With memory for the output, in which there is something."""
    return {**arguments, "output": torch.full_like(arguments["v"], 5.0)}


def compare(door: Door, arguments: Arguments, implementation: Implementation) -> None:
    if door is gated_delta_rule_mtp:
        several = arguments["v"].shape[1] > 1
        compare_delta(door, models_of_peers.flashinfer_mtp, arguments, implementation, keeps=several)
    else:
        compare_delta(door, models_of_peers.flashinfer_decode, arguments, implementation)


def output_of(door: Door) -> Door:
    return lambda **arguments: door(**arguments)[0]


@REFERENCE_AND_GPU
@OUTPUTS
@pytest.mark.parametrize("indices", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("mode", DECODE)
def test_one_token_in_every_mode_gives_what_the_contract_says(
    mode: str, indices: torch.dtype, given: bool, device: torch.device, implementation: Implementation
) -> None:
    arguments = of_mode(gated_delta_rule_decode_pretranspose, mode, device, indices=indices)
    compare(gated_delta_rule_decode_pretranspose, with_output(arguments) if given else arguments, implementation)


@REFERENCE_AND_GPU
@OUTPUTS
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("mode", MTP)
def test_several_tokens_in_every_mode_give_what_the_contract_says(
    mode: str, tokens: int, given: bool, device: torch.device, implementation: Implementation
) -> None:
    indices = torch.int64 if tokens % 2 else torch.int32
    arguments = of_mode(gated_delta_rule_mtp, mode, device, tokens, indices)
    compare(gated_delta_rule_mtp, with_output(arguments) if given else arguments, implementation)


DOORS: dict[str, tuple[Door, str, int]] = {
    "one token": (gated_delta_rule_decode_pretranspose, "in order", 1),
    "one token, a pool": (gated_delta_rule_decode_pretranspose, "rows skipped and not written", 1),
    "three tokens": (gated_delta_rule_mtp, "a row skipped", 3),
    "four tokens, a buffer": (gated_delta_rule_mtp, "a buffer, elsewhere", 4),
    "five tokens, each stored": (gated_delta_rule_mtp, "every token, a row skipped", 5),
}
CALLS = pytest.mark.parametrize("call", DOORS)


def of_call(call: str, device: torch.device, **options: Any) -> tuple[Door, Arguments]:
    door, mode, tokens = DOORS[call]
    return door, of_mode(door, mode, device, tokens, **options)


@REFERENCE_AND_GPU
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (2, 4), (3, 9), (1, 4), (2, 10), (1, 8)], ids=str)
@CALLS
def test_heads_of_v_share_those_of_q_and_k(
    call: str, heads: tuple[int, int], device: torch.device, implementation: Implementation
) -> None:
    door, arguments = of_call(call, device, heads=heads)
    compare(door, arguments, implementation)


OPTIONS: dict[str, tuple[dict[str, torch.dtype], Arguments]] = {
    "not normalised": ({}, {"use_qk_l2norm": False, "scale": 0.02}),
    "a scale": ({}, {"scale": 1.5}),
    "no scale": ({}, {"scale": None, "use_qk_l2norm": True}),
    "bfloat16 tokens": ({"x": torch.bfloat16}, {}),
    "float16 tokens": ({"x": torch.float16}, {}),
    "a bfloat16 state": ({"state": torch.bfloat16, "x": torch.bfloat16}, {}),
    "a float16 state": ({"state": torch.float16, "x": torch.bfloat16}, {}),
    "bfloat16 weights": ({"x": torch.bfloat16, "weights": torch.bfloat16}, {}),
}


@REFERENCE_AND_GPU
@OUTPUTS
@CALLS
@pytest.mark.parametrize("options", OPTIONS)
def test_every_form_of_the_arguments_gives_what_the_contract_says(
    options: str, call: str, given: bool, device: torch.device, implementation: Implementation
) -> None:
    dtypes, changes = OPTIONS[options]
    door, arguments = of_call(call, device, **dtypes)
    arguments = {**arguments, **changes}
    compare(door, with_output(arguments) if given else arguments, implementation)


@pytest.mark.interpreted
@OUTPUTS
@pytest.mark.parametrize("options", [{}, {"state": torch.float16, "x": torch.float16}], ids=["float32", "float16"])
@CALLS
def test_kernels_in_the_interpreter_do_the_same(call: str, options: dict[str, torch.dtype], given: bool) -> None:
    door, arguments = of_call(call, CPU, heads=(1, 2), **options)
    compare(door, with_output(arguments) if given else arguments, interpreted)


@pytest.mark.interpreted
@pytest.mark.parametrize("mode", ["output alone", "a large buffer", "every token, and nothing elsewhere"])
def test_kernels_in_the_interpreter_do_the_same_without_normalised_vectors(mode: str) -> None:
    arguments = of_mode(gated_delta_rule_mtp, mode, CPU, tokens=2)
    compare(gated_delta_rule_mtp, {**arguments, "use_qk_l2norm": False, "scale": 0.1}, interpreted)


@REFERENCE_AND_GPU
@CALLS
def test_slots_past_the_pool_are_skipped(call: str, device: torch.device, implementation: Implementation) -> None:
    door, arguments = of_call(call, device)
    other = copied(arguments)
    for name, numbers in other.items():
        if name.endswith("indices"):
            numbers[numbers < 0] = SLOTS + 3
    require_equal_results(output_of(door), arguments, other, implementation)


@REFERENCE_AND_GPU
@LAYOUTS
@CALLS
def test_strides_change_no_byte(
    call: str, layout: Callable[[Tensor], Tensor], device: torch.device, implementation: Implementation
) -> None:
    door, arguments = of_call(call, device)
    names = [name for name in (*"qkvab", "A_log", "dt_bias") if name in arguments]
    names += [name for name in arguments if name.endswith("indices")]
    pages = {name: in_pages(t) for name, t in arguments.items() if name.endswith("state") and t is not None}
    other = {**copied(arguments), **{name: layout(arguments[name]) for name in names}, **pages}
    require_equal_results(output_of(door), arguments, other, implementation)


@REFERENCE_AND_GPU
@CALLS
def test_parts_of_one_projection_need_no_copy_and_change_no_byte(
    call: str, device: torch.device, implementation: Implementation
) -> None:
    """q, k and v as a convolution leaves them: side by side on one axis."""
    door, arguments = of_call(call, device)
    parts = [arguments[name].flatten(2) for name in "qkv"]
    together = torch.cat(parts, -1).split([part.shape[-1] for part in parts], -1)
    views = {name: part.view(arguments[name].shape) for name, part in zip("qkv", together, strict=True)}
    assert not any(view.is_contiguous() for view in views.values())
    require_equal_results(output_of(door), arguments, {**copied(arguments), **views}, implementation)


@REFERENCE_AND_GPU
@CALLS
def test_a_row_alone_gives_what_it_gives_in_a_batch(
    call: str, device: torch.device, implementation: Implementation
) -> None:
    door, arguments = of_call(call, device)
    per_row = (*"qkvab", "state", BUFFER, "initial_state_indices", "output_state_indices", "ssm_state_indices")
    alone = {name: t[2:] if name in per_row and t is not None else t for name, t in copied(arguments).items()}
    with implementation():
        y, y_alone = door(**arguments)[0], door(**alone)[0]
    assert equal_bytes(y[2:], y_alone)
    if alone.get("output_state_indices") is not None and int(alone["output_state_indices"]) >= 0:
        slot = int(alone["output_state_indices"])
        assert equal_bytes(arguments["initial_state"][slot], alone["initial_state"][slot])


@REFERENCE_AND_GPU
def test_several_tokens_are_one_token_after_another(device: torch.device, implementation: Implementation) -> None:
    """The same bytes, because no state is rounded in between."""
    several = of_mode(gated_delta_rule_mtp, "in place", device, tokens=5)
    one = {**copied(several), "state": None}
    del one["disable_state_update"]
    with implementation():
        y, state = gated_delta_rule_mtp(**several)
        for t in range(5):
            token = {name: one[name][:, t : t + 1] for name in "qkvab"}
            y_token, _ = gated_delta_rule_decode_pretranspose(**{**one, **token})
            assert equal_bytes(y[:, t : t + 1], y_token)
    assert equal_bytes(state, one["initial_state"])


@REFERENCE_AND_GPU
def test_a_buffer_and_slots_for_every_token_receive_the_same_states(
    device: torch.device, implementation: Implementation
) -> None:
    buffered = of_mode(gated_delta_rule_mtp, "a large buffer", device, tokens=3)
    stored = of_mode(gated_delta_rule_mtp, "every token", device, tokens=3)
    with implementation():
        assert equal_bytes(gated_delta_rule_mtp(**buffered)[0], gated_delta_rule_mtp(**stored)[0])
    for b, slots in enumerate(EVERY):
        for t, slot in enumerate(slots[:3]):
            assert slot < 0 or equal_bytes(buffered[BUFFER][b, t], stored["initial_state"][slot])


@CALLS
@OUTPUTS
def test_torch_compile_makes_one_graph_of_a_call(given: bool, call: str) -> None:
    door, arguments = of_call(call, CPU)
    arguments = with_output(arguments) if given else arguments
    compiled = torch.compile(door, fullgraph=True, dynamic=False, backend="aot_eager")
    again = copied(arguments)
    y, state = compiled(**arguments)
    y_eager, state_eager = door(**again)
    assert equal_bytes(y, y_eager)
    assert equal_bytes(state, state_eager)
    assert BUFFER not in arguments or equal_bytes(arguments[BUFFER], again[BUFFER])


@pytest.mark.gpu
@CALLS
def test_a_cuda_graph_reads_slots_and_tokens_when_it_is_replayed(call: str) -> None:
    door, arguments = of_call(call, torch.device("cuda"), x=torch.bfloat16)
    arguments, other = with_output(arguments), with_output(of_call(call, torch.device("cuda"), x=torch.bfloat16)[1])
    for name in (*"qkvab", "initial_state_indices", "output_state_indices", "ssm_state_indices"):
        if other.get(name) is not None:
            other[name] = other[name].roll(1, 0).contiguous()
    door(**copied(arguments))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        door(**arguments)
    for name, tensor in other.items():
        if isinstance(tensor, Tensor):
            arguments[name].copy_(tensor)
    graph.replay()
    door(**other)
    for name, tensor in other.items():
        assert not isinstance(tensor, Tensor) or equal_bytes(arguments[name], tensor)


@CALLS
def test_a_repeated_call_with_an_output_starts_its_kernel_directly(
    call: str, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, stand_in in (("start", launcher.start), ("uses_kernels", lambda device: True)):
        monkeypatch.setattr(gated_delta, name, stand_in)
    monkeypatch.setattr(gated_delta, "_launches_on_tensors", {})
    door, arguments = of_call(call, CPU)
    door(**with_output(arguments))
    again = with_output(copied(arguments))
    assert door(**again)[0] is again["output"]
    assert (len(launcher.ordinary), len(launcher.directly)) == (1, 1)
    with suspended():
        door(**again)
    assert launcher.directly == [parameters(launcher.ordinary[-1].launch.arguments)]


def test_the_signatures_are_flashinfers() -> None:
    assert signature_of(gated_delta_rule_decode_pretranspose) == (
        "q, k, v, state, A_log, a, dt_bias, b, scale=None, output=None, use_qk_l2norm=True, initial_state=None, "
        "initial_state_indices=None, output_state_indices=None"
    )
    assert signature_of(gated_delta_rule_mtp) == (
        "q, k, v, initial_state, initial_state_indices, A_log, a, dt_bias, b, scale=None, output=None, "
        "intermediate_states_buffer=None, ssm_state_indices=None, disable_state_update=None, use_qk_l2norm=True, "
        "output_state_indices=None"
    )
