"""Small kernels that show one device function each; importing this imports triton."""

import triton
import triton.language as tl

from flashstate.kernels.state_io import load_state, philox, store_state, to_nearest


@triton.jit
def philox_kernel(ours_ptr, tritons_ptr, counter_ptr, seed_ptr, c1, c2, ROUNDS: tl.constexpr):
    offs = tl.arange(0, 64)
    seed = tl.load(seed_ptr)
    c0 = tl.load(counter_ptr + offs).to(tl.uint32)
    o0, o1, o2, o3 = philox(seed, c0, c1, c2, 0, ROUNDS)
    zero = tl.zeros([64], tl.uint32)
    t0, t1, t2, t3 = tl.philox(seed, c0, (zero + c1).to(tl.uint32), (zero + c2).to(tl.uint32), zero, ROUNDS)
    _store_words(ours_ptr, offs, o0, o1, o2, o3)
    _store_words(tritons_ptr, offs, t0, t1, t2, t3)


@triton.jit
def _store_words(ptr, offs, w0, w1, w2, w3):
    tl.store(ptr + offs, w0.to(tl.int64))
    tl.store(ptr + 64 + offs, w1.to(tl.int64))
    tl.store(ptr + 128 + offs, w2.to(tl.int64))
    tl.store(ptr + 192 + offs, w3.to(tl.int64))


@triton.jit
def encode_kernel(stored_ptr, value_ptr, random_ptr, ROUNDING: tl.constexpr):
    """store_state on 64 values; ROUNDING "integer" is rounding to nearest without the hardware's conversion."""
    offs = tl.program_id(0) * 64 + tl.arange(0, 1)[:, None] * 64 + tl.arange(0, 64)[None, :]
    v = tl.load(value_ptr + offs)
    random = tl.load(random_ptr + offs).to(tl.uint32)
    if ROUNDING == "integer":
        code = to_nearest(v, stored_ptr.dtype.element_ty, False)
        tl.store((stored_ptr + offs).to(tl.pointer_type(tl.uint16), bitcast=True), code)
    else:
        store_state(stored_ptr + offs, v, offs >= 0, random, ROUNDING)


@triton.jit
def decode_kernel(value_ptr, stored_ptr):
    offs = tl.program_id(0) * 64 + tl.arange(0, 64)
    tl.store(value_ptr + offs, load_state(stored_ptr + offs, offs >= 0))
