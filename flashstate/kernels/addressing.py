"""What a program works on, and where a tensor's entries are, in 64 bits."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashstate.kernels.slots import bound


class Place(NamedTuple):
    """Rows of a head, of one batch row."""

    b: Any
    h: Any
    g: Any  # group of the head
    rows: Any  # offsets within the head
    mask: Any  # which of them exist


@triton.jit
def this_program(H: tl.constexpr, ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """The batch row, the head and the first row of the head that this program has."""
    tiles: tl.constexpr = (ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS
    pid = tl.program_id(0)
    return pid // (H * tiles), pid // tiles % H, pid % tiles * BLOCK_ROWS


@triton.jit
def batch_size(H: tl.constexpr, ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """How many batch rows the programs have among them, where each has what this_program says."""
    return tl.num_programs(0) // (H * ((ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS))


@triton.jit
def token_offset(tensor, b, t, h):
    """Where the values of token t of batch row b at head or group h are; `tensor`: its pointer and those strides.

    Torch strides are never negative; told so, the compiler needs one instruction instead of three for a 64-bit product.
    """
    _, stride_b, stride_t, stride_h = tensor
    tl.assume(stride_b >= 0)
    tl.assume(stride_t >= 0)
    tl.assume(stride_h >= 0)
    return b.to(tl.int64) * stride_b + t.to(tl.int64) * stride_t + h.to(tl.int64) * stride_h


@triton.jit
def token_entry(tensor, b, t, h, ALIGNMENT: tl.constexpr):
    """Pointer to the values of token t of batch row b at head or group h; `tensor`: its pointer and those strides.
    ALIGNMENT: bytes that all such pointers are multiples of, as far as the compiler is to know."""
    return tl.multiple_of(tensor[0] + token_offset(tensor, b, t, h), ALIGNMENT)


@triton.jit
def zero_past(out, b, first, count, length, h, offsets, mask, live, PADDING: tl.constexpr):
    """Zero the output of the tokens of a packed row of `length` past the `count` that there is room for, at these
    offsets from head h; of padding rows not, where PADDING is "keep"."""
    for i in range(count, length):
        zero = tl.zeros(offsets.shape, out[0].dtype.element_ty)
        goes = tl.where(live, mask, False) if PADDING == "keep" else mask
        tl.store(token_entry(out, b, first + i, h, 1) + offsets, zero, mask=goes)


@triton.jit
def zero_unused(out, cu_seqlens_ptr, b, h, offsets, mask, tokens, batch):
    """Zero the output of the tokens that no row has, at these offsets from head h; the rows share the work."""
    zero = tl.zeros(offsets.shape, out[0].dtype.element_ty)
    start, end = bound(tl.load(cu_seqlens_ptr), tokens), bound(tl.load(cu_seqlens_ptr + batch), tokens)
    for index in range(b, start + tokens - end, batch):
        t = tl.where(index < start, b * 0 + index, end + index - start)
        tl.store(token_entry(out, b, t, h, 1) + offsets, zero, mask=mask)
