"""How a kernel is started: which backend runs a call, and with which config."""

from flashstate.launch.backend import interpreted, kernel_rounding, uses_kernels
from flashstate.launch.config import Config, Problem, choose, choose_with_reason, override

__all__ = [
    "Config",
    "Problem",
    "choose",
    "choose_with_reason",
    "interpreted",
    "kernel_rounding",
    "override",
    "uses_kernels",
]
