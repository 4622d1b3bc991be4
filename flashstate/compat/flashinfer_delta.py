"""FlashInfer's gated delta rules, of flashinfer.gdn_decode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashstate.compat import delta, shapes
from flashstate.errors import check_choice
from flashstate.launch.doors import remembering
from flashstate.ops.gated_delta import GATED_DELTA_STEP, gated_delta_step
from flashstate.state.slots import Slots

BACKENDS = ("auto", "flashinfer", "cake_gdn")
BACKENDS_OF_ROWS = (*BACKENDS, "rubin")


@remembering(main="v")
def gated_delta_rule_decode_pretranspose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    use_qk_l2norm: bool = True,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    output_state_indices: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None,
    disable_state_update: bool = False,
    backend: str = "auto",
    *,
    exact: bool = True,
) -> tuple[Tensor, Tensor]:
    """Step every row by its tokens; update the state in place, and return the output and the tensor with the states.

    q, k are (B, T, H, K), v (B, T, HV, V), a, b (B, T, HV). States are `state` (B, HV, V, K), one per row, or a pool in
    `initial_state` with indices. The buffer and disable_state_update are for several tokens. docs/compat.md has the
    other arguments, and says what differs from FlashInfer.
    """
    check_choice("backend", backend, BACKENDS_OF_ROWS)
    batch, steps = shapes.with_these_axes("v", v, "B", "T", "HV", "V").shape[:2]
    shapes.check_not_both(state=state, initial_state=initial_state)
    read, write, buffer = initial_state_indices, output_state_indices, intermediate_states_buffer
    update = not _disabled(disable_state_update)
    if steps == 1 and (buffer is not None or not update):
        which = "disable_state_update" if buffer is None else "intermediate_states_buffer"
        raise ValueError(f"{which} is for several tokens per row, got {tuple(v.shape)}")
    slots, pool = None, state if initial_state is None else initial_state
    if initial_state is not None:
        slots = _delta_slots(batch, read, write, update=update, padding=_padding_of(output, steps))
    else:
        shapes.check_needs("initial_state", None, initial_state_indices=read, output_state_indices=write)
        if state is not None and len(shapes.with_axes("state", state, 4, 4)) != batch:
            raise ValueError(f"state must have {batch} slots, as the batch has rows, got shape {tuple(state.shape)}")
    if pool is None:
        raise ValueError("state or initial_state must be given, got None for both")
    return _delta_step(
        pool, q, k, v, a, b, A_log, dt_bias, scale, use_qk_l2norm, output, slots, update=update, exact=exact,
        snapshots=delta.snapshots_of(buffer),
    )  # fmt: skip


@remembering(main="v")
def gated_delta_rule_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    use_qk_l2norm: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Step every row by its token; update the state in place, and return the output and the state.

    As gated_delta_rule_decode_pretranspose, with `state` (B, HV, K, V) in memory and one token per row: q, k are
    (B, 1, H, K), v (B, 1, HV, V), a, b (B, 1, HV). docs/compat.md says what differs from FlashInfer.
    """
    check_choice("backend", backend, BACKENDS)
    batch, steps = shapes.with_these_axes("v", v, "B", "one", "HV", "V").shape[:2]
    if steps != 1:
        raise ValueError(f"v must have one token per row, got shape {tuple(v.shape)}")
    if len(shapes.with_these_axes("state", state, "B", "HV", "K", "V")) != batch:
        raise ValueError(f"state must have {batch} slots, as the batch has rows, got shape {tuple(state.shape)}")
    y, _ = _delta_step(state.mT, q, k, v, a, b, A_log, dt_bias, scale, use_qk_l2norm, output, slots=None)
    return y, state


