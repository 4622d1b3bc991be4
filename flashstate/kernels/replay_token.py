"""One token of every row through replay, of float32 states and without tensor cores.

All that a tile of state needs is on its way at once, by as many warps as the tile has rows for, and one pass over it is
enough. A ring that is full is folded in by steps of mamba2_step. Sums have the same order whatever the config is.
"""

import triton
import triton.language as tl

from flashstate.kernels.addressing import Place, token_entry
from flashstate.kernels.functions import silu, softplus, within_limits
from flashstate.kernels.mamba2 import load_mamba2_update, load_rates, step_mamba2
from flashstate.kernels.replay_rows import either_row, place_of, token_base
from flashstate.kernels.replay_window import (
    bytes_beside,
    load_token_rows,
    row_in_ring,
    stride_of_heads,
    weights_of_ring,
)
from flashstate.kernels.state_io import load_state, store_chunk
from flashstate.kernels.tensor_cores import sum_columns
from flashstate.kernels.tiles import (
    dot_rows,
    form_of_rows,
    load_columns,
    load_head,
    sums_by_thread,
    tile_at,
    zero_unless,
)

STEPS = tl.constexpr(4)  # tokens of a ring whose inputs are loaded at once
BESIDE_EACH_OTHER = tl.constexpr(8)  # threads of a row of products, and
ONE_WARP = tl.constexpr(64)  # threads at most, of any GPU


