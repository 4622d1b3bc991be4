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
    off = {name: (stored(values, Way(name, "nearest"), {}) - values).square() for name, _ in FORMATS[-3:]}
    plain = (stored(values, Way("int8", "nearest"), {}) - values).square()
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
    assert [bytes_kept(replay, *kind) / 2 for kind in (gdn, kda)] == pytest.approx([0.71, 0.98], abs=0.005)
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
    assert "Averages of tokens 5 to 5 and of tokens 61 to 80. Measured" in printed


# What the documents say


BF16, INT8 = Way("bfloat16", "nearest"), Way("int8", "nearest", "float16")
FINE, COARSE = ("float16", "int16"), ("bfloat16", "int8")


def by_group(results: list[DeltaErrorRow], way: Way, what: str, end: int = 16384) -> dict[tuple[str, ...], float]:
    """Errors of a way, by keys, decay and beta."""
    here = [row for row in results if Way(row.format, row.rounding, row.u) == way and row.tokens == end]
    return {(row.keys, row.decay, row.beta): getattr(row, f"{what}_error") for row in here}


def ratios(results: list[DeltaErrorRow], way: Way, other: Way, what: str) -> dict[tuple[str, ...], float]:
    errors, others = by_group(results, way, what), by_group(results, other, what)
    return {group: errors[group] / others[group] for group in GROUPS}


def test_the_results_have_every_way_end_and_group() -> None:
    provenance, rows = read_delta_errors(RESULTS)
    assert provenance["decoded"] == "16384 tokens of 2 requests, one per call; replay with a window of 16"
    found = [(Way(row.format, row.rounding, row.u), row.tokens, (row.keys, row.decay, row.beta)) for row in rows]
    assert found == list(product(WAYS, (1024, 16384), GROUPS))


@pytest.mark.parametrize("what", ["state", "output"])
def test_an_int8_checkpoint_by_replay_is_as_right_as_bfloat16_in_place(results: list[DeltaErrorRow], what: str) -> None:
    assert error_of(what, results, INT8) == pytest.approx(error_of(what, results, BF16), rel=0.05)
    for (_, decay, _), ratio in ratios(results, INT8, BF16, what).items():
        assert ratio < (3 if decay == "small" else 1.25)
    small = [error for (_, decay, _), error in by_group(results, INT8, "output").items() if decay == "small"]
    assert max(small) < 2**-9


def test_replay_divides_what_rounding_the_state_costs_by_four(results: list[DeltaErrorRow]) -> None:
    for (name, rounding), what in product(PORTABLE_FORMATS[1:-2], ("state", "output")):
        in_place, replay = (error_of(what, results, Way(name, rounding, u)) for u in ("", "float32"))
        assert 3.9 < in_place / replay < 4.7


def test_nearest_beats_stochastic_rounding(results: list[DeltaErrorRow]) -> None:
    ways = [(name, u) for name in (*FINE, *COARSE) for u in ("", "float32")] + [("float8_e4m3fn", "float32")]
    for name, u in ways:
        found = ratios(results, Way(name, "stochastic", u), Way(name, "nearest", u), "output")
        few = {group for group, ratio in found.items() if not 1.15 < ratio < 1.75}
        assert few <= ({("repeated", "mixed", "usual")} if (name, u) == ("int8", "") else set())


def test_bfloat16_is_too_coarse_for_u_beside_fine_checkpoints(results: list[DeltaErrorRow]) -> None:
    def error(name: str, u: str) -> float:
        return error_of("output", results, Way(name, "nearest", u))

    for name in ("float32", *FINE):
        assert error(name, "bfloat16") == pytest.approx(error("float32", "bfloat16"), rel=0.2)
        assert error(name, "bfloat16") > 1.7 * error(name, "float16")
    for name in COARSE:
        assert error(name, "bfloat16") < 1.1 * error(name, "float32")
    assert error("float32", "bfloat16") / error("float32", "float16") == pytest.approx(8, rel=0.1)
    assert error("float16", "float16") < 1.1 * error("float16", "float32")
    assert error("int16", "float16") > 1.7 * error("int16", "float32")


