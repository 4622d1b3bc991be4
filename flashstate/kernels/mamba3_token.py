"""What a token of Mamba-3 brings to all rows of a head: loaded, with its biases, turned; what a slot keeps of it."""

from dataclasses import dataclass

import triton
import triton.language as tl

from flashstate.kernels.addressing import token_entry
from flashstate.kernels.functions import PI_HIGH, PI_LOW, cos_and_sin, sigmoid, tanh, wrapped
from flashstate.kernels.ptx import LINE, has_ptx, prefetch_ptx
from flashstate.kernels.state_io import prefetch_rows, update_terms
from flashstate.kernels.tensor_cores import as_operand, beside, halved, terms_of, transposed
from flashstate.kernels.tiles import Constants, Form, load_or_zero, widened


@dataclass(frozen=True)
class Kind(Constants):
    """The constants that functions of mamba3_step share."""

    H: int
    RANK: int
    ANGLES: int
    PAIRING: str  # of columns that are turned: "interleaved", "halved", or "none"
    IN_HALVES: bool  # columns come in halves: pairs are far from each other, and every chunk of a tile is of one half
    TRAP_LOGIT: bool
    STORES_KV: bool
    GATED: bool
    SUMMED: bool  # the output is the sum of all ranks'
    TERMS: int  # of products that are added to the state
    OUT_TERMS: int  # of those with C
    DTYPE: tl.dtype  # of the state
    KEPT_DTYPE: tl.dtype  # of k
    TARGET: str
    FORM: Form


@triton.constexpr_function
def kind_of(H, RANK, ANGLES, PAIRING, TRAP_LOGIT, STORES_KV, GATED, SUMMED, DTYPE, x_dtype, KEPT_DTYPE, TARGET, FORM):
    """The constants of a step on a state, with inputs and on k of these dtypes."""
    IN_HALVES = PAIRING == "halved" and FORM.COLS == FORM.BLOCK_COLS and 2 * FORM.CHUNK <= FORM.COLS
    TERMS = update_terms(DTYPE, x_dtype)
    # Tensor cores round sums towards zero, 6 units in the last place of a float32 output: those are made without them.
    OUT_TERMS = 0 if x_dtype == tl.float32 else 2
    of_call = (H, RANK, ANGLES, PAIRING, IN_HALVES, TRAP_LOGIT, STORES_KV, GATED, SUMMED or RANK == 1)
    return Kind(*of_call, TERMS, OUT_TERMS, DTYPE, KEPT_DTYPE, TARGET, FORM)


@triton.jit
def load_gate(tensor, b, t, h):
    """The value of token t for a head."""
    return tl.load(token_entry(tensor, b, t, h, 1)).to(tl.float32)


