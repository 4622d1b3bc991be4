"""Triton's interpreter without what takes most of its time, and changes nothing."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

Function = Callable[..., Any]


def without_overflows(options: Any) -> Any:
    """Of every sum and product of integers it works out whether it overflows, and tells nobody."""
    return replace(options, sanitize_overflow=False)


def what_is_left(patch: Function) -> Function:
    """At every call of a device function it looks for what is left of its language to replace, though it did so when
    the kernel started."""
    language = interpreter.tl

    @cache
    def modules_of(fn: Function) -> list[Any]:
        return [module for module in (language, language.core) if any(module is x for x in fn.__globals__.values())]

    def patched(fn: Function) -> Any:
        left = any(language.core.is_builtin(module.load) for module in modules_of(fn))
        return patch(fn) if left else interpreter._LangPatchScope()

    return patched


def once_per_name(find: Function) -> Function:
    """It finds the dtype that numpy has for a type in a table that it makes every time."""
    known: dict[str, Any] = {}

    def found(of: Any) -> Any:
        of = of.scalar
        if of.name not in known:
            known[of.name] = find(of)
        return known[of.name]

    return found


def once_per_shape(init: Function) -> Function:
    """It works out the same of the type of a block in every operation."""
    known: dict[Any, dict[str, Any]] = {}

    def of_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(n.value if type(n) is core.constexpr else n for n in shape)
        if key not in known:
            init(self, element_ty, shape)
            known[key] = dict(self.__dict__)
        self.__dict__.update(known[key], element_ty=element_ty)

    return of_type


def with_known_shape(init: Function) -> Function:
    """It wraps the shape of every tensor anew."""

    @cache
    def wrapped(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(n) for n in shape]), core.constexpr(math.prod(shape))

    def of_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = wrapped(tuple(type.shape) if type.is_block() else ())

    return of_tensor


def unless_alike(broadcast: Function) -> Function:
    """It compares shapes size by size, equal ones too."""

    def of_operands(self: Any, lhs: Any, rhs: Any) -> Any:
        shapes = [list(x.type.shape) if x.type.is_block() else [] for x in (lhs, rhs)]
        return (lhs, rhs) if shapes[0] == shapes[1] else broadcast(self, lhs, rhs)

    return of_operands


def in_whole_slices(reduce: Function) -> Function:
    """It goes from element to element; in the same order along the axis, but all others at once, the result is the
    same."""

    def reduced(self: Any, input: Any) -> Any:
        if self.axis is None or input[0].handle.data.ndim < 2:
            return reduce(self, input)

        def at(i: int) -> tuple[Any, ...]:
            return tuple(self.to_tensor(np.take(x.handle.data, i, self.axis), x.dtype) for x in input)

        result = at(0)
        for i in range(1, input[0].handle.data.shape[self.axis]):
            combined = self.combine_fn.fn(*result, *at(i))
            result = combined if isinstance(combined, tuple) else (combined,)
        found = (x.handle.data for x in result)
        shaped = (np.expand_dims(data, self.axis) if self.keep_dims else data for data in found)
        return [self.to_tensor(data, x.dtype) for data, x in zip(shaped, input, strict=True)]

    return reduced


SPARED: list[tuple[Any, str, Function]] = [
    (interpreter.interpreter_builder, "options", without_overflows),
    (interpreter, "_patch_lang", what_is_left),
    (interpreter, "_get_np_dtype", once_per_name),
    (core.block_type, "__init__", once_per_shape),
    (core.tensor, "__init__", with_known_shape),
    (TritonSemantic, "broadcast_impl_value", unless_alike),
    (interpreter.ReduceOps, "generic_reduce", in_whole_slices),
]
ORIGINALS = [(owner, name, getattr(owner, name)) for owner, name, _ in SPARED]


def spare_the_interpreter() -> None:
    for (owner, name, original), (*_, spare) in zip(ORIGINALS, SPARED, strict=True):
        setattr(owner, name, spare(original))
