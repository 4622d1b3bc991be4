"""SGLang's causal_conv1d_update and selective_state_update, of sglang.kernels.ops.mamba, and its delta rules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashstate.compat import shapes, trees
from flashstate.compat.sglang_delta import (
    fused_recurrent_gated_delta_rule_packed_decode,
    fused_recurrent_gated_delta_rule_update,
    fused_recurrent_kda_packed_decode,
    fused_sigmoid_gating_delta_rule_update,
    verify_slots,
)
from flashstate.errors import INT64, check_device, check_flag, check_int, check_tensor, dtype_name
from flashstate.launch.doors import remembering
from flashstate.ops.conv1d import CONV1D_STEP, conv1d_step
from flashstate.state.slots import MOST_TOKENS, Slots
from flashstate.state.state import MOST_ROUNDS, State

__all__ = [
    "causal_conv1d_update",
    "fused_recurrent_gated_delta_rule_packed_decode",
    "fused_recurrent_gated_delta_rule_update",
    "fused_recurrent_kda_packed_decode",
    "fused_sigmoid_gating_delta_rule_update",
    "selective_state_update",
]


@remembering(main="x")
def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: bool | str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    num_accept_tokens: Tensor | None = None,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    retrieve_next_token: Tensor | None = None,
    retrieve_next_sibling: Tensor | None = None,
    retrieve_parent_token: Tensor | None = None,
    pad_slot_id: int = -1,
    metadata: Any = None,
    validate_data: bool = False,
) -> Tensor:
    """Convolve every row's tokens with the inputs before them; update conv_state in place, return a tensor like x.

    x is (batch, dim) or (batch, dim, seqlen), conv_state (slots, dim, state_len). The intermediate windows receive the
    last inputs after every token. With retrieve_next_token tokens form a tree, whose parents are written to
    retrieve_parent_token. This is SGLang's function in Triton: it reads the first width - 1 entries of a longer state,
    where the compiled one reads the last, so a longer state that could be meant for either is refused. docs/compat.md
    has the other arguments, and says what differs from SGLang.
    """
    check_int("pad_slot_id", pad_slot_id, *INT64)
    width = shapes.width_of(weight)
    window = shapes.with_axes("conv_state", conv_state, 3, 3)
    tokens = shapes.tokens_before_channels("x", x, window.shape[1])
    check_device("x", x, window.device)
    batch, steps = len(x), tokens.shape[1] if x.dim() == 3 else 1
    if conv_state_indices is None:
        read = shapes.own_slots("conv_state_indices", window, batch)
    else:
        shapes.check_indices("conv_state_indices", conv_state_indices, device=window.device, batch=batch)
        read = conv_state_indices.contiguous()
    rolls_back, ring = num_accept_tokens is not None, cache_seqlens is not None
    of_triton = rolls_back or intermediate_conv_window is not None or retrieve_next_token is not None
    if window.shape[2] > width - 1 and not ring and not of_triton:
        others = "SGLang's Triton convolution reads the first entries of a longer one, its compiled one the last"
        remedy = f"give conv_state[..., :{width - 1}] or conv_state[..., -{width - 1}:]"
        got = f"got {tuple(window.shape)}; {others}: {remedy}"
        raise ValueError(f"conv_state must have shape (slots, dim, {width - 1}), {got}")
    parents = _parents(x, steps, retrieve_next_token, retrieve_next_sibling, retrieve_parent_token)
    slots = Slots(
        read, accepted=shapes.list_of("num_accept_tokens", num_accept_tokens, batch),
        snapshot_rows=shapes.list_of("intermediate_state_indices", intermediate_state_indices, batch),
        parents=trees.parents_of("retrieve_parent_token", parents, batch, steps, read.device),
        null=-1 if conv_state_indices is None else pad_slot_id,
    )  # fmt: skip
    y = conv1d_step(
        window if rolls_back or ring else window[..., : width - 1], tokens,
        **shapes.fitted(CONV1D_STEP, weight=weight, bias=bias, positions=cache_seqlens),
        activation=shapes.activation_of(activation), history=width - 2 if rolls_back else None, slots=slots,
        snapshots=intermediate_conv_window, update=parents is None,
        out=None if torch.compiler.is_compiling() else torch.empty_like(tokens),  # in memory as x is
    )  # fmt: skip
    if parents is not None and retrieve_parent_token is not None:
        retrieve_parent_token[:batch, :steps].copy_(parents)
    return shapes.tokens_before_channels("out", y)


def _parents(x: Tensor, steps: int, child: Any, sibling: Any, parent: Any) -> Tensor | None:
    """The parents of a tree of tokens, if there is one. `parent`: where they will be written, checked here."""
    if child is None:
        return None
    tables = {"retrieve_next_token": child, "retrieve_next_sibling": sibling}
    for name, table in (tables if parent is None else {**tables, "retrieve_parent_token": parent}).items():
        shapes.check_indices(name, table, "batch", "T")
        tables[name] = shapes.table_of(name, table, len(x), steps, device=x.device)[:, :steps]
    return trees.parents_from(tables["retrieve_next_token"], tables["retrieve_next_sibling"])


@remembering(main="x")
def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    out: Tensor | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    enable_stochastic_rounding: bool = False,
    cache_philox_rounds: int = 0,
) -> Tensor:
    """Step every row by its tokens; update the state in place, and fill and return `out`.

    state is (slots, heads, dim, dstate), x (batch, heads, dim) or (batch, T, heads, dim). The buffer receives the state
    after every token; with retrieve_parent_token tokens form a tree. docs/compat.md has the other arguments, and says
    what differs from SGLang.
    """
    check_flag("disable_state_update", disable_state_update)
    check_flag("enable_stochastic_rounding", enable_stochastic_rounding)
    check_int("pad_slot_id", pad_slot_id, *INT64)
    check_int("cache_philox_rounds", cache_philox_rounds, 0, MOST_ROUNDS)
    if cache_steps is not None:
        check_int("cache_steps", cache_steps, 0, MOST_TOKENS)
    state = shapes.with_axes("state", state, 3, 4)
    several = isinstance(x, Tensor) and x.dim() == 4
    given: dict[str, Any] = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias}
    tensors = shapes.step_tensors(state, rank=4 if several else 3, **given)
    read, rows, buffer = state_batch_indices, intermediate_state_indices, intermediate_states_buffer
    if read is None:
        read, pad_slot_id = shapes.own_slots("state_batch_indices", state, len(x)), -1
    else:
        shapes.check_indices("state_batch_indices", read, device=state.device, batch=len(x))
        read = read.contiguous()
    rows = read if rows is None and buffer is not None else rows
    snapshots = None if buffer is None else _snapshots(buffer, state)
    slots = verify_slots(
        read, x.shape[1] if several else 1, disable_state_update, rows, retrieve_parent_token, pad_slot_id
    )
    stored = _stochastic(state, cache_philox_rounds) if enable_stochastic_rounding else state
    return shapes.selective_step(
        stored, x, tensors, out, dt_softplus=dt_softplus, slots=slots, snapshots=snapshots,
        update=not disable_state_update,
    )  # fmt: skip


def _snapshots(buffer: Any, state: Tensor) -> State:
    """Return the buffer for the state after every token, with a head axis where it lacks one."""
    snapshots = shapes.with_axes("intermediate_states_buffer", buffer, 4, 5, 2)
    if snapshots.shape[2:] != state.shape[1:]:
        axes = ("rows", "steps", "heads", "dim", "dstate")
        check_tensor("intermediate_states_buffer", buffer, axes, (None, None, *state.shape[1:]))
    return State(snapshots)


def _stochastic(state: Tensor, rounds: int) -> State:
    """The state, rounded with new random bits."""
    if state.dtype != torch.float16:
        raise ValueError(f"enable_stochastic_rounding is for a state of float16, got {dtype_name(state.dtype)}")
    return shapes.with_new_seed(state, rounds)
