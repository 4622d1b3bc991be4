"""Runs a block of PTX on numbers, by exact fractions: what it gives can be known without a GPU."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Sequence
from fractions import Fraction

WORD = 0xFFFFFFFF


def float32(exact: Fraction, rounding: Callable[[Fraction], int] = round) -> Fraction:
    """`exact` as a float32: `round` goes to nearest even, `math.floor` down. Infinity is out of reach here."""
    if exact == 0:
        return exact
    exponent = abs(exact.numerator).bit_length() - exact.denominator.bit_length()
    exponent -= abs(exact) < Fraction(2) ** exponent
    unit = Fraction(2) ** max(exponent - 23, -149)
    return rounding(exact / unit) * unit


def value_of(bits: int) -> Fraction:
    """The finite float32 of these bits."""
    return Fraction(struct.unpack("<f", struct.pack("<I", bits))[0])


def bits_of(value: float, negative: bool) -> int:
    """The bits of a float32, whose zeros have a sign."""
    return int(struct.unpack("<I", struct.pack("<f", math.copysign(value, -1 if negative else 1)))[0])


def prmt(a: int, b: int, selector: int) -> int:
    """Four of eight bytes."""
    of_both = (b << 32 | a).to_bytes(8, "little")
    return int.from_bytes(bytes(of_both[selector >> 4 * i & 7] for i in range(4)), "little")


def lop3(a: int, b: int, c: int, table: int) -> int:
    """Of three bits the entry of a table, 32 times."""
    return sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1) << i for i in range(32))


def product(a: int, b: int, rounding: Callable[[Fraction], int]) -> int:
    """Of two float32, as bits; a zero has the sign of the factors."""
    return bits_of(float(float32(value_of(a) * value_of(b), rounding)), bool((a ^ b) >> 31))


def fused(a: int, b: int, c: int) -> int:
    """A product plus a float32, rounded once, as bits."""
    total = float32(value_of(a) * value_of(b) + value_of(c))
    return bits_of(float(total), total < 0)


OPERATIONS: dict[str, Callable[..., int]] = {
    "fma.rn.f32": fused,
    "mul.rn.f32": lambda a, b: product(a, b, round),
    "mul.rz.f32": lambda a, b: product(a, b, math.trunc),
    "mad.lo.u32": lambda a, b, c: a * b + c & WORD,
    "prmt.b32": prmt,
    "lop3.b32": lop3,
    "and.b32": lambda a, b: a & b,
}


def run(block: str, inputs: Sequence[int]) -> int:
    """What a block writes to its operand $0, of the registers that it reads, $1 and on."""
    registers = {f"${i}": number for i, number in enumerate(inputs, start=1)}

    def number(operand: str) -> int:
        if operand in registers:
            return registers[operand]
        return int(operand[2:], 16) if operand.startswith("0f") else int(operand, 0)

    for line in re.findall(r"^\s*([^{}\s][^;]*);", block, re.MULTILINE):
        name, _, rest = line.partition(" ")
        if name != ".reg":
            out, *operands = (operand.strip() for operand in rest.split(","))
            registers[out] = OPERATIONS[name](*map(number, operands))
    return registers["$0"]
