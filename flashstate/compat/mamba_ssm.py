"""mamba_ssm's selective_state_update, of mamba_ssm.ops.triton.selective_state_update."""

from __future__ import annotations

from torch import Tensor

from flashstate.compat.shapes import room_for_output, step_tensors, with_axes
from flashstate.errors import INDEX_DTYPES, check_tensor
from flashstate.ops.mamba2 import mamba2_step


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """Step every row by one token; update the state in place and return the output, which has the shape of x.

    state: (slots, heads, dim, dstate), contiguous within a slot.
    x, dt, z: (batch, heads, dim); B, C: (batch, groups, dstate), where groups divides heads.
    A: (heads, dim, dstate); D, dt_bias: (heads, dim). Expanded ones, and an expanded dt, are one value per head.
    state_batch_indices: (batch,) int32 or int64, the slot of each row; None: row b is slot b. A row with a negative one
        gives zero, and its state stays.

    Any tensor may have no head axis: then there is one head. docs/compat.md says what differs from mamba_ssm.
    """
    state = with_axes("state", state, 3, 4)
    tensors = step_tensors(x, dt, A, B, C, D, z, dt_bias)
    if state_batch_indices is not None:
        check_tensor("state_batch_indices", state_batch_indices, ("batch",), (x.shape[0],), dtypes=INDEX_DTYPES)
    y = mamba2_step(
        state, **tensors, dt_softplus=dt_softplus, slots=state_batch_indices, out=room_for_output(tensors["x"])
    )
    return y.reshape(x.shape)
