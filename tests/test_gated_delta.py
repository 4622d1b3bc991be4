"""gated_delta_step: an independent model. The laws: test_laws.py."""

import math

import pytest
import torch

from flashstate.proof import DeltaCase, make_inputs
from flashstate.reference.gated_delta import EPSILON, gated_delta_token

CPU = torch.device("cpu")


Row = list[float]


def dot(x: Row, y: Row) -> float:
    return math.fsum(a * b for a, b in zip(x, y, strict=True))


def unit(x: Row) -> Row:
    return [value / math.sqrt(dot(x, x) + EPSILON) for value in x]


def one_row(s: Row, q: Row, k: Row, v: float, alpha: Row, beta: float, scale: float) -> tuple[float, Row]:
    """The recurrence for one row of the state, in Python's floats: the output, and the row after it."""
    q, k = [value * scale for value in unit(q)], unit(k)
    s = [value * a for value, a in zip(s, alpha, strict=True)]
    u = beta * (v - dot(s, k))
    s = [value + u * other for value, other in zip(s, k, strict=True)]
    return dot(s, q), s


def decay(a: float, A_log: float, dt_bias: float) -> float:
    a += dt_bias
    return math.exp(-math.exp(A_log) * (a if a > 20.0 else math.log1p(math.exp(a))))


@pytest.mark.parametrize("per_channel", [False, True])
def test_reference_equals_the_recurrence_written_with_loops(per_channel: bool) -> None:
    case = DeltaCase(2, 4, 2, 3, 5, per_channel=per_channel)
    inputs = make_inputs(case, CPU)
    options = {name: inputs.arguments[name] for name in ("A_log", "dt_bias", "b_logit", "scale", "qk_l2norm")}
    s, t = inputs.states.double(), {name: tensor.double() for name, tensor in inputs.activations.items()}
    t["a"].view(-1)[:3] = torch.tensor([30.0, -40.0, 20.5])
    o, after = gated_delta_token(s, **t, **options)
    A_log, bias = options["A_log"].double(), options["dt_bias"].double().reshape(4, -1)
    for b in range(case.batch):
        for h in range(case.heads):
            a = t["a"][b, h].expand(5).tolist()
            alpha = [decay(x, float(A_log[h]), y) for x, y in zip(a, bias[h].expand(5).tolist(), strict=True)]
            beta = 1 / (1 + math.exp(-float(t["b"][b, h])))
            q, k = (t[name][b, h // 2].tolist() for name in ("q", "k"))
            for d in range(case.rows):
                out, row = one_row(s[b, h, d].tolist(), q, k, float(t["v"][b, h, d]), alpha, beta, 5**-0.5)
                assert torch.allclose(after[b, h, d], torch.tensor(row, dtype=torch.float64), rtol=1e-12, atol=1e-14)
                assert math.isclose(float(o[b, h, d]), out, rel_tol=1e-12, abs_tol=1e-14)


def test_a_bias_per_head_is_added_to_every_channel_and_the_default_scale_is_one_over_the_root_of_k() -> None:
    inputs = make_inputs(DeltaCase(2, 4, 2, 5, 16, per_channel=True, tokens=2), CPU)
    bias = inputs.arguments["dt_bias"][:, 0].contiguous()
    want, per_head = inputs.fresh(), inputs.fresh()
    y = want.step(dt_bias=bias[:, None].repeat(1, 16))
    assert torch.equal(per_head.step(dt_bias=bias, scale=0.25), y)
    assert torch.equal(per_head.state.data, want.state.data)
    assert torch.equal(inputs.fresh().step(dt_bias=bias, scale=1), 4 * y)


def test_b_is_a_logit_by_default_where_a_log_is_given() -> None:
    for raw in (True, False):
        inputs = make_inputs(DeltaCase(2, 4, 2, 5, 16, raw=raw), CPU)
        y, other = (inputs.fresh().step(b_logit=logit) for logit in (raw, not raw))
        assert torch.equal(inputs.fresh().step(b_logit=None), y)
        assert not torch.equal(y, other)
