"""Measure errors of gated_delta_step, gated_delta_replay and mamba3_step over many tokens, in every format, against
float64: `python -m tools.numerics_ops --csv results/numerics-ops.csv`.

That takes minutes on a CPU. `make figures` then writes the tables of costs on the pages of these ops. Heads forget as
those of tools/numerics_experiment.py do, and tokens are drawn alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashstate.bench.results import read_rows
from flashstate.demo import one_thread
from flashstate.ops.gated_delta import gated_delta_step
from flashstate.ops.mamba3 import mamba3_step
from flashstate.pool.pool import StatePool
from flashstate.reference.gated_delta import gated_delta_token, sigmoid
from flashstate.reference.mamba2 import softplus
from flashstate.reference.mamba3 import FourStates, Parameters, mamba3_token
from flashstate.state.formats import PORTABLE_FORMATS
from tools.numerics_delta_experiment import Simulation, Way
from tools.numerics_experiment import BATCH, COLS, DT_SPREAD, HEADS, ROWS, STATE_EVERY, TOKENS, NewMamba2, Sums
from tools.numerics_run import progress, run_of

Formats = Sequence[tuple[str, str]]  # and roundings
SHARE = 4  # errors are those of the last quarter of a run
PLAIN = Parameters(None, None, None, None, None, None, pairing="interleaved", trap_logit=False)


@dataclass(frozen=True)
class OpErrorRow:
    """What is wrong in the last quarter of a run, over all heads; its fields are the columns of the CSV."""

    op: str
    format: str
    rounding: str
    tokens: int  # of the whole run
    state_error: float  # root mean square of the error, relative to that of the exact values
    output_error: float


class Pools:
    """Pools of an op, one for each format, that are stepped in place."""

    def __init__(
        self, pool: Callable[..., StatePool[Any]], op: Callable[..., Tensor], formats: Formats, device: torch.device
    ) -> None:
        shape = {"slots": BATCH, "layers": 1, "heads": HEADS, "seed": 0, "device": device}
        self.op = op
        self.pools = [pool(**shape, dtype=getattr(torch, name), rounding=rounding) for name, rounding in formats]
        self.slots, *_ = [pool.acquire(BATCH) for pool in self.pools]  # every pool hands out the same

    def step(self, token: dict[str, Any]) -> list[Tensor]:
        """Outputs of every format: (batch, heads, rows)."""
        outputs = [self.op(pool.layer(0), **token, slots=self.slots) for pool in self.pools]
        for pool in self.pools:
            pool.advance(self.slots)
        return outputs

    def states(self) -> list[Tensor]:
        """States of every format: (batch, heads, rows, cols)."""
        return [pool.read(0, self.slots) for pool in self.pools]


class ReplayedDelta:
    """States of the delta rule by replay, one for each format, with a ring of float16. They are simulated, since the
    op itself takes an hour on a CPU; the heads of both requests lie side by side."""

    def __init__(self, formats: Formats, device: torch.device) -> None:
        self.ways = [Way(*form, "float16") for form in formats]
        self.simulation = Simulation(self.ways, device, (BATCH * HEADS, ROWS, COLS))

    def step(self, token: dict[str, Any]) -> list[Tensor]:
        """Outputs of every format: (batch, heads, rows)."""
        parameters = {name: token[name].repeat(BATCH) for name in ("A_log", "dt_bias")}
        tokens = {name: t.flatten(0, 1)[None] for name, t in token.items() if name not in parameters}
        return self._by_request(self.simulation.step({**tokens, **parameters}))

    def states(self) -> list[Tensor]:
        """States of every format: (batch, heads, rows, cols)."""
        return self._by_request(self.simulation.states)

    def _by_request(self, values: Tensor) -> list[Tensor]:
        return list(values.unflatten(1, (BATCH, HEADS)))


class Model(NamedTuple):
    """How one op decodes: its tokens, what is stepped in every format, and the same in float64."""

    token: Callable[[NewMamba2], dict[str, Any]]
    runs: Callable[[Formats, torch.device], Pools | ReplayedDelta]
    exact: Callable[[Any, dict[str, Any]], tuple[Tensor, Any]]


def delta_token(model: NewMamba2) -> dict[str, Any]:
    """Arguments of one step of Gated DeltaNet: every value head has a key head."""
    q, k = model.activation(BATCH, HEADS, COLS), model.activation(BATCH, HEADS, COLS)
    gates = {"a": DT_SPREAD * model.source.normal(BATCH, HEADS), "b": model.source.normal(BATCH, HEADS)}
    parameters = {"A_log": (-model.parameters["A"]).log(), "dt_bias": model.parameters["dt_bias"]}
    return {"q": q, "k": k, "v": model.activation(BATCH, HEADS, ROWS), **gates, **parameters}


def mamba3_arguments(model: NewMamba2) -> dict[str, Any]:
    """Arguments of one step of Mamba-3 of rank 1, B and C given turned."""
    dt = softplus(DT_SPREAD * model.source.normal(BATCH, HEADS) + model.parameters["dt_bias"])
    trap = sigmoid(model.source.normal(BATCH, HEADS))
    gates = {"A": model.parameters["A"].expand(BATCH, HEADS), "dt": dt, "trap": trap}
    B, C = model.activation(BATCH, 1, 1, COLS), model.activation(BATCH, 1, 1, COLS)
    return {"x": model.activation(BATCH, HEADS, ROWS), **gates, "B": B, "C": C}


def exact_delta(state: Tensor, token: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return gated_delta_token(state, **token, b_logit=None, scale=None, qk_l2norm=True)


def exact_mamba3(state: Tensor | FourStates, token: dict[str, Any]) -> tuple[Tensor, FourStates]:
    if isinstance(state, Tensor):
        zeros = state.new_zeros
        state = FourStates(state, zeros(BATCH, 1, HEADS, COLS), zeros(BATCH, HEADS, ROWS), None)
    return mamba3_token(state, **token, z=None, angle=None, parameters=PLAIN)


DELTA_POOL = partial(StatePool.gated_delta, value_dim=ROWS, key_dim=COLS)
MAMBA3_POOL = partial(StatePool.mamba3, rows=ROWS, cols=COLS, kv_dtype=torch.float32)
MODELS = {
    "gated_delta": Model(delta_token, partial(Pools, DELTA_POOL, gated_delta_step), exact_delta),
    "gated_delta_replay": Model(delta_token, ReplayedDelta, exact_delta),
    "mamba3": Model(mamba3_arguments, partial(Pools, MAMBA3_POOL, mamba3_step), exact_mamba3),
}


def measure_op(
    op: str,
    device: torch.device,
    tokens: int = TOKENS,
    formats: Formats = PORTABLE_FORMATS,
    tracked: Callable[[range], Iterable[int]] = iter,
) -> list[OpErrorRow]:
    """Decode tokens one by one, in every format side by side."""
    model, drawn = MODELS[op], NewMamba2(device)
    runs = model.runs(formats, device)
    sums = [(Sums(device), Sums(device)) for _ in formats]
    exact: Any = torch.zeros(BATCH, HEADS, ROWS, COLS, dtype=torch.float64, device=device)
    with one_thread():
        for count in tracked(range(1, tokens + 1)):
            token = model.token(drawn)
            y, exact = model.exact(exact, token)
            got = runs.step(token)
            if count > tokens - tokens // SHARE:
                add_all([outputs for _, outputs in sums], got, y)
                if count % STATE_EVERY == 0:
                    s = exact if isinstance(exact, Tensor) else exact.s
                    add_all([states for states, _ in sums], runs.states(), s)
    everything = torch.ones(HEADS, dtype=torch.bool, device=device)
    errors = [[total.error(everything) for total in totals] for totals in sums]
    return [OpErrorRow(op, *form, tokens, *found) for form, found in zip(formats, errors, strict=True)]


def add_all(sums: Sequence[Sums], got: Sequence[Tensor], exact: Tensor) -> None:
    """Add what every format got, and the exact values, to its sums."""
    for total, values in zip(sums, got, strict=True):
        total.add(values, exact)


def read_op_errors(path: Path) -> tuple[dict[str, str], list[OpErrorRow]]:
    """The provenance and the rows of a file that `python -m tools.numerics_ops` wrote."""
    return read_rows(path, OpErrorRow, "tools.numerics_ops")


def main(argv: list[str] | None = None, tokens: int = TOKENS) -> None:
    """Decode so many tokens of every op with a progress bar, and write the rows."""
    run, rows = run_of("tools.numerics_ops", "Measure errors of ops.", argv), []
    for op in MODELS:
        rows += measure_op(op, run.device, tokens, tracked=progress(op))
    decoded = f"{tokens} tokens of {BATCH} requests, one per call; {HEADS} heads of {ROWS} x {COLS}"
    run.write(rows, {"decoded": decoded})


if __name__ == "__main__":
    main()
