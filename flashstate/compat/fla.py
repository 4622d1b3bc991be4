"""flash-linear-attention's fused_recurrent_gated_delta_rule and fused_recurrent_kda, of fla.ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashstate.compat import delta, shapes
from flashstate.errors import check_flag, check_tensor
from flashstate.launch.doors import remembering
from flashstate.state.slots import Slots
from flashstate.state.state import State

NO_EQUATION = "gated_delta_step has no such gate"


@remembering(main="v")
def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Any = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Step every row by its tokens; return the outputs, and with output_final_state new states in float32.

    q, k are (B, T, H, K), v (B, T, HV, V), g and beta (B, T, HV), gk (B, T, HV, K), initial_state (N, HV, K, V), which
    stays as it is. docs/compat.md has the other arguments, and says what differs from fla.
    """
    delta.check_absent(NO_EQUATION, gv=gv)
    shapes.check_not_both(g=g, gk=gk)
    rows = delta.rows_of(q, k, v, cu_seqlens)
    HV, K = v.shape[2], q.shape[3]
    raw, logit = _gates_in_kernel(use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    if raw:
        delta.check_absent("gates in the kernel are of g", gk=gk)
    if gk is not None:
        a = delta.gate_of("gk", gk, v, HV, K)
    else:
        a = delta.one_gate(v, 0.0) if g is None and not raw else delta.gate_of("g", g, v, HV)
    b = delta.one_gate(v, 1.0) if beta is None and not logit else delta.gate_of("beta", beta, v, HV)
    return _functional(
        q, k, v, a, b, initial_state, output_final_state, _v_first(state_v_first, kwargs), rows, scale=scale,
        qk_l2norm=use_qk_l2norm_in_kernel, b_logit=logit, A_log=delta.of_heads("A_log", A_log, HV) if raw else None,
        dt_bias=delta.of_heads("dt_bias", dt_bias, HV) if raw and dt_bias is not None else None,
    )  # fmt: skip


@remembering(main="v")
def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Step every row by its tokens; return the outputs, and with output_final_state new states in float32.

    q, k are (B, T, H, K), v (B, T, HV, V), g (B, T, HV, K), beta (B, T, HV), initial_state (N, HV, K, V), which stays
    as it is. docs/compat.md has the other arguments, and says what differs from fla.
    """
    rows = delta.rows_of(q, k, v, cu_seqlens)
    HV, K = v.shape[2], q.shape[3]
    raw, logit = _gates_in_kernel(use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    if raw:
        delta.check_absent(NO_EQUATION, lower_bound=lower_bound)
    return _functional(
        q, k, v, delta.gate_of("g", g, v, HV, K), delta.gate_of("beta", beta, v, HV), initial_state,
        output_final_state, _v_first(state_v_first, kwargs), rows, scale=scale,
        qk_l2norm=use_qk_l2norm_in_kernel, b_logit=logit, A_log=delta.of_heads("A_log", A_log, HV) if raw else None,
        dt_bias=delta.of_heads("dt_bias", dt_bias, HV, K) if raw and dt_bias is not None else None,
    )  # fmt: skip


def _gates_in_kernel(gate: Any, sigmoid: Any, negative: Any) -> tuple[bool, bool]:
    """Whether the decay comes raw, and whether beta does."""
    check_flag("use_gate_in_kernel", gate)
    check_flag("use_beta_sigmoid_in_kernel", sigmoid)
    delta.check_absent(NO_EQUATION, allow_neg_eigval=negative)
    return bool(gate), bool(sigmoid)


def _v_first(state_v_first: Any, more: dict[str, Any]) -> bool:
    """Whether states are (N, HV, V, K), also by the name that this argument had before; others are not looked at."""
    if more.get("head_first"):
        raise ValueError(f"head_first must be False, got {more['head_first']!r}: tokens come before heads")
    old = more.get("transpose_state_layout", False)
    for name, flag in (("state_v_first", state_v_first), ("transpose_state_layout", old)):
        check_flag(name, flag)
    if state_v_first and "transpose_state_layout" in more:
        raise ValueError("state_v_first and transpose_state_layout must not both be given")
    return bool(state_v_first or old)


def _functional(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, initial: Tensor | None, keep: bool, v_first: bool,
    rows: delta.Rows, **more: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Step states that are not changed, or zeros; return outputs, and with `keep` the states after the last tokens."""
    batch, bounds = rows
    axes = ("N", "HV", "V", "K") if v_first else ("N", "HV", "K", "V")
    sizes = {"N": batch, "HV": v.shape[2], "V": v.shape[3], "K": q.shape[3]}
    shape = tuple(sizes[axis] for axis in axes)
    final = snapshots = None
    if initial is None:
        state = final = torch.zeros(shape, dtype=torch.float32, device=v.device)
    else:
        check_tensor("initial_state", initial, axes, shape, device=v.device)
        if not keep:
            state = initial.contiguous()
        elif bounds is None and v.shape[1] == 1:  # what is read need not be what is written
            state, final = initial.contiguous(), torch.empty(shape, dtype=torch.float32, device=v.device)
            snapshots = State((final if v_first else final.mT)[:, None])
        else:
            state = final = initial.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    pool = state if v_first else state.mT  # (N, HV, V, K)
    slots = None if bounds is None else Slots(shapes.own_slots("initial_state", pool, batch), cu_seqlens=bounds)
    y = delta.delta_step(
        pool, q, k, v, a, b, packed=bounds is not None, slots=slots, snapshots=snapshots,
        update=bool(keep) and snapshots is None, **more,
    )  # fmt: skip
    return y, final if keep else None
