"""tools.numerics, tools.numerics_ops and tools.numerics_delta: that they decode as the library does, measure what
results have, and that results show what documents say."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from flashstate import StatePool, gated_delta_fold, gated_delta_replay, gated_delta_step
from flashstate.reference.gated_delta import gates
from flashstate.state.formats import PORTABLE_FORMATS
from tools import numerics_delta as delta
from tools import numerics_delta_experiment as experiment
from tools import numerics_ops
from tools.figures import ERRORS, ERRORS_OF_DELTA, ERRORS_OF_OPS
from tools.numerics import at_the_end, main, read_errors
from tools.numerics_delta import delta_table, error_of, read_delta_errors
from tools.numerics_delta_experiment import COLS, GROUPS, HEADS, RING, ROWS, WAYS, WINDOW, Way
from tools.numerics_experiment import MEMORIES, ends_of_periods, measure_errors, setup_of
from tools.numerics_ops import MODELS, read_op_errors

CPU = torch.device("cpu")
PLAIN, REPLAY = "plain", "replay"
FLOAT32, FLOAT16, INT8 = ("float32", "nearest"), ("float16", "nearest"), ("int8", "nearest")

# Mamba-2


def test_the_command_measures_prints_and_writes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Replay rounds nothing before the first fold, and less than plain steps after it."""
    formats = (FLOAT32, FLOAT16, INT8)
    monkeypatch.setattr(measure_errors, "__defaults__", (32, formats, iter))
    main(["--csv", str(tmp_path / "a.csv"), "--device", "cpu", "--commit", "abc"], tokens=32)
    provenance, rows = read_errors(tmp_path / "a.csv")
    assert (provenance["commit"], provenance["device"][:3]) == ("abc", "CPU")
    assert setup_of(CPU, 4096).items() <= read_errors(ERRORS)[0].items()
    found = {((row.format, row.rounding), row.way, row.memory, row.tokens): row for row in rows}
    assert list(found) == list(product(formats, (PLAIN, REPLAY), MEMORIES, (16, 32)))
    for fmt, memory, tokens in product(formats, MEMORIES, (16, 32)):
        plain, replay, exact = (found[(*of, memory, tokens)] for of in ((fmt, PLAIN), (fmt, REPLAY), (FLOAT32, REPLAY)))
        assert 1e-9 < exact.output_error < 1e-6
        if fmt != FLOAT32:
            assert (replay.output_error == exact.output_error) == (tokens == 16)
            assert 2 * replay.output_error < plain.output_error
            assert 2 * replay.state_error < plain.state_error
    last, printed = at_the_end(rows)[(*FLOAT32, PLAIN, "long")], capsys.readouterr().out
    assert "errors of long heads:\n\n| format | plain: state | " in printed
    assert f"\n| float32 | {last.state_error:.1e} | {last.output_error:.1e} | " in printed
    assert "Averages of tokens 17 to 32. Measured on: CPU" in printed
    with pytest.raises(ValueError, match=r"is not a file that tools\.numerics wrote"):
        read_errors(ERRORS_OF_OPS)
    with pytest.raises(ValueError, match="tokens must be whole windows of 16, got 40"):
        ends_of_periods(40)


def test_results_of_mamba2_show_what_the_document_says() -> None:
    last = at_the_end(read_errors(ERRORS)[1])
    for fmt, (memory, ratio) in [*product(PORTABLE_FORMATS[1:], [("short", 5)]), (FLOAT16, ("long", 4))]:
        plain, replay = (last[(*fmt, way, memory)].output_error for way in (PLAIN, REPLAY))
        assert plain / replay == pytest.approx(ratio, abs=0.4)
    for name, low, high in (("bfloat16", 1.01, 1.2), ("float8_e4m3fn", 1.4, 2), ("int8", 0.5, 0.99)):
        assert low < last[name, "nearest", PLAIN, "long"].state_size < high  # they swallow their decay, or forget
        assert last[name, "nearest", REPLAY, "long"].state_size == pytest.approx(1, abs=0.01)


# All ops


