"""Starting a kernel again: a call like one before goes straight to what Triton compiled for that one.

An ordinary launch looks at every argument anew, in Python: which types it has, what it is specialised for, whether that
was compiled. A call whose tensors have the dtypes, shapes, strides, device and alignment of those of an earlier call
needs none of that, and none of an op's checks.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashstate.launch.driver import DriverLaunch
from flashstate.launch.start import Started
from flashstate.state.signature import ALIGNMENT

MOST_KEYS = 1024  # remembered at once; then all are forgotten, and the next ones remembered anew
MOST_ALIKE = 16  # calls that only their tensors tell apart


class DirectLaunch(NamedTuple):
    """What a call like an earlier one needs to start its kernel."""

    same_tensors: Callable[..., bool]  # whether tensors have the dtypes, shapes, strides and devices of that call's
    unaligned: int  # low bits that no address may have
    device_index: int
    hooks: tuple[list[Any], list[Any]]  # what Triton is to call before and after every launch
    start: Callable[[Sequence[int], int], None]  # with the pointers that are there, and the number that follows them


Launches = dict[Hashable, list[DirectLaunch]]  # by what tells calls apart but their tensors


def find(launches: Launches, key: Hashable, tensors: Sequence[Tensor], address_bits: int) -> DirectLaunch | None:
    """The launch of a call like this; `address_bits`: addresses that alignment matters for, ored.

    None also where the current device is another one, and where somebody, such as a profiler, wants to see launches.
    """
    for launch in launches.get(key, ()):
        if not address_bits & launch.unaligned and launch.same_tensors(*tensors):
            before, after = launch.hooks
            ordinary = before or after or launch.device_index != torch._C._cuda_getDevice()
            return None if ordinary else launch
    return None


def remember(
    launches: Launches, key: Hashable, tensors: Sequence[Tensor], started: Started, pointers: int, aligned: bool
) -> None:
    """Keep a launch whose first `pointers` arguments, and a number behind them, change from call to call.

    Where Triton or torch are not as expected, that is said once, and calls take the ordinary way.
    """
    try:
        launch = DirectLaunch(
            guard(tensors), ALIGNMENT - 1 if aligned else 0, started.device.index, hooks(),
            DriverLaunch(started.compiled, started.device, started.grid[0], started.arguments, pointers),
        )  # fmt: skip
    except (AttributeError, ImportError, KeyError, OSError, TypeError) as reason:
        _say_once(str(reason))
        return
    if len(launches) >= MOST_KEYS:
        launches.clear()
    alike = launches.setdefault(key, [])
    if len(alike) < MOST_ALIKE:
        alike.append(launch)


def guard(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A function that says whether other tensors have the dtypes, shapes, strides and devices of these.

    torch.compile has one in C++; asking every tensor in Python takes three times as long.
    """
    from torch._C._dynamo.guards import TensorGuards

    sizes: Any = [list(t.shape) for t in tensors]
    strides: Any = [list(t.stride()) for t in tensors]
    check: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    if not check(*tensors):
        raise AttributeError("torch's TensorGuards does not know its own tensors")
    return check


def hooks() -> tuple[list[Any], list[Any]]:
    """The lists of what Triton is to call before and after every launch."""
    from triton import knobs

    before, after = knobs.runtime.launch_enter_hook.calls, knobs.runtime.launch_exit_hook.calls
    if not isinstance(before, list) or not isinstance(after, list):
        raise AttributeError("Triton's launch hooks are not in lists")
    return before, after


@functools.cache
def _say_once(reason: str) -> None:
    warnings.warn(f"flashstate starts kernels the ordinary way, which costs the host more: {reason}", stacklevel=3)
