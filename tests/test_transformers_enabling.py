"""enable and disable change one model and nothing else, and calls that are not flashstate's stay as they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from decoding import PROMPT, TOKENS, call, greedy, stock_cache
from torch import Tensor

import flashstate.integrations.transformers as fs
from flashstate.integrations.transformers.families import mixers_of
from flashstate.integrations.transformers.tiny import tiny_model


def test_copies_of_an_enabled_model_and_others_of_its_class_run_by_themselves() -> None:
    model, other = tiny_model("qwen3_next"), tiny_model("qwen3_next")
    before = {name: dict(vars(module)) for name, module in other.named_modules()}
    logits = call(other, TOKENS, stock_cache(other), 0)
    want = greedy(fs.enable(model), past_key_values=fs.StateCache(model))
    assert {name: dict(vars(module)) for name, module in other.named_modules()} == before
    assert torch.equal(call(other, TOKENS, stock_cache(other), 0), logits)
    twin = copy.deepcopy(model)
    for found in mixers_of(twin).values():
        assert found.mixer.forward.__self__ is found.mixer
    with torch.no_grad():
        for weight in mixers_of(model)[min(mixers_of(model))].mixer.parameters():
            weight.zero_()
    assert not torch.equal(greedy(model, past_key_values=fs.StateCache(model)), want)
    fs.disable(model)
    assert torch.equal(greedy(twin, past_key_values=fs.StateCache(twin)), want)


@pytest.mark.parametrize("family", ["mamba2", "qwen3_5"])
def test_an_enabled_model_trains_and_runs_without_a_cache_as_before(family: str) -> None:
    model: Any = tiny_model(family, dtype=torch.bfloat16)
    before = model(PROMPT).logits
    before.float().square().sum().backward()
    gradients = [weight.grad for weight in model.parameters()]
    model.zero_grad()
    fs.enable(model)
    after = model(PROMPT).logits
    after.float().square().sum().backward()
    assert torch.equal(after, before)
    for weight, gradient in zip(model.parameters(), gradients, strict=True):
        assert (weight.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(weight.grad, gradient)


def test_a_norm_that_somebody_has_replaced_keeps_its_forward() -> None:
    model: Any = tiny_model("mamba2")
    norm = model.backbone.norm_f

    def forward(hidden: Tensor) -> Tensor:
        return 2 * hidden

    norm.forward = forward
    for change in (fs.enable, fs.disable):
        change(model)
        assert norm.forward is forward


def test_packed_sequences_are_refused() -> None:
    """With a StateCache, and in a step over a stock cache."""
    model: Any = fs.enable(tiny_model("bamba"))
    stock = stock_cache(model)
    call(model, PROMPT, stock, 0)
    message = "seq_idx and cu_seq_lens_q are not for a model that decodes on flashstate"
    for name, cache in (("seq_idx", fs.StateCache(model)), ("cu_seq_lens_q", stock)):
        with pytest.raises(ValueError, match=message):
            call(model, TOKENS[:, 6:7], cache, 6, **{name: torch.zeros(2, 1, dtype=torch.int32)})
