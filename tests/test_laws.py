"""Every op that is registered obeys the laws: on the reference, in Triton's interpreter, compiled on a GPU."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from obeying import OPS, PLACES, Meeting, every_config, laws, meetings, parameters, values_of

from flashstate.proof import CASES, AnyCase, interpreted, make_inputs
from flashstate.proof.laws import LAWS, replay, require, speaks_of

CPU = torch.device("cpu")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "meeting" in metafunc.fixturenames:
        place = metafunc.function.place
        there = place != "gpu" or torch.cuda.is_available()
        seed = metafunc.config.getoption("seed")
        metafunc.parametrize("meeting", list(parameters(place, seed)) if there else [], ids=str)


def at(place: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Try a test with the meetings of a place."""

    def placed(test: Callable[..., None]) -> Callable[..., None]:
        test.place = place  # type: ignore[attr-defined]
        return test

    return placed


@at("reference")
def test_reference_obeys(meeting: Meeting) -> None:
    LAWS[meeting.law](meeting.case, CPU)


@pytest.mark.interpreted
@at("interpreter")
def test_interpreted_kernel_obeys(meeting: Meeting) -> None:
    with interpreted():
        LAWS[meeting.law](meeting.case, CPU)


@pytest.mark.gpu
@at("gpu")
def test_compiled_kernel_obeys(meeting: Meeting, record_property: Callable[[str, object], None]) -> None:
    record_property("meeting", str(meeting))
    with every_config(meeting.config, meeting.case):
        LAWS[meeting.law](meeting.case, torch.device("cuda"))


@pytest.mark.quick
@pytest.mark.parametrize("case", [cases.groups[0][0] for cases in CASES.values()], ids=str)
def test_an_empty_batch_does_nothing(case: AnyCase, device: torch.device) -> None:
    for form in case.forms:
        inputs = make_inputs(form, device)
        before, y = inputs.fresh(), inputs.fresh().step()
        none = inputs.of_rows(torch.arange(0, device=device)).step()
        assert none.shape == (0, *y.shape[1:])
        require.equal_states("the pool", inputs.state, before.state)


def test_laws_are_silent_on_the_ops_that_they_cannot_speak_of() -> None:
    silent: dict[str, list[str]] = {}
    for words, (op, cases) in product(LAWS, CASES.items()):
        if not any(speaks_of(words, case) for case in (*cases.odd, *cases.real)):
            silent.setdefault(op, []).append(" ".join(words.split()[:4]))
    between_tokens = ["snapshots hold the state", "a token of a", "a token whose parent"]
    replays = [
        "a separate write slot", "a write slot that", "T tokens at once", "a state written after",
        between_tokens[0], "a row with n", *between_tokens[1:],
    ]  # fmt: skip
    of_rings = [" ".join(words.split()[:4]) for words in replay.WORDS]
    assert silent == {
        "mamba2_step": of_rings, "gated_delta_step": of_rings, "mamba3_step": of_rings + between_tokens,
        "conv1d_step": ["stochastic rounding draws other", *of_rings],
        "gated_delta_replay": replays, "mamba2_replay": ["a ring that is", *replays],
    }  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_every_law_meets_every_op_and_every_format_at_every_seed(place: str) -> None:
    """And every op meets every form of its calls."""
    for seed in (0, 1):
        there = meetings(place, seed)
        spoken = [
            Meeting(words, case) for words in laws(*PLACES[place].needs) for cases in CASES.values()
            for case in PLACES[place].cases_for(words, cases) if speaks_of(words, case)
        ]  # fmt: skip
        for known in (law_and_op, law_and_format, form_of_call):
            assert set(map(known, there)) == set(map(known, spoken))
        assert len(there) == len(set(map(str, there)))


def law_and_op(meeting: Meeting) -> object:
    return meeting.law, OPS[type(meeting.case)]


def law_and_format(meeting: Meeting) -> object:
    return meeting.law, meeting.case.format, meeting.case.rounding


def form_of_call(meeting: Meeting) -> object:
    values = values_of(meeting.case)
    return values["kernel"], values["tokens"]
