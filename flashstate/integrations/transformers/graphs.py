"""Graphs: the decode step of a model as CUDA graphs, one for every shape of its inputs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import proxy

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flashstate.integrations.transformers.mixers.rms import lean

if TYPE_CHECKING:
    from flashstate.integrations.transformers.cache import StateCache

DEVICES = ("cuda",)  # types of devices that have graphs
WAITING = ("glm5_next", "glm5_next_text")  # types of models whose attention lets the host wait for the GPU
MOST_GRAPHS = 64  # that a cache keeps; the oldest goes
UNGRAPHED = ("output_hidden_states", "output_attentions", "labels")  # arguments whose results outlive a step


class Graphs:
    """The CUDA graphs of one cache. The first call of a shape runs as it is, which compiles what it needs; the second
    is captured; from then on a call copies its inputs, replays the graph, and copies its outputs."""

    def __init__(self, cache: StateCache) -> None:
        self.cache: Any = proxy(cache)  # so that nothing but its user holds a cache, and its memory goes with it
        self.graphs: dict[Hashable, Graph | None] = {}
        self.pool: Any = None  # of memory, which all graphs share
        self.weights: list[tuple[int, int]] = []  # where those of graphs are, and how often they were written
        self.whole: bool | None = None  # whether the model is on one device; None: not looked up yet

    def clear(self) -> None:
        """Forget all graphs: what they were captured with has moved."""
        self.graphs.clear()
        self.whole = None

    def watch(self, model: nn.Module) -> None:
        """Forget all graphs if weights of the model have moved, or were written, since they were captured."""
        weights = [(weight.data_ptr(), written(weight)) for weight in model.parameters()]
        if self.weights and weights != self.weights:
            self.clear()
        self.weights = weights

    def can_run(self, model: Any, given: dict[str, Any]) -> bool:
        """Whether a call with these arguments is a step that a graph can be."""
        cache, tokens = self.cache, given.get("input_ids")
        if model.config.model_type in WAITING:
            return False
        if not isinstance(tokens, Tensor) or tokens.device.type not in DEVICES or not cache.is_compileable:
            return False
        steps = cache.batch is not None and tokens.shape[1] <= cache.format.drafts + 1
        asked = (given.get(name) or getattr(model.config, name, False) for name in UNGRAPHED)
        plain = not any(asked) and not any(cache.is_sliding)
        busy = cache.call is not None or torch.is_grad_enabled() or torch.cuda.is_current_stream_capturing()
        return steps and plain and not busy and self.on_one_device(model)

    def on_one_device(self, model: Any) -> bool:
        """Whether all of a model is on one device, and none of it offloaded: else hooks move things in every call."""
        if self.whole is None:
            self.whole = len({parameter.device for parameter in model.parameters()}) == 1
        return self.whole

    def run(self, model: Any, forward: Callable[..., Any], name: str, given: dict[str, Any]) -> Any:
        """forward(model, **given), captured or replayed where this shape was there before; `name` is the argument, and
        the output, that is the cache."""
        kept = given.pop(name)
        leaves, tree = pytree.tree_flatten(given)
        mode = model, model.training, torch.is_autocast_enabled("cuda")
        key = (*mode, tree, *(described(leaf) for leaf in leaves))
        if key not in self.graphs:
            if len(self.graphs) == MOST_GRAPHS:
                del self.graphs[next(iter(self.graphs))]
            self.graphs[key] = None
            with as_captured(model):
                return forward(model, **given, **{name: kept})
        kept.settle()
        graph = self.graphs[key]
        if graph is None:
            self.watch(model)
            step = Step(partial(forward, model), name, tree)
            with as_captured(model):
                graph = self.graphs[key] = Graph(step, kept, leaves, self.pool)
            self.pool = graph.graph.pool()
        kept.use.begun = True
        outputs = graph.replay(leaves)
        kept.called(graph.call)
        outputs[name] = kept
        return outputs


class Step:
    """A call of a model whose arguments are leaves of a tree."""

    def __init__(self, forward: Callable[..., Any], name: str, tree: Any) -> None:
        self.forward, self.name, self.tree = forward, name, tree

    def __call__(self, kept: StateCache, leaves: list[Any]) -> Any:
        """Its outputs, without the cache."""
        outputs = self.forward(**pytree.tree_unflatten(leaves, self.tree), **{self.name: kept})
        return type(outputs)({key: value for key, value in outputs.items() if value is not kept})


class Graph:
    """One captured step, the tensors it reads its inputs from, and its outputs."""

    def __init__(self, step: Step, kept: StateCache, leaves: list[Any], pool: Any) -> None:
        self.inputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.graph = torch.cuda.CUDAGraph()
        with no_collection(), torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self.outputs = step(kept, self.inputs)
        self.call = kept.latest

    def replay(self, leaves: list[Any]) -> Any:
        """Run it on other inputs of the same shapes."""
        for mine, leaf in zip(self.inputs, leaves, strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(leaf)
        self.graph.replay()
        return type(self.outputs)({name: pytree.tree_map(copied, value) for name, value in self.outputs.items()})


@contextmanager
def no_collection() -> Iterator[None]:
    """Let no garbage be collected inside: a capture must not meet memory that is freed, of another graph say."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def as_captured(model: Any) -> Iterator[None]:
    """Run a step inside as a graph runs it: experts in a way that does not wait for their numbers, norms as one kernel
    each."""
    with model._optimize_model_for_decode(), lean(for_graph=True):
        yield


def copied(output: Any) -> Any:
    """An output of a graph, kept from its next replay."""
    return output.clone() if isinstance(output, Tensor) else output


def written(weight: Tensor) -> int:
    """How often a weight was written, as far as torch counts it."""
    return 0 if weight.is_inference() else weight._version


def described(leaf: Any) -> Hashable:
    """What a graph depends on of an argument: all but the contents of a tensor."""
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf
