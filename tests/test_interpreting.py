"""What the tests spare Triton's interpreter changes nothing."""

import pytest
import torch
from torch import Tensor

from flashstate.proof import CASES as PROVEN
from flashstate.proof import AnyCase, interpreted, make_inputs, slotted
from flashstate.state.formats import bits_of

CPU = torch.device("cpu")
CASES = [cases.groups[0][1] for cases in PROVEN.values()]  # of several tokens


def bytes_of(case: AnyCase) -> list[Tensor]:
    """Of the output and of all states, with a NaN among the inputs."""
    inputs = make_inputs(case, CPU)
    inputs.main.view(-1)[3] = torch.nan
    with interpreted():
        y = inputs.step()
    return [bits_of(tensor) for tensor in (y, *slotted(inputs.state).values())]


@pytest.mark.interpreted
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_spared_interpreter_gives_the_same_bytes(case: AnyCase, monkeypatch: pytest.MonkeyPatch) -> None:
    from interpreting import ORIGINALS

    spared = bytes_of(case)
    for owner, name, original in ORIGINALS:
        assert getattr(owner, name) is not original
        monkeypatch.setattr(owner, name, original)
    assert all(map(torch.equal, spared, bytes_of(case)))
