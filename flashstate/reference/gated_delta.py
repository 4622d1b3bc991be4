"""gated_delta_step: the gated delta rule of Gated DeltaNet and KDA. docs/ops/ derives it; this file defines it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashstate.reference.mamba2 import softplus
from flashstate.reference.steps import step_at_once, step_tokens
from flashstate.state.slots import Slots
from flashstate.state.state import State

EPSILON = 1e-6  # added to the sum of squares of q and of k before they are normalised


def sigmoid(x: Tensor) -> Tensor:
    """Written with torch.exp, whose result does not depend on where in a tensor an element is."""
    return 1.0 / (1.0 + torch.exp(-x))


def normalised(x: Tensor) -> Tensor:
    """Vectors of length 1, as far as they are not tiny."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPSILON)


def gates(
    a: Tensor, b: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, b_logit: bool | None
) -> tuple[Tensor, Tensor]:
    """alpha (..., HV, K or 1) and beta (..., HV) of a (..., HV), or per channel (..., HV, K), and b (..., HV)."""
    a = a if a.dim() > b.dim() else a[..., None]  # (..., HV, K or 1)
    beta = sigmoid(b) if b_logit or (b_logit is None and A_log is not None) else b
    return torch.exp(log_decay(a, A_log, dt_bias)), beta


def log_decay(a: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
    """The logarithm of alpha, (..., HV, K or 1), of a with these axes."""
    if A_log is None:
        return a
    if dt_bias is not None:
        a = a + dt_bias.to(a.dtype).reshape(a.shape[-2], -1)
    return -torch.exp(A_log.to(a.dtype))[:, None] * softplus(a)


def gated_delta_token(
    s: Tensor,  # (batch, HV, V, K), float32 or float64: the dtype everything is computed in
    q: Tensor,  # (batch, H, K)
    k: Tensor,  # (batch, H, K)
    v: Tensor,  # (batch, HV, V)
    a: Tensor,  # (batch, HV), or per channel (batch, HV, K)
    b: Tensor,  # (batch, HV)
    A_log: Tensor | None,  # (HV,)
    dt_bias: Tensor | None,  # (HV,) or (HV, K)
    b_logit: bool | None,
    scale: float | None,
    qk_l2norm: bool,
    operand: Callable[[Tensor], Tensor] = lambda t: t,  # what products take of states, and of what is added to them
    kept: Callable[[Tensor], Tensor] = lambda u: u,  # what is kept of u
) -> tuple[Tensor, Tensor]:
    """One token: the output (batch, HV, V) and the state after it (batch, HV, V, K), both unrounded."""
    heads_per_key = s.shape[1] // q.shape[1]
    q, k, v, a, b = (t.to(s.dtype) for t in (q, k, v, a, b))
    alpha, beta = gates(a, b, A_log, dt_bias, b_logit)  # (batch, HV, K or 1), (batch, HV)
    if qk_l2norm:
        q, k = normalised(q), normalised(k)
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    q, k = (t.repeat_interleave(heads_per_key, dim=1)[:, :, None, :] for t in (q, k))  # (batch, HV, 1, K)

    s = s * alpha[:, :, None, :]  # (batch, HV, V, K)
    u = kept(beta[..., None] * (v - (operand(s) * k).sum(-1)))  # (batch, HV, V)
    o = (operand(s) * q).sum(-1) + u * (k * q).sum(-1)  # the product of q with the state after the update
    s = s + operand(u)[..., None] * k
    return o, s


def gated_delta_at_once(
    s: Tensor,  # (batch, HV, V, K)
    q: Tensor,  # (batch, T, H, K)
    k: Tensor,  # (batch, T, H, K)
    v: Tensor,  # (batch, T, HV, V)
    a: Tensor,  # (batch, T, HV)
    b: Tensor,  # (batch, T, HV)
    exists: Tensor,  # (batch, T), bool: whether there is such a token; what does not exist may hold anything
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    b_logit: bool | None,
    scale: float | None,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor]:
    """All tokens of rows: outputs (batch, T, HV, V) and the states after them. The recurrence is carried out on the
    products of the initial state with all k and q; the state itself is read once and written once."""
    T, heads_per_key = q.shape[1], s.shape[1] // q.shape[2]
    q, k, v, a, b = (
        torch.where(exists.reshape(*exists.shape, *(1,) * (t.dim() - 2)), t.to(s.dtype), 0.0) for t in (q, k, v, a, b)
    )
    alpha, beta = gates(a, b, A_log, dt_bias, b_logit)
    alpha = torch.where(exists[..., None], alpha[..., 0], 1.0).transpose(1, 2)  # (batch, HV, T)
    beta = torch.where(exists[..., None], beta, 0.0).transpose(1, 2)  # (batch, HV, T)
    if qk_l2norm:
        q, k = normalised(q), normalised(k)
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    q, k = (t.repeat_interleave(heads_per_key, dim=2).transpose(1, 2) for t in (q, k))  # (batch, HV, T, K)

    sk, sq = s @ k.mT, s @ q.mT  # (batch, HV, V, T): products of the state with every k and q
    kk, kq = k @ k.mT, k @ q.mT  # (batch, HV, T, T)
    w, o = torch.zeros_like(sk), torch.zeros_like(sk)  # (batch, HV, V, T): u, decayed up to the last token; outputs
    total = torch.ones_like(alpha[..., 0])  # (batch, HV)
    for t in range(T):
        decay = alpha[..., t, None, None]  # (batch, HV, 1, 1)
        sk, sq, w = decay * sk, decay * sq, decay * w
        u = beta[..., t, None] * (v[:, t] - sk[..., t])  # (batch, HV, V)
        sk, sq = sk + u[..., None] * kk[..., t, None, :], sq + u[..., None] * kq[..., t, None, :]
        o[..., t], w[..., t] = sq[..., t], u
        total = total * alpha[..., t]
    s = total[..., None, None] * s + w @ k
    return o.permute(0, 3, 1, 2), s


@torch.no_grad()
def gated_delta_step(
    state: State,
    q: Tensor,  # (batch, T, H, K), (batch, H, K), or packed (tokens, H, K); the others alike
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    b_logit: bool | None,
    scale: float | None,
    qk_l2norm: bool,
    at_once: bool,
    slots: Slots | None,
    snapshots: State | None,
    update: bool,
    out: Tensor,
) -> None:
    """Every token of every row of the batch, on the pool: fills `out`, `snapshots` and, with `update`, the pool."""
    activations: dict[str, Tensor | None] = {"q": q, "k": k, "v": v, "a": a, "b": b}

    def token(s: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return gated_delta_token(s, q, k, v, a, b, A_log, dt_bias, b_logit, scale, qk_l2norm)

    if at_once:
        gates_of: dict[str, Any] = {"A_log": A_log, "dt_bias": dt_bias, "b_logit": b_logit}
        tokens = partial(gated_delta_at_once, **gates_of, scale=scale, qk_l2norm=qk_l2norm)
        step_at_once(state, activations, tokens, slots, update, out)
    else:
        step_tokens(state, activations, token, slots, snapshots, update, out)
