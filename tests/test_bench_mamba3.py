"""The benchmark of mamba3_step: its jobs, bytes, other ways to call it, its peer, and how it is tuned."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from benching import NEEDS_INTERPRETER, measure_in_the_interpreter
from torch import Tensor

from flashstate.bench.jobs import Grid, Job, Shape
from flashstate.bench.mamba3 import COMMON, MAMBA3, bind_flashstate, bind_mamba_ssm, of_rank_one, turned
from flashstate.bench.measure import Report, check, inputs_of, measure_on_gpu
from flashstate.bench.peers import IN_PLACE, MeasurementError, Storing
from flashstate.compat.mamba_ssm import mamba3_step_fn
from flashstate.proof import Mamba3Case, interpreted, make_inputs
from flashstate.tune import jobs_by_problem, with_variants

CPU = torch.device("cpu")
TINY = Mamba3Case(2, 2, 1, 16, 16, rank=2, angles=0, slots=5)


def test_the_table_of_the_benchmark_has_every_form_and_batch() -> None:
    jobs = MAMBA3.jobs(MAMBA3.grids)
    assert {job.case.measured_axes for job in jobs} == {(48, 1, 64, 128)}
    one_token = [job.case for job in jobs if not job.case.tokens]
    assert {(case.format, case.batch) for case in one_token} == {
        (name, batch) for name in ("float32", "bfloat16", "int8", "float8_e4m3fn") for batch in (1, 4, 16, 64, 256)
    }
    assert all(case.rank == 4 and not case.angles and case.Wo and case.z and case.update_kv for case in one_token)


def test_a_number_of_groups_that_does_not_divide_the_heads_is_refused() -> None:
    with pytest.raises(ValueError, match="groups must divide the 48 heads, got 5"):
        MAMBA3.case(Shape(48, 5, 64, 128), "float32", "nearest", 0, 1)


def test_a_row_counts_every_byte_once_and_every_state_twice() -> None:
    for case in (TINY, replace(TINY, angles=8), replace(TINY, update_kv=False)):
        inputs = make_inputs(case, CPU)
        given = {**inputs.arguments, **inputs.options, "slots": inputs.slots}
        pool, batch = inputs.state, slice(0, case.batch)
        others = sum(tensor.nbytes for tensor in given.values() if isinstance(tensor, Tensor))
        kept = pool.k[batch].nbytes + pool.v[batch].nbytes
        angles = 2 * pool.angle[batch].nbytes if case.angles else 0
        states = 2 * pool.data[batch].nbytes + (1 + case.update_kv) * kept + angles
        assert Job("mamba3", case).counted_bytes == states + others + given["x"].nbytes


def test_other_ways_are_the_same_job_with_turned_columns_or_one_rank() -> None:
    job = Job("mamba3", COMMON)
    assert turned(job).case == replace(COMMON, angles=4)
    assert of_rank_one(job).case == replace(COMMON, rank=1)
    problems = jobs_by_problem(with_variants(MAMBA3, [job]))
    assert [problem.op for problem in problems] == [
        "mamba3_step rank 4",
        "mamba3_step rank 4 turned",
        "mamba3_step rank 1",
        "mamba3_step rank 1 turned",
    ]


@pytest.mark.interpreted
@NEEDS_INTERPRETER
def test_ways_to_call_flashstate_are_measured_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_in_the_interpreter(monkeypatch, cold_bytes=1 << 10)
    report = Report()
    peers = {"mamba_ssm": lambda inputs, storing: bind_mamba_ssm(mamba3_step_fn, inputs, storing)}
    with interpreted():
        measure_on_gpu(MAMBA3, Job("mamba3", TINY), peers, CPU, report)
    assert [row.implementation for row in report.rows] == [
        "touch", "read", "flashstate", "touch, turned", "flashstate, turned", "touch, rank 1", "flashstate, rank 1",
        "touch, rank 1, turned", "flashstate, rank 1, turned", "mamba_ssm",
    ]  # fmt: skip
    assert not report.skipped


def test_the_peer_gives_what_flashstate_gives_and_leaves_k_and_v_behind() -> None:
    inputs = inputs_of(TINY, CPU)
    check(lambda inputs, storing: bind_mamba_ssm(mamba3_step_fn, inputs, storing), inputs)
    ours, theirs = inputs.fresh(), inputs.fresh()
    slots = ours.at()
    bind_flashstate(ours)(slots)()
    bind_mamba_ssm(mamba3_step_fn, theirs, IN_PLACE)(slots)()
    assert torch.equal(ours.state.k, theirs.state.k)
    assert torch.equal(ours.state.v, theirs.state.v)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (replace(TINY, tokens=2), "one token per call"),
        (replace(TINY, angles=8), "come turned"),
        (replace(TINY, format="int8"), "no scales"),
    ],
    ids=str,
)
def test_what_the_peer_cannot_do_is_skipped(case: Mamba3Case, reason: str) -> None:
    with pytest.raises(MeasurementError, match=reason):
        bind_mamba_ssm(mamba3_step_fn, make_inputs(case, CPU), IN_PLACE)


def test_there_are_no_snapshots() -> None:
    inputs = make_inputs(TINY, CPU)
    with pytest.raises(MeasurementError, match="no snapshots"):
        bind_flashstate(inputs, Storing(inputs.state, update=False))


def test_jobs_of_a_grid_have_its_formats_and_tokens() -> None:
    jobs = MAMBA3.jobs([Grid((Shape(4, 2, 16, 16),), [("float32", "nearest")], (1, 3), ("last",), (1, 4))])
    assert [(job.case.tokens, job.case.batch) for job in jobs] == [(0, 1), (0, 4), (3, 1), (3, 4)]


@pytest.mark.parametrize("grids", [MAMBA3.tuned_grids, [replace(grid, tokens=(1, 3)) for grid in MAMBA3.grids]])
def test_several_tokens_are_tuned_and_measured_without_snapshots(grids: Sequence[Grid]) -> None:
    jobs = MAMBA3.jobs(grids)
    assert {job.case.tokens > 0 for job in jobs} == {False, True}
    assert {job.stored for job in jobs} == {"last"}
