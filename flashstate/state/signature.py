"""Signatures: numbers that stand for what a launch depends on, cheap to compare and to hash."""

from __future__ import annotations

import itertools
from collections.abc import Hashable

from torch import Tensor

ALIGNMENT = 16  # bytes that kernels access at once, where addresses are multiples of them

_numbers = itertools.count()
_known: dict[Hashable, int] = {}


def signature_of(*described: Hashable) -> int:
    """The number of this description: equal for equal ones, from 0 on."""
    number = _known.get(described)
    return _known.setdefault(described, next(_numbers)) if number is None else number


def describe(tensor: Tensor | None) -> Hashable:
    """What a launch depends on, of a tensor that stays where it is."""
    if tensor is None:
        return None
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % ALIGNMENT
