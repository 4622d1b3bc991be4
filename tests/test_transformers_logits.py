"""Logits of models on flashstate are those of Transformers, call by call, with a prompt that is padded on the left;
what formats of a StateCache get wrong, what they draw, and what they take."""

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import pytest
import torch
from decoding import KNOWN, REPLAYED, STATIC, TOKENS, call, expected, forced, greedy, states_of, stock_cache, store_of
from needs_transformers import VERSION
from torch import Tensor

import flashstate
import flashstate.integrations.transformers as fs
from flashstate.integrations.transformers.families import mixers_of
from flashstate.integrations.transformers.tiny import tiny_model
from flashstate.proof import error_ratio, interpreted
from flashstate.state.formats import FORMATS

MASK = (torch.arange(TOKENS.shape[1] + 1) >= torch.tensor([[2], [0]])).long()
BY_ONE = (3, *6 * (1,))
WITH_DRAFTS = (3, (1, 2), (2, 1), 3)
WAYS: dict[str, tuple[Sequence[Any], dict[str, Any]]] = {  # calls, and options of a StateCache
    "static": (BY_ONE, STATIC),
    "stepped": (BY_ONE, {}),  # the prompt too, as where nobody has a kernel for it
    "drafts": (WITH_DRAFTS, {"drafts": 2}),
    "replayed drafts": (WITH_DRAFTS, {"drafts": 2, "replay": 4}),
    "pieces": ((3, 2, 1, 2, 1), {}),  # two tokens are another piece of the prompt
    "replayed pieces": ((3, 1, 1, 1, 2, 1), {"replay": 2}),
}
DENSE = {"mlp_layer_types": ["dense"] * 3}
HALF = {"dtype": torch.bfloat16}
VARIANTS: dict[str, dict[str, Any]] = {  # of families, which differ in their mixers
    "mamba2, one group": {"n_groups": 1},
    "mamba2, limits of prompts": {"time_step_limit": (0.1, 0.2)},
    "nemotron_h, limits of prompts": {"time_step_min": 0.1},
    "zamba2, limits of prompts": {"time_step_min": 0.1},
    "falcon_h1, gate before the norm": {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    "falcon_h1, norm before the gate": {"mamba_rms_norm": True, "mamba_norm_before_gate": True},
    "qwen3_next, heads alone": {"linear_num_key_heads": 4},
    "olmo_hybrid, beta below 1": {"linear_allow_neg_eigval": False},
    "bailing_hybrid, no bound": {"kda_safe_gate": False},
    "glm5_next, no bound": {"linear_lower_bound": None},
    "mamba, half": HALF, "falcon_h1, half": HALF, "olmo_hybrid, half": HALF, "bailing_hybrid, half": HALF | DENSE,
    "lfm2, half": HALF,
}  # fmt: skip
# Models whose steps of one token fail in Transformers itself, before 5.23.
STEPLESS = ("falcon_h1, gate before the norm", "falcon_h1, norm before the gate") if VERSION < (5, 23) else ()
CASES = [*KNOWN, *(name for name in VARIANTS if name.split(",")[0] in KNOWN)]


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = case.split(",")[0]
    model: Any = tiny_model(family, **VARIANTS.get(case, {}))
    tokens = MASK[:, :9].bool()
    exact, plain = (logits[tokens] for logits in expected(model, (9,) if case in STEPLESS else BY_ONE, MASK))
    fs.enable(model)
    got = {"stock cache": forced(model, BY_ONE, stock_cache(model), MASK)}
    for way, (calls, options) in WAYS.items():
        if ("replay" in options and family not in REPLAYED) or ("pieces" in way and case != family):
            continue
        with monkeypatch.context() as patched:
            if way == "stepped":
                patched.setattr("flashstate.integrations.transformers.cache.goes_stock", lambda *_: False)
            got[way] = forced(model, calls, fs.StateCache(model, **options), MASK)
    errors = {way: error_ratio(logits[tokens], exact, plain) for way, logits in got.items()}
    assert max(errors.values()) <= 1, errors


@pytest.mark.interpreted
@pytest.mark.parametrize(("family", "replay"), [("qwen3_next", None), ("kimi_linear", 4)])
def test_kernels_take_all_views_of_projections(family: str, replay: int | None) -> None:
    """With a ring that is folded."""
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "dtype": torch.bfloat16}
    model: Any = tiny_model(family, **layers, **({"mlp_layer_types": 2 * ["dense"]} if family == "kimi_linear" else {}))
    exact, plain = expected(model, BY_ONE)
    with interpreted():
        got = forced(model, WITH_DRAFTS, fs.StateCache(model, drafts=2, replay=replay))
    assert error_ratio(got, exact, plain) <= 1


ONE_BY_ONE = (5, 1, 1, 1, 1)
MODELS: dict[str, dict[str, Any]] = {  # without experts, which are chosen anew where a state differs a little
    "mamba2": {}, "qwen3_5": {}, "mamba": {}, "kimi_linear": {"mlp_layer_types": ["dense"] * 3},
}  # fmt: skip
STORED = [
    (dtype, rounding)
    for dtype, known in FORMATS.items()
    for rounding in known.roundings
    if dtype != torch.float32 and rounding != "stochastic_hw"
]
FORMAT_CASES = [(family, *stored) for family, stored in zip(cycle(MODELS), STORED, strict=False)]
RANDOM: dict[str, Any] = {"dtype": torch.int8, "rounding": "stochastic"}


