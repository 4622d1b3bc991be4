"""conv1d_step: tokens through the short causal convolution before a recurrence."""

from __future__ import annotations

import math
from collections.abc import Hashable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from flashstate.errors import (
    INDEX_DTYPES,
    check_choice,
    check_contiguous,
    check_flag,
    check_int,
    check_no_overlap,
    check_tensor,
    dtype_name,
)
from flashstate.launch import (
    ChannelProblem,
    choose,
    direct,
    gpu_of,
    kernel_target,
    lets_next_start,
    start,
    suspension,
    uses_kernels,
)
from flashstate.launch.arguments import row_alignment, row_stride, table_shape, token_strides
from flashstate.launch.config import next_power_of_2, tokens_together
from flashstate.launch.start import Started
from flashstate.ops.debug import check_contents, debugging
from flashstate.ops.library import register
from flashstate.ops.tokens import (
    SLOTS_SCHEMA,
    Tokens,
    check_slots,
    check_snapshots,
    flat_slots,
    new_out,
    slots_of,
    tokens_of,
)
from flashstate.reference import conv1d as reference
from flashstate.state.faults import fault_flag
from flashstate.state.signature import ACCESS_BYTES
from flashstate.state.slots import Slots, as_slots

ACTIVATIONS = ("silu", None)
SMALLEST_WIDTH, LARGEST_WIDTH = 2, 6


def conv1d_step(
    window: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
    history: int | None = None,
    positions: Tensor | None = None,
    slots: Slots | Tensor | None = None,
    snapshots: Tensor | None = None,
    update: bool = True,
    out: Tensor | None = None,
    early: bool = False,
) -> Tensor:
    """Convolve every row's tokens with the last inputs before them; update the windows in place, return the outputs.

    Per row and channel c, token by token, in float32, where u is the row's stream of inputs and K the width::

        y = bias[c] + sum over i < K of weight[c, i] * u[c, t - K + 1 + i]
        y = y * sigmoid(y)                  only with activation="silu"

    Token axes, written (...): (batch,) for one token per row, (batch, T), or (tokens,) packed with slots.cu_seqlens.

    window: (slots, channels, length), length >= K - 1, in the dtype of x or float32: the last inputs of every slot,
        newest last, copied bit for bit. Any strides; channels are fastest where they are neighbours in memory, as in a
        transposed (slots, length, channels).
    x: (..., channels), any strides, and `out`, which the result is written to if it is given; it may be x itself,
        unless tokens form a tree.
    weight, bias: (channels, K) with K from 2 to 6, (channels,); contiguous.
    activation: "silu" or None.
    slots: Slots, or (batch,) slot numbers; None: row b is slot b. With slots.accepted and read (batch,) a window rolls
        back: the call before left `history` inputs and its tokens in it, from entry 0 on; the row continues after
        the first accepted[b] of those tokens, and leaves its window so again.
    history: that number, K - 1, which is the default, or K - 2, where at least one token is always accepted. A window
        needs room for it and the tokens of a call.
    positions: (batch,) int32 or int64: the window is a ring, and token t of row b goes to entry (positions[b] + t)
        modulo its length. It stays in its slot: slots must not have write.
    snapshots: (batch or more, T or more, channels, K - 1), in the dtype of the window: receives the last inputs after
        every token.
    update: False leaves the windows as they are.
    early: True lets the kernel start, and read windows, before the kernel in front of it on the stream has ended; it
        waits for that one before it reads x. The kernel in front must not write the windows, the slots or the
        parameters. Nothing changes but the time: see `early` of mamba2_step.

    Slots for every token, slots.write (batch, T), are for windows of K - 1 entries. Nothing is differentiable.
    """
    eager, likeness = not torch.compiler.is_compiling(), None
    if eager and out is not None and direct.available and not suspension.depth:
        likeness = _step_again(
            window, x, weight, bias, activation, history, positions, slots, snapshots, update, out, early
        )  # fmt: skip
        if likeness is direct.STARTED:
            return out
    slots = as_slots(slots)
    channels = _check_window(window, weight, bias)
    tokens = tokens_of("x", x, {"channels": channels}, window.device, slots)
    if window.dtype not in (x.dtype, torch.float32):
        allowed = " or ".join(dict.fromkeys((dtype_name(x.dtype), "float32")))
        raise TypeError(f"window must be {allowed}, so that inputs stay what they are, got {dtype_name(window.dtype)}")
    check_choice("activation", activation, ACTIVATIONS)
    check_flag("early", early)
    check_slots(len(window), window.device, tokens, slots, update)
    width = weight.shape[1]
    history = _check_places(window, width, tokens, history, positions, slots, update)
    if snapshots is not None:
        _check_snapshots(snapshots, window, width, tokens, slots)
    if out is None:
        out = new_out(x, slots)
    else:
        check_tensor("out", out, (*tokens.axes, "channels"), tuple(x.shape), dtypes=(x.dtype,), device=x.device)
        check_no_overlap("out", out)
    if debugging():
        rows, places = None if snapshots is None else len(snapshots), (width, window.shape[2], history, positions)
        read = partial(reference.slots_read, places, len(window))
        check_contents(len(window), tokens, slots, rows, update, read)
    run = _run if eager else torch.ops.flashstate.conv1d_step
    started = run(
        window, x, weight, bias, activation, history, positions, *flat_slots(slots), snapshots, update, out, early
    )  # fmt: skip
    if started is not None and likeness is not None:
        direct.remember(*likeness, started, POINTERS)
    return out


