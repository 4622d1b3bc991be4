"""Rows of a batch and tiles of heads for replay: where they are, what is loaded of them, zeros for padding."""

from dataclasses import dataclass

import triton
import triton.language as tl

from flashstate.kernels.addressing import token_entry, token_offset, zero_unused
from flashstate.kernels.replay_window import bytes_beside, head_in_ring, load_token_rows
from flashstate.kernels.rings import FIELDS
from flashstate.kernels.slots import resolve_read, token_range
from flashstate.kernels.state_io import load_codes, prefetch_rows
from flashstate.kernels.tiles import Constants, Form, tile_at


@dataclass(frozen=True)
class Replay(Constants):
    """The constants that functions of mamba2_replay share, as its kernel has them."""

    HEADS_PER_GROUP: int
    ROWS_DO: str
    UPDATE: bool
    PADDING: str
    WIDE: bool
    D_PER_ROW: bool
    DT_SOFTPLUS: bool
    TOKENS: int
    ROOM: int
    SHARED_SEED: bool
    RING_X_H: int
    RING_B_H: int
    RING_DT_H: int
    FORM: Form


@triton.constexpr_function
def replay_of(
    HEADS_PER_GROUP, ROWS_DO, UPDATE, PADDING, WIDE, D_PER_ROW, DT_SOFTPLUS, TOKENS, ROOM, SHARED_SEED, RING_X_H,
    RING_B_H, RING_DT_H, FORM,
):  # fmt: skip
    """Give the constants of a replay their names."""
    return Replay(
        HEADS_PER_GROUP, ROWS_DO, UPDATE, PADDING, WIDE, D_PER_ROW, DT_SOFTPLUS, TOKENS, ROOM, SHARED_SEED, RING_X_H,
        RING_B_H, RING_DT_H, FORM,
    )  # fmt: skip


