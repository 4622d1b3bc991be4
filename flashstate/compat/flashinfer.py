"""FlashInfer's selective_state_update, of flashinfer.mamba, and the gated delta rules of flashinfer.gdn_decode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashstate.compat.shapes import (
    batch_of,
    check_slot,
    delta_tensors,
    list_of,
    own_slots,
    room_for_output,
    rows_contiguous,
    slot_numbers,
    step_tensors,
    table_of,
    with_axes,
)
from flashstate.errors import (
    ACTIVATION_DTYPES,
    INDEX_DTYPES,
    check_choice,
    check_flag,
    check_int,
    check_tensor,
    dtype_name,
)
from flashstate.ops.gated_delta import gated_delta_step
from flashstate.ops.mamba2 import mamba2_step
from flashstate.state.formats import FORMATS
from flashstate.state.slots import MOST_TOKENS, Slots
from flashstate.state.state import MOST_ROUNDS, State

ALGORITHMS = ("auto", "simple", "vertical", "horizontal", "async_horizontal")
BACKENDS = ("auto", "flashinfer", "cake")
SEED_OF_A_SLOT = 0xD1342543DE82EF95 - (1 << 64)  # odd, so that no two slots of a pool share a seed


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
) -> Tensor:
    """Step every row by its tokens; update the state in place, and return `out`, or an output of the shape of x.

    state: (slots, heads, dim, dstate), contiguous within a slot.
    x, dt, z, out: (batch, heads, dim), (batch, T, heads, dim), or with `cu_seqlens` (tokens, heads, dim).
    A: (heads, dim, dstate); B, C: (…, groups, dstate); D, dt_bias: (heads, dim), in the dtype of dt. One value per head
        is recognised where A, D, dt and dt_bias are expanded.
    state_batch_indices: (batch,) or (batch, n), int32 or int64: where each row is read, from the first column unless
        `num_accepted_tokens`, (batch,) numbers from 1 to n, chooses another; None: row b is slot b.
    pad_slot_id: the slot of padding rows, as negative ones are. Their output is what a zero state gives; nothing is
        stored for them.
    state_scale: (slots, heads, dim) or (slots, heads, dim, 1) float32, for int16.
    disable_state_update: leave the state as it is.
    intermediate_states_buffer: (rows, steps, heads, dim, dstate), receives the state after every token, and the state
        stays as it is; with intermediate_state_scales (rows, steps, heads, dim) for int16. Row b of the batch fills row
        intermediate_state_indices[b] of it, or the one that its slot names.
    rand_seed: one int64 number on the device, for stochastic rounding of float16; philox_rounds: of Philox, 1 to 16.
    cache_steps: the most tokens a packed row has; 1 or more with `cu_seqlens`.
    dst_state_batch_indices: (batch,), where the last state goes; or (batch, T), where the state after every token goes.
        A slot that is pad_slot_id or negative is not written.
    cu_seqlens: (batch + 1,), for packed tokens.
    algorithm, backend: names that FlashInfer knows; they change nothing.

    Any tensor may have no head axis: then there is one head. docs/compat.md says what differs from FlashInfer.
    """
    check_choice("algorithm", algorithm, ALGORITHMS)
    check_choice("backend", backend, BACKENDS)
    check_flag("disable_state_update", disable_state_update)
    check_slot("pad_slot_id", pad_slot_id)
    check_int("cache_steps", cache_steps, 0 if cu_seqlens is None else 1, MOST_TOKENS)
    if intermediate_states_buffer is not None and dst_state_batch_indices is not None:
        raise ValueError("intermediate_states_buffer and dst_state_batch_indices must not both be given")
    state = with_axes("state", state, 3, 4)
    rank = 4 if cache_steps and cu_seqlens is None else 3
    tensors = step_tensors(x, dt, A, B, C, D, z, dt_bias, rank)
    _check_dtypes(dt, D, dt_bias, state_batch_indices, dst_state_batch_indices, intermediate_state_indices)
    snapshots = _snapshots(intermediate_states_buffer, intermediate_state_scales)
    update = snapshots is None and not disable_state_update
    steps = cache_steps if cu_seqlens is not None else x.shape[1] if x.dim() == 4 else 1
    slots = _slots(
        state, batch_of(x, cu_seqlens), steps, state_batch_indices, dst_state_batch_indices if update else None,
        num_accepted_tokens, intermediate_state_indices, cu_seqlens, pad_slot_id, snapshots is not None,
    )  # fmt: skip
    y = mamba2_step(
        _state(state, state_scale, rand_seed, philox_rounds), **tensors, dt_softplus=dt_softplus, slots=slots,
        snapshots=snapshots, update=update, out=room_for_output(tensors["x"], out),
    )  # fmt: skip
    return y.reshape(x.shape) if out is None else out


def _check_dtypes(
    dt: Tensor, D: Tensor | None, dt_bias: Tensor | None, read: Tensor | None, write: Tensor | None, rows: Tensor | None
) -> None:
    """Raise as FlashInfer does where dtypes are not what a compiled kernel of it expects."""
    for name, tensor in (("D", D), ("dt_bias", dt_bias)):
        if tensor is not None and tensor.dtype != dt.dtype:
            wanted, got = dtype_name(dt.dtype), dtype_name(tensor.dtype)
            raise RuntimeError(f"{name} must be {wanted}, as dt is, got {got}")
    for name, numbers in (("dst_state_batch_indices", write), ("intermediate_state_indices", rows)):
        if isinstance(read, Tensor) and isinstance(numbers, Tensor) and numbers.dtype != read.dtype:
            wanted, got = dtype_name(read.dtype), dtype_name(numbers.dtype)
            raise RuntimeError(f"{name} must be {wanted}, as state_batch_indices is, got {got}")


def _snapshots(buffer: Tensor | None, scales: Tensor | None) -> State | Tensor | None:
    if scales is None:
        if buffer is not None:
            _check_unscaled("intermediate_state_scales", "intermediate_states_buffer", buffer)
        return buffer
    if buffer is None:
        raise ValueError("intermediate_state_scales needs intermediate_states_buffer, got None")
    return State(buffer, scales)


def _state(state: Tensor, scale: Tensor | None, rand_seed: Tensor | None, rounds: int) -> State | Tensor:
    if rand_seed is not None:
        if scale is not None:
            raise ValueError("rand_seed and state_scale must not both be given")
        if state.dtype != torch.float16:
            raise ValueError(f"rand_seed is for a state of float16, got {dtype_name(state.dtype)}")
        check_int("philox_rounds", rounds, 1, MOST_ROUNDS)
        return State(state, rounding="stochastic", rounds=rounds, seed=_seeds(state, rand_seed))
    if scale is None:
        _check_unscaled("state_scale", "state", state)
        return state
    per_row = isinstance(scale, Tensor) and scale.dim() == 4 and scale.shape[-1] == 1
    return State(state, scale[..., 0] if per_row else scale)


def _check_unscaled(name: str, of: str, data: Tensor) -> None:
    if isinstance(data, Tensor) and data.dtype in FORMATS and FORMATS[data.dtype].scaled:
        raise ValueError(f"{name} must be given where {of} is {dtype_name(data.dtype)}, got None")


def _seeds(state: Tensor, rand_seed: Tensor) -> Tensor:
    """A seed for every slot, made of one number on the device, so that slots draw different bits."""
    if not isinstance(rand_seed, Tensor):
        raise TypeError(f"rand_seed must be a tensor, got {type(rand_seed).__name__}")
    if rand_seed.numel() != 1 or rand_seed.dtype != torch.int64:
        got = f"{dtype_name(rand_seed.dtype)} of shape {tuple(rand_seed.shape)}"
        raise ValueError(f"rand_seed must be one int64 number, got {got}")
    if rand_seed.device != state.device:
        raise ValueError(f"rand_seed is on {rand_seed.device}, but the state is on {state.device}")
    return torch.add(rand_seed.reshape(1), slot_numbers(state), alpha=SEED_OF_A_SLOT)


def _slots(
    state: Tensor, batch: int, steps: int, read: Tensor | None, write: Tensor | None, accepted: Tensor | None,
    snapshot_rows: Tensor | None, cu_seqlens: Tensor | None, null: int, keeps: bool,
) -> Slots:  # fmt: skip
    """`steps`: the most tokens a row has; `keeps`: whether there is a buffer for the state after every token."""
    if accepted is not None:
        check_tensor("state_batch_indices", read, ("batch", "n"), (None, None), dtypes=INDEX_DTYPES)
        accepted = list_of("num_accepted_tokens", accepted, batch).contiguous()
    table = own_slots(state, batch)[:, None] if read is None else table_of("state_batch_indices", read, batch)
    if isinstance(write, Tensor) and write.dim() == 1:
        write = list_of("dst_state_batch_indices", write, batch)
    elif write is not None:
        write = table_of("dst_state_batch_indices", write, batch, steps)[:, :steps]
    if snapshot_rows is None and keeps:
        snapshot_rows = _chosen(table, accepted)
    if snapshot_rows is not None:
        snapshot_rows = list_of("intermediate_state_indices", snapshot_rows, batch).contiguous()
    read = table[:, 0] if accepted is None else table
    return Slots(
        read, write=write, accepted=accepted, snapshot_rows=snapshot_rows, cu_seqlens=cu_seqlens,
        max_len=None if cu_seqlens is None else steps, null=null, padding="fresh",
    )  # fmt: skip


def _chosen(table: Tensor, accepted: Tensor | None) -> Tensor:
    """The slot that each row reads; of padding rows any."""
    if accepted is None:
        return table[:, 0]
    column = (accepted.long() - 1).clamp(0, table.shape[1] - 1)
    return table.gather(1, column[:, None])[:, 0]


def gated_delta_rule_decode_pretranspose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    use_qk_l2norm: bool = True,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    output_state_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Step every row by one token; update the state in place, and return the output and the tensor that was updated.

    q, k: (B, 1, H, K), where H divides HV; v, output: (B, 1, HV, V); a, b: (B, 1, HV).
    state: (B, HV, V, K), where row b is slot b; None where there is a pool.
    A_log, dt_bias: (HV,).
    scale: of q; None: 1 / sqrt(K).
    output: in the dtype of v; None: a new tensor.
    use_qk_l2norm: make vectors of length 1 of q and k first.
    initial_state: (pool, HV, V, K), a pool of states, contiguous within a slot; with initial_state_indices (B,), int32
        or int64, the slot of each row. A row whose slot is negative gives zero, and no slot is written for it.
    output_state_indices: (B,), where the new state goes in the pool; None: where it was read. Negative: nowhere.

    docs/compat.md says what differs from FlashInfer.
    """
    tensors = delta_tensors(q, k, v, a, b, A_log, dt_bias)
    if v.shape[1] != 1:
        raise ValueError(f"v must have one token per row, got {tuple(v.shape)}; gated_delta_rule_mtp takes several")
    pool, slots = _pool_and_slots(len(v), state, initial_state, initial_state_indices, output_state_indices)
    y = gated_delta_step(
        pool, **tensors, scale=scale, qk_l2norm=use_qk_l2norm, exact=True, slots=slots,
        out=room_for_output(tensors["v"]) if output is None else output,
    )  # fmt: skip
    return y, pool


