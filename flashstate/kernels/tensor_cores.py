"""Tensor cores: float32 as sums of their operands, products of such sums, and columns in the order they are held in."""

import triton
import triton.language as tl

QUAD = tl.constexpr(4)  # threads that share a row of an operand


@triton.jit
def terms_of(x, TERMS: tl.constexpr, TARGET: tl.constexpr):
    """float32 as so many bfloat16, each the rest of those before, to be summed; in the interpreter, whose products of
    bfloat16 are wrong, as it is."""
    if TARGET == "interpreter":
        return (x,)
    else:
        terms = ()
        for _ in tl.static_range(TERMS):
            term = x.to(tl.bfloat16)
            terms, x = terms + (term,), x - term.to(tl.float32)
        return terms


@triton.jit
def dot_terms(x, y, total):
    """total + x y in float32, of matrices that are sums of terms; without the products that are too small to count
    beside the last terms."""
    for i in tl.static_range(len(x)):
        for j in tl.static_range(len(y)):
            if i + j < max(len(x), len(y)):
                total = tl.dot(x[i], y[j], total, input_precision="ieee")
    return total


@triton.jit
def transposed(terms):
    flipped = ()
    for i in tl.static_range(len(terms)):
        flipped = flipped + (tl.trans(terms[i]),)
    return flipped


@triton.jit
def as_operand(x, PER_COLUMNS: tl.constexpr):
    """A matrix (rows, QUAD * PER_COLUMNS), of which a thread has PER_COLUMNS neighbours, with its columns in another
    order: one in which tensor cores expect every thread to have what it has. A product sums over columns in any order,
    as long as both matrices have the same; so nothing moves between threads."""
    if PER_COLUMNS < QUAD:
        return x
    else:
        rows: tl.constexpr = x.shape[0]
        x = tl.reshape(x, (rows, QUAD, PER_COLUMNS // 4, 2, 2))
        return tl.reshape(tl.permute(x, (0, 2, 3, 1, 4)), (rows, QUAD * PER_COLUMNS))


@triton.jit
def as_in_memory(x, PER_COLUMNS: tl.constexpr):
    """The inverse of as_operand."""
    if PER_COLUMNS < QUAD:
        return x
    else:
        rows: tl.constexpr = x.shape[0]
        x = tl.reshape(x, (rows, PER_COLUMNS // 4, 2, QUAD, 2))
        return tl.reshape(tl.permute(x, (0, 3, 1, 2, 4)), (rows, QUAD * PER_COLUMNS))


@triton.jit
def upper_and_lower(x):
    """The halves of a matrix, (rows / 2, columns) each."""
    return tl.split(tl.permute(tl.reshape(x, (2, x.shape[0] // 2, x.shape[1])), (1, 2, 0)))


@triton.jit
def left_and_right(x):
    """The halves of a matrix, (rows, columns / 2) each."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def chunks_of(x, CHUNK: tl.constexpr):
    """A vector in chunks of so many entries."""
    chunks = (tl.trans(tl.reshape(x, (x.shape[0] // CHUNK, CHUNK))),)  # one behind the other, in registers of a thread
    for i in tl.static_range(6):
        if chunks[0].shape[1] > 1:
            halves = ()
            for j in tl.static_range(len(chunks)):
                halves = halves + left_and_right(chunks[j])
            chunks = halves
    flat = ()
    for j in tl.static_range(len(chunks)):
        flat = flat + (tl.reshape(chunks[j], (CHUNK,)),)
    return flat


@triton.jit
def above(x, y):
    """Two matrices, one on top of the other."""
    return tl.reshape(tl.permute(tl.join(x, y), (2, 0, 1)), (2 * x.shape[0], x.shape[1]))


@triton.jit
def beside(x, y):
    """Two matrices, side by side."""
    return tl.reshape(tl.permute(tl.join(x, y), (0, 2, 1)), (x.shape[0], 2 * x.shape[1]))


@triton.jit
def add_products(total, w, k):
    """total + w k, of matrices (rows, tokens) and (tokens, columns) that are sums of terms, k of no more than w. Of
    three terms each, six of the nine products; the others are too small to count. Tensor cores sum over 16 tokens at
    least: of eight, two products go side by side."""
    if w[0].shape[1] < 16 and len(w) > 1:
        for j in tl.static_range(min(2, len(k))):
            total = tl.dot(beside(w[0], w[1]), above(k[j], k[j]), total)
        if len(w) == 3:
            if len(k) == 3:
                total = tl.dot(beside(w[2], w[0]), above(k[0], k[2]), total)
            else:
                total = tl.dot(beside(w[2], tl.zeros_like(w[2])), above(k[0], k[0]), total)
    else:
        for i in tl.static_range(len(w)):
            for j in tl.static_range(len(k)):
                if i + j < 3:
                    total = tl.dot(w[i], k[j], total, input_precision="ieee")
    return total
