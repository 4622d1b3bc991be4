"""gated_delta_replay on the GPU: a program per (batch row, key head, some tiles of V rows), or one that walks on.

A row has a window of tokens behind its state: live rows of its ring and then the new tokens, or, where it folds, the
new tokens alone. k and q of all new tokens are columns of one operand, so tensor cores make the products of a tile with
all of them at once; those of the window's keys with them say how much a row of the ring counts for each. Then every
token is corrected by those before it, one after the other, because each u is rounded before anything uses it. Where a
row folds, tensor cores add the products of the ring to the tile first, which is rounded and stored; what was stored is
what the tokens see. A program is one warp, as in mamba2_replay, whose ways of walking along a plan it shares.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashstate.kernels import delta_window, replay_rows, replay_window, state_io
from flashstate.kernels.functions import column_of, entry_of, row_of, sigmoid
from flashstate.kernels.gated_delta import for_chunks, load_rate, log_decay
from flashstate.kernels.slots import load_seed
from flashstate.kernels.state_io import BEFORE_THE_FIRST_TOKEN, STREAMING
from flashstate.kernels.tensor_cores import MOST_HALVINGS, dot_terms, left_and_right, products, terms_of, transposed
from flashstate.kernels.tiles import STAGES, Constants, Form, form_of, tile_at
from flashstate.launch.kernel import kernel

MOST_UNROLLED = tl.constexpr(8)  # tokens whose corrections are unrolled


@dataclass(frozen=True)
class DeltaReplay(Constants):
    """The constants that functions of gated_delta_replay share, as its kernel has them; and of how many bfloat16
    operands of tensor cores are sums: 0 of float32, without tensor cores."""

    HEADS_PER_GROUP: int
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
    DTYPE: Any  # of states
    KEY_TERMS: int  # of keys and queries: those of bfloat16 are one, unless decays are multiplied in
    STATE_TERMS: int
    SUM_TERMS: int  # of logarithms of decays
    RING_TERMS: int  # of u, and of what it counts
    FOLD_TERMS: int  # of what is added to a state
    FORM: Form


@triton.constexpr_function
def delta_replay_of(*constants, dtype, k_dtype, u_dtype, FORM):
    """Give the constants of a replay their names, for states, keys and u of these dtypes."""
    exact = k_dtype == tl.float32
    fold = 3 if exact or dtype == tl.float32 or dtype == tl.int16 else 2
    others = (0, 0, 0, 0) if exact else (2, 3 if dtype == tl.float32 else 2, 3, 3 if u_dtype == tl.float32 else 2)
    return DeltaReplay(*constants, dtype, *others, fold, FORM)


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
    WIDTH: tl.constexpr = state_io.operand_width(KIND.DTYPE, True)
    token, of_k, exists = columns_of(count, KIND)
    j, last = tl.arange(0, KIND.ROOM), window.base + token

    values = replay_window.load_token_chunks(rows_of_columns(k_at, q_at, row, g, KIND), exists, FORM)
    ring_k = ring_k_ptr + slot * ring_k_stride + replay_window.head_in_ring(g, L, FORM.COLS, KIND.RING_K_H)
    new_k = rows_of_tokens(k_at, row, g, window.token, KIND)
    rows = tl.where(window.of_ring, ring_k + window.ring_row * FORM.COLS, new_k)
    keys = replay_window.load_token_chunks(rows, window.of_ring | window.new, FORM)
    decay_rows = ring_decay_ptr + slot * ring_decay_stride + replay_window.head_in_ring(h, L, 1, KIND.RING_DECAY_H)
    twice = tl.zeros([1, 2], tl.int32)
    ring_g = tl.load(decay_rows + (window.ring_row[:, None] + twice), mask=window.lives[:, None], other=0.0)
    a_ptrs = rows_of_tokens(a_at, row, h, window.token[:, None] + twice, KIND)
    a = tl.load(a_ptrs, mask=window.new[:, None], other=0.0).to(tl.float32)
    rate = None if A_log_ptr is None else load_rate(A_log_ptr, h)  # None: a is the logarithm of the decay itself
    bias = 0.0 if dt_bias_ptr is None else tl.load(dt_bias_ptr + h).to(tl.float32)

    kq = replay_window.token_operands(values, KIND.KEY_TERMS, WIDTH, FORM)
    of_columns = kq if WIDTH == 2 else replay_window.token_operands(values, KIND.KEY_TERMS, 2, FORM)
    of_keys = replay_window.token_operands(keys, KIND.KEY_TERMS, 2, FORM)
    together = products(of_keys, of_columns)
    scale = delta_window.length_factors(of_columns, KIND.QK_L2NORM) * tl.where(of_k, 1.0, q_scale)
    together *= delta_window.length_factors(of_keys, KIND.QK_L2NORM)[:, None] * scale[None, :]

    logs = tl.where(window.of_ring[:, None], ring_g, tl.where(window.new[:, None], log_decay(a, rate, bias), 0.0))
    logs = replay_window.once(logs)
    between, total = replay_window.sums_between(logs, last, KIND.SUM_TERMS, FORM.TARGET)
    counts = (j[:, None] < last[None, :]) | ((j[:, None] == last[None, :]) & (of_k == 0)[None, :])
    weights = signed(tl.where(counts & exists[None, :], together * tl.exp(between), 0.0), KIND)
    gamma = tl.exp(total) * tl.where(of_k, -scale, scale)
    if KIND.UPDATE and first_row == 0:
        tl.store(decay_rows + window.to_row, logs, mask=window.appends)
        if h % KIND.HEADS_PER_GROUP == 0:
            append_rows(ring_k + window.to_row * FORM.COLS, new_k, window.appends, FORM)
    ring_weights = terms_of(tl.where(window.of_ring[:, None], weights, 0.0), KIND.RING_TERMS, FORM.TARGET)
    if FOLDS:
        old = replay_window.load_token_chunks(ring_k + window.ring_row * FORM.COLS, window.lives, FORM)
        left, alpha = delta_window.decays_of_ring(replay_window.once(ring_g), live, KIND.SUM_TERMS, FORM.TARGET)
        raw = replay_window.token_operands(old, KIND.KEY_TERMS, 2, FORM)
        old_weight = left * delta_window.length_factors(raw, KIND.QK_L2NORM)
        old_keys = replay_window.token_operands(old, KIND.FOLD_TERMS, 2, FORM)
        return kq, gamma, weights, window.base, ring_weights, (old_keys, old_weight, for_chunks(alpha, FORM))
    else:
        return kq, gamma, weights, window.base, ring_weights, ()


@triton.jit
def prepare_channels(
    ring, activations, parameters, row, window, g, h, first_row, L, FOLDS: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """What prepare_head gives, with a decay per channel; the weights of new tokens, without those of the ring. Chunk by
    chunk: a decay of pairs of a row of the ring and a new token is that up to the end of the ring, times the rest."""
    ring_k_ptr, ring_k_stride, _, _, ring_decay_ptr, ring_decay_stride = ring
    q_at, k_at, _, a_at, _, _ = activations
    A_log_ptr, dt_bias_ptr, q_scale = parameters
    _, slot, _, _, _, count = row
    FORM: tl.constexpr = KIND.FORM
    COLS: tl.constexpr = FORM.COLS
    WIDTH: tl.constexpr = state_io.operand_width(KIND.DTYPE, True)
    token, of_k, exists = columns_of(count, KIND)
    rate = None if A_log_ptr is None else load_rate(A_log_ptr, h)  # None: a is the logarithm of the decay itself

    column_rows, a_rows = rows_of_columns(k_at, q_at, row, g, KIND), rows_of_tokens(a_at, row, h, token, KIND)
    ring_k = ring_k_ptr + slot * ring_k_stride + replay_window.head_in_ring(g, L, COLS, KIND.RING_K_H)
    ring_a = ring_decay_ptr + slot * ring_decay_stride + replay_window.head_in_ring(h, L, COLS, KIND.RING_DECAY_H)
    squares = tl.zeros([2 * KIND.HALF, 2 * KIND.HALF], tl.float32)
    key_squares = tl.zeros([KIND.ROOM, KIND.ROOM], tl.float32)
    together = tl.zeros([KIND.ROOM, 2 * KIND.HALF], tl.float32)
    among = tl.zeros([KIND.HALF, 2 * KIND.HALF], tl.float32)
    kq, old_keys, alphas = (), (), ()
    for i in tl.static_range(FORM.BLOCK_COLS // FORM.CHUNK):
        values = delta_window.load_chunk(column_rows, exists, i, FORM)
        logs = delta_window.load_log_decays(a_rows, exists, i, rate, dt_bias_ptr, h, KIND.BIAS_PER_CHANNEL, FORM)
        keys = delta_window.load_chunk(ring_k + window.ring_row * COLS, window.lives, i, FORM)
        ring_logs = delta_window.load_log_decays(
            ring_a + window.ring_row * COLS, window.lives, i, rate, dt_bias_ptr, h, KIND.BIAS_PER_CHANNEL, FORM
        )
        left, alpha = delta_window.decays_of_channels(ring_logs, KIND.SUM_TERMS, FORM.TARGET)
        of_values = delta_window.operand_of(values, KIND.KEY_TERMS, 2, FORM)
        of_keys = delta_window.operand_of(keys, KIND.KEY_TERMS, 2, FORM)
        squares = dot_terms(of_values, transposed(of_values), squares)
        key_squares = dot_terms(of_keys, transposed(of_keys), key_squares)
        among, decay = between_tokens(values, of_values, logs, among, count, KIND)
        decayed, decayed_keys = values * decay, keys * left
        if FOLDS:
            kq = kq + (delta_window.operand_of(decayed, KIND.KEY_TERMS, WIDTH, FORM),)
            old_keys = old_keys + (delta_window.operand_of(decayed_keys, KIND.FOLD_TERMS, 2, FORM),)
            alphas = alphas + (delta_window.ordered(alpha, 2, FORM),)
        else:
            kq = kq + (delta_window.operand_of(decayed * alpha, KIND.KEY_TERMS, WIDTH, FORM),)
            pairs = delta_window.operand_of(decayed_keys, KIND.KEY_TERMS, 2, FORM)
            of_columns = delta_window.operand_of(decayed, KIND.KEY_TERMS, 2, FORM)
            together = dot_terms(pairs, transposed(of_columns), together)
    if KIND.UPDATE and first_row == 0:
        new_a = rows_of_tokens(a_at, row, h, window.token, KIND)
        append_rows(ring_a + window.to_row * COLS, new_a, window.appends, FORM)
        if h % KIND.HEADS_PER_GROUP == 0:
            new_k = rows_of_tokens(k_at, row, g, window.token, KIND)
            append_rows(ring_k + window.to_row * COLS, new_k, window.appends, FORM)
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
def between_tokens(values, of_values, logs, among, count, KIND: tl.constexpr):
    """With a decay per channel, of a chunk of columns, also as operands: `among` and the products of every new k with
    every k and q that sees it, (HALF, 2 * HALF); and what is left of what was there before the first token,
    (2 * HALF, CHUNK). From the last token to the first, so that every logarithm is added to the sums that it belongs
    to, and none is taken back."""
    token, of_k, exists = columns_of(count, KIND)
    sums = tl.zeros(logs.shape, tl.float32)
    for n in range(0, count):
        i = count - 1 - n
        sees = ((token > i) | ((token == i) & (of_k == 0))) & exists
        left = delta_window.operand_of(values * tl.exp(sums), KIND.KEY_TERMS, 2, KIND.FORM)
        nothing = tl.zeros([2 * KIND.HALF, 2 * KIND.HALF], tl.float32)
        row = tl.where(sees, column_of(dot_terms(left, transposed(of_values), nothing), i), 0.0)
        among += tl.where((tl.arange(0, KIND.HALF) == i)[:, None], row[None, :], 0.0)
        sums += tl.where((token >= i)[:, None], row_of(logs, i)[None, :], 0.0)
    return among, tl.exp(sums)


@triton.jit
def load_beta(beta_at, row, h, i, KIND: tl.constexpr):
    """beta of token i of a row; 0 where there is none."""
    b, _, _, _, first, count = row
    ptr, stride = replay_rows.token_base(beta_at, b, first, h)
    t = count * 0 + i
    beta = tl.load(ptr + t.to(tl.int64) * stride, mask=t < count, other=0.0).to(tl.float32)
    if KIND.B_LOGIT:
        beta = sigmoid(beta)
    return tl.where(t < count, beta, 0.0)


@triton.jit
def load_betas(beta_at, row, h, KIND: tl.constexpr):
    """beta of every token, for correct_few; nothing where tokens are too many for that."""
    betas = ()
    if KIND.TOKENS <= MOST_UNROLLED:
        for i in tl.static_range(KIND.TOKENS):
            betas = betas + (load_beta(beta_at, row, h, i, KIND),)
    return betas


@triton.jit
def steps_of(betas, weights, first_weight, KIND: tl.constexpr):
    """beta of every token, and how much its u counts for every column, number by number."""
    steps = ()
    for i in tl.static_range(len(betas)):
        of_token, numbers = row_of(weights, first_weight + i), ()
        for t in tl.static_range(2 * KIND.HALF):
            numbers = numbers + (entry_of(of_token, t),)
        steps = steps + ((betas[i], numbers),)
    return steps


@triton.jit
def columns(y):
    """Every column of a matrix, (rows,) each."""
    rows: tl.constexpr = y.shape[0]
    parts = (y,)
    for _ in tl.static_range(MOST_HALVINGS):
        if len(parts) < y.shape[1]:
            halves = ()
            for k in tl.static_range(len(parts)):
                halves = halves + left_and_right(parts[k])
            parts = halves
    vectors = ()
    for k in tl.static_range(len(parts)):
        vectors = vectors + (tl.reshape(parts[k], (rows,)),)
    return vectors


@triton.jit
def load_values(v_at, row, h, rows, mask, KIND: tl.constexpr):
    """v of every token for rows of head h, (rows,) each, for correct_few; nothing where tokens are too many."""
    count, values = row[5], ()
    if KIND.TOKENS <= MOST_UNROLLED:
        for i in tl.static_range(KIND.TOKENS):
            t = count * 0 + i
            ptrs = rows_of_tokens(v_at, row, h, t, KIND) + rows
            values = values + (tl.load(ptrs, mask=tl.where(t < count, mask, False), other=0.0),)
    return values


@triton.jit
def correct_few(
    y, values, rows, mask, out, ring_u, start, L, row, h, steps, u_dtype: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """Correct the few tokens of a row in a tile, in vectors of rows, then store their u and their outputs. `y`: less
    what is predicted, in the columns of k, and what is seen, in those of q."""
    _, slot, _, live, _, count = row
    y = columns(y)
    us, outputs = (), ()
    for i in tl.static_range(KIND.TOKENS):
        t = count * 0 + i
        left, seen = values[i].to(tl.float32) + y[i], y[KIND.HALF + i]
        for j in tl.static_range(i):
            left = tl.fma(us[j], steps[j][1][i], left)
            seen = tl.fma(us[j], steps[j][1][KIND.HALF + i], seen)
        u = tl.where(t < count, delta_window.as_kept(steps[i][0] * left, u_dtype, KIND.FORM.TARGET), 0.0)
        us, outputs = us + (u,), outputs + (tl.fma(u, steps[i][1][KIND.HALF + i], seen),)
    for i in tl.static_range(KIND.TOKENS):
        t = count * 0 + i
        shown = tl.where(t < count, mask, False)
        tl.store(rows_of_tokens(out, row, h, t, KIND) + rows, outputs[i].to(out[0].dtype.element_ty), mask=shown)
        if KIND.UPDATE:
            to = ring_u + replay_window.row_in_ring(start + live + t, L) * KIND.FORM.ROWS + rows
            delta_window.store_kept(to, us[i], tl.where(slot >= 0, shown, False), u_dtype, KIND.FORM.TARGET)


@triton.jit
def correct_token(y, i, beta, weights, u_dtype: tl.constexpr, KIND: tl.constexpr):
    """Correct token i of a tile: its column of y, which has v less what tokens before it predict, becomes u; and others
    get their share of that, as a row of weights says."""
    column = tl.arange(0, 2 * KIND.HALF)
    u = delta_window.as_kept(beta * column_of(y, i), u_dtype, KIND.FORM.TARGET)[:, None]
    return tl.fma(u, weights[None, :], tl.where((column == i)[None, :], u, y))


@triton.jit
def correct_all(
    y, rows, mask, beta_at, v_at, out, ring_u, start, L, row, h, weights, first_weight,
    u_dtype: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Correct all tokens of a row in a tile, and store their u and their outputs. `y`: less what is predicted, in the
    columns of k, and what is seen, in those of q."""
    _, slot, _, live, _, count = row
    token, of_k, exists = columns_of(count, KIND)
    shown = mask[:, None] & exists[None, :]
    v_ptrs = rows_of_tokens(v_at, row, h, token, KIND)[None, :] + rows[:, None]
    y += tl.load(v_ptrs, mask=shown & of_k[None, :], other=0.0).to(tl.float32)
    for n in range(0, count):
        i = count * 0 + n  # a number of the kernel also where the interpreter has one of Python
        beta = load_beta(beta_at, row, h, i, KIND)
        y = correct_token(y, i, beta, row_of(weights, first_weight + i), u_dtype, KIND)
    out_ptrs = rows_of_tokens(out, row, h, token, KIND)[None, :] + rows[:, None]
    tl.store(out_ptrs, y.to(out[0].dtype.element_ty), mask=shown & (of_k == 0)[None, :])
    if KIND.UPDATE:
        to_row = replay_window.row_in_ring(start + live + token, L)
        to = (ring_u + to_row * KIND.FORM.ROWS)[None, :] + rows[:, None]
        goes = tl.where(slot >= 0, shown & of_k[None, :], False)
        delta_window.store_kept(to, y, goes, u_dtype, KIND.FORM.TARGET)


