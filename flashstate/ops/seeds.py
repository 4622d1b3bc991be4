"""advance_seeds: the launch behind State.advance."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from flashstate.launch import uses_kernels
from flashstate.launch.arguments import slots_values
from flashstate.launch.registered import registered
from flashstate.launch.start import Launch, kernel_in, start
from flashstate.reference import state_io as reference
from flashstate.state.actions import provide
from flashstate.state.faults import fault_flag
from flashstate.state.rounding import SEED_STEP
from flashstate.state.slots import MOST_TOKENS, Slots


@provide
def advance_seeds(seed: Tensor, slots: Slots | None) -> None:
    """Add SEED_STEP to the seeds of the slots that rows with tokens have to read, chosen or not."""
    if slots is not None:
        slots.check_device(seed.device)
    add_seed_step(seed, replace(slots, accepted=None) if slots is not None and slots.rolls_back else slots)


@registered("seed", name="advance_seeds")
def add_seed_step(seed: Tensor, slots: Slots | None) -> None:
    if not uses_kernels(seed.device):
        reference.advance_seeds(seed, slots)
        return
    rows = seed.shape[0] if slots is None else slots.read.shape[0]
    if rows == 0 or (slots is not None and slots.read.numel() == 0):
        return
    columns = 1 if slots is None or slots.accepted is None else slots.read.shape[1]
    values = {
        **slots_values(slots), "seed_ptr": seed, "fault_ptr": fault_flag(seed.device), "tokens": MOST_TOKENS,
        "num_slots": seed.shape[0], "seed_step": SEED_STEP,
    }  # fmt: skip
    start(Launch(kernel_in("seeds", "advance_seeds"), (rows, columns), seed.device, values, num_warps=1))