def gated_delta_rule_mtp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    disable_state_update: bool | None = None,
    use_qk_l2norm: bool = True,
    output_state_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Step every row by its T tokens, one after the other; return the outputs and the pool.

    q, k: (B, T, H, K), where H divides HV; v, output: (B, T, HV, V); a, b: (B, T, HV); A_log, dt_bias: (HV,).
    initial_state: (pool, HV, V, K), contiguous within a slot.
    initial_state_indices: (B,), int32 or int64, the slot that each row reads. A row whose slot is negative is skipped:
        nothing is stored for it, and `output` stays as it is.
    scale: of q; None: 1 / sqrt(K).
    output: in the dtype of v; None: a new tensor, with zeros for rows that are skipped.
    intermediate_states_buffer: (B or more, T or more, HV, V, K), receives the state after every token of every row,
        whether the pool is updated or not.
    ssm_state_indices: (B, T), where in the pool the state after every token goes; then nothing else is written there,
        and disable_state_update and output_state_indices change nothing. Not with a buffer.
    disable_state_update: leave the pool as it is; None: True.
    use_qk_l2norm: make vectors of length 1 of q and k first.
    output_state_indices: (B,), where the state after the last token goes; None: where it was read.

    A negative index of those that are written is not written. docs/compat.md says what differs from FlashInfer.
    """
    if disable_state_update is not None:
        check_flag("disable_state_update", disable_state_update)
    if intermediate_states_buffer is not None and ssm_state_indices is not None:
        raise ValueError("intermediate_states_buffer and ssm_state_indices must not both be given")
    tensors = delta_tensors(q, k, v, a, b, A_log, dt_bias)
    update = disable_state_update is False or ssm_state_indices is not None
    slots = _delta_slots(
        len(v), initial_state_indices, output_state_indices, ssm_state_indices, v.shape[1], update,
        padding="zero" if output is None or v.shape[1] == 1 else "keep",
    )  # fmt: skip
    y = gated_delta_step(
        initial_state, **tensors, scale=scale, qk_l2norm=use_qk_l2norm, exact=True, slots=slots,
        snapshots=None if intermediate_states_buffer is None else _delta_snapshots(intermediate_states_buffer),
        update=update, out=room_for_output(tensors["v"]) if output is None else output,
    )  # fmt: skip
    return y, initial_state


def _pool_and_slots(
    batch: int, state: Tensor | None, pool: Tensor | None, read: Tensor | None, write: Tensor | None
) -> tuple[Tensor, Slots | None]:
    """Where the states are, and which is whose; None: row b is slot b."""
    if pool is not None:
        if state is not None:
            raise ValueError("state and initial_state must not both be given")
        return pool, _delta_slots(batch, read, write)
    for name, indices in (("initial_state_indices", read), ("output_state_indices", write)):
        if indices is not None:
            raise ValueError(f"{name} needs initial_state, got None")
    if state is None:
        raise ValueError("state or initial_state must be given, got None for both")
    if len(with_axes("state", state, 4, 4)) != batch:
        raise ValueError(f"state must have {batch} slots, as the batch has rows, got shape {tuple(state.shape)}")
    return state, None


def _delta_slots(
    batch: int, read: Any, write: Tensor | None, every: Tensor | None = None, steps: int = 1, update: bool = True,
    padding: str = "zero",
) -> Slots:  # fmt: skip
    """`every`: slots for the state after each of the steps; `update`: whether anything is written."""
    check_tensor("initial_state_indices", read, ("B",), (batch,), dtypes=INDEX_DTYPES)
    if write is not None:
        check_tensor("output_state_indices", write, ("B",), (batch,), dtypes=INDEX_DTYPES)
    if every is not None:
        check_tensor("ssm_state_indices", every, ("B", "T"), (batch, steps), dtypes=INDEX_DTYPES)
        write = rows_contiguous(every)
    return Slots(read, write=write if update else None, padding=padding)


def _delta_snapshots(buffer: Tensor) -> State:
    """A State, with which a call can start as one before it did; a bare tensor would be looked at anew."""
    axes = ("rows", "steps", "HV", "V", "K")
    check_tensor("intermediate_states_buffer", buffer, axes, (None,) * len(axes), dtypes=ACTIVATION_DTYPES)
    return State(buffer)
