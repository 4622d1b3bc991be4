"""Starting a kernel again: a call like one before goes straight to what Triton compiled for that one.

An ordinary launch looks at every argument anew, in Python: which types it has, what it is specialised for, whether that
was compiled. A call whose tensors have the dtypes, shapes, strides, device and alignment of those of an earlier call
needs none of that, and none of an op's checks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashstate.launch.driver import DriverLaunch, UnfamiliarError, familiar
from flashstate.launch.start import Launch

MOST_KEYS = 4096  # remembered at once; then all are forgotten, and the next ones remembered anew
MOST_ALIKE = 16  # calls that only their tensors tell apart; more of them take the ordinary way

available = True  # until it turns out that Triton or torch are not as expected


class DirectLaunch(NamedTuple):
    """What a call like an earlier one needs to start its kernel."""

    same_tensors: Callable[..., bool]  # whether tensors have the dtypes, shapes, strides and devices of that call's
    device_index: int
    hooks: tuple[list[Any], list[Any]]  # what Triton is to call before and after every launch
    start: Callable[..., Any]  # with the pointers that are there, and the number that follows them

    def usable(self) -> bool:
        """False where another device is current, and where somebody, such as a profiler, wants to see launches."""
        before, after = self.hooks
        return not (before or after) and self.device_index == torch._C._cuda_getDevice()


Launches = dict[Hashable, list[DirectLaunch]]  # by what tells calls apart but their tensors
Likeness = tuple[Launches, Hashable, list[Any]]  # launches to look in, and what tells a call from others there


def remember(launches: Launches, key: Hashable, tensors: Sequence[Tensor], started: Sequence[Launch]) -> None:
    """Keep a launch, or several with the same arguments, of which pointers and a number behind them change."""
    if not available:
        return
    if len(launches) >= MOST_KEYS:
        launches.clear()
    alike = launches.setdefault(key, [])
    if len(alike) >= MOST_ALIKE or len({id(tensor) for tensor in tensors}) < len(tensors):  # which a guard refuses
        return
    with as_expected():
        starts = [DriverLaunch(one) for one in started]
        start = starts[0] if len(starts) == 1 else partial(_start_all, starts)
        alike.append(DirectLaunch(guard(tensors), started[0].device.index, hooks(), start))


@contextmanager
def as_expected() -> Iterator[None]:
    """Warn once at an UnfamiliarError inside, and let all later calls take the ordinary way. Other errors are mistakes
    of flashstate, and are raised."""
    global available
    try:
        yield
    except UnfamiliarError as reason:
        available = False
        warnings.warn(f"flashstate starts kernels the ordinary way, which costs the host more: {reason}", stacklevel=5)


def _start_all(starts: Sequence[DriverLaunch], pointers: Sequence[int], number: int) -> None:
    for start in starts:
        start(pointers, number)


def guard(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A function that says whether other tensors have the dtypes, shapes, strides and devices of these: torch.compile
    has one in C++, and asking every tensor in Python takes three times as long."""
    sizes: Any = [list(t.shape) for t in tensors]
    strides: Any = [list(t.stride()) for t in tensors]
    with familiar():
        from torch._C._dynamo.guards import TensorGuards

        guards: Any = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        check: Callable[..., bool] = guards.check
        if not check(*tensors):
            raise UnfamiliarError("torch's TensorGuards does not know its own tensors")
    return check


def hooks() -> tuple[list[Any], list[Any]]:
    """The lists of what Triton is to call before and after every launch."""
    with familiar():
        from triton import knobs

        before, after = knobs.runtime.launch_enter_hook.calls, knobs.runtime.launch_exit_hook.calls
    if not isinstance(before, list) or not isinstance(after, list):
        raise UnfamiliarError("Triton's launch hooks are not in lists")
    return before, after
