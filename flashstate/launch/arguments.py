"""What kernels are told of tensors besides their addresses: strides, and whether accesses are aligned."""

from __future__ import annotations

import torch
from torch import Tensor

from flashstate.state.signature import ACCESS_BYTES


def token_strides(tensor: Tensor | None, token_axes: int, packed: bool, inner: int = 1) -> tuple[int, ...]:
    """Batch stride, token stride, and those of `inner` more axes, such as heads, of a tensor (batch, heads, ...),
    (batch, T, heads, ...) or packed (tokens, heads, ...)."""
    if tensor is None:
        return (0,) * (2 + inner)
    strides = tensor.stride()
    of_tokens = strides[:2] if token_axes == 2 else (0, strides[0]) if packed else (strides[0], 0)
    return (*of_tokens, *strides[token_axes : token_axes + inner])


def outer_strides(data: Tensor | None, scale: Tensor | None, axes: int) -> tuple[int, ...]:
    """The strides of the first axes of a state or of snapshots: of each axis in the data, then in the scales."""
    of_data, of_scale = ((0,) * axes if t is None else t.stride()[:axes] for t in (data, scale))
    return tuple(stride for both in zip(of_data, of_scale, strict=True) for stride in both)


def as_bytes(data: Tensor) -> Tensor:
    """float8 as the bytes it is."""
    return data.view(torch.uint8) if data.dtype is torch.float8_e4m3fn else data


def row_stride(table: Tensor | None) -> int:
    """Of a table of numbers per batch row."""
    return 0 if table is None else table.stride(0)


def table_shape(table: Tensor | None) -> tuple[int, int]:
    """Row stride and width of a table of numbers per batch row."""
    return row_stride(table), 1 if table is None or table.dim() == 1 else table.shape[1]


def aligned(tensor: Tensor | None) -> bool:
    """Whether every row of a tensor starts at a multiple of 16 bytes, so that it can be read in wide accesses."""
    if tensor is None:
        return True
    outer = (stride * tensor.element_size() for stride in tensor.stride()[:-1])
    return not (tensor.data_ptr() % ACCESS_BYTES or any(step % ACCESS_BYTES for step in outer))


def row_alignment(tensor: Tensor) -> int:
    """Bytes that all rows of a tensor start at multiples of, as far as it matters: 16 or 1; 0 if the entries of a row
    are not neighbours."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        return 0
    return ACCESS_BYTES if aligned(tensor) else 1
