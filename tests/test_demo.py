"""flashstate demo: what it serves, what it calls the truth, and that no padding, rejected token or slot leaks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
from printed import output_of
from torch import Tensor

import flashstate
from flashstate.cli import main
from flashstate.demo import (
    COLS,
    HEADS,
    LAYERS,
    REQUESTS,
    ROWS,
    WIDTHS,
    Contender,
    Demo,
    DemoRow,
    Traffic,
    one_thread,
    parameters,
    run_demo,
)
from flashstate.launch import interpreted
from flashstate.state.formats import PORTABLE_FORMATS

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_cpu_thread() -> Iterator[None]:
    """Several threads on tensors this small are slow, and very slow where tests run side by side."""
    with one_thread():
        yield


@pytest.fixture
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill is a loop over the prompt."""
    monkeypatch.setattr("flashstate.demo.PROMPT_TOKENS", (1, 20))


def running(demo: Demo) -> list[int]:
    """The rows of the batch that have a request."""
    return [row for row, request in enumerate(demo.traffic.rows) if request is not None]


def timeless(rows: list[DemoRow]) -> list[DemoRow]:
    return [replace(row, tokens_per_second=0.0) for row in rows]


@pytest.mark.usefixtures("short_prompts")
def test_the_command_prints_what_was_served_a_row_per_format_and_findings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--device", "cpu", "--steps", "3"]) == 0
    out = output_of(capsys)
    demo = run_demo(CPU, steps=3, tokens=4, seed=0)
    assert f"Model steps: 3. Requests: {demo.requests}. " in out
    assert f"Tokens: {demo.proposed} proposed, {demo.accepted} accepted. " in out
    assert "a pool of 32 slots, 4 for a request" in out
    for cells in ("float32 16,384 65,536", "int16 8,448 33,792", "float8_e4m3fn stochastic 4,360 17,440"):
        assert f"{cells} " in out
    for row in demo.rows():
        assert f"{row.output_error:.1e} {row.state_error:.1e} " in out
    assert f"float64 never saw the {demo.proposed - demo.accepted} rejected tokens" in out
    assert out.count(": stochastic rounding ") == 5
    assert main(["demo", "--device", "cpu", "--steps", "2", "--tokens", "1", "--seed", "7"]) == 0
    out, demo = output_of(capsys), run_demo(CPU, steps=2, tokens=1, seed=7)
    assert f"Tokens: {demo.proposed} proposed, {demo.proposed} accepted. " in out
    assert "bfloat16 stochastic 8,200 8,200 " in out
    assert "rejected" not in out


@pytest.mark.usefixtures("short_prompts")
def test_more_bits_make_smaller_errors_and_stochastic_rounding_drifts_less_where_nearest_loses_updates() -> None:
    """Where a state is rounded every second token or more often."""
    rows = run_demo(CPU, steps=48, tokens=2, seed=0).rows()
    errors = {(row.format, row.rounding): row.state_error for row in rows}
    assert errors.keys() == set(PORTABLE_FORMATS)
    assert errors["float32", "nearest"] < 1e-5
    sixteen = [error for (name, _), error in errors.items() if name in ("bfloat16", "float16", "int16")]
    eight = [error for (name, _), error in errors.items() if name in ("int8", "float8_e4m3fn")]
    assert errors["float32", "nearest"] < min(sixteen)
    assert max(sixteen) < min(eight)
    assert max(eight) < 0.5
    for name in ("int8", "float8_e4m3fn"):  # of those that drift in a run as short
        assert errors[name, "stochastic"] < 0.9 * errors[name, "nearest"], name


@pytest.mark.usefixtures("short_prompts")
def test_equal_seeds_give_equal_numbers_and_neither_rejected_tokens_nor_padding_leave_a_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with flashstate.debug():  # no row touches what is another's
        first, other = (run_demo(CPU, steps=3, tokens=3, seed=seed) for seed in (1, 2))
    flashstate.check_faults()
    assert first.proposed > first.accepted
    assert all(a.state_error != b.state_error for a, b in zip(first.rows(), other.rows(), strict=True))
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    propose, step = Traffic.propose, Contender.step

    def proposed_nan(traffic: Traffic) -> tuple[Tensor, Tensor]:
        proposed, accepted = propose(traffic)
        proposed[torch.arange(3) >= accepted[:, None]] = torch.nan
        return proposed, accepted

    def recorded(contender: Contender, proposed: Tensor) -> Tensor:
        seen.append((proposed, contender.accepted > 0, step(contender, proposed)))
        return seen[-1][-1]

    monkeypatch.setattr(Traffic, "propose", proposed_nan)
    monkeypatch.setattr(Contender, "step", recorded)
    poisoned = run_demo(CPU, steps=3, tokens=3, seed=1)
    assert timeless(poisoned.rows()) == timeless(first.rows())
    assert all(math.isfinite(row.state_error) and row.tokens_per_second > 0 for row in poisoned.rows())
    for proposed, live, y in seen:
        assert not live.all()
        assert proposed[~live].isnan().all()
        assert not y[~live].any()


