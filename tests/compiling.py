"""Compile a kernel as a call would, for any architecture and without a GPU: the launch is collected, not run."""

import inspect
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any
from unittest import mock

import torch
import triton.language as tl
from torch import Tensor

from flashstate.launch import Config, Gpu, Machine, collecting, environment, override
from flashstate.launch.environment import pretending
from flashstate.launch.start import Launch
from flashstate.launch.variants import variant_key
from flashstate.proof import AnyCase, Inputs, make_inputs

ARCHITECTURES = (80, 89, 90, 100, 103, 120, "gfx942", "gfx950")
TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "i8", torch.uint8: "u8",
    torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
CPU = torch.device("cpu")
Call = Callable[[Any, Any], object]  # of a case and its inputs


def machine_with(architecture: int | str) -> Machine:
    """One that has no table."""
    if isinstance(architecture, str):
        return Machine(Gpu("a GPU nobody measured", (9, 4)), "portable", nvidia=False, warp=64)
    gpu = Gpu("a GPU nobody measured", divmod(architecture, 10))
    return Machine(gpu, "sm_89" if architecture >= 89 else "sm_80", overlaps=architecture >= 90)


@contextmanager
def collected(architecture: int | str) -> Iterator[list[Launch]]:
    """Calls on CPU tensors inside reach their launches as on that architecture, and end there."""
    with pretending(machine_with(architecture)), collecting() as launches:
        yield launches


def by_the_reference() -> AbstractContextManager[Any]:
    """Calls inside run on the CPU, as if nobody stood in for a GPU."""
    return mock.patch.object(environment, "pretended", None)


def chosen(case: AnyCase, architecture: int | str) -> Config:
    """What the heuristic gives a case on that architecture."""
    machine = machine_with(architecture)
    with pretending(machine):
        return case.problem.heuristic(machine.gpu)


def plain(case: AnyCase, inputs: Inputs) -> object:
    return inputs.step()


@cache
def compiled(case: AnyCase, architecture: int | str, call: Call = plain, config: Config | None = None) -> Any:
    """The kernel that a call would start; the heuristic's config if none is given. Of two kernels of a call, the one
    whose rows do what the call is named after."""
    inputs = make_inputs(case, CPU)
    with collected(architecture) as launches, override(config) if config else nullcontext():
        call(case, inputs)
    (launch,) = (one for one in launches if one.constants.get("ROWS_DO", "either") in ("either", call.__name__))
    return compile_launch(launch, architecture)


_compiled: dict[Hashable, Any] = {}


def compile_launch(launch: Launch, architecture: int | str) -> Any:
    """What Triton compiles of a launch, for any architecture; once, however many tests ask for it."""
    key = variant_key(launch), architecture
    if key not in _compiled:
        _compiled[key] = _compile(launch, architecture)
    return _compiled[key]


def _compile(launch: Launch, architecture: int | str) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    nvidia = isinstance(architecture, int)
    target = GPUTarget("cuda", architecture, 32) if nvidia else GPUTarget("hip", architecture, 64)
    arguments = {**dict(zip(launch.kernel.runtime, launch.arguments, strict=True)), **launch.constants}
    signature, constants = {}, {}
    for position, parameter in enumerate(launch.kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[(position,)] = "constexpr", value
        else:
            signature[parameter.name] = type_of(value)
    source = ASTSource(launch.kernel, signature, constants)
    with calls_told_apart():
        return triton.compile(source, target=target, options=launch.options)


@contextmanager
def calls_told_apart() -> Iterator[None]:
    """A kernel that is compiled inside, and not found in Triton's cache, must not call a function twice so that Triton
    3.6 takes one call for the other: all that is in their arguments has the same types, but tuples end elsewhere."""
    from triton.compiler.code_generator import CodeGenerator

    call, seen = CodeGenerator.call_JitFunction, dict[Hashable, Hashable]()

    def watched(self: Any, fn: Any, args: Any, kwargs: Any, *context: Any, **named: Any) -> Any:
        given = inspect.getcallargs(fn.fn, *args, **kwargs)
        nested = tuple(shape_of(given[name]) for name in fn.arg_names)
        if seen.setdefault((fn, flat(nested)), nested) != nested:
            raise AssertionError(f"Triton 3.6 cannot tell two calls of {fn.__name__} apart: tuples end elsewhere")
        return call(self, fn, args, kwargs, *context, **named)

    with mock.patch.object(CodeGenerator, "call_JitFunction", watched):
        yield


def shape_of(argument: Any) -> Hashable:
    """The type of an argument of a function that a kernel calls, or those in it; a constant itself."""
    if isinstance(argument, tl.tuple | tuple):
        return tuple(shape_of(one) for one in argument)
    return repr(argument) if isinstance(argument, tl.constexpr) else str(getattr(argument, "type", argument))


def flat(nested: Hashable) -> tuple[Hashable, ...]:
    """What is in tuples, wherever they end."""
    return tuple(one for part in nested for one in flat(part)) if isinstance(nested, tuple) else (nested,)


def type_of(value: Any) -> str:
    """Of an argument that Triton does not specialise on."""
    if isinstance(value, Tensor):
        return f"*{TYPES[value.dtype]}"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
