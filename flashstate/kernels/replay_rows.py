"""Rows of a batch and tiles of heads for mamba2_replay: where they are, what is loaded of them, zeros for padding."""

import triton
import triton.language as tl

from flashstate.kernels.addressing import token_entry, token_offset, zero_unused
from flashstate.kernels.replay_window import bytes_beside, load_token_rows
from flashstate.kernels.rings import FIELDS
from flashstate.kernels.slots import resolve_read, token_range
from flashstate.kernels.state_io import STREAMING, load_codes, prefetch_rows
from flashstate.kernels.tiles import tile_at


@triton.jit
def planned_row(rows_ptr, i, cu_seqlens_ptr, tokens):
    """What a plan says of its row i: place in the batch, slot, start, live count, first token, and how many; of packed
    tokens, whose axis a plan does not know, no more than there are."""
    entry = rows_ptr + i * FIELDS
    b, slot, start, live = tl.load(entry), tl.load(entry + 1).to(tl.int64), tl.load(entry + 2), tl.load(entry + 3)
    first, count = tl.load(entry + 4), tl.load(entry + 5)
    if cu_seqlens_ptr is not None:
        first = tl.minimum(first, tokens)
        count = tl.minimum(count, tokens - first)
    return b, slot, start, live, first, count


@triton.jit
def row_of_batch(read, cursors, cu_seqlens_ptr, b, tokens, longest, slots):
    """What a plan would say of row b, found without one. Slots stay wide: narrow ones take 45 us where these take 39
    (one token of float32 states, batch 256, no row folds, on an H200)."""
    start_ptr, count_ptr = cursors
    slot = resolve_read(read, b, slots, NARROW=False)
    start = tl.load(start_ptr + slot, mask=slot >= 0, other=0)
    live = tl.load(count_ptr + slot, mask=slot >= 0, other=0)
    first, length = token_range(cu_seqlens_ptr, b, tokens, False)
    return b, slot, start, live, first, tl.minimum(length, longest)


@triton.jit
def place_of(g, tile, HEADS_PER_GROUP: tl.constexpr, FORM: tl.constexpr):
    """The head, and the first row of it, that a tile of group g has."""
    TILES_PER_HEAD: tl.constexpr = (FORM.ROWS + FORM.BLOCK_ROWS - 1) // FORM.BLOCK_ROWS
    return g * HEADS_PER_GROUP + tile // TILES_PER_HEAD, tile % TILES_PER_HEAD * FORM.BLOCK_ROWS


@triton.jit
def token_base(tensor, b, first, h):
    """Pointer to the values of the first token of batch row b at head or group h, and the stride of tokens."""
    return tensor[0] + token_offset(tensor, b, first, h), tensor[2]


@triton.jit
def entries(base, t, WIDE: tl.constexpr):
    """Pointers to the values of tokens t from there on. WIDE: whether their offsets need 64 bits."""
    ptr, stride = base
    return ptr + (t.to(tl.int64) * stride if WIDE else t * stride)


@triton.jit
def either_row(of_ring, ring_ptr, ring_offset, base, token, WIDE: tl.constexpr):
    """Pointers to rows of a ring, or of what a call was given. Of two addresses and of offsets, which do not change
    from head to head, so that few registers keep them."""
    ptr, stride = base
    offset = tl.where(of_ring, ring_offset, token.to(tl.int64) * stride if WIDE else token * stride)
    return tl.where(of_ring, ring_ptr, ptr) + offset


