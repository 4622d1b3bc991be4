"""Logits of models on flashstate are those of Transformers, call by call, with a prompt that is padded on the left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from decoding import KNOWN, REPLAYED, STATIC, TOKENS, Call, call, expected, states_of, stock_cache, store_of
from decoding import teacher_forced as forced

import flashstate.integrations.transformers as fs
from flashstate.integrations.transformers.tiny import tiny_model
from flashstate.proof import error_ratio, interpreted

MASK = (torch.arange(TOKENS.shape[1] + 1) >= torch.tensor([[2], [0]])).long()
BY_ONE = (3, *6 * (1,))
WITH_DRAFTS = (3, (1, 2), (2, 1), 3)
WAYS: dict[str, tuple[Sequence[Call], dict[str, Any]]] = {  # calls, and options of a StateCache
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
CASES = [*KNOWN, *(name for name in VARIANTS if name.split(",")[0] in KNOWN)]


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = case.split(",")[0]
    model: Any = tiny_model(family, **VARIANTS.get(case, {}))
    tokens = MASK[:, :9].bool()
    exact, plain = (logits[tokens] for logits in expected(model, BY_ONE, MASK))
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


@pytest.mark.parametrize("family", KNOWN)
def test_states_and_windows_matter(family: str) -> None:
    model: Any = tiny_model(family)
    logits = []
    for lost in (lambda cache: [], lambda cache: [store_of(cache).windows], states_of):
        cache = fs.StateCache(model)
        call(model, TOKENS[:, :5], cache, 0)
        for tensor in lost(cache):
            tensor.zero_()
        logits.append(call(model, TOKENS[:, 5:6], cache, 5))
    whole, *others = logits
    assert all((other - whole).abs().max() > whole.std() / 2 for other in others[: 2 if states_of(cache) else 1])
