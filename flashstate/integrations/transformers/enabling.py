"""enable, disable: run the mixers of one model on flashstate, and no other model of the process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, wraps
from types import MethodType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import GenerationMode

from flashstate.errors import check_dtype
from flashstate.integrations.transformers.candidates import check_source, for_cache
from flashstate.integrations.transformers.families import check_model, found_as, is_mixer, mixers_of
from flashstate.integrations.transformers.layers import DISABLED, StateLayer, has_states
from flashstate.integrations.transformers.memory import Memory
from flashstate.integrations.transformers.mixers.rms import lean
from flashstate.integrations.transformers.norms import norms_of
from flashstate.integrations.transformers.store import convolution
from flashstate.integrations.transformers.use import CACHES, copied, reduced
from flashstate.state.state import State

PACKED = ("seq_idx", "cu_seq_lens_q")  # arguments of mixers for several sequences in one row
OURS: set[Callable[..., Any]] = set()  # forwards of flashstate that modules have had


def enable(model: PreTrainedModel) -> PreTrainedModel:
    """Decode with flashstate's ops from now on: every recurrent layer of this model, with a stock cache or a
    StateCache. Prompts over a stock cache, and calls without a cache, stay what they are. Returns the model.

    Only instances change, so no other model of the process does. ValueError, before anything is changed, names what
    flashstate does not know: a model, or a mixer whose forward is not one it has seen; ImportError, a version of
    Transformers.
    """
    found = mixers_of(model)
    if is_enabled(model) and all(has_forward(each.mixer) for each in found.values()):
        return model
    vars(model).pop(refuse_states.__name__, None)
    cls: Any = type(model)
    if not hasattr(cls, "prepare_inputs_for_generation"):
        raise ValueError(f"enable takes a model that generates, got {cls.__name__}: give it the model around this one")
    for each in found.values():
        if not has_forward(each.mixer):
            check_own(each.mixer)
    for module, forward in forwards_of(model):
        if module is model or own_forward(module) is None:
            set_forward(module, forward)
    CACHES.setdefault(model, WeakSet())
    model._is_stateful = False  # which would refuse drafts; `prepared_cache` refuses those of other caches
    for name, method in methods(cls).items():
        setattr(model, name, MethodType(method, model))
    return model


def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model again what it was before `enable`; returns it."""
    check_model(model)
    if is_enabled(model):
        for module in filter(has_forward, model.modules()):
            unset_forward(module)
        for name in ("_is_stateful", *methods(type(model))):
            vars(model).pop(name, None)
        if CACHES.get(model):
            setattr(model, refuse_states.__name__, MethodType(refuse_states, model))
    return model


def refuse_states(model: Any, model_kwargs: dict[str, Any]) -> None:
    """Stand in for `_validate_model_kwargs` of a disabled model whose StateCaches, or those of the model it is a copy
    of, are still there: models of Mamba alone would call `past_key_values` a typo."""
    if has_states(model_kwargs.get("past_key_values")):
        raise RuntimeError(DISABLED)
    type(model)._validate_model_kwargs(model, model_kwargs)


refuse_states.__name__ = "_validate_model_kwargs"  # by which pickle finds a method again: that of the class


def is_enabled(model: PreTrainedModel) -> bool:
    """Whether a model runs on flashstate."""
    return "_get_candidate_generator" in vars(model)


def forward_name(module: nn.Module) -> str:
    """Under which name a module has its forward: accelerate puts its own in front of it."""
    return "_old_forward" if hasattr(module, "_hf_hook") else "forward"


def check_own(mixer: nn.Module) -> None:
    """Raise where something else has replaced the forward of a mixer, or keeps its weights elsewhere."""
    name = type(mixer).__name__
    if own_forward(mixer) is not None:
        raise ValueError(f"the forward of this {name} has been replaced already, so flashstate cannot replace it")
    check_dtype("model", convolution(mixer).weight.dtype)
    if any(weight.device.type == "meta" for weight in mixer.parameters()):
        raise ValueError(f"this {name} is offloaded: flashstate needs its weights on the device it runs on")


def forwards_of(model: nn.Module) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """Yield the norms and mixers of a model, the model, and the models inside it that have mixers, each with the
    forward that it has while the model is enabled."""
    yield from norms_of(model)
    for module in model.modules():
        cls: Any = type(module)
        if is_mixer(module):
            yield module, mixer_forward
        if isinstance(module, PreTrainedModel) and any(map(is_mixer, module.modules())):
            yield module, model_forward(cls)


def own_forward(module: Any) -> Any:
    """The function that is the forward of one module, where that is not the one of its class."""
    own = vars(module).get(forward_name(module))
    function = getattr(own, "__func__", own)
    return None if function is type(module).forward else function


