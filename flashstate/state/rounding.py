"""Stochastic rounding: the random bits and the conversions, in plain torch. docs/formats.md defines both.

kernels/state_io.py holds the same functions under the same names; for equal inputs both give equal bytes.
Unsigned 32-bit words live in int64 tensors here, because torch has no arithmetic on uint32.
"""

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
SEED_STEP = 0x9E3779B97F4A7C15 - (1 << 64)  # what advance() adds to a seed, as a signed 64-bit number
SEED_OF_A_SLOT = 0xD1342543DE82EF95 - (
    1 << 64
)  # from slot to slot, where all share one seed: odd, so that none repeats


def philox(
    seed: Tensor, c0: Tensor, c1: Tensor | int, c2: int, c3: int, rounds: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox-4x32: four words per counter. `seed` int64 is the key, low word first; seed, c0 and c1 broadcast."""
    c1 = torch.as_tensor(c1, device=seed.device) & WORD
    seed, w0, w1 = torch.broadcast_tensors(seed, c0, c1)
    k0, k1 = seed & WORD, (seed >> 32) & WORD
    w2, w3 = torch.full_like(w0, c2), torch.full_like(w0, c3)
    for _ in range(rounds):
        high, low = 0xCD9E8D57 * w2, 0xD2511F53 * w0  # 64-bit products; they wrap in int64, which keeps every bit
        w0, w2 = (high >> 32) & WORD ^ w1 ^ k0, (low >> 32) & WORD ^ w3 ^ k1
        w1, w3 = high & WORD, low & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return w0, w1, w2, w3


def random_bits(
    seed: Tensor, shape: tuple[int, int, int], token: Tensor | int, stream: int, rounds: int, dtype: torch.dtype
) -> Tensor:
    """Sixteen random bits for every element of (heads, rows, cols) that is stored in `dtype`, one set per seed: (batch,
    heads, rows, cols) int64.

    `token` is the index of the token in its call: one for all, or (batch,). The bits of the next column begin sixteen
    bits on in the words of a Philox call, in formats of 8 bits eight bits on, where the last column of a word ends with
    its first byte. So a call serves eight consecutive columns of a row, or sixteen.
    """
    heads, rows, cols = shape
    apart = 8 if dtype.itemsize == 1 else 16  # bits, from column to column
    per_call = 128 // apart
    calls = -(-cols // per_call)  # per row
    c0 = torch.arange(heads * rows * calls, device=seed.device)
    c1 = torch.as_tensor(token, device=seed.device).reshape(-1, 1)
    words = torch.stack(philox(seed[:, None], c0[None, :], c1, stream, 0, rounds), dim=-1)  # (batch, calls, 4)
    twice = words << 32 | words
    bits = torch.stack([twice >> first & 0xFFFF for first in range(0, 32, apart)], dim=-1)  # (batch, calls, 4, 2 or 4)
    return bits.reshape(-1, heads, rows, calls * per_call)[..., :cols]


def to_float16_stochastic(v: Tensor, random: Tensor) -> Tensor:
    """float32 to float16, away from zero with the probability of the discarded fraction."""
    bits, magnitude = v.view(torch.int32).long(), v.abs()
    code = ((bits & 0x7FFFFFFF) + (random & 0x1FFF) >> 13) - (112 << 10)  # 13 mantissa bits fewer, exponent bias 15
    subnormal = magnitude < 2.0**-14  # multiples of 2^-24: the code is the multiple; 16 bits of fraction below it
    fixed_point = torch.where(subnormal, magnitude, 0.0) * 2.0**40
    code = torch.where(subnormal, fixed_point.long() + random >> 16, code)
    code = torch.where(magnitude > 65504.0, 0x7BFF, code)  # rounding never makes an inf,
    code = torch.where(magnitude >= 65536.0, 0x7C00, code)  # but what is too large by a whole step is one
    code = torch.where(v.isnan(), 0x7E00, code)
    return (code | bits >> 16 & 0x8000).to(torch.uint16).view(torch.float16)


def to_bfloat16_stochastic(v: Tensor, random: Tensor) -> Tensor:
    """float32 to bfloat16, away from zero with the probability of the discarded fraction."""
    bits = v.view(torch.int32).long() & WORD
    magnitude = bits & 0x7FFFFFFF
    random = torch.where(magnitude < 0x7F7F0000, random, 0)  # from the largest finite value on: truncate; inf stays
    code = torch.where(v.isnan(), 0x7FC0, bits + random >> 16)
    return code.to(torch.uint16).view(torch.bfloat16)


def to_integer_stochastic(w: Tensor, random: Tensor) -> Tensor:
    """float64 to a whole number, upward with the probability of the discarded fraction: floor(w + u), where u =
    (random | 1) / 65536 is the middle of one of 2^15 intervals: what is less than 2^-16 from a whole one becomes it."""
    return (w * 65536.0).floor().long() + (random | 1) >> 16


def to_int8_stochastic(w: Tensor, random: Tensor) -> Tensor:
    """float64 to a whole number, upward with the probability of the discarded fraction, which is rounded to a multiple
    of 2^-15, ties to even: what is less than 2^-16 from a whole number becomes it."""
    return 2 * (w * 32768.0).round().long() + random >> 16


def to_float8_stochastic(w: Tensor, random: Tensor) -> Tensor:
    """float32 up to 448 to float8_e4m3fn, away from zero with the probability of the discarded fraction."""
    bits, magnitude = w.view(torch.int32).long(), w.abs()
    code = ((bits & 0x7FFFFFFF) + (random << 4) >> 20) - (120 << 3)  # 20 mantissa bits fewer, exponent bias 7
    subnormal = magnitude < 2.0**-6  # multiples of 2^-9: the code is the multiple; 16 bits of fraction below it
    fixed_point = torch.where(subnormal, magnitude, 0.0) * 2.0**25
    code = torch.where(subnormal, fixed_point.long() + random >> 16, code)
    return (code | bits >> 24 & 0x80).to(torch.uint8).view(torch.float8_e4m3fn)
