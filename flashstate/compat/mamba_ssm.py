"""mamba_ssm's selective_state_update, of mamba_ssm.ops.triton, and its mamba3_step_fn, of mamba_ssm.ops.cute.mamba3."""

from __future__ import annotations

import torch
from torch import Tensor

from flashstate.compat import shapes
from flashstate.errors import LARGEST_INT32, check_flag, check_int, check_tensor
from flashstate.launch.doors import remembering
from flashstate.ops.mamba3 import MAMBA3_STEP
from flashstate.state.mamba3 import Mamba3State
from flashstate.state.places import Place
from flashstate.state.state import as_state, check_slots_of


@remembering(main="x")
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

    state is (slots, heads, dim, dstate), x (batch, heads, dim); a row with a negative index gives zero, and its state
    stays. docs/compat.md has the other arguments, and says what differs from mamba_ssm.
    """
    state = shapes.with_axes("state", state, 3, 4)
    tensors = shapes.step_tensors(state, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias)
    if state_batch_indices is not None:
        shapes.check_indices("state_batch_indices", state_batch_indices, batch=x.shape[0])
    return shapes.selective_step(state, x, tensors, dt_softplus=dt_softplus, slots=state_batch_indices)


@remembering(main="x")
def mamba3_step_fn(
    state: Tensor,
    Bstate: Tensor,
    Xstate: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    x: Tensor,
    dt: Tensor,
    trap: Tensor,
    xproj: Tensor | None,
    outproj: Tensor | None = None,
    state_out: Tensor | None = None,
    out: Tensor | None = None,
    z: Tensor | None = None,
    zproj: Tensor | None = None,
    tile_D: int = 64,
    num_warps: int = 2,
    state_batch_indices: Tensor | None = None,
    update_kv_state: bool = False,
) -> Tensor:
    """Step every row by one token of Mamba-3; update the state in place or in `state_out`, and return the output.

    state is (slots, H, D, N), Bstate (slots, R, H, N) and Xstate (slots, H, D), the B and x of the token before; they
    are stored only with update_kv_state. B and C come with their bias and turned. docs/compat.md has the other
    arguments, and says what differs from mamba_ssm.
    """
    for name, number in (("tile_D", tile_D), ("num_warps", num_warps)):
        check_int(name, number, 1, LARGEST_INT32)
    check_flag("update_kv_state", update_kv_state)
    pool = Mamba3State(as_state(shapes.with_these_axes("state", state, "slots", "H", "D", "N")), Bstate, Xstate)
    check_tensor("x", x, ("batch", "H", "D"), (None, *state.shape[1:3]), device=state.device)
    shapes.check_needs("z", z, zproj=zproj)
    if state_batch_indices is None:
        shapes.own_slots("state_batch_indices", state, len(x))
    else:
        shapes.check_indices("state_batch_indices", state_batch_indices, device=state.device, batch=len(x))
    per_rank = x[:, None].expand(-1, pool.rank, -1, -1) if outproj is None else x
    room = shapes.room_for_output(per_rank) if out is None else out
    one_rank = outproj is None and pool.rank == 1  # mamba3_step has no axis for it
    if one_rank and out is not None:
        axes = ("batch", "R", "H", "D")
        check_tensor("out", out, axes, tuple(per_rank.shape), device=x.device)
    tensors = shapes.fitted(MAMBA3_STEP, x=x, B=B, C=C, Wx=xproj, Wz=zproj, Wo=outproj, D=D, z=z)
    given = {
        **tensors, "A": A, "dt": dt, "trap": trap, "rotary": None, "trap_logit": False, "update_kv": update_kv_state,
        "slots": state_batch_indices, "update": True, "out": room[:, 0] if room is not None and one_rank else room,
    }  # fmt: skip
    values = [given[name] for name in MAMBA3_STEP.hints if name != "state"]
    if state_out is not None and state_out is not state:
        MAMBA3_STEP.checked([pool, *values])  # before state_out is written
        pool = _elsewhere(pool, state_out, state_batch_indices, len(x))
    y = MAMBA3_STEP.call(pool, *values)
    return room if room is not None else y[:, None] if one_rank else y


def _elsewhere(pool: Mamba3State, state_out: Tensor, indices: Tensor | None, batch: int) -> Mamba3State:
    """The pool with state_out for its states, after what rows read of them was copied there."""
    state = pool.ssm.data
    axes, shape = ("slots", "H", "D", "N"), tuple(state.shape)
    check_tensor("state_out", state_out, axes, shape, dtypes=(state.dtype,), device=state.device)
    check_slots_of("state_out", state_out, state.shape[1:])
    if not torch.compiler.is_compiling():  # there are no addresses then
        for name, tensor in (("state", state), ("Bstate", pool.k), ("Xstate", pool.v)):
            if Place.of(state_out).overlaps(Place.of(tensor)):
                raise ValueError(f"state_out must not share memory with {name}")
    if indices is None:
        state_out[:batch].copy_(state[:batch])
    elif batch > 0:
        shapes.copy_slots(state_out, indices, state, indices)
    return Mamba3State(state_out, pool.k, pool.v)