@triton.jit
def replay_delta(
    pool, ring, activations, parameters, seed_ptr, stream, row, g, first_tile, L,
    FOLDS: tl.constexpr, TILES: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """The outputs of some tiles of a value head of key head g for all tokens of a row, which FOLDS its ring first or
    does not."""
    _, _, ring_u_ptr, ring_u_stride, _, _ = ring
    _, _, v_at, _, beta_at, out = activations
    _, slot, start, _, _, _ = row
    known = slot >= 0
    dtype: tl.constexpr = pool[0].dtype.element_ty
    u_dtype: tl.constexpr = ring_u_ptr.dtype.element_ty
    FORM: tl.constexpr = KIND.FORM
    ROWS: tl.constexpr = FORM.ROWS
    BLOCK_ROWS: tl.constexpr = FORM.BLOCK_ROWS
    WIDTH: tl.constexpr = state_io.operand_width(dtype, True)
    WHOLE: tl.constexpr = KIND.PADDING != "fresh" and ROWS % BLOCK_ROWS == 0 and FORM.COLS == FORM.BLOCK_COLS
    BESIDE: tl.constexpr = replay_window.bytes_beside(u_dtype, FORM)
    AHEAD: tl.constexpr = 1 if FOLDS or dtype == tl.float32 else STAGES
    h, head_row = replay_rows.place_of(g, first_tile, KIND)
    window = window_of(row, L, FOLDS, KIND)
    ring_u = ring_u_ptr + slot * ring_u_stride + replay_window.head_in_ring(h, L, ROWS, KIND.RING_U_H)
    u_rows, seen = ring_u + window.ring_row * ROWS, window.lives if FOLDS else window.of_ring
    delta_window.prefetch_u(u_rows, seen, head_row, TILES * BLOCK_ROWS, FORM)
    betas = load_betas(beta_at, row, h, KIND)
    seed = load_seed(seed_ptr, slot, known, FORM.ROUNDING != "nearest" and FOLDS, KIND.SHARED_SEED)
    if KIND.PER_CHANNEL:
        kq, gamma, weights, first_weight, ring_weights, fold = prepare_channels(
            ring, activations, parameters, row, window, g, h, head_row, L, FOLDS, KIND
        )
    else:
        kq, gamma, weights, first_weight, ring_weights, fold = prepare_head(
            ring, activations, parameters, row, window, g, h, head_row, L, FOLDS, KIND
        )
    steps = steps_of(betas, weights, first_weight, KIND)

    for i in tl.range(TILES, num_stages=AHEAD):
        first_row = head_row + i * BLOCK_ROWS
        tile = tile_at(h, first_row, FORM)
        factor, codes = state_io.load_codes(pool, slot, known, tile, FORM, WHOLE)
        u = replay_window.load_token_rows(u_rows, seen, first_row, ROWS, BLOCK_ROWS, ROWS % BLOCK_ROWS == 0, BESIDE)
        rows = first_row + tl.arange(0, BLOCK_ROWS)
        values = load_values(v_at, row, h, rows, rows < ROWS, KIND)
        if FOLDS:
            old_keys, old_weight, alpha = fold
            codes = replay_window.operands_of(codes, known, 2, KIND.PADDING, FORM)
            old_u = terms_of(tl.trans(u.to(tl.float32) * old_weight[:, None]), KIND.FOLD_TERMS, FORM.TARGET)
            s = delta_window.folded_tile(codes, factor, alpha, old_u, old_keys, dtype, KIND.FOLD_TERMS, FORM)
            drawing = (seed, BEFORE_THE_FIRST_TOKEN, stream)
            factor, codes = state_io.store_rounded(pool, slot, known & KIND.UPDATE, tile, s, drawing, FORM)
        codes = replay_window.operands_of(codes, known, WIDTH, KIND.PADDING, FORM)
        y = tl.zeros([BLOCK_ROWS, 2 * KIND.HALF], tl.float32)
        for c in tl.static_range(len(codes)):
            y = dot_terms(state_io.terms_of_code(codes[c], dtype, KIND.STATE_TERMS, FORM.TARGET), transposed(kq[c]), y)
        y = y * factor * gamma[None, :]
        if not FOLDS:
            y = dot_terms(transposed(terms_of(u, KIND.RING_TERMS, FORM.TARGET)), ring_weights, y)
        if KIND.TOKENS <= MOST_UNROLLED:
            correct_few(y, values, rows, rows < ROWS, out, ring_u, start, L, row, h, steps, u_dtype, KIND)
        else:
            correct_all(
                y, rows, rows < ROWS, beta_at, v_at, out, ring_u, start, L, row, h, weights, first_weight, u_dtype, KIND
            )  # fmt: skip


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
    HALF: tl.constexpr = max(4, TOKENS)
    FORM: tl.constexpr = form_of(
        ROWS, COLS, BLOCK_ROWS, BLOCK_COLS, CHUNK, VECTOR, STREAMING, TARGET, False, ROUNDING, ROUNDS,
        ALIGNED, THREADS, "portable", HEAD_STRIDE=HEAD_STRIDE,
    )  # fmt: skip
    KIND: tl.constexpr = delta_replay_of(
        HEADS_PER_GROUP, UPDATE, PADDING, WIDE, PER_CHANNEL, BIAS_PER_CHANNEL, QK_L2NORM, B_LOGIT, TOKENS, HALF, ROOM,
        SHARED_SEED, RING_K_H, RING_U_H, RING_DECAY_H, dtype=data_ptr.dtype.element_ty,
        k_dtype=k_ptr.dtype.element_ty, u_dtype=ring_u_ptr.dtype.element_ty, FORM=FORM,
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
