"""mamba2_step: the selective state update of Mamba-1 and Mamba-2. docs/ops/ derives it; this file defines it."""

from __future__ import annotations

import torch
from torch import Tensor

from flashstate.reference.steps import step_tokens
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
) -> tuple[Tensor, Tensor]:
    """One token: the output (batch, H, D) and the state after it (batch, H, D, N), both unrounded."""
    H = s.shape[1]
    x, dt = x.to(s.dtype), dt.to(s.dtype).reshape(*dt.shape[:2], *dt.shape[2:] or (1,))  # (batch, H, D or 1)
    bias = None if dt_bias is None else dt_bias.to(s.dtype).reshape(H, -1)
    dt = time_steps(dt, bias, dt_softplus, dt_limit)  # (batch, H, D or 1)
    s = state_after(s, x, dt, A, B)  # (batch, H, D, N)
    y = (s * per_head(C, s)[..., None, :]).sum(-1)  # (batch, H, D)
    if D is not None:
        y = y + D.to(s.dtype).reshape(H, -1) * x
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
    slots: Slots | None,
    snapshots: State | None,
    update: bool,
    out: Tensor,
) -> None:
    """Every token of every row of the batch, on the pool: fills `out`, `snapshots` and, with `update`, the pool."""

    def token(s: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor | None) -> tuple[Tensor, Tensor]:
        return mamba2_token(s, x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit)

    step_tokens(state, {"x": x, "dt": dt, "B": B, "C": C, "z": z}, token, slots, snapshots, update, out)
