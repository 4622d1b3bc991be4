"""mamba2_replay and mamba2_fold: Mamba-2 from a checkpoint and a ring of inputs; this file defines them."""

from __future__ import annotations

import torch
from torch import Tensor

from flashstate.reference.mamba2 import mamba2_token, state_after, time_steps
from flashstate.reference.rings import BEFORE_THE_FIRST_TOKEN, rows_and_rings, store_folded
from flashstate.reference.state_io import store_output, store_state
from flashstate.reference.steps import states_of
from flashstate.state.ring import Plan, Ring
from flashstate.state.slots import Slots
from flashstate.state.state import State


def replayed(ring: Ring, s: Tensor, slot: Tensor, start: Tensor, live: Tensor, A: Tensor) -> Tensor:
    """States (batch, H, D, N) after the first `live` rows of the rings in these slots, in the dtype of `s`."""
    s = s.clone()
    for j in range(int(live.max()) if len(live) else 0):
        runs = j < live
        at, row = slot[runs], (start[runs] + j) % ring.length
        dt = ring.dt[at, :, row].to(s.dtype)[..., None]  # (batch, H, 1)
        s[runs] = state_after(s[runs], ring.x[at, :, row].to(s.dtype), dt, A, ring.B[at, :, row])
    return s


@torch.no_grad()
def mamba2_replay(
    state: State,
    ring: Ring,
    x: Tensor,  # (batch, T, H, D), (batch, H, D), or packed (tokens, H, D); the others alike
    dt: Tensor,  # (..., H)
    A: Tensor,  # (H,)
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float] | None,
    plan: Plan | None,
    slots: Slots | None,
    longest: int,
    update: bool,
    out: Tensor,
) -> None:
    """Every token of every row of the batch, from what its checkpoint and its ring say: fills `out`; with `update` it
    folds rings that would overflow, and appends the tokens."""
    lead = out.dim() - 2  # token axes
    x, dt, B, C = (tensor.flatten(0, lead - 1) for tensor in (x, dt, B, C))
    z = None if z is None else z.flatten(0, lead - 1)
    (at, y, slot, known, gives), (start, live, fold) = rows_and_rings(ring, plan, slots, out, lead, longest)

    s = replayed(ring, states_of(state, slot), slot, start, live, A)  # (batch, H, D, N)
    if update:
        to, index = torch.where(fold, slot, -1), torch.full_like(slot, BEFORE_THE_FIRST_TOKEN)
        store_state(state, s, (to,), state.seeds_of(slot), index)
    for t in range(min(longest, at.shape[1])):
        runs = gives & (at[:, t] >= 0)
        here = at[runs, t]
        gate = None if z is None else z[here]
        token = (x[here], dt[here], A, B[here], C[here], D, gate, dt_bias, dt_softplus, dt_limit)
        y[here], s[runs] = mamba2_token(s[runs], *token)
        if update:
            into = runs & known
            new, row = at[into, t], (start + live + t)[into] % ring.length
            sizes = time_steps(dt[new].float(), None if dt_bias is None else dt_bias.float(), dt_softplus, dt_limit)
            append(ring, slot[into], row, x[new], sizes, B[new])
    store_output(out, y, at, known, slots)


def append(ring: Ring, slot: Tensor, row: Tensor, x: Tensor, dt: Tensor, B: Tensor) -> None:
    """Put x, dt and B of a token into a row of the ring of each slot: dt as it counts."""
    ring.x[slot, :, row] = x
    ring.B[slot, :, row] = B
    ring.dt[slot, :, row] = dt


@torch.no_grad()
def mamba2_fold(
    state: State, ring: Ring, A: Tensor, slots: Slots | None, tokens: Tensor | int | None, into: State | None
) -> None:
    """Store the states after so many live tokens, (batch,) or one number: in place, or in slots of another State."""
    store_folded(state, ring, lambda s, slot, start, live: replayed(ring, s, slot, start, live, A), slots, tokens, into)
