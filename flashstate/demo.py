"""`flashstate demo`: a continuous batch with speculative tokens, one pool per format, every format against float64.

Every request keeps to a level of its own and wanders slowly about it, and memory is long. That is where rounding to
nearest in few bits fails: an update below half a unit in the last place is lost, every time. Stochastic rounding keeps
it on average. Where updates are larger than that, nearest has the smaller errors, by about 1.4. Tokens of one step are
rounded once, so speculation is kind to every format: `--tokens 1` is the harder test.

A request has a slot for each of the T tokens of a step: the state after every token is written, and the next step reads
that of the last token that was accepted. Snapshots would take one state more, and a copy per step. A token is what the
projections of a model would make of it: the inputs of every layer, drawn at random.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise, takewhile
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table
from torch import Tensor

from flashstate.check import implementation
from flashstate.ops.mamba2 import mamba2_step
from flashstate.pool.pool import StatePool
from flashstate.reference.mamba2 import mamba2_token
from flashstate.state.formats import PORTABLE_FORMATS, label_of
from flashstate.state.slots import Slots

LAYERS, HEADS, ROWS, COLS = 2, 4, 8, 64
WIDTHS = (HEADS * ROWS, HEADS, COLS, COLS)  # of x, dt, B and C, which lie side by side in the values of a layer
WIDTH = sum(WIDTHS)
DECAYS = (0.98, 0.999)  # per token, of the fastest and the slowest head
LEVEL, WANDER_TOKENS = 0.97, 100.0  # share of a request's own level in its inputs; how long its inputs stay alike

BATCH, REQUESTS = 10, 8  # rows of the server's fixed batch, and requests it has slots for: the other rows are padding
PROMPT_TOKENS = (256, 1024)
LONGEST = 2000  # tokens that a request generates at most, however many steps there are
ACCEPTANCE = 0.7  # the probability of a draft token to be right


@cache
def parameters(device: torch.device) -> dict[str, Tensor]:
    """A and dt_bias, which all layers share."""
    slowest_last = torch.logspace(math.log10(1 - DECAYS[0]), math.log10(1 - DECAYS[1]), HEADS)
    dt = -torch.log1p(-slowest_last)  # with A = -1, the decay is exp(-dt)
    return {"A": -torch.ones(HEADS, device=device), "dt_bias": dt.expm1().log().to(device)}


def arguments_of(values: Tensor) -> dict[str, Any]:
    """Values (..., WIDTH) of a layer as arguments of mamba2_step."""
    x, dt, B, C = values.split(WIDTHS, dim=-1)
    B, C = B.unflatten(-1, (1, COLS)), C.unflatten(-1, (1, COLS))
    return {"x": x.unflatten(-1, (HEADS, ROWS)), "dt": dt, "B": B, "C": C, **parameters(values.device)}


def exact(states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs (tokens, layers, heads, rows) of tokens (tokens, layers, WIDTH), and the states behind them."""
    outputs = []
    for values in tokens:
        y, states = mamba2_token(states, **arguments_of(values), D=None, z=None, dt_softplus=True)
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


@dataclass(frozen=True)
class DemoRow:
    """What one format costs and what it gets wrong; errors are root mean squares relative to float64."""

    format: str
    rounding: str
    bytes_per_state: int
    output_error: float
    state_error: float
    tokens_per_second: float


