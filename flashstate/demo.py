"""`flashstate demo`: requests come and go through one pool per format, and every format is held against float64.

Every request keeps to a level of its own and wanders slowly about it, and memory is long. That is where rounding to
nearest in 16 bits fails: an update below half a unit in the last place is lost, every time. Stochastic rounding keeps
it on average. Inputs that jitter more than that are kind to nearest, whose errors are then the smaller by about 1.4.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table
from torch import Tensor

from flashstate.check import implementation
from flashstate.ops.mamba2 import mamba2_step
from flashstate.reference.mamba2 import mamba2_token
from flashstate.state.formats import PORTABLE_FORMATS, label_of
from flashstate.state.state import State

HEADS, ROWS, COLS = 4, 16, 64
SLOTS, BATCH = 8, 10  # requests that fit, and the fixed batch of the server: rows without a request are padding
REQUESTS = 2.0 * SLOTS  # that arrive during a run, about
DECAYS = (0.98, 0.999)  # per token, of the fastest and the slowest head
LEVEL, WANDER_TOKENS = 0.97, 100.0  # share of a request's own level in its inputs; how long its inputs stay alike


@dataclass(frozen=True)
class DemoRow:
    """What one format costs and what it gets wrong; errors are root mean squares relative to float64."""

    format: str
    rounding: str
    bytes_per_request: int
    output_error: float
    state_error: float
    tokens_per_second: float


@dataclass
class Traffic:
    """Requests that come and go: the lengths of those that wait, the tokens left to those that have a slot."""

    steps: int
    random: random.Random
    waiting: list[int] = field(default_factory=list)
    left: dict[int, int] = field(default_factory=dict)

    def admit(self) -> list[int]:
        """Let requests arrive, several at once on an idle server, and take free slots; returns the slots taken."""
        arrivals = SLOTS // 2 if not self.left and not self.waiting else self.random.random() < REQUESTS / self.steps
        self.waiting += [self.random.randint(1 + self.steps // 5, 1 + self.steps * 4 // 5) for _ in range(arrivals)]
        free = [slot for slot in range(SLOTS) if slot not in self.left]
        self.random.shuffle(free)
        taken = free[: len(self.waiting)]
        for slot in taken:
            self.left[slot] = self.waiting.pop(0)
        return taken

    def batch(self, device: torch.device) -> Tensor:
        """The slots of the running requests, padded with -1 to the server's batch size."""
        running = list(self.left)
        return torch.tensor(running + [-1] * (BATCH - len(running)), dtype=torch.int32, device=device)

    def finish(self) -> list[int]:
        """Count one token for every request; returns the slots of those that ended."""
        self.left = {slot: left - 1 for slot, left in self.left.items()}
        ended = [slot for slot, left in self.left.items() if left == 0]
        for slot in ended:
            del self.left[slot]
        return ended


class Model:
    """A layer's parameters, and the smooth random inputs of the request in every slot."""

    WIDTHS = (HEADS * ROWS, HEADS, COLS, COLS)  # of x, dt, B and C, which lie side by side in one row of values

    def __init__(self, device: torch.device, generator: torch.Generator) -> None:
        self.device, self.generator = device, generator
        self.level, self.wander = torch.zeros(2, SLOTS, sum(self.WIDTHS))
        slowest_last = torch.logspace(math.log10(1 - DECAYS[0]), math.log10(1 - DECAYS[1]), HEADS)
        dt = -torch.log1p(-slowest_last)  # with A = -1, the decay is exp(-dt)
        self.A, self.dt_bias = -torch.ones(HEADS, device=device), dt.expm1().log().to(device)

    def start(self, slot: int) -> None:
        """A new request in this slot: a level of its own."""
        self.level[slot], self.wander[slot] = torch.randn(2, sum(self.WIDTHS), generator=self.generator)

    def inputs(self, slots: Tensor) -> dict[str, Tensor]:
        """The next token of every request, as arguments of mamba2_step; NaN in padding rows, which must not matter."""
        keep = math.exp(-1 / WANDER_TOKENS)
        noise = torch.randn(self.wander.shape, generator=self.generator)
        self.wander = keep * self.wander + math.sqrt(1 - keep**2) * noise
        values = (LEVEL * self.level + math.sqrt(1 - LEVEL**2) * self.wander).to(self.device)[slots.long()]
        values[slots < 0] = torch.nan
        x, dt, B, C = values.split(self.WIDTHS, dim=1)
        x, B, C = x.unflatten(1, (HEADS, ROWS)), B.unflatten(1, (1, COLS)), C.unflatten(1, (1, COLS))
        return {"x": x, "dt": 0.3 * dt, "A": self.A, "B": B, "C": C}


@dataclass
class Contender:
    """One format's pool, the time it took, and the squared errors it has piled up."""

    state: State
    seconds: float = 0.0
    output_error: float = 0.0
    state_error: float = 0.0

    def step(self, inputs: dict[str, Any], dt_bias: Tensor, slots: Tensor) -> Tensor:
        start = _clock(slots.device)
        y = mamba2_step(self.state, **inputs, dt_bias=dt_bias, slots=slots)
        if self.state.seed is not None:
            self.state.advance(slots)
        self.seconds += _clock(slots.device) - start
        return y