@triton.jit
def zero_tiles(
    out, row, g, first_tile, HEADS_PER_GROUP: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr,
    TILES: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Zero the outputs of some tiles of heads of group g, of a padding row."""
    b, _, _, _, first, count = row
    t = tl.arange(0, TOKENS)
    for i in range(TILES):
        h, first_row = place_of(g, first_tile + i, HEADS_PER_GROUP, FORM)
        offs_d = first_row + tl.arange(0, FORM.BLOCK_ROWS)
        ptrs = entries(token_base(out, b, first, h), t, WIDE)[None, :] + offs_d[:, None]
        zero = tl.zeros(ptrs.shape, out[0].dtype.element_ty)
        tl.store(ptrs, zero, mask=(offs_d < FORM.ROWS)[:, None] & (t < count)[None, :])


@triton.jit
def zero_rest(
    out, cu_seqlens_ptr, row, g, tokens, batch, HEADS_PER_GROUP: tl.constexpr, ROWS: tl.constexpr, PADDING: tl.constexpr
):  # fmt: skip
    """Zero the output of packed tokens past the most that a row may have, and of a share of those that no row has."""
    b, slot, _, _, first, count = row
    offs_d = tl.arange(0, triton.next_power_of_2(ROWS))
    mask_d = offs_d < ROWS
    _, length = token_range(cu_seqlens_ptr, b, tokens, False)
    for i in range(HEADS_PER_GROUP):
        h = g * HEADS_PER_GROUP + i
        for past in range(count, length):
            zero = tl.zeros(offs_d.shape, out[0].dtype.element_ty)
            mask = tl.where(slot >= 0, mask_d, False) if PADDING == "keep" else mask_d
            tl.store(token_entry(out, b, first + past, h, 1) + offs_d, zero, mask=mask)
        zero_unused(out, cu_seqlens_ptr, b, h, offs_d, mask_d, tokens, batch)


@triton.jit
def prefetch_tile(
    data_ptr, offset, exists, g, tile, HEADS_PER_GROUP: tl.constexpr, FORM: tl.constexpr, TARGET: tl.constexpr
):  # fmt: skip
    """Ask for a tile of group g, of the slot at `offset`, to come to the L2 cache."""
    h, first_row = place_of(g, tile, HEADS_PER_GROUP, FORM)
    prefetch_rows(data_ptr, offset, exists, h, first_row, FORM.BLOCK_ROWS, FORM, TARGET)


@triton.jit
def load_tile_inputs(
    pool, ring_x_at, x_at, z_at, dt_at, ring_dt_at, row, window, h, first_row, L, FOLDS: tl.constexpr,
    BYTES: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr, WHOLE: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """All that a tile needs, so that it is on its way before the tile in front of it is replayed: its scales and state,
    x of the window, and of the ring where it folds, z, and dt of the window and of the ring."""
    b, slot, _, _, first, count = row
    of_ring, new, lives, ring_row, token = window
    t = tl.arange(0, TOKENS)
    ROWS: tl.constexpr = FORM.ROWS
    BLOCK_ROWS: tl.constexpr = FORM.BLOCK_ROWS
    tile = tile_at(h, first_row, FORM)
    factor, codes = load_codes(pool, slot, slot >= 0, tile, FORM, STREAMING, WHOLE)
    ring_x = ring_x_at[0] + slot * ring_x_at[1] + h * L * ROWS
    x_rows = either_row(of_ring, ring_x, ring_row * ROWS, token_base(x_at, b, first, h), token, WIDE)
    BESIDE: tl.constexpr = bytes_beside(x_rows.dtype.element_ty, BYTES, FORM)
    INSIDE: tl.constexpr = ROWS % BLOCK_ROWS == 0
    x = load_token_rows(x_rows, of_ring | new, first_row, ROWS, BLOCK_ROWS, BESIDE, INSIDE)
    old_x = x
    if FOLDS:
        old_x = load_token_rows(ring_x + ring_row * ROWS, lives, first_row, ROWS, BLOCK_ROWS, BESIDE, INSIDE)
    z = x
    if z_at[0] is not None:
        rows = first_row + tl.arange(0, BLOCK_ROWS)
        z_ptrs = entries(token_base(z_at, b, first, h), t, WIDE)[None, :] + rows[:, None]
        mask = (rows < ROWS)[:, None] & (t < count)[None, :]
        z = tl.load(tl.multiple_of(z_ptrs, (BYTES, 1)), mask=mask, other=0.0)
    twice = tl.zeros([1, 2], tl.int32)
    ring_dt_ptrs = ring_dt_at[0] + slot * ring_dt_at[1] + h * L + (ring_row[:, None] + twice)
    ring_dt = tl.load(ring_dt_ptrs, mask=lives[:, None], other=0.0)
    dt = tl.load(entries(token_base(dt_at, b, first, h), token[:, None] + twice, WIDE), mask=new[:, None], other=0.0)
    return factor, codes, x, old_x, z, ring_dt, dt
