"""Kernels that start before the one in front of them has ended give the bytes of those that wait for it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import flashstate
from flashstate.proof import AnyCase, Case, DeltaCase, DeltaReplayCase, ReplayInputs, make_inputs, slotted
from flashstate.state.formats import bits_of

HALF = {"x": "bfloat16", "format": "bfloat16"}
DELTA = {**HALF, "qk": "bfloat16", "gates": "bfloat16", "slots": 8}
LAYERS: dict[AnyCase, tuple[str, ...]] = {  # and what convolutions bring
    Case(3, 4, 1, 64, 128, x="bfloat16", bc="bfloat16", slots=8): ("x", "B", "C"),
    DeltaCase(2, 64, 16, 128, 128, **DELTA): ("q", "k", "v"),
    DeltaCase(1, 16, 16, 128, 128, **DELTA): ("q", "k", "v"),
    DeltaReplayCase(2, 16, 8, 128, 128, **DELTA, form="planned"): ("q", "k", "v"),
    DeltaReplayCase(4, 16, 8, 128, 128, **DELTA, form="parted"): ("q", "k", "v"),
}


def make_layer(case: AnyCase, device: torch.device) -> tuple[Callable[[bool], None], list[Tensor]]:
    """Two convolutions and the recurrence, each on what the kernel in front of it writes, step after step on the same
    slots; and all memory they write, which shows what was read too early."""
    inputs, names, steps = make_inputs(case, device), LAYERS[case], 32
    sizes = [inputs.arguments[name][0].numel() for name in names]
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(inputs.main)

    windows, weight = [normal(8, 3, sum(sizes)).mT for _ in range(2)], normal(sum(sizes), 4)
    u, at = normal(steps, case.batch, sum(sizes)), {"slots": inputs.slots}
    between, convolved = (torch.full_like(u, torch.nan) for _ in range(2))
    y = inputs.main.new_full((steps, *inputs.main.shape), torch.nan)

    def run(early: bool) -> None:
        for t in range(steps):
            plan = inputs.plan() if isinstance(inputs, ReplayInputs) else None
            flashstate.conv1d_step(windows[0], u[t], weight, **at, out=between[t])  # the next one's x
            flashstate.conv1d_step(windows[1], between[t], weight, **at, out=convolved[t], early=early)
            brought = zip(names, convolved[t].split(sizes, 1), strict=True)
            views = {name: piece.unflatten(1, inputs.arguments[name].shape[1:]) for name, piece in brought}
            inputs.step(**views, out=y[t], early=early, **({} if plan is None else {"plan": plan}))
            if plan is not None:
                inputs.state.ring.commit(plan, torch.ones_like(inputs.slots))

    return run, [*windows, *slotted(inputs.state).values(), between, convolved, y]


def in_a_graph(run: Callable[[bool], None], early: bool, memory: list[Tensor]) -> None:
    before = [tensor.clone() for tensor in memory]
    run(early)  # compiles
    for tensor, was in zip(memory, before, strict=True):
        tensor.copy_(was)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(early)
    graph.replay()


@pytest.mark.gpu
@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_starting_early_changes_no_byte(case: AnyCase) -> None:
    for attempt in range(5):
        results = []
        for early in (False, True):
            run, memory = make_layer(case, torch.device("cuda"))
            in_a_graph(run, early, memory) if attempt % 2 else run(early)
            results.append(memory)
        assert all(torch.equal(bits_of(off), bits_of(on)) for off, on in zip(*results, strict=True))