POINTERS = 13  # of the kernel that change from call to call; the null slot follows them
launches: Final[direct.Launches] = {}  # on whichever windows


def _step_again(
    window: Any, x: Any, weight: Any, bias: Any, activation: Any, history: Any, positions: Any, slots: Any,
    snapshots: Any, update: Any, out: Any, early: Any,
) -> direct.Likeness | None:  # fmt: skip
    """As _step_again of mamba2: STARTED if the kernel could be started as by a call like this before, else by what to
    remember this one; None if there is no way."""
    try:
        window_at, x_at, out_at, weight_at = window.data_ptr(), x.data_ptr(), out.data_ptr(), weight.data_ptr()
        pointers, tensors, bias_at, snapshots_at = [window_at, x_at, out_at, weight_at], [window, x, weight], 0, 0
        if out is not x:
            tensors.append(out)
        if bias is not None:
            tensors.append(bias)
            bias_at = bias.data_ptr()
            pointers.append(bias_at)
        if positions is not None:
            tensors.append(positions)
            pointers.append(positions.data_ptr())
        slots_like, null = direct.add_slots(slots, x, tensors, pointers)
        if snapshots is not None:
            tensors.append(snapshots)
            snapshots_at = snapshots.data_ptr()
            pointers.append(snapshots_at)
        if x_at == out_at and slots.__class__ is Slots and slots.parents is not None:  # which is refused
            return None
        if update.__class__ is not bool or early.__class__ is not bool or history.__class__ is bool:
            return None
        present = (bias is not None, positions is not None, snapshots is not None, out is x)
        key: Hashable = (
            slots_like, present, activation, history, update, early,
            window_at % ACCESS_BYTES, x_at % ACCESS_BYTES, out_at % ACCESS_BYTES, weight_at % ACCESS_BYTES,
            bias_at % ACCESS_BYTES, snapshots_at % ACCESS_BYTES,
        )  # fmt: skip
        launch = direct.find(launches, key, tensors)
    except (AttributeError, TypeError, RuntimeError):  # the last from tensors without memory, such as sparse ones
        return None
    return direct.start_again(launch, (launches, key, tensors), pointers, null)


