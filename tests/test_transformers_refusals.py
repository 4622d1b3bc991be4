"""What a StateCache and an enabled model cannot do, they refuse by name, before anything changes."""

from typing import Any

import pytest
import torch
from decoding import KNOWN, ONE_OF_EACH, PROMPT, REPLAYED, STATIC, TOKENS, call, greedy, states_of, stock_cache

import flashstate.integrations.transformers as fs
from flashstate.integrations.transformers.enabling import is_enabled
from flashstate.integrations.transformers.families import mixers_of
from flashstate.integrations.transformers.tiny import tiny_model

ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"dtype": torch.float64}, r"dtype must be float32 or .*, got float64"),
    ({"dtype": "int4"}, r"dtype must be float32 or .*, got 'int4'"),
    ({"rounding": "up"}, r"rounding must be one of nearest, stochastic, stochastic_hw, got 'up'"),
    ({"rounding": "stochastic"}, r"rounding='stochastic' is not for float32, which has nearest"),
    ({"dtype": torch.int8, "rounding": "stochastic_hw"}, r"rounding='stochastic_hw' is not for int8"),
    ({"dtype": torch.float16, "rounding": "stochastic_hw"}, r"rounding='stochastic_hw' needs an NVIDIA GPU"),
    ({"rounds": 0}, r"rounds must be from 1 to 16, got 0"),
    ({"seed": -1}, r"seed must be from 0 to \d+, got -1"),
    ({"replay": 65}, r"replay must be from 1 to 64, got 65"),
    ({"replay": 2, "drafts": 2}, r"replay must be 3 or more, the tokens of a call with drafts=2, got 2"),
    ({"drafts": 64}, r"drafts must be from 0 to 63, got 64"),
    ({"drafts": True}, r"drafts must be an int, got True"),
    ({"max_batch": 0}, r"max_batch must be from 1 to \d+, got 0"),
    ({"max_cache_len": 2.5}, r"max_cache_len must be an int, got 2.5"),
]

STUCK = {"glm5_next": "StaticIndexedLayer", "lfm3": "StaticSlidingWindowLayer"}


@pytest.mark.parametrize(("options", "message"), ARGUMENTS, ids=[str(options) for options, _ in ARGUMENTS])
def test_wrong_arguments_are_refused_and_leave_the_model_alone(options: dict[str, Any], message: str) -> None:
    model = tiny_model("mamba2")
    with pytest.raises((ValueError, TypeError), match=message):
        fs.StateCache(model, **options)
    assert not is_enabled(model)


@pytest.mark.parametrize("family", [family for family in KNOWN if family not in REPLAYED])
def test_replay_is_refused_for_models_whose_tokens_no_ring_keeps(family: str) -> None:
    model = tiny_model(family)
    mixer = type(next(iter(mixers_of(model).values())).mixer).__name__
    with pytest.raises(ValueError, match=f"replay is for mixers of .* and KDA, but this model has {mixer}"):
        fs.StateCache(model, replay=4)
    assert not is_enabled(model)


def test_replay_is_refused_for_mixers_of_two_recurrences() -> None:
    model, other = tiny_model("qwen3_5"), tiny_model("kimi_linear")
    model.model.layers[0].linear_attn = mixers_of(other)[0].mixer
    both = "KimiLinearDeltaAttention, Qwen3_5GatedDeltaNet"
    with pytest.raises(ValueError, match=f"replay is for mixers of one recurrence, but this model has {both}"):
        fs.StateCache(model, replay=4)


@pytest.mark.parametrize("family", [family for family in STUCK if family in KNOWN])
def test_drafts_are_refused_over_static_layers_that_take_nothing_back(family: str) -> None:
    message = f"drafts need layers that take tokens back, which {STUCK[family]} cannot: leave max_cache_len out"
    with pytest.raises(ValueError, match=message):
        fs.StateCache(tiny_model(family), drafts=2, **STATIC)


@pytest.mark.parametrize("options", [{}, {"replay": 3}], ids=str)
def test_only_drafts_of_the_last_call_are_taken_back(options: dict[str, int]) -> None:
    model: Any = tiny_model("mamba2")
    cache = fs.StateCache(model, drafts=2, **options)

    def require_refused(tokens: int, most: int) -> None:
        message = rf"crop must be given 0 or less, and {most} tokens of the last call .* drafts=2, got {tokens}"
        with pytest.raises(ValueError, match=message):
            cache.crop(tokens)

    call(model, PROMPT, cache, 0)
    require_refused(-1, 0)
    call(model, TOKENS[:, 6:9], cache, 6)
    require_refused(-3, 2)
    require_refused(1, 2)
    cache.crop(-1)
    require_refused(-2, 1)
    cache.crop(-1)
    require_refused(-1, 0)
    cache.crop(0)
    assert cache.get_seq_length() == 7
    call(model, TOKENS[:, 7:9], cache, 7)
    cache.reorder_cache(torch.tensor([1, 0]))
    require_refused(-1, 0)
    assert not fs.StateCache(model).is_croppable


