"""mamba2_replay: tokens through Mamba-2 from a checkpoint and a ring of inputs, folded in only when it is full."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashstate.errors import check_flag, dtype_name
from flashstate.launch import (
    AnyReplay,
    ReplayTokenProblem,
    access_width,
    choose,
    direct,
    gpu_of,
    kernel_target,
    lets_next_start,
    replay_kind,
    start,
    suspension,
    uses_kernels,
)
from flashstate.launch.arguments import aligned, as_bytes, outer_strides, row_stride, token_strides
from flashstate.launch.config import WARP, multiprocessors, next_power_of_2
from flashstate.launch.start import Started
from flashstate.ops.debug import check_contents, check_cursors, debugging
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
from flashstate.state.signature import ACCESS_BYTES
from flashstate.state.slots import Slots, as_slots
from flashstate.state.state import State, as_state, refuse_transposed

SMALL = 2048  # batch x heads below which one kernel decides for every row; half of it for states of 8 bits
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
    are of bfloat16 operands, for float32 of float32, and so those of one token that is not packed, on float32 states
    with windows up to 16. Strides are as in `mamba2_step`. `out` must not overlap other arguments. Nothing is
    differentiable.
    """
    eager, likeness = not torch.compiler.is_compiling(), None
    if eager and out is not None and direct.available and not suspension.depth:
        given = (D, z, dt_bias, dt_softplus, plan, slots, update, out)
        likeness = _replay_again(state, ring, x, dt, A, B, C, *given)
        if likeness is direct.STARTED:
            return out
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
        check_cursors(ring, slots, tokens.batch)
    run = _run if eager else torch.ops.flashstate.mamba2_replay
    plan_rows, plan_parts = (None, None) if plan is None else (plan.rows, plan.parts)
    started = run(
        state.data, state.scale, state.seed, state.rounding, state.rounds, state.stream,
        ring.x, ring.B, ring.dt, ring.start, ring.count, ring.window,
        x, dt, A, B, C, D, z, dt_bias, dt_softplus, plan_rows, plan_parts, *_flat_slots(slots), longest, update, out,
    )  # fmt: skip
    if started and likeness is not None:
        direct.remember(*likeness, started, POINTERS)
    return out


POINTERS = 21  # of the kernels that change from call to call; the stream follows them
_launches_on_tensors: direct.Launches = {}  # where states are tensors, not State objects


def _replay_again(
    state: Any, ring: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, z: Any, dt_bias: Any, dt_softplus: Any,
    plan: Any, slots: Any, update: Any, out: Any,
) -> direct.Likeness | None:  # fmt: skip
    """STARTED if the kernels could be started as by a call like this before, else by what to remember this one; None if
    there is no way, as with arguments of wrong types. This is all that a call costs on the host."""
    try:
        data, scale, seed, stream, launches = state, None, None, 0, _launches_on_tensors
        if state.__class__ is State:
            data, scale, seed, stream, launches = state.data, state.scale, state.seed, state.stream, state.launches
        if plan is not None and slots is not None:
            return None
        x_at, B_at, C_at, out_at = x.data_ptr(), B.data_ptr(), C.data_ptr(), out.data_ptr()
        data_at, z_at = data.data_ptr(), 0
        pointers = [data_at, ring.x.data_ptr(), ring.B.data_ptr(), ring.dt.data_ptr()]  # in the kernel's order
        pointers += [x_at, B_at, C_at, dt.data_ptr(), out_at, A.data_ptr()]
        tensors = [x, dt, A, B, C, data, out]
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
        pointers += [kept.data_ptr() for kept in (scale, seed) if kept is not None]
        plan_like = None
        if plan is not None:
            plan_like, slots = plan.signature, plan.slots
            if plan.count.data_ptr() != ring.count.data_ptr() or plan.window != ring.window:
                return None
            pointers += [plan.rows.data_ptr(), plan.parts.data_ptr()]
        pointers += [ring.start.data_ptr(), ring.count.data_ptr()]
        slots_like, _ = direct.add_slots(slots, x, tensors, pointers)
        if dt_softplus.__class__ is not bool or update.__class__ is not bool:
            return None
        present = (D is not None, z is not None, dt_bias is not None)
        aligned_at = (x_at | B_at | C_at | out_at | z_at) % ACCESS_BYTES == 0
        likes = ("replay", ring.signature, plan_like, slots_like)
        key = (*likes, present, dt_softplus, update, aligned_at, data_at % ACCESS_BYTES)
        launch = direct.find(launches, key, tensors)
    except (AttributeError, TypeError, RuntimeError):  # the last from tensors without memory, such as sparse ones
        return None
    return direct.start_again(launch, (launches, key, tensors), pointers, stream)


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
) -> list[Started]:  # fmt: skip
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
    num_slots, heads, rows, cols = data.shape
    extent = extent_of(x, read, cu_seqlens, longest)
    activations = (x, B, C, dt, z, out)
    arguments = (
        as_bytes(data), ring_x, ring_B, ring_dt, x, B, C, dt, out, A, D, z, dt_bias, scale, seed,
        plan_rows, plan_parts, oldest, count, read, cu_seqlens, stream, fault_flag(data.device),
        *outer_strides(data, scale, 1), *(kept.stride(0) for kept in (ring_x, ring_B, ring_dt)),
        *(stride for t in activations for stride in token_strides(t, extent.token_axes, extent.packed)),
        row_stride(read), extent.batch, extent.num_tokens, longest, ring_x.shape[2], num_slots, null,
    )  # fmt: skip
    vector, kind = access_width(data), replay_kind(longest, dtype_name(data.dtype), extent.packed, window)
    constants = {
        "H": heads, "HEADS_PER_GROUP": heads // B.shape[-2], "ROWS": rows, "COLS": cols, "WINDOW": window,
        "VECTOR": vector, "ALIGNED": all(aligned(t) for t in (x, B, C, z, out, ring_x, ring_B)),
        "WIDE": any(t is not None and _far_apart(t, extent.token_axes) for t in activations),
        "D_PER_ROW": D is not None and D.dim() == 2, "DT_SOFTPLUS": dt_softplus, "UPDATE": update,
        "PADDING": padding, "ROUNDING": rounding, "ROUNDS": rounds, "TARGET": kernel_target(data.device),
        "TOKENS": 1 if kind is ReplayTokenProblem else max(8, next_power_of_2(longest)),
        "ROOM": max(16, next_power_of_2(window)),
    }  # fmt: skip
    problem = kind(
        "mamba2_replay", rows, cols, dtype_name(data.dtype), rounding, vector, extent.batch * heads, longest > 1
    )  # fmt: skip
    return _start_kernels(problem, plan_rows is not None, x, arguments, constants)


