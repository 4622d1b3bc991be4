"""A whole speculative step by replay inside torch.compile, and its ops as they are registered."""

from typing import Any

import pytest
import torch
from torch import Tensor

import flashstate
from flashstate.state.formats import bits_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BATCH, H, G, D, N, SLOTS, WINDOW, TOKENS = 4, 4, 2, 16, 32, 7, 8, 3


def make_pool(device: torch.device) -> flashstate.StatePool:
    sizes = {"slots": SLOTS, "layers": 2, "heads": H, "rows": D, "cols": N, "groups": G, "window": WINDOW}
    kind = {"dtype": torch.float16, "rounding": "stochastic", "ring_dtype": torch.float16, "seed": 5}
    pool = flashstate.StatePool.mamba2(**sizes, **kind, tokens=TOKENS, device=device)
    pool.acquire(BATCH, seed=7)
    return pool


def inputs_of(device: torch.device, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = {
        "x": (BATCH, TOKENS, H, D),
        "dt": (BATCH, TOKENS, H),
        "B": (BATCH, TOKENS, G, N),
        "C": (BATCH, TOKENS, G, N),
    }
    tensors = {name: torch.randn(size, generator=generator).half().to(device) for name, size in sizes.items()}
    return {**tensors, "A": -torch.rand(H, generator=generator).to(device)}


def tensors_of(pool: flashstate.StatePool) -> list[Tensor]:
    rings = [getattr(pool.ring(i), name) for i in range(2) for name in ("x", "B", "dt", "start", "count")]
    seed = pool.layer(0).seed
    assert seed is not None
    return [*(pool.layer(i).data for i in range(2)), *rings, seed]


@pytest.mark.parametrize(
    ("device", "backend"),
    [(CPU, "aot_eager"), pytest.param(CUDA, "inductor", marks=pytest.mark.gpu)],
    ids=["cpu", "gpu"],
)
def test_a_whole_speculative_step_is_one_graph(device: torch.device, backend: str) -> None:
    """Five steps, so that rings fold."""
    plain, compiled = make_pool(device), make_pool(device)
    slots = torch.tensor([3, 0, -1, 2], dtype=torch.int32, device=device)

    def step(pool: flashstate.StatePool, given: dict[str, Tensor], accepted: Tensor) -> Tensor:
        plan = pool.plan(slots, TOKENS)
        y = flashstate.mamba2_replay(pool.layer(0), pool.ring(0), **given, plan=plan)
        given = {**given, "x": y}
        y = flashstate.mamba2_replay(pool.layer(1), pool.ring(1), **given, plan=plan)
        pool.commit(plan, accepted)
        pool.advance(slots)
        return y

    graph = torch.compile(step, backend=backend, fullgraph=True)
    for i in range(5):
        given, accepted = inputs_of(device, i), torch.tensor([3, i % 4, 2, 2], device=device)
        assert torch.equal(graph(compiled, given, accepted), step(plain, given, accepted))
        for got, want in zip(tensors_of(compiled), tensors_of(plain), strict=True):
            assert torch.equal(bits_of(got), bits_of(want))


def arguments_of(pool: flashstate.StatePool) -> tuple[list[Any], list[Any]]:
    """Of a state and a ring, as registered ops take them."""
    state, ring = pool.layer(0), pool.ring(0)
    of_state = [state.data, state.scale, state.seed, state.rounding, state.rounds, state.stream]
    return of_state, [ring.x, ring.B, ring.dt, ring.start, ring.count, ring.window]


@pytest.mark.parametrize("planned", [False, True])
def test_the_registered_op_of_replay_declares_what_it_writes(planned: bool) -> None:
    pool, given = make_pool(CPU), inputs_of(CPU, 0)
    slots = torch.arange(BATCH)
    plan = pool.plan(slots, TOKENS)
    of_state, of_ring = arguments_of(pool)
    tokens = [given[name] for name in ("x", "dt", "A", "B", "C")]
    of_plan = [plan.rows, plan.parts] if planned else [None, None]
    out = torch.empty_like(given["x"])
    arguments = (
        *of_state, *of_ring, *tokens, None, None, None, True, *of_plan, slots, None, -1, "zero", TOKENS, True, out
    )  # fmt: skip
    torch.library.opcheck(torch.ops.flashstate.mamba2_replay.default, arguments)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_registered_op_that_folds_declares_what_it_writes(elsewhere: bool) -> None:
    pool = make_pool(CPU)
    of_state, of_ring = arguments_of(pool)
    into = (torch.zeros(SLOTS, H, D, N), None, "nearest") if elsewhere else (None, None, "nearest")
    arguments = (*of_state, *of_ring, -torch.rand(H), torch.arange(BATCH), None, -1, None, -1, *into)
    torch.library.opcheck(torch.ops.flashstate.mamba2_fold.default, arguments)
