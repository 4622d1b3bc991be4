"""gated_delta_step on the GPU for several tokens: one program per (batch row, value head, block of V rows), the state
tile in registers, token by token."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from flashstate.kernels import tiles
from flashstate.kernels.addressing import Place, batch_size, this_program, token_entry, zero_unused
from flashstate.kernels.functions import either, sigmoid, softplus
from flashstate.kernels.slots import ancestor, path_to, read_slot, resolve_snapshot_row, token_range, write_slot
from flashstate.kernels.state_io import STREAMING, load_state, random_bits, store_slot
from flashstate.kernels.stores import store_after_token, store_output
from flashstate.launch.kernel import kernel

EPSILON = tl.constexpr(1e-6)  # added to the sum of squares of q and of k before they are normalised
PIECE = tl.constexpr(32)  # columns, one per thread of any warp


@triton.jit
def load_pieces(tensor, b, t, g, exists, FORM: tl.constexpr):
    """What token t of key head g has for each column, in vectors of a warp's length, whatever the tile looks like; so
    all configs sum over them in one order."""
    entry = token_entry(tensor, b, t, g, 1)
    pieces = ()
    for i in tl.static_range((FORM.BLOCK_COLS + PIECE - 1) // PIECE):
        cols = i * PIECE + tl.arange(0, PIECE)
        pieces = pieces + (tiles.load_or_zero(entry + cols, mask=tl.where(exists, cols < FORM.COLS, False)),)
    return pieces


@triton.jit
def dot_pieces(x, y):
    """The sum of products of two vectors."""
    total = x[0] * y[0]
    for i in tl.static_range(1, len(x)):
        total = tl.fma(x[i], y[i], total)
    return tl.sum(total, 0)


@triton.jit
def length_factor(x, QK_L2NORM: tl.constexpr):
    """What makes a vector of pieces one of length 1."""
    return tl.rsqrt(dot_pieces(x, x) + EPSILON) if QK_L2NORM else 1.0


@triton.jit
def load_rate(A_log_ptr, h):
    """exp(A_log) of a head. Only where there is one: Triton 3.6 gives no None back."""
    return tl.exp(tl.load(A_log_ptr + h).to(tl.float32))


@triton.jit
def load_bias(ptr, h, PER_CHANNEL: tl.constexpr, FORM: tl.constexpr):
    """dt_bias of the head, for each chunk of a tile; zeros if there is none."""
    if PER_CHANNEL and ptr is not None:
        zero = h * 0
        return load_channels((ptr, zero, zero, zero + FORM.COLS), zero, zero, h, True, FORM)
    else:
        return for_chunks(0.0 if ptr is None else tl.load(ptr + h).to(tl.float32), FORM)


@triton.jit
def load_channels(tensor, b, t, h, exists, FORM: tl.constexpr):
    """What token t of head h has for each column, in chunks as a tile has them, (CHUNK,) each: a thread has other
    columns than of a tile, and none that another one has too; so they are for what takes many instructions."""
    entry = token_entry(tensor, b, t, h, 1)
    values = ()
    for i in tl.static_range(FORM.BLOCK_COLS // FORM.CHUNK):
        cols = i * FORM.CHUNK + tl.arange(0, FORM.CHUNK)
        x = tl.load(entry + cols, mask=tl.where(exists, cols < FORM.COLS, False), other=0.0)
        values = values + (tiles.widened_here(x, FORM.TARGET),)
    return values


@triton.jit
def for_chunks(value, FORM: tl.constexpr):
    """A value that all chunks of a tile share, once for each of them."""
    values = ()
    for _ in tl.static_range(FORM.BLOCK_COLS // FORM.CHUNK):
        values = values + (value,)
    return values


@triton.jit
def load_alpha(tensor, b, t, h, exists, rate, dt_bias, PER_CHANNEL: tl.constexpr, FORM: tl.constexpr):
    """alpha of token t for each chunk of a tile: of its columns, or that of the head. Without a rate: see decay_of."""
    if PER_CHANNEL:
        a = load_channels(tensor, b, t, h, exists, FORM)
        alpha = ()
        for i in tl.static_range(len(a)):
            alpha = alpha + (decay_of(a[i], rate, dt_bias[i])[None, :],)
        return alpha
    else:
        a = tiles.load_or_zero(token_entry(tensor, b, t, h, 1), mask=exists)
        return for_chunks(decay_of(a, rate, dt_bias[0]), FORM)


@triton.jit
def decay_of(a, rate, dt_bias):
    """alpha of these a. rate: exp(A_log); None: a is the log-decay itself."""
    return tl.exp(log_decay(a, rate, dt_bias))


@triton.jit
def log_decay(a, rate, dt_bias):
    """The logarithm of alpha of these a. rate: exp(A_log); None: a is that itself."""
    return a if rate is None else -rate * softplus(a + dt_bias)


@triton.jit
def step_delta(s, factor, k, k_factor, v, decay, beta, exists, PER_COLUMNS: tl.constexpr):
    """A state, chunk by chunk, through one more token: decayed, u, and after it. factor: of every row of s, (rows, 1),
    or 1; k_factor: of k. Where there is no such token the state stays as it is: s * 1 + -0.0 * 0."""
    decayed = ()
    for i in tl.static_range(len(s)):
        decayed = decayed + (s[i] * (tl.where(exists, decay[i], 1.0) * factor),)
    u = beta * (v - tiles.dot_rows(decayed, k, PER_COLUMNS) * k_factor)
    # (rows, 1), by way of three axes: else the compiler gives the tiles of a loop the layout of w, which is that of a
    # sum, and moves them through shared memory.
    w = tl.reshape(tl.where(exists, u * k_factor, tiles.minus_zero())[:, None, None], (u.shape[0], 1))
    after = ()
    for i in tl.static_range(len(s)):
        after = after + (tl.fma(w, k[i], decayed[i]),)
    return decayed, u, after


@triton.jit
def load_delta_update(
    updates, place, t, exists, rate, dt_bias, pieces,
    QK_L2NORM: tl.constexpr, PER_CHANNEL: tl.constexpr, B_LOGIT: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """What token t steps the state with: k and its factor, v, decay and beta. pieces: of k."""
    k_at, v_at, a_at, beta_at = updates
    b, h, g, offs_d, _ = place
    mask_d = offs_d < FORM.ROWS
    k = tiles.load_columns(k_at, b, t, g, exists, FORM.ALIGNMENT, FORM)
    v = tiles.load_rows(token_entry(v_at, b, t, h, FORM.ALIGNMENT), offs_d, mask_d, exists)
    alpha = load_alpha(a_at, b, t, h, exists, rate, dt_bias, PER_CHANNEL, FORM)
    k_factor = length_factor(pieces, QK_L2NORM)
    beta = tiles.load_or_zero(token_entry(beta_at, b, t, h, 1), mask=exists)
    if B_LOGIT:
        beta = sigmoid(beta)
    return k, k_factor, v, alpha, beta


@triton.jit
def load_delta_token(
    q_at, updates, place, t, exists, rate, dt_bias, q_scale,
    QK_L2NORM: tl.constexpr, PER_CHANNEL: tl.constexpr, B_LOGIT: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """What token t steps the state with, and what makes its output: q, its factor, and the product of both k and q."""
    q_pieces = load_pieces(q_at, place.b, t, place.g, exists, FORM)
    k_pieces = load_pieces(updates[0], place.b, t, place.g, exists, FORM)
    update = load_delta_update(
        updates, place, t, exists, rate, dt_bias, k_pieces, QK_L2NORM, PER_CHANNEL, B_LOGIT, FORM
    )
    q = tiles.load_columns(q_at, place.b, t, place.g, exists, FORM.ALIGNMENT, FORM)
    q_factor = length_factor(q_pieces, QK_L2NORM) * q_scale
    return update, q, q_factor, dot_pieces(k_pieces, q_pieces) * update[1] * q_factor


@triton.jit
def state_before(
    parents, updates, place, first, t, s, factor, initial, initial_factor, rate, dt_bias,
    SCALED: tl.constexpr, QK_L2NORM: tl.constexpr, PER_CHANNEL: tl.constexpr, B_LOGIT: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    """The state that token t of a tree continues from with the factor of its rows, and whether there is one: that after
    the token before if that is its parent, else the initial one after all its ancestors."""
    steps, follows = path_to(parents, place.b, t)
    s = either(follows, s, initial)
    if SCALED:
        factor = tl.where(follows, factor, initial_factor)
    for done in range(1, steps):
        i = ancestor(parents, place.b, t, steps - done)
        pieces = load_pieces(updates[0], place.b, first + i, place.g, True, FORM)
        k, k_factor, v, decay, beta = load_delta_update(
            updates, place, first + i, True, rate, dt_bias, pieces, QK_L2NORM, PER_CHANNEL, B_LOGIT, FORM
        )
        _, _, s = step_delta(s, factor, k, k_factor, v, decay, beta, True, FORM.PER_COLUMNS)
        if SCALED:
            factor = tl.full(factor.shape, 1.0, tl.float32)
    return s, factor, steps > 0


@kernel
def gated_delta_step_kernel(
    # Pointers, which change from call to call; None: absent. beta: the op's b.
    data_ptr, q_ptr, k_ptr, v_ptr, a_ptr, beta_ptr, out_ptr, A_log_ptr, dt_bias_ptr, scale_ptr, seed_ptr,
    read_ptr, accepted_ptr, write_ptr, parents_ptr, cu_seqlens_ptr, snapshot_rows_ptr,
    copy_ptr, copy_scale_ptr,  # snapshots
    stream,
    # What a server repeats.
    fault_ptr,
    slot_stride, scale_stride,  # of slots, in the data and in the scales
    copy_b, copy_scale_b, copy_t, copy_scale_t, num_copies,  # strides of snapshots and of their scales; rows there are
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h,  # strides of batch, token and head
    a_b, a_t, a_h, beta_b, beta_t, beta_h, out_b, out_t, out_h,
    read_stride, read_width, write_stride, parents_stride,  # of the rows of tables
    tokens,  # length of the token axis
    longest,  # entries that write, parents and snapshots have for the tokens of a row
    num_slots, null,
    q_scale,  # of queries, beside their normalisation
    H: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, SNAPSHOT_HEAD_STRIDE: tl.constexpr,  # from head to head; None: they lie side by side
    VECTOR: tl.constexpr, SNAPSHOT_VECTOR: tl.constexpr,  # elements per access
    TRANSPOSED: tl.constexpr, SNAPSHOTS_TRANSPOSED: tl.constexpr,  # states are (COLS, ROWS) in memory
    ALIGNED: tl.constexpr,  # every row of q, k, v and out starts at a multiple of 16 bytes
    PER_CHANNEL: tl.constexpr, BIAS_PER_CHANNEL: tl.constexpr,  # a and dt_bias have a value for each column
    QK_L2NORM: tl.constexpr,
    B_LOGIT: tl.constexpr,  # b is the logit of beta
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
    FORM: tl.constexpr = tiles.form_of(
        ROWS, COLS, BLOCK_ROWS, BLOCK_COLS, CHUNK, VECTOR, STREAMING, TARGET, TRANSPOSED, ROUNDING, ROUNDS,
        ALIGNED, THREADS, HEAD_STRIDE=HEAD_STRIDE,
    )  # fmt: skip
    COPY_FORM: tl.constexpr = tiles.stored_as(
        FORM, SNAPSHOT_VECTOR, SNAPSHOTS_TRANSPOSED, SNAPSHOT_ROUNDING, SNAPSHOT_HEAD_STRIDE
    )
    tile, copy_tile = tiles.tile_at(h, first_row, FORM), tiles.tile_at(h, first_row, COPY_FORM)

    # No branches: a padding row is masked. So loads do not wait until the row is known to be live.
    read, slots = (read_ptr, read_stride, read_width, accepted_ptr), (num_slots, null, fault_ptr)
    SEEDED: tl.constexpr = ROUNDING != "nearest" or SNAPSHOT_ROUNDING != "nearest"
    slot, live, seed = read_slot(read, b, slots, seed_ptr, SEEDED, SHARED_SEED, AT_LEAST_ONE)
    first, count = token_range(cu_seqlens_ptr, b, tokens, False)

    pool, write = (data_ptr, scale_ptr, slot_stride, scale_stride), (write_ptr, write_stride)
    factor, s = load_state(pool, slot, live, tile, FORM)
    if PADDING == "fresh":
        s, factor = tiles.zero_unless(live, s, factor)
    initial, initial_factor = s, factor
    rate = None if A_log_ptr is None else load_rate(A_log_ptr, h)  # None: a is the log-decay itself
    dt_bias = load_bias(dt_bias_ptr, h, BIAS_PER_CHANNEL, FORM)
    if STORES == "last":  # drawn while the state is on its way
        DRAWS_TWICE: tl.constexpr = TRANSPOSED and copy_ptr is not None
        random = random_bits((seed, count - 1, stream), tile, data_ptr.dtype.element_ty, FORM, DRAWS_TWICE)

    if EARLY:  # what tokens bring may come from the kernel in front; the state is on its way
        gdc_wait()
    k_at, v_at, a_at = (k_ptr, k_b, k_t, k_h), (v_ptr, v_b, v_t, v_h), (a_ptr, a_b, a_t, a_h)
    updates, q_at = (k_at, v_at, a_at, (beta_ptr, beta_b, beta_t, beta_h)), (q_ptr, q_b, q_t, q_h)
    out = (out_ptr, out_b, out_t, out_h)
    copies = (copy_ptr, copy_scale_ptr, copy_b, copy_scale_b, copy_t, copy_scale_t)
    copy_rows, copy_row = (snapshot_rows_ptr, num_copies), -1
    if copy_ptr is not None and parents_ptr is None:
        copy_row = resolve_snapshot_row(copy_rows, b, live & (count > 0) & (longest > 0), fault_ptr)
    for start in range(0, count, TOGETHER):
        group = ()
        for j in tl.static_range(TOGETHER):  # all of them are on their way before the first is used
            t = b * 0 + (start + j)  # a number of the kernel also where the interpreter has one of Python
            exists = True if TOGETHER == 1 else t < count
            token = load_delta_token(
                q_at, updates, place, first + t, exists, rate, dt_bias, q_scale,
                QK_L2NORM, PER_CHANNEL, B_LOGIT, FORM,
            )  # fmt: skip
            group = group + ((t, exists, token),)

        for j in tl.static_range(TOGETHER):
            t, exists, token = group[j]
            update, q, q_factor, kq = token
            k, k_factor, v, decay, beta = update
            stepped = exists
            if parents_ptr is not None:
                s, factor, stepped = state_before(
                    (parents_ptr, parents_stride, longest), updates, place, first, t, s, factor, initial,
                    initial_factor, rate, dt_bias, scale_ptr is not None, QK_L2NORM, PER_CHANNEL, B_LOGIT, FORM,
                )  # fmt: skip
            decayed, u, s = step_delta(s, factor, k, k_factor, v, decay, beta, exists, FORM.PER_COLUMNS)
            if scale_ptr is not None:
                factor = tl.full([BLOCK_ROWS, 1], 1.0, tl.float32)
            o = tl.fma(u, kq, tiles.dot_rows(decayed, q, FORM.PER_COLUMNS) * q_factor)

            runs = tl.where(stepped, live, False)
            store_output(out, place, first + t, o, exists, stepped, live, PADDING, FORM.ALIGNMENT)
            store_after_token(
                pool, write, copies, copy_rows, copy_row, b, t, slot, runs & (t < longest), slots, (seed, t, stream),
                tile, copy_tile, s, STORES, parents_ptr is not None, FORM, COPY_FORM,
            )  # fmt: skip

    if STORES == "last":
        goes = live & (count > 0)
        store_slot(pool, write_slot(write, b, slot, goes, slots), tile, s, random, FORM)
    if cu_seqlens_ptr is not None:
        zero_unused(out, cu_seqlens_ptr, b, h, offs_d, mask_d, tokens, batch_size(H, ROWS, BLOCK_ROWS))
