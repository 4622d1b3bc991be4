"""Tiles of state in registers: values for their columns and rows, and products that are summed along rows."""

import triton
import triton.language as tl

from flashstate.kernels.addressing import token_entry
from flashstate.kernels.ptx import from_bfloat16_ptx

STAGES = tl.constexpr(3)  # of several tiles: while one is stepped the next two are on their way to shared memory
MOST_HALVINGS = tl.constexpr(16)  # of the chunks of a row; a single one stays as it is


@triton.jit
def load_columns(
    tensor, b, t, g, exists, ALIGNED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNK: tl.constexpr, VECTOR: tl.constexpr,
    THREADS: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """What token t of group g has for each column, in chunks as a tile has them, (1, CHUNK) or (BLOCK_ROWS, CHUNK);
    zero in columns that do not exist, and where the token does not.

    A vector with a value for every thread is loaded once and handed on through shared memory, behind a barrier. Loaded
    as a tile, every thread has its values where it needs them. The compiler is told of no wider alignment than the
    state has: it gives a tile the layout of its widest access, and that would change the order of sums.
    """
    as_tile: tl.constexpr = CHUNK >= THREADS
    width: tl.constexpr = tensor[0].dtype.element_ty.primitive_bitwidth // 8
    alignment: tl.constexpr = min(16, VECTOR * width) if as_tile else 16
    entry = token_entry(tensor, b, t, g, alignment if ALIGNED else 1)
    values = ()
    for k in tl.static_range(BLOCK_COLS // CHUNK):
        cols = (k * CHUNK + tl.arange(0, CHUNK))[None, :]
        if as_tile:
            cols += tl.zeros([BLOCK_ROWS, 1], tl.int32)
        mask = tl.where(exists, cols < COLS, False)
        values = values + (widened(tl.load(entry + cols, mask=mask, other=0.0), TARGET),)
    return values


@triton.jit
def widened(x, TARGET: tl.constexpr):
    """Values in float32."""
    if x.dtype == tl.bfloat16 and (TARGET == "sm_80" or TARGET == "sm_89"):
        return from_bfloat16_ptx(x.to(tl.uint16, bitcast=True))
    else:
        return x.to(tl.float32)


@triton.jit
def load_rows(ptr, offs_d, mask_d, exists):
    """A value for each row of a head, (BLOCK_ROWS,); zeros where nothing exists."""
    return tl.load(ptr + offs_d, mask=tl.where(exists, mask_d, False), other=0.0).to(tl.float32)


@triton.jit
def store_rows(ptr, offs_d, mask_d, goes, values):
    """Store a value for each row of a head."""
    tl.store(ptr + offs_d, values.to(ptr.dtype.element_ty), mask=tl.where(goes, mask_d, False))


@triton.jit
def load_head(ptr, offs_d, mask_d, exists, PER_ROW: tl.constexpr):
    """A value for each row of a head, (BLOCK_ROWS,), or one for all; zero where nothing exists."""
    if PER_ROW:
        return load_rows(ptr, offs_d, mask_d, exists)
    else:
        return tl.load(ptr, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def dot_rows(s, C, VECTOR: tl.constexpr):
    """The product of every row with the values C of its columns, summed in an order that does not depend on how many
    threads share a row: VECTOR neighbouring columns first, which one thread holds, then halves of the row onto each
    other, in a thread as far as it holds both."""
    sums = ()
    for k in tl.static_range(len(s)):
        sums = sums + (sum_vectors(s[k], C[k], VECTOR),)
    for _ in tl.static_range(MOST_HALVINGS):
        sums = fold(sums)
    tl.static_assert(len(sums) == 1)
    return tl.sum(sums[0], axis=1)


@triton.jit
def sum_vectors(s, C, VECTOR: tl.constexpr):
    """The products of each VECTOR neighbours, summed: (rows, columns / VECTOR)."""
    vectors: tl.constexpr = s.shape[1] // VECTOR
    parts, weights = (tl.reshape(s, (s.shape[0], vectors, VECTOR)),), (tl.reshape(C, (C.shape[0], vectors, VECTOR)),)
    for i in tl.static_range(4):
        if (2 << i) <= VECTOR:
            parts, weights = halves_of(parts), halves_of(weights)
    total = parts[0] * weights[0]
    for k in tl.static_range(1, len(parts)):
        total = tl.fma(parts[k], weights[k], total)
    return tl.reshape(total, (s.shape[0], vectors))


@triton.jit
def halves_of(values):
    """Even and odd entries of the last axis of every value."""
    halves = ()
    for k in tl.static_range(len(values)):
        value = values[k]
        even, odd = tl.split(tl.reshape(value, value.shape[:-1] + (value.shape[len(value.shape) - 1] // 2, 2)))
        halves = halves + (even, odd)
    return halves


@triton.jit
def fold(values):
    """The second half of a tuple added to its first; a single value as it is."""
    if len(values) == 1:
        return values
    else:
        half: tl.constexpr = len(values) // 2
        folded = ()
        for k in tl.static_range(half):
            folded = folded + (values[k] + values[half + k],)
        return folded


@triton.jit
def zero_unless(live, s, factor):
    """A state and the factor of its rows, or a zero state, where masked loads gave anything."""
    chosen = ()
    for k in tl.static_range(len(s)):
        chosen = chosen + (tl.where(live, s[k], 0.0),)
    return chosen, tl.where(live, factor, 1.0)


@triton.jit
def minus_zero():
    """-0.0, which Triton 3.6 makes 0.0 of where it is written so."""
    return tl.full([], -2147483648, tl.int32).to(tl.float32, bitcast=True)
