"""The roof of a step, measured: move the same bytes of state and do nothing else. Needs triton and a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashstate.bench.timing import Timing, time_launches

TOUCH_CONFIGS = ((1024, 4), (2048, 4), (4096, 4), (4096, 8), (8192, 8))  # 32-bit words and warps per program


@triton.jit  # type: ignore[untyped-decorator]
def touch_kernel(  # type: ignore[no-untyped-def]
    state_ptr, slots_ptr, copies_ptr, rows_ptr, SIZE: tl.constexpr, COPIES: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK of the SIZE words of one slot: flip their sign bits in place, or copy them to COPIES places of a row."""
    tiles: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    b = pid // tiles
    offs = pid % tiles * BLOCK + tl.arange(0, BLOCK)
    ptrs = state_ptr + tl.load(slots_ptr + b).to(tl.int64) * SIZE + offs
    words = tl.load(ptrs, mask=offs < SIZE, eviction_policy="evict_first")
    if COPIES == 0:
        tl.store(ptrs, words ^ -2147483648, mask=offs < SIZE, eviction_policy="evict_first")
    else:
        ptrs = copies_ptr + tl.load(rows_ptr + b).to(tl.int64) * (COPIES * SIZE) + offs
        for copy in tl.static_range(COPIES):
            tl.store(ptrs + copy * SIZE, words, mask=offs < SIZE, eviction_policy="evict_first")


def touch(data: Tensor, slots: Tensor, copies: Tensor | None, rows: Tensor | None, block: int, num_warps: int) -> None:
    """Touch these slots of a dense pool once: in place, or with `copies` (rows, T, ...) as snapshots of every token."""
    words = data.flatten(1).view(torch.int32)
    size = words.shape[1]
    touch_kernel[(slots.numel() * -(-size // block),)](
        words, slots, None if copies is None else copies.flatten(1).view(torch.int32), rows, size,
        0 if copies is None else copies.shape[1], block, num_warps=num_warps, enable_fp_fusion=False,
    )  # fmt: skip


def time_touch(
    data: Tensor, slots: Sequence[Tensor], copies: Tensor | None = None, rows: Sequence[Tensor | None] | None = None
) -> Timing:
    """The best time of a touch of these slots, one launch each, over all configs."""
    launches = list(zip(slots, rows or [None] * len(slots), strict=True))
    timings = [
        time_launches([partial(touch, data, at, copies, to, block, num_warps) for at, to in launches])
        for block, num_warps in TOUCH_CONFIGS
    ]
    return min(timings, key=lambda timing: timing.median)