@triton.jit
def products_with(C, rows, exists, FORM: tl.constexpr):
    """The products of C with rows of B that these pointers start, (rows,), summed as those of rows of a state are.

    The layout here is not that of a state: the compiler takes the one of the product that weights are used in, where
    several warps have a column in each of 8 threads, and one warp has two side by side in each of 4. So sums of more
    columns, and of one warp, are made of pairs, which no layout orders otherwise. They are slower, and no table has
    such configs."""
    BESIDE: tl.constexpr = bytes_beside(rows.dtype.element_ty, FORM)
    CHUNK: tl.constexpr = FORM.CHUNK
    B = ()
    for k in tl.static_range(FORM.BLOCK_COLS // CHUNK):
        values = load_token_rows(rows, exists, k * CHUNK, FORM.COLS, CHUNK, (k + 1) * CHUNK <= FORM.COLS, BESIDE)
        B = B + (values.to(tl.float32),)
    sums = sums_by_thread(B, C, FORM.VECTOR)
    if sums.shape[1] > BESIDE_EACH_OTHER or FORM.THREADS <= ONE_WARP:
        return sum_columns(sums)
    else:
        return tl.sum(sums, axis=1)


@triton.jit
def stepped_by_ring(s, ring, place, start, live, L, A, FORM: tl.constexpr):
    """A tile of state after the first `live` tokens of a ring, as mamba2_step would have it. place.b: the slot."""
    for first in range(0, live, STEPS):
        group = ()
        for j in tl.static_range(STEPS):  # all of them are on their way before the first is used
            i = live * 0 + (first + j)  # a number of the kernel also where the interpreter has one of Python
            row = row_in_ring(start + i, L)
            update = load_mamba2_update(ring, place, row, i < live, False, FORM)
            group = group + ((i < live, update),)
        for j in tl.static_range(STEPS):
            exists, update = group[j]
            x, dt, B = update
            s = step_mamba2(s, 1.0, x, dt, B, A, None, (None, None), exists, False)
    return s


@triton.jit
def replay_token(
    pool, ring, activations, parameters, row, folds, g, first_tile, L, TILES: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """The outputs of some tiles of heads of group g for the one token of a row. `folds`: its ring is folded into the
    state first; only where rows "fold", or do "either"."""
    data_ptr, _, slot_stride, _ = pool
    ring_x_ptr, ring_x_stride, ring_B_ptr, ring_B_stride, ring_dt_ptr, ring_dt_stride = ring
    x_at, dt_at, B_at, C_at, z_at, out = activations
    A_ptr, D_ptr, dt_bias_ptr, limits = parameters
    b, slot, start, live, first, _ = row
    known = slot >= 0
    FORM: tl.constexpr = KIND.FORM
    ROWS: tl.constexpr = FORM.ROWS
    COLS: tl.constexpr = FORM.COLS
    BLOCK_ROWS: tl.constexpr = FORM.BLOCK_ROWS
    BYTES: tl.constexpr = FORM.ALIGNMENT
    BESIDE: tl.constexpr = bytes_beside(x_at[0].dtype.element_ty, FORM)
    ROWS_DO: tl.constexpr = KIND.ROWS_DO
    WINDOW_FORM: tl.constexpr = form_of_rows(FORM, KIND.ROOM)
    ring_x_at = (ring_x_ptr, ring_x_stride, ROWS, stride_of_heads(L, ROWS, KIND.RING_X_H))
    ring_B_at = (ring_B_ptr, ring_B_stride, COLS, stride_of_heads(L, COLS, KIND.RING_B_H))
    ring_dt_at = (ring_dt_ptr, ring_dt_stride, 1, stride_of_heads(L, 1, KIND.RING_DT_H))
    entry_0, to_row = start * 0, row_in_ring(start + live, L)

    # The window: live rows of the ring, unless they are folded, and then the token.
    last = live
    if ROWS_DO != "keep":
        last = tl.where(folds, 0, live)
    j = tl.arange(0, KIND.ROOM)
    of_ring, new, ring_row = j < last, j == last, row_in_ring(start + j, L)
    C = load_columns(C_at, b, first, g, True, BYTES, FORM)
    C_for_B = load_columns(C_at, b, first, g, True, BYTES, WINDOW_FORM)
    ring_B = token_entry(ring_B_at, slot, entry_0, g, BYTES)
    B_rows = either_row(of_ring, ring_B, ring_row * COLS, token_base(B_at, b, first, g), j * 0, KIND)
    with_C = products_with(C_for_B, B_rows, of_ring | new, FORM)
    if KIND.UPDATE and first_tile == 0:
        cols = tl.arange(0, FORM.BLOCK_COLS)
        kept = tl.load(token_entry(B_at, b, first, g, BYTES) + cols, mask=cols < COLS)
        tl.store(token_entry(ring_B_at, slot, to_row, g, BYTES) + cols, kept, mask=tl.where(known, cols < COLS, False))

    for i in tl.range(TILES, num_stages=1):
        h, first_row = place_of(g, first_tile + i, KIND)
        offs_d = first_row + tl.arange(0, BLOCK_ROWS)
        mask_d = offs_d < ROWS
        tile = tile_at(h, first_row, FORM)
        s = load_state(pool, slot, known, tile, FORM)[1]
        if KIND.PADDING == "fresh":
            s = zero_unless(known, s, 1.0)[0]
        ring_x = token_entry(ring_x_at, slot, entry_0, h, BYTES)
        x_rows = either_row(of_ring, ring_x, ring_row * ROWS, token_base(x_at, b, first, h), j * 0, KIND)
        xs = load_token_rows(x_rows, of_ring | new, first_row, ROWS, BLOCK_ROWS, ROWS % BLOCK_ROWS == 0, BESIDE)
        x = tl.load(token_entry(x_at, b, first, h, BYTES) + offs_d, mask=mask_d, other=0.0)
        A = load_rates(A_ptr, h, tile, False, FORM)
        dt = tl.load(token_entry(dt_at, b, first, h, 1)).to(tl.float32)
        if dt_bias_ptr is not None:
            dt += tl.load(dt_bias_ptr + h).to(tl.float32)
        if KIND.DT_SOFTPLUS:
            dt = softplus(dt)
        dt = within_limits(dt, limits)
        ring_dt = tl.load(token_entry(ring_dt_at, slot, entry_0, h, 1) + ring_row, mask=of_ring, other=0.0)
        weights, decay = weights_of_ring(tl.where(new, dt, ring_dt), last + 1, A[0], 0, FORM.TARGET)
        weights = tl.where(of_ring | new, weights * with_C, 0.0)

        if ROWS_DO != "keep":
            place = Place(slot, h, g, offs_d, mask_d)
            s = stepped_by_ring(s, (ring_x_at, ring_dt_at, ring_B_at), place, start, live - last, L, A, FORM)
        y = dot_rows(s, C, FORM.VECTOR) * decay
        y += tl.reshape(tl.dot(tl.trans(xs.to(tl.float32)), weights[:, None], input_precision="ieee"), (BLOCK_ROWS,))
        if D_ptr is not None:
            D = load_head(D_ptr + h * (ROWS if KIND.D_PER_ROW else 1), offs_d, mask_d, True, KIND.D_PER_ROW)
            y = tl.fma(x.to(tl.float32), D, y)
        if z_at[0] is not None:
            z = tl.load(token_entry(z_at, b, first, h, BYTES) + offs_d, mask=mask_d, other=0.0)
            y *= silu(z.to(tl.float32))
        tl.store(token_entry(out, b, first, h, BYTES) + offs_d, y.to(out[0].dtype.element_ty), mask=mask_d)
        if KIND.UPDATE:
            goes = tl.where(known, mask_d, False)
            tl.store(token_entry(ring_x_at, slot, to_row, h, BYTES) + offs_d, x, mask=goes)
            tl.store(token_entry(ring_dt_at, slot, to_row, h, 1), dt, mask=known & (first_row == 0))
        if KIND.UPDATE and ROWS_DO != "keep":
            for k in tl.static_range(len(s)):
                store_chunk(data_ptr, slot * slot_stride, known & folds, tile, k, s[k], None, None, 0, FORM)
