"""Signatures: numbers that stand for what a launch depends on, cheap to compare and to hash."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from dataclasses import fields
from functools import wraps
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

ACCESS_BYTES = 16  # that a thread accesses at once, where addresses are multiples of them
MOST_KNOWN = 1 << 16  # descriptions; then all are forgotten, and get other numbers when they come again

_numbers = itertools.count()
_known: dict[Hashable, int] = {}
_right: set[int] = set()  # signatures of what has been checked


def signature_of(*described: Hashable) -> int:
    """The number of this description, from 0 on: equal numbers stand for equal descriptions."""
    number = _known.get(described)
    if number is None:
        if len(_known) >= MOST_KNOWN:
            _known.clear()
            _right.clear()
        number = _known.setdefault(described, next(_numbers))
    return number


class Describes:
    """A dataclass that describes tensors, which ops may write. What it keeps beside its fields no copy of it has."""

    written: ClassVar[tuple[str, ...]] = ()  # fields whose tensors ops write

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]


D = TypeVar("D", bound=Describes)


def unless_known(check: Callable[[D], None]) -> Callable[[D], None]:
    """Leave out a check where what has the same signature has passed it: servers make such objects anew for every call.
    It must depend on what the signature says alone. Decorates a method."""

    @wraps(check)
    def run(described: D) -> None:
        number = _signature_if_any(described)
        if number is None or number not in _right:
            check(described)
            if number is not None:
                _right.add(number)

    return run


def _signature_if_any(described: Any) -> int | None:
    """None inside torch.compile, whose tensors have no addresses, and where something is no tensor, which is wrong."""
    if torch.compiler.is_compiling():
        return None
    try:
        number: int = described.signature
    except (AttributeError, TypeError, RuntimeError):
        return None
    return number


def describe(tensor: Tensor | None) -> Hashable:
    """What a launch depends on, of a tensor of numbers that are read one by one."""
    return None if tensor is None else (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


def describe_aligned(tensor: Tensor) -> Hashable:
    """What a launch depends on, of a tensor that is accessed as widely as its address allows."""
    return describe(tensor), tensor.data_ptr() % ACCESS_BYTES
