"""advance_seeds: the launch behind State.advance."""

from __future__ import annotations

import torch
from torch import Tensor

from flashstate.launch import start, uses_kernels
from flashstate.launch.arguments import slots_values
from flashstate.launch.registered import define
from flashstate.reference import state_io as reference
from flashstate.state.actions import provide
from flashstate.state.faults import fault_flag
from flashstate.state.rounding import SEED_STEP
from flashstate.state.slots import MOST_TOKENS, Slots


@provide
def advance_seeds(seed: Tensor, slots: Slots | None) -> None:
    """Add SEED_STEP to the seeds of the slots that rows with tokens have to read, chosen or not."""
    if slots is not None and slots.read.device != seed.device:
        raise ValueError(f"slots are on {slots.read.device}, but the state is on {seed.device}")
    read, accepted, cu_seqlens, null = None, None, None, -1
    if slots is not None:
        accepted = None if slots.rolls_back else slots.accepted
        read, cu_seqlens, null = slots.read, slots.cu_seqlens, slots.null
    run = torch.ops.flashstate.advance_seeds if torch.compiler.is_compiling() else _run
    run(seed, read, accepted, cu_seqlens, null)


def _run(seed: Tensor, read: Tensor | None, accepted: Tensor | None, cu_seqlens: Tensor | None, null: int) -> None:
    slots = None if read is None else Slots(read, accepted=accepted, cu_seqlens=cu_seqlens, null=null)
    if not uses_kernels(seed.device):
        reference.advance_seeds(seed, slots)
        return
    from flashstate.kernels.seeds import advance_seeds_kernel

    rows = seed.shape[0] if read is None else read.shape[0]
    if rows == 0 or (read is not None and read.numel() == 0):
        return
    columns = 1 if accepted is None or read is None else read.shape[1]
    values = {
        **slots_values(slots), "seed_ptr": seed, "fault_ptr": fault_flag(seed.device), "tokens": MOST_TOKENS,
        "num_slots": seed.shape[0], "seed_step": SEED_STEP,
    }  # fmt: skip
    arguments = tuple(values[name] for name in advance_seeds_kernel.runtime)
    start(advance_seeds_kernel, (rows, columns), seed.device, arguments, {}, num_warps=1)


define("advance_seeds(Tensor(a!) seed, Tensor? read, Tensor? accepted, Tensor? cu_seqlens, SymInt null) -> ()", _run)
