"""How a step is called: what is made before anything is timed, and what is timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashstate.proof import Inputs, Pool
from flashstate.state.slots import Slots
from flashstate.state.state import State


@dataclass(frozen=True)
class Storing:
    """Where a step stores states: the last one in place; or, while the pool is only read, all as snapshots or none."""

    snapshots: Pool | None = None
    update: bool = True


IN_PLACE = Storing()

# A binding makes a step of inputs, and of where states are stored. A step is told its slots before anything is timed,
# and gives a call, which advances the states of these slots and returns the output.
TimedCall = Callable[[], Tensor]
Step = Callable[[Slots], TimedCall]
Binding = Callable[[Inputs, Storing], Step]


def arguments_of(inputs: Inputs, storing: Storing = IN_PLACE, **options: Any) -> dict[str, Any]:
    """All arguments of an op but slots: those of inputs, an output, where states are stored, and more options."""
    given = {**inputs.arguments, "out": torch.empty_like(inputs.main), **options}
    if storing != IN_PLACE:
        given.update(snapshots=storing.snapshots, update=storing.update)
    return inputs.op.takes(inputs.state, given)


def bind_op(inputs: Inputs, storing: Storing = IN_PLACE, *, bare: bool = False, **options: Any) -> Step:
    """Make a step of an op of flashstate, with more options; `bare`: of plain tensors, the pool and slot numbers."""
    op, given = inputs.op.step, arguments_of(inputs, storing, **options)
    if bare:
        given = {name: value.data if isinstance(value, State) else value for name, value in given.items()}

    def step(slots: Slots) -> TimedCall:
        where = slots.read if bare else slots
        return lambda: op(**given, slots=where)

    return step
