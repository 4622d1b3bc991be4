"""Tiny models of Transformers that decode: prompts, calls with known tokens, and the logits of Transformers alone."""

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from needs_transformers import transformers
from torch import Tensor

import flashstate.integrations.transformers as fs
from flashstate.integrations.transformers.enabling import own_cache_name
from flashstate.integrations.transformers.families import MIXERS
from flashstate.integrations.transformers.mixers import KINDS
from flashstate.integrations.transformers.mixers.kind import Replays
from flashstate.integrations.transformers.store import Store
from flashstate.integrations.transformers.tiny import FAMILIES, tiny_model

KNOWN = [family for family in FAMILIES if family in transformers.CONFIG_MAPPING]  # to the installed version
KIND_OF = dict(MIXERS.values())  # of every family
REPLAYED = [family for family in KNOWN if isinstance(KINDS[KIND_OF[family]], Replays)]
NEW = 8  # tokens that are generated
TOKENS = torch.randint(1, 96, (2, 11), generator=torch.Generator().manual_seed(1))
PROMPT = TOKENS[:, :6]
LONG = torch.arange(1, 25).view(2, 12) * 37 % 96
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}  # of a generation behind it
STATIC = {"max_batch": 2, "max_cache_len": PROMPT.shape[1] + NEW}
Call = int | tuple[int, int]  # tokens, and candidates behind them that are wrong and taken back


def greedy(model: Any, prompt: Tensor = PROMPT, **options: Any) -> Tensor:
    """The prompt and what the model continues it with."""
    plain = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    return model.generate(prompt, **{**plain, **options})


def of_families(**options: dict[str, Any]) -> pytest.MarkDecorator:
    """A test of these families, each with options of its cache."""
    return pytest.mark.parametrize(("family", "options"), options.items(), ids=str)


def refused(message: str, use: Callable[..., Any], *args: Any, error: Any = ValueError, **options: Any) -> None:
    with pytest.raises(error, match=message):
        use(*args, **options)


def started(family: str, prompt: Tensor = PROMPT, **options: Any) -> tuple[Any, Tensor, fs.StateCache]:
    """A tiny model, what it continues a prompt with by itself, and a cache for it."""
    model = tiny_model(family)
    return model, greedy(model, prompt), fs.StateCache(model, **options)


def stock_cache(model: Any) -> Any:
    return transformers.DynamicCache(config=model.config.get_text_config())


@torch.no_grad()
def call(model: Any, tokens: Tensor, cache: Any, first: int, mask: Tensor | None = None, **more: Any) -> Tensor:
    """The logits of tokens, (batch, T, vocabulary), which are at these places from the first on. mask: of all tokens;
    models without attention read it of a prompt only."""
    name = own_cache_name(model)
    if "position_ids" in inspect.signature(type(model).forward).parameters:  # which some models count from 0
        more["position_ids"] = torch.arange(first, first + tokens.shape[1]).expand(len(tokens), -1)
    if mask is not None and (first == 0 or name == "past_key_values"):
        more["attention_mask"] = mask[:, : first + tokens.shape[1]]
    return model(input_ids=tokens, use_cache=True, **{name: cache}, **more).logits


def forced(model: Any, calls: Sequence[Call], cache: Any, mask: Tensor | None = None) -> Tensor:
    """The logits of TOKENS in these calls."""
    logits, first = [], 0
    for each in calls:
        right, wrong = each if isinstance(each, tuple) else (each, 0)
        tokens = TOKENS[:, first : first + right + wrong].clone()
        tokens[:, right:] += 1
        logits.append(call(model, tokens, cache, first, mask)[:, :right])
        if wrong:
            cache.crop(-wrong)
        first += right
    return torch.cat(logits, 1)


def expected(model: Any, calls: Sequence[int], mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The logits that Transformers gives for these calls in float64, and in the precision of the model."""
    precise = copy.deepcopy(model).double()
    precise.set_experts_implementation("eager")  # others are not for float64
    exact, plain = (forced(each, calls, stock_cache(each), mask) for each in (precise, model))
    return exact, plain


def store_of(cache: fs.StateCache) -> Store:
    """What the recurrent layers of a model keep, all of which are on one device."""
    (store,) = cache.stores.values()
    return store


def states_of(cache: fs.StateCache) -> list[Tensor]:
    """The stored states of all layers."""
    pool = store_of(cache).pool
    return [] if pool is None else [pool.layer(i).data for i in range(pool.layers)]


class Steps(list[tuple[int, int]]):
    """The candidates of every call of a cache, and how many of them were taken back."""

    def __init__(self, cache: Any) -> None:
        super().__init__()
        self.cache, self.crop = cache, cache.crop
        cache.crop = self.note

    def note(self, tokens_to_remove: int) -> None:
        self.append((self.cache.croppable, -tokens_to_remove))
        self.crop(tokens_to_remove)

    def check(self, most: int) -> None:
        """Assert that calls had up to `most` candidates, and that some of them were right and some wrong."""
        assert max(candidates for candidates, _ in self) == most
        assert 0 < sum(back for _, back in self) < sum(candidates for candidates, _ in self)