def replayed(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The last output and the state of tokens (tokens, layers, WIDTH), by the equations and nothing else."""
    state = torch.zeros(LAYERS, HEADS, ROWS, COLS, dtype=torch.float64)
    y = torch.zeros(LAYERS, HEADS, ROWS, dtype=torch.float64)
    for token in tokens.double():
        x, dt, B, C = token.split(WIDTHS, dim=-1)
        dt = torch.log(1 + torch.exp(dt + parameters(CPU)["dt_bias"].double()))
        update = torch.einsum("lh,lhr,lc->lhrc", dt, x.reshape(LAYERS, HEADS, ROWS), B)
        state = torch.exp(-dt)[..., None, None] * state + update
        y = torch.einsum("lhrc,lc->lhr", state, C)
    return y, state


@pytest.mark.usefixtures("short_prompts")
def test_the_truth_is_the_prompt_and_the_accepted_tokens_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashstate.demo.PORTABLE_FORMATS", (("float32", "nearest"),))
    demo = Demo(CPU, steps=20, tokens=4, seed=3)
    outputs: list[tuple[Tensor, Tensor]] = []
    step = demo.exact_step

    def recorded(proposed: Tensor, accepted: Tensor) -> Tensor:
        outputs.append((step(proposed, accepted), accepted))
        return outputs[-1][0]

    monkeypatch.setattr(demo, "exact_step", recorded)
    for _ in range(5):
        demo.step()
        y, accepted = outputs[-1]
        assert running(demo)
        for row in running(demo):
            request = demo.traffic.rows[row]
            assert request is not None
            last, state = replayed(request.tokens[: request.done])
            torch.testing.assert_close(demo.states[row], state, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(y[row, accepted[row] - 1], last, rtol=1e-10, atol=1e-12)
    assert len({tuple(accepted.tolist()) for _, accepted in outputs}) > 2, "the numbers of accepted tokens vary"


@pytest.mark.usefixtures("short_prompts")
def test_requests_wait_for_slots_which_all_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pools of plain and of scaled states."""
    monkeypatch.setattr("flashstate.demo.PORTABLE_FORMATS", (("float32", "nearest"), ("int8", "stochastic")))
    demo = Demo(CPU, steps=6, tokens=2, seed=0)
    waited = False
    for _ in range(30):
        demo.step()
        held = len(running(demo)) * demo.tokens
        assert all(contender.pool.free == contender.pool.slots - held for contender in demo.contenders)
        waited |= bool(demo.traffic.waiting)
        owned = demo.contenders[0].slots
        assert (owned >= 0).all(dim=1).nonzero()[:, 0].tolist() == running(demo)
        assert len(owned[owned >= 0].unique()) == held
    demo.step(last=True)
    assert waited
    assert demo.requests > REQUESTS
    assert all(contender.pool.free == contender.pool.slots for contender in demo.contenders)
    assert not any(demo.traffic.rows)


@pytest.mark.parametrize(
    ("device", "context"),
    [
        pytest.param("cpu", interpreted, id="interpreter", marks=pytest.mark.interpreted),
        pytest.param("cuda", contextlib.nullcontext, id="gpu", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.usefixtures("short_prompts")
def test_kernels_serve_as_well_as_the_reference(
    device: str, context: type[AbstractContextManager[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":  # the interpreter is slow
        monkeypatch.setattr("flashstate.demo.PORTABLE_FORMATS", (("float32", "nearest"), ("int8", "stochastic")))
        for name, size in (("BATCH", 3), ("REQUESTS", 2)):
            monkeypatch.setattr(f"flashstate.demo.{name}", size)
    reference = run_demo(CPU, steps=2, tokens=2, seed=0)
    with context():
        kernels = run_demo(torch.device(device), steps=2, tokens=2, seed=0)
    assert (kernels.proposed, kernels.accepted) == (reference.proposed, reference.accepted)
    for got, want in zip(kernels.rows(), reference.rows(), strict=True):
        assert got.state_error == pytest.approx(want.state_error, rel=0.1, abs=1e-6)
        assert got.output_error == pytest.approx(want.output_error, rel=0.1, abs=1e-6)
