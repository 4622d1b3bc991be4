"""mamba2_replay: tokens through Mamba-2 from a checkpoint and a ring of inputs, folded in only when it is full."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashstate.errors import check_flag, dtype_name
from flashstate.launch import (
    ReplayProblem,
    access_width,
    choose,
    gpu_of,
    kernel_target,
    lets_next_start,
    start,
    uses_kernels,
)
from flashstate.launch.arguments import aligned, as_bytes, outer_strides, row_stride, token_strides
from flashstate.launch.config import multiprocessors, next_power_of_2
from flashstate.launch.start import Started
from flashstate.ops.debug import check_contents, debugging
from flashstate.ops.library import register
from flashstate.ops.mamba2 import check_activations, check_parameters
from flashstate.ops.steps import check_out, extent_of, programs_of
from flashstate.ops.tokens import Tokens, check_slots, new_out, slots_of, tokens_of
from flashstate.reference import mamba2_replay as reference
from flashstate.state.faults import fault_flag
from flashstate.state.ring import (
    LARGEST_WINDOW,
    Plan,
    Ring,
    check_call_length,
    check_plan,
    check_replayed_slots,
    check_ring,
)
from flashstate.state.slots import Slots, as_slots
from flashstate.state.state import State, as_state, refuse_transposed

SMALL = 512  # batch x heads below which one kernel decides for every row
MOST_PER_PROCESSOR = 16  # programs of a kernel that walks along a plan


def mamba2_replay(
    state: State | Tensor,
    ring: Ring,
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
    plan: Plan | None = None,
    slots: Slots | Tensor | None = None,
    update: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Give the outputs of `mamba2_step` for every row of the batch, while the state is a checkpoint that lags.

    What a row continues from is its state after the live tokens of its ring. The new tokens are appended to the ring;
    only where live and new ones together are more than the window, the live ones are folded into the state first, which
    is then rounded and stored. `commit` says afterwards which new tokens stay: until then the next call overwrites
    them. See docs/ops.md.

    Token axes, written (...): (batch,) for one token per row, (batch, T), or (tokens,) packed with slots.cu_seqlens and
    slots.max_len. A row has at most as many tokens as the window.

    state: State, or a tensor (slots, heads, rows, cols): the checkpoint.
    ring: of the same slots; x and B must have the dtypes of its.
    x, z: (..., heads, rows), and `out`, which the result is written to if it is given.
    dt: (..., heads); A, dt_bias: (heads,).
    B, C: (..., groups, cols), with the groups of the ring.
    D: (heads,) or (heads, rows).
    plan: of this step, from `StatePool.plan`, for all layers; it has the slots. None: every row decides for itself.
    slots: Slots without write, accepted, parents and snapshot_rows, or (batch,) slot numbers; None: row b is slot b.
    update: False leaves the state and the ring as they are.

    Inputs are float32, bfloat16 or float16; the output has the dtype of x. Sums are float32; for x of 16 bits products
    are of bfloat16 operands, for float32 of float32. Strides are as in `mamba2_step`. `out` must not overlap other
    arguments. Nothing is differentiable.
    """
    state, slots = as_state(state), _slots_of(plan, slots)
    refuse_transposed("state", state)
    check_ring(ring, state)
    num_slots, heads, rows, _ = state.data.shape
    tokens = tokens_of("x", x, {"heads": heads, "rows": rows}, state.data.device, slots)
    check_activations(state, tokens, x, B, C, z)
    _check_ring_takes(ring, x, B)
    dt, A, D, dt_bias = _check_parameters(state, tokens, dt, A, D, dt_bias)
    check_flag("dt_softplus", dt_softplus)
    check_replayed_slots(slots)
    check_slots(num_slots, x.device, tokens, slots, update)
    longest = check_call_length(ring, tokens.longest)
    _check_plan(plan, ring, tokens, longest)
    if out is None:
        out = new_out(x, slots)
    else:
        check_out(out, x, tokens, ("heads", "rows"))
    if debugging():
        check_contents(num_slots, tokens, slots, None, update)
    run = _run if not torch.compiler.is_compiling() else torch.ops.flashstate.mamba2_replay
    plan_rows, plan_parts = (None, None) if plan is None else (plan.rows, plan.parts)
    run(
        state.data, state.scale, state.seed, state.rounding, state.rounds, state.stream,
        ring.x, ring.B, ring.dt, ring.start, ring.count, ring.window,
        x, dt, A, B, C, D, z, dt_bias, dt_softplus, plan_rows, plan_parts, *_flat_slots(slots), longest, update, out,
    )  # fmt: skip
    return out


