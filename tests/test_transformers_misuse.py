"""What goes wrong around a StateCache, or is done beside it, leaves no trace in what is generated."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from decoding import NEW, PROMPT, STATIC, greedy
from torch import Tensor

import flashstate.integrations.transformers as fs
from flashstate.integrations.transformers.tiny import tiny_model

MASK = torch.ones_like(PROMPT)
MASK[0, :3] = 0


def test_a_failed_generation_with_drafts_does_not_change_the_next() -> None:
    model: Any = tiny_model("mamba2")
    stock = greedy(model)
    cache = fs.StateCache(model, drafts=3)
    with pytest.raises(ValueError, match="batch_size = 1"):
        greedy(model, past_key_values=cache, prompt_lookup_num_tokens=3)
    assert torch.equal(greedy(model, past_key_values=cache), stock)


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "mamba2", "jamba"])
def test_a_padded_batch_can_be_continued(family: str) -> None:
    model: Any = tiny_model(family)
    first = greedy(model, attention_mask=MASK)
    longer = torch.cat([first, PROMPT[:, :4]], 1)
    mask = torch.cat([MASK, torch.ones(2, NEW + 4, dtype=torch.int64)], 1)
    stock = greedy(model, longer, attention_mask=mask)
    cache = fs.StateCache(model)
    assert torch.equal(greedy(model, attention_mask=MASK, past_key_values=cache), first)
    assert torch.equal(greedy(model, longer, attention_mask=mask, past_key_values=cache), stock)


@pytest.mark.parametrize("drafts", [0, 3])
def test_more_tokens_than_a_static_cache_has_room_for_are_refused_before_anything_moves(drafts: int) -> None:
    model: Any = tiny_model("jamba")
    stock = greedy(model)
    cache = fs.StateCache(model, drafts=drafts, **STATIC)
    with pytest.raises(ValueError, match="room for max_cache_len=14 tokens, of which 0 are taken, got 18 more"):
        greedy(model, PROMPT.repeat(1, 3), past_key_values=cache)
    assert torch.equal(greedy(model, past_key_values=cache), stock)
    with torch.no_grad(), pytest.raises(ValueError, match=f"of which 13 are taken, got {drafts + 2} more"):
        model(PROMPT.repeat(1, 2)[:, : drafts + 2], past_key_values=cache)


def test_a_cache_without_attention_has_no_longest_length() -> None:
    model: Any = tiny_model("mamba2")
    stock = greedy(model)
    assert torch.equal(greedy(model, past_key_values=fs.StateCache(model, max_cache_len=1)), stock)


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


def test_a_model_that_cannot_generate_is_refused_and_stays_what_it_is() -> None:
    model: Any = tiny_model("mamba2")
    with pytest.raises(ValueError, match="a model that generates, got Mamba2Model"):
        fs.enable(model.backbone)
    assert not any("forward" in vars(module) for module in model.modules())
    fs.enable(model)


@pytest.mark.parametrize("options", [{}, {"drafts": 2}, {"replay": 8, "drafts": 2}, STATIC], ids=str)
@pytest.mark.parametrize("family", ["mamba2", "nemotron_h", "qwen3_5"])
def test_a_copy_of_a_cache_goes_on_alone(family: str, options: dict[str, Any]) -> None:
    model: Any = tiny_model(family)
    both = greedy(model, max_new_tokens=4)
    stock = greedy(model, both, max_new_tokens=4)
    cache = fs.StateCache(model, **options)
    greedy(model, past_key_values=cache, max_new_tokens=4)
    for kept in (copy.deepcopy(cache), cache):
        assert torch.equal(greedy(model, both, past_key_values=kept, max_new_tokens=4), stock)


def test_a_cache_of_inference_mode_serves_outside_of_it() -> None:
    model: Any = tiny_model("qwen3_5")
    stock = greedy(model)
    cache = fs.StateCache(model, **STATIC)
    with torch.inference_mode():
        assert torch.equal(greedy(model, past_key_values=cache), stock)
    cache.reset()
    assert torch.equal(greedy(model, past_key_values=cache), stock)


def test_a_norm_that_somebody_has_replaced_keeps_its_forward() -> None:
    model: Any = tiny_model("mamba2")
    norm = model.backbone.norm_f

    def forward(hidden: Tensor) -> Tensor:
        return 2 * hidden

    norm.forward = forward
    for change in (fs.enable, fs.disable):
        change(model)
        assert norm.forward is forward
