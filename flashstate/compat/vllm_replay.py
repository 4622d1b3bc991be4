"""vLLM's Mamba-2 from a checkpoint and a buffer of inputs, of vllm.model_executor.layers.mamba.ops:
selective_state_update_replayssm_output_only, and selective_state_update_replayssm_flashinfer of ssu_dispatch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashstate.basics import LARGEST_WINDOW
from flashstate.compat import flashinfer_replay, shapes
from flashstate.errors import INT64, check_flag, check_int, check_tensor
from flashstate.launch.doors import remembering
from flashstate.ops.mamba2_fold import mamba2_fold
from flashstate.ops.rings import place_counts
from flashstate.state.slots import Slots
from flashstate.state.state import MOST_ROUNDS, State


@remembering(main="x")
def selective_state_update_replayssm_output_only(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    z: Tensor | None = None,
    dt_softplus: bool = False,
    x_cache: Tensor | None = None,
    dt_cache: Tensor | None = None,
    B_cache: Tensor | None = None,
    bc_pre: Tensor | None = None,
    write_pos: Tensor | None = None,
    is_flush: Tensor | None = None,
    max_cache_len: int = 16,
    state_batch_indices: Tensor | None = None,
    null_block_id: int = 0,
    out: Tensor | None = None,
    enable_stochastic_rounding: bool = False,
    cache_philox_rounds: int = 0,
) -> Tensor:
    """Give the output of every row's token from its checkpoint and the `write_pos` tokens in its buffer; append the
    token there, or with `is_flush` store the state after it; fill and return `out`.

    state is (slots, heads, dim, dstate), x (batch, heads, dim), x_cache (slots, heads, max_cache_len, dim), write_pos
    and is_flush (batch,). docs/compat.md has the other arguments, and says what differs from vLLM.
    """
    check_int("null_block_id", null_block_id, *INT64)
    check_int("max_cache_len", max_cache_len, 1, LARGEST_WINDOW)
    state = shapes.with_axes("state", state, 3, 4)
    stored = state_of(state, enable_stochastic_rounding, cache_philox_rounds=cache_philox_rounds)
    tensors = shapes.step_tensors(state, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias)
    tensors["out"] = None if out is None else shapes.room_for_output(tensors["x"], out, x)  # else zeros for padding
    batch, axes = len(tensors["x"]), ("slots", "heads", "max_cache_len", "dim")
    check_tensor("x_cache", x_cache, axes, (None, None, max_cache_len, None))
    flags = _of_rows("is_flush", is_flush, batch, (torch.bool, torch.int8), state.device).view(torch.int8)
    counts = _of_rows("write_pos", write_pos, batch, (torch.int32,), state.device)
    slots = _slots(state, batch, state_batch_indices, null_block_id)
    before, after = (torch.empty(len(state), dtype=torch.int32, device=state.device) for _ in range(2))
    rows, folding = (torch.empty(batch, dtype=torch.int32, device=state.device) for _ in range(2))
    ring, longer = (
        flashinfer_replay.ring_of(state, x_cache, B_cache, dt_cache, shapes.slot_zeros(state), count, 1, max_cache_len)
        for count in (before, after)
    )
    place_counts(slots, counts, flags, max_cache_len, before, after, rows, folding)
    y = flashinfer_replay.replay(stored, ring, tensors, Slots(rows, padding="keep"), dt_softplus=dt_softplus)
    mamba2_fold(stored, longer, tensors["A"], slots=folding)
    return y.reshape(x.shape) if out is None else out


@remembering(main="x")
def selective_state_update_replayssm_flashinfer(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    out: Tensor,
    x_cache: Tensor,
    B_cache: Tensor,
    dt_cache: Tensor,
    ring_start: Tensor,
    prev_num_accepted_tokens: Tensor,
    prev_query_len: Tensor,
    logical_window: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    null_block_id: int = 0,
    scratch: tuple[Tensor, Tensor, Tensor] | None = None,
    update_trackers: bool = True,
    enable_stochastic_rounding: bool = False,
    stochastic_rounding_philox_rounds: int = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    enable_pdl: bool = False,
) -> Tensor:
    """Do what FlashInfer's checkpointing_ssu does; with update_trackers also move ring_start and
    prev_num_accepted_tokens on by the one token of every row. Fill and return `out`.

    x is (batch, heads, dim), (batch, T, heads, dim), or with cu_seqlens (tokens, heads, dim) or (1, tokens, heads,
    dim). docs/compat.md has the other arguments, and says what differs from vLLM.
    """
    check_flag("update_trackers", update_trackers)
    check_flag("enable_pdl", enable_pdl)
    check_int("null_block_id", null_block_id, *INT64)
    state = shapes.with_these_axes("state", state, "slots", "heads", "dim", "dstate")
    tokens: dict[str, Any] = {"x": x, "dt": dt, "B": B, "C": C, "out": out}
    rank, axis = 4 if isinstance(x, Tensor) and x.dim() == 3 else 0, 1 if cu_seqlens is None else 0
    wide = {name: shapes.with_axes(name, tensor, 3, rank, axis) for name, tensor in tokens.items()}
    given, longest = flashinfer_replay.tokens_of(state, tokens, wide, cu_seqlens, max_seqlen)
    stored = state_of(
        state, enable_stochastic_rounding, stochastic_rounding_philox_rounds=stochastic_rounding_philox_rounds
    )
    ring = flashinfer_replay.ring_of(state, x_cache, B_cache, dt_cache, ring_start, prev_num_accepted_tokens, longest)
    if logical_window != ring.window:
        rows = f"{ring.length} rows of x_cache without {longest} of new tokens"
        raise ValueError(f"logical_window must be {ring.window}, the {rows}, got {logical_window}")
    if isinstance(state_batch_indices, Tensor) and state_batch_indices.dim() == 2:
        batch, _ = shapes.rows_of(given["x"], cu_seqlens)
        state_batch_indices = shapes.table_of("state_batch_indices", state_batch_indices, batch)[:, 0]
    slots = flashinfer_replay.slots_of(state, given["x"], state_batch_indices, null_block_id, cu_seqlens, longest)
    moves = update_trackers and state_batch_indices is not None
    if moves and longest != 1:
        raise ValueError(f"update_trackers is for one token per row, got {longest}")
    plan = ring.plan(slots, None if cu_seqlens is not None else 1) if moves else None
    flashinfer_replay.replay(stored, ring, given, slots, plan, A=A, D=D, dt_bias=dt_bias, dt_softplus=dt_softplus)
    if plan is not None:
        ring.commit(plan)
    return out


def state_of(state: Any, stochastic: bool, **rounds: int) -> State | Tensor:
    """The state, with one new seed for all slots where it is rounded stochastically. `rounds`: under the name that the
    caller has for them."""
    check_flag("enable_stochastic_rounding", stochastic)
    ((name, number),) = rounds.items()
    check_int(name, number, 0, MOST_ROUNDS)
    if not stochastic:
        return state
    if isinstance(state, State):
        raise ValueError("enable_stochastic_rounding is for a tensor: a State says itself how it is rounded")
    return shapes.with_new_seed(state, number)


def _of_rows(name: str, numbers: Any, batch: int, dtypes: tuple[torch.dtype, ...], device: torch.device) -> Tensor:
    """The first entries of a list that has one or more for every row of the batch."""
    check_tensor(name, numbers, ("batch",), (None,), dtypes=dtypes, device=device)
    return shapes.first_of(name, numbers, batch)


def _slots(state: Tensor, batch: int, read: Any, null: int) -> Slots:
    """Where the rows of a batch live: in the first column of a table, or row b in slot b."""
    if read is None:
        return Slots(shapes.own_slots("state_batch_indices", state, batch))
    return Slots(shapes.table_of("state_batch_indices", read, batch, device=state.device)[:, 0], null=null)
