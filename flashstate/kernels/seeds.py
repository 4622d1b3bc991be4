"""Moving seeds on, so that the next step draws new random bits."""

import triton.language as tl

from flashstate.kernels.slots import resolve_read, table_entry, token_range
from flashstate.launch.kernel import kernel


@kernel
def advance_seeds_kernel(
    seed_ptr, read_ptr, read_stride, read_width, accepted_ptr, cu_seqlens_ptr, fault_ptr,
    tokens, num_slots, null, seed_step,
    AT_LEAST_ONE: tl.constexpr,  # whether accepted counts below 1 are taken as 1
):  # fmt: skip
    """One program per batch row and column of its slots: all slots of a request move on together, whichever was read.
    Atomic, so that rows which share a slot advance it once each, in any order."""
    b = tl.program_id(0)
    read = (read_ptr, read_stride, read_width, accepted_ptr)
    slot = resolve_read(read, b, (num_slots, null, fault_ptr), AT_LEAST_ONE=AT_LEAST_ONE)
    _, count = token_range(cu_seqlens_ptr, b, tokens, False)
    if (slot >= 0) & (count > 0):
        if accepted_ptr is not None:
            slot = tl.load(table_entry(read_ptr, b, read_stride, tl.program_id(1))).to(tl.int64)
        if (slot >= 0) & (slot < num_slots) & (slot != null):
            tl.atomic_add(seed_ptr + slot, seed_step)
