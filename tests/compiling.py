"""Compile a kernel as a call would, for any architecture and without a GPU: the launch is recorded, not run."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from flashstate.launch import backend
from flashstate.launch.start import FP_FUSION

TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "i8", torch.uint8: "u8",
    torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip


def target_of(architecture: int | str) -> str:
    """What kernels/state_io.py may use there, as launch.kernel_target would say."""
    if isinstance(architecture, str):
        return "portable"
    return "sm_89" if architecture >= 89 else "sm_80"


@dataclass
class Launch:
    """A kernel and the arguments of one launch."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]

    def compile(self, architecture: int | str) -> Any:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        nvidia = isinstance(architecture, int)
        target = GPUTarget("cuda", architecture, 32) if nvidia else GPUTarget("hip", architecture, 64)
        signature, constants, attributes = {}, {}, {}
        for position, parameter in enumerate(self.kernel.params):
            value = self.arguments[parameter.name]
            if parameter.is_constexpr:
                signature[parameter.name], constants[(position,)] = "constexpr", value
            else:
                specialize = not parameter.do_not_specialize
                signature[parameter.name] = describe(value, (position,), specialize, constants, attributes)
        source = ASTSource(self.kernel, signature, constants, attributes)
        return triton.compile(source, target=target, options=self.options)


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


@contextmanager
def recorded(module: str, name: str, architecture: int | str) -> Iterator[list[Launch]]:
    """Calls on CPU tensors inside reach the launch of this kernel as on that architecture, and end there."""
    launches: list[Launch] = []
    wanted = getattr(importlib.import_module(module), name)

    def record(kernel: Any, grid: Any, device: Any, arguments: Any, constants: dict[str, Any], num_warps: int) -> None:
        assert kernel is wanted
        named = {**dict(zip(kernel.arg_names, arguments, strict=False)), **constants}
        launches.append(Launch(kernel, named, {"num_warps": num_warps, "enable_fp_fusion": FP_FUSION}))

    target = mock.Mock(return_value=target_of(architecture))
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(backend, "_interpreting", True))
        for op in ("mamba2", "pool", "seeds"):
            patches.enter_context(mock.patch(f"flashstate.ops.{op}.start", record))
        for op in ("mamba2", "pool"):
            patches.enter_context(mock.patch(f"flashstate.ops.{op}.kernel_target", target))
        yield launches
