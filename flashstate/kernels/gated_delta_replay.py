"""gated_delta_replay on the GPU: a program per (batch row, key head, some tiles of V rows), or one that walks on.

A row has a window of tokens behind its state: live rows of its ring and then the new tokens, or, where it folds, the
new tokens alone. k and q of all new tokens are columns of one operand, so tensor cores make the products of a tile with
all of them at once; those of the window's keys with them say how much a row of the ring counts for each. Then every
token is corrected by those before it, one after the other, because each u is rounded before anything uses it. Where a
row folds, tensor cores add the products of the ring to the tile first, which is rounded and stored; what was stored is
what the tokens see. A program is one warp, as in mamba2_replay, whose ways of walking along a plan it shares.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashstate.kernels import delta_head, delta_window, replay_rows, replay_window, state_io
from flashstate.kernels.delta_correction import (
    correct_all,
    correct_few,
    in_vectors,
    load_betas,
    load_values,
    steps_of,
)
from flashstate.kernels.slots import load_seed
from flashstate.kernels.state_io import BEFORE_THE_FIRST_TOKEN, STREAMING
from flashstate.kernels.tensor_cores import dot_terms, terms_of, transposed
from flashstate.kernels.tiles import STAGES, form_of, tile_at
from flashstate.launch.kernel import kernel


@triton.jit
def replay_delta(
    pool, ring, activations, parameters, seed_ptr, stream, row, g, first_tile, tiles, L,
    FOLDS: tl.constexpr, MOST_TILES: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """The outputs of some tiles of a value head of key head g for all tokens of a row, which FOLDS its ring first or
    does not."""
    _, _, ring_u_ptr, ring_u_stride, _, _ = ring
    _, _, v_at, _, beta_at, out = activations
    _, slot, start, _, _, _ = row
    known = slot >= 0
    dtype: tl.constexpr = pool[0].dtype.element_ty
    u_dtype: tl.constexpr = ring_u_ptr.dtype.element_ty
    FORM: tl.constexpr = KIND.FORM
    ROWS: tl.constexpr = FORM.ROWS
    BLOCK_ROWS: tl.constexpr = FORM.BLOCK_ROWS
    WIDTH: tl.constexpr = state_io.operand_width(dtype, True, FORM.TARGET)
    WHOLE: tl.constexpr = KIND.PADDING != "fresh" and ROWS % BLOCK_ROWS == 0 and FORM.COLS == FORM.BLOCK_COLS
    BESIDE: tl.constexpr = replay_window.bytes_beside(u_dtype, FORM)
    AHEAD: tl.constexpr = 1 if FOLDS or dtype == tl.float32 else STAGES
    h, head_row = replay_rows.place_of(g, first_tile, KIND)
    window = delta_head.window_of(row, L, FOLDS, KIND)
    ring_u = ring_u_ptr + slot * ring_u_stride + replay_window.head_in_ring(h, L, ROWS, KIND.RING_U_H)
    u_rows, seen = ring_u + window.ring_row * ROWS, window.lives if FOLDS else window.of_ring
    delta_window.prefetch_rows(u_rows, seen, head_row, MOST_TILES * BLOCK_ROWS, ROWS, FORM.TARGET)
    betas = load_betas(beta_at, row, h, KIND)
    seed = load_seed(seed_ptr, slot, known, FORM.ROUNDING != "nearest" and FOLDS, KIND.SHARED_SEED)
    if KIND.PER_CHANNEL:
        kq, gamma, weights, first_weight, ring_weights, fold = delta_head.prepare_channels(
            ring, activations, parameters, row, window, g, h, head_row, L, FOLDS, KIND
        )
    else:
        kq, gamma, weights, first_weight, ring_weights, fold = delta_head.prepare_head(
            ring, activations, parameters, row, window, g, h, head_row, L, FOLDS, KIND
        )
    steps = steps_of(betas, weights, first_weight, KIND)

    for i in tl.range(tiles, num_stages=AHEAD):
        first_row = head_row + i * BLOCK_ROWS
        tile = tile_at(h, first_row, FORM)
        factor, codes = state_io.load_codes(pool, slot, known, tile, FORM, WHOLE)
        u = replay_window.load_token_rows(u_rows, seen, first_row, ROWS, BLOCK_ROWS, ROWS % BLOCK_ROWS == 0, BESIDE)
        rows = first_row + tl.arange(0, BLOCK_ROWS)
        values = load_values(v_at, row, h, rows, rows < ROWS, KIND)
        if FOLDS:
            old_keys, old_weight, alpha = fold
            codes = replay_window.operands_of(codes, known, 2, KIND.PADDING, FORM)
            old_u = terms_of(tl.trans(u.to(tl.float32) * old_weight[:, None]), KIND.FOLD_TERMS, FORM.TARGET)
            s = delta_window.folded_tile(codes, factor, alpha, old_u, old_keys, dtype, KIND.FOLD_TERMS, FORM)
            drawing = (seed, BEFORE_THE_FIRST_TOKEN, stream)
            factor, codes = state_io.store_rounded(pool, slot, known & KIND.UPDATE, tile, s, drawing, FORM)
        codes = replay_window.operands_of(codes, known, WIDTH, KIND.PADDING, FORM)
        y = tl.zeros([BLOCK_ROWS, 2 * KIND.HALF], tl.float32)
        for c in tl.static_range(len(codes)):
            y = dot_terms(state_io.opaque_terms(codes[c], dtype, KIND.STATE_TERMS, FORM.TARGET), y, transposed(kq[c]))
        y = y * factor * gamma[None, :]
        if not FOLDS:
            y = dot_terms(transposed(terms_of(u, KIND.RING_TERMS, FORM.TARGET)), y, ring_weights)
        if in_vectors(KIND):
            correct_few(y, values, rows, rows < ROWS, out, ring_u, start, L, row, h, steps, u_dtype, KIND)
        else:
            correct_all(
                y, rows, rows < ROWS, beta_at, v_at, out, ring_u, start, L, row, h, weights, first_weight, u_dtype, KIND
            )  # fmt: skip


@kernel
def gated_delta_replay_kernel(
    # Pointers, which change from call to call; None: absent. beta: the op's b.
    data_ptr, ring_k_ptr, ring_u_ptr, ring_decay_ptr, q_ptr, k_ptr, v_ptr, a_ptr, beta_ptr, out_ptr, A_log_ptr,
    dt_bias_ptr, scale_ptr, seed_ptr,
    rows_ptr, parts_ptr,  # of a plan
    start_ptr, count_ptr, read_ptr, cu_seqlens_ptr,
    stream,
    # What a server repeats. Not in tuples: Triton compiles anew for the values it finds in one.
    fault_ptr,
    slot_stride, scale_stride, ring_k_stride, ring_u_stride, ring_decay_stride,  # of slots
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h,  # strides of batch, token and head
    a_b, a_t, a_h, beta_b, beta_t, beta_h, out_b, out_t, out_h,
    read_stride,
    batch,
    tokens,  # length of the token axis
    longest,  # the most tokens a row has
    L,  # rows of a ring
    num_slots, null,
    q_scale,  # of queries, beside their normalisation
    H: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,  # from head to head of the state; None: they lie side by side
    VECTOR: tl.constexpr,  # elements per access of the state
    ALIGNED: tl.constexpr,  # every row of q, k, v, out and of the ring starts at a multiple of 16 bytes
    A_ALIGNED: tl.constexpr,  # every row of a does
    WIDE: tl.constexpr,  # whether the tokens of a row are so far apart that their offsets need 64 bits
    PER_CHANNEL: tl.constexpr, BIAS_PER_CHANNEL: tl.constexpr,  # a and dt_bias have a value for each column
    QK_L2NORM: tl.constexpr,
    B_LOGIT: tl.constexpr,  # b is the logit of beta
    ROWS_DO: tl.constexpr,  # what rows are for this kernel: "fold", "keep" what they have, or "either"
    UPDATE: tl.constexpr,
    PADDING: tl.constexpr,  # the output of padding rows: "zero", "fresh", from a zero state, or "keep", as it was
    ROUNDING: tl.constexpr, ROUNDS: tl.constexpr, SHARED_SEED: tl.constexpr, TARGET: tl.constexpr,
    TOKENS: tl.constexpr,  # that there is room for in a row
    ROOM: tl.constexpr,  # tokens that there is room for in a window
    RING_K_H: tl.constexpr, RING_U_H: tl.constexpr, RING_DECAY_H: tl.constexpr,  # of heads of a ring that lie apart
    TILES: tl.constexpr,  # that a program takes at a time
    FOLD_TILES: tl.constexpr,  # that it takes at most where a plan says that it folds, which takes longer
    FEWEST_TILES: tl.constexpr,  # that it then takes at least
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNK: tl.constexpr,  # of a tile
    THREADS: tl.constexpr,  # of a program
    PLACE: tl.constexpr,  # "first" and "second" of two kernels that run side by side, or "alone"
    WAITS: tl.constexpr,  # started before the kernel in front of it has ended, which brings the tokens
):  # fmt: skip
    GROUPS: tl.constexpr = H // HEADS_PER_GROUP
    TILES_OF_GROUP: tl.constexpr = HEADS_PER_GROUP * ((ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS)
    HALF: tl.constexpr = max(4, TOKENS)
    FORM: tl.constexpr = form_of(
        ROWS, COLS, BLOCK_ROWS, BLOCK_COLS, CHUNK, VECTOR, STREAMING, TARGET, False, ROUNDING, ROUNDS,
        ALIGNED, THREADS, "portable", HEAD_STRIDE=HEAD_STRIDE,
    )  # fmt: skip
    KIND: tl.constexpr = delta_head.delta_replay_of(
        HEADS_PER_GROUP, UPDATE, PADDING, WIDE, A_ALIGNED, PER_CHANNEL, BIAS_PER_CHANNEL, QK_L2NORM, B_LOGIT, TOKENS,
        HALF, ROOM, SHARED_SEED, RING_K_H, RING_U_H, RING_DECAY_H, dtype=data_ptr.dtype.element_ty,
        k_dtype=k_ptr.dtype.element_ty, u_dtype=ring_u_ptr.dtype.element_ty, FORM=FORM,
    )  # fmt: skip
    q_at, k_at, v_at = (q_ptr, q_b, q_t, q_h), (k_ptr, k_b, k_t, k_h), (v_ptr, v_b, v_t, v_h)
    a_at, beta_at, out = (a_ptr, a_b, a_t, a_h), (beta_ptr, beta_b, beta_t, beta_h), (out_ptr, out_b, out_t, out_h)
    activations, parameters = (q_at, k_at, v_at, a_at, beta_at, out), (A_log_ptr, dt_bias_ptr, q_scale)
    ring = (ring_k_ptr, ring_k_stride, ring_u_ptr, ring_u_stride, ring_decay_ptr, ring_decay_stride)
    pool = (data_ptr, scale_ptr, slot_stride, scale_stride)

    if WAITS:  # what tokens bring may come from the kernel in front
        gdc_wait()
    if PLACE == "first":  # the rows of the second are others
        gdc_launch_dependents()
    folding, fold_tiles, to_fold, items = replay_rows.work_of(
        (rows_ptr, parts_ptr), batch, GROUPS, TILES_OF_GROUP, TILES, FOLD_TILES, FEWEST_TILES, ROWS_DO
    )
    batch_rows = (read_ptr, read_stride, 1, None), (start_ptr, count_ptr), (num_slots, null, fault_ptr)
    for number in tl.range(tl.program_id(0), items, tl.num_programs(0), num_stages=1):
        item = tl.program_id(0) * 0 + number  # a number of the kernel also where the interpreter has one of Python
        i, g, first_tile = replay_rows.item_at(
            item, folding, fold_tiles, to_fold, GROUPS, TILES_OF_GROUP, TILES, FOLD_TILES, FEWEST_TILES, ROWS_DO
        )
        row, folds = replay_rows.row_at(i, rows_ptr, batch_rows, cu_seqlens_ptr, tokens, longest, WINDOW)
        _, slot, _, _, _, count = row
        if ROWS_DO == "fold" or (ROWS_DO == "either" and folds):
            replay_delta(
                pool, ring, activations, parameters, seed_ptr, stream, row, g, first_tile, fold_tiles, L, True,
                FOLD_TILES, KIND,
            )  # fmt: skip
        elif (count > 0) & ((slot >= 0) | (PADDING == "fresh")):
            replay_delta(
                pool, ring, activations, parameters, seed_ptr, stream, row, g, first_tile, TILES, L, False, TILES, KIND
            )
        elif PADDING == "zero":
            replay_rows.zero_tiles(out, row, g, first_tile, TILES, KIND)
        if cu_seqlens_ptr is not None and first_tile == 0:
            replay_rows.zero_rest(out, cu_seqlens_ptr, row, g, tokens, batch, KIND)
    if PLACE == "second":
        if tl.program_id(0) == 0:  # who comes next waits for this kernel alone, so it waits for the first
            gdc_wait()
