"""gated_delta_step on the GPU for several tokens at once: a program per (batch row, value head, some tiles of V rows).

What a row of the state gives, and what it becomes, is linear in itself and in its values v. So a program carries out
the recurrence once, on unit vectors; tensor cores make the products of every row with all k and q, and apply the matrix
that the recurrence gave. The state is read once, and stored once after the last token. A single tile is loaded to
registers, before anything of the tokens. Of several, the next are on their way to shared memory, where accesses are
wide enough for that, while one is stepped; if they are to be stored, and few, they come to the L2 cache while the
recurrence is carried out.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from flashstate.kernels import state_io, tensor_cores
from flashstate.kernels.addressing import batch_size, this_program, token_entry, zero_past, zero_unused
from flashstate.kernels.functions import column_of, entry_of, row_of, sigmoid
from flashstate.kernels.gated_delta import EPSILON, decay_of, load_rate
from flashstate.kernels.slots import read_slot, token_range, write_slot
from flashstate.kernels.state_io import STREAMING
from flashstate.kernels.tiles import STAGES, form_of, load_or_zero, tile_at
from flashstate.launch.kernel import kernel

MOST_PREFETCHED = tl.constexpr(2048)  # bytes of a program's states per token there is room for; timed with 8 and 16


@triton.jit
def load_keys_and_queries(k_at, q_at, b, first, count, g, TOKENS: tl.constexpr, FORM: tl.constexpr):
    """k of every token above q of every token, as operands of tensor cores, in chunks as a tile has them: terms of
    (2 * TOKENS, CHUNK) each; zero in columns and tokens that do not exist."""
    rows = tl.arange(0, 2 * TOKENS)
    t = rows % TOKENS
    dtype: tl.constexpr = k_at[0].dtype.element_ty
    entries = tl.where(rows < TOKENS, token_entry(k_at, b, first + t, g, 1), token_entry(q_at, b, first + t, g, 1))
    if FORM.ALIGNMENT > 1:  # no more than threads have side by side, so that it is the layout of the tile
        entries = tl.multiple_of(entries, min(16, FORM.PER_COLUMNS * dtype.primitive_bitwidth // 8))
    cols = tl.arange(0, FORM.CHUNK)
    chunks = ()
    for i in tl.static_range(FORM.BLOCK_COLS // FORM.CHUNK):
        mask = (t < count)[:, None] & (i * FORM.CHUNK + cols < FORM.COLS)[None, :]
        values = tl.load(entries[:, None] + i * FORM.CHUNK + cols[None, :], mask=mask, other=0.0)
        values = tensor_cores.as_operand(values, FORM.PER_COLUMNS)
        chunks = chunks + (tensor_cores.terms_of(values, 2, FORM.TARGET),)
    return chunks


@triton.jit
def keys_of(kq):
    """The upper halves of what load_keys_and_queries gives: k of every token."""
    chunks = ()
    for i in tl.static_range(len(kq)):
        terms = ()
        for j in tl.static_range(len(kq[i])):
            upper, _ = tensor_cores.upper_and_lower(kq[i][j])
            terms = terms + (upper,)
        chunks = chunks + (terms,)
    return chunks


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
def row_entries(tensor, b, first, t, h, offs_d, FORM: tl.constexpr):
    """Pointers to values for rows of head h, for each of these tokens: (rows, tokens)."""
    return token_entry(tensor, b, first + t, h, FORM.ALIGNMENT)[None, :] + offs_d[:, None]


@triton.jit
def load_values(tensor, b, first, t, h, offs_d, exists, FORM: tl.constexpr):
    """The values of these rows for each of these tokens, (rows, tokens)."""
    mask = (offs_d < FORM.ROWS)[:, None] & exists[None, :]
    return tl.load(row_entries(tensor, b, first, t, h, offs_d, FORM), mask=mask, other=0.0)


@triton.jit
def unit_steps(alpha, beta, with_k, scale, count, TOKENS: tl.constexpr):
    """The recurrence over `count` tokens, on one row of state for every token: zero, with 1 for the v of that token and
    0 for others. `with_k` (TOKENS, 2 * TOKENS): products of every k with every k and q; `scale` (2 * TOKENS,): what
    normalises these; `alpha` and `beta`, (2 * TOKENS,) each: of every token, twice.

    Gives, for each of these rows, the weights of every k in the last state, beside its outputs, (TOKENS, 2 * TOKENS);
    what the products of a state with every k and q, before the first token, are to be multiplied with when their token
    has come, (2 * TOKENS,); and with what the state itself, after the last. Weights, and products with a state, are of
    k and q as they were loaded."""
    t, column = tl.arange(0, TOKENS), tl.arange(0, 2 * TOKENS)
    of_k, column_t = column < TOKENS, column % TOKENS
    v = tl.where(t[:, None] == column[None, :], beta[None, :], 0.0)
    last = tl.where(of_k, column_t - 1, column_t)  # the last token that adds to a column
    added = tl.where(t[:, None] <= last[None, :], with_k * tl.where(of_k, -beta, 1.0)[None, :], 0.0)
    # On the left weights u of tokens that have come, decayed up to now, and of others -beta times the product with
    # their k; on the right products with q, which stay as they are when their token has come.
    rows = tl.zeros([TOKENS, 2 * TOKENS], tl.float32)
    gamma = tl.zeros([2 * TOKENS], tl.float32)
    total = 1.0
    next_decay = entry_of(alpha, 0)
    for i in range(0, tl.maximum(count, 1)):  # without a branch around it, behind which loads would be put off
        decay, next_decay = next_decay, entry_of(alpha, i + 1)
        total *= decay
        gamma = tl.where(column_t == i, total, gamma)
        rows *= tl.where(of_k | (column_t >= i), decay, 1.0)[None, :]
        u = column_of(rows + v, i)[:, None]
        rows = tl.fma(u, row_of(added, i)[None, :], tl.where((column == i)[None, :], u, rows))
    return rows * tl.where(of_k, scale, 1.0)[None, :], gamma * scale, total


@triton.jit
def multiply_tile(stored, live, kq, dtype: tl.constexpr, PADDING: tl.constexpr, FORM: tl.constexpr):
    """What load_tile gave, its codes as operands, beside its products with all k and q, (rows, 2 * tokens)."""
    factor, codes, random = stored
    operands = ()
    with_state = tl.zeros([codes[0].shape[0], kq[0][0].shape[0]], tl.float32)
    for i in tl.static_range(len(codes)):
        code = codes[i]
        if PADDING == "fresh":
            code = tl.where(live, code, 0).to(code.dtype)
        code = tensor_cores.as_operand(code, FORM.PER_COLUMNS)
        operands = operands + (code,)
        terms = state_io.terms_of_code(code, dtype, 2, FORM.TARGET)
        with_state = tensor_cores.dot_terms(terms, with_state, tensor_cores.transposed(kq[i]))
    if PADDING == "fresh":
        factor = tl.where(live, factor, 1.0)
    return operands, factor, random, with_state * factor


@triton.jit
def step_all_tokens(
    multiplied, tile, v, exists, live, kq, steps, out_ptrs, pool, to,
    STORES: tl.constexpr, PADDING: tl.constexpr, TERMS: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Step what multiply_tile gave by what unit_steps gave: store its outputs, and its rows in slot `to` unless -1."""
    operands, factor, random, with_state = multiplied
    matrix, gamma, total = steps
    sk, sq = tensor_cores.left_and_right(with_state * gamma[None, :])  # (rows, tokens)
    nothing = tl.zeros([v.shape[0], 2 * v.shape[1]], tl.float32)
    given = tensor_cores.terms_of(v.to(tl.float32) - sk, TERMS, FORM.TARGET)
    matrix = tensor_cores.terms_of(matrix, TERMS, FORM.TARGET)
    w, o = tensor_cores.left_and_right(tensor_cores.add_products(given, nothing, matrix))
    o += sq
    if PADDING != "fresh":
        o = tl.where(live, o, 0.0)
    shown = tile.mask_rows[:, None] & exists[None, :]
    if PADDING == "keep":
        shown = tl.where(live, shown, False)
    tl.store(out_ptrs, o.to(out_ptrs.dtype.element_ty), mask=shown)
    if STORES == "last":
        k, weights = keys_of(kq), tensor_cores.terms_of(w, 2, FORM.TARGET)
        after = ()
        for i in tl.static_range(len(operands)):
            decayed = state_io.from_code(operands[i], pool[0].dtype.element_ty, FORM.TARGET) * (total * factor)
            chunk = tensor_cores.add_products(weights, decayed, k[i])
            after = after + (tensor_cores.as_in_memory(chunk, FORM.PER_COLUMNS),)
        state_io.store_slot(pool, to, tile, after, random, FORM)


