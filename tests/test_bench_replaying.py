"""What the benchmarks of replay share: the live rows of their jobs, bytes, roofs, plans, and what is checked."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from benching import CPU, spoiled
from torch import Tensor

from flashstate.bench.jobs import Job, Live, Stored
from flashstate.bench.mamba2_replay import LIVE, Mamba2RingCase
from flashstate.bench.mamba2_replay import bind_flashstate as bind_cursors
from flashstate.bench.mamba2_replay import check as check_cursors
from flashstate.bench.measure import inputs_of
from flashstate.bench.ops import OPS
from flashstate.bench.peers import MeasurementError
from flashstate.bench.replaying import (
    ACCEPTANCE,
    WINDOW,
    bind_flashstate,
    check,
    live_counts,
    stationary_counts,
)
from flashstate.bench.timing import Timing
from flashstate.proof import AnyCase, Case, DeltaCase, Inputs, ReplayPool, make_inputs
from flashstate.state.formats import bits_of

HALF = dict.fromkeys(("x", "qk", "gates"), "bfloat16")
TINY: dict[str, AnyCase] = {
    "mamba2_replay": Case(4, 2, 1, 4, 16, x="bfloat16", bc="bfloat16", dt="bfloat16"),
    "gated_delta_replay": DeltaCase(4, 2, 1, 4, 16, **HALF),
}
KDA = DeltaCase(4, 2, 2, 4, 16, **HALF, per_channel=True)
CASES = [*TINY.items(), ("gated_delta_replay", KDA)]
FORMATS = [("float32", "nearest"), ("float16", "stochastic"), ("int8", "stochastic")]
every_op = pytest.mark.parametrize("op", TINY)
every_case = pytest.mark.parametrize(("op", "tiny"), CASES, ids=["Mamba-2", "Gated DeltaNet", "KDA"])


def job_of(op: str, stored: Stored, tiny: AnyCase | None = None, **changes: Any) -> Job:
    """A small job of an op."""
    return OPS[op].job(op, replace(tiny or TINY[op], **changes), stored)


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


def test_live_rows_are_those_of_the_chain_that_requests_are() -> None:
    for tokens in (2, 6):
        assert (shares(stationary_counts(tokens)) - exact_distribution(tokens)).abs().sum() < 0.05
    folding = exact_distribution(6)[WINDOW - 5 :].sum().item()
    assert abs(Mamba2RingCase(tokens=6).folding - folding) < 0.01
    counts = live_counts("a 16th folds", 1)  # one token makes every count equally likely
    assert torch.allclose(shares(counts)[1:], torch.tensor(1 / 16, dtype=torch.float64), atol=0.01)
    assert live_counts("none folds", 1).unique().tolist() == list(range(1, 16))


def test_rows_fold_as_the_names_of_live_rows_say() -> None:
    none, some, uniform, every = (live_counts(live, 6) for live in LIVE)
    assert (none.min(), none.max()) == (1, 10)
    assert (every.min(), every.max()) == (11, 16)
    assert torch.equal(torch.cat([none, every]), some)
    assert uniform.tolist() == list(range(3, 17))
    assert live_counts("none folds", WINDOW).tolist() == [0]  # where all would


# Jobs


@every_case
def test_bytes_are_those_of_all_arguments_live_rows_new_rows_and_folded_states(op: str, tiny: AnyCase) -> None:
    job = job_of(op, "uniform", tiny, tokens=6, batch=14, format="int8", rounding="stochastic")
    inputs = make_inputs(job.case, CPU)
    pool, tensors = inputs.state, [t for t in inputs.arguments.values() if isinstance(t, Tensor)]
    given = sum(t.nbytes for t in (*tensors, inputs.main, inputs.slots))
    slot = pool.data[0].nbytes + pool.scale[0].nbytes
    ring_row = sum(kept[0].nbytes for kept in pool.kept.values()) // (WINDOW + 6)
    live, new, folding = sum(range(3, 17)), 14 * 6, 6  # of 14 rows with 3 to 16, those with 11 or more fold
    assert job.counted_bytes == given + (14 + folding) * slot + (live + new) * ring_row + 14 * (2 * 4 + 8)


def test_the_roof_has_states_that_fold_touched_and_others_read_and_all_else_in_proportion() -> None:
    for stored, folding in {"none folds": 0.0, "uniform": 6 / 14, "all fold": 1.0}.items():
        job = job_of("mamba2_replay", stored, tokens=6)
        states = job.case.batch * job.case.slot_bytes
        assert (job.read_bytes, job.touched_bytes) == (states, 2 * states)
        roof = job.roof_of_both(Timing(8.0, 7.0, 9.0), Timing(5.0, 4.0, 6.0))
        assert roof is not None
        want = [(5 + 3 * folding + more) * job.counted_bytes / ((1 + folding) * states) for more in (0, -1, 1)]
        assert [roof.median, roof.fastest, roof.slowest] == pytest.approx(want)


# What is checked


Spoil = Callable[..., object]  # given a pool, the slots of the batch, and the output


@every_case
def test_what_is_right_passes_the_check(op: str, tiny: AnyCase) -> None:
    for live, (name, rounding), tokens in zip(LIVE, [*FORMATS, FORMATS[0]], (0, 3, 3, 3), strict=True):
        job = job_of(op, live, tiny, format=name, rounding=rounding, tokens=tokens)
        check(bind_flashstate, inputs_of(job.case, CPU))


def change(tensor: Tensor, *index: Tensor | int) -> None:
    """Change the last bit of the last element of an entry."""
    bits_of(tensor[tuple(int(i) for i in index)]).view(-1)[-1] ^= 1


def change_live(name: str, pool: ReplayPool, slot: Tensor, y: Tensor) -> None:
    """Change what a ring keeps of a live token."""
    change(pool.kept[name], slot[0], 0, pool.start[slot[0]])


def change_new(name: str, pool: ReplayPool, slot: Tensor, y: Tensor, by: float = -1) -> None:
    """Change what a ring keeps of a new token."""
    pool.kept[name][slot[1], 0, int((pool.start + pool.count)[slot[1]] % pool.ring.length)] *= by


BUDGET = r"is .* times the error budget away from float64$"
KEPT = r"other than it must be$"
SPOILS: dict[str, tuple[Live, Spoil, str]] = {
    "an output": ("uniform", lambda pool, slot, y: y[-1].mul_(1.5), f"its output {BUDGET}"),
    "a folded state": ("all fold", lambda pool, slot, y: pool.data[slot[-1], -1, -1].zero_(), f"its state {BUDGET}"),
    "a state not folded": ("none folds", lambda pool, slot, y: change(pool.data, slot[0], 1, 3), f"leaves data {KEPT}"),
    "a state of nobody": ("uniform", lambda pool, slot, y: change(pool.data, 0, 1, 3), f"leaves data {KEPT}"),
    "a scale": ("all fold", lambda pool, slot, y: pool.scale[slot[0]].mul_(1.1), f"its state {BUDGET}"),
    "a count": ("uniform", lambda pool, slot, y: pool.count[slot[0]].add_(1), f"leaves count {KEPT}"),
}


def require_refused(inputs: Inputs, spoil: Spoil, complaint: str) -> None:
    with pytest.raises(MeasurementError, match=rf"^wrong: .*{complaint}"):
        check(spoiled(bind_flashstate, lambda run, storing, at, y: spoil(run.state, at.read.long(), y)), inputs)


@every_op
def test_what_is_wrong_fails_the_check(op: str) -> None:
    for what, (live, spoil, complaint) in SPOILS.items():
        job = job_of(op, live, tokens=3, format="int8" if what == "a scale" else "float32")
        require_refused(inputs_of(job.case, CPU), spoil, complaint)


def test_what_is_wrong_in_a_ring_fails_the_check() -> None:
    for (op, tiny), exact, rounded in zip(CASES, ("x", "k", "decay"), ("dt", "u", "u"), strict=True):
        inputs = inputs_of(job_of(op, "uniform", tiny, tokens=3).case, CPU)
        for name in (exact, rounded):
            require_refused(inputs, partial(change_live, name), f"leaves {name} {KEPT}")
        require_refused(inputs, partial(change_new, exact), f"leaves {exact} {KEPT}")
        require_refused(inputs, partial(change_new, rounded, by=1.01), f"its {rounded} in the ring {BUDGET}")


def test_plans_cursors_and_seeds_are_checked_bit_for_bit() -> None:
    spoils: dict[str, Spoil] = {
        "rows of the plan": lambda pool, slot, rows: rows[0].add_(1),
        "start": lambda pool, slot, rows: pool.start[slot[0]].add_(1),
        "count": lambda pool, slot, rows: pool.count[0].add_(1),
        "seed": lambda pool, slot, rows: pool.seed[slot[1]].add_(1),
    }
    job = job_of("mamba2_replay", "plan and commit", tokens=6, format="float16", rounding="stochastic")
    inputs = inputs_of(job.case, CPU)
    check_cursors(bind_cursors, inputs)
    for name, spoil in spoils.items():
        bind = spoiled(bind_cursors, lambda run, storing, at, y, by=spoil: by(run.state, at.read.long(), y))
        with pytest.raises(MeasurementError, match=f"^wrong: it leaves {name} {KEPT}"):
            check_cursors(bind, inputs)
