"""What makes a function a kernel that can be launched. Importing this imports triton."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import takewhile
from typing import Any

import triton
import triton.language as tl


def kernel(function: Callable[..., None]) -> Any:
    """A Triton kernel that is compiled for the types of its runtime parameters and for none of their values, so that
    what a compiler may assume of addresses and strides, such as alignment, is said by constants alone.

    runtime: names of the parameters that are not annotated `tl.constexpr`, in order; pointers come first.
    pointers: those before the first number, which change from call to call.
    constants: names of the others.
    """
    parameters = inspect.signature(function).parameters.values()
    runtime = tuple(parameter.name for parameter in parameters if parameter.annotation is not tl.constexpr)
    jitted: Any = triton.jit(function, do_not_specialize=runtime)
    jitted.runtime = runtime
    jitted.pointers = tuple(takewhile(lambda name: name.endswith("_ptr"), runtime))
    jitted.constants = tuple(parameter.name for parameter in parameters if parameter.name not in runtime)
    return jitted
