"""The layers of a StateCache: recurrent ones, whose states are in its stores, and Transformers' own for attention."""

from __future__ import annotations

from collections.abc import Container
from functools import cache
from typing import Any, NoReturn

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    STATIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    LinearAttentionCacheLayerMixin,
    StaticLayer,
    get_layer_types_and_kwargs,
)

ATTENTION_OF = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}  # of layers that have a state too

DISABLED = "this model is not enabled for a StateCache: enable(model), and give it a StateCache that was made for it"


class StateLayer(LinearAttentionCacheLayerMixin):
    """A recurrent layer of a StateCache, which itself moves, resets and takes back the states of all of them."""

    is_croppable = True

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(DISABLED)

    update_conv_state = update_recurrent_state = lazy_initialization

    def offload(self) -> NoReturn:
        raise NotImplementedError("a StateCache is not offloaded")

    prefetch = offload

    def reset(self) -> None: ...

    def reorder_cache(self, beam_idx: Tensor) -> None: ...

    def crop(self, tokens_to_remove: int) -> None: ...


class CroppedStaticLayer(StaticLayer):
    """A static layer of attention that takes tokens back: what is behind its length is overwritten."""

    is_croppable = True

    def crop(self, tokens_to_remove: int) -> None:
        self.cumulative_length.sub_(abs(tokens_to_remove))


def cache_layers(
    config: PreTrainedConfig, recurrent: Container[int], max_cache_len: int | None, croppable: bool
) -> list[Any]:
    """One layer of a cache for every layer of a model; static ones for attention where there is a longest length.
    ValueError if one of them must take tokens back and cannot."""
    types, options = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    layers = []
    for i, (kind, given) in enumerate(zip(types, options, strict=True)):
        if i in recurrent and kind not in ATTENTION_OF:
            layers.append(StateLayer())
            continue
        given = {name: value for name, value in given.items() if name != "number_of_states"}
        if max_cache_len is not None:
            given["max_cache_len"] = max_cache_len
        attention = attention_class(ATTENTION_OF.get(kind, kind), max_cache_len is not None)
        layers.append((with_state(attention) if i in recurrent else attention)(**given))
    if croppable:
        check_croppable(layers)
    return layers


def attention_class(kind: str, static: bool) -> Any:
    """The layer of Transformers for a type of attention, one that takes tokens back where there is one."""
    found = (STATIC_LAYER_TYPE_MAPPING if static else DYNAMIC_LAYER_TYPE_MAPPING)[kind]
    return CroppedStaticLayer if found is StaticLayer else found


@cache
def with_state(attention: Any) -> Any:
    """The class of layers that have both a recurrence and this kind of attention."""

    def initialise(self: Any, **given: Any) -> None:
        for base in (attention, StateLayer):
            base.__init__(self, **(given if base is attention else {}))

    return type(f"StateAnd{attention.__name__}", (attention, StateLayer), {"__init__": initialise})


def forget(layer: Any) -> None:
    """Let an empty static layer give up its memory; the next keys and values decide on what it gets."""
    layer.is_initialized = layer.is_indexer_initialized = False
    del layer.batch_size


def reorder_in_place(layer: Any, beam_idx: Tensor) -> None:
    """Let row i of a layer continue from row beam_idx[i], in the memory that it has: graphs were captured with it."""
    before = {name: value for name, value in vars(layer).items() if isinstance(value, Tensor)}
    layer.reorder_cache(beam_idx)
    for name, tensor in before.items():
        if getattr(layer, name) is not tensor:
            setattr(layer, name, tensor.copy_(getattr(layer, name)))


def check_croppable(layers: list[Any]) -> None:
    """Raise where a layer cannot take tokens back."""
    attention = (layer for layer in layers if isinstance(layer, CacheLayerMixin))
    stuck = {type(layer).__name__ for layer in attention if not hasattr(layer, "crop")}
    if stuck:
        words = "leave max_cache_len out, so that attention layers grow"
        raise ValueError(f"drafts need layers that take tokens back, which {', '.join(sorted(stuck))} cannot: {words}")


def has_states(kept: Any) -> bool:
    """Whether a cache is a StateCache."""
    return isinstance(kept, Cache) and any(isinstance(layer, StateLayer) for layer in kept.layers)
