"""`flashstate generate`: a model of Transformers generates, alone and then on flashstate, side by side in one table.

Both runs are greedy, on the same prompt, and each comes after one of the same length that is not timed. What is timed
is decoding: from the first token to the last, without the time that showing them takes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table
from torch import Tensor

from flashstate.basics import FAMILY, WINDOW
from flashstate.check import implementation
from flashstate.errors import counted, dtype_name
from flashstate.state.formats import FORMATS, label_of

VOCABULARY = 8  # of the random model: it repeats itself, so that some drafts are right
PART = r"\w([\w.-]*\w)?"  # of a name on the hub: ./x, ../x and x/.. are folders
ON_HUB = rf"{PART}(/{PART})?"
TINY = "Of a model this small neither speed nor bytes say anything: its rings and windows may outweigh its states."
ON_CPU = "On a CPU flashstate runs its reference, which is plain torch and says nothing about speed on a GPU."

Show = Callable[[Tensor], object]  # takes new tokens of the first row of a batch


@dataclass(frozen=True)
class Task:
    """What is generated, by which model, and how flashstate keeps the model's states."""

    device: torch.device
    prompt: str
    tokens: int
    batch: int = 1
    model: str | None = None  # a folder, or a name on the hub; None: a tiny random model
    family: str | None = None  # of a random model
    dtype: torch.dtype | None = None  # of weights; None: that of the checkpoint, and float32 for random ones
    state: torch.dtype = torch.float32
    rounding: str = "nearest"
    replay: int | None = None  # window; 0: every token is stepped; None: WINDOW for int8 states that replay, else 0
    drafts: int = 0
    seed: int = 0  # of rounding, and of random weights
    static: bool = False

    def __post_init__(self) -> None:
        if self.model is not None and self.family is not None:
            raise ValueError(f"--family is of a random model, and --model names another, {self.model!r}: give only one")
        if self.model is not None and not Path(self.model).is_dir() and not re.fullmatch(ON_HUB, self.model):
            words = "a folder, or a name on the hub such as owner/name"
            raise ValueError(f"--model must be {words}, got {self.model!r}, which is neither")
        if self.drafts and self.batch > 1:
            raise ValueError(f"--drafts needs --batch 1, got {self.batch}: Transformers takes drafts for one row only")


class Numbers:
    """What stands for a tokenizer where there is none: the bytes of a text are its tokens, and tokens are printed as
    numbers."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def encode(self, text: str, return_tensors: str = "pt") -> Tensor:
        """Tokens (1, bytes of the text)."""
        return torch.tensor([[byte % self.vocabulary for byte in text.encode()]], dtype=torch.int64)

    def decode(self, tokens: list[int]) -> str:
        return "".join(f"{token} " for token in tokens)


class Stopwatch:
    """A streamer of Transformers that times decoding and passes on the tokens of the first row."""

    def __init__(self, batch: int, show: Show) -> None:
        self.batch, self.show = batch, show
        self.has_prompt = False
        self.shown_at: float | None = None  # when the last tokens had been shown
        self.seconds = 0.0
        self.steps: list[int] = []  # tokens that a row got from every step

    def put(self, tokens: Tensor) -> None:
        """Take the prompt first, then what every step gave: (batch,), or with drafts (1, accepted + 1)."""
        now = time.perf_counter()
        if not self.has_prompt:
            self.has_prompt = True
            return
        if self.shown_at is not None:
            self.seconds += now - self.shown_at
        row = tokens.reshape(self.batch, -1)[0]
        self.steps.append(len(row))
        self.show(row)
        self.shown_at = time.perf_counter()

    def end(self) -> None:
        """Nothing is held back."""


class Bytes(NamedTuple):
    """Bytes of a cache: of windows, states and rings, and of everything in it."""

    state: int
    cache: int


@dataclass(frozen=True)
class Run:
    """New tokens (batch, n), how many of them a row got from every step, the seconds from the first step's end to the
    last step's, and the bytes of the cache."""

    tokens: Tensor
    steps: list[int]
    seconds: float
    bytes: Bytes

    @property
    def speed(self) -> str:
        """Tokens per second, of all rows, without those of the first step."""
        decoded = len(self.tokens) * sum(self.steps[1:])
        return f"{decoded / self.seconds:,.1f}" if decoded else "-"

    @property
    def accepted(self) -> str:
        """Drafts accepted per step, without the first step."""
        later = self.steps[1:]
        return f"{sum(later) / len(later) - 1:.2f}" if later else "-"


