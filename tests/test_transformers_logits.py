"""Logits of models on flashstate are those of Transformers, call by call."""

from typing import Any

import pytest
from decoding import KNOWN, REPLAYED, STATIC, expected, stock_cache
from decoding import teacher_forced as forced

import flashstate.integrations.transformers as fs
from flashstate.integrations.transformers.tiny import tiny_model
from flashstate.proof import error_ratio

ONE_BY_ONE = (5, 1, 1, 1, 1, 1, 1)
IN_PIECES = (3, 4, 1, 2, 1)
WITH_DRAFTS = (5, 1, 3, 2)


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
    if family in REPLAYED:
        got["replay"] = forced(model, ONE_BY_ONE, fs.StateCache(model, replay=4))
        got["replayed pieces"] = forced(model, IN_PIECES, fs.StateCache(model, replay=4))
        got["replayed drafts"] = forced(model, WITH_DRAFTS, fs.StateCache(model, replay=4, drafts=2))
    errors = {name: error_ratio(logits, exact, plain) for name, logits in got.items()}
    print(family, {k: round(v, 2) for k, v in errors.items()})
    assert max(errors.values()) <= 1, errors
