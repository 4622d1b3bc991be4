"""The roofs of a step, measured: move the same bytes of state and do nothing else. Needs triton and a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashstate.bench.timing import Timing, time_launches
from flashstate.state.slots import Slots

TOUCH_CONFIGS = ((1024, 4), (2048, 4), (4096, 4), (4096, 8), (8192, 8))  # 32-bit words and warps per program
READ_CONFIGS = ((2048, 4), (4096, 4), (8192, 8))
SMALL_CONFIGS = ((256, 2), (512, 4))  # tried too where a slot has few words:
SMALL = 1 << 15


@triton.jit  # type: ignore[untyped-decorator]
def words_of_program(  # type: ignore[no-untyped-def]
    state_ptr, slots_ptr, STRIDE: tl.constexpr, SIZE: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr
):
    """The batch row of this program, offsets of its BLOCK of words, and pointers to these in its slot of the pool."""
    tiles: tl.constexpr = (max(SIZE, TOKENS) + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    b = pid // tiles
    offs = pid % tiles * BLOCK + tl.arange(0, BLOCK)
    return b, offs, state_ptr + tl.load(slots_ptr + b).to(tl.int64) * STRIDE + offs


@triton.jit  # type: ignore[untyped-decorator]
def touch_kernel(  # type: ignore[no-untyped-def]
    state_ptr, slots_ptr, copies_ptr, rows_ptr, x_ptr, out_ptr,
    STRIDE: tl.constexpr, SIZE: tl.constexpr, TOKENS: tl.constexpr, COPIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Flip the sign bits of words in place, or copy the words to COPIES places of a row; copy the words of tokens."""
    b, offs, ptrs = words_of_program(state_ptr, slots_ptr, STRIDE, SIZE, TOKENS, BLOCK)
    if TOKENS > 0:
        at = b.to(tl.int64) * TOKENS + offs
        tl.store(out_ptr + at, tl.load(x_ptr + at, mask=offs < TOKENS), mask=offs < TOKENS)
    words = tl.load(ptrs, mask=offs < SIZE, eviction_policy="evict_first")
    if COPIES == 0:
        tl.store(ptrs, words ^ -2147483648, mask=offs < SIZE, eviction_policy="evict_first")
    else:
        ptrs = copies_ptr + tl.load(rows_ptr + b).to(tl.int64) * (COPIES * SIZE) + offs
        for copy in tl.static_range(COPIES):
            tl.store(ptrs + copy * SIZE, words, mask=offs < SIZE, eviction_policy="evict_first")


@triton.jit  # type: ignore[untyped-decorator]
def read_kernel(  # type: ignore[no-untyped-def]
    state_ptr, slots_ptr, largest_ptr, STRIDE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Find the largest word: one per program is stored, because the compiler drops loads that nobody uses."""
    _, offs, ptrs = words_of_program(state_ptr, slots_ptr, STRIDE, SIZE, 0, BLOCK)
    words = tl.load(ptrs, mask=offs < SIZE, other=-2147483648, eviction_policy="evict_first")
    tl.store(largest_ptr + tl.program_id(0), tl.max(words, 0))


def touch(
    data: Tensor, slots: Slots, copies: Tensor | None, block: int, num_warps: int, x: Tensor | None = None
) -> None:
    """Touch slots of a pool once: in place, or into `copies` (rows, T, ...). Tokens x (batch, ...) are copied too."""
    words, tokens = _words(data), None if x is None else _words(x)
    size, token_size = words.shape[1], 0 if tokens is None else tokens.shape[1]
    touch_kernel[(_programs(slots, max(size, token_size), block),)](
        words, slots.read, None if copies is None else _words(copies), slots.snapshot_rows,
        tokens, None if tokens is None else torch.empty_like(tokens),
        words.stride(0), size, token_size, 0 if copies is None else copies.shape[1], block,
        num_warps=num_warps, enable_fp_fusion=False,
    )  # fmt: skip


def read(data: Tensor, slots: Slots, largest: Tensor, block: int, num_warps: int) -> None:
    """Read these slots of a pool once, and leave the largest word of every block in `largest`."""
    words = _words(data)
    size = words.shape[1]
    read_kernel[(_programs(slots, size, block),)](
        words, slots.read, largest, words.stride(0), size, block, num_warps=num_warps, enable_fp_fusion=False
    )


def time_touch(
    data: Tensor, slots: Sequence[Slots], copies: Tensor | None = None, x: Tensor | None = None, flush: bool = False
) -> Timing:
    """The best time of a touch of these slots."""
    return _fastest(partial(touch, copies=copies, x=x), data, slots, flush, TOUCH_CONFIGS)


def time_read(data: Tensor, slots: Sequence[Slots], flush: bool = False) -> Timing:
    """The best time of reading these slots."""
    most = _programs(slots[0], _words(data).shape[1], SMALL_CONFIGS[0][0])
    largest = torch.empty(most, dtype=torch.int32, device=data.device)
    return _fastest(partial(read, largest=largest), data, slots, flush, READ_CONFIGS)


def _fastest(
    move: Callable[..., None], data: Tensor, slots: Sequence[Slots], flush: bool, configs: Sequence[tuple[int, int]]
) -> Timing:
    """The best time of moving these slots of a pool, one launch each, over all configs."""
    small = SMALL_CONFIGS if _words(data).shape[1] < SMALL else ()
    timings = [
        time_launches([partial(move, data, slots=at, block=block, num_warps=warps) for at in slots], flush=flush)
        for block, warps in (*small, *configs)
    ]
    return min(timings, key=lambda timing: timing.median)


def _words(data: Tensor) -> Tensor:
    """The entries of the first axis, which are dense in some order of their axes, as rows of 32-bit words."""
    return data.as_strided((len(data), data[0].numel()), (data.stride(0), 1)).view(torch.int32)


def _programs(slots: Slots, size: int, block: int) -> int:
    return slots.read.numel() * -(-size // block)
