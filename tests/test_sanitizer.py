"""Calls that compute-sanitizer watches start every kernel."""

import pytest
import torch
from compiling import machine_with

from flashstate.launch.environment import pretending
from tools.sanitize import every_kernel, launches_of, watched


@pytest.mark.compiled
def test_watched_calls_start_every_kernel_and_those_that_sum_over_warps_with_several() -> None:
    with pretending(machine_with(90)):
        launches = launches_of(watched(), torch.device("cpu"))
    assert {launch.kernel.__name__ for launch in launches} == every_kernel()
    shared = {launch.kernel.__name__ for launch in launches if launch.num_warps > 1}
    assert shared >= {f"{name}_kernel" for name in ("mamba2_replay", "mamba2_step", "mamba3_step", "rms_norm")}
