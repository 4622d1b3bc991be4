"""Timing a way to decode, checking it first, and finding where the time goes."""

from __future__ import annotations

import copy
import gc
import os
import re
import statistics
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flashstate.generate import bytes_in
from tools.transformers_ways import Chosen, Clock, Prompt, Recorded, Way, generate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SEGMENT = 16  # steps that a time is the mean of, which is a window of replay
EDITED = 0.25  # of the tokens that prompt lookup meets: so many are not those of the prompt
GATE_PROMPT, GATE_TOKENS = 24, 12
SLACK = 2.0  # times what bfloat16 gets wrong
# Half the distance of stored values, relative to their size; int8 has scales of rows, whose largest value is about 2.8
# times their usual one.
STEPS = {torch.float32: 0.0, torch.float16: 2.0**-12, torch.bfloat16: 2.0**-9, torch.int8: 2.8 / 254}
WARM_TOKENS = 1 << 15  # of a prompt to warm up with, at most; a row of more has
WARM_LENGTH = 256
PROFILED = 8  # steps of a profile
COPIED = 2 << 30  # bytes whose copy gives the speed of memory
GROUPS = {  # of kernels, by what their names contain
    "attention": r"flash|fmha|attention|sdpa",
    "convolution": r"conv1d|conv_depthwise|cudnn",
    "recurrence": r"mamba2|gated_delta|replay|fold|selective|recurrent",
    "matrix products": r"gemm|gemv|nvjet|cutlass|splitk|xmma|cublas|grouped_mm|wgmma",
    "norms": r"norm",
    "copies and elementwise": r"elementwise|copy|memcpy|memset|cat|reduce|index|gather|scatter|fill|triton_poi",
}


class Measured(NamedTuple):
    """What was measured of a way to decode."""

    prompt_ms: float
    ms_per_token: float
    spread: float  # slowest minus fastest segment, relative to the median
    tokens_per_step: float
    state_bytes: int  # of a row
    attention_bytes: int  # of a row
    peak_bytes: int


class Gate:
    """Decides whether a way to decode a model is right: by its logits for given tokens, against float32.

    kept: a file for the references, so that other processes need not make them; there they are read if it exists.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device, kept: Path | None = None) -> None:
        self.ids = random_tokens(model, 2, GATE_PROMPT, device)
        self.text = edited(self.ids, GATE_TOKENS, model)
        if kept is not None and kept.exists():
            self.exact, self.forgetting, self.noise = torch.load(kept, map_location=device)
            return
        exact, stock = copy.deepcopy(model).float(), Way()
        self.exact = forced_logits(exact, stock, Prompt(self.ids), self.text)
        self.forgetting = self.error(forced_logits(exact, stock, Prompt(self.ids[:, -1:]), self.text))
        del exact
        free()
        self.noise = self.error(self.logits(model, stock))
        if kept is not None:
            torch.save((self.exact, self.forgetting, self.noise), kept)

    def logits(self, model: PreTrainedModel, way: Way) -> Tensor:
        """Those of a model for the tokens of the gate, of which drafts take one row."""
        rows = 1 if way.drafts else len(self.ids)
        return forced_logits(model, way, Prompt(self.ids[:rows]), self.text[:rows])

    def error(self, logits: Tensor) -> float:
        """Of logits, relative to those of float32."""
        exact = self.exact[:, : logits.shape[1]]
        return float((logits - exact).norm() / exact.norm())

    def allowed(self, way: Way) -> float:
        """The error of a way that is right: what bfloat16 gets wrong, and more as its states are coarser; at most a
        third of what is wrong when the prompt is lost."""
        coarser = STEPS[way.state_dtype] / STEPS[torch.bfloat16]
        return min(SLACK * self.noise * (1 + coarser), self.forgetting / 3)

    def check(self, model: PreTrainedModel, way: Way) -> str:
        """Say how wrong a way is; ValueError where that is too much."""
        error, allowed = self.error(self.logits(model, way)), self.allowed(way)
        words = f"logits are off by {error:.2e} of their size; bfloat16 alone by {self.noise:.2e}, a lost prompt by "
        words += f"{self.forgetting:.2e}, allowed are {allowed:.2e}"
        if not error <= allowed:
            raise ValueError(words)
        return words


def forced_logits(model: PreTrainedModel, way: Way, prompt: Prompt, text: Tensor) -> Tensor:
    """Logits of a model before every token of a text that follows a prompt: (tokens, batch, vocabulary)."""
    tokens, length = text.shape[1], prompt.ids.shape[1]
    recorded = Recorded(text, length)
    with way.on(model):
        generate(model, way, prompt, tokens, way.make_cache(model, len(text), length + tokens), processor=recorded)
    return torch.stack([recorded.logits[at] for at in range(tokens)])


def measure(model: PreTrainedModel, way: Way, prompt: Prompt, tokens: int) -> Measured:
    """Generate once to warm up, and once by the clock; drafts are looked up for an edited copy of the prompt."""
    batch, length = prompt.ids.shape
    processor = Chosen(edited(prompt.ids, tokens, model), length) if way.drafts else None
    with way.on(model):
        cache = way.make_cache(model, batch, length + tokens)
        if way.drafts:  # the same steps, of which some have more tokens than others
            generate(model, way, prompt, tokens, cache, Clock(), processor)
        else:
            generate(model, way, warming(prompt), min(SEGMENT, tokens), cache, Clock())
        reset_peak(prompt.ids.device)
        clock = Clock()
        used = generate(model, way, prompt, tokens, cache, clock, processor)
        peak = peak_bytes(prompt.ids.device)
    times = clock.seconds_per_token(len(clock.times) if way.drafts else SEGMENT)
    median = statistics.median(times)
    held = bytes_in(used)
    state, attention = (size // batch for size in (held.state, held.cache - held.state))
    return Measured(
        clock.prompt_seconds * 1e3, median * 1e3, (max(times) - min(times)) / median, clock.tokens_per_step, state,
        attention, peak,
    )  # fmt: skip


def warming(prompt: Prompt) -> Prompt:
    """A prompt to warm up with: the same one, or its beginning where that saves seconds."""
    batch, length = prompt.ids.shape
    return prompt if batch * length <= WARM_TOKENS else Prompt(prompt.ids[:, :WARM_LENGTH])


class Profiler(Clock):
    """A streamer that profiles some steps in the middle of a generation."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        kinds = torch.profiler.ProfilerActivity
        self.profile = torch.profiler.profile(activities=[kinds.CUDA if device.type == "cuda" else kinds.CPU])
        self.milliseconds = 0.0  # of a step, by the clock of the host

    def put(self, tokens: Tensor) -> None:
        super().put(tokens)
        if len(self.times) == 3:
            self.profile.start()
            self.times[-1] = time.perf_counter()
        elif len(self.times) == 3 + PROFILED:
            self.profile.stop()
            self.milliseconds = (self.times[-1] - self.times[2]) / PROFILED * 1e3


