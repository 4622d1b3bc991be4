"""Tiny models of Transformers that decode: what they are asked, and the logits they give token by token."""

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from stock_mixers import KNOWN, transformers
from torch import Tensor

import flashstate.integrations.transformers as fs
from flashstate.integrations.transformers.enabling import own_cache_name
from flashstate.integrations.transformers.families import MIXERS
from flashstate.integrations.transformers.mixers import KINDS
from flashstate.integrations.transformers.mixers.kind import Replays
from flashstate.integrations.transformers.store import Store

KIND_OF = dict(MIXERS.values())  # of every family
REPLAYED = [family for family in KNOWN if isinstance(KINDS[KIND_OF[family]], Replays)]
ONE_OF_EACH = ("mamba", "mamba2", "qwen3_5", "kimi_linear", "lfm2")  # kind
NEW = 8  # tokens that are generated
TOKENS = torch.randint(1, 96, (2, 11), generator=torch.Generator().manual_seed(1))
PROMPT = TOKENS[:, :6]
STATIC = {"max_batch": 2, "max_cache_len": PROMPT.shape[1] + NEW}


def greedy(model: Any, prompt: Tensor = PROMPT, **options: Any) -> Tensor:
    """The prompt and what the model continues it with."""
    plain = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    return model.generate(prompt, **{**plain, **options})


def stock_cache(model: Any) -> Any:
    return transformers.DynamicCache(config=model.config.get_text_config())


@torch.no_grad()
def call(model: Any, tokens: Tensor, cache: Any, first: int, **more: Any) -> Tensor:
    """The logits of tokens, (batch, T, vocabulary), which are at these places from the first on."""
    if "position_ids" in inspect.signature(type(model).forward).parameters:  # which some models count from 0
        more["position_ids"] = torch.arange(first, first + tokens.shape[1]).expand(len(tokens), -1)
    return model(input_ids=tokens, use_cache=True, **{own_cache_name(model): cache}, **more).logits


def teacher_forced(model: Any, lengths: Sequence[int], cache: Any) -> Tensor:
    """The logits of TOKENS in calls of so many."""
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    calls = [call(model, TOKENS[:, end - n : end], cache, end - n) for n, end in zip(lengths, ends, strict=True)]
    return torch.cat(calls, 1)


def expected(model: Any, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """What a model as Transformers has it gives for these calls in float64, and in the precision it has."""
    precise = copy.deepcopy(model).double()
    precise.set_experts_implementation("eager")  # others are not for float64
    return teacher_forced(precise, lengths, stock_cache(model)), teacher_forced(model, lengths, stock_cache(model))


def store_of(cache: fs.StateCache) -> Store:
    """What the recurrent layers of a model keep, all of which are on one device."""
    (store,) = cache.stores.values()
    return store


def states_of(cache: fs.StateCache) -> list[Tensor]:
    """The stored states of all layers."""
    pool = store_of(cache).pool
    return [] if pool is None else [pool.layer(i).data for i in range(pool.layers)]
