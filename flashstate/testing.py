"""What documents name of the proof: cases, inputs, budgets and the interpreter. All else is in flashstate.proof."""

from flashstate.launch import interpreted
from flashstate.proof import (
    AnyCase,
    Case,
    ConvCase,
    DeltaCase,
    DeltaReplayCase,
    Inputs,
    Mamba3Case,
    ReplayCase,
    make_inputs,
)
from flashstate.proof.oracle import BUDGET, Expected, error_ratio, oracle

__all__ = [
    "BUDGET", "AnyCase", "Case", "ConvCase", "DeltaCase", "DeltaReplayCase", "Expected", "Inputs", "Mamba3Case",
    "ReplayCase", "error_ratio", "interpreted", "make_inputs", "oracle",
]  # fmt: skip
