"""Cases, and what tests, `flashstate check` and the benchmark need of each: inputs, bytes, budgets."""

from flashstate.launch import interpreted
from flashstate.proof import cases  # fills CASES
from flashstate.proof.case import CASES, AnyCase, Cases, StateCase, make_inputs
from flashstate.proof.cases.conv1d import ConvCase
from flashstate.proof.cases.gated_delta import DeltaCase
from flashstate.proof.cases.gated_delta_replay import DeltaReplayCase
from flashstate.proof.cases.mamba2 import Case
from flashstate.proof.cases.mamba2_replay import ReplayCase
from flashstate.proof.cases.mamba3 import Mamba3Case
from flashstate.proof.inputs import Inputs, Pool, ProvenOp, dtype, slotted
from flashstate.proof.oracle import BUDGET, Expected, carried_errors, encoded, error_ratio, oracle, up_to_turns
from flashstate.proof.replaying import AnyReplayCase, Recurrence, ReplayInputs, ReplayPool

__all__ = [
    "BUDGET", "CASES", "AnyCase", "AnyReplayCase", "Case", "Cases", "ConvCase", "DeltaCase", "DeltaReplayCase",
    "Expected", "Inputs", "Mamba3Case", "Pool", "ProvenOp", "Recurrence", "ReplayCase", "ReplayInputs", "ReplayPool",
    "StateCase", "carried_errors", "cases", "dtype", "encoded", "error_ratio", "interpreted", "make_inputs", "oracle",
    "slotted", "up_to_turns",
]  # fmt: skip
