"""Prompts: which way they go through a mixer, and what is left of them for a store."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashstate.integrations.transformers.families import Found
from flashstate.integrations.transformers.memory import Memory
from flashstate.state.state import State

PACKAGES = {"mamba1": "mamba_ssm", "mamba2": "mamba_ssm", "delta": "fla", "kda": "fla"}  # which have a scan for prompts


class Left(NamedTuple):
    """What a prompt leaves in a layer."""

    outputs: Tensor
    window: Tensor  # (batch, channels, K - 1)
    state: Tensor | None  # with the axes of ops, float32


class Handover:
    """Stands in for the cache of a mixer's own forward over a prompt, and keeps what that forward hands over."""

    def __init__(self) -> None:
        self.inputs: Tensor | None = None
        self.recurrent: Tensor | None = None

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Nothing is before a prompt."""

    get_recurrent_state = get_conv_state

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, **given: Any) -> Tensor:
        self.inputs = conv_states
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, **given: Any) -> Tensor:
        self.recurrent = recurrent_states
        return recurrent_states

    def window(self, entries: int) -> Tensor:
        """The last inputs of the convolution, zeros before a short prompt."""
        assert self.inputs is not None
        last = self.inputs[..., -entries:]
        return pad(last, (entries - last.shape[-1], 0))


def goes_stock(found: Found, device: torch.device) -> bool:
    """Whether a prompt goes through the mixer's own forward: on a CPU, or where it has a kernel for it or needs none.
    Without one, Transformers' torch code takes many times the memory and time of stepping through the prompt."""
    package = PACKAGES.get(found.name)
    return device.type == "cpu" or package is None or is_installed(package)


@cache
def is_installed(package: str) -> bool:
    """Whether a package can be imported; looked up once, and not for every layer of every prompt."""
    return find_spec(package) is not None


def stock_prompt(found: Found, hidden: Tensor, mask: Tensor | None, width: int, more: dict[str, Any]) -> Left:
    """A whole prompt through the mixer's own forward."""
    hand = Handover()
    given = {found.cache_name: hand, "attention_mask": mask, **more}
    y = type(found.mixer).forward(found.mixer, hidden, **given)
    state = None if hand.recurrent is None else found.kind.view(hand.recurrent)
    return Left(y, hand.window(width - 1), state)


def stepped_prompt(found: Found, hidden: Tensor, mask: Tensor | None, window: Tensor, state: Tensor | None) -> Left:
    """Tokens of a prompt behind what a layer has, stepped one by one in one launch."""
    memory = Memory(window, state=None if state is None else State(state))
    return Left(found.kind.forward(found.mixer, hidden, memory, mask, prompt=True), window, state)
