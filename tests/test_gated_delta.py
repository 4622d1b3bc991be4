"""gated_delta_step: an independent model. The laws: test_laws.py."""

from itertools import product

import pytest
import torch

from flashstate.proof import DeltaCase, make_inputs
from flashstate.reference.gated_delta import EPSILON, gated_delta_token

CPU = torch.device("cpu")


@pytest.mark.parametrize("per_channel", [False, True])
def test_reference_equals_the_recurrence_written_for_one_head(per_channel: bool) -> None:
    case = DeltaCase(2, 4, 2, 3, 5, per_channel=per_channel)
    inputs = make_inputs(case, CPU)
    options = {name: inputs.arguments[name] for name in ("A_log", "dt_bias", "b_logit", "scale", "qk_l2norm")}
    s, given = inputs.states.double(), {name: tensor.double() for name, tensor in inputs.activations.items()}
    given["a"].view(-1)[:3] = torch.tensor([30.0, -40.0, 20.5])
    o, after = gated_delta_token(s, **given, **options)
    for b, h in product(range(case.batch), range(case.heads)):
        q, k = (u / (u @ u + EPSILON).sqrt() for u in (given["q"][b, h // 2], given["k"][b, h // 2]))
        a = given["a"][b, h] + options["dt_bias"][h].double()
        alpha = torch.exp(-options["A_log"][h].double().exp() * torch.where(a > 20, a, torch.log1p(a.exp())))
        state = s[b, h] * alpha  # (V, K)
        u = torch.sigmoid(given["b"][b, h]) * (given["v"][b, h] - state @ k)
        state = state + u[:, None] * k
        torch.testing.assert_close(after[b, h], state, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(o[b, h], state @ q * 5**-0.5, rtol=1e-12, atol=1e-14)


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
