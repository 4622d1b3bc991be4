"""How many rows of a replay ring are live: requests that draft tokens, simulated until their counts are stationary."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from flashstate.bench.jobs import Live

ACCEPTANCE = 0.7  # the probability that a draft token is right, if those before it are
REQUESTS, STEPS = 1 << 14, 64  # that are simulated; after so many steps nothing is left of how they began
LEAST_UNIFORM = 3  # live rows


def accepted_tokens(requests: int, tokens: int, generator: torch.Generator) -> Tensor:
    """How many tokens of a step each request keeps, (requests,): the first, which is always right, and the drafts
    behind it up to the first that is wrong."""
    right = torch.rand(requests, tokens - 1, generator=generator) < ACCEPTANCE
    return 1 + right.long().cumprod(1).sum(1)


@cache
def stationary_counts(tokens: int, window: int) -> Tensor:
    """Live rows of many requests between two steps of so many tokens each, sorted."""
    generator = torch.Generator().manual_seed(0)
    count = torch.randint(1, window + 1, (REQUESTS,), generator=generator)
    for _ in range(STEPS):
        kept = torch.where(count + tokens > window, 0, count)  # what is not folded
        count = kept + accepted_tokens(REQUESTS, tokens, generator)
    return count.sort().values


@cache
def live_counts(live: Live, tokens: int, window: int) -> Tensor:
    """Live rows of many requests as a measurement has them, sorted."""
    if live == "uniform":
        return torch.arange(LEAST_UNIFORM, window + 1)
    counts = stationary_counts(tokens, window)
    folds = counts + tokens > window
    if live == "none folds":  # where all would, rings are empty
        return counts[~folds] if not folds.all() else torch.zeros(1, dtype=torch.int64)
    return counts[folds] if live == "all fold" else counts


def spread_counts(live: Live, tokens: int, window: int, slots: int) -> Tensor:
    """Live rows of so many slots, (slots,) int32, sorted: every count as often as among many requests, nearly."""
    counts = live_counts(live, tokens, window)
    return counts[(2 * torch.arange(slots) + 1) * len(counts) // (2 * slots)].int()
