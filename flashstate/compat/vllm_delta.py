"""vLLM's gated delta rules, of vllm.third_party.flash_linear_attention.ops; flashstate.compat.vllm has them too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashstate.compat import delta, shapes
from flashstate.errors import check_flag
from flashstate.launch.doors import remembering
from flashstate.state.slots import Slots
from flashstate.state.state import State

NULL_BLOCK = 0


@remembering(main="mixed_qkv")
def fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor | State,
    out: Tensor,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    """Step every row by one token; update the state in place, fill `out`, and return both.

    mixed_qkv (B, 2 * H * K + HV * V) has q, k and v side by side, a and b are (B, HV), initial_state is (slots, HV, V,
    K) and out (B, 1, HV, V). A row in block 0 gives zero. docs/compat.md says what differs from vLLM.
    """
    return delta.packed_decode(
        mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices, use_qk_l2norm_in_kernel,
        per_channel=False, null=NULL_BLOCK,
    )  # fmt: skip


@remembering(main="v")
def fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor,
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
    scale: float | None = None,
    initial_state: Tensor | State | None = None,
    inplace_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    is_kda: bool = False,
    *,
    exact: bool = True,
    max_query_len: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Step every row by its tokens, with raw gates; return the outputs and the tensor that holds the states.

    q, k are (B, T, H, K), v (B, T, HV, V), a, b (B, T, HV) or (B * T, HV), with is_kda a also per channel, and
    initial_state is (slots, HV, V, K). With a table of blocks the state after token t goes to column t. docs/compat.md
    has the other arguments, and says what differs from vLLM.
    """
    delta.check_softplus(beta=beta, threshold=threshold)
    check_flag("is_kda", is_kda)
    pool = delta.state_of("initial_state", initial_state)
    HV, K = pool.shape[1::2]
    rows = delta.rows_of(q, k, v, cu_seqlens, pool)
    channels = (K,) if is_kda else ()
    return step_blocks(
        initial_state, q, k, v, delta.gate_of("a", a, v, HV, *channels), delta.gate_of("b", b, v, HV),
        inplace_final_state, rows, ssm_state_indices, num_accepted_tokens, scale=scale, exact=exact,
        max_query_len=max_query_len, qk_l2norm=use_qk_l2norm_in_kernel, A_log=delta.of_heads("A_log", A_log, HV),
        dt_bias=delta.of_heads("dt_bias", dt_bias, HV, *channels),
    )  # fmt: skip


@remembering(main="v")
def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | State | None = None,
    inplace_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    exact: bool = True,
    max_query_len: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Step every row by its tokens, with given decays; return the outputs and the tensor that holds the states.

    q, k are (B, T, H, K), v (B, T, HV, V), g (B, T, HV) the logarithm of the decay, beta (B, T, HV), and initial_state
    is (slots, HV, V, K). With a table of blocks the state after token t goes to column t. docs/compat.md has the other
    arguments, and says what differs from vLLM.
    """
    pool = delta.state_of("initial_state", initial_state)
    rows = delta.rows_of(q, k, v, cu_seqlens, pool)
    beta = delta.one_gate(v, 1.0) if beta is None else delta.gate_of("beta", beta, v, pool.shape[1])
    return step_blocks(
        initial_state, q, k, v, delta.gate_of("g", g, v, pool.shape[1]), beta, inplace_final_state, rows,
        ssm_state_indices, num_accepted_tokens, scale=scale, qk_l2norm=use_qk_l2norm_in_kernel, exact=exact,
        max_query_len=max_query_len,
    )  # fmt: skip


@remembering(main="v")
def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | State | None = None,
    inplace_final_state: bool = True,
    use_qk_l2norm_in_kernel: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Step every row by its tokens; return the outputs and the tensor that holds the states.

    q, k are (B, T, H, K), v (B, T, HV, V), g (B, T, HV, K) the logarithm of the decay, beta (B, T, HV), and
    initial_state is (slots, HV, V, K). docs/compat.md has the other arguments, and says what differs from vLLM.
    """
    counts = kwargs.get("num_accepted_tokens")
    delta.check_absent("fused_sigmoid_gating_delta_rule_update takes it", num_accepted_tokens=counts)
    pool = delta.state_of("initial_state", initial_state)
    HV, K = pool.shape[1::2]
    rows = delta.rows_of(q, k, v, cu_seqlens, pool)
    return step_blocks(
        initial_state, q, k, v, delta.gate_of("g", g, v, HV, K), delta.gate_of("beta", beta, v, HV),
        inplace_final_state, rows, ssm_state_indices, None, scale=scale, qk_l2norm=use_qk_l2norm_in_kernel,
    )  # fmt: skip


def step_blocks(
    pool: Any, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, in_place: bool, rows: delta.Rows,
    indices: Tensor | None, accepted: Tensor | None, exact: bool = True, max_query_len: int | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Step rows from block to block; return the outputs, and the pool, or with in_place=False a state per token."""
    check_flag("inplace_final_state", in_place)
    batch, bounds = rows
    steps, packed, snapshots = v.shape[1], bounds is not None, None
    states = delta.state_of("initial_state", pool)
    if not in_place:
        if packed:
            raise ValueError("inplace_final_state=False is for rows of equal length: cu_seqlens must be None")
        if isinstance(pool, State):
            raise ValueError("inplace_final_state=False is for a tensor of states, got a State")
        states = torch.empty(batch * steps, *pool.shape[1:], dtype=pool.dtype, device=pool.device)
        snapshots = State(states.unflatten(0, (batch, steps)))
    slots = _slots(batch, steps, bounds, indices, accepted, in_place, v.device, exact, max_query_len)
    y = delta.delta_step(
        pool, q, k, v, a, b, packed=packed, slots=slots, snapshots=snapshots, update=in_place, exact=exact, **more
    )
    return y, states


def _slots(
    batch: int, steps: int, cu_seqlens: Tensor | None, indices: Tensor | None, accepted: Tensor | None,
    update: bool, device: torch.device, exact: bool, max_query_len: int | None,
) -> Slots:  # fmt: skip
    """A list has the blocks of rows, a table one for every token, of which the accepted one is read, or the first."""
    read = shapes.table_of("ssm_state_indices", indices, batch, device=device)
    write = None
    if update and isinstance(indices, Tensor) and indices.dim() == 2:
        columns = steps if cu_seqlens is None else read.shape[1]
        write = shapes.table_of("ssm_state_indices", indices, batch, columns)[:, :columns]
    accepted = shapes.list_of("num_accepted_tokens", accepted, batch)
    return Slots(
        read[:, 0] if accepted is None else read, write=write, accepted=accepted, cu_seqlens=cu_seqlens,
        null=NULL_BLOCK, max_len=shapes.most_at_once(steps, cu_seqlens, exact or write is not None, max_query_len),
    )  # fmt: skip