class Share(NamedTuple):
    """Kernels of one group in a decode step."""

    group: str
    milliseconds: float
    launches: float


def profile(model: PreTrainedModel, way: Way, prompt: Prompt) -> tuple[float, list[Share]]:
    """Milliseconds of a decode step by the clock of the host, and the kernels in it by group."""
    batch, length = prompt.ids.shape
    tokens = 4 + PROFILED
    device = prompt.ids.device
    with way.on(model):
        cache = way.make_cache(model, batch, length + tokens)
        generate(model, way, prompt, tokens, cache)
        profiler = Profiler(device)
        generate(model, way, prompt, tokens, cache, profiler)
    events = profiler.profile.events() or ()
    kind = device.type.upper()
    kernels = [(event.name, event.time_range.elapsed_us()) for event in events if event.device_type.name == kind]
    return profiler.milliseconds, shares_of(kernels, PROFILED)


def shares_of(kernels: Iterable[tuple[str, float]], steps: int) -> list[Share]:
    """Kernels, by name and microseconds, in groups; the longest first."""
    found: dict[str, list[float]] = {}
    for name, microseconds in kernels:
        found.setdefault(group_of(name), []).append(microseconds)
    shares = [Share(group, sum(times) / steps / 1e3, len(times) / steps) for group, times in found.items()]
    return sorted(shares, key=lambda share: -share.milliseconds)


def group_of(kernel: str, groups: Mapping[str, str] = GROUPS) -> str:
    """The first group that the name of a kernel belongs to."""
    return next((group for group, words in groups.items() if re.search(words, kernel.lower())), "other")


def random_tokens(model: PreTrainedModel, batch: int, length: int, device: torch.device) -> Tensor:
    """A prompt of random tokens, always the same one."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, model.config.vocab_size, (batch, length), generator=generator).to(device)


def edited(ids: Tensor, tokens: int, model: PreTrainedModel) -> Tensor:
    """The beginning of a prompt once more, with so many tokens, of which EDITED are other ones."""
    text = ids.repeat(1, -(-tokens // ids.shape[1]))[:, :tokens].clone()
    generator = torch.Generator().manual_seed(1)
    changed = torch.rand(text.shape, generator=generator) < EDITED
    others = torch.randint(1, model.config.vocab_size, text.shape, generator=generator)
    return torch.where(changed.to(ids.device), others.to(ids.device), text)


def copy_speed(device: torch.device) -> float:
    """Bytes per second that memory reads and writes together when a large tensor is copied."""
    source = torch.ones(COPIED // 64 if device.type == "cpu" else COPIED, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(8):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(4):
            target.copy_(source)
        synchronize(device)
        times.append((time.perf_counter() - start) / 4)
    return 2 * source.numel() / statistics.median(times)


def memory_of(device: torch.device) -> int:
    """Bytes of memory that a device has."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """The most bytes of the GPU that were in use since `reset_peak`; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def free() -> None:
    """Give back memory that nothing holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
