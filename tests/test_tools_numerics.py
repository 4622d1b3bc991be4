"""tools.numerics, tools.numerics_ops and tools.numerics_delta: that they decode as the library does, what they measure
and leave behind, and that results show what documents say."""

from __future__ import annotations

from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flashstate import DeltaRing, State, gated_delta_fold, gated_delta_replay, gated_delta_step
from flashstate.reference.gated_delta import gates
from flashstate.state.formats import PORTABLE_FORMATS
from tools import numerics_delta as delta
from tools import numerics_delta_experiment as experiment
from tools import numerics_ops
from tools.figures import ERRORS, ERRORS_OF_DELTA, ERRORS_OF_OPS
from tools.numerics import at_the_end, main, read_errors
from tools.numerics_delta import bytes_kept, bytes_moved, delta_table, error_of, read_delta_errors
from tools.numerics_delta_experiment import COLS, GROUPS, HEADS, RING, ROWS, TRIALS, WAYS, WINDOW, DeltaErrorRow, Way
from tools.numerics_experiment import MEMORIES, NewMamba2, Sums, ends_of_periods
from tools.numerics_ops import MODELS, measure_op, read_op_errors

CPU = torch.device("cpu")
PLAIN, REPLAY = "plain", "replay"

# Mamba-2


def test_heads_have_one_memory_each_and_periods_are_whole_windows() -> None:
    model = NewMamba2(CPU)
    assert [int(model.heads_of(memory).sum()) for memory in MEMORIES] == [64, 32, 26, 6]  # the document says so
    assert [round(model.memory.min().item()), round(model.memory.max().item())] == [1, 395]
    assert ends_of_periods(128) == [16, 32, 48, 64, 96, 128]
    with pytest.raises(ValueError, match="tokens must be whole windows of 16, got 40"):
        ends_of_periods(40)


def test_errors_are_relative_to_the_exact_values_of_the_heads_that_are_asked_for() -> None:
    exact = torch.randn(2, 64, 3, 5, dtype=torch.float64)
    wrong = torch.arange(64) < 4
    got, sums = torch.where(wrong[:, None, None], 1.5 * exact, exact), Sums(CPU)
    for half in (0, 1):
        sums.add(got[half : half + 1], exact[half : half + 1])
    assert [sums.error(wrong), sums.size(wrong)] == pytest.approx([0.5, 1.5])
    assert [sums.error(~wrong), sums.size(~wrong)] == pytest.approx([0, 1])


