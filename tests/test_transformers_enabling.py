"""An enabled model takes the arguments of `generate` that it took before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashstate.integrations.transformers as fs
from flashstate.integrations.transformers.tiny import tiny_model

PROMPT = torch.arange(1, 25).view(2, 12) * 37 % 96
OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


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
        ("nemotron_h", {"inputs_embeds": torch.zeros(2, 12, 32)}, "doesn't have its forwarding implemented"),
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
