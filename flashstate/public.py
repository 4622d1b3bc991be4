"""The public names, which `import flashstate` loads when the first of them is asked for."""

from flashstate.ops.conv1d import conv1d_step
from flashstate.ops.debug import debug
from flashstate.ops.gated_delta import gated_delta_step
from flashstate.ops.gated_delta_fold import gated_delta_fold
from flashstate.ops.gated_delta_replay import gated_delta_replay
from flashstate.ops.mamba2 import mamba2_step
from flashstate.ops.mamba2_fold import mamba2_fold
from flashstate.ops.mamba2_replay import mamba2_replay
from flashstate.ops.mamba3 import mamba3_step
from flashstate.pool.pool import StatePool
from flashstate.state.faults import check_faults
from flashstate.state.mamba3 import Mamba3State, Rotary
from flashstate.state.ring import DeltaRing, Plan, Ring
from flashstate.state.slots import Slots
from flashstate.state.state import State
from flashstate.warming import warmup

__all__ = [
    "DeltaRing",
    "Mamba3State",
    "Plan",
    "Ring",
    "Rotary",
    "Slots",
    "State",
    "StatePool",
    "check_faults",
    "conv1d_step",
    "debug",
    "gated_delta_fold",
    "gated_delta_replay",
    "gated_delta_step",
    "mamba2_fold",
    "mamba2_replay",
    "mamba2_step",
    "mamba3_step",
    "warmup",
]
