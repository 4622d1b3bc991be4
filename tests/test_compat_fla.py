"""The doors of flash-linear-attention give outputs and new states, and leave what they are given as it is."""

import implementations
import pytest
import torch
from launchers import Launcher, launcher, parameters
from peer_calls import CPU, REFERENCE_AND_GPU, Door, copied, doors_and, equal_bytes
from peer_fla import FLA_KDA, FLA_RULE
from torch import Tensor

from flashstate.launch.environment import suspended
from flashstate.proof import error_ratio

__all__ = ["launcher"]  # a fixture
EVERY_CALL = [(door, call) for door in (FLA_RULE, FLA_KDA) for call in door.calls]
INTERPRETED = [(FLA_RULE, "one token")]


def require_contract(door: Door, call: str, device: torch.device) -> None:
    arguments = door.arguments(call, device)
    before = copied(arguments)
    (y, states), (plain, plainly) = (
        door.model(copied(arguments, CPU), dtype) for dtype in (torch.float64, torch.float32)
    )
    got, final = door.function(**arguments)
    assert (got.shape, got.dtype) == (y.shape, arguments["v"].dtype)
    assert error_ratio(got.cpu(), y, plain.to(got.dtype)) <= 1
    assert (final is not None) == arguments["output_final_state"]
    if final is not None:
        v_first = arguments.get("state_v_first") or arguments.get("transpose_state_layout")
        assert (final.dtype, final.is_contiguous()) == (torch.float32, True)
        assert error_ratio((final if v_first else final.mT).cpu(), states, plainly) <= 1
    assert all(equal_bytes(t, before[name]) for name, t in arguments.items() if isinstance(t, Tensor))


@REFERENCE_AND_GPU
@doors_and("call", EVERY_CALL)
def test_every_call_gives_outputs_and_states_and_changes_nothing(door: Door, call: str, device: torch.device) -> None:
    require_contract(door, call, device)


@pytest.mark.parametrize("device", [implementations.KERNELS[0]], indirect=True)
@doors_and("call", INTERPRETED)
def test_kernels_in_the_interpreter_do_so_too(door: Door, call: str, device: torch.device) -> None:
    require_contract(door, call, device)


def test_strides_change_no_byte() -> None:
    arguments = FLA_RULE.arguments("several tokens")
    tensors = {name: t for name, t in arguments.items() if isinstance(t, Tensor)}
    strided = {**arguments, **{name: torch.stack([t, t], -1)[..., 0] for name, t in tensors.items()}}
    for one, other in zip(FLA_RULE.function(**arguments), FLA_RULE.function(**strided), strict=True):
        assert equal_bytes(one, other)


def test_torch_compile_makes_one_graph_of_a_call() -> None:
    arguments = FLA_RULE.arguments("one token")
    compiled = torch.compile(FLA_RULE.function, fullgraph=True, dynamic=False, backend="aot_eager")
    for one, other in zip(compiled(**arguments), FLA_RULE.function(**arguments), strict=True):
        assert equal_bytes(one, other)


@pytest.mark.parametrize(("call", "ordinary"), [("one token", 1), ("several tokens, states transposed", 2)])
def test_a_repeated_call_starts_its_kernel_directly(call: str, ordinary: int, launcher: Launcher) -> None:
    """Where torch computes too, that is found out first, and then its op starts so."""
    arguments = FLA_RULE.arguments(call)
    for _ in range(3):
        FLA_RULE.function(**arguments)
    assert launcher.counts == (ordinary, 3 - ordinary)
    with suspended():
        FLA_RULE.function(**arguments)
    assert len(parameters(launcher.ordinary[-1].arguments)) == len(launcher.directly[0])
