"""Tiny models of every family generate, and models, versions and forwards that flashstate does not know are refused."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearForgetGate
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from flashstate.integrations.transformers import families
from flashstate.integrations.transformers.families import KNOWN, MIXERS, fingerprint, mixers_of, statements
from flashstate.integrations.transformers.tiny import FAMILIES, tiny_model
from tools.transformers_fingerprints import classes

HERE = [family for family in FAMILIES if family in CONFIG_MAPPING]  # in the installed version
PROMPT = torch.arange(1, 25).view(2, 12) * 37 % 96
SMALL = {"vocab_size": 96, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}


def call(model: Any, tokens: Tensor, cache: DynamicCache) -> Tensor:
    """The logits behind the last of `tokens`, which continue what the cache has."""
    name = "cache_params" if model.config.model_type in ("mamba", "falcon_mamba", "mamba2") else "past_key_values"
    return model(input_ids=tokens, use_cache=True, **{name: cache}).logits[:, -1]


def after_forgetting(model: Any, token: Tensor, *forgotten: str) -> Tensor:
    """The logits behind a token behind the prompt, where a cache of Transformers lost what `forgotten` names."""
    cache = DynamicCache(config=model.config.get_text_config())
    call(model, PROMPT, cache)
    for layer in mixers_of(model):
        for name in forgotten:
            (kept,) = getattr(cache.layers[layer], name).values()
            kept.zero_()
    return call(model, token, cache)


@pytest.mark.parametrize("family", HERE)
@torch.no_grad()
def test_a_tiny_model_generates_and_what_it_remembers_matters(family: str) -> None:
    model: Any = tiny_model(family)
    generated = model.generate(PROMPT, max_new_tokens=12, do_sample=False)[:, PROMPT.shape[1] :]
    assert generated.shape == (2, 12)
    assert all(len(row.unique()) > 4 for row in generated)

    token = generated[:, :1]
    logits = after_forgetting(model, token)
    kinds = {found.name for found in mixers_of(model).values()}
    for name in ("conv_states",) if kinds == {"short_conv"} else ("conv_states", "recurrent_states"):
        changed = (after_forgetting(model, token, name) - logits).abs().max()
        assert changed > logits.std() / 2, name


def test_a_seed_decides_the_weights_and_nothing_else_of_the_process() -> None:
    before = torch.get_rng_state()
    first, again, other = (tiny_model("mamba2", seed=seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_changes_reach_the_configuration_and_an_unknown_family_is_refused() -> None:
    model = tiny_model("falcon_h1", mamba_rms_norm=True, dtype=torch.bfloat16)
    assert model.config.mamba_rms_norm
    assert model.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"family must be one of mamba, .*; got 'gpt'"):
        tiny_model("gpt")


@pytest.mark.parametrize("family", HERE)
def test_mixers_are_found_by_their_layers(family: str) -> None:
    model = tiny_model(family)
    types = model.config.get_text_config().layer_types
    found = mixers_of(model)
    assert list(found) == [layer for layer, name in enumerate(types) if name in families.RECURRENT]
    for layer, (kind, mixer) in found.items():
        assert mixer.layer_idx == layer
        assert MIXERS[type(mixer).__name__] == (family, kind)


def test_the_sources_of_every_mixer_in_the_installed_version_are_known() -> None:
    found = classes()
    assert {name for name, (family, _) in MIXERS.items() if family in HERE} <= found.keys() <= KNOWN.keys()
    assert not {name for name, cls in found.items() if fingerprint(cls) not in KNOWN[name]}


@pytest.mark.parametrize("version", ["4.57.1", "5.20.3", "5.24.0.dev0", "6.0.0"])
def test_other_versions_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("mamba")
    monkeypatch.setattr("transformers.__version__", version)
    with pytest.raises(ImportError, match=rf"transformers must be 5\.21 to 5\.23, got {version}: pip install"):
        mixers_of(model)


def test_the_absence_of_transformers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"transformers is not installed: pip install 'flashstate\[transformers\]'"):
        families.check_version()


def another(self: nn.Module, hidden_states: Tensor, **more: Any) -> Tensor:
    """A forward that no version has."""
    return hidden_states


def wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that does something before that of Transformers."""

    @functools.wraps(forward)
    def wrapper(self: nn.Module, hidden_states: Tensor, **more: Any) -> Any:
        return forward(self, 2 * hidden_states, **more)

    return wrapper


@pytest.mark.parametrize(
    ("family", "cls", "forward"),
    [
        ("mamba2", Mamba2Mixer, another),
        ("mamba2", Mamba2Mixer, wrapped(Mamba2Mixer.forward)),
        ("mamba2", Mamba2Mixer, torch.relu),
        ("kimi_linear", KimiLinearForgetGate, another),
    ],
    ids=["replaced", "wrapped", "without a source", "of a gate"],
)
def test_a_forward_that_nobody_tested_is_refused(
    family: str, cls: type[nn.Module], forward: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family)
    monkeypatch.setattr(cls, "forward", forward)
    with pytest.raises(ValueError, match=rf"the forward of .*\.{cls.__name__}: transformers {families.installed()} or"):
        mixers_of(model)


@pytest.mark.parametrize(
    ("name", "layers", "message"),
    [
        ("llama", 1, r"^LlamaForCausalLM has no recurrent layer that flashstate knows; docs/transformers.md [^,]*$"),
        ("minimax", 2, r"layers 1 of MiniMaxForCausalLM, which has .*MiniMaxLightningAttention.*; docs/"),
        ("zaya", 2, r"layers 0, 1 of ZayaForCausalLM, which has .*ZayaCCAProjection.*; docs/"),
    ],
)
def test_models_with_other_layers_are_refused_by_name(name: str, layers: int, message: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](num_hidden_layers=layers, **SMALL))
    with pytest.raises(ValueError, match=message):
        mixers_of(model)


def test_a_subclass_of_a_mixer_is_not_taken_for_it() -> None:
    model = tiny_model("lfm2")
    first, second = (mixer for _, mixer in mixers_of(model).values())
    second.__class__ = type("Lfm2ShortConv", (type(second),), {})
    with pytest.raises(ValueError, match=r"does not know layers 2 of Lfm2ForCausalLM"):
        mixers_of(model)
    second.__class__, second.layer_idx = type(first), first.layer_idx
    with pytest.raises(ValueError, match=r"Lfm2ForCausalLM has two mixers of layer 0"):
        mixers_of(model)


def test_comments_docstrings_and_layout_do_not_count_and_depth_does() -> None:
    plain = "def forward(self, x):\n    if x:\n        x = f'{x} {1}'\n    return x\n"
    adorned = 'def forward(\n  self, x  # what\n):\n  """Which."""\n\n  if x :\n    x = f\'{x} {1}\'\n  return x\n'
    deeper = plain.replace("    return", "        return")
    assert list(statements(plain)) == ["0 defforward(self,x):", "1 ifx:", "2 x=f'{x}{1}'", "1 returnx"]
    assert list(statements(adorned)) == list(statements(plain))
    assert list(statements(deeper)) != list(statements(plain))
