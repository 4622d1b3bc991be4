"""Candidates from an assistant model and from a model's own layers for them give what plain decoding gives, and
sources of candidates that cannot work are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import Steps
from safetensors.torch import save_file
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, LogitsProcessor
from transformers.modeling_layers import MtpModel

import flashstate.integrations.transformers as fs
from flashstate.integrations.transformers.tiny import tiny_model

VOCABULARY = 96
PROMPT = torch.arange(1, 13)[None] * 37 % VOCABULARY
NEW = 40  # tokens that are generated


class Few(LogitsProcessor):
    """Leaves a model one token or two to choose, two times each: so that models with other weights often agree."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        length = input_ids.shape[1]
        left = (11 * length + 29 * torch.arange(2 if length % 4 < 2 else 1)) % VOCABULARY
        return torch.full_like(scores, -torch.inf).index_copy(1, left, scores[:, left])


OPTIONS: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "logits_processor": [Few()]}


def assistant(tokens: int, schedule: str = "constant") -> LlamaForCausalLM:
    """A model of attention that gives so many candidates for a call."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = LlamaForCausalLM(config).eval()
    model.generation_config.update(
        num_assistant_tokens=tokens, num_assistant_tokens_schedule=schedule, assistant_confidence_threshold=0.0
    )
    return model


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mamba2", {"replay": 7}),
        ("jamba", {}),
        ("qwen3_next", {}),
        ("kimi_linear", {"replay": 7}),
        ("nemotron_h", {"max_cache_len": 52}),
    ],
    ids=str,
)
def test_with_an_assistant_model_tokens_are_those_of_plain_decoding(family: str, options: dict[str, Any]) -> None:
    model: Any = tiny_model(family)
    plain = model.generate(PROMPT, **OPTIONS)
    cache = fs.StateCache(model, drafts=4, **options)
    steps = Steps(cache)
    assert torch.equal(model.generate(PROMPT, past_key_values=cache, assistant_model=assistant(4), **OPTIONS), plain)
    steps.check(4)


@pytest.mark.parametrize("schedule", ["constant", "heuristic"])
def test_of_more_candidates_than_drafts_the_first_are_taken(schedule: str) -> None:
    model: Any = tiny_model("mamba2")
    plain = model.generate(PROMPT, **OPTIONS)
    cache = fs.StateCache(model, drafts=2)
    steps = Steps(cache)
    more = assistant(6, schedule)
    assert torch.equal(model.generate(PROMPT, past_key_values=cache, assistant_model=more, **OPTIONS), plain)
    steps.check(2)


def test_a_schedule_that_grows_stops_at_drafts() -> None:
    """Every candidate is right where the assistant has no choice, so that there are more and more of them."""
    model: Any = tiny_model("mamba2")
    cache = fs.StateCache(model, drafts=5)
    steps = Steps(cache)
    model.generate(
        PROMPT, past_key_values=cache, assistant_model=assistant(1, "heuristic"), max_new_tokens=NEW, do_sample=False,
        suppress_tokens=list(range(1, VOCABULARY)),
    )  # fmt: skip
    assert [candidates for candidates, _ in steps[:4]] == [1, 3, 5, 5]
    assert not any(back for _, back in steps)


def test_samples_are_those_of_the_model_and_a_seed_repeats_them() -> None:
    """With one token to sample from, samples are known; with more, they are those of a seed."""
    model: Any = tiny_model("qwen3_next")
    cache = fs.StateCache(model, drafts=3)

    def sampled(**options: Any) -> Tensor:
        cache.reset()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            return model.generate(
                PROMPT, past_key_values=cache, assistant_model=assistant(5), **(OPTIONS | {"do_sample": True} | options)
            )

    plain = model.generate(PROMPT, **OPTIONS)
    assert torch.equal(sampled(top_k=1), plain)
    steps = Steps(cache)
    first = sampled(temperature=2.0)
    steps.check(3)
    assert not torch.equal(first, plain)
    assert torch.equal(sampled(temperature=2.0), first)


def with_own_drafts(family: str, layers: int, path: Path) -> Any:
    """A tiny model that has a checkpoint with so many layers for candidates. Those of Transformers are made after its
    last layer, which has to be of attention for that."""
    model: Any = tiny_model(
        family, layer_types=["linear_attention", "linear_attention", "full_attention"], num_mtp_layers=layers,
        mtp_layer_types=["full_attention"] * layers, mtp_mlp_layer_types=["dense"] * layers,
    )  # fmt: skip
    model.config.dtype, model.config.name_or_path = torch.float32, str(path)
    model._keys_to_ignore_on_load_unexpected = [r"^mtp.*"]  # by which Transformers finds them
    with torch.random.fork_rng():
        torch.manual_seed(2)
        own = MtpModel(model, layers).state_dict()
    own = {f"mtp.{name}": weight.contiguous() for name, weight in own.items() if name.startswith("layers.")}
    save_file(own, path / "model.safetensors", {"format": "pt"})
    return model


@pytest.mark.parametrize(("family", "layers"), [("bailing_hybrid", 1), ("qwen3_next", 2)])
def test_with_layers_for_candidates_tokens_are_those_of_plain_decoding(
    family: str, layers: int, tmp_path: Path
) -> None:
    model = with_own_drafts(family, layers, tmp_path)
    plain = model.generate(PROMPT, **OPTIONS)
    cache = fs.StateCache(model, drafts=layers)
    steps = Steps(cache)
    assert torch.equal(model.generate(PROMPT, past_key_values=cache, use_mtp=True, **OPTIONS), plain)
    assert steps[0] == (0, 0)  # candidates need what the model makes of the prompt
    steps.check(layers)


def test_layers_for_candidates_need_as_many_drafts(tmp_path: Path) -> None:
    model = with_own_drafts("qwen3_next", 2, tmp_path)
    with pytest.raises(ValueError, match=r"use_mtp has a candidate from each of 2 layers: .* as many, got 1"):
        model.generate(PROMPT, past_key_values=fs.StateCache(model, drafts=1), use_mtp=True, **OPTIONS)


def test_an_assistant_with_recurrent_layers_is_refused_by_name() -> None:
    model: Any = tiny_model("mamba2")
    with pytest.raises(ValueError, match=r"assistant_model has recurrent layers, .*: JambaForCausalLM"):
        model.generate(
            PROMPT, past_key_values=fs.StateCache(model, drafts=2), assistant_model=tiny_model("jamba"), **OPTIONS
        )


def test_leaving_the_model_early_is_refused() -> None:
    model: Any = tiny_model("mamba2")
    with pytest.raises(ValueError, match=r"assistant_early_exit takes tokens of several calls back"):
        model.generate(PROMPT, past_key_values=fs.StateCache(model, drafts=2), assistant_early_exit=1, **OPTIONS)


@pytest.mark.parametrize("family", ["mamba2", "jamba"])
def test_a_cache_that_takes_nothing_back_is_refused(family: str) -> None:
    model: Any = fs.enable(tiny_model(family))
    for cache in (None, DynamicCache(config=model.config), fs.StateCache(model)):
        with pytest.raises(ValueError, match=r"assisted generation needs past_key_values=StateCache\(model, drafts="):
            model.generate(PROMPT, past_key_values=cache, assistant_model=assistant(2), **OPTIONS)


def test_a_cache_that_has_tokens_is_refused() -> None:
    model: Any = tiny_model("mamba2")
    cache = fs.StateCache(model, drafts=2)
    tokens = model.generate(PROMPT, past_key_values=cache, max_new_tokens=2)
    with pytest.raises(ValueError, match=r"begins with an empty cache, but this one has tokens; reset\(\) it first"):
        model.generate(tokens, past_key_values=cache, assistant_model=assistant(2), **OPTIONS)
