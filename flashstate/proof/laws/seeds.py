"""Laws of random bits, CUDA graphs and streams."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from flashstate.proof import AnyCase, Inputs, make_inputs
from flashstate.proof.inputs import AnyInputs
from flashstate.proof.laws.registry import law
from flashstate.proof.laws.require import require, require_equal_bytes, require_equal_states, rest_of, restore
from flashstate.state.formats import bits_of
from flashstate.state.rounding import SEED_STEP

ENOUGH_VALUES = 32  # of a head, so that they do not all happen to be rounded the same way twice


@law(
    "stochastic rounding draws other bits after advance and in another stream, and advance moves only its slots",
    includes=lambda case: case.rounding == "stochastic" and math.prod(case.state_axes[1:]) >= ENOUGH_VALUES,
)
def seeds_decide(case: AnyCase, device: torch.device) -> None:
    inputs = make_inputs(case, device)
    base, stepped, streamed = inputs.fresh(), inputs.fresh(), inputs.fresh()
    streamed.state = replace(streamed.state, stream=streamed.state.stream + 1)
    stepped.state.advance(stepped.slots)
    rest = rest_of(inputs)
    moved = _seeds(stepped) != _seeds(inputs)
    require(not bool(moved[rest].any()) and bool(moved[inputs.slots.long()].all()), "advance moved the wrong seeds")
    for run in (base, stepped, streamed):
        run.step()
    stored = inputs.slots.long()[inputs.stores]
    for name, other in (("after advance", stepped), ("in another stream", streamed)):
        same = (bits_of(other.state.data) == bits_of(base.state.data))[stored].flatten(1).all(1)
        require(not bool(same.any()), f"the bytes {name} are the same")


def _seeds(inputs: Inputs) -> Tensor:
    assert inputs.state.seed is not None
    return inputs.state.seed


@law("a CUDA graph draws fresh random bits at every replay", needs="cuda")
def graph_replays_draw_fresh_bits(case: AnyCase, device: torch.device) -> None:
    inputs = make_inputs(case, device)
    before, slots = inputs.fresh(), inputs.at()

    def one_step(run: Inputs, out: Tensor) -> None:
        run.step(slots=slots, out=out)
        if run.state.seed is not None:
            run.state.advance(slots)

    graph = graph_like_eager_steps(inputs, one_step, 3, lambda replays: _require_moved(inputs, before, replays))
    _require_other_bits(graph, inputs, before)


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
        require_equal_bytes("output of a replay", replayed, out)
        require_equal_states("the pool after a replay", inputs.state, eager.state)
        then(replays)
    return graph


def _require_moved(inputs: Inputs, before: Inputs, steps: int) -> None:
    """The seeds of rows with tokens have moved on by so many steps, where there are seeds."""
    if inputs.state.seed is None:
        return
    stepped = inputs.slots.long()[torch.tensor(inputs.row_lengths, device=inputs.slots.device) > 0]
    moved = _seeds(inputs)[stepped] - _seeds(before)[stepped]
    require(bool((moved == _wrapped(steps * SEED_STEP)).all()), f"seeds did not move on by {steps} steps")


def _require_other_bits(graph: torch.cuda.CUDAGraph, inputs: Inputs, before: Inputs) -> None:
    """Two replays from the same state store different bytes, where rounding is stochastic."""
    if inputs.state.rounding == "nearest" or inputs.state.data[0, 0].numel() < ENOUGH_VALUES:
        return
    stored = []
    for _ in range(2):
        restore(inputs.state, before.state)
        graph.replay()
        stored.append(bits_of(inputs.state.data).clone())
    require(not torch.equal(*stored), "two replays from the same state drew the same bits")


def _wrapped(number: int) -> int:
    """The number as 64-bit arithmetic has it."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


@law("a second stream works", needs="cuda")
def second_stream_works(case: AnyCase, device: torch.device) -> None:
    inputs = make_inputs(case, device)
    other = inputs.fresh()
    want = inputs.step()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        got = other.step()
    torch.cuda.current_stream(device).wait_stream(stream)
    require_equal_bytes("output", got, want)
    require_equal_states("the pool", other.state, inputs.state)
