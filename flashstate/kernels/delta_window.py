"""What kernels of the delta rule do with a replay ring: its keys and decays, and how it is folded into a state."""

import triton
import triton.language as tl

from flashstate.kernels import ptx, replay_window, state_io
from flashstate.kernels.functions import (
    column_of,
    entry_of,
    exp_in_short,
    maximum_or_nan,
    row_of,
    softplus_in_short,
)
from flashstate.kernels.gated_delta import EPSILON, log_decay
from flashstate.kernels.tensor_cores import (
    as_in_memory,
    as_operand,
    chunks_of_stack,
    dot_terms,
    products,
    terms_of,
    transposed,
    with_chunk,
)
from flashstate.kernels.tiles import widened

LEAST_LOGARITHM = tl.constexpr(-1e30)  # of decays: exp of it is 0, and any number of them can be summed up


@triton.constexpr_function
def key_terms(k_dtype):
    """How many bfloat16 stand for a key where tensor cores multiply it: 0 of float32, without tensor cores."""
    return 0 if k_dtype == tl.float32 else 2


@triton.constexpr_function
def sum_terms(k_dtype):
    """How many bfloat16 stand for the logarithm of a decay where products with ones sum it up, beside such keys."""
    return 0 if k_dtype == tl.float32 else 3


@triton.jit
def length_factors(operands, QK_L2NORM: tl.constexpr):
    """What makes every token's vector one of length 1, (tokens,); of vectors as operands, chunk by chunk."""
    return factor_of(products(operands, operands), QK_L2NORM)


@triton.jit
def factor_of(with_each_other, QK_L2NORM: tl.constexpr):
    """What makes vectors with these products of length 1, (vectors,); 1 where they stay as they are. By products, and
    their diagonal, which is exact in whatever order it is summed: so in one order, however threads share a vector."""
    i = tl.arange(0, with_each_other.shape[0])
    squares = tl.sum(tl.where(i[:, None] == i[None, :], with_each_other, 0.0), 0)
    return tl.rsqrt(squares + EPSILON) if QK_L2NORM else tl.full(squares.shape, 1.0, tl.float32)


