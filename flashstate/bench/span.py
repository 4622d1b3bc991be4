"""The benchmark of a layer's two steps, conv1d_step and then mamba2_step: their span, with and without `early`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from flashstate.bench.binding import IN_PLACE, Step, Storing, TimedCall, bind_op
from flashstate.bench.jobs import BFLOAT16, FLOAT32, BenchedOp, Grid, Way
from flashstate.bench.mamba2 import MAMBA2
from flashstate.proof import Case, ConvCase, Inputs
from flashstate.state.slots import Slots

WIDTH = 4


@dataclass
class SpanInputs(Inputs):
    """The inputs of mamba2_step, whose x, B and C are the output of a convolution, and what that one is given."""

    convolution: Inputs


@dataclass(frozen=True)
class SpanCase(Case):
    """A case of mamba2_step behind a convolution over x, B and C side by side."""

    def make_inputs(self, device: torch.device, seed: int = 0) -> SpanInputs:
        inputs = super().make_inputs(device, seed)
        channels = self.heads * self.rows + 2 * self.groups * self.cols
        before = ConvCase(self.batch, channels, WIDTH, tokens=self.tokens, x=self.x, parameters=self.x, slots=1)
        convolution = before.make_inputs(device, seed)
        convolved = convolution.on_larger_pool(self.batch).step(slots=None)
        arguments = {**inputs.arguments, **split(convolved, inputs.arguments)}
        return SpanInputs(**{**vars(inputs), "arguments": arguments}, convolution=convolution)


def split(convolved: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The views of x, B and C into the output of the convolution."""
    sizes = [like[name].shape[-2:].numel() for name in ("x", "B", "C")]
    parts = zip(("x", "B", "C"), convolved.split(sizes, dim=-1), strict=True)
    return {name: part.unflatten(-1, tuple(like[name].shape[-2:])) for name, part in parts}


def bind_flashstate(inputs: Inputs, storing: Storing = IN_PLACE, *, bare: bool = False, early: bool = False) -> Step:
    """Make a step of both; `early`: each starts before what is in front of it has ended. All windows are the same, so
    that the first step gives x, B and C in any slot."""
    assert isinstance(inputs, SpanInputs)
    before = inputs.convolution.on_larger_pool(len(inputs.state.data))
    convolved = torch.empty_like(before.main)
    behind = replace(inputs, arguments={**inputs.arguments, **split(convolved, inputs.arguments)})
    first = bind_op(before, bare=bare, early=early, out=convolved)
    second = bind_op(behind, bare=bare, early=early)

    def step(slots: Slots) -> TimedCall:
        convolve, update = first(slots), second(slots)
        return lambda: (convolve(), update())[1]

    return step


SPAN = BenchedOp(
    "conv1d + mamba2", SpanCase(**vars(MAMBA2.case)), (Grid((FLOAT32, BFLOAT16), stored=("last",)),),
    variants={"early": Way(partial(bind_flashstate, early=True))}, bind=bind_flashstate,
)  # fmt: skip
