"""mamba2_replay: an independent model. The laws: test_laws.py; what all replays have: test_replays.py."""

import math

import pytest
import torch

from flashstate.launch import choose, machine_of, override, valid_configs
from flashstate.proof import Recurrence, ReplayCase, make_inputs
from flashstate.proof.laws import require

CPU = torch.device("cpu")


# The recurrence with loops


def one_row(s: list[float], tokens: list[tuple[float, float, list[float]]], A: float) -> list[float]:
    """A row of a state after tokens, each with its x, its time step and its B, in Python's floats."""
    for x, dt, B in tokens:
        s = [value * math.exp(dt * A) + dt * x * b for value, b in zip(s, B, strict=True)]
    return s


MODELLED = [
    ReplayCase(4, 4, 2, 3, 5, tokens=3, window=8),
    ReplayCase(5, 2, 1, 2, 4, tokens=2, packed=True, D="row", dt_softplus=False, window=5, spare=2),
    ReplayCase(4, 2, 2, 3, 4, D=None, z=False, dt_bias=False, window=16, x="float16"),
]


@pytest.mark.parametrize("case", MODELLED, ids=str)
def test_reference_equals_the_recurrence_written_with_loops(case: ReplayCase) -> None:
    inputs = case.make_inputs(CPU)
    model, pool, given = Recurrence.of(inputs), inputs.state, inputs.arguments
    y = iter(model.step(inputs, torch.zeros_like(inputs.tokens))[0])
    for b, slot in enumerate(inputs.slots.tolist()):
        rows = [(int(pool.start[slot]) + j) % pool.ring.length for j in range(int(pool.count[slot]))]
        tokens = [inputs.token(torch.tensor([b]), t) for t in range(inputs.row_lengths[b])]
        for token in tokens:
            out = next(y)
            for h in range(case.heads):
                g, A = h // (case.heads // case.groups), float(given["A"][h])
                bias = float(given["dt_bias"][h]) if case.dt_bias else 0.0
                sizes = [float(each["dt"][0, h]) + bias for each in tokens]
                sizes = [math.log1p(math.exp(dt)) for dt in sizes] if case.dt_softplus else sizes
                until = next(i for i, each in enumerate(tokens) if each is token) + 1
                for d in range(case.rows):
                    brought = [
                        (float(pool.x[slot, h, r, d]), float(pool.dt[slot, h, r]), pool.B[slot, g, r].tolist())
                        for r in rows
                    ]
                    brought += [
                        (float(each["x"][0, h, d]), dt, each["B"][0, g].tolist())
                        for each, dt in zip(tokens[:until], sizes[:until], strict=True)
                    ]
                    s = one_row(pool.data[slot, h, d].tolist(), brought, A)
                    want = math.fsum(value * c for value, c in zip(s, token["C"][0, g].tolist(), strict=True))
                    if case.D is not None:
                        skip = given["D"].reshape(case.heads, -1).expand(-1, case.rows)
                        want += float(skip[h, d]) * float(token["x"][0, h, d])
                    if case.z:
                        z = float(token["z"][0, h, d])
                        want *= z / (1 + math.exp(-z))
                    assert math.isclose(float(out[h, d]), want, rel_tol=1e-9, abs_tol=1e-11)
    assert next(y, None) is None


# The order of sums


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
