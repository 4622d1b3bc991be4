"""enable and disable change one model and nothing else of the process, and it takes the arguments that it took."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from decoding import KNOWN, ONE_OF_EACH, PROMPT, TOKENS, call, greedy, stock_cache
from torch import nn

import flashstate.integrations.transformers as fs
from flashstate.integrations.transformers.families import mixers_of
from flashstate.integrations.transformers.tiny import tiny_model

OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


def attributes(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What every module of a model has of its own, by its name."""
    return {name: dict(vars(module)) for name, module in model.named_modules()}


@pytest.mark.parametrize("family", KNOWN)
def test_disable_leaves_a_model_as_it_was(family: str) -> None:
    model: Any = tiny_model(family)
    before, keys = attributes(model), list(model.state_dict())
    classes = {type(module): dict(vars(type(module))) for module in model.modules()}
    assert fs.enable(model) is model
    assert attributes(model) != before
    assert fs.enable(model) is model  # again, which changes nothing
    assert {cls: dict(vars(cls)) for cls in classes} == classes
    assert list(model.state_dict()) == keys
    assert fs.disable(model) is model
    assert attributes(model) == before
    assert fs.disable(model) is model
    assert attributes(model) == before


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_enabling_a_model_leaves_others_of_its_class_alone(family: str) -> None:
    model, other = tiny_model(family), tiny_model(family)
    before, want = attributes(other), call(other, TOKENS, stock_cache(other), 0)
    fs.enable(model)
    greedy(model, past_key_values=fs.StateCache(model))
    assert attributes(other) == before
    assert torch.equal(call(other, TOKENS, stock_cache(other), 0), want)
    assert torch.equal(greedy(other), greedy(model))


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_a_copy_of_an_enabled_model_runs_by_itself(family: str) -> None:
    model: Any = fs.enable(tiny_model(family))
    want = greedy(model, past_key_values=fs.StateCache(model))
    twin = copy.deepcopy(model)
    for found in mixers_of(twin).values():
        assert found.mixer.forward.__self__ is found.mixer
    with torch.no_grad():
        for weight in mixers_of(model)[min(mixers_of(model))].mixer.parameters():
            weight.zero_()
    assert not torch.equal(greedy(model, past_key_values=fs.StateCache(model)), want)
    fs.disable(model)
    assert torch.equal(greedy(twin, past_key_values=fs.StateCache(twin)), want)


@pytest.mark.parametrize("family", ["mamba2", "mamba", "qwen3_next", "jamba"])
def test_prompts_may_be_embeddings(family: str) -> None:
    model: Any = tiny_model(family)
    with torch.no_grad():
        embeddings = model.get_input_embeddings()(PROMPT)
    stock = model.generate(inputs_embeds=embeddings, **OPTIONS)
    fs.enable(model)
    for cache in (None, fs.StateCache(model), fs.StateCache(model, drafts=2), fs.StateCache(model, max_cache_len=32)):
        assert torch.equal(model.generate(inputs_embeds=embeddings, past_key_values=cache, **OPTIONS), stock)


@pytest.mark.parametrize(
    ("family", "given", "words"),
    [
        ("nemotron_h", {"inputs_embeds": torch.zeros(2, 6, 32)}, "doesn't have its forwarding implemented"),
        ("mamba2", {"input_ids": PROMPT, "colour": 3}, r"not used by the model: \['colour'\]"),
    ],
)
def test_what_a_model_does_not_take_it_does_not_take_enabled(family: str, given: dict[str, Any], words: str) -> None:
    model: Any = tiny_model(family)
    for cache in (None, fs.StateCache(model)):
        with pytest.raises(ValueError, match=words):
            model.generate(past_key_values=cache, **given, **OPTIONS)


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next"])
def test_continuous_batching_of_transformers_refuses_recurrent_layers(family: str) -> None:
    """If this fails, Transformers has learned it, and docs/transformers.md says what flashstate would have to do."""
    model: Any = fs.enable(tiny_model(family))
    with pytest.raises(ValueError, match=r"Invalid layer type: linear_attention"):
        model.generate_batch(inputs=[[1, 2, 3], [4, 5, 6, 7]], max_new_tokens=4)