class Contender:
    """A server whose states have one format: its pool, and the time it took."""

    def __init__(self, name: str, rounding: str, tokens: int, device: torch.device, seed: int) -> None:
        self.format, self.rounding, self.tokens = name, rounding, tokens
        self.pool = StatePool.mamba2(
            slots=REQUESTS * tokens, layers=LAYERS, heads=HEADS, rows=ROWS, cols=COLS,
            dtype=getattr(torch, name), rounding=rounding, seed=seed, device=device,
        )  # fmt: skip
        self.slots = torch.full((BATCH, tokens), -1, device=device)  # of the request in every row; -1: padding
        self.accepted = torch.zeros(BATCH, dtype=torch.int64, device=device)  # tokens of the step before
        self.seconds = 0.0

    def start(self, row: int, states: Tensor) -> None:
        """Take slots for a new request, and write the states its prefill left, (layers, ...), to the first of them."""
        slots = self.pool.acquire(self.tokens)
        for i in range(LAYERS):
            self.pool.write(i, slots[:1], states[i : i + 1].float())
        self.slots[row], self.accepted[row] = slots, 1

    def step(self, proposed: Tensor) -> Tensor:
        """One step of the model on tokens (BATCH, T, layers, WIDTH); returns (BATCH, T, layers, heads, rows)."""
        arguments = [arguments_of(proposed[:, :, i]) for i in range(LAYERS)]
        start = _clock(proposed.device)
        slots = Slots(self.slots, write=self.slots, accepted=self.accepted)
        y = [mamba2_step(self.pool.layer(i), **arguments[i], slots=slots) for i in range(LAYERS)]
        self.pool.advance(slots)
        self.seconds += _clock(proposed.device) - start
        return torch.stack(y, dim=2)

    def leave(self, row: int) -> Tensor:
        """Give back the slots of a request that left; returns the states it left with, (layers, ...)."""
        last = self.slots[row, self.accepted[row] - 1]
        states = torch.cat([self.pool.read(i, last) for i in range(LAYERS)])
        self.pool.release(self.slots[row])
        self.slots[row], self.accepted[row] = -1, 0
        return states


