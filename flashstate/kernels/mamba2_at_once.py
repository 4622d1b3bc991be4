"""mamba2_step on the GPU for several tokens at once: a program per (batch row, head, some tiles of D rows).

One matrix says how much every token counts for every output, and one vector how much for the last state. Tensor cores
multiply them with x, the state with C, and what x counts with B. The state is read once, and stored once after the last
token. A single tile is loaded to registers, before anything of the tokens; of several, the next are on their way to
shared memory while one is stepped.

Tensor cores sum over ROOM tokens. Of eight tokens there are two copies, one behind the other: what is multiplied with x
or B in two terms has the first term in one copy and the second in the other, and one product makes both.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from flashstate.kernels import replay_window, state_io, tensor_cores
from flashstate.kernels.addressing import batch_size, this_program, token_entry, zero_past, zero_unused
from flashstate.kernels.functions import column_of, entry_of, gate, softplus, within_limits
from flashstate.kernels.slots import read_slot, token_range, write_slot
from flashstate.kernels.state_io import STREAMING
from flashstate.kernels.tiles import STAGES, form_of, tile_at
from flashstate.launch.kernel import kernel

ROOM = tl.constexpr(16)  # tokens, or copies of them, that one product of tensor cores sums over
SUM_TERMS = tl.constexpr(3)  # of sums of time steps


@triton.jit
def in_copies(x, AXIS: tl.constexpr, TOKENS: tl.constexpr, TERMS: tl.constexpr, TARGET: tl.constexpr):
    """Terms of a matrix that has copies of all tokens along an axis, whose sum over all copies is that of one: two
    terms side by side in two copies."""
    terms = tensor_cores.terms_of(x, TERMS, TARGET)
    if TOKENS == ROOM:
        return terms
    else:
        first = tl.expand_dims(tl.arange(0, ROOM) < TOKENS, 1 - AXIS)
        packed = ()
        for i in tl.static_range((len(terms) + 1) // 2):
            second = terms[2 * i + 1] if 2 * i + 1 < len(terms) else tl.zeros_like(terms[0])
            packed = packed + (tl.where(first, terms[2 * i], second),)
        return packed


@triton.jit
def weigh_tokens(
    dt, with_C, A, D_ptr, dt_bias_ptr, limits, h, count,
    D_PER_ROW: tl.constexpr, DT_SOFTPLUS: tl.constexpr, TOKENS: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """How much every token counts for every output, (ROOM, TOKENS), D among it if it has one value per head, and for
    the last state, (ROOM,); and the state for every output, (TOKENS,), and for the last state."""
    place, t = tl.arange(0, ROOM), tl.arange(0, TOKENS)
    token = place % TOKENS
    if dt_bias_ptr is not None:
        dt += tl.load(dt_bias_ptr + h).to(tl.float32)
    if DT_SOFTPLUS:
        dt = softplus(dt)
    dt = replay_window.once(tl.where((token < count)[:, None], within_limits(dt, limits), 0.0))
    counted = tl.where(place < TOKENS, dt, 0.0)
    between, total = replay_window.sums_between(counted, t, SUM_TERMS, TARGET, ROOM // TOKENS)
    lasting = tl.exp(A * between) * dt[:, None]
    weights = tl.where(token[:, None] <= t[None, :], with_C * lasting, 0.0)
    if D_ptr is not None and not D_PER_ROW:
        weights += tl.where(token[:, None] == t[None, :], tl.load(D_ptr + h).to(tl.float32), 0.0)
    decay = tl.exp(A * total)
    return weights, column_of(lasting, TOKENS - 1), decay, entry_of(decay, TOKENS - 1)


@triton.jit
def row_entries(tensor, b, first, count, h, first_row, TOKENS: tl.constexpr, FORM: tl.constexpr):
    """Pointers to what every token has for the rows of a tile, and which exist: (rows, TOKENS)."""
    t, rows = tl.arange(0, TOKENS), first_row + tl.arange(0, FORM.BLOCK_ROWS)
    ptrs = token_entry(tensor, b, first + t, h, 1)[None, :] + rows[:, None]
    return tl.multiple_of(ptrs, (FORM.ALIGNMENT, 1)), (rows < FORM.ROWS)[:, None] & (t < count)[None, :]


@triton.jit
def load_values(
    x_at, z_at, b, first, count, h, first_row, TOKENS: tl.constexpr, TILES: tl.constexpr, FORM: tl.constexpr
):  # fmt: skip
    """What tokens bring for the rows of one of a program's TILES: x, (ROOM, rows), and z, (rows, TOKENS), or in its
    place x."""
    INSIDE: tl.constexpr = FORM.ROWS % (TILES * FORM.BLOCK_ROWS) == 0  # no program has tiles past the head
    BESIDE: tl.constexpr = replay_window.bytes_beside(x_at[0].dtype.element_ty, FORM)
    token = tl.arange(0, ROOM) % TOKENS
    x_rows = token_entry(x_at, b, first + token, h, 1)
    x = replay_window.load_token_rows(x_rows, token < count, first_row, FORM.ROWS, FORM.BLOCK_ROWS, INSIDE, BESIDE)
    z = x
    if z_at[0] is not None:
        ptrs, mask = row_entries(z_at, b, first, count, h, first_row, TOKENS, FORM)
        z = tl.load(ptrs, mask=mask, other=0.0)
    return x, z


@triton.jit
def add_skip(y, x_at, D_ptr, b, first, count, h, first_row, TOKENS: tl.constexpr, FORM: tl.constexpr):
    """y + D x, with a D for every row: (rows, TOKENS)."""
    ptrs, mask = row_entries(x_at, b, first, count, h, first_row, TOKENS, FORM)
    rows = first_row + tl.arange(0, FORM.BLOCK_ROWS)
    D = tl.load(D_ptr + h * FORM.ROWS + rows, mask=rows < FORM.ROWS, other=0.0).to(tl.float32)
    return tl.fma(tl.load(ptrs, mask=mask, other=0.0).to(tl.float32), D[:, None], y)


@triton.jit
def multiply_tile(codes, factor, C, dtype: tl.constexpr, FORM: tl.constexpr):
    """The products of a tile with C of every token, (rows, TOKENS)."""
    y = tl.zeros([codes[0].shape[0], C[0][0].shape[0]], tl.float32)
    for k in tl.static_range(len(codes)):
        terms = state_io.opaque_terms(codes[k], dtype, 2, FORM.TARGET)
        y = tensor_cores.dot_terms(terms, y, tensor_cores.transposed(C[k]))
    return y * factor


@kernel
def mamba2_at_once_kernel(
    # The arguments of mamba2_step_kernel in its order, of which it does not need all: launches share a list.
    data_ptr, x_ptr, B_ptr, C_ptr, dt_ptr, out_ptr, A_ptr, D_ptr, z_ptr, dt_bias_ptr, scale_ptr, seed_ptr,
    read_ptr, accepted_ptr, write_ptr, parents_ptr, cu_seqlens_ptr, snapshot_rows_ptr,
    copy_ptr, copy_scale_ptr,
    stream,
    fault_ptr,
    slot_stride, scale_stride, copy_b, copy_scale_b, copy_t, copy_scale_t, num_copies,
    x_b, x_t, x_h, B_b, B_t, B_h, C_b, C_t, C_h, dt_b, dt_t, dt_h, z_b, z_t, z_h, out_b, out_t, out_h,
    read_stride, read_width, write_stride, parents_stride, tokens, longest, num_slots, null,
    dt_limit_0, dt_limit_1,
    H: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr,
    D_PER_ROW: tl.constexpr, DT_SOFTPLUS: tl.constexpr,
    STORES: tl.constexpr, PADDING: tl.constexpr, AT_LEAST_ONE: tl.constexpr, EARLY: tl.constexpr,
    ROUNDING: tl.constexpr, ROUNDS: tl.constexpr, SHARED_SEED: tl.constexpr, TARGET: tl.constexpr,
    TOKENS: tl.constexpr,  # there is room for: 8 or 16
    TILES: tl.constexpr,  # of a program
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNK: tl.constexpr,  # of a tile
):  # fmt: skip
    b, h, first_row = this_program(H, ROWS, TILES * BLOCK_ROWS)
    g = h // HEADS_PER_GROUP
    STORED_ROUNDING: tl.constexpr = ROUNDING if STORES == "last" else "nearest"
    FORM: tl.constexpr = form_of(
        ROWS, COLS, BLOCK_ROWS, BLOCK_COLS, CHUNK, VECTOR, STREAMING, TARGET, False, STORED_ROUNDING, ROUNDS, ALIGNED,
        HEAD_STRIDE=HEAD_STRIDE,
    )  # fmt: skip
    dtype: tl.constexpr = data_ptr.dtype.element_ty
    x_dtype: tl.constexpr = x_ptr.dtype.element_ty
    OUTPUT_TERMS: tl.constexpr = 3 if x_dtype == tl.float32 else 2
    UPDATE_TERMS: tl.constexpr = state_io.update_terms(dtype, x_dtype)

    read, slots = (read_ptr, read_stride, read_width, accepted_ptr), (num_slots, null, fault_ptr)
    pool = (data_ptr, scale_ptr, slot_stride, scale_stride)
    first, length = token_range(cu_seqlens_ptr, b, tokens, False)
    count = tl.minimum(length, longest)  # there is no room for more, whatever a packed row has
    slot, live, seed = read_slot(read, b, slots, seed_ptr, STORED_ROUNDING != "nearest", SHARED_SEED, AT_LEAST_ONE)
    if TILES == 1:  # the state takes longest
        tile = tile_at(h, first_row, FORM)
        factor, codes = state_io.load_codes(pool, slot, live, tile, FORM)
    A = tl.load(A_ptr + h).to(tl.float32)

    if EARLY:  # what tokens bring may come from the kernel in front; a single tile is on its way
        gdc_wait()
    x_at, z_at, out = (x_ptr, x_b, x_t, x_h), (z_ptr, z_b, z_t, z_h), (out_ptr, out_b, out_t, out_h)
    if TILES == 1:
        x, z = load_values(x_at, z_at, b, first, count, h, first_row, TOKENS, TILES, FORM)
    token, t = tl.arange(0, ROOM) % TOKENS, tl.arange(0, TOKENS)
    dt_ptrs = token_entry((dt_ptr, dt_b, dt_t, dt_h), b, first + token, h, 1)[:, None] + tl.zeros([1, 2], tl.int32)
    dt = tl.load(dt_ptrs, mask=(token < count)[:, None], other=0.0).to(tl.float32)
    B_rows = token_entry((B_ptr, B_b, B_t, B_h), b, first + token, g, 1)
    C_rows = token_entry((C_ptr, C_b, C_t, C_h), b, first + t, g, 1)
    B = replay_window.load_chunks(B_rows, token < count, 2, 2, FORM)
    C = replay_window.load_chunks(C_rows, t < count, 2, 2, FORM)
    weights, left, decay, total = weigh_tokens(
        dt, tensor_cores.products(B, C), A, D_ptr, dt_bias_ptr, (dt_limit_0, dt_limit_1), h, count,
        D_PER_ROW, DT_SOFTPLUS, TOKENS, TARGET,
    )  # fmt: skip
    weights = in_copies(weights, 0, TOKENS, OUTPUT_TERMS, TARGET)

    to = write_slot((write_ptr, write_stride), b, slot, live & (count > 0), slots) if STORES == "last" else slot
    for i in tl.range(TILES, num_stages=STAGES):
        tile_row = first_row + i * BLOCK_ROWS
        if TILES > 1:
            tile = tile_at(h, tile_row, FORM)
            factor, codes = state_io.load_codes(pool, slot, live, tile, FORM)
            x, z = load_values(x_at, z_at, b, first, count, h, tile_row, TOKENS, TILES, FORM)
        codes = replay_window.operands_of(codes, live, 2, PADDING, FORM)
        if PADDING == "fresh":
            factor = tl.where(live, factor, 1.0)
        y = multiply_tile(codes, factor, C, dtype, FORM) * decay[None, :]
        x_terms = tensor_cores.transposed(tensor_cores.terms_of(x, OUTPUT_TERMS, TARGET))
        y = tensor_cores.dot_terms(x_terms, y, weights)
        if D_ptr is not None and D_PER_ROW:
            y = add_skip(y, x_at, D_ptr, b, first, count, h, tile_row, TOKENS, FORM)
        if z_ptr is not None:
            y *= gate(z.to(tl.float32), TARGET)
        out_ptrs, shown = row_entries(out, b, first, count, h, tile_row, TOKENS, FORM)
        if PADDING != "fresh":
            y = tl.where(live, y, 0.0)
        if PADDING == "keep":
            shown = tl.where(live, shown, False)
        tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=shown)
        if STORES == "last":
            u = in_copies(tl.trans(x.to(tl.float32) * left[:, None]), 1, TOKENS, UPDATE_TERMS, TARGET)
            after = ()
            for k in tl.static_range(len(codes)):
                chunk = replay_window.folded(codes[k], factor, total, u, B[k], dtype, UPDATE_TERMS, TARGET)
                after = after + (tensor_cores.as_in_memory(chunk, VECTOR),)
            state_io.store_rounded(pool, to, to >= 0, tile, after, (seed, count - 1, stream), FORM)
    if cu_seqlens_ptr is not None:
        offs_d = first_row + tl.arange(0, TILES * BLOCK_ROWS)
        mask_d = offs_d < ROWS
        zero_past(out, b, first, count, length, h, offs_d, mask_d, live, PADDING)
        zero_unused(out, cu_seqlens_ptr, b, h, offs_d, mask_d, tokens, batch_size(H, ROWS, TILES * BLOCK_ROWS))
