"""mamba2_replay: orders of sums. The laws: test_laws.py; what all replays have: test_replays.py; peers have a model of
it token by token."""

import pytest
import torch

from flashstate.launch import choose, machine_of, override, valid_configs
from flashstate.proof import ReplayCase, make_inputs
from flashstate.proof.laws import require


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [64, 128])
def test_a_program_with_more_threads_than_a_row_has_columns_sums_the_window_in_the_same_order(cols: int) -> None:
    case, cuda = ReplayCase(4, 4, 1, 64, cols, bc="bfloat16"), torch.device("cuda")
    problem, first = case.problem, make_inputs(case, cuda)
    whole_rows = (config for config in valid_configs(problem) if problem.chunk(config.lanes) == cols)
    wide = next(config for config in whole_rows if config.num_warps * problem.warp > cols)
    again = first.fresh()
    with override(choose(problem, machine_of(cuda).gpu)):
        y_first = first.step()
    with override(wide):
        require.alike(f" with {wide}", again, again.step(), first, y_first)
