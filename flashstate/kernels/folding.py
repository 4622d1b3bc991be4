"""What the kernels of folds share: a tile of a state with the live rows of its ring, and where it is stored."""

import triton
import triton.language as tl

from flashstate.kernels import replay_window, state_io
from flashstate.kernels.rings import tokens_to_fold
from flashstate.kernels.slots import read_slot, write_slot
from flashstate.kernels.state_io import BEFORE_THE_FIRST_TOKEN
from flashstate.kernels.tiles import tile_at


@triton.jit
def slot_to_fold(read, b, slots, seed_ptr, cursors, counts, SHARED_SEED: tl.constexpr, FORM: tl.constexpr):
    """The slot of a row, whether there is one, its seed, where its ring starts, and how many live rows of it to fold.
    `counts`: how many of every row, and how many where that does not say it."""
    start_ptr, count_ptr = cursors
    tokens_ptr, most = counts
    slot, known, seed = read_slot(read, b, slots, seed_ptr, FORM.ROUNDING != "nearest", SHARED_SEED)
    start = tl.load(start_ptr + slot, mask=known, other=0)
    count = tl.load(count_ptr + slot, mask=known, other=0)
    return slot, known, seed, start, tokens_to_fold(tokens_ptr, most, b, known, count, slots[2])


@triton.jit
def tile_to_fold(pool, slot, known, h, first_row, FORM: tl.constexpr):
    """A tile of a slot: where it is, the factor of its rows, and what is stored in it, as operands."""
    tile = tile_at(h, first_row, FORM)
    factor, codes = state_io.load_codes(pool, slot, known, tile, FORM)
    return tile, factor, replay_window.operands_of(codes, known, 2, "zero", FORM)


@triton.jit
def store_fold(
    pool, into, write, b, slot, known, live, h, first_row, tile, s, seed, stream, targets,
    FORM: tl.constexpr, INTO_FORM: tl.constexpr,
):  # fmt: skip
    """Store a folded tile in its slot, unless nothing was folded: what stays as it is need not be rounded again; or in
    one of another State, if `into` has one. `targets`: that one's slots."""
    _, _, slot_stride, scale_stride = pool
    ptr = pool[0] if into[0] is None else into[0]
    random = state_io.random_bits((seed, BEFORE_THE_FIRST_TOKEN, stream), tile, ptr.dtype.element_ty, FORM)
    if into[0] is None:
        state_io.store_state(pool, (slot * slot_stride, slot * scale_stride), known & (live > 0), tile, s, random, FORM)
    else:
        to = write_slot(write, b, slot, known, targets)
        state_io.store_slot(into, to, tile_at(h, first_row, INTO_FORM), s, random, INTO_FORM)
