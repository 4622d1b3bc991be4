"""Tensor cores: float32 as sums of their operands, products of such sums, and columns in the order they are held in.

What products are added to stands between the tuples that are multiplied. Triton 3.6 tells calls of a function apart by
the types of all that is in its arguments, not by where tuples end: of tuples side by side, one and three terms would be
taken for two and two. tests/compiling.py watches over it.
"""

import triton
import triton.language as tl

from flashstate.kernels.ptx import split_ptx

QUAD = tl.constexpr(4)  # threads that share a row of an operand
MOST_HALVINGS = tl.constexpr(8)  # of a matrix into chunks


@triton.jit
def terms_of(x, TERMS: tl.constexpr, TARGET: tl.constexpr):
    """Values as so many bfloat16, each the rest of those before, to be summed: bfloat16 as one, float16 as two at most.
    With no TERMS, and in the interpreter, whose products of bfloat16 are wrong, as float32."""
    if TARGET == "interpreter" or TERMS == 0:
        return (x.to(tl.float32),)
    elif x.dtype == tl.bfloat16:
        return (x,)
    else:
        terms = ()
        rest = x.to(tl.float32)
        for i in tl.static_range(min(TERMS, 2) if x.dtype == tl.float16 else TERMS):
            if i + 1 < TERMS and (TARGET == "sm_80" or TARGET == "sm_89"):
                term, rest = split_ptx(rest)
            else:
                term = rest.to(tl.bfloat16)
                rest = rest - term.to(tl.float32)
            terms = terms + (term,)
        return terms


