"""Other libraries that are timed beside flashstate, each through its public function. Every op has its own peers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashstate.state.slots import Slots
from flashstate.testing import Inputs, Pool

# A step advances the states of the slots it is given, in place or into snapshots, and returns the output. A binding
# makes one of inputs, and of snapshots where the job takes them.
Step = Callable[[Slots], Tensor]
Binding = Callable[[Inputs, Pool | None], Step]
NO_PEERS = "none"


class MeasurementError(Exception):
    """Why an implementation is not timed."""


@dataclass(frozen=True)
class Peer:
    """Where the public function of another library is, and how it is called with the arguments of ours.

    What the function needs in another shape or dtype is converted by `bind`, once, so that it costs the step nothing.
    `bind` raises MeasurementError where the function cannot do the job.
    """

    module: str
    function: str
    bind: Callable[[Callable[..., Any], Inputs, Pool | None], Step]

    def load(self) -> Binding:
        """Import the function; MeasurementError where that fails."""
        try:
            function = getattr(importlib.import_module(self.module), self.function)
        except Exception as error:  # a broken installation may raise anything
            raise MeasurementError(f"cannot be imported: {error}") from error
        return partial(self.bind, function)

    @property
    def version(self) -> str:
        """Of the imported library, as it says itself."""
        return str(getattr(sys.modules.get(self.module.split(".")[0]), "__version__", "unknown version"))


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
