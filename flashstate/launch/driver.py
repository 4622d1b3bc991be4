"""Starting a compiled kernel through the CUDA driver, with its parameters kept in memory and only pointers renewed.

Triton's own launcher is given every argument of a kernel anew, compile-time constants too, and takes each apart. On an
H200's host that is 6.7 µs of a call, where `torch.add_` takes 6.4 in all.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashstate.launch.start import Launch

NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
SLOT = 8  # bytes of memory for each parameter, whatever its size
WORD = (1 << 64) - 1  # all bits of one


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of the CUDA driver."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_memory", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("num_attributes", ctypes.c_uint),
    )  # fmt: skip


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute of the CUDA driver."""

    _fields_ = (
        ("id", ctypes.c_uint), ("unused", ctypes.c_uint), ("value", ctypes.c_int),
        ("rest_of_value", ctypes.c_char * 60),
    )  # fmt: skip


START_EARLY = LaunchAttribute(6, 0, 1)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


@functools.cache
def _launch_function() -> Any:
    """cuLaunchKernelEx, with addresses as plain numbers."""
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    function.argtypes = (ctypes.c_void_p,) * 4
    function.restype = ctypes.c_int
    return function


class DriverLaunch:
    """A kernel and its parameters, of which pointers, all in front, and a number behind them change with calls."""

    def __init__(self, started: Launch) -> None:
        """Take over what an ordinary launch was started with; pointers that are None are no parameters."""
        compiled, arguments = started.compiled, started.arguments
        pointers = len(started.kernel.pointers)
        parameters = [*parameters_of(arguments), 0, 0]  # the last two: scratch memory, which is not used
        _require(compiled, len(parameters), started.early)
        present = sum(argument is not None for argument in arguments[:pointers])
        self._memory = bytearray(SLOT * len(parameters))
        struct.pack_into(f"<{len(parameters)}Q", self._memory, 0, *(parameter & WORD for parameter in parameters))
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._addresses = (ctypes.c_void_p * len(parameters))(*(start + SLOT * i for i in range(len(parameters))))
        block = (32 * compiled.metadata.num_warps, 1, 1)
        attributes = (ctypes.addressof(START_EARLY), 1) if started.early else (None, 0)
        self._config = LaunchConfig((started.grid[0], 1, 1), block, compiled.metadata.shared, None, *attributes)
        self._device_index = started.device.index
        self._pack = struct.Struct(f"<{present}Qq").pack_into
        self._launch = _launch_function()
        self._launched = ctypes.addressof(self._config), compiled.function, ctypes.addressof(self._addresses), None
        self._kept = compiled, [argument for argument in arguments[pointers:] if isinstance(argument, Tensor)]
        self._lock = threading.Lock()  # the driver reads the memory while other threads may run

    def __call__(self, pointers: Sequence[int], number: int) -> None:
        """Launch with these pointers, those that the kernel has, and the number behind them, on the current stream."""
        with self._lock:
            self._pack(self._memory, 0, *pointers, number)
            self._config.stream = torch._C._cuda_getCurrentRawStream(self._device_index)
            error = self._launch(*self._launched)
            if error == NO_CONTEXT:  # in a thread that has not used CUDA yet
                torch.cuda.set_device(self._device_index)
                error = self._launch(*self._launched)
        if error:
            raise RuntimeError(f"the CUDA driver could not start a kernel: error {error}")


def parameters_of(arguments: Sequence[Any]) -> list[int]:
    """What a kernel gets: addresses, numbers and the bits of float32, and nothing for None."""
    return [_bits_of(argument) for argument in arguments if argument is not None]


def _bits_of(argument: Tensor | float) -> int:
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    return argument if isinstance(argument, int) else int.from_bytes(struct.pack("<f", argument), "little")


def _require(compiled: Any, parameters: int, early: bool) -> None:
    """AttributeError unless a kernel is for CUDA, has so many parameters, and nothing that needs more care."""
    metadata, launcher = compiled.metadata, compiled.run
    if "ptx" not in compiled.asm:
        raise AttributeError("this is not CUDA")
    plain = (
        metadata.num_ctas == 1
        and not launcher.launch_cooperative_grid
        and bool(launcher.launch_pdl) == early
        and launcher.global_scratch_size == launcher.profile_scratch_size == 0
    )
    if not plain:
        raise AttributeError("a kernel needs scratch memory, clusters or another kind of launch")
    entry = re.search(r"\.entry [^(]*\((.*?)\)", compiled.asm["ptx"], re.S)
    found = 0 if entry is None else entry[1].count(".param")
    if found != parameters:
        raise AttributeError(f"a kernel has {found} parameters where {parameters} were expected")
