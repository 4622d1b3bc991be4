"""mamba2_fold: the state of Mamba-2 after live tokens of a replay ring."""

from __future__ import annotations

import torch
from torch import Tensor

from flashstate.errors import check_contiguous, dtype_name, tied
from flashstate.launch import ReplayProblem, access_width, choose, gpu_of, kernel_target, start, uses_kernels
from flashstate.launch.arguments import aligned, as_bytes, outer_strides, row_stride
from flashstate.launch.config import next_power_of_2
from flashstate.ops.debug import check_contents, check_cursors, debugging
from flashstate.ops.library import register
from flashstate.ops.mamba2 import OR_EXPANDED
from flashstate.ops.steps import programs_of
from flashstate.ops.tokens import Tokens
from flashstate.reference import mamba2_replay as reference
from flashstate.state.faults import fault_flag
from flashstate.state.ring import Ring, check_folded_slots, check_ring, check_tokens_to_fold
from flashstate.state.slots import Slots, as_slots
from flashstate.state.state import State, as_state, refuse_transposed


def mamba2_fold(
    state: State | Tensor,
    ring: Ring,
    A: Tensor,
    *,
    slots: Slots | Tensor | None = None,
    tokens: Tensor | int | None = None,
    into: State | Tensor | None = None,
) -> None:
    """Store the state of every row after live tokens of its ring, rounded: in place, or in another State.

    In place, it is to be followed by `StatePool.folded` with the same slots and tokens, once for all layers; until then
    the ring counts tokens that the state already has. A row without tokens to fold keeps its bytes. `into` leaves state
    and ring as they are, and stores every row: prefix caches keep states so.

    state, ring: of one layer.
    A: (heads,).
    slots: Slots, or (batch,) slot numbers; None: all slots. With `into`, slots.write says which of its slots a row goes
        to; None: the one of the same number.
    tokens: how many of the live tokens, oldest first: (batch,) int32 or int64, or one number for all; None: all. What a
        ring does not have sets the flag that `flashstate.check_faults()` reports, and the nearest it has is taken.
    into: State, or a tensor (slots, heads, rows, cols), in any format; stochastic rounding draws from the seeds of
        `state`.
    """
    state, where = as_state(state), as_slots(slots)
    refuse_transposed("state", state)
    check_ring(ring, state)
    _, heads, rows, cols = state.data.shape
    A = tied("A", A, ("heads",), (heads,), ("rows", "cols"), (rows, cols), state.data.device)
    if A.dim() != 1:
        raise ValueError(f"A must have one value per head, as Mamba-2 has, got shape {tuple(A.shape)}")
    check_contiguous("A", A, OR_EXPANDED)
    target = None if into is None else _check_into(as_state(into, "into"), state)
    _check_slots(where, state, into is not None)
    if target is not None and len(target.data) < len(state.data) and (where is None or where.write is None):
        need, got = len(state.data), len(target.data)
        raise ValueError(f"into must have {need} slots as the state has, or slots.write to say where, got {got}")
    batch = state.data.shape[0] if where is None else len(where.read)
    check_tokens_to_fold(tokens, ring, batch)
    if debugging():
        if into is None:  # which may have other slots
            check_contents(len(state.data), Tokens(("batch",), (batch,), batch, 1), where, None, True)
        check_cursors(ring, where, batch)
    read, write, null = (None, None, -1) if where is None else (where.read, where.write, where.null)
    each, most = (tokens, -1) if isinstance(tokens, Tensor) else (None, -1 if tokens is None else tokens)
    flat = (None, None, "nearest") if target is None else (target.data, target.scale, target.rounding)
    run = torch.ops.flashstate.mamba2_fold if torch.compiler.is_compiling() else _run
    run(
        state.data, state.scale, state.seed, state.rounding, state.rounds, state.stream,
        ring.x, ring.B, ring.dt, ring.start, ring.count, ring.window, A, read, write, null, each, most, *flat,
    )  # fmt: skip


def _check_into(into: State, state: State) -> State:
    """The State to store in, if its slots are like those of a layer."""
    refuse_transposed("into", into)
    if into.data.shape[1:] != state.data.shape[1:]:
        raise ValueError(f"into must have states {tuple(state.data.shape[1:])}, got {tuple(into.data.shape[1:])}")
    if into.data.device != state.data.device:
        raise ValueError(f"into is on {into.data.device}, but the state is on {state.data.device}")
    if into.rounding != "nearest" and state.seed is None:
        raise ValueError(f"into with rounding={into.rounding!r} needs a state with a seed, got seed=None")
    return into


