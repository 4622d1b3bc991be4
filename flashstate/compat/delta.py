"""What doors of gated delta rules share: gates in other shapes, packed projections, rows on a batch axis of one."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from flashstate.compat import shapes
from flashstate.errors import check_device, check_number, check_tensor
from flashstate.ops.gated_delta import GATED_DELTA_STEP, gated_delta_step
from flashstate.state.slots import Slots
from flashstate.state.state import State

SOFTPLUS = (1.0, 20.0)  # its beta, and the threshold from which on it is the identity, of gated_delta_step
STATE_AXES = ("slots", "HV", "V", "K")
BUFFER_AXES = ("rows", "steps", "HV", "V", "K")
QK_AXES, V_AXES = ("B", "T", "H", "K"), ("B", "T", "HV", "V")
Rows = tuple[int, Tensor | None]  # how many, and the bounds of their tokens where these are packed


def check_softplus(**given: Any) -> None:
    """Raise unless these, the beta and the threshold of softplus, are those of gated_delta_step."""
    for (name, number), only in zip(given.items(), SOFTPLUS, strict=True):
        check_number(name, number)
        if number != only:
            raise ValueError(f"{name} must be {only}, got {number}")


def check_absent(why: str, **given: Any) -> None:
    """Raise where an argument is given that gated_delta_step has no equation for."""
    for name, value in given.items():
        if value is not None and value is not False:
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{name} must be left out: {why}, got {got}")


def rows_of(q: Any, k: Any, v: Any, cu_seqlens: Tensor | None, state: Tensor | None = None) -> Rows:
    """Return the rows of q, k (B, T, H, K) and v (B, T, HV, V), or with cu_seqlens of (1, tokens, ...)."""
    check_tokens(q, k, v, state)
    return rows_of_tokens(v, cu_seqlens)


def rows_of_tokens(v: Tensor, cu_seqlens: Tensor | None) -> Rows:
    """Return the rows of v (B, T, HV, V), or with cu_seqlens of v (1, tokens, HV, V)."""
    if cu_seqlens is not None and v.shape[0] != 1:
        raise ValueError(f"v must have a batch axis of 1 with cu_seqlens, got shape {tuple(v.shape)}")
    batch, bounds = shapes.rows_of(v, cu_seqlens)
    if bounds is not None:
        check_device("cu_seqlens", bounds, v.device, "v")
    return batch, bounds


def check_tokens(q: Any, k: Any, v: Any, state: Tensor | None = None) -> None:
    """Check that q, k (B, T, H, K) and v (B, T, HV, V) go together, and with a state (slots, HV, V, K)."""
    HV, V, K = (None,) * 3 if state is None else state.shape[1:]
    check_tensor("v", v, V_AXES, (None, None, HV, V))
    check_tensor("k", k, QK_AXES, (*v.shape[:2], None, K))
    check_tensor("q", q, QK_AXES, tuple(k.shape))
    for name, tensor in (("v", v), ("k", k), ("q", q)):
        check_device(name, tensor, (v if state is None else state).device, "v" if state is None else "the state")


def gate_of(name: str, gate: Any, v: Tensor, *inner: int) -> Tensor:
    """A gate with the token axes of v and these behind. It may have one token axis, (B * T, …), and one axis behind."""
    tokens, axes = tuple(v.shape[:2]), ("B", "T", "HV", "K")[: 2 + len(inner)]
    flat = {(*lead, *rest) for lead in (tokens, (math.prod(tokens),)) for rest in (inner, (math.prod(inner),))}
    if isinstance(gate, Tensor) and tuple(gate.shape) in flat:
        gate = gate.reshape(*tokens, *inner)
    check_tensor(name, gate, axes, (*tokens, *inner), device=v.device)
    return gate


def one_gate(v: Tensor, value: float) -> Tensor:
    """One value for every token and head of v."""
    return v.new_full((), value).expand(v.shape[:3])


def of_heads(name: str, parameter: Any, *sizes: int) -> Tensor:
    """A parameter with these axes, (HV,) or (HV, K). It may have others, if it has as many elements."""
    if isinstance(parameter, Tensor) and parameter.numel() == math.prod(sizes):
        parameter = parameter.reshape(sizes)
    check_tensor(name, parameter, ("HV", "K")[: len(sizes)], sizes)
    return parameter


def state_of(name: str, state: Any) -> Tensor:
    """The data (slots, HV, V, K) of a pool, whose sizes say what other tensors must have."""
    if isinstance(state, State):
        return state.data
    return shapes.with_these_axes(name, state, *STATE_AXES)


def snapshots_of(buffer: Any) -> State | None:
    """A buffer for the state after every token, as a State, so that a call can start as one before it did."""
    if buffer is None:
        return None
    check_tensor("intermediate_states_buffer", buffer, BUFFER_AXES, (None,) * len(BUFFER_AXES))
    return State(buffer)


def delta_step(
    pool: Tensor | State, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *, packed: bool,
    A_log: Tensor | None = None, dt_bias: Tensor | None = None, out: Tensor | None = None, **more: Any,
) -> Tensor:  # fmt: skip
    """Call gated_delta_step with tokens (B, T, …), or packed (1, tokens, …); return `out`, or an output like v."""
    tensors = shapes.fitted(GATED_DELTA_STEP, q=q, k=k, v=v, a=a, b=b)
    room = shapes.room_for_output(v) if out is None else shapes.with_these_axes("out", out, "B", "T", "HV", "V")
    if packed:
        tensors = {name: tensor[0] for name, tensor in tensors.items()}
        room = None if room is None else room[0]
    parameters = shapes.fitted(GATED_DELTA_STEP, A_log=A_log, dt_bias=dt_bias)
    y = gated_delta_step(pool, **tensors, **parameters, **more, out=room)
    return out if out is not None else y[None] if packed else y


def packed_decode(
    mixed_qkv: Any, a: Any, b: Any, A_log: Any, dt_bias: Any, scale: float, state: Any, out: Any, indices: Any,
    l2norm: bool, per_channel: bool, null: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Step every row of a projection (B, 2 * H * K + HV * V) by its token; return `out` and the pool."""
    pool = state_of("initial_state", state)
    HV, V, K = pool.shape[1:]
    check_tensor("mixed_qkv", mixed_qkv, ("B", "qkv_dim"), (None, None), device=pool.device)
    mixed = shapes.rows_contiguous(mixed_qkv)
    batch, heads = len(mixed), (mixed.shape[1] - HV * V) // (2 * K)
    if heads < 1 or mixed.shape[1] != 2 * heads * K + HV * V:
        wanted = f"2 * H * {K} + {HV} * {V} columns, for the q, k and v of such states"
        raise ValueError(f"mixed_qkv must have {wanted}, got shape {tuple(mixed.shape)}")
    shapes.check_indices("ssm_state_indices", indices, device=pool.device, B=batch)
    check_number("scale", scale)
    q, k, v = mixed.split([heads * K, heads * K, HV * V], 1)
    values = v.unflatten(1, (HV, V))[:, None]  # (B, 1, HV, V)
    channels = (K,) if per_channel else ()
    check_tensor("out", out, ("B", "one", "HV", "V"), tuple(values.shape))
    delta_step(
        state, q.unflatten(1, (heads, K))[:, None], k.unflatten(1, (heads, K))[:, None], values,
        gate_of("a", a, values, HV, *channels), gate_of("b", b, values, HV), packed=False,
        A_log=of_heads("A_log", A_log, HV), dt_bias=of_heads("dt_bias", dt_bias, HV, *channels), scale=scale,
        qk_l2norm=l2norm, slots=Slots(indices, null=null), out=out,
    )  # fmt: skip
    return out, pool
