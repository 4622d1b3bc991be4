"""Where results go: outputs, the state after every token to a slot of its own or to snapshots, the last to the pool."""

import triton
import triton.language as tl

from flashstate.kernels.addressing import token_entry
from flashstate.kernels.slots import resolve_write, write_slot
from flashstate.kernels.state_io import random_bits, store_slot, store_state


@triton.jit
def store_output(
    out, b, t, h, offs_d, mask_d, y, exists, stepped, live, PADDING: tl.constexpr, ALIGNMENT: tl.constexpr
):  # fmt: skip
    """Store the output of token t of row b, if it exists: y, or zero if it was not stepped or the row is padding and
    PADDING "zero"; with "keep" padding rows stay as they were."""
    shown = tl.where(exists, live, False) if PADDING == "keep" else exists
    y = tl.where(tl.where(stepped, live, False) if PADDING == "zero" else stepped, y, 0.0)
    entries = token_entry(out, b, t, h, ALIGNMENT) + offs_d
    tl.store(entries, y.to(out[0].dtype.element_ty), mask=tl.where(shown, mask_d, False))


@triton.jit
def store_after_token(
    pool, write, copies, copy_row, b, t, slot, goes, slots, seed, stream, tile, copy_tile, s,
    FORM: tl.constexpr, COPY_FORM: tl.constexpr, STORES: tl.constexpr, ROUNDING: tl.constexpr,
    SNAPSHOT_ROUNDING: tl.constexpr, ROUNDS: tl.constexpr, TARGET: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    """Store the state after token t of row b, if `goes`: with STORES "every" in the slot that its table names, and in
    snapshots if there are some.

    write: the table and its row stride; copies: the snapshots' data and scales, and their strides of rows and of
    tokens; copy_row: the one of them that row b fills; copy_tile, COPY_FORM: of snapshots, which may be laid out
    otherwise than the pool.
    """
    copy_ptr, copy_scale_ptr, copy_b, copy_scale_b, copy_t, copy_scale_t = copies
    if STORES == "every":
        bits = random_bits(seed, tile, t, stream, FORM, ROUNDING, ROUNDS)
        to = resolve_write(write, b, t, slot, goes, slots)
        store_slot(pool, to, tile, s, bits, FORM, ROUNDING, TARGET, HINT)
    if copy_ptr is not None:
        bits = random_bits(seed, tile, t, stream, FORM, SNAPSHOT_ROUNDING, ROUNDS)
        to = tl.where(goes, copy_row, -1)
        store_state(
            copy_ptr, copy_scale_ptr, to * copy_b + t.to(tl.int64) * copy_t,
            to * copy_scale_b + t.to(tl.int64) * copy_scale_t, to >= 0, copy_tile, s, bits,
            COPY_FORM, SNAPSHOT_ROUNDING, TARGET, HINT,
        )  # fmt: skip


@triton.jit
def store_last(
    pool, write, b, slot, goes, slots, tile, s, random,
    FORM: tl.constexpr, ROUNDING: tl.constexpr, TARGET: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    """Store the state after the last token of row b where it was read, or in the slot that `write` names, if `goes`."""
    to = write_slot(write, b, slot, goes, slots)
    store_slot(pool, to, tile, s, random, FORM, ROUNDING, TARGET, HINT)