def test_the_command_writes_errors_of_every_op_which_are_those_of_the_format(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(numerics_ops.measure_op, "__defaults__", (40, (FLOAT32, FLOAT16, INT8), iter))
    numerics_ops.main(["--csv", str(tmp_path / "errors.csv"), "--device", "cpu", "--commit", "abc"], tokens=40)
    provenance, rows = read_op_errors(tmp_path / "errors.csv")
    assert provenance["commit"] == "abc"
    of_results = [(row.op, row.format, row.rounding) for row in read_op_errors(ERRORS_OF_OPS)[1]]
    assert of_results == [(op, *fmt) for op in MODELS for fmt in PORTABLE_FORMATS]
    for op in MODELS:
        fine, middle, coarse = (row for row in rows if row.op == op)
        assert fine.state_error < (2**-11 if op == "gated_delta_replay" else 2**-20)  # its ring is float16
        assert 2**-13 < middle.state_error < 2**-9 < 2**-8 < coarse.state_error < 2**-3
        assert fine.output_error < coarse.output_error


# The delta rule


def pool_of(way: Way) -> StatePool[Any]:
    """A pool of one request, whose state is stepped in place, or by replay with a ring that keeps u so."""
    ring: dict[str, Any] = {"window": WINDOW, "per_channel": True, "ring_dtype": torch.float32}
    ring["u_dtype"] = getattr(torch, way.u or "float32")
    pool = StatePool.gated_delta(
        slots=1, layers=1, heads=HEADS, value_dim=ROWS, key_dim=COLS, dtype=getattr(torch, way.format),
        rounding=way.rounding, seed=0, **ring if way.folds else {},
    )  # fmt: skip
    pool.acquire(1)
    if pool.layer(0).seed is not None:
        pool.layer(0).seed.zero_()
    return pool


@pytest.mark.parametrize(
    "way",
    [
        Way(*FLOAT32, "bfloat16"),
        Way("bfloat16", "stochastic"),
        Way(*FLOAT16, "float16"),
        Way("int8", "stochastic", "float32"),
    ],
    ids=str,
)
def test_the_simulation_gives_the_bytes_of_the_library(way: Way) -> None:
    simulation = experiment.Simulation([Way(*FLOAT32, "float16"), way], CPU)
    drawn, pool, at, slot = experiment.Tokens(CPU), pool_of(way), simulation.ways.index(way), torch.tensor([0])
    for count in range(1, 2 * WINDOW + 4):
        token = drawn.token()
        if way.folds:
            plan = pool.plan(slot, tokens=1)
            y = gated_delta_replay(pool.layer(0), pool.ring(0), **token, plan=plan)
            pool.commit(plan)
        else:
            y = gated_delta_step(pool.layer(0), **token, slots=slot)
        pool.advance(slot)
        assert torch.equal(simulation.step(token)[at], y[0]), count
    found = torch.empty(1, HEADS, ROWS, COLS)
    if way.folds:
        gated_delta_fold(pool.layer(0), pool.ring(0), **drawn.parameters, into=found)
    assert torch.equal(simulation.states[at], found[0] if way.folds else pool.read(0, slot)[0])


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


def test_the_command_of_the_delta_rule_measures_prints_and_writes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    delta.main(["--csv", str(tmp_path / "errors.csv"), "--device", "cpu", "--commit", "abc"], tokens=80)
    provenance, rows = read_delta_errors(tmp_path / "errors.csv")
    assert (provenance["commit"], provenance["decoded"][:9]) == ("abc", "80 tokens")
    found = [(Way(row.format, row.rounding, row.u), row.tokens, (row.keys, row.decay, row.beta)) for row in rows]
    assert found == list(product(WAYS, (5, 80), GROUPS))

    def error(name: str, u: str = "", end: int = 80) -> float:
        return error_of("state", rows, Way(name, "nearest", u), end)

    assert error("float32") < 1e-6 < 2**-14 < error("float32", "float16") < 2**-11 < error("float32", "bfloat16")
    assert error("int8", "float32", 5) == pytest.approx(error("float32", end=5))  # before the first fold
    for name, low, high in (("int8, residual of 2 bits", 3, 5), ("int8, scale per 32", 1.1, 1.5)):
        assert low < error("int8") / error(name) < high
    printed = capsys.readouterr().out
    assert all(f"{name}:\n" in printed for name in delta.TABLES)
    errors = (f"{error_of('state', rows, Way('int16', 'stochastic', u)):.1e}" for u in ("", *RING))
    line = f"| int16 stochastic | {' | '.join(errors)} |\n"
    assert line in printed
    assert line in delta_table("errors of delta states", rows, "Some CPU")


def test_results_of_the_delta_rule_show_what_the_document_says() -> None:
    results = read_delta_errors(ERRORS_OF_DELTA)[1]
    bf16, int8, float8 = Way("bfloat16", "nearest"), Way(*INT8, "float16"), Way("float8_e4m3fn", "nearest")
    by_way = {(Way(row.format, row.rounding, row.u), row.keys, row.decay, row.beta): row.state_error
              for row in results if row.tokens == 16384}  # fmt: skip
    for group in GROUPS:
        keys, decay, _ = group  # an int8 checkpoint by replay is as right as bfloat16 in place; float8 is not for it
        assert by_way[(int8, *group)] / by_way[(bf16, *group)] < (3 if decay == "small" else 1.25)
        assert (by_way[(float8, *group)] > 0.6) == (decay != "small" and keys in ("correlated", "repeated"))
    for name, rounding in PORTABLE_FORMATS[1:-2]:  # replay divides by four what rounding the state costs
        in_place, replay = (error_of("output", results, Way(name, rounding, u)) for u in ("", "float32"))
        assert 3.9 < in_place / replay < 4.7
    shares = {("float16", ""): 1 / 8, ("float16", "float16"): 1 / 30, ("bfloat16", "float16"): 1 / 4}
    for (name, u), want in {**shares, ("int8", "float16"): 1, ("int8", ""): 4.4}.items():
        share = error_of("state", results, Way(name, "nearest", u)) / error_of("state", results, bf16)
        assert share == pytest.approx(want, rel=0.1)
