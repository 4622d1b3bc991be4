"""mamba3_step on the GPU: a program per (batch row, head), all rows of the head, tile by tile.

Tensor cores add the products of all ranks to a tile, and multiply it with C of all ranks, on float32 as sums of
bfloat16. All rows of a head need k and the angles of the token before, which the program overwrites at its end: so
nobody else may have rows of the head. It has one warp, whose loads come before its stores.
"""

import triton
import triton.language as tl

from flashstate.kernels.addressing import this_program, token_entry, zero_unused
from flashstate.kernels.functions import cos_and_sin, sigmoid, silu, tanh, wrapped
from flashstate.kernels.slots import resolve_read, resolve_write, token_range
from flashstate.kernels.state_io import from_code, load_seed, load_tile, random_bits, store_state, tile_at
from flashstate.kernels.stores import store_output
from flashstate.kernels.tensor_cores import (
    add_products,
    as_in_memory,
    as_operand,
    chunks_of,
    dot_terms,
    terms_of,
    transposed,
)
from flashstate.kernels.tiles import STAGES, load_rows, store_rows

HINT = tl.constexpr("streaming")
PI = tl.constexpr(3.141592653589793)


@triton.jit
def load_gates(A_at, dt_at, trap_at, b, t, h, TRAP_LOGIT: tl.constexpr):
    """dt of token t, and what it multiplies with: the state, what the token before brought, and what it brings."""
    A = tl.load(token_entry(A_at, b, t, h, 1)).to(tl.float32)
    dt = tl.load(token_entry(dt_at, b, t, h, 1)).to(tl.float32)
    trap = tl.load(token_entry(trap_at, b, t, h, 1)).to(tl.float32)
    if TRAP_LOGIT:
        trap = sigmoid(trap)
    alpha = tl.exp(A * dt)
    return dt, alpha, (1.0 - trap) * dt * alpha, trap * dt


