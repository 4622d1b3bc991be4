"""How a step is called: what is made before anything is timed, and what is timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from flashstate.proof import Inputs, Pool
from flashstate.state.slots import Slots


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


class Binder(Protocol):
    """Makes a step of flashstate; with `bare` it is given plain tensors: the pool, and slot numbers."""

    def __call__(self, inputs: Inputs, storing: Storing = IN_PLACE, *, bare: bool = False) -> Step: ...


def on_states(inputs: Inputs, bare: bool) -> dict[str, Any]:
    """All arguments of an op on a State, or with `bare` on its data."""
    return {**inputs.arguments, "state": inputs.state.data if bare else inputs.state}


def bind_op(
    op: Callable[..., Tensor],
    arguments: Callable[[Inputs, bool], dict[str, Any]],
    inputs: Inputs,
    storing: Storing = IN_PLACE,
    *,
    bare: bool = False,
    **options: Any,
) -> Step:
    """Make a step of an op of flashstate, of `arguments` and more options: a Binder, once it has the first two."""
    given = {**arguments(inputs, bare), "out": torch.empty_like(inputs.main), **options}
    if storing != IN_PLACE:
        given.update(snapshots=storing.snapshots, update=storing.update)

    def step(slots: Slots) -> TimedCall:
        where = slots.read if bare else slots
        return lambda: op(**given, slots=where)

    return step
