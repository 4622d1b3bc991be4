"""tools.numerics_delta: that it decodes as the library does, what it measures and leaves behind, and what the tree has
for the documents."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flashstate import DeltaRing, State, gated_delta_fold, gated_delta_replay, gated_delta_step
from flashstate.reference.gated_delta import gates
from flashstate.state.formats import PORTABLE_FORMATS
from tools import numerics_delta as tool
from tools.numerics_delta import TABLES, bytes_kept, bytes_moved, delta_table, error_of, read_delta_errors
from tools.numerics_delta_experiment import (
    COLS,
    DECAYS,
    FORMATS,
    GROUPS,
    HEADS,
    MANY,
    RING,
    ROWS,
    TRIALS,
    WAYS,
    WINDOW,
    DeltaErrorRow,
    Simulation,
    Tokens,
    Way,
    measure_delta,
    stored,
)

CPU = torch.device("cpu")
RESULTS = Path(tool.__file__).parent.parent / "results" / "numerics-delta.csv"
SHORT = [Way(name, "nearest", u) for name in ("float32", "bfloat16", "int8", *TRIALS) for u in ("", *RING)]


@pytest.fixture(scope="module")
def rows() -> list[DeltaErrorRow]:
    """The rows of a short run."""
    return measure_delta(CPU, 80, SHORT)


@pytest.fixture(scope="module")
def results() -> list[DeltaErrorRow]:
    """The rows of the run in the tree."""
    return read_delta_errors(RESULTS)[1]


class Library:
    """A state that the library steps: in place, or by replay with a ring."""

    def __init__(self, way: Way) -> None:
        data = torch.zeros(1, HEADS, ROWS, COLS, dtype=getattr(torch, way.format))
        scale = torch.ones(1, HEADS, ROWS) if way.format in ("int16", "int8", "float8_e4m3fn") else None
        seed = torch.zeros(1, dtype=torch.int64) if way.rounding == "stochastic" else None
        self.state, self.ring = State(data, scale, rounding=way.rounding, seed=seed), None
        if way.folds:
            k, a = torch.zeros(2, 1, HEADS, WINDOW + 1, COLS)
            u = torch.zeros(1, HEADS, WINDOW + 1, ROWS, dtype=getattr(torch, way.u))
            start, count = torch.zeros(2, 1, dtype=torch.int32)
            self.ring = DeltaRing(k, u, a, start, count, WINDOW)

    def step(self, token: dict[str, Any]) -> Tensor:
        if self.ring is None:
            y = gated_delta_step(self.state, **token)
        else:
            plan = self.ring.plan(tokens=1)
            y = gated_delta_replay(self.state, self.ring, **token, plan=plan)
            self.ring.commit(plan)
        if self.state.seed is not None:
            self.state.advance()
        return y

    def states(self, parameters: dict[str, Any]) -> Tensor:
        if self.ring is None:
            return self.state.read([0])
        folded = torch.empty(1, HEADS, ROWS, COLS)
        gated_delta_fold(self.state, self.ring, **parameters, into=folded)
        return folded


# What is decoded


@pytest.mark.parametrize(("fmt", "u"), [*product(PORTABLE_FORMATS, ("", "float16")), (PORTABLE_FORMATS[0], "bfloat16")])
def test_the_simulation_gives_the_bytes_of_the_library(fmt: tuple[str, str], u: str) -> None:
    way = Way(*fmt, u)
    drawn, simulation, library = (
        Tokens(CPU),
        Simulation([Way("float32", "nearest", "bfloat16"), way], CPU),
        Library(way),
    )
    at = simulation.ways.index(way)
    for count in range(1, 2 * WINDOW + 4):
        token = drawn.token()
        assert torch.equal(simulation.step(token)[at], library.step(token)[0]), count
    assert torch.equal(simulation.states[at], library.states(drawn.parameters)[0])


def test_a_run_of_hundreds_of_tokens_gives_the_bytes_of_the_library() -> None:
    way = Way("int8", "nearest", "float16")
    drawn, simulation, library = Tokens(CPU), Simulation([way], CPU), Library(way)
    for _ in range(300):
        token = drawn.token()
        assert torch.equal(simulation.step(token), library.step(token))


def test_tokens_are_what_the_names_of_groups_say() -> None:
    drawn = Tokens(CPU)
    tokens = [drawn.token() for _ in range(200)]
    keys = torch.stack([token["k"][0] for token in tokens]).unflatten(1, (-1, len(GROUPS)))[:, 0]  # (tokens, groups, K)
    alpha, beta = gates(tokens[0]["a"], tokens[0]["b"], **drawn.parameters, b_logit=None)
    alpha, beta = alpha[0].unflatten(0, (-1, len(GROUPS))), beta[0].unflatten(0, (-1, len(GROUPS)))
    centred = keys - keys.mean((0, 2), keepdim=True)
    for index, (kind, decay, size) in enumerate(GROUPS):
        here = torch.nn.functional.normalize(centred[:, index], dim=-1)
        others = (here @ here.T).fill_diagonal_(0)
        assert (others.diagonal(1).mean() > 0.8) == (kind == "correlated")
        assert (others.amax(1).min() > 0.98) == (kind == "repeated")
        largest = keys[:, index].abs().amax(0).sort().values
        assert (largest[-MANY] > 2 * largest[-MANY - 1]) == (kind == "uneven")
        assert (len(set(alpha[0, index].tolist())) > 1) == (decay == "mixed")
        low, high = DECAYS[decay]
        rate = -alpha[:, index].log()
        assert low / 6 < rate.min()
        assert rate.max() < 6 * high
        assert (beta[:, index].min() > 0.9) == (size == "near 1")
    assert torch.equal(keys, keys.bfloat16().float())


def test_trials_keep_what_their_names_say() -> None:
    values = torch.randn(50, COLS)
    values[:, 0] = 20.0  # one column that all others share a scale with, but for those of other blocks
    off = {name: (stored(values, Way(name, "nearest"), values) - values).square() for name, _ in FORMATS[-3:]}
    plain = (stored(values, Way("int8", "nearest"), values) - values).square()
    blocks, two, four = (plain.mean() / wrong.mean() for wrong in off.values())
    assert two == pytest.approx(4**2, rel=0.1)
    assert four == pytest.approx(16**2, rel=0.1)
    assert blocks == pytest.approx(4, rel=0.2)  # a quarter of the columns is as wrong as before
    assert plain[:, 1:32].mean() / off["int8, scale per 32"][:, 1:32].mean() == pytest.approx(1, rel=1e-3)


# What is measured


def test_there_is_a_row_for_every_way_end_and_group(rows: list[DeltaErrorRow]) -> None:
    found = [(Way(row.format, row.rounding, row.u), row.tokens, (row.keys, row.decay, row.beta)) for row in rows]
    assert found == list(product(SHORT, (5, 80), GROUPS))


def test_errors_are_those_of_the_state_and_of_u(rows: list[DeltaErrorRow]) -> None:
    def error(name: str, u: str = "", end: int = 80) -> float:
        return error_of("state", rows, Way(name, "nearest", u), end)

    assert 1e-8 < error("float32") == error("float32", "float32") < 1e-6
    assert 2**-14 < error("float32", "float16") < 2**-11 < error("float32", "bfloat16") < 2**-8
    assert error("int8", "float32", 5) == error("float32", end=5)  # before the first fold
    assert 3 < error("int8") / error("int8", "float32") < 6
    assert 3 < error("int8") / error("int8, residual of 2 bits") < 5
    assert 1.1 < error("int8") / error("int8, scale per 32") < 1.5


def test_bytes_are_those_of_states_scales_and_rings() -> None:
    """The figures that stand in documents."""
    in_place, replay = Way("bfloat16", "nearest"), Way("int8", "nearest", "float16")
    gdn, kda = tool.MODELS.values()
    assert bytes_kept(in_place, *gdn) == 2
    assert bytes_moved(in_place, *gdn) == 4
    state, row = 1 + 4 / 128, {"gdn": (256 + 64 + 4) / 128**2, "kda": 3 * 256 / 128**2}
    assert bytes_kept(replay, *gdn) == pytest.approx(state + 20 * row["gdn"])
    assert bytes_kept(replay, *kda) == pytest.approx(state + 20 * row["kda"])
    assert bytes_moved(replay, *kda) == pytest.approx(state * 17 / 16 + 9.5 * row["kda"])
    trials = [bytes_kept(Way(name, "nearest"), *gdn) for name in TRIALS]
    assert trials == pytest.approx([1 + 4 / 32, 1.25 + 4 / 128, 1.5 + 4 / 128])


# What a run leaves behind


def test_the_command_measures_prints_and_writes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    csv_file = tmp_path / "errors.csv"
    tool.main(["--csv", str(csv_file), "--device", "cpu", "--commit", "abc"], tokens=80)
    provenance, rows = read_delta_errors(csv_file)
    assert provenance["commit"] == "abc"
    assert provenance["decoded"] == "80 tokens of 2 requests, one per call; replay with a window of 16"
    assert provenance["heads"] == "24 of 2 x 128, one for each kind of token"
    assert len(rows) == 2 * len(WAYS) * len(GROUPS)
    printed = capsys.readouterr().out
    assert all(f"{name}:\n" in printed for name in TABLES)
    line = next(
        line for line in delta_table("errors of delta states", rows, "Some CPU").split("\n") if "int16 s" in line
    )
    errors = (f"{error_of('state', rows, Way('int16', 'stochastic', u)):.1e}" for u in ("", *RING))
    assert line == f"| int16 stochastic | {' | '.join(errors)} |"
    assert "Averages of tokens 61 to 80. Measured on: Some CPU." in printed.replace(provenance["device"], "Some CPU")
