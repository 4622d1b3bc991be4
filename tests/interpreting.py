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


def unless_a_tensor(unwrap: Function) -> Function:
    """Of all that an operation is given it asks whether it is a list, a tuple or a constant; most are tensors."""
    tensor = core.tensor
    return lambda given: given if type(given) is tensor else unwrap(given)


def with_its_semantic(patch: Function) -> Function:
    """What stands for an operation copies the arguments given by name, and asks whether they are complete."""
    semantic = interpreter.interpreter_semantic

    def patched(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        fn = getattr(member, "__wrapped__", member)

        def operation(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return fn(*args, **kwargs)

        scope.set_attr(obj, name, operation)

    return patched


def unchecked(check: Function) -> Function:
    """It compares the size of every result with that of its type, though nothing gives another one."""
    return lambda self: None


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
    """It wraps the shape of every tensor anew. Equal ones are one object, so that `is` compares them."""

    @cache
    def wrapped(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(n) for n in shape]), core.constexpr(math.prod(shape))

    def of_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = wrapped(tuple(type.shape) if type.is_block() else ())

    return of_tensor


def unless_alike(broadcast: Function) -> Function:
    """It compares shapes size by size, equal ones too."""
    return lambda self, lhs, rhs: (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)


LIMITS = {  # of numbers that Triton takes for one of such a type
    "int32": (-1 << 31, (1 << 31) - 1), "int64": (-1 << 63, (1 << 63) - 1), "uint32": (0, (1 << 32) - 1),
    "uint64": (0, (1 << 63) - 1),
}  # fmt: skip
UNCHANGED = {"fp32", "int1", *LIMITS}  # types that operands keep where both have them


def unless_of_one_type(check: Function) -> Function:
    """It looks for the type of both operands and casts them to it, though most have it, and offsets of pointers need
    none; a number beside a tensor takes its type, if it is of no higher kind."""
    tensor, pointer = core.tensor, core.pointer_type

    def taken(self: Any, number: Any, of: Any) -> Any:
        least, most = LIMITS.get(of.name, (0, -1))
        fits = type(number) in (int, float) if of.name == "fp32" else type(number) is int and least <= number <= most
        return self.scalar_constant(number, of) if fits else None

    def checked(self: Any, lhs: Any, rhs: Any, *flags: Any, **named: Any) -> tuple[Any, Any]:
        left = lhs if type(lhs) is tensor else taken(self, lhs, rhs.dtype) if type(rhs) is tensor else None
        right = rhs if type(rhs) is tensor else taken(self, rhs, lhs.dtype) if type(lhs) is tensor else None
        if left is not None and right is not None:
            if left.dtype is right.dtype and left.dtype.name in UNCHANGED:
                return self.broadcast_impl_value(left, right)
            if flags[:1] == (True,) and type(left.dtype) is pointer and right.dtype.name in LIMITS:
                return self.broadcast_impl_value(left, right)
        return check(self, lhs, rhs, *flags, **named)

    return checked


def unless_of_that_type(cast: Function) -> Function:
    """It compares types field by field, equal ones too."""

    def of_operand(self: Any, input: Any, dst_ty: Any, *rounding: Any) -> Any:
        return input if input.dtype is dst_ty else cast(self, input, dst_ty, *rounding)

    return of_operand


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
    (core, "_unwrap_if_constexpr", unless_a_tensor),
    (interpreter, "_patch_attr", with_its_semantic),
    (interpreter.TensorHandle, "__post_init__", unchecked),
    (interpreter.interpreter_builder, "options", without_overflows),
    (interpreter, "_patch_lang", what_is_left),
    (interpreter, "_get_np_dtype", once_per_name),
    (core.block_type, "__init__", once_per_shape),
    (core.tensor, "__init__", with_known_shape),
    (TritonSemantic, "binary_op_type_checking_impl", unless_of_one_type),
    (TritonSemantic, "cast", unless_of_that_type),
    (TritonSemantic, "broadcast_impl_value", unless_alike),
    (interpreter.ReduceOps, "generic_reduce", in_whole_slices),
]
ORIGINALS = [(owner, name, getattr(owner, name)) for owner, name, _ in SPARED]


def spare_the_interpreter() -> None:
    for (owner, name, original), (*_, spare) in zip(ORIGINALS, SPARED, strict=True):
        setattr(owner, name, spare(original))
