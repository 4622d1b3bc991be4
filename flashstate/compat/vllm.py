"""vLLM's selective_state_update and causal_conv1d_update, of vllm.model_executor.layers.mamba.ops."""

from __future__ import annotations

import torch
from torch import Tensor

from flashstate.compat.shapes import (
    activation_of,
    batch_of,
    check_slot,
    contiguous,
    list_of,
    own_slots,
    room_for_output,
    step_tensors,
    table_of,
    tokens_last_to_first,
    with_axes,
)
from flashstate.errors import check_flag, check_int, check_tensor
from flashstate.ops.conv1d import conv1d_step
from flashstate.ops.mamba2 import mamba2_step
from flashstate.state.slots import MOST_TOKENS, Slots
from flashstate.state.state import MOST_ROUNDS, State


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    z: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    dst_state_batch_indices: Tensor | None = None,
    null_block_id: int = 0,
    out: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    is_blackwell: bool = False,
    enable_stochastic_rounding: bool = False,
    cache_philox_rounds: int = 0,
) -> Tensor:
    """Step every row by its tokens; update the state in place, and fill and return `out`.

    state: (slots, heads, dim, dstate), contiguous within a slot.
    x, dt, z, out: (batch, heads, dim), or with `cu_seqlens` (tokens, heads, dim); B, C: (…, groups, dstate).
    A: (heads, dim, dstate); D, dt_bias: (heads, dim). Expanded ones, and an expanded dt, are one value per head.
    state_batch_indices: (batch,) or (batch, n), int32 or int64: where each row is read, from the first column unless
        `num_accepted_tokens` is given; None: row b is slot b.
    dst_state_batch_indices: (batch,) or (batch, n), where the new state goes; None: as state_batch_indices.
    null_block_id: the slot that means "no request". A row that has it, or a negative slot, gives zero; nothing is
        written for it, nor to it.
    out: as x; None: a new tensor.
    num_accepted_tokens: (batch,) numbers from 1 to n: which column each row reads. The state after its token t then
        goes to column t; without it, the last state goes to the first column.
    cu_seqlens: (batch + 1,), for packed tokens.
    is_blackwell: changes nothing.
    enable_stochastic_rounding: round the state stochastically, with new random bits at every call.
    cache_philox_rounds: rounds of Philox behind them, 1 to 16; 0: ten.

    Any tensor may have no head axis: then there is one head. docs/compat.md says what differs from vLLM.
    """
    check_flag("enable_stochastic_rounding", enable_stochastic_rounding)
    check_slot("null_block_id", null_block_id)
    check_int("cache_philox_rounds", cache_philox_rounds, 0, MOST_ROUNDS)
    state = with_axes("state", state, 3, 4)
    tensors = step_tensors(x, dt, A, B, C, D, z, dt_bias)
    slots = _slots(
        state, batch_of(x, cu_seqlens), state_batch_indices, dst_state_batch_indices, num_accepted_tokens, cu_seqlens,
        null_block_id,
    )  # fmt: skip
    stored = _stochastic(state, cache_philox_rounds) if enable_stochastic_rounding else state
    y = mamba2_step(stored, **tensors, dt_softplus=dt_softplus, slots=slots, out=room_for_output(tensors["x"], out))
    return y.reshape(x.shape) if out is None else out


def _slots(
    state: Tensor, batch: int, read: Tensor | None, write: Tensor | None, accepted: Tensor | None,
    cu_seqlens: Tensor | None, null: int,
) -> Slots | None:  # fmt: skip
    if read is None:
        for name, given in (("dst_state_batch_indices", write), ("num_accepted_tokens", accepted)):
            if given is not None:
                raise ValueError(f"{name} needs state_batch_indices, got None")
        return None if cu_seqlens is None else Slots(own_slots(state, batch), cu_seqlens=cu_seqlens)
    read = table_of("state_batch_indices", read, batch)
    every = accepted is not None and cu_seqlens is not None
    if write is not None:
        write = table_of("dst_state_batch_indices", write, batch, read.shape[1] if every else 1)
    if accepted is None:
        write = None if write is None else write[:, 0]
        return Slots(read[:, 0], write=write, cu_seqlens=cu_seqlens, null=null)
    accepted = list_of("num_accepted_tokens", accepted, batch).contiguous()
    write = read if write is None else write
    write = write if every else write[:, 0]
    return Slots(read, write=write, accepted=accepted, cu_seqlens=cu_seqlens, null=null)


