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
from flashstate.integrations.vllm.kinds import Kind
from flashstate.integrations.vllm.options import Options
from flashstate.integrations.vllm.pages import PagedState, widened
from flashstate.integrations.vllm.serving import Function, Serving, current, running
from flashstate.state.formats import FORMATS

PREFILL = "prefill"  # what errors call what prefill does to states that it finds in float32


class Served:
    """A layer that runs on flashstate; the other base class is the one that vLLM has."""

    kind: Kind
    prefix: str  # the layer's name, which vLLM sets
    kv_cache: tuple[Any, ...]  # its pages, which vLLM sets
    served: Serving | None = None  # until it is initialised
    shows_float32 = False  # whether prefill finds float32 states in place of those in its pages
    checkpoints = True

    def serve(self, serving: Serving, model_dtype: torch.dtype, checkpoints: bool) -> None:
        """Begin to run on flashstate.

        checkpoints: whether prefill can store a second state on its way, at a boundary of the prefix cache. vLLM does
        that by a kernel that takes tensors alone; where it cannot, it ends prefills at such boundaries.
        """
        self.served = serving
        self._check_format(model_dtype)
        stores_float32 = self.get_state_dtype()[-1] == PagedState.dtype
        self.shows_float32 = serving.options.scaled or (self.kind.float32_prefill and not stores_float32)
        self.checkpoints = checkpoints and not self.shows_float32
        for setting, value in self.kind.settings:
            if hasattr(self, setting):
                setattr(self, setting, value)

    def _check_format(self, model_dtype: torch.dtype) -> None:
        """Raise where options would be lost, and where prefill or the format cannot do what they ask for."""
        dtypes, options = self.get_state_dtype(), self.options
        if len(dtypes) == 1:
            if options.dtype is not None or options.rounding != "nearest":
                kept = f"layer {self.prefix!r} has no state but that of its convolution"
                raise ValueError(f"{kept}: leave out state and stochastic rounding")
            return
        name = dtype_name(dtypes[-1])
        if not self.kind.every_format and dtypes[-1] not in (torch.float32, model_dtype):
            known = " or ".join(dict.fromkeys(("float32", dtype_name(model_dtype))))
            raise ValueError(f"vLLM cannot prefill layer {self.prefix!r} with states of {name}: they must be {known}")
        if options.rounding not in FORMATS[dtypes[-1]].roundings:
            raise ValueError(f"rounding={options.rounding!r} is not for {name}, the states of layer {self.prefix!r}")

    def get_state_shape(self) -> Any:
        """The shapes of the layer's states, with room for scales."""
        return with_room_for_scales(super().get_state_shape(), self.options)  # type: ignore[misc]

    def get_state_dtype(self) -> Any:
        """The dtypes of the layer's states; while it runs, those that prefill works with."""
        dtypes = with_dtype(super().get_state_dtype(), self.options)  # type: ignore[misc]
        return (*dtypes[:-1], PagedState.dtype) if current() is not None and self.shows_float32 else dtypes

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """What vLLM keeps for this layer."""
        spec = super().get_kv_cache_spec(vllm_config)  # type: ignore[misc]
        if self.checkpoints or not getattr(spec, "num_prefill_checkpoint_blocks", None):
            return spec
        return dataclasses.replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)

    def get_prefill_checkpoint_alignment(self) -> int | None:
        """Return the token alignment of states that prefill stores on its way, or None; vLLM asks since 0.33."""
        return super().get_prefill_checkpoint_alignment() if self.checkpoints else None  # type: ignore[misc]

    @property
    def options(self) -> Options:
        """How its states are stored; as vLLM does it until it is initialised."""
        return Options() if self.served is None else self.served.options

    @contextmanager
    def on_flashstate(self) -> Iterator[None]:
        """Let flashstate answer the calls of this layer, and show states as what prefill can index."""
        if self.served is None:
            raise RuntimeError(f"{type(self).__name__} runs before it is initialised")
        pages = self.kv_cache
        with running(self.served):
            bound = bool(pages) and isinstance(pages[-1], Tensor) and pages[-1].dim() == 4
            if self.shows_float32 and bound:
                state = self.served.call(PREFILL, self.served.state_in, pages[-1])
                self.kv_cache = (*pages[:-1], PagedState(state, functools.partial(self.served.call, PREFILL)))
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


def subclass(base: type, kind: Kind, begin: Callable[[Any], None], eager: Function) -> type:
    """A class of layers that run on flashstate.

    begin: called with a layer that vLLM has initialised.
    eager: vLLM's decorator of what runs between CUDA graphs. It must be outermost: a replay calls what it decorates.
    """

    def initialise(self: Any, *args: Any, **more: Any) -> None:
        base.__init__(self, *args, **more)  # type: ignore[misc]
        begin(self)

    methods = {name: _on_flashstate(getattr(base, name), eager) for name in kind.methods if hasattr(base, name)}
    if not methods:
        raise AttributeError(f"{base.__name__} has no {' or '.join(kind.methods)}")
    return type(f"Flashstate{base.__name__}", (Served, base), {"kind": kind, "__init__": initialise, **methods})


def _on_flashstate(stock: Function, eager: Function) -> Function:
    """A method that lets flashstate answer what `stock` calls."""

    @functools.wraps(stock)
    def method(self: Served, *args: Any, **more: Any) -> Any:
        with self.on_flashstate():
            return inner(self, *args, **more)

    decorated = eager(method)
    breaks = decorated is not method and decorated.__code__ is stock.__code__  # stock is decorated too
    inner = stock.__wrapped__ if breaks else stock  # type: ignore[attr-defined]
    return decorated if breaks else method
