"""How wrong states and outputs become while a model decodes, in every format, against float64.

A plain step rounds the state it stores. Replay stores a state once per window of tokens, so it rounds less often. This
measures what that is worth, for heads that forget soon and for heads that remember long; docs/numerics.md has what it
shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashstate.demo import one_thread
from flashstate.ops.mamba2 import mamba2_step
from flashstate.ops.mamba2_fold import mamba2_fold
from flashstate.ops.mamba2_replay import mamba2_replay
from flashstate.pool.pool import StatePool
from flashstate.proof.inputs import Source
from flashstate.reference.mamba2 import mamba2_token, silu
from flashstate.state.formats import PORTABLE_FORMATS

TOKENS, WINDOW = 4096, 16
BATCH, HEADS, ROWS, COLS = 2, 64, 2, 128
A_RANGE, DT_RANGE = (1.0, 16.0), (0.001, 0.1)  # what mamba_ssm draws -A and dt of new heads from
DT_SPREAD = 0.5  # standard deviation of what a token adds to dt_bias
STATE_EVERY = 5  # tokens; prime to the window, so that states are seen soon after a fold and late alike
MEMORIES = {"all": (0, math.inf), "short": (0, 16), "medium": (16, 128), "long": (128, math.inf)}  # of heads, in tokens


@dataclass(frozen=True)
class ErrorRow:
    """What is wrong in one period of a run, for some heads; its fields are the columns of the CSV."""

    format: str
    rounding: str
    way: str  # "plain" or "replay"
    memory: str  # of the heads: "all", "short", "medium" or "long"
    tokens: int  # from the start to the end of the period; it begins where that of the row before ends
    state_error: float  # root mean square of the error, relative to that of the exact values
    output_error: float
    state_size: float  # of the state's part along the exact state, relative to it; 1 is right


class NewMamba2:
    """Heads of a new Mamba-2, and random tokens for them: the same for every format, on every device."""

    def __init__(self, device: torch.device) -> None:
        self.source = Source(device, seed=0)
        A = self._drawn(*A_RANGE)
        dt = self._drawn(*map(math.log, DT_RANGE)).exp()
        self.parameters = {"A": -A, "dt_bias": dt + torch.log(-torch.expm1(-dt))}  # whose softplus is dt
        self.memory = 1 / (A * dt)  # (heads,): tokens that a state takes to decay to 1/e

    def _drawn(self, low: float, high: float) -> Tensor:
        return low + (high - low) * self.source.uniform(HEADS)

    def token(self) -> dict[str, Any]:
        """The arguments of one step. Activations are bfloat16 values, but float32, so that outputs are not rounded."""
        return {
            "x": self.activation(BATCH, HEADS, ROWS),
            "dt": DT_SPREAD * self.source.normal(BATCH, HEADS),
            "B": self.activation(BATCH, 1, COLS),
            "C": self.activation(BATCH, 1, COLS),
            **self.parameters,
        }

    def activation(self, *size: int) -> Tensor:
        return silu(self.source.normal(*size)).bfloat16().float()

    def heads_of(self, memory: str) -> Tensor:
        """Which heads have such a memory: (heads,) bool."""
        low, high = MEMORIES[memory]
        return (low <= self.memory) & (self.memory < high)


class PlainRun:
    """A pool of one format, stepped in place: every token rounds the state."""

    way, window = "plain", 0

    def __init__(self, format: str, rounding: str, device: torch.device) -> None:
        self.format, self.rounding = format, rounding
        self.pool = StatePool.mamba2(
            slots=BATCH, layers=1, heads=HEADS, rows=ROWS, cols=COLS,
            dtype=getattr(torch, format), rounding=rounding, seed=0, device=device,
            window=self.window, ring_dtype=torch.float32 if self.window else None,
        )  # fmt: skip
        self.slots = self.pool.acquire(BATCH)
        self.outputs, self.states = Sums(device), Sums(device)

    def step(self, token: Mapping[str, Any]) -> Tensor:
        y = mamba2_step(self.pool.layer(0), **token, slots=self.slots)
        self.pool.advance(self.slots)
        return y

    def state(self, A: Tensor) -> Tensor:
        """What the next token continues from: (batch, heads, rows, cols) float32."""
        return self.pool.read(0, self.slots)

    def rows(self, model: NewMamba2, tokens: int) -> list[ErrorRow]:
        """What is wrong in the period that ends after so many tokens; the next one begins."""
        rows = []
        for memory in MEMORIES:
            heads = model.heads_of(memory)
            errors = (self.states.error(heads), self.outputs.error(heads), self.states.size(heads))
            rows.append(ErrorRow(self.format, self.rounding, self.way, memory, tokens, *errors))
        self.outputs, self.states = Sums(self.slots.device), Sums(self.slots.device)
        return rows


class ReplayRun(PlainRun):
    """A pool of one format, stepped by replay: a state is rounded when a full window is folded into it."""

    way, window = "replay", WINDOW

    def step(self, token: Mapping[str, Any]) -> Tensor:
        plan = self.pool.plan(self.slots, tokens=1)
        y = mamba2_replay(self.pool.layer(0), self.pool.ring(0), **token, plan=plan)
        self.pool.commit(plan)
        self.pool.advance(self.slots)
        return y

    def state(self, A: Tensor) -> Tensor:
        folded = torch.empty(BATCH, HEADS, ROWS, COLS, device=A.device)
        mamba2_fold(self.pool.layer(0), self.pool.ring(0), A, slots=self.slots, into=folded)
        return folded[self.slots]


class Sums:
    """Squares of errors and of exact values, and products of exact values with those got: sums per head."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(3, HEADS, dtype=torch.float64, device=device)

    def add(self, got: Tensor, exact: Tensor) -> None:
        """Both (batch, heads, ...), the exact values float64."""
        terms = torch.stack([(got - exact).square(), exact.square(), got * exact])
        self.sums += terms.sum([1, *range(3, terms.dim())])

    def error(self, heads: Tensor) -> float:
        error, exact, _ = self.sums[:, heads].sum(1).tolist()
        return math.sqrt(error / exact)

    def size(self, heads: Tensor) -> float:
        _, exact, product = self.sums[:, heads].sum(1).tolist()
        return product / exact


