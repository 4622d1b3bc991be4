"""mamba2_step on the GPU: one program per (batch row, head, block of D rows), the state tile in registers."""

import triton
import triton.language as tl

from flashstate.kernels.slots import resolve_read, resolve_write
from flashstate.kernels.state_io import load_state, store_state


@triton.jit
def softplus(x):
    """log(1 + exp(x)), the identity above 20. Where exp(x) < 1 the bits that 1 + exp(x) lost are added back."""
    e = tl.exp(tl.minimum(x, 20.0))
    w = 1.0 + e
    log1p = tl.log(w) + tl.where(e < 1.0, e - (w - 1.0), 0.0)
    return tl.where(x > 20.0, x, log1p)


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit(
    do_not_specialize=["dt_stride_b", "dt_stride_h", "read_stride", "write_stride", "num_slots", "null", "stream"]
)
def mamba2_step_kernel(
    state_ptr, seed_ptr, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, out_ptr,  # None: absent
    read_ptr, write_ptr, fault_ptr,
    slot_stride, x_stride_b, x_stride_h, dt_stride_b, dt_stride_h, B_stride_b, B_stride_g, C_stride_b, C_stride_g,
    z_stride_b, z_stride_h, out_stride_b, out_stride_h, read_stride, write_stride,
    num_slots, null, stream,
    H: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    SLOT_ALIGN: tl.constexpr,  # elements that divide slot_stride
    D_PER_ROW: tl.constexpr, DT_SOFTPLUS: tl.constexpr, UPDATE: tl.constexpr,
    ROUNDING: tl.constexpr, ROUNDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS
    pid = tl.program_id(0)
    b = (pid // (H * tiles)).to(tl.int64)
    h = pid // tiles % H
    g = h // HEADS_PER_GROUP
    first_row = pid % tiles * BLOCK_ROWS
    offs_d = tl.arange(0, BLOCK_ROWS)
    offs_n = tl.arange(0, BLOCK_COLS)
    mask_d = first_row + offs_d < ROWS
    mask_n = offs_n < COLS
    read = resolve_read(read_ptr, read_stride, b, num_slots, null, fault_ptr)

    # All that does not wait for the slot is loaded before the state.
    x = tl.load(x_ptr + b * x_stride_b + h * x_stride_h + first_row + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    dt = tl.load(dt_ptr + b * dt_stride_b + h * dt_stride_h).to(tl.float32)
    A = tl.load(A_ptr + h).to(tl.float32)
    B = tl.load(B_ptr + b * B_stride_b + g * B_stride_g + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    C = tl.load(C_ptr + b * C_stride_b + g * C_stride_g + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + b * out_stride_b + h * out_stride_h + first_row + offs_d
    if read < 0:  # padding
        tl.store(out_ptrs, tl.zeros([BLOCK_ROWS], out_ptr.dtype.element_ty), mask=mask_d)
        return
    tile = (h * ROWS + first_row) * COLS  # within a slot
    offs_state = offs_d[:, None] * COLS + offs_n[None, :]
    mask_state = mask_d[:, None] & mask_n[None, :]
    s = load_state(state_ptr + tl.multiple_of(read * slot_stride, SLOT_ALIGN) + tile + offs_state, mask_state)

    if dt_bias_ptr is not None:
        dt += tl.load(dt_bias_ptr + h).to(tl.float32)
    if DT_SOFTPLUS:
        dt = softplus(dt)
    dA = tl.exp(dt * A)
    s = tl.fma(s, dA, (dt * x)[:, None] * B[None, :])
    y = tl.sum(s * C[None, :], axis=1)
    if D_ptr is not None:
        if D_PER_ROW:
            y += tl.load(D_ptr + h * ROWS + first_row + offs_d, mask=mask_d, other=0.0).to(tl.float32) * x
        else:
            y += tl.load(D_ptr + h).to(tl.float32) * x
    if z_ptr is not None:
        z = tl.load(z_ptr + b * z_stride_b + h * z_stride_h + first_row + offs_d, mask=mask_d, other=0.0).to(tl.float32)
        y *= silu(z)
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=mask_d)

    if UPDATE:
        write = resolve_write(write_ptr, write_stride, b, read, num_slots, null, fault_ptr)
        if write >= 0:
            seed = 0 if seed_ptr is None else tl.load(seed_ptr + read)
            ptrs = state_ptr + tl.multiple_of(write * slot_stride, SLOT_ALIGN) + tile + offs_state
            rows = h * ROWS + first_row + offs_d
            store_state(ptrs, s, mask_state, rows, seed, 0, stream, COLS, ROUNDING, ROUNDS)
