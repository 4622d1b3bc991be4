"""mamba2_step on the GPU: one program per (batch row, head, block of D rows), the state tile in registers."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from flashstate.kernels import tiles
from flashstate.kernels.addressing import Place, batch_size, this_program, token_entry, zero_unused
from flashstate.kernels.functions import either, silu, softplus, within_limits
from flashstate.kernels.slots import (
    READ_FAULT,
    ancestor,
    ask_slot,
    load_seed,
    note_past,
    path_to,
    read_slot,
    resolve_snapshot_row,
    slot_and_life,
    token_range,
    write_slot,
)
from flashstate.kernels.state_io import EVICT_FIRST, load_state, random_bits, store_slot
from flashstate.kernels.stores import store_after_token, store_output
from flashstate.launch.kernel import kernel


@triton.jit
def load_rates(ptr, h, tile, PER_ELEMENT: tl.constexpr, FORM: tl.constexpr):
    """A for each chunk of a tile: its elements', or the one of the head."""
    A = ()
    for k in tl.static_range(len(tile.masks)):
        if PER_ELEMENT:
            ptrs, mask = tiles.chunk_at(ptr + (h * FORM.ROWS + tile.first_row) * FORM.COLS, tile, k, FORM)
            A = A + (tiles.load_or_zero(ptrs, mask=mask),)
        else:
            A = A + (tl.load(ptr + h).to(tl.float32),)
    return A


@triton.jit
def load_parameters(heads, place, tile, EACH: tl.constexpr, FORM: tl.constexpr):
    """A for each chunk of a tile, D and dt_bias, of pointers to them, `heads`; zero where there is no D or bias. EACH:
    whether A has a value for every element, and D and dt_bias one for every row."""
    A_ptr, D_ptr, dt_bias_ptr = heads
    A = load_rates(A_ptr, place.h, tile, EACH[0], FORM)
    return A, load_parameter(D_ptr, place, EACH[1], FORM), load_parameter(dt_bias_ptr, place, EACH[2], FORM)


@triton.jit
def load_parameter(ptr, place, PER_ROW: tl.constexpr, FORM: tl.constexpr):
    """What there is for each row of a head, or for the head; zero if there is nothing."""
    if ptr is None:
        return 0.0
    else:
        return tiles.load_head(ptr + place.h * (FORM.ROWS if PER_ROW else 1), place.rows, place.mask, True, PER_ROW)


@triton.jit
def load_mamba2_update(updates, place, t, exists, DT_PER_ROW: tl.constexpr, FORM: tl.constexpr):
    """What token t steps the state with: x, dt and B; zeros if the token does not exist."""
    x_at, dt_at, B_at = updates
    b, h, g, offs_d, mask_d = place
    x = tiles.load_rows(token_entry(x_at, b, t, h, FORM.ALIGNMENT), offs_d, mask_d, exists)
    dt = tiles.load_head(token_entry(dt_at, b, t, h, 1), offs_d, mask_d, exists, DT_PER_ROW)
    return x, dt, tiles.load_columns(B_at, b, t, g, exists, FORM.ALIGNMENT, FORM)


@triton.jit
def load_mamba2_token(updates, C_at, z_at, place, t, exists, DT_PER_ROW: tl.constexpr, FORM: tl.constexpr):
    """What token t brings: what it steps the state with, C, and the gate; zero if there is none."""
    x, dt, B = load_mamba2_update(updates, place, t, exists, DT_PER_ROW, FORM)
    C = tiles.load_columns(C_at, place.b, t, place.g, exists, FORM.ALIGNMENT, FORM)
    if z_at[0] is None:
        return x, dt, B, C, 0.0
    else:
        z_entry = token_entry(z_at, place.b, t, place.h, FORM.ALIGNMENT)
        return x, dt, B, C, tiles.load_rows(z_entry, place.rows, place.mask, exists)


@triton.jit
def step_mamba2(s, factor, x, dt, B, A, dt_bias, limits, exists, DT_SOFTPLUS: tl.constexpr):
    """A state after one more token: s * factor * exp(dt * A) + (dt * x) ⊗ B, chunk by chunk. factor: of every row,
    (rows, 1), or 1. Where there is no such token the state stays as it is: s * 1 + -0.0 * 0."""
    if dt_bias is not None:
        dt += dt_bias
    if DT_SOFTPLUS:
        dt = softplus(dt)
    dt = within_limits(dt, limits)
    dtx = tl.where(exists, dt * x, tiles.minus_zero())[:, None]
    if len(dt.shape) == 1:
        dt = dt[:, None]
    stepped = ()
    for k in tl.static_range(len(s)):
        decay = tl.where(exists, tl.exp(dt * A[k]), 1.0)
        stepped = stepped + (tl.fma(s[k], decay * factor, dtx * B[k]),)
    return stepped


