"""Root-mean-square norms of rows, gated or not; reference/norms.py has the same in torch."""

import triton.language as tl

from flashstate.launch.kernel import kernel


@kernel
def rms_norm_kernel(
    x_ptr, weight_ptr, gate_ptr, out_ptr, x_row, x_head, gate_row, gate_head, eps,
    HEADS: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr,
    WEIGHT_PER_HEAD: tl.constexpr,  # whether every head of a row has its own weight, or all have one
    SILU: tl.constexpr,  # whether the gate is silu, else it is sigmoid
    ALIGNMENT: tl.constexpr,  # bytes that heads of x, the gate, the weight and the output begin at multiples of
):  # fmt: skip
    """One program per row and head: N elements, (BLOCK_N,), in float32, rounded once."""
    row, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    offs_n = tl.arange(0, BLOCK_N)
    exists = offs_n < N
    xs = tl.multiple_of(x_ptr + (row.to(tl.int64) * x_row + head * x_head), ALIGNMENT)
    x = tl.load(xs + offs_n, mask=exists, other=0.0).to(tl.float32)
    weights = weight_ptr + (head * N if WEIGHT_PER_HEAD else 0) + offs_n
    weight = tl.load(tl.multiple_of(weights, ALIGNMENT), mask=exists, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / N + eps) * weight
    if gate_ptr is not None:
        gates = tl.multiple_of(gate_ptr + (row.to(tl.int64) * gate_row + head * gate_head), ALIGNMENT)
        gate = tl.load(gates + offs_n, mask=exists, other=0.0).to(tl.float32)
        y = y * (gate * tl.sigmoid(gate) if SILU else tl.sigmoid(gate))
    out = tl.multiple_of(out_ptr + tl.program_id(0).to(tl.int64) * N, ALIGNMENT)
    tl.store(out + offs_n, y.to(out_ptr.dtype.element_ty), mask=exists)