def test_rounding_u_does_not_add_up_and_rounding_states_does_where_nothing_corrects_it(
    results: list[DeltaErrorRow],
) -> None:
    def growth(way: Way) -> dict[tuple[str, ...], float]:
        early, late = (by_group(results, way, "state", end) for end in (1024, 16384))
        return {group: late[group] / early[group] for group in GROUPS}

    for u in ("bfloat16", "float16"):
        assert max(growth(Way("float32", "nearest", u)).values()) < 1.2
    for name, u in product((*COARSE, "float16"), ("", "float32")):
        for (keys, decay, _), ratio in growth(Way(name, "nearest", u)).items():
            low, high = {"repeated": (1.6, 3.4), "correlated": (1.1, 1.9)}.get(keys, (0.8, 1.2))
            assert low < ratio < high or decay == "small"


def test_float8_is_not_for_the_delta_rule(results: list[DeltaErrorRow]) -> None:
    for rounding in ("nearest", "stochastic"):
        for (keys, decay, _), error in by_group(results, Way("float8_e4m3fn", rounding), "state").items():
            assert (error > 0.6) == (decay != "small" and keys in ("correlated", "repeated"))
    by_replay = Way("float8_e4m3fn", "nearest", "float16")
    assert 3 < error_of("state", results, by_replay) / error_of("state", results, INT8) < 4


def test_the_table_of_what_a_server_may_use(results: list[DeltaErrorRow]) -> None:
    def share(name: str, u: str = "") -> float:
        return error_of("state", results, Way(name, "nearest", u)) / error_of("state", results, BF16)

    assert share("float16") == pytest.approx(1 / 8, rel=0.05)
    assert share("int16") < 1 / 50
    assert 4 < share("int8") < 5
    repeated = [e for group, e in by_group(results, Way("int8", "nearest"), "state").items() if group[0] == "repeated"]
    assert max(repeated) > 0.3
    assert share("float16", "float16") == pytest.approx(1 / 30, rel=0.1)
    assert share("bfloat16", "float16") == pytest.approx(1 / 4, rel=0.1)
    assert share("int8", "float16") == pytest.approx(1, rel=0.05)
    assert share("float32", "float32") < 1e-4
    assert share("int16", "float32") < 1 / 100


def test_what_trials_give_and_cost(results: list[DeltaErrorRow]) -> None:
    blocks, two, four = (Way(name, "nearest") for name in TRIALS)
    bf16_by_replay = Way("bfloat16", "nearest", "float16")
    for what in ("state", "output"):
        assert error_of(what, results, two) == pytest.approx(error_of(what, results, BF16), rel=0.05)
        assert error_of(what, results, four) == pytest.approx(error_of(what, results, bf16_by_replay), rel=0.1)
        assert error_of(what, results, blocks) / error_of(what, results, BF16) > 3
        for u in ("", "float16"):
            found = ratios(results, Way(blocks.format, "nearest", u), Way("int8", "nearest", u), what)
            assert 0.55 < min(found.values()) < 0.65
            assert 0.85 < max(found.values()) < 0.88
            assert min(found, key=found.__getitem__)[0] == "uneven"
    for (keys, decay, _), ratio in ratios(results, two, BF16, "output").items():
        assert ratio < (2.6 if (keys, decay) == ("uneven", "small") else 1.7)
    for model, fewer, fewer_of_four, more in (("GDN", 0.9, 0.64, 2.0), ("KDA", 0.65, 0.52, 1.66)):
        kind = tool.MODELS[model]
        assert bytes_kept(two, *kind) / bytes_kept(INT8, *kind) == pytest.approx(fewer, abs=0.01)
        assert bytes_kept(four, *kind) / bytes_kept(bf16_by_replay, *kind) == pytest.approx(fewer_of_four, abs=0.01)
        assert bytes_moved(two, *kind) / bytes_moved(INT8, *kind) == pytest.approx(more, abs=0.01)
