"""mamba3_step: tokens through the trapezoidal state update of Mamba-3, SISO and MIMO."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashstate.errors import (
    check_contiguous,
    check_flag,
    check_no_overlap,
    check_row_contiguous,
    check_tensor,
    dtype_name,
)
from flashstate.launch import (
    access_width,
    choose,
    direct,
    gpu_of,
    kernel_target,
    mamba3_kind,
    start,
    suspension,
    uses_kernels,
)
from flashstate.launch.arguments import as_bytes, row_stride, table_shape, token_strides
from flashstate.launch.config import AHEAD
from flashstate.launch.start import Started
from flashstate.ops.debug import check_contents, debugging
from flashstate.ops.library import register
from flashstate.ops.steps import extent_of, for_reference, programs_of, stored_of, stores_of
from flashstate.ops.tokens import SLOTS_SCHEMA, Tokens, check_slots, check_table_of_slots, flat_slots, tokens_of
from flashstate.reference import mamba3 as reference
from flashstate.state.faults import fault_flag
from flashstate.state.mamba3 import Mamba3State, Rotary
from flashstate.state.slots import Slots, as_slots


def mamba3_step(
    state: Mamba3State,
    x: Tensor,
    A: Tensor,
    dt: Tensor,
    trap: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    Wx: Tensor | None = None,
    Wz: Tensor | None = None,
    Wo: Tensor | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    rotary: Rotary | None = None,
    trap_logit: bool = False,
    update_kv: bool = True,
    slots: Slots | Tensor | None = None,
    update: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Step every row of the batch by its tokens; update all four states in place and return the outputs.

    Per row and head, token by token, in float32, with the head's group of B and C; r counts ranks::

        trap  = sigmoid(trap)                                   only with trap_logit
        angle = (angle + tanh(rotary.angle) * dt * π) mod 2π    these lines only with rotary
        B[r]  = rotate(B[r] + bias_B[r], angle)
        C[r]  = rotate(C[r] + bias_C[r], angle)
        B     = B, rounded to the dtype of state.k
        alpha, beta, gamma = exp(A * dt), (1 - trap) * dt * alpha, trap * dt
        s     = s * alpha + sum over r of (gamma * x * Wx[r]) ⊗ B[r] + (beta * v * Wx[r]) ⊗ k[r]
        y[r]  = s C[r] + D * x * Wx[r]
        y[r]  = y[r] * silu(z * Wz[r])                          only with z
        y     = sum over r of y[r] * Wo[r]                      only with Wo
        k, v  = B, x                                            what the next token sees as k and v

    Token axes, written (...): (batch,) for one token per row, (batch, T), or (tokens,) packed with slots.cu_seqlens.

    state: Mamba3State, of H heads with D rows and N columns, and of rank R; R = 1 is SISO.
    x, z: (..., H, D). The output has the shape of x; of rank above 1 without Wo it is (..., R, H, D).
    A, dt, trap: (..., H).
    B, C: (..., R, G, N), where G divides H.
    Wx, Wz, Wo: (R, H, D); None: ones, of Wo also no sum.
    D: (H,).
    rotary: Rotary; None: B and C come with their bias and turned, and state.angle is left alone.
    update_kv: False leaves state.k and state.v to the caller.
    slots: Slots, or (batch,) slot numbers; None: row b is slot b. They must not have parents.
    update: False leaves all four states as they are.
    out: what the result is written to.

    Inputs are float32, bfloat16 or float16, each its own; the output has the dtype of x. Token, rank, head and group
    axes of activations may have any stride. `out` may be x itself, if it has its shape, and must not overlap other
    arguments. Nothing is differentiable.
    """
    eager, likeness = not torch.compiler.is_compiling(), None
    if eager and out is not None and direct.available and not suspension.depth:
        likeness = _step_again(
            state, x, A, dt, trap, B, C, Wx, Wz, Wo, D, z, rotary, trap_logit, update_kv, slots, update, out
        )  # fmt: skip
        if likeness is direct.STARTED:
            return out
    if not isinstance(state, Mamba3State):
        raise TypeError(f"state must be a Mamba3State, got {type(state).__name__}")
    slots = as_slots(slots)
    num_slots, H, rows, _ = state.ssm.data.shape
    tokens = tokens_of("x", x, {"H": H, "D": rows}, state.k.device, slots)
    _check_activations(state, tokens, x, A, dt, trap, B, C, z)
    _check_parameters(state, Wx, Wz, Wo, D)
    if Wz is not None and z is None:
        raise ValueError("Wz must come with z, which it multiplies")
    angle, bias_B, bias_C, pairing = _check_rotary(state, tokens, rotary)
    for name, flag in (("trap_logit", trap_logit), ("update_kv", update_kv)):
        check_flag(name, flag)
    if slots is not None and slots.parents is not None:
        raise ValueError("slots must not have parents: mamba3_step has no draft trees")
    check_slots(num_slots, x.device, tokens, slots, update)
    check_table_of_slots(slots)
    per_rank = Wo is None and state.rank > 1
    shape = (*tokens.sizes, *((state.rank,) if per_rank else ()), H, rows)
    if out is None:
        allocate = torch.zeros if slots is not None and slots.padding == "keep" else torch.empty
        out = allocate(shape, dtype=x.dtype, device=x.device)
    else:
        axes = (*tokens.axes, *(("R",) if per_rank else ()), "H", "D")
        check_tensor("out", out, axes, shape, dtypes=(x.dtype,), device=x.device)
        check_row_contiguous("out", out)
        check_no_overlap("out", out)
    if debugging():
        check_contents(num_slots, tokens, slots, None, update)
    run = _run if eager else torch.ops.flashstate.mamba3_step
    ssm = state.ssm
    started = run(
        ssm.data, ssm.scale, ssm.seed, ssm.rounding, ssm.rounds, ssm.stream, state.k, state.v, state.angle,
        x, A, dt, trap, B, C, Wx, Wz, Wo, D, z, angle, bias_B, bias_C, pairing, trap_logit, update_kv,
        *flat_slots(slots), update, out,
    )  # fmt: skip
    if started is not None and likeness is not None:
        direct.remember(*likeness, started, POINTERS)
    return out