@dataclass
class Truth:
    """The same recurrence in float64, on the running requests alone, and the squares that errors are relative to."""

    states: Tensor
    output_power: float = 0.0
    state_power: float = 0.0

    def step(self, inputs: dict[str, Any], dt_bias: Tensor, slots: Tensor) -> Tensor:
        live = slots >= 0
        tokens = {name: value if name == "A" else value[live] for name, value in inputs.items()}
        read = slots[live].long()
        y, states = mamba2_token(self.states[read], **tokens, D=None, z=None, dt_bias=dt_bias, dt_softplus=True)
        self.states[read] = states
        self.output_power += _sum_of_squares(y)
        return y


def run_demo(
    device: torch.device, steps: int, seed: int, tracked: Callable[[range], Iterable[int]] = iter
) -> list[DemoRow]:
    """Serve random requests for some model steps, once per format, and measure each against float64."""
    with one_thread():
        return _serve(device, steps, seed, tracked)


@contextmanager
def one_thread() -> Iterator[None]:
    """Tensors as small as these cost a CPU more to share among threads than to compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _serve(device: torch.device, steps: int, seed: int, tracked: Callable[[range], Iterable[int]]) -> list[DemoRow]:
    generator = torch.Generator().manual_seed(seed)
    traffic, model = Traffic(steps, random.Random(seed)), Model(device, generator)
    contenders = [_contender(name, rounding, device, generator) for name, rounding in PORTABLE_FORMATS]
    truth = Truth(torch.zeros(SLOTS, HEADS, ROWS, COLS, dtype=torch.float64, device=device))
    _warm_up(contenders, model, device)
    tokens = 0
    for step in tracked(range(steps)):
        for slot in traffic.admit():
            model.start(slot)
            for states in (truth.states, *(contender.state.data for contender in contenders)):
                states[slot] = 0  # a slot must not leak into the next request
        slots = traffic.batch(device)
        inputs = model.inputs(slots)
        tokens += len(traffic.left)
        y = truth.step(inputs, model.dt_bias, slots)
        for contender in contenders:
            got = contender.step(inputs, model.dt_bias, slots)[slots >= 0]
            contender.output_error += _sum_of_squares(got - y)
        _compare_states(truth, contenders, traffic.finish() if step < steps - 1 else list(traffic.left))
    return [_row(contender, truth, tokens) for contender in contenders]


def _contender(name: str, rounding: str, device: torch.device, generator: torch.Generator) -> Contender:
    data = torch.zeros(SLOTS, HEADS, ROWS, COLS, dtype=getattr(torch, name), device=device)
    seed = None if rounding == "nearest" else torch.randint(1 << 62, (SLOTS,), generator=generator).to(device)
    return Contender(State(data, rounding=rounding, seed=seed))


def _warm_up(contenders: Sequence[Contender], model: Model, device: torch.device) -> None:
    """Compile what must be compiled, on a batch of padding, which changes nothing."""
    slots = torch.full((BATCH,), -1, dtype=torch.int32, device=device)
    for contender in contenders:
        contender.step(model.inputs(slots), model.dt_bias, slots)
        contender.seconds = 0.0


def _compare_states(truth: Truth, contenders: Sequence[Contender], ended: list[int]) -> None:
    """Add up how far the states of the requests that ended are from the truth."""
    truth.state_power += _sum_of_squares(truth.states[ended])
    for contender in contenders:
        contender.state_error += _sum_of_squares(contender.state.data[ended] - truth.states[ended])


def _row(contender: Contender, truth: Truth, tokens: int) -> DemoRow:
    return DemoRow(
        contender.state.format.name,
        contender.state.rounding,
        contender.state.bytes_per_slot,
        math.sqrt(contender.output_error / truth.output_power),
        math.sqrt(contender.state_error / truth.state_power),
        tokens / contender.seconds,
    )


def _sum_of_squares(values: Tensor) -> float:
    return values.square().sum().item()


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def show_demo(device: torch.device, steps: int, seed: int) -> None:
    """Run the demo with a progress bar and print what came out."""
    bar = partial(track, description="serving", console=Console(stderr=True), transient=True)
    rows = run_demo(device, steps, seed, bar)
    console = Console()
    console.print(
        f"{steps} model steps, a pool of {SLOTS} slots, batches of {BATCH} rows, {HEADS} heads of {ROWS} x {COLS}, "
        f"decays {DECAYS[0]} to {DECAYS[1]}, {implementation(device)}",
        highlight=False,
    )
    console.print(demo_table(rows))
    for line in findings(rows):
        console.print(line, highlight=False)


def demo_table(rows: Sequence[DemoRow]) -> Table:
    names = ("bytes/request", "output error", "state error", "tokens/s")
    table = Table("format", *(Column(name, justify="right") for name in names), box=SIMPLE_HEAD)
    for row in rows:
        errors = (f"{row.output_error:.1e}", f"{row.state_error:.1e}")
        table.add_row(
            label_of(row.format, row.rounding), f"{row.bytes_per_request:,}", *errors, f"{row.tokens_per_second:,.0f}"
        )
    return table


def findings(rows: Sequence[DemoRow]) -> list[str]:
    """What the numbers say, one line per 16-bit format that was run with both roundings."""
    found = {(row.format, row.rounding): row.state_error for row in rows}
    lines = ["Errors are relative to float64: over all tokens, and over the states requests ended with."]
    for name, rounding in found:
        if rounding == "stochastic":
            ratio = found[name, "nearest"] / found[name, rounding]
            words = f"{ratio:.1f} times less" if ratio >= 1 else f"{1 / ratio:.1f} times more"
            lines.append(f"{name}: states drift {words} with stochastic rounding than with rounding to nearest.")
    return lines
