"""The windows of a pool: what convolutions keep per request, the last inputs of every channel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashstate.errors import ACTIVATION_DTYPES, check_int, check_no_overlap, check_tensor, dtype_name
from flashstate.ops.conv1d import LARGEST_WIDTH, SMALLEST_WIDTH
from flashstate.state.state import State

WINDOW_AXES = ("slots", "channels", "length")
LARGEST = (1 << 31) - 1


def allocate_windows(
    layers: int, slots: int, channels: int, width: int, drafts: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Windows of zeros, (layers, slots, length, channels), with room to roll back so many tokens; length 0 without
    channels."""
    check_int("conv_channels", channels, 0, LARGEST)
    check_int("conv_width", width, SMALLEST_WIDTH, LARGEST_WIDTH)
    check_int("drafts", drafts, 0, LARGEST)
    if drafts and not channels:
        raise ValueError(f"drafts are for windows: conv_channels must be given too, got drafts={drafts}")
    if dtype not in ACTIVATION_DTYPES:
        got = dtype_name(dtype) if isinstance(dtype, torch.dtype) else repr(dtype)
        raise TypeError(f"conv_dtype must be {' or '.join(map(dtype_name, ACTIVATION_DTYPES))}, got {got}")
    return torch.zeros(layers, slots, (width - 1 + drafts) if channels else 0, channels, dtype=dtype, device=device)


def check_windows(windows: Sequence[Tensor], states: Sequence[State], drafts: int) -> None:
    """Raise unless these can be the windows of layers that have these states, with room for so many drafts."""
    check_int("drafts", drafts, 0, LARGEST)
    if not isinstance(windows, Sequence) or len(windows) != len(states):
        got = len(windows) if isinstance(windows, Sequence) else type(windows).__name__
        raise ValueError(f"windows must be a sequence with one tensor per layer, {len(states)}, got {got}")
    first = states[0].data
    for i, window in enumerate(windows):
        name = f"windows[{i}]"
        check_tensor(name, window, WINDOW_AXES, (first.shape[0], None, None), device=first.device)
        if window.numel() == 0:
            raise ValueError(f"{name} must not be empty, got shape {tuple(window.shape)}")
        if window.shape[2] <= drafts:
            raise ValueError(f"{name} must have more than {drafts} entries, which drafts take, got {window.shape[2]}")
        check_no_overlap(name, window)


def with_history(window: Tensor, values: Tensor, drafts: int, count: int) -> Tensor:
    """Windows for so many slots that end with these inputs, (slots, channels, n): as long as `window`, zeros before
    them, and after them where drafts go. Raises unless `values` can be stored as they are."""
    exact = ACTIVATION_DTYPES if window.dtype is torch.float32 else (window.dtype,)
    axes = ("slots", "channels", "n")
    check_tensor("windows", values, axes, (count, window.shape[1], None), dtypes=exact, device=window.device)
    history = window.shape[2] - drafts
    if values.shape[2] > history:
        raise ValueError(f"windows must have {history} entries or fewer, got shape {tuple(values.shape)}")
    return torch.nn.functional.pad(values, (history - values.shape[2], drafts))
