"""What a StateCache and an enabled model cannot do, they refuse by name; what is odd, but right, leaves no trace."""

import copy
import io
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import PROMPT, STATIC, TOKENS, call, greedy, of_families, refused, started, states_of
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation import BaseStreamer

import flashstate.integrations.transformers as fs
from flashstate.integrations.transformers.enabling import is_enabled
from flashstate.integrations.transformers.families import mixers_of
from flashstate.integrations.transformers.tiny import tiny_model

ARGUMENTS: list[tuple[str, dict[str, Any], str]] = [
    ("mamba2", {"dtype": "int4"}, r"dtype must be float32 or .*, got 'int4'"),
    ("mamba2", {"rounding": "stochastic"}, r"rounding='stochastic' is not for float32, which has nearest"),
    ("mamba2", {"seed": -1}, r"seed must be from 0 to \d+, got -1"),
    ("mamba2", {"replay": 65}, r"replay must be from 1 to 64, got 65"),
    ("mamba2", {"replay": 2, "drafts": 2}, r"replay must be 3 or more, the tokens of a call with drafts=2, got 2"),
    ("mamba2", {"drafts": True}, r"drafts must be an int, got True"),
    ("mamba2", {"max_batch": 0}, r"max_batch must be from 1 to \d+, got 0"),
    ("mamba2", {"max_cache_len": 2.5}, r"max_cache_len must be an int, got 2.5"),
    ("mamba", {"replay": 4}, "replay is for mixers of .* and KDA, but this model has MambaMixer"),
    ("glm5_next", {"drafts": 2, **STATIC}, "StaticIndexedLayer cannot: leave max_cache_len out"),
]


@pytest.mark.parametrize(("family", "options", "message"), ARGUMENTS, ids=str)
def test_wrong_arguments_are_refused_and_leave_the_model_alone(
    family: str, options: dict[str, Any], message: str
) -> None:
    model = tiny_model(family)
    refused(message, fs.StateCache, model, **options, error=(ValueError, TypeError))
    assert not is_enabled(model)


def test_models_that_it_cannot_serve_are_refused_and_stay_as_they_are() -> None:
    """Those of two recurrences, of none, and without a head; and what is no model."""
    small = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "num_hidden_layers": 1}
    mamba2, two = tiny_model("mamba2"), tiny_model("qwen3_5")
    two.model.layers[0].linear_attn = mixers_of(tiny_model("kimi_linear"))[0].mixer
    both = "mixers of one recurrence, but this model has KimiLinearDeltaAttention, Qwen3_5GatedDeltaNet"
    one_line = "^LlamaForCausalLM has no recurrent layer that flashstate knows; docs/transformers.md [^,]*$"
    refused(both, fs.StateCache, two, replay=4)
    refused(one_line, fs.enable, LlamaForCausalLM(LlamaConfig(vocab_size=96, **small)))
    refused("a model that generates, got Mamba2Model", fs.enable, mamba2.backbone)
    assert not any(is_enabled(model) for model in (two, mamba2))
    other: Any
    for other in (mamba2.config, "mamba2", torch.nn.Linear(2, 2)):
        message = f"model must be a model of Transformers, as from_pretrained returns it, got {type(other).__name__}"
        for offer in (fs.enable, fs.disable, fs.StateCache):
            refused(message, offer, other, error=TypeError)


def test_a_prompt_that_is_not_longer_than_what_a_cache_holds_is_refused() -> None:
    model: Any = tiny_model("qwen3_5")
    first = greedy(model, max_new_tokens=2)
    stock = greedy(model, first)[:, 7:]
    cache = fs.StateCache(model)
    greedy(model, past_key_values=cache, max_new_tokens=2)
    for tokens in (5, 7):
        message = rf"this cache holds 7 tokens and the prompt has {tokens}: give all tokens so far, or reset\(\)"
        refused(message, greedy, model, TOKENS[:, :tokens], past_key_values=cache, prefill_chunk_size=4)
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

    def step(of: Any) -> None:
        with torch.no_grad():
            of(TOKENS[:, 6:7], past_key_values=cache)

    def require_refused() -> None:
        uses = (partial(step, model), partial(step, model.base_model), partial(greedy, model, past_key_values=cache))
        for use in uses:
            refused(r"this StateCache failed half way, so some layers .*: reset\(\) it", use, error=RuntimeError)
        cache.reset()

    layers = model.get_decoder().layers
    for of in (model, model.base_model):
        call(model, PROMPT, cache, 0)
        refused("got a batch of 1", call, model, PROMPT[:1], cache, 6)  # before anything moved
        with layers[1].register_forward_pre_hook(interrupt), pytest.raises(KeyboardInterrupt):
            step(of)
        require_refused()
    if family == "mamba2":
        with torch.no_grad():
            layers[0](torch.zeros(2, 1, 32), cache_params=cache)  # and no other layer
        require_refused()
    assert torch.equal(greedy(model, past_key_values=cache), stock)


