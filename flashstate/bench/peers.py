"""Other libraries that are timed beside flashstate, each through its public functions. Every op has its own peers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flashstate.basics import NO_PEERS
from flashstate.bench.binding import IN_PLACE, Binding, Step, Storing
from flashstate.proof import Inputs


class MeasurementError(Exception):
    """Why an implementation is not timed."""


@dataclass(frozen=True)
class Peer:
    """Where the public functions of another library are, and how they are called with the arguments of ours."""

    module: str
    functions: tuple[str, ...]
    # A Binding, once it has the functions; it converts what they need in another shape or dtype, so that this costs the
    # step nothing, and raises MeasurementError where they cannot do the job.
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
        """The version of the imported library, as it says itself."""
        return str(getattr(sys.modules.get(self.module.split(".")[0]), "__version__", "unknown version"))


def require_plain(inputs: Inputs, storing: Storing = IN_PLACE) -> None:
    """Raise MeasurementError where states have scales, are not rounded to nearest, or are stored but in place."""
    if inputs.state.scale is not None:
        raise MeasurementError("only compared where states have no scales")
    if inputs.state.rounding != "nearest":
        raise MeasurementError(f"only compared where states are rounded to nearest, not {inputs.state.rounding}")
    if storing != IN_PLACE:
        raise MeasurementError("only compared where the last state is stored in place")


def packed_bounds(dense: Tensor) -> Tensor:
    """Where the tokens of every row begin and end if those of a batch (batch, T, ...) are packed: (batch + 1,)."""
    batch, tokens = dense.shape[:2]
    return torch.arange(batch + 1, dtype=torch.int32, device=dense.device) * tokens


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
    if device.type != "cuda":
        return {}, {name: {"only compared on a GPU"} for name in peers}
    bindings: dict[str, Binding] = {}
    reasons: dict[str, set[str]] = {}
    for name, peer in peers.items():
        try:
            bindings[name] = peer.load()
        except MeasurementError as reason:
            reasons[name] = {str(reason)}
    return bindings, reasons