def _slots_of(plan: Plan | None, slots: Slots | Tensor | None) -> Slots | None:
    """The slots of a call: those of its plan, if it has one."""
    if plan is None:
        return as_slots(slots)
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a Plan, got {type(plan).__name__}")
    if slots is not None and slots is not plan.slots and getattr(plan.slots, "read", None) is not slots:
        raise ValueError("slots must be left out with a plan, which has those that it was made for")
    return plan.slots


def _check_ring_takes(ring: Ring, x: Tensor, B: Tensor) -> None:
    """Raise unless a ring has the dtypes and the groups of what is appended to it."""
    for name, tensor, kept in (("x", x, ring.x), ("B", B, ring.B)):
        if tensor.dtype != kept.dtype:
            want, got = dtype_name(kept.dtype), dtype_name(tensor.dtype)
            raise TypeError(f"{name} must have the dtype of ring.{name}, {want}, got {got}")
    if B.shape[-2] != ring.B.shape[1]:
        raise ValueError(f"B must have the groups of ring.B, {ring.B.shape[1]}, got {B.shape[-2]}")


def _check_parameters(
    state: State, tokens: Tokens, dt: Tensor, A: Tensor, D: Tensor | None, dt_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Check what has one value per head, and D, which may have more."""
    dt, A, D, dt_bias = check_parameters(state, tokens, dt, A, D, dt_bias)
    for name, parameter, axes in (("dt", dt, len(tokens.axes) + 1), ("A", A, 1), ("dt_bias", dt_bias, 1)):
        if parameter is not None and parameter.dim() != axes:
            raise ValueError(
                f"{name} must have one value per head, as Mamba-2 has, or be expanded from such, got shape "
                f"{tuple(parameter.shape)}: replay is not for Mamba-1"
            )
    return dt, A, D, dt_bias


def _check_plan(plan: Plan | None, ring: Ring, tokens: Tokens, longest: int) -> None:
    """Raise where a plan was made for other rings, or for another batch."""
    if plan is None:
        return
    check_plan(plan, ring)
    if (plan.batch, plan.tokens) != (tokens.batch, longest):
        raise ValueError(
            f"plan is for {plan.batch} rows of up to {plan.tokens} tokens, but x has {tokens.batch} of up to {longest}"
        )


def _flat_slots(slots: Slots | None) -> tuple[Tensor | None, Tensor | None, int, str]:
    """What replay needs of a Slots."""
    return (None, None, -1, "zero") if slots is None else (slots.read, slots.cu_seqlens, slots.null, slots.padding)


def _run(
    data: Tensor, scale: Tensor | None, seed: Tensor | None, rounding: str, rounds: int, stream: int,
    ring_x: Tensor, ring_B: Tensor, ring_dt: Tensor, oldest: Tensor, count: Tensor, window: int,
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None, dt_softplus: bool,
    plan_rows: Tensor | None, plan_parts: Tensor | None,
    read: Tensor | None, cu_seqlens: Tensor | None, null: int, padding: str, longest: int, update: bool, out: Tensor,
) -> list[Started | None]:  # fmt: skip
    """Fill `out`, and update the state and the ring. Arguments are checked; flat, as torch.library wants them."""
    if x.numel() == 0 or (read is not None and read.shape[0] == 0):
        out.zero_()
        return []
    if not uses_kernels(data.device):
        state = State(data, scale, rounding=rounding, rounds=rounds, seed=seed, stream=stream)
        ring = Ring(ring_x, ring_B, ring_dt, oldest, count, window)
        slots = None
        if read is not None:
            slots = slots_of(read, None, None, None, cu_seqlens, longest, None, null, padding)
        given = (x, dt, A, B, C, D, z, dt_bias, dt_softplus)
        reference.mamba2_replay(state, ring, *given, slots, longest, update, out)
        return []
    from flashstate.kernels.mamba2_replay import mamba2_replay_kernel

    num_slots, heads, rows, cols = data.shape
    extent = extent_of(x, read, cu_seqlens, longest)
    vector = access_width(data)
    small = plan_rows is None or extent.batch * heads < SMALL
    tables = plan_rows, plan_parts, oldest, count, read, cu_seqlens
    arguments = (
        as_bytes(data), ring_x, ring_B, ring_dt, x, B, C, dt, out, A, D, z, dt_bias, scale, seed, *tables,
        stream, fault_flag(data.device), *outer_strides(data, scale, 1),
        *(kept.stride(0) for kept in (ring_x, ring_B, ring_dt)),
        *(stride for t in (x, B, C, dt, z, out) for stride in token_strides(t, extent.token_axes, extent.packed)),
        row_stride(read), extent.batch, extent.num_tokens, longest, ring_x.shape[2], num_slots, null,
    )  # fmt: skip

    def far_apart(tensor: Tensor | None) -> bool:
        """Whether offsets between tokens of a row, some of which may be before it, need 64 bits."""
        axis = extent.token_axes - 1
        return tensor is not None and tensor.stride(axis) * 2 * LARGEST_WINDOW >= 1 << 31

    paired = not small and lets_next_start(data.device)
    started = []
    for rows_do in ("either",) if small else ("fold", "keep"):
        problem = ReplayProblem(
            f"mamba2_replay {rows_do}", rows, cols, dtype_name(data.dtype), rounding, vector, extent.batch * heads,
            longest > 1,
        )  # fmt: skip
        config = choose(problem, gpu_of(data.device))
        tiles = math.gcd(config.together, heads // B.shape[-2] * -(-rows // config.block_rows))
        programs = programs_of("x", x, extent.batch * heads, rows, config.block_rows) // tiles
        if not small:
            programs = min(programs, MOST_PER_PROCESSOR * multiprocessors(data.device))
        constants = {
            "H": heads, "HEADS_PER_GROUP": heads // B.shape[-2], "ROWS": rows, "COLS": cols, "WINDOW": window,
            "VECTOR": vector, "ALIGNED": all(aligned(t) for t in (x, B, C, z, out, ring_x, ring_B)),
            "WIDE": any(far_apart(t) for t in (x, B, C, dt, z, out)), "D_PER_ROW": D is not None and D.dim() == 2,
            "DT_SOFTPLUS": dt_softplus, "ROWS_DO": rows_do, "UPDATE": update, "PADDING": padding,
            "ROUNDING": rounding, "ROUNDS": rounds, "TARGET": kernel_target(data.device),
            "TOKENS": max(8, next_power_of_2(longest)), "ROOM": max(16, next_power_of_2(window)), "TILES": tiles,
            "BLOCK_ROWS": config.block_rows, "BLOCK_COLS": problem.block_cols, "CHUNK": problem.chunk(config.lanes),
            "PAIRED": paired,
        }  # fmt: skip
        early = paired and rows_do == "keep"
        started.append(
            start(mamba2_replay_kernel, (programs,), data.device, arguments, constants, 1, config.registers, early)
        )
    return started


register(
    "mamba2_replay(Tensor(a!) data, Tensor(b!)? scale, Tensor? seed, str rounding, int rounds, SymInt stream, "
    "Tensor(c!) ring_x, Tensor(d!) ring_B, Tensor(e!) ring_dt, Tensor start, Tensor count, int window, "
    "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, bool dt_softplus, "
    "Tensor? plan_rows, Tensor? plan_parts, Tensor? read, Tensor? cu_seqlens, SymInt null, str padding, "
    "SymInt longest, bool update, Tensor(f!) out) -> ()",
    _run,
)
