"""Models, versions and forwards that flashstate does not know are refused; what mixers derive from their parameters,
and what they copy."""

import copy
import functools
import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoding import refused
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearForgetGate
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from flashstate.integrations.fingerprints import statements
from flashstate.integrations.transformers import families
from flashstate.integrations.transformers.families import KNOWN, MIXERS, Found, fingerprint, mixers_of
from flashstate.integrations.transformers.mixers.parameters import DERIVED, decay, derived
from flashstate.integrations.transformers.mixers.short_conv import SHORT_CONV
from flashstate.integrations.transformers.tiny import tiny_model
from tools.transformers_fingerprints import classes


def test_a_seed_decides_the_weights_and_nothing_else_of_the_process() -> None:
    before = torch.get_rng_state()
    first, again, other = (tiny_model("mamba2", seed=seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    model = tiny_model("falcon_h1", mamba_rms_norm=True, dtype=torch.bfloat16)
    assert model.config.mamba_rms_norm
    assert model.dtype == torch.bfloat16
    refused(r"family must be one of mamba, .*; got 'gpt'", tiny_model, "gpt")


def test_the_sources_of_every_mixer_in_the_installed_version_are_known() -> None:
    found = classes()
    assert {name for name, (family, _) in MIXERS.items() if family in CONFIG_MAPPING} <= found.keys() <= KNOWN.keys()
    assert not {name for name, cls in found.items() if fingerprint(cls) not in KNOWN[name]}


def test_other_versions_and_the_absence_of_transformers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("mamba")
    for version in ("4.57.1", "5.20.3", "5.24.0.dev0", "6.0.0"):
        monkeypatch.setattr("transformers.__version__", version)
        with pytest.raises(ImportError, match=rf"transformers must be 5\.21 to 5\.23, got {version}: pip install"):
            mixers_of(model)
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


def test_a_forward_that_nobody_tested_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was replaced, wrapped, or has no source; and that of a gate."""
    for family, cls, forward in (
        ("mamba2", Mamba2Mixer, another),
        ("mamba2", Mamba2Mixer, wrapped(Mamba2Mixer.forward)),
        ("mamba2", Mamba2Mixer, torch.relu),
        ("kimi_linear", KimiLinearForgetGate, another),
    ):
        model = tiny_model(family)
        message = rf"the forward of .*\.{cls.__name__}: transformers {families.installed()} or"
        with monkeypatch.context() as patched:
            patched.setattr(cls, "forward", forward)
            refused(message, mixers_of, model)


def test_models_with_other_layers_are_refused_by_name() -> None:
    small = {"vocab_size": 96, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["minimax"](num_hidden_layers=2, **small))
    message = r"layers 1 of MiniMaxForCausalLM, which has .*MiniMaxLightningAttention.*; docs/"
    refused(message, mixers_of, model)


def test_a_subclass_of_a_mixer_is_not_taken_for_it() -> None:
    model = tiny_model("lfm2")
    first, second = (mixer for _, mixer in mixers_of(model).values())
    second.__class__ = type("Lfm2ShortConv", (type(second),), {})
    refused(r"does not know layers 2 of Lfm2ForCausalLM", mixers_of, model)
    second.__class__, second.layer_idx = type(first), first.layer_idx
    refused(r"Lfm2ForCausalLM has two mixers of layer 0", mixers_of, model)


def test_comments_docstrings_and_layout_do_not_count_and_depth_does() -> None:
    plain = "def forward(self, x):\n    if x:\n        x = f'{x} {1}'\n    return x\n"
    adorned = 'def forward(\n  self, x  # what\n):\n  """Which."""\n\n  if x :\n    x = f\'{x} {1}\'\n  return x\n'
    deeper = plain.replace("    return", "        return")
    assert list(statements(plain)) == ["0 defforward(self,x):", "1 ifx:", "2 x=f'{x}{1}'", "1 returnx"]
    assert list(statements(adorned)) == list(statements(plain))
    assert list(statements(deeper)) != list(statements(plain))


def first_mixer(family: str) -> Found:
    return next(iter(mixers_of(tiny_model(family)).values()))


def test_a_tensor_is_derived_once_and_anew_when_its_parameter_has_changed() -> None:
    module = nn.Linear(2, 2)

    def replaced() -> None:
        module.bias.data = module.bias.data + 0.5

    def written() -> None:
        with torch.no_grad():
            module.bias.add_(0.3)

    others = nn.Linear(2, 2).state_dict()
    for change in (written, lambda: module.load_state_dict(others), replaced, lambda: module.bfloat16()):
        change()
        A = derived(module, decay, module.bias)
        assert torch.equal(A, decay(module.bias))
        assert derived(module, decay, module.bias) is A
    assert set(module.state_dict()) == {"weight", "bias"}
    twin = copy.deepcopy(module)
    assert derived(twin, decay, twin.bias) is not A


def test_what_is_derived_ends_with_its_module_and_serves_outside_inference_mode() -> None:
    module, known = nn.Linear(2, 2), len(DERIVED)
    with torch.inference_mode():
        assert not derived(module, decay, module.bias).is_inference()
        made_here = nn.Linear(2, 2)
        first = derived(made_here, decay, made_here.bias)
        made_here.bias.add_(1)
        assert not torch.equal(derived(made_here, decay, made_here.bias), first)
    assert len(DERIVED) == known + 1
    del module
    gc.collect()
    assert len(DERIVED) <= known


MOVES = "clone", "copy_", "_to_copy", "cat", "index_select", "index", "gather", "repeat", "repeat_interleave"


class Copies(TorchDispatchMode):
    """Counts operations that only move values."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        self.count += function.overloadpacket.__name__ in MOVES
        return function(*arguments, **(named or {}))


@torch.no_grad()
def test_projections_are_copied_only_for_the_convolution_and_to_part_interleaved_gates() -> None:
    for family, copies in (("qwen3_next", 2), ("qwen3_5", 0), ("olmo_hybrid", 1), ("kimi_linear", 1)):
        found: Any = first_mixer(family)
        for _ in range(2):  # the second time parts that are derived from parameters are there
            with Copies() as seen:
                found.kind.project(found.mixer, torch.ones(3, 1, 32))
        assert seen.count == copies, family


def test_other_activations_and_states_of_short_convolutions_are_refused() -> None:
    for family, name in (("mamba", "MambaMixer"), ("mamba2", "Mamba2Mixer"), ("qwen3_5", "Qwen3_5GatedDeltaNet")):
        found = first_mixer(family)
        found.mixer.activation = "gelu"
        refused(rf"{name}.activation must be one of silu, swish, got 'gelu'", found.kind.sizes, found.mixer)
    refused("have no recurrent state", SHORT_CONV.view, torch.zeros(1), error=TypeError)
