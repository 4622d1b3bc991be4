"""What documents name of the proof: cases, inputs, budgets and the interpreter. All else is in flashstate.proof."""

from flashstate.launch import interpreted
from flashstate.proof import (
    BUDGET,
    AnyCase,
    Case,
    ConvCase,
    DeltaCase,
    Expected,
    Inputs,
    Mamba3Case,
    ReplayCase,
    error_ratio,
    make_inputs,
    oracle,
)

__all__ = [
    "BUDGET", "AnyCase", "Case", "ConvCase", "DeltaCase", "Expected", "Inputs", "Mamba3Case", "ReplayCase",
    "error_ratio", "interpreted", "make_inputs", "oracle",
]  # fmt: skip
