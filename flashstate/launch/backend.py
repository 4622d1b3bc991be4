"""Which implementation runs a call: the device decides, and tests may ask for the interpreter."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_interpreting = False


def uses_kernels(device: torch.device) -> bool:
    """True where a call on `device` runs kernels/, False where it runs reference/."""
    if device.type == "cuda":
        return True
    if device.type == "cpu":
        return _interpreting
    raise ValueError(f"state is on {device}; flashstate runs on cuda and cpu devices")


def kernel_rounding(rounding: str, device: torch.device) -> str:
    """The name kernels know a rounding by: NVIDIA GPUs have their own form of stochastic rounding, equal in bytes."""
    return "stochastic_ptx" if rounding == "stochastic" and _has_packed_float16(device) else rounding


@functools.cache
def _has_packed_float16(device: torch.device) -> bool:
    """Whether the instructions of kernels/ptx.py are there: NVIDIA GPUs from compute capability 8.0 on."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


@contextmanager
def interpreted() -> Iterator[None]:
    """Send ops on CPU tensors through the Triton kernels, run by Triton's interpreter."""
    global _interpreting
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("the interpreter needs TRITON_INTERPRET=1 in the environment before triton is imported")
    before, _interpreting = _interpreting, True
    try:
        yield
    finally:
        _interpreting = before
