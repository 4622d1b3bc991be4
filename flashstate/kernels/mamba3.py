"""mamba3_step on the GPU: a program per (batch row, head).

All rows of a head need k and the angles of the token before, which the program overwrites: so it has all of them, tile
by tile if they are many. Of higher rank tensor cores add the products of all ranks to a tile, and multiply it with C of
all ranks, on float32 as sums of bfloat16; every warp has 16 rows of the tile, or a multiple. The state is asked for as
soon as the slot is known, then everything else, before anything waits; and the states of a program that comes later are
asked for too.
"""

import triton
import triton.language as tl

from flashstate.kernels import mamba3_token, tensor_cores, tiles
from flashstate.kernels.addressing import Place, batch_size, this_program, token_entry, zero_unused
from flashstate.kernels.functions import silu
from flashstate.kernels.slots import read_slot, resolve_write, token_range, write_slot
from flashstate.kernels.state_io import STREAMING, from_code, load_tile, random_bits, store_slot
from flashstate.kernels.stores import store_output
from flashstate.kernels.tiles import STAGES
from flashstate.launch.kernel import kernel


@triton.jit
def load_rank_weights(ptr, offs_d, r, h, KIND: tl.constexpr):
    """Weights, or ones, of every row and rank, (rows, ranks), of rank 1 (rows,); zero for what does not exist."""
    ROWS: tl.constexpr = KIND.FORM.ROWS
    if KIND.RANK == 1:
        entries, mask = h * ROWS + offs_d, offs_d < ROWS
    else:
        entries = ((r * KIND.H + h) * ROWS)[None, :] + offs_d[:, None]
        mask = (offs_d < ROWS)[:, None] & (r < KIND.RANK)[None, :]
    return tl.where(mask, 1.0, 0.0) if ptr is None else tiles.load_or_zero(ptr + entries, mask=mask)


@triton.jit
def load_weights(weights, offs_d, r, h, KIND: tl.constexpr):
    """Wx, Wz and Wo of these rows."""
    Wx_ptr, Wz_ptr, Wo_ptr = weights
    Wx = load_rank_weights(Wx_ptr, offs_d, r, h, KIND)
    Wz = load_rank_weights(Wz_ptr, offs_d, r, h, KIND) if KIND.GATED else Wx
    return Wx, Wz, load_rank_weights(Wo_ptr, offs_d, r, h, KIND)


@triton.jit
def load_row_inputs(x_at, z_at, b, t, h, offs_d, KIND: tl.constexpr):
    """x and z of token t for these rows."""
    x = tiles.load_rows(token_entry(x_at, b, t, h, 1), offs_d, offs_d < KIND.FORM.ROWS, True)
    z = tiles.load_rows(token_entry(z_at, b, t, h, 1), offs_d, offs_d < KIND.FORM.ROWS, True) if KIND.GATED else x
    return x, z


@triton.jit
def tile_of(stored, live, WARPS: tl.constexpr, PADDING: tl.constexpr, KIND: tl.constexpr):
    """What load_tile gave, in float32: of rank 1 in chunks; of others in one part or in halves, as tensor cores have
    them, (WARPS, rows, columns), columns in the order of operands."""
    PARTS: tl.constexpr = 2 if KIND.IN_HALVES else 1
    factor, codes, _ = stored
    s = ()
    if KIND.RANK == 1:
        for i in tl.static_range(len(codes)):
            s = s + (from_code(codes[i], KIND.DTYPE, KIND.TARGET) * factor,)
    else:
        CHUNKS: tl.constexpr = len(codes) // PARTS
        for i in tl.static_range(PARTS):
            part = tensor_cores.operand_of_chunks(codes[i * CHUNKS : (i + 1) * CHUNKS], KIND.FORM.VECTOR)
            s = s + (tensor_cores.by_warps(from_code(part, KIND.DTYPE, KIND.TARGET) * factor, WARPS),)
    if PADDING == "fresh":
        s, _ = tiles.zero_unless(live, s, 1.0)
    return s


