"""vLLM's engine for CPUs on flashstate: tokens and probabilities are those of the stock engine.

Tokens must be equal. Logarithms of probabilities may differ as much as those of the stock engine do between a token
that it generates and the same one in a prompt, which is what another order of sums costs, times SLACK.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests_vllm.oldest import is_installed

OLDEST = is_installed()
attention = pytest.mark.skipif(OLDEST, reason="attention of vLLM 0.26.0 needs what it has compiled for torch 2.11")
HYBRID = pytest.param("granitemoehybrid", marks=attention)
SLACK = 8
FAMILIES = ("mamba2", HYBRID, *(pytest.param(name, marks=attention) for name in ("falcon_h1", "zamba2", "nemotron_h")))
MODES = ("align", "all") if OLDEST else ("align",)  # of prefix caches
DRAFTS = {
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3,
                           "prompt_lookup_min": 1},
    "enable_prefix_caching": False,
}  # fmt: skip


def engine(family: str, *work: str, **settings: Any) -> dict[str, Any]:
    return {"model": family, "settings": settings, "work": list(work)}


def ours(family: str, *work: str, options: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    extra = {} if options is None else {"additional_config": {"flashstate": options}}
    return engine(family, *work, mamba_backend="flashstate", **extra, **settings)


def tokens_of(results: list[dict[str, Any]]) -> list[list[int]]:
    return [result["tokens"] for result in results]


def distance(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> float:
    """How far logarithms of probabilities are apart, up to the first token that is another."""
    largest = 0.0
    for one, other in zip(some, others, strict=True):
        for mine, yours, p, q in zip(one["tokens"], other["tokens"], one["logprobs"], other["logprobs"], strict=True):
            if mine != yours:
                break
            largest = max(largest, abs(p - q))
    return largest


def pair(serve: Any, family: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """What the stock engine gives, what ours gives, and the log of both."""
    stock = engine(family, "together", "alone", "in_prompts")
    (stock, mine), log = serve(stock, ours(family, "together", "alone"))
    return stock, mine, log


def noise(stock: dict[str, Any]) -> float:
    """How far logarithms of probabilities of the stock engine are apart that should be equal."""
    return distance(stock["alone"], stock["in_prompts"])


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_probabilities_are_those_of_the_stock_engine(serve: Any, family: str) -> None:
    stock, mine, log = pair(serve, family)
    for work in ("together", "alone"):
        assert tokens_of(mine[work]) == tokens_of(stock[work])
        assert distance(mine[work], stock[work]) <= SLACK * noise(stock)
    assert log.count("flashstate is active: states are float32, rounded nearest") == 1


def test_an_engine_that_has_not_selected_flashstate_has_none_of_it(serve: Any) -> None:
    stock, mine, _ = pair(serve, "mamba2")
    assert stock["layers"] == ["MambaMixer2"]
    assert mine["layers"] == ["FlashstateMambaMixer2"]


@pytest.mark.skipif(OLDEST, reason="interpreted prefills of vLLM 0.26.0 would take an hour")
@pytest.mark.parametrize("options", [{}, {"state": "int8"}, {"state": "float16", "rounding": "nearest"}])
def test_200_requests_that_arrive_over_time_are_served_as_each_alone(serve: Any, options: dict[str, Any]) -> None:
    few = {"max_num_seqs": 6, "num_gpu_blocks_override": 6}  # of which one is the null block
    (found,), log = serve(ours("mamba2", "arriving", options=options, **few))
    served = found["arriving"]
    assert set(served["among_others"]) >= {str(i) for i in range(200) if i not in served["aborted"]}, log[-2000:]
    assert served["stops"] > 0  # of requests that were waiting or running
    for name, result in served["alone"].items():
        assert served["among_others"][name]["tokens"] == result["tokens"]


FORMATS = ["bfloat16", "float16", "int16", "int8", "float8_e4m3fn"]


@pytest.mark.parametrize("family", ["mamba2", HYBRID])
def test_states_of_fewer_bits_stay_near_float32(serve: Any, family: str) -> None:
    """Formats are held to what float8, the coarsest, costs; the log says which one is used."""
    stock, _, _ = pair(serve, family)
    engines = [ours(family, "together", options={"state": name}) for name in FORMATS]
    found, log = serve(*engines)
    far = {name: distance(of["together"], stock["together"]) for name, of in zip(FORMATS, found, strict=True)}
    assert 0 < far["int16"] < far["int8"]
    assert 0 < far["float16"] < far["bfloat16"]
    assert max(far["int8"], far["bfloat16"]) < SLACK * far["float8_e4m3fn"]
    for name in FORMATS:
        assert log.count(f"flashstate is active: states are {name}, rounded nearest") == 1


@attention
@pytest.mark.parametrize("state", ["float16", "int8"])
def test_stochastic_rounding_draws_bits_in_every_step_and_stays_near_float32(serve: Any, state: str) -> None:
    stock, _, _ = pair(serve, "granitemoehybrid")
    options = {"state": state, "rounding": "stochastic", "rounds": 7}
    nearest, first, second = serve(
        ours("granitemoehybrid", "together", options={"state": state}),
        ours("granitemoehybrid", "together", options=options),
        ours("granitemoehybrid", "together", "together", options=options, seed=1),
    )[0]
    assert nearest["seeds"] == [0]
    assert len({*first["seeds"], *second["seeds"]}) == 3
    near = distance(nearest["together"], stock["together"])
    for drawn in (first, second):
        assert 0 < distance(drawn["together"], stock["together"]) < SLACK * near
    assert distance(first["together"], second["together"]) > 0


@attention
def test_pages_shrink_with_the_state(serve: Any) -> None:
    names = ["float32", "float16", "int8"]
    engines = [ours("wide", options={"state": name}) for name in names]
    found, _ = serve(*engines)
    blocks = {name: of["cache"]["block"] for name, of in zip(names, found, strict=True)}
    assert blocks == {"float32": 1152, "float16": 640, "int8": 384}  # as docs/vllm.md has them


def accepted_and_drafted(found: dict[str, Any]) -> tuple[int, int]:
    counts = found["counts"]
    return counts["vllm:spec_decode_num_accepted_tokens"], counts["vllm:spec_decode_num_draft_tokens"]


@attention
def test_drafts_change_no_token(serve: Any) -> None:
    stock, _, _ = pair(serve, "granitemoehybrid")
    (found,), _ = serve(ours("granitemoehybrid", "together", **DRAFTS))
    accepted, drafted = accepted_and_drafted(found)
    assert 0 < accepted < drafted  # some right, some wrong
    assert tokens_of(found["together"]) == tokens_of(stock["together"])
    assert distance(found["together"], stock["together"]) <= SLACK * noise(stock)


@attention
@pytest.mark.parametrize("options", [{"state": "float16", "rounding": "stochastic"}, {"state": "int8"}])
def test_drafts_work_with_states_of_fewer_bits(serve: Any, options: dict[str, Any]) -> None:
    stock, _, _ = pair(serve, "granitemoehybrid")
    (plain,), _ = serve(ours("granitemoehybrid", "together", options=options))
    (found,), _ = serve(ours("granitemoehybrid", "together", options=options, **DRAFTS))
    accepted, drafted = accepted_and_drafted(found)
    assert 0 < accepted < drafted
    near = distance(plain["together"], stock["together"])
    assert 0 < distance(found["together"], stock["together"]) < SLACK * near


def test_drafts_for_a_model_without_attention_are_refused(serve: Any) -> None:
    """vLLM counts accepted drafts for hybrid models alone."""
    found, log = serve(ours("mamba2", "together", **DRAFTS))
    assert not found
    assert "vLLM cannot roll back the states of a model without attention: leave out speculative_config" in log


@pytest.mark.parametrize("options", [{}, {"state": "int8"}])
@pytest.mark.parametrize("family", ["mamba2", HYBRID])
@pytest.mark.parametrize("mode", MODES)
def test_a_cached_prefix_gives_what_the_whole_prompt_gives(
    serve: Any, mode: str, family: str, options: dict[str, Any]
) -> None:
    cached, whole = serve(
        ours(family, "prefixes", options=options, enable_prefix_caching=True, mamba_cache_mode=mode, block_size=32),
        ours(family, "prefixes", options=options, enable_prefix_caching=False),
    )[0]
    assert (cached["cache"]["mode"], whole["cache"]["mode"]) == (mode, "none")
    hits = [result["cached"] for result in cached["prefixes"]]
    assert hits[0] == 0
    assert all(hit > 0 for hit in hits[1:])
    first, *_, again = tokens_of(cached["prefixes"])
    assert again == first
    if not options:  # else the cached state was rounded on its way
        assert tokens_of(cached["prefixes"]) == tokens_of(whole["prefixes"])


@pytest.mark.skipif(OLDEST, reason="processes of ranks do not import what stands in for what is compiled")
def test_two_ranks_give_what_one_gives(serve: Any) -> None:
    """Heads are split; the output projection sums over ranks."""
    stock, _, _ = pair(serve, "mamba2")
    several = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    found, log = serve(ours("mamba2", "together", tensor_parallel_size=2), **several)
    assert found, log[-2000:]
    assert log.count("flashstate is active: states are float32, rounded nearest") == 2
    assert tokens_of(found[0]["together"]) == tokens_of(stock["together"])
    assert distance(found[0]["together"], stock["together"]) <= SLACK * noise(stock)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"states": "int8"}, "additional_config[\"flashstate\"] may have state, rounding, rounds, got 'states'"),
        ({"state": "int4"}, "state must be one of"),
        ({"state": "float32", "rounding": "stochastic"}, "rounding='stochastic' is not for float32"),
    ],
)
def test_wrong_options_stop_the_engine_before_it_serves(serve: Any, options: dict[str, Any], message: str) -> None:
    found, log = serve(ours("mamba2", "together", options=options))
    assert not found
    assert message in log