def test_a_cache_is_in_use_by_one_thread_at_a_time() -> None:
    model, stock, cache = started("mamba2", PROMPT[:1])

    class Intruder(BaseStreamer):
        def put(self, value: Tensor) -> None:
            with ThreadPoolExecutor(1) as other:
                for use in uses:
                    refused("this StateCache is in use by another call", other.submit(use).result, error=RuntimeError)

        def end(self) -> None: ...

    given, first = {"past_key_values": cache}, torch.zeros(1, dtype=torch.int64)
    inside, layer = model.base_model, model.base_model.layers[0]
    rows = (cache.reorder_cache, cache.batch_select_indices)
    uses = [
        cache.reset, lambda: cache.crop(0), lambda: copy.deepcopy(cache), lambda: cache.batch_repeat_interleave(1),
        *(partial(use, first) for use in rows), lambda: call(model, PROMPT, cache, 0), lambda: greedy(model, **given),
        lambda: inside(PROMPT, **given), lambda: layer(torch.zeros(1, 1, 32), cache),
    ]  # fmt: skip
    assert torch.equal(greedy(model, PROMPT[:1], streamer=Intruder(), **given), stock)


def test_an_enabled_model_and_a_used_cache_are_not_pickled_and_a_disabled_model_is(tmp_path: Path) -> None:
    model, stock, cache = started("mamba2")
    call(model, PROMPT, cache, 0)
    for dump in (pickle.dumps, lambda each: torch.save(each, io.BytesIO())):
        for each in (model, model.backbone):
            refused(r"decodes on flashstate: disable\(model\) before it", dump, each, error=pickle.PicklingError)
        refused("belongs to its model and cannot .*; copy.deepcopy copies it", dump, cache, error=pickle.PicklingError)
    model.save_pretrained(tmp_path)
    assert torch.equal(greedy(type(model).from_pretrained(tmp_path)), stock)
    assert torch.equal(greedy(pickle.loads(pickle.dumps(fs.disable(model)))), stock)


@of_families(mamba2={"replay": 8, "drafts": 2}, qwen3_5={"drafts": 2})
def test_a_copy_of_a_cache_goes_on_alone(family: str, options: dict[str, Any]) -> None:
    model: Any = tiny_model(family)
    both = greedy(model, max_new_tokens=4)
    stock = greedy(model, both, max_new_tokens=4)
    cache = fs.StateCache(model, **options)
    greedy(model, past_key_values=cache, max_new_tokens=4)
    for kept in (copy.deepcopy(cache), cache):
        assert torch.equal(greedy(model, both, past_key_values=kept, max_new_tokens=4), stock)


def test_a_cache_of_inference_mode_serves_outside_of_it() -> None:
    model, stock, cache = started("qwen3_5", **STATIC)
    with torch.inference_mode():
        assert torch.equal(greedy(model, past_key_values=cache), stock)
    cache.reset()
    assert torch.equal(greedy(model, past_key_values=cache), stock)


def test_a_model_in_another_dtype_is_refused_by_name() -> None:
    model: Any = tiny_model("qwen3_5")
    cache = fs.StateCache(model)
    made = "was made for a model in float32, but the model is in float16 now: make"
    for use in (greedy, lambda model, **given: model.base_model(PROMPT, **given)):
        refused(made, use, model.half(), past_key_values=cache, error=TypeError)
    model.double()
    for use in (greedy, fs.StateCache, lambda model: fs.enable(fs.disable(model))):
        refused(r"model must be float32 or bfloat16 or float16, got float64", use, model, error=TypeError)


def test_a_cache_is_refused_by_other_models_and_by_its_own_when_that_is_disabled() -> None:
    model, other = tiny_model("mamba2"), fs.enable(tiny_model("mamba2"))
    cache = fs.StateCache(model)
    refused("this StateCache is for another model than that of this Mamba2Mixer", call, other, PROMPT, cache, 0)
    copies = [copy.deepcopy(model), fs.disable(copy.deepcopy(model)), copy.copy(model)]
    copies.append(copy.deepcopy(copies[1]))
    for each in (*map(fs.disable, copies), fs.disable(model)):
        for use in (partial(call, each, PROMPT, cache, 0), partial(greedy, each, past_key_values=cache)):
            refused(r"not enabled for a StateCache: enable\(model\), and give it a", use, error=RuntimeError)
    cache.reset()
    assert greedy(fs.enable(model), past_key_values=cache).shape == (2, 14)