def rounded(model: Any, dtype: torch.dtype, rounding: str) -> Tensor:
    """Logits of Transformers where states are rounded to a format after every call."""
    kept, found, logits = stock_cache(model), mixers_of(model), []
    pool: Any = None
    for first, n in zip((0, *range(5, 9)), ONE_BY_ONE, strict=True):
        logits.append(call(model, TOKENS[:, first : first + n], kept, first))
        states = [each.kind.view(kept.layers[layer].recurrent_states[0]) for layer, each in found.items()]
        if pool is None:
            heads, rows, cols = states[0].shape[1:]
            sizes: Any = {"slots": len(TOKENS), "layers": len(states), "heads": heads, "rows": rows, "cols": cols}
            pool = flashstate.StatePool.mamba2(**sizes, dtype=dtype, rounding=rounding, seed=0)
            slots = pool.acquire(len(TOKENS))
        for i, state in enumerate(states):
            pool.write(i, slots, state)
            state.copy_(pool.read(i, slots))
        pool.advance()
    return torch.cat(logits, 1)


@pytest.mark.parametrize(("family", "dtype", "rounding"), FORMAT_CASES, ids=str)
def test_a_format_gets_no_more_wrong_than_rounding_every_state_does(
    family: str, dtype: torch.dtype, rounding: str
) -> None:
    """No further from float64 than Transformers is with states of this format, and not as near as in float32."""
    model: Any = tiny_model(family, **MODELS[family])
    exact, plain = expected(model, ONE_BY_ONE)
    budget = rounded(model, dtype, rounding)
    ways: list[tuple[Sequence[int], dict[str, int]]] = [(ONE_BY_ONE, {}), ((5, 1, 3), {"drafts": 2})]
    for calls, more in [*ways, ((5, 1, 3), {"replay": 3, "drafts": 2})][: 2 + (family != "mamba")]:
        got = forced(model, calls, fs.StateCache(model, dtype=dtype, rounding=rounding, seed=1, **more))
        assert error_ratio(got, exact, budget) <= 1 < error_ratio(got, exact, plain), more


def generated(cache: fs.StateCache, model: Any, **options: Any) -> list[Tensor]:
    """The logits of a generation, and what it leaves stored."""
    scores = {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 4}
    logits = greedy(model, past_key_values=cache, **scores, **options).logits
    return [result.clone() for result in (*logits, *states_of(cache))]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("family", "more", "options"),
    [("mamba2", {"replay": 3}, {}), ("qwen3_5", {"drafts": 2}, {"num_beams": 3})],
    ids=str,
)
def test_a_seed_reproduces_a_generation(family: str, more: dict[str, int], options: dict[str, int]) -> None:
    """In another cache, and in the same cache after a reset; other seeds, and none, draw other bits."""
    model: Any = tiny_model(family)
    kept, *others = (fs.StateCache(model, **RANDOM, seed=seed, **more) for seed in (3, 3, 4, None, None))
    want = generated(kept, model, **options)
    alike, other, first, second = (generated(cache, model, **options) for cache in others)
    assert same(alike, want)
    assert not any(same(*pair) for pair in ((other, want), (first, want), (first, second)))
    kept.reset()
    assert same(generated(kept, model, **options), want)
    assert store_of(fs.StateCache(model, dtype="int8", max_batch=2)).seed is None  # which rounding to nearest needs not


def test_every_step_every_row_and_every_copy_of_a_row_draws_bits_of_its_own() -> None:
    model = tiny_model("mamba2")
    kept = fs.StateCache(model, **RANDOM, seed=3, drafts=2)
    call(model, TOKENS[[0, 0], :5], kept, 0)
    seed = store_of(kept).seed
    assert seed is not None
    before = seed.clone()
    call(model, TOKENS[[0, 0], 5:6], kept, 5)
    assert not torch.any(seed == before)
    kept.batch_repeat_interleave(2)
    kept.reorder_cache(torch.tensor([1, 0, 1, 2]))
    call(model, TOKENS[4 * [0], 6:7], kept, 6)
    rows = [row.tolist() for row in states_of(kept)[0].view(4, -1)]
    assert all(rows.count(row) == 1 for row in rows)


def test_bytes_are_those_of_all_that_is_kept() -> None:
    model, bytes_of = tiny_model("qwen3_5"), {}
    for dtype in FORMATS:
        cache = fs.StateCache(model, dtype=dtype, max_batch=3, drafts=2)
        states, windows = states_of(cache), store_of(cache).windows
        scales = 4 * states[0].shape[:-1].numel() * len(states) if FORMATS[dtype].scaled else 0
        bytes_of[dtype] = cache.bytes_of_state
        assert states[0].shape[0] == 3 * (1 + 2)
        assert cache.bytes_of_state == sum(part.nbytes for part in (*states, windows)) + scales
        assert cache.bytes == cache.bytes_of_state  # attention layers are empty
    assert bytes_of[torch.float32] > bytes_of[torch.float16] > bytes_of[torch.int8]
    call(model, TOKENS, cache, 0)
    heads, size = model.config.num_key_value_heads, model.config.head_dim
    assert cache.bytes - cache.bytes_of_state == 2 * 4 * TOKENS.numel() * heads * size  # keys and values
