"""mamba2_replay on the GPU: a program per (batch row, head, some tiles of D rows), or one that walks along them.

A row has a window of tokens behind its state: live rows of its ring and then the new tokens, or, where it folds, the
new tokens alone. One matrix says how much every token of the window counts for every output; tensor cores multiply it
with x, and the state with C, tile by tile. Where a row folds, they add the products of the ring to the state first, on
float32 as sums of bfloat16. A program is one warp, because all warps would have to make the matrix, and hand it around.
One token needs no matrix: in dense calls on float32 states with short windows, replay_token.py has it with more warps,
and without tensor cores.

Kernels that only fold, or never do, walk along their part of a plan. One that can do both serves small batches, and
calls without a plan, where every row decides. These three give the same bytes, on tensor cores and without them; the
two ways sum in different orders.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashstate.kernels import replay_rows, replay_window, state_io
from flashstate.kernels.functions import gate, softplus, within_limits
from flashstate.kernels.replay_token import replay_token
from flashstate.kernels.slots import load_seed
from flashstate.kernels.state_io import BEFORE_THE_FIRST_TOKEN, EVICT_FIRST, STREAMING
from flashstate.kernels.tensor_cores import as_in_memory, dot_terms, products, terms_of, transposed
from flashstate.kernels.tiles import form_of, tile_at
from flashstate.launch.kernel import kernel


@triton.jit
def terms_of_codes(codes, dtype: tl.constexpr, TERMS: tl.constexpr, TARGET: tl.constexpr):
    """Stored chunks as operands of tensor cores."""
    terms = ()
    for i in tl.static_range(len(codes)):
        terms = terms + (state_io.terms_of_code(codes[i], dtype, TERMS, TARGET),)
    return terms


@triton.jit
def weights_of_window(
    with_C, dt, ring_dt, window, last, A, D_ptr, dt_bias_ptr, limits, h, TERMS: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """Time steps of the window of head h, (window,); how much every token of it counts for every output, (window,
    tokens), D among them if it has one value per head; and the state for each, (tokens,)."""
    of_ring, new, _, _, _ = window
    j = tl.arange(0, with_C.shape[0])
    sizes = dt.to(tl.float32)
    if dt_bias_ptr is not None:
        sizes += tl.load(dt_bias_ptr + h).to(tl.float32)
    if KIND.DT_SOFTPLUS:
        sizes = softplus(sizes)
    sizes = within_limits(sizes, limits)
    sizes = replay_window.once(tl.where(of_ring[:, None], ring_dt, tl.where(new[:, None], sizes, 0.0)))
    between, total = replay_window.sums_between(sizes, last, TERMS, KIND.FORM.TARGET)
    weights = tl.where(j[:, None] <= last[None, :], with_C * tl.exp(A * between) * sizes[:, None], 0.0)
    if D_ptr is not None and not KIND.D_PER_ROW:
        weights += tl.where(j[:, None] == last[None, :], tl.load(D_ptr + h).to(tl.float32), 0.0)
    return sizes, weights, tl.exp(A * total)


@triton.jit
def fold_tile(
    pool, slot, tile, codes, factor, alpha, u, B, C, drawing,
    WIDTH: tl.constexpr, FOLD_TERMS: tl.constexpr, TERMS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Fold the tokens of a ring, u with B, into a tile of state and store it; its products with C of all tokens, (rows,
    tokens). Chunk by chunk, so that few registers keep it; but with scales all of it must be there first."""
    _, scale_ptr, _, scale_stride = pool
    FORM: tl.constexpr = KIND.FORM
    dtype: tl.constexpr = pool[0].dtype.element_ty
    y, s = tl.zeros([codes[0].shape[0], C[0][0].shape[0]], tl.float32), ()
    for k in tl.static_range(len(codes)):
        chunk = replay_window.folded(codes[k], factor, alpha, u, B[k], dtype, FOLD_TERMS, FORM.TARGET)
        y = dot_terms(terms_of(chunk, TERMS, FORM.TARGET), y, transposed(C[k]))
        s = s + (as_in_memory(chunk, FORM.VECTOR, WIDTH),)
        if KIND.UPDATE and scale_ptr is None:
            store_folded(pool, slot, tile, k, s[k], None, None, drawing, FORM)
    if KIND.UPDATE and scale_ptr is not None:
        e, stored = state_io.store_scale(pool, slot * scale_stride, slot >= 0, tile, s, FORM)
        for k in tl.static_range(len(codes)):
            store_folded(pool, slot, tile, k, s[k], e, stored, drawing, FORM)
    return y