@triton.jit
def pairs_of(cols, COLS: tl.constexpr, PAIRING: tl.constexpr):
    """The pair that every column is turned in, and whether it is its first."""
    if PAIRING == "interleaved":
        return cols // 2, cols % 2 == 0
    else:
        return cols % (COLS // 2), cols < COLS // 2


@triton.jit
def load_theta(ptr, offset, live, h, ANGLES: tl.constexpr, COLS: tl.constexpr, BLOCK_COLS: tl.constexpr,
               PAIRING: tl.constexpr):  # fmt: skip
    """The angle of every column's pair in the slot at `offset`; zero where there is none."""
    cols = tl.arange(0, BLOCK_COLS)
    pair, _ = pairs_of(cols, COLS, PAIRING)
    exists = tl.where(live, (pair < ANGLES) & (cols < COLS), False)
    return tl.load(ptr + offset + h * ANGLES + pair, mask=exists, other=0.0)


@triton.jit
def turn(theta, angle_at, b, t, h, dt, ANGLES: tl.constexpr, COLS: tl.constexpr, PAIRING: tl.constexpr):
    """The angles of columns, moved on by token t."""
    cols = tl.arange(0, theta.shape[0])
    pair, _ = pairs_of(cols, COLS, PAIRING)
    exists = (pair < ANGLES) & (cols < COLS)
    angle = tl.load(token_entry(angle_at, b, t, h, 1) + pair, mask=exists, other=0.0).to(tl.float32)
    return wrapped(theta + tanh(angle) * dt * PI)


@triton.jit
def store_theta(ptr, offset, goes, h, theta, ANGLES: tl.constexpr, COLS: tl.constexpr, PAIRING: tl.constexpr):
    cols = tl.arange(0, theta.shape[0])
    pair, first = pairs_of(cols, COLS, PAIRING)
    mask = tl.where(goes, first & (pair < ANGLES) & (cols < COLS), False)
    tl.store(ptr + offset + h * ANGLES + pair, theta, mask=mask)


@triton.jit
def rotation_of(theta, CHUNK: tl.constexpr, COLS: tl.constexpr, PAIRING: tl.constexpr):
    """What columns, and the other columns of their pairs, are multiplied with: chunks of each."""
    _, first = pairs_of(tl.arange(0, theta.shape[0]), COLS, PAIRING)
    cos, sin = cos_and_sin(theta)
    return chunks_of(cos, CHUNK), chunks_of(tl.where(first, -sin, sin), CHUNK)


@triton.jit
def load_biased(entries, bias_entries, cols, exists, COLS: tl.constexpr):
    """Values of these columns for every rank, (ranks, CHUNK) float32; zero in columns that do not exist."""
    mask = exists[:, None] & ((cols >= 0) & (cols < COLS))[None, :]
    values = tl.load(entries[:, None] + cols[None, :], mask=mask, other=0.0)
    if bias_entries is not None:
        bias = tl.load(bias_entries[:, None] + cols[None, :], mask=mask, other=0.0)
        values = values.to(tl.float32) + bias.to(tl.float32)
    return values


@triton.jit
def load_vectors(
    tensor, stride_r, bias_ptr, rotation, b, t, h, g,
    ROOM: tl.constexpr, REPEAT: tl.constexpr, RANK: tl.constexpr, ALIGNED: tl.constexpr, PAIRING: tl.constexpr,
    H: tl.constexpr, COLS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNK: tl.constexpr, PER_COLUMNS: tl.constexpr,
):  # fmt: skip
    """B or C of token t for all ranks, with its bias and turned, in chunks (ROOM, CHUNK); zero for ranks that do not
    exist. Ranks come again after REPEAT rows."""
    r = tl.arange(0, ROOM) % REPEAT
    dtype: tl.constexpr = tensor[0].dtype.element_ty
    entries = token_entry(tensor, b, t, g, 1) + r.to(tl.int64) * stride_r
    bias_entries = None
    if bias_ptr is not None:
        bias_entries = bias_ptr + (r * H + h) * COLS
    if ALIGNED:  # no more than threads have side by side, so that it is the layout of the tile
        entries = tl.multiple_of(entries, min(16, PER_COLUMNS * dtype.primitive_bitwidth // 8))
        if bias_ptr is not None:
            width: tl.constexpr = bias_ptr.dtype.element_ty.primitive_bitwidth // 8
            bias_entries = tl.multiple_of(bias_entries, min(16, PER_COLUMNS * width))
    chunks = ()
    for i in tl.static_range(BLOCK_COLS // CHUNK):
        cols = i * CHUNK + tl.arange(0, CHUNK)
        u = load_biased(entries, bias_entries, cols, r < RANK, COLS)
        if PAIRING != "none":
            u = u.to(tl.float32)
            if PAIRING == "interleaved":
                first, second = tl.split(tl.reshape(u, (ROOM, CHUNK // 2, 2)))
                other = tl.reshape(tl.join(second, first), (ROOM, CHUNK))
            else:
                half: tl.constexpr = COLS // 2
                others = tl.where(cols < half, cols + half, cols - half)
                other = load_biased(entries, bias_entries, others, r < RANK, COLS).to(tl.float32)
            cos, sin = rotation
            u = tl.fma(other, sin[i][None, :], u * cos[i][None, :])
        chunks = chunks + (u,)
    return chunks


@triton.jit
def load_kept(
    ptr, offset, live, h, ROOM: tl.constexpr, REPEAT: tl.constexpr, RANK: tl.constexpr, ALIGNED: tl.constexpr,
    H: tl.constexpr, COLS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNK: tl.constexpr, PER_COLUMNS: tl.constexpr,
):  # fmt: skip
    """B of the token before, as load_vectors gives it."""
    r = tl.arange(0, ROOM) % REPEAT
    entries = ptr + offset + (r * H + h) * COLS
    if ALIGNED:
        entries = tl.multiple_of(entries, min(16, PER_COLUMNS * ptr.dtype.element_ty.primitive_bitwidth // 8))
    chunks = ()
    for i in tl.static_range(BLOCK_COLS // CHUNK):
        cols = i * CHUNK + tl.arange(0, CHUNK)
        chunks = chunks + (load_biased(entries, None, cols, tl.where(live, r < RANK, False), COLS),)
    return chunks


@triton.jit
def store_kept(ptr, offset, goes, h, k, RANK: tl.constexpr, H: tl.constexpr, COLS: tl.constexpr):
    r = tl.arange(0, k[0].shape[0])
    CHUNK: tl.constexpr = k[0].shape[1]
    for i in tl.static_range(len(k)):
        cols = i * CHUNK + tl.arange(0, CHUNK)
        mask = tl.where(goes, r < RANK, False)[:, None] & (cols < COLS)[None, :]
        tl.store(ptr + offset + ((r * H + h) * COLS)[:, None] + cols[None, :], k[i], mask=mask)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Chunks in this dtype."""
    values = ()
    for i in tl.static_range(len(x)):
        values = values + (x[i].to(dtype),)
    return values


@triton.jit
def operands_of(x, TERMS: tl.constexpr, PER_COLUMNS: tl.constexpr, TARGET: tl.constexpr):
    """Chunks as operands of tensor cores, terms of each: one of bfloat16, else up to TERMS."""
    operands = ()
    for i in tl.static_range(len(x)):
        value = as_operand(x[i], PER_COLUMNS)
        if value.dtype == tl.bfloat16 and TARGET != "interpreter":
            operands = operands + ((value,),)
        else:
            terms: tl.constexpr = min(TERMS, 2) if value.dtype == tl.float16 else TERMS
            operands = operands + (terms_of(value.to(tl.float32), terms, TARGET),)
    return operands


@triton.jit
def stacked(now, before):
    """Chunks with the ranks of a token above those of the token before."""
    ROOM: tl.constexpr = now[0].shape[0]
    upper = (tl.arange(0, ROOM) < ROOM // 2)[:, None]
    both = ()
    for i in tl.static_range(len(now)):
        both = both + (tl.where(upper, now[i], before[i]),)
    return both


@triton.jit
def load_weights(ptr, offs_d, r, h, RANK: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr):
    """A weight for every row and rank, (rows, ranks); ones if there are none, zero for what does not exist."""
    exists = (offs_d < ROWS)[:, None] & (r < RANK)[None, :]
    if ptr is None:
        return tl.where(exists, 1.0, 0.0)
    else:
        return tl.load(ptr + ((r * H + h) * ROWS)[None, :] + offs_d[:, None], mask=exists, other=0.0).to(tl.float32)


@triton.jit
def step(s, factor, alpha, u, vectors):
    """A tile through one more token: chunks of it, in the order of operands. factor: of every row of s, (rows, 1), or
    1; u: (rows, ranks twice), terms of what multiplies with the vectors."""
    stepped = ()
    for i in tl.static_range(len(s)):
        stepped = stepped + (add_products(s[i] * (alpha * factor), u, vectors[i]),)
    return stepped


@triton.jit
def read_out(s, C, BLOCK_ROWS: tl.constexpr, TERMS: tl.constexpr, TARGET: tl.constexpr):
    """The products of a tile with C of all ranks, (rows, ranks)."""
    y = tl.zeros([BLOCK_ROWS, C[0][0].shape[0]], tl.float32)
    for i in tl.static_range(len(s)):
        y = dot_terms(terms_of(s[i], TERMS, TARGET), transposed(C[i]), y)
    return y


@triton.jit
def in_memory_order(s, PER_COLUMNS: tl.constexpr):
    chunks = ()
    for i in tl.static_range(len(s)):
        chunks = chunks + (as_in_memory(s[i], PER_COLUMNS),)
    return chunks


@triton.jit
def load_token(
    inputs, theta, b, t, h, g, kept_dtype: tl.constexpr,
    RANKS: tl.constexpr, READ_RANKS: tl.constexpr, RANK: tl.constexpr, ANGLES: tl.constexpr, ALIGNED: tl.constexpr,
    PAIRING: tl.constexpr, TRAP_LOGIT: tl.constexpr, OUT_TERMS: tl.constexpr,
    H: tl.constexpr, COLS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNK: tl.constexpr, PER_COLUMNS: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    """What token t brings to every row of a head: its gates, the angles after it, B as it is kept, in both halves of
    chunks (2 * RANKS, CHUNK), and C as operands."""
    A_at, dt_at, trap_at, B_at, B_r, C_at, C_r, angle_at, bias_B_ptr, bias_C_ptr = inputs
    dt, alpha, beta, gamma = load_gates(A_at, dt_at, trap_at, b, t, h, TRAP_LOGIT)
    rotation = None
    if PAIRING != "none":
        theta = turn(theta, angle_at, b, t, h, dt, ANGLES, COLS, PAIRING)
        rotation = rotation_of(theta, CHUNK, COLS, PAIRING)
    B = load_vectors(
        B_at, B_r, bias_B_ptr, rotation, b, t, h, g,
        2 * RANKS, RANKS, RANK, ALIGNED, PAIRING, H, COLS, BLOCK_COLS, CHUNK, PER_COLUMNS,
    )  # fmt: skip
    C = load_vectors(
        C_at, C_r, bias_C_ptr, rotation, b, t, h, g,
        READ_RANKS, READ_RANKS, RANK, ALIGNED, PAIRING, H, COLS, BLOCK_COLS, CHUNK, PER_COLUMNS,
    )  # fmt: skip
    return (alpha, beta, gamma), theta, rounded(B, kept_dtype), operands_of(C, OUT_TERMS, PER_COLUMNS, TARGET)


@triton.jit
def step_tile(
    s, factor, v, gates, vectors, C, weights, D, x_at, z_at, out, out_r, b, t, h, offs_d, live,
    RANKS: tl.constexpr, READ_RANKS: tl.constexpr, RANK: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr,
    PADDING: tl.constexpr, TERMS: tl.constexpr, OUT_TERMS: tl.constexpr, ALIGNMENT: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """A tile through token t, whose output is stored: the tile after it, and its x. v: x of the token before."""
    alpha, beta, gamma = gates
    Wx_ptr, Wz_ptr, Wo_ptr = weights
    mask_d = offs_d < ROWS
    x = load_rows(token_entry(x_at, b, t, h, ALIGNMENT), offs_d, mask_d, True)
    r = tl.arange(0, 2 * RANKS)
    u = tl.where((r < RANKS)[None, :], (gamma * x)[:, None], (beta * v)[:, None])
    u *= load_weights(Wx_ptr, offs_d, r % RANKS, h, RANK, H, ROWS)
    s = step(s, factor, alpha, terms_of(u, TERMS, TARGET), vectors)

    y = read_out(s, C, offs_d.shape[0], OUT_TERMS, TARGET)
    r = tl.arange(0, READ_RANKS)
    y = tl.fma((D * x)[:, None], load_weights(Wx_ptr, offs_d, r, h, RANK, H, ROWS), y)
    if z_at[0] is not None:
        z = load_rows(token_entry(z_at, b, t, h, ALIGNMENT), offs_d, mask_d, True)
        y *= silu(z[:, None] * load_weights(Wz_ptr, offs_d, r, h, RANK, H, ROWS))
    if Wo_ptr is None and RANK > 1:
        offsets = offs_d[:, None] + r.to(tl.int64)[None, :] * out_r
        mask = mask_d[:, None] & (r < RANK)[None, :]
        store_output(out, b, t, h, offsets, mask, y, True, True, live, PADDING, ALIGNMENT)
    else:
        y = tl.sum(y * load_weights(Wo_ptr, offs_d, r, h, RANK, H, ROWS), 1)
        store_output(out, b, t, h, offs_d, mask_d, y, True, True, live, PADDING, ALIGNMENT)
    return s, x


# Every argument: what a compiler may assume about alignment is said by VECTOR and ALIGNED alone.
ARGUMENTS = [
    "data_ptr", "k_ptr", "v_ptr", "theta_ptr", "x_ptr", "A_ptr", "dt_ptr", "trap_ptr", "B_ptr", "C_ptr", "out_ptr",
    "z_ptr", "angle_ptr", "Wx_ptr", "Wz_ptr", "Wo_ptr", "D_ptr", "bias_B_ptr", "bias_C_ptr", "scale_ptr", "seed_ptr",
    "read_ptr", "accepted_ptr", "write_ptr", "cu_seqlens_ptr", "stream", "fault_ptr",
    "slot_stride", "scale_stride", "k_stride", "v_stride", "theta_stride",
    "x_b", "x_t", "x_h", "A_b", "A_t", "A_h", "dt_b", "dt_t", "dt_h", "trap_b", "trap_t", "trap_h", "z_b", "z_t", "z_h",
    "B_b", "B_t", "B_r", "B_g", "C_b", "C_t", "C_r", "C_g", "angle_b", "angle_t", "angle_h",
    "out_b", "out_t", "out_r", "out_h", "read_stride", "read_width", "write_stride", "tokens", "num_slots", "null",
]  # fmt: skip


@triton.jit(do_not_specialize=ARGUMENTS)
def mamba3_step_kernel(
    # Pointers, which change from call to call; None: absent.
    data_ptr, k_ptr, v_ptr, theta_ptr, x_ptr, A_ptr, dt_ptr, trap_ptr, B_ptr, C_ptr, out_ptr,
    z_ptr, angle_ptr, Wx_ptr, Wz_ptr, Wo_ptr, D_ptr, bias_B_ptr, bias_C_ptr, scale_ptr, seed_ptr,
    read_ptr, accepted_ptr, write_ptr, cu_seqlens_ptr,
    stream,
    # What a server repeats. Not in tuples: Triton compiles anew for the values it finds in one.
    fault_ptr,
    slot_stride, scale_stride, k_stride, v_stride, theta_stride,  # of slots
    x_b, x_t, x_h, A_b, A_t, A_h, dt_b, dt_t, dt_h, trap_b, trap_t, trap_h, z_b, z_t, z_h,  # of batch, token and head
    B_b, B_t, B_r, B_g, C_b, C_t, C_r, C_g,  # of batch, token, rank and group
    angle_b, angle_t, angle_h, out_b, out_t, out_r, out_h,
    read_stride, read_width, write_stride,  # of the rows of tables
    tokens,  # length of the token axis
    num_slots, null,
    H: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, RANK: tl.constexpr,
    ANGLES: tl.constexpr,
    VECTOR: tl.constexpr,  # elements per access of the state
    ALIGNED: tl.constexpr,  # every row of x, B, C, z, out, k, v and of the biases starts at a multiple of 16 bytes
    PAIRING: tl.constexpr,  # of columns that are turned: "interleaved", "halved", or "none"
    TRAP_LOGIT: tl.constexpr, ONE_TOKEN: tl.constexpr,
    STORES: tl.constexpr,  # after which tokens the pool is written: "last", "every" or "none"
    STORES_KV: tl.constexpr,  # whether k and v are among that
    PADDING: tl.constexpr,  # the output of padding rows: "zero", "fresh", from a zero state, or "keep", as it was
    ROUNDING: tl.constexpr, ROUNDS: tl.constexpr, TARGET: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNK: tl.constexpr,  # of a tile
):  # fmt: skip
    b, h, _ = this_program(H, ROWS, ROWS)
    g = h // HEADS_PER_GROUP
    TILES: tl.constexpr = (ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS
    RANKS: tl.constexpr = max(4, triton.next_power_of_2(RANK))  # there is room for
    READ_RANKS: tl.constexpr = max(8, RANKS)
    dtype: tl.constexpr = data_ptr.dtype.element_ty
    kept_dtype: tl.constexpr = k_ptr.dtype.element_ty
    wide_output: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    fine: tl.constexpr = wide_output or dtype == tl.float32 or dtype == tl.int16
    TERMS: tl.constexpr = 3 if fine else 2  # as much as float32 has, or enough for 16 bits
    OUT_TERMS: tl.constexpr = 3 if wide_output else 2

    slot = resolve_read((read_ptr, read_stride, read_width, accepted_ptr), b, num_slots, null, fault_ptr)
    live = slot >= 0
    seed = load_seed(seed_ptr, slot, live, ROUNDING != "nearest")
    first, count = token_range(cu_seqlens_ptr, b, tokens, ONE_TOKEN)
    pool, write = (data_ptr, scale_ptr, slot_stride, scale_stride), (write_ptr, write_stride)
    x_at, z_at, out = (x_ptr, x_b, x_t, x_h), (z_ptr, z_b, z_t, z_h), (out_ptr, out_b, out_t, out_h)
    A_at, dt_at, trap_at = (A_ptr, A_b, A_t, A_h), (dt_ptr, dt_b, dt_t, dt_h), (trap_ptr, trap_b, trap_t, trap_h)
    B_at, C_at, angle_at = (B_ptr, B_b, B_t, B_g), (C_ptr, C_b, C_t, C_g), (angle_ptr, angle_b, angle_t, angle_h)
    alignment: tl.constexpr = 16 if ALIGNED else 1
    LAST_ROUNDING: tl.constexpr = ROUNDING if STORES == "last" else "nearest"
    D = 0.0
    if D_ptr is not None:
        D = tl.load(D_ptr + h).to(tl.float32)

    inputs = (A_at, dt_at, trap_at, B_at, B_r, C_at, C_r, angle_at, bias_B_ptr, bias_C_ptr)
    weights = (Wx_ptr, Wz_ptr, Wo_ptr)
    goes = live if ONE_TOKEN else live & (count > 0)
    to = slot
    if STORES == "last":
        to = resolve_write(write, b, 0, slot, goes, num_slots, null, fault_ptr)
        to = tl.where(goes, to, -1)
    before = load_kept(
        k_ptr, slot * k_stride, live, h,
        2 * RANKS, RANKS, RANK, ALIGNED, H, COLS, BLOCK_COLS, CHUNK, VECTOR,
    )  # fmt: skip
    theta = 0.0
    if PAIRING != "none":
        theta = load_theta(theta_ptr, slot * theta_stride, live, h, ANGLES, COLS, BLOCK_COLS, PAIRING)
    if ONE_TOKEN:
        gates, theta, now, C = load_token(
            inputs, theta, b, first, h, g, kept_dtype, RANKS, READ_RANKS, RANK, ANGLES, ALIGNED, PAIRING, TRAP_LOGIT,
            OUT_TERMS, H, COLS, BLOCK_COLS, CHUNK, VECTOR, TARGET,
        )  # fmt: skip
        vectors = operands_of(stacked(now, before), TERMS, VECTOR, TARGET)

    for i in tl.range(TILES, num_stages=STAGES):
        tile_row = i * BLOCK_ROWS
        offs_d = tile_row + tl.arange(0, BLOCK_ROWS)
        mask_d = offs_d < ROWS
        tile = tile_at(h, tile_row, ROWS, COLS, BLOCK_ROWS, BLOCK_COLS, CHUNK, False)
        codes, factor, random = load_tile(
            pool, slot, live, tile, (seed, count - 1, stream), COLS, VECTOR, VECTOR, LAST_ROUNDING, ROUNDS, HINT
        )
        v = load_rows(v_ptr + slot * v_stride + h * ROWS, offs_d, mask_d, live)
        s = ()
        for c in tl.static_range(len(codes)):
            code = codes[c]
            if PADDING == "fresh":
                code = tl.where(live, code, 0).to(code.dtype)
            s = s + (from_code(as_operand(code, VECTOR), dtype, TARGET),)
        if PADDING == "fresh":
            factor = tl.where(live, factor, 1.0)
        if ONE_TOKEN:
            s, x = step_tile(
                s, factor, v, gates, vectors, C, weights, D, x_at, z_at, out, out_r, b, first, h, offs_d, live,
                RANKS, READ_RANKS, RANK, H, ROWS, PADDING, TERMS, OUT_TERMS, alignment, TARGET,
            )  # fmt: skip
            v = x
        else:
            tile_theta, tile_before = theta, before
            for t in range(0, count):
                gates, tile_theta, now, C = load_token(
                    inputs, tile_theta, b, first + t, h, g, kept_dtype, RANKS, READ_RANKS, RANK, ANGLES, ALIGNED,
                    PAIRING, TRAP_LOGIT, OUT_TERMS, H, COLS, BLOCK_COLS, CHUNK, VECTOR, TARGET,
                )  # fmt: skip
                vectors = operands_of(stacked(now, tile_before), TERMS, VECTOR, TARGET)
                s, x = step_tile(
                    s, factor, v, gates, vectors, C, weights, D, x_at, z_at, out, out_r, b, first + t, h, offs_d, live,
                    RANKS, READ_RANKS, RANK, H, ROWS, PADDING, TERMS, OUT_TERMS, alignment, TARGET,
                )  # fmt: skip
                v = x.to(v_ptr.dtype.element_ty).to(tl.float32)
                tile_before = now
                if scale_ptr is not None:
                    factor = tl.full([BLOCK_ROWS, 1], 1.0, tl.float32)
                if STORES == "every":
                    after = resolve_write(write, b, t, slot, live, num_slots, null, fault_ptr)
                    bits = random_bits(seed, tile, t, stream, COLS, VECTOR, ROUNDING, ROUNDS)
                    store_state(
                        data_ptr, scale_ptr, after * slot_stride, after * scale_stride, after >= 0, tile,
                        in_memory_order(s, VECTOR), bits, ROUNDING, VECTOR, TARGET, HINT,
                    )  # fmt: skip
                    if STORES_KV:
                        store_rows(v_ptr + after * v_stride + h * ROWS, offs_d, mask_d, after >= 0, v)
                    ends = (after >= 0) & (i == TILES - 1)  # other tiles begin with what was there before
                    if STORES_KV:
                        store_kept(k_ptr, after * k_stride, ends, h, now, RANK, H, COLS)
                    if PAIRING != "none":
                        store_theta(theta_ptr, after * theta_stride, ends, h, tile_theta, ANGLES, COLS, PAIRING)
            if STORES == "last":
                ends = (to >= 0) & (i == TILES - 1)
                if STORES_KV:
                    store_kept(k_ptr, to * k_stride, ends, h, tile_before, RANK, H, COLS)
                if PAIRING != "none":
                    store_theta(theta_ptr, to * theta_stride, ends, h, tile_theta, ANGLES, COLS, PAIRING)
        if STORES == "last":
            store_state(
                data_ptr, scale_ptr, to * slot_stride, to * scale_stride, to >= 0, tile,
                in_memory_order(s, VECTOR), random, ROUNDING, VECTOR, TARGET, HINT,
            )  # fmt: skip
            if STORES_KV:
                store_rows(v_ptr + to * v_stride + h * ROWS, offs_d, mask_d, to >= 0, v)

    if ONE_TOKEN and STORES == "last":
        if STORES_KV:
            store_kept(k_ptr, to * k_stride, to >= 0, h, now, RANK, H, COLS)
        if PAIRING != "none":
            store_theta(theta_ptr, to * theta_stride, to >= 0, h, theta, ANGLES, COLS, PAIRING)
    if cu_seqlens_ptr is not None:
        RANKS_OUT: tl.constexpr = RANK if Wo_ptr is None else 1
        offs_d = tl.arange(0, triton.next_power_of_2(ROWS))[:, None]
        r = tl.arange(0, triton.next_power_of_2(RANKS_OUT))[None, :]
        mask = (offs_d < ROWS) & (r < RANKS_OUT)
        zero_unused(out, cu_seqlens_ptr, b, h, offs_d + r.to(tl.int64) * out_r, mask, tokens, tl.num_programs(0) // H)
