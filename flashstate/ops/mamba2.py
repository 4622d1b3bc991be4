"""mamba2_step: tokens through the selective state update of Mamba-1 and Mamba-2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashstate.errors import (
    check_contiguous,
    check_flag,
    check_row_contiguous,
    check_tensor,
    dtype_name,
    tied,
)
from flashstate.launch import (
    Problem,
    access_width,
    choose,
    direct,
    gpu_of,
    kernel_target,
    lets_next_start,
    start,
    suspension,
    uses_kernels,
)
from flashstate.launch.arguments import aligned, as_bytes, row_stride, table_shape, token_strides
from flashstate.launch.config import WARP, tokens_together
from flashstate.launch.start import Started
from flashstate.ops.debug import check_contents, debugging
from flashstate.ops.library import register
from flashstate.ops.steps import check_out, extent_of, for_reference, pool_arguments, programs_of, stored_of, stores_of
from flashstate.ops.tokens import (
    SLOTS_SCHEMA,
    SNAPSHOTS_SCHEMA,
    Tokens,
    check_slots,
    check_snapshots,
    check_table_of_slots,
    flat_slots,
    flat_snapshots,
    new_out,
    tokens_of,
)
from flashstate.reference import mamba2 as reference
from flashstate.state.signature import ACCESS_BYTES
from flashstate.state.slots import Slots, as_slots
from flashstate.state.state import State, as_snapshots, as_state, refuse_transposed

OR_EXPANDED = ", or expanded from contiguous values per head"


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
    snapshots: State | Tensor | None = None,
    update: bool = True,
    out: Tensor | None = None,
    early: bool = False,
) -> Tensor:
    """Step every row of the batch by its tokens; update the state in place and return the outputs.

    Per row and head, token by token, in float32, with the head's group of B and C::

        dt = softplus(dt + dt_bias)         softplus only with dt_softplus
        s  = s * exp(dt * A) + (dt * x) ⊗ B
        y  = s C + D * x
        y  = y * silu(z)                    only with z

    Token axes, written (...): (batch,) for one token per row, (batch, T), or (tokens,) packed with slots.cu_seqlens.

    state: State, or a tensor (slots, heads, rows, cols).
    x, z: (..., heads, rows), and `out`, which the result is written to if it is given.
    dt: (..., heads), or per channel (..., heads, rows).
    A: (heads,), or (heads, rows, cols).
    B, C: (..., groups, cols), where groups divides heads.
    D, dt_bias: (heads,) or (heads, rows).
    slots: Slots, or (batch,) slot numbers; None: row b is slot b.
    snapshots: State, or a tensor (batch or more, T or more, heads, rows, cols): receives the state after every token.
    update: False leaves the pool as it is.
    early: True lets the kernel start, and read the state, before the kernel in front of it on the stream has ended; it
        waits for that one before it reads x, dt, B, C and z. For calls behind `conv1d_step`: the kernel in front must
        not write the pool, its seeds, the slots or the parameters. Nothing changes but the time, and that only on GPUs
        of NVIDIA of compute capability 9.0 and above.

    Inputs are float32, bfloat16 or float16, each its own; the output has the dtype of x. Token, head and group axes of
    activations may have any stride; dt, A, D and dt_bias may be expanded from one value per head. `out` may be x
    itself, unless tokens form a tree, and must not overlap other arguments. Nothing is differentiable.
    """
    eager, likeness = not torch.compiler.is_compiling(), None
    if eager and out is not None and direct.available and not suspension.depth:
        likeness = _step_again(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, slots, snapshots, update, out, early)
        if likeness is direct.STARTED:
            return out
    state, slots = as_state(state), as_slots(slots)
    refuse_transposed("state", state)
    num_slots, heads, rows, _ = state.data.shape
    tokens = tokens_of("x", x, {"heads": heads, "rows": rows}, state.data.device, slots)
    check_activations(state, tokens, x, B, C, z)
    dt, A, D, dt_bias = check_parameters(state, tokens, dt, A, D, dt_bias)
    check_flag("dt_softplus", dt_softplus)
    check_flag("early", early)
    check_slots(num_slots, x.device, tokens, slots, update)
    check_table_of_slots(slots)
    if snapshots is not None:
        snapshots = as_snapshots(snapshots, state)
        refuse_transposed("snapshots", snapshots)
        check_snapshots(snapshots.data, tuple(state.data.shape[1:]), x.device, tokens, slots)
    if out is None:
        out = new_out(x, slots)
    else:
        check_out(out, x, tokens, ("heads", "rows"))
    if debugging():
        check_contents(num_slots, tokens, slots, None if snapshots is None else len(snapshots.data), update)
    run = _run if eager else torch.ops.flashstate.mamba2_step
    started = run(
        state.data, state.scale, state.seed, state.rounding, state.rounds, state.stream,
        x, dt, A, B, C, D, z, dt_bias, dt_softplus, *flat_slots(slots), *flat_snapshots(snapshots), update, out, early,
    )  # fmt: skip
    if started is not None and likeness is not None:
        direct.remember(*likeness, started, POINTERS)
    return out


POINTERS = 20  # of the kernel that change from call to call; the stream follows them
_launches_on_tensors: direct.Launches = {}  # where states are tensors, not State objects


def _step_again(
    state: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, z: Any, dt_bias: Any, dt_softplus: Any,
    slots: Any, snapshots: Any, update: Any, out: Any, early: Any,
) -> direct.Likeness | None:  # fmt: skip
    """STARTED if the kernel could be started as by a call like this before, else by what to remember this one; None if
    there is no way, as with arguments of wrong types. This is all that a call costs on the host, so it asks nothing
    twice."""
    try:
        data, scale, seed, stream, launches = state, None, None, 0, _launches_on_tensors
        if state.__class__ is State:
            data, scale, seed, stream, launches = state.data, state.scale, state.seed, state.stream, state.launches
        data_at, x_at, B_at, C_at, out_at = data.data_ptr(), x.data_ptr(), B.data_ptr(), C.data_ptr(), out.data_ptr()
        pointers, z_at = [data_at, x_at, B_at, C_at, dt.data_ptr(), out_at, A.data_ptr()], 0  # in the kernel's order
        tensors = [x, dt, A, B, C, data]
        if out is not x:
            tensors.append(out)
        if D is not None:
            tensors.append(D)
            pointers.append(D.data_ptr())
        if z is not None:
            tensors.append(z)
            z_at = z.data_ptr()
            pointers.append(z_at)
        if dt_bias is not None:
            tensors.append(dt_bias)
            pointers.append(dt_bias.data_ptr())
        if scale is not None:
            pointers.append(scale.data_ptr())
        if seed is not None:
            pointers.append(seed.data_ptr())
        if x_at == out_at and slots.__class__ is Slots and slots.parents is not None:  # which is refused
            return None
        slots_like, _ = direct.add_slots(slots, x, tensors, pointers)
        snapshots_like = None
        if snapshots is not None:
            snapshots_like = snapshots.signature
            pointers += [copy.data_ptr() for copy in (snapshots.data, snapshots.scale) if copy is not None]
        if dt_softplus.__class__ is not bool or update.__class__ is not bool or early.__class__ is not bool:
            return None
        present = (D is not None, z is not None, dt_bias is not None, out is x)
        aligned = (x_at | B_at | C_at | out_at | z_at) % ACCESS_BYTES == 0
        key = (slots_like, snapshots_like, present, dt_softplus, update, early, aligned, data_at % ACCESS_BYTES)
        launch = direct.find(launches, key, tensors)
    except (AttributeError, TypeError, RuntimeError):  # the last from tensors without memory, such as sparse ones
        return None
    return direct.start_again(launch, (launches, key, tensors), pointers, stream)


def check_activations(state: State, tokens: Tokens, x: Tensor, B: Tensor, C: Tensor, z: Tensor | None) -> None:
    """Check what has one row of values per token and head or group, x already for its shape."""
    _, heads, rows, cols = state.data.shape
    device = state.data.device
    groups_of = (*tokens.axes, "groups", "cols")
    check_tensor("B", B, groups_of, (*tokens.sizes, None, cols), device=device)
    groups = B.shape[-2]
    if groups == 0 or heads % groups:
        raise ValueError(f"B must have a number of groups that divides the {heads} heads, got {groups}")
    check_tensor("C", C, groups_of, (*tokens.sizes, groups, cols), device=device)
    if z is not None:
        check_tensor("z", z, (*tokens.axes, "heads", "rows"), (*tokens.sizes, heads, rows), device=device)
        check_row_contiguous("z", z)
    for name, tensor in (("x", x), ("B", B), ("C", C)):
        check_row_contiguous(name, tensor)


def check_parameters(
    state: State, tokens: Tokens, dt: Tensor, A: Tensor, D: Tensor | None, dt_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Check what has one value per head, or more; returned without the axes it was expanded along."""
    _, heads, rows, cols = state.data.shape
    device = state.data.device
    dt = tied("dt", dt, (*tokens.axes, "heads"), (*tokens.sizes, heads), ("rows",), (rows,), device)
    if dt.dim() > len(tokens.axes) + 1:
        check_row_contiguous("dt", dt)
    A = tied("A", A, ("heads",), (heads,), ("rows", "cols"), (rows, cols), device)
    check_contiguous("A", A, OR_EXPANDED)
    per_head = []
    for name, parameter in (("D", D), ("dt_bias", dt_bias)):
        if parameter is not None:
            parameter = tied(name, parameter, ("heads",), (heads,), ("rows",), (rows,), device)
            check_contiguous(name, parameter, OR_EXPANDED)
        per_head.append(parameter)
    return dt, A, per_head[0], per_head[1]