def set_forward(module: Any, forward: Callable[..., Any]) -> None:
    """Make a function the forward of one module. As a method it follows the module when that is copied."""
    OURS.add(forward)
    setattr(module, forward_name(module), MethodType(forward, module))
    module.__reduce_ex__ = MethodType(reduced, module)
    module.__deepcopy__ = MethodType(copied, module)


def has_forward(module: Any) -> bool:
    """Return whether a module has a forward of flashstate, perhaps inside somebody else's."""
    return getattr(vars(module).get("__deepcopy__"), "__func__", None) is copied


def unset_forward(module: Any) -> None:
    """Give a module the forward of its class again, unless somebody else has replaced that of flashstate."""
    for name in ("__reduce_ex__", "__deepcopy__"):
        vars(module).pop(name, None)
    if own_forward(module) not in OURS:
        return
    if forward_name(module) == "forward":
        del module.forward
    else:
        module._old_forward = MethodType(type(module).forward, module)


def mixer_forward(mixer: Any, hidden_states: Tensor, *args: Any, **given: Any) -> Tensor:
    """The forward of an enabled mixer: on flashstate where there is a cache to decode with."""
    found = found_as(mixer)
    given |= dict(zip((found.cache_name, "attention_mask"), args, strict=False))
    kept: Any = given.pop(found.cache_name, None)
    layer: Any = None if kept is None else kept.layers[mixer.layer_idx]
    mask = given.pop("attention_mask", None)
    on_flashstate = isinstance(layer, StateLayer) or (layer is not None and decodes(layer, hidden_states))
    if not on_flashstate:
        return type(mixer).forward(mixer, hidden_states, **{found.cache_name: kept, "attention_mask": mask}, **given)
    if any(given.get(name) is not None for name in PACKED):
        raise ValueError(f"{' and '.join(PACKED)} are not for a model that decodes on flashstate")
    if isinstance(layer, StateLayer):
        return kept.mix(mixer, hidden_states, mask, given)
    check_dtype("model", hidden_states.dtype)
    state = layer.recurrent_states[0]
    memory = Memory(layer.conv_states[0], state=None if state is None else State(found.kind.view(state)))
    return found.kind.forward(mixer, hidden_states, memory, mask, prompt=False)


def decodes(layer: Any, hidden_states: Tensor) -> bool:
    """Whether a layer of a stock cache is there to decode one token with."""
    return hidden_states.shape[1] == 1 and layer.has_previous_state[0] and not layer.record_past


def own_cache_name(model: Any) -> str:
    """The argument of a model's own forward that is the cache."""
    cls: Any = type(model)
    return cache_argument(cls)


@cache
def cache_argument(cls: Any) -> str:
    """Return the argument of the forward of a class of models that is the cache: models of Mamba alone have another.
    A class whose forward passes all arguments on has the argument of the class that it is derived from."""
    for forward in (base.forward for base in cls.__mro__ if hasattr(base, "forward")):
        names = inspect.signature(forward).parameters
        for name in ("past_key_values", "cache_params"):
            if name in names:
                return name
    return "past_key_values"


@cache
def model_forward(cls: Any) -> Callable[..., Any]:
    """Return the forward of an enabled model of this class, or of a model inside one: the forward of the class, with a
    guarded StateCache, a CUDA graph where a step on it can be one, and a cache that is taken and returned as
    past_key_values."""
    stock, name = cls.forward, cache_argument(cls)

    @wraps(stock)
    def forward(self: Any, *args: Any, **given: Any) -> Any:
        if name != "past_key_values" and given.get("past_key_values") is not None:
            given[name] = given.pop("past_key_values")
        unnamed = [each for each in args if isinstance(each, Cache)]
        kept: Any = unnamed[0] if unnamed else given.get(name)
        if torch.compiler.is_compiling():
            outputs = stock(self, *args, **given)
        elif not has_states(kept):
            with lean(kept is not None and tokens_of(args, given) == 1):
                return stock(self, *args, **given)
        else:
            outputs = on_states(self, stock, name, kept, args, given)
        if name != "past_key_values" and has_states(kept) and isinstance(outputs, dict):
            outputs["past_key_values"] = kept
        return outputs

    return forward