def test_other_rows_and_more_rows_than_max_batch_are_refused_before_anything_moves() -> None:
    model: Any = tiny_model("qwen3_5")
    cache, small = fs.StateCache(model, **STATIC), fs.StateCache(model, max_batch=1)
    call(model, PROMPT, cache, 0)
    before = [state.clone() for state in states_of(cache)]
    for rows in (1, 3):
        message = rf"has 2 rows, got a batch of {rows}; reset\(\) makes it empty"
        refused(message, call, model, TOKENS[:1, 6:7].expand(rows, -1), cache, 6)
    assert all(torch.equal(state, old) for state, old in zip(states_of(cache), before, strict=True))
    for more in (lambda: call(model, PROMPT, small, 0), lambda: small.batch_repeat_interleave(2)):
        refused(r"this cache has room for max_batch=1 rows, got 2", more)
        call(model, PROMPT[:1], small, 0)


def test_more_tokens_than_a_static_cache_has_room_for_are_refused_before_anything_moves() -> None:
    model, stock, cache = started("jamba", drafts=3, **STATIC)
    message = "room for max_cache_len=14 tokens, of which 0 are taken, got 18 more"
    refused(message, greedy, model, PROMPT.repeat(1, 3), past_key_values=cache)
    assert torch.equal(greedy(model, past_key_values=cache), stock)
    for of, taken in ((model, 13), (model.base_model, 14)):
        with torch.no_grad(), pytest.raises(ValueError, match=f"of which {taken} are taken, got 5 more"):
            of(PROMPT[:, :5], None, None, cache)
        with torch.no_grad():
            model.base_model(PROMPT[:, :1], past_key_values=cache)
    model = tiny_model("mamba2")  # without attention there is no longest length
    assert greedy(model, past_key_values=fs.StateCache(model, max_cache_len=1)).shape == (2, 14)


def test_only_drafts_of_the_last_call_are_taken_back() -> None:
    model: Any = tiny_model("mamba2")
    cache = fs.StateCache(model, drafts=2, replay=3)

    def require_refused(tokens: int, most: int) -> None:
        words = rf"crop must be given 0 or less, and {most} tokens of the last call .* drafts=2, got {tokens}"
        refused(words, cache.crop, tokens)

    call(model, PROMPT, cache, 0)
    require_refused(-1, 0)
    call(model, TOKENS[:, 6:9], cache, 6)
    require_refused(-3, 2)
    require_refused(1, 2)
    cache.crop(-1)
    require_refused(-2, 1)
    assert cache.get_seq_length() == 8
    cache.reorder_cache(torch.tensor([1, 0]))
    require_refused(-1, 0)
    assert not fs.StateCache(model).is_croppable


def test_rows_of_static_attention_layers_are_neither_repeated_nor_selected_nor_layers_offloaded() -> None:
    model: Any = tiny_model("qwen3_5")
    cache = fs.StateCache(model, **STATIC)
    call(model, PROMPT, cache, 0)
    static = "rows of static attention layers: leave max_cache_len out"
    refused(f"cannot repeat {static}", cache.batch_repeat_interleave, 2)
    refused(f"cannot select {static}", cache.batch_select_indices, torch.tensor([0]))
    refused(r"repeats must be from 1 to \d+, got 0", cache.batch_repeat_interleave, 0)
    for move in (cache.layers[0].offload, cache.layers[0].prefetch):
        refused(r"a StateCache is not offloaded", move, error=NotImplementedError)


def test_a_cache_says_what_it_is() -> None:
    model: Any = tiny_model("qwen3_5")
    cache = fs.StateCache(model, dtype="int8", rounding="stochastic", drafts=2, **STATIC)
    layers = "2 recurrent layers of 4 x 8 x 16, int8 stochastic, drafts 2, static"
    assert repr(cache) == f"StateCache(Qwen3_5ForCausalLM, empty, {layers}, 16.6 KiB, cpu)"
    call(model, PROMPT, cache, 0)
    assert repr(cache).startswith(f"StateCache(Qwen3_5ForCausalLM, 2 rows of 6 tokens, {layers}, ")
    assert repr(fs.StateCache(tiny_model("lfm2"))).endswith("empty, 2 recurrent layers, float32, 0 B, cpu)")
