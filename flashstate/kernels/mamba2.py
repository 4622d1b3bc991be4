"""mamba2_step on the GPU: one program per (batch row, head, block of D rows), the state tile in registers."""

import triton
import triton.language as tl

from flashstate.kernels.addressing import entry
from flashstate.kernels.slots import resolve_read, resolve_write
from flashstate.kernels.state_io import load_seed, load_state, random_bits, store_state


@triton.jit
def softplus(x):
    """log(1 + exp(x)), the identity above 20. Where exp(x) < 1 the bits that 1 + exp(x) lost are added back."""
    e = tl.exp(x)
    w = 1.0 + e
    log1p = tl.log(w) + tl.where(e < 1.0, e - (w - 1.0), 0.0)
    return tl.where(x > 20.0, x, log1p)


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def load_skip(D_ptr, h, offs_d, mask_d, ROWS: tl.constexpr, PER_ROW: tl.constexpr):
    """D of head h: a value for each row, or one for all."""
    if PER_ROW:
        return tl.load(D_ptr + h * ROWS + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    else:
        return tl.load(D_ptr + h).to(tl.float32)


UNSPECIALIZED = ["dt_stride_b", "dt_stride_h", "read_stride", "write_stride", "num_slots", "null", "stream"]


@triton.jit(do_not_specialize=UNSPECIALIZED)
def mamba2_step_kernel(
    state_ptr, seed_ptr, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, out_ptr,  # None: absent
    read_ptr, write_ptr, fault_ptr,
    slot_stride, x_stride_b, x_stride_h, dt_stride_b, dt_stride_h, B_stride_b, B_stride_g, C_stride_b, C_stride_g,
    z_stride_b, z_stride_h, out_stride_b, out_stride_h, read_stride, write_stride,
    num_slots, null, stream,
    H: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    VECTOR: tl.constexpr,  # consecutive elements of state per access; divides slot_stride
    D_PER_ROW: tl.constexpr, DT_SOFTPLUS: tl.constexpr, UPDATE: tl.constexpr,
    ROUNDING: tl.constexpr, ROUNDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS
    pid = tl.program_id(0)
    b = pid // (H * tiles)
    h = pid // tiles % H
    g = h // HEADS_PER_GROUP
    first_row = pid % tiles * BLOCK_ROWS
    offs_d = first_row + tl.arange(0, BLOCK_ROWS)
    offs_n = tl.arange(0, BLOCK_COLS)
    mask_d = offs_d < ROWS
    mask_n = offs_n < COLS
    mask = mask_d[:, None] & mask_n[None, :]

    # No branches: a padding row is masked. So loads and random bits do not wait until the row is known to be live.
    read = resolve_read(read_ptr, read_stride, b, num_slots, null, fault_ptr)
    live = read >= 0
    tile = (h * ROWS + first_row) * COLS  # within a slot, which has fewer than 2^31 elements
    offs_tile = tl.arange(0, BLOCK_ROWS)[:, None] * COLS + offs_n[None, :]
    seed = load_seed(seed_ptr, read, live)
    s_ptrs = state_ptr + tl.multiple_of(read * slot_stride, VECTOR) + tile + offs_tile
    s = load_state(s_ptrs, tl.where(live, mask, False))
    if COLS < BLOCK_COLS:
        s = tl.where(mask_n[None, :], s, 0.0)

    x = tl.load(entry(x_ptr, b, x_stride_b, h, x_stride_h) + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    dt = tl.load(entry(dt_ptr, b, dt_stride_b, h, dt_stride_h)).to(tl.float32)
    A = tl.load(A_ptr + h).to(tl.float32)
    B = tl.load(entry(B_ptr, b, B_stride_b, g, B_stride_g) + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    C = tl.load(entry(C_ptr, b, C_stride_b, g, C_stride_g) + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    if D_ptr is not None:
        D = load_skip(D_ptr, h, offs_d, mask_d, ROWS, D_PER_ROW)
    if z_ptr is not None:
        z = tl.load(entry(z_ptr, b, z_stride_b, h, z_stride_h) + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    random = random_bits(seed, h * ROWS + offs_d, 0, stream, COLS, BLOCK_COLS, ROUNDING, ROUNDS)

    if dt_bias_ptr is not None:
        dt += tl.load(dt_bias_ptr + h).to(tl.float32)
    if DT_SOFTPLUS:
        dt = softplus(dt)
    dA = tl.exp(dt * A)
    s = tl.fma(s, dA, (dt * x)[:, None] * B[None, :])
    y = tl.sum(s * C[None, :], axis=1)
    if D_ptr is not None:
        y += D * x
    if z_ptr is not None:
        y *= silu(z)
    y = tl.where(live, y, 0.0).to(out_ptr.dtype.element_ty)
    tl.store(entry(out_ptr, b, out_stride_b, h, out_stride_h) + offs_d, y, mask=mask_d)

    if UPDATE:
        write = resolve_write(write_ptr, write_stride, b, read, num_slots, null, fault_ptr)
        s_ptrs = state_ptr + tl.multiple_of(write * slot_stride, VECTOR) + tile + offs_tile
        mask = tl.where(write >= 0, mask, False)
        store_state(s_ptrs, s, mask, random, ROUNDING)
