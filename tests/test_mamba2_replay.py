"""mamba2_replay: a model token by token. The laws: test_laws.py; what all replays have: test_replays.py."""

import pytest
import torch

from flashstate.launch import choose, machine_of, override, valid_configs
from flashstate.proof import Recurrence, ReplayCase, make_inputs
from flashstate.proof.laws import require
from flashstate.reference.mamba2 import mamba2_token

MODELLED = [
    ReplayCase(4, 4, 2, 3, 5, tokens=3, window=8),
    ReplayCase(5, 2, 1, 2, 4, tokens=2, packed=True, D="row", dt_softplus=False, window=5, spare=2),
    ReplayCase(4, 2, 2, 3, 4, D=None, z=False, dt_bias=False, window=16, x="float16"),
]


@pytest.mark.parametrize("case", MODELLED, ids=str)
def test_reference_equals_the_recurrence_written_with_loops(case: ReplayCase) -> None:
    """A ring holds time steps as they count; its rows are tokens without an output."""
    inputs = case.make_inputs(torch.device("cpu"))
    pool, A, outputs = inputs.state, inputs.arguments["A"], []
    for b, slot in enumerate(inputs.slots.tolist()):
        s = pool.data[[slot]].double()
        for j in range(int(pool.count[slot])):
            row = (int(pool.start[slot]) + j) % pool.ring.length
            x, dt, B = (tensor[[slot], :, row] for tensor in (pool.x, pool.dt, pool.B))
            _, s = mamba2_token(s, x, dt, A, B, B, None, None, None, False)
        for t in range(inputs.row_lengths[b]):
            y, s = mamba2_token(s, **inputs.token(torch.tensor([b]), t))
            outputs.append(y)
    y, _ = Recurrence.of(inputs).step(inputs, torch.zeros_like(inputs.tokens))
    torch.testing.assert_close(y, torch.cat(outputs), rtol=1e-9, atol=1e-11)


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
