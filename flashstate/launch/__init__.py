"""How a kernel is started: where a call runs, with which config, and what an op's declaration says of it."""

from flashstate.launch.config import Problem, access_width, choose, choose_with_reason, override, valid_configs
from flashstate.launch.environment import Gpu, Machine, interpreted, machine_of, uses_kernels
from flashstate.launch.start import collecting
from flashstate.launch.table import Config

__all__ = [
    "Config", "Gpu", "Machine", "Problem", "access_width", "choose", "choose_with_reason", "collecting", "interpreted",
    "machine_of", "override", "uses_kernels", "valid_configs",
]  # fmt: skip