@triton.jit
def step_along_path(
    parents, updates, place, first, t, s, factor, initial, initial_factor, A, dt_bias, limits,
    SCALED: tl.constexpr, DT_SOFTPLUS: tl.constexpr, DT_PER_ROW: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """The state after token t of a tree, and whether there is one: from that of the token before if that is its parent,
    else from the initial one through all its ancestors."""
    steps, follows = path_to(parents, place.b, t)
    s = either(follows, s, initial)
    if SCALED:
        factor = tl.where(follows, factor, initial_factor)
    for done in range(0, steps):
        i = ancestor(parents, place.b, t, steps - 1 - done)
        x, dt, B = load_mamba2_update(updates, place, first + i, True, DT_PER_ROW, FORM)
        s = step_mamba2(s, factor, x, dt, B, A, dt_bias, limits, True, DT_SOFTPLUS)
        if SCALED:
            factor = tl.full(factor.shape, 1.0, tl.float32)
    return s, steps > 0


@kernel
def mamba2_step_kernel(
    # Pointers, which change from call to call; None: absent.
    data_ptr, x_ptr, B_ptr, C_ptr, dt_ptr, out_ptr, A_ptr, D_ptr, z_ptr, dt_bias_ptr, scale_ptr, seed_ptr,
    read_ptr, accepted_ptr, write_ptr, parents_ptr, cu_seqlens_ptr, snapshot_rows_ptr,
    copy_ptr, copy_scale_ptr,  # snapshots
    stream,
    # What a server repeats. Not in tuples: Triton compiles anew for the values it finds in one.
    fault_ptr,
    slot_stride, scale_stride,  # of slots, in the data and in the scales
    copy_b, copy_scale_b, copy_t, copy_scale_t, num_copies,  # strides of snapshots and of their scales; rows there are
    x_b, x_t, x_h, B_b, B_t, B_h, C_b, C_t, C_h,  # strides of batch, token, and head or group
    dt_b, dt_t, dt_h, z_b, z_t, z_h, out_b, out_t, out_h,
    read_stride, read_width, write_stride, parents_stride,  # of the rows of tables
    tokens,  # length of the token axis
    longest,  # entries that write, parents and snapshots have for the tokens of a row
    num_slots, null,
    dt_limit_0, dt_limit_1,  # between which time steps are kept; None: anywhere
    H: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, SNAPSHOT_HEAD_STRIDE: tl.constexpr,  # from head to head; None: they lie side by side
    VECTOR: tl.constexpr, SNAPSHOT_VECTOR: tl.constexpr,  # elements per access: of snapshots no more
    ALIGNED: tl.constexpr,  # every row of x, B, C, z and out starts at a multiple of 16 bytes
    A_PER_ELEMENT: tl.constexpr, DT_PER_ROW: tl.constexpr, BIAS_PER_ROW: tl.constexpr, D_PER_ROW: tl.constexpr,
    DT_SOFTPLUS: tl.constexpr, ONE_TOKEN: tl.constexpr,
    TOGETHER: tl.constexpr,  # tokens whose inputs are loaded at once; 1 with parents
    STORES: tl.constexpr,  # after which tokens the pool is written: "last", "every" or "none"
    PADDING: tl.constexpr,  # the output of padding rows: "zero", "fresh", from a zero state, or "keep", as it was
    AT_LEAST_ONE: tl.constexpr,  # whether accepted counts below 1 are taken as 1
    EARLY: tl.constexpr,  # started before the kernel in front of it has ended
    ROUNDING: tl.constexpr, SNAPSHOT_ROUNDING: tl.constexpr, ROUNDS: tl.constexpr, SHARED_SEED: tl.constexpr,
    TARGET: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNK: tl.constexpr, THREADS: tl.constexpr,  # of a program
):  # fmt: skip
    b, h, first_row = this_program(H, ROWS, BLOCK_ROWS)
    g = h // HEADS_PER_GROUP
    offs_d = first_row + tl.arange(0, BLOCK_ROWS)
    mask_d = offs_d < ROWS
    place = Place(b, h, g, offs_d, mask_d)
    # Of one token the compiler converts bfloat16: in fewer instructions, small batches take longer (docs/log.md).
    WIDENING: tl.constexpr = "portable" if ONE_TOKEN else TARGET
    FORM: tl.constexpr = tiles.form_of(
        ROWS, COLS, BLOCK_ROWS, BLOCK_COLS, CHUNK, VECTOR, EVICT_FIRST, TARGET, False, ROUNDING, ROUNDS,
        ALIGNED, THREADS, WIDENING, HEAD_STRIDE=HEAD_STRIDE,
    )  # fmt: skip
    COPY_FORM: tl.constexpr = tiles.stored_as(FORM, SNAPSHOT_VECTOR, False, SNAPSHOT_ROUNDING, SNAPSHOT_HEAD_STRIDE)
    updates = (x_ptr, x_b, x_t, x_h), (dt_ptr, dt_b, dt_t, dt_h), (B_ptr, B_b, B_t, B_h)
    C_at, z_at, out = (C_ptr, C_b, C_t, C_h), (z_ptr, z_b, z_t, z_h), (out_ptr, out_b, out_t, out_h)

    first, count = token_range(cu_seqlens_ptr, b, tokens, ONE_TOKEN)
    tile, copy_tile = tiles.tile_at(h, first_row, FORM), tiles.tile_at(h, first_row, COPY_FORM)
    read, slots = (read_ptr, read_stride, read_width, accepted_ptr), (num_slots, null, fault_ptr)
    pool, write = (data_ptr, scale_ptr, slot_stride, scale_stride), (write_ptr, write_stride)
    heads = A_ptr, D_ptr, dt_bias_ptr
    EACH: tl.constexpr = (A_PER_ELEMENT, D_PER_ROW, BIAS_PER_ROW)

    # Of float states rounded to nearest, what one token brings is on its way before the slot is known, and time steps
    # are made meanwhile: small batches take up to 4 % less. Others would take 4 to 7 % more at 256 (docs/log.md).
    AHEAD: tl.constexpr = ONE_TOKEN and not EARLY and ROUNDING == "nearest" and scale_ptr is None
    SEEDED: tl.constexpr = ROUNDING != "nearest" or SNAPSHOT_ROUNDING != "nearest"
    # No branches: a padding row is masked. So loads do not wait until the row is known to be live.
    if AHEAD:
        number = ask_slot(read, b, slots, AT_LEAST_ONE=AT_LEAST_ONE)
        A, D, dt_bias = load_parameters(heads, place, tile, EACH, FORM)
        token = load_mamba2_token(updates, C_at, z_at, place, first, True, DT_PER_ROW, FORM)
        slot, live = slot_and_life(number, slots)
        seed = load_seed(seed_ptr, slot, live, SEEDED, SHARED_SEED)
    else:
        slot, live, seed = read_slot(read, b, slots, seed_ptr, SEEDED, SHARED_SEED, AT_LEAST_ONE)
    factor, s = load_state(pool, slot, live, tile, FORM)
    if PADDING == "fresh":
        s, factor = tiles.zero_unless(live, s, factor)
    initial, initial_factor = s, factor
    if AHEAD:
        if read_ptr is not None:
            note_past(number, slots, READ_FAULT)
    else:
        A, D, dt_bias = load_parameters(heads, place, tile, EACH, FORM)
    if dt_bias_ptr is None:
        dt_bias = None
    if STORES == "last":  # drawn while the state is on its way
        random = random_bits((seed, count - 1, stream), tile, data_ptr.dtype.element_ty, FORM)

    if EARLY:  # what tokens bring may come from the kernel in front; the state is on its way
        gdc_wait()
    copies = (copy_ptr, copy_scale_ptr, copy_b, copy_scale_b, copy_t, copy_scale_t)
    parents = (parents_ptr, parents_stride, longest)
    copy_rows, copy_row, limits = (snapshot_rows_ptr, num_copies), -1, (dt_limit_0, dt_limit_1)
    if copy_ptr is not None and parents_ptr is None:
        copy_row = resolve_snapshot_row(copy_rows, b, live & (count > 0) & (longest > 0), fault_ptr)
    for start in range(0, count, TOGETHER):
        group = ()
        for j in tl.static_range(TOGETHER):  # all of them are on their way before the first is used
            t = b * 0 + (start + j)  # a number of the kernel also where the interpreter has one of Python
            exists = True if TOGETHER == 1 else t < count
            if not AHEAD:
                token = load_mamba2_token(updates, C_at, z_at, place, first + t, exists, DT_PER_ROW, FORM)
            group = group + ((t, exists, token),)

        for j in tl.static_range(TOGETHER):
            t, exists, token = group[j]
            x, dt, B, C, z = token
            if parents_ptr is None:
                stepped = exists
                s = step_mamba2(s, factor, x, dt, B, A, dt_bias, limits, exists, DT_SOFTPLUS)
            else:
                s, stepped = step_along_path(
                    parents, updates, place, first, t, s, factor, initial, initial_factor, A, dt_bias, limits,
                    scale_ptr is not None, DT_SOFTPLUS, DT_PER_ROW, FORM,
                )  # fmt: skip
            if scale_ptr is not None:
                factor = tl.full([BLOCK_ROWS, 1], 1.0, tl.float32)
            runs = tl.where(stepped, live, False)
            y = tiles.dot_rows(s, C, VECTOR)
            if D_ptr is not None:
                y = tl.fma(x, D, y)
            if z_ptr is not None:
                y *= silu(z)
            store_output(out, place, first + t, y, exists, stepped, live, PADDING, FORM.ALIGNMENT)
            store_after_token(
                pool, write, copies, copy_rows, copy_row, b, t, slot, runs & (t < longest), slots, (seed, t, stream),
                tile, copy_tile, s, STORES, parents_ptr is not None, FORM, COPY_FORM,
            )  # fmt: skip

    if STORES == "last":
        goes = live if ONE_TOKEN else live & (count > 0)
        store_slot(pool, write_slot(write, b, slot, goes, slots), tile, s, random, FORM)
    if cu_seqlens_ptr is not None:
        zero_unused(out, cu_seqlens_ptr, b, h, offs_d, mask_d, tokens, batch_size(H, ROWS, BLOCK_ROWS))
