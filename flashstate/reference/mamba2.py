"""mamba2_step: the selective state update of Mamba-2. docs/ops.md derives it; this file defines it."""

from __future__ import annotations

import torch
from torch import Tensor

from flashstate.reference.state_io import load_state, resolve_slots, store_state
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
    dt: Tensor,  # (batch, H)
    A: Tensor,  # (H,)
    B: Tensor,  # (batch, G, N)
    C: Tensor,  # (batch, G, N)
    D: Tensor | None,  # (H,) or (H, D)
    z: Tensor | None,  # (batch, H, D)
    dt_bias: Tensor | None,  # (H,)
    dt_softplus: bool,
) -> tuple[Tensor, Tensor]:
    """One token: the output (batch, H, D) and the state after it (batch, H, D, N), both unrounded."""
    heads_per_group = s.shape[1] // B.shape[1]
    x, dt, A = x.to(s.dtype), dt.to(s.dtype), A.to(s.dtype)
    B = B.to(s.dtype).repeat_interleave(heads_per_group, dim=1)  # (batch, H, N)
    C = C.to(s.dtype).repeat_interleave(heads_per_group, dim=1)  # (batch, H, N)

    if dt_bias is not None:
        dt = dt + dt_bias.to(s.dtype)
    if dt_softplus:
        dt = softplus(dt)  # (batch, H)
    dA = torch.exp(dt * A)  # (batch, H)
    s = s * dA[..., None, None] + (dt[..., None] * x)[..., None] * B[..., None, :]  # (batch, H, D, N)
    y = (s * C[..., None, :]).sum(-1)  # (batch, H, D)
    if D is not None:
        y = y + D.to(s.dtype).reshape(s.shape[1], -1) * x
    if z is not None:
        y = y * silu(z.to(s.dtype))
    return y, s


@torch.no_grad()
def mamba2_step(
    state: State,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    slots: Slots | None,
    update: bool,
    out: Tensor,
) -> None:
    """One token for every row of the batch, on the pool: fills `out` and, with `update`, the slots written."""
    read, write = resolve_slots(slots, x.shape[0], state.data.shape[0], x.device)
    live = read >= 0
    s = load_state(state, read)
    gate = None if z is None else z[live]
    y, s = mamba2_token(s, x[live], dt[live], A, B[live], C[live], D, gate, dt_bias, dt_softplus)
    out.zero_()
    out[live] = y.to(out.dtype)
    if update:
        store_state(state, s, read, write)
