"""mamba2_step: the selective state update of Mamba-1 and Mamba-2. docs/ops/ derives it; this file defines it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashstate.reference.steps import step_at_once, step_tokens
from flashstate.state.slots import Slots
from flashstate.state.state import State


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), the identity above 20.

    Written with torch.exp and torch.log1p, as silu below with torch.exp: torch.nn.functional's versions round the last
    elements of a CPU tensor differently from the rest, so a row would depend on its neighbours.
    """
    return torch.where(x > 20.0, x, torch.log1p(torch.exp(x)))


def silu(x: Tensor) -> Tensor:
    return x / (1.0 + torch.exp(-x))


def mamba2_token(
    s: Tensor,  # (batch, H, D, N), float32 or float64: the dtype everything is computed in
    x: Tensor,  # (batch, H, D)
    dt: Tensor,  # (batch, H), or per channel (batch, H, D)
    A: Tensor,  # (H,), or (H, D, N)
    B: Tensor,  # (batch, G, N)
    C: Tensor,  # (batch, G, N)
    D: Tensor | None,  # (H,) or (H, D)
    z: Tensor | None,  # (batch, H, D)
    dt_bias: Tensor | None,  # (H,) or (H, D)
    dt_softplus: bool,
    dt_limit: tuple[float, float] | None = None,
    operand: Callable[[Tensor], Tensor] = lambda t: t,  # what products take of states
) -> tuple[Tensor, Tensor]:
    """One token: the output (batch, H, D) and the state after it (batch, H, D, N), both unrounded."""
    H = s.shape[1]
    x, dt = x.to(s.dtype), dt.to(s.dtype).reshape(*dt.shape[:2], *dt.shape[2:] or (1,))  # (batch, H, D or 1)
    bias = None if dt_bias is None else dt_bias.to(s.dtype).reshape(H, -1)
    dt = time_steps(dt, bias, dt_softplus, dt_limit)  # (batch, H, D or 1)
    s = state_after(s, x, dt, A, B)  # (batch, H, D, N)
    y = (operand(s) * per_head(C, s)[..., None, :]).sum(-1)  # (batch, H, D)
    if D is not None:
        y = y + D.to(s.dtype).reshape(H, -1) * x
    if z is not None:
        y = y * silu(z.to(s.dtype))
    return y, s


def mamba2_at_once(
    s: Tensor,  # (batch, H, D, N)
    x: Tensor,  # (batch, T, H, D)
    dt: Tensor,  # (batch, T, H)
    B: Tensor,  # (batch, T, G, N)
    C: Tensor,  # (batch, T, G, N)
    z: Tensor | None,  # (batch, T, H, D)
    exists: Tensor,  # (batch, T), bool: whether there is such a token; what does not exist may hold anything
    A: Tensor,  # (H,)
    D: Tensor | None,  # (H,) or (H, D)
    dt_bias: Tensor | None,  # (H,)
    dt_softplus: bool,
    dt_limit: tuple[float, float] | None = None,
) -> tuple[Tensor, Tensor]:
    """All tokens of rows: outputs (batch, T, H, D) and the states after them. Every sum of time steps is made on its
    own: a difference of long ones would lose what is short."""
    T, heads_per_group = x.shape[1], s.shape[1] // B.shape[2]
    x, dt, B, C = (
        torch.where(exists.reshape(*exists.shape, *(1,) * (t.dim() - 2)), t.to(s.dtype), 0.0) for t in (x, dt, B, C)
    )
    dt = time_steps(dt, None if dt_bias is None else dt_bias.to(s.dtype), dt_softplus, dt_limit)
    dt = torch.where(exists[..., None], dt, 0.0).transpose(1, 2)  # (batch, H, T)
    B, C = (t.repeat_interleave(heads_per_group, dim=2).transpose(1, 2) for t in (B, C))  # (batch, H, T, N)
    after = torch.ones(T, T, dtype=torch.bool, device=s.device).triu(1)  # [i, j]: token j comes after token i
    counted = torch.where(after.T[None, None], 0.0, dt[..., None])  # (batch, H, i, t): steps of tokens up to t
    between = after.to(s.dtype) @ counted  # (batch, H, i, t): steps of tokens after i, up to t
    total = counted.sum(-2)  # (batch, H, t): steps of all tokens up to t
    rate = A.to(s.dtype)[:, None]  # (H, 1)

    x = x.transpose(1, 2)  # (batch, H, T, D)
    lasting = torch.exp(rate[..., None] * between) * dt[..., None]  # (batch, H, i, t): how much of token i is left
    weights = torch.where(after.T, 0.0, B @ C.mT * lasting)  # (batch, H, i, t)
    y = torch.exp(rate * total)[..., None] * (C @ s.mT) + weights.mT @ x  # (batch, H, T, D)
    s = torch.exp(rate * total)[..., -1, None, None] * s + (x * lasting[..., -1:]).mT @ B  # (batch, H, D, N)
    y, x = y.transpose(1, 2), x.transpose(1, 2)
    if D is not None:
        y = y + D.to(s.dtype).reshape(s.shape[1], -1) * x
    if z is not None:
        y = y * silu(z.to(s.dtype))
    return y, s


def time_steps(dt: Tensor, dt_bias: Tensor | None, dt_softplus: bool, dt_limit: tuple[float, float] | None) -> Tensor:
    """Time steps as they count. NaN is within every limit."""
    dt = dt if dt_bias is None else dt + dt_bias
    dt = softplus(dt) if dt_softplus else dt
    return dt if dt_limit is None else dt.clamp(*dt_limit)


def state_after(s: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """The state after one token, whose time steps dt (batch, H, D or 1) are as they count."""
    A = A.to(s.dtype).reshape(s.shape[1], *A.shape[1:] or (1, 1))  # (H, D, N) or (H, 1, 1)
    dA = torch.exp(dt[..., None] * A)  # (batch, H, D or 1, N or 1)
    return s * dA + (dt * x)[..., None] * per_head(B, s)[..., None, :]  # (batch, H, D, N)


def per_head(values: Tensor, s: Tensor) -> Tensor:
    """Values of groups, (batch, G, N), for each of their heads, (batch, H, N)."""
    return values.to(s.dtype).repeat_interleave(s.shape[1] // values.shape[1], dim=1)


@torch.no_grad()
def mamba2_step(
    state: State,
    x: Tensor,  # (batch, T, H, D), (batch, H, D), or packed (tokens, H, D); the others alike
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float] | None,
    at_once: bool,
    slots: Slots | None,
    snapshots: State | None,
    update: bool,
    out: Tensor,
) -> None:
    """Every token of every row of the batch, on the pool: fills `out`, `snapshots` and, with `update`, the pool."""

    def token(s: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor | None) -> tuple[Tensor, Tensor]:
        return mamba2_token(s, x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit)

    activations = {"x": x, "dt": dt, "B": B, "C": C, "z": z}
    if at_once:
        parameters: dict[str, Any] = {"A": A, "D": D, "dt_bias": dt_bias, "z": None}  # z of every row, if it is given
        tokens = partial(mamba2_at_once, **parameters, dt_softplus=dt_softplus, dt_limit=dt_limit)
        step_at_once(state, activations, tokens, slots, update, out)
    else:
        step_tokens(state, activations, token, slots, snapshots, update, out)
