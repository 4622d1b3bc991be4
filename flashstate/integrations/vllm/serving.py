"""Which layer of vLLM is running on flashstate, and what its calls become."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from flashstate.integrations.reports import failure
from flashstate.integrations.vllm.options import Options
from flashstate.integrations.vllm.pages import PagedState, data_and_scale
from flashstate.state.state import State

Function = Callable[..., Any]


class Seeds:
    """One seed of stochastic rounding for all layers of a model, drawn anew when a step of the model begins.

    first: the layer that begins a step. A CUDA graph that captured it draws another seed at every replay.
    """

    def __init__(self, first: str) -> None:
        self.first = first
        self.seed = torch.zeros((), dtype=torch.int64)  # where vLLM makes the parameters of the layer

    def of(self, layer: str, device: torch.device) -> Tensor:
        """The seed for a call of this layer on this device, () int64."""
        if self.seed.device != device:  # of a model that was made elsewhere
            self.seed = torch.zeros((), dtype=torch.int64, device=device)
        return self.seed.random_() if layer == self.first else self.seed


class Serving:
    """A layer that runs on flashstate.

    name: of the layer, in messages.
    options: how its states are stored.
    stream: tells its random bits from those of other layers and ranks.
    """

    def __init__(self, name: str, options: Options, stream: int, seeds: Seeds) -> None:
        self.name, self.options, self.stream, self.seeds = name, options, stream, seeds

    def state_in(self, pages: Tensor | PagedState) -> State:
        """The state in the pages of this layer, rounded as its options say. It is not kept: vLLM gives a layer other
        pages while it measures memory, and wants them back."""
        if isinstance(pages, PagedState):
            return pages.state
        rounding = self.options.rounding
        seed = None if rounding == "nearest" else self.seeds.of(self.name, pages.device)
        data, scale = data_and_scale(pages if pages.dim() == 4 else pages[:, None])
        return State(data, scale, rounding=rounding, rounds=self.options.rounds, seed=seed, stream=self.stream)

    def with_state(self, function: Function, argument: str | None) -> Function:
        """A function that gets the state in place of the pages in this argument, if it has such an argument."""
        if argument is None:
            return function
        return lambda *args, **more: function(*args, **{**more, argument: self.state_in(more[argument])})

    def call(self, name: str, function: Function, *args: Any, **more: Any) -> Any:
        """Call a function of flashstate; an error says for which layer and in place of which call of vLLM."""
        try:
            return function(*args, **more)
        except Exception as error:
            raise failure(name, f"layer {self.name!r}", error) from error


_current: ContextVar[Serving | None] = ContextVar("flashstate_serving", default=None)


def current() -> Serving | None:
    """The layer that is running on flashstate, if one is."""
    return _current.get()


@contextmanager
def running(layer: Serving) -> Iterator[None]:
    """Let calls of vLLM inside of this be answered by flashstate, for this layer."""
    token = _current.set(layer)
    try:
        yield
    finally:
        _current.reset(token)


def answered(name: str, stock: Function, ours: Function, state: str | None = None) -> Function:
    """A function that is `ours` while a layer runs on flashstate, and `stock` otherwise.

    state: the name of the argument that has the layer's states.
    """

    @functools.wraps(stock)
    def answer(*args: Any, **more: Any) -> Any:
        layer = current()
        if layer is None:
            return stock(*args, **more)
        return layer.call(name, layer.with_state(ours, state), *args, **more)

    return answer
