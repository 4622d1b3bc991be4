"""vLLM's delta rules of Kimi layers, of vllm.models.kimi_k3.nvidia.ops.third_party.kda: raw gates per channel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashstate.compat import delta, shapes
from flashstate.compat.vllm_delta import step_blocks
from flashstate.errors import check_number, check_tensor
from flashstate.launch.doors import remembering
from flashstate.state.state import State


@remembering(main="v")
def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    initial_state: Tensor | State,
    cu_seqlens: Tensor,
    ssm_state_indices: Tensor,
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
    fuse_gate: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Step every row by its tokens, with raw gates; return the outputs and the tensor that holds the states.

    q, k are (1, tokens, H, K), v (1, tokens, H, V), raw_g (1, tokens, H, K), raw_beta (1, tokens, H), and initial_state
    is (slots, H, V, K). With a table of blocks the state after token t goes to column t. docs/compat.md has the other
    arguments, and says what differs from vLLM.
    """
    pool = delta.state_of("initial_state", initial_state)
    shapes.check_indices("cu_seqlens", cu_seqlens, "batch + 1")
    rows = delta.rows_of(q, k, v, cu_seqlens, pool)
    if out is not None:
        check_tensor("out", out, ("one", "tokens", "H", "V"), tuple(v.shape))
    (a, b), more = _gates(pool, v, raw_g, raw_beta, A_log, dt_bias, lower_bound)
    return step_blocks(
        initial_state, q, k, v, a, b, True, rows, ssm_state_indices, num_accepted_tokens, out=out, **more
    )


@remembering(main="mixed_qkv")
def fused_recurrent_kda_packed_decode(
    mixed_qkv: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    initial_state: Tensor | State,
    state_indices: Tensor,
    scale: float | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Step every row by one token, with raw gates; return the outputs and the tensor that holds the states.

    mixed_qkv (B, 2 * H * K + H * V) has q, k and v side by side, raw_g is (1, B, H, K), raw_beta (1, B, H),
    initial_state (slots, H, V, K) and out (1, B, H, V). A row in block 0 gives zero.
    """
    pool = delta.state_of("initial_state", initial_state)
    H, V, K = pool.shape[1:]
    check_tensor("mixed_qkv", mixed_qkv, ("B", "qkv_dim"), (None, H * (2 * K + V)), device=pool.device)
    sizes = [(H, K), (H, K), (H, V)]
    parts = shapes.rows_contiguous(mixed_qkv).split([heads * size for heads, size in sizes], 1)
    q, k, v = (part.unflatten(1, size)[:, None] for part, size in zip(parts, sizes, strict=True))  # (B, 1, H, K or V)
    shapes.check_indices("state_indices", state_indices, device=pool.device, B=len(v))
    if out is None:
        out = torch.empty_like(v, memory_format=torch.contiguous_format).transpose(0, 1)
    check_tensor("out", out, ("one", "B", "H", "V"), (1, len(v), H, V))
    gates, more = _gates(pool, v.transpose(0, 1), raw_g, raw_beta, A_log, dt_bias, lower_bound)
    a, b = (gate.transpose(0, 1) for gate in gates)
    step_blocks(
        initial_state, q, k, v, a, b, True, (len(v), None), state_indices, None, out=out.transpose(0, 1), scale=scale,
        **more,
    )  # fmt: skip
    return out, pool


def _gates(
    pool: Tensor, v: Tensor, raw_g: Any, raw_beta: Any, A_log: Any, dt_bias: Any, lower_bound: float | None
) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    """a and b of gated_delta_step, with the token axes of v, and what goes with them.

    A gate with a lower bound is lower_bound * sigmoid(exp(A_log) * (raw_g + dt_bias)), which torch computes first.
    """
    H, K = pool.shape[1::2]
    a, b = delta.gate_of("raw_g", raw_g, v, H, K), delta.gate_of("raw_beta", raw_beta, v, H)
    A_log = delta.of_heads("A_log", A_log, H)
    if dt_bias is not None:
        dt_bias = delta.of_heads("dt_bias", dt_bias, H, K)
    more = {"b_logit": True, "qk_l2norm": True}
    if lower_bound is None:
        return (a, b), {**more, "A_log": A_log, "dt_bias": dt_bias}
    check_number("lower_bound", lower_bound)
    a = a.float() if dt_bias is None else a.float() + dt_bias.float()
    return (lower_bound * torch.sigmoid(torch.exp(A_log.float())[:, None] * a), b), more
