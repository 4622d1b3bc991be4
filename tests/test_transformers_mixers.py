"""What mixers derive from their parameters, what they copy, and what they refuse."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from flashstate.integrations.transformers.families import Found, mixers_of
from flashstate.integrations.transformers.mixers.parameters import DERIVED, decay, derived
from flashstate.integrations.transformers.mixers.short_conv import SHORT_CONV
from flashstate.integrations.transformers.tiny import tiny_model


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
        with pytest.raises(ValueError, match=rf"{name}.activation must be one of silu, swish, got 'gelu'"):
            found.kind.sizes(found.mixer)
    with pytest.raises(TypeError, match="have no recurrent state"):
        SHORT_CONV.view(torch.zeros(1))
