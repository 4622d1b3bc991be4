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


def spare_the_interpreter() -> None:
    """Of every sum and product of integers it works out whether it overflows, too, and tells nobody."""
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = patch_what_is_left(interpreter._patch_lang)
    interpreter._get_np_dtype = once_per_name(interpreter._get_np_dtype)
    interpreter.ReduceOps.generic_reduce = whole_slices(interpreter.ReduceOps.generic_reduce)
    core.block_type.__init__ = once_per_shape(core.block_type.__init__)
    core.tensor.__init__ = with_known_shape
    TritonSemantic.broadcast_impl_value = unless_alike(TritonSemantic.broadcast_impl_value)


def patch_what_is_left(patch: Callable[..., Any]) -> Callable[..., Any]:
    """At every call of a device function it looks for what is left of its language to replace, though it did so when
    the kernel started."""
    language = interpreter.tl

    @cache
    def modules_of(fn: Callable[..., Any]) -> list[Any]:
        return [module for module in (language, language.core) if any(module is x for x in fn.__globals__.values())]

    def patched(fn: Callable[..., Any]) -> Any:
        left = any(language.core.is_builtin(module.load) for module in modules_of(fn))
        return patch(fn) if left else interpreter._LangPatchScope()

    return patched


def once_per_name(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The numpy dtype of a type, which it looks up in a table that it makes every time."""
    known: dict[str, Any] = {}

    def found(of: Any) -> Any:
        of = of.scalar
        if of.name not in known:
            known[of.name] = find(of)
        return known[of.name]

    return found


def once_per_shape(make: Callable[..., None]) -> Callable[..., None]:
    """Types of blocks, a new one for every operation."""
    known: dict[Any, dict[str, Any]] = {}

    def init_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(n.value if type(n) is core.constexpr else n for n in shape)
        if key not in known:
            make(self, element_ty, shape)
            known[key] = dict(self.__dict__)
        self.__dict__.update(known[key], element_ty=element_ty)

    return init_once


@cache
def constants_of(shape: tuple[int, ...]) -> tuple[Any, Any]:
    return core.tuple([core.constexpr(n) for n in shape]), core.constexpr(math.prod(shape))


def with_known_shape(self: Any, handle: Any, type: Any) -> None:
    """Of a tensor, whose shape and size it wraps anew for every operation."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = constants_of(tuple(type.shape) if type.is_block() else ())


def unless_alike(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """Operands of equal shape are not compared size by size."""

    def broadcast_unless_alike(self: Any, lhs: Any, rhs: Any) -> Any:
        shapes = [list(x.type.shape) if x.type.is_block() else [] for x in (lhs, rhs)]
        return (lhs, rhs) if shapes[0] == shapes[1] else broadcast(self, lhs, rhs)

    return broadcast_unless_alike


def whole_slices(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Reductions in the same order, but of all rows at once: it goes from element to element."""

    def reduce_slices(self: Any, input: Any) -> Any:
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

    return reduce_slices
