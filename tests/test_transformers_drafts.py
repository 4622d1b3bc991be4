"""Drafts change nothing of what is generated, whether they are accepted or taken back."""

from itertools import cycle
from typing import Any

import pytest
import torch
from decoding import KNOWN, ONE_OF_EACH, PROMPT, REPLAYED, greedy
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator
from transformers.modeling_layers import MtpModel

import flashstate.integrations.transformers as fs
from flashstate.integrations.transformers.tiny import fill, tiny_model

FIRST = PROMPT[:1]
DRAFTS = 3
RIGHT = (2, 0, 3, 1)  # drafts that are right, call by call
ROLLED_BACK_STATIC = [family for family in KNOWN if family not in ("glm5_next", "lfm3")]


class Watched(fs.StateCache):
    """A StateCache that counts, for every call, tokens that could be taken back, and those that were."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.taken_back: list[tuple[int, int]] = []

    def crop(self, tokens_to_remove: int) -> None:
        self.taken_back.append((self.croppable, -tokens_to_remove))
        super().crop(tokens_to_remove)

    @property
    def fates(self) -> set[str]:
        """What became of drafts: of a call all were accepted, some, or none."""
        names = {(True, False): "all", (False, True): "none", (False, False): "some"}
        return {names[back == 0, back == drafts] for drafts, back in self.taken_back if drafts}


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
    cache = Watched(model, drafts=DRAFTS, **options)
    assert torch.equal(greedy(model, FIRST, past_key_values=cache, prompt_lookup_num_tokens=2, max_new_tokens=12), want)
    assert cache.fates == {"all", "some", "none"}
    assert {drafts for drafts, _ in cache.taken_back} >= {DRAFTS}
    assert cache.get_seq_length() == want.shape[1] - 1


@pytest.mark.parametrize("family", KNOWN)
def test_drafts_do_not_change_tokens(scripted: Any, family: str) -> None:
    require_same_with_drafts(scripted, family)


@pytest.mark.parametrize("family", ROLLED_BACK_STATIC)
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
    cache = Watched(model, drafts=DRAFTS)
    drafted = greedy(model, FIRST, attention_mask=mask, past_key_values=cache, prompt_lookup_num_tokens=2)
    assert torch.equal(drafted, want)
    assert cache.fates == {"all", "some", "none"}


FEW_WORDS = {"vocab_size": 8, "pad_token_id": None}  # so that what comes next was often there before
REPEATED = torch.tensor([[1, 2, 3, 4, 1, 2, 3]])


def require_same_with(model: Any, drafts: int, **options: Any) -> None:
    """Candidates from somewhere, of which some are accepted and some are not, change nothing."""
    want = greedy(model, REPEATED, max_new_tokens=24)
    cache = Watched(model, drafts=drafts)
    assert torch.equal(greedy(model, REPEATED, past_key_values=cache, max_new_tokens=24, **options), want)
    assert "none" in cache.fates
    assert len(cache.fates) > 1


def filled(module: Any) -> Any:
    """A module with weights as tiny models have them."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for name, weight in module.named_parameters():
            fill(name, weight.data)
    return module.eval()


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_prompt_lookup_gives_the_tokens_of_plain_decoding(family: str) -> None:
    require_same_with(tiny_model(family, **FEW_WORDS), DRAFTS, prompt_lookup_num_tokens=5)


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_an_assistant_of_attention_layers_gives_the_tokens_of_plain_decoding(family: str) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    assistant = LlamaForCausalLM(LlamaConfig(**sizes, **FEW_WORDS, bos_token_id=None, eos_token_id=None))
    require_same_with(tiny_model(family, **FEW_WORDS), DRAFTS, assistant_model=filled(assistant))


def test_multi_token_prediction_gives_the_tokens_of_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layers would come from a checkpoint."""
    types = {"layer_types": ["linear_attention", "linear_attention", "full_attention"]}
    types |= {"mtp_layer_types": ["full_attention"] * 2, "mtp_mlp_layer_types": ["dense"] * 2}
    model = tiny_model("bailing_hybrid", **FEW_WORDS, num_mtp_layers=2, **types)

    def from_pretrained(main_model: Any, **given: Any) -> MtpModel:
        layers = MtpModel(main_model, 2)
        filled(layers.layers)
        return layers.eval()

    monkeypatch.setattr(MtpModel, "from_pretrained", from_pretrained)
    require_same_with(model, 2, use_mtp=True)
