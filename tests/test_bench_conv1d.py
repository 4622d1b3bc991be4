"""The benchmarks of conv1d_step and of a layer: their jobs, bytes, roofs, checks and peers."""

from typing import Any

import pytest
import torch
from benching import NEEDS_INTERPRETER, measure_in_the_interpreter
from torch import Tensor

from flashstate import Slots
from flashstate.bench import measure
from flashstate.bench.conv1d import CONV1D, bind_vllm
from flashstate.bench.jobs import Grid, Job, Shape, check_words
from flashstate.bench.measure import Report, check, measure_on_gpu
from flashstate.bench.peers import IN_PLACE, MeasurementError
from flashstate.bench.span import SPAN, SpanCase, SpanInputs
from flashstate.bench.timing import Timing
from flashstate.compat import vllm
from flashstate.proof import ConvCase, Inputs, interpreted, make_inputs

CPU = torch.device("cpu")
TINY = ConvCase(2, 8, 4, tokens=3, slots=5)
TINY_SPAN = SpanCase(2, 2, 1, 4, 8, slots=4)


def test_jobs_are_every_dtype_number_of_tokens_and_batch() -> None:
    formats = [("bfloat16", "nearest"), ("float32", "nearest")]
    jobs = CONV1D.jobs([Grid((Shape(1, 1, 24, 3),), formats, (1, 6), ("last",), (1, 4))])
    assert [(job.case.format, job.case.tokens, job.case.batch) for job in jobs] == [
        (name, tokens, batch) for name in ("bfloat16", "float32") for tokens in (0, 6) for batch in (1, 4)
    ]
    assert {job.case.measured_axes for job in jobs} == {(1, 1, 24, 3)}
    rows = [measure.row_of("x", job, Timing(2, 2, 2), 1, None) for job in jobs[:3]]
    assert [row.label for row in rows] == ["24 channels, bfloat16"] * 2 + ["24 channels, bfloat16, 6 tokens"]
    assert {row.shape for row in rows} == {"conv1d, width 3"}


def test_windows_and_tokens_that_roofs_cannot_move_are_refused_by_name() -> None:
    for width, length in ((4, 3), (3, 2)):  # of three entries, which are not whole words, and of two
        (job,) = CONV1D.jobs([Grid((Shape(1, 1, 1283, width),), [("bfloat16", "nearest")], batches=(2,))])
        with pytest.raises(ValueError, match=f"^a state of 1283 x {length} in bfloat16, .* not whole 32-bit words$"):
            check_words([job])
    check_words(CONV1D.jobs([Grid((Shape(1, 1, 1283, 4),), [("float32", "nearest")], batches=(2,))]))


def test_formats_that_windows_have_not_are_refused_by_name() -> None:
    for name, rounding, label in (("int8", "nearest", "int8"), ("float16", "stochastic", "float16 stochastic")):
        with pytest.raises(ValueError, match=f"^windows are float32, .*, rounded to nearest, got {label}$"):
            CONV1D.case(Shape(1, 1, 1280, 4), name, rounding, 0, 1)


def test_a_row_counts_every_byte_and_its_roof_those_of_windows_and_tokens() -> None:
    for tokens in (1, 3):
        (job,) = CONV1D.jobs([Grid((Shape(1, 1, 8, 4),), [("bfloat16", "nearest")], [tokens], ("last",), [2])])
        inputs = make_inputs(job.case, CPU)
        given = {**inputs.arguments, **inputs.options, "slots": inputs.slots}
        window, x = inputs.state.data[:2].nbytes, given["x"].nbytes
        others = sum(tensor.nbytes for tensor in given.values() if isinstance(tensor, Tensor))
        assert job.counted_bytes == 2 * window + others + x
        assert job.touched_bytes == 2 * window + 2 * x
        assert job.read_bytes == window


@pytest.mark.interpreted
@NEEDS_INTERPRETER
@pytest.mark.parametrize("tokens", [1, 5])
def test_the_roof_touches_windows_and_copies_tokens(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashstate.bench import roofs

    windows = torch.randn(6, 3, 8).transpose(1, 2)
    before, x = windows.clone(), torch.randn(2, tokens, 8)
    out = torch.full((2, 8 * tokens), 7, dtype=torch.int32)
    monkeypatch.setattr(roofs.torch, "empty_like", lambda words: out)
    roofs.touch(windows, Slots(torch.tensor([4, 1])), None, 16, 1, x)
    expected = before.clone()
    expected[[4, 1]] *= -1
    assert torch.equal(windows, expected)
    assert torch.equal(out, x.view(torch.int32).flatten(1))


def test_a_span_gives_what_its_two_steps_give() -> None:
    inputs = make_inputs(TINY_SPAN, CPU)
    assert isinstance(inputs, SpanInputs)
    check(SPAN.bind, inputs)
    for variant in SPAN.variants.values():
        check(variant.bind, inputs)


@pytest.mark.parametrize("forgotten", ["x", "B", "C"])
def test_a_span_whose_convolution_went_wrong_is_not_timed(forgotten: str) -> None:
    inputs = make_inputs(TINY_SPAN, CPU)
    inputs.arguments[forgotten] = inputs.arguments[forgotten] * 1.5
    with pytest.raises(MeasurementError, match="wrong: its"):
        check(SPAN.bind, inputs)


@pytest.mark.interpreted
@NEEDS_INTERPRETER
@pytest.mark.parametrize(("op", "case"), [(CONV1D, TINY), (SPAN, TINY_SPAN)], ids=["conv1d", "span"])
def test_ways_to_call_flashstate_are_measured_beside_it(op: Any, case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_in_the_interpreter(monkeypatch, cold_bytes=1 << 10)
    report = Report()
    peers = {"vllm": lambda inputs, storing: bind_vllm(vllm.causal_conv1d_update, inputs, storing)}
    with interpreted():
        measure_on_gpu(op, Job("conv1d", case), peers if op is CONV1D else {}, CPU, report)
    names = ["touch", "read", "flashstate", "flashstate, early", *(["vllm"] if op is CONV1D else [])]
    assert [row.implementation for row in report.rows] == names
    assert not report.skipped


def test_a_release_of_vllm_with_other_arguments_is_skipped() -> None:
    def older(x: Tensor, conv_state: Tensor, weight: Tensor, pad_slot_id: int = -1) -> None:
        raise AssertionError

    with pytest.raises(MeasurementError, match="this release has no out"):
        bind_vllm(older, make_inputs(TINY, CPU), IN_PLACE)


def test_larger_pools_keep_the_layout_of_windows() -> None:
    inputs: Inputs = make_inputs(TINY, CPU)
    larger = inputs.on_larger_pool(11).state.data
    assert larger.shape == (11, 8, 3)
    assert larger.stride() == inputs.state.data.stride()
    assert torch.equal(larger[7], inputs.state.data[2])
