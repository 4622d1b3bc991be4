"""conv1d_step: the laws on every implementation."""

import pytest
import torch
from obeying import gpu_pairs, interpreted_pairs, laws, reference_pairs

from flashstate.proof import (
    ODD_CONV_CASES,
    ODD_CONV_GROUPS,
    QUICK_CONV_CASES,
    REAL_CONV_CASES,
    ConvCase,
    interpreted,
)
from flashstate.proof.laws import LAWS, pairs

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
GPU_CASES = REAL_CONV_CASES + QUICK_CONV_CASES
CASES_FOR_CONFIGS = {REAL_CONV_CASES[1], REAL_CONV_CASES[5], *QUICK_CONV_CASES}


def form_of(case: ConvCase) -> tuple[bool, bool]:
    return case.tokens > 0, case.packed


def test_every_law_meets_every_form_it_speaks_of_in_the_interpreter() -> None:
    """Of every form a group has one case, so that every law meets each as often as there are groups, by turns."""
    assert {tuple(map(form_of, group)) for group in ODD_CONV_GROUPS} == {((False, False), (True, False), (True, True))}
    for words in laws("", "kernels"):
        met = [case for law, case in interpreted_pairs(ODD_CONV_GROUPS) if law == words]
        possible = [case for _, case in pairs([words], ODD_CONV_CASES)]
        assert set(map(form_of, met)) == set(map(form_of, possible))


@pytest.mark.parametrize(("words", "case"), reference_pairs(ODD_CONV_CASES), ids=str)
def test_reference_obeys(words: str, case: ConvCase) -> None:
    LAWS[words](case, CPU)


@pytest.mark.interpreted
@pytest.mark.parametrize(("words", "case"), interpreted_pairs(ODD_CONV_GROUPS), ids=str)
def test_interpreted_kernel_obeys(words: str, case: ConvCase) -> None:
    with interpreted():
        LAWS[words](case, CPU)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("words", "case"), gpu_pairs([[case] for case in GPU_CASES], CASES_FOR_CONFIGS.__contains__), ids=str
)
def test_compiled_kernel_obeys(words: str, case: ConvCase) -> None:
    LAWS[words](case, CUDA)
