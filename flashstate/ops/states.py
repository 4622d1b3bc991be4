"""write_states and read_states: the launches behind `write` and `read` of a State and of a StatePool."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashstate.errors import check_tensor
from flashstate.launch import Problem, choose, machine_of, uses_kernels
from flashstate.launch.arguments import aligned, state_values, tile_values
from flashstate.launch.start import Launch, check_programs, kernel_in, start
from flashstate.ops.numbers import check_distinct, check_in_range, slots_on
from flashstate.reference import state_io as reference
from flashstate.state.actions import provide
from flashstate.state.faults import fault_flag
from flashstate.state.slots import SlotNumbers
from flashstate.state.state import POOL_AXES, State, as_state

TOKEN = -1  # what random bits of a written state are drawn for: the token before the first of a step


@provide
def read_slots(state: State, slots: SlotNumbers) -> Tensor:
    """The states in these slots: (n, heads, rows, cols) float32."""
    data = as_state(state).data
    index = slots_on(data.device, "slots", slots, lambda name, given: check_in_range(name, given, len(data)))
    return read_states(state, index)


@provide
def write_slots(state: State, slots: SlotNumbers, values: Tensor) -> None:
    """Round `values` (n, heads, rows, cols) to the format of `state` and store them in these slots."""
    data = as_state(state).data

    def check(name: str, numbers: list[int]) -> None:
        check_in_range(name, numbers, len(data))
        check_distinct(name, numbers)

    write_states(state, slots_on(data.device, "slots", slots, check), values, name="values")


@torch.no_grad()
def write_states(
    state: State, slots: Tensor, states: Tensor, null: int = -1, count: Tensor | None = None, name: str = "states"
) -> None:
    """Round `states` (n, heads, rows, cols), of any strides, to the format of `state` and store them in these slots,
    which are on its device. `count`: of rings, which are empty afterwards. `name`: what the caller calls the states."""
    check_tensor(name, states, POOL_AXES, (len(slots), *state.data.shape[1:]), device=state.data.device)
    if len(slots) == 0:
        return
    if not uses_kernels(slots.device):
        found = reference.resolve("write", slots, torch.ones_like(slots, dtype=torch.bool), len(state.data), null)
        seed = state.seeds_of(found.clamp(min=0))
        reference.store_state(state, states.float(), (found,), seed, torch.full_like(found, TOKEN))
        if count is not None:
            count[found[found >= 0]] = 0
        return
    strides = dict(zip(("stride_n", "stride_h", "stride_row", "stride_col"), states.stride(), strict=True))
    seed = None if state.rounding == "nearest" else state.seed
    strided = states.shape[-1] > 1 and states.stride(-1) != 1
    values = {
        "values_ptr": states, **strides, "seed_ptr": seed, "count_ptr": count, "STRIDED": strided,
        "ALIGNED": not strided and aligned(states),
    }  # fmt: skip
    _start("write", state, slots, null, values)


@torch.no_grad()
def read_states(state: State, slots: Tensor, null: int = -1) -> Tensor:
    """The states in these slots, which are on its device: (n, heads, rows, cols) float32, zero where a number names
    none."""
    if not uses_kernels(slots.device):
        found = reference.resolve("read", slots, torch.ones_like(slots, dtype=torch.bool), len(state.data), null)
        with torch.inference_mode(False):  # else only inference mode could change it
            states = reference.load_state(state, found.clamp(min=0))
            return states.masked_fill((found < 0)[:, None, None, None], 0.0)
    with torch.inference_mode(False):
        out = torch.empty((len(slots), *state.data.shape[1:]), dtype=torch.float32, device=slots.device)
    if len(slots) == 0:
        return out
    _start("read", state, slots, null, {"out_ptr": out})
    return out


def _start(do: str, state: State, slots: Tensor, null: int, values: dict[str, Any]) -> None:
    """Start the kernel that does this, with a program for each block of rows of these slots."""
    machine, problem = machine_of(slots.device), Problem.of(f"pool_{do}", state, len(slots))
    config = choose(problem, machine.gpu)
    programs = problem.programs(config)
    check_programs("slots", programs, f"{len(slots)} slots")
    values = {
        **state_values(state), **tile_values(machine, problem, config), "slots_ptr": slots, "null": null,
        "fault_ptr": fault_flag(slots.device), **values,
    }  # fmt: skip
    start(Launch(kernel_in("states", f"{do}_states"), (programs,), slots.device, values, config.num_warps))
