"""advance_seeds: the launch behind State.advance."""

from __future__ import annotations

import torch
from torch import Tensor

from flashstate.launch import uses_kernels
from flashstate.ops.library import register
from flashstate.reference import state_io as reference
from flashstate.state.faults import fault_flag
from flashstate.state.rounding import SEED_STEP
from flashstate.state.slots import Slots


def advance_seeds(seed: Tensor, slots: Slots | None) -> None:
    """Add SEED_STEP to the seeds of the slots that are read."""
    if slots is not None and slots.read.device != seed.device:
        raise ValueError(f"slots are on {slots.read.device}, but the state is on {seed.device}")
    read, null = (None, -1) if slots is None else (slots.read, slots.null)
    if torch.compiler.is_compiling():
        torch.ops.flashstate.advance_seeds(seed, read, null)
    else:
        _run(seed, read, null)


def _run(seed: Tensor, read: Tensor | None, null: int) -> None:
    if not uses_kernels(seed.device):
        reference.advance_seeds(seed, None if read is None else Slots(read, null=null))
        return
    from flashstate.kernels.seeds import advance_seeds_kernel

    rows, read_stride = (seed.shape[0], 0) if read is None else (read.shape[0], read.stride(0))
    if rows == 0:
        return
    with torch.cuda.device_of(seed):
        advance_seeds_kernel[(rows,)](
            seed,
            read,
            fault_flag(seed.device),
            read_stride,
            seed.shape[0],
            null,
            SEED_STEP,
            num_warps=1,
            enable_fp_fusion=False,
        )


register("advance_seeds(Tensor(a!) seed, Tensor? read, SymInt null) -> ()", _run)
