"""Norms of models that decode: torch's, one kernel each, and in a step that becomes a CUDA graph one launch of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from flashstate.ops import norms

STOCK, LEAN, FOR_GRAPH = range(3)  # as Transformers writes them out; one kernel; the kernel that costs a GPU least
_norms: ContextVar[int] = ContextVar("norms", default=STOCK)


@contextmanager
def lean(wanted: bool = True, for_graph: bool = False) -> Iterator[None]:
    """Let norms of a model inside be one kernel each, if that is wanted and gradients are not; `for_graph`: the kernel
    that costs the GPU least, whatever it costs the host."""
    before = _norms.set((FOR_GRAPH if for_graph else LEAN) if wanted and not torch.is_grad_enabled() else STOCK)
    try:
        yield
    finally:
        _norms.reset(before)


def is_lean() -> bool:
    """Whether norms of a model are one kernel each; what torch.compile traces has them as Transformers writes them."""
    return not torch.compiler.is_compiling() and _norms.get() != STOCK


def is_for_graph() -> bool:
    """Whether norms may cost the host what they like."""
    return not torch.compiler.is_compiling() and _norms.get() == FOR_GRAPH


def rms(
    x: Tensor, weight: Tensor, eps: float, gate: Tensor | None = None, activation: Callable[[Tensor], Tensor] = silu
) -> Tensor:
    """The norm of every head, x: (..., heads, n), and behind it activation(gate), which is silu or sigmoid, if there is
    a gate, (..., heads, n); weight: (n,) or (heads, n)."""
    if is_for_graph():
        gates = None if gate is None else gate.flatten(0, -3)
        return norms.rms_norm(x.flatten(0, -3), weight, eps, gates, silu=activation is silu).view(x.shape)
    y = rms_norm(x, x.shape[-1:], weight if weight.dim() == 1 else None, eps)
    y = y if weight.dim() == 1 else y * weight
    return y if gate is None else y * activation(gate)
