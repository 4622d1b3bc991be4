"""Moving seeds on, so that the next step draws new random bits."""

import triton
import triton.language as tl

from flashstate.kernels.slots import resolve_read


@triton.jit(do_not_specialize=["read", "num_slots", "null", "seed_step"])
def advance_seeds_kernel(seed_ptr, read, fault_ptr, num_slots, null, seed_step):
    """One program per batch row. Atomic, so that rows which share a slot advance it once each, in any order."""
    slot = resolve_read(read, tl.program_id(0), num_slots, null, fault_ptr)
    if slot >= 0:
        tl.atomic_add(seed_ptr + slot, seed_step)
