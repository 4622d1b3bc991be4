"""The benchmark: jobs of every op, what rows say, what is checked before it is timed, cold slots, roofs."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from benching import CPU, NEEDS_INTERPRETER, TINY, TWO_MICROSECONDS, spoiled, tiny_job
from torch import Tensor

from flashstate import Slots, State
from flashstate.bench import measure, timing
from flashstate.bench.jobs import Grid, Job, check_words
from flashstate.bench.measure import inputs_of, row_of, storing_for
from flashstate.bench.ops import OPS
from flashstate.bench.peers import MeasurementError
from flashstate.bench.timing import Timing, cold_rows, cold_slots
from flashstate.proof import make_inputs, slotted

MAMBA2, GATED_DELTA, MAMBA3, CONV1D, SPAN = (
    OPS[name] for name in ("mamba2", "gated_delta", "mamba3", "conv1d", "span")
)


# Jobs, and what a row says of them


def test_grids_that_overlap_and_take_other_sizes_give_every_job_once() -> None:
    sizes = {"heads": (6,), "groups": (2,), "rows": (4, 8), "cols": (16,)}
    grid = Grid((("int8", "nearest"),), (1, 3), ("last", "none"), (2,), sizes=sizes)
    jobs = MAMBA2.jobs([grid, replace(grid, sizes={**sizes, "heads": (2, 6), "rows": (4,)})])
    forms = [(*job.case.measured_axes, job.case.tokens, job.stored) for job in jobs]
    each = ((0, "last"), (3, "last"), (3, "none"))
    assert forms == [(*axes, *form) for axes in ((6, 2, 4, 16), (6, 2, 8, 16), (2, 2, 4, 16)) for form in each]


def test_shapes_and_formats_that_an_op_has_not_are_refused_by_name() -> None:
    for op, which in ((MAMBA2, ""), (GATED_DELTA, ", which are key heads,")):
        with pytest.raises(ValueError, match=f"^the number of groups{which} must divide the 48 heads, got 5$"):
            op.jobs([Grid([("float32", "nearest")], sizes={"heads": (48,), "groups": (5,)})])
    check_words([tiny_job("conv1d", channels=1283)])
    with pytest.raises(ValueError, match=r"^a state of 1283 x 3 in bfloat16, .* not whole 32-bit words$"):
        check_words([tiny_job("conv1d", channels=1283, x="bfloat16")])


COUNTED = [
    tiny_job("mamba2", "every", format="int8", rounding="stochastic", tokens=3),
    tiny_job("gated_delta", "none", tokens=3), tiny_job("conv1d", tokens=3),
    *(tiny_job("mamba3", angles=8, update_kv=keeps) for keeps in (True, False)),
]  # fmt: skip


@pytest.mark.parametrize("job", COUNTED, ids=lambda job: f"{job.case}-{job.stored}")
def test_a_row_counts_every_byte_of_its_arguments_and_roofs_those_of_states(job: Job) -> None:
    inputs, batch, times = make_inputs(job.case, CPU), job.case.batch, 1 + job.stores
    slot = {name: tensor[0].nbytes for name, tensor in slotted(inputs.state).items()}
    given = (t for t in inputs.arguments.values() if isinstance(t, Tensor))
    moved = sum(t.nbytes for t in given) + inputs.main.nbytes + inputs.slots.nbytes
    moved += batch * (times * (slot["data"] + slot.get("scale", 0)) + (0 if job.case.rounding == "nearest" else 8))
    moved += batch * ((1 + getattr(job.case, "update_kv", 0)) * (slot.get("k", 0) + slot.get("v", 0)))
    moved += batch * 2 * slot.get("angle", 0)
    tokens = 2 * inputs.main.nbytes if job.op == "conv1d" else 0
    roofs = (times * batch * slot["data"] + tokens, batch * slot["data"])
    assert (job.counted_bytes, job.touched_bytes, job.read_bytes) == (moved, *roofs)
    ours = row_of("flashstate", job, Timing(4.0, 3.0, 5.0), job.counted_bytes, TWO_MICROSECONDS)
    assert (ours.gigabytes_per_second, ours.percent_of_roof, ours.spread) == (moved / 4e3, 50.0, 0.5)
    assert (ours.op, ours.tokens, ours.stored) == (job.op, job.case.tokens or 1, job.stored)
    assert row_of("reference, CPU", job, TWO_MICROSECONDS, moved, None).percent_of_roof is None


# What is checked


def check_spoiled(spoil: Callable[[State, State], object], name: str = "float32", rounding: str = "nearest") -> None:
    """Check a step that stores snapshots; states and snapshots are spoiled after it."""
    job = tiny_job("mamba2", "every", format=name, rounding=rounding, tokens=3)
    bind = spoiled(MAMBA2.bind, lambda inputs, storing, slots, y: spoil(inputs.state, storing.snapshots))
    measure.check(bind, make_inputs(job.case, CPU), storing_for(job, job.case.batch, CPU))


def test_snapshots_that_are_right_pass_the_check_and_wrong_ones_fail_it() -> None:
    for name, rounding in (("float32", "nearest"), ("int8", "stochastic")):
        check_spoiled(lambda states, snapshots: None, name, rounding)
    for name, spoil in (
        ("float32", lambda s: s.data[:, -1].copy_(s.data[:, -2])),
        ("float32", lambda s: s.data[-1, -1, -1, -1].zero_()),
        ("int16", lambda s: s.scale.mul_(1.01)),
    ):
        with pytest.raises(MeasurementError, match=r"^wrong: its snapshot of token \d is .* times the error budget"):
            check_spoiled(lambda states, snapshots, spoil=spoil: spoil(snapshots), name)


def test_a_step_that_stores_where_it_should_only_read_fails_the_check() -> None:
    with pytest.raises(MeasurementError, match=r"^wrong: it changes states that are only to be read$"):
        check_spoiled(lambda states, snapshots: states.data[-1].neg_())


def test_results_are_checked_on_slots_that_no_library_takes_for_padding() -> None:
    for spare in (1, 5):
        slots = inputs_of(replace(TINY["mamba2"], batch=4, slots=4 + spare), CPU).slots
        assert len({0, *slots.tolist()}) == 5
        assert slots.dtype == torch.int32


def test_a_span_gives_what_its_two_steps_give_and_fails_where_the_convolution_went_wrong() -> None:
    for bind in (SPAN.bind, *(way.bind for way in SPAN.variants.values())):
        measure.check(bind, make_inputs(TINY["span"], CPU))
    for forgotten in ("x", "B", "C"):
        inputs = make_inputs(TINY["span"], CPU)
        inputs.arguments[forgotten] = inputs.arguments[forgotten] * 1.5
        with pytest.raises(MeasurementError, match="wrong: its"):
            measure.check(SPAN.bind, inputs)


# Cold slots and roofs


def test_launches_meet_cold_slots_and_cold_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "COLD_BYTES", 1000)
    size, slots = cold_slots(3, 40, CPU)
    rows = cold_rows(3, 10, len(slots), CPU)
    assert (size, len(slots), len(rows)) == (1 + 25, timing.MIN_LAUNCHES, timing.MIN_LAUNCHES)
    for numbers, first, count in ((slots, 1, 25), (rows, 0, 10)):
        assert {(len(launch), launch.dtype) for launch in numbers} == {(3, torch.int32)}
        flat = torch.cat(numbers).tolist()
        assert sorted(flat[:count]) == list(range(first, first + count))
        assert flat == [flat[i % count] for i in range(len(flat))]
    assert torch.equal(torch.cat(cold_slots(5, 40, CPU, ascending=True)[1][:5]), torch.arange(1, 26))


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@NEEDS_INTERPRETER
@pytest.mark.interpreted
def test_roofs_move_every_word_of_the_slots_they_are_given_and_no_other() -> None:
    from flashstate.bench.roofs import read, touch

    pages, copies = random_bytes(6, 3, 2, 5, 28), random_bytes(4, 3, 2, 5, 28)
    data, slots = pages[:, -1], Slots(torch.tensor([4, 1]), snapshot_rows=torch.tensor([3, 0]))
    before, copied = pages.view(torch.int32).clone(), copies.view(torch.int32).clone()
    words = before[:, -1]
    blocks = [block for slot in (4, 1) for block in words[slot].flatten().split(32)]  # the last of a slot is shorter
    largest = torch.zeros(len(blocks), dtype=torch.int32)
    read(data, slots, largest, 32, 4)
    assert torch.equal(largest, torch.stack([block.max() for block in blocks]))
    copied[[3, 0]] = words[[4, 1]][:, None]
    touch(data, slots, copies, 32, 4)
    assert torch.equal(copies.view(torch.int32), copied)
    assert torch.equal(pages.view(torch.int32), before)
    before[[4, 1], -1] ^= -(1 << 31)
    touch(data, slots, None, 32, 4)
    assert torch.equal(pages.view(torch.int32), before)


@pytest.mark.interpreted
@NEEDS_INTERPRETER
def test_the_roof_of_windows_copies_tokens_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashstate.bench import roofs

    windows = torch.randn(6, 3, 8).transpose(1, 2)
    before, x = windows.clone(), torch.randn(2, 5, 8)
    out = torch.full((2, 8 * 5), 7, dtype=torch.int32)
    monkeypatch.setattr(roofs.torch, "empty_like", lambda words: out)
    roofs.touch(windows, Slots(torch.tensor([4, 1])), None, 16, 1, x)
    before[[4, 1]] *= -1
    assert torch.equal(windows, before)
    assert torch.equal(out, x.view(torch.int32).flatten(1))
