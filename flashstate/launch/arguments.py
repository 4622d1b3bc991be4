"""Tensors as kernels take them: a pointer with the strides that belong to it, in one tuple."""

from __future__ import annotations

import torch
from torch import Tensor

from flashstate.launch.config import ACCESS_BYTES

TokenView = tuple[Tensor, int, int, int]
StateView = tuple[Tensor, Tensor | None, int, int]
Table = tuple[Tensor, int]


def token_view(tensor: Tensor, token_axes: int, packed: bool) -> TokenView:
    """A tensor (batch, heads, ...), (batch, T, heads, ...) or packed (tokens, heads, ...), and its strides."""
    strides = tensor.stride()
    if token_axes == 2:
        return tensor, strides[0], strides[1], strides[2]
    return (tensor, 0, strides[0], strides[1]) if packed else (tensor, strides[0], 0, strides[1])


def state_view(data: Tensor, scale: Tensor | None) -> StateView:
    """A state and its scales, with the slot strides of both; float8 as the bytes it is."""
    return as_bytes(data), scale, data.stride(0), 0 if scale is None else scale.stride(0)


def snapshots_view(
    data: Tensor | None, scale: Tensor | None
) -> tuple[Tensor | None, Tensor | None, int, int, int, int]:
    """Snapshots and their scales, with the row strides and the token strides of both; all nothing without data."""
    if data is None:
        return None, None, 0, 0, 0, 0
    scale_strides = (0, 0) if scale is None else scale.stride()[:2]
    return as_bytes(data), scale, data.stride(0), scale_strides[0], data.stride(1), scale_strides[1]


def as_bytes(data: Tensor) -> Tensor:
    return data.view(torch.uint8) if data.dtype is torch.float8_e4m3fn else data


def table(entries: Tensor | None) -> Table | None:
    """A table of numbers per batch row, with its row stride."""
    return None if entries is None else (entries, entries.stride(0))


def read_table(read: Tensor | None, accepted: Tensor | None) -> tuple[Tensor | None, int, int, Tensor | None]:
    """The slots to read: their table, its row stride and width, and the accepted counts that choose a column."""
    if read is None:
        return None, 0, 1, None
    return read, read.stride(0), 1 if read.dim() == 1 else read.shape[1], accepted


def aligned(tensor: Tensor | None) -> bool:
    """Whether every row of a tensor starts at a multiple of 16 bytes, so that it can be read in wide accesses."""
    if tensor is None:
        return True
    outer = (stride * tensor.element_size() for stride in tensor.stride()[:-1])
    return not (tensor.data_ptr() % ACCESS_BYTES or any(step % ACCESS_BYTES for step in outer))
