"""mamba2_fold: the state of Mamba-2 after live tokens of a replay ring."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from flashstate.errors import check_contiguous, check_device, tied
from flashstate.launch import access_width, choose, machine_of, uses_kernels
from flashstate.launch.arguments import aligned, slots_values, state_values, tile_values
from flashstate.launch.axes import OR_EXPANDED, Tokens
from flashstate.launch.call import Given
from flashstate.launch.registered import registered
from flashstate.launch.start import Launch, check_programs, kernel_in, start
from flashstate.ops.debug import check_cursors, check_debugged, debugging
from flashstate.ops.mamba2_replay import ReplayProblem, ring_values
from flashstate.reference import mamba2_replay as reference
from flashstate.state.faults import fault_flag
from flashstate.state.ring import Ring, check_ring, refuse_tables, tokens_to_fold
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
    A = tied("A", A, (("heads",), (heads,)), (("rows", "cols"), (rows, cols)), state.data.device)
    if A.dim() != 1:
        raise ValueError(f"A must have one value per head, as Mamba-2 has, got shape {tuple(A.shape)}")
    check_contiguous("A", A, OR_EXPANDED)
    target = None if into is None else _check_into(as_state(into, "into"), state)
    if where is not None:
        where.check_device(state.data.device)
        if where.write is not None and (into is None or where.per_token):
            raise ValueError("slots.write is for mamba2_fold with into, whose slots it names, one per row: (batch,)")
        refuse_tables(where, "folding")
    if target is not None and len(target.data) < len(state.data) and (where is None or where.write is None):
        need, got = len(state.data), len(target.data)
        raise ValueError(f"into must have {need} slots as the state has, or slots.write to say where, got {got}")
    batch = state.data.shape[0] if where is None else len(where.read)
    each, most = tokens_to_fold(tokens, ring, batch)
    if debugging():
        if into is None:  # which may have other slots
            names, tokens_of_rows = ("pool", "tokens", "slots", "update"), Tokens(("batch",), (batch,), batch, 1)
            check_debugged(Given(names, (state.data, tokens_of_rows, where, True)))
        check_cursors(ring, where, batch)
    fold(state, ring, A, where, each, most, target)


def _check_into(into: State, state: State) -> State:
    """The State to store in, if its slots are like those of a layer; it draws the random bits of that."""
    refuse_transposed("into", into)
    if into.data.shape[1:] != state.data.shape[1:]:
        raise ValueError(f"into must have states {tuple(state.data.shape[1:])}, got {tuple(into.data.shape[1:])}")
    check_device("into", into.data, state.data.device)
    if into.rounding != "nearest" and state.seed is None:
        raise ValueError(f"into with rounding={into.rounding!r} needs a state with a seed, got seed=None")
    return replace(into, rounds=state.rounds, stream=state.stream)


@registered(name="mamba2_fold")
def fold(
    state: State, ring: Ring, A: Tensor, slots: Slots | None, tokens: Tensor | None, most: int, into: State | None
) -> None:
    """Carry out a call that was checked. `most`: tokens of every row, where `tokens` does not say it; -1: all."""
    if slots is not None and len(slots.read) == 0:
        return
    if not uses_kernels(state.data.device):
        given = tokens if tokens is not None else None if most < 0 else most
        reference.mamba2_fold(state, ring, A, slots, given, into)
        return
    other = {} if into is None else state_values(into)
    target, machine = state if into is None else into, machine_of(state.data.device)
    batch, group = len(state.data) if slots is None else len(slots.read), state.data.shape[1] // ring.B.shape[1]
    problem = ReplayProblem.of("mamba2_fold", state, batch, heads_per_group=group)
    config = choose(problem, machine.gpu)
    programs = problem.batch_heads * -(-problem.rows // config.block_rows)
    check_programs("slots", programs, f"shape {tuple(state.data.shape)}")
    values = {
        **state_values(state), **slots_values(slots), **ring_values(ring), **tile_values(machine, problem, config),
        "fault_ptr": fault_flag(state.data.device), "A_ptr": A, "tokens_ptr": tokens, "most": most,
        "into_ptr": other.get("data_ptr"), "into_scale_ptr": other.get("scale_ptr"),
        "into_stride": other.get("slot_stride", 0), "into_scale_stride": other.get("scale_stride", 0),
        "INTO_HEAD_STRIDE": other.get("HEAD_STRIDE"),
        "num_targets": len(target.data), "HEADS_PER_GROUP": group, "ROUNDING": target.rounding,
        "INTO_VECTOR": min(problem.vector, access_width(target.data)), "ALIGNED": aligned(ring.x) and aligned(ring.B),
    }  # fmt: skip
    start(Launch(kernel_in("mamba2_fold"), (programs,), state.data.device, values, num_warps=1))
