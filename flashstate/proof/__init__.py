"""The tables of cases, and what tests, `flashstate check` and the benchmark need of each: inputs, bytes, budgets."""

from flashstate.launch import interpreted
from flashstate.proof.cases.conv1d import ODD_CONV_CASES, ODD_CONV_GROUPS, QUICK_CONV_CASES, REAL_CONV_CASES, ConvCase
from flashstate.proof.cases.gated_delta import (
    ODD_DELTA_CASES,
    ODD_DELTA_SHAPES,
    QUICK_DELTA_CASES,
    REAL_DELTA_CASES,
    DeltaCase,
)
from flashstate.proof.cases.mamba2 import ODD_CASES, ODD_SHAPES, QUICK_CASES, REAL_CASES, Case
from flashstate.proof.cases.mamba2_replay import (
    ODD_REPLAY_CASES,
    ODD_REPLAY_SHAPES,
    QUICK_REPLAY_CASES,
    REAL_REPLAY_CASES,
    Recurrence,
    ReplayCase,
    ReplayInputs,
    ReplayPool,
)
from flashstate.proof.cases.mamba3 import (
    ODD_MAMBA3_CASES,
    ODD_MAMBA3_SHAPES,
    QUICK_MAMBA3_CASES,
    REAL_MAMBA3_CASES,
    Mamba3Case,
    with_rotary,
)
from flashstate.proof.inputs import AnyCase, Inputs, Op, Pool, dtype, make_inputs, slotted
from flashstate.proof.oracle import BUDGET, Expected, carried_errors, encoded, error_ratio, oracle, up_to_turns

__all__ = [
    "BUDGET",
    "ODD_CASES",
    "ODD_CONV_CASES",
    "ODD_CONV_GROUPS",
    "ODD_DELTA_CASES",
    "ODD_DELTA_SHAPES",
    "ODD_MAMBA3_CASES",
    "ODD_MAMBA3_SHAPES",
    "ODD_REPLAY_CASES",
    "ODD_REPLAY_SHAPES",
    "ODD_SHAPES",
    "QUICK_CASES",
    "QUICK_CONV_CASES",
    "QUICK_DELTA_CASES",
    "QUICK_MAMBA3_CASES",
    "QUICK_REPLAY_CASES",
    "REAL_CASES",
    "REAL_CONV_CASES",
    "REAL_DELTA_CASES",
    "REAL_MAMBA3_CASES",
    "REAL_REPLAY_CASES",
    "AnyCase",
    "Case",
    "ConvCase",
    "DeltaCase",
    "Expected",
    "Inputs",
    "Mamba3Case",
    "Op",
    "Pool",
    "Recurrence",
    "ReplayCase",
    "ReplayInputs",
    "ReplayPool",
    "carried_errors",
    "dtype",
    "encoded",
    "error_ratio",
    "interpreted",
    "make_inputs",
    "oracle",
    "slotted",
    "up_to_turns",
    "with_rotary",
]