POINTERS = 25  # of the kernel that change from call to call; the stream follows them


def _step_again(
    state: Any, x: Any, A: Any, dt: Any, trap: Any, B: Any, C: Any, Wx: Any, Wz: Any, Wo: Any, D: Any, z: Any,
    rotary: Any, trap_logit: Any, update_kv: Any, slots: Any, update: Any, out: Any,
) -> direct.Likeness | None:  # fmt: skip
    """As _step_again of mamba2: STARTED if the kernel could be started as by a call like this before, else by what to
    remember this one; None if there is no way."""
    try:
        if state.__class__ is not Mamba3State or not (rotary is None or rotary.__class__ is Rotary):
            return None
        ssm, launches = state.ssm, state.launches
        tensors = [x, A, dt, trap, B, C]
        if out is not x:
            tensors.append(out)
        turned = (None, None, None, None) if rotary is None else (
            rotary.angle, rotary.bias_B, rotary.bias_C, rotary.pairing
        )  # fmt: skip
        angle, bias_B, bias_C, pairing = turned
        pointers = [ssm.data.data_ptr(), state.k.data_ptr(), state.v.data_ptr()]  # in the kernel's order
        if rotary is not None:
            theta: Any = state.angle
            pointers.append(theta.data_ptr())
        pointers += [tensor.data_ptr() for tensor in (x, A, dt, trap, B, C, out)]
        given = (z, angle, Wx, Wz, Wo, D, bias_B, bias_C)
        for tensor in given:
            if tensor is not None:
                tensors.append(tensor)
                pointers.append(tensor.data_ptr())
        for tensor in (ssm.scale, ssm.seed):
            if tensor is not None:
                pointers.append(tensor.data_ptr())
        if slots.__class__ is Slots and slots.snapshot_rows is not None:  # which its kernel does not take
            return None
        slots_like, _ = direct.add_slots(slots, x, tensors, pointers)
        flags = (trap_logit, update_kv, update)
        if any(flag.__class__ is not bool for flag in flags):
            return None
        present = tuple(tensor is not None for tensor in given)
        key = (slots_like, present, flags, pairing, out is x)
        launch = direct.find(launches, key, tensors)
    except (AttributeError, TypeError, RuntimeError):  # the last from tensors without memory, such as sparse ones
        return None
    return direct.start_again(launch, (launches, key, tensors), pointers, ssm.stream)