def _stochastic(state: Tensor, rounds: int) -> State:
    """The state with a new seed for every slot."""
    seed = torch.randint(-(1 << 62), 1 << 62, state.shape[:1], device=state.device)
    return State(state, rounding="stochastic", rounds=rounds or State.rounds, seed=seed)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: bool | str | None = None,
    conv_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    max_query_len: int = -1,
    null_block_id: int = 0,
    block_idx_last_scheduled_token: Tensor | None = None,
    initial_state_idx: Tensor | None = None,
    validate_data: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Convolve every row's tokens with the inputs before them; update conv_state in place, fill and return `out`.

    x: (batch, dim), (batch, dim, seqlen), or with `query_start_loc` (tokens, dim).
    conv_state: (slots, dim, state_len), in the dtype of x or float32. Its first width - 1 entries are the last inputs.
    weight, bias: (dim, width), (dim,).
    activation: None or False, or "silu", "swish" or True, which are the same.
    conv_state_indices: (batch,) or (batch, n), int32 or int64, the slots of each row; None: row b is slot b.
    num_accepted_tokens: (batch,) numbers of 1 and more: the call before left width - 2 inputs and its tokens in a slot;
        a row continues after so many of these tokens. state_len is then width - 2 + the most tokens or more.
    query_start_loc: (batch + 1,), for packed tokens; max_query_len: the most of a row.
    null_block_id: the slot that means "no request". A row that has it, or a negative slot, gives zero.
    initial_state_idx, block_idx_last_scheduled_token: (batch,), the column of conv_state_indices where a row is read,
        and where it is written; None: the first.
    validate_data: changes nothing: everything is checked always.
    out: as x; None: x itself is overwritten.

    docs/compat.md says what differs from vLLM.
    """
    check_slot("null_block_id", null_block_id)
    check_int("max_query_len", max_query_len, -1, MOST_TOKENS)
    check_tensor("weight", weight, ("dim", "width"), (None, None))
    width, out = weight.shape[1], x if out is None else out
    window = with_axes("conv_state", conv_state, 3, 3)
    tokens, room = with_axes("x", x, 2, 2), with_axes("out", out, 2, 2)
    if query_start_loc is None:
        tokens, room = tokens_last_to_first("x", tokens), tokens_last_to_first("out", room)
    batch = len(x)
    if query_start_loc is not None:  # what belongs to rows may be longer than there are rows
        if not isinstance(conv_state_indices, Tensor):
            raise ValueError("conv_state_indices must be given with query_start_loc: they say how many rows there are")
        batch = len(conv_state_indices)
        query_start_loc = contiguous(list_of("query_start_loc", query_start_loc, batch + 1))
    if num_accepted_tokens is not None:
        num_accepted_tokens = contiguous(list_of("num_accepted_tokens", num_accepted_tokens, batch))
    read, write = _read_and_write(window, batch, conv_state_indices, initial_state_idx, block_idx_last_scheduled_token)
    slots = Slots(
        read, write=write, accepted=num_accepted_tokens, cu_seqlens=query_start_loc,
        max_len=None if query_start_loc is None or max_query_len < 0 else max_query_len,
        null=-1 if conv_state_indices is None else null_block_id,
    )  # fmt: skip
    rolls_back = num_accepted_tokens is not None
    conv1d_step(
        window if rolls_back else window[..., : width - 1], tokens, contiguous(weight), contiguous(bias),
        activation=activation_of(activation), history=width - 2 if rolls_back else None, slots=slots, out=room,
    )  # fmt: skip
    return out


def _read_and_write(
    window: Tensor, batch: int, indices: Tensor | None, reads: Tensor | None, writes: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The slot that each row reads, and the one that it writes if that may be another."""
    if indices is None:
        return own_slots(window, batch), None
    table = table_of("conv_state_indices", indices, batch)
    read = _column_of(table, "initial_state_idx", reads)
    if reads is None and writes is None:
        return read, None
    return read, _column_of(table, "block_idx_last_scheduled_token", writes)


def _column_of(table: Tensor, name: str, columns: Tensor | None) -> Tensor:
    """The entry of each row in its column; -1 where there is no such column."""
    if columns is None:
        return table[:, 0]
    columns = list_of(name, columns, len(table)).long()
    inside = (columns >= 0) & (columns < table.shape[1])
    return torch.where(inside, table.gather(1, torch.where(inside, columns, 0)[:, None])[:, 0], -1)