@triton.jit
def planned_row(rows_ptr, i, cu_seqlens_ptr, tokens, WINDOW: tl.constexpr):
    """What a plan says of its row i: place in the batch, slot, start, live count, first token, and how many; of packed
    tokens, whose axis a plan does not know, no more than there are. And whether it folds."""
    entry = rows_ptr + i * FIELDS
    b, slot, start, live = tl.load(entry), tl.load(entry + 1).to(tl.int64), tl.load(entry + 2), tl.load(entry + 3)
    first, count = tl.load(entry + 4), tl.load(entry + 5)
    folds = live + count > WINDOW
    if cu_seqlens_ptr is not None:
        first = tl.minimum(first, tokens)
        count = tl.minimum(count, tokens - first)
    return (b, slot, start, live, first, count), folds


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
def work_of(
    plan, batch, GROUPS: tl.constexpr, TILES_OF_GROUP: tl.constexpr, TILES: tl.constexpr, FOLD_TILES: tl.constexpr,
    FEWEST_TILES: tl.constexpr, ROWS_DO: tl.constexpr,
):  # fmt: skip
    """The work of a kernel, in parts of groups: how many rows fold, as far as a plan says it, which come first in it;
    how many tiles a program takes at a time of rows that fold, of a plan as few as FEWEST_TILES while some programs
    have none; how many items these are, and how many all are."""
    rows_ptr, parts_ptr = plan
    folding = tl.program_id(0) * 0
    if rows_ptr is not None:
        folding = tl.load(parts_ptr)
    to_fold, to_keep, fold_tiles = folding * 0, folding * 0, folding * 0 + FOLD_TILES
    if ROWS_DO != "keep":
        for _ in tl.static_range(halvings(FOLD_TILES, FEWEST_TILES) if rows_ptr is not None else 0):
            parts = folding * GROUPS * (TILES_OF_GROUP // fold_tiles)
            fold_tiles = tl.where(parts < tl.num_programs(0), tl.maximum(fold_tiles // 2, FEWEST_TILES), fold_tiles)
        to_fold = folding * (GROUPS * (TILES_OF_GROUP // fold_tiles))
    if ROWS_DO != "fold":
        to_keep = (batch - folding) * (GROUPS * (TILES_OF_GROUP // TILES))
    items = to_fold + to_keep
    if shared_alike(TILES, FOLD_TILES, FEWEST_TILES, ROWS_DO):
        items = batch * (GROUPS * (TILES_OF_GROUP // TILES))
    return folding, fold_tiles, to_fold, items


@triton.constexpr_function
def shared_alike(TILES, FOLD_TILES, FEWEST_TILES, ROWS_DO):
    """Whether rows that fold and others are shared out alike: which an item has is then known before a plan is."""
    return ROWS_DO == "either" and TILES == FOLD_TILES == FEWEST_TILES


@triton.constexpr_function
def halvings(TILES, FEWEST):
    """How often so many tiles, a power of two, can be halved until the fewest are left."""
    return max(0, TILES.bit_length() - FEWEST.bit_length())


@triton.jit
def item_at(
    item, folding, fold_tiles, to_fold, GROUPS: tl.constexpr, TILES_OF_GROUP: tl.constexpr, TILES: tl.constexpr,
    FOLD_TILES: tl.constexpr, FEWEST_TILES: tl.constexpr, ROWS_DO: tl.constexpr,
):  # fmt: skip
    """What an item of a kernel's work is: the row of the plan, or of the batch, the group, its first tile. Rows of a
    plan that fold come first, `to_fold` items of `folding` rows."""
    PARTS: tl.constexpr = TILES_OF_GROUP // TILES  # that programs have of a group
    folds, kept = item < to_fold, item - to_fold
    if shared_alike(TILES, FOLD_TILES, FEWEST_TILES, ROWS_DO):
        return item // (GROUPS * PARTS), item // PARTS % GROUPS, item % PARTS * TILES
    else:
        i, g, first_tile = folding + kept // (GROUPS * PARTS), kept // PARTS % GROUPS, kept % PARTS * TILES
        if ROWS_DO != "keep":
            fold_parts = TILES_OF_GROUP // fold_tiles
            i = tl.where(folds, item // (GROUPS * fold_parts), i)
            g = tl.where(folds, item // fold_parts % GROUPS, g)
            first_tile = tl.where(folds, item % fold_parts * fold_tiles, first_tile)
        return i, g, first_tile


@triton.jit
def row_at(i, rows_ptr, batch_rows, cu_seqlens_ptr, tokens, longest, WINDOW: tl.constexpr):
    """Row i of a plan, or of the batch where there is none, and whether it folds."""
    read, cursors, slots = batch_rows
    if rows_ptr is None:
        row = row_of_batch(read, cursors, cu_seqlens_ptr, i, tokens, longest, slots)
        return row, row[3] + row[5] > WINDOW
    else:
        return planned_row(rows_ptr, i, cu_seqlens_ptr, tokens, WINDOW)


@triton.jit
def place_of(g, tile, KIND: tl.constexpr):
    """The head, and the first row of it, that a tile of group g has."""
    BLOCK_ROWS: tl.constexpr = KIND.FORM.BLOCK_ROWS
    TILES_PER_HEAD: tl.constexpr = (KIND.FORM.ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS
    return g * KIND.HEADS_PER_GROUP + tile // TILES_PER_HEAD, tile % TILES_PER_HEAD * BLOCK_ROWS


@triton.jit
def token_base(tensor, b, first, h):
    """Pointer to the values of the first token of batch row b at head or group h, and the stride of tokens."""
    return tensor[0] + token_offset(tensor, b, first, h), tensor[2]


@triton.jit
def entries(base, t, KIND: tl.constexpr):
    """Pointers to the values of tokens t from there on."""
    ptr, stride = base
    return ptr + (t.to(tl.int64) * stride if KIND.WIDE else t * stride)


@triton.jit
def either_row(of_ring, ring_ptr, ring_offset, base, token, KIND: tl.constexpr):
    """Pointers to rows of a ring, or of what a call was given. Of two addresses and of offsets, which do not change
    from head to head, so that few registers keep them."""
    ptr, stride = base
    offset = tl.where(of_ring, ring_offset, token.to(tl.int64) * stride if KIND.WIDE else token * stride)
    return tl.where(of_ring, ring_ptr, ptr) + offset


@triton.jit
def zero_tiles(out, row, g, first_tile, TILES: tl.constexpr, KIND: tl.constexpr):
    """Zero the outputs of some tiles of heads of group g, of a padding row."""
    b, _, _, _, first, count = row
    t = tl.arange(0, KIND.TOKENS)
    for i in range(TILES):
        h, first_row = place_of(g, first_tile + i, KIND)
        offs_d = first_row + tl.arange(0, KIND.FORM.BLOCK_ROWS)
        ptrs = entries(token_base(out, b, first, h), t, KIND)[None, :] + offs_d[:, None]
        zero = tl.zeros(ptrs.shape, out[0].dtype.element_ty)
        tl.store(ptrs, zero, mask=(offs_d < KIND.FORM.ROWS)[:, None] & (t < count)[None, :])


@triton.jit
def zero_rest(out, cu_seqlens_ptr, row, g, tokens, batch, KIND: tl.constexpr):
    """Zero the output of packed tokens past the most that a row may have, and of a share of those that no row has."""
    b, slot, _, _, first, count = row
    offs_d = tl.arange(0, triton.next_power_of_2(KIND.FORM.ROWS))
    mask_d = offs_d < KIND.FORM.ROWS
    _, length = token_range(cu_seqlens_ptr, b, tokens, False)
    for i in range(KIND.HEADS_PER_GROUP):
        h = g * KIND.HEADS_PER_GROUP + i
        for past in range(count, length):
            zero = tl.zeros(offs_d.shape, out[0].dtype.element_ty)
            mask = tl.where(slot >= 0, mask_d, False) if KIND.PADDING == "keep" else mask_d
            tl.store(token_entry(out, b, first + past, h, 1) + offs_d, zero, mask=mask)
        zero_unused(out, cu_seqlens_ptr, b, h, offs_d, mask_d, tokens, batch)


@triton.jit
def prefetch_tile(pool, slot, exists, g, tile, KIND: tl.constexpr):
    """Ask for a tile of group g, of a slot, to come to the L2 cache."""
    offset = slot * pool[2]
    h, first_row = place_of(g, tile, KIND)
    prefetch_rows(pool[0], offset, exists, h, first_row, KIND.FORM.BLOCK_ROWS, KIND.FORM)


@triton.jit
def load_tile_inputs(pool, ring, activations, row, window, h, first_row, L, FOLDS: tl.constexpr, KIND: tl.constexpr):
    """All that a tile needs, so that it is on its way before the tile in front of it is replayed: its scales and state,
    x of the window, and of the ring where it folds, z, and dt of the window and of the ring."""
    ring_x_ptr, ring_x_stride, _, _, ring_dt_ptr, ring_dt_stride = ring
    x_at, dt_at, _, _, z_at, _ = activations
    b, slot, _, _, first, count = row
    of_ring, new, lives, ring_row, token = window
    t = tl.arange(0, KIND.TOKENS)
    FORM: tl.constexpr = KIND.FORM
    ROWS: tl.constexpr = FORM.ROWS
    BLOCK_ROWS: tl.constexpr = FORM.BLOCK_ROWS
    BESIDE: tl.constexpr = bytes_beside(x_at[0].dtype.element_ty, FORM)
    INSIDE: tl.constexpr = ROWS % BLOCK_ROWS == 0
    tile = tile_at(h, first_row, FORM)
    WHOLE: tl.constexpr = KIND.PADDING != "fresh" and INSIDE and FORM.COLS == FORM.BLOCK_COLS
    factor, codes = load_codes(pool, slot, slot >= 0, tile, FORM, WHOLE)
    ring_x = ring_x_ptr + slot * ring_x_stride + head_in_ring(h, L, ROWS, KIND.RING_X_H)
    x_rows = either_row(of_ring, ring_x, ring_row * ROWS, token_base(x_at, b, first, h), token, KIND)
    x = load_token_rows(x_rows, of_ring | new, first_row, ROWS, BLOCK_ROWS, INSIDE, BESIDE)
    old_x = x
    if FOLDS:
        old_x = load_token_rows(ring_x + ring_row * ROWS, lives, first_row, ROWS, BLOCK_ROWS, INSIDE, BESIDE)
    z = x
    if z_at[0] is not None:
        rows = first_row + tl.arange(0, BLOCK_ROWS)
        z_ptrs = entries(token_base(z_at, b, first, h), t, KIND)[None, :] + rows[:, None]
        mask = (rows < ROWS)[:, None] & (t < count)[None, :]
        z = tl.load(tl.multiple_of(z_ptrs, (FORM.ALIGNMENT, 1)), mask=mask, other=0.0)
    twice = tl.zeros([1, 2], tl.int32)
    ring_dt_head = ring_dt_ptr + slot * ring_dt_stride + head_in_ring(h, L, 1, KIND.RING_DT_H)
    ring_dt_ptrs = ring_dt_head + (ring_row[:, None] + twice)
    ring_dt = tl.load(ring_dt_ptrs, mask=lives[:, None], other=0.0)
    dt = tl.load(entries(token_base(dt_at, b, first, h), token[:, None] + twice, KIND), mask=new[:, None], other=0.0)
    return factor, codes, x, old_x, z, ring_dt, dt
