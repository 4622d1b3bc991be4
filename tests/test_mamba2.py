"""mamba2_step: an independent model, extreme time steps, faults, and pools of any size. The laws: test_laws.py."""

import math
import os
from itertools import product

import pytest
import torch
from implementations import NO_INTERPRETER
from test_formats import EVERYWHERE

import flashstate
from flashstate.proof import CASES, Case, error_ratio, interpreted, make_inputs, oracle
from flashstate.reference.mamba2 import mamba2_token

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
REAL = CASES["mamba2_step"].real[0]


@pytest.mark.parametrize("mamba1", [False, True])
def test_reference_equals_the_recurrence_written_for_one_head(mamba1: bool) -> None:
    batch, heads, groups, rows, cols = 2, 4, 2, 3, 5
    generator, own = torch.Generator().manual_seed(0), (rows,) if mamba1 else ()
    s, x, dt, A, B, C, D, z, bias = (
        torch.randn(*size, generator=generator, dtype=torch.float64)
        for size in ((batch, heads, rows, cols), (batch, heads, rows), (batch, heads, *own),
                     (heads, rows, cols) if mamba1 else (heads,), (batch, groups, cols), (batch, groups, cols),
                     (heads, *own), (batch, heads, rows), (heads, *own))
    )  # fmt: skip
    dt[0, 0], dt[0, 1], dt[1, 0], dt[1, 1], bias[:2] = 30.0, -40.0, 20.5, 19.5, 0.25
    y, after = mamba2_token(s, x, dt, -A.abs(), B, C, D, z, bias, True)
    dt, D = (t if mamba1 else t[..., None].expand(*t.shape, rows) for t in (dt + bias, D))
    time = torch.where(dt > 20.0, dt, torch.log1p(dt.exp()))
    for b, h in product(range(batch), range(heads)):
        g, value = h * groups // heads, x[b, h]
        new = s[b, h] * torch.exp(-A[h].abs() * time[b, h][:, None]) + (time[b, h] * value)[:, None] * B[b, g]
        torch.testing.assert_close(after[b, h], new, rtol=1e-13, atol=1e-15)
        out = (new @ C[b, g] + D[h] * value) * z[b, h] / (1 + torch.exp(-z[b, h]))
        torch.testing.assert_close(y[b, h], out, rtol=1e-12, atol=1e-14)


EXTREME_DT = [-80.0, -60.0, -17.0, -1e-3, 0.0, 1.0, 19.999, 20.0, 20.001, 100.0, 1e4]


def test_tiny_and_huge_time_steps_are_kept(device: torch.device) -> None:
    """From zero with x = B = 1 and A = 0 the state is softplus(dt). exp on a GPU rounds its argument, so the relative
    error of a tiny result grows with |dt|; it is not lost."""
    dt, one = torch.tensor(EXTREME_DT, device=device), torch.ones(len(EXTREME_DT), 1, 1, device=device)
    data = torch.zeros(len(EXTREME_DT), 1, 1, 1, device=device)
    flashstate.mamba2_step(data, one, dt[:, None], torch.zeros(1, device=device), one, one)
    exact = torch.nn.functional.softplus(dt.double(), threshold=700)
    allowed = (4 + dt.double().clamp(max=0).abs()) * torch.finfo(torch.float32).eps * exact
    assert ((data.flatten().double() - exact).abs() <= allowed).all()


def test_time_steps_are_kept_within_limits_after_softplus_and_nan_stays_nan(device: torch.device) -> None:
    """From zero with x = B = 1 and A = 0 the state is dt as it counts, and so is what a ring keeps of it."""
    dt, one = torch.tensor([-3.0, 0.0, 1.0, 30.0, math.nan], device=device), torch.ones(5, 1, 1, device=device)
    bias, A = torch.full((1,), 0.5, device=device), torch.zeros(1, device=device)
    plain = torch.nn.functional.softplus(dt.double() + 0.5)
    for limit in ((0.25, 1.5), [0, math.inf]):
        data, cursors = torch.zeros(5, 1, 1, 1, device=device), torch.zeros(2, 5, dtype=torch.int32, device=device)
        x, B = torch.zeros(2, 5, 1, 2, 1, device=device)
        ring = flashstate.Ring(x, B, torch.zeros(5, 1, 2, device=device), *cursors, 1)
        given = {"dt_bias": bias, "dt_limit": limit}
        flashstate.mamba2_step(data, one, dt[:, None], A, one, one, **given)
        y = flashstate.mamba2_replay(torch.zeros_like(data), ring, one, dt[:, None], A, one, one, **given)
        want = plain.clamp(*limit)
        for found in (data.flatten(), ring.dt[:, 0, 0], y.flatten()):
            within = (found.double() - want).abs() <= 4 * torch.finfo(torch.float32).eps * want
            assert (within | (found.isnan() & want.isnan())).all()


@pytest.mark.parametrize("device", NO_INTERPRETER, indirect=True)
def test_faults_cross_the_border_of_inference_mode(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's steps run in inference mode; the flag they may set is read and cleared outside it, and the reverse."""
    monkeypatch.setattr("flashstate.state.faults._flags", {})
    for setting, reading in ((True, False), (False, True)):
        with torch.inference_mode(setting):
            inputs = make_inputs(Case(), device)
            inputs.step(slots=inputs.slots + 100)
        with torch.inference_mode(reading), pytest.raises(IndexError, match="read slot"):
            flashstate.check_faults()


@pytest.mark.gpu
def test_a_fault_on_another_stream_is_seen() -> None:
    inputs = make_inputs(REAL, CUDA)
    inputs.step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        inputs.step(slots=inputs.slots + 1000)
    with pytest.raises(IndexError, match="read slot"):
        flashstate.check_faults()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_current_works() -> None:
    other = torch.device("cuda", 1)
    here, there = make_inputs(REAL, CUDA), make_inputs(REAL, other)
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


@EVERYWHERE
def test_terms_side_by_side_in_two_copies_of_eight_tokens_sum_up_to_all_that_terms_hold(device: torch.device) -> None:
    from device_functions import copies_kernel

    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    for terms, products in ((1, 1), (2, 1), (3, 2)):
        packed = torch.full((2, 2, 8, 16), torch.nan, device=device)
        copies_kernel[(1,)](packed, x.to(device), terms)
        assert packed[products:].isnan().all()
        lost = (packed[:products].double().sum((0, 1)).cpu() - x).abs() / x.abs()
        assert lost.max() <= (0 if terms == 3 else 2.0 ** (1 - 8 * terms))
        assert (lost > 0).any() == (terms < 3)


def test_tokens_at_once_keep_what_is_short_behind_a_time_step_that_forgets_all(device: torch.device) -> None:
    """Sums of time steps are not differences of long ones, which would lose short steps behind."""
    inputs = make_inputs(Case(2, 2, 1, 16, 32, tokens=6, bc="float16", exact=False), device)
    inputs.arguments["dt"][:, 2], inputs.arguments["x"][:, 2] = 1e6, 0.0
    want = oracle(inputs)
    y = inputs.step()
    exact, plain = (t.reshape(y.shape)[:, 3:] for t in (want.y, want.y_plain))
    assert error_ratio(y[:, 3:], exact, plain) <= 1
    assert error_ratio(inputs.states, want.state, want.state_plain) <= 1
