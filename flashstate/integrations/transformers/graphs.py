"""Graphs: the decode step of a model as CUDA graphs, one for every shape of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from flashstate.integrations.transformers.cache import StateCache

UNGRAPHED = ("output_hidden_states", "output_attentions", "labels")  # arguments whose results outlive a step


class Graphs:
    """The CUDA graphs of one cache. The first call of a shape runs as it is, which compiles what it needs; the second
    is captured; from then on a call copies its inputs and replays the graph. Outputs stay until the next call."""

    def __init__(self, cache: StateCache) -> None:
        self.cache = cache
        self.graphs: dict[Hashable, Graph | None] = {}
        self.pool: Any = None  # of memory, which all graphs share

    def clear(self) -> None:
        """Forget all graphs: what they were captured with has moved."""
        self.graphs.clear()

    def can_run(self, given: dict[str, Any]) -> bool:
        """Whether a call with these arguments is a step that a graph can be."""
        cache, tokens = self.cache, given.get("input_ids")
        if not isinstance(tokens, Tensor) or tokens.device.type != "cuda" or not cache.is_compileable:
            return False
        steps = cache.batch is not None and tokens.shape[1] <= cache.format.drafts + 1
        plain = not any(given.get(name) for name in UNGRAPHED) and not any(cache.is_sliding)
        busy = torch.is_grad_enabled() or torch.cuda.is_current_stream_capturing()
        return steps and plain and not busy and len(cache.stores) == 1

    def run(self, model: Any, forward: Callable[..., Any], given: dict[str, Any]) -> Any:
        """forward(model, **given), captured or replayed where this shape was there before."""
        leaves, tree = pytree.tree_flatten(given)
        key = (tree, *(described(leaf) for leaf in leaves))
        if key not in self.graphs:
            self.graphs[key] = None
            return forward(model, **given)
        self.cache.settle()
        graph = self.graphs[key]
        if graph is None:
            graph = self.graphs[key] = Graph(self, model, forward, leaves, tree)
        return graph.replay(leaves)


class Graph:
    """One captured call, the tensors it reads its inputs from, and its outputs."""

    def __init__(self, graphs: Graphs, model: Any, forward: Callable[..., Any], leaves: list[Any], tree: Any) -> None:
        self.cache = graphs.cache
        self.inputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=graphs.pool):
            self.outputs = forward(model, **pytree.tree_unflatten(self.inputs, tree))
        graphs.pool = graphs.pool or self.graph.pool()
        self.call = self.cache.latest

    def replay(self, leaves: list[Any]) -> Any:
        """Run it on other inputs of the same shapes."""
        for mine, leaf in zip(self.inputs, leaves, strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(leaf)
        self.graph.replay()
        self.cache.called(self.call)
        return type(self.outputs)(self.outputs)


def described(leaf: Any) -> Hashable:
    """What a graph depends on of an argument: all but the contents of a tensor."""
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf
