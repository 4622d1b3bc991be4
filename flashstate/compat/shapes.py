"""What the doors share: head axes, strides that ops do not take, and tables with more than they read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashstate.errors import INDEX_DTYPES, check_int, check_tensor


def with_axes(name: str, tensor: Any, fewest: int, rank: int, axis: int = 1) -> Tensor:
    """A tensor of `fewest` axes or more, with axes of one put in at `axis` until it has that rank."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dim() < fewest:
        raise ValueError(f"{name} must have {fewest} axes or more, got shape {tuple(tensor.shape)}")
    while tensor.dim() < rank:
        tensor = tensor.unsqueeze(axis)
    return tensor


def step_tensors(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None,
    rank: int = 3,
) -> dict[str, Any]:  # fmt: skip
    """The tensors of mamba2_step that are there: activations of this rank, all with a head axis, in strides that it
    takes. What has others is copied."""
    activations = {"x": x, "dt": dt, "B": B, "C": C}
    if z is not None:
        activations["z"] = z
    tensors = {}
    for name, tensor in activations.items():
        tensor = with_axes(name, tensor, 2, rank)
        per_head = name == "dt" and is_one_value(tensor, 1)
        tensors[name] = tensor if per_head else rows_contiguous(tensor)
    tensors["A"] = per_head_or_contiguous(with_axes("A", A, 2, 3, axis=0), 2)
    for name, parameter in (("D", D), ("dt_bias", dt_bias)):
        if parameter is not None:
            tensors[name] = per_head_or_contiguous(with_axes(name, parameter, 1, 2, axis=0), 1)
    return tensors


def with_these_axes(name: str, tensor: Any, *axes: str) -> Tensor:
    """The tensor, if it has so many axes; their sizes are left to the op."""
    if not isinstance(tensor, Tensor) or tensor.dim() != len(axes):
        check_tensor(name, tensor, axes, (None,) * len(axes))
    return tensor


def delta_tensors(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor
) -> dict[str, Any]:
    """The tensors of gated_delta_step for a decay per token and head, with both token axes, in strides that it takes.
    What has others is copied."""
    return {
        "q": rows_contiguous(with_these_axes("q", q, "B", "T", "H", "K")),
        "k": rows_contiguous(with_these_axes("k", k, "B", "T", "H", "K")),
        "v": rows_contiguous(with_these_axes("v", v, "B", "T", "HV", "V")),
        "a": with_these_axes("a", a, "B", "T", "HV"),
        "b": b,
        "A_log": with_these_axes("A_log", A_log, "HV").contiguous(),
        "dt_bias": with_these_axes("dt_bias", dt_bias, "HV").contiguous(),
    }


def is_one_value(tensor: Tensor, axes: int) -> bool:
    """Whether all entries of the last axes are one value in memory."""
    sizes, strides = tensor.shape[-axes:], tensor.stride()[-axes:]
    return all(size <= 1 or stride == 0 for size, stride in zip(sizes, strides, strict=True))


def rows_contiguous(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it whose entries of the last axis are neighbours in memory."""
    return tensor if tensor.shape[-1] <= 1 or tensor.stride(-1) == 1 else tensor.contiguous()


def per_head_or_contiguous(tensor: Tensor, axes: int) -> Tensor:
    """A parameter (heads, ...) without its last axes where they are one value, else contiguous."""
    if tensor.numel() and tensor.dim() == 1 + axes and is_one_value(tensor, axes):
        for _ in range(axes):
            tensor = tensor[..., 0]
    return tensor.contiguous()


def room_for_output(x: Tensor, out: Tensor | None = None) -> Tensor | None:
    """Where outputs go that are like x, which has all its axes: `out`, or new memory, because a call that brings its
    own can start as one before it did. Under torch.compile, which cannot check it, None."""
    if out is not None:
        return with_axes("out", out, 2, x.dim())
    return None if torch.compiler.is_compiling() else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def batch_of(x: Tensor, cu_seqlens: Tensor | None) -> int:
    """How many rows the batch has."""
    if cu_seqlens is None:
        return x.shape[0]
    check_tensor("cu_seqlens", cu_seqlens, ("batch + 1",), (None,), dtypes=INDEX_DTYPES)
    if len(cu_seqlens) == 0:
        raise ValueError("cu_seqlens must have shape (batch + 1), got (0,)")
    return len(cu_seqlens) - 1


def check_slot(name: str, slot: Any) -> None:
    check_int(name, slot, -(1 << 63), (1 << 63) - 1)


def list_of(name: str, numbers: Any, batch: int) -> Tensor:
    """The first numbers of a list that has one or more for every row of the batch."""
    check_tensor(name, numbers, ("batch",), (None,), dtypes=INDEX_DTYPES)
    if len(numbers) < batch:
        raise ValueError(f"{name} must have {batch} entries or more, got shape {tuple(numbers.shape)}")
    return numbers[:batch]


def table_of(name: str, numbers: Any, batch: int, columns: int = 1) -> Tensor:
    """The first rows of a table (batch or more, columns or more); a list is a table of one column."""
    if isinstance(numbers, Tensor) and numbers.dim() == 1:
        numbers = numbers[:, None]
    check_tensor(name, numbers, ("batch", "n"), (None, None), dtypes=INDEX_DTYPES, also=(("batch",), (None,)))
    if numbers.shape[0] < batch or numbers.shape[1] < columns:
        least = f"{batch} rows and {columns} columns"
        raise ValueError(f"{name} must have {least} or more, got shape {tuple(numbers.shape)}")
    return rows_contiguous(numbers[:batch])


_numbers: dict[tuple[int, torch.device], Tensor] = {}


def slot_numbers(state: Tensor) -> Tensor:
    """0, 1, 2, … for the slots of a pool. Kept from the first call on, so that later ones make nothing."""
    key = state.shape[0], state.device
    numbers = None if torch.compiler.is_compiling() else _numbers.get(key)
    if numbers is None:
        numbers = torch.arange(state.shape[0], device=state.device)
        capturing = state.is_cuda and torch.cuda.is_current_stream_capturing()  # then nothing is in it yet
        if not capturing and not torch.compiler.is_compiling():
            _numbers[key] = numbers
    return numbers


def own_slots(state: Tensor, batch: int) -> Tensor:
    """The slots of a batch that names none: row b is slot b."""
    if batch > state.shape[0]:
        raise ValueError(f"state_batch_indices must be given for a batch of {batch} on {state.shape[0]} slots")
    return slot_numbers(state)[:batch]


def activation_of(activation: Any) -> str | None:
    """What conv1d_step calls the activation that others call silu, swish or True."""
    if activation is None or activation is False:
        return None
    if activation is True or activation in ("silu", "swish"):
        return "silu"
    raise ValueError(f"activation must be silu, swish, True, False or None, got {activation!r}")


def contiguous(tensor: Any) -> Any:
    """The tensor, or a contiguous copy of it; what is no tensor as it is, for the op to refuse."""
    return tensor.contiguous() if isinstance(tensor, Tensor) else tensor


def tokens_last_to_first(name: str, tensor: Tensor) -> Tensor:
    """Channels (batch, channels, tokens) as conv1d_step has them, (batch, tokens, channels), and the other way round;
    one token as it is."""
    if tensor.dim() > 3:
        raise ValueError(f"{name} must have shape (batch, dim) or (batch, dim, seqlen), got {tuple(tensor.shape)}")
    return tensor.transpose(1, 2) if tensor.dim() == 3 else tensor
