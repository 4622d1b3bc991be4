"""gated_delta_fold: the state of the delta rule after live rows of a replay ring."""

from __future__ import annotations

from torch import Tensor

from flashstate.errors import check_contiguous, check_flag, check_tensor, tied
from flashstate.launch import uses_kernels
from flashstate.launch.arguments import aligned
from flashstate.launch.axes import OR_EXPANDED
from flashstate.launch.registered import registered
from flashstate.ops.debug import check_finite, debugging
from flashstate.ops.folding import Fold, checked_fold, start_fold
from flashstate.ops.gated_delta_replay import DeltaReplayProblem
from flashstate.reference import gated_delta_replay as reference
from flashstate.state.ring import DeltaRing, check_ring
from flashstate.state.slots import Slots
from flashstate.state.state import State, as_state, refuse_transposed


def gated_delta_fold(
    state: State | Tensor,
    ring: DeltaRing,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    qk_l2norm: bool = True,
    slots: Slots | Tensor | None = None,
    tokens: Tensor | int | None = None,
    into: State | Tensor | None = None,
) -> None:
    """Store the state of every row after live rows of its ring, rounded: in place, or in another State.

    In place, it is to be followed by `StatePool.folded` with the same slots and tokens, once for all layers; until then
    the ring counts tokens that the state already has. A row without tokens to fold keeps its bytes. `into` leaves state
    and ring as they are, and stores every row: prefix caches keep states so.

    state, ring: of one layer.
    A_log, dt_bias: as `gated_delta_replay` had them. A ring that keeps logarithms of decays, one per head, needs none.
    qk_l2norm: as `gated_delta_replay` had it.
    slots: Slots, or (batch,) slot numbers; None: all slots. With `into`, slots.write says which of its slots a row goes
        to; None: the one of the same number.
    tokens: how many of the live tokens, oldest first: (batch,) int32 or int64, or one number for all; None: all. What a
        ring does not have sets the flag that `flashstate.check_faults()` reports, and the nearest it has is taken.
    into: State, or a tensor (slots, HV, V, K), in any format; stochastic rounding draws from the seeds of `state`.
        It shares no memory with that: within a pool, `StatePool.copy` the slot, and fold the copy in place.
    """
    state = as_state(state)
    refuse_transposed("state", state)
    check_ring(ring, state, kind=DeltaRing)
    check_flag("qk_l2norm", qk_l2norm)
    heads, _, cols = state.data.shape[1:]
    if dt_bias is not None and A_log is None:
        raise ValueError("dt_bias must come with A_log: without it a is the logarithm of the decay itself")
    if A_log is not None:
        check_tensor("A_log", A_log, ("HV",), (heads,), device=state.data.device)
        check_contiguous("A_log", A_log)
    if dt_bias is not None:
        dt_bias = tied("dt_bias", dt_bias, (("HV",), (heads,)), (("K",), (cols,)), state.data.device)
        check_contiguous("dt_bias", dt_bias, OR_EXPANDED)
        if dt_bias.dim() == 2 and not ring.per_channel:
            shape = tuple(dt_bias.shape)
            raise ValueError(f"dt_bias must have shape (HV={heads}) where a ring has one decay per head, got {shape}")
    if not ring.per_channel:  # then it has logarithms of decays, and all calls are of one variant
        A_log = dt_bias = None
    checked = checked_fold("gated_delta_fold", state, ring, slots, tokens, into)
    if debugging():
        check_finite({"A_log": A_log, "dt_bias": dt_bias})
    fold(state, ring, A_log, dt_bias, qk_l2norm, *checked)


@registered(name="gated_delta_fold")
def fold(
    state: State,
    ring: DeltaRing,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    qk_l2norm: bool,
    slots: Slots | None,
    tokens: Tensor | None,
    most: int,
    into: State | None,
) -> None:
    """Carry out a call that was checked. `most`: tokens of every row, where `tokens` does not say it; -1: all."""
    if slots is not None and len(slots.read) == 0:
        return
    if not uses_kernels(state.data.device):
        given = tokens if tokens is not None else None if most < 0 else most
        reference.gated_delta_fold(state, ring, A_log, dt_bias, qk_l2norm, slots, given, into)
        return
    batch, group = len(state.data) if slots is None else len(slots.read), state.data.shape[1] // ring.k.shape[1]
    problem = DeltaReplayProblem.of("gated_delta_fold", state, batch, heads_per_group=group)
    wide = (ring.k, ring.u, *((ring.decay,) if ring.per_channel else ()))
    more = {
        "A_log_ptr": A_log, "dt_bias_ptr": dt_bias, "QK_L2NORM": qk_l2norm, "PER_CHANNEL": ring.per_channel,
        "BIAS_PER_CHANNEL": dt_bias is not None and dt_bias.dim() == 2, "ALIGNED": all(aligned(kept) for kept in wide),
    }  # fmt: skip
    start_fold("gated_delta_fold", state, ring, Fold(slots, tokens, most, into), problem, more)
