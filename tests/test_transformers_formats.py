"""Formats of a StateCache: what they get wrong, what they draw, and what they take."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from decoding import PROMPT, TOKENS, call, expected, greedy, states_of, stock_cache, store_of, teacher_forced
from torch import Tensor

import flashstate
import flashstate.integrations.transformers as fs
from flashstate.integrations.transformers.families import mixers_of
from flashstate.integrations.transformers.tiny import tiny_model
from flashstate.proof import error_ratio
from flashstate.state.formats import FORMATS

ONE_BY_ONE = (5, 1, 1, 1, 1)
WITH_DRAFTS = (5, 1, 3)
# Without experts, which are chosen anew where a state differs a little.
MODELS: dict[str, dict[str, Any]] = {
    "mamba": {},
    "mamba2": {},
    "qwen3_5": {},
    "kimi_linear": {"mlp_layer_types": ["dense"] * 3},
}
STORED = [
    (dtype, rounding)
    for dtype, known in FORMATS.items()
    for rounding in known.roundings
    if dtype != torch.float32 and rounding != "stochastic_hw"
]
IN_TURN = [(torch.bfloat16, "nearest"), (torch.int8, "stochastic"), (torch.float8_e4m3fn, "nearest")]
CASES = [(family, *stored) for family in ("mamba2", "qwen3_5") for stored in STORED]
CASES += [(family, *stored) for family in ("mamba", "kimi_linear") for stored in IN_TURN]
RANDOM: dict[str, Any] = {"dtype": torch.int8, "rounding": "stochastic"}


@cache
def model_of(family: str) -> Any:
    return tiny_model(family, **MODELS[family])


@cache
def references(family: str) -> tuple[Tensor, Tensor]:
    """Logits of Transformers in float64 and in float32."""
    return expected(tiny_model(family, **MODELS[family]), ONE_BY_ONE)


@cache
def rounded(family: str, dtype: torch.dtype, rounding: str) -> Tensor:
    """Logits of Transformers where states are rounded to a format after every call."""
    model: Any = tiny_model(family, **MODELS[family])
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


def require_within_budget(family: str, dtype: torch.dtype, rounding: str, lengths: Sequence[int], **more: Any) -> None:
    """No further from float64 than Transformers is with states of this format, and not as near as in float32."""
    model, (exact, plain) = model_of(family), references(family)
    got = teacher_forced(model, lengths, fs.StateCache(model, dtype=dtype, rounding=rounding, seed=1, **more))
    assert error_ratio(got, exact, rounded(family, dtype, rounding)) <= 1
    assert error_ratio(got, exact, plain) > 1


@pytest.mark.parametrize(("family", "dtype", "rounding"), CASES, ids=str)
def test_a_format_gets_no_more_wrong_than_rounding_every_state_does(
    family: str, dtype: torch.dtype, rounding: str
) -> None:
    require_within_budget(family, dtype, rounding, ONE_BY_ONE)


@pytest.mark.parametrize(("dtype", "rounding"), STORED, ids=str)
def test_drafts_in_a_format_get_no_more_wrong(dtype: torch.dtype, rounding: str) -> None:
    require_within_budget("qwen3_5", dtype, rounding, WITH_DRAFTS, drafts=2)


@pytest.mark.parametrize(("family", "dtype", "rounding"), [case for case in CASES if case[0] != "mamba"], ids=str)
def test_states_that_are_replayed_get_no_more_wrong(family: str, dtype: torch.dtype, rounding: str) -> None:
    require_within_budget(family, dtype, rounding, WITH_DRAFTS, replay=3, drafts=2)


def generated(family: str, cache: fs.StateCache, **options: Any) -> list[Tensor]:
    """The logits of a generation, and what it leaves stored."""
    scores = {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 4}
    return [*greedy(model_of(family), past_key_values=cache, **scores, **options).logits, *states_of(cache)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize(
    ("family", "more"),
    [("mamba2", {}), *((family, {"replay": 3}) for family in ("mamba2", "qwen3_5")), ("qwen3_5", {"drafts": 2})],
    ids=str,
)
def test_a_seed_reproduces_a_generation(family: str, more: dict[str, int], options: dict[str, int]) -> None:
    """In another cache, and in the same cache after a reset; other seeds draw other bits."""
    kept, again, other = (fs.StateCache(model_of(family), **RANDOM, seed=seed, **more) for seed in (3, 3, 4))
    want = [result.clone() for result in generated(family, kept, **options)]
    assert same(generated(family, again, **options), want)
    assert not same(generated(family, other, **options), want)
    kept.reset()
    assert same(generated(family, kept, **options), want)


def test_without_a_seed_every_cache_draws_other_bits() -> None:
    first, second = (fs.StateCache(model_of("mamba2"), **RANDOM) for _ in range(2))
    assert not same(generated("mamba2", first), generated("mamba2", second))


@pytest.mark.parametrize(("family", "more"), [("mamba2", {}), ("qwen3_5", {"drafts": 2})], ids=str)
def test_every_step_and_every_row_draws_bits_of_its_own(family: str, more: dict[str, int]) -> None:
    model, alike = model_of(family), TOKENS[[0, 0]]
    kept, stuck = (fs.StateCache(model, **RANDOM, seed=3, **more) for _ in range(2))
    for each in (kept, stuck):
        call(model, alike[:, :5], each, 0)
        seed = store_of(each).seed
        assert seed is not None
        before = seed.clone()
        call(model, alike[:, 5:6], each, 5)
        assert not torch.any(seed == before)
    assert same(states_of(kept), states_of(stuck))
    seed.copy_(before)  # of the second, as if seeds had not moved on
    for each in (kept, stuck):
        call(model, alike[:, 6:7], each, 6)
    assert not same(states_of(kept), states_of(stuck))
    first, second = states_of(kept)[0].chunk(2)  # the slots of each row
    assert not torch.equal(first, second)


@pytest.mark.parametrize("more", [{}, {"drafts": 2}], ids=str)
def test_copies_of_a_row_draw_bits_of_their_own(more: dict[str, int]) -> None:
    model = model_of("mamba2")
    kept = fs.StateCache(model, **RANDOM, seed=3, **more)
    call(model, TOKENS[:1, :5], kept, 0)
    kept.batch_repeat_interleave(3)
    kept.reorder_cache(torch.tensor([1, 0, 1]))
    call(model, TOKENS[[0, 0, 0], 5:6], kept, 5)
    rows = [row.tolist() for row in states_of(kept)[0].view(3, -1)]
    assert all(rows.count(row) == 1 for row in rows)


def test_rounding_to_nearest_draws_nothing() -> None:
    cache = fs.StateCache(model_of("mamba2"), dtype=torch.int8, max_batch=2)
    assert store_of(cache).seed is None


@pytest.mark.parametrize("more", [{}, {"drafts": 2}], ids=str)
def test_bytes_are_those_of_all_that_is_kept(more: dict[str, int]) -> None:
    model, slots = model_of("qwen3_5"), 1 + more.get("drafts", 0)
    bytes_of = {}
    for dtype in FORMATS:
        cache = fs.StateCache(model, dtype=dtype, max_batch=3, **more)
        states, windows = states_of(cache), store_of(cache).windows
        scales = 4 * states[0].shape[:-1].numel() * len(states) if FORMATS[dtype].scaled else 0
        bytes_of[dtype] = cache.bytes_of_state
        assert states[0].shape[0] == 3 * slots
        assert cache.bytes_of_state == sum(part.nbytes for part in (*states, windows)) + scales
        assert cache.bytes == cache.bytes_of_state  # attention layers are empty
    assert bytes_of[torch.float32] > bytes_of[torch.float16] > bytes_of[torch.int8]
    call(model, PROMPT, cache, 0)
    heads, size = model.config.num_key_value_heads, model.config.head_dim
    assert cache.bytes - cache.bytes_of_state == 2 * 4 * PROMPT.numel() * heads * size  # keys and values


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [(torch.float32, torch.float32), (torch.int16, torch.float32), (torch.float16, torch.float16),
     (torch.int8, torch.float16)], ids=str,
)  # fmt: skip
@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear"])
def test_rings_of_the_delta_rule_keep_no_less_than_states_do(
    family: str, dtype: torch.dtype, kept: torch.dtype
) -> None:
    pool: Any = store_of(fs.StateCache(model_of(family), dtype=dtype, replay=4, drafts=1, max_batch=1)).pool
    for ring in map(pool.ring, range(pool.layers)):
        assert (ring.k.dtype, ring.u.dtype, ring.decay.dtype) == (torch.float32, kept, torch.float32)
        assert (ring.window, ring.length, ring.per_channel) == (4, 6, family == "kimi_linear")
