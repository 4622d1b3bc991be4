"""Which slot a batch row reads and writes; reference/state_io.py has the same functions in torch."""

import triton
import triton.language as tl

READ_FAULT = tl.constexpr(0)  # elements of the fault flag, as state/faults.py names them
WRITE_FAULT = tl.constexpr(1)


@triton.jit
def resolve_read(read_ptr, read_stride, b, num_slots, null, fault_ptr):
    """The slot row `b` reads, int64; -1 for a padding row."""
    if read_ptr is None:
        return b
    else:
        slot = tl.load(read_ptr + b * read_stride).to(tl.int64)
        return _in_pool(slot, num_slots, null, fault_ptr + READ_FAULT)


@triton.jit
def resolve_write(write_ptr, write_stride, b, read, num_slots, null, fault_ptr):
    """The slot row `b` writes, int64; -1 for none. Call it for rows that are not padding."""
    if write_ptr is None:
        return read
    else:
        slot = tl.load(write_ptr + b * write_stride).to(tl.int64)
        return _in_pool(slot, num_slots, null, fault_ptr + WRITE_FAULT)


@triton.jit
def _in_pool(slot, num_slots, null, fault_ptr):
    """`slot` if the pool has it and it is not null, else -1; a slot past the pool is noted in the fault flag."""
    past = (slot >= num_slots) & (slot != null)
    tl.store(fault_ptr, slot, mask=past)
    return tl.where((slot < 0) | (slot >= num_slots) | (slot == null), -1, slot)
