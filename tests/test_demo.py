"""flashstate demo: what it serves, what it calls the truth, and that no padding, rejected token or slot leaks."""

import contextlib
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
from printed import output_of
from torch import Tensor

import flashstate
from flashstate.cli import main
from flashstate.demo import REQUESTS, Contender, Demo, Traffic, exact, run_demo
from flashstate.launch import interpreted
from flashstate.state.formats import PORTABLE_FORMATS

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill is a loop over the prompt."""
    monkeypatch.setattr("flashstate.demo.PROMPT_TOKENS", (1, 20))


@pytest.fixture
def two_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of plain and of scaled states."""
    monkeypatch.setattr("flashstate.demo.PORTABLE_FORMATS", (("float32", "nearest"), ("int8", "stochastic")))


@pytest.mark.parametrize(("tokens", "seed"), [(4, 0), (1, 7)])
def test_the_command_prints_what_was_served_a_row_per_format_and_findings(
    tokens: int, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--device", "cpu", "--steps", "2", "--tokens", str(tokens), "--seed", str(seed)]) == 0
    out, demo = output_of(capsys), run_demo(CPU, steps=2, tokens=tokens, seed=seed)
    rejected = demo.proposed - demo.accepted
    assert f"Model steps: 2. Requests: {demo.requests}. " in out
    assert f"Tokens: {demo.proposed} proposed, {demo.accepted} accepted. " in out
    assert f"a pool of {8 * tokens} slots, {tokens} for a request" in out
    for name, size in (("float32", 16384), ("int16", 8448), ("float8_e4m3fn stochastic", 4360)):
        assert f"{name} {size:,} {size * tokens:,} " in out
    for row in demo.rows():
        assert f"{row.output_error:.1e} {row.state_error:.1e} " in out
    assert (f"float64 never saw the {rejected} rejected tokens" in out) == ("rejected" in out) == (tokens > 1)
    assert out.count(": stochastic rounding ") == 5


def test_more_bits_make_smaller_errors_and_stochastic_rounding_drifts_less_where_nearest_loses_updates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a state is rounded every second token or more often."""
    eight = [form for form in PORTABLE_FORMATS if form[0] in ("int8", "float8_e4m3fn")]
    monkeypatch.setattr(
        "flashstate.demo.PORTABLE_FORMATS", (("float32", "nearest"), ("bfloat16", "stochastic"), *eight)
    )
    rows = run_demo(CPU, steps=48, tokens=2, seed=0).rows()
    exact, sixteen, *errors = (row.state_error for row in rows)
    assert exact < 1e-5 < sixteen < min(errors) <= max(errors) < 0.5
    for nearest, stochastic in (errors[:2], errors[2:]):
        assert stochastic < 0.9 * nearest


@pytest.mark.usefixtures("two_formats")
def test_equal_seeds_give_equal_numbers_and_neither_rejected_tokens_nor_padding_leave_a_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with flashstate.debug():  # no row touches what is another's
        first, other = (run_demo(CPU, steps=3, tokens=3, seed=seed) for seed in (1, 2))
    flashstate.check_faults()
    assert first.proposed > first.accepted
    propose, step = Traffic.propose, Contender.step

    def proposed_nan(traffic: Traffic) -> tuple[Tensor, Tensor]:
        proposed, accepted = propose(traffic)
        proposed[torch.arange(3) >= accepted[:, None]] = torch.nan
        return proposed, accepted

    def watched(contender: Contender, proposed: Tensor) -> Tensor:
        padding, y = contender.accepted == 0, step(contender, proposed)
        assert padding.any()
        assert proposed[padding].isnan().all()
        assert not y[padding].any()
        return y

    monkeypatch.setattr(Traffic, "propose", proposed_nan)
    monkeypatch.setattr(Contender, "step", watched)
    rows = zip(run_demo(CPU, steps=3, tokens=3, seed=1).rows(), first.rows(), other.rows(), strict=True)
    for poisoned, row, another in rows:
        assert replace(poisoned, tokens_per_second=row.tokens_per_second) == row
        assert another.state_error != row.state_error
        assert row.tokens_per_second > 0


@pytest.mark.usefixtures("two_formats")
def test_the_truth_is_the_prompt_and_the_accepted_tokens_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    demo = Demo(CPU, steps=20, tokens=4, seed=3)
    seen, step = list[tuple[Tensor, Tensor]](), demo.exact_step

    def recorded(proposed: Tensor, accepted: Tensor) -> Tensor:
        seen.append((accepted, step(proposed, accepted)))
        return seen[-1][1]

    monkeypatch.setattr(demo, "exact_step", recorded)
    for _ in range(5):
        demo.step()
        for row, request in enumerate(demo.traffic.rows):
            if request is not None:
                y, state = exact(torch.zeros_like(demo.states[row]), request.tokens[: request.done])
                torch.testing.assert_close(demo.states[row], state, rtol=1e-10, atol=1e-12)
                torch.testing.assert_close(seen[-1][1][row, seen[-1][0][row] - 1], y[-1], rtol=1e-10, atol=1e-12)
    assert len({tuple(accepted.tolist()) for accepted, _ in seen}) > 2, "the numbers of accepted tokens vary"


@pytest.mark.usefixtures("two_formats")
def test_requests_wait_for_slots_which_all_come_back() -> None:
    demo = Demo(CPU, steps=6, tokens=2, seed=0)
    waited = False
    for _ in range(30):
        demo.step()
        running = [row for row, request in enumerate(demo.traffic.rows) if request is not None]
        held = len(running) * demo.tokens
        assert all(contender.pool.free == contender.pool.slots - held for contender in demo.contenders)
        waited |= bool(demo.traffic.waiting)
        owned = demo.contenders[0].slots
        assert (owned >= 0).all(dim=1).nonzero()[:, 0].tolist() == running
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
def test_kernels_serve_as_well_as_the_reference(
    device: str, context: type[AbstractContextManager[Any]], request: pytest.FixtureRequest
) -> None:
    if device == "cpu":  # the interpreter is slow
        request.getfixturevalue("two_formats")
        for name, size in (("BATCH", 3), ("REQUESTS", 2)):
            request.getfixturevalue("monkeypatch").setattr(f"flashstate.demo.{name}", size)
    reference = run_demo(CPU, steps=2, tokens=2, seed=0)
    with context():
        kernels = run_demo(torch.device(device), steps=2, tokens=2, seed=0)
    assert (kernels.proposed, kernels.accepted) == (reference.proposed, reference.accepted)
    for got, want in zip(kernels.rows(), reference.rows(), strict=True):
        assert got.state_error == pytest.approx(want.state_error, rel=0.1, abs=1e-6)
        assert got.output_error == pytest.approx(want.output_error, rel=0.1, abs=1e-6)
