"""The benchmark of mamba2_replay: the live rows of its jobs, bytes, roofs, and what is checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from benching import CPU, NEEDS_INTERPRETER, measure_in_the_interpreter, spoiled, tiny_job
from torch import Tensor

from flashstate.bench.binding import Binding
from flashstate.bench.jobs import Live, Stored
from flashstate.bench.mamba2_replay import (
    ACCEPTANCE,
    DRAFTING,
    LEAST_SLOTS,
    LIVE,
    MAMBA2_REPLAY,
    WINDOW,
    RingCase,
    RingJob,
    accepted_tokens,
    bind_flashstate,
    check,
    job_of,
    live_counts,
    spread_counts,
    stationary_counts,
)
from flashstate.bench.measure import Report, inputs_of, measure_on_gpu, storing_for
from flashstate.bench.peers import MeasurementError
from flashstate.bench.timing import Timing
from flashstate.proof import Case, ReplayPool, make_inputs

TINY = Case(batch=4, heads=2, groups=1, rows=4, cols=16, slots=7, x="bfloat16", bc="bfloat16", dt="bfloat16")
FORMATS = [("float32", "nearest"), ("float16", "stochastic"), ("int8", "stochastic")]
MOVES = "plan and commit"


# Live rows


def exact_distribution(tokens: int) -> Tensor:
    """Of live rows, by a power of the chain that requests are: (WINDOW + 1,)."""
    accepted = [ACCEPTANCE ** (n - 1) * (1 - ACCEPTANCE if n < tokens else 1) for n in range(1, tokens + 1)]
    chain = torch.zeros(WINDOW + 1, WINDOW + 1, dtype=torch.float64)
    for count in range(WINDOW + 1):
        for n, probability in enumerate(accepted, 1):
            chain[count, n + (0 if count + tokens > WINDOW else count)] += probability
    return torch.linalg.matrix_power(chain, 1 << 10)[WINDOW]


def shares(counts: Tensor) -> Tensor:
    return torch.bincount(counts, minlength=WINDOW + 1).double() / len(counts)


@pytest.mark.parametrize("tokens", [2, 4, 6])
def test_live_rows_are_those_of_the_chain_that_requests_are(tokens: int) -> None:
    want = exact_distribution(tokens)
    assert torch.allclose(want.sum(), torch.tensor(1.0, dtype=torch.float64))
    assert (shares(stationary_counts(tokens)) - want).abs().sum() < 0.05


def test_six_tokens_keep_three_nearly_and_a_quarter_of_the_rows_folds() -> None:
    accepted = accepted_tokens(1 << 14, 6, torch.Generator().manual_seed(1)).double()
    expected = sum(ACCEPTANCE**n for n in range(6))
    assert abs(accepted.mean() - expected) < 0.05
    assert abs(expected - 2.94) < 0.005
    folding = exact_distribution(6)[WINDOW - 5 :].sum().item()
    assert abs(RingCase(tokens=6).folding - folding) < 0.01
    assert 0.2 < folding < 0.3


def test_one_token_makes_every_count_equally_likely_and_folds_a_16th() -> None:
    counts = live_counts("a 16th folds", 1)
    assert torch.allclose(shares(counts)[1:], torch.tensor(1 / 16, dtype=torch.float64), atol=0.01)
    assert abs(RingCase(live_rows="a 16th folds").folding - 1 / 16) < 0.01
    assert live_counts("none folds", 1).unique().tolist() == list(range(1, 16))


def test_rows_fold_as_the_names_of_live_rows_say() -> None:
    none, some, uniform, every = (live_counts(live, 6) for live in LIVE)
    assert (none.min(), none.max()) == (1, 10)
    assert (every.min(), every.max()) == (11, 16)
    assert torch.equal(torch.cat([none, every]), some)
    assert uniform.tolist() == list(range(3, 17))
    assert live_counts("none folds", WINDOW).tolist() == [0]  # where all would


@pytest.mark.parametrize("live", LIVE)
def test_pools_of_any_size_have_every_count_as_often_as_it_comes(live: Live) -> None:
    want = shares(live_counts(live, 6))
    for slots in (LEAST_SLOTS, 1027):
        counts = spread_counts(live, 6, slots)
        assert counts.shape == (slots,)
        assert (shares(counts) - want).abs().max() <= 1 / slots
    inputs = inputs_of(job_of("mamba2_replay", replace(TINY, batch=1, tokens=6), live).case, CPU)
    assert len(inputs.state.count) >= LEAST_SLOTS
    assert (shares(inputs.on_larger_pool(5000).state.count) - want).abs().sum() < 0.05


# Jobs


def test_bytes_are_those_of_all_arguments_live_rows_new_rows_and_folded_states() -> None:
    case = job_of("", replace(TINY, tokens=6, batch=14, format="int8", rounding="stochastic"), "uniform").case
    inputs = make_inputs(case, CPU)
    pool, tensors = inputs.state, [t for t in inputs.arguments.values() if isinstance(t, Tensor)]
    given = sum(t.nbytes for t in (*tensors, inputs.main, inputs.slots))
    slot = 2 * 4 * 16 + 2 * 4 * 4  # with scales
    ring_row = 2 * 4 * 2 + 16 * 2 + 2 * 4
    assert (slot, ring_row) == (
        pool.data[0].nbytes + pool.scale[0].nbytes,
        (pool.x[0].nbytes + pool.B[0].nbytes + pool.dt[0].nbytes) // 22,
    )
    live, new, folding = sum(range(3, 17)), 14 * 6, 6  # of 14 rows with 3 to 16, those with 11 or more fold
    assert RingJob("mamba2_replay", case, "uniform").counted_bytes == (
        given + (14 + folding) * slot + (live + new) * ring_row + 14 * (2 * 4 + 8)
    )


@pytest.mark.parametrize(("stored", "folding"), [("none folds", 0.0), ("uniform", 6 / 14), ("all fold", 1.0)])
def test_the_roof_has_states_that_fold_touched_and_others_read_and_all_else_in_proportion(
    stored: Stored, folding: float
) -> None:
    job = job_of("mamba2_replay", replace(TINY, tokens=6), stored)
    states = job.case.batch * job.case.slot_bytes
    assert (job.read_bytes, job.touched_bytes) == (states, 2 * states)
    roof = job.roof_of_both(Timing(8.0, 7.0, 9.0), Timing(5.0, 4.0, 6.0))
    assert roof is not None
    want = [(5 + 3 * folding + more) * job.counted_bytes / ((1 + folding) * states) for more in (0, -1, 1)]
    assert torch.allclose(torch.tensor([roof.median, roof.fastest, roof.slowest]), torch.tensor(want))


def test_small_batches_have_one_kernel_and_larger_ones_one_for_each_part() -> None:
    jobs = MAMBA2_REPLAY.jobs([replace(DRAFTING, formats=FORMATS[:1], stored=("stationary",), batches=(1, 1024))])
    ops = [{problem.op.removeprefix("mamba2_replay ") for problem in job.problems} for job in jobs]
    assert ops == [{"either"}, {"fold", "keep"}]
    assert all(problem.several_tokens for job in jobs for problem in job.problems)


# What is checked


Spoil = Callable[[ReplayPool, Tensor, Tensor], object]  # given a pool, the slots of the batch, and the output


def wrong(spoil: Spoil) -> Binding:
    """A binding whose pool or output is spoiled after the call."""
    return spoiled(bind_flashstate, lambda inputs, storing, slots, y: spoil(inputs.state, slots.read.long(), y))


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize(("name", "rounding"), FORMATS)
@pytest.mark.parametrize("live", LIVE)
def test_what_is_right_passes_the_check(live: Live, name: str, rounding: str, tokens: int) -> None:
    job = job_of("", replace(TINY, format=name, rounding=rounding, tokens=tokens), live)
    check(bind_flashstate, inputs_of(job.case, CPU))
    if name == "float32":  # without a plan
        check(lambda inputs, storing: bind_flashstate(inputs, storing, bare=True), inputs_of(job.case, CPU))


def new_row(pool: ReplayPool, slot: Tensor) -> Tensor:
    """The row of the ring that the first new token of each slot went to."""
    return ((pool.start + pool.count)[slot] % pool.x.shape[2]).long()


def change(tensor: Tensor, *index: Tensor | int) -> None:
    """Change the last bit of the last element of an entry."""
    entry = tensor[tuple(int(i) for i in index)]
    entry.view({2: torch.int16, 4: torch.int32}[entry.element_size()])[..., -1] ^= 1


BUDGET = r"is .* times the error budget away from float64$"
KEPT = r"other than it must be$"
SPOILS: dict[str, tuple[Live, Spoil, str]] = {
    "an output": ("uniform", lambda pool, slot, y: y[-1].mul_(1.5), f"its output {BUDGET}"),
    "outputs of others": ("uniform", lambda pool, slot, y: y.copy_(y.flip(0)), f"its output {BUDGET}"),
    "a folded state": ("all fold", lambda pool, slot, y: pool.data[slot[-1], -1, -1].zero_(), f"its state {BUDGET}"),
    "a state not folded": ("none folds", lambda pool, slot, y: change(pool.data, slot[0], 1, 3), f"leaves data {KEPT}"),
    "a state of nobody": ("uniform", lambda pool, slot, y: change(pool.data, 0, 1, 3), f"leaves data {KEPT}"),
    "a new x": (
        "uniform", lambda pool, slot, y: change(pool.x, slot[1], 1, new_row(pool, slot)[1]), f"leaves x {KEPT}"
    ),
    "a new B": (
        "uniform", lambda pool, slot, y: change(pool.B, slot[1], 0, new_row(pool, slot)[1]), f"leaves B {KEPT}"
    ),
    "new dt": (
        "uniform", lambda pool, slot, y: pool.dt[slot[1], 1, new_row(pool, slot)[1]].mul_(1.01), f"its dt .* {BUDGET}"
    ),
    "a live x": ("uniform", lambda pool, slot, y: change(pool.x, slot[0], 0, pool.start[slot[0]]), f"leaves x {KEPT}"),
    "a live dt": ("uniform", lambda pool, slot, y: change(pool.dt, slot[0]), f"leaves dt {KEPT}"),
    "a scale": ("all fold", lambda pool, slot, y: pool.scale[slot[0]].mul_(1.1), f"its state {BUDGET}"),
    "a count": ("uniform", lambda pool, slot, y: pool.count[slot[0]].add_(1), f"leaves count {KEPT}"),
}  # fmt: skip


@pytest.mark.parametrize("what", SPOILS)
def test_what_is_wrong_fails_the_check(what: str) -> None:
    live, spoil, complaint = SPOILS[what]
    case = replace(TINY, tokens=3, format="int8" if what == "a scale" else "float32")
    inputs = inputs_of(job_of("", case, live).case, CPU)
    with pytest.raises(MeasurementError, match=rf"^wrong: .*{complaint}"):
        check(wrong(spoil), inputs)


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (lambda pool, slot, rows: rows[0].add_(1), "rows of the plan"),
        (lambda pool, slot, rows: pool.start[slot[0]].add_(1), "start"),
        (lambda pool, slot, rows: pool.count[0].add_(1), "count"),
        (lambda pool, slot, rows: pool.seed[slot[1]].add_(1), "seed"),
    ],
)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_plans_and_cursors_are_checked_bit_for_bit(spoil: Any, name: str, rounding: str) -> None:
    job = job_of("", replace(TINY, tokens=6, format="float16", rounding=rounding), MOVES)
    inputs = inputs_of(job.case, CPU)
    check(bind_flashstate, inputs)
    with pytest.raises(MeasurementError, match=f"^wrong: it leaves {name} {KEPT}"):
        check(wrong(spoil), inputs)


def test_steps_beside_replay_are_those_of_mamba2_step() -> None:
    for stored in ("last", "every"):
        job = job_of("mamba2_replay", replace(TINY, tokens=3), stored)
        inputs = inputs_of(job.case, CPU)
        storing = storing_for(job, TINY.batch, CPU)
        check(bind_flashstate, inputs, storing)
        with pytest.raises(MeasurementError, match=f"its output {BUDGET}"):
            check(wrong(lambda pool, slot, y: y.neg_()), inputs, storing)


@pytest.mark.interpreted
@NEEDS_INTERPRETER
def test_jobs_that_differ_in_live_rows_alone_share_what_their_roofs_are_made_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measure_in_the_interpreter(monkeypatch, cold_bytes=1 << 10)
    from flashstate.bench import roofs

    times = iter(Timing(t, t, t) for t in map(float, range(2, 100)))
    for roof in ("time_touch", "time_read"):
        monkeypatch.setattr(roofs, roof, lambda *arguments: next(times))
    report = Report()
    for stored in ("none folds", "all fold", "last"):
        measure_on_gpu(MAMBA2_REPLAY, tiny_job("mamba2_replay", stored, tokens=2), {}, CPU, report)
    found = [(row.implementation, row.microseconds) for row in report.rows if row.implementation in ("touch", "read")]
    assert found == [("touch", 2.0), ("read", 3.0)] * 2 + [("touch", 4.0), ("read", 5.0)]