def _check_window(window: Tensor, weight: Tensor, bias: Tensor | None) -> int:
    """Check the windows, and the parameters against them; how many channels there are."""
    check_tensor("window", window, ("slots", "channels", "length"), (None, None, None))
    if window.numel() == 0:
        raise ValueError(f"window must not be empty, got shape {tuple(window.shape)}")
    check_no_overlap("window", window)
    channels, length = window.shape[1:]
    check_tensor("weight", weight, ("channels", "width"), (channels, None), device=window.device)
    check_contiguous("weight", weight)
    if not SMALLEST_WIDTH <= weight.shape[1] <= LARGEST_WIDTH:
        raise ValueError(f"weight must have a width from {SMALLEST_WIDTH} to {LARGEST_WIDTH}, got {weight.shape[1]}")
    if length < weight.shape[1] - 1:
        raise ValueError(f"window must have {weight.shape[1] - 1} entries or more for this weight, got {length}")
    if bias is not None:
        check_tensor("bias", bias, ("channels",), (channels,), device=window.device)
        check_contiguous("bias", bias)
    return int(channels)


def _check_places(
    window: Tensor,
    width: int,
    tokens: Tokens,
    history: int | None,
    positions: Tensor | None,
    slots: Slots | None,
    update: bool,
) -> int:
    """Check where in a window inputs are read and written; how many stay before the tokens where it rolls back."""
    length, rolls_back = window.shape[2], slots is not None and slots.rolls_back
    if positions is not None:
        check_tensor(
            "positions", positions, ("batch",), (tokens.batch,), dtypes=INDEX_DTYPES, device=window.device
        )  # fmt: skip
        check_contiguous("positions", positions)
        if rolls_back:
            raise ValueError("positions make a ring, which rolls back by lower positions: slots must not have accepted")
    if slots is not None and positions is not None and slots.write is not None:
        raise ValueError("positions make a ring, which is kept where it is: slots must not have write")
    if slots is not None and slots.per_token and (length != width - 1 or rolls_back):
        raise ValueError(
            f"slots.write (batch, T) needs windows of {width - 1} entries, not rolled back, got {length} entries"
        )
    if not rolls_back:
        if history is not None:
            raise ValueError("history is for windows that roll back: slots must have accepted, and read (batch,)")
        return width - 1
    if history is None:
        history = width - 1
    check_int("history", history, width - 2, width - 1)
    if tokens.longest is None:
        raise ValueError("windows that roll back need slots.max_len for packed tokens, the most that a row has")
    if update and length < history + tokens.longest:
        raise ValueError(
            f"window must have {history + tokens.longest} entries or more to roll back {tokens.longest} tokens, "
            f"got {length}"
        )
    return history


def _check_snapshots(snapshots: Tensor, window: Tensor, width: int, tokens: Tokens, slots: Slots | None) -> None:
    axes = ("batch", "T", "channels", "width - 1")
    check_tensor("snapshots", snapshots, axes, (None,) * 4, dtypes=(window.dtype,))
    check_snapshots(snapshots, (window.shape[1], width - 1), window.device, tokens, slots)
    check_no_overlap("snapshots", snapshots)


