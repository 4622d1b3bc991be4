"""gated_delta_replay on the GPU: a program per (batch row, key head, some tiles of V rows), or one that walks on.

A row has a window of tokens behind its state: live rows of its ring and then the new tokens, or, where it folds, the
new tokens alone. k and q of all new tokens are columns of one operand, so tensor cores make the products of a tile with
all of them at once; those of the window's keys with them say how much a row of the ring counts for each. Then every
token is corrected by those before it, one after the other, because each u is rounded before anything uses it. Where a
row folds, tensor cores add the products of the ring to the tile first, which is rounded and stored; what was stored is
what the tokens see. A program is one warp, as in mamba2_replay, whose ways of walking along a plan it shares.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashstate.kernels import delta_window, replay_rows, replay_window, state_io
from flashstate.kernels.functions import column_of, row_of, sigmoid
from flashstate.kernels.gated_delta import for_chunks, load_rate, log_decay
from flashstate.kernels.slots import load_seed
from flashstate.kernels.state_io import BEFORE_THE_FIRST_TOKEN, STREAMING
from flashstate.kernels.tensor_cores import dot_terms, products, terms_of, transposed
from flashstate.kernels.tiles import Constants, Form, form_of, tile_at, widened
from flashstate.launch.kernel import kernel

MOST_UNROLLED = tl.constexpr(8)  # tokens whose corrections are unrolled


@dataclass(frozen=True)
class DeltaReplay(Constants):
    """The constants that functions of gated_delta_replay share, as its kernel has them."""

    HEADS_PER_GROUP: int
    ROWS_DO: str
    UPDATE: bool
    PADDING: str
    WIDE: bool
    PER_CHANNEL: bool
    BIAS_PER_CHANNEL: bool
    QK_L2NORM: bool
    B_LOGIT: bool
    TOKENS: int
    HALF: int  # columns that an operand has for k, and again for q
    ROOM: int
    SHARED_SEED: bool
    RING_K_H: int
    RING_U_H: int
    RING_DECAY_H: int
    FORM: Form


@triton.constexpr_function
def delta_replay_of(*constants):
    """Give the constants of a replay their names."""
    return DeltaReplay(*constants)


@triton.jit
def columns_of(count, KIND: tl.constexpr):
    """Of every column of the operand of k and q: its token, whether it is of k, and whether there is such a token."""
    column = tl.arange(0, 2 * KIND.HALF)
    token = column % KIND.HALF
    return token, column < KIND.HALF, token < count


@triton.jit
def load_keys_and_queries(k_at, q_at, b, first, count, g, KIND: tl.constexpr):
    """k of every token above q of every token, as they are, in chunks as a tile has them: (2 * HALF, CHUNK) each."""
    token, of_k, exists = columns_of(count, KIND)
    k_rows = replay_rows.entries(replay_rows.token_base(k_at, b, first, g), token, KIND)
    q_rows = replay_rows.entries(replay_rows.token_base(q_at, b, first, g), token, KIND)
    return replay_window.load_token_chunks(tl.where(of_k, k_rows, q_rows), exists, KIND.FORM)


@triton.jit
def signed(weights, KIND: tl.constexpr):
    """Weights (rows, 2 * HALF) of what is taken from v, in the columns of k, and of what is added to an output, in
    those of q."""
    column = tl.arange(0, 2 * KIND.HALF)
    return tl.where((column < KIND.HALF)[None, :], -weights, weights)


@triton.jit
def weights_of_head(
    together, lengths, window, decays, base, count, rate, bias, SUM_TERMS: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """With a decay per head: its logarithm of every token of the window; how much each of them counts for every column,
    (window, 2 * HALF); and how much the state, (2 * HALF,). `together`: products of the window's keys with k and q;
    `lengths`: what makes both of length 1; `decays`: logarithms of the ring's rows, and a of new tokens."""
    of_ring, new, _, _, _ = window
    of_window, of_columns = lengths
    ring_g, a = decays
    token, of_k, exists = columns_of(count, KIND)
    logs = tl.where(of_ring[:, None], ring_g, tl.where(new[:, None], log_decay(a, rate, bias), 0.0))
    g, last, j = replay_window.once(logs), base + token, tl.arange(0, KIND.ROOM)
    between, total = replay_window.sums_between(g, last, SUM_TERMS, KIND.FORM.TARGET)
    counts = (j[:, None] < last[None, :]) | ((j[:, None] == last[None, :]) & (of_k == 0)[None, :])
    weights = together * of_window[:, None] * of_columns[None, :] * tl.exp(between)
    return g, tl.where(counts & exists[None, :], weights, 0.0), tl.exp(total) * of_columns


