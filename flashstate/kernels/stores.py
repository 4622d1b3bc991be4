"""Where results go: outputs, and the state after every token to a slot of its own or to snapshots.

`write` is a tuple: a table of slots and its row stride. `copies` is one of snapshots: data and scales, and their
strides of rows and of tokens; `copy_rows` their list of rows, and how many there are.
"""

import triton
import triton.language as tl

from flashstate.kernels.addressing import token_entry
from flashstate.kernels.slots import resolve_snapshot_row, resolve_write
from flashstate.kernels.state_io import random_bits, store_slot, store_state
from flashstate.kernels.tiles import rounded_as


@triton.jit
def store_output(out, place, t, y, exists, stepped, live, PADDING: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Store the output of token t, if it exists: y, or zero if it was not stepped or the row is padding and PADDING
    "zero"; with "keep" padding rows stay as they were."""
    shown = tl.where(exists, live, False) if PADDING == "keep" else exists
    y = tl.where(tl.where(stepped, live, False) if PADDING == "zero" else stepped, y, 0.0)
    entries = token_entry(out, place.b, t, place.h, ALIGNMENT) + place.rows
    tl.store(entries, y.to(out[0].dtype.element_ty), mask=tl.where(shown, place.mask, False))


@triton.jit
def store_after_token(
    pool, write, copies, copy_rows, copy_row, b, t, slot, goes, slots, drawing, tile, copy_tile, s,
    STORES: tl.constexpr, IN_TREE: tl.constexpr, FORM: tl.constexpr, COPY_FORM: tl.constexpr,
):  # fmt: skip
    """Store the state after token t of row b, if `goes`: with STORES "every" in the slot that its table names, and in
    snapshots if there are some, in their row copy_row, or IN_TREE, which may have no token that runs, one found here.
    copy_tile, COPY_FORM: of snapshots, which may be laid out otherwise than the pool."""
    if copies[0] is not None and IN_TREE:
        copy_row = resolve_snapshot_row(copy_rows, b, goes, slots[2])
    if STORES == "every":
        bits = random_bits(drawing, tile, pool[0].dtype.element_ty, FORM)
        to = resolve_write(write, b, t, slot, goes, slots)
        store_slot(pool, to, tile, s, bits, FORM)
    if copies[0] is not None:
        store_snapshot(copies, copy_row, goes, t, drawing, tile, copy_tile, s, FORM, COPY_FORM)


@triton.jit
def store_snapshot(copies, row, goes, t, drawing, tile, copy_tile, s, FORM: tl.constexpr, COPY_FORM: tl.constexpr):
    """Store the state after token t in that row of the snapshots, if `goes`, unless it is -1."""
    copy_ptr, copy_scale_ptr, copy_b, copy_scale_b, copy_t, copy_scale_t = copies
    DRAWN: tl.constexpr = rounded_as(FORM, COPY_FORM.ROUNDING)  # as threads have the tile
    bits = random_bits(drawing, tile, copy_ptr.dtype.element_ty, DRAWN, FORM.TRANSPOSED)
    to = tl.where(goes, row, -1)
    offsets = to * copy_b + t.to(tl.int64) * copy_t, to * copy_scale_b + t.to(tl.int64) * copy_scale_t
    store_state((copy_ptr, copy_scale_ptr, 0, 0), offsets, to >= 0, copy_tile, s, bits, COPY_FORM)
