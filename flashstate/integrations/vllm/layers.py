"""Layers of vLLM whose calls flashstate answers: subclasses, made of the classes that vLLM has."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flashstate.errors import dtype_name
from flashstate.integrations.vllm.options import Options
from flashstate.integrations.vllm.pages import PagedState, widened
from flashstate.integrations.vllm.serving import Seeds, Serving, current, running


@dataclasses.dataclass(frozen=True)
class Kind:
    """What the plugin has to know of a class of layers.

    methods: those that step states.
    scaled: whether prefill of such layers takes states that are no tensor, so that int8, int16 and float8 work.
    cuda: whether vLLM runs other methods on anything but GPUs of NVIDIA.
    settings: attributes that choose between ways to decode, and what they must be.
    """

    methods: tuple[str, ...]
    scaled: bool = False
    cuda: bool = False
    settings: tuple[tuple[str, Any], ...] = ()


class Served:
    """A layer that runs on flashstate; the other base class is the one that vLLM has."""

    kind: Kind
    prefix: str  # the layer's name, which vLLM sets
    kv_cache: tuple[Any, ...]  # its pages, which vLLM sets
    served: Serving | None = None  # until it is initialised
    checkpoints = True

    def serve(self, options: Options, rank: int, ranks: int, others: list[Served], checkpoints: bool) -> None:
        """Begin to run on flashstate, as one of `ranks` that share heads, beside other layers of the model.

        checkpoints: whether prefill can store a second state on its way, at a boundary of the prefix cache. vLLM does
        that by a kernel that takes tensors alone; where it cannot, it ends prefills at such boundaries.
        """
        if options.scaled and not self.kind.scaled:
            kept = f"the states of layer {self.prefix!r}, a {type(self).__name__}, cannot have scales in vLLM"
            raise ValueError(f"{kept}: leave out state={dtype_name(options.dtype)!r}")  # type: ignore[arg-type]
        seeds = others[0].served.seeds if others and others[0].served else Seeds(self.prefix)
        self.served = Serving(self.prefix, options, len(others) * ranks + rank, seeds)
        self.checkpoints = checkpoints and not options.scaled
        for setting, value in self.kind.settings:
            if hasattr(self, setting):
                setattr(self, setting, value)

    def get_state_shape(self) -> Any:
        """The shapes of the layer's states, with room for scales."""
        return with_room_for_scales(super().get_state_shape(), self.options)  # type: ignore[misc]

    def get_state_dtype(self) -> Any:
        """The dtypes of the layer's states; while it runs, those that prefill works with."""
        dtypes = super().get_state_dtype()  # type: ignore[misc]
        if current() is not None and self.options.scaled:
            return (*dtypes[:-1], PagedState.dtype)
        return with_dtype(dtypes, self.options)

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """What vLLM keeps for this layer."""
        spec = super().get_kv_cache_spec(vllm_config)  # type: ignore[misc]
        if self.checkpoints or not getattr(spec, "num_prefill_checkpoint_blocks", None):
            return spec
        return dataclasses.replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)

    @property
    def options(self) -> Options:
        return Options() if self.served is None else self.served.options

    @contextmanager
    def on_flashstate(self) -> Iterator[None]:
        """Let flashstate answer the calls of this layer, and show scaled states as what prefill can index."""
        if self.served is None:
            raise RuntimeError(f"{type(self).__name__} runs before it is initialised")
        pages = self.kv_cache
        with running(self.served):
            bound = isinstance(pages[-1], Tensor) and pages[-1].dim() == 4
            if self.options.scaled and bound:
                self.kv_cache = (*pages[:-1], PagedState(self.served.state_in(pages[-1])))
            try:
                yield
            finally:
                self.kv_cache = pages


def with_room_for_scales(shapes: Sequence[tuple[int, ...]], options: Options) -> tuple[tuple[int, ...], ...]:
    """The shapes of a layer's tensors, of which the last is its state; the first is of its convolution."""
    if options.dtype is None or len(shapes) < 2:
        return tuple(shapes)
    return (*shapes[:-1], widened(shapes[-1], options.dtype))


def with_dtype(dtypes: Sequence[torch.dtype], options: Options) -> tuple[torch.dtype, ...]:
    """The dtypes of a layer's tensors, of which the last is its state; the first is of its convolution."""
    return tuple(dtypes) if options.dtype is None or len(dtypes) < 2 else (*dtypes[:-1], options.dtype)


def subclass(base: type, kind: Kind, begin: Callable[[Any], None]) -> type:
    """A class of layers that run on flashstate. begin: called with a layer that vLLM has initialised."""

    def initialise(self: Any, *args: Any, **more: Any) -> None:
        base.__init__(self, *args, **more)  # type: ignore[misc]
        begin(self)

    methods = {name: _on_flashstate(getattr(base, name)) for name in kind.methods if hasattr(base, name)}
    return type(f"Flashstate{base.__name__}", (Served, base), {"kind": kind, "__init__": initialise, **methods})


def _on_flashstate(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def method(self: Served, *args: Any, **more: Any) -> Any:
        with self.on_flashstate():
            return stock(self, *args, **more)

    return method