@triton.jit
def step_chunks(s, v, x, z, factors, vectors, weights, D, KIND: tl.constexpr):
    """A tile of rank 1 through a token, and the output of its rows. v: x of the token before."""
    alpha, beta, gamma = factors
    Wx, Wz, Wo = weights
    B, k, C = vectors
    now, before = (gamma * x * Wx)[:, None], (beta * v * Wx)[:, None]
    after = ()
    for i in tl.static_range(len(s)):
        after = after + (tl.fma(now, B[i], tl.fma(before, k[i], s[i] * alpha)),)
    y = tl.fma(D * x, Wx, tiles.dot_rows(after, C, KIND.FORM.VECTOR)) * Wo
    if KIND.GATED:
        y *= silu(z * Wz)
    return after, y


@triton.jit
def scaled_plus_products(s, alpha, u, vectors, KIND: tl.constexpr):
    """s alpha + u vectors. Tensor cores round sums towards zero: a state of more than 16 bits would lose by every
    token. So their sum is added to it, once a product with zeros has brought it where they have theirs."""
    if KIND.TERMS < 3:
        return tensor_cores.add_products(u, s * alpha, vectors)
    else:
        if KIND.PAIRING == "none":  # vectors come as they are, early: other loads do not wait for the state's then
            operand = vectors[0] if vectors[0].shape[0] >= 16 else tensor_cores.above(vectors[0], vectors[0])
        else:
            operand = tl.zeros([16, s.shape[2]], vectors[0].dtype)
        nothing = tl.zeros([s.shape[0] * s.shape[1], operand.shape[0]], operand.dtype)
        s = tensor_cores.multiply(nothing, operand, s)
        return tl.fma(s, alpha, tensor_cores.add_products(u, tl.zeros(s.shape, tl.float32), vectors))


