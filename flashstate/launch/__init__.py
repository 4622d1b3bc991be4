"""How a kernel is started: which backend runs a call, and with which config."""

from flashstate.launch.backend import interpreted, kernel_target, uses_kernels
from flashstate.launch.config import (
    Config,
    Problem,
    access_width,
    choose,
    choose_with_reason,
    gpu_name,
    override,
    valid_configs,
)

__all__ = [
    "Config",
    "Problem",
    "access_width",
    "choose",
    "choose_with_reason",
    "gpu_name",
    "interpreted",
    "kernel_target",
    "override",
    "uses_kernels",
    "valid_configs",
]