def _check_activations(
    state: Mamba3State, tokens: Tokens, x: Tensor, A: Tensor, dt: Tensor, trap: Tensor, B: Tensor, C: Tensor,
    z: Tensor | None,
) -> None:  # fmt: skip
    """Check what has values per token but the angles, x already for its shape."""
    _, H, rows, N = state.ssm.data.shape
    device, R = state.k.device, state.rank
    for name, per_head in (("A", A), ("dt", dt), ("trap", trap)):
        check_tensor(name, per_head, (*tokens.axes, "H"), (*tokens.sizes, H), device=device)
    axes = (*tokens.axes, "R", "G", "N")
    check_tensor("B", B, axes, (*tokens.sizes, R, None, N), device=device)
    G = B.shape[-2]
    if G == 0 or H % G:
        raise ValueError(f"B must have a number of groups that divides the {H} heads, got {G}")
    check_tensor("C", C, axes, (*tokens.sizes, R, G, N), device=device)
    if z is not None:
        check_tensor("z", z, (*tokens.axes, "H", "D"), (*tokens.sizes, H, rows), device=device)
        check_row_contiguous("z", z)
    for name, tensor in (("x", x), ("B", B), ("C", C)):
        check_row_contiguous(name, tensor)


def _check_parameters(
    state: Mamba3State, Wx: Tensor | None, Wz: Tensor | None, Wo: Tensor | None, D: Tensor | None
) -> None:
    """Check what all tokens share but the bias of B and C."""
    _, H, rows, _ = state.ssm.data.shape
    for name, W in (("Wx", Wx), ("Wz", Wz), ("Wo", Wo)):
        if W is not None:
            check_tensor(name, W, ("R", "H", "D"), (state.rank, H, rows), device=state.k.device)
            check_contiguous(name, W)
    if D is not None:
        check_tensor("D", D, ("H",), (H,), device=state.k.device)
        check_contiguous("D", D)


def _check_rotary(
    state: Mamba3State, tokens: Tokens, rotary: Rotary | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None, str]:
    """Check what B and C are turned by; returns the angles and biases of tokens, and which columns are pairs."""
    if rotary is None:
        return None, None, None, "none"
    if not isinstance(rotary, Rotary):
        raise TypeError(f"rotary must be a Rotary or None, got {type(rotary).__name__}")
    _, H, _, N = state.ssm.data.shape
    device = state.k.device
    if state.angle is None:
        raise ValueError("rotary needs a state with angle: Mamba3State(ssm, k, v, angle)")
    if N % 2:
        raise ValueError(f"rotary needs an even number of columns, got N = {N}")
    S = state.angle.shape[2]
    shared, own = (*tokens.axes, "S"), (*tokens.axes, "H", "S")
    one_for_all = isinstance(rotary.angle, Tensor) and rotary.angle.dim() == len(shared)
    few, many = (shared, (*tokens.sizes, S)), (own, (*tokens.sizes, H, S))
    check_tensor("rotary.angle", rotary.angle, *(few if one_for_all else many), device=device,
                 also=many if one_for_all else few)  # fmt: skip
    check_row_contiguous("rotary.angle", rotary.angle)
    for name, bias in (("rotary.bias_B", rotary.bias_B), ("rotary.bias_C", rotary.bias_C)):
        if bias is not None:
            check_tensor(name, bias, ("R", "H", "N"), (state.rank, H, N), device=device)
            check_contiguous(name, bias)
    return rotary.angle, rotary.bias_B, rotary.bias_C, rotary.pairing_of(state.rank)