@triton.jit
def factors_in_loop(rows, exists, QK_L2NORM: tl.constexpr, FORM: tl.constexpr):
    """What length_factors gives of rows of float32 that these pointers start, in a loop, as products_in_loop is."""
    total = tl.zeros([rows.shape[0], rows.shape[0]], tl.float32)
    for i in tl.range(FORM.BLOCK_COLS // FORM.CHUNK if QK_L2NORM else 0, num_stages=1):
        x = replay_window.float32_chunk(rows, exists, i, FORM)
        total = dot_terms(x, total, transposed(x))
    return factor_of(total, QK_L2NORM)


@triton.jit
def operands_in_loop(rows, exists, TERMS: tl.constexpr, WIDTH: tl.constexpr, FORM: tl.constexpr):
    """Rows of float32 that these pointers start, as token_operands gives them, and their products with each other; in a
    loop, as products_in_loop is, which puts chunks on a stack."""
    CHUNKS: tl.constexpr = FORM.BLOCK_COLS // FORM.CHUNK
    squares = tl.zeros([rows.shape[0], rows.shape[0]], tl.float32)
    stack = tl.zeros([rows.shape[0], FORM.CHUNK, CHUNKS], tl.float32)
    for i in tl.range(CHUNKS, num_stages=1):
        x = replay_window.load_token_chunk(rows, exists, i, FORM)
        operand = (ordered(x, 2, FORM),)
        squares = dot_terms(operand, squares, transposed(operand))
        stack = with_chunk(stack, ordered(x, WIDTH, FORM), i)
    return replay_window.all_terms_of(chunks_of_stack(stack), TERMS, FORM.TARGET), squares


@triton.jit
def summable(logs):
    """Logarithms of decays that products with ones can sum up: of a decay 0 one that is finite, so that it is still 0,
    and no product with a zero is NaN."""
    return maximum_or_nan(logs, LEAST_LOGARITHM)


@triton.jit
def sums_of_rows(which, logs, TERMS: tl.constexpr, TARGET: tl.constexpr):
    """Sums of the rows of logs that each row of `which` marks with 1: by products, so every sum is made on its own, and
    in one order however threads share it."""
    nothing = tl.zeros([which.shape[0], logs.shape[1]], tl.float32)
    return dot_terms(terms_of(which, min(TERMS, 1), TARGET), nothing, terms_of(logs, TERMS, TARGET))


@triton.jit
def load_log_decays(
    rows, exists, i, rate, bias_ptr, h, BIAS_PER_CHANNEL: tl.constexpr, FORM: tl.constexpr
):  # fmt: skip
    """Logarithms of the decays of every token in chunk i of columns, to be summed up, from the rows of a that these
    pointers start; zero for what does not exist."""
    cols = i * FORM.CHUNK + tl.arange(0, FORM.CHUNK)
    bias = 0.0
    if bias_ptr is not None and BIAS_PER_CHANNEL:
        bias = tl.load(bias_ptr + h * FORM.COLS + cols, mask=cols < FORM.COLS, other=0.0).to(tl.float32)[None, :]
    elif bias_ptr is not None:
        bias = tl.load(bias_ptr + h).to(tl.float32)
    a = widened(replay_window.load_token_chunk(rows, exists, i, FORM), FORM.WIDENING)
    if rate is None or rows.dtype.element_ty == tl.float32:
        g = log_decay(a, rate, bias)
    else:
        g = -rate * softplus_in_short(a + bias, FORM.TARGET)
    return tl.where(exists[:, None] & (cols < FORM.COLS)[None, :], summable(g), 0.0)


@triton.jit
def decays_of_ring(g, live, TERMS: tl.constexpr, TARGET: tl.constexpr):
    """How much is left at the end of a ring of what each of its `live` rows added, and of the state before them; `g`:
    logarithms of decays, one for each row."""
    after, total = replay_window.sums_between(summable(g), live - 1 + tl.zeros([8], tl.int32), TERMS, TARGET)
    return tl.exp(column_of(after, 0)), tl.exp(entry_of(total, 0))


@triton.jit
def decays_of_channels(logs, TERMS: tl.constexpr, TARGET: tl.constexpr):
    """How much is left at the end of a ring of what each of its rows added, (rows, CHUNK), and of the state before it,
    (1, CHUNK); `logs`: logarithms of decays, zero in rows that are not live."""
    j = tl.arange(0, logs.shape[0])
    after = sums_of_rows(tl.where(j[None, :] > j[:, None], 1.0, 0.0), logs, TERMS, TARGET)
    return exp_in_short(after, TARGET), exp_in_short(row_of(after + logs, 0), TARGET)[None, :]


@triton.jit
def ring_chunk(
    k_rows, a_rows, lives, i, rate, bias_ptr, h, squares, BIAS_PER_CHANNEL: tl.constexpr, FORM: tl.constexpr
):  # fmt: skip
    """Of a ring with a decay per channel, in chunk i of columns: its keys, each as much as is left of it at the end of
    the ring; what is left of the state before; and `squares` and the products of its keys with each other."""
    k_dtype: tl.constexpr = k_rows.dtype.element_ty
    logs = load_log_decays(a_rows, lives, i, rate, bias_ptr, h, BIAS_PER_CHANNEL, FORM)
    left, alpha = decays_of_channels(logs, sum_terms(k_dtype), FORM.TARGET)
    keys = replay_window.load_token_chunk(k_rows, lives, i, FORM)
    operand = operand_of(keys, key_terms(k_dtype), 2, FORM)
    return widened(keys, FORM.WIDENING) * left, alpha, dot_terms(operand, squares, transposed(operand))


@triton.jit
def operand_of(x, TERMS: tl.constexpr, WIDTH: tl.constexpr, FORM: tl.constexpr):
    """A chunk of tokens as an operand of tensor cores, with columns in the order that a state has there."""
    return terms_of(ordered(x, WIDTH, FORM), TERMS, FORM.TARGET)


@triton.jit
def ordered(x, WIDTH: tl.constexpr, FORM: tl.constexpr):
    """A chunk with columns in the order that operands have."""
    return as_operand(x, FORM.VECTOR, WIDTH)


@triton.jit
def folded_tile(codes, factor, alpha, u, keys, dtype: tl.constexpr, TERMS: tl.constexpr, FORM: tl.constexpr):
    """A tile after the rows of a ring, in float32 and as it is in memory: what is stored, as operands and times alpha,
    one for each chunk, plus the products of u (rows, ring rows) with keys."""
    s = ()
    for i in tl.static_range(len(codes)):
        chunk = replay_window.folded(codes[i], factor, alpha[i], u, keys[i], dtype, TERMS, FORM.TARGET)
        s = s + (as_in_memory(chunk, FORM.VECTOR),)
    return s


@triton.jit
def as_kept(u, dtype: tl.constexpr, TARGET: tl.constexpr):
    """u in float32, as a ring keeps it: to nearest, and no finite value becomes infinite."""
    if dtype == tl.float32:
        return u
    else:
        largest: tl.constexpr = 65504.0 if dtype == tl.float16 else 3.3895313892515355e38
        within = tl.minimum(tl.maximum(u, -largest), largest)
        u = tl.where(tl.abs(u) < float("inf"), within, u)
        return state_io.from_code(state_io.as_loaded(state_io.to_nearest(u, dtype, TARGET), dtype), dtype, TARGET)


@triton.jit
def store_kept(ptrs, u, goes, dtype: tl.constexpr, TARGET: tl.constexpr):
    """Store values in a ring that are as it keeps them."""
    code = state_io.to_nearest(u, dtype, TARGET)
    tl.store(ptrs.to(tl.pointer_type(code.dtype), bitcast=True), code, mask=goes)


@triton.jit
def prefetch_rows(rows, lives, first, COUNT: tl.constexpr, SIZE: tl.constexpr, TARGET: tl.constexpr):
    """Ask for COUNT values, from `first` on, of rows of a ring that these pointers start, SIZE long, to come to the L2
    cache; on NVIDIA. A tile, or a chunk, has few bytes of each, and would wait for them one by one."""
    if ptx.has_ptx(TARGET):
        per_line: tl.constexpr = ptx.LINE // state_io.state_bytes(rows.dtype.element_ty, 1)
        lines = first + tl.arange(0, triton.next_power_of_2(triton.cdiv(COUNT, per_line))) * per_line
        ptx.prefetch_ptx(rows[:, None] + lines[None, :], lives[:, None] & (lines < SIZE)[None, :])
