"""conv1d_step: tokens through the short causal convolution before a recurrence."""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from flashstate.errors import INDEX_DTYPES, check_choice, check_dtype, check_int, check_no_overlap, dtype_name
from flashstate.launch.arguments import loaded_together, row_alignment
from flashstate.launch.call import Given, Op, check_snapshots
from flashstate.launch.config import MOST_UNROLLED, POWERS, Problem, next_power_of_2
from flashstate.launch.environment import Gpu
from flashstate.launch.table import Config
from flashstate.ops.debug import check_debugged
from flashstate.reference import conv1d as reference
from flashstate.state.signature import ACCESS_BYTES
from flashstate.state.slots import Slots

ACTIVATIONS = ("silu", None)
SMALLEST_WIDTH, LARGEST_WIDTH = 2, 8


def conv1d_step(
    window: Annotated[Tensor, "slots channels length |"],
    x: Annotated[Tensor, "tokens channels |"],
    weight: Annotated[Tensor, "| channels width"],
    bias: Annotated[Tensor, "| channels"] | None = None,
    *,
    activation: str | None = "silu",
    history: int | None = None,
    positions: Annotated[Tensor, "| batch", INDEX_DTYPES] | None = None,
    slots: Slots | Tensor | None = None,
    snapshots: Annotated[Tensor, "rows steps channels entries |"] | None = None,
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
        unless tokens form a tree. The output has the dtype of x unless `out` has another.
    weight, bias: (channels, K) with K from 2 to 8, (channels,); contiguous.
    activation: "silu" or None.
    slots: Slots, or (batch,) slot numbers; None: row b is slot b. With slots.accepted and read (batch,) a window rolls
        back: the call before left `history` inputs and its tokens in it, from entry 0 on; the row continues after
        the first accepted[b] of those tokens, and leaves its window so again.
    history: that number, K - 1, which is the default, or K - 2, where at least one token is always accepted. A window
        needs room for it and the tokens of a call.
    positions: (batch,) int32 or int64: the window is a ring, and token t of row b goes to entry (positions[b] + t)
        modulo its length. It stays in its slot: slots must not have write.
    snapshots: (batch or more, T or more, channels, K - 1), in the dtype of the window: receives the last inputs after
        every token. Where tokens form no tree, those of a row may overlap in memory, one input further with each token.
    update: False leaves the windows as they are.
    early: True lets the kernel start, and read windows, before the kernel in front of it on the stream has ended; it
        waits for that one, which must not write the windows, the slots or the parameters, before it reads x. See
        `mamba2_step`.

    Slots for every token, slots.write (batch, T), are for windows of K - 1 entries. Nothing is differentiable.
    """
    return CONV1D_STEP.call(
        window, x, weight, bias, activation, history, positions, slots, snapshots, update, out, early
    )  # fmt: skip


def check(given: Given) -> None:
    """Raise where widths, windows, places in them or snapshots do not go together."""
    window, x, width = given.window, given.x, given.sizes["width"]
    if len(window) >= 1 << 31:  # kernels keep the number of a slot in 32 bits
        raise ValueError(f"window must have fewer than 2^31 slots, got {len(window)}")
    if not SMALLEST_WIDTH <= width <= LARGEST_WIDTH:
        raise ValueError(f"weight must have a width from {SMALLEST_WIDTH} to {LARGEST_WIDTH}, got {width}")
    if window.shape[2] < width - 1:
        raise ValueError(f"window must have {width - 1} entries or more for this weight, got {window.shape[2]}")
    if window.dtype not in (x.dtype, torch.float32):
        allowed = " or ".join(dict.fromkeys((dtype_name(x.dtype), "float32")))
        raise TypeError(f"window must be {allowed}, so that inputs stay what they are, got {dtype_name(window.dtype)}")
    check_choice("activation", given.activation, ACTIVATIONS)
    given.history = check_places(given, width)
    if given.snapshots is not None:
        check_dtype("snapshots", given.snapshots.dtype, (window.dtype,))
        check_snapshots(given, given.snapshots, (window.shape[1], width - 1))
        check_no_overlap("snapshots", shared_once(given))


def shared_once(given: Given) -> Tensor:
    """The snapshots, or where those of tokens that follow each other share their inputs, one stream of these."""
    snapshots, slots = given.snapshots, given.slots
    if snapshots.stride(1) != snapshots.stride(3) or (slots is not None and slots.parents is not None):
        return snapshots  # in a tree, what two tokens have before them may differ
    rows, steps, channels, entries = snapshots.shape
    per_row, per_step, per_channel, _ = snapshots.stride()
    return snapshots.as_strided((rows, channels, steps + entries - 1), (per_row, per_channel, per_step))


def check_places(given: Given, width: int) -> int:
    """Check where in a window inputs are read and written; how many stay before the tokens where it rolls back."""
    slots, history, longest, length = given.slots, given.history, given.tokens.longest, given.window.shape[2]
    rolls_back = slots is not None and slots.rolls_back
    if given.positions is not None and rolls_back:
        raise ValueError("positions make a ring, which rolls back by lower positions: slots must not have accepted")
    if slots is not None and given.positions is not None and slots.write is not None:
        raise ValueError("positions make a ring, which is kept where it is: slots must not have write")
    if slots is not None and slots.per_token and (length != width - 1 or rolls_back):
        wanted = f"windows of {width - 1} entries, not rolled back"
        raise ValueError(f"slots.write (batch, T) needs {wanted}, got {length} entries")
    if not rolls_back:
        if history is not None:
            raise ValueError("history is for windows that roll back: slots must have accepted, and read (batch,)")
        return width - 1
    history = width - 1 if history is None else history
    check_int("history", history, width - 2, width - 1)
    if longest is None:
        raise ValueError("windows that roll back need slots.max_len for packed tokens, the most that a row has")
    if given.update and length < history + longest:
        wanted = f"{history + longest} entries or more to roll back {longest} tokens"
        raise ValueError(f"window must have {wanted}, got {length}")
    return int(history)


def check_debugged_window(given: Given) -> None:
    """Inside debug(), raise where the numbers in slots would lose or mix up a window."""
    places = given.sizes["width"], given.window.shape[2], given.history, given.positions
    check_debugged(given, partial(reference.slots_read, places, len(given.window)))


class ChannelProblem(Problem):
    """What a config of a convolution is chosen for: `rows` are channels and `cols` the taps of each, all of which one
    thread has, so every config gives the same bytes. `batch_heads` is the batch, `vector` the channels of an access."""

    knob_values: ClassVar[tuple[int, ...]] = POWERS[:4]
    row_choices: ClassVar[tuple[int, ...]] = (32, 64, 128, 256, 512, 1024, 2048, 4096)

    @property
    def lane_choices(self) -> list[int]:
        return [1]

    def per_thread(self, config: Config) -> int:
        """Channels that a thread has."""
        return config.block_rows // (config.num_warps * self.warp)

    def manageable(self, config: Config) -> bool:
        return self.per_thread(config) * max(config.tokens_together, self.cols) <= MOST_UNROLLED

    def heuristic(self, gpu: Gpu) -> Config:
        """Four channels per thread: more warps where all they do is move bytes, else two tokens together."""
        warps = 1 if self.several_tokens else 4
        return Config(4 * self.warp * warps, warps, 1, tokens_together=2 if self.several_tokens else 1)


def problems(given: Given) -> tuple[Problem]:
    """One kernel convolves all tokens."""
    window, x, tokens = given.window, given.x, given.tokens
    wide = row_alignment(x) == row_alignment(window.transpose(1, 2)) == ACCESS_BYTES
    vector = ACCESS_BYTES // x.element_size() if wide else 1
    shape = window.shape[1], given.weight.shape[1], dtype_name(window.dtype), "nearest", vector
    return (ChannelProblem("conv1d_step", *shape, tokens.batch, not tokens.one_token),)


def values(given: Given, problem: Problem, config: Config) -> dict[str, Any]:
    """What the kernel takes of windows and of snapshots, and how it convolves."""
    window, weight, tokens, slots, snapshots = given.window, given.weight, given.tokens, given.slots, given.snapshots
    num_slots, channels, length = window.shape
    width, together = weight.shape[1], loaded_together(given, problem, config)
    rolls_back = slots is not None and slots.rolls_back
    strides = (0,) * 4 if snapshots is None else snapshots.stride()
    return {
        **dict(zip(("slot_stride", "window_c", "window_e"), window.stride(), strict=True)),
        **dict(zip(("copy_b", "copy_t", "copy_c", "copy_e"), strides, strict=True)),
        "num_copies": 0 if snapshots is None else len(snapshots), "length": length, "num_slots": num_slots,
        "WINDOW_ROWS": row_alignment(window.transpose(1, 2)),
        "X_ROWS": row_alignment(given.x), "OUT_ROWS": row_alignment(given.out),
        "BIAS_ROWS": 0 if given.bias is None else row_alignment(given.bias),
        "COPY_ROWS": 0 if snapshots is None else row_alignment(snapshots.transpose(2, 3)),
        "CHANNELS": channels, "WIDTH": width, "BLOCK_WIDTH": next_power_of_2(width), "LONGER": length > width - 1,
        "MODE": "ring" if given.positions is not None else "rollback" if rolls_back else "shift",
        "WHOLE": together == 1 or (not tokens.packed and tokens.num_tokens % together == 0),
        "WEIGHT_ALIGNMENT": math.gcd(ACCESS_BYTES, weight.data_ptr(), width * weight.element_size()),
        "LETS_NEXT_START": given.machine.overlaps, "BLOCK": config.block_rows,
    }  # fmt: skip


def slots_of(given: Given) -> Slots:
    """The slots of a call, which the reference always has."""
    return given.slots or Slots(torch.arange(given.tokens.batch, device=given.x.device))


CONV1D_STEP = Op(
    conv1d_step,
    main="x",
    state_axes="slots channels length",
    problems=problems,
    values=values,
    reference={"slots": slots_of},
    check=check,
    debug=check_debugged_window,
    writes=("window", "snapshots"),
    aligned_each=("window", "x", "out", "weight", "bias", "snapshots"),
    aliases={"snapshots": "copy"},
    rolls_back=True,
)
