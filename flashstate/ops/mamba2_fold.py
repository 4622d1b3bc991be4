"""mamba2_fold: the state of Mamba-2 after live tokens of a replay ring."""

from __future__ import annotations

from torch import Tensor

from flashstate.errors import check_contiguous, tied
from flashstate.launch import uses_kernels
from flashstate.launch.arguments import aligned
from flashstate.launch.axes import OR_EXPANDED
from flashstate.launch.registered import registered
from flashstate.ops.debug import check_each, check_finite, debugging
from flashstate.ops.folding import Fold, checked_fold, start_fold
from flashstate.ops.mamba2 import NOT_POSITIVE
from flashstate.ops.mamba2_replay import ReplayProblem
from flashstate.reference import mamba2_replay as reference
from flashstate.state.ring import Ring, check_ring
from flashstate.state.slots import Slots
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
        `state`. It shares no memory with that: within a pool, `StatePool.copy` the slot, and fold the copy in place.
    """
    state = as_state(state)
    refuse_transposed("state", state)
    check_ring(ring, state)
    _, heads, rows, cols = state.data.shape
    A = tied("A", A, (("heads",), (heads,)), (("rows", "cols"), (rows, cols)), state.data.device)
    if A.dim() != 1:
        raise ValueError(f"A must have one value per head, as Mamba-2 has, got shape {tuple(A.shape)}")
    check_contiguous("A", A, OR_EXPANDED)
    checked = checked_fold("mamba2_fold", state, ring, slots, tokens, into)
    if debugging():
        check_finite({"A": A})
        check_each("A", A, lambda A: A <= 0, NOT_POSITIVE)
    fold(state, ring, A, *checked)


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
    batch, group = len(state.data) if slots is None else len(slots.read), state.data.shape[1] // ring.B.shape[1]
    problem = ReplayProblem.of("mamba2_fold", state, batch, heads_per_group=group)
    more = {"A_ptr": A, "ALIGNED": aligned(ring.x) and aligned(ring.B)}
    start_fold("mamba2_fold", state, ring, Fold(slots, tokens, most, into), problem, more)