def _check_slots(slots: Slots | None, state: State, elsewhere: bool) -> None:
    """Raise where slots have what folding has not."""
    if slots is None:
        return
    if slots.read.device != state.data.device:
        raise ValueError(f"slots are on {slots.read.device}, but the state is on {state.data.device}")
    if slots.write is not None and (not elsewhere or slots.per_token):
        raise ValueError("slots.write is for mamba2_fold with into, whose slots it names, one per row: (batch,)")
    check_folded_slots(slots)


def _run(
    data: Tensor, scale: Tensor | None, seed: Tensor | None, rounding: str, rounds: int, stream: int,
    ring_x: Tensor, ring_B: Tensor, ring_dt: Tensor, oldest: Tensor, count: Tensor, window: int, A: Tensor,
    read: Tensor | None, write: Tensor | None, null: int, tokens: Tensor | None, most: int,
    into_data: Tensor | None, into_scale: Tensor | None, into_rounding: str,
) -> None:  # fmt: skip
    """`most`: how many tokens of every row, where `tokens` does not say it; -1: all."""
    if read is not None and len(read) == 0:
        return
    if not uses_kernels(data.device):
        state = State(data, scale, rounding=rounding, rounds=rounds, seed=seed, stream=stream)
        ring = Ring(ring_x, ring_B, ring_dt, oldest, count, window)
        slots = None if read is None else Slots(read, write=write, null=null)
        into = None
        if into_data is not None:
            unused = None if into_rounding == "nearest" else count.new_zeros(len(into_data), dtype=torch.int64)
            into = State(into_data, into_scale, rounding=into_rounding, rounds=rounds, seed=unused, stream=stream)
        given = tokens if tokens is not None else None if most < 0 else most
        reference.mamba2_fold(state, ring, A, slots, given, into)
        return
    from flashstate.kernels.mamba2_fold import mamba2_fold_kernel

    num_slots, heads, rows, cols = data.shape
    batch, vector = num_slots if read is None else len(read), access_width(data)
    problem = ReplayProblem("mamba2_fold", rows, cols, dtype_name(data.dtype), rounding, vector, batch * heads)
    config = choose(problem, gpu_of(data.device))
    into_vector, num_targets = vector, num_slots
    if into_data is not None:
        into_vector, num_targets = min(vector, access_width(into_data)), len(into_data)
    arguments = (
        as_bytes(data), ring_x, ring_B, ring_dt, A, scale, seed, oldest, count, read, write, tokens,
        None if into_data is None else as_bytes(into_data), into_scale, stream, fault_flag(data.device),
        *outer_strides(data, scale, 1), *outer_strides(into_data, into_scale, 1),
        *(kept.stride(0) for kept in (ring_x, ring_B, ring_dt)), row_stride(read), row_stride(write),
        most, ring_x.shape[2], num_slots, num_targets, null,
    )  # fmt: skip
    constants = {
        "H": heads, "HEADS_PER_GROUP": heads // ring_B.shape[1], "ROWS": rows, "COLS": cols,
        "VECTOR": vector, "INTO_VECTOR": into_vector, "ALIGNED": aligned(ring_x) and aligned(ring_B),
        "ROUNDING": rounding if into_data is None else into_rounding, "ROUNDS": rounds,
        "TARGET": kernel_target(data.device), "ROOM": max(16, next_power_of_2(window)),
        "BLOCK_ROWS": config.block_rows, "BLOCK_COLS": problem.block_cols, "CHUNK": problem.chunk(config.lanes),
    }  # fmt: skip
    programs = programs_of("slots", data, batch * heads, rows, config.block_rows)
    start(mamba2_fold_kernel, (programs,), data.device, arguments, constants, num_warps=1)


register(
    "mamba2_fold(Tensor(a!) data, Tensor(b!)? scale, Tensor? seed, str rounding, int rounds, SymInt stream, "
    "Tensor ring_x, Tensor ring_B, Tensor ring_dt, Tensor start, Tensor count, int window, Tensor A, "
    "Tensor? read, Tensor? write, SymInt null, Tensor? tokens, SymInt most, "
    "Tensor(c!)? into_data, Tensor(d!)? into_scale, str into_rounding) -> ()",
    _run,
)
