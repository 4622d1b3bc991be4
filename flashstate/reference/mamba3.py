"""mamba3_step: the trapezoidal state update of Mamba-3, SISO and MIMO. docs/ops/ derives it; this file defines it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashstate.reference.gated_delta import sigmoid
from flashstate.reference.mamba2 import silu
from flashstate.reference.state_io import resolve, store_output, store_state
from flashstate.reference.steps import flat_tokens, rows_of, states_of
from flashstate.reference.tree import column
from flashstate.state.mamba3 import Mamba3State
from flashstate.state.slots import Slots

TURN = 2 * math.pi
TURN_HIGH = 6.28125  # eight bits of it, so that products with whole turns are exact, and
TURN_LOW = TURN - TURN_HIGH
PI_HIGH = TURN_HIGH / 2
PI_LOW = TURN_LOW / 2  # with float32's π angles would drift


class FourStates(NamedTuple):
    """What rows of a batch keep between tokens."""

    s: Tensor  # (batch, H, D, N), float32 or float64: the dtype everything is computed in
    k: Tensor  # (batch, R, H, N), in the dtype it is kept in
    v: Tensor  # (batch, H, D), in the dtype it is kept in
    angle: Tensor | None  # (batch, H, S)

    def of(self, rows: Tensor) -> FourStates:
        """The states of some rows."""
        return FourStates(self.s[rows], self.k[rows], self.v[rows], None if self.angle is None else self.angle[rows])


class Parameters(NamedTuple):
    """What all tokens share."""

    Wx: Tensor | None  # (R, H, D)
    Wz: Tensor | None  # (R, H, D)
    Wo: Tensor | None  # (R, H, D)
    D: Tensor | None  # (H,)
    bias_B: Tensor | None  # (R, H, N)
    bias_C: Tensor | None  # (R, H, N)
    pairing: str
    trap_logit: bool


def wrapped(angle: Tensor) -> Tensor:
    """Angles in [0, 2π). What the sum with whole turns loses is added back, else angles that turn backwards drift."""
    turns = torch.floor(angle / TURN)
    whole = turns * -TURN_HIGH
    total = angle + whole
    part = total - angle
    lost = (angle - (total - part)) + (whole - part)
    angle = total + (lost - turns * TURN_LOW)
    angle = torch.where(angle < 0.0, angle + TURN, angle)
    return torch.where(angle >= torch.tensor(TURN, dtype=angle.dtype), 0.0, angle)


def moved_on(theta: Tensor, angle: Tensor, dt: Tensor) -> Tensor:
    """The angles (batch, H, S) after a token that brings angle (batch, H or 1, S) and dt (batch, H)."""
    half_turns = torch.tanh(angle) * dt[..., None]
    return wrapped(theta + (half_turns * PI_HIGH + half_turns * PI_LOW))


def rotated(u: Tensor, angle: Tensor, pairing: str) -> Tensor:
    """Columns of u (batch, R, H, N), turned in pairs by angles (batch, H, S); pairs from S on stay."""
    S, half = angle.shape[-1], u.shape[-1] // 2
    pairs = u.unflatten(-1, (half, 2)) if pairing == "interleaved" else u.unflatten(-1, (2, half)).mT
    u0, u1 = pairs.unbind(-1)  # (batch, R, H, N / 2)
    cos, sin = (torch.nn.functional.pad(f(angle), (0, half - S), value=rest)[:, None]  # (batch, 1, H, N / 2)
                for f, rest in ((torch.cos, 1.0), (torch.sin, 0.0)))  # fmt: skip
    turned = torch.stack([u0 * cos - u1 * sin, u0 * sin + u1 * cos], -1)
    return (turned if pairing == "interleaved" else turned.mT).flatten(-2)


def mamba3_token(
    memory: FourStates,
    x: Tensor,  # (batch, H, D)
    A: Tensor,  # (batch, H)
    dt: Tensor,  # (batch, H)
    trap: Tensor,  # (batch, H)
    B: Tensor,  # (batch, R, G, N)
    C: Tensor,  # (batch, R, G, N)
    z: Tensor | None,  # (batch, H, D)
    angle: Tensor | None,  # (batch, S), or per head (batch, H, S)
    parameters: Parameters,
) -> tuple[Tensor, FourStates]:
    """One token: the output (batch, H, D), or (batch, R, H, D) of rank above 1 without Wo, unrounded, and what is kept
    after it: s unrounded, k and v as they are kept."""
    s, k, v, theta = memory
    H, R = s.shape[1], k.shape[1]
    x_raw, (x, A, dt, trap, B, C) = x, (t.to(s.dtype) for t in (x, A, dt, trap, B, C))
    B, C = (t.repeat_interleave(H // t.shape[2], dim=2) for t in (B, C))  # (batch, R, H, N)
    if angle is not None and theta is not None:
        if parameters.bias_B is not None:
            B = B + parameters.bias_B.to(s.dtype)
        if parameters.bias_C is not None:
            C = C + parameters.bias_C.to(s.dtype)
        angle = angle.to(s.dtype) if angle.dim() == 3 else angle.to(s.dtype)[:, None]  # (batch, H or 1, S)
        theta = moved_on(theta.to(s.dtype), angle, dt)  # (batch, H, S)
        B, C = (rotated(t, theta, parameters.pairing) for t in (B, C))
    kept = B.to(k.dtype)  # what the next token sees, and this one too
    if parameters.trap_logit:
        trap = sigmoid(trap)
    alpha = torch.exp(A * dt)  # (batch, H)
    beta, gamma = (1.0 - trap) * dt * alpha, trap * dt  # (batch, H)

    Wx, Wz, Wo = (None if W is None else W.to(s.dtype) for W in parameters[:3])
    now, before = x[:, None], v.to(s.dtype)[:, None]  # (batch, 1, H, D)
    if Wx is not None:
        now, before = now * Wx, before * Wx  # (batch, R, H, D)
    now, before = (t.expand(-1, R, -1, -1) for t in (now, before))
    s = s * alpha[..., None, None]  # (batch, H, D, N)
    for r in range(R):
        s = s + (gamma[..., None] * now[:, r])[..., None] * kept[:, r, :, None].to(s.dtype)
        s = s + (beta[..., None] * before[:, r])[..., None] * k[:, r, :, None].to(s.dtype)
    y = (s[:, None] * C[:, :, :, None]).sum(-1)  # (batch, R, H, D)
    if parameters.D is not None:
        y = y + parameters.D.to(s.dtype)[:, None] * now
    if z is not None:
        gate = z.to(s.dtype)[:, None]  # (batch, 1, H, D)
        y = y * silu(gate if Wz is None else gate * Wz)
    if Wo is not None:
        y = (y * Wo).sum(1)  # (batch, H, D)
    elif R == 1:
        y = y[:, 0]
    return y, FourStates(s, kept, x_raw.to(v.dtype), theta)


@torch.no_grad()
def mamba3_step(
    state: Mamba3State,
    x: Tensor,  # (batch, T, H, D), (batch, H, D), or packed (tokens, H, D); the others alike
    A: Tensor,
    dt: Tensor,
    trap: Tensor,
    B: Tensor,
    C: Tensor,
    z: Tensor | None,
    angle: Tensor | None,
    parameters: Parameters,
    slots: Slots | None,
    update: bool,
    update_kv: bool,
    out: Tensor,
) -> None:
    """Every token of every row of the batch, on the pool: fills `out` and, with `update`, the pool."""
    lead = x.dim() - 2  # token axes
    tokens = {"x": x, "A": A, "dt": dt, "trap": trap, "B": B, "C": C, "z": z, "angle": angle}
    flat, num_slots = flat_tokens(tokens, lead), state.k.shape[0]
    at, y, read, live, gives = rows_of(slots, num_slots, out, lead)
    write, null = (None, -1) if slots is None else (slots.write, slots.null)

    memory = four_states_in(state, read)
    for t in range(at.shape[1]):
        runs = gives & (at[:, t] >= 0)
        here = at[runs, t]
        brought: dict[str, Any] = {name: None if tensor is None else tensor[here] for name, tensor in flat.items()}
        y[here], after = mamba3_token(memory.of(runs), **brought, parameters=parameters)
        for kept, new in zip(memory, after, strict=True):
            if kept is not None and new is not None:
                kept[runs] = new
        if update and write is not None and write.dim() == 2:
            to = resolve("write", column(write, t), runs & live, num_slots, null)
            store_four(state, memory, to, read, torch.full_like(read, t), update_kv, angle is not None)
    store_output(out, y, at, live, slots)
    if update and (write is None or write.dim() == 1):
        length = (at >= 0).sum(1)
        to = resolve("write", read if write is None else write, live & (length > 0), num_slots, null)
        store_four(state, memory, to, read, length - 1, update_kv, angle is not None)


def four_states_in(state: Mamba3State, read: Tensor) -> FourStates:
    """What is kept in these slots; zeros where there is none."""

    def kept_in(tensor: Tensor) -> Tensor:
        kept = tensor.new_zeros(len(read), *tensor.shape[1:])
        kept[read >= 0] = tensor[read[read >= 0]]
        return kept

    angle = None if state.angle is None else kept_in(state.angle)
    return FourStates(states_of(state.ssm, read), kept_in(state.k), kept_in(state.v), angle)


def store_four(
    state: Mamba3State, memory: FourStates, to: Tensor, read: Tensor, token: Tensor, update_kv: bool, turned: bool
) -> None:
    """Store what rows keep in the slots `to`, where these are not negative; s is rounded with the bits of the slots
    that were read, at this token."""
    store_state(state.ssm, memory.s, (to,), state.ssm.seeds_of(read), token)
    goes = to >= 0
    for tensor, kept, stored in (
        (state.k, memory.k, update_kv),
        (state.v, memory.v, update_kv),
        (state.angle, memory.angle, turned),
    ):
        if stored and tensor is not None and kept is not None:
            tensor[to[goes]] = kept[goes]
