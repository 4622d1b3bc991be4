"""What `generate` makes of prompts on flashstate is what it makes of them in Transformers, also with drafts, wherever
they come from; sources of drafts that cannot work are refused."""

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import KNOWN, LONG, NEW, PROMPT, STATIC, TOKENS, Steps, call, expected, greedy, of_families, started
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, LogitsProcessor
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator
from transformers.modeling_layers import MtpModel

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


@of_families(mamba={"max_batch": 3}, qwen3_5={"max_cache_len": 14}, kimi_linear={"replay": 3, "drafts": 2}, lfm2={})
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


@of_families(mamba2={"max_cache_len": 14}, qwen3_5={"drafts": 2}, kimi_linear={"replay": 3, "drafts": 2}, lfm2={})
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


FIRST = PROMPT[:1]
DRAFTS = 3
RIGHT = (2, 0, 3, 1)  # drafts that are right, call by call


@pytest.mark.parametrize(
    ("family", "options", "padding"),
    [
        ("mamba", {}, 2),
        ("mamba2", {"replay": DRAFTS + 2}, 2),
        ("kimi_linear", {"replay": DRAFTS + 2}, 0),
        ("glm5_next", {}, 0),
        ("lfm2", {"max_batch": 1, "max_cache_len": 18}, 2),
        ("falcon_h1", {"max_batch": 1, "max_cache_len": 18}, 0),
    ],
    ids=str,
)
def test_drafts_do_not_change_tokens(
    family: str, options: dict[str, Any], padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompt lookup proposes known tokens, of which RIGHT are right, and one more than the cache can take back."""
    model: Any = tiny_model(family)
    given = {"max_new_tokens": 12, "attention_mask": (torch.arange(FIRST.shape[1]) >= padding).long()[None]}
    want, turns = greedy(model, FIRST, **given), cycle(RIGHT)

    def get_candidates(self: Any, input_ids: Tensor, **given: Any) -> tuple[Tensor, None]:
        length, right = input_ids.shape[1], next(turns)
        drafts = want[:, length : length + DRAFTS + 1].clone()
        drafts[:, right : right + 1] += 1
        return torch.cat([input_ids, drafts % 96], 1), None

    monkeypatch.setattr(PromptLookupCandidateGenerator, "get_candidates", get_candidates)
    cache = fs.StateCache(model, drafts=DRAFTS, **options)
    steps = Steps(cache)
    assert torch.equal(greedy(model, FIRST, past_key_values=cache, prompt_lookup_num_tokens=2, **given), want)
    assert {(DRAFTS, back) for back in range(DRAFTS + 1)} <= set(steps)
    assert cache.get_seq_length() == want.shape[1] - 1


class Few(LogitsProcessor):
    """Leaves a model one token or two to choose, two times each: so that models with other weights often agree."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        length = input_ids.shape[1]
        left = (11 * length + 29 * torch.arange(2 if length % 4 < 2 else 1)) % 96
        return torch.full_like(scores, -torch.inf).index_copy(1, left, scores[:, left])


GIVEN: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "logits_processor": [Few()]}


def assistant(tokens: int) -> LlamaForCausalLM:
    """A model of attention that gives so many candidates for a call."""
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = LlamaForCausalLM(config).eval()
    model.generation_config.update(
        num_assistant_tokens=tokens, num_assistant_tokens_schedule="heuristic", assistant_confidence_threshold=0.0
    )
    return model


@pytest.mark.parametrize(
    ("family", "options", "candidates"),
    [("jamba", {"drafts": 4}, 4), ("qwen3_next", {"drafts": 4, "replay": 7}, 4), ("mamba2", {"drafts": 2}, 6)],
    ids=str,
)
def test_with_an_assistant_model_tokens_are_those_of_plain_decoding(
    family: str, options: dict[str, Any], candidates: int
) -> None:
    model: Any = tiny_model(family)
    plain = model.generate(LONG[:1], **GIVEN)
    cache = fs.StateCache(model, **options)
    steps = Steps(cache)
    given = {"past_key_values": cache, "assistant_model": assistant(candidates)}
    assert torch.equal(model.generate(LONG[:1], **given, **GIVEN), plain)
    steps.check(options["drafts"])


def test_samples_are_those_of_the_model_and_a_seed_repeats_them() -> None:
    """With one token to sample from, samples are known; with more, they are those of a seed."""
    model: Any = tiny_model("qwen3_next")
    cache, short = fs.StateCache(model, drafts=3), GIVEN | {"max_new_tokens": 16}

    def sampled(**options: Any) -> Tensor:
        cache.reset()
        given = short | {"do_sample": True, "assistant_model": assistant(5)}  # anew, since its schedule learns
        with torch.random.fork_rng():
            torch.manual_seed(5)
            return model.generate(LONG[:1], past_key_values=cache, **given, **options)

    plain = model.generate(LONG[:1], **short)
    assert torch.equal(sampled(top_k=1), plain)
    first = sampled(temperature=2.0)
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
def test_layers_for_candidates_give_the_tokens_of_plain_decoding(family: str, layers: int, tmp_path: Path) -> None:
    model = with_own_drafts(family, layers, tmp_path)
    plain = model.generate(LONG[:1], **GIVEN)
    cache = fs.StateCache(model, drafts=layers)
    steps = Steps(cache)
    assert torch.equal(model.generate(LONG[:1], past_key_values=cache, use_mtp=True, **GIVEN), plain)
    assert steps[0] == (0, 0)  # candidates need what the model makes of the prompt
    steps.check(layers)
    if layers > 1:
        with pytest.raises(ValueError, match=r"use_mtp has a candidate from each of 2 layers: .* as many, got 1"):
            model.generate(LONG[:1], past_key_values=fs.StateCache(model, drafts=1), use_mtp=True, **GIVEN)


def test_sources_and_caches_that_cannot_take_tokens_back_are_refused() -> None:
    model: Any = tiny_model("mamba2")
    fresh, used, other = (fs.StateCache(model, drafts=2) for _ in range(3))
    tokens = model.generate(LONG[:1], past_key_values=used, max_new_tokens=2)
    without = r"assisted generation needs past_key_values=StateCache\(model, drafts="
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (fresh, {"assistant_model": tiny_model("jamba")}, "assistant_model has recurrent layers, .*: JambaFor"),
        (other, {"assistant_early_exit": 1}, "assistant_early_exit takes tokens of several calls back"),
        (used, {"assistant_model": assistant(2)}, r"begins with an empty cache, but this one has tokens; reset\(\) it"),
        (None, {"assistant_model": assistant(2)}, without),
        (DynamicCache(config=model.config), {"assistant_model": assistant(2)}, without),
        (fs.StateCache(model), {"assistant_model": assistant(2)}, without),
    ]
    for cache, source, message in refused:
        with pytest.raises(ValueError, match=message):
            model.generate(tokens, past_key_values=cache, **source, **GIVEN)


def test_a_failed_generation_with_drafts_does_not_change_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    model, stock, cache = started("mamba2", FIRST[:, :4], drafts=3)
    monkeypatch.setattr(PromptLookupCandidateGenerator, "get_candidates", lambda *_, **given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        greedy(model, FIRST, past_key_values=cache, prompt_lookup_num_tokens=3)
    assert torch.equal(greedy(model, FIRST[:, :4], past_key_values=cache), stock)
