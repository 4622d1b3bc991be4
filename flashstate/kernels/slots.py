"""Which slot a batch row reads and writes; reference/state_io.py has the same functions in torch."""

import triton
import triton.language as tl

READ_FAULT = tl.constexpr(0)  # elements of the fault flag, as state/faults.py names them
WRITE_FAULT = tl.constexpr(1)


@triton.jit
def resolve_read(read_ptr, read_stride, b, num_slots, null, fault_ptr):
    """The slot row `b` reads, int64; -1 for a padding row."""
    if read_ptr is None:
        return b.to(tl.int64)
    else:
        slot = _load_slot(read_ptr, read_stride, b)
        return _in_pool(slot, num_slots, null, fault_ptr + READ_FAULT)


@triton.jit
def resolve_write(write_ptr, write_stride, b, read, num_slots, null, fault_ptr):
    """The slot row `b` writes, int64; -1 for none, and for a padding row wherever it points."""
    if write_ptr is None:
        return read
    else:
        slot = tl.where(read < 0, -1, _load_slot(write_ptr, write_stride, b))
        return _in_pool(slot, num_slots, null, fault_ptr + WRITE_FAULT)


@triton.jit
def _load_slot(ptr, stride, b):
    tl.assume(stride >= 0)
    return tl.load(ptr + b.to(tl.int64) * stride)


@triton.jit
def _in_pool(slot, num_slots, null, fault_ptr):
    """`slot` if the pool has it and it is not null, else -1; a slot past the pool is noted in the fault flag."""
    past = slot >= num_slots
    tl.store(fault_ptr, slot.to(tl.int64), mask=past & (slot != null))
    return tl.where((slot == null) | past | (slot < 0), -1, slot).to(tl.int64)
