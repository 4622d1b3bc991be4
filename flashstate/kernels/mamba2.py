"""mamba2_step on the GPU: one program per (batch row, head, block of D rows), the state tile in registers."""

import triton
import triton.language as tl

from flashstate.kernels.addressing import token_entry
from flashstate.kernels.slots import (
    ancestor,
    path_to,
    resolve_read,
    resolve_snapshot_row,
    resolve_write,
    token_range,
    unused_tokens,
)
from flashstate.kernels.state_io import load_seed, load_state, random_bits, store_state, tile_at


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
def load_columns(ptr, COLS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNK: tl.constexpr):
    """A value for each column, in chunks as a tile has them, (CHUNK,) each; zero in columns that do not exist."""
    values = ()
    for k in tl.static_range(BLOCK_COLS // CHUNK):
        offs_n = k * CHUNK + tl.arange(0, CHUNK)
        values = values + (tl.load(ptr + offs_n, mask=offs_n < COLS, other=0.0).to(tl.float32),)
    return values


@triton.jit
def load_decay(ptr, h, tile, PER_ELEMENT: tl.constexpr):
    """A for each chunk of a tile: its elements', or the one of the head."""
    first, offsets, _, masks, _ = tile
    A = ()
    for k in tl.static_range(len(masks)):
        if PER_ELEMENT:
            ptrs = ptr + first + k * offsets.shape[1] + offsets
            A = A + (tl.load(ptrs, mask=masks[k], other=0.0).to(tl.float32),)
        else:
            A = A + (tl.load(ptr + h).to(tl.float32),)
    return A


@triton.jit
def step_chunks(s, dt, A, dtx, B):
    """s * exp(dt * A) + (dt * x) ⊗ B, chunk by chunk."""
    stepped = ()
    for k in tl.static_range(len(s)):
        stepped = stepped + (tl.fma(s[k], tl.exp(dt * A[k]), dtx[:, None] * B[k][None, :]),)
    return stepped


@triton.jit
def read_out(s, C):
    """The product of every row with C: every thread sums along its columns, and the threads of a row at the end."""
    products = s[0] * C[0][None, :]
    for k in tl.static_range(1, len(s)):
        products = tl.fma(s[k], C[k][None, :], products)
    return tl.sum(products, axis=1)


@triton.jit
def either(choose_first, first, second):
    chosen = ()
    for k in tl.static_range(len(first)):
        chosen = chosen + (tl.where(choose_first, first[k], second[k]),)
    return chosen


@triton.jit
def load_head(ptr, offs_d, mask_d, PER_ROW: tl.constexpr):
    """A value for each row of a head, (BLOCK_ROWS,), or one for all."""
    if PER_ROW:
        return tl.load(ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    else:
        return tl.load(ptr).to(tl.float32)


# Every argument: what a compiler may assume about alignment is said by VECTOR, SNAPSHOT_VECTOR and ALIGNED alone. Of
# snapshots that is no more than of the pool: accesses wider than those of the pool would change the layout of the tile,
# and with it the order in which a row is summed.
ARGUMENTS = [
    "state", "snapshots", "x_view", "B_view", "C_view", "z_view", "out_view", "dt_view", "A_ptr", "D_ptr",
    "dt_bias_ptr", "seed_ptr", "cu_seqlens_ptr", "fault_ptr", "read", "write", "parents", "snapshot_rows", "tokens",
    "longest", "num_slots", "null", "stream",
]  # fmt: skip


@triton.jit(do_not_specialize=ARGUMENTS)
def mamba2_step_kernel(
    state,  # data, scale, slot stride of either
    snapshots,  # data (None: none are taken), scale, row stride of either, token stride of either
    x_view, B_view, C_view, z_view, out_view, dt_view,  # pointer; batch, token and head (or group) stride; None: absent
    A_ptr, D_ptr, dt_bias_ptr, seed_ptr, cu_seqlens_ptr, fault_ptr,  # None: absent
    read,  # table, its row stride and width, accepted counts
    write, parents,  # table, its row stride; None: absent
    snapshot_rows,  # list, how many rows there are
    tokens,  # length of the token axis
    longest,  # entries that write, parents and snapshots have for the tokens of a row
    num_slots, null, stream,
    H: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    VECTOR: tl.constexpr, SNAPSHOT_VECTOR: tl.constexpr,  # elements per access
    ALIGNED: tl.constexpr,  # every row of x, B, C, z and out starts at a multiple of 16 bytes
    A_PER_ELEMENT: tl.constexpr, DT_PER_ROW: tl.constexpr, BIAS_PER_ROW: tl.constexpr, D_PER_ROW: tl.constexpr,
    DT_SOFTPLUS: tl.constexpr, ONE_TOKEN: tl.constexpr,
    STORES: tl.constexpr,  # after which tokens the pool is written: "last", "every" or "none"
    ROUNDING: tl.constexpr, SNAPSHOT_ROUNDING: tl.constexpr, ROUNDS: tl.constexpr, TARGET: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS
    pid = tl.program_id(0)
    b = pid // (H * tiles)
    h = pid // tiles % H
    g = h // HEADS_PER_GROUP
    first_row = pid % tiles * BLOCK_ROWS
    offs_d = first_row + tl.arange(0, BLOCK_ROWS)
    mask_d = offs_d < ROWS
    tile = tile_at(h * ROWS + first_row, h * ROWS + ROWS, COLS, BLOCK_ROWS, BLOCK_COLS, CHUNK)

    # No branches: a padding row is masked. So loads do not wait until the row is known to be live.
    slot = resolve_read(read, b, num_slots, null, fault_ptr)
    live = slot >= 0
    seed = load_seed(seed_ptr, slot, live)
    data_ptr, scale_ptr, slot_stride, scale_stride = state
    copy_ptr, copy_scale_ptr, row_stride, scale_row_stride, token_stride, scale_token_stride = snapshots
    s = load_state(data_ptr, scale_ptr, slot * slot_stride, slot * scale_stride, live, tile, COLS, VECTOR, TARGET)
    initial = s

    A = load_decay(A_ptr, h, tile, A_PER_ELEMENT)
    if D_ptr is not None:
        D = load_head(D_ptr + h * (ROWS if D_PER_ROW else 1), offs_d, mask_d, D_PER_ROW)
    if dt_bias_ptr is not None:
        dt_bias = load_head(dt_bias_ptr + h * (ROWS if BIAS_PER_ROW else 1), offs_d, mask_d, BIAS_PER_ROW)

    zero = b * 0
    first, count = zero, 1
    if not ONE_TOKEN:
        first, count = token_range(cu_seqlens_ptr, b, tokens)
    if STORES == "last":  # drawn while the state is on its way
        random = random_bits(seed, tile, count - 1, stream, COLS, VECTOR, ROUNDING, ROUNDS)
    for index in range(0, count):
        t = zero + index  # a number of the kernel also where the interpreter has one of Python
        runs, steps = live, 1
        if parents is not None:
            steps, follows = path_to(parents, b, t, longest)
            runs = live & (steps > 0)
            s = either(follows, s, initial)
        C = load_columns(token_entry(C_view, b, first + t, g, ALIGNED), COLS, BLOCK_COLS, CHUNK)
        if z_view is not None:
            z = tl.load(token_entry(z_view, b, first + t, h, ALIGNED) + offs_d, mask=mask_d, other=0.0).to(tl.float32)
        x = tl.zeros([BLOCK_ROWS], tl.float32)
        for step in range(0, steps):
            i = t
            if parents is not None:
                i = ancestor(parents, b, t, steps - 1 - step, longest)
            x = tl.load(token_entry(x_view, b, first + i, h, ALIGNED) + offs_d, mask=mask_d, other=0.0).to(tl.float32)
            dt = load_head(token_entry(dt_view, b, first + i, h, False), offs_d, mask_d, DT_PER_ROW)
            B = load_columns(token_entry(B_view, b, first + i, g, ALIGNED), COLS, BLOCK_COLS, CHUNK)

            if dt_bias_ptr is not None:
                dt += dt_bias
            if DT_SOFTPLUS:
                dt = softplus(dt)
            s = step_chunks(s, dt[:, None] if DT_PER_ROW or BIAS_PER_ROW else dt, A, dt * x, B)
        y = read_out(s, C)
        if D_ptr is not None:
            y = tl.fma(x, D, y)
        if z_view is not None:
            y *= silu(z)
        y = tl.where(runs, y, 0.0).to(out_view[0].dtype.element_ty)
        tl.store(token_entry(out_view, b, first + t, h, ALIGNED) + offs_d, y, mask=mask_d)

        if STORES == "every":
            bits = random_bits(seed, tile, t, stream, COLS, VECTOR, ROUNDING, ROUNDS)
            to = resolve_write(write, b, t, slot, runs & (t < longest), num_slots, null, fault_ptr)
            store_state(
                data_ptr, scale_ptr, to * slot_stride, to * scale_stride, to >= 0, tile, s, bits,
                ROUNDING, VECTOR, TARGET,
            )  # fmt: skip
        if copy_ptr is not None:
            bits = random_bits(seed, tile, t, stream, COLS, VECTOR, SNAPSHOT_ROUNDING, ROUNDS)
            to = resolve_snapshot_row(snapshot_rows, b, runs & (t < longest), fault_ptr)
            store_state(
                copy_ptr, copy_scale_ptr, to * row_stride + t.to(tl.int64) * token_stride,
                to * scale_row_stride + t.to(tl.int64) * scale_token_stride, to >= 0, tile, s, bits,
                SNAPSHOT_ROUNDING, SNAPSHOT_VECTOR, TARGET,
            )  # fmt: skip

    if STORES == "last":
        goes = live
        if not ONE_TOKEN:
            goes = live & (count > 0)
        to = tl.where(goes, resolve_write(write, b, 0, slot, goes, num_slots, null, fault_ptr), -1)
        store_state(
            data_ptr, scale_ptr, to * slot_stride, to * scale_stride, to >= 0, tile, s, random,
            ROUNDING, VECTOR, TARGET,
        )  # fmt: skip
    if cu_seqlens_ptr is not None:
        zero_unused(out_view, cu_seqlens_ptr, b, h, offs_d, mask_d, tokens, tl.num_programs(0) // (H * tiles))


@triton.jit
def zero_unused(out_view, cu_seqlens_ptr, b, h, offs_d, mask_d, tokens, batch):
    """Zero the output of the tokens that no row has; the rows share the work."""
    zero = tl.zeros(offs_d.shape, out_view[0].dtype.element_ty)
    start, end = unused_tokens(cu_seqlens_ptr, batch, tokens)
    for index in range(b, start + tokens - end, batch):
        t = tl.where(index < start, b * 0 + index, end + index - start)
        tl.store(token_entry(out_view, b, t, h, False) + offs_d, zero, mask=mask_d)
