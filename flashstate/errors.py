"""Argument checks with one voice: the argument's name, what it got, and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashstate.basics import ACTIVATIONS, BINARY_UNITS

ACTIVATION_DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in ACTIVATIONS)
INDEX_DTYPES = (torch.int32, torch.int64)
INT64 = (-(1 << 63), (1 << 63) - 1)  # the least and the most
Shape = tuple[tuple[str, ...], tuple[int | None, ...]]  # names of axes, and their sizes; None: any
LARGEST_INT32 = (1 << 31) - 1
LARGEST_FLOAT32 = torch.finfo(torch.float32).max


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def counted(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def bytes_text(size: int) -> str:
    """Return bytes in the largest fitting binary unit, to three digits, as in "33 KiB"."""
    power = min(max(0, (size.bit_length() - 1) // 10), len(BINARY_UNITS) - 1)
    number = size / 1024**power
    return f"{number:,.0f} {BINARY_UNITS[power]}" if number >= 100 else f"{number:.3g} {BINARY_UNITS[power]}"


def describe_shape(axes: tuple[str, ...], sizes: tuple[int | None, ...]) -> str:
    named = [axis if size is None else f"{axis}={size}" for axis, size in zip(axes, sizes, strict=True)]
    return f"({', '.join(named)})"


def no_tensor(value: Any) -> str:
    """Name the type of something that is no tensor, and how to make one of it."""
    convertible = isinstance(value, (list, tuple)) or hasattr(value, "__array__")
    return type(value).__name__ + (": torch.tensor(...) makes a tensor of it" if convertible else "")


def check_dtype(name: str, dtype: Any, allowed: Sequence[torch.dtype] = ACTIVATION_DTYPES) -> None:
    if dtype not in allowed:
        got = dtype_name(dtype) if isinstance(dtype, torch.dtype) else repr(dtype)
        raise TypeError(f"{name} must be {' or '.join(map(dtype_name, allowed))}, got {got}")


def check_tensor(
    name: str,
    tensor: Any,
    axes: tuple[str, ...],
    sizes: tuple[int | None, ...],
    *,
    dtypes: Sequence[torch.dtype] = ACTIVATION_DTYPES,
    device: torch.device | None = None,
    also: Shape | None = None,
) -> None:
    """Raise unless `tensor` has these axes (a size of None is free), one of these dtypes, and lives on `device`.
    `also`: axes and sizes that the caller allows besides; the message has both."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {no_tensor(tensor)}")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got {tensor.layout}")
    check_dtype(name, tensor.dtype, dtypes)
    if tensor.dim() != len(axes) or any(
        want is not None and got != want for got, want in zip(tensor.shape, sizes, strict=True)
    ):
        allowed = " or ".join(describe_shape(*shape) for shape in ((axes, sizes), also) if shape is not None)
        raise ValueError(f"{name} must have shape {allowed}, got {tuple(tensor.shape)}")
    if device is not None:
        check_device(name, tensor, device)


def check_device(name: str, tensor: Tensor, device: torch.device, of: str = "the state") -> None:
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, but {of} is on {device}")


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_choice(name: str, value: Any, choices: Sequence[str | None]) -> None:
    if not (value is None or isinstance(value, str)) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}")


def check_int(name: str, value: Any, smallest: int, largest: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if not smallest <= value <= largest:
        raise ValueError(f"{name} must be from {smallest} to {largest}, got {value}")


def check_number(name: str, value: Any) -> None:
    """Raise unless it is a number that is finite as float32, which is what kernels get."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not abs(value) <= LARGEST_FLOAT32:
        raise ValueError(f"{name} must be finite in float32, got {value}")


def checked_range(name: str, value: Any) -> tuple[float, float]:
    """Two numbers in order, either of which may be infinite; raises unless they are that."""
    pair = tuple(value) if isinstance(value, (tuple, list)) else ()
    if len(pair) != 2 or any(not isinstance(one, (int, float)) or isinstance(one, bool) for one in pair):
        raise TypeError(f"{name} must be two numbers, (lo, hi), got {value!r}")
    lo, hi = pair
    if not lo <= hi:  # or one of them is NaN
        raise ValueError(f"{name} must be (lo, hi) with lo <= hi, got {value!r}")
    if any(LARGEST_FLOAT32 < abs(one) < math.inf for one in pair):
        raise ValueError(f"{name} must be of numbers that are finite in float32 or infinite, got {value!r}")
    return float(lo) + 0.0, float(hi) + 0.0  # 0.0 of -0.0, which is equal to it


def check_row_contiguous(name: str, tensor: Tensor) -> None:
    """Raise unless consecutive elements of the last axis are neighbours in memory."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        got = f"got strides {tuple(tensor.stride())}; other axes may have any stride"
        raise ValueError(f"{name} must be contiguous along its last axis, {got}")


def check_no_overlap(name: str, tensor: Tensor) -> None:
    """Raise where two elements of a tensor share memory, as in an expanded one."""
    if too_short(tensor.stride(), tensor.shape, 1) is not None:
        raise ValueError(f"{name} must not overlap itself, got strides {tuple(tensor.stride())}")


def too_short(strides: Sequence[int], sizes: Sequence[int], reach: int) -> tuple[int, int] | None:
    """The first stride that is shorter than what lies within it, and how long that is; None if there is none. Axes that
    interleave count as too short. `reach`: elements that one entry of these axes spans."""
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1 and stride < reach:
            return stride, reach
        reach += (size - 1) * stride
    return None


def check_contiguous(name: str, tensor: Tensor, also: str = "") -> None:
    """Raise unless a tensor can be read without strides. `also`: what the caller allows besides."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous{also}, got strides {tuple(tensor.stride())}")


def tied(
    name: str, tensor: Any, few: Shape, more: Shape, device: torch.device,
    dtypes: Sequence[torch.dtype] = ACTIVATION_DTYPES,
) -> Tensor:  # fmt: skip
    """Check a tensor of few axes, or of more behind them; returned without those it was expanded along (stride 0)."""
    every = few[0] + more[0], few[1] + more[1]
    if not isinstance(tensor, Tensor) or tensor.dim() != len(every[0]):
        check_tensor(name, tensor, *few, dtypes=dtypes, device=device, also=every)
        return tensor
    check_tensor(name, tensor, *every, dtypes=dtypes, device=device, also=few)
    inner = tensor.stride()[len(few[0]) :]
    if any(size > 1 and stride != 0 for size, stride in zip(tensor.shape[len(few[0]) :], inner, strict=True)):
        return tensor
    for _ in inner:
        tensor = tensor[..., 0]
    return tensor


def check_list(
    name: str, numbers: Tensor | None, size: int, axis: str = "batch", device: torch.device | None = None
) -> None:
    """Raise unless it is None, or so many whole numbers side by side."""
    if numbers is not None:
        check_tensor(name, numbers, (axis,), (size,), dtypes=INDEX_DTYPES, device=device)
        check_contiguous(name, numbers)
