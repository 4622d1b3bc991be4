"""mamba3_step: an independent model. The laws: test_laws.py."""

import math
import struct
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashstate.proof import Inputs, Mamba3Case, make_inputs, oracle, up_to_turns

CPU = torch.device("cpu")


# The recurrence with loops

Row = list[float]
PACKED = {"float16": "e", "float32": "f"}


@dataclass
class Head:
    """What one head of one row keeps: its state, and of the token before k of every rank, v, and the angles."""

    s: list[Row]
    k: list[Row]
    v: Row
    theta: Row


def turned(u: Row, bias: Row, theta: Row, pairs: str) -> Row:
    u = [a + b for a, b in zip(u, bias, strict=True)]
    for i, angle in enumerate(theta):
        first, second = (2 * i, 2 * i + 1) if pairs == "interleaved" else (i, i + len(u) // 2)
        a, b = u[first], u[second]
        u[first] = a * math.cos(angle) - b * math.sin(angle)
        u[second] = a * math.sin(angle) + b * math.cos(angle)
    return u


def rounded(value: float, dtype: str) -> float:
    return struct.unpack(PACKED[dtype], struct.pack(PACKED[dtype], value))[0]


def one_token(head: Head, token: SimpleNamespace, case: Mamba3Case) -> list[Row]:
    """The recurrence for one head, in Python's floats: updates what it keeps, and returns the outputs of all ranks, or
    their sum."""
    trap = 1 / (1 + math.exp(-token.trap)) if case.trap_logit else token.trap
    head.theta = [
        (old + math.tanh(a) * token.dt * math.pi) % math.tau for old, a in zip(head.theta, token.angle, strict=True)
    ]
    pairs = case.pairing or ("interleaved" if case.rank == 1 else "halved")
    B, C = (
        [turned(u, bias, head.theta, pairs) for u, bias in zip(us, biases, strict=True)]
        for us, biases in ((token.B, token.bias_B), (token.C, token.bias_C))
    )
    B = [[rounded(value, case.kv) for value in row] for row in B]
    alpha = math.exp(token.A * token.dt)
    beta, gamma = (1 - trap) * token.dt * alpha, trap * token.dt
    outputs = [[0.0] * case.rows for _ in range(case.rank)]
    for d in range(case.rows):
        for n in range(case.cols):
            head.s[d][n] = alpha * head.s[d][n] + math.fsum(
                Wx[d] * (gamma * token.x[d] * now[n] + beta * head.v[d] * before[n])
                for Wx, now, before in zip(token.Wx, B, head.k, strict=True)
            )
        for r in range(case.rank):
            y = math.fsum(s * c for s, c in zip(head.s[d], C[r], strict=True)) + token.D * token.x[d] * token.Wx[r][d]
            if token.z is not None:
                gate = token.z[d] * token.Wz[r][d]
                y *= gate / (1 + math.exp(-gate))
            outputs[r][d] = y if token.Wo is None else y * token.Wo[r][d]
    head.k, head.v = B, [rounded(value, case.kv) for value in token.x]
    return outputs if token.Wo is None else [[math.fsum(ys) for ys in zip(*outputs, strict=True)]]


def token_of(case: Mamba3Case, inputs: Inputs, b: int, t: int, h: int) -> SimpleNamespace:
    """What token t of row b brings to head h, and what all tokens share: of every rank, ones and zeros where absent."""
    given = inputs.arguments
    g = h // (case.heads // case.groups)
    ones, zeros = torch.ones(case.rank, case.rows), torch.zeros(case.rank, case.cols)
    found = {name: given[name][b, t, h].tolist() for name in ("x", "A", "dt", "trap")}
    found |= {name: given[name][b, t, :, g].tolist() for name in ("B", "C")}
    found["z"] = given["z"][b, t, h].tolist() if case.z else None
    angle = given["angle"][b, t] if case.angles else torch.zeros(0)
    found["angle"] = (angle[h] if angle.dim() == 2 else angle).tolist()
    found |= {name: (ones if given[name] is None else given[name][:, h]).tolist() for name in ("Wx", "Wz")}
    found["Wo"] = given["Wo"][:, h].tolist() if case.Wo else None
    found["D"] = float(given["D"][h]) if case.D else 0.0
    found |= {name: (zeros if given[name] is None else given[name][:, h]).tolist() for name in ("bias_B", "bias_C")}
    return SimpleNamespace(**found)


MODELLED = [
    Mamba3Case(2, 2, 1, 3, 6, 1, angles=3, tokens=3, kv="float16", trap_logit=True),
    Mamba3Case(2, 2, 2, 3, 8, 1, angles=3, tokens=2, pairing="halved", angle_per_head=True, Wx=False, z=False),
    Mamba3Case(1, 4, 2, 3, 6, 3, angles=2, tokens=3, kv="float16", angle_per_head=True),
    Mamba3Case(2, 2, 1, 2, 8, 2, angles=4, tokens=2, pairing="interleaved", bias=False, Wz=False, Wo=False),
    Mamba3Case(2, 3, 1, 3, 5, 2, angles=0, tokens=2, kv="float16", Wo=False, D=False, trap_logit=True),
    Mamba3Case(1, 2, 1, 3, 5, 1, angles=0, tokens=2, Wo=False, z=False, format="int8"),
]


@pytest.mark.parametrize("case", MODELLED, ids=str)
def test_reference_equals_the_recurrence_written_with_loops(case: Mamba3Case) -> None:
    inputs = make_inputs(case, CPU)
    want, states, pool = oracle(inputs), inputs.states, inputs.state
    y = want.y.unflatten(0, (case.batch, case.tokens))

    def require_close(got: Tensor, wanted: Any) -> None:
        assert torch.allclose(got, torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-13)

    for b, slot in enumerate(inputs.slots.tolist()):
        for h in range(case.heads):
            theta = [] if pool.angle is None else pool.angle[slot, h].tolist()
            head = Head(states[b, h].tolist(), pool.k[slot, :, h].tolist(), pool.v[slot, h].tolist(), theta)
            for t in range(case.tokens):
                outputs = one_token(head, token_of(case, inputs, b, t, h), case)
                require_close(y[b, t, ..., h, :].reshape(-1, case.rows), outputs)
            require_close(want.state[b, h], head.s)
            assert want.carried["k"].exact[b, :, h].tolist() == head.k
            assert want.carried["v"].exact[b, h].tolist() == head.v
            if case.angles:
                exact = want.carried["angle"].exact[b, h]
                require_close(up_to_turns(exact, torch.tensor(head.theta, dtype=torch.float64)), head.theta)


def test_without_arguments_that_are_ones_a_call_gives_what_it_gives_with_them() -> None:
    inputs = make_inputs(Mamba3Case(2, 2, 1, 5, 12, 3, tokens=2), CPU)
    ones = torch.ones(3, 2, 5)
    for name in ("Wx", "Wz"):
        assert torch.equal(inputs.fresh().step(**{name: None}), inputs.fresh().step(**{name: ones}))
    of_ranks = inputs.fresh().step(Wo=None)
    assert of_ranks.shape == (2, 2, 3, 2, 5)
    assert torch.allclose(of_ranks.sum(2), inputs.fresh().step(Wo=ones), rtol=1e-6, atol=1e-6)


def test_columns_are_interleaved_for_rank_1_and_halved_for_others_unless_said_otherwise() -> None:
    for rank, default, other in ((1, "interleaved", "halved"), (2, "halved", "interleaved")):
        inputs = make_inputs(Mamba3Case(2, 2, 1, 3, 8, rank), CPU)
        want = inputs.fresh().step()
        assert torch.equal(inputs.fresh().step(pairing=default), want)
        assert not torch.equal(inputs.fresh().step(pairing=other), want)
