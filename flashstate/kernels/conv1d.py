"""conv1d_step on the GPU: one program per (batch row, block of channels), the last inputs in registers."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashstate.kernels.addressing import batch_size, this_program, token_entry, zero_unused
from flashstate.kernels.functions import either, gate
from flashstate.kernels.slots import (
    ACCEPTED_FAULT,
    depth_of,
    parent_of,
    resolve_read,
    resolve_snapshot_row,
    resolve_write,
    token_range,
)
from flashstate.kernels.tensor_cores import halved
from flashstate.launch.kernel import kernel

# How rows of channels lie in memory, as constants say it: 0, channels apart from each other; else channels are
# neighbours, and all rows start at multiples of that many bytes.
APART = tl.constexpr(0)


@triton.jit
def channels_at(row, channels, stride, ROWS: tl.constexpr):
    """Pointers to the channels of a row that starts there."""
    offs_c, _ = channels
    if ROWS == APART:
        return row + offs_c.to(tl.int64) * stride
    else:
        return tl.multiple_of(row + offs_c, ROWS)  # said of what is computed here: of arguments the compiler forgets it


@triton.jit
def window_entry(windows, base, entry, channels, ROWS: tl.constexpr):
    """Pointers to an entry of the window at offset `base`; `windows`: pointer, strides of channels and entries."""
    ptr, stride_c, stride_e = windows
    tl.assume(stride_c >= 0)
    tl.assume(stride_e >= 0)
    return channels_at(ptr + (base + entry.to(tl.int64) * stride_e), channels, stride_c, ROWS)


@triton.jit
def store_entries(windows, base, first, values, channels, goes, ROWS: tl.constexpr):
    """Store `values`, one entry each, from entry `first` on."""
    for i in tl.static_range(len(values)):
        ptrs = window_entry(windows, base, first + i, channels, ROWS)
        tl.store(ptrs, values[i], mask=tl.where(goes, channels[1], False), eviction_policy="evict_first")


@triton.jit
def first_entry(slot, b, accepted_ptr, positions_ptr, length, fault_ptr, WIDTH: tl.constexpr, HISTORY: tl.constexpr,
                MODE: tl.constexpr):  # fmt: skip
    """The first of the WIDTH - 1 entries that row b reads, and its slot, or -1 if the window has no such entry."""
    if MODE == "ring":
        return slot, tl.load(positions_ptr + b).to(tl.int64) - (WIDTH - 1)
    elif MODE == "shift":
        return slot, (length - (WIDTH - 1)).to(tl.int64)
    else:
        accepted = tl.load(accepted_ptr + b).to(tl.int64)
        first = accepted - (WIDTH - 1 - HISTORY)
        past = first > length - (WIDTH - 1)
        tl.store(fault_ptr + ACCEPTED_FAULT, accepted, mask=past & (slot >= 0))
        inside = (first >= 0) & (first <= length - (WIDTH - 1))
        return tl.where(inside, slot, -1), tl.where(inside, first, 0)


@triton.jit
def in_ring(entry, length):
    """An entry of a ring: a number from 0 to length - 1, also of one below 0."""
    entry = entry % length
    return tl.where(entry < 0, entry + length, entry)


@triton.jit
def load_filters(ptr, channels, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, ALIGNMENT: tl.constexpr):
    """The weights of every channel, (channels, BLOCK_WIDTH): rows of WIDTH at multiples of ALIGNMENT bytes."""
    offs_c, mask_c = channels
    taps = tl.arange(0, BLOCK_WIDTH)[None, :]
    ptrs = tl.multiple_of(ptr + (offs_c[:, None] * WIDTH + taps), (1, ALIGNMENT))
    return tl.load(ptrs, mask=mask_c[:, None] & (taps < WIDTH), other=0.0)


@triton.jit
def taps_of(rows, WIDTH: tl.constexpr):
    """The weights of each tap, oldest first."""
    columns = halved(rows.to(tl.float32), 1)
    taps = ()
    for i in tl.static_range(WIDTH):
        taps = taps + (tl.reshape(columns[i], (rows.shape[0],)),)
    return taps


@triton.jit
def convolve(u, weights, bias, ACTIVATION: tl.constexpr, TARGET: tl.constexpr):
    """The output of a token from the last inputs, its own among them: bias + sum of weight * u, activated."""
    y = bias
    for i in tl.static_range(len(u)):
        y = tl.fma(weights[i], u[i], y)
    return gate(y, TARGET) if ACTIVATION == "silu" else y


@triton.jit
def as_float32(values):
    """Every value of a tuple in float32."""
    floats = ()
    for i in tl.static_range(len(values)):
        floats = floats + (values[i].to(tl.float32),)
    return floats


@triton.jit
def inputs_along_path(parents, x_at, b, first, t, x_channel, channels, initial, X_ROWS: tl.constexpr):
    """The inputs before token t of a tree, of tokens on its path and then of the window; whether it has a path."""
    depth = depth_of(parents, b, t)
    count: tl.constexpr = len(initial)
    node = t
    inputs = ()
    for generation in tl.static_range(1, count + 1):
        node = parent_of(parents, b, node)
        value = load_input(x_at, b, first + node, x_channel, channels, generation < depth, X_ROWS)
        value = value.to(initial[0].dtype)
        for i in tl.static_range(count):
            value = tl.where(count - 1 - i == generation - depth, initial[i], value)
        inputs = (value,) + inputs
    return inputs, depth > 0


@triton.jit
def load_input(x_at, b, t, stride_c, channels, exists, ROWS: tl.constexpr):
    """The input of token t; zeros if it does not exist."""
    row = token_entry(x_at, b, t, b * 0, 1)
    return tl.load(channels_at(row, channels, stride_c, ROWS), mask=tl.where(exists, channels[1], False), other=0.0)


@triton.jit
def load_inputs(x_at, b, first, start, count, stride_c, channels, TOGETHER: tl.constexpr, ROWS: tl.constexpr):
    """The inputs of so many tokens from number `start` on; zeros where the row has no more."""
    values = ()
    for j in tl.static_range(TOGETHER):
        t = b * 0 + start + j
        values = values + (load_input(x_at, b, first + t, stride_c, channels, t < count, ROWS),)
    return values


@triton.jit
def shift_older(windows, read_base, write_base, x_at, b, first, count, length, x_channel, channels, reads, goes,
                WIDTH: tl.constexpr, WINDOW_ROWS: tl.constexpr, X_ROWS: tl.constexpr):  # fmt: skip
    """Move the entries of a longer window than a token needs, all but the last WIDTH - 1, `count` places on; those that
    come from tokens too. An entry is read before it is overwritten, whichever threads do so."""
    for entry in range(0, length - (WIDTH - 1)):
        source = count + entry
        ptrs = window_entry(windows, read_base, b * 0 + source, channels, WINDOW_ROWS)
        kept = tl.load(ptrs, mask=tl.where(reads & (source < length), channels[1], False), other=0.0)
        from_token = reads & (source >= length)
        token = load_input(x_at, b, first + source - length, x_channel, channels, from_token, X_ROWS)
        tl.debug_barrier()
        value = (tl.where(source < length, kept, token.to(kept.dtype)),)
        store_entries(windows, write_base, b * 0 + entry, value, channels, goes, WINDOW_ROWS)


@kernel
def conv1d_step_kernel(
    # Pointers, which change from call to call; None: absent.
    window_ptr, x_ptr, out_ptr, weight_ptr, bias_ptr, positions_ptr,
    read_ptr, accepted_ptr, write_ptr, parents_ptr, cu_seqlens_ptr, snapshot_rows_ptr,
    copy_ptr,  # snapshots
    null, fault_ptr,
    slot_stride, window_c, window_e, length,  # of windows: strides of slots, channels and entries; entries there are
    copy_b, copy_t, copy_c, copy_e, num_copies,  # of snapshots: strides of rows, tokens, channels, entries; rows
    x_b, x_t, x_c, out_b, out_t, out_c,  # strides of batch, token and channel
    read_stride, read_width, write_stride, parents_stride,  # of the rows of tables
    tokens,  # length of the token axis
    longest,  # entries that write, parents and snapshots have for the tokens of a row
    num_slots,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    MODE: tl.constexpr,  # of the window: "shift" keeps the last inputs, "rollback" reads at an offset, or a "ring"
    HISTORY: tl.constexpr,  # entries before the tokens of a call, where MODE is "rollback"
    LONGER: tl.constexpr,  # length > WIDTH - 1, where MODE is "shift"
    ACTIVATION: tl.constexpr, TARGET: tl.constexpr, ONE_TOKEN: tl.constexpr,
    TOGETHER: tl.constexpr,  # tokens whose inputs are loaded at once; 1 with parents
    WHOLE: tl.constexpr,  # every row has a multiple of TOGETHER tokens
    STORES: tl.constexpr,  # after which tokens windows are written: "last", "every" or "none"
    PADDING: tl.constexpr,  # the output of padding rows: "zero", "fresh", from a window of zeros, or "keep", as it was
    AT_LEAST_ONE: tl.constexpr,  # whether accepted counts below 1 are taken as 1
    WINDOW_ROWS: tl.constexpr, COPY_ROWS: tl.constexpr, X_ROWS: tl.constexpr, OUT_ROWS: tl.constexpr,
    BIAS_ROWS: tl.constexpr, WEIGHT_ALIGNMENT: tl.constexpr,  # bytes that weights of a channel start at multiples of
    EARLY: tl.constexpr,  # started before the kernel in front of it has ended
    LETS_NEXT_START: tl.constexpr,  # a kernel behind this one may start before it ends
    BLOCK: tl.constexpr,
):  # fmt: skip
    if LETS_NEXT_START and not EARLY:
        gdc_launch_dependents()
    b, _, first_channel = this_program(1, CHANNELS, BLOCK)
    offs_c = first_channel + tl.arange(0, BLOCK)
    channels = (offs_c, offs_c < CHANNELS)
    zero = b * 0
    windows, copies = (window_ptr, window_c, window_e), (copy_ptr, copy_c, copy_e)
    x_at, out_at = (x_ptr, x_b, x_t, 0), (out_ptr, out_b, out_t, 0)
    parents, write = (parents_ptr, parents_stride, longest), (write_ptr, write_stride)
    slots = (num_slots, null, fault_ptr)

    read = (read_ptr, read_stride, read_width, None if MODE == "rollback" else accepted_ptr)
    slot = resolve_read(read, b, slots, AT_LEAST_ONE=AT_LEAST_ONE)
    slot, from_entry = first_entry(slot, b, accepted_ptr, positions_ptr, length, fault_ptr, WIDTH, HISTORY, MODE)
    live = slot >= 0
    first, count = token_range(cu_seqlens_ptr, b, tokens, ONE_TOKEN)

    # All that a program needs at first is on its way before anything is waited for.
    weight_rows = load_filters(weight_ptr, channels, WIDTH, BLOCK_WIDTH, WEIGHT_ALIGNMENT)
    if not EARLY:
        group = load_inputs(x_at, b, first, zero, count, x_c, channels, TOGETHER, X_ROWS)
    recent = ()  # the inputs before a token, oldest first
    for i in tl.static_range(WIDTH - 1):
        entry = in_ring(from_entry + i, length) if MODE == "ring" else from_entry + i
        ptrs = window_entry(windows, slot * slot_stride, entry, channels, WINDOW_ROWS)
        before = tl.load(ptrs, mask=tl.where(live, channels[1], False), other=0.0, eviction_policy="evict_first")
        recent = recent + (before,)
    initial = recent
    bias = tl.zeros([BLOCK], tl.float32)
    if bias_ptr is not None:
        bias = tl.load(channels_at(bias_ptr, channels, 1, BIAS_ROWS), mask=channels[1], other=0.0)
    if EARLY:  # the inputs may come from the kernel in front; only then has all ended that the next one may rely on
        gdc_wait()
        if LETS_NEXT_START:
            gdc_launch_dependents()
        group = load_inputs(x_at, b, first, zero, count, x_c, channels, TOGETHER, X_ROWS)
    weights, bias, floats = taps_of(weight_rows, WIDTH), bias.to(tl.float32), as_float32(recent)

    goes = live if ONE_TOKEN else live & (count > 0)
    if STORES == "last":
        to = resolve_write(write, b, 0, slot, goes, slots)
        goes = goes & (to >= 0)
        base = to * slot_stride
    if STORES == "last" and MODE == "shift" and LONGER:
        shift_older(
            windows, slot * slot_stride, base, x_at, b, first, count, length, x_c, channels, live, goes,
            WIDTH, WINDOW_ROWS, X_ROWS,
        )  # fmt: skip
    tl.debug_barrier()  # what was read may be overwritten now, by whichever threads

    for start in range(0, count, TOGETHER):
        next_group = group
        if not ONE_TOKEN:
            next_group = load_inputs(x_at, b, first, start + TOGETHER, count, x_c, channels, TOGETHER, X_ROWS)
        for j in tl.static_range(TOGETHER):
            t = zero + (start + j)  # a number of the kernel also where the interpreter has one of Python
            exists = True if WHOLE else t < count
            x = group[j].to(window_ptr.dtype.element_ty)
            stepped = exists
            if parents_ptr is not None:
                recent, stepped = inputs_along_path(parents, x_at, b, first, t, x_c, channels, initial, X_ROWS)
                floats = as_float32(recent)
            u = floats + (x.to(tl.float32),)
            runs = tl.where(stepped, live, False)
            y = convolve(u, weights, bias, ACTIVATION, TARGET)
            y = tl.where(runs if PADDING == "zero" else stepped, y, 0.0).to(out_ptr.dtype.element_ty)
            row = token_entry(out_at, b, first + t, zero, 1)
            shown = tl.where(exists, live, False) if PADDING == "keep" else exists
            tl.store(channels_at(row, channels, out_c, OUT_ROWS), y, mask=tl.where(shown, channels[1], False))
            recent = either(exists, recent[1:] + (x,), recent)
            floats = either(exists, u[1:], floats)

            if STORES == "last" and MODE != "shift":
                # Behind the history, if there is room; or in a ring at its position, if no later token falls there.
                stays = HISTORY + t < length if MODE == "rollback" else t >= count - length
                place = HISTORY + t if MODE == "rollback" else in_ring(from_entry + (WIDTH - 1) + t, length)
                stays = tl.where(exists, goes & stays, False)
                store_entries(windows, base, place, (x,), channels, stays, WINDOW_ROWS)
            known = runs & (t < longest)
            if STORES == "every":
                to = resolve_write(write, b, t, slot, known, slots)
                store_entries(windows, to * slot_stride, zero, recent, channels, to >= 0, WINDOW_ROWS)
            if copy_ptr is not None:
                to = resolve_snapshot_row((snapshot_rows_ptr, num_copies), b, known, fault_ptr)
                at = to * copy_b + t.to(tl.int64) * copy_t
                store_entries(copies, at, zero, recent, channels, to >= 0, COPY_ROWS)
        group = next_group

    if STORES == "last" and MODE == "shift":
        store_entries(windows, base, length - (WIDTH - 1), recent, channels, goes, WINDOW_ROWS)
    if STORES == "last" and MODE == "rollback":
        store_entries(windows, base, zero, initial[WIDTH - 1 - HISTORY :], channels, goes, WINDOW_ROWS)
    if cu_seqlens_ptr is not None:
        offsets = offs_c.to(tl.int64) * out_c if OUT_ROWS == APART else offs_c
        zero_unused(out_at, cu_seqlens_ptr, b, zero, offsets, channels[1], tokens, batch_size(1, CHANNELS, BLOCK))