@triton.jit
def store_folded(pool, slot, tile, k: tl.constexpr, s, e, stored, drawing, FORM: tl.constexpr):
    """Round and store chunk k of a folded tile. Its random bits are drawn here: no registers keep those of others."""
    ptr, _, slot_stride, _ = pool
    offset, live = slot * slot_stride, slot >= 0
    random = state_io.bits_of_chunk(drawing, tile, k, ptr.dtype.element_ty, FORM)
    state_io.store_chunk(ptr, offset, live, tile, k, s, e, stored, random, FORM)


@triton.jit
def replay_tiles(
    pool, ring, activations, parameters, seed_ptr, stream, row, g, first_tile, L,
    FOLDS: tl.constexpr, TILES: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """The outputs of some tiles of heads of group g for all tokens of a row, which FOLDS its ring first or does not."""
    ring_x_ptr, ring_x_stride, ring_B_ptr, ring_B_stride, ring_dt_ptr, ring_dt_stride = ring
    x_at, _, B_at, C_at, z_at, out = activations
    A_ptr, D_ptr, dt_bias_ptr, limits = parameters
    b, slot, start, live, first, count = row
    known = slot >= 0
    dtype: tl.constexpr = pool[0].dtype.element_ty
    x_dtype: tl.constexpr = x_at[0].dtype.element_ty
    # Tensor cores round sums towards zero, 6 units in the last place of a float32 output: those are made without them.
    TERMS: tl.constexpr = 0 if x_dtype == tl.float32 else 1 if x_dtype == tl.bfloat16 else 2
    SUM_TERMS: tl.constexpr = 0 if x_dtype == tl.float32 else 3
    FOLD_TERMS: tl.constexpr = state_io.update_terms(dtype, x_dtype)
    WIDTH: tl.constexpr = state_io.operand_width(dtype, not FOLDS)
    FORM: tl.constexpr = KIND.FORM
    TARGET: tl.constexpr = FORM.TARGET
    ROWS: tl.constexpr = FORM.ROWS
    COLS: tl.constexpr = FORM.COLS
    BLOCK_COLS: tl.constexpr = FORM.BLOCK_COLS
    AHEAD: tl.constexpr = KIND.ROWS_DO != "keep"  # whether the next tile is asked for to come to the L2 cache

    # The window: live rows, unless they are folded, and then new tokens.
    j, t = tl.arange(0, KIND.ROOM), tl.arange(0, KIND.TOKENS)
    ring_row, lives = replay_window.row_in_ring(start + j, L), j < live
    base = live * 0 if FOLDS else live
    of_ring, new, token = j < base, (j >= base) & (j < base + count), j - base
    window = (of_ring, new, lives, ring_row, token)
    appends, to_row = tl.where(known, new, False), replay_window.row_in_ring(start + live + token, L)
    if TILES == 1:  # it is on its way while the weights of the window are found
        h, first_row = replay_rows.place_of(g, first_tile, KIND)
        inputs = replay_rows.load_tile_inputs(pool, ring, activations, row, window, h, first_row, L, FOLDS, KIND)
    elif AHEAD:
        replay_rows.prefetch_tile(pool, slot, known, g, first_tile, KIND)
    ring_B = ring_B_ptr + slot * ring_B_stride + replay_window.head_in_ring(g, L, COLS, KIND.RING_B_H)
    B_rows = replay_rows.either_row(
        of_ring, ring_B, ring_row * COLS, replay_rows.token_base(B_at, b, first, g), token, KIND
    )
    C_rows = replay_rows.entries(replay_rows.token_base(C_at, b, first, g), t, KIND)
    C = replay_window.load_chunks(C_rows, t < count, TERMS, WIDTH, FORM)
    if TERMS > 0:
        C_for_B = C
        if WIDTH != 2:  # B has its columns in another order than the state, which would be moved between threads
            C_for_B = replay_window.load_chunks(C_rows, t < count, TERMS, 2, FORM)
        B = replay_window.load_chunks(B_rows, of_ring | new, TERMS, 2, FORM)
    if FOLDS:
        old_B = replay_window.load_chunks(ring_B + ring_row * COLS, lives, FOLD_TERMS, WIDTH, FORM)
        seed = load_seed(seed_ptr, slot, known, FORM.ROUNDING != "nearest" and KIND.UPDATE, KIND.SHARED_SEED)
        old_weight, alpha = tl.zeros([KIND.ROOM], tl.float32), 0.0
    if TERMS > 0:
        with_C = tl.zeros([KIND.ROOM, KIND.TOKENS], tl.float32)
        for i in tl.static_range(len(B)):
            with_C = dot_terms(B[i], with_C, transposed(C_for_B[i]))
    else:
        with_C = replay_window.products_in_loop(B_rows, of_ring | new, C_rows, t < count, FORM)
    last = base + t
    weights, decay = with_C, tl.zeros([KIND.TOKENS], tl.float32)
    if KIND.UPDATE and first_tile == 0:
        cols = tl.arange(0, BLOCK_COLS)
        kept = replay_window.load_token_rows(B_rows, appends, 0, COLS, BLOCK_COLS, COLS == BLOCK_COLS, FORM.ALIGNMENT)
        to = tl.multiple_of((ring_B + to_row * COLS)[:, None] + cols[None, :], (1, FORM.ALIGNMENT))
        tl.store(to, kept, mask=appends[:, None] & (cols < COLS)[None, :])

    for i in tl.range(TILES, num_stages=1):
        h, first_row = replay_rows.place_of(g, first_tile + i, KIND)
        tile = tile_at(h, first_row, FORM)
        if TILES > 1:
            inputs = replay_rows.load_tile_inputs(pool, ring, activations, row, window, h, first_row, L, FOLDS, KIND)
            if AHEAD:
                replay_rows.prefetch_tile(pool, slot, known & (i + 1 < TILES), g, first_tile + i + 1, KIND)
        factor, codes, x, old_x, z, ring_dt, dt = inputs

        if (i == 0) | (first_row == 0):
            A = tl.load(A_ptr + h).to(tl.float32)
            sizes, weights, decay = weights_of_window(
                with_C, dt, ring_dt, window, last, A, D_ptr, dt_bias_ptr, limits, h, SUM_TERMS, KIND
            )
            if FOLDS:
                old_dt = replay_window.once(ring_dt)
                old_weight, alpha = replay_window.weights_of_ring(old_dt, live, A, SUM_TERMS, TARGET)
            if KIND.UPDATE and first_row == 0:
                dt_rows = ring_dt_ptr + slot * ring_dt_stride + replay_window.head_in_ring(h, L, 1, KIND.RING_DT_H)
                tl.store(dt_rows + to_row, sizes, mask=appends)

        codes = replay_window.operands_of(codes, known, WIDTH, KIND.PADDING, FORM)
        if FOLDS:
            u = terms_of(tl.trans(old_x.to(tl.float32) * old_weight[:, None]), FOLD_TERMS, TARGET)  # (rows, window)
            drawing = (seed, BEFORE_THE_FIRST_TOKEN, stream)
            y = fold_tile(pool, slot, tile, codes, factor, alpha, u, old_B, C, drawing, WIDTH, FOLD_TERMS, TERMS, KIND)
        else:
            y = products(terms_of_codes(codes, dtype, TERMS, TARGET), C) * factor
        y *= decay[None, :]
        y = dot_terms(transposed(terms_of(x, TERMS, TARGET)), y, terms_of(weights, TERMS, TARGET))
        offs_d = first_row + tl.arange(0, FORM.BLOCK_ROWS)
        shown = (offs_d < ROWS)[:, None] & (t < count)[None, :]
        if D_ptr is not None and KIND.D_PER_ROW:
            D = tl.load(D_ptr + h * ROWS + offs_d, mask=offs_d < ROWS, other=0.0).to(tl.float32)[:, None]
            x_ptrs = replay_rows.entries(replay_rows.token_base(x_at, b, first, h), t, KIND)[None, :] + offs_d[:, None]
            y = tl.fma(tl.load(x_ptrs, mask=shown, other=0.0).to(tl.float32), D, y)
        if z_at[0] is not None:
            y *= gate(z.to(tl.float32), TARGET)
        out_ptrs = replay_rows.entries(replay_rows.token_base(out, b, first, h), t, KIND)[None, :] + offs_d[:, None]
        tl.store(tl.multiple_of(out_ptrs, (FORM.ALIGNMENT, 1)), y.to(out[0].dtype.element_ty), mask=shown)
        if KIND.UPDATE:
            ring_x = ring_x_ptr + slot * ring_x_stride + replay_window.head_in_ring(h, L, ROWS, KIND.RING_X_H)
            to = (ring_x + to_row * ROWS)[:, None] + offs_d[None, :]
            BESIDE: tl.constexpr = replay_window.bytes_beside(x_dtype, FORM)
            tl.store(tl.multiple_of(to, (1, BESIDE)), x, mask=appends[:, None] & (offs_d < ROWS)[None, :])


@kernel
def mamba2_replay_kernel(
    # Pointers, which change from call to call; None: absent.
    data_ptr, ring_x_ptr, ring_B_ptr, ring_dt_ptr, x_ptr, B_ptr, C_ptr, dt_ptr, out_ptr, A_ptr, D_ptr, z_ptr,
    dt_bias_ptr, scale_ptr, seed_ptr,
    rows_ptr, parts_ptr,  # of a plan
    start_ptr, count_ptr, read_ptr, cu_seqlens_ptr,
    stream,
    # What a server repeats. Not in tuples: Triton compiles anew for the values it finds in one.
    fault_ptr,
    slot_stride, scale_stride, ring_x_stride, ring_B_stride, ring_dt_stride,  # of slots
    x_b, x_t, x_h, B_b, B_t, B_h, C_b, C_t, C_h,  # strides of batch, token, and head or group
    dt_b, dt_t, dt_h, z_b, z_t, z_h, out_b, out_t, out_h,
    read_stride,
    batch,
    tokens,  # length of the token axis
    longest,  # the most tokens a row has
    L,  # rows of a ring
    num_slots, null,
    dt_limit_0, dt_limit_1,  # between which time steps are kept; None: anywhere
    H: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,  # from head to head of the state; None: they lie side by side
    VECTOR: tl.constexpr,  # elements per access of the state
    ALIGNED: tl.constexpr,  # every row of x, B, C, z, out and of the ring starts at a multiple of 16 bytes
    WIDE: tl.constexpr,  # whether the tokens of a row are so far apart that their offsets need 64 bits
    D_PER_ROW: tl.constexpr, DT_SOFTPLUS: tl.constexpr,
    ROWS_DO: tl.constexpr,  # what rows are for this kernel: "fold", "keep" what they have, or "either"
    UPDATE: tl.constexpr,
    PADDING: tl.constexpr,  # the output of padding rows: "zero", "fresh", from a zero state, or "keep", as it was
    ROUNDING: tl.constexpr, ROUNDS: tl.constexpr, SHARED_SEED: tl.constexpr, TARGET: tl.constexpr,
    TOKENS: tl.constexpr,  # that there is room for in a row; 1: without tensor cores
    ROOM: tl.constexpr,  # tokens that there is room for in a window
    RING_X_H: tl.constexpr, RING_B_H: tl.constexpr, RING_DT_H: tl.constexpr,  # of heads of a ring that lie apart
    TILES: tl.constexpr,  # that a program takes at a time
    FOLD_TILES: tl.constexpr,  # that it takes at a time where a plan says that it folds, which takes longer
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNK: tl.constexpr,  # of a tile
    THREADS: tl.constexpr,  # of a program
    PLACE: tl.constexpr,  # "first" and "second" of two kernels that run side by side, or "alone"
):  # fmt: skip
    GROUPS: tl.constexpr = H // HEADS_PER_GROUP
    TILES_OF_GROUP: tl.constexpr = HEADS_PER_GROUP * ((ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS)
    HINT: tl.constexpr = EVICT_FIRST if TOKENS == 1 else STREAMING
    FORM: tl.constexpr = form_of(
        ROWS, COLS, BLOCK_ROWS, BLOCK_COLS, CHUNK, VECTOR, HINT, TARGET, False, ROUNDING, ROUNDS,
        ALIGNED, THREADS, "portable", HEAD_STRIDE=HEAD_STRIDE,
    )  # fmt: skip
    KIND: tl.constexpr = replay_rows.replay_of(
        HEADS_PER_GROUP, ROWS_DO, UPDATE, PADDING, WIDE, D_PER_ROW, DT_SOFTPLUS, TOKENS, ROOM, SHARED_SEED, RING_X_H,
        RING_B_H, RING_DT_H, FORM,
    )  # fmt: skip
    x_at, dt_at, B_at = (x_ptr, x_b, x_t, x_h), (dt_ptr, dt_b, dt_t, dt_h), (B_ptr, B_b, B_t, B_h)
    C_at, z_at, out = (C_ptr, C_b, C_t, C_h), (z_ptr, z_b, z_t, z_h), (out_ptr, out_b, out_t, out_h)
    activations = (x_at, dt_at, B_at, C_at, z_at, out)
    parameters = (A_ptr, D_ptr, dt_bias_ptr, (dt_limit_0, dt_limit_1))
    ring = (ring_x_ptr, ring_x_stride, ring_B_ptr, ring_B_stride, ring_dt_ptr, ring_dt_stride)
    pool = (data_ptr, scale_ptr, slot_stride, scale_stride)

    if PLACE == "first":  # the rows of the second are others
        gdc_launch_dependents()
    folding, fold_tiles, to_fold, items = replay_rows.work_of(
        (rows_ptr, parts_ptr), batch, GROUPS, TILES_OF_GROUP, TILES, FOLD_TILES, FOLD_TILES, ROWS_DO
    )
    batch_rows = (read_ptr, read_stride, 1, None), (start_ptr, count_ptr), (num_slots, null, fault_ptr)
    for number in tl.range(tl.program_id(0), items, tl.num_programs(0), num_stages=1):
        item = tl.program_id(0) * 0 + number  # a number of the kernel also where the interpreter has one of Python
        i, g, first_tile = replay_rows.item_at(
            item, folding, fold_tiles, to_fold, GROUPS, TILES_OF_GROUP, TILES, FOLD_TILES, FOLD_TILES, ROWS_DO
        )
        row, folds = replay_rows.row_at(i, rows_ptr, batch_rows, cu_seqlens_ptr, tokens, longest, WINDOW)
        _, slot, _, _, _, count = row
        if TOKENS == 1 and ((count > 0) & ((slot >= 0) | (PADDING == "fresh"))):
            replay_token(pool, ring, activations, parameters, row, folds, g, first_tile, L, TILES, KIND)
        elif TOKENS > 1 and (ROWS_DO == "fold" or (ROWS_DO == "either" and folds)):
            replay_tiles(
                pool, ring, activations, parameters, seed_ptr, stream, row, g, first_tile, L, True, FOLD_TILES, KIND
            )
        elif TOKENS > 1 and (PADDING == "fresh" or ((slot >= 0) & (count > 0))):
            replay_tiles(
                pool, ring, activations, parameters, seed_ptr, stream, row, g, first_tile, L, False, TILES, KIND
            )
        elif PADDING == "zero":
            replay_rows.zero_tiles(out, row, g, first_tile, TILES, KIND)
        if cu_seqlens_ptr is not None and first_tile == 0:
            replay_rows.zero_rest(out, cu_seqlens_ptr, row, g, tokens, batch, KIND)
    if PLACE == "second":
        if tl.program_id(0) == 0:  # who comes next waits for this kernel alone, so it waits for the first
            gdc_wait()
