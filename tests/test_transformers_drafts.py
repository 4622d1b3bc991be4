"""Drafts change nothing of what is generated, whether they are accepted or taken back."""

from itertools import cycle
from typing import Any

import pytest
import torch
from decoding import KNOWN, ONE_OF_EACH, PROMPT, REPLAYED, greedy
from drafting import Steps
from torch import Tensor
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import flashstate.integrations.transformers as fs
from flashstate.integrations.transformers.tiny import tiny_model

FIRST = PROMPT[:1]
DRAFTS = 3
RIGHT = (2, 0, 3, 1)  # drafts that are right, call by call


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes prompt lookup propose known tokens, of which RIGHT are right, and one more than the cache can take back."""

    def script(tokens: Tensor) -> None:
        turns = cycle(RIGHT)

        def get_candidates(self: Any, input_ids: Tensor, **given: Any) -> tuple[Tensor, None]:
            length, right = input_ids.shape[1], next(turns)
            drafts = tokens[:, length : length + DRAFTS + 1].clone()
            drafts[:, right : right + 1] += 1
            return torch.cat([input_ids, drafts % 96], 1), None

        monkeypatch.setattr(PromptLookupCandidateGenerator, "get_candidates", get_candidates)

    return script


def require_same_with_drafts(scripted: Any, family: str, **options: Any) -> None:
    model: Any = tiny_model(family)
    want = greedy(model, FIRST, max_new_tokens=12)
    scripted(want)
    cache = fs.StateCache(model, drafts=DRAFTS, **options)
    steps = Steps(cache)
    assert torch.equal(greedy(model, FIRST, past_key_values=cache, prompt_lookup_num_tokens=2, max_new_tokens=12), want)
    assert {(DRAFTS, back) for back in range(DRAFTS + 1)} <= set(steps)
    assert cache.get_seq_length() == want.shape[1] - 1


@pytest.mark.parametrize("family", KNOWN)
def test_drafts_do_not_change_tokens(scripted: Any, family: str) -> None:
    require_same_with_drafts(scripted, family)


@pytest.mark.parametrize("family", [*ONE_OF_EACH, "falcon_h1", "nemotron_h"])
def test_drafts_over_a_static_cache_do_not_change_tokens(scripted: Any, family: str) -> None:
    require_same_with_drafts(scripted, family, max_batch=1, max_cache_len=FIRST.shape[1] + 12)


@pytest.mark.parametrize("family", REPLAYED)
def test_drafts_that_are_replayed_do_not_change_tokens(scripted: Any, family: str) -> None:
    require_same_with_drafts(scripted, family, replay=DRAFTS + 2)


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_drafts_behind_a_padded_prompt_do_not_change_tokens(scripted: Any, family: str) -> None:
    model: Any = tiny_model(family)
    mask = (torch.arange(FIRST.shape[1]) >= 2).long()[None]
    want = greedy(model, FIRST, attention_mask=mask)
    scripted(want)
    cache = fs.StateCache(model, drafts=DRAFTS)
    steps = Steps(cache)
    drafted = greedy(model, FIRST, attention_mask=mask, past_key_values=cache, prompt_lookup_num_tokens=2)
    assert torch.equal(drafted, want)
    steps.check(DRAFTS)


FEW_WORDS = {"vocab_size": 8, "pad_token_id": None}  # so that what comes next was often there before
REPEATED = torch.tensor([[1, 2, 3, 4, 1, 2, 3]])


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_prompt_lookup_gives_the_tokens_of_plain_decoding(family: str) -> None:
    model: Any = tiny_model(family, **FEW_WORDS)
    want = greedy(model, REPEATED, max_new_tokens=24)
    cache = fs.StateCache(model, drafts=DRAFTS)
    steps = Steps(cache)
    lookup = {"prompt_lookup_num_tokens": DRAFTS + 2, "max_new_tokens": 24}
    assert torch.equal(greedy(model, REPEATED, past_key_values=cache, **lookup), want)
    steps.check(DRAFTS)
