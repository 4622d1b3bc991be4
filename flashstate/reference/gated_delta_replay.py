"""gated_delta_replay and gated_delta_fold: the delta rule from a checkpoint and a ring of what tokens added to it; this
file defines them."""

from __future__ import annotations

import torch
from torch import Tensor

from flashstate.reference.gated_delta import gated_delta_token, log_decay, normalised
from flashstate.reference.rings import BEFORE_THE_FIRST_TOKEN, rows_and_rings, store_folded
from flashstate.reference.state_io import encoded, put, store_output
from flashstate.reference.steps import states_of
from flashstate.state.formats import decode
from flashstate.state.ring import DeltaRing, Plan
from flashstate.state.slots import Slots
from flashstate.state.state import State


def as_kept(u: Tensor, dtype: torch.dtype) -> Tensor:
    """u as a ring of this dtype keeps it, in its own dtype: to nearest, and no finite value becomes infinite."""
    largest = torch.finfo(dtype).max
    return torch.where(u.isinf(), u, u.clamp(-largest, largest)).to(dtype).to(u.dtype)


def replayed(
    ring: DeltaRing,
    s: Tensor,  # (batch, HV, V, K)
    slot: Tensor,
    start: Tensor,
    live: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    qk_l2norm: bool,
) -> Tensor:
    """States after the first `live` rows of the rings in these slots, in the dtype of `s`."""
    s, heads_per_key = s.clone(), s.shape[1] // ring.k.shape[1]
    for j in range(int(live.max()) if len(live) else 0):
        runs = j < live
        at, row = slot[runs], (start[runs] + j) % ring.length
        k, u, g = (getattr(ring, name)[at, :, row].to(s.dtype) for name in ring.written)
        k = (normalised(k) if qk_l2norm else k).repeat_interleave(heads_per_key, 1)  # (batch, HV, K)
        g = log_decay(g, A_log, dt_bias) if ring.per_channel else g[..., None]  # (batch, HV, K or 1)
        s[runs] = s[runs] * torch.exp(g)[:, :, None, :] + u[..., None] * k[:, :, None, :]
    return s


@torch.no_grad()
def gated_delta_replay(
    state: State,
    ring: DeltaRing,
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
    plan: Plan | None,
    slots: Slots | None,
    longest: int,
    update: bool,
    out: Tensor,
) -> None:
    """Every token of every row of the batch, from what its checkpoint and its ring say: fills `out`; with `update` it
    folds rings that would overflow, and appends the tokens."""
    lead = out.dim() - 2  # token axes
    tokens = [tensor.flatten(0, lead - 1) for tensor in (q, k, v, a, b)]
    (at, y, slot, known, gives), (start, live, fold) = rows_and_rings(ring, plan, slots, out, lead, longest)

    s = replayed(ring, states_of(state, slot), slot, start, live, A_log, dt_bias, qk_l2norm)  # (batch, HV, V, K)
    folds = slot[fold]
    stored = encoded(state, s[fold], state.seeds_of(folds), torch.full_like(folds, BEFORE_THE_FIRST_TOKEN))
    if update:
        put(state, stored, (folds,))
    s[fold] = decode(*stored)  # new tokens go on from that
    for t in range(min(longest, at.shape[1])):
        runs = gives & (at[:, t] >= 0)
        token = [tensor[at[runs, t]] for tensor in tokens]
        made: list[Tensor] = []  # u, as the ring keeps it

        def kept(u: Tensor, made: list[Tensor] = made) -> Tensor:
            made.append(as_kept(u, ring.u.dtype))
            return made[0]

        q_t, k_t, v_t, a_t, b_t = token
        gates = A_log, dt_bias, b_logit, scale, qk_l2norm
        y[at[runs, t]], s[runs] = gated_delta_token(s[runs], q_t, k_t, v_t, a_t, b_t, *gates, kept=kept)
        if update:
            into = known[runs]
            row = ((start + live + t)[runs] % ring.length)[into]
            append(ring, slot[runs][into], row, k_t[into], made[0][into], a_t[into], A_log, dt_bias)
    store_output(out, y, at, known, slots)


def append(
    ring: DeltaRing,
    slot: Tensor,
    row: Tensor,
    k: Tensor,
    u: Tensor,
    a: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
) -> None:
    """Put what a token added into a row of the ring of each slot: the decay as its logarithm, or a per channel."""
    ring.k[slot, :, row] = k
    ring.u[slot, :, row] = u.to(ring.u.dtype)
    ring.decay[slot, :, row] = a if ring.per_channel else log_decay(a.float()[..., None], A_log, dt_bias)[..., 0]


@torch.no_grad()
def gated_delta_fold(
    state: State,
    ring: DeltaRing,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    qk_l2norm: bool,
    slots: Slots | None,
    tokens: Tensor | int | None,
    into: State | None,
) -> None:
    """Store the states after so many live tokens, (batch,) or one number: in place, or in slots of another State."""

    def after(s: Tensor, slot: Tensor, start: Tensor, live: Tensor) -> Tensor:
        return replayed(ring, s, slot, start, live, A_log, dt_bias, qk_l2norm)

    store_folded(state, ring, after, slots, tokens, into)
