"""States whose heads are apart from each other: every third head of a wider pool. The law of pages has them too."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flashstate import State, StatePool, mamba2_fold
from flashstate.proof import AnyCase, Case, DeltaCase, Mamba3Case, ReplayCase, make_inputs
from flashstate.proof.laws import require
from flashstate.state.formats import bits_of

FILL = 77.0  # of heads that belong to others
DELTA = DeltaCase(1, 2, 1, 5, 8, slots=3, x="float16", qk="float16", format="bfloat16", rounding="stochastic")
CASES: dict[str, AnyCase] = {
    "Mamba-1": Case(1, 2, 1, 2, 8, mamba1=True, slots=3, format="float16"),
    "Mamba-2, several tokens": Case(1, 2, 1, 5, 7, tokens=2, slots=3, format="float16", rounding="stochastic"),
    "one token": DELTA,
    "several tokens": replace(DELTA, tokens=2),
    "at once": replace(DELTA, tokens=2, exact=False, transposed=True),
    "transposed": replace(DELTA, transposed=True),
    "Mamba-3": Mamba3Case(1, 2, 1, 5, 8, rank=2, slots=3, format="float16"),
    "replay, several tokens": ReplayCase(1, 2, 1, 5, 8, tokens=3, x="float16", window=4, slots=3, format="bfloat16"),
    "replay, one token": ReplayCase(1, 2, 1, 5, 8, window=4, slots=3),
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
def test_states_and_snapshots_with_heads_apart_hold_what_dense_ones_hold(case: AnyCase, device: torch.device) -> None:
    dense = make_inputs(case, device)
    apart = dense.fresh()
    apart.state = replace(apart.state, data=among_others(dense.state.data))
    assert apart.state.transposed == dense.state.transposed
    takes_snapshots = case.op.between_tokens and case.op.declared.takes_snapshots
    copies = torch.full((1, case.tokens or 1, *case.state_axes), FILL, device=device)
    taken = [{"snapshots": copies}, {"snapshots": among_others(copies)}] if takes_snapshots else [{}, {}]
    require.equal_bytes("output", apart.step(**taken[1]), dense.step(**taken[0]))
    require.equal_states("the pool", apart.state, dense.state)
    if takes_snapshots:
        require.equal_bytes("snapshots", taken[1]["snapshots"], copies)
        assert others_kept(taken[1]["snapshots"])
    assert others_kept(apart.state.data)


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
    inputs = make_inputs(CASES["replay, several tokens"], device)
    into = torch.full((3, 2, 5, 8), FILL, device=device)
    apart = among_others(into)
    for target in (into, apart):
        mamba2_fold(inputs.state.state, inputs.state.ring, inputs.arguments["A"], into=target)
    assert torch.equal(bits_of(apart), bits_of(into))
    assert others_kept(apart)
