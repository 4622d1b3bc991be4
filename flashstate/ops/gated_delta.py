"""gated_delta_step: tokens through the gated delta rule of Gated DeltaNet and KDA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashstate.errors import (
    check_contiguous,
    check_flag,
    check_number,
    check_row_contiguous,
    check_tensor,
    dtype_name,
    tied,
)
from flashstate.launch import (
    access_width,
    choose,
    delta_kind,
    direct,
    gpu_of,
    kernel_target,
    lets_next_start,
    start,
    suspension,
    uses_kernels,
)
from flashstate.launch.arguments import aligned, as_bytes, row_stride, table_shape, token_strides
from flashstate.launch.config import MOST_AT_ONCE, WARP, room_at_once, tokens_together
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
from flashstate.reference import gated_delta as reference
from flashstate.state.signature import ACCESS_BYTES
from flashstate.state.slots import Slots, as_slots
from flashstate.state.state import State, as_snapshots, as_state, is_transposed

HALVES = (torch.bfloat16, torch.float16)  # dtypes of q and k that tensor cores take
OR_EXPANDED = ", or expanded from contiguous values per head"


def gated_delta_step(
    state: State | Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = True,
    exact: bool = True,
    slots: Slots | Tensor | None = None,
    snapshots: State | Tensor | None = None,
    update: bool = True,
    out: Tensor | None = None,
    early: bool = False,
) -> Tensor:
    """Step every row of the batch by its tokens; update the state in place and return the outputs.

    Per row and value head, token by token, in float32, with the head's q and k::

        alpha = exp(-exp(A_log) * softplus(a + dt_bias))    exp(a) without A_log
        beta  = sigmoid(b)                                  b itself without A_log
        k     = k / sqrt(sum(k^2) + 1e-6)                   both only with qk_l2norm
        q     = q / sqrt(sum(q^2) + 1e-6) * scale
        s     = s * alpha
        u     = beta * (v - s k)
        s     = s + u ⊗ k
        o     = s q

    Token axes, written (...): (batch,) for one token per row, (batch, T), or (tokens,) packed with slots.cu_seqlens.

    state: State, or a tensor (slots, HV, V, K). Those of float32, bfloat16 and float16 may also be (slots, HV, K, V) in
        memory, given as a transposed view.
    q, k: (..., H, K), where H divides HV.
    v: (..., HV, V), and `out`, which the result is written to if it is given.
    a: (..., HV), or per channel (..., HV, K), as KDA has it.
    b: (..., HV).
    A_log: (HV,); None: a is the logarithm of alpha, and b is beta.
    dt_bias: (HV,), or with a per channel (HV, K); only with A_log.
    scale: of q; None: 1 / sqrt(K).
    exact: False lets several tokens go through tensor cores at once: the same result but for rounding, for calls that
        store no state but the last. It needs q and k of bfloat16 or of float16, one a per head, and 16 tokens per row
        at most. One token per row is not affected.
    slots: Slots, or (batch,) slot numbers; None: row b is slot b.
    snapshots: State, or a tensor (batch or more, T or more, HV, V, K): receives the state after every token. They may
        be transposed as a state may.
    update: False leaves the pool as it is.
    early: True lets the kernel start, and read the state, before the kernel in front of it on the stream has ended; it
        waits for that one before it reads q, k, v, a and b. For calls behind `conv1d_step`: the kernel in front must
        not write the pool, its seeds, the slots or the parameters. Nothing changes but the time, and that only on GPUs
        of NVIDIA of compute capability 9.0 and above.

    Inputs are float32, bfloat16 or float16, each its own; the output has the dtype of v. Token and head axes of
    activations may have any stride; a and dt_bias may be expanded from one value per head. `out` may be v itself,
    unless tokens form a tree, and must not overlap other arguments. Nothing is differentiable.
    """
    eager, likeness = not torch.compiler.is_compiling(), None
    if eager and out is not None and direct.available and not suspension.depth:
        likeness = _step_again(
            state, q, k, v, a, b, A_log, dt_bias, scale, qk_l2norm, exact, slots, snapshots, update, out, early
        )  # fmt: skip
        if likeness is direct.STARTED:
            return out
    state, slots = as_state(state), as_slots(slots)
    num_slots, HV, V, K = state.data.shape
    tokens = tokens_of("v", v, {"HV": HV, "V": V}, state.data.device, slots)
    _check_activations(state, tokens, q, k, v, b)
    a, A_log, dt_bias = _check_gates(state, tokens, a, A_log, dt_bias)
    if scale is not None:
        check_number("scale", scale)
    for name, flag in (("qk_l2norm", qk_l2norm), ("exact", exact), ("early", early)):
        check_flag(name, flag)
    check_slots(num_slots, v.device, tokens, slots, update)
    check_table_of_slots(slots)
    if snapshots is not None:
        snapshots = as_snapshots(snapshots, state)
        check_snapshots(snapshots.data, (HV, V, K), v.device, tokens, slots)
    at_once = not exact and tokens.longest != 1
    if at_once:
        _check_at_once(tokens, q, k, a, slots, snapshots)
    if out is None:
        out = new_out(v, slots)
    else:
        check_out(out, v, tokens, ("HV", "V"))
    if debugging():
        check_contents(num_slots, tokens, slots, None if snapshots is None else len(snapshots.data), update)
    run = _run if eager else torch.ops.flashstate.gated_delta_step
    started = run(
        state.data, state.scale, state.seed, state.rounding, state.rounds, state.stream,
        q, k, v, a, b, A_log, dt_bias, K**-0.5 if scale is None else float(scale), qk_l2norm, at_once,
        *flat_slots(slots), *flat_snapshots(snapshots), update, out, early,
    )  # fmt: skip
    if started is not None and likeness is not None:
        direct.remember(*likeness, started, POINTERS)
    return out


POINTERS = 19  # of the kernels that change from call to call; the stream follows them
_launches_on_tensors: direct.Launches = {}  # where states are tensors, not State objects


def _step_again(
    state: Any, q: Any, k: Any, v: Any, a: Any, b: Any, A_log: Any, dt_bias: Any, scale: Any, qk_l2norm: Any,
    exact: Any, slots: Any, snapshots: Any, update: Any, out: Any, early: Any,
) -> direct.Likeness | None:  # fmt: skip
    """STARTED if the kernel could be started as by a call like this before, else by what to remember this one; None if
    there is no way, as with arguments of wrong types. This is all that a call costs on the host, so it asks nothing
    twice."""
    try:
        data, state_scale, seed, stream, launches = state, None, None, 0, _launches_on_tensors
        if state.__class__ is State:
            data, state_scale, seed = state.data, state.scale, state.seed
            stream, launches = state.stream, state.launches
        data_at, q_at, k_at, v_at, out_at = data.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        pointers = [data_at, q_at, k_at, v_at, a.data_ptr(), b.data_ptr(), out_at]  # in the kernels' order
        tensors = [q, k, v, a, b, data]
        if out is not v:
            tensors.append(out)
        if A_log is not None:
            tensors.append(A_log)
            pointers.append(A_log.data_ptr())
        if dt_bias is not None:
            tensors.append(dt_bias)
            pointers.append(dt_bias.data_ptr())
        if state_scale is not None:
            pointers.append(state_scale.data_ptr())
        if seed is not None:
            pointers.append(seed.data_ptr())
        if v_at == out_at and slots.__class__ is Slots and slots.parents is not None:  # which is refused
            return None
        slots_like, _ = direct.add_slots(slots, v, tensors, pointers)
        snapshots_like = None
        if snapshots is not None:
            snapshots_like = snapshots.signature
            pointers += [copy.data_ptr() for copy in (snapshots.data, snapshots.scale) if copy is not None]
        flags = (qk_l2norm, exact, update, early)
        if any(flag.__class__ is not bool for flag in flags) or not (scale is None or scale.__class__ is float):
            return None
        present = (A_log is not None, dt_bias is not None, out is v)
        aligned = (q_at | k_at | v_at | out_at) % ACCESS_BYTES == 0
        key = (slots_like, snapshots_like, present, flags, scale, aligned, data_at % ACCESS_BYTES)
        launch = direct.find(launches, key, tensors)
    except (AttributeError, TypeError, RuntimeError):  # the last from tensors without memory, such as sparse ones
        return None
    return direct.start_again(launch, (launches, key, tensors), pointers, stream)


def _check_activations(state: State, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> None:
    """Check what has values per token and head but a, v already for its shape."""
    _, HV, _, K = state.data.shape
    device = state.data.device
    check_tensor("q", q, (*tokens.axes, "H", "K"), (*tokens.sizes, None, K), device=device)
    H = q.shape[-2]
    if H == 0 or HV % H:
        raise ValueError(f"q must have a number of heads that divides the {HV} value heads, got {H}")
    check_tensor("k", k, (*tokens.axes, "H", "K"), (*tokens.sizes, H, K), device=device)
    check_tensor("b", b, (*tokens.axes, "HV"), (*tokens.sizes, HV), device=device)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_row_contiguous(name, tensor)


def _check_gates(
    state: State, tokens: Tokens, a: Tensor, A_log: Tensor | None, dt_bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Check a and its parameters; returned without the axes they were expanded along."""
    _, HV, _, K = state.data.shape
    device = state.data.device
    a = tied("a", a, (*tokens.axes, "HV"), (*tokens.sizes, HV), ("K",), (K,), device)
    per_channel = a.dim() > len(tokens.axes) + 1
    if per_channel:
        check_row_contiguous("a", a)
    if A_log is not None:
        check_tensor("A_log", A_log, ("HV",), (HV,), device=device)
        check_contiguous("A_log", A_log)
    if dt_bias is not None:
        if A_log is None:
            raise ValueError("dt_bias must come with A_log: without it a is the logarithm of the decay itself")
        dt_bias = tied("dt_bias", dt_bias, ("HV",), (HV,), ("K",), (K,), device)
        if dt_bias.dim() == 2 and not per_channel:
            raise ValueError(f"dt_bias must have shape (HV={HV}) where a has one value per head, got ({HV}, {K})")
        check_contiguous("dt_bias", dt_bias, OR_EXPANDED)
    return a, A_log, dt_bias