class Demo:
    """One stream of requests through a pool per format, and the truth beside them: what is accepted, in float64."""

    def __init__(self, device: torch.device, steps: int, tokens: int, seed: int) -> None:
        self.device, self.tokens, self.traffic = device, tokens, Traffic(steps, tokens, seed)
        self.steps = self.requests = self.proposed = self.accepted = 0
        self.contenders = [Contender(*known, tokens, device, seed) for known in PORTABLE_FORMATS]
        self.states = torch.zeros(BATCH, LAYERS, HEADS, ROWS, COLS, dtype=torch.float64, device=device)
        # Sums of squares: of the truth, and of how far every format is from it.
        self.squares = {what: self.states.new_zeros(1 + len(self.contenders)) for what in ("outputs", "states")}
        padding, _ = Traffic(1, tokens, 0).propose()
        for contender in self.contenders:  # compile what must be compiled, on a batch of padding, which changes nothing
            contender.step(padding.to(device))
            contender.seconds = 0.0

    def step(self, last: bool = False) -> None:
        """Let requests come, run the model once, and let those that are complete go; with `last`, all go."""
        self.traffic.arrive()
        room = min(contender.pool.free for contender in self.contenders) // self.tokens
        for row, request in self.traffic.admit(room):
            self.requests += 1
            prompt = request.tokens[: request.done].to(self.device)
            _, self.states[row] = exact(torch.zeros_like(self.states[row]), prompt)
            for contender in self.contenders:
                contender.start(row, self.states[row])
        proposed, accepted = (part.to(self.device) for part in self.traffic.propose())
        right = torch.arange(self.tokens, device=self.device) < accepted[:, None]  # (BATCH, T)
        y = self.exact_step(proposed, accepted)[right]
        self._compare("outputs", y, [contender.step(proposed)[right] for contender in self.contenders])
        for contender in self.contenders:
            contender.accepted.copy_(accepted)
        self.steps += 1
        self.proposed += self.tokens * int((accepted > 0).sum())
        self.accepted += int(accepted.sum())
        for row in self.traffic.leave(everybody=last):
            self._compare("states", self.states[row], [contender.leave(row) for contender in self.contenders])

    def exact_step(self, proposed: Tensor, accepted: Tensor) -> Tensor:
        """The true outputs of accepted tokens; zero elsewhere."""
        y = self.states.new_zeros(*proposed.shape[:3], HEADS, ROWS)
        for row in accepted.nonzero()[:, 0].tolist():
            right = slice(0, accepted[row])
            y[row, right], self.states[row] = exact(self.states[row], proposed[row, right])
        return y

    def _compare(self, what: str, want: Tensor, found: Sequence[Tensor]) -> None:
        """Add the squares of the truth, and of how far every format is from it."""
        self.squares[what] += torch.stack([want, *(got - want for got in found)]).square().flatten(1).sum(1)

    def rows(self) -> list[DemoRow]:
        """What every format costs and gets wrong so far."""
        errors = ((of_formats[1:] / of_formats[0]).sqrt().tolist() for of_formats in self.squares.values())
        return [
            DemoRow(c.format, c.rounding, c.pool.bytes_per_slot, output, state, self.accepted / c.seconds)
            for c, output, state in zip(self.contenders, *errors, strict=True)
        ]


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextmanager
def one_thread() -> Iterator[None]:
    """Tensors as small as these cost a CPU more to share among threads than to compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_demo(
    device: torch.device, steps: int, tokens: int, seed: int, tracked: Callable[[range], Iterable[int]] = iter
) -> Demo:
    """Serve random requests for some model steps, with so many tokens per request and step."""
    with one_thread():
        demo = Demo(device, steps, tokens, seed)
        for step in tracked(range(steps)):
            demo.step(last=step == steps - 1)
    return demo


def show_demo(device: torch.device, steps: int, tokens: int, seed: int) -> None:
    """Run the demo with a progress bar and print what came out."""
    bar = partial(track, description="serving", console=Console(stderr=True), transient=True)
    demo = run_demo(device, steps, tokens, seed, bar)
    console = Console()
    for part in (*headline(demo), demo_table(demo), *findings(demo)):
        console.print(part, highlight=False)


def headline(demo: Demo) -> list[str]:
    """What was served, and by what."""
    return [
        f"Model steps: {demo.steps}. Requests: {demo.requests}. "
        f"Tokens: {demo.proposed:,} proposed, {demo.accepted:,} accepted.",
        f"Per format a pool of {REQUESTS * demo.tokens} slots, {demo.tokens} for a request; "
        f"{LAYERS} layers of {HEADS} heads of {ROWS} x {COLS}, decays {DECAYS[0]} to {DECAYS[1]}; "
        f"batches of {BATCH} rows, run by {implementation(demo.device)}.",
    ]


def demo_table(demo: Demo) -> Table:
    """A line per format."""
    names = ("bytes/\nstate", "bytes/\nrequest", "output\nerror", "state\nerror", "tokens/s\n")
    table = Table("format", *(Column(name, justify="right") for name in names), box=SIMPLE_HEAD)
    for row in demo.rows():
        numbers = (f"{row.bytes_per_state:,}", f"{row.bytes_per_state * demo.tokens:,}")
        errors = (f"{row.output_error:.1e}", f"{row.state_error:.1e}")
        table.add_row(label_of(row.format, row.rounding), *numbers, *errors, f"{row.tokens_per_second:,.0f}")
    return table


def findings(demo: Demo) -> list[str]:
    """What the numbers say, with one line per format that was run with both roundings."""
    found = {(row.format, row.rounding): row.state_error for row in demo.rows()}
    lines = ["Errors are relative to float64, of accepted tokens and of requests' last states."]
    rejected = demo.proposed - demo.accepted
    if rejected:
        error = found["float32", "nearest"]
        lines.append(f"float64 never saw the {rejected:,} rejected tokens; float32 did, and ends {error:.1e} off.")
    for name, rounding in found:
        if rounding == "stochastic":
            lines.append(f"{name}: stochastic rounding {effect(found[name, 'nearest'], found[name, rounding])}.")
    return [*lines, "Small shapes take the time of calls, not of memory; flashstate bench has speeds."]


def effect(before: float, after: float) -> str:
    """What a change does to the state error, in words."""
    times = f"{max(before / after, after / before):.1f}"
    if times == "1.0":
        return "hardly changes the state error"
    return f"makes the state error {times} times {'larger' if after > before else 'smaller'}"
