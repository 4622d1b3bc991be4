"""What the tests spare Triton's interpreter changes nothing."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flashstate.proof import (
    AnyCase,
    Case,
    ConvCase,
    DeltaCase,
    Mamba3Case,
    ReplayCase,
    interpreted,
    make_inputs,
    slotted,
)
from flashstate.state.formats import bits_of

CPU = torch.device("cpu")
SEVERAL = Case(2, 2, 1, 5, 20, format="int8", rounding="stochastic", tokens=2)
CASES: list[AnyCase] = [
    SEVERAL,
    replace(SEVERAL, format="float8_e4m3fn", mamba1=True, tokens=0),
    DeltaCase(2, 1, 1, 5, 20, format="float16", rounding="stochastic", transposed=True, tokens=2),
    DeltaCase(2, 1, 1, 5, 20, format="int16", exact=False, tokens=2, x="float16", qk="float16"),
    Mamba3Case(2, 1, 1, 5, 12, 2, 3, format="bfloat16", kv="float16"),
    ConvCase(2, 5, 3, tokens=2),
    ReplayCase(2, 1, 1, 5, 20, window=4, tokens=2, format="float16", rounding="stochastic"),
]


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
