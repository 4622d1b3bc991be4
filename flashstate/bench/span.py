"""The benchmark of a layer's two steps, conv1d_step and then mamba2_step: their span, with and without `early`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from flashstate.bench.jobs import BenchedOp, Grid, Shape, Variant
from flashstate.bench.mamba2 import HOST_CASE, SHAPE
from flashstate.bench.mamba2 import case_of as case_of_mamba2
from flashstate.bench.peers import IN_PLACE, Launch, Step, Storing
from flashstate.ops.conv1d import conv1d_step
from flashstate.ops.mamba2 import mamba2_step
from flashstate.proof import Case, ConvCase, Inputs
from flashstate.state.slots import Slots

WIDTH = 4


@dataclass
class SpanInputs(Inputs):
    """The inputs of mamba2_step, whose x, B and C are the output of a convolution, and what that one is given."""

    convolution: Inputs

    def windows(self) -> Tensor:
        """For each slot of the pool a window, all the same, so that the first step gives x, B and C in any slot."""
        return self.convolution.on_larger_pool(len(self.state.data)).state.data


@dataclass(frozen=True)
class SpanCase(Case):
    """A case of mamba2_step behind a convolution over x, B and C side by side."""

    def make_inputs(self, device: torch.device, seed: int = 0) -> SpanInputs:
        inputs = super().make_inputs(device, seed)
        channels = self.heads * self.rows + 2 * self.groups * self.cols
        before = ConvCase(self.batch, channels, WIDTH, tokens=self.tokens, x=self.x, parameters=self.x, slots=1)
        convolution = before.make_inputs(device, seed)
        same = replace(convolution, state=convolution.on_larger_pool(self.batch).state)
        parts = split(same.step(slots=None), inputs.arguments)
        arguments = {**inputs.arguments, **parts}
        return SpanInputs(inputs.op, inputs.state, arguments, inputs.options, inputs.slots, inputs.lengths, convolution)


def split(convolved: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """The views of x, B and C into the output of the convolution."""
    sizes = [like[name].shape[-2:].numel() for name in ("x", "B", "C")]
    parts = zip(("x", "B", "C"), convolved.split(sizes, dim=-1), strict=True)
    return {name: part.unflatten(-1, tuple(like[name].shape[-2:])) for name, part in parts}


def case_of(shape: Shape, name: str, rounding: str, tokens: int, batch: int) -> SpanCase:
    """That of mamba2_step, behind a convolution."""
    return _as_span(case_of_mamba2(shape, name, rounding, tokens, batch))


def bind_flashstate(inputs: Inputs, storing: Storing = IN_PLACE, *, bare: bool = False, early: bool = False) -> Step:
    """Both steps; `early`: each starts before what is in front of it has ended."""
    assert isinstance(inputs, SpanInputs)
    convolution = {**inputs.convolution.arguments, **inputs.convolution.options, "window": inputs.windows()}
    convolved = convolution["out"] = torch.empty_like(convolution["x"])
    arguments = {**inputs.arguments, **inputs.options, **split(convolved, inputs.arguments)}
    state = inputs.state.data if bare else inputs.state
    y = torch.empty(inputs.arguments["x"].shape, dtype=convolved.dtype, device=convolved.device)

    def step(slots: Slots) -> Launch:
        where = slots.read if bare else slots

        def launch() -> Tensor:
            conv1d_step(**convolution, slots=where, early=early)
            return mamba2_step(state, **arguments, slots=where, out=y, early=early)

        return launch

    return step


def _as_span(case: Case) -> SpanCase:
    return SpanCase(**{name: getattr(case, name) for name in case.__dataclass_fields__})


GRID = Grid((SHAPE,), (("float32", "nearest"), ("bfloat16", "nearest")), stored=("last",))
SPAN = BenchedOp(
    "conv1d + mamba2", bind_flashstate, case_of, (GRID,), {}, _as_span(HOST_CASE),
    {"early": Variant(partial(bind_flashstate, early=True))},
)  # fmt: skip
