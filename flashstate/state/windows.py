"""The windows of a pool: what convolutions keep per request, the last inputs of every channel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashstate.errors import ACTIVATION_DTYPES, check_int, check_no_overlap, check_tensor, dtype_name
from flashstate.state.state import State

WINDOW_AXES = ("slots", "channels", "length")
LARGEST = (1 << 31) - 1


def allocate_windows(
    layers: int, slots: int, channels: int, width: int, drafts: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Windows of zeros, (layers, slots, length, channels), with room to roll back so many tokens; length 0 without
    channels."""
    check_int("conv_channels", channels, 0, LARGEST)
    check_int("conv_width", width, 2, 6)
    check_int("drafts", drafts, 0, LARGEST)
    if dtype not in ACTIVATION_DTYPES:
        got = dtype_name(dtype) if isinstance(dtype, torch.dtype) else repr(dtype)
        raise TypeError(f"conv_dtype must be {' or '.join(map(dtype_name, ACTIVATION_DTYPES))}, got {got}")
    return torch.zeros(layers, slots, (width - 1 + drafts) if channels else 0, channels, dtype=dtype, device=device)


def check_windows(windows: Sequence[Tensor], states: Sequence[State]) -> None:
    """Raise unless these can be the windows of layers that have these states."""
    if not isinstance(windows, Sequence) or len(windows) != len(states):
        got = len(windows) if isinstance(windows, Sequence) else type(windows).__name__
        raise ValueError(f"windows must be a sequence with one tensor per layer, {len(states)}, got {got}")
    first = states[0].data
    for i, window in enumerate(windows):
        name = f"windows[{i}]"
        check_tensor(name, window, WINDOW_AXES, (first.shape[0], None, None), device=first.device)
        if window.numel() == 0:
            raise ValueError(f"{name} must not be empty, got shape {tuple(window.shape)}")
        check_no_overlap(name, window)


def check_written(window: Tensor, values: Tensor, count: int) -> None:
    """Raise unless `values` (slots, channels, n) can go into so many slots as they are."""
    exact = ACTIVATION_DTYPES if window.dtype is torch.float32 else (window.dtype,)
    axes = ("slots", "channels", "n")
    check_tensor("windows", values, axes, (count, window.shape[1], None), dtypes=exact, device=window.device)
    if values.shape[2] > window.shape[2]:
        raise ValueError(f"windows must have {window.shape[2]} entries or fewer, got shape {tuple(values.shape)}")