def _run(
    window: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, history: int,
    positions: Tensor | None,
    read: Tensor | None, write: Tensor | None, accepted: Tensor | None, snapshot_rows: Tensor | None,
    cu_seqlens: Tensor | None, max_len: int | None, parents: Tensor | None, null: int, padding: str,
    snapshots: Tensor | None, update: bool, out: Tensor, early: bool,
) -> Started | None:  # fmt: skip
    """Fill `out` and the snapshots, and update windows. Arguments are checked; flat, as torch.library wants them."""
    batch = x.shape[0] if read is None else read.shape[0]
    if x.numel() == 0 or batch == 0:
        out.zero_()
        return None
    if parents is not None and out.data_ptr() == x.data_ptr():
        raise ValueError("out must not be x with slots.parents: a token's x is read again for those that follow it")
    if not uses_kernels(window.device):
        every_slot = torch.arange(batch, device=x.device) if read is None else read
        slots = slots_of(
            every_slot, write, accepted, snapshot_rows, cu_seqlens, max_len, parents, null, padding
        )  # fmt: skip
        reference.conv1d_step(
            window, x, weight, bias, activation, history, positions, slots, snapshots, update, out
        )  # fmt: skip
        return None
    from flashstate.kernels.conv1d import conv1d_step_kernel

    num_slots, channels, length = window.shape
    early = early and lets_next_start(window.device)
    width, packed, dense = weight.shape[1], cu_seqlens is not None, x.dim() == 3
    num_tokens = x.shape[-2] if packed or dense else 1
    one_token = num_tokens == 1 and not packed
    rows = _row_alignments(window, x, out, bias, snapshots)
    vector = ACCESS_BYTES // x.element_size() if rows["X_ROWS"] == rows["WINDOW_ROWS"] == ACCESS_BYTES else 1
    problem = ChannelProblem(
        "conv1d_step", channels, width, dtype_name(window.dtype), "nearest", vector, batch, not one_token
    )  # fmt: skip
    config = choose(problem, gpu_of(window.device))
    programs = batch * -(-channels // config.block_rows)
    if programs >= 1 << 31:
        raise ValueError(f"x must need fewer than 2^31 programs, got {programs} for shape {tuple(x.shape)}")
    longest = (max_len or 0) if packed else num_tokens
    together = tokens_together(config, longest, packed, tree=parents is not None)
    rolls_back = accepted is not None and read is not None and read.dim() == 1
    arguments = (
        window, x, out, weight, bias, positions, read, accepted, write, parents, cu_seqlens, snapshot_rows, snapshots,
        null, fault_flag(window.device), *window.stride(), length,
        *((0, 0, 0, 0) if snapshots is None else snapshots.stride()), 0 if snapshots is None else len(snapshots),
        *token_strides(x, x.dim() - 1, packed), *token_strides(out, x.dim() - 1, packed),
        *table_shape(read), row_stride(write), row_stride(parents), num_tokens, longest, num_slots,
    )  # fmt: skip
    constants = rows | {
        "CHANNELS": channels, "WIDTH": width, "BLOCK_WIDTH": next_power_of_2(width),
        "MODE": "ring" if positions is not None else "rollback" if rolls_back else "shift", "HISTORY": history,
        "LONGER": length > width - 1, "ACTIVATION": activation, "ONE_TOKEN": one_token,
        "TARGET": kernel_target(window.device),
        "TOGETHER": together, "WHOLE": together == 1 or (not packed and num_tokens % together == 0),
        "STORES": "none" if not update else "every" if write is not None and write.dim() == 2 else "last",
        "PADDING": padding,
        "WEIGHT_ALIGNMENT": math.gcd(ACCESS_BYTES, weight.data_ptr(), width * weight.element_size()),
        "EARLY": early, "LETS_NEXT_START": lets_next_start(window.device), "BLOCK": config.block_rows,
    }  # fmt: skip
    return start(
        conv1d_step_kernel, (programs,), window.device, arguments, constants, config.num_warps, config.registers, early
    )


def _row_alignments(
    window: Tensor, x: Tensor, out: Tensor, bias: Tensor | None, snapshots: Tensor | None
) -> dict[str, int]:
    """What the kernel is told of rows of channels, by the names it has for it."""
    return {
        "WINDOW_ROWS": row_alignment(window.transpose(1, 2)),
        "X_ROWS": row_alignment(x),
        "OUT_ROWS": row_alignment(out),
        "BIAS_ROWS": 0 if bias is None else row_alignment(bias),
        "COPY_ROWS": 0 if snapshots is None else row_alignment(snapshots.transpose(2, 3)),
    }


register(
    "conv1d_step(Tensor(a!) window, Tensor x, Tensor weight, Tensor? bias, str? activation, int history, "
    f"Tensor? positions, {SLOTS_SCHEMA}, Tensor(b!)? snapshots, bool update, Tensor(c!) out, bool early) -> ()",
    _run,
)
