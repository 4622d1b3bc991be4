"""mamba2_step: the laws on every implementation, an independent model, and pools of any size."""

import math
import os
from dataclasses import replace

import pytest
import torch
from obeying import by_shape, format_of, gpu_pairs, interpreted_pairs, laws, reference_pairs, require_half
from torch import Tensor

import flashstate
from flashstate.proof import (
    ODD_CASES,
    ODD_SHAPES,
    QUICK_CASES,
    REAL_CASES,
    Case,
    Inputs,
    interpreted,
    make_inputs,
)
from flashstate.proof.laws import LAWS, pairs
from flashstate.reference.mamba2 import mamba2_token
from flashstate.state.formats import PORTABLE_FORMATS

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
GPU_CASES = REAL_CASES + QUICK_CASES
SHAPES_FOR_CONFIGS = {(64, 128), (128, 256), (80, 20), (4, 33)}
FORMS = len(ODD_SHAPES)
GROUPS = [ODD_CASES[FORMS * i : FORMS * (i + 1)] for i in range(len(PORTABLE_FORMATS))]  # a format each, in every form
IN_THE_INTERPRETER = interpreted_pairs(GROUPS, turns=2)  # which is slow; a GPU meets all


def form_of(case: Case) -> tuple[bool, bool, bool]:
    return case.tokens > 0, case.packed, case.mamba1


def test_every_law_meets_every_format_and_every_form_without_a_gpu() -> None:
    """On the reference, of those it speaks of; half of the formats and of the forms in the interpreter."""
    formats, forms = set(PORTABLE_FORMATS), set(map(form_of, ODD_CASES))
    assert {(c.format, c.rounding, *form_of(c)) for c in ODD_CASES} == {(*f, *form) for f in formats for form in forms}
    for kind_of in (format_of, form_of):
        require_half(pairs(laws("", "kernels"), ODD_CASES), IN_THE_INTERPRETER, kind_of)


def tries_configs(case: Case) -> bool:
    return (case.rows, case.cols) in SHAPES_FOR_CONFIGS and case.heads <= 16


@pytest.mark.parametrize(("words", "case"), reference_pairs(ODD_CASES), ids=str)
def test_reference_obeys(words: str, case: Case) -> None:
    LAWS[words](case, CPU)


@pytest.mark.interpreted
@pytest.mark.parametrize(("words", "case"), IN_THE_INTERPRETER, ids=str)
def test_interpreted_kernel_obeys(words: str, case: Case) -> None:
    with interpreted():
        LAWS[words](case, CPU)


@pytest.mark.gpu
@pytest.mark.parametrize(("words", "case"), gpu_pairs(by_shape(GPU_CASES), tries_configs), ids=str)
def test_compiled_kernel_obeys(words: str, case: Case) -> None:
    LAWS[words](case, CUDA)


def one_element(s: float, x: float, dt: float, A: float, B: float) -> float:
    """The recurrence for one element of the state, in Python's floats."""
    dt = dt if dt > 20.0 else math.log1p(math.exp(dt))
    return s * math.exp(dt * A) + dt * x * B


def test_reference_equals_the_recurrence_written_with_loops() -> None:
    batch, heads, groups, rows, cols = 2, 4, 2, 3, 5
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    s, x, dt, A = (
        normal(batch, heads, rows, cols),
        normal(batch, heads, rows),
        normal(batch, heads),
        -normal(heads).abs(),
    )
    B, C, D, z = normal(batch, groups, cols), normal(batch, groups, cols), normal(heads), normal(batch, heads, rows)
    dt[0, 0], dt[0, 1], dt[1, 0] = 30.0, -40.0, 20.5
    y, after = mamba2_token(s, x, dt, A, B, C, D, z, None, True)
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // groups)
            for d in range(rows):
                row = [
                    one_element(*map(float, (s[b, h, d, n], x[b, h, d], dt[b, h], A[h], B[b, g, n])))
                    for n in range(cols)
                ]
                out = sum(value * float(C[b, g, n]) for n, value in enumerate(row)) + float(D[h] * x[b, h, d])
                out *= float(z[b, h, d]) / (1 + math.exp(-float(z[b, h, d])))
                assert torch.allclose(after[b, h, d], torch.tensor(row, dtype=torch.float64), rtol=1e-13, atol=1e-15)
                assert math.isclose(float(y[b, h, d]), out, rel_tol=1e-12, abs_tol=1e-14)


EXTREME_DT = [-80.0, -60.0, -17.0, -1e-3, 0.0, 1.0, 19.999, 20.0, 20.001, 100.0, 1e4]


def extreme_step(device: torch.device) -> Tensor:
    """The state after one step from zero with x = B = 1 and A = 0: it is softplus(dt)."""
    dt = torch.tensor(EXTREME_DT, device=device)[:, None]
    data = torch.zeros(len(EXTREME_DT), 1, 1, 1, device=device)
    one = torch.ones(len(EXTREME_DT), 1, 1, device=device)
    flashstate.mamba2_step(data, one, dt, torch.zeros(1, device=device), one, one)
    return data.flatten().double().cpu()