@triton.jit
def step_operand(s, v, x, z, factors, vectors, weights, D, KIND: tl.constexpr):
    """A tile of higher rank through a token, and the output of its rows for every rank, (rows, ranks)."""
    alpha, beta, gamma = factors
    Wx, Wz, Wo = weights
    both, across = vectors
    now = (tl.arange(0, Wx.shape[1]) < Wx.shape[1] // 2)[None, :]
    u = Wx * tl.where(now, (gamma * x)[:, None], (beta * v)[:, None])  # (rows, ranks of both tokens)
    u = tensor_cores.terms_of(u, KIND.TERMS, KIND.TARGET)
    y = tl.zeros([s[0].shape[0], s[0].shape[1], Wx.shape[1]], tl.float32)
    rest = y + tiles.minus_zero()  # a zero that no compiler sees: it would append the sum to the other
    after = ()
    for i in tl.static_range(len(s)):
        after = after + (scaled_plus_products(s[i], alpha, u, both[i], KIND),)
        terms = tensor_cores.terms_of(after[i], KIND.OUT_TERMS, KIND.TARGET)
        y, rest = tensor_cores.dot_terms_apart(terms, y, rest, across[i])
    y += rest
    gate = Wo * silu(z[:, None] * Wz) if KIND.GATED else Wo
    return after, tl.fma(tensor_cores.in_rows(y), gate, tl.where(now, Wx, 0.0) * gate * (D * x)[:, None])


@triton.jit
def step_tile(
    s, v, x, z, factors, vectors, weights, D, out, out_r, b, t, h, offs_d, r, live,
    PADDING: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """A tile through token t, whose output is stored."""
    if KIND.RANK == 1:
        s, y = step_chunks(s, v, x, z, factors, vectors, weights, D, KIND)
    else:
        s, y = step_operand(s, v, x, z, factors, vectors, weights, D, KIND)
        if KIND.SUMMED:
            y = tl.sum(y, 1) if KIND.OUT_TERMS > 0 else tensor_cores.sum_columns(y)
    offsets, shown = offs_d, offs_d < KIND.FORM.ROWS
    if not KIND.SUMMED:
        offsets = offs_d[:, None] + r.to(tl.int64)[None, :] * out_r
        shown = (offs_d < KIND.FORM.ROWS)[:, None] & (tl.arange(0, r.shape[0]) < KIND.RANK)[None, :]
    store_output(out, Place(b, h, h, offsets, shown), t, y, True, True, live, PADDING, 1)
    return s


@triton.jit
def store_tile(pool, to, tile, s, random, KIND: tl.constexpr):
    """Store a tile, as tile_of has it, in slot `to` unless that is -1."""
    chunks = s
    if KIND.RANK > 1:
        chunks = ()
        for i in tl.static_range(len(s)):
            part = tensor_cores.in_rows(s[i])
            chunks = chunks + tensor_cores.chunks_of_operand(part, KIND.FORM.CHUNK, KIND.FORM.VECTOR)
    store_slot(pool, to, tile, chunks, random, KIND.FORM)


@triton.jit
def step_tokens(
    v, s, theta, before, weights, D, inputs, x_at, z_at, out, out_r, b, first, count, h, g, offs_d, r, exists, live,
    every, PADDING: tl.constexpr, STORES: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """A tile through all tokens of row b, whose outputs are stored, with STORES "every" also what is kept after each:
    the last v, the tile, the last angles and k."""
    pool, carried, v_at, write, slot, slots, longest, tile, drawing, last_tile = every
    seed, _, stream = drawing
    for t in range(0, count):
        token = mamba3_token.load_token(inputs, b, first + t, h, g, r, exists, KIND)
        x, z = load_row_inputs(x_at, z_at, b, first + t, h, offs_d, KIND)
        factors, theta, now, C = mamba3_token.prepare_token(token, theta, KIND)
        vectors = mamba3_token.vectors_of(now, before, C, KIND)
        s = step_tile(
            s, v, x, z, factors, vectors, weights, D, out, out_r, b, first + t, h, offs_d, r, live, PADDING, KIND
        )
        v = x.to(v_at[0].dtype.element_ty).to(tl.float32)
        before = now
        if STORES == "every":
            to = resolve_write(write, b, t, slot, live & (t < longest), slots)
            bits = random_bits((seed, t, stream), tile, pool[0].dtype.element_ty, KIND.FORM)
            store_tile(pool, to, tile, s, bits, KIND)
            ends = (to >= 0) & last_tile  # other tiles begin with what was there before
            tl.debug_barrier()
            store_v(v_at, to, h, offs_d, v, KIND)
            mamba3_token.store_carried(carried, to, ends, h, now, theta, r, KIND)
    return v, s, theta, before


@triton.jit
def store_v(v_at, to, h, offs_d, v, KIND: tl.constexpr):
    """Store v of these rows of a head in slot `to`, unless that is -1 or the call stores no v."""
    v_ptr, v_stride = v_at
    if KIND.STORES_KV:
        entry, mask_d, goes = v_ptr + to * v_stride + h * KIND.FORM.ROWS, offs_d < KIND.FORM.ROWS, to >= 0
        tl.store(entry + offs_d, v.to(v_ptr.dtype.element_ty), mask=tl.where(goes, mask_d, False))


@triton.jit
def read_ahead(read, AHEAD: tl.constexpr, H: tl.constexpr):
    """The slot and the head of the program that is AHEAD behind this one, and whether there is such a program."""
    read_ptr, read_stride = read
    later = tl.program_id(0) + AHEAD
    b, h = later // H, later % H
    comes = later < tl.num_programs(0)
    slot = b.to(tl.int64)
    if read_ptr is not None:
        slot = tl.load(read_ptr + b.to(tl.int64) * read_stride, mask=comes, other=-1).to(tl.int64)
    return slot, h, comes


@triton.jit
def zero_unused_ranks(out, out_r, cu_seqlens_ptr, b, h, tokens, KIND: tl.constexpr):
    """Zero the output of head h, of all ranks it has, for a share of the tokens that no row has."""
    RANKS: tl.constexpr = 1 if KIND.SUMMED else KIND.RANK
    ROWS: tl.constexpr = KIND.FORM.ROWS
    rows = tl.arange(0, triton.next_power_of_2(ROWS))[:, None]
    ranks = tl.arange(0, triton.next_power_of_2(RANKS))[None, :]
    mask = (rows < ROWS) & (ranks < RANKS)
    offsets = rows + ranks.to(tl.int64) * out_r
    zero_unused(out, cu_seqlens_ptr, b, h, offsets, mask, tokens, batch_size(KIND.H, ROWS, ROWS))


@kernel
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
    longest,  # entries that write has for the tokens of a row
    num_slots, null,
    H: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, RANK: tl.constexpr,
    ANGLES: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,  # from head to head of the state; None: they lie side by side
    VECTOR: tl.constexpr,  # elements per access of the state
    PAIRING: tl.constexpr,  # of columns that are turned: "interleaved", "halved", or "none"
    TRAP_LOGIT: tl.constexpr, ONE_TOKEN: tl.constexpr,
    STORES: tl.constexpr,  # after which tokens the pool is written: "last", "every" or "none"
    STORES_KV: tl.constexpr,  # whether k and v are among that
    PADDING: tl.constexpr,  # the output of padding rows: "zero", "fresh", from a zero state, or "keep", as it was
    AT_LEAST_ONE: tl.constexpr,  # whether accepted counts below 1 are taken as 1
    ROUNDING: tl.constexpr, ROUNDS: tl.constexpr, SHARED_SEED: tl.constexpr, TARGET: tl.constexpr,
    AHEAD: tl.constexpr,  # programs: the states of the one that is so many behind are asked for; 0: none are
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNK: tl.constexpr,  # of a tile
    WARPS: tl.constexpr,
):  # fmt: skip
    b, h, _ = this_program(H, ROWS, ROWS)
    g = h // HEADS_PER_GROUP
    TILES: tl.constexpr = (ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS
    ROOM: tl.constexpr = 1 if RANK == 1 else 2 * max(4, triton.next_power_of_2(RANK))  # for ranks of two tokens
    STORED_ROUNDING: tl.constexpr = "nearest" if STORES == "none" else ROUNDING
    FORM: tl.constexpr = tiles.form_of(
        ROWS, COLS, BLOCK_ROWS, BLOCK_COLS, CHUNK, VECTOR, STREAMING, TARGET, False, STORED_ROUNDING, ROUNDS,
        HEAD_STRIDE=HEAD_STRIDE,
    )  # fmt: skip
    KIND: tl.constexpr = mamba3_token.kind_of(
        H, RANK, ANGLES, PAIRING, TRAP_LOGIT, STORES_KV, z_ptr is not None, Wo_ptr is not None,
        data_ptr.dtype.element_ty, x_ptr.dtype.element_ty, k_ptr.dtype.element_ty, TARGET, FORM,
    )  # fmt: skip
    column = tl.arange(0, ROOM)
    r = column % max(1, ROOM // 2)
    exists = (column < RANK if ONE_TOKEN else r < RANK, column < RANK)

    x_at, z_at, out = (x_ptr, x_b, x_t, x_h), (z_ptr, z_b, z_t, z_h), (out_ptr, out_b, out_t, out_h)
    A_at, dt_at, trap_at = (A_ptr, A_b, A_t, A_h), (dt_ptr, dt_b, dt_t, dt_h), (trap_ptr, trap_b, trap_t, trap_h)
    B_at, C_at, angle_at = (B_ptr, B_b, B_t, B_g), (C_ptr, C_b, C_t, C_g), (angle_ptr, angle_b, angle_t, angle_h)
    inputs = (A_at, dt_at, trap_at, B_at, B_r, C_at, C_r, angle_at, bias_B_ptr, bias_C_ptr)
    pool, write = (data_ptr, scale_ptr, slot_stride, scale_stride), (write_ptr, write_stride)
    weight_ptrs, v_at, carried = (Wx_ptr, Wz_ptr, Wo_ptr), (v_ptr, v_stride), (k_ptr, k_stride, theta_ptr, theta_stride)
    read, slots = (read_ptr, read_stride, read_width, accepted_ptr), (num_slots, null, fault_ptr)
    first, count = token_range(cu_seqlens_ptr, b, tokens, ONE_TOKEN)
    if AHEAD > 0:
        later_slot, later_h, comes = read_ahead((read_ptr, read_stride), AHEAD, H)
    slot, live, seed = read_slot(read, b, slots, seed_ptr, ROUNDING != "nearest", SHARED_SEED, AT_LEAST_ONE)
    drawing = (seed, count - 1, stream)
    if TILES == 1:
        tile = tiles.tile_at(h, 0, FORM)
        stored = load_tile(pool, slot, live, tile, drawing, FORM)
    if AHEAD > 0:
        comes = comes & (later_slot >= 0) & (later_slot < num_slots)
        mamba3_token.prefetch_slot(data_ptr, slot_stride, v_at, carried, later_slot, comes, later_h, KIND)
    kept_entries = k_ptr + slot * k_stride + (r * H + h) * COLS
    before = mamba3_token.load_rank_columns(kept_entries, tl.where(live, r < RANK, False), KIND.IN_HALVES, FORM)
    theta = 0.0
    if PAIRING != "none":
        theta = mamba3_token.load_angles(theta_ptr + slot * theta_stride + h * ANGLES, live, KIND)
    if TILES == 1:
        offs_d = tl.arange(0, BLOCK_ROWS)
        v = tiles.load_rows(v_ptr + slot * v_stride + h * ROWS, offs_d, offs_d < ROWS, live)
        tl.debug_barrier()  # else a compiler puts what waits for the weights in front of the state's loads
        weights = load_weights(weight_ptrs, offs_d, r, h, KIND)
        if ONE_TOKEN:
            x, z = load_row_inputs(x_at, z_at, b, first, h, offs_d, KIND)
    D = 0.0 if D_ptr is None else tl.load(D_ptr + h).to(tl.float32)
    if ONE_TOKEN:
        token = mamba3_token.load_token(inputs, b, first, h, g, r, exists, KIND)

    goes = live if ONE_TOKEN else live & (count > 0)
    to = write_slot(write, b, slot, goes, slots) if STORES == "last" else slot
    if ONE_TOKEN:
        factors, theta, now, C = mamba3_token.prepare_token(token, theta, KIND)
        vectors = mamba3_token.vectors_of(now, before, C, KIND)
        if STORES == "last":
            tl.debug_barrier()  # all warps have k and the angles of the token before
            mamba3_token.store_carried(carried, to, to >= 0, h, now, theta, r, KIND)

    for i in tl.range(TILES, num_stages=STAGES):
        if TILES > 1:
            offs_d = i * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
            tile = tiles.tile_at(h, i * BLOCK_ROWS, FORM)
            stored = load_tile(pool, slot, live, tile, drawing, FORM)
            v = tiles.load_rows(v_ptr + slot * v_stride + h * ROWS, offs_d, offs_d < ROWS, live)
            weights = load_weights(weight_ptrs, offs_d, r, h, KIND)
            if ONE_TOKEN:
                x, z = load_row_inputs(x_at, z_at, b, first, h, offs_d, KIND)
        s = tile_of(stored, live, WARPS, PADDING, KIND)
        if ONE_TOKEN:
            s = step_tile(
                s, v, x, z, factors, vectors, weights, D, out, out_r, b, first, h, offs_d, r, live, PADDING, KIND
            )
            v = x
        else:
            every = (pool, carried, v_at, write, slot, slots, longest, tile, drawing, i == TILES - 1)
            v, s, tile_theta, tile_before = step_tokens(
                v, s, theta, before, weights, D, inputs, x_at, z_at, out, out_r, b, first, count, h, g, offs_d, r,
                exists, live, every, PADDING, STORES, KIND,
            )  # fmt: skip
            if STORES == "last":
                ends = (to >= 0) & (i == TILES - 1)
                tl.debug_barrier()
                mamba3_token.store_carried(carried, to, ends, h, tile_before, tile_theta, r, KIND)
        if STORES == "last":
            store_tile(pool, to, tile, s, stored[2], KIND)
            if TILES > 1:
                tl.debug_barrier()  # all warps have v of the token before
            store_v(v_at, to, h, offs_d, v, KIND)

    if cu_seqlens_ptr is not None:
        zero_unused_ranks(out, out_r, cu_seqlens_ptr, b, h, tokens, KIND)
