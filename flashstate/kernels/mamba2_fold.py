"""mamba2_fold on the GPU: a program of one warp per (batch row, head, tile of D rows), as mamba2_replay folds."""

import triton.language as tl

from flashstate.kernels import replay_window, state_io
from flashstate.kernels.addressing import this_program
from flashstate.kernels.folding import slot_to_fold, store_fold, tile_to_fold
from flashstate.kernels.state_io import STREAMING
from flashstate.kernels.tensor_cores import as_in_memory, terms_of
from flashstate.kernels.tiles import form_of, stored_as
from flashstate.launch.kernel import kernel


@kernel
def mamba2_fold_kernel(
    data_ptr, ring_x_ptr, ring_B_ptr, ring_dt_ptr, A_ptr, scale_ptr, seed_ptr, start_ptr, count_ptr, read_ptr,
    write_ptr, tokens_ptr,
    into_ptr, into_scale_ptr,  # of another State, None: in place
    stream, fault_ptr,
    slot_stride, scale_stride, into_stride, into_scale_stride, ring_x_stride, ring_B_stride, ring_dt_stride,  # of slots
    read_stride, write_stride,
    most,  # tokens of every row, where tokens_ptr does not say it; -1: all
    L,  # rows of a ring
    num_slots, num_targets, null,
    H: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, INTO_HEAD_STRIDE: tl.constexpr,  # from head to head; None: they lie side by side
    VECTOR: tl.constexpr, INTO_VECTOR: tl.constexpr,  # elements per access of the state, and of what is stored
    ALIGNED: tl.constexpr,  # every row of the ring starts at a multiple of 16 bytes
    ROUNDING: tl.constexpr, ROUNDS: tl.constexpr, SHARED_SEED: tl.constexpr, TARGET: tl.constexpr,
    ROOM: tl.constexpr,  # for live tokens
    RING_X_H: tl.constexpr, RING_B_H: tl.constexpr, RING_DT_H: tl.constexpr,  # of heads of a ring that lie apart
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNK: tl.constexpr,  # of a tile
):  # fmt: skip
    b, h, first_row = this_program(H, ROWS, BLOCK_ROWS)
    g = h // HEADS_PER_GROUP
    dtype: tl.constexpr = data_ptr.dtype.element_ty
    x_dtype: tl.constexpr = ring_x_ptr.dtype.element_ty
    into_dtype: tl.constexpr = dtype if into_ptr is None else into_ptr.dtype.element_ty
    TERMS: tl.constexpr = state_io.update_terms(into_dtype, x_dtype)
    SUM_TERMS: tl.constexpr = 0 if x_dtype == tl.float32 else 3
    FORM: tl.constexpr = form_of(
        ROWS, COLS, BLOCK_ROWS, BLOCK_COLS, CHUNK, VECTOR, STREAMING, TARGET, False, ROUNDING, ROUNDS, ALIGNED,
        HEAD_STRIDE=HEAD_STRIDE,
    )  # fmt: skip
    INTO_FORM: tl.constexpr = stored_as(FORM, INTO_VECTOR, False, ROUNDING, INTO_HEAD_STRIDE)

    pool, read = (data_ptr, scale_ptr, slot_stride, scale_stride), (read_ptr, read_stride, 1, None)
    slots, cursors, counts = (num_slots, null, fault_ptr), (start_ptr, count_ptr), (tokens_ptr, most)
    slot, known, seed, start, live = slot_to_fold(read, b, slots, seed_ptr, cursors, counts, SHARED_SEED, FORM)
    tile, factor, codes = tile_to_fold(pool, slot, known, h, first_row, FORM)

    j = tl.arange(0, ROOM)
    row, lives = replay_window.row_in_ring(start + j, L), j < live
    x_rows = ring_x_ptr + slot * ring_x_stride + replay_window.rows_in_head(h, row, L, ROWS, RING_X_H)
    BESIDE: tl.constexpr = replay_window.bytes_beside(x_dtype, FORM)
    x = replay_window.load_token_rows(x_rows, lives, first_row, ROWS, BLOCK_ROWS, ROWS % BLOCK_ROWS == 0, BESIDE)
    B_rows = ring_B_ptr + slot * ring_B_stride + replay_window.rows_in_head(g, row, L, COLS, RING_B_H)
    B = replay_window.load_chunks(B_rows, lives, TERMS, 2, FORM)
    dt_rows = ring_dt_ptr + slot * ring_dt_stride + replay_window.head_in_ring(h, L, 1, RING_DT_H)
    dt_ptrs = dt_rows + (row[:, None] + tl.zeros([1, 2], tl.int32))
    dt = replay_window.once(tl.load(dt_ptrs, mask=lives[:, None], other=0.0))
    weight, alpha = replay_window.weights_of_ring(dt, live, tl.load(A_ptr + h).to(tl.float32), SUM_TERMS, TARGET)
    u = terms_of(tl.trans(x.to(tl.float32) * weight[:, None]), TERMS, TARGET)  # (rows, tokens)
    s = ()
    for k in tl.static_range(len(codes)):
        s = s + (as_in_memory(replay_window.folded(codes[k], factor, alpha, u, B[k], dtype, TERMS, TARGET), VECTOR, 2),)

    into, write = (into_ptr, into_scale_ptr, into_stride, into_scale_stride), (write_ptr, write_stride)
    targets = (num_targets, null, fault_ptr)
    store_fold(
        pool, into, write, b, slot, known, live, h, first_row, tile, s, seed, stream, targets, FORM, INTO_FORM
    )  # fmt: skip
