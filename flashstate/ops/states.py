"""write_states and read_states: the launches behind StatePool.write and StatePool.read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashstate.errors import check_row_contiguous, check_tensor, dtype_name
from flashstate.launch import Problem, access_width, choose, gpu_of, kernel_target, start, uses_kernels
from flashstate.launch.arguments import aligned, as_bytes, outer_strides
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
        seed = None if state.seed is None else state.seed[slots]
        reference.store_state(state, states.float(), (slots,), seed, torch.full_like(slots, TOKEN))
        return
    from flashstate.kernels.states import write_states_kernel

    programs, constants, num_warps = _launch("pool_write", state, slots)
    arguments = (
        as_bytes(state.data), state.scale, *outer_strides(state.data, state.scale, 1), states, *states.stride()[:3],
        slots, None if state.rounding == "nearest" else state.seed, state.stream,
    )  # fmt: skip
    constants |= {"ALIGNED": aligned(states), "ROUNDING": state.rounding, "ROUNDS": state.rounds}
    start(write_states_kernel, (programs,), slots.device, arguments, constants, num_warps)


@torch.no_grad()
def read_states(state: State, slots: Tensor) -> Tensor:
    """The states in these slots, int64: (slots, heads, rows, cols) float32."""
    if not uses_kernels(slots.device):
        return reference.load_state(state, slots)
    out = torch.empty((len(slots), *state.data.shape[1:]), dtype=torch.float32, device=slots.device)
    if len(slots) == 0:
        return out
    from flashstate.kernels.states import read_states_kernel

    programs, constants, num_warps = _launch("pool_read", state, slots)
    arguments = (as_bytes(state.data), state.scale, *outer_strides(state.data, state.scale, 1), out, slots)
    start(read_states_kernel, (programs,), slots.device, arguments, constants, num_warps)
    return out


def _launch(op: str, state: State, slots: Tensor) -> tuple[int, dict[str, Any], int]:
    """How many programs a call has, what both kernels are compiled for, and their warps."""
    _, heads, rows, cols = state.data.shape
    vector = access_width(state.data)
    problem = Problem(
        op,
        rows,
        cols,
        dtype_name(state.data.dtype),
        state.rounding,
        vector,
        len(slots) * heads,
        transposed=state.transposed,
    )
    config = choose(problem, gpu_of(slots.device))
    programs = len(slots) * heads * -(-rows // config.block_rows)
    if programs >= 1 << 31:
        raise ValueError(f"slots must need fewer than 2^31 programs, got {programs} for {len(slots)} slots")
    constants = {
        "H": heads, "ROWS": rows, "COLS": cols, "VECTOR": vector, "TARGET": kernel_target(slots.device),
        "BLOCK_ROWS": config.block_rows, "BLOCK_COLS": problem.block_cols, "CHUNK": problem.chunk(config.lanes),
        "TRANSPOSED": state.transposed,
    }  # fmt: skip
    return programs, constants, config.num_warps
