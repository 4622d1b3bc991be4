"""Norms around mixers: torch's, and in a step that becomes a CUDA graph one launch of ours each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from flashstate.ops import norms

_for_graph: ContextVar[bool] = ContextVar("steps for a graph", default=False)


@contextmanager
def for_graph() -> Iterator[None]:
    """Let norms inside be what costs the GPU least, whatever they cost the host."""
    before = _for_graph.set(True)
    try:
        yield
    finally:
        _for_graph.reset(before)


def is_for_graph() -> bool:
    """Whether the host's time does not count; while torch.compile traces, it cannot be asked."""
    return not torch.compiler.is_compiling() and _for_graph.get()


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