def test_the_command_measures_prints_and_writes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Replay rounds nothing before the first fold, and less than plain steps after it."""
    main(["--csv", str(tmp_path / "a.csv"), "--device", "cpu", "--commit", "abc"], tokens=48)
    provenance, rows = read_errors(tmp_path / "a.csv")
    assert (provenance["commit"], provenance["device"][:3]) == ("abc", "CPU")
    assert provenance["decoded"].startswith("48 tokens of 2 requests, one per call")
    found = {((row.format, row.rounding), row.way, row.memory, row.tokens): row for row in rows}
    assert list(found) == list(product(PORTABLE_FORMATS, (PLAIN, REPLAY), MEMORIES, (16, 32, 48)))
    for fmt, memory, tokens in product(PORTABLE_FORMATS, MEMORIES, (16, 32, 48)):
        plain, replay = (found[fmt, way, memory, tokens] for way in (PLAIN, REPLAY))
        exact = found[PORTABLE_FORMATS[0], REPLAY, memory, tokens]
        assert 1e-9 < exact.output_error < 1e-6
        if fmt != PORTABLE_FORMATS[0]:
            assert (replay.output_error == exact.output_error) == (tokens == 16)
            assert 2 * replay.output_error < plain.output_error
            assert 2 * replay.state_error < plain.state_error
    last, printed = at_the_end(rows)["float32", "nearest", PLAIN, "long"], capsys.readouterr().out
    assert "errors of long heads:\n\n| format | plain: state | " in printed
    assert f"\n| float32 | {last.state_error:.1e} | {last.output_error:.1e} | " in printed
    assert "Averages of tokens 33 to 48. Measured on: CPU" in printed
    with pytest.raises(ValueError, match=r"is not a file that tools\.numerics wrote"):
        read_errors(ERRORS_OF_OPS)


def test_results_of_mamba2_show_what_the_document_says() -> None:
    provenance, rows = read_errors(ERRORS)
    assert provenance["decoded"] == "4096 tokens of 2 requests, one per call; replay with a window of 16"
    last = at_the_end(rows)

    def ratio(name: str, rounding: str, memory: str) -> float:
        plain, replay = (last[name, rounding, way, memory].output_error for way in (PLAIN, REPLAY))
        return plain / replay

    for fmt in (("bfloat16", "stochastic"), ("int8", "stochastic"), ("float16", "nearest"), ("int16", "nearest")):
        assert ratio(*fmt, "long") == pytest.approx(4, abs=0.4)
    for fmt in PORTABLE_FORMATS[1:]:
        assert ratio(*fmt, "short") == pytest.approx(5, abs=0.4)
    for name, way, error in (("int8", REPLAY, 2**-9), ("float8_e4m3fn", REPLAY, 0.01), ("bfloat16", PLAIN, 0.01)):
        assert last[name, "nearest", way, "all"].output_error == pytest.approx(error, rel=0.25)
    for name, low, high in (("bfloat16", 1.01, 1.2), ("float8_e4m3fn", 1.4, 2), ("int8", 0.5, 0.99)):
        assert low < last[name, "nearest", PLAIN, "long"].state_size < high  # they swallow their decay, or forget
        assert last[name, "nearest", REPLAY, "long"].state_size == pytest.approx(1, abs=0.01)


# All ops


@pytest.mark.parametrize("op", MODELS)
def test_errors_are_those_of_the_format(op: str) -> None:
    fine, middle, coarse = measure_op(
        op, CPU, 40, [("float32", "nearest"), ("float16", "nearest"), ("int8", "nearest")]
    )
    assert fine.state_error < (2**-11 if op == "gated_delta_replay" else 2**-20)  # its ring is float16
    assert 2**-13 < middle.state_error < 2**-9 < 2**-7 < coarse.state_error < 2**-3
    assert fine.output_error < coarse.output_error


def test_the_command_writes_what_the_tables_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one_row = numerics_ops.OpErrorRow("mamba3", "int8", "nearest", 4, 0.5, 0.25)
    monkeypatch.setattr(numerics_ops, "measure_op", lambda op, *_, **__: [one_row] if op == "mamba3" else [])
    numerics_ops.main(["--csv", str(tmp_path / "errors.csv"), "--device", "cpu", "--commit", "abc"], tokens=4)
    provenance, rows = read_op_errors(tmp_path / "errors.csv")
    assert (provenance["commit"], rows) == ("abc", [one_row])


def test_results_have_errors_of_every_op_in_every_format() -> None:
    _, rows = read_op_errors(ERRORS_OF_OPS)
    errors = {(row.op, row.format, row.rounding): row.output_error for row in rows}
    assert list(errors) == [(op, *fmt) for op in MODELS for fmt in PORTABLE_FORMATS]
    replayed, stepped = (errors[op, "int8", "nearest"] for op in ("gated_delta_replay", "gated_delta"))
    assert replayed == pytest.approx(stepped / 4, rel=0.05) == errors["gated_delta", "bfloat16", "nearest"]


# The delta rule


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


@pytest.mark.parametrize(("fmt", "u"), zip(PORTABLE_FORMATS, cycle(("bfloat16", "", "float16")), strict=False))
def test_the_simulation_gives_the_bytes_of_the_library(fmt: tuple[str, str], u: str) -> None:
    way = Way(*fmt, u)
    simulation = experiment.Simulation([Way("float32", "nearest", "float16"), way], CPU)
    drawn, library, at = experiment.Tokens(CPU), Library(way), simulation.ways.index(way)
    for count in range(1, 2 * WINDOW + 4):
        token = drawn.token()
        assert torch.equal(simulation.step(token)[at], library.step(token)[0]), count
    assert torch.equal(simulation.states[at], library.states(drawn.parameters)[0])


def test_tokens_are_what_the_names_of_groups_say() -> None:
    drawn = experiment.Tokens(CPU)
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
        assert (len(set(alpha[0, index].tolist())) > 1) == (decay == "mixed")
        assert (beta[:, index].min() > 0.9) == (size == "near 1")


def test_bytes_are_those_of_states_scales_and_rings() -> None:
    """The figures that stand in documents."""
    in_place, replay = Way("bfloat16", "nearest"), Way("int8", "nearest", "float16")
    gdn, kda = delta.MODELS.values()
    assert (bytes_kept(in_place, *gdn), bytes_moved(in_place, *gdn)) == (2, 4)
    assert [bytes_kept(replay, *kind) / 2 for kind in (gdn, kda)] == pytest.approx([0.71, 0.98], abs=0.005)
    assert bytes_moved(replay, *kda) == pytest.approx((1 + 4 / 128) * 17 / 16 + 9.5 * 3 * 256 / 128**2)
    trials = [bytes_kept(Way(name, "nearest"), *gdn) for name in TRIALS]
    assert trials == pytest.approx([1 + 4 / 32, 1.25 + 4 / 128, 1.5 + 4 / 128])


def test_the_command_of_the_delta_rule_measures_prints_and_writes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    delta.main(["--csv", str(tmp_path / "errors.csv"), "--device", "cpu", "--commit", "abc"], tokens=80)
    provenance, rows = read_delta_errors(tmp_path / "errors.csv")
    assert provenance["commit"] == "abc"
    assert provenance["decoded"] == "80 tokens of 2 requests, one per call; replay with a window of 16"
    found = [(Way(row.format, row.rounding, row.u), row.tokens, (row.keys, row.decay, row.beta)) for row in rows]
    assert found == list(product(WAYS, (5, 80), GROUPS))

    def error(name: str, u: str = "", end: int = 80) -> float:
        return error_of("state", rows, Way(name, "nearest", u), end)

    assert 1e-8 < error("float32") < 1e-6
    assert 2**-14 < error("float32", "float16") < 2**-11 < error("float32", "bfloat16") < 2**-8
    assert error("int8", "float32", 5) == pytest.approx(error("float32", end=5))  # before the first fold
    assert 3 < error("int8") / error("int8", "float32") < 6
    assert 3 < error("int8") / error("int8, residual of 2 bits") < 5
    assert 1.1 < error("int8") / error("int8, scale per 32") < 1.5
    printed = capsys.readouterr().out
    assert all(f"{name}:\n" in printed for name in delta.TABLES)
    errors = (f"{error_of('state', rows, Way('int16', 'stochastic', u)):.1e}" for u in ("", *RING))
    line = f"| int16 stochastic | {' | '.join(errors)} |\n"
    assert line in printed
    assert line in delta_table("errors of delta states", rows, "Some CPU")


def test_results_of_the_delta_rule_show_what_the_document_says() -> None:
    provenance, results = read_delta_errors(ERRORS_OF_DELTA)
    assert provenance["decoded"] == "16384 tokens of 2 requests, one per call; replay with a window of 16"
    bf16, int8 = Way("bfloat16", "nearest"), Way("int8", "nearest", "float16")

    def by_group(way: Way) -> dict[tuple[str, ...], float]:
        here: list[DeltaErrorRow] = [row for row in results if Way(row.format, row.rounding, row.u) == way]
        return {(row.keys, row.decay, row.beta): row.state_error for row in here if row.tokens == 16384}

    def share(name: str, u: str = "") -> float:
        return error_of("state", results, Way(name, "nearest", u)) / error_of("state", results, bf16)

    for group, error in by_group(int8).items():  # an int8 checkpoint by replay is as right as bfloat16 in place
        assert error / by_group(bf16)[group] < (3 if group[1] == "small" else 1.25)
    for name, rounding in PORTABLE_FORMATS[1:-2]:  # replay divides by four what rounding the state costs
        in_place, replay = (error_of("output", results, Way(name, rounding, u)) for u in ("", "float32"))
        assert 3.9 < in_place / replay < 4.7
    for (keys, decay, _), error in by_group(Way("float8_e4m3fn", "nearest")).items():  # float8 is not for it
        assert (error > 0.6) == (decay != "small" and keys in ("correlated", "repeated"))
    shares = {("float16", ""): 1 / 8, ("float16", "float16"): 1 / 30, ("bfloat16", "float16"): 1 / 4}
    for (name, u), want in {**shares, ("int8", "float16"): 1}.items():
        assert share(name, u) == pytest.approx(want, rel=0.1)
    assert share("int16") < 1 / 50
    assert 4 < share("int8") < 5
