"""One seed for all slots of a state: the bits of a slot are drawn from it and the slot's number."""

from dataclasses import replace
from typing import Any

import implementations
import pytest
import torch
from calls import DELTA, MAMBA2, MAMBA3, REPLAY, shaped
from torch import Tensor

import flashstate
from flashstate import State
from flashstate.ops.states import write_states
from flashstate.proof import AnyCase, make_inputs
from flashstate.state.formats import bits_of
from flashstate.state.rounding import SEED_OF_A_SLOT, SEED_STEP

SEED = -7
SMALL = {"heads": 2, "groups": 1}
CASES = {
    "mamba2_step": replace(shaped(MAMBA2, **SMALL), format="int8", rounding="stochastic", tokens=2),
    "gated_delta_step": replace(shaped(DELTA, **SMALL), format="float8_e4m3fn", rounding="stochastic", tokens=3),
    "mamba3_step": replace(shaped(MAMBA3, **SMALL), format="bfloat16", rounding="stochastic"),
    "mamba2_replay": replace(shaped(REPLAY, **SMALL), format="float16", rounding="stochastic", tokens=3),
}
every_device = pytest.mark.parametrize("device", implementations.ALL, indirect=True)


def of_every_slot(slots: int, device: torch.device) -> Tensor:
    """The seeds of slots that share SEED, by whole numbers of Python."""
    words = [(SEED + slot * SEED_OF_A_SLOT) % (1 << 64) for slot in range(slots)]
    return torch.tensor([word - (word >> 63 << 64) for word in words], device=device)


def require_equal_pools(one: Any, other: Any) -> None:
    assert torch.equal(bits_of(other.data), bits_of(one.data))
    assert one.scale is None or torch.equal(other.scale, one.scale)


@every_device
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_one_seed_gives_the_bytes_of_those_that_are_made_of_it(case: AnyCase, device: torch.device) -> None:
    inputs, pools = make_inputs(case, device), []
    for seed in (of_every_slot(len(inputs.state.data), device), torch.tensor(SEED, device=device)):
        run = inputs.fresh()
        run.state = replace(run.state, seed=seed)
        run.step()
        pools.append(run.state)
    require_equal_pools(*pools)
    assert not torch.equal(bits_of(pools[0].data), bits_of(inputs.state.data))


@every_device
def test_folded_and_written_states_draw_from_it_too(device: torch.device) -> None:
    inputs, folded, written = make_inputs(CASES["mamba2_replay"], device), [], []
    slots, values = torch.tensor([5, 2], device=device), torch.linspace(0.1, 1, 2048, device=device).view(2, 2, 16, 32)
    for seed in (of_every_slot(len(inputs.state.data), device), torch.tensor([SEED], device=device)):
        run = inputs.fresh()
        state = replace(run.state.state, seed=seed)
        flashstate.mamba2_fold(state, run.state.ring, inputs.arguments["A"], slots=inputs.slots)
        folded.append(state)
        state = replace(inputs.fresh().state.state, seed=seed)
        write_states(state, slots, values)
        written.append(state)
    require_equal_pools(*folded)
    require_equal_pools(*written)


def test_it_moves_on_once_whatever_slots_are_read() -> None:
    state = State(torch.zeros(4, 1, 1, 8, dtype=torch.float16), rounding="stochastic", seed=torch.tensor(SEED))
    assert (state.shares_seed, state.bytes_per_slot) == (True, 16)
    for slots in (None, torch.tensor([2, 3, -1])):
        state.advance(slots)
    assert int(state.seed) == SEED + 2 * SEED_STEP + (1 << 64)
    assert not State(state.data[:1], rounding="stochastic", seed=torch.tensor([3])).shares_seed