def _run(
    data: Tensor, scale: Tensor | None, seed: Tensor | None, rounding: str, rounds: int, stream: int,
    k: Tensor, v: Tensor, theta: Tensor | None,
    x: Tensor, A: Tensor, dt: Tensor, trap: Tensor, B: Tensor, C: Tensor,
    Wx: Tensor | None, Wz: Tensor | None, Wo: Tensor | None, D: Tensor | None, z: Tensor | None,
    angle: Tensor | None, bias_B: Tensor | None, bias_C: Tensor | None, pairing: str,
    trap_logit: bool, update_kv: bool,
    read: Tensor | None, write: Tensor | None, accepted: Tensor | None, snapshot_rows: Tensor | None,
    cu_seqlens: Tensor | None, max_len: int | None, parents: Tensor | None, null: int, padding: str,
    update: bool, out: Tensor,
) -> Started | None:  # fmt: skip
    """Fill `out` and update the four states. Arguments are checked; flat, as torch.library wants them."""
    if x.numel() == 0 or (read is not None and read.shape[0] == 0):
        out.zero_()
        return None
    if not uses_kernels(data.device):
        ssm, slots, _ = for_reference(
            data, scale, seed, rounding, rounds, stream, read, write, accepted, snapshot_rows, cu_seqlens, max_len,
            parents, null, padding, None, None, "nearest",
        )  # fmt: skip
        parameters = reference.Parameters(Wx, Wz, Wo, D, bias_B, bias_C, pairing, trap_logit)
        reference.mamba3_step(
            Mamba3State(ssm, k, v, theta), x, A, dt, trap, B, C, z, angle, parameters, slots, update, update_kv, out
        )
        return None
    from flashstate.kernels.mamba3 import mamba3_step_kernel

    num_slots, H, rows, cols = data.shape
    R = k.shape[1]
    extent = extent_of(x, read, cu_seqlens, max_len)
    axes, packed = extent.token_axes, extent.packed
    vector = access_width(data)
    stores = stores_of(update, write)
    if extent.one_token and stores == "every":
        stores = "last"  # which is in the only column of the table
    stored = stored_of(stores, None, extent.one_token)
    kind, op = mamba3_kind(R, angle is not None)
    problem = kind(
        op, rows, cols, dtype_name(data.dtype), rounding, vector, extent.batch * H,
        not extent.one_token, stored,
    )  # fmt: skip
    config = choose(problem, gpu_of(data.device))
    programs = programs_of("x", x, extent.batch * H, rows, rows)
    theta = None if angle is None else theta
    shared_angle = angle is not None and angle.dim() == axes + 1
    out_strides = token_strides(out, axes, packed, out.dim() - axes - 1)
    arguments = (
        as_bytes(data), k, v, theta, x, A, dt, trap, B, C, out, z, angle, Wx, Wz, Wo, D, bias_B, bias_C, scale, seed,
        read, accepted, write, cu_seqlens, stream, fault_flag(data.device),
        *(0 if t is None else t.stride(0) for t in (data, scale, k, v, theta)),
        *(stride for t in (x, A, dt, trap, z) for stride in token_strides(t, axes, packed)),
        *(stride for t in (B, C) for stride in token_strides(t, axes, packed, 2)),
        *((*token_strides(angle, axes, packed, 0), 0) if shared_angle else token_strides(angle, axes, packed)),
        *(out_strides if len(out_strides) == 4 else (*out_strides[:2], 0, out_strides[2])),
        *table_shape(read), row_stride(write), extent.num_tokens, extent.longest, num_slots, null,
    )  # fmt: skip
    constants = {
        "H": H, "HEADS_PER_GROUP": H // B.shape[-2], "ROWS": rows, "COLS": cols, "RANK": R,
        "ANGLES": 0 if theta is None else theta.shape[2], "VECTOR": vector,
        "PAIRING": pairing, "TRAP_LOGIT": trap_logit, "ONE_TOKEN": extent.one_token,
        "STORES": stores, "STORES_KV": update_kv, "PADDING": padding, "ROUNDING": rounding, "ROUNDS": rounds,
        "TARGET": kernel_target(data.device),
        "AHEAD": AHEAD * config.together if config.together > 1 and accepted is None else 0,
        "BLOCK_ROWS": config.block_rows, "BLOCK_COLS": problem.block_cols, "CHUNK": problem.chunk(config.lanes),
        "WARPS": config.num_warps,
    }  # fmt: skip
    return start(mamba3_step_kernel, (programs,), data.device, arguments, constants, config.num_warps, config.registers)


register(
    "mamba3_step(Tensor(a!) data, Tensor(b!)? scale, Tensor? seed, str rounding, int rounds, SymInt stream, "
    "Tensor(c!) k, Tensor(d!) v, Tensor(e!)? theta, Tensor x, Tensor A, Tensor dt, Tensor trap, Tensor B, Tensor C, "
    "Tensor? Wx, Tensor? Wz, Tensor? Wo, Tensor? D, Tensor? z, Tensor? angle, Tensor? bias_B, Tensor? bias_C, "
    f"str pairing, bool trap_logit, bool update_kv, {SLOTS_SCHEMA}, bool update, Tensor(f!) out) -> ()",
    _run,
)