@pytest.mark.parametrize("options", [{}, STATIC], ids=["dynamic", "static"])
@pytest.mark.parametrize("family", ["mamba", "falcon_h1", "qwen3_5"])
def test_another_number_of_rows_is_refused(family: str, options: dict[str, int]) -> None:
    model: Any = tiny_model(family)
    cache = fs.StateCache(model, **options)
    call(model, PROMPT, cache, 0)
    before = [state.clone() for state in states_of(cache)]
    for rows in (1, 3):
        with pytest.raises(
            ValueError, match=rf"this cache has 2 rows, got a batch of {rows}; reset\(\) makes it empty"
        ):
            call(model, TOKENS[:1, 6:7].expand(rows, -1), cache, 6)
    assert all(torch.equal(state, old) for state, old in zip(states_of(cache), before, strict=True))


def test_more_rows_than_max_batch_are_refused() -> None:
    model: Any = tiny_model("mamba2")
    cache = fs.StateCache(model, max_batch=1)
    for rows in (lambda: call(model, PROMPT, cache, 0), lambda: cache.batch_repeat_interleave(2)):
        with pytest.raises(ValueError, match=r"this cache has room for max_batch=1 rows, got 2"):
            rows()
        call(model, PROMPT[:1], cache, 0)


@pytest.mark.parametrize("family", ["mamba2", "qwen3_5"])
def test_a_model_in_another_dtype_is_refused_by_name(family: str) -> None:
    model: Any = tiny_model(family)
    cache = fs.StateCache(model)
    with pytest.raises(TypeError, match=r"was made for a model in float32, but the model is in float16 now: make"):
        greedy(model.half(), past_key_values=cache)
    model.double()
    for use in (greedy, fs.StateCache, lambda model: fs.enable(fs.disable(model))):
        with pytest.raises(TypeError, match=r"model must be float32 or bfloat16 or float16, got float64"):
            use(model)


def test_what_is_no_model_of_transformers_is_refused() -> None:
    other: Any
    for other in (tiny_model("mamba2").config, "mamba2", None, torch.nn.Linear(2, 2)):
        message = f"model must be a model of Transformers, as from_pretrained returns it, got {type(other).__name__}"
        for use in (fs.enable, fs.disable, fs.StateCache):
            with pytest.raises(TypeError, match=message):
                use(other)


def test_a_cache_says_what_it_is() -> None:
    model: Any = tiny_model("qwen3_5")
    cache = fs.StateCache(model, dtype="int8", rounding="stochastic", drafts=2, **STATIC)
    layers = "2 recurrent layers of 4 x 8 x 16, int8 stochastic, drafts 2, static"
    assert repr(cache) == f"StateCache(Qwen3_5ForCausalLM, empty, {layers}, 16.6 KiB, cpu)"
    call(model, PROMPT, cache, 0)
    assert repr(cache).startswith(f"StateCache(Qwen3_5ForCausalLM, 2 rows of 6 tokens, {layers}, ")
    assert repr(fs.StateCache(tiny_model("lfm2"))).endswith("empty, 2 recurrent layers, float32, 0 B, cpu)")


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_a_cache_is_refused_by_other_models_and_by_its_own_when_that_is_disabled(family: str) -> None:
    model, other = tiny_model(family), fs.enable(tiny_model(family))
    cache = fs.StateCache(model)
    with pytest.raises(ValueError, match=r"this StateCache is for another model than that of this \w+"):
        call(other, PROMPT, cache, 0)
    fs.disable(model)
    for use in (lambda: call(model, PROMPT, cache, 0), lambda: greedy(model, past_key_values=cache)):
        with pytest.raises(RuntimeError, match=r"a StateCache is for a model that runs on flashstate, but this model"):
            use()
    cache.reset()
    assert greedy(fs.enable(model), past_key_values=cache).shape == (2, 14)


@pytest.mark.parametrize("name", ["seq_idx", "cu_seq_lens_q"])
def test_packed_sequences_are_refused(name: str) -> None:
    """With a StateCache, and in a step over a stock cache."""
    model: Any = fs.enable(tiny_model("bamba"))
    packed = {name: torch.zeros(2, 1, dtype=torch.int32)}
    stock = stock_cache(model)
    call(model, PROMPT, stock, 0)
    for cache in (fs.StateCache(model), stock):
        with pytest.raises(
            ValueError, match=r"seq_idx and cu_seq_lens_q are not for a model that decodes on flashstate"
        ):
            call(model, TOKENS[:, 6:7], cache, 6, **packed)


def test_rows_of_static_attention_layers_are_neither_repeated_nor_selected() -> None:
    model: Any = tiny_model("qwen3_5")
    cache = fs.StateCache(model, **STATIC)
    call(model, PROMPT, cache, 0)
    with pytest.raises(ValueError, match=r"cannot repeat rows of static attention layers: leave max_cache_len out"):
        cache.batch_repeat_interleave(2)
    with pytest.raises(ValueError, match=r"cannot select rows of static attention layers: leave max_cache_len out"):
        cache.batch_select_indices(torch.tensor([0]))
    with pytest.raises(ValueError, match=r"repeats must be from 1 to \d+, got 0"):
        cache.batch_repeat_interleave(0)


def test_a_cache_is_not_offloaded() -> None:
    cache = fs.StateCache(tiny_model("mamba"))
    for move in (cache.layers[0].offload, cache.layers[0].prefetch):
        with pytest.raises(NotImplementedError, match=r"a StateCache is not offloaded"):
            move()
