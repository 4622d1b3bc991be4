"""What `generate` makes of prompts on flashstate is what it makes of them in Transformers."""

from typing import Any

import pytest
import torch
from decoding import KNOWN, ONE_OF_EACH, PROMPT, STATIC, TOKENS, call, expected, greedy
from torch import Tensor

import flashstate.integrations.transformers as fs
from flashstate.integrations.transformers.tiny import tiny_model
from flashstate.proof import error_ratio

FEW = (*ONE_OF_EACH, "falcon_h1", "nemotron_h")  # with attention beside a recurrence, and with layers that keep nothing
UNEQUAL = torch.cat([PROMPT, PROMPT[:1]])
MASK = (torch.arange(PROMPT.shape[1]) >= torch.tensor([[2], [0], [4]])).long()


@pytest.mark.parametrize("family", KNOWN)
def test_greedy_tokens_are_those_of_transformers(family: str) -> None:
    model: Any = tiny_model(family)
    want = greedy(model)
    fs.enable(model)
    assert torch.equal(greedy(model), want)
    assert torch.equal(greedy(model, past_key_values=fs.StateCache(model)), want)


def require_alike_after_reset(family: str, **options: Any) -> None:
    """A cache that was reset serves more rows, whose prompts are padded on the left, and then fewer."""
    model: Any = tiny_model(family)
    unequal = {"prompt": UNEQUAL, "attention_mask": MASK, "max_new_tokens": 4}
    want, first = greedy(model, **unequal), greedy(model, PROMPT[:1], max_new_tokens=3)
    cache = fs.StateCache(model, **options)
    greedy(model, past_key_values=cache, max_new_tokens=2)
    cache.reset()
    assert not cache.has_previous_state()
    assert torch.equal(greedy(model, **unequal, past_key_values=cache), want)
    cache.reset()
    assert torch.equal(greedy(model, PROMPT[:1], past_key_values=cache, max_new_tokens=3), first)


@pytest.mark.parametrize("family", FEW)
def test_a_static_cache_serves_other_prompts_after_a_reset(family: str) -> None:
    require_alike_after_reset(family, max_cache_len=STATIC["max_cache_len"])


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mamba", {"max_batch": 3}),
        ("kimi_linear", {}),
        ("falcon_h1", {"drafts": 2}),
        ("nemotron_h", {"replay": 3}),
        ("qwen3_next", {"replay": 3}),
    ],
    ids=str,
)
def test_a_cache_serves_other_prompts_after_a_reset(family: str, options: dict[str, Any]) -> None:
    require_alike_after_reset(family, **options)


@pytest.mark.parametrize("family", KNOWN)
def test_prompts_in_pieces_and_a_second_generate_continue_the_cache(family: str) -> None:
    model: Any = tiny_model(family)
    whole = greedy(model, TOKENS, max_new_tokens=4)
    cache = fs.StateCache(model)
    greedy(model, TOKENS[:, :3], past_key_values=cache, max_new_tokens=1)
    assert cache.get_seq_length() == 3
    assert torch.equal(greedy(model, TOKENS, past_key_values=cache, prefill_chunk_size=5, max_new_tokens=4), whole)
    more = torch.cat([whole, PROMPT], 1)
    want = greedy(model, more, max_new_tokens=2)
    assert torch.equal(greedy(model, more, past_key_values=cache, max_new_tokens=2), want)


@pytest.mark.parametrize(("family", "more"), [*((family, {}) for family in FEW), ("qwen3_5", {"replay": 3})], ids=str)
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


RINGS = ("mamba2", "qwen3_5", "kimi_linear")
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
        *((family, options) for family in FEW for options in ({}, {"drafts": 2})),
        *((family, {"replay": 3, **options}) for family in RINGS for options in ({}, {"drafts": 2})),
    ],
    ids=str,
)
def test_rows_are_repeated_selected_and_reordered(family: str, options: dict[str, int]) -> None:
    """Beyond the rows that there was room for at first, and with tokens in rings."""
    model: Any = tiny_model(family)
    exact, plain = (logits[ROWS] for logits in expected(model, (5, 1, 1, 1, 1)))
    cache = fs.StateCache(model, **options)
    assert error_ratio(rearranged(model, cache), exact, plain) <= 1


def test_a_static_cache_of_recurrent_layers_alone_rearranges_its_rows() -> None:
    model: Any = tiny_model("mamba2")
    exact, plain = (logits[ROWS] for logits in expected(model, (5, 1, 1, 1, 1)))
    assert error_ratio(rearranged(model, fs.StateCache(model, max_cache_len=14)), exact, plain) <= 1
