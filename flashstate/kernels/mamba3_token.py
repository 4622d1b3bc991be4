"""What a token of Mamba-3 brings to all rows of a head: loaded, with its biases, turned."""

import triton
import triton.language as tl

from flashstate.kernels.addressing import token_entry
from flashstate.kernels.functions import PI_HIGH, PI_LOW, cos_and_sin, sigmoid, tanh, wrapped
from flashstate.kernels.tensor_cores import beside


@triton.jit
def load_gate(tensor, b, t, h):
    """The value of token t for a head."""
    return tl.load(token_entry(tensor, b, t, h, 1)).to(tl.float32)


@triton.jit
def load_angles(entry, exists, ANGLES: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """An angle for every pair of columns, of those at `entry`; zero where there is none."""
    pair = tl.arange(0, BLOCK_COLS // 2)
    return tl.load(entry + pair, mask=tl.where(exists, pair < ANGLES, False), other=0.0).to(tl.float32)


@triton.jit
def load_columns(entries, exists, COLS: tl.constexpr, BLOCK_COLS: tl.constexpr, IN_HALVES: tl.constexpr):
    """The columns at every entry, (entries, BLOCK_COLS), zero for what does not exist; or those of each half of them,
    in half as many. Wider accesses, where alignment allows them, are slower: what they bring moves between threads."""
    parts: tl.constexpr = 2 if IN_HALVES else 1
    values = ()
    for i in tl.static_range(parts):
        cols = tl.arange(0, BLOCK_COLS // parts)
        here = entries[:, None] + (i * (COLS // parts) + cols)[None, :]
        values = values + (tl.load(here, mask=exists[:, None] & (cols < COLS // parts)[None, :], other=0.0),)
    return values


@triton.jit
def load_vectors(
    tensor, stride_r, bias_ptr, b, t, h, g, r, exists, H: tl.constexpr, COLS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    PAIRING: tl.constexpr,
):  # fmt: skip
    """B or C of token t for these ranks, and its bias, each as load_columns gives it; an empty tuple for no bias."""
    entries = token_entry(tensor, b, t, g, 1) + r.to(tl.int64) * stride_r
    values = load_columns(entries, exists, COLS, BLOCK_COLS, PAIRING == "halved")
    bias = ()
    if bias_ptr is not None:
        bias = load_columns(bias_ptr + (r * H + h) * COLS, exists, COLS, BLOCK_COLS, PAIRING == "halved")
    return values, bias


@triton.jit
def turned(vectors, cos, sin, COLS: tl.constexpr, PAIRING: tl.constexpr, IN_HALVES: tl.constexpr):
    """What load_vectors gave, with its bias and turned: a matrix of all columns, or one of each half of them."""
    values, bias = vectors
    if len(bias) > 0:
        sums = ()
        for i in tl.static_range(len(values)):
            sums = sums + (values[i].to(tl.float32) + bias[i].to(tl.float32),)
        values = sums
    if PAIRING == "none":
        return values
    elif PAIRING == "interleaved":
        u = values[0].to(tl.float32)
        first, second = tl.split(tl.reshape(u, (u.shape[0], u.shape[1] // 2, 2)))
        first, second = turn(first, second, cos, sin)
        return (tl.reshape(tl.join(first, second), u.shape),)
    elif IN_HALVES:
        return turn(values[0].to(tl.float32), values[1].to(tl.float32), cos, sin)
    else:  # there is a gap between the halves
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
def load_token(
    inputs, b, t, h, g, r, exists, ANGLES: tl.constexpr, H: tl.constexpr, COLS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    PAIRING: tl.constexpr,
):  # fmt: skip
    """What token t brings to every row of a head: A, dt and trap, B and C, and angles. r: the rank of every row of B;
    exists: whether there is one, and whether C has it there."""
    A_at, dt_at, trap_at, B_at, B_r, C_at, C_r, angle_at, bias_B_ptr, bias_C_ptr = inputs
    gates = load_gate(A_at, b, t, h), load_gate(dt_at, b, t, h), load_gate(trap_at, b, t, h)
    B = load_vectors(B_at, B_r, bias_B_ptr, b, t, h, g, r, exists[0], H, COLS, BLOCK_COLS, PAIRING)
    C = load_vectors(C_at, C_r, bias_C_ptr, b, t, h, g, r, exists[1], H, COLS, BLOCK_COLS, PAIRING)
    angle = 0.0
    if PAIRING != "none":
        angle = load_angles(token_entry(angle_at, b, t, h, 1), True, ANGLES, BLOCK_COLS)
    return gates, B, C, angle


@triton.jit
def prepare_token(
    token, theta, kept_dtype: tl.constexpr, COLS: tl.constexpr, PAIRING: tl.constexpr, IN_HALVES: tl.constexpr,
    TRAP_LOGIT: tl.constexpr,
):  # fmt: skip
    """Of what load_token gave: what multiplies with the state, with the token before, and with this one; the angles
    after it; B as it is kept, and C, each in one matrix or in halves."""
    gates, B, C, angle = token
    A, dt, trap = gates
    if TRAP_LOGIT:
        trap = sigmoid(trap)
    alpha = tl.exp(A * dt)
    cos, sin = 1.0, 0.0
    if PAIRING != "none":
        step = tanh(angle) * dt
        theta = wrapped(theta + tl.fma(step, PI_HIGH, step * PI_LOW))
        cos, sin = cos_and_sin(theta)
    factors = alpha, (1.0 - trap) * dt * alpha, trap * dt
    kept = ()
    B = turned(B, cos, sin, COLS, PAIRING, IN_HALVES)
    for i in tl.static_range(len(B)):
        kept = kept + (B[i].to(kept_dtype),)
    return factors, theta, kept, turned(C, cos, sin, COLS, PAIRING, IN_HALVES)
