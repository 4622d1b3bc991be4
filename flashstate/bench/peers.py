"""Other libraries that are timed beside flashstate, each through its public functions. Every op has its own peers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashstate.proof import Inputs, Pool
from flashstate.state.slots import Slots

NO_PEERS = "none"


@dataclass(frozen=True)
class Storing:
    """Where a step stores states: the last one in place; or, while the pool is only read, all as snapshots or none."""

    snapshots: Pool | None = None
    update: bool = True


IN_PLACE = Storing()

# A binding makes a step of inputs, and of where states are stored. A step is told its slots before anything is timed,
# and gives a launch, which advances the states of these slots and returns the output.
Launch = Callable[[], Tensor]
Step = Callable[[Slots], Launch]
Binding = Callable[[Inputs, Storing], Step]


def step_of(op: Callable[..., Tensor], arguments: Mapping[str, Any], bare: bool) -> Step:
    """The step of an op of flashstate; with `bare` it is given slot numbers instead of Slots."""

    def step(slots: Slots) -> Launch:
        where = slots.read if bare else slots
        return lambda: op(**arguments, slots=where)

    return step


class MeasurementError(Exception):
    """Why an implementation is not timed."""


@dataclass(frozen=True)
class Peer:
    """Where the public functions of another library are, and how they are called with the arguments of ours.

    What a function needs in another shape or dtype is converted by `bind`, once, so that it costs the step nothing.
    `bind` is given the functions first, and raises MeasurementError where they cannot do the job.
    """

    module: str
    functions: tuple[str, ...]
    bind: Callable[..., Step]

    def load(self) -> Binding:
        """Import the functions; MeasurementError where that fails."""
        try:
            module = importlib.import_module(self.module)
            functions = [getattr(module, name) for name in self.functions]
        except Exception as error:  # a broken installation may raise anything
            raise MeasurementError(f"cannot be imported: {error}") from error
        return partial(self.bind, *functions)

    @property
    def version(self) -> str:
        """Of the imported library, as it says itself."""
        return str(getattr(sys.modules.get(self.module.split(".")[0]), "__version__", "unknown version"))


def require_plain_states(inputs: Inputs) -> None:
    """Raise MeasurementError where states have scales or are not rounded to nearest."""
    if inputs.state.scale is not None:
        raise MeasurementError("only compared where states have no scales")
    if inputs.state.rounding != "nearest":
        raise MeasurementError(f"only compared where states are rounded to nearest, not {inputs.state.rounding}")


def require_in_place(storing: Storing) -> None:
    """Raise MeasurementError where anything but the last state is to be stored."""
    if storing != IN_PLACE:
        raise MeasurementError("only compared where the last state is stored in place")


def choose_peers(known: Mapping[str, Peer], names: Sequence[str] | None) -> dict[str, Peer]:
    """The peers of these names; all without names, none for "none". ValueError for a name that is none of them."""
    if names is None:
        return dict(known)
    if list(names) == [NO_PEERS]:
        return {}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"there is no peer {unknown[0]!r}, only {', '.join(known)}; {NO_PEERS!r} alone for none")
    return {name: known[name] for name in names}


def load_peers(peers: Mapping[str, Peer], device: torch.device) -> tuple[dict[str, Binding], dict[str, set[str]]]:
    """The bindings of the peers that can be imported, and the reasons why others cannot be compared."""
    bindings: dict[str, Binding] = {}
    reasons: dict[str, set[str]] = {}
    for name, peer in peers.items():
        try:
            if device.type != "cuda":
                raise MeasurementError("only compared on a GPU")
            bindings[name] = peer.load()
        except MeasurementError as reason:
            reasons[name] = {str(reason)}
    return bindings, reasons


def versions_of(peers: Mapping[str, Peer], names: Iterable[str]) -> str:
    """The names with their versions, for the record."""
    return ", ".join(f"{name} {peers[name].version}" for name in names)
