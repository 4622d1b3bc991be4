"""gated_delta_fold on the GPU: a program of one warp per (batch row, value head, tile of V rows), as gated_delta_replay
folds."""

import triton.language as tl

from flashstate.kernels import delta_window, replay_window, state_io
from flashstate.kernels.addressing import this_program
from flashstate.kernels.folding import slot_to_fold, store_fold, tile_to_fold
from flashstate.kernels.gated_delta import for_chunks, load_rate
from flashstate.kernels.state_io import STREAMING
from flashstate.kernels.tensor_cores import terms_of
from flashstate.kernels.tiles import form_of, stored_as
from flashstate.launch.kernel import kernel


@kernel
def gated_delta_fold_kernel(
    data_ptr, ring_k_ptr, ring_u_ptr, ring_decay_ptr, A_log_ptr, dt_bias_ptr, scale_ptr, seed_ptr, start_ptr, count_ptr,
    read_ptr, write_ptr, tokens_ptr,
    into_ptr, into_scale_ptr,  # of another State, None: in place
    stream, fault_ptr,
    slot_stride, scale_stride, into_stride, into_scale_stride, ring_k_stride, ring_u_stride, ring_decay_stride,
    read_stride, write_stride,
    most,  # tokens of every row, where tokens_ptr does not say it; -1: all
    L,  # rows of a ring
    num_slots, num_targets, null,
    H: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, INTO_HEAD_STRIDE: tl.constexpr,  # from head to head; None: they lie side by side
    VECTOR: tl.constexpr, INTO_VECTOR: tl.constexpr,  # elements per access of the state, and of what is stored
    ALIGNED: tl.constexpr,  # every row of the ring starts at a multiple of 16 bytes
    PER_CHANNEL: tl.constexpr, BIAS_PER_CHANNEL: tl.constexpr,  # the ring has a, and dt_bias a value, for each column
    QK_L2NORM: tl.constexpr,
    ROUNDING: tl.constexpr, ROUNDS: tl.constexpr, SHARED_SEED: tl.constexpr, TARGET: tl.constexpr,
    ROOM: tl.constexpr,  # for live tokens
    RING_K_H: tl.constexpr, RING_U_H: tl.constexpr, RING_DECAY_H: tl.constexpr,  # of heads of a ring that lie apart
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNK: tl.constexpr,  # of a tile
):  # fmt: skip
    b, h, first_row = this_program(H, ROWS, BLOCK_ROWS)
    g = h // HEADS_PER_GROUP
    dtype: tl.constexpr = data_ptr.dtype.element_ty
    k_dtype: tl.constexpr = ring_k_ptr.dtype.element_ty
    into_dtype: tl.constexpr = dtype if into_ptr is None else into_ptr.dtype.element_ty
    TERMS: tl.constexpr = state_io.update_terms(into_dtype, k_dtype)
    FORM: tl.constexpr = form_of(
        ROWS, COLS, BLOCK_ROWS, BLOCK_COLS, CHUNK, VECTOR, STREAMING, TARGET, False, ROUNDING, ROUNDS, ALIGNED,
        WIDENING="portable", HEAD_STRIDE=HEAD_STRIDE,
    )  # fmt: skip
    INTO_FORM: tl.constexpr = stored_as(FORM, INTO_VECTOR, False, ROUNDING, INTO_HEAD_STRIDE)

    pool, read = (data_ptr, scale_ptr, slot_stride, scale_stride), (read_ptr, read_stride, 1, None)
    slots, cursors, counts = (num_slots, null, fault_ptr), (start_ptr, count_ptr), (tokens_ptr, most)
    slot, known, seed, start, live = slot_to_fold(read, b, slots, seed_ptr, cursors, counts, SHARED_SEED, FORM)
    tile, factor, codes = tile_to_fold(pool, slot, known, h, first_row, FORM)

    j = tl.arange(0, ROOM)
    row, lives = replay_window.row_in_ring(start + j, L), j < live
    u_dtype: tl.constexpr = ring_u_ptr.dtype.element_ty
    BESIDE: tl.constexpr = replay_window.bytes_beside(u_dtype, FORM)
    u_rows = ring_u_ptr + slot * ring_u_stride + replay_window.rows_in_head(h, row, L, ROWS, RING_U_H)
    u = replay_window.load_token_rows(u_rows, lives, first_row, ROWS, BLOCK_ROWS, ROWS % BLOCK_ROWS == 0, BESIDE)
    k_rows = ring_k_ptr + slot * ring_k_stride + replay_window.rows_in_head(g, row, L, COLS, RING_K_H)
    if PER_CHANNEL:
        rate = None if A_log_ptr is None else load_rate(A_log_ptr, h)  # None: a is the logarithm of the decay itself
        decay_rows = ring_decay_ptr + slot * ring_decay_stride
        decay_rows += replay_window.rows_in_head(h, row, L, COLS, RING_DECAY_H)
        keys, alpha, squares = (), (), tl.zeros([ROOM, ROOM], tl.float32)
        for i in tl.static_range(BLOCK_COLS // CHUNK):
            k, of_state, squares = delta_window.ring_chunk(
                k_rows, decay_rows, lives, i, rate, dt_bias_ptr, h, squares, BIAS_PER_CHANNEL, FORM
            )
            keys = keys + (delta_window.operand_of(k, TERMS, 2, FORM),)
            alpha = alpha + (delta_window.ordered(of_state, 2, FORM),)
        weight = delta_window.factor_of(squares, QK_L2NORM)
    else:
        decay_row = ring_decay_ptr + slot * ring_decay_stride + replay_window.head_in_ring(h, L, 1, RING_DECAY_H)
        decay_ptrs = decay_row + (row[:, None] + tl.zeros([1, 2], tl.int32))
        logs = replay_window.once(tl.load(decay_ptrs, mask=lives[:, None], other=0.0))
        left, of_state = delta_window.decays_of_ring(logs, live, delta_window.sum_terms(k_dtype), TARGET)
        k = replay_window.load_token_chunks(k_rows, lives, FORM)
        keys, alpha = replay_window.token_operands(k, TERMS, 2, FORM), for_chunks(of_state, FORM)
        raw = replay_window.token_operands(k, delta_window.key_terms(k_dtype), 2, FORM)
        weight = left * delta_window.length_factors(raw, QK_L2NORM)
    u = terms_of(tl.trans(u.to(tl.float32) * weight[:, None]), TERMS, TARGET)  # (rows, tokens)
    s = delta_window.folded_tile(codes, factor, alpha, u, keys, dtype, TERMS, FORM)

    into, write = (into_ptr, into_scale_ptr, into_stride, into_scale_stride), (write_ptr, write_stride)
    targets = (num_targets, null, fault_ptr)
    store_fold(
        pool, into, write, b, slot, known, live, h, first_row, tile, s, seed, stream, targets, FORM, INTO_FORM
    )  # fmt: skip
