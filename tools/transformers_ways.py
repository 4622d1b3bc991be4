"""Ways to decode a model of Transformers that are timed beside each other, and the one call of generate they share."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

WINDOW = 16  # tokens of replay
DRAFTS = 4


@dataclass(frozen=True)
class Way:
    """How a model is decoded.

    enabled: on flashstate's ops with a cache of Transformers.
    cache: what a StateCache is made with; None: a cache of Transformers.
    static: whether it is made for a number of rows and tokens, so that a decode step is one CUDA graph.
    options: of generate.
    drafts: tokens that prompt lookup proposes for every step, at batch 1.
    """

    enabled: bool = False
    cache: Mapping[str, Any] | None = None
    static: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    drafts: int = 0

    @property
    def is_stock(self) -> bool:
        """Whether Transformers decodes alone."""
        return not self.enabled and self.cache is None

    @property
    def state_dtype(self) -> torch.dtype:
        """What recurrent states are stored in."""
        return (self.cache or {}).get("dtype", torch.float32)

    @property
    def written(self) -> float:
        """The share of its state that a row writes for every token."""
        replay = (self.cache or {}).get("replay")
        return 1 / replay if replay else 1.0

    def make_cache(self, model: PreTrainedModel, batch: int, tokens: int) -> Cache | None:
        """An empty cache for rows of so many tokens; None where each generation has its own."""
        if self.cache is None:
            return None
        import flashstate.integrations.transformers as fs

        sizes: dict[str, Any] = {"max_batch": batch, "max_cache_len": tokens} if self.static else {}
        return fs.StateCache(model, **self.cache, **sizes)

    @contextmanager
    def on(self, model: PreTrainedModel) -> Iterator[None]:
        """Have the model decode this way."""
        if self.is_stock:
            yield
            return
        import flashstate.integrations.transformers as fs

        fs.enable(model)
        try:
            yield
        finally:
            fs.disable(model)


WAYS = {
    "stock": Way(),
    "stock compiled": Way(options={"cache_implementation": "static"}),
    "enable": Way(enabled=True),
    "float32": Way(cache={"dtype": torch.float32}),
    "bfloat16": Way(cache={"dtype": torch.bfloat16}),
    "float16 stochastic": Way(cache={"dtype": torch.float16, "rounding": "stochastic", "seed": 0}),
    "int8 replay": Way(cache={"dtype": torch.int8, "replay": WINDOW}),
    "int8 stochastic": Way(cache={"dtype": torch.int8, "rounding": "stochastic", "seed": 0}),
    "drafts": Way(cache={"drafts": DRAFTS}, static=False, drafts=DRAFTS),
    "drafts static": Way(cache={"drafts": DRAFTS}, drafts=DRAFTS),
}


class Chosen:
    """A logits processor that chooses given tokens, (batch, T), behind a prompt of so many.

    Only the score of the token wanted is changed: prompt lookup asks processors which of its drafts are allowed.
    """

    def __init__(self, tokens: Tensor, prompt: int) -> None:
        self.tokens, self.prompt = tokens, prompt

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        at = self.place(ids)
        return scores.scatter_(1, self.tokens[:, at, None], torch.inf)

    def place(self, ids: Tensor) -> int:
        """Which of the tokens follows; the last one where prompt lookup asks beyond it."""
        return min(ids.shape[1] - self.prompt, self.tokens.shape[1] - 1)


class Recorded(Chosen):
    """A logits processor that chooses given tokens, and keeps the logits that the model had instead."""

    def __init__(self, tokens: Tensor, prompt: int) -> None:
        super().__init__(tokens, prompt)
        self.logits: dict[int, Tensor] = {}  # by token; what follows a draft that is rejected comes again

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.logits[self.place(ids)] = scores.clone()
        return super().__call__(ids, scores)


class Clock:
    """A streamer that notes when every step of a generation was done, and how many tokens a row got from it."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.tokens: list[int] = []

    def put(self, tokens: Tensor) -> None:
        """Transformers hands tokens over on the CPU, so the step that made them is done."""
        self.times.append(time.perf_counter())
        self.tokens.append(1 if tokens.ndim == 1 else tokens.shape[1])

    def end(self) -> None:
        """Nothing is left to do."""

    @property
    def prompt_seconds(self) -> float:
        """From the prompt to the first token."""
        return self.times[1] - self.times[0]

    @property
    def tokens_per_step(self) -> float:
        """Tokens of a row and step, after the first."""
        return sum(self.tokens[2:]) / len(self.tokens[2:])

    def seconds_per_token(self, segment: int) -> list[float]:
        """Of every segment of so many steps behind the first token; of all together where there are fewer."""
        steps = len(self.times) - 2
        segment = min(segment, steps)
        starts = range(1, 2 + steps - segment, segment)
        return [
            (self.times[at + segment] - self.times[at]) / sum(self.tokens[at + 1 : at + 1 + segment]) for at in starts
        ]


class Prompt(NamedTuple):
    """Tokens that a generation continues, (batch, T), and in pieces of how many they go through the model; 0: all."""

    ids: Tensor
    chunk: int = 0


def generate(
    model: PreTrainedModel,
    way: Way,
    prompt: Prompt,
    tokens: int,
    cache: Cache | None = None,
    streamer: object = None,
    processor: object = None,
) -> Cache:
    """Generate so many tokens greedily, from an empty cache, which is returned with what it then holds."""
    options = dict(way.options)
    if prompt.chunk:
        options["prefill_chunk_size"] = prompt.chunk
    if way.drafts:
        options["prompt_lookup_num_tokens"] = way.drafts
    if cache is not None:
        cache.reset()
        options["past_key_values"] = cache
    result = model.generate(
        prompt.ids, do_sample=False, max_new_tokens=tokens, return_dict_in_generate=True, streamer=streamer,
        logits_processor=[] if processor is None else [processor], **options,
    )  # fmt: skip
    return result.past_key_values if cache is None else cache
