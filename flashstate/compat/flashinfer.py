"""FlashInfer's selective_state_update and checkpointing_ssu, of flashinfer.mamba, and the gated delta rules of
flashinfer.gdn_decode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashstate.compat import shapes
from flashstate.compat.flashinfer_delta import (
    gated_delta_rule_decode,
    gated_delta_rule_decode_pretranspose,
    gated_delta_rule_mtp,
)
from flashstate.compat.flashinfer_replay import checkpointing_ssu
from flashstate.errors import INT64, check_choice, check_flag, check_int, dtype_name
from flashstate.launch.doors import remembering
from flashstate.state.slots import MOST_TOKENS, Slots
from flashstate.state.state import MOST_ROUNDS, State

__all__ = [
    "checkpointing_ssu",
    "gated_delta_rule_decode",
    "gated_delta_rule_decode_pretranspose",
    "gated_delta_rule_mtp",
    "selective_state_update",
]
ALGORITHMS = ("auto", "simple", "vertical", "horizontal", "async_horizontal")
BACKENDS = ("auto", "flashinfer", "cake")


@remembering(main="x")
def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    state_scale: Tensor | None = None,
    out: Tensor | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    intermediate_state_scales: Tensor | None = None,
    rand_seed: Tensor | None = None,
    philox_rounds: int = 10,
    cache_steps: int = 0,
    algorithm: str = "auto",
    dst_state_batch_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    backend: str = "auto",
    *,
    exact: bool = True,
) -> Tensor:
    """Step every row by its tokens; update the state in place, and return `out`, or an output of the shape of x.

    state is (slots, heads, dim, dstate), x (batch, heads, dim), (batch, T, heads, dim), or with `cu_seqlens` (tokens,
    heads, dim). A padding row gives what a zero state gives. With a buffer, which receives the state after every token,
    the state stays as it is. docs/compat.md has the other arguments, and says what differs from FlashInfer.
    """
    check_choice("algorithm", algorithm, ALGORITHMS)
    check_choice("backend", backend, BACKENDS)
    check_flag("disable_state_update", disable_state_update)
    check_int("pad_slot_id", pad_slot_id, *INT64)
    check_int("cache_steps", cache_steps, 0 if cu_seqlens is None else 1, MOST_TOKENS)
    read, write, rows = state_batch_indices, dst_state_batch_indices, intermediate_state_indices
    buffer, scales = intermediate_states_buffer, intermediate_state_scales
    shapes.check_not_both(intermediate_states_buffer=buffer, dst_state_batch_indices=write)
    state = shapes.with_axes("state", state, 3, 4)
    rank = 4 if cache_steps and cu_seqlens is None else 3
    given: dict[str, Any] = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias}
    tensors = shapes.step_tensors(state, cu_seqlens is not None, rank, **given)
    _check_dtypes_of("dt", dt, D=D, dt_bias=dt_bias)
    _check_dtypes_of("state_batch_indices", read, dst_state_batch_indices=write, intermediate_state_indices=rows)
    shapes.check_needs("intermediate_states_buffer", buffer, intermediate_state_scales=scales)
    snapshots = _scaled("intermediate_states_buffer", buffer, "intermediate_state_scales", scales)
    update = snapshots is None and not disable_state_update
    slots = _slots(
        state, x, cache_steps, read, write if update else None, num_accepted_tokens, rows, cu_seqlens, pad_slot_id,
        keeps=snapshots is not None,
    )  # fmt: skip
    stored = _state(state, state_scale, rand_seed, philox_rounds)
    return shapes.selective_step(
        stored, x, tensors, out, dt_softplus=dt_softplus, exact=exact, slots=slots, snapshots=snapshots, update=update
    )


def _check_dtypes_of(of: str, wanted: Any, **others: Any) -> None:
    """Raise as FlashInfer does where a compiled kernel of it expects one dtype of several tensors."""
    for name, tensor in others.items():
        if isinstance(wanted, Tensor) and isinstance(tensor, Tensor) and tensor.dtype != wanted.dtype:
            got = dtype_name(tensor.dtype)
            raise RuntimeError(f"{name} must be {dtype_name(wanted.dtype)}, as {of} is, got {got}")


def _scaled(name: str, data: Any, name_of_scale: str, scale: Any) -> Any:
    """A State where there is a scale, else data, which must not need one."""
    shapes.check_scale(name, data, name_of_scale, scale)
    return data if scale is None else State(data, scale)


def _state(state: Tensor, scale: Any, rand_seed: Tensor | None, rounds: int) -> State | Tensor:
    """The state with its scales, or with one seed for all slots, whose bits still differ."""
    shapes.check_not_both(rand_seed=rand_seed, state_scale=scale)
    if rand_seed is None:
        per_row = isinstance(scale, Tensor) and scale.dim() == 4 and scale.shape[-1] == 1
        return _scaled("state", state, "state_scale", scale[..., 0] if per_row else scale)
    if state.dtype != torch.float16:
        raise ValueError(f"rand_seed is for a state of float16, got {dtype_name(state.dtype)}")
    check_int("philox_rounds", rounds, 1, MOST_ROUNDS)
    shapes.check_seed("rand_seed", rand_seed, state)
    return State(state, rounding="stochastic", rounds=rounds, seed=rand_seed.reshape(()))


def _slots(
    state: Tensor, x: Tensor, cache_steps: int, read: Tensor | None, write: Tensor | None, accepted: Tensor | None,
    snapshot_rows: Tensor | None, cu_seqlens: Tensor | None, null: int, keeps: bool,
) -> Slots:  # fmt: skip
    """`keeps`: whether there is a buffer for the state after every token."""
    batch, bounds = shapes.rows_of(x, cu_seqlens)
    steps = cache_steps if bounds is not None else x.shape[1] if x.dim() == 4 else 1  # the most tokens a row has
    if accepted is not None:
        shapes.check_indices("state_batch_indices", read, "batch", "n")
    accepted = shapes.list_of("num_accepted_tokens", accepted, batch)
    read = shapes.own_slots("state_batch_indices", state, batch) if read is None else read
    table = shapes.table_of("state_batch_indices", read, batch)
    if isinstance(write, Tensor) and write.dim() == 1:
        write = shapes.list_of("dst_state_batch_indices", write, batch)
    elif write is not None:
        write = shapes.table_of("dst_state_batch_indices", write, batch, steps)[:, :steps]
    snapshot_rows = shapes.list_of("intermediate_state_indices", snapshot_rows, batch)
    if snapshot_rows is None and keeps:  # the slot that each row reads; of padding rows any
        column = None if accepted is None else (accepted.long() - 1).clamp(0, table.shape[1] - 1)[:, None]
        snapshot_rows = (table if column is None else table.gather(1, column))[:, 0].contiguous()
    return Slots(
        table[:, 0] if accepted is None else table, write=write, accepted=accepted, snapshot_rows=snapshot_rows,
        cu_seqlens=bounds, max_len=None if bounds is None else steps, null=null, padding="fresh",
        at_least_one=accepted is not None,
    )  # fmt: skip
