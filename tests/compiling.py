"""Compile a kernel as a call would, for any architecture and without a GPU: the launch is collected, not run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from flashstate.launch import backend, collecting
from flashstate.launch.start import FP_FUSION, Launch

TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "i8", torch.uint8: "u8",
    torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip


def target_of(architecture: int | str) -> str:
    """What kernels/state_io.py may use there, as launch.kernel_target would say."""
    if isinstance(architecture, str):
        return "portable"
    return "sm_89" if architecture >= 89 else "sm_80"


@contextmanager
def collected(architecture: int | str) -> Iterator[list[Launch]]:
    """Calls on CPU tensors inside reach their launches as on that architecture, and end there."""
    target = mock.Mock(return_value=target_of(architecture))
    with (
        mock.patch.object(backend, "_interpreting", True),
        mock.patch("flashstate.ops.mamba2.kernel_target", target),
        mock.patch("flashstate.ops.pool.kernel_target", target),
        collecting() as launches,
    ):
        yield launches


def compile_launch(launch: Launch, architecture: int | str) -> Any:
    """What Triton compiles of a launch, for any architecture."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    nvidia = isinstance(architecture, int)
    target = GPUTarget("cuda", architecture, 32) if nvidia else GPUTarget("hip", architecture, 64)
    arguments = {**dict(zip(launch.kernel.arg_names, launch.arguments, strict=False)), **launch.constants}
    signature, constants, attributes = {}, {}, {}
    for position, parameter in enumerate(launch.kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[(position,)] = "constexpr", value
        else:
            specialize = not parameter.do_not_specialize
            signature[parameter.name] = describe(value, (position,), specialize, constants, attributes)
    source = ASTSource(launch.kernel, signature, constants, attributes)
    options = {"num_warps": launch.num_warps, "enable_fp_fusion": FP_FUSION}
    return triton.compile(source, target=target, options=options)


def describe(
    value: Any, path: tuple[int, ...], specialize: bool, constants: dict[Any, Any], attributes: dict[Any, Any]
) -> Any:
    """The type of an argument as Triton specialises it: None and 1 are constants, multiples of 16 known as such."""
    if isinstance(value, tuple):
        return tuple(describe(v, (*path, i), specialize, constants, attributes) for i, v in enumerate(value))
    if value is None or (specialize and isinstance(value, int) and value == 1):
        constants[path] = value
        return "constexpr"
    number = value.data_ptr() if isinstance(value, Tensor) else value
    if specialize and number % 16 == 0:
        attributes[path] = [["tt.divisibility", 16]]
    if isinstance(value, Tensor):
        return f"*{TYPES[value.dtype]}"
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