@remembering(main="v")
def gated_delta_rule_mtp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    disable_state_update: bool | None = None,
    use_qk_l2norm: bool = True,
    output_state_indices: Tensor | None = None,
    cache_replayssm: bool = False,
    replayssm_rawv: Any = None,
    replayssm_rawk: Any = None,
    replayssm_g: Any = None,
    replayssm_beta: Any = None,
    *,
    exact: bool = True,
) -> tuple[Tensor, Tensor]:
    """Step every row by its T tokens, one after the other; return the outputs and the pool.

    q, k are (B, T, H, K), v (B, T, HV, V), a, b (B, T, HV), initial_state (pool, HV, V, K). The pool is updated only
    with disable_state_update=False or ssm_state_indices; the buffer receives the state after every token in any case.
    With ssm_state_indices the last state also goes to output_state_indices, if these are not initial_state_indices.
    docs/compat.md has the other arguments, and says what differs from FlashInfer.
    """
    delta.check_absent(
        "there is no ring to write", cache_replayssm=cache_replayssm, replayssm_rawv=replayssm_rawv,
        replayssm_rawk=replayssm_rawk, replayssm_g=replayssm_g, replayssm_beta=replayssm_beta,
    )  # fmt: skip
    update = not (disable_state_update is None or _disabled(disable_state_update)) or ssm_state_indices is not None
    shapes.check_not_both(intermediate_states_buffer=intermediate_states_buffer, ssm_state_indices=ssm_state_indices)
    batch, steps = shapes.with_these_axes("v", v, "B", "T", "HV", "V").shape[:2]
    read, write, every = initial_state_indices, output_state_indices, ssm_state_indices
    slots = _delta_slots(batch, read, write, every, steps, update, padding=_padding_of(output, steps))
    given = _delta_step(
        initial_state, q, k, v, a, b, A_log, dt_bias, scale, use_qk_l2norm, output, slots, update=update, exact=exact,
        snapshots=delta.snapshots_of(intermediate_states_buffer),
    )  # fmt: skip
    if every is not None and write is not None and write is not read and batch > 0:
        live = (read >= 0) & (read < len(initial_state))
        shapes.copy_slots(initial_state, write, initial_state, torch.where(live, every[:, -1], -1))
    return given


def _disabled(flag: Any) -> bool:
    """A flag that may also be 0 or 1."""
    if not isinstance(flag, int) or flag not in (0, 1):
        raise TypeError(f"disable_state_update must be True or False, 1 or 0, got {flag!r}")
    return bool(flag)


def _padding_of(output: Tensor | None, steps: int) -> str:
    """What rows without a slot give: zero, or of several tokens what is in the output."""
    return "zero" if output is None or steps == 1 else "keep"


def _delta_step(
    pool: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
    scale: float | None, l2norm: bool, output: Tensor | None, slots: Slots | None, **more: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Call gated_delta_step with a decay per token and head; what has strides that it does not take is copied."""
    tensors = shapes.fitted(
        GATED_DELTA_STEP, q=q, k=k, v=v, A_log=shapes.with_these_axes("A_log", A_log, "HV"),
        dt_bias=shapes.with_these_axes("dt_bias", dt_bias, "HV"),
    )  # fmt: skip
    y = gated_delta_step(
        pool, a=shapes.with_these_axes("a", a, "B", "T", "HV"), b=b, **tensors, scale=scale, qk_l2norm=l2norm,
        slots=slots, out=shapes.room_for_output(v) if output is None else output, **more,
    )  # fmt: skip
    return y, pool


def _delta_slots(
    batch: int, read: Any, write: Tensor | None, every: Tensor | None = None, steps: int = 1, update: bool = True,
    padding: str = "zero",
) -> Slots:  # fmt: skip
    """`every`: slots for the state after each of the steps; `update`: whether anything is written."""
    shapes.check_indices("initial_state_indices", read, B=batch)
    if write is not None:
        shapes.check_indices("output_state_indices", write, B=batch)
    if every is not None:
        shapes.check_indices("ssm_state_indices", every, B=batch, T=steps)
        if write is not None and write is not read:  # goes there at once where the last token has no other place
            last = torch.where(every[:, -1:] < 0, write[:, None], every[:, -1:])
            every = torch.cat([every[:, :-1], last], 1)
        write = shapes.rows_contiguous(every)
    return Slots(read, write=write if update else None, padding=padding)
