"""Starting a kernel again: a call like one before goes straight to what Triton compiled for that one.

An ordinary launch looks at every argument anew, in Python: which types it has, what it is specialised for, whether that
was compiled. A call whose tensors have the dtypes, shapes, strides, device and alignment of those of an earlier call
needs none of that, and none of an op's checks.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashstate.launch.start import Started
from flashstate.state.signature import ALIGNMENT

MOST_KEYS = 1024  # remembered at once; then all are forgotten, and the next ones remembered anew
MOST_ALIKE = 16  # calls that only their tensors tell apart


class DirectLaunch(NamedTuple):
    """What a call like an earlier one needs to start its kernel."""

    same_tensors: Callable[..., bool]  # whether tensors have the dtypes, shapes, strides and devices of that call's
    unaligned: int  # low bits that no address may have
    device_index: int
    start: Callable[..., None]  # with the grid, the CUDA stream, what follows here, the pointers, and the rest
    programs: int
    before_pointers: tuple[Any, ...]
    after_pointers: tuple[Any, ...]


Launches = dict[Hashable, list[DirectLaunch]]  # by what tells calls apart but their tensors


def find(
    launches: Launches, key: Hashable, tensors: Sequence[Tensor], address_bits: int
) -> DirectLaunch | None:
    """The launch of a call like this on the current device; `address_bits`: addresses that alignment matters for,
    ored."""
    for launch in launches.get(key, ()):
        if not address_bits & launch.unaligned and launch.same_tensors(*tensors):
            elsewhere = launch.device_index != torch._C._cuda_getDevice()
            return None if elsewhere or hooked() else launch
    return None


def again(launch: DirectLaunch, pointers: Sequence[int | None], number: int) -> None:
    """Start it with other pointers, in the order of the kernel, and the number that follows them."""
    stream = torch._C._cuda_getCurrentRawStream(launch.device_index)
    launch.start(
        launch.programs, 1, 1, stream, *launch.before_pointers, *pointers, number, *launch.after_pointers
    )  # fmt: skip


def remember(
    launches: Launches, key: Hashable, tensors: Sequence[Tensor], started: Started, pointers: int, aligned: bool
) -> None:
    """Keep a launch whose first `pointers` arguments, and a number behind them, change from call to call."""
    launch = _direct_launch(tensors, started, pointers, aligned)
    if launch is not None:
        if len(launches) >= MOST_KEYS:
            launches.clear()
        alike = launches.setdefault(key, [])
        if len(alike) < MOST_ALIKE:
            alike.append(launch)


def _direct_launch(
    tensors: Sequence[Tensor], started: Started, pointers: int, aligned: bool
) -> DirectLaunch | None:
    """None where Triton or torch are not as expected, which is said once."""
    try:
        start, before_pointers = _starter(started.compiled)
        names = started.kernel.arg_names[len(started.arguments) :]
        constants = tuple(started.constants[name] for name in names)
        if hooks() is None:
            raise AttributeError("Triton's launch hooks are not lists")
        same_tensors = guard(tensors)
    except (AttributeError, KeyError, ImportError, TypeError) as reason:
        _say_once(str(reason))
        return None
    rest = map(_address_or_number, started.arguments[pointers + 1 :])
    return DirectLaunch(
        same_tensors, ALIGNMENT - 1 if aligned else 0, started.device.index, start, started.grid[0], before_pointers,
        (*rest, *constants),
    )  # fmt: skip


def _starter(compiled: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """What starts a compiled kernel, and its arguments between the stream and the pointers.

    In Triton 3.6 that is a C function behind a Python object which would ask for scratch memory first; these kernels
    have none. Elsewhere it is that object.
    """
    launcher, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    no_hooks = (None, None, None)
    names = tuple(inspect.signature(type(launcher).__call__).parameters)
    if names == ("self", "gridX", "gridY", "gridZ", "stream", "function", "args") and hasattr(launcher, "launch_pdl"):
        if launcher.global_scratch_size == 0 and launcher.profile_scratch_size == 0:
            modes = (launcher.launch_cooperative_grid, launcher.launch_pdl)
            return launcher.launch, (function, *modes, None, None, metadata, *no_hooks)
    return launcher, (function, metadata, *no_hooks)


def _address_or_number(argument: Any) -> Any:
    return argument.data_ptr() if isinstance(argument, Tensor) else argument


def guard(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A function that says whether other tensors have the dtypes, shapes, strides and devices of these.

    torch.compile has one in C++; asking every tensor in Python takes three times as long.
    """
    from torch._C._dynamo.guards import TensorGuards

    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    check: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    if not check(*tensors):
        raise AttributeError("torch's TensorGuards does not know its own tensors")
    return check


@functools.cache
def hooks() -> tuple[list[Any], list[Any]] | None:
    """What Triton is to call before and after every launch: both lists; None where there are none to be found."""
    from triton import knobs

    lists = knobs.runtime.launch_enter_hook.calls, knobs.runtime.launch_exit_hook.calls
    return lists if all(isinstance(calls, list) for calls in lists) else None


def hooked() -> bool:
    """Whether somebody, such as a profiler, wants to see launches: then they go the ordinary way."""
    lists = hooks()
    return lists is None or bool(lists[0] or lists[1])


@functools.cache
def _say_once(reason: str) -> None:
    warnings.warn(f"flashstate starts kernels the ordinary way, which costs the host more: {reason}", stacklevel=3)
