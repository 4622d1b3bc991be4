"""mamba3_step: an independent model. The laws: test_laws.py."""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from flashstate.proof import Inputs, Mamba3Case, dtype, make_inputs, oracle, up_to_turns

CPU = torch.device("cpu")


@dataclass
class Head:
    """What one head of one row keeps: its state, and of the token before k of every rank, v, and the angles."""

    s: Tensor  # (D, N)
    k: Tensor  # (R, N)
    v: Tensor  # (D,)
    theta: Tensor


def turned(u: Tensor, theta: Tensor, case: Mamba3Case) -> Tensor:
    """Pairs of columns (R, N), each turned by its angle."""
    pair, pairs = torch.arange(len(theta)), case.pairing or ("interleaved" if case.rank == 1 else "halved")
    first, second = (2 * pair, 2 * pair + 1) if pairs == "interleaved" else (pair, pair + case.cols // 2)
    a, b, u = u[:, first], u[:, second], u.clone()
    u[:, first], u[:, second] = a * theta.cos() - b * theta.sin(), a * theta.sin() + b * theta.cos()
    return u


def one_token(head: Head, token: SimpleNamespace, case: Mamba3Case) -> Tensor:
    """The recurrence for one head, in float64: updates what it keeps, and returns the outputs of all ranks, or their
    sum."""
    trap = torch.sigmoid(token.trap) if case.trap_logit else token.trap
    head.theta = (head.theta + torch.tanh(token.angle) * token.dt * math.pi) % math.tau
    B, C = (turned(u, head.theta, case) for u in (token.B + token.bias_B, token.C + token.bias_C))
    B = B.to(dtype(case.kv)).double()
    alpha = torch.exp(token.A * token.dt)
    beta, gamma = (1 - trap) * token.dt * alpha, trap * token.dt
    head.s = alpha * head.s + (token.Wx * gamma * token.x).T @ B + (token.Wx * beta * head.v).T @ head.k
    head.k, head.v = B, token.x.to(dtype(case.kv)).double()
    y = C @ head.s.T + token.D * token.x * token.Wx
    y = y if token.z is None else y * torch.nn.functional.silu(token.z * token.Wz)
    return y if token.Wo is None else (y * token.Wo).sum(0, keepdim=True)


def token_of(case: Mamba3Case, inputs: Inputs, b: int, t: int, h: int) -> SimpleNamespace:
    """What token t of row b brings to head h, and what all tokens share: of every rank, ones and zeros where absent."""
    ones, zeros = torch.ones(case.rank, case.rows).double(), torch.zeros(case.rank, case.cols)
    absent = {"z": None, "angle": torch.zeros(0), "Wx": ones, "Wz": ones, "Wo": None, "D": torch.zeros(())}
    ranks, found = slice(None), dict[str, Tensor | None]({**absent, "bias_B": zeros, "bias_C": zeros})
    for name, tensor in inputs.arguments.items():
        if isinstance(tensor, Tensor):
            at: tuple[int | slice, ...] = (b, t, h) if tensor.shape[2:3] == (case.heads,) else (b, t)
            at = (b, t, ranks, h * case.groups // case.heads) if name in "BC" else at
            at = (h,) if name == "D" else (ranks, h) if name[0] in "Wb" else at
            found[name] = tensor[at].double()
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

    def require_close(got: Tensor, wanted: Tensor) -> None:
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-13)

    for b, slot in enumerate(inputs.slots.tolist()):
        for h in range(case.heads):
            theta = torch.zeros(0) if pool.angle is None else pool.angle[slot, h]
            head = Head(*(kept.double() for kept in (states[b, h], pool.k[slot, :, h], pool.v[slot, h], theta)))
            for t in range(case.tokens):
                outputs = one_token(head, token_of(case, inputs, b, t, h), case)
                require_close(y[b, t, ..., h, :].reshape(-1, case.rows), outputs)
            require_close(want.state[b, h], head.s)
            assert torch.equal(want.carried["k"].exact[b, :, h], head.k)
            assert torch.equal(want.carried["v"].exact[b, h], head.v)
            if case.angles:
                require_close(up_to_turns(want.carried["angle"].exact[b, h], head.theta), head.theta)


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
