"""Which implementation runs a call: the device decides, and tests may ask for the interpreter."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flashstate.launch.suspension import suspended

_interpreting = False


def uses_kernels(device: torch.device) -> bool:
    """True where a call on `device` runs kernels/, False where it runs reference/."""
    if device.type == "cuda":
        return True
    if device.type == "cpu":
        return _interpreting
    raise ValueError(f"state is on {device}; flashstate runs on cuda and cpu devices")


@functools.cache
def kernel_target(device: torch.device) -> str:
    """The instructions that kernels may use on a device. Stored states have the same bytes with every choice."""
    if device.type == "cpu":
        return "interpreter"
    if torch.version.cuda is None:
        return "portable"
    capability = torch.cuda.get_device_capability(device)
    return "sm_89" if capability >= (8, 9) else "sm_80" if capability >= (8, 0) else "portable"


@functools.cache
def lets_next_start(device: torch.device) -> bool:
    """Whether kernels can let the next one start before they end: programmatic dependent launch."""
    if device.type == "cpu" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@contextmanager
def interpreted() -> Iterator[None]:
    """Send ops on CPU tensors through the Triton kernels, run by Triton's interpreter."""
    global _interpreting
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("the interpreter needs TRITON_INTERPRET=1 in the environment before triton is imported")
    before, _interpreting = _interpreting, True
    try:
        with suspended():
            yield
    finally:
        _interpreting = before
