"""Laws of random bits, CUDA graphs and streams."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from flashstate.proof import AnyCase, Inputs
from flashstate.proof.inputs import AnyInputs
from flashstate.proof.laws import require
from flashstate.proof.laws.registry import law
from flashstate.proof.laws.require import rest_of, restore
from flashstate.state.formats import bits_of
from flashstate.state.rounding import SEED_STEP

ENOUGH_VALUES = 32  # of a head, so that they do not all happen to be rounded the same way twice


@law(
    "stochastic rounding draws other bits after advance and in another stream, and advance moves only its slots",
    includes=lambda case: case.rounding == "stochastic" and math.prod(case.state_axes[1:]) >= ENOUGH_VALUES,
)
def seeds_decide(case: AnyCase, device: torch.device, inputs: Inputs) -> None:
    base, stepped, streamed = inputs.fresh(), inputs.fresh(), inputs.fresh()
    streamed.state = replace(streamed.state, stream=streamed.state.stream + 1)
    stepped.state.advance(stepped.slots)
    moved = stepped.state.seed != inputs.state.seed
    only = bool(moved[inputs.slots.long()].all()) and not bool(moved[rest_of(inputs)].any())
    require.that(only, "advance moved the wrong seeds")
    for run in (base, stepped, streamed):
        run.step()
    stored = inputs.slots.long()[inputs.stores]
    for name, other in (("after advance", stepped), ("in another stream", streamed)):
        same = (bits_of(other.state.data) == bits_of(base.state.data))[stored].flatten(1).all(1)
        require.that(not bool(same.any()), f"the bytes {name} are the same")


@law("a CUDA graph draws fresh random bits at every replay", needs="cuda")
def graph_replays_draw_fresh_bits(case: AnyCase, device: torch.device, inputs: Inputs) -> None:
    before, slots = inputs.fresh(), inputs.at()

    def one_step(run: Inputs, out: Tensor) -> None:
        run.step(slots=slots, out=out)
        if run.state.seed is not None:
            run.state.advance(slots)

    def require_moved(steps: int) -> None:
        if inputs.state.seed is not None:
            moved = (inputs.state.seed - before.state.seed)[inputs.slots.long()[inputs.tokens > 0]]
            expected = torch.full_like(moved, SEED_STEP) * steps  # which wraps as seeds do
            require.that(torch.equal(moved, expected), f"seeds did not move on by {steps} steps")

    graph = graph_like_eager_steps(inputs, one_step, 3, require_moved)
    if inputs.state.rounding != "nearest" and inputs.state.data[0, 0].numel() >= ENOUGH_VALUES:
        stored = []
        for _ in range(2):
            restore(inputs.state, before.state)
            graph.replay()
            stored.append(bits_of(inputs.state.data).clone())
        require.that(not torch.equal(*stored), "two replays from the same state drew the same bits")


def graph_like_eager_steps(
    inputs: AnyInputs, one_step: Callable[[AnyInputs, Tensor], None], times: int, then: Callable[[int], object]
) -> torch.cuda.CUDAGraph:
    """Capture a step, which writes an output, and replay it so often, beside eager steps that must give the same bytes;
    `then` is told how often, every time."""
    out, eager = torch.empty_like(inputs.fresh().step()), inputs.fresh()
    one_step(inputs.fresh(), out)  # compiles
    torch.cuda.synchronize(out.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one_step(inputs, out)
    for replays in range(1, times + 1):
        graph.replay()
        replayed = out.clone()
        one_step(eager, out)
        require.alike(" of a replay", inputs, replayed, eager, out)
        then(replays)
    return graph


@law("a second stream works", needs="cuda")
def second_stream_works(case: AnyCase, device: torch.device, inputs: Inputs) -> None:
    other = inputs.fresh()
    want = inputs.step()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        got = other.step()
    torch.cuda.current_stream(device).wait_stream(stream)
    require.alike("", other, got, inputs, want)
