"""What the kernels of replay do with a ring of inputs and a window of tokens: rows, sums of time steps, a fold."""

import triton
import triton.language as tl

from flashstate.kernels.functions import column_of, entry_of
from flashstate.kernels.state_io import from_code
from flashstate.kernels.tensor_cores import add_products, as_operand, dot_terms, terms_of, transposed


@triton.jit
def row_in_ring(row, L):
    """Rows of a ring of L, of numbers that count on behind its last by no more than L."""
    return tl.where(row >= L, row - L, row)


@triton.jit
def head_in_ring(h, L, WIDTH: tl.constexpr, STRIDE: tl.constexpr):
    """Where the rows of head or group h start in a slot of a ring: behind L rows of WIDTH for each before it, or where
    those lie apart, STRIDE."""
    if STRIDE != 0:
        return h * STRIDE
    elif WIDTH != 1:
        return h * L * WIDTH
    else:
        return h * L


@triton.jit
def rows_in_head(h, row, L, WIDTH: tl.constexpr, STRIDE: tl.constexpr):
    """Where rows of head or group h are in a slot of a ring, as head_in_ring has it."""
    if STRIDE != 0:
        return h * STRIDE + row * WIDTH
    else:
        return (h * L + row) * WIDTH


@triton.jit
def stride_of_heads(L, WIDTH: tl.constexpr, STRIDE: tl.constexpr):
    """From head to head of a ring: L rows of WIDTH, or where heads lie apart, STRIDE."""
    if STRIDE != 0:
        return L * 0 + STRIDE
    elif WIDTH != 1:
        return L * WIDTH
    else:
        return L


