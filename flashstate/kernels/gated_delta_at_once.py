"""gated_delta_step on the GPU for several tokens at once: one program per (batch row, value head, block of V rows).

The recurrence is carried out on the products of the state with every k and q, which tensor cores make; the state itself
is read once, and stored once after the last token.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from flashstate.kernels.addressing import this_program, token_entry, zero_unused
from flashstate.kernels.functions import sigmoid
from flashstate.kernels.gated_delta import ARGUMENTS, EPSILON, decay_of
from flashstate.kernels.slots import resolve_read, token_range
from flashstate.kernels.state_io import from_code, load_codes, load_scale, load_seed, random_bits, tile_at
from flashstate.kernels.stores import store_last
from flashstate.kernels.tensor_cores import (
    add_products,
    as_in_memory,
    as_operand,
    dot_terms,
    left_and_right,
    terms_of,
    transposed,
    upper_and_lower,
)


@triton.jit
def load_keys_and_queries(
    k_at, q_at, b, first, count, g, TOKENS: tl.constexpr, ALIGNED: tl.constexpr, COLS: tl.constexpr,
    BLOCK_COLS: tl.constexpr, CHUNK: tl.constexpr, PER_COLUMNS: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """k of every token above q of every token, as operands of tensor cores, in chunks as a tile has them: terms of
    (2 * TOKENS, CHUNK) each; zero in columns and tokens that do not exist."""
    rows = tl.arange(0, 2 * TOKENS)
    t = rows % TOKENS
    dtype: tl.constexpr = k_at[0].dtype.element_ty
    entries = tl.where(rows < TOKENS, token_entry(k_at, b, first + t, g, 1), token_entry(q_at, b, first + t, g, 1))
    if ALIGNED:  # no more than threads have side by side, so that it is the layout of the tile
        entries = tl.multiple_of(entries, min(16, PER_COLUMNS * dtype.primitive_bitwidth // 8))
    cols = tl.arange(0, CHUNK)
    chunks = ()
    for i in tl.static_range(BLOCK_COLS // CHUNK):
        mask = (t < count)[:, None] & (i * CHUNK + cols < COLS)[None, :]
        values = tl.load(entries[:, None] + i * CHUNK + cols[None, :], mask=mask, other=0.0)
        values = as_operand(values, PER_COLUMNS)
        if dtype == tl.bfloat16 and TARGET != "interpreter":
            chunks = chunks + ((values,),)
        else:
            chunks = chunks + (terms_of(values.to(tl.float32), 2, TARGET),)
    return chunks


@triton.jit
def terms_of_code(code, dtype: tl.constexpr, TARGET: tl.constexpr):
    """What is stored, as operands of tensor cores: one where it has no more bits than bfloat16 has, else two."""
    if dtype == tl.bfloat16 and TARGET != "interpreter":
        return (code.to(tl.bfloat16, bitcast=True),)
    else:
        one: tl.constexpr = dtype == tl.bfloat16 or dtype.primitive_bitwidth == 8
        return terms_of(from_code(code, dtype, TARGET), 1 if one else 2, TARGET)


@triton.jit
def products(codes, kq, ROWS: tl.constexpr, dtype: tl.constexpr, TARGET: tl.constexpr):
    """The products of the state with all k and q, (ROWS, 2 * TOKENS), and of these with each other."""
    tokens: tl.constexpr = kq[0][0].shape[0]
    with_state = tl.zeros([ROWS, tokens], tl.float32)
    with_each_other = tl.zeros([tokens, tokens], tl.float32)
    for i in tl.static_range(len(codes)):
        flipped = transposed(kq[i])
        with_state = dot_terms(terms_of_code(codes[i], dtype, TARGET), flipped, with_state)
        with_each_other = dot_terms(kq[i], flipped, with_each_other)
    return with_state, with_each_other


@triton.jit
def factors(with_each_other, q_scale, TOKENS: tl.constexpr, QK_L2NORM: tl.constexpr):
    """What k and q are to be multiplied with, (2 * TOKENS,)."""
    rows = tl.arange(0, 2 * TOKENS)
    scale = tl.where(rows < TOKENS, 1.0, q_scale)
    if QK_L2NORM:
        squares = tl.sum(tl.where(rows[:, None] == rows[None, :], with_each_other, 0.0), 0)
        scale *= tl.rsqrt(squares + EPSILON)
    return scale


@triton.jit
def load_tokens(tensor, b, first, t, h, exists):
    """A value of head h for each of these tokens."""
    return tl.load(token_entry(tensor, b, first + t, h, 1), mask=exists, other=0.0).to(tl.float32)


@triton.jit
def row_entries(tensor, b, first, t, h, offs_d, ALIGNED: tl.constexpr):
    """Pointers to values for rows of head h, for each of these tokens: (rows, tokens)."""
    return token_entry(tensor, b, first + t, h, 16 if ALIGNED else 1)[None, :] + offs_d[:, None]


@triton.jit
def entry_of(vector, chosen):
    return tl.sum(tl.where(chosen, vector, 0.0), 0)


@triton.jit
def row_of(matrix, chosen):
    return tl.sum(tl.where(chosen[:, None], matrix, 0.0), 0)


@triton.jit
def column_of(matrix, chosen):
    return tl.sum(tl.where(chosen[None, :], matrix, 0.0), 1)


@triton.jit(do_not_specialize=ARGUMENTS)
def gated_delta_at_once_kernel(
    # The arguments of gated_delta_step_kernel, of which it does not need all.
    data_ptr, q_ptr, k_ptr, v_ptr, a_ptr, beta_ptr, out_ptr, A_log_ptr, dt_bias_ptr, scale_ptr, seed_ptr,
    read_ptr, accepted_ptr, write_ptr, parents_ptr, cu_seqlens_ptr, snapshot_rows_ptr, copy_ptr, copy_scale_ptr,
    stream, fault_ptr, slot_stride, scale_stride, copy_b, copy_scale_b, copy_t, copy_scale_t, num_copies,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, a_b, a_t, a_h, beta_b, beta_t, beta_h, out_b, out_t, out_h,
    read_stride, read_width, write_stride, parents_stride, tokens, longest, num_slots, null, q_scale,
    H: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    VECTOR: tl.constexpr, TRANSPOSED: tl.constexpr, ALIGNED: tl.constexpr, QK_L2NORM: tl.constexpr,
    STORES: tl.constexpr, PADDING: tl.constexpr, EARLY: tl.constexpr,
    ROUNDING: tl.constexpr, ROUNDS: tl.constexpr, TARGET: tl.constexpr,
    TOKENS: tl.constexpr,  # there is room for: 8 or 16
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    b, h, first_row = this_program(H, ROWS, BLOCK_ROWS)
    g = h // HEADS_PER_GROUP
    offs_d = first_row + tl.arange(0, BLOCK_ROWS)
    mask_d = offs_d < ROWS
    tile = tile_at(h, first_row, ROWS, COLS, BLOCK_ROWS, BLOCK_COLS, CHUNK, TRANSPOSED)
    PER_COLUMNS: tl.constexpr = 1 if TRANSPOSED else VECTOR  # neighbouring columns that a thread has

    slot = resolve_read((read_ptr, read_stride, read_width, accepted_ptr), b, num_slots, null, fault_ptr)
    live = slot >= 0
    first, length = token_range(cu_seqlens_ptr, b, tokens, False)
    count = tl.minimum(length, longest)  # there is no room for more, whatever a packed row has
    factor = load_scale(scale_ptr, slot * scale_stride, live, tile)
    codes = load_codes(data_ptr, slot * slot_stride, live, tile, COLS, VECTOR, "streaming")
    if STORES == "last":  # drawn while the state is on its way
        seed = load_seed(seed_ptr, slot, live, ROUNDING != "nearest")
        random = random_bits(seed, tile, count - 1, stream, COLS, PER_COLUMNS, ROUNDING, ROUNDS)
    rate, dt_bias = None, 0.0
    if A_log_ptr is not None:
        rate = tl.exp(tl.load(A_log_ptr + h).to(tl.float32))
    if dt_bias_ptr is not None:
        dt_bias = tl.load(dt_bias_ptr + h).to(tl.float32)

    if EARLY:  # what tokens bring may come from the kernel in front; the state is on its way
        gdc_wait()
    t = tl.arange(0, TOKENS)
    exists = t < count
    alpha = decay_of(load_tokens((a_ptr, a_b, a_t, a_h), b, first, t, h, exists), rate, dt_bias)
    beta = load_tokens((beta_ptr, beta_b, beta_t, beta_h), b, first, t, h, exists)
    if A_log_ptr is not None:
        beta = sigmoid(beta)
    mask = mask_d[:, None] & exists[None, :]
    v_ptrs = row_entries((v_ptr, v_b, v_t, v_h), b, first, t, h, offs_d, ALIGNED)
    v = tl.load(v_ptrs, mask=mask, other=0.0).to(tl.float32)  # (BLOCK_ROWS, TOKENS)
    kq = load_keys_and_queries(
        (k_ptr, k_b, k_t, k_h), (q_ptr, q_b, q_t, q_h), b, first, count, g,
        TOKENS, ALIGNED, COLS, BLOCK_COLS, CHUNK, PER_COLUMNS, TARGET,
    )  # fmt: skip

    s = ()
    for i in tl.static_range(len(codes)):
        code = codes[i]
        if PADDING == "fresh":
            code = tl.where(live, code, 0).to(code.dtype)
        s = s + (as_operand(code, PER_COLUMNS),)
    if PADDING == "fresh":
        factor = tl.where(live, factor, 1.0)
    with_state, with_each_other = products(s, kq, BLOCK_ROWS, data_ptr.dtype.element_ty, TARGET)
    scale = factors(with_each_other, q_scale, TOKENS, QK_L2NORM)
    sk, sq = left_and_right(with_state * factor * scale[None, :])  # (BLOCK_ROWS, TOKENS)
    of_k, _ = upper_and_lower(with_each_other * scale[:, None] * scale[None, :])
    kk, kq_products = left_and_right(of_k)  # (TOKENS, TOKENS)

    w = tl.zeros([BLOCK_ROWS, TOKENS], tl.float32)  # u, decayed up to the last token
    o = tl.zeros([BLOCK_ROWS, TOKENS], tl.float32)
    total = 1.0
    for i in range(0, count):
        now = t == i
        decay = entry_of(alpha, now)
        sk, sq, w = decay * sk, decay * sq, decay * w
        u = (entry_of(beta, now) * column_of(v - sk, now))[:, None]
        sk = tl.fma(u, row_of(kk, now)[None, :], sk)
        sq = tl.fma(u, row_of(kq_products, now)[None, :], sq)
        o = tl.where(now[None, :], sq, o)
        w = tl.where(now[None, :], u, w)
        total *= decay

    out = (out_ptr, out_b, out_t, out_h)
    if PADDING != "fresh":
        o = tl.where(live, o, 0.0)
    shown = tl.where(live, mask, False) if PADDING == "keep" else mask
    out_ptrs = row_entries(out, b, first, t, h, offs_d, ALIGNED)
    tl.store(out_ptrs, o.to(out_ptr.dtype.element_ty), mask=shown)
    if STORES == "last":
        k_scale, _ = tl.split(tl.permute(tl.reshape(scale, (2, TOKENS)), (1, 0)))
        weights = terms_of(w * k_scale[None, :], 2, TARGET)
        after = ()
        for i in tl.static_range(len(s)):
            k = ()
            for j in tl.static_range(len(kq[i])):
                upper, _ = upper_and_lower(kq[i][j])
                k = k + (upper,)
            decayed = from_code(s[i], data_ptr.dtype.element_ty, TARGET) * (total * factor)
            after = after + (as_in_memory(add_products(decayed, weights, k), PER_COLUMNS),)
        pool = (data_ptr, scale_ptr, slot_stride, scale_stride, num_slots)
        goes = live & (count > 0)
        store_last(
            pool, (write_ptr, write_stride), b, slot, goes, null, fault_ptr, tile, after, random,
            ROUNDING, VECTOR, TARGET, "streaming",
        )  # fmt: skip
    if cu_seqlens_ptr is not None:
        for i in range(count, length):
            zero = tl.zeros([BLOCK_ROWS], out_ptr.dtype.element_ty)
            past = token_entry(out, b, first + i, h, 1) + offs_d
            tl.store(past, zero, mask=tl.where(live, mask_d, False) if PADDING == "keep" else mask_d)
        batch = tl.num_programs(0) // (H * ((ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS))
        zero_unused(out, cu_seqlens_ptr, b, h, offs_d, mask_d, tokens, batch)
