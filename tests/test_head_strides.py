"""Snapshots, pools and folds with heads apart: every third of a wider pool. The law of pages has states of steps."""

import pytest
import torch
from torch import Tensor

from flashstate import State, StatePool, mamba2_fold
from flashstate.proof import AnyCase, Case, DeltaCase, ReplayCase, make_inputs
from flashstate.proof.laws import require
from flashstate.state.formats import bits_of

FILL = 77.0  # of heads that belong to others
CASES: dict[str, AnyCase] = {  # that store states after tokens
    "Mamba-2": Case(1, 2, 1, 5, 7, tokens=2, slots=3, format="float16", rounding="stochastic"),
    "delta rule, transposed": DeltaCase(1, 2, 1, 5, 8, slots=3, tokens=2, transposed=True),
}


def among_others(states: Tensor) -> Tensor:
    """The same states, as every third head of a wider pool."""
    transposed = states.stride(-1) != 1
    states = states.mT if transposed else states
    wide = states.repeat_interleave(3, -3).fill_(FILL)
    mine = wide[..., 1::3, :, :]
    mine.copy_(states)
    return mine.mT if transposed else mine


def others_kept(mine: Tensor) -> bool:
    """Whether the heads in between are as they were."""
    memory = torch.empty(0, dtype=mine.dtype, device=mine.device).set_(mine.untyped_storage())
    mine.fill_(FILL)
    return bool((memory == FILL).all())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_snapshots_with_heads_apart_hold_what_dense_ones_hold(case: AnyCase, device: torch.device) -> None:
    inputs, copies = make_inputs(case, device), torch.full((1, 2, *case.state_axes), FILL, device=device)
    apart = among_others(copies)
    for snapshots in (copies, apart):
        inputs.fresh().step(snapshots=snapshots)
    require.equal_bytes("snapshots", apart, copies)
    assert others_kept(apart)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_pool_of_heads_that_are_apart_stores_clears_and_copies_its_own(
    transposed: bool, device: torch.device
) -> None:
    data = torch.full((3, 2, 5, 8), FILL, dtype=torch.float16, device=device)
    data = among_others(data.mT.contiguous().mT if transposed else data)
    pool = StatePool.wrap([State(data)])  # which holds all slots
    states = torch.randn(1, 2, 5, 8, device=device)
    pool.write(0, [0], states)
    pool.copy([0], [1])
    assert torch.equal(pool.read(0, [1]), states.half().float())
    pool.reset([0])
    assert not data[0].any()
    assert others_kept(data)


def test_rings_are_folded_into_heads_that_are_apart(device: torch.device) -> None:
    replay = ReplayCase(1, 2, 1, 5, 8, tokens=3, x="float16", window=4, slots=3, format="bfloat16")
    inputs = make_inputs(replay, device)
    into = torch.full((3, 2, 5, 8), FILL, device=device)
    apart = among_others(into)
    for target in (into, apart):
        mamba2_fold(inputs.state.state, inputs.state.ring, inputs.arguments["A"], into=target)
    assert torch.equal(bits_of(apart), bits_of(into))
    assert others_kept(apart)