@triton.jit
def by_warps(x, WARPS: tl.constexpr):
    """A matrix of which a thread has every so many rows as one for each warp, (WARPS, rows, columns), with the rows it
    has: in multiples of 16, as operands have them, so nothing moves between threads."""
    rows: tl.constexpr = x.shape[0] // WARPS
    x = tl.permute(tl.reshape(x, (rows // 8, WARPS, 8, x.shape[1])), (1, 0, 2, 3))
    return tl.reshape(x, (WARPS, rows, x.shape[3]))


@triton.jit
def in_rows(x):
    """A matrix (rows, columns), from one for each warp as by_warps gives it."""
    warps: tl.constexpr = x.shape[0]
    rows: tl.constexpr = x.shape[1]
    x = tl.permute(tl.reshape(x, (warps, rows // 8, 8, x.shape[2])), (1, 0, 2, 3))
    return tl.reshape(x, (warps * rows, x.shape[3]))


@triton.jit
def multiply(x, y, total):
    """total + x y, of matrices; or, if total is that, of those of every warp, or of all rows, with a y they share."""
    if len(total.shape) == 3:
        if len(x.shape) == 2:
            x = by_warps(x, total.shape[0])
        y = tl.broadcast_to(y[None, :, :], (total.shape[0], y.shape[0], y.shape[1]))
    return tl.dot(x, y, total, input_precision="ieee")


@triton.jit
def dot_terms(x, total, y):
    """total + x y in float32, of matrices that are sums of terms; without the products that are too small to count
    beside the last terms."""
    for i in tl.static_range(len(x)):
        for j in tl.static_range(len(y)):
            if i + j < max(len(x), len(y)):
                total = multiply(x[i], y[j], total)
    return total


@triton.jit
def products(x, y):
    """x times y transposed, of matrices that are chunks side by side, each a sum of terms: (rows of x, rows of y)."""
    total = tl.zeros([x[0][0].shape[0], y[0][0].shape[0]], tl.float32)
    for i in tl.static_range(len(x)):
        total = dot_terms(x[i], total, transposed(y[i]))
    return total


@triton.jit
def dot_terms_apart(x, total, rest, y):
    """x y in float32, of matrices that are sums of terms, as two sums that do not wait for each other: total + the
    product of the first terms, and rest + all others that dot_terms has."""
    total = multiply(x[0], y[0], total)
    for j in tl.static_range(len(y)):
        for i in tl.static_range(len(x)):
            if i + j > 0 and i + j < max(len(x), len(y)):
                rest = multiply(x[i], y[j], rest)
    return total, rest


@triton.jit
def transposed(terms):
    """Every term, transposed."""
    flipped = ()
    for i in tl.static_range(len(terms)):
        flipped = flipped + (tl.trans(terms[i]),)
    return flipped


@triton.jit
def as_operand(x, PER_COLUMNS: tl.constexpr, WIDTH: tl.constexpr = 2):
    """A matrix of chunks of QUAD * PER_COLUMNS columns, of which a thread has PER_COLUMNS neighbours, with its columns
    in another order: one in which tensor cores expect every thread to have what it has. A product sums over columns in
    any order, as long as both matrices have the same; so nothing moves between threads. WIDTH: neighbours that the
    compiler wants in a thread, 2, or 4 where they are loaded in 8 bits each and multiplied at once."""
    if PER_COLUMNS < QUAD:
        return x
    else:
        rows: tl.constexpr = x.shape[0]
        cols: tl.constexpr = x.shape[1]
        chunks: tl.constexpr = cols // (QUAD * PER_COLUMNS)
        if WIDTH == 4:
            x = tl.permute(tl.reshape(x, (rows, chunks, QUAD, PER_COLUMNS // 4, 4)), (0, 1, 3, 2, 4))
        else:
            x = tl.permute(tl.reshape(x, (rows, chunks, QUAD, PER_COLUMNS // 4, 2, 2)), (0, 1, 3, 4, 2, 5))
        return tl.reshape(x, (rows, cols))


@triton.jit
def as_in_memory(x, PER_COLUMNS: tl.constexpr, WIDTH: tl.constexpr = 2):
    """A chunk with its columns as they are in memory, from one as as_operand has it."""
    if PER_COLUMNS < QUAD:
        return x
    else:
        rows: tl.constexpr = x.shape[0]
        if WIDTH == 4:
            x = tl.permute(tl.reshape(x, (rows, PER_COLUMNS // 4, QUAD, 4)), (0, 2, 1, 3))
        else:
            x = tl.permute(tl.reshape(x, (rows, PER_COLUMNS // 4, 2, QUAD, 2)), (0, 3, 1, 2, 4))
        return tl.reshape(x, (rows, QUAD * PER_COLUMNS))


@triton.jit
def operand_of_chunks(chunks, PER_COLUMNS: tl.constexpr):
    """Chunks (rows, QUAD * PER_COLUMNS) side by side, each as as_operand has it."""
    parts = ()
    for i in tl.static_range(len(chunks)):
        parts = parts + (as_operand(chunks[i], PER_COLUMNS),)
    for _ in tl.static_range(MOST_HALVINGS):
        if len(parts) > 1:
            pairs = ()
            for i in tl.static_range(len(parts) // 2):
                pairs = pairs + (beside(parts[2 * i], parts[2 * i + 1]),)
            parts = pairs
    return parts[0]


@triton.jit
def chunks_of_operand(x, CHUNK: tl.constexpr, PER_COLUMNS: tl.constexpr):
    """Chunks as they are in memory, (rows, CHUNK) each, from a matrix as operand_of_chunks has it."""
    parts = halved(x, CHUNK)
    chunks = ()
    for i in tl.static_range(len(parts)):
        chunks = chunks + (as_in_memory(parts[i], PER_COLUMNS),)
    return chunks


@triton.jit
def halved(x, COLUMNS: tl.constexpr):
    """A matrix in parts of so many columns."""
    parts = (x,)
    for _ in tl.static_range(MOST_HALVINGS):
        if parts[0].shape[1] > COLUMNS:
            halves = ()
            for i in tl.static_range(len(parts)):
                halves = halves + left_and_right(parts[i])
            parts = halves
    return parts


@triton.jit
def with_chunk(stack, chunk, i):
    """Chunks that lie on each other, (rows, columns, chunks), with this one at place i."""
    return tl.where((tl.arange(0, stack.shape[2]) == i)[None, None, :], chunk[:, :, None], stack)


@triton.jit
def chunks_of_stack(stack):
    """Every chunk of those that lie on each other, (rows, columns) each."""
    rows: tl.constexpr = stack.shape[0]
    cols: tl.constexpr = stack.shape[1]
    parts = (tl.reshape(stack, (rows, cols * stack.shape[2])),)
    for _ in tl.static_range(MOST_HALVINGS):
        if parts[0].shape[1] > cols:
            halves = ()
            for i in tl.static_range(len(parts)):
                x = tl.reshape(parts[i], (rows, cols, 2, parts[i].shape[1] // cols // 2))
                x = tl.permute(x, (0, 1, 3, 2))
                left, right = tl.split(x)
                halves = halves + (tl.reshape(left, (rows, parts[i].shape[1] // 2)),)
                halves = halves + (tl.reshape(right, (rows, parts[i].shape[1] // 2)),)
            parts = halves
    return parts


@triton.jit
def upper_and_lower(x):
    """The halves of a matrix, (rows / 2, columns) each."""
    return tl.split(tl.permute(tl.reshape(x, (2, x.shape[0] // 2, x.shape[1])), (1, 2, 0)))


@triton.jit
def left_and_right(x):
    """The halves of a matrix, (rows, columns / 2) each."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def sum_columns(x):
    """The sum of every row, halves onto each other: in one order, however threads share it."""
    for _ in tl.static_range(MOST_HALVINGS):
        if x.shape[1] > 1:
            left, right = left_and_right(x)
            x = left + right
    return tl.reshape(x, (x.shape[0],))


@triton.jit
def above(x, y):
    """Two matrices, one on top of the other."""
    return tl.reshape(tl.permute(tl.join(x, y), (2, 0, 1)), (2 * x.shape[0], x.shape[1]))


@triton.jit
def beside(x, y):
    """Two matrices, side by side."""
    return tl.reshape(tl.permute(tl.join(x, y), (0, 2, 1)), (x.shape[0], 2 * x.shape[1]))


@triton.jit
def add_products(w, total, k):
    """total + w k, of matrices (rows, tokens) and (tokens, columns) that are sums of terms, k of no more than w. Of
    three terms each, six of the nine products; the others are too small to count. Tensor cores sum over 16 tokens at
    least: of eight, two products go side by side. They round every sum towards zero, so the smallest products are added
    first: largest first, folds into float32 exceeded their error budget for a quarter of random inputs."""
    if w[0].shape[1] < 16 and len(w) > 1:
        if len(w) == 3:
            if len(k) == 3:
                total = multiply(beside(w[2], w[0]), above(k[0], k[2]), total)
            else:
                total = multiply(beside(w[2], tl.zeros_like(w[2])), above(k[0], k[0]), total)
        for j in tl.static_range(min(2, len(k)) - 1, -1, -1):
            total = multiply(beside(w[0], w[1]), above(k[j], k[j]), total)
    else:
        for order in tl.static_range(2, -1, -1):
            for i in tl.static_range(len(w)):
                for j in tl.static_range(len(k)):
                    if i + j == order:
                        total = multiply(w[i], k[j], total)
    return total
