"""Tiles of state: their form, where they are in memory, values for their columns and rows, and sums along rows."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashstate.kernels.addressing import token_entry
from flashstate.kernels.ptx import from_bfloat16_ptx, from_float16_ptx, has_ptx

STAGES = tl.constexpr(3)  # of several tiles: while one is stepped the next two are on their way to shared memory
MOST_FOLDS = tl.constexpr(16)  # of the chunks of a row onto each other; a single one stays as it is


class Constants:
    """Constants of a kernel under names: for the compiler constants each, for the interpreter plain values."""

    def __post_init__(self):
        if not triton.knobs.runtime.interpret:
            for name, value in vars(self).items():
                object.__setattr__(self, name, tl.constexpr(value))


@dataclass(frozen=True)
class Form(Constants):
    """All that a compiler knows of a tile: whole rows of a head, in chunks of columns; and how it is loaded and stored,
    in the words of state_io.py."""

    ROWS: int  # of a head
    COLS: int
    BLOCK_ROWS: int  # of the tile; ROWS and COLS, or more where those are no powers of two
    BLOCK_COLS: int
    CHUNK: int  # columns of a chunk
    VECTOR: int  # elements per access
    PER_COLUMNS: int  # neighbouring columns that a thread has
    HINT: str
    TARGET: str
    TRANSPOSED: bool  # the elements of a column are neighbours in memory, and not those of a row
    ROUNDING: str
    ROUNDS: int
    ALIGNMENT: int  # bytes that rows of what tokens bring start at multiples of
    THREADS: int  # of a program
    WIDENING: str  # the TARGET by whose instructions bfloat16 is converted
    HEAD_STRIDE: int | None  # elements from head to head, where heads are apart; None: they lie side by side


@triton.constexpr_function
def form_of(
    ROWS, COLS, BLOCK_ROWS, BLOCK_COLS, CHUNK, VECTOR, HINT, TARGET, TRANSPOSED=False, ROUNDING="nearest", ROUNDS=0,
    ALIGNED=False, THREADS=0, WIDENING=None, HEAD_STRIDE=None,
):  # fmt: skip
    """The form of tiles that are accessed so; THREADS only where load_columns needs them."""
    tile = (ROWS, COLS, BLOCK_ROWS, BLOCK_COLS, CHUNK, VECTOR, 1 if TRANSPOSED else VECTOR)
    stored = (HINT, TARGET, TRANSPOSED, ROUNDING, ROUNDS)
    return Form(*tile, *stored, 16 if ALIGNED else 1, THREADS, WIDENING or TARGET, HEAD_STRIDE)


@triton.constexpr_function
def stored_as(FORM, VECTOR, TRANSPOSED, ROUNDING, HEAD_STRIDE):
    """The form of the same tiles where they are stored otherwise."""
    changed = {"VECTOR": VECTOR, "PER_COLUMNS": 1 if TRANSPOSED else VECTOR, "TRANSPOSED": TRANSPOSED}
    return Form(**{**vars(FORM), **changed, "ROUNDING": ROUNDING, "HEAD_STRIDE": HEAD_STRIDE})


@triton.constexpr_function
def rounded_as(FORM, ROUNDING):
    """The form of the same tiles where they are rounded otherwise."""
    return Form(**{**vars(FORM), "ROUNDING": ROUNDING})


@triton.constexpr_function
def form_of_rows(FORM, BLOCK_ROWS):
    """The form of tiles that have so many rows."""
    return Form(**{**vars(FORM), "BLOCK_ROWS": BLOCK_ROWS})


@triton.constexpr_function
def aligned_as(FORM, ALIGNED):
    """The form of the same tiles where rows of what tokens bring are aligned, or are not."""
    return Form(**{**vars(FORM), "ALIGNMENT": 16 if ALIGNED and FORM.ALIGNMENT == 16 else 1})


class Tile(NamedTuple):
    """Whole rows of a head, as a tuple of chunks, (BLOCK_ROWS, CHUNK) each: threads share a row only within a chunk,
    and every thread walks along its rows from chunk to chunk."""

    first: Any  # element, within the slot
    first_row: Any  # within the head
    offsets: Any  # of a chunk, from its first element
    rows: Any  # within the slot
    masks: Any  # of every chunk: which elements exist
    mask_rows: Any


@triton.jit
def first_element(h, first_row, FORM: tl.constexpr):
    """Where `first_row` of head h starts within the slot, which reaches over fewer than 2^31 elements."""
    if FORM.HEAD_STRIDE is not None:
        return h * FORM.HEAD_STRIDE + first_row * (1 if FORM.TRANSPOSED else FORM.COLS)
    elif FORM.TRANSPOSED:
        return h * (FORM.ROWS * FORM.COLS) + first_row
    else:
        return (h * FORM.ROWS + first_row) * FORM.COLS


@triton.jit
def tile_at(h, first_row, FORM: tl.constexpr):
    """The tile of head h from `first_row` on."""
    first, end = h * FORM.ROWS + first_row, h * FORM.ROWS + FORM.ROWS  # rows, within the slot
    rows = first + tl.arange(0, FORM.BLOCK_ROWS)
    mask_rows = rows < end
    cols = tl.arange(0, FORM.CHUNK)
    masks = ()
    for k in tl.static_range(FORM.BLOCK_COLS // FORM.CHUNK):
        masks = masks + (mask_rows[:, None] & (k * FORM.CHUNK + cols < FORM.COLS)[None, :],)
    if FORM.TRANSPOSED:
        offsets = tl.arange(0, FORM.BLOCK_ROWS)[:, None] + cols[None, :] * FORM.ROWS
    else:
        offsets = tl.arange(0, FORM.BLOCK_ROWS)[:, None] * FORM.COLS + cols[None, :]
    return Tile(first_element(h, first_row, FORM), first_row, offsets, rows, masks, mask_rows)


@triton.jit
def chunk_at(tile_start, tile, k, FORM: tl.constexpr):
    """Pointers to chunk k of a tile that starts there, and which of them exist: rows and columns as the tile has them,
    or of a transposed state (groups, columns, VECTOR rows of each group). So a thread has the rows of a group and its
    neighbours have other columns; of rows and columns the compiler would split rows over warps."""
    if FORM.TRANSPOSED:
        group: tl.constexpr = min(FORM.VECTOR, FORM.BLOCK_ROWS)
        rows = (tl.arange(0, FORM.BLOCK_ROWS // group) * group)[:, None, None] + tl.arange(0, group)[None, None, :]
        cols = k * FORM.CHUNK + tl.arange(0, FORM.CHUNK)[None, :, None]
        return tile_start + (rows + cols * FORM.ROWS), (tile.first_row + rows < FORM.ROWS) & (cols < FORM.COLS)
    else:
        return tile_start + k * FORM.CHUNK + tile.offsets, tile.masks[k]


@triton.jit
def as_rows(chunk):
    """A chunk of rows and columns, from one as chunk_at has it."""
    if len(chunk.shape) == 2:
        return chunk
    else:
        return tl.reshape(tl.permute(chunk, (0, 2, 1)), (chunk.shape[0] * chunk.shape[2], chunk.shape[1]))


@triton.jit
def as_accessed(chunk, shape: tl.constexpr):
    """A chunk as chunk_at has it, in that shape, from one of rows and columns."""
    return chunk if len(shape) == 2 else tl.permute(tl.reshape(chunk, (shape[0], shape[2], shape[1])), (0, 2, 1))


@triton.jit
def load_columns(tensor, b, t, g, exists, ALIGNMENT: tl.constexpr, FORM: tl.constexpr):
    """What token t of group g has for each column, in chunks as a tile has them, (1, CHUNK) or (BLOCK_ROWS, CHUNK);
    zero in columns that do not exist, and where the token does not.

    A vector with a value for every thread is loaded once and handed on through shared memory, behind a barrier. Loaded
    as a tile, every thread has its values where it needs them. The compiler is told of no wider alignment than the
    state has: it gives a tile the layout of its widest access, and that would change the order of sums.
    """
    as_tile: tl.constexpr = FORM.CHUNK >= FORM.THREADS
    width: tl.constexpr = tensor[0].dtype.element_ty.primitive_bitwidth // 8
    entry = token_entry(tensor, b, t, g, min(ALIGNMENT, FORM.PER_COLUMNS * width) if as_tile else ALIGNMENT)
    values = ()
    for k in tl.static_range(FORM.BLOCK_COLS // FORM.CHUNK):
        cols = (k * FORM.CHUNK + tl.arange(0, FORM.CHUNK))[None, :]
        if as_tile:
            cols += tl.zeros([FORM.BLOCK_ROWS, 1], tl.int32)
        mask = tl.where(exists, cols < FORM.COLS, False)
        values = values + (widened(tl.load(entry + cols, mask=mask, other=0.0), FORM.WIDENING),)
    return values


@triton.jit
def widened(x, TARGET: tl.constexpr):
    """Values in float32."""
    if x.dtype == tl.bfloat16 and has_ptx(TARGET):
        return from_bfloat16_ptx(x.to(tl.uint16, bitcast=True))
    else:
        return x.to(tl.float32)


@triton.jit
def widened_here(x, TARGET: tl.constexpr):
    """Values in float32, in the threads that have them: by a conversion that the compiler knows it would move 16 bits
    to where they are needed, and have all that follows done there."""
    if x.dtype == tl.float16 and has_ptx(TARGET):
        return from_float16_ptx(x)
    else:
        return widened(x, TARGET)


@triton.jit
def load_or_zero(ptrs, mask):
    """Values in float32; zero where masked."""
    return tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_rows(ptr, offs_d, mask_d, exists):
    """A value for each row of a head, (BLOCK_ROWS,); zeros where nothing exists."""
    return load_or_zero(ptr + offs_d, mask=tl.where(exists, mask_d, False))


@triton.jit
def load_head(ptr, offs_d, mask_d, exists, PER_ROW: tl.constexpr):
    """A value for each row of a head, (BLOCK_ROWS,), or one for all; zero where nothing exists."""
    return load_rows(ptr, offs_d, mask_d, exists) if PER_ROW else load_or_zero(ptr, mask=exists)


@triton.jit
def dot_rows(s, C, VECTOR: tl.constexpr):
    """The product of every row with the values C of its columns, summed in an order that does not depend on how many
    threads share a row: VECTOR neighbouring columns first, which one thread holds, then halves of the row onto each
    other, in a thread as far as it holds both."""
    return tl.sum(sums_by_thread(s, C, VECTOR), axis=1)


@triton.jit
def sums_by_thread(s, C, VECTOR: tl.constexpr):
    """The part of these sums that a thread makes on its own: (rows, threads of a row)."""
    sums = ()
    for k in tl.static_range(len(s)):
        sums = sums + (sum_vectors(s[k], C[k], VECTOR),)
    for _ in tl.static_range(MOST_FOLDS):
        if len(sums) > 1:
            folded = ()
            for k in tl.static_range(len(sums) // 2):
                folded = folded + (sums[k] + sums[len(sums) // 2 + k],)
            sums = folded
    tl.static_assert(len(sums) == 1)
    return sums[0]


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
