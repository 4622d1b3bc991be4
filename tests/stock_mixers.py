"""Mixers of tiny models, and what Transformers' own forward makes of tokens with a cache of its own."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from flashstate.integrations.transformers.tiny import FAMILIES, tiny_model
from flashstate.proof import error_ratio

transformers = pytest.importorskip("transformers")

KNOWN = [family for family in FAMILIES if family in transformers.CONFIG_MAPPING]  # to the installed version
BATCH, HIDDEN = 3, 32


class Result(NamedTuple):
    """What calls gave, and what was kept behind the last of them."""

    outputs: list[Tensor]
    window: Tensor  # (batch, channels, K - 1)
    recurrent: Tensor | None  # as Transformers has it

    def holds(self, exact: Result, plain: Result) -> bool:
        """Whether nothing is much further from `exact` than what Transformers itself gives in this precision."""
        everything = zip(self.tensors, exact.tensors, plain.tensors, strict=True)
        return all(error_ratio(got, want.double(), rough) <= 1 for got, want, rough in everything)

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.outputs, self.window, *([] if self.recurrent is None else [self.recurrent])]


class Stock(NamedTuple):
    """The first mixer of a tiny model, which runs as Transformers wrote it."""

    mixer: Any
    config: Any

    def cache(self) -> Any:
        """A cache of Transformers for the mixer's model, with nothing in it."""
        return transformers.DynamicCache(config=self.config)

    def kept(self, cache: Any) -> tuple[Tensor, Any]:
        """What a cache keeps for the mixer: the last K inputs, and the state where there is one."""
        layer = cache.layers[self.mixer.layer_idx]
        return layer.conv_states[0], layer.recurrent_states[0]

    def forward(self, hidden: Tensor, cache: Any, mask: Tensor | None = None) -> Tensor:
        """The mixer's own forward; models name the argument of their cache differently."""
        names = inspect.signature(self.mixer.forward).parameters
        name = "cache_params" if "cache_params" in names else "past_key_values"
        with torch.no_grad():
            return self.mixer(hidden, attention_mask=mask, **{name: cache})

    def run(self, calls: Sequence[Tensor], mask: Tensor | None = None) -> Result:
        """Calls through the mixer's own forward, with a cache; the mask is for the first."""
        cache = self.cache()
        outputs = [self.forward(hidden, cache, mask if i == 0 else None) for i, hidden in enumerate(calls)]
        window, recurrent = self.kept(cache)
        return Result(outputs, window[..., 1:], recurrent)

    def expected(self, calls: Sequence[Tensor], mask: Tensor | None = None) -> tuple[Result, Result]:
        """What these calls give in float64, and in the precision they have; the recurrence itself Transformers always
        has in float32."""
        precise = self._replace(mixer=copy.deepcopy(self.mixer).double())
        return precise.run([hidden.double() for hidden in calls], mask), self.run(calls, mask)


def stock(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Stock:
    """A mixer of a tiny model of `family` with these settings changed, for a test to change."""
    mixer, config = made(family, **changes)
    return Stock(copy.deepcopy(mixer).to(dtype), config)


@cache
def made(family: str, **changes: Any) -> tuple[nn.Module, Any]:
    model = tiny_model(family, **changes)
    return next(module for module in model.modules() if convolves(module)), model.config.get_text_config()


def convolves(module: nn.Module) -> bool:
    """Whether the module is a mixer with a short convolution."""
    return hasattr(module, "layer_idx") and any(isinstance(child, nn.Conv1d) for child in module.children())


def tokens(*lengths: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Random tokens for calls of so many each."""
    generator = torch.Generator().manual_seed(len(lengths))
    return list(torch.randn(BATCH, sum(lengths), HIDDEN, generator=generator).to(dtype).split(lengths, 1))