@triton.jit
def load_token_rows(
    rows, exists, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr, INSIDE: tl.constexpr, BYTES: tl.constexpr
):  # fmt: skip
    """Values of every token, (tokens, BLOCK), from column `first` of the rows of WIDTH that these pointers start; zero
    for what does not exist. INSIDE: whether all of these columns exist. BYTES: that the rows are aligned to."""
    cols = first + tl.arange(0, BLOCK)
    mask = exists[:, None]
    if not INSIDE:
        mask = mask & (cols < WIDTH)[None, :]
    ptrs = tl.multiple_of(rows[:, None] + cols[None, :], (1, BYTES))  # of arguments the compiler would forget it
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.constexpr_function
def bytes_beside(dtype, FORM):
    """How wide an access of aligned rows of inputs the compiler is to know of: no wider than what threads have side by
    side of a tile of state. Else it would load a tile of the same shape in another layout."""
    return min(FORM.ALIGNMENT, FORM.VECTOR * dtype.primitive_bitwidth // 8)


@triton.jit
def load_token_chunks(rows, exists, FORM: tl.constexpr):
    """Values of every token, from the rows that these pointers start, in chunks as a tile has them: (tokens, CHUNK)
    each, zero for what does not exist."""
    chunks = ()
    for i in tl.static_range(FORM.BLOCK_COLS // FORM.CHUNK):
        chunks = chunks + (load_token_chunk(rows, exists, i, FORM),)
    return chunks


@triton.jit
def load_token_chunk(rows, exists, i, FORM: tl.constexpr):
    """Chunk i of these. Of a number of a loop the compiler does not know which chunks are inside."""
    BESIDE: tl.constexpr = bytes_beside(rows.dtype.element_ty, FORM)
    CHUNK: tl.constexpr = FORM.CHUNK
    if isinstance(i, int):
        INSIDE: tl.constexpr = (i + 1) * CHUNK <= FORM.COLS
        return load_token_rows(rows, exists, i * CHUNK, FORM.COLS, CHUNK, INSIDE, BESIDE)
    else:
        return load_token_rows(rows, exists, i * CHUNK, FORM.COLS, CHUNK, FORM.COLS == FORM.BLOCK_COLS, BESIDE)


@triton.jit
def float32_chunk(rows, exists, i, FORM: tl.constexpr):
    """Chunk i of every token, which may be a number of a loop, as an operand of float32, without tensor cores."""
    return terms_of(as_operand(load_token_chunk(rows, exists, i, FORM), FORM.VECTOR), 0, FORM.TARGET)


@triton.jit
def products_in_loop(rows, exists, others, others_exist, FORM: tl.constexpr):
    """The products in float32 of all rows that these pointers start with all others, (rows, others), summed as
    `products` does. Without tensor cores they are many instructions, so they are in a loop: else they take long to
    compile."""
    total = tl.zeros([rows.shape[0], others.shape[0]], tl.float32)
    for i in tl.range(FORM.BLOCK_COLS // FORM.CHUNK, num_stages=1):
        x, y = float32_chunk(rows, exists, i, FORM), float32_chunk(others, others_exist, i, FORM)
        total = dot_terms(x, total, transposed(y))
    return total


@triton.jit
def token_operands(chunks, TERMS: tl.constexpr, WIDTH: tl.constexpr, FORM: tl.constexpr):
    """Chunks of tokens as operands of tensor cores, with columns in the order that a state has there."""
    operands = ()
    for i in tl.static_range(len(chunks)):
        operands = operands + (terms_of(as_operand(chunks[i], FORM.VECTOR, WIDTH), TERMS, FORM.TARGET),)
    return operands


@triton.jit
def all_terms_of(chunks, TERMS: tl.constexpr, TARGET: tl.constexpr):
    """Every chunk as operands of tensor cores."""
    operands = ()
    for i in tl.static_range(len(chunks)):
        operands = operands + (terms_of(chunks[i], TERMS, TARGET),)
    return operands


@triton.jit
def load_chunks(rows, exists, TERMS: tl.constexpr, WIDTH: tl.constexpr, FORM: tl.constexpr):
    """Values of every token, from the rows that these pointers start, as operands of tensor cores: a chunk of columns
    each, in the order that a state has there, zero for what does not exist."""
    return token_operands(load_token_chunks(rows, exists, FORM), TERMS, WIDTH, FORM)


@triton.jit
def once(x):
    """A vector of a matrix (tokens, 2) whose second column does not count. As the result of a sum it is made once; else
    the compiler would have it made from its loads on in every layout that needs it, six of them."""
    return tl.sum(tl.where((tl.arange(0, 2) == 0)[None, :], x, 0.0), 1)


@triton.jit
def sums_between(dt, last, TERMS: tl.constexpr, TARGET: tl.constexpr, COPIES: tl.constexpr = 1):
    """Sums of the time steps dt of tokens in a row, up to each of some tokens `last`: of all steps after a token,
    (tokens, last), and of all from the first on, (last,). By products with ones, so in one order however threads share
    them; every sum on its own, because a difference of long ones would lose what is short. COPIES: how often all tokens
    are there, one after the other, so that sums after them are; the first copy is counted."""
    place = tl.arange(0, dt.shape[0])
    counted = tl.where(place[:, None] <= last[None, :], dt[:, None], 0.0)
    token = place % (dt.shape[0] // COPIES)
    after = tl.where(place[None, :] > token[:, None], 1.0, 0.0)
    nothing = tl.zeros([dt.shape[0], last.shape[0]], tl.float32)
    sums = dot_terms(terms_of(after, min(TERMS, 1), TARGET), nothing, terms_of(counted, TERMS, TARGET))
    return sums, tl.sum(tl.where((place == 0)[:, None], sums + counted, 0.0), 0)


@triton.jit
def weights_of_ring(dt, live, A, TERMS: tl.constexpr, TARGET: tl.constexpr):
    """How much every one of `live` tokens with time steps dt counts for the state after the last of them, and how much
    the state before the first."""
    after, total = sums_between(dt, live - 1 + tl.zeros([8], tl.int32), TERMS, TARGET)
    return tl.exp(A * column_of(after, 0)) * dt, tl.exp(A * entry_of(total, 0))


@triton.jit
def folded(code, factor, alpha, u, B, dtype: tl.constexpr, TERMS: tl.constexpr, TARGET: tl.constexpr):
    """A chunk of state after the tokens of a ring: times alpha, plus the products of u (rows, tokens) with B, as terms.
    Tensor cores round sums towards zero: a state of more than 16 bits is added to theirs."""
    s = from_code(code, dtype, TARGET)
    if TERMS == 3:
        return tl.fma(s, alpha * factor, add_products(u, tl.zeros(code.shape, tl.float32), B))
    else:
        return add_products(u, s * (alpha * factor), B)


@triton.jit
def operands_of(codes, live, WIDTH: tl.constexpr, PADDING: tl.constexpr, FORM: tl.constexpr):
    """Stored chunks with columns in the order of operands; zeros where nothing is live, if that matters."""
    operands = ()
    for i in tl.static_range(len(codes)):
        code = codes[i]
        if PADDING == "fresh":
            code = tl.where(live, code, 0).to(code.dtype)
        operands = operands + (as_operand(code, FORM.VECTOR, WIDTH),)
    return operands
