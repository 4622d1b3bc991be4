"""FlashInfer's checkpointing_ssu, of flashinfer.mamba: Mamba-2 from a checkpoint and a ring of inputs."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from flashstate.basics import LARGEST_WINDOW
from flashstate.compat import shapes
from flashstate.errors import INT64, LARGEST_INT32, check_choice, check_flag, check_int, check_tensor
from flashstate.launch.doors import remembering
from flashstate.ops.mamba2_replay import MAMBA2_REPLAY, mamba2_replay
from flashstate.state.ring import Plan, Ring
from flashstate.state.slots import Slots
from flashstate.state.state import MOST_ROUNDS, State

ALGORITHMS = ("auto", "monolith", "two-kernel")
NAMES = {  # that the fields of a ring have here
    "x": "x_cache", "B": "B_cache", "dt": "dt_cache", "start": "ring_start", "count": "prev_num_accepted_tokens",
}  # fmt: skip


@remembering(main="x")
def checkpointing_ssu(
    state: Tensor,
    x_cache: Tensor,
    B_cache: Tensor,
    dt_cache: Tensor,
    ring_start: Tensor,
    prev_num_accepted_tokens: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    out: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    state_scale: Tensor | None = None,
    rand_seed: Tensor | None = None,
    philox_rounds: int = 10,
    d_split: int | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    enable_pdl: bool = False,
    cb_scaled: Tensor | None = None,
    cumAdt_vec: Tensor | None = None,
    cb_old: Tensor | None = None,
    precompute_heads_per_cta: int = 0,
    algorithm: str = "auto",
) -> Tensor:
    """Give the outputs of every row's tokens from its checkpoint and its ring; append them to the ring, fold the ring
    into the state where it overflows, and fill and return `out`.

    state is (slots, heads, dim, dstate), x_cache (slots, heads, length, dim), x (batch, T, heads, dim), or with
    cu_seqlens (1, tokens, heads, dim). ring_start and prev_num_accepted_tokens (slots,) are read alone: their owner
    moves them on. docs/compat.md has the other arguments, and says what differs from FlashInfer.
    """
    check_choice("algorithm", algorithm, ALGORITHMS)
    check_flag("enable_pdl", enable_pdl)
    check_int("precompute_heads_per_cta", precompute_heads_per_cta, 0, LARGEST_INT32)
    if d_split is not None:
        check_int("d_split", d_split, 1, LARGEST_INT32)
    scratch = {"cb_scaled": cb_scaled, "cumAdt_vec": cumAdt_vec, "cb_old": cb_old}
    check_scratch(scratch, algorithm)
    tokens = {"x": x, "dt": dt, "B": B, "C": C, "out": out, **({} if z is None else {"z": z})}
    stored = state_of(state, state_scale, rand_seed, philox_rounds)
    packed, longest = tokens_of(state, tokens, tokens, cu_seqlens, max_seqlen)
    ring = ring_of(state, x_cache, B_cache, dt_cache, ring_start, prev_num_accepted_tokens, longest)
    slots = slots_of(state, packed["x"], state_batch_indices, pad_slot_id, cu_seqlens, longest)
    replay(stored, ring, packed, slots, A=A, D=D, dt_bias=dt_bias, dt_softplus=dt_softplus)
    return out


def check_scratch(scratch: dict[str, Any], algorithm: str) -> None:
    """Raise as FlashInfer does where scratch memory, which nobody needs here, is not all there."""
    given = [name for name, tensor in scratch.items() if tensor is not None]
    if given and len(given) < len(scratch):
        raise ValueError(f"{', '.join(scratch)} must be given together, got {', '.join(given)} alone")
    if algorithm == "two-kernel" and not given:
        raise ValueError(f"algorithm 'two-kernel' needs {', '.join(scratch)}, got None")
    for name in given:
        if not isinstance(scratch[name], Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(scratch[name]).__name__}")


def tokens_of(
    state: Tensor, given: dict[str, Any], tokens: dict[str, Any], cu_seqlens: Tensor | None, max_seqlen: int | None
) -> tuple[dict[str, Tensor], int]:
    """Return tensors (batch, T, ...), or (1, tokens, ...) without their first axis, and the most tokens of a row.

    given: the tensors as the caller has them, which may lack one of these axes.
    """
    tokens = {name: shapes.with_axes(name, tensor, 1, 1) for name, tensor in tokens.items()}
    if cu_seqlens is None and max_seqlen is not None:
        raise ValueError(f"max_seqlen is for packed tokens: give it with cu_seqlens, got {max_seqlen}")
    if cu_seqlens is None:
        shapes.check_step_tensors(given, tokens, ("batch", "T"), state)
        return tokens, tokens["x"].shape[1]
    if max_seqlen is None:
        raise ValueError("max_seqlen must be given with cu_seqlens: the most tokens a row has, got None")
    check_int("max_seqlen", max_seqlen, 1, LARGEST_WINDOW)
    shapes.check_step_tensors(given, tokens, ("one", "tokens"), state, one=1)
    return {name: tensor[0] for name, tensor in tokens.items()}, max_seqlen


def ring_of(
    state: Tensor, x_cache: Any, B_cache: Any, dt_cache: Any, start: Any, count: Any, longest: int,
    window: int | None = None,
) -> Ring:  # fmt: skip
    """The ring in these tensors; its window is what its length leaves beside the tokens of the longest row. Of one that
    is given, the caller folds before there are more live and new rows than that."""
    slots, heads, dim, dstate = state.shape
    axes = ("slots", "heads", "length", "dim")
    check_tensor("x_cache", x_cache, axes, (slots, heads, None, dim), device=state.device)
    length, axes = x_cache.shape[2], ("slots", "groups", "length", "dstate")
    check_tensor("B_cache", B_cache, axes, (slots, None, length, dstate), device=state.device)
    found = length - longest if window is None else window
    if not max(longest, 1) <= found <= LARGEST_WINDOW:
        most = f"{2 * max(longest, 1)} to {LARGEST_WINDOW + longest} rows, for a window beside {longest} tokens"
        raise ValueError(f"x_cache must have {most}, got shape {tuple(x_cache.shape)}")
    try:
        return Ring(x_cache, B_cache, dt_cache, start, count, found, folds_by_hand=window is not None)
    except (TypeError, ValueError) as error:  # in the words of a ring
        words = re.sub(rf"\b({'|'.join(NAMES)})\b", lambda found: NAMES[found[0]], str(error))
        raise type(error)(words) from None


def slots_of(state: Tensor, x: Tensor, read: Any, null: int, cu_seqlens: Tensor | None, longest: int | None) -> Slots:
    """Where rows live; padding keeps what is in the output."""
    check_int("pad_slot_id", null, *INT64)
    batch, bounds = shapes.rows_of(x, cu_seqlens)
    if read is None:
        read, null = shapes.own_slots("state_batch_indices", state, batch), -1
    else:
        shapes.check_indices("state_batch_indices", read, device=state.device, batch=batch)
    return Slots(read, cu_seqlens=bounds, max_len=None if bounds is None else longest, null=null, padding="keep")


def state_of(state: Tensor, scale: Any, rand_seed: Any, rounds: int) -> State:
    """The checkpoint with its scales and one seed for all slots, where it has them."""
    shapes.with_these_axes("state", state, "slots", "heads", "dim", "dstate")
    shapes.check_scale("state", state, "state_scale", scale)
    if rand_seed is None:
        return State(state, scale)
    check_int("philox_rounds", rounds, 1, MOST_ROUNDS)
    shapes.check_seed("rand_seed", rand_seed, state)
    if state.dtype == torch.float32:  # which nothing is rounded to
        return State(state)
    return State(state, scale, rounding="stochastic", rounds=rounds, seed=rand_seed.reshape(()))


def replay(
    state: State | Tensor, ring: Ring, tokens: dict[str, Any], slots: Slots, plan: Plan | None = None, *,
    dt_softplus: bool, **more: Any,
) -> Tensor:  # fmt: skip
    """Call mamba2_replay; what has strides that it does not take is copied. `tokens`: tensors with token axes."""
    present = {name: value for name, value in more.items() if value is not None or name not in MAMBA2_REPLAY.optional}
    given = {**tokens, **present}
    out = given.pop("out")
    return mamba2_replay(
        state, ring, **shapes.fitted(MAMBA2_REPLAY, **given), dt_softplus=dt_softplus, plan=plan,
        slots=slots if plan is None else None, out=out,
    )  # fmt: skip