def on_states(
    model: Any, stock: Callable[..., Any], name: str, kept: Any, args: tuple[Any, ...], given: dict[str, Any]
) -> Any:
    """Return the outputs of a call of a model with the StateCache `kept` in the argument `name`. A call that is not
    inside another may be a CUDA graph."""
    with kept.use as outermost:
        if not outermost:
            return stock(model, *args, **given)
        tokens, generates = tokens_of(args, given), is_enabled(model)
        kept.check_call(tokens)
        if generates and not args and kept.graphs.can_run(model, given):
            outputs = kept.graphs.run(model, stock, name, given)
        else:
            if generates and kept.graphs.graphs:
                kept.graphs.watch(model)
            with lean():
                outputs = stock(model, *args, **given)
        kept.length += tokens
    return outputs


def tokens_of(args: tuple[Any, ...], given: dict[str, Any]) -> int:
    """How many tokens a call of a model has for every row."""
    inputs = (*args[:1], given.get("input_ids"), given.get("inputs_embeds"))
    return next((value.shape[1] for value in inputs if isinstance(value, Tensor)), 0)


@cache
def prepared_inputs(cls: Any) -> Callable[..., Any]:
    """How an enabled model of this class prepares the inputs of a call of `generate`: with a StateCache under the name
    that the model has for caches. `generate` looks at the arguments, so they are those of the class, and the cache."""
    stock, name = cls.prepare_inputs_for_generation, cache_argument(cls)

    @wraps(stock)
    def prepare(self: Any, input_ids: Tensor, **given: Any) -> dict[str, Any]:
        if has_states(given.get("past_key_values")):
            given[name] = given.pop("past_key_values")
        return stock(self, input_ids, **given)

    *named, others = inspect.signature(stock).parameters.values()
    if "past_key_values" not in inspect.signature(stock).parameters:
        named.append(inspect.Parameter("past_key_values", inspect.Parameter.KEYWORD_ONLY, default=None))
    prepare.__dict__["__signature__"] = inspect.Signature([*named, others])
    return prepare


def prepared_cache(
    model: Any, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, *args: Any
) -> Any:
    """Let `generate` know a StateCache as the user's cache, under whatever name the model has for caches."""
    kept: Any = model_kwargs.get("past_key_values")
    name = own_cache_name(model)
    if generation_mode == GenerationMode.ASSISTED_GENERATION and not drafts_of(kept):
        words = "cannot take tokens back that its recurrent layers have had"
        raise ValueError(f"assisted generation needs past_key_values=StateCache(model, drafts=...): this cache {words}")
    if has_states(kept):
        mask = model_kwargs.get("attention_mask")  # of all tokens so far; None: all are 1
        kept.check_prompt(getattr(generation_config, "_mask_length", None) if mask is None else mask.shape[1])
        model_kwargs[name] = kept
        kept.sure = None  # of a generation that failed
    result = type(model)._prepare_cache_for_generation(model, generation_config, model_kwargs, generation_mode, *args)
    if has_states(kept) and name != "past_key_values":
        del model_kwargs[name]
    return result


def drafts_of(kept: Any) -> int:
    """How many tokens of a call a cache can take back."""
    return kept.format.drafts if has_states(kept) else 0


def candidate_generator(model: Any, **given: Any) -> Any:
    """Where candidates of assisted generation come from, as many as the cache can take back."""
    kept = given["model_kwargs"]["past_key_values"]
    if kept.batch is not None:
        raise ValueError("assisted generation begins with an empty cache, but this one has tokens; reset() it first")
    check_source(drafts_of(kept), model, given["generation_config"], given.get("assistant_model"))
    return for_cache(kept, type(model)._get_candidate_generator(model, **given))


def compiled_call(model: Any, compile_config: Any) -> Callable[..., Any]:
    """What `generate` decodes with over a static cache: for a StateCache the model itself, which runs a CUDA graph,
    unless the user says how to compile it."""
    stock = type(model).get_compiled_call
    if compile_config is not None:
        return stock(model, compile_config)

    def call(**given: Any) -> Any:
        kept = given.get("past_key_values", given.get("cache_params"))
        return (model if has_states(kept) else stock(model, None))(**given)

    return call


@cache
def generation(cls: Any) -> Callable[..., Any]:
    """Return the `generate` of enabled models of this class, which keeps other threads out of its StateCache."""
    stock = cls.generate

    @wraps(stock)
    def generate(self: Any, *args: Any, **given: Any) -> Any:
        kept: Any = given.get("past_key_values", given.get("cache_params"))
        with kept.use.alone() if has_states(kept) else nullcontext():
            return stock(self, *args, **given)

    return generate


def methods(cls: Any) -> dict[str, Callable[..., Any]]:
    """The methods of an enabled model, in the place of its class's."""
    return {
        "prepare_inputs_for_generation": prepared_inputs(cls),
        "_prepare_cache_for_generation": prepared_cache,
        "_get_candidate_generator": candidate_generator,
        "get_compiled_call": compiled_call,
        "generate": generation(cls),
    }
