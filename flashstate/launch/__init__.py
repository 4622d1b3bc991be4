"""How a kernel is started: which backend runs a call, and with which config."""

from flashstate.launch.backend import interpreted, kernel_target, lets_next_start, uses_kernels
from flashstate.launch.config import (
    ChannelProblem,
    DeltaProblem,
    Gpu,
    HeadProblem,
    Problem,
    RankProblem,
    ReplayProblem,
    ReplayTokenProblem,
    TensorCoreProblem,
    access_width,
    choose,
    choose_with_reason,
    delta_kind,
    gpu_of,
    mamba3_kind,
    override,
    replay_kind,
    valid_configs,
)
from flashstate.launch.start import collecting, start
from flashstate.launch.table import Config

__all__ = [
    "ChannelProblem",
    "Config",
    "DeltaProblem",
    "Gpu",
    "HeadProblem",
    "Problem",
    "RankProblem",
    "ReplayProblem",
    "ReplayTokenProblem",
    "TensorCoreProblem",
    "access_width",
    "choose",
    "choose_with_reason",
    "collecting",
    "delta_kind",
    "gpu_of",
    "interpreted",
    "kernel_target",
    "lets_next_start",
    "mamba3_kind",
    "override",
    "replay_kind",
    "start",
    "uses_kernels",
    "valid_configs",
]