def _check_at_once(
    tokens: Tokens, q: Tensor, k: Tensor, a: Tensor, slots: Slots | None, snapshots: State | None
) -> None:
    """Raise unless tokens can go through tensor cores at once."""
    if q.dtype != k.dtype or q.dtype not in HALVES:
        got = f"{dtype_name(q.dtype)} and {dtype_name(k.dtype)}"
        raise ValueError(f"exact=False needs q and k that are both bfloat16 or both float16, got {got}")
    if a.dim() > len(tokens.axes) + 1:
        raise ValueError(f"exact=False needs one a per head, not one per channel, got shape {tuple(a.shape)}")
    if tokens.longest is None:
        raise ValueError("exact=False with packed tokens needs slots.max_len, the most tokens a row has")
    if tokens.longest > MOST_AT_ONCE:
        raise ValueError(f"exact=False is for up to {MOST_AT_ONCE} tokens per row, got {tokens.longest}")
    if snapshots is not None:
        raise ValueError("exact=False has no states between tokens, so there are no snapshots")
    if slots is not None and (slots.per_token or slots.parents is not None):
        name = "write (batch, T)" if slots.per_token else "parents"
        raise ValueError(f"exact=False has no states between tokens, so slots must not have {name}")


def _run(
    data: Tensor, scale: Tensor | None, seed: Tensor | None, rounding: str, rounds: int, stream: int,
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
    q_scale: float, qk_l2norm: bool, at_once: bool,
    read: Tensor | None, write: Tensor | None, accepted: Tensor | None, snapshot_rows: Tensor | None,
    cu_seqlens: Tensor | None, max_len: int | None, parents: Tensor | None, null: int, padding: str,
    snapshot_data: Tensor | None, snapshot_scale: Tensor | None, snapshot_rounding: str, update: bool, out: Tensor,
    early: bool,
) -> Started | None:  # fmt: skip
    """Fill `out` and the snapshots, and update `data`. Arguments are checked; flat, as torch.library wants them."""
    if v.numel() == 0 or (read is not None and read.shape[0] == 0):
        out.zero_()
        return None
    if parents is not None and out.data_ptr() == v.data_ptr():
        raise ValueError("out must not be v with slots.parents: a token's v is read again for those that follow it")
    if not uses_kernels(data.device):
        state, slots, snapshots = for_reference(
            data, scale, seed, rounding, rounds, stream, read, write, accepted, snapshot_rows, cu_seqlens, max_len,
            parents, null, padding, snapshot_data, snapshot_scale, snapshot_rounding,
        )  # fmt: skip
        reference.gated_delta_step(
            state, q, k, v, a, b, A_log, dt_bias, q_scale, qk_l2norm, at_once, slots, snapshots, update, out
        )
        return None
    from flashstate.kernels.gated_delta import gated_delta_step_kernel
    from flashstate.kernels.gated_delta_at_once import gated_delta_at_once_kernel
    from flashstate.kernels.gated_delta_one_token import gated_delta_one_token_kernel

    num_slots, heads, rows, cols = data.shape
    transposed = is_transposed(data)
    copies_transposed = transposed if snapshot_data is None else is_transposed(snapshot_data)
    extent = extent_of(v, read, cu_seqlens, max_len)
    batch_heads, one_token = extent.batch * heads, extent.one_token
    vector = access_width(data)
    stores = stores_of(update, write)
    stored = stored_of(stores, snapshot_data, one_token)
    kind, op = delta_kind(at_once, extent.longest)
    problem = kind(
        op, rows, cols, dtype_name(data.dtype), rounding, vector, batch_heads, not one_token, stored, transposed
    )  # fmt: skip
    config = choose(problem, gpu_of(data.device))
    tiles = config.together if one_token or at_once else 1  # of a program
    programs = programs_of("v", v, batch_heads, rows, tiles * config.block_rows)
    early = early and lets_next_start(data.device)
    tables = read, accepted, write, parents, cu_seqlens, snapshot_rows
    arguments = (
        as_bytes(data), q, k, v, a, b, out, A_log, dt_bias, scale, seed,
        *pool_arguments(data, scale, stream, tables, snapshot_data, snapshot_scale),
        *(stride for t in (q, k, v, a, b, out) for stride in token_strides(t, extent.token_axes, extent.packed)),
        *table_shape(read), row_stride(write), row_stride(parents),
        extent.num_tokens, extent.longest, num_slots, null, q_scale,
    )  # fmt: skip
    constants = {
        "H": heads, "HEADS_PER_GROUP": heads // q.shape[-2], "ROWS": rows, "COLS": cols,
        "VECTOR": vector, "TRANSPOSED": transposed, "ALIGNED": all(aligned(t) for t in (q, k, v, out)),
        "QK_L2NORM": qk_l2norm, "STORES": stores, "PADDING": padding, "EARLY": early,
        "ROUNDING": rounding, "ROUNDS": rounds, "TARGET": kernel_target(data.device),
        "BLOCK_ROWS": config.block_rows, "BLOCK_COLS": problem.block_cols, "CHUNK": problem.chunk(config.lanes),
    }  # fmt: skip
    if at_once:
        kernel = gated_delta_at_once_kernel
        constants |= {"TOKENS": room_at_once(extent.longest), "TILES": tiles}
    else:
        constants |= {
            "SNAPSHOT_VECTOR": min(vector, access_width(data if snapshot_data is None else snapshot_data)),
            "SNAPSHOTS_TRANSPOSED": copies_transposed, "SNAPSHOT_ROUNDING": snapshot_rounding,
            "PER_CHANNEL": a.dim() == extent.token_axes + 2,
            "BIAS_PER_CHANNEL": dt_bias is not None and dt_bias.dim() == 2, "THREADS": WARP * config.num_warps,
        }  # fmt: skip
        if copies_transposed != transposed:
            constants["SNAPSHOT_VECTOR"] = 1  # what is stored across the layout of the tile must not change it
        if one_token:
            kernel = gated_delta_one_token_kernel
            constants["TILES"] = tiles
        else:
            kernel = gated_delta_step_kernel
            constants["TOGETHER"] = tokens_together(config, extent.longest, extent.packed, tree=parents is not None)
    return start(kernel, (programs,), data.device, arguments, constants, config.num_warps, config.registers, early)


register(
    "gated_delta_step(Tensor(a!) data, Tensor(b!)? scale, Tensor? seed, str rounding, int rounds, SymInt stream, "
    "Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor? A_log, Tensor? dt_bias, float q_scale, bool qk_l2norm, "
    f"bool at_once, {SLOTS_SCHEMA}, {SNAPSHOTS_SCHEMA.format('c', 'd')}, bool update, Tensor(e!) out, bool early) "
    "-> ()",
    _run,
)