def ends_of_periods(tokens: int) -> list[int]:
    """Where the periods of a run of so many tokens end.

    Twice per doubling, so that the last one is a quarter of a run of 2^n; after whole windows, so that a period sees
    all that happens between two folds.
    """
    if tokens < WINDOW or tokens % WINDOW:
        raise ValueError(f"tokens must be whole windows of {WINDOW}, got {tokens}")
    ends = sorted({factor * WINDOW << doublings for factor in (1, 3) for doublings in range(tokens.bit_length())})
    return [*(end for end in ends if end < tokens), tokens]


def measure_errors(
    device: torch.device,
    tokens: int = TOKENS,
    formats: Sequence[tuple[str, str]] = PORTABLE_FORMATS,
    tracked: Callable[[range], Iterable[int]] = iter,
) -> list[ErrorRow]:
    """Decode tokens one by one, in every format and both ways side by side.

    Rows of a format, a way and a memory follow each other.
    """
    ends = ends_of_periods(tokens)
    with one_thread():
        model = NewMamba2(device)
        runs = [run(*fmt, device) for fmt in formats for run in (PlainRun, ReplayRun)]
        rows: dict[PlainRun, list[ErrorRow]] = {run: [] for run in runs}
        exact = torch.zeros(BATCH, HEADS, ROWS, COLS, dtype=torch.float64, device=device)
        for count in tracked(range(1, tokens + 1)):
            token = model.token()
            y, exact = mamba2_token(exact, **token, D=None, z=None, dt_softplus=True)
            for run in runs:
                run.outputs.add(run.step(token), y)
                if count % STATE_EVERY == 0:
                    run.states.add(run.state(token["A"]), exact)
                if count in ends:
                    rows[run] += run.rows(model, count)
    return [row for run in runs for memory in MEMORIES for row in rows[run] if row.memory == memory]


def setup_of(device: torch.device, tokens: int) -> dict[str, str]:
    """What is decoded, in words, for the provenance of a file."""
    model = NewMamba2(device)
    counts = [f"{int(model.heads_of(memory).sum())} {memory}" for memory in MEMORIES if memory != "all"]
    return {
        "decoded": f"{tokens} tokens of {BATCH} requests, one per call; replay with a window of {WINDOW}",
        "heads": f"{HEADS} of {ROWS} x {COLS}: {', '.join(counts)}",
    }