def show_generate(task: Task) -> None:
    """Run the model both ways and print its tokens as they come, then what each way took."""
    console = Console(highlight=False)
    with Console(stderr=True).status("loading"):
        model, tokenizer = load(task)
    ids = tokenizer.encode(task.prompt, return_tensors="pt").to(task.device).repeat(task.batch, 1)
    if not ids.numel():
        raise ValueError("--prompt must have at least one token, got none")
    options = cache_options(task, model, ids.shape[1])
    for line in headline(task, model, ids.shape[1], options):
        console.print(line, markup=False)
    alone = run_alone(task, model, ids)
    ours = run_with_flashstate(task, model, ids, options, tokenizer)
    console.print(table_of(alone, ours, drafts=task.drafts > 0))
    console.print(verdict(alone.tokens, ours.tokens))
    if task.model is None or task.device.type == "cpu":
        console.print(TINY if task.model is None else ON_CPU)


def integration() -> ModuleType:
    """flashstate.integrations.transformers; ValueError without a Transformers that it knows."""
    try:
        import flashstate.integrations.transformers as fs
    except ImportError as error:
        raise ValueError(str(error)) from error
    return fs


def load(task: Task) -> tuple[Any, Any]:
    """The model of a task on its device, and its tokenizer."""
    integration()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from flashstate.integrations.transformers.tiny import tiny_model

    if task.model is None:
        model: Any = tiny_model(
            task.family or FAMILY, seed=task.seed, device=task.device, dtype=task.dtype or torch.float32,
            vocab_size=VOCABULARY,
        )  # fmt: skip
        return model, Numbers(VOCABULARY)
    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=task.dtype or "auto")
    return model.to(task.device).eval(), AutoTokenizer.from_pretrained(task.model)


def cache_options(task: Task, model: Any, prompt_tokens: int) -> dict[str, Any]:
    """What StateCache is given besides the model. What it refuses, it refuses here, before the model has run."""
    replay = task.replay
    if replay is None and task.state == torch.int8 and replays(model):
        replay = max(WINDOW, task.drafts + 1)
    options: dict[str, Any] = {
        "dtype": task.state,
        "rounding": task.rounding,
        "seed": task.seed,
        "replay": replay or None,
        "drafts": task.drafts,
    }
    if task.static:
        options |= {"max_batch": task.batch, "max_cache_len": prompt_tokens + task.tokens}
    fs = integration()
    fs.StateCache(model, **options | {"max_batch": None})  # which would allocate
    fs.disable(model)
    return options


def replays(model: Any) -> bool:
    """Whether rings can keep the tokens of all recurrent layers of a model."""
    from flashstate.integrations.transformers.families import mixers_of

    return all(found.replays is not None for found in mixers_of(model).values())


def headline(task: Task, model: Any, prompt_tokens: int, options: dict[str, Any]) -> list[str]:
    """What generates, from what, and how its states are kept."""
    name = task.model or f"a tiny random {task.family or FAMILY}"
    how = [label_of(FORMATS[task.state].name, task.rounding)]
    if options["replay"]:
        unless = ", unless --replay 0" if task.replay is None else ""
        how.append(f"by replay with a window of {options['replay']}{unless}")
    if task.drafts:
        how.append(f"up to {counted(task.drafts, 'draft')} per step by prompt lookup")
    if task.static:
        how.append("a cache of fixed size")
    return [
        f"Model: {name}, {dtype_name(model.dtype)}, run by {implementation(task.device)}.",
        f"Prompt: {counted(prompt_tokens, 'token')}, in {counted(task.batch, 'row')}. Greedy decoding.",
        f"State: {'; '.join(how)}.",
    ]