@triton.jit
def decayed_tokens(values, logs, count, SUM_TERMS: tl.constexpr, KIND: tl.constexpr):
    """With a decay per channel: k and q of every token, each as much as is left of what was there before the first;
    `logs`: logarithms of the decays of every token, twice."""
    token, _, _ = columns_of(count, KIND)
    column = tl.arange(0, 2 * KIND.HALF)
    up_to = tl.where((column < KIND.HALF)[None, :] & (token[None, :] <= token[:, None]), 1.0, 0.0)
    decays = ()
    for i in tl.static_range(len(logs)):
        decays = decays + (tl.exp(delta_window.sums_of_rows(up_to, logs[i], SUM_TERMS, KIND.FORM.TARGET)),)
    return delta_window.times(values, decays, KIND.FORM)


@triton.jit
def weights_of_tokens(values, logs, k_at, b, first, g, count, of_columns, SUM_TERMS: tl.constexpr, KIND: tl.constexpr):
    """With a decay per channel: how much each new token counts for every column, (HALF, 2 * HALF)."""
    token, of_k, exists = columns_of(count, KIND)
    column = tl.arange(0, 2 * KIND.HALF)
    weights = tl.zeros([KIND.HALF, 2 * KIND.HALF], tl.float32)
    for n in range(0, count):
        i = count * 0 + n  # a number of the kernel also where the interpreter has one of Python
        between = (column < KIND.HALF)[None, :] & (token[None, :] <= token[:, None]) & (token[None, :] > i)
        rows = replay_rows.entries(replay_rows.token_base(k_at, b, first, g), i + tl.zeros([1], tl.int32), KIND)
        k = replay_window.load_token_chunks(rows, i + tl.zeros([1], tl.int32) < count, KIND.FORM)
        total = tl.zeros([2 * KIND.HALF, KIND.FORM.CHUNK], tl.float32)
        for c in tl.static_range(len(logs)):
            sums = delta_window.sums_of_rows(tl.where(between, 1.0, 0.0), logs[c], SUM_TERMS, KIND.FORM.TARGET)
            key = widened(k[c], KIND.FORM.WIDENING)
            total += widened(values[c], KIND.FORM.WIDENING) * key * tl.exp(sums)
        counts = ((token > i) | ((token == i) & (of_k == 0))) & exists
        of_token = tl.sum(tl.where(column == i, of_columns, 0.0), 0)  # what makes its k of length 1
        row = tl.where(counts, tl.sum(total, 1) * of_columns * of_token, 0.0)
        weights = tl.where((tl.arange(0, KIND.HALF) == i)[:, None], row[None, :], weights)
    return weights


@triton.jit
def load_beta(beta_at, b, first, h, i, count, KIND: tl.constexpr):
    """beta of token i; 0 where there is none."""
    ptr, stride = replay_rows.token_base(beta_at, b, first, h)
    t = count * 0 + i
    beta = tl.load(ptr + t.to(tl.int64) * stride, mask=t < count, other=0.0).to(tl.float32)
    if KIND.B_LOGIT:
        beta = sigmoid(beta)
    return tl.where(t < count, beta, 0.0)


@triton.jit
def correct_token(y, i, beta, weights, count, u_dtype: tl.constexpr, KIND: tl.constexpr):
    """Correct token i of a tile: its column of y, which has v less what tokens before it predict, becomes u; and others
    get their share of that, as a row of weights says."""
    column = tl.arange(0, 2 * KIND.HALF)
    u = delta_window.as_kept(beta * column_of(y, i), u_dtype, KIND.FORM.TARGET)
    u = tl.where(i < count, u, 0.0)[:, None]
    return tl.fma(u, weights[None, :], tl.where((column == i)[None, :], u, y))


