"""Logits of models on flashstate are those of Transformers, call by call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoding import KIND_OF, KNOWN, REPLAYED, STATIC, TOKENS, call, expected, states_of, stock_cache, store_of
from decoding import teacher_forced as forced
from torch import Tensor

import flashstate.integrations.transformers as fs
from flashstate.integrations.transformers.tiny import tiny_model
from flashstate.proof import error_ratio

ONE_BY_ONE = (5, 1, 1, 1)
IN_PIECES = (3, 2, 1, 2)
WITH_DRAFTS = (1, 2, 4, 1)  # the third is another piece of a prompt


@pytest.mark.parametrize("family", KNOWN)
def test_logits_are_those_of_transformers(family: str) -> None:
    """Token by token with a stock cache and a StateCache, in pieces of a prompt, and with drafts."""
    model: Any = tiny_model(family)
    exact, plain = expected(model, ONE_BY_ONE)
    fs.enable(model)
    got = {
        "stock cache": forced(model, ONE_BY_ONE, stock_cache(model)),
        "dynamic": forced(model, ONE_BY_ONE, fs.StateCache(model)),
        "static": forced(model, ONE_BY_ONE, fs.StateCache(model, **STATIC)),
        "pieces": forced(model, IN_PIECES, fs.StateCache(model)),
        "drafts": forced(model, WITH_DRAFTS, fs.StateCache(model, drafts=2)),
    }
    if family in REPLAYED:  # with windows that are full before the tokens end
        got["replay"] = forced(model, ONE_BY_ONE, fs.StateCache(model, replay=2))
        got["replayed pieces"] = forced(model, IN_PIECES, fs.StateCache(model, replay=2))
        got["replayed drafts"] = forced(model, WITH_DRAFTS, fs.StateCache(model, replay=3, drafts=2))
    errors = {name: error_ratio(logits, exact, plain) for name, logits in got.items()}
    assert max(errors.values()) <= 1, errors


HALF: dict[str, dict[str, Any]] = {
    "mamba": {}, "falcon_h1": {}, "olmo_hybrid": {}, "bailing_hybrid": {"mlp_layer_types": ["dense"] * 3}, "lfm2": {},
}  # fmt: skip


@pytest.mark.parametrize("family", HALF)
def test_logits_of_half_precision_are_no_further_off_than_those_of_transformers(family: str) -> None:
    model: Any = tiny_model(family, dtype=torch.bfloat16, **HALF[family])
    exact, plain = expected(model, ONE_BY_ONE)
    fs.enable(model)
    assert error_ratio(forced(model, ONE_BY_ONE, stock_cache(model)), exact, plain) <= 1
    for replay in (None, 3) if family in REPLAYED else (None,):
        cache = fs.StateCache(model, drafts=2, replay=replay)
        assert error_ratio(forced(model, WITH_DRAFTS, cache), exact, plain) <= 1, replay


@pytest.mark.parametrize("family", KNOWN)
def test_what_is_kept_of_a_prompt_matters(family: str) -> None:
    model: Any = tiny_model(family)

    def after_losing(what: Callable[[fs.StateCache], list[Tensor]]) -> Tensor:
        """The logits of a token behind a prompt, of which the cache lost some tensors."""
        cache = fs.StateCache(model)
        call(model, TOKENS[:, :5], cache, 0)
        for tensor in what(cache):
            tensor.zero_()
        return call(model, TOKENS[:, 5:6], cache, 5)

    logits = after_losing(lambda cache: [])
    assert (after_losing(lambda cache: [store_of(cache).windows]) - logits).abs().max() > logits.std() / 2
    if KIND_OF[family] != "short_conv":
        assert (after_losing(states_of) - logits).abs().max() > logits.std() / 2