def _far_apart(tensor: Tensor, token_axes: int) -> bool:
    """Whether offsets between the tokens of a window need 64 bits."""
    return tensor.stride(token_axes - 1) * LARGEST_WINDOW >= 1 << 31


def forms_of(problem: AnyReplay, planned: bool) -> tuple[AnyReplay, ...]:
    """The kernels that a call starts, one after the other: one that decides for every row, or with a plan, and rows
    enough, one for those that do not fold and one for those that do."""
    small = SMALL // 2 if problem.itemsize == 1 else SMALL
    forms = ("keep", "fold") if planned and problem.batch_heads >= small else ("either",)
    return tuple(replace(problem, op=f"{problem.op} {form}") for form in forms)


def _start_kernels(
    problem: AnyReplay, planned: bool, x: Tensor, arguments: tuple[Any, ...], constants: dict[str, Any]
) -> list[Started]:
    """Start the kernels of a call; the second does not wait for the first, which has other rows. Gives those that were
    compiled and started."""
    from flashstate.kernels.mamba2_replay import mamba2_replay_kernel

    forms = forms_of(problem, planned)
    places = ("first", "second") if len(forms) == 2 and lets_next_start(x.device) else ("alone", "alone")
    started: list[Started | None] = []
    for form, place in zip(forms, places, strict=False):
        config = choose(form, gpu_of(x.device))
        tiles = math.gcd(config.together, constants["HEADS_PER_GROUP"] * -(-form.rows // config.block_rows))
        programs = programs_of("x", x, form.batch_heads, form.rows, config.block_rows) // tiles
        if len(forms) == 2:
            programs = min(programs, MOST_PER_PROCESSOR * multiprocessors(x.device))
        of_form = {
            "ROWS_DO": form.op.split()[1], "TILES": tiles, "BLOCK_ROWS": config.block_rows,
            "BLOCK_COLS": form.block_cols, "CHUNK": form.chunk(config.lanes), "PLACE": place,
            "FOLD_TILES": 1 if planned and len(forms) == 1 and constants["TOKENS"] > 1 else tiles,
            "THREADS": WARP * config.num_warps,
        }  # fmt: skip
        all_constants, how = {**constants, **of_form}, (config.num_warps, config.registers, place == "second")
        started.append(start(mamba2_replay_kernel, (programs,), x.device, arguments, all_constants, *how))
    return [one for one in started if one is not None]


register(
    "mamba2_replay(Tensor(a!) data, Tensor(b!)? scale, Tensor? seed, str rounding, int rounds, SymInt stream, "
    "Tensor(c!) ring_x, Tensor(d!) ring_B, Tensor(e!) ring_dt, Tensor start, Tensor count, int window, "
    "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, bool dt_softplus, "
    "Tensor? plan_rows, Tensor? plan_parts, Tensor? read, Tensor? cu_seqlens, SymInt null, str padding, "
    "SymInt longest, bool update, Tensor(f!) out) -> ()",
    _run,
)
