"""Every op that is registered obeys the laws: on the reference, in Triton's interpreter, compiled on a GPU."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from obeying import (
    ACCURACY,
    Pairs,
    format_of,
    in_the_interpreter,
    laws,
    on_a_gpu,
    on_the_reference,
    require_all_met,
    smallest_first,
)

from flashstate.proof import CASES, AnyCase, Cases, interpreted, make_inputs
from flashstate.proof.laws import LAWS, require, speaks_of

CPU = torch.device("cpu")
OPS = pytest.mark.parametrize("op", CASES)


def of_every_op(choose: Callable[[Cases], Pairs]) -> list[object]:
    return [parameters for cases in CASES.values() for parameters in smallest_first(choose(cases))]


@pytest.mark.parametrize(("words", "case"), of_every_op(on_the_reference), ids=str)
def test_reference_obeys(words: str, case: AnyCase) -> None:
    LAWS[words](case, CPU)


@pytest.mark.interpreted
@pytest.mark.parametrize(("words", "case"), of_every_op(in_the_interpreter), ids=str)
def test_interpreted_kernel_obeys(words: str, case: AnyCase) -> None:
    with interpreted():
        LAWS[words](case, CPU)


@pytest.mark.gpu
@pytest.mark.parametrize(("words", "case"), of_every_op(on_a_gpu) if torch.cuda.is_available() else [], ids=str)
def test_compiled_kernel_obeys(words: str, case: AnyCase) -> None:
    LAWS[words](case, torch.device("cuda"))


@pytest.mark.quick
@pytest.mark.parametrize("case", [case for cases in CASES.values() for case in cases.groups[0][:2]], ids=str)
def test_an_empty_batch_does_nothing(case: AnyCase, device: torch.device) -> None:
    for form in case.forms:
        inputs = make_inputs(form, device)
        before, y = inputs.fresh(), inputs.fresh().step()
        none = inputs.of_rows(torch.arange(0, device=device)).step()
        assert none.shape == (0, *y.shape[1:])
        require.equal_states("the pool", inputs.state, before.state)


# Which laws meet which cases


def form_in(cases: Cases) -> Callable[[AnyCase], int]:
    """Which form of a call a case has: its place in its group."""
    places = {case: place for group in cases.groups for place, case in enumerate(group)}
    return lambda case: places[case.forms[0]]


@OPS
def test_every_law_meets_every_format_and_every_form_on_the_reference(op: str) -> None:
    cases = CASES[op]
    require_all_met(laws(""), on_the_reference(cases), cases.odd, format_of)
    require_all_met(laws(""), on_the_reference(cases), cases.odd, form_in(cases), at_turns=True)


@OPS
def test_every_law_is_tried_in_the_interpreter_with_as_many_formats_and_forms_as_it_has_turns(op: str) -> None:
    cases, there = CASES[op], {*CASES[op].odd} - {*CASES[op].besides}
    chosen = [(words, case) for words, case in in_the_interpreter(cases) if case.forms[0] in there]
    spoken = [words for words in laws("", "kernels") if any(speaks_of(words, case) for case in cases.odd)]
    assert {words for words, _ in chosen} == set(spoken)
    for kind_of in (format_of, form_in(cases)):
        require_all_met(spoken, chosen, cases.odd, kind_of, at_turns=True)
        met = Counter(kind_of(case) for words, case in chosen if words != ACCURACY)
        assert met.keys() == set(map(kind_of, cases.odd))
        assert min(met.values()) >= 2


@OPS
def test_every_law_meets_every_format_on_a_gpu(op: str) -> None:
    chosen = on_a_gpu(CASES[op])
    require_all_met(laws("", "kernels", "cuda"), chosen, CASES[op].real, format_of)
    assert len(chosen) == len(set(chosen))


@OPS
@pytest.mark.parametrize("choose", [on_the_reference, in_the_interpreter, on_a_gpu])
def test_every_law_meets_every_form_that_calls_have(op: str, choose: Callable[[Cases], Pairs]) -> None:
    met: dict[str, list[str]] = {}
    for words, case in choose(CASES[op]):
        met.setdefault(words, []).append(getattr(case, "form", ""))
    forms = len(CASES[op].odd[0].forms)
    assert all(len(set(found)) == min(forms, len(found)) for found in met.values()), met
