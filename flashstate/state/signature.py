"""Signatures: numbers that stand for what a launch depends on, cheap to compare and to hash."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import fields
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

ACCESS_BYTES = 16  # that a thread accesses at once, where addresses are multiples of them
MOST_KNOWN = 1 << 16  # descriptions; then all are forgotten, and get other numbers when they come again

_numbers = itertools.count()
_known: dict[Hashable, int] = {}


def signature_of(*described: Hashable) -> int:
    """The number of this description, from 0 on: equal numbers stand for equal descriptions."""
    number = _known.get(described)
    if number is None:
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        number = _known.setdefault(described, next(_numbers))
    return number


class Describes:
    """A dataclass that describes tensors, which ops may write. What it keeps beside its fields no copy of it has."""

    written: ClassVar[tuple[str, ...]] = ()  # fields whose tensors ops write

    @cached_property
    def launches(self) -> dict[Any, Any]:
        """Kernels that were started on these tensors before, for launch/direct.py."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]


def describe(tensor: Tensor | None) -> Hashable:
    """What a launch depends on, of a tensor of numbers that are read one by one."""
    return None if tensor is None else (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


def describe_aligned(tensor: Tensor) -> Hashable:
    """What a launch depends on, of a tensor that is accessed as widely as its address allows."""
    return describe(tensor), tensor.data_ptr() % ACCESS_BYTES
