"""What `flashstate demo` serves: requests that come and go, and the smooth random tokens they are made of.

A token is what the projections of a model would make of it: the inputs of every layer, drawn at random.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any

import torch
from torch import Tensor

from flashstate.reference.mamba2 import mamba2_token

LAYERS, HEADS, ROWS, COLS = 2, 4, 8, 64
WIDTHS = (HEADS * ROWS, HEADS, COLS, COLS)  # of x, dt, B and C, which lie side by side in the values of a layer
WIDTH = sum(WIDTHS)
DECAYS = (0.98, 0.999)  # per token, of the fastest and the slowest head
LEVEL, WANDER_TOKENS = 0.97, 100.0  # share of a request's own level in its inputs; how long its inputs stay alike

BATCH, REQUESTS = 10, 8  # rows of the server's fixed batch, and requests it has slots for: the other rows are padding
PROMPT_TOKENS = (256, 1024)
LONGEST = 2000  # tokens that a request generates at most, however many steps there are
ACCEPTANCE = 0.7  # the probability of a draft token to be right


class DemoModel:
    """The parameters that all layers of the demo share, and how a layer's values become arguments of mamba2."""

    def __init__(self, device: torch.device) -> None:
        slowest_last = torch.logspace(math.log10(1 - DECAYS[0]), math.log10(1 - DECAYS[1]), HEADS)
        dt = -torch.log1p(-slowest_last)  # with A = -1, the decay is exp(-dt)
        self.A, self.dt_bias = -torch.ones(HEADS, device=device), dt.expm1().log().to(device)

    def arguments(self, values: Tensor) -> dict[str, Any]:
        """Values (..., WIDTH) as arguments of mamba2_step."""
        x, dt, B, C = values.split(WIDTHS, dim=-1)
        B, C = B.unflatten(-1, (1, COLS)), C.unflatten(-1, (1, COLS))
        return {"x": x.unflatten(-1, (HEADS, ROWS)), "dt": dt, "A": self.A, "B": B, "C": C, "dt_bias": self.dt_bias}

    def exact(self, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs (tokens, layers, heads, rows) of tokens (tokens, layers, WIDTH), and the states behind them."""
        outputs = []
        for values in tokens:
            y, states = mamba2_token(states, **self.arguments(values), D=None, z=None, dt_softplus=True)
            outputs.append(y)
        return torch.stack(outputs), states


@dataclass
class Request:
    """All tokens of a request, (tokens, layers, WIDTH), and how many of them the server has: at first the prompt."""

    tokens: Tensor
    done: int

    @property
    def left(self) -> int:
        return len(self.tokens) - self.done


class Traffic:
    """Requests that wait, and the request in every row of the batch."""

    def __init__(self, steps: int, draft_tokens: int, seed: int) -> None:
        self.random, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.draft_tokens = draft_tokens
        self.waiting: list[Request] = []
        self.rows: list[Request | None] = [None] * BATCH
        per_step = sum(ACCEPTANCE**i for i in range(draft_tokens))  # tokens accepted, on average
        longest = min(math.ceil(0.8 * steps * per_step), LONGEST)
        self.lengths = (math.ceil(longest / 4), longest)
        self.arrivals = REQUESTS * per_step / (sum(self.lengths) / 2)  # per step: about what the server can take

    def arrive(self) -> None:
        """Let requests arrive: now and then, and several at once on an idle server."""
        idle = not self.waiting and not any(self.rows)
        for _ in range(REQUESTS // 2 if idle else int(self.arrivals + self.random.random())):
            prompt, answer = self.random.randint(*PROMPT_TOKENS), self.random.randint(*self.lengths)
            self.waiting.append(Request(smooth_tokens(prompt + answer, self.generator), prompt))

    def admit(self, room: int) -> list[tuple[int, Request]]:
        """Give up to `room` of the requests that wait a row of the batch each; returns them with their rows."""
        free = [row for row, request in enumerate(self.rows) if request is None]
        admitted = list(zip(self.random.sample(free, len(free)), self.waiting[:room], strict=False))
        del self.waiting[: len(admitted)]
        for row, request in admitted:
            self.rows[row] = request
        return admitted

    def propose(self) -> tuple[Tensor, Tensor]:
        """The next tokens of every row (BATCH, T, layers, WIDTH), and how many of them are right, (BATCH,). The first
        is certain; from the first wrong one on, they are tokens of no request. Padding is NaN, 0 are right."""
        proposed = jittery_tokens(BATCH, self.draft_tokens, generator=self.generator)
        accepted = torch.zeros(BATCH, dtype=torch.int64)
        for row, request in enumerate(self.rows):
            if request is None:
                proposed[row] = torch.nan
                continue
            guesses = (self.random.random() < ACCEPTANCE for _ in range(1, self.draft_tokens))
            right = min(1 + sum(takewhile(bool, guesses)), request.left)
            proposed[row, :right] = request.tokens[request.done : request.done + right]
            request.done += right
            accepted[row] = right
        return proposed, accepted

    def leave(self, everybody: bool) -> list[int]:
        """Let go of the requests that are complete, or of everybody; returns the rows they had."""
        left = [row for row, request in enumerate(self.rows) if request and (everybody or not request.left)]
        for row in left:
            self.rows[row] = None
        return left


def smooth_tokens(count: int, generator: torch.Generator) -> Tensor:
    """The tokens of one request, (count, layers, WIDTH): they wander slowly about a level of its own."""
    level, wander = jittery_tokens(1, generator=generator), jittery_tokens(count, generator=generator)
    keep = math.exp(-1 / WANDER_TOKENS)
    for before, after in pairwise(wander):
        after.mul_(math.sqrt(1 - keep**2)).add_(before, alpha=keep)
    return LEVEL * level + math.sqrt(1 - LEVEL**2) * wander


def jittery_tokens(*lead: int, generator: torch.Generator) -> Tensor:
    """Tokens (*lead, layers, WIDTH) that have nothing to do with each other."""
    scale = torch.cat([torch.full((width,), size) for width, size in zip(WIDTHS, (1.0, 0.3, 1.0, 1.0), strict=True)])
    return scale * torch.randn(*lead, LAYERS, WIDTH, generator=generator)
