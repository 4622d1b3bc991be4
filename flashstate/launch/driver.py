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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashstate.launch.start import Launch

NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
SLOT = 8  # bytes of memory for each parameter, whatever its size
WORD = (1 << 64) - 1  # all bits of one


class UnfamiliarError(Exception):
    """The internals of Triton or torch are not those that this version of flashstate knows."""


@contextmanager
def familiar() -> Iterator[None]:
    """Turn errors inside into UnfamiliarError. Only reads of internals of Triton, torch or the driver belong inside."""
    try:
        yield
    except (AttributeError, ImportError, KeyError, OSError, TypeError) as reason:
        raise UnfamiliarError(str(reason)) from reason


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
    with familiar():
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
        code = code_of(compiled, len(parameters), started.early)
        present = sum(argument is not None for argument in arguments[:pointers])
        self._memory = bytearray(SLOT * len(parameters))
        struct.pack_into(f"<{len(parameters)}Q", self._memory, 0, *(parameter & WORD for parameter in parameters))
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._addresses = (ctypes.c_void_p * len(parameters))(*(start + SLOT * i for i in range(len(parameters))))
        attributes = (ctypes.addressof(START_EARLY), 1) if started.early else (None, 0)
        self._config = LaunchConfig((started.grid[0], 1, 1), (code.threads, 1, 1), code.shared, None, *attributes)
        self._device_index = started.device.index
        self._pack = struct.Struct(f"<{present}Qq").pack_into
        self._launch = _launch_function()
        self._launched = ctypes.addressof(self._config), code.function, ctypes.addressof(self._addresses), None
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


class Code(NamedTuple):
    """A compiled kernel, as the driver starts it."""

    function: int
    threads: int  # of a program
    shared: int  # bytes of shared memory


def code_of(compiled: Any, parameters: int, early: bool) -> Code:
    """Return the machine code that Triton compiled; UnfamiliarError unless it is for CUDA, has this number of
    parameters, and needs no scratch memory, clusters or cooperative launch."""
    with familiar():
        metadata, launcher = compiled.metadata, compiled.run
        ptx, code = compiled.asm.get("ptx"), Code(compiled.function, 32 * metadata.num_warps, metadata.shared)
        plain = (
            metadata.num_ctas == 1
            and not launcher.launch_cooperative_grid
            and bool(launcher.launch_pdl) == early
            and launcher.global_scratch_size == launcher.profile_scratch_size == 0
        )
    if ptx is None:
        raise UnfamiliarError("this is not CUDA")
    if not plain:
        raise UnfamiliarError("a kernel needs scratch memory, clusters or another kind of launch")
    entry = re.search(r"\.entry [^(]*\((.*?)\)", ptx, re.S)
    found = 0 if entry is None else entry[1].count(".param")
    if found != parameters:
        raise UnfamiliarError(f"a kernel has {found} parameters where {parameters} were expected")
    return code
