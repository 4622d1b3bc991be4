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


AS_THEY_ARE = {core.tensor, core.dtype, core.block_type, core.pointer_type, bool, int, float, str, type(None)}


def by_type(unwrap: Function) -> Function:
    """Of all that an operation is given it asks whether it is a list, a tuple or a constant; most are none."""
    constant = core.constexpr

    def unwrapped(given: Any) -> Any:
        kind = type(given)
        if kind in AS_THEY_ARE:
            return given
        return given.value if kind is constant else unwrap(given)

    return unwrapped


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


def unchecked(init: Function) -> Function:
    """It compares the size of every result with that of its type, though nothing gives another one."""

    def of_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    return of_handle


def without_overflows(options: Any) -> Any:
    """Of every sum and product of integers it works out whether it overflows, and tells nobody."""
    return replace(options, sanitize_overflow=False)


def what_is_left(patch: Function) -> Function:
    """At every call of a device function it looks for what is left of its language to replace, though it did so when
    the kernel started."""
    language, is_builtin, nothing = interpreter.tl, interpreter.tl.core.is_builtin, interpreter._LangPatchScope()

    @cache
    def modules_of(fn: Function) -> list[Any]:
        return [module for module in (language, language.core) if any(module is x for x in fn.__globals__.values())]

    def patched(fn: Function) -> Any:
        for module in modules_of(fn):
            if is_builtin(module.load):
                return patch(fn)
        return nothing

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
            sizes = key[1:]
            known[key] = {**self.__dict__, "sizes": sizes, "wrapped": wrapped(sizes)}
        self.__dict__.update(known[key], element_ty=element_ty)

    return of_type


@cache
def wrapped(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """The shape of a tensor and the number of its elements. Equal ones are one object, so that `is` compares them."""
    return core.tuple([core.constexpr(n) for n in sizes]), core.constexpr(math.prod(sizes))


def with_known_shape(init: Function) -> Function:
    """It wraps the shape of every tensor anew."""
    block, of_scalar = core.block_type, wrapped(())

    def of_tensor(self: Any, handle: Any, of: Any) -> None:
        self.handle, self.type, self.dtype = handle, of, of.scalar
        self.shape, self.numel = of.wrapped if type(of) is block else of_scalar

    return of_tensor


@cache
def common_sizes(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
    """Those of a result, unless axes have to be added or sizes do not fit."""
    fit = len(left) == len(right) and all(a == b or 1 in (a, b) for a, b in zip(left, right, strict=True))
    return tuple(b if a == 1 else a for a, b in zip(left, right, strict=True)) if fit else None


def with_known_sizes(broadcast: Function) -> Function:
    """It compares shapes size by size, equal ones too."""
    tensor, handle_of, scalar = core.tensor, interpreter.TensorHandle, wrapped(())[0]

    def filled(value: Any, like: Any) -> Any:
        data = np.full(like.sizes, value.handle.data, dtype=interpreter._get_np_dtype(value.dtype))
        return tensor(handle_of(data, value.dtype), like.with_element_ty(value.dtype))

    def stretched(value: Any, sizes: tuple[int, ...]) -> Any:
        if value.type.sizes == sizes:
            return value
        data = np.broadcast_to(value.handle.data, sizes)
        return tensor(handle_of(data, value.dtype), core.block_type(value.dtype, list(sizes)))

    def of_one_shape(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        if rhs.shape is scalar:
            return lhs, filled(rhs, lhs.type)
        if lhs.shape is scalar:
            return filled(lhs, rhs.type), rhs
        sizes = common_sizes(lhs.type.sizes, rhs.type.sizes)
        return broadcast(self, lhs, rhs) if sizes is None else (stretched(lhs, sizes), stretched(rhs, sizes))

    return of_one_shape


LIMITS = {  # of numbers that Triton takes for one of such a type
    "int32": (-1 << 31, (1 << 31) - 1), "int64": (-1 << 63, (1 << 63) - 1), "uint32": (0, (1 << 32) - 1),
    "uint64": (0, (1 << 63) - 1),
}  # fmt: skip
UNCHANGED = {"fp32", "int1", *LIMITS}  # types that operands keep where both have them


def unless_of_one_type(check: Function) -> Function:
    """It looks for the type of both operands and casts them to it, though most have it, and offsets of pointers need
    none; a number beside a tensor takes its type, if it is of no higher kind."""
    tensor, pointer = core.tensor, core.pointer_type
    known: dict[Any, Any] = {}  # by integers, of which there are few

    def taken(self: Any, number: Any, of: Any) -> Any:
        if type(number) is not int:
            return self.scalar_constant(number, of) if type(number) is float and of.name == "fp32" else None
        key = number, of.name
        if key not in known:
            least, most = LIMITS.get(of.name, (0, -1))
            fits = of.name == "fp32" or least <= number <= most
            known[key] = self.scalar_constant(number, of) if fits else None
            if fits:
                known[key].handle.data.flags.writeable = False
        return known[key]

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


NUMBERS = {"fp32", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))}  # that numpy has


def unless_of_numbers(cast: Function) -> Function:
    """It compares types field by field, equal ones too, and asks for all that they may be."""
    tensor, handle_of = core.tensor, interpreter.TensorHandle

    def of_operand(self: Any, input: Any, dst_ty: Any, *rounding: Any) -> Any:
        source, wanted = input.dtype, dst_ty.scalar
        if source is wanted:
            return input
        if wanted.name not in NUMBERS or (source.name not in NUMBERS and source.name != "int1") or any(rounding):
            return cast(self, input, dst_ty, *rounding)
        data = input.handle.data.astype(interpreter._get_np_dtype(wanted))
        of = input.type.with_element_ty(wanted) if input.type.is_block() else wanted
        return tensor(handle_of(data, wanted), of)

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
    (core, "_unwrap_if_constexpr", by_type),
    (interpreter, "_patch_attr", with_its_semantic),
    (interpreter.TensorHandle, "__init__", unchecked),
    (interpreter.interpreter_builder, "options", without_overflows),
    (interpreter, "_patch_lang", what_is_left),
    (interpreter, "_get_np_dtype", once_per_name),
    (core.block_type, "__init__", once_per_shape),
    (core.tensor, "__init__", with_known_shape),
    (TritonSemantic, "binary_op_type_checking_impl", unless_of_one_type),
    (TritonSemantic, "cast", unless_of_numbers),
    (TritonSemantic, "broadcast_impl_value", with_known_sizes),
    (interpreter.ReduceOps, "generic_reduce", in_whole_slices),
]
ORIGINALS = [(owner, name, getattr(owner, name)) for owner, name, _ in SPARED]


def spare_the_interpreter() -> None:
    for (owner, name, original), (*_, spare) in zip(ORIGINALS, SPARED, strict=True):
        setattr(owner, name, spare(original))