@contextmanager
def bar(words: str, tokens: int) -> Iterator[Show]:
    """A progress bar that moves on with the tokens it is shown, and at no other time."""
    with Progress(console=Console(stderr=True), transient=True, auto_refresh=False) as progress:
        task = progress.add_task(words, total=tokens)
        yield lambda row: progress.update(task, advance=len(row), refresh=True)


def run_alone(task: Task, model: Any, ids: Tensor) -> Run:
    """Generate as Transformers does, with its own cache."""
    for words in ("transformers alone, warming up", "transformers alone"):
        with bar(words, task.tokens) as show:
            run = generate(task, model, ids, show)
    return run


def run_with_flashstate(task: Task, model: Any, ids: Tensor, options: dict[str, Any], tokenizer: Any) -> Run:
    """Generate on flashstate's cache, and print the tokens of the first row as they come."""
    from transformers import TextStreamer

    cache = integration().StateCache(model, **options)
    more: dict[str, Any] = {"past_key_values": cache}
    if task.drafts:
        more["prompt_lookup_num_tokens"] = task.drafts
    with bar("with flashstate, warming up", task.tokens) as show:
        generate(task, model, ids, show, **more)
    cache.reset()
    text = TextStreamer(tokenizer)
    run = generate(task, model, ids, text.put, **more)
    text.end()
    return run


def generate(task: Task, model: Any, ids: Tensor, show: Show, **more: Any) -> Run:
    """One greedy generation, timed."""
    watch = Stopwatch(task.batch, show)
    result = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=task.tokens, do_sample=False, streamer=watch,
        return_dict_in_generate=True, **more,
    )  # fmt: skip
    tokens = result.sequences[:, ids.shape[1] :].cpu()
    return Run(tokens, watch.steps, watch.seconds, bytes_in(result.past_key_values))


def bytes_in(cache: Any) -> Bytes:
    """Bytes of a StateCache, or of one of Transformers' own caches."""
    if hasattr(cache, "bytes_of_state"):
        return Bytes(cache.bytes_of_state, cache.bytes)
    state = whole = 0
    for layer in cache.layers:
        for name, held in vars(layer).items():
            tensors = held.values() if isinstance(held, dict) else [held]
            size = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))
            whole += size
            state += size if name in ("conv_states", "recurrent_states") else 0
    return Bytes(state, whole)


def table_of(alone: Run, ours: Run, drafts: bool) -> Table:
    """A line per way to run; with a column for drafts, which Transformers alone refuses."""
    names = ["tokens/s", "bytes of\nstate", "bytes of\nthe cache", *["drafts accepted\nper step"][: int(drafts)]]
    table = Table("", *(Column(name, justify="right") for name in names), box=SIMPLE_HEAD)
    for name, run, accepted in (("transformers alone", alone, "none"), ("with flashstate", ours, ours.accepted)):
        cells = (name, run.speed, f"{run.bytes.state:,}", f"{run.bytes.cache:,}", accepted)
        table.add_row(*cells[: 1 + len(names)])
    return table


def verdict(alone: Tensor, ours: Tensor) -> str:
    """Whether both gave the same tokens (batch, n), or how many of the first are the same in all rows."""
    if torch.equal(alone, ours):
        return f"Both gave the same {counted(alone.shape[1], 'token')}."
    length = min(alone.shape[1], ours.shape[1])
    agree = (alone[:, :length] == ours[:, :length]).all(0).int().cumprod(0).sum()
    return f"The first {agree} of {counted(alone.shape[1], 'token')} are the same."
