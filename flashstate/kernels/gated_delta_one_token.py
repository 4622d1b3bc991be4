"""gated_delta_step on the GPU for one token per row: one program per (batch row, value head, some tiles of V rows).

Tiles share what the token brings. A single one is loaded to registers, before anything of the token. Of several, the
next is on its way to shared memory, where accesses are wide enough for that, while one is stepped: no registers wait.
"""

import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from flashstate.kernels.addressing import Place, this_program, token_entry
from flashstate.kernels.gated_delta import load_bias, load_delta_token, load_rate, step_delta
from flashstate.kernels.ptx import has_ptx
from flashstate.kernels.slots import parent_of, read_slot, resolve_snapshot_row, write_slot
from flashstate.kernels.state_io import EVICT_FIRST, decoded, load_tile, store_slot
from flashstate.kernels.stores import store_output, store_snapshot
from flashstate.kernels.tiles import STAGES, dot_rows, form_of, load_rows, stored_as, tile_at, zero_unless
from flashstate.launch.kernel import kernel


@kernel
def gated_delta_one_token_kernel(
    # The arguments of gated_delta_step_kernel in its order, of which it does not need all: launches share a list.
    data_ptr, q_ptr, k_ptr, v_ptr, a_ptr, beta_ptr, out_ptr, A_log_ptr, dt_bias_ptr, scale_ptr, seed_ptr,
    read_ptr, accepted_ptr, write_ptr, parents_ptr, cu_seqlens_ptr, snapshot_rows_ptr, copy_ptr, copy_scale_ptr,
    stream, fault_ptr, slot_stride, scale_stride, copy_b, copy_scale_b, copy_t, copy_scale_t, num_copies,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, a_b, a_t, a_h, beta_b, beta_t, beta_h, out_b, out_t, out_h,
    read_stride, read_width, write_stride, parents_stride, tokens, longest, num_slots, null, q_scale,
    H: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, SNAPSHOT_HEAD_STRIDE: tl.constexpr, VECTOR: tl.constexpr, SNAPSHOT_VECTOR: tl.constexpr,
    TRANSPOSED: tl.constexpr, SNAPSHOTS_TRANSPOSED: tl.constexpr, ALIGNED: tl.constexpr,
    PER_CHANNEL: tl.constexpr, BIAS_PER_CHANNEL: tl.constexpr, QK_L2NORM: tl.constexpr, B_LOGIT: tl.constexpr,
    STORES: tl.constexpr, PADDING: tl.constexpr, AT_LEAST_ONE: tl.constexpr, EARLY: tl.constexpr,
    ROUNDING: tl.constexpr, SNAPSHOT_ROUNDING: tl.constexpr, ROUNDS: tl.constexpr, SHARED_SEED: tl.constexpr,
    TARGET: tl.constexpr,
    TILES: tl.constexpr,  # of a program
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNK: tl.constexpr, THREADS: tl.constexpr,  # of a tile
):  # fmt: skip
    b, h, first_row = this_program(H, ROWS, TILES * BLOCK_ROWS)
    g = h // HEADS_PER_GROUP
    t = b * 0
    FORM: tl.constexpr = form_of(
        ROWS, COLS, BLOCK_ROWS, BLOCK_COLS, CHUNK, VECTOR, EVICT_FIRST, TARGET, TRANSPOSED, ROUNDING, ROUNDS,
        ALIGNED, THREADS, HEAD_STRIDE=HEAD_STRIDE,
    )  # fmt: skip
    COPY_FORM: tl.constexpr = stored_as(
        FORM, SNAPSHOT_VECTOR, SNAPSHOTS_TRANSPOSED, SNAPSHOT_ROUNDING, SNAPSHOT_HEAD_STRIDE
    )

    # Single tiles without scales, eight elements to an access: 10 % faster at batch 4. Others got slower (docs/log.md).
    SINGLE: tl.constexpr = TILES == 1 and scale_ptr is None and VECTOR == 8
    PER_THREAD: tl.constexpr = SINGLE and has_ptx(TARGET)

    # No branches: a padding row is masked. So loads do not wait until the row is known to be live.
    read, slots = (read_ptr, read_stride, read_width, accepted_ptr), (num_slots, null, fault_ptr)
    SEEDED: tl.constexpr = ROUNDING != "nearest" or SNAPSHOT_ROUNDING != "nearest"
    slot, live, seed = read_slot(read, b, slots, seed_ptr, SEEDED, SHARED_SEED, AT_LEAST_ONE, PER_THREAD)
    pool, drawing = (data_ptr, scale_ptr, slot_stride, scale_stride), (seed, t, stream)
    if TILES == 1:
        tile = tile_at(h, first_row, FORM)
        stored = load_tile(pool, slot, live, tile, drawing, FORM)
    rate = None if A_log_ptr is None else load_rate(A_log_ptr, h)  # None: a is the log-decay itself
    dt_bias = load_bias(dt_bias_ptr, h, BIAS_PER_CHANNEL, FORM)

    if EARLY:  # what tokens bring may come from the kernel in front; a single tile is on its way
        gdc_wait()
    k_at, v_at, a_at = (k_ptr, k_b, k_t, k_h), (v_ptr, v_b, v_t, v_h), (a_ptr, a_b, a_t, a_h)
    updates, q_at = (k_at, v_at, a_at, (beta_ptr, beta_b, beta_t, beta_h)), (q_ptr, q_b, q_t, q_h)
    offs_d = first_row + tl.arange(0, BLOCK_ROWS)
    place = Place(b, h, g, offs_d, offs_d < ROWS)
    update, q, q_factor, kq = load_delta_token(
        q_at, updates, place, t, True, rate, dt_bias, q_scale, QK_L2NORM, PER_CHANNEL, B_LOGIT, FORM
    )
    k, k_factor, v, decay, beta = update

    stepped = True
    if parents_ptr is not None:  # a tree of one token
        stepped = parent_of((parents_ptr, parents_stride, longest), b, t) == -1
    runs = tl.where(stepped, live, False)
    if STORES != "none":
        to = write_slot((write_ptr, write_stride), b, slot, runs, slots)
    if copy_ptr is not None:
        copy_to = resolve_snapshot_row((snapshot_rows_ptr, num_copies), b, runs, fault_ptr)
    for i in tl.range(TILES, num_stages=STAGES):
        tile_row = first_row + i * BLOCK_ROWS
        offs_d = tile_row + tl.arange(0, BLOCK_ROWS)
        v_next = v
        if TILES > 1:
            tile = tile_at(h, tile_row, FORM)
            stored = load_tile(pool, slot, live, tile, drawing, FORM)
            offs_next = offs_d + BLOCK_ROWS
            v_next = load_rows(token_entry(v_at, b, t, h, FORM.ALIGNMENT), offs_next, offs_next < ROWS, i + 1 < TILES)
        s_factor, codes, random = stored
        s = decoded(codes, data_ptr.dtype.element_ty, TARGET)
        if PADDING == "fresh":
            s, s_factor = zero_unless(live, s, s_factor)
        decayed, u, s = step_delta(s, s_factor, k, k_factor, v, decay, beta, True, FORM.PER_COLUMNS)
        o = tl.fma(u, kq, dot_rows(decayed, q, FORM.PER_COLUMNS) * q_factor)
        out, place = (out_ptr, out_b, out_t, out_h), Place(b, h, g, offs_d, offs_d < ROWS)
        store_output(out, place, t, o, True, stepped, live, PADDING, FORM.ALIGNMENT)
        if STORES != "none":
            store_slot(pool, to, tile, s, random, FORM)
        if copy_ptr is not None:
            copies = (copy_ptr, copy_scale_ptr, copy_b, copy_scale_b, copy_t, copy_scale_t)
            copy_tile = tile_at(h, tile_row, COPY_FORM)
            store_snapshot(copies, copy_to, True, t, drawing, tile, copy_tile, s, FORM, COPY_FORM)
        v = v_next