@triton.jit
def steps_of(weights, first_row, beta_at, b, first, h, count, KIND: tl.constexpr):
    """beta and the row of weights of every token, for correct_token; where tokens are so many that corrections are not
    unrolled, nothing."""
    steps = ()
    if KIND.TOKENS <= MOST_UNROLLED:
        for i in tl.static_range(KIND.TOKENS):
            beta = load_beta(beta_at, b, first, h, i, count, KIND)
            steps = steps + ((beta, row_of(weights, first_row + i)),)
    return steps


@triton.jit
def corrected(
    y, steps, weights, first_row, beta_at, b, first, h, count, u_dtype: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """All tokens of a tile, one after the other: u in the columns of k, outputs in those of q."""
    if KIND.TOKENS <= MOST_UNROLLED:
        for i in tl.static_range(KIND.TOKENS):
            beta, row = steps[i]
            y = correct_token(y, i, beta, row, count, u_dtype, KIND)
    else:
        for n in range(0, count):
            i = count * 0 + n  # a number of the kernel also where the interpreter has one of Python
            beta = load_beta(beta_at, b, first, h, i, count, KIND)
            y = correct_token(y, i, beta, row_of(weights, first_row + i), count, u_dtype, KIND)
    return y


@triton.jit
def append_rows(ring_rows, rows, appends, FORM: tl.constexpr):
    """Copy rows with a value for every column, of every token, to a ring."""
    cols = tl.arange(0, FORM.BLOCK_COLS)
    INSIDE: tl.constexpr = FORM.COLS == FORM.BLOCK_COLS
    kept = replay_window.load_token_rows(rows, appends, 0, FORM.COLS, FORM.BLOCK_COLS, INSIDE, FORM.ALIGNMENT)
    to = tl.multiple_of(ring_rows[:, None] + cols[None, :], (1, FORM.ALIGNMENT))
    tl.store(to, kept, mask=appends[:, None] & (cols < FORM.COLS)[None, :])


@triton.jit
def replay_delta(
    pool, ring, activations, parameters, seed_ptr, stream, row, g, first_tile, L,
    FOLDS: tl.constexpr, TILES: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """The outputs of some tiles of value heads of key head g for all tokens of a row, which FOLDS its ring first or
    does not. A program has tiles of one head, or all tiles of several."""
    ring_k_ptr, ring_k_stride, ring_u_ptr, ring_u_stride, ring_decay_ptr, ring_decay_stride = ring
    q_at, k_at, v_at, a_at, beta_at, out = activations
    A_log_ptr, dt_bias_ptr, q_scale = parameters
    b, slot, start, live, first, count = row
    known = slot >= 0
    dtype: tl.constexpr = pool[0].dtype.element_ty
    k_dtype: tl.constexpr = k_at[0].dtype.element_ty
    u_dtype: tl.constexpr = ring_u_ptr.dtype.element_ty
    EXACT: tl.constexpr = k_dtype == tl.float32  # products of float32, without tensor cores
    TERMS: tl.constexpr = 0 if EXACT else 2  # of keys: those of bfloat16 are one, unless decays are multiplied in
    STATE_TERMS: tl.constexpr = 0 if EXACT else 3 if dtype == tl.float32 else 2
    SUM_TERMS: tl.constexpr = 0 if EXACT else 3
    RING_TERMS: tl.constexpr = 0 if EXACT else 3 if u_dtype == tl.float32 else 2
    FOLD_TERMS: tl.constexpr = state_io.update_terms(dtype, k_dtype)
    WIDTH: tl.constexpr = state_io.operand_width(dtype, not FOLDS)
    FORM: tl.constexpr = KIND.FORM
    TARGET: tl.constexpr = FORM.TARGET
    ROWS: tl.constexpr = FORM.ROWS
    COLS: tl.constexpr = FORM.COLS
    BLOCK_ROWS: tl.constexpr = FORM.BLOCK_ROWS
    INSIDE: tl.constexpr = ROWS % BLOCK_ROWS == 0
    WHOLE: tl.constexpr = KIND.PADDING != "fresh" and INSIDE and COLS == FORM.BLOCK_COLS
    TILES_OF_HEAD: tl.constexpr = (ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS
    BESIDE: tl.constexpr = replay_window.bytes_beside(u_dtype, FORM)

    # The window: live rows, unless they are folded, and then new tokens.
    j = tl.arange(0, KIND.ROOM)
    ring_row, lives = replay_window.row_in_ring(start + j, L), j < live
    base = live * 0 if FOLDS else live
    of_ring, new, token = j < base, (j >= base) & (j < base + count), j - base
    window = (of_ring, new, lives, ring_row, token)
    appends, to_row = tl.where(known, new, False), replay_window.row_in_ring(start + live + token, L)
    column_token, of_k, exists = columns_of(count, KIND)

    values = load_keys_and_queries(k_at, q_at, b, first, count, g, KIND)
    of_columns = delta_window.length_factors(values, KIND.QK_L2NORM, FORM) * tl.where(of_k, 1.0, q_scale)
    ring_k = ring_k_ptr + slot * ring_k_stride + replay_window.head_in_ring(g, L, COLS, KIND.RING_K_H)
    new_k = replay_rows.token_base(k_at, b, first, g)
    if KIND.UPDATE and first_tile == 0:
        append_rows(ring_k + to_row * COLS, replay_rows.entries(new_k, token, KIND), appends, FORM)
    if FOLDS:
        old_k = replay_window.load_token_chunks(ring_k + ring_row * COLS, lives, FORM)
        of_old = delta_window.length_factors(old_k, KIND.QK_L2NORM, FORM)
        seed = load_seed(seed_ptr, slot, known, FORM.ROUNDING != "nearest" and KIND.UPDATE, KIND.SHARED_SEED)
    if KIND.PER_CHANNEL:
        if not FOLDS:
            window_k = replay_window.load_token_chunks(ring_k + ring_row * COLS, of_ring, FORM)
            of_window = delta_window.length_factors(window_k, KIND.QK_L2NORM, FORM)
    else:
        window_rows = replay_rows.either_row(of_ring, ring_k, ring_row * COLS, new_k, token, KIND)
        window_k = replay_window.load_token_chunks(window_rows, of_ring | new, FORM)
        of_window = delta_window.length_factors(window_k, KIND.QK_L2NORM, FORM)
        together = products(
            replay_window.token_operands(window_k, TERMS, 2, FORM), replay_window.token_operands(values, TERMS, 2, FORM)
        )
        kq = replay_window.token_operands(values, TERMS, WIDTH, FORM)
        if FOLDS:
            old_keys = replay_window.token_operands(old_k, FOLD_TERMS, 2, FORM)

    for n in tl.range((TILES + TILES_OF_HEAD - 1) // TILES_OF_HEAD, num_stages=1):
        h, head_row = replay_rows.place_of(g, first_tile + n * TILES_OF_HEAD, KIND)
        rate = None if A_log_ptr is None else load_rate(A_log_ptr, h)  # None: a is the logarithm of the decay itself
        if KIND.PER_CHANNEL:
            decay_rows = ring_decay_ptr + slot * ring_decay_stride
            decay_rows += replay_window.head_in_ring(h, L, COLS, KIND.RING_DECAY_H)
            new_a = replay_rows.token_base(a_at, b, first, h)
            if KIND.UPDATE and head_row == 0:
                append_rows(decay_rows + to_row * COLS, replay_rows.entries(new_a, token, KIND), appends, FORM)
            logs = delta_window.load_log_decays(
                replay_rows.entries(new_a, column_token, KIND), exists, rate, dt_bias_ptr, h,
                KIND.BIAS_PER_CHANNEL, FORM,
            )  # fmt: skip
            ring_logs = delta_window.load_log_decays(
                decay_rows + ring_row * COLS, lives, rate, dt_bias_ptr, h, KIND.BIAS_PER_CHANNEL, FORM
            )
            of_rows, of_state = delta_window.decays_of_channels(ring_logs, SUM_TERMS, TARGET)
            decayed = decayed_tokens(values, logs, count, SUM_TERMS, KIND)
            weights = weights_of_tokens(values, logs, k_at, b, first, g, count, of_columns, SUM_TERMS, KIND)
            first_weight, gamma = base * 0, of_columns
            if FOLDS:
                kq = replay_window.token_operands(decayed, TERMS, WIDTH, FORM)
                old_keys = replay_window.token_operands(delta_window.times(old_k, of_rows, FORM), FOLD_TERMS, 2, FORM)
                old_weight, alpha = of_old, delta_window.for_operands(of_state, 2, FORM)
            else:
                kq = replay_window.token_operands(delta_window.times(decayed, of_state, FORM), TERMS, WIDTH, FORM)
                keys = replay_window.token_operands(delta_window.times(window_k, of_rows, FORM), TERMS, 2, FORM)
                of_pairs = products(keys, replay_window.token_operands(decayed, TERMS, 2, FORM))
                ring_weights = of_pairs * of_window[:, None] * of_columns[None, :]
        else:
            decay_rows = ring_decay_ptr + slot * ring_decay_stride
            decay_rows += replay_window.head_in_ring(h, L, 1, KIND.RING_DECAY_H)
            twice = tl.zeros([1, 2], tl.int32)
            ring_g = tl.load(decay_rows + (ring_row[:, None] + twice), mask=lives[:, None], other=0.0)
            a_ptrs = replay_rows.entries(replay_rows.token_base(a_at, b, first, h), token[:, None] + twice, KIND)
            a = tl.load(a_ptrs, mask=new[:, None], other=0.0).to(tl.float32)
            bias = 0.0 if dt_bias_ptr is None else tl.load(dt_bias_ptr + h).to(tl.float32)
            decays, lengths = (ring_g, a), (of_window, of_columns)
            log, weights, gamma = weights_of_head(
                together, lengths, window, decays, base, count, rate, bias, SUM_TERMS, KIND
            )
            first_weight = base
            ring_weights = tl.where(of_ring[:, None], weights, 0.0)
            if KIND.UPDATE and head_row == 0:
                tl.store(decay_rows + to_row, log, mask=appends)
            if FOLDS:
                left, of_state = delta_window.decays_of_ring(replay_window.once(ring_g), live, SUM_TERMS, TARGET)
                old_weight, alpha = left * of_old, for_chunks(of_state, FORM)
        weights = signed(weights, KIND)
        steps = steps_of(weights, first_weight, beta_at, b, first, h, count, KIND)
        ring_u = ring_u_ptr + slot * ring_u_stride + replay_window.head_in_ring(h, L, ROWS, KIND.RING_U_H)
        gamma = tl.where(of_k, -gamma, gamma)
        if not FOLDS:
            ring_operand = terms_of(signed(ring_weights, KIND), RING_TERMS, TARGET)

        for i in tl.range(min(TILES, TILES_OF_HEAD), num_stages=1):
            first_row = head_row + i * BLOCK_ROWS
            tile = tile_at(h, first_row, FORM)
            factor, codes = state_io.load_codes(pool, slot, known, tile, FORM, WHOLE)
            u_rows = ring_u + ring_row * ROWS
            u = replay_window.load_token_rows(
                u_rows, lives if FOLDS else of_ring, first_row, ROWS, BLOCK_ROWS, INSIDE, BESIDE
            )
            offs_d = first_row + tl.arange(0, BLOCK_ROWS)
            shown = (offs_d < ROWS)[:, None] & exists[None, :]
            v_base = replay_rows.token_base(v_at, b, first, h)
            v_ptrs = replay_rows.entries(v_base, column_token, KIND)[None, :] + offs_d[:, None]
            v = tl.load(v_ptrs, mask=shown & of_k[None, :], other=0.0).to(tl.float32)
            if FOLDS:
                codes = replay_window.operands_of(codes, known, 2, KIND.PADDING, FORM)
                old_u = terms_of(tl.trans(u.to(tl.float32) * old_weight[:, None]), FOLD_TERMS, TARGET)
                s = delta_window.folded_tile(codes, factor, alpha, old_u, old_keys, dtype, FOLD_TERMS, FORM)
                drawing, goes = (seed, BEFORE_THE_FIRST_TOKEN, stream), known & KIND.UPDATE
                factor, codes = state_io.store_rounded(pool, slot, goes, tile, s, drawing, FORM)
            codes = replay_window.operands_of(codes, known, WIDTH, KIND.PADDING, FORM)
            y = tl.zeros([BLOCK_ROWS, 2 * KIND.HALF], tl.float32)
            for c in tl.static_range(len(codes)):
                of_state_terms = state_io.terms_of_code(codes[c], dtype, STATE_TERMS, TARGET)
                y = dot_terms(of_state_terms, transposed(kq[c]), y)
            y = tl.fma(y * factor, gamma[None, :], v)
            if not FOLDS:
                y = dot_terms(transposed(terms_of(u, RING_TERMS, TARGET)), ring_operand, y)
            y = corrected(y, steps, weights, first_weight, beta_at, b, first, h, count, u_dtype, KIND)
            out_base = replay_rows.token_base(out, b, first, h)
            out_ptrs = replay_rows.entries(out_base, column_token, KIND)[None, :] + offs_d[:, None]
            tl.store(out_ptrs, y.to(out[0].dtype.element_ty), mask=shown & (of_k == 0)[None, :])
            if KIND.UPDATE:
                new_row = replay_window.row_in_ring(start + live + column_token, L)
                to = (ring_u + new_row * ROWS)[None, :] + offs_d[:, None]
                appended = tl.where(known, shown & of_k[None, :], False)
                delta_window.store_kept(to, y, appended, u_dtype, TARGET)


@kernel
def gated_delta_replay_kernel(
    # Pointers, which change from call to call; None: absent. beta: the op's b.
    data_ptr, ring_k_ptr, ring_u_ptr, ring_decay_ptr, q_ptr, k_ptr, v_ptr, a_ptr, beta_ptr, out_ptr, A_log_ptr,
    dt_bias_ptr, scale_ptr, seed_ptr,
    rows_ptr, parts_ptr,  # of a plan
    start_ptr, count_ptr, read_ptr, cu_seqlens_ptr,
    stream,
    # What a server repeats. Not in tuples: Triton compiles anew for the values it finds in one.
    fault_ptr,
    slot_stride, scale_stride, ring_k_stride, ring_u_stride, ring_decay_stride,  # of slots
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h,  # strides of batch, token and head
    a_b, a_t, a_h, beta_b, beta_t, beta_h, out_b, out_t, out_h,
    read_stride,
    batch,
    tokens,  # length of the token axis
    longest,  # the most tokens a row has
    L,  # rows of a ring
    num_slots, null,
    q_scale,  # of queries, beside their normalisation
    H: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,  # from head to head of the state; None: they lie side by side
    VECTOR: tl.constexpr,  # elements per access of the state
    ALIGNED: tl.constexpr,  # every row of q, k, v, out and of the ring starts at a multiple of 16 bytes
    WIDE: tl.constexpr,  # whether the tokens of a row are so far apart that their offsets need 64 bits
    PER_CHANNEL: tl.constexpr, BIAS_PER_CHANNEL: tl.constexpr,  # a and dt_bias have a value for each column
    QK_L2NORM: tl.constexpr,
    B_LOGIT: tl.constexpr,  # b is the logit of beta
    ROWS_DO: tl.constexpr,  # what rows are for this kernel: "fold", "keep" what they have, or "either"
    UPDATE: tl.constexpr,
    PADDING: tl.constexpr,  # the output of padding rows: "zero", "fresh", from a zero state, or "keep", as it was
    ROUNDING: tl.constexpr, ROUNDS: tl.constexpr, SHARED_SEED: tl.constexpr, TARGET: tl.constexpr,
    TOKENS: tl.constexpr,  # that there is room for in a row
    ROOM: tl.constexpr,  # tokens that there is room for in a window
    RING_K_H: tl.constexpr, RING_U_H: tl.constexpr, RING_DECAY_H: tl.constexpr,  # of heads of a ring that lie apart
    TILES: tl.constexpr,  # that a program takes at a time
    FOLD_TILES: tl.constexpr,  # that it takes at a time where a plan says that it folds, which takes longer
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNK: tl.constexpr,  # of a tile
    THREADS: tl.constexpr,  # of a program
    PLACE: tl.constexpr,  # "first" and "second" of two kernels that run side by side, or "alone"
    WAITS: tl.constexpr,  # started before the kernel in front of it has ended, which brings the tokens
):  # fmt: skip
    GROUPS: tl.constexpr = H // HEADS_PER_GROUP
    TILES_OF_GROUP: tl.constexpr = HEADS_PER_GROUP * ((ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS)
    HALF: tl.constexpr = max(8 if PER_CHANNEL else 4, TOKENS)
    FORM: tl.constexpr = form_of(
        ROWS, COLS, BLOCK_ROWS, BLOCK_COLS, CHUNK, VECTOR, STREAMING, TARGET, False, ROUNDING, ROUNDS,
        ALIGNED, THREADS, "portable", HEAD_STRIDE=HEAD_STRIDE,
    )  # fmt: skip
    KIND: tl.constexpr = delta_replay_of(
        HEADS_PER_GROUP, ROWS_DO, UPDATE, PADDING, WIDE, PER_CHANNEL, BIAS_PER_CHANNEL, QK_L2NORM, B_LOGIT, TOKENS,
        HALF, ROOM, SHARED_SEED, RING_K_H, RING_U_H, RING_DECAY_H, FORM,
    )  # fmt: skip
    q_at, k_at, v_at = (q_ptr, q_b, q_t, q_h), (k_ptr, k_b, k_t, k_h), (v_ptr, v_b, v_t, v_h)
    a_at, beta_at, out = (a_ptr, a_b, a_t, a_h), (beta_ptr, beta_b, beta_t, beta_h), (out_ptr, out_b, out_t, out_h)
    activations, parameters = (q_at, k_at, v_at, a_at, beta_at, out), (A_log_ptr, dt_bias_ptr, q_scale)
    ring = (ring_k_ptr, ring_k_stride, ring_u_ptr, ring_u_stride, ring_decay_ptr, ring_decay_stride)
    pool = (data_ptr, scale_ptr, slot_stride, scale_stride)

    if WAITS:  # what tokens bring may come from the kernel in front
        gdc_wait()
    if PLACE == "first":  # the rows of the second are others
        gdc_launch_dependents()
    folding = tl.program_id(0) * 0  # rows; they come first in a plan
    if rows_ptr is not None:
        folding = tl.load(parts_ptr)
    to_fold, to_keep = folding * 0, folding * 0  # parts of groups
    if ROWS_DO != "keep":
        to_fold = folding * (GROUPS * (TILES_OF_GROUP // FOLD_TILES))
    if ROWS_DO != "fold":
        to_keep = (batch - folding) * (GROUPS * (TILES_OF_GROUP // TILES))
    batch_rows = (read_ptr, read_stride, 1, None), (start_ptr, count_ptr), (num_slots, null, fault_ptr)
    for number in tl.range(tl.program_id(0), to_fold + to_keep, tl.num_programs(0), num_stages=1):
        item = tl.program_id(0) * 0 + number  # a number of the kernel also where the interpreter has one of Python
        i, g, first_tile, folds = replay_rows.item_at(
            item, folding, to_fold, GROUPS, TILES_OF_GROUP, TILES, FOLD_TILES, ROWS_DO
        )
        row, folds = replay_rows.row_at(
            i, (rows_ptr, parts_ptr), batch_rows, cu_seqlens_ptr, tokens, longest, folds, WINDOW
        )
        _, slot, _, _, _, count = row
        if ROWS_DO == "fold" or (ROWS_DO == "either" and folds):
            replay_delta(
                pool, ring, activations, parameters, seed_ptr, stream, row, g, first_tile, L, True, FOLD_TILES, KIND
            )
        elif (count > 0) & ((slot >= 0) | (PADDING == "fresh")):
            replay_delta(
                pool, ring, activations, parameters, seed_ptr, stream, row, g, first_tile, L, False, TILES, KIND
            )
        elif PADDING == "zero":
            replay_rows.zero_tiles(out, row, g, first_tile, TILES, KIND)
        if cu_seqlens_ptr is not None and first_tile == 0:
            replay_rows.zero_rest(out, cu_seqlens_ptr, row, g, tokens, batch, KIND)
    if PLACE == "second":
        if tl.program_id(0) == 0:  # who comes next waits for this kernel alone, so it waits for the first
            gdc_wait()
