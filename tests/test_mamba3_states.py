"""mamba3_step on four states in slots: angles over many tokens, races, tokens and their slots."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from racing import busy, require_equal_launches
from torch import Tensor

from flashstate.launch import Config, override, valid_configs
from flashstate.proof import Mamba3Case, error_ratio, make_inputs, up_to_turns
from flashstate.proof.laws import require
from flashstate.proof.laws.require import rest_of
from flashstate.reference.mamba3 import FourStates, Parameters, mamba3_token, moved_on

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


TINY = Mamba3Case(5, 1, 1, 5, 12, 2, angles=3, x="float16", kv="float16", slots=37)
REAL = Mamba3Case(5, 48, 1, 64, 128, 4, angles=32, x="bfloat16", bc="bfloat16", kv="bfloat16", slots=37)


def test_without_rotary_angles_are_left_alone_and_change_nothing(device: torch.device) -> None:
    """Those of the slots that are written too."""
    inputs = make_inputs(replace(TINY, batch=2, slots=4, angles=0, tokens=2), device)
    angle = torch.arange(8.0, device=device).view(4, 1, 2)
    plain, angled = inputs.fresh(), replace(inputs.fresh(), state=replace(inputs.fresh().state, angle=angle.clone()))
    slots = inputs.at(write=rest_of(inputs))
    require.equal_bytes("output", angled.step(slots=slots), plain.step(slots=slots))
    require.equal_states("the pool", angled.state, plain.state)
    assert torch.equal(angled.state.angle, angle)


# Angles

STEPS, DRAWN = 4096, 256  # tokens, and of how many at a time numbers are drawn
MOST_WRONG = 4e-5  # radians, after all of them


Move = Callable[[Tensor, Tensor], Tensor]  # by angles and time steps of (batch, tokens); returns where angles are then


def turning(move: Move, theta: Tensor, tokens: int, most: float) -> float:
    """Move angles (batch, heads, S) on again and again, so many tokens at a time, whose time steps are up to `most`.
    The last row only turns backward and others only forward, and so turn often. Returns the largest difference from a
    sum in float64."""
    batch, heads, angles = theta.shape
    generator = torch.Generator(theta.device).manual_seed(5)
    total = theta.double()
    for _ in range(STEPS // DRAWN):
        angle = torch.randn(batch, DRAWN, angles, generator=generator, device=theta.device)
        angle[batch // 2 :].abs_()
        angle[-1].neg_()
        dt = most * torch.rand(batch, DRAWN, heads, generator=generator, device=theta.device)
        total += (torch.tanh(angle.double())[:, :, None] * dt.double()[..., None] * math.pi).sum(1)
        thetas = [move(*now).clone() for now in zip(angle.split(tokens, 1), dt.split(tokens, 1), strict=True)]
        theta = thetas[-1]
        assert float(min(map(torch.min, thetas))) >= 0
        assert float(max(map(torch.max, thetas))) < math.tau
    assert total[batch // 2 :].abs().min() > 40 * math.tau
    return float((up_to_turns(theta.double(), total) - total).abs().max())


TURNING = Mamba3Case(4, 2, 1, 1, 16, 1, angles=8, Wx=False, Wz=False, Wo=False, D=False, z=False, bias=False, slots=4)


def step_of(case: Mamba3Case, tokens: int, device: torch.device) -> tuple[Move, Tensor]:
    """Steps of one batch, and its angles."""
    inputs = make_inputs(replace(case, tokens=tokens), device)
    out, rows = torch.empty_like(inputs.main), torch.arange(case.batch, device=device)

    def step(angle: Tensor, dt: Tensor) -> Tensor:
        inputs.step(angle=angle, dt=dt, slots=rows, out=out)
        return inputs.state.angle

    return step, inputs.state.angle


def test_angles_stay_right_over_many_tokens() -> None:
    """By the line that moves them on, which a step has, bit for bit."""
    step, theta = step_of(TURNING, 1, CPU)
    theta = theta.clone()

    def moved(angle: Tensor, dt: Tensor) -> Tensor:
        nonlocal theta
        theta = moved_on(theta, angle, dt[:, 0])
        return theta

    for _ in range(64):
        angle, dt = torch.randn(4, 1, 8), torch.rand(4, 1, 2)
        assert torch.equal(step(angle, dt), moved(angle, dt))
    assert turning(moved, theta, 1, 1.0) <= MOST_WRONG


@pytest.mark.gpu
@pytest.mark.parametrize(("rank", "tokens"), [(1, 256), (4, 1)])
def test_compiled_kernel_keeps_angles_right_over_many_tokens(rank: int, tokens: int) -> None:
    case = replace(TURNING, heads=48, rows=16, cols=128, angles=64, rank=rank, Wo=rank > 1)
    assert turning(*step_of(case, tokens, CUDA), tokens, 0.1) <= MOST_WRONG


EDGES = [0.0, 1e-30, 1e-7, math.pi, 6.2831845, 6.283185]  # the last of float32 below a turn
TURNS = [0.0, 1e-30, -1e-30, 1e-9, -1e-9, 1e-7, -1e-7, 1e-3, -1e-3, 1.0, -1.0, 30.0, -30.0, 1e30]


@pytest.mark.parametrize("rank", [1, 2])
def test_angles_stay_in_a_turn_at_its_edges(rank: int, device: torch.device) -> None:
    """Whatever is added to what is next to the edges, and of many turns at once."""
    heads, angles = len(EDGES), len(TURNS)
    case = replace(TURNING, batch=2, heads=heads, cols=2 * angles, angles=angles, rank=rank, Wo=rank > 1)
    inputs = make_inputs(case, device)
    theta, angle, dt = inputs.state.angle, inputs.arguments["angle"], inputs.arguments["dt"]
    theta[:] = torch.tensor(EDGES, device=device)[:, None]
    angle[:] = torch.tensor(TURNS, device=device)
    dt[0], dt[1] = 1.0, 100.0
    exact = theta[inputs.slots.long()].double() + torch.tanh(angle.double())[:, None] * dt.double()[..., None] * math.pi
    inputs.step()
    got = theta[inputs.slots.long()]
    assert (got >= 0).all()
    assert (got.double() < math.tau).all()
    error = (up_to_turns(got.double(), exact) - exact).abs()
    largest = exact.abs().clamp(min=math.tau) + dt.double()[..., None] * math.pi  # tanh has an absolute accuracy
    assert (error <= 4 * torch.finfo(torch.float32).eps * largest).all()


# Races: every row of a head reads what is overwritten in the same launch


def in_tiles() -> dict[str, tuple[Mamba3Case, Config]]:
    """Cases that programs step tile by tile: the last one overwrites what all of them read."""
    found = {}
    for rank, angles, tokens in product((4, 1), (0, 32), (0, 3)):
        case = replace(REAL, batch=16, rank=rank, angles=angles, tokens=tokens, slots=64)
        halves = (config for config in valid_configs(case.problem) if 2 * config.block_rows == case.rows)
        shared = [config for config in halves if config.num_warps > 1]
        name = f"rank {rank}{' turned' if angles else ''}, {tokens or 1} tokens"
        found[name] = case, max(shared, key=lambda config: config.lanes)  # compiled soonest
    return found


RACES = in_tiles()


@pytest.mark.gpu
@pytest.mark.parametrize(("where", "every_token"), [*((name, False) for name in RACES), ("rank 4, 3 tokens", True)])
def test_launches_on_equal_inputs_give_equal_bytes_on_a_busy_gpu(where: str, every_token: bool) -> None:
    """Also where they store the state after every token: of the first in the slot that was read."""
    case, config = RACES[where]
    inputs = make_inputs(case, CUDA)
    slots = inputs.at()
    if every_token:
        others = rest_of(inputs)[: case.batch * (case.tokens - 1)]
        slots = inputs.at(write=torch.cat([inputs.slots[:, None], others.view(case.batch, -1).to(inputs.slots)], 1))
    with override(config):
        out = torch.empty_like(inputs.fresh().step())
        require_equal_launches(inputs, lambda run: [run.step(slots=slots, out=out.fill_(torch.nan))], busy)


# Tokens and their slots


def test_tokens_past_the_table_of_a_packed_row_are_not_stored(device: torch.device) -> None:
    """A row of three tokens where there is room for two; the entry behind is that of the next row, which has none."""
    inputs = make_inputs(replace(TINY, batch=3, tokens=0), device)
    inputs = replace(inputs, slots=inputs.slots[:2].copy_(torch.tensor([0, 1])), lengths=[3, 0])
    write = torch.tensor([[20, 21], [22, 23]], device=device)
    run = inputs.fresh()
    run.step(slots=run.at(write=write, max_len=2))
    untouched = torch.tensor([0, 1, 22, 23], device=device)
    require.equal_states("slots of no token", run.state, inputs.state, untouched)
    short = replace(inputs.fresh(), lengths=[2, 0])
    short.step(slots=short.at(write=write))
    require.equal_states("slots of two tokens", run.state, short.state, torch.tensor([20, 21], device=device))


# Many tokens

DECAY, CALLS = 1e-3, 16


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [1, 4])
def test_a_float32_state_is_as_good_after_thousands_of_tokens(rank: int) -> None:
    """Decays are so slow that errors of one sign would add up: tensor cores round towards zero."""
    case = Mamba3Case(1, 2, 1, 16, 16, rank, angles=0, x="bfloat16", bc="bfloat16", kv="bfloat16", tokens=256, slots=1)
    inputs = make_inputs(case, CPU)
    inputs.arguments["A"].fill_(-DECAY)
    inputs.arguments["dt"].fill_(1.0)
    shared = Parameters(*(inputs.arguments[name] for name in ("Wx", "Wz", "Wo", "D")), None, None, "none", False)
    names = ("x", "A", "dt", "trap", "B", "C")
    after = []
    for number in (torch.float64, torch.float32):
        memory = FourStates(inputs.states.to(number), inputs.state.k, inputs.state.v, None)
        for t in range(CALLS * case.tokens):
            token = {name: inputs.arguments[name][:, t % case.tokens] for name in names}
            _, memory = mamba3_token(memory, **token, z=None, angle=None, parameters=shared)
        after.append(memory.s)
    on_gpu = make_inputs(case, CUDA)
    given = {name: tensor.to(CUDA) for name, tensor in inputs.activations.items()}
    for _ in range(CALLS):
        on_gpu.step(**given)
    assert error_ratio(on_gpu.states.cpu(), *after) <= 1
