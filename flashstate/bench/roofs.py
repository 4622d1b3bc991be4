"""The roof of an in-place step, measured: read and write the same slots and do nothing else. Needs triton and a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import triton
import triton.language as tl
from torch import Tensor

from flashstate.bench.timing import Timing, time_launches
from flashstate.kernels.state_io import load_state, store_state

TOUCH_CONFIGS = ((1024, 4), (2048, 4), (4096, 4), (4096, 8), (8192, 8))  # elements and warps per program


@triton.jit  # type: ignore[untyped-decorator]
def touch_kernel(state_ptr, slots_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Negate BLOCK of the SIZE elements of one slot: magnitudes stay, however often it runs."""
    tiles: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    slot = tl.load(slots_ptr + pid // tiles).to(tl.int64)
    offs = pid % tiles * BLOCK + tl.arange(0, BLOCK)
    ptrs = state_ptr + slot * SIZE + offs
    store_state(ptrs, -load_state(ptrs, offs < SIZE), offs < SIZE, 0, "nearest")


def touch(data: Tensor, block: int, num_warps: int, slots: Tensor) -> None:
    """Touch these slots of a dense pool once."""
    size = data[0].numel()
    touch_kernel[(slots.numel() * -(-size // block),)](
        data, slots, size, block, num_warps=num_warps, enable_fp_fusion=False
    )


def time_touch(data: Tensor, slots: Sequence[Tensor]) -> Timing:
    """The best time of a touch of these slots, one launch each, over all configs."""
    timings = [
        time_launches([partial(touch, data, block, num_warps, of_launch) for of_launch in slots])
        for block, num_warps in TOUCH_CONFIGS
    ]
    return min(timings, key=lambda timing: timing.median)
