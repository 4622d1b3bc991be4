"""Layers for another number of slots, with what the slots of both hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashstate.pool.layers import Layer, ssm_of
from flashstate.state.formats import bits_of
from flashstate.state.mamba3 import Mamba3State
from flashstate.state.parts import Part, Parts
from flashstate.state.state import State


@torch.no_grad()
@torch.inference_mode(False)  # else only inference mode could change them
def resized_layers(
    parts: Parts, states: Sequence[Layer], windows: Sequence[Tensor], rings: Sequence[Any], slots: int
) -> tuple[list[Any], list[Tensor], list[Any]]:
    """States, windows and rings like these, whose parts they are, for so many slots."""
    made = {part.name: resized(part, slots) for part in parts.parts}

    def of(holder: str, names: Sequence[str]) -> dict[str, Any]:
        """What was made for a holder, by the names of its fields."""
        return {name: made[f"{holder}.{name}"] for name in names if f"{holder}.{name}" in made}

    def layer(i: int, one: Layer) -> Layer:
        seed = None if ssm_of(one).seed is None else made["seed"]
        state = replace(ssm_of(one), **of(f"states[{i}]", State.written), seed=seed)
        return Mamba3State(state, **of(f"states[{i}]", Mamba3State.written)) if isinstance(one, Mamba3State) else state

    cursors = of("rings", ("start", "count"))
    return (
        [layer(i, one) for i, one in enumerate(states)],
        [made[f"windows[{i}]"] for i in range(len(windows))],
        [replace(ring, **of(f"rings[{i}]", ring.written), **cursors) for i, ring in enumerate(rings)],
    )


def resized(part: Part, slots: int) -> Tensor:
    """The tensor of a part for so many slots, laid out as it is: what both have is copied, other slots are clean."""
    tensor, inner = part.tensor, part.tensor.shape[1:]
    shape = (slots, *(inner[axis] for axis in part.order))
    new = torch.full(shape, part.clean, dtype=tensor.dtype, device=tensor.device)
    new = new.permute(0, *(1 + part.order.index(axis) for axis in range(len(inner))))
    kept = min(slots, len(tensor))
    bits_of(new)[:kept].copy_(bits_of(tensor)[:kept])
    return new