def check_extreme_dt(device: torch.device) -> None:
    """exp on a GPU rounds its argument, so the relative error of a tiny result grows with |dt|; it is not lost."""
    dt = torch.tensor(EXTREME_DT, dtype=torch.float64)
    exact = torch.nn.functional.softplus(dt, threshold=700)
    allowed = (4 + dt.clamp(max=0).abs()) * torch.finfo(torch.float32).eps * exact
    assert ((extreme_step(device) - exact).abs() <= allowed).all()


def test_reference_keeps_tiny_and_huge_time_steps() -> None:
    check_extreme_dt(CPU)


@pytest.mark.interpreted
def test_interpreted_kernel_keeps_tiny_and_huge_time_steps() -> None:
    with interpreted():
        check_extreme_dt(CPU)


@pytest.mark.gpu
def test_compiled_kernel_keeps_tiny_and_huge_time_steps() -> None:
    check_extreme_dt(CUDA)


def check_inference_mode(device: torch.device) -> None:
    """A server's steps run in inference mode; the flag they may set is read and cleared outside it, and the reverse."""
    for setting, reading in ((True, False), (False, True)):
        with torch.inference_mode(setting):
            inputs = make_inputs(Case(), device)
            inputs.step(slots=inputs.slots + 100)
        with torch.inference_mode(reading), pytest.raises(IndexError, match="read slot"):
            flashstate.check_faults()


def test_faults_cross_the_border_of_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashstate.state.faults._flags", {})
    check_inference_mode(CPU)


@pytest.mark.gpu
def test_faults_cross_the_border_of_inference_mode_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashstate.state.faults._flags", {})
    check_inference_mode(CUDA)


@pytest.mark.gpu
def test_a_fault_on_another_stream_is_seen() -> None:
    inputs = make_inputs(REAL_CASES[0], CUDA)
    inputs.step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        inputs.step(slots=inputs.slots + 1000)
    with pytest.raises(IndexError, match="read slot"):
        flashstate.check_faults()


def test_an_empty_batch_does_nothing() -> None:
    inputs = make_inputs(Case(), CPU)
    before = inputs.state.data.clone()
    empty = {name: t if name == "A" else t[:0] for name, t in inputs.arguments.items()}
    y = inputs.step(**empty, z=inputs.options["z"][:0], slots=inputs.slots[:0])
    assert y.shape == (0, 4, 16)
    assert torch.equal(inputs.state.data, before)


def largest_pool(device: torch.device) -> Inputs:
    """A pool of more than 2^31 elements, its batch on the last slots."""
    case = Case(8, 16, 1, 64, 128, format="float16", x="bfloat16", bc="bfloat16", dt="bfloat16", slots=8)
    inputs = make_inputs(case, device)
    slots = (1 << 31) // (16 * 64 * 128) + 64
    data = torch.zeros(slots, 16, 64, 128, dtype=torch.float16, device=device)
    data[-8:] = inputs.state.data
    inputs.state = flashstate.State(data)
    inputs.slots = inputs.slots + (slots - 8)
    return inputs


@pytest.mark.gpu
def test_a_pool_past_2_31_elements_works() -> None:
    large = largest_pool(CUDA)
    assert large.state.data.numel() > 1 << 31
    first = large.state.data.shape[0] - 8
    small = replace(large, state=flashstate.State(large.state.data[first:].clone()), slots=large.slots - first)
    assert torch.equal(large.step(), small.step())
    assert torch.equal(large.state.data[-8:], small.state.data)
    assert not large.state.data[:-8].any()


@pytest.mark.gpu
@pytest.mark.parametrize("strides", [((1 << 31) + 64, 16), (16, (1 << 30) + 64)], ids=["batch", "head"])
def test_activations_past_2_31_elements_work(strides: tuple[int, int]) -> None:
    inputs = make_inputs(Case(2, 4, 2, 16, 16, x="float16"), CUDA)
    x = inputs.arguments["x"]
    elements = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, (*strides, 1), strict=True))
    assert elements > 1 << 31
    far = torch.empty(elements, dtype=torch.float16, device=CUDA).as_strided(x.shape, (*strides, 1))
    far.copy_(x)
    want = inputs.fresh().step()
    assert torch.equal(inputs.step(x=far), want)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_current_works() -> None:
    other = torch.device("cuda", 1)
    here, there = make_inputs(REAL_CASES[0], CUDA), make_inputs(REAL_CASES[0], other)
    assert torch.equal(here.step().cpu(), there.step().cpu())


@pytest.mark.gpu
def test_hardware_rounding_is_refused_where_there_is_none() -> None:
    if torch.cuda.get_device_capability() in ((10, 0), (10, 3)):
        pytest.skip("this GPU has it")
    data, seed = (
        torch.zeros(2, 1, 1, 8, device=CUDA, dtype=torch.float16),
        torch.zeros(2, dtype=torch.int64, device=CUDA),
    )
    with pytest.raises(ValueError, match=r"10\.0 or 10\.3"):
        flashstate.State(data, rounding="stochastic_hw", seed=seed)


def test_interpreted_needs_the_environment_to_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(os.environ, "TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"), interpreted():
        pass