@triton.jit
def load_angles(entry, exists, KIND: tl.constexpr):
    """An angle for every pair of columns, of those at `entry`; zero where there is none."""
    pair = tl.arange(0, KIND.FORM.BLOCK_COLS // 2)
    return load_or_zero(entry + pair, mask=tl.where(exists, pair < KIND.ANGLES, False))


@triton.jit
def load_rank_columns(entries, exists, IN_HALVES: tl.constexpr, FORM: tl.constexpr):
    """The columns at every entry, (entries, BLOCK_COLS), zero for what does not exist; or those of each half of them,
    in half as many. Wider accesses, where alignment allows them, are slower: what they bring moves between threads."""
    parts: tl.constexpr = 2 if IN_HALVES else 1
    values = ()
    for i in tl.static_range(parts):
        cols = tl.arange(0, FORM.BLOCK_COLS // parts)
        here = entries[:, None] + (i * (FORM.COLS // parts) + cols)[None, :]
        values = values + (tl.load(here, mask=exists[:, None] & (cols < FORM.COLS // parts)[None, :], other=0.0),)
    return values


@triton.jit
def load_vectors(tensor, stride_r, bias_ptr, b, t, h, g, r, exists, KIND: tl.constexpr):
    """B or C of token t for these ranks, and its bias or an empty tuple, each as load_rank_columns gives it."""
    HALVED: tl.constexpr = KIND.PAIRING == "halved"
    entries = token_entry(tensor, b, t, g, 1) + r.to(tl.int64) * stride_r
    values = load_rank_columns(entries, exists, HALVED, KIND.FORM)
    bias = ()
    if bias_ptr is not None:
        bias = load_rank_columns(bias_ptr + (r * KIND.H + h) * KIND.FORM.COLS, exists, HALVED, KIND.FORM)
    return values, bias


@triton.jit
def turned(vectors, cos, sin, KIND: tl.constexpr):
    """What load_vectors gave, with its bias and turned: a matrix of all columns, or one of each half of them."""
    values, bias = vectors
    if len(bias) > 0:
        sums = ()
        for i in tl.static_range(len(values)):
            sums = sums + (values[i].to(tl.float32) + bias[i].to(tl.float32),)
        values = sums
    if KIND.PAIRING == "none":
        return values
    elif KIND.PAIRING == "interleaved":
        u = values[0].to(tl.float32)
        first, second = tl.split(tl.reshape(u, (u.shape[0], u.shape[1] // 2, 2)))
        first, second = turn(first, second, cos, sin)
        return (tl.reshape(tl.join(first, second), u.shape),)
    elif KIND.IN_HALVES:
        return turn(values[0].to(tl.float32), values[1].to(tl.float32), cos, sin)
    else:  # there is a gap between the halves
        COLS: tl.constexpr = KIND.FORM.COLS
        first, second = turn(values[0].to(tl.float32), values[1].to(tl.float32), cos, sin)
        both = beside(first, second)
        cols = tl.arange(0, both.shape[1])
        at = tl.where(cols < COLS // 2, cols, tl.minimum(cols + (both.shape[1] - COLS) // 2, both.shape[1] - 1))
        both = tl.gather(both, tl.broadcast_to(at[None, :], both.shape), 1)
        return (tl.where(cols[None, :] < COLS, both, 0.0),)


@triton.jit
def turn(first, second, cos, sin):
    """Pairs of columns, turned by an angle each."""
    cos, sin = cos[None, :], sin[None, :]
    return first * cos - second * sin, tl.fma(first, sin, second * cos)


@triton.jit
def load_token(inputs, b, t, h, g, r, exists, KIND: tl.constexpr):
    """What token t brings to every row of a head: A, dt and trap, B and C, and angles. r: the rank of every row of B;
    exists: whether there is one, and whether C has it there."""
    A_at, dt_at, trap_at, B_at, B_r, C_at, C_r, angle_at, bias_B_ptr, bias_C_ptr = inputs
    gates = load_gate(A_at, b, t, h), load_gate(dt_at, b, t, h), load_gate(trap_at, b, t, h)
    B = load_vectors(B_at, B_r, bias_B_ptr, b, t, h, g, r, exists[0], KIND)
    C = load_vectors(C_at, C_r, bias_C_ptr, b, t, h, g, r, exists[1], KIND)
    angle = 0.0 if KIND.PAIRING == "none" else load_angles(token_entry(angle_at, b, t, h, 1), True, KIND)
    return gates, B, C, angle


@triton.jit
def prepare_token(token, theta, KIND: tl.constexpr):
    """What a token is stepped with, of what load_token gave: factors of the state, of the token before, and of this
    one; the angles after it; B as it is kept, and C, each in one matrix or in halves."""
    gates, B, C, angle = token
    A, dt, trap = gates
    if KIND.TRAP_LOGIT:
        trap = sigmoid(trap)
    alpha = tl.exp(A * dt)
    cos, sin = 1.0, 0.0
    if KIND.PAIRING != "none":
        step = tanh(angle) * dt
        theta = wrapped(theta + tl.fma(step, PI_HIGH, step * PI_LOW))
        cos, sin = cos_and_sin(theta)
    factors = alpha, (1.0 - trap) * dt * alpha, trap * dt
    kept = ()
    B = turned(B, cos, sin, KIND)
    for i in tl.static_range(len(B)):
        kept = kept + (B[i].to(KIND.KEPT_DTYPE),)
    return factors, theta, kept, turned(C, cos, sin, KIND)


@triton.jit
def in_chunks(x, CHUNK: tl.constexpr, TARGET: tl.constexpr):
    """Matrices side by side, in float32, as chunks of so many columns."""
    chunks = ()
    for i in tl.static_range(len(x)):
        chunks = chunks + halved(widened(x[i], TARGET), CHUNK)
    return chunks


@triton.jit
def vectors_of(now, before, C, KIND: tl.constexpr):
    """What a tile is multiplied with. Of rank 1 B of a token, B of the token before, and C, in chunks as the tile has
    them. Of others terms of B of the token above that of the token before, and terms of C (columns, ranks), columns in
    the order of operands; of each half of the columns, if they come in halves."""
    CHUNK: tl.constexpr = KIND.FORM.CHUNK
    VECTOR: tl.constexpr = KIND.FORM.VECTOR
    TARGET: tl.constexpr = KIND.TARGET
    if KIND.RANK == 1:
        return in_chunks(now, CHUNK, TARGET), in_chunks(before, CHUNK, TARGET), in_chunks(C, CHUNK, TARGET)
    else:
        upper = (tl.arange(0, now[0].shape[0]) < now[0].shape[0] // 2)[:, None]
        both, across = (), ()
        for i in tl.static_range(len(now)):
            stacked = as_operand(tl.where(upper, now[i], before[i]), VECTOR)
            both = both + (terms_of(stacked, KIND.TERMS, TARGET),)
            across = across + (transposed(terms_of(as_operand(C[i], VECTOR), KIND.OUT_TERMS, TARGET)),)
        return both, across


@triton.jit
def store_carried(carried, to, goes, h, k, theta, r, KIND: tl.constexpr):
    """Store what all rows of a head share in slot `to`, if `goes`: k and the angles, as far as a call stores them."""
    k_ptr, k_stride, theta_ptr, theta_stride = carried
    if KIND.STORES_KV:
        entries = k_ptr + to * k_stride + ((r * KIND.H + h) * KIND.FORM.COLS)[:, None]
        mask = tl.where(goes, tl.arange(0, r.shape[0]) < KIND.RANK, False)[:, None]
        for i in tl.static_range(len(k)):
            cols = (tl.arange(0, k[i].shape[1]) + i * k[i].shape[1])[None, :]
            tl.store(entries + cols, k[i], mask=mask & (cols < KIND.FORM.COLS))
    if theta_ptr is not None:
        entry = theta_ptr + to * theta_stride + h * KIND.ANGLES
        pair = tl.arange(0, theta.shape[0])
        tl.store(entry + pair, theta, mask=tl.where(goes, pair < KIND.ANGLES, False))


@triton.jit
def prefetch_kept(slot_ptr, live, h, COLS: tl.constexpr, RANK: tl.constexpr, KIND: tl.constexpr):
    """Ask for what (RANK, H, COLS) values of a slot have for head h to come to the L2 cache; on NVIDIA."""
    if has_ptx(KIND.TARGET):
        per_line: tl.constexpr = LINE // (slot_ptr.dtype.element_ty.primitive_bitwidth // 8)
        r = tl.arange(0, triton.next_power_of_2(RANK))[:, None]
        cols = tl.arange(0, triton.next_power_of_2(triton.cdiv(COLS, per_line)))[None, :] * per_line
        prefetch_ptx(slot_ptr + (r * KIND.H + h) * COLS + cols, live & (r < RANK) & (cols < COLS))


@triton.jit
def prefetch_slot(data_ptr, slot_stride, v_at, carried, slot, exists, h, KIND: tl.constexpr):
    """Ask for what a slot has of head h to come to the L2 cache."""
    k_ptr, k_stride, theta_ptr, theta_stride = carried
    v_ptr, v_stride = v_at
    prefetch_rows(data_ptr, slot * slot_stride, exists, h, 0, KIND.FORM.ROWS, KIND.FORM)
    prefetch_kept(k_ptr + slot * k_stride, exists, h, KIND.FORM.COLS, KIND.RANK, KIND)
    prefetch_kept(v_ptr + slot * v_stride, exists, h, KIND.FORM.ROWS, 1, KIND)
    if theta_ptr is not None:
        prefetch_kept(theta_ptr + slot * theta_stride, exists, h, KIND.ANGLES, 1, KIND)
