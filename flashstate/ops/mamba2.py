"""mamba2_step: one token through the selective state update of Mamba-2."""

from __future__ import annotations

import torch
from torch import Tensor

from flashstate.errors import (
    INDEX_DTYPES,
    check_contiguous,
    check_flag,
    check_no_overlap,
    check_row_contiguous,
    check_tensor,
    dtype_name,
    tied,
)
from flashstate.launch import Problem, access_width, choose, gpu_name, kernel_rounding, uses_kernels
from flashstate.ops.library import register
from flashstate.reference import mamba2 as reference
from flashstate.state.faults import fault_flag
from flashstate.state.slots import Slots, as_slots
from flashstate.state.state import State, as_state

# Contraction makes FMAs of the products in the read-out sum: 4 % off a float16 stochastic step on an H200. The state
# update is an explicit FMA and the encoders are integer arithmetic, out of its reach.
FP_FUSION = True


def mamba2_step(
    state: State | Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = True,
    slots: Slots | Tensor | None = None,
    update: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Step every row of the batch by one token; update the state in place and return the output.

    Per row and head, in float32, with the head's group of B and C::

        dt = softplus(dt + dt_bias)         softplus only with dt_softplus
        s  = s * exp(dt * A) + (dt * x) ⊗ B
        y  = s C + D * x
        y  = y * silu(z)                    only with z

    state: State, or a tensor (slots, heads, rows, cols).
    x, z: (batch, heads, rows), and `out`, which the result is written to if it is given.
    dt: (batch, heads), or (batch, heads, rows) expanded from it.
    A: (heads,), or (heads, rows, cols) expanded from it.
    B, C: (batch, groups, cols), where groups divides heads.
    D: (heads,) or (heads, rows). dt_bias: (heads,), or (heads, rows) expanded from it.
    slots: Slots, or (batch,) slot numbers; None: row b is slot b.
    update: False computes the output and leaves the state as it is.

    Inputs are float32, bfloat16 or float16, each its own; the output has the dtype of x. Batch, head and group axes of
    activations may have any stride. `out` may be x itself, and must not overlap other arguments. Nothing is
    differentiable.
    """
    state, slots = as_state(state), as_slots(slots)
    _, heads, rows, cols = state.data.shape
    device = state.data.device
    batch = _check_activations(state, x, B, C, z)
    dt = tied("dt", dt, ("batch", "heads"), (batch, heads), ("rows",), (rows,), device)
    A = check_contiguous("A", tied("A", A, ("heads",), (heads,), ("rows", "cols"), (rows, cols), device))
    if dt_bias is not None:
        dt_bias = check_contiguous(
            "dt_bias", tied("dt_bias", dt_bias, ("heads",), (heads,), ("rows",), (rows,), device)
        )
    if D is not None:
        D = _check_skip(D, heads, rows, device)
    _check_modes(state, batch, slots, dt_softplus, update)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    else:
        _check_out(out, x)
    read, write, null = (None, None, -1) if slots is None else (slots.read, slots.write, slots.null)
    run = torch.ops.flashstate.mamba2_step if torch.compiler.is_compiling() else _run
    run(
        state.data, state.seed, state.rounding, state.rounds, state.stream,
        x, dt, A, B, C, D, z, dt_bias, dt_softplus, read, write, null, update, out,
    )  # fmt: skip
    return out


def _check_activations(state: State, x: Tensor, B: Tensor, C: Tensor, z: Tensor | None) -> int:
    """Check what has one row of values per batch row and head or group; returns the batch size."""
    _, heads, rows, cols = state.data.shape
    device = state.data.device
    check_tensor("x", x, ("batch", "heads", "rows"), (None, heads, rows), device=device)
    batch = x.shape[0]
    check_tensor("B", B, ("batch", "groups", "cols"), (batch, None, cols), device=device)
    groups = B.shape[1]
    if groups == 0 or heads % groups:
        raise ValueError(f"B must have a number of groups that divides the {heads} heads, got {groups}")
    check_tensor("C", C, ("batch", "groups", "cols"), (batch, groups, cols), device=device)
    if z is not None:
        check_tensor("z", z, ("batch", "heads", "rows"), (batch, heads, rows), device=device)
        check_row_contiguous("z", z)
    for name, tensor in (("x", x), ("B", B), ("C", C)):
        check_row_contiguous(name, tensor)
    return batch


def _check_skip(D: Tensor, heads: int, rows: int, device: torch.device) -> Tensor:
    """D as (heads,), or as (heads, rows) where it differs along a head."""
    if isinstance(D, Tensor) and D.dim() == 2 and D.stride(1) != 0:
        check_tensor("D", D, ("heads", "rows"), (heads, rows), device=device)
    else:
        D = tied("D", D, ("heads",), (heads,), ("rows",), (rows,), device)
    return check_contiguous("D", D)


def _check_modes(state: State, batch: int, slots: Slots | None, dt_softplus: bool, update: bool) -> None:
    check_flag("dt_softplus", dt_softplus)
    check_flag("update", update)
    if slots is None:
        if batch > state.data.shape[0]:
            raise ValueError(f"slots must be given for a batch of {batch} on a pool of {state.data.shape[0]} slots")
        return
    check_tensor("slots", slots.read, ("batch",), (batch,), dtypes=INDEX_DTYPES, device=state.data.device)
    if slots.write is not None and not update:
        raise ValueError("update=False writes no state, so slots must not have write")


def _check_out(out: Tensor, x: Tensor) -> None:
    check_tensor("out", out, ("batch", "heads", "rows"), tuple(x.shape), dtypes=(x.dtype,), device=x.device)
    check_row_contiguous("out", out)
    check_no_overlap("out", out)


def _run(
    data: Tensor, seed: Tensor | None, rounding: str, rounds: int, stream: int,
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None, dt_softplus: bool,
    read: Tensor | None, write: Tensor | None, null: int, update: bool, out: Tensor,
) -> None:  # fmt: skip
    """Fill `out` and update `data`. Arguments are checked; flat, as torch.library and the kernel want them."""
    if not uses_kernels(data.device):
        state = State(data, rounding=rounding, rounds=rounds, seed=seed, stream=stream)
        slots = None if read is None else Slots(read, write=write, null=null)
        reference.mamba2_step(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, slots, update, out)
        return
    batch, heads, rows = x.shape
    if batch == 0:
        return
    from flashstate.kernels.mamba2 import mamba2_step_kernel

    num_slots, _, _, cols = data.shape
    vector = access_width(data)
    problem = Problem("mamba2_step", rows, cols, dtype_name(data.dtype), rounding, vector, batch * heads)
    config = choose(problem, gpu_name(data.device))
    programs = batch * heads * -(-rows // config.block_rows)
    if programs >= 1 << 31:
        raise ValueError(f"x must need fewer than 2^31 programs, got {programs} for shape {tuple(x.shape)}")
    z_stride_b, z_stride_h = (0, 0) if z is None else z.stride()[:2]
    with torch.cuda.device_of(data):
        mamba2_step_kernel[(programs,)](
            data, None if rounding == "nearest" else seed, x, dt, A, B, C, D, z, dt_bias, out,
            read, write, fault_flag(data.device),
            data.stride(0), *x.stride()[:2], *dt.stride(), *B.stride()[:2], *C.stride()[:2], z_stride_b, z_stride_h,
            *out.stride()[:2], 0 if read is None else read.stride(0), 0 if write is None else write.stride(0),
            num_slots, null, stream,
            H=heads, HEADS_PER_GROUP=heads // B.shape[1], ROWS=rows, COLS=cols, VECTOR=vector,
            D_PER_ROW=D is not None and D.dim() == 2, DT_SOFTPLUS=dt_softplus, UPDATE=update,
            ROUNDING=kernel_rounding(rounding, data.device), ROUNDS=rounds,
            BLOCK_ROWS=config.block_rows, BLOCK_COLS=problem.block_cols,
            num_warps=config.num_warps, enable_fp_fusion=FP_FUSION,
        )  # fmt: skip


register(
    "mamba2_step(Tensor(a!) data, Tensor? seed, str rounding, int rounds, SymInt stream, "
    "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, bool dt_softplus, "
    "Tensor? read, Tensor? write, SymInt null, bool update, Tensor(b!) out) -> ()",
    _run,
)
