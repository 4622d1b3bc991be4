"""What the tiles of a head share in gated_delta_replay: k and q as operands, and how much every token of a window
counts for each of them, with a decay per head or per channel."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashstate.kernels import delta_window, replay_rows, replay_window, state_io
from flashstate.kernels.functions import column_of, exp_in_short, row_of
from flashstate.kernels.gated_delta import for_chunks, load_rate, log_decay
from flashstate.kernels.tensor_cores import chunks_of_stack, dot_terms, products, terms_of, transposed, with_chunk
from flashstate.kernels.tiles import Constants, Form, aligned_as, widened


@dataclass(frozen=True)
class DeltaReplay(Constants):
    """The constants that functions of gated_delta_replay share, as its kernel has them; and of how many bfloat16
    operands of tensor cores are sums: 0 of float32, without tensor cores."""

    HEADS_PER_GROUP: int
    UPDATE: bool
    PADDING: str
    WIDE: bool
    A_ALIGNED: bool
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
    DTYPE: Any  # of states
    KEY_TERMS: int  # of keys and queries: those of bfloat16 are one, unless decays are multiplied in
    STATE_TERMS: int
    SUM_TERMS: int  # of logarithms of decays
    RING_TERMS: int  # of u, and of what it counts
    FOLD_TERMS: int  # of what is added to a state
    FORM: Form


@triton.constexpr_function
def delta_replay_of(
    HEADS_PER_GROUP, UPDATE, PADDING, WIDE, A_ALIGNED, PER_CHANNEL, BIAS_PER_CHANNEL, QK_L2NORM, B_LOGIT, TOKENS,
    HALF, ROOM, SHARED_SEED, RING_K_H, RING_U_H, RING_DECAY_H, dtype, k_dtype, u_dtype, FORM,
):  # fmt: skip
    """Give the constants of a replay their names, for states, keys and u of these dtypes."""
    exact = k_dtype == tl.float32
    state, ring = 3 if dtype == tl.float32 else 2, 3 if u_dtype == tl.float32 else 2
    return DeltaReplay(
        HEADS_PER_GROUP, UPDATE, PADDING, WIDE, A_ALIGNED, PER_CHANNEL, BIAS_PER_CHANNEL, QK_L2NORM, B_LOGIT, TOKENS,
        HALF, ROOM, SHARED_SEED, RING_K_H, RING_U_H, RING_DECAY_H, dtype, delta_window.key_terms(k_dtype),
        0 if exact else state, delta_window.sum_terms(k_dtype), 0 if exact else ring,
        state_io.update_terms(dtype, k_dtype), FORM,
    )  # fmt: skip


class Window(NamedTuple):
    """The tokens behind the state of a row: live rows of its ring, unless it folds them, and then new ones."""

    base: Any  # how many are of the ring
    of_ring: Any
    new: Any
    lives: Any  # rows of the ring, of which those that fold are not in the window
    ring_row: Any
    token: Any  # which new one
    to_row: Any  # of the ring, where that is appended,
    appends: Any  # if it is


@triton.jit
def window_of(row, L, FOLDS: tl.constexpr, KIND: tl.constexpr):
    """The window of a row."""
    _, slot, start, live, _, count = row
    j = tl.arange(0, KIND.ROOM)
    base = live * 0 if FOLDS else live
    new, token = (j >= base) & (j < base + count), j - base
    to_row, ring_row = replay_window.row_in_ring(start + live + token, L), replay_window.row_in_ring(start + j, L)
    return Window(base, j < base, new, j < live, ring_row, token, to_row, tl.where(slot >= 0, new, False))


@triton.jit
def columns_of(count, KIND: tl.constexpr):
    """Of every column of the operand of k and q: its token, whether it is of k, and whether there is such a token."""
    column = tl.arange(0, 2 * KIND.HALF)
    token = column % KIND.HALF
    return token, column < KIND.HALF, token < count


@triton.jit
def columns_that_see(i, KIND: tl.constexpr):
    """Which columns of the operand of k and q see what token i writes: k of later tokens, and q of it and of these."""
    token, of_k, _ = columns_of(i, KIND)
    return (token > i) | ((token == i) & (of_k == 0))


@triton.jit
def rows_of_tokens(tensor, row, h, token, KIND: tl.constexpr):
    """Pointers to the values of these tokens of a row at head h."""
    b, _, _, _, first, _ = row
    return replay_rows.entries(replay_rows.token_base(tensor, b, first, h), token, KIND)


@triton.jit
def rows_of_columns(k_at, q_at, row, g, KIND: tl.constexpr):
    """Pointers to k of every token, and then to q of every token."""
    token, of_k, _ = columns_of(row[5], KIND)
    return tl.where(of_k, rows_of_tokens(k_at, row, g, token, KIND), rows_of_tokens(q_at, row, g, token, KIND))


@triton.jit
def signed(weights, KIND: tl.constexpr):
    """Weights (..., 2 * HALF), those of k negative: of what is taken from v, and of what is added to an output."""
    return tl.where((tl.arange(0, 2 * KIND.HALF) < KIND.HALF)[None, :], -weights, weights)


@triton.jit
def append_rows(ring_rows, rows, appends, FORM: tl.constexpr):
    """Copy rows with a value for every column, of every token, to a ring."""
    cols = tl.arange(0, FORM.BLOCK_COLS)
    INSIDE: tl.constexpr = FORM.COLS == FORM.BLOCK_COLS
    kept = replay_window.load_token_rows(rows, appends, 0, FORM.COLS, FORM.BLOCK_COLS, INSIDE, FORM.ALIGNMENT)
    to = tl.multiple_of(ring_rows[:, None] + cols[None, :], (1, FORM.ALIGNMENT))
    tl.store(to, kept, mask=appends[:, None] & (cols < FORM.COLS)[None, :])


@triton.jit
def prepare_head(
    ring, activations, parameters, row, window, g, h, first_row, L, FOLDS: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """What the tiles of head h share, with one decay per head: k and q as operands, and what they are to be multiplied
    with; how much every token of the window counts for each of them, and the row of the first new one; of a ring that
    is folded its keys, their weights, and what is left of the state. Appends what the head brings to the ring."""
    ring_k_ptr, ring_k_stride, _, _, ring_decay_ptr, ring_decay_stride = ring
    q_at, k_at, _, a_at, _, _ = activations
    A_log_ptr, dt_bias_ptr, q_scale = parameters
    _, slot, _, live, _, count = row
    FORM: tl.constexpr = KIND.FORM
    WIDTH: tl.constexpr = state_io.operand_width(KIND.DTYPE, True, FORM.TARGET)
    token, of_k, exists = columns_of(count, KIND)
    j, last = tl.arange(0, KIND.ROOM), window.base + token

    if KIND.KEY_TERMS > 0:
        values = replay_window.load_token_chunks(rows_of_columns(k_at, q_at, row, g, KIND), exists, FORM)
    ring_k = ring_k_ptr + slot * ring_k_stride + replay_window.head_in_ring(g, L, FORM.COLS, KIND.RING_K_H)
    new_k = rows_of_tokens(k_at, row, g, window.token, KIND)
    rows = tl.where(window.of_ring, ring_k + window.ring_row * FORM.COLS, new_k)
    if KIND.KEY_TERMS > 0:
        keys = replay_window.load_token_chunks(rows, window.of_ring | window.new, FORM)
    decay_rows = ring_decay_ptr + slot * ring_decay_stride + replay_window.head_in_ring(h, L, 1, KIND.RING_DECAY_H)
    twice = tl.zeros([1, 2], tl.int32)
    ring_g = tl.load(decay_rows + (window.ring_row[:, None] + twice), mask=window.lives[:, None], other=0.0)
    a_ptrs = rows_of_tokens(a_at, row, h, window.token[:, None] + twice, KIND)
    a = tl.load(a_ptrs, mask=window.new[:, None], other=0.0).to(tl.float32)
    rate = None if A_log_ptr is None else load_rate(A_log_ptr, h)  # None: a is the logarithm of the decay itself
    bias = 0.0 if dt_bias_ptr is None else tl.load(dt_bias_ptr + h).to(tl.float32)

    if KIND.KEY_TERMS > 0:
        kq = replay_window.token_operands(values, KIND.KEY_TERMS, WIDTH, FORM)
        of_columns = kq if WIDTH == 2 else replay_window.token_operands(values, KIND.KEY_TERMS, 2, FORM)
        of_keys = replay_window.token_operands(keys, KIND.KEY_TERMS, 2, FORM)
        together = products(of_keys, of_columns)
        scale = delta_window.length_factors(of_columns, KIND.QK_L2NORM) * tl.where(of_k, 1.0, q_scale)
        together *= delta_window.length_factors(of_keys, KIND.QK_L2NORM)[:, None] * scale[None, :]
    else:
        columns, are_keys = rows_of_columns(k_at, q_at, row, g, KIND), window.of_ring | window.new
        kq, squares = delta_window.operands_in_loop(columns, exists, KIND.KEY_TERMS, WIDTH, FORM)
        together = replay_window.products_in_loop(rows, are_keys, columns, exists, FORM)
        scale = delta_window.factor_of(squares, KIND.QK_L2NORM) * tl.where(of_k, 1.0, q_scale)
        together *= delta_window.factors_in_loop(rows, are_keys, KIND.QK_L2NORM, FORM)[:, None] * scale[None, :]

    logs = tl.where(window.of_ring[:, None], ring_g, tl.where(window.new[:, None], log_decay(a, rate, bias), 0.0))
    logs = replay_window.once(logs)
    between, total = replay_window.sums_between(delta_window.summable(logs), last, KIND.SUM_TERMS, FORM.TARGET)
    counts = (j[:, None] < last[None, :]) | ((j[:, None] == last[None, :]) & (of_k == 0)[None, :])
    weights = signed(tl.where(counts & exists[None, :], together * tl.exp(between), 0.0), KIND)
    gamma = tl.exp(total) * tl.where(of_k, -scale, scale)
    if KIND.UPDATE and first_row == 0:
        tl.store(decay_rows + window.to_row, logs, mask=window.appends)
        if h % KIND.HEADS_PER_GROUP == 0:
            append_rows(ring_k + window.to_row * FORM.COLS, new_k, window.appends, FORM)
    ring_weights = terms_of(tl.where(window.of_ring[:, None], weights, 0.0), KIND.RING_TERMS, FORM.TARGET)
    if FOLDS:
        old_rows = ring_k + window.ring_row * FORM.COLS
        if KIND.KEY_TERMS > 0:
            old = replay_window.load_token_chunks(old_rows, window.lives, FORM)
        left, alpha = delta_window.decays_of_ring(replay_window.once(ring_g), live, KIND.SUM_TERMS, FORM.TARGET)
        if KIND.KEY_TERMS > 0:
            raw = replay_window.token_operands(old, KIND.KEY_TERMS, 2, FORM)
            old_weight = left * delta_window.length_factors(raw, KIND.QK_L2NORM)
            old_keys = replay_window.token_operands(old, KIND.FOLD_TERMS, 2, FORM)
        else:
            old_keys, squares = delta_window.operands_in_loop(old_rows, window.lives, KIND.FOLD_TERMS, 2, FORM)
            old_weight = left * delta_window.factor_of(squares, KIND.QK_L2NORM)
        return kq, gamma, weights, window.base, ring_weights, (old_keys, old_weight, for_chunks(alpha, FORM))
    else:
        return kq, gamma, weights, window.base, ring_weights, ()


@triton.jit
def prepare_channels(
    ring, activations, parameters, row, window, g, h, first_row, L, FOLDS: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """What the tiles of head h share, with a decay per channel: k and q as operands, decayed since the state, and what
    their products with it are to be multiplied with; how much every new token counts for each of them, and the row of
    the first one; how much every row of the ring does; of a ring that is folded its keys, their weights, and what is
    left of the state. Appends what the head brings to the ring. Chunk by chunk: a decay of pairs of a row of the ring
    and a new token is that up to the end of the ring, times the rest."""
    ring_k_ptr, ring_k_stride, _, _, ring_decay_ptr, ring_decay_stride = ring
    q_at, k_at, _, a_at, _, _ = activations
    A_log_ptr, dt_bias_ptr, q_scale = parameters
    _, slot, _, _, _, count = row
    FORM: tl.constexpr = KIND.FORM
    A_FORM: tl.constexpr = aligned_as(FORM, KIND.A_ALIGNED)
    COLS: tl.constexpr = FORM.COLS
    WIDTH: tl.constexpr = state_io.operand_width(KIND.DTYPE, True, FORM.TARGET)
    token, of_k, exists = columns_of(count, KIND)
    rate = None if A_log_ptr is None else load_rate(A_log_ptr, h)  # None: a is the logarithm of the decay itself

    column_rows, a_rows = rows_of_columns(k_at, q_at, row, g, KIND), rows_of_tokens(a_at, row, h, token, KIND)
    ring_k = ring_k_ptr + slot * ring_k_stride + replay_window.head_in_ring(g, L, COLS, KIND.RING_K_H)
    ring_a = ring_decay_ptr + slot * ring_decay_stride + replay_window.head_in_ring(h, L, COLS, KIND.RING_DECAY_H)
    ring_k_rows, ring_a_rows = ring_k + window.ring_row * COLS, ring_a + window.ring_row * COLS
    delta_window.prefetch_rows(ring_a_rows, window.lives, 0, COLS, COLS, FORM.TARGET)
    delta_window.prefetch_rows(ring_k_rows, window.lives, 0, COLS, COLS, FORM.TARGET)
    if KIND.KEY_TERMS > 0:
        squares = tl.zeros([2 * KIND.HALF, 2 * KIND.HALF], tl.float32)
        key_squares = tl.zeros([KIND.ROOM, KIND.ROOM], tl.float32)
        together = tl.zeros([KIND.ROOM, 2 * KIND.HALF], tl.float32)
        among = tl.zeros([KIND.HALF, 2 * KIND.HALF], tl.float32)
        kq, old_keys, alphas = (), (), ()
        for i in tl.static_range(FORM.BLOCK_COLS // FORM.CHUNK):
            values = replay_window.load_token_chunk(column_rows, exists, i, FORM)
            logs = delta_window.load_log_decays(a_rows, exists, i, rate, dt_bias_ptr, h, KIND.BIAS_PER_CHANNEL, A_FORM)
            keys, alpha, key_squares = delta_window.ring_chunk(
                ring_k_rows, ring_a_rows, window.lives, i, rate, dt_bias_ptr, h, key_squares, KIND.BIAS_PER_CHANNEL,
                FORM,
            )  # fmt: skip
            of_values = delta_window.operand_of(values, KIND.KEY_TERMS, 2, FORM)
            squares = dot_terms(of_values, squares, transposed(of_values))
            values = widened(values, FORM.WIDENING)
            if KIND.TOKENS == 1:
                decay = exp_in_short(logs, FORM.TARGET)
            else:
                among, decay = between_tokens(values, of_values, logs, among, count, KIND)
            decayed = values * decay
            if FOLDS:
                kq = kq + (delta_window.operand_of(decayed, KIND.KEY_TERMS, WIDTH, FORM),)
                old_keys = old_keys + (delta_window.operand_of(keys, KIND.FOLD_TERMS, 2, FORM),)
                alphas = alphas + (delta_window.ordered(alpha, 2, FORM),)
            else:
                kq = kq + (delta_window.operand_of(decayed * alpha, KIND.KEY_TERMS, WIDTH, FORM),)
                pairs = delta_window.operand_of(keys, KIND.KEY_TERMS, 2, FORM)
                of_columns = delta_window.operand_of(decayed, KIND.KEY_TERMS, 2, FORM)
                together = dot_terms(pairs, together, transposed(of_columns))
    else:
        new, of_ring = (column_rows, a_rows, exists), (ring_k_rows, ring_a_rows, window.lives)
        kq, old_keys, alphas, squares, key_squares, together, among = channels_in_loop(
            new, of_ring, rate, dt_bias_ptr, h, count, FOLDS, KIND, A_FORM
        )
    if KIND.UPDATE and first_row == 0:
        new_a = rows_of_tokens(a_at, row, h, window.token, KIND)
        append_rows(ring_a + window.to_row * COLS, new_a, window.appends, A_FORM)
        if h % KIND.HEADS_PER_GROUP == 0:
            new_k = rows_of_tokens(k_at, row, g, window.token, KIND)
            append_rows(ring_k + window.to_row * COLS, new_k, window.appends, FORM)
    if KIND.TOKENS == 1:  # whose q sees its k and nothing else
        among = tl.where((columns_that_see(0, KIND) & exists)[None, :], row_of(squares, 0)[None, :], among)
    scale = delta_window.factor_of(squares, KIND.QK_L2NORM) * tl.where(of_k, 1.0, q_scale)
    key_scale = delta_window.factor_of(key_squares, KIND.QK_L2NORM)
    # What makes k of a token of length 1, for the rows of `among`: the left half of the scale.
    column, i = tl.arange(0, 2 * KIND.HALF), tl.arange(0, KIND.HALF)
    of_tokens = tl.sum(tl.where(column[None, :] == i[:, None], scale[None, :], 0.0), 1)
    weights = signed(among * of_tokens[:, None] * scale[None, :], KIND)
    gamma = tl.where(of_k, -scale, scale)
    ring_weights = terms_of(signed(together * key_scale[:, None] * scale[None, :], KIND), KIND.RING_TERMS, FORM.TARGET)
    if FOLDS:
        return kq, gamma, weights, window.base * 0, ring_weights, (old_keys, key_scale, alphas)
    else:
        return kq, gamma, weights, window.base * 0, ring_weights, ()


@triton.jit
def channels_in_loop(
    new, of_ring, rate, bias_ptr, h, count, FOLDS: tl.constexpr, KIND: tl.constexpr, A_FORM: tl.constexpr
):  # fmt: skip
    """What prepare_channels finds chunk by chunk, for keys of float32: without tensor cores their products are so many
    instructions that, unrolled, they took a minute to compile. What tiles need of every chunk is put on a stack."""
    column_rows, a_rows, exists = new
    ring_k_rows, ring_a_rows, lives = of_ring
    FORM: tl.constexpr = KIND.FORM
    CHUNKS: tl.constexpr = FORM.BLOCK_COLS // FORM.CHUNK
    WIDTH: tl.constexpr = state_io.operand_width(KIND.DTYPE, True, FORM.TARGET)
    squares = tl.zeros([2 * KIND.HALF, 2 * KIND.HALF], tl.float32)
    key_squares = tl.zeros([KIND.ROOM, KIND.ROOM], tl.float32)
    together = tl.zeros([KIND.ROOM, 2 * KIND.HALF], tl.float32)
    among = tl.zeros([KIND.HALF, 2 * KIND.HALF], tl.float32)
    kq_stack = tl.zeros([2 * KIND.HALF, FORM.CHUNK, CHUNKS], tl.float32)
    key_stack = tl.zeros([KIND.ROOM, FORM.CHUNK, CHUNKS], tl.float32)
    alpha_stack = tl.zeros([1, FORM.CHUNK, CHUNKS], tl.float32)
    for i in tl.range(CHUNKS, num_stages=1):
        values = replay_window.load_token_chunk(column_rows, exists, i, FORM)
        logs = delta_window.load_log_decays(a_rows, exists, i, rate, bias_ptr, h, KIND.BIAS_PER_CHANNEL, A_FORM)
        keys, alpha, key_squares = delta_window.ring_chunk(
            ring_k_rows, ring_a_rows, lives, i, rate, bias_ptr, h, key_squares, KIND.BIAS_PER_CHANNEL, FORM
        )
        operand = (delta_window.ordered(values, 2, FORM),)
        squares = dot_terms(operand, squares, transposed(operand))
        if KIND.TOKENS == 1:
            decay = exp_in_short(logs, FORM.TARGET)
        else:
            among, decay = between_tokens(values, operand, logs, among, count, KIND)
        decayed, keys = values * decay, delta_window.ordered(keys, 2, FORM)
        if FOLDS:
            kq_stack = with_chunk(kq_stack, delta_window.ordered(decayed, WIDTH, FORM), i)
            key_stack = with_chunk(key_stack, keys, i)
            alpha_stack = with_chunk(alpha_stack, delta_window.ordered(alpha, 2, FORM), i)
        else:
            kq_stack = with_chunk(kq_stack, delta_window.ordered(decayed * alpha, WIDTH, FORM), i)
            together = dot_terms((keys,), together, transposed((delta_window.ordered(decayed, 2, FORM),)))
    kq = replay_window.all_terms_of(chunks_of_stack(kq_stack), KIND.KEY_TERMS, FORM.TARGET)
    if FOLDS:
        old_keys = replay_window.all_terms_of(chunks_of_stack(key_stack), KIND.FOLD_TERMS, FORM.TARGET)
        return kq, old_keys, chunks_of_stack(alpha_stack), squares, key_squares, together, among
    else:
        return kq, (), (), squares, key_squares, together, among


@triton.jit
def between_tokens(values, of_values, logs, among, count, KIND: tl.constexpr):
    """With a decay per channel, of a chunk of columns, also as operands: `among` and the products of every new k with
    every k and q that sees it, (HALF, 2 * HALF); and what is left of what was there before the first token,
    (2 * HALF, CHUNK). From the last token to the first, so that every logarithm is added to the sums that it belongs
    to, and none is taken back."""
    token, _, exists = columns_of(count, KIND)
    sums = tl.zeros(logs.shape, tl.float32)
    for n in range(0, count):
        i = count - 1 - n
        sees = columns_that_see(i, KIND) & exists
        left = delta_window.operand_of(values * exp_in_short(sums, KIND.FORM.TARGET), KIND.KEY_TERMS, 2, KIND.FORM)
        nothing = tl.zeros([2 * KIND.HALF, 2 * KIND.HALF], tl.float32)
        row = tl.where(sees, column_of(dot_terms(left, nothing, transposed(of_values)), i), 0.0)
        among += tl.where((tl.arange(0, KIND.HALF) == i)[:, None], row[None, :], 0.0)
        sums += tl.where((token >= i)[:, None], row_of(logs, i)[None, :], 0.0)
    return among, exp_in_short(sums, KIND.FORM.TARGET)
