"""What `generate` makes of prompts on flashstate is what it makes of them in Transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoding import KNOWN, NEW, PROMPT, STATIC, TOKENS, call, expected, greedy
from torch import Tensor, nn

import flashstate.integrations.transformers as fs
from flashstate.integrations.transformers.tiny import tiny_model
from flashstate.proof import error_ratio

MASK = (torch.arange(PROMPT.shape[1]) >= torch.tensor([[2], [0], [4]])).long()


def attributes(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What every module of a model has of its own, by its name."""
    return {name: dict(vars(module)) for name, module in model.named_modules()}


@pytest.mark.parametrize("family", KNOWN)
def test_greedy_tokens_are_those_of_transformers_and_a_disabled_model_is_as_before(family: str) -> None:
    """Behind a prompt that is shorter than windows are."""
    model: Any = tiny_model(family)
    before, keys = attributes(model), list(model.state_dict())
    classes = {type(module): dict(vars(type(module))) for module in model.modules()}
    for _ in range(2):  # twice, of which the second changes nothing
        assert fs.enable(model) is model
    assert attributes(model) != before
    assert {cls: dict(vars(cls)) for cls in classes} == classes
    assert list(model.state_dict()) == keys
    for _ in range(2):
        assert fs.disable(model) is model
        assert attributes(model) == before
    want = greedy(model, PROMPT[:, :2])
    fs.enable(model)
    assert torch.equal(greedy(model, PROMPT[:, :2]), want)
    assert torch.equal(greedy(model, PROMPT[:, :2], past_key_values=fs.StateCache(model)), want)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mamba", {"max_batch": 3}),
        ("qwen3_5", {"max_cache_len": STATIC["max_cache_len"]}),
        ("falcon_h1", {"max_cache_len": STATIC["max_cache_len"]}),
        ("kimi_linear", {"drafts": 2}),
        ("nemotron_h", {"replay": 3}),
        ("lfm2", {}),
    ],
    ids=str,
)
def test_a_cache_serves_other_prompts_after_a_reset(family: str, options: dict[str, Any]) -> None:
    """First more rows, whose prompts are padded on the left, and then fewer."""
    model: Any = tiny_model(family)
    unequal = {"prompt": torch.cat([PROMPT, PROMPT[:1]]), "attention_mask": MASK, "max_new_tokens": 4}
    want, first = greedy(model, **unequal), greedy(model, PROMPT[:1], max_new_tokens=3)
    cache = fs.StateCache(model, **options)
    greedy(model, past_key_values=cache, max_new_tokens=2)
    cache.reset()
    assert not cache.has_previous_state()
    assert torch.equal(greedy(model, **unequal, past_key_values=cache), want)
    cache.reset()
    assert torch.equal(greedy(model, PROMPT[:1], past_key_values=cache, max_new_tokens=3), first)


@pytest.mark.parametrize("family", ["mamba", "mamba2", "jamba", "qwen3_5", "lfm2"])
def test_a_second_generate_continues_a_padded_batch_in_pieces(family: str) -> None:
    model: Any = tiny_model(family)
    first = greedy(model, attention_mask=MASK[:2])
    longer = torch.cat([first, PROMPT[:, :4]], 1)
    mask = torch.cat([MASK[:2], torch.ones(2, NEW + 4, dtype=torch.int64)], 1)
    want = greedy(model, longer, attention_mask=mask)
    cache = fs.StateCache(model)
    assert torch.equal(greedy(model, attention_mask=MASK[:2], past_key_values=cache), first)
    assert cache.get_seq_length() == first.shape[1] - 1
    more = {"attention_mask": mask, "past_key_values": cache, "prefill_chunk_size": 3}
    assert torch.equal(greedy(model, longer, **more), want)


@pytest.mark.parametrize(("family", "more"), [("mamba2", {}), ("falcon_h1", {}), ("qwen3_5", {"replay": 3})], ids=str)
def test_beams_and_samples_are_those_of_transformers(family: str, more: dict[str, int]) -> None:
    model: Any = tiny_model(family)
    beams = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 5}
    samples = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 5}
    for options in (beams, samples):
        torch.manual_seed(7)
        want = greedy(model, **options)
        torch.manual_seed(7)
        assert torch.equal(greedy(model, past_key_values=fs.StateCache(model, **more), **options), want), options
    assert len(want[:3].unique(dim=0)) > 1  # samples differ


ROWS = torch.tensor([1, 0, 0, 1])  # of the tokens, as a cache has them after it was rearranged


def rearranged(model: Any, cache: fs.StateCache) -> Tensor:
    """The logits of TOKENS for ROWS, where the cache is made these rows in the middle."""
    before = [call(model, TOKENS[:, :5], cache, 0), call(model, TOKENS[:, 5:6], cache, 5)]
    cache.batch_repeat_interleave(3)  # rows 0, 0, 0, 1, 1, 1
    between = call(model, TOKENS[:, 6:7].repeat_interleave(3, 0), cache, 6)
    cache.batch_select_indices(torch.tensor([4, 0, 1, 5]))
    after = [call(model, TOKENS[ROWS, 7:8], cache, 7)]
    cache.reorder_cache(torch.tensor([3, 2, 1, 0]))  # which ROWS are again
    after.append(call(model, TOKENS[ROWS, 8:9], cache, 8))
    return torch.cat([*(logits[ROWS] for logits in before), between[[3, 0, 1, 4]], *after], 1)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mamba2", {"max_cache_len": 14}),
        ("qwen3_5", {"drafts": 2}),
        ("kimi_linear", {"replay": 3, "drafts": 2}),
        ("falcon_h1", {"replay": 3}),
        ("lfm2", {"drafts": 2}),
    ],
    ids=str,
)
def test_rows_are_repeated_selected_and_reordered(family: str, options: dict[str, int]) -> None:
    """Beyond the rows that there was room for at first, and with tokens in rings."""
    model: Any = tiny_model(family)
    exact, plain = (logits[ROWS] for logits in expected(model, (5, 1, 1, 1, 1)))
    assert error_ratio(rearranged(model, fs.StateCache(model, **options)), exact, plain) <= 1


def test_prompts_may_be_embeddings_where_models_take_them_and_typos_are_refused() -> None:
    model: Any = tiny_model("mamba2")
    with torch.no_grad():
        embeddings = model.get_input_embeddings()(PROMPT)
    options = {"max_new_tokens": NEW, "do_sample": False}
    stock = model.generate(inputs_embeds=embeddings, **options)
    fs.enable(model)
    for cache in (None, fs.StateCache(model, **STATIC)):
        assert torch.equal(model.generate(inputs_embeds=embeddings, past_key_values=cache, **options), stock)
    with pytest.raises(ValueError, match=r"not used by the model: \['colour'\]"):
        greedy(model, past_key_values=fs.StateCache(model), colour=3)
    other: Any = tiny_model("nemotron_h")
    with pytest.raises(ValueError, match="doesn't have its forwarding implemented"):
        other.generate(inputs_embeds=embeddings, past_key_values=fs.StateCache(other), **options)


def test_continuous_batching_of_transformers_refuses_recurrent_layers() -> None:
    """If this fails, Transformers has learned it, and docs/transformers.md says what flashstate would have to do."""
    model: Any = fs.enable(tiny_model("mamba2"))
    with pytest.raises(ValueError, match=r"Invalid layer type: linear_attention"):
        model.generate_batch(inputs=[[1, 2, 3], [4, 5, 6, 7]], max_new_tokens=4)
