"""`flashstate demo`: a continuous batch with speculative tokens, one pool per format, every format against float64.

Every request keeps to a level of its own and wanders slowly about it, and memory is long. That is where rounding to
nearest in few bits fails: an update below half a unit in the last place is lost, every time. Stochastic rounding keeps
it on average. Where updates are larger than that, nearest has the smaller errors, by about 1.4. Tokens of one step are
rounded once, so speculation is kind to every format: `--tokens 1` is the harder test.

A request has a slot for each of the T tokens of a step: the state after every token is written, and the next step reads
that of the last token that was accepted. Snapshots would take one state more, and a copy per step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table
from torch import Tensor

from flashstate.check import implementation
from flashstate.ops.mamba2 import mamba2_step
from flashstate.pool.pool import StatePool
from flashstate.state.formats import PORTABLE_FORMATS, label_of
from flashstate.state.slots import Slots
from flashstate.traffic import BATCH, COLS, DECAYS, HEADS, LAYERS, REQUESTS, ROWS, DemoModel, Traffic


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

    def __init__(
        self, name: str, rounding: str, tokens: int, model: DemoModel, device: torch.device, seed: int
    ) -> None:
        self.format, self.rounding, self.model, self.tokens = name, rounding, model, tokens
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
        arguments = [self.model.arguments(proposed[:, :, i]) for i in range(LAYERS)]
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
        self.device, self.tokens = device, tokens
        self.steps = self.requests = self.proposed = self.accepted = 0
        self.traffic, self.model = Traffic(steps, tokens, seed), DemoModel(device)
        self.contenders = [Contender(*known, tokens, self.model, device, seed) for known in PORTABLE_FORMATS]
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
            _, self.states[row] = self.model.exact(torch.zeros_like(self.states[row]), prompt)
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
            y[row, right], self.states[row] = self.model.exact(self.states[row], proposed[row, right])
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
