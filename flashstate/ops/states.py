"""write_states and read_states: the launches behind StatePool.write and StatePool.read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashstate.errors import check_row_contiguous, check_tensor
from flashstate.launch import Problem, choose, machine_of, uses_kernels
from flashstate.launch.arguments import aligned, state_values, tile_values
from flashstate.launch.start import Launch, check_programs, kernel_in, start
from flashstate.reference import state_io as reference
from flashstate.state.state import POOL_AXES, State

TOKEN = -1  # what random bits of a written state are drawn for: the token before the first of a step


@torch.no_grad()
def write_states(state: State, slots: Tensor, states: Tensor) -> None:
    """Round `states` (slots, heads, rows, cols) to the format of `state` and store them in these slots, int64."""
    check_tensor("states", states, POOL_AXES, (len(slots), *state.data.shape[1:]), device=state.data.device)
    check_row_contiguous("states", states)
    if len(slots) == 0:
        return
    if not uses_kernels(slots.device):
        reference.store_state(state, states.float(), (slots,), state.seeds_of(slots), torch.full_like(slots, TOKEN))
        return
    strides = dict(zip(("stride_n", "stride_h", "stride_row"), states.stride(), strict=False))
    seed = None if state.rounding == "nearest" else state.seed
    values = {"values_ptr": states, **strides, "seed_ptr": seed, "ALIGNED": aligned(states)}
    _start("write", state, slots, values)


@torch.no_grad()
def read_states(state: State, slots: Tensor) -> Tensor:
    """The states in these slots, int64: (slots, heads, rows, cols) float32."""
    if not uses_kernels(slots.device):
        return reference.load_state(state, slots)
    out = torch.empty((len(slots), *state.data.shape[1:]), dtype=torch.float32, device=slots.device)
    if len(slots) == 0:
        return out
    _start("read", state, slots, {"out_ptr": out})
    return out


def _start(do: str, state: State, slots: Tensor, values: dict[str, Any]) -> None:
    """Start the kernel that does this, with a program for each block of rows of these slots."""
    machine, problem = machine_of(slots.device), Problem.of(f"pool_{do}", state, len(slots))
    config = choose(problem, machine.gpu)
    programs = problem.programs(config)
    check_programs("slots", programs, f"{len(slots)} slots")
    values = {**state_values(state), **tile_values(machine, problem, config), "slots_ptr": slots, **values}
    start(Launch(kernel_in("states", f"{do}_states"), (programs,), slots.device, values, config.num_warps))
