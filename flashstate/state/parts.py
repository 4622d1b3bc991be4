"""Parts: what is kept for every slot, as bytes that can be moved by those who do not know what they mean."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product
from typing import NamedTuple

import torch
from torch import Tensor

from flashstate.errors import dtype_name
from flashstate.state.formats import bits_of
from flashstate.state.signature import Describes

PIECE = 1024  # elements that a row of a table stands for, at most
ROUNDS = 10  # of Philox, behind new seeds
OF_SEEDS = 1  # the last word of its counter; that of random bits is 0
WIDEST = 8  # bytes of an element


class Rows(NamedTuple):
    """Bytes of a slot that lie in rows of one length, at one distance."""

    start: int  # of the first, from where the slot begins
    run: int  # bytes of a row
    pitch: int  # from row to row
    size: int  # bytes of all


@dataclass(frozen=True, eq=False)
class Part(Describes):
    """A tensor that has slots on its first axis, of any strides.

    name: what layouts call it.
    clean: the value that fills it in a slot that nothing has used.
    """

    name: str
    tensor: Tensor
    clean: int = 0

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The axes of a slot, from 0 on, as they lie in memory: those of one entry, then those of entries farthest
        apart."""
        sizes, strides = self.tensor.shape[1:], self.tensor.stride()[1:]
        return tuple(sorted(range(len(sizes)), key=lambda axis: (sizes[axis] > 1, -strides[axis] * (sizes[axis] > 1))))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a slot."""
        return self.tensor.shape[1:].numel() * self.tensor.element_size()

    @cached_property
    def pattern(self) -> int:
        """Eight bytes of clean slots, as a signed number."""
        count = WIDEST // self.tensor.element_size()
        value = torch.full((count,), self.clean, dtype=self.tensor.dtype, device="cpu")
        return int(value.view(torch.int64))

    def pack(self, values: Tensor) -> Tensor:
        """Values for so many slots, (n, ...) in its dtype, as the bytes that they have in memory: (n, bytes) uint8."""
        ordered = bits_of(values).permute(0, *(1 + axis for axis in self.order))
        return ordered.reshape(len(values), self.tensor.shape[1:].numel()).contiguous().view(torch.uint8)

    def unpack(self, packed: Tensor, order: tuple[int, ...] | None = None) -> Tensor:
        """What `pack` was given, as whole numbers; of bytes that lie in another order of axes, if one is named."""
        order, shape = self.order if order is None else order, self.tensor.shape[1:]
        bits = packed.clone(memory_format=torch.contiguous_format).view(bits_of(self.tensor[:0]).dtype)
        values = bits.reshape(len(packed), *(shape[axis] for axis in order))
        return values.permute(0, *(1 + order.index(axis) for axis in range(len(shape))))

    def layout(self) -> list[object]:
        """Its name, dtype, shape of a slot, and order of axes, in plain types."""
        return [self.name, dtype_name(self.tensor.dtype), list(self.tensor.shape[1:]), list(self.order)]

    @cached_property
    def rows(self) -> tuple[Rows, ...]:
        """The bytes of a slot in the order of memory."""
        return tuple(self._rows())

    def _rows(self) -> Iterator[Rows]:
        width = self.tensor.element_size()
        axes = [(self.tensor.shape[1 + axis], self.tensor.stride(1 + axis)) for axis in self.order]
        axes = [(size, stride) for size, stride in axes if size > 1]
        run = 1
        while axes and axes[-1][1] == run:
            run *= axes.pop()[0]
        count, pitch = axes.pop() if axes else (1, run)
        for index in product(*(range(size) for size, _ in axes)):
            start = sum(i * stride for i, (_, stride) in zip(index, axes, strict=True))
            yield Rows(start * width, run * width, pitch * width, run * count * width)


@dataclass(frozen=True, eq=False)
class Parts(Describes):
    """All that is kept for a slot. A packed slot is the bytes of one part after another.

    Copies of this object make tables of their own: a table has the addresses of the tensors.
    """

    parts: tuple[Part, ...]

    @property
    def device(self) -> torch.device:
        return self.parts[0].tensor.device

    @property
    def slots(self) -> int:
        return len(self.parts[0].tensor)

    def prepare(self) -> None:
        """Make what a launch needs, which cannot be made while a CUDA graph is captured."""
        _ = self.table, self.strided, self.pieces

    @cached_property
    def places(self) -> dict[str, int]:
        """Where in the list a part is, by its name."""
        return {part.name: place for place, part in enumerate(self.parts)}

    @cached_property
    def offsets(self) -> list[int]:
        """Where parts begin in a packed slot, in bytes, and where the last one ends."""
        return [0, *accumulate(part.nbytes for part in self.parts)]

    @cached_property
    def width(self) -> int:
        """Bytes that everything is a multiple of: addresses, strides and lengths; at most 8."""
        numbers = [WIDEST]
        for part in self.parts:
            tensor = part.tensor
            numbers += [tensor.data_ptr(), tensor.stride(0) * tensor.element_size()]
            numbers += [number for rows in part.rows for number in rows]
        return math.gcd(*numbers)

    @cached_property
    def strided(self) -> bool:
        """Whether a slot has rows that are no neighbours in any part."""
        return any(rows.pitch != rows.run for part in self.parts for rows in part.rows)

    @cached_property
    def pieces(self) -> list[int]:
        """The first row of each part in the table, and how many rows there are."""
        block = PIECE * self.width
        return [0, *accumulate(sum(-(-rows.size // block) for rows in part.rows) for part in self.parts)]

    @cached_property
    def table(self) -> Tensor:
        """(pieces, 8) int64 on the device of the parts, of at most PIECE elements each: the address of some rows in
        slot 0; then, all in elements of `width` bytes, from slot to slot, the first that is meant, the end of the rows,
        where they are in a packed slot, their length and distance; and the bytes of a clean slot."""
        width, found = self.width, []
        for part, offset in zip(self.parts, self.offsets, strict=False):
            tensor, at = part.tensor, offset // width
            stride = tensor.stride(0) * tensor.element_size() // width
            for rows in part.rows:
                address, size = tensor.data_ptr() + rows.start, rows.size // width
                fields = size, at, rows.run // width, rows.pitch // width, part.pattern
                found += [(address, stride, first, *fields) for first in range(0, size, PIECE)]
                at += size
        with torch.inference_mode(False):
            return torch.tensor(found, dtype=torch.int64, device="cpu").to(self.device)
