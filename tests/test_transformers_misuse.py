"""What goes wrong around a StateCache, or is done beside it, leaves no trace in what is generated."""

from __future__ import annotations

import copy
import io
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from decoding import NEW, PROMPT, STATIC, TOKENS, call, greedy
from torch import Tensor
from transformers.generation import BaseStreamer

import flashstate.integrations.transformers as fs
from flashstate.integrations.transformers.tiny import tiny_model

MASK = torch.ones_like(PROMPT)
MASK[0, :3] = 0


@pytest.mark.parametrize(("family", "options"), [("mamba2", {}), ("qwen3_5", {"prefill_chunk_size": 4})], ids=str)
def test_a_prompt_that_is_not_longer_than_what_a_cache_holds_is_refused(family: str, options: dict[str, int]) -> None:
    model: Any = tiny_model(family)
    first = greedy(model, max_new_tokens=2)
    stock = greedy(model, first)[:, 7:]
    cache = fs.StateCache(model)
    greedy(model, past_key_values=cache, max_new_tokens=2)
    for tokens in (5, 7):
        message = rf"this cache holds 7 tokens and the prompt has {tokens}: give all tokens so far, or reset\(\)"
        with pytest.raises(ValueError, match=message):
            greedy(model, TOKENS[:, :tokens], past_key_values=cache, **options)
    behind = torch.ones(2, 8, dtype=torch.int64)  # says that one token has seven before it
    assert torch.equal(greedy(model, first[:, 7:], attention_mask=behind, past_key_values=cache), stock)


@pytest.mark.parametrize(
    ("family", "changes", "options"),
    [
        ("mamba2", {}, {"drafts": 2, "replay": 3}),
        ("lfm2", {"layer_types": ["full_attention", "full_attention", "conv"]}, STATIC),  # failing before states move
    ],
    ids=str,
)
def test_after_a_call_that_failed_half_way_a_cache_refuses_until_it_is_reset(
    family: str, changes: dict[str, Any], options: dict[str, int]
) -> None:
    model: Any = tiny_model(family, **changes)
    stock = greedy(model)
    cache = fs.StateCache(model, **options)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    call(model, PROMPT, cache, 0)
    with pytest.raises(ValueError, match="got a batch of 1"):
        call(model, PROMPT[:1], cache, 6)  # which fails before anything moved
    with model.get_decoder().layers[1].register_forward_pre_hook(interrupt), pytest.raises(KeyboardInterrupt):
        call(model, TOKENS[:, 6:7], cache, 6)
    for again in (lambda: call(model, TOKENS[:, 6:7], cache, 6), lambda: greedy(model, past_key_values=cache)):
        with pytest.raises(RuntimeError, match=r"this StateCache failed half way, so some layers .*: reset\(\) it"):
            again()
    cache.reset()
    assert torch.equal(greedy(model, past_key_values=cache), stock)


def test_a_cache_is_in_use_by_one_thread_at_a_time() -> None:
    model: Any = tiny_model("mamba2")
    stock = greedy(model, PROMPT[:1])
    cache = fs.StateCache(model)
    refused: list[str] = []

    class Intruder(BaseStreamer):
        def put(self, value: Tensor) -> None:
            with ThreadPoolExecutor(1) as other:
                for use in (cache.reset, lambda: call(model, PROMPT, cache, 0), lambda: greedy(model, **given)):
                    refused.append(str(other.submit(use).exception()))

        def end(self) -> None: ...

    given = {"past_key_values": cache}
    assert torch.equal(greedy(model, PROMPT[:1], streamer=Intruder(), **given), stock)
    assert set(refused) == {"this StateCache is in use by another call"}


def test_an_enabled_model_and_a_cache_are_not_pickled_and_a_disabled_model_is() -> None:
    model: Any = tiny_model("mamba2")
    stock = greedy(model)
    cache = fs.StateCache(model)
    for dump in (pickle.dumps, lambda each: torch.save(each, io.BytesIO())):
        for each in (model, model.backbone):
            with pytest.raises(pickle.PicklingError, match=r"decodes on flashstate: disable\(model\) before it"):
                dump(each)
        with pytest.raises(pickle.PicklingError, match=r"belongs to its model and cannot .*; copy.deepcopy copies it"):
            dump(cache)
    assert torch.equal(greedy(pickle.loads(pickle.dumps(fs.disable(model)))), stock)


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
