"""The tokens of a row through the delta rule, in a tile of gated_delta_replay: one after the other, because each u is
rounded before anything uses it. Few of them in vectors of rows, which need nothing of other threads; more as columns of
a matrix."""

import triton
import triton.language as tl

from flashstate.kernels import delta_window, replay_rows, replay_window
from flashstate.kernels.delta_head import columns_of, columns_that_see, rows_of_tokens
from flashstate.kernels.functions import column_of, entry_of, row_of, sigmoid
from flashstate.kernels.tensor_cores import MOST_HALVINGS, left_and_right

MOST_UNROLLED = 8  # tokens that are corrected in vectors, and
MOST_OF_FLOAT32 = 4  # beside keys of float32, where eight took 55 seconds to compile


@triton.constexpr_function
def in_vectors(KIND):
    """Whether the tokens of a row are few enough to be corrected in vectors."""
    return KIND.TOKENS <= (MOST_UNROLLED if KIND.KEY_TERMS else MOST_OF_FLOAT32)


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
    if in_vectors(KIND):
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
    if in_vectors(KIND):
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
    """Correct token i of a tile: its column of y, which has v less what tokens before it predict, becomes u; and those
    that see it get their share of that, as a row of weights says. Nothing of others: a NaN would destroy them."""
    column = tl.arange(0, 2 * KIND.HALF)
    u = delta_window.as_kept(beta * column_of(y, i), u_dtype, KIND.FORM.TARGET)[:, None]
    sees = columns_that_see(i, KIND)[None, :]
    return tl.where((column == i)[None, :], u, tl.where(sees, tl.fma(u, weights[None, :], y), y))


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
