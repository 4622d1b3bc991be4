"""vLLM's selective_state_update, also from a buffer of inputs, and causal_conv1d_update, of
vllm.model_executor.layers.mamba.ops; its delta rules."""

from __future__ import annotations

import torch
from torch import Tensor

from flashstate.compat import shapes
from flashstate.compat.vllm_delta import (
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gated_delta_rule_packed_decode,
    fused_recurrent_kda,
    fused_sigmoid_gating_delta_rule_update,
)
from flashstate.compat.vllm_replay import (
    selective_state_update_replayssm_flashinfer,
    selective_state_update_replayssm_output_only,
    state_of,
)
from flashstate.errors import INT64, check_flag, check_int
from flashstate.launch.doors import remembering
from flashstate.ops.conv1d import CONV1D_STEP, conv1d_step
from flashstate.state.slots import MOST_TOKENS, Slots
from flashstate.state.state import State

__all__ = [
    "causal_conv1d_update",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gated_delta_rule_packed_decode",
    "fused_recurrent_kda",
    "fused_sigmoid_gating_delta_rule_update",
    "selective_state_update",
    "selective_state_update_replayssm_flashinfer",
    "selective_state_update_replayssm_output_only",
]


@remembering(main="x")
def selective_state_update(
    state: Tensor | State,
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
    *,
    exact: bool = True,
    max_query_len: int | None = None,
) -> Tensor:
    """Step every row by its tokens; update the state in place, and fill and return `out`.

    state is (slots, heads, dim, dstate), or a State of such data; x is (batch, heads, dim), or with `cu_seqlens`
    (tokens, heads, dim). A row in the null block gives zero. With num_accepted_tokens the state after token t goes to
    column t of the destinations; else the last one goes to the first. docs/compat.md has the other arguments, and says
    what differs from vLLM.
    """
    check_int("null_block_id", null_block_id, *INT64)
    pool = state.data if isinstance(state, State) else shapes.with_axes("state", state, 3, 4)
    tensors = shapes.step_tensors(pool, cu_seqlens is not None, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias)
    read, write, accepted = state_batch_indices, dst_state_batch_indices, num_accepted_tokens
    batch, bounds = shapes.rows_of(x, cu_seqlens)
    shapes.check_needs("state_batch_indices", read, dst_state_batch_indices=write, num_accepted_tokens=accepted)
    every = accepted is not None and bounds is not None  # every token has a place
    longest = shapes.most_at_once(len(x), bounds, exact or every, max_query_len)
    slots = _slots(pool, batch, read, write, accepted, bounds, null_block_id, every, longest)
    stored = state if isinstance(state, State) else pool
    stored = state_of(stored, enable_stochastic_rounding, cache_philox_rounds=cache_philox_rounds)
    return shapes.selective_step(stored, x, tensors, out, dt_softplus=dt_softplus, exact=exact, slots=slots)


def _slots(
    state: Tensor, batch: int, read: Tensor | None, write: Tensor | None, accepted: Tensor | None,
    cu_seqlens: Tensor | None, null: int, every: bool, longest: int | None,
) -> Slots | None:  # fmt: skip
    if read is None and cu_seqlens is None:
        return None
    if read is None:
        return Slots(shapes.own_slots("state_batch_indices", state, batch), cu_seqlens=cu_seqlens, max_len=longest)
    read = shapes.table_of("state_batch_indices", read, batch)
    if write is not None:
        write = shapes.table_of("dst_state_batch_indices", write, batch, read.shape[1] if every else 1)
    elif accepted is not None:
        write = read
    if write is not None and not every:
        write = write[:, 0]
    accepted = shapes.list_of("num_accepted_tokens", accepted, batch)
    chosen = accepted is not None
    return Slots(
        read if chosen else read[:, 0], write=write, accepted=accepted, cu_seqlens=cu_seqlens, null=null,
        max_len=longest, at_least_one=chosen,
    )  # fmt: skip


@remembering(main="x")
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
    validate_data: bool = False,
    out: Tensor | None = None,
    *,
    block_idx_last_scheduled_token: Tensor | None = None,
    initial_state_idx: Tensor | None = None,
) -> Tensor:
    """Convolve every row's tokens with the inputs before them; update conv_state in place, fill and return `out`.

    x is (batch, dim), (batch, dim, seqlen), or with `query_start_loc` (tokens, dim), and is overwritten without `out`.
    conv_state is (slots, dim, state_len). With num_accepted_tokens a row continues after so many tokens of the call
    before. docs/compat.md has the other arguments, and says what differs from vLLM.
    """
    check_int("null_block_id", null_block_id, *INT64)
    check_int("max_query_len", max_query_len, -1, MOST_TOKENS)
    check_flag("validate_data", validate_data)  # vLLM up to 0.32 has another argument in its place
    width, out = shapes.width_of(weight), x if out is None else out
    window = shapes.with_axes("conv_state", conv_state, 3, 3)
    packed = query_start_loc is not None
    if packed and conv_state_indices is None:
        raise ValueError("conv_state_indices must be given with query_start_loc: they say how many rows there are")
    tokens, room = x, out
    if not packed:
        tokens, room = shapes.tokens_before_channels("x", x, window.shape[1]), shapes.tokens_before_channels("out", out)
        shapes.check_like_x(out, x)
    if conv_state_indices is None:
        read, write = shapes.own_slots("conv_state_indices", window, len(x)), None
    else:
        batch = None if packed else len(x)  # all rows of the table
        table = shapes.table_of("conv_state_indices", conv_state_indices, batch, device=window.device)
        read = _column_of(table, "initial_state_idx", initial_state_idx)
        write = _column_of(table, "block_idx_last_scheduled_token", block_idx_last_scheduled_token)
        if initial_state_idx is None and block_idx_last_scheduled_token is None:
            write = None  # where it was read
    # What belongs to rows may be longer than there are rows.
    query_start_loc = shapes.list_of("query_start_loc", query_start_loc, len(read) + 1)
    num_accepted_tokens = shapes.list_of("num_accepted_tokens", num_accepted_tokens, len(read))
    rolls_back, history = num_accepted_tokens is not None, width - 2
    if rolls_back and block_idx_last_scheduled_token is not None and max_query_len == table.shape[1]:
        # vLLM then gives the columns of its table of blocks; rows have no more tokens than a window has room for.
        max_query_len = min(max_query_len, max(window.shape[2] - history, 1))
    slots = Slots(
        read, write=write, accepted=num_accepted_tokens, cu_seqlens=query_start_loc,
        max_len=None if query_start_loc is None or max_query_len < 0 else max_query_len,
        null=-1 if conv_state_indices is None else null_block_id,
    )  # fmt: skip
    conv1d_step(
        window if rolls_back else window[..., : width - 1], tokens,
        **shapes.fitted(CONV1D_STEP, weight=weight, bias=bias), activation=shapes.activation_of(activation),
        history=history if rolls_back else None, slots=slots, out=room,
    )  # fmt: skip
    return out


def _column_of(table: Tensor, name: str, columns: Tensor | None) -> Tensor:
    """The entry of each row in its column; -1 where there is no such column."""
    columns = shapes.list_of(name, columns, len(table), device=table.device)
    if columns is None:
        return table[:, 0]
    inside = (columns >= 0) & (columns < table.shape[1])
    return torch.where(inside, table.gather(1, torch.where(inside, columns, 0).long()[:, None])[:, 0], -1)