@kernel
def gated_delta_at_once_kernel(
    # The arguments of gated_delta_step_kernel in its order, of which it does not need all: launches share a list.
    data_ptr, q_ptr, k_ptr, v_ptr, a_ptr, beta_ptr, out_ptr, A_log_ptr, dt_bias_ptr, scale_ptr, seed_ptr,
    read_ptr, accepted_ptr, write_ptr, parents_ptr, cu_seqlens_ptr, snapshot_rows_ptr, copy_ptr, copy_scale_ptr,
    stream, fault_ptr, slot_stride, scale_stride, copy_b, copy_scale_b, copy_t, copy_scale_t, num_copies,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, a_b, a_t, a_h, beta_b, beta_t, beta_h, out_b, out_t, out_h,
    read_stride, read_width, write_stride, parents_stride, tokens, longest, num_slots, null, q_scale,
    H: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, VECTOR: tl.constexpr, TRANSPOSED: tl.constexpr, ALIGNED: tl.constexpr,
    QK_L2NORM: tl.constexpr, B_LOGIT: tl.constexpr,
    STORES: tl.constexpr, PADDING: tl.constexpr, AT_LEAST_ONE: tl.constexpr, EARLY: tl.constexpr,
    ROUNDING: tl.constexpr, ROUNDS: tl.constexpr, SHARED_SEED: tl.constexpr, TARGET: tl.constexpr,
    TOKENS: tl.constexpr,  # there is room for: 8 or 16
    TILES: tl.constexpr,  # of a program
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNK: tl.constexpr,  # of a tile
):  # fmt: skip
    b, h, first_row = this_program(H, ROWS, TILES * BLOCK_ROWS)
    g = h // HEADS_PER_GROUP
    STORED_ROUNDING: tl.constexpr = ROUNDING if STORES == "last" else "nearest"
    FORM: tl.constexpr = form_of(
        ROWS, COLS, BLOCK_ROWS, BLOCK_COLS, CHUNK, VECTOR, STREAMING, TARGET, TRANSPOSED, STORED_ROUNDING, ROUNDS,
        ALIGNED, HEAD_STRIDE=HEAD_STRIDE,
    )  # fmt: skip

    read, slots = (read_ptr, read_stride, read_width, accepted_ptr), (num_slots, null, fault_ptr)
    pool = (data_ptr, scale_ptr, slot_stride, scale_stride)
    first, length = token_range(cu_seqlens_ptr, b, tokens, False)
    count = tl.minimum(length, longest)  # there is no room for more, whatever a packed row has
    dtype: tl.constexpr = data_ptr.dtype.element_ty
    SEEDED: tl.constexpr = STORED_ROUNDING != "nearest"
    if TILES == 1:  # the state takes longest
        slot, live, seed = read_slot(read, b, slots, seed_ptr, SEEDED, SHARED_SEED, AT_LEAST_ONE)
        drawing = (seed, count - 1, stream)
        tile = tile_at(h, first_row, FORM)
        stored = state_io.load_tile(pool, slot, live, tile, drawing, FORM)
    rate = None if A_log_ptr is None else load_rate(A_log_ptr, h)  # None: a is the log-decay itself
    dt_bias = 0.0 if dt_bias_ptr is None else tl.load(dt_bias_ptr + h).to(tl.float32)

    if EARLY:  # what tokens bring may come from the kernel in front; a single tile is on its way
        gdc_wait()
    t, twice = tl.arange(0, TOKENS), tl.arange(0, 2 * TOKENS) % TOKENS
    exists = t < count
    a = load_or_zero(token_entry((a_ptr, a_b, a_t, a_h), b, first + twice, h, 1), mask=twice < count)
    beta = load_or_zero(token_entry((beta_ptr, beta_b, beta_t, beta_h), b, first + twice, h, 1), mask=twice < count)
    v_at, out = (v_ptr, v_b, v_t, v_h), (out_ptr, out_b, out_t, out_h)
    if TILES == 1:
        v = load_values(v_at, b, first, t, h, first_row + tl.arange(0, BLOCK_ROWS), exists, FORM)
    k_at, q_at = (k_ptr, k_b, k_t, k_h), (q_ptr, q_b, q_t, q_h)
    kq = load_keys_and_queries(k_at, q_at, b, first, count, g, TOKENS, FORM)
    if TILES > 1:  # the recurrence comes first, and what it needs is on its way
        slot, live, seed = read_slot(read, b, slots, seed_ptr, SEEDED, SHARED_SEED, AT_LEAST_ONE)
        drawing = (seed, count - 1, stream)
        few: tl.constexpr = state_io.state_bytes(dtype, TILES * BLOCK_ROWS * COLS) <= MOST_PREFETCHED * TOKENS
        if STORES == "last" and not TRANSPOSED and few:
            state_io.prefetch_rows(data_ptr, slot * slot_stride, live, h, first_row, TILES * BLOCK_ROWS, FORM)
    alpha = decay_of(a, rate, dt_bias)
    if B_LOGIT:
        beta = sigmoid(beta)
    if TILES == 1:
        multiplied = multiply_tile(stored, live, kq, dtype, PADDING, FORM)
    with_each_other = tensor_cores.products(kq, kq)
    scale = factors(with_each_other, q_scale, TOKENS, QK_L2NORM)
    with_k, _ = tensor_cores.upper_and_lower(with_each_other * scale[:, None] * scale[None, :])
    steps = unit_steps(alpha, beta, with_k, scale, count, TOKENS)
    TERMS: tl.constexpr = state_io.update_terms(dtype, v_ptr.dtype.element_ty)

    to = write_slot((write_ptr, write_stride), b, slot, live & (count > 0), slots) if STORES == "last" else slot
    for i in tl.range(TILES, num_stages=STAGES):
        tile_row = first_row + i * BLOCK_ROWS
        offs_d = tile_row + tl.arange(0, BLOCK_ROWS)
        if TILES > 1:
            tile = tile_at(h, tile_row, FORM)
            stored = state_io.load_tile(pool, slot, live, tile, drawing, FORM)
            v = load_values(v_at, b, first, t, h, offs_d, exists, FORM)
            multiplied = multiply_tile(stored, live, kq, dtype, PADDING, FORM)
        out_ptrs = row_entries(out, b, first, t, h, offs_d, FORM)
        step_all_tokens(multiplied, tile, v, exists, live, kq, steps, out_ptrs, pool, to, STORES, PADDING, TERMS, FORM)
    if cu_seqlens_ptr is not None:
        offs_d = first_row + tl.arange(0, TILES * BLOCK_ROWS)
        mask_d = offs_d < ROWS
        zero_past(out, b, first, count, length, h, offs_d, mask_d, live, PADDING)
        zero_unused(out, cu_seqlens_ptr, b, h, offs_d, mask_d, tokens, batch_size(H, ROWS, TILES * BLOCK_ROWS))