def _run(
    data: Tensor, scale: Tensor | None, seed: Tensor | None, rounding: str, rounds: int, stream: int,
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None, dt_softplus: bool,
    read: Tensor | None, write: Tensor | None, accepted: Tensor | None, snapshot_rows: Tensor | None,
    cu_seqlens: Tensor | None, max_len: int | None, parents: Tensor | None, null: int, padding: str,
    snapshot_data: Tensor | None, snapshot_scale: Tensor | None, snapshot_rounding: str, update: bool, out: Tensor,
    early: bool,
) -> Started | None:  # fmt: skip
    """Fill `out` and the snapshots, and update `data`. Arguments are checked; flat, as torch.library wants them."""
    if x.numel() == 0 or (read is not None and read.shape[0] == 0):
        out.zero_()
        return None
    if parents is not None and out.data_ptr() == x.data_ptr():
        raise ValueError("out must not be x with slots.parents: a token's x is read again for those that follow it")
    if not uses_kernels(data.device):
        state, slots, snapshots = for_reference(
            data, scale, seed, rounding, rounds, stream, read, write, accepted, snapshot_rows, cu_seqlens, max_len,
            parents, null, padding, snapshot_data, snapshot_scale, snapshot_rounding,
        )  # fmt: skip
        reference.mamba2_step(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, slots, snapshots, update, out)
        return None
    from flashstate.kernels.mamba2 import mamba2_step_kernel

    num_slots, heads, rows, cols = data.shape
    early = early and lets_next_start(data.device)
    extent = extent_of(x, read, cu_seqlens, max_len)
    batch_heads, one_token = extent.batch * heads, extent.one_token
    vector = access_width(data)
    stores = stores_of(update, write)
    stored = stored_of(stores, snapshot_data, one_token)
    problem = Problem(
        "mamba2_step", rows, cols, dtype_name(data.dtype), rounding, vector, batch_heads, not one_token, stored
    )  # fmt: skip
    config = choose(problem, gpu_of(data.device))
    programs = programs_of("x", x, batch_heads, rows, config.block_rows)
    tables = read, accepted, write, parents, cu_seqlens, snapshot_rows
    arguments = (
        as_bytes(data), x, B, C, dt, out, A, D, z, dt_bias, scale, seed,
        *pool_arguments(data, scale, stream, tables, snapshot_data, snapshot_scale),
        *(stride for t in (x, B, C, dt, z, out) for stride in token_strides(t, extent.token_axes, extent.packed)),
        *table_shape(read), row_stride(write), row_stride(parents),
        extent.num_tokens, extent.longest, num_slots, null,
    )  # fmt: skip
    constants = {
        "H": heads, "HEADS_PER_GROUP": heads // B.shape[-2], "ROWS": rows, "COLS": cols,
        "VECTOR": vector, "SNAPSHOT_VECTOR": 1 if snapshot_data is None else min(vector, access_width(snapshot_data)),
        "ALIGNED": all(aligned(t) for t in (x, B, C, z, out)),
        "A_PER_ELEMENT": A.dim() == 3, "DT_PER_ROW": dt.dim() == extent.token_axes + 2,
        "BIAS_PER_ROW": dt_bias is not None and dt_bias.dim() == 2, "D_PER_ROW": D is not None and D.dim() == 2,
        "DT_SOFTPLUS": dt_softplus, "ONE_TOKEN": one_token,
        "TOGETHER": tokens_together(config, extent.longest, extent.packed, tree=parents is not None),
        "STORES": stores, "PADDING": padding, "EARLY": early,
        "ROUNDING": rounding, "SNAPSHOT_ROUNDING": snapshot_rounding, "ROUNDS": rounds,
        "TARGET": kernel_target(data.device),
        "BLOCK_ROWS": config.block_rows, "BLOCK_COLS": problem.block_cols, "CHUNK": problem.chunk(config.lanes),
        "THREADS": WARP * config.num_warps,
    }  # fmt: skip
    return start(
        mamba2_step_kernel, (programs,), data.device, arguments, constants, config.num_warps, config.registers, early
    )


register(
    "mamba2_step(Tensor(a!) data, Tensor(b!)? scale, Tensor? seed, str rounding, int rounds, SymInt stream, "
    "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, bool dt_softplus, "
    f"{SLOTS_SCHEMA}, {SNAPSHOTS_SCHEMA.format('c', 'd')}, bool update, Tensor(e!) out, bool early) -> ()",
    _run,
)
