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
SEVERAL = {"rows": 16, "cols": 32, "tokens": 3}
LAYERS: tuple[AnyCase, ...] = (
    Case(3, 4, 1, 64, 128, x="bfloat16", bc="bfloat16", slots=8),
    Case(2, 2, 1, **HALF, **SEVERAL, exact=False),
    DeltaCase(2, 64, 16, 128, 128, **DELTA),
    DeltaCase(1, 16, 16, 128, 128, **DELTA),
    DeltaCase(2, 2, 1, **DELTA, **SEVERAL),
    DeltaCase(2, 2, 1, **DELTA, **SEVERAL, exact=False),
    DeltaReplayCase(2, 16, 8, 128, 128, **DELTA, form="planned"),
    DeltaReplayCase(4, 16, 8, 128, 128, **DELTA, form="parted"),
)
LATE = 100_000  # nanoseconds by which a copy is late


def make_layer(case: AnyCase, device: torch.device) -> tuple[Callable[[bool], None], list[Tensor]]:
    """Return a function that runs two convolutions and the recurrence for 32 steps on the same slots, and all memory it
    writes. Each op reads the output of the kernel in front; in odd steps that is a late copy, so a read that does not
    wait finds NaN."""
    from device_functions import late_copy_kernel

    inputs, steps = make_inputs(case, device), 32
    names = ("x", "B", "C") if isinstance(case, Case) else ("q", "k", "v")
    sizes = [inputs.arguments[name][0].numel() for name in names]
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(inputs.main)

    windows, weight = [normal(8, 3, sum(sizes)).mT for _ in range(2)], normal(sum(sizes), 4)
    u, at = normal(steps, case.batch, sum(sizes)), {"slots": inputs.slots}
    between, convolved, *copies = (torch.full_like(u, torch.nan) for _ in range(4))
    y = inputs.main.new_full((steps, *inputs.main.shape), torch.nan)

    def passed_on(output: Tensor, copy: Tensor, t: int) -> Tensor:
        """Return the output of step t, in odd steps as a copy that is written late."""
        if t % 2 == 0:
            return output[t]
        late_copy_kernel[(1,)](output[t], copy[t], output[t].numel(), NANOSECONDS=LATE, BLOCK=1024)
        return copy[t]

    def run(early: bool) -> None:
        for t in range(steps):
            plan = inputs.plan() if isinstance(inputs, ReplayInputs) else None
            flashstate.conv1d_step(windows[0], u[t], weight, **at, out=between[t])  # the next one's x
            x = passed_on(between, copies[0], t)
            flashstate.conv1d_step(windows[1], x, weight, **at, out=convolved[t], early=early)
            brought = zip(names, passed_on(convolved, copies[1], t).split(sizes, 1), strict=True)
            views = {name: piece.unflatten(1, inputs.arguments[name].shape[1:]) for name, piece in brought}
            inputs.step(**views, out=y[t], early=early, **({} if plan is None else {"plan": plan}))
            if plan is not None:
                inputs.state.ring.commit(plan, torch.ones_like(inputs.slots))

    return run, [*windows, *slotted(inputs.state).values(), between, convolved, *copies, y]


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
