"""The layers of a pool: what they are, what a caller may bring as such, and what a prefill may leave in them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashstate.errors import (
    ACTIVATION_DTYPES,
    LARGEST_INT32,
    check_int,
    check_no_overlap,
    check_tensor,
    describe_shape,
)
from flashstate.launch import uses_kernels
from flashstate.state.formats import FORMATS
from flashstate.state.mamba3 import Mamba3State
from flashstate.state.parts import Part, Parts
from flashstate.state.places import Place
from flashstate.state.ring import AnyRing, check_ring
from flashstate.state.state import POOL_AXES, State

Layer = State | Mamba3State
if TYPE_CHECKING:
    from typing_extensions import TypeVar  # typing has defaults from Python 3.13 on

    LayerT = TypeVar("LayerT", bound=Layer, default=State)
else:
    from typing import TypeVar

    LayerT = TypeVar("LayerT")

KV_AXES = {"k": ("slots", "R", "H", "N"), "v": ("slots", "H", "D"), "angle": ("slots", "H", "S")}
TURN = 2 * math.pi


def ssm_of(layer: Layer) -> State:
    """The recurrent state of a layer."""
    return layer.ssm if isinstance(layer, Mamba3State) else layer


def own_parts(holder: Layer | AnyRing) -> dict[str, Tensor]:
    """What a State or a ring keeps for every slot alone, by name; of a Mamba3State what it keeps beside its ssm."""
    return {name: part for name in holder.written if (part := getattr(holder, name)) is not None}


def parts_of(layer: Layer) -> dict[str, Tensor]:
    """What a layer keeps for every slot alone, by name."""
    return own_parts(ssm_of(layer)) | own_parts(layer)


def all_parts(states: Sequence[Layer], windows: Sequence[Tensor], rings: Sequence[AnyRing]) -> Parts:
    """What a pool of these layers keeps for every slot, layer by layer, then what all layers share; the seed last."""
    parts = []
    for i, layer in enumerate(states):
        parts += [Part(f"states[{i}].{name}", part, int(name == "scale")) for name, part in parts_of(layer).items()]
        parts += [Part(f"windows[{i}]", window) for window in windows[i : i + 1]]
        parts += [
            Part(f"rings[{i}].{name}", part) for ring in rings[i : i + 1] for name, part in own_parts(ring).items()
        ]
    parts += [Part(f"rings.{name}", getattr(ring, name)) for ring in rings[:1] for name in ("start", "count")]
    seeds = (ssm_of(layer).seed for layer in states)
    parts += [Part("seed", seed) for seed in seeds if seed is not None][:1]
    return Parts(tuple(parts))


def check_layers(
    states: Sequence[Layer], windows: Sequence[Tensor] | None, drafts: int, rings: Sequence[AnyRing] | None
) -> None:
    """Raise unless a caller's tensors can be the layers of one pool, and share no memory."""
    check_states(states)
    if windows is None and drafts:
        raise ValueError(f"drafts are for windows, which must be given too, got drafts={drafts}")
    others = {} if windows is None else check_windows(windows, states, drafts)
    others |= {} if rings is None else check_rings(rings, states)
    check_apart(states, others)


def check_states(states: Sequence[Layer]) -> None:
    """Raise unless these can be the layers of one pool."""
    if not isinstance(states, Sequence):
        raise TypeError(f"states must be a sequence of States, got {type(states).__name__}")
    if not states:
        raise ValueError("states must have one State per layer, got none")
    for i, layer in enumerate(states):
        name = f"states[{i}]"
        if not isinstance(layer, (State, Mamba3State)):
            got = type(layer).__name__
            raise TypeError(f"{name} must be a State, got {got}; a layer of Mamba-3 has a Mamba3State")
        data, first = ssm_of(layer).data, ssm_of(states[0]).data
        check_tensor(f"{name}.data", data, POOL_AXES, (first.shape[0], None, None, None), dtypes=tuple(FORMATS))
        uses_kernels(data.device)  # refuses devices that no op runs on
        if data.device != first.device:
            raise ValueError(f"{name} is on {data.device}, but states[0] is on {first.device}")


def _check_one_each(name: str, kind: str, given: Any, layers: int) -> None:
    if not isinstance(given, Sequence) or len(given) != layers:
        got = len(given) if isinstance(given, Sequence) else type(given).__name__
        raise ValueError(f"{name} must be a sequence with one {kind} per layer, {layers}, got {got}")


def check_windows(windows: Sequence[Tensor], states: Sequence[Layer], drafts: int) -> dict[str, Tensor]:
    """Windows by name, if they can be those of layers that have these states, with room for so many drafts."""
    check_int("drafts", drafts, 0, LARGEST_INT32)
    _check_one_each("windows", "tensor", windows, len(states))
    first, named = ssm_of(states[0]).data, {f"windows[{i}]": window for i, window in enumerate(windows)}
    for name, window in named.items():
        sizes = (first.shape[0], None, None)
        check_tensor(name, window, ("slots", "channels", "length"), sizes, device=first.device)
        if window.numel() == 0:
            raise ValueError(f"{name} must not be empty, got shape {tuple(window.shape)}")
        if window.shape[2] <= drafts:
            raise ValueError(f"{name} must have more than {drafts} entries, which drafts take, got {window.shape[2]}")
        check_no_overlap(name, window)
    return named


def check_rings(rings: Sequence[AnyRing], states: Sequence[Layer]) -> dict[str, Tensor]:
    """What rings keep for every slot by name, the cursors that they share once; if layers can have these rings."""
    _check_one_each("rings", "ring", rings, len(states))
    named: dict[str, Tensor] = {}
    for i, (ring, state) in enumerate(zip(rings, states, strict=True)):
        if not isinstance(state, State):
            raise TypeError(f"rings are for layers that are each a State, got {type(state).__name__}")
        if not isinstance(ring, AnyRing):
            raise TypeError(f"rings[{i}] must be a Ring or a DeltaRing, got {type(ring).__name__}")
        check_ring(ring, state, f"rings[{i}]", type(ring))
        first = rings[0]
        if ring.start.data_ptr() != first.start.data_ptr() or ring.count.data_ptr() != first.count.data_ptr():
            raise ValueError(f"rings must share start and count, but rings[{i}] has others than rings[0]")
        if (ring.window, ring.length) != (first.window, first.length):
            both = f"{ring.window} and {ring.length}, rings[0] has {first.window} and {first.length}"
            raise ValueError(f"rings must have one window and one length, but rings[{i}] has {both}")
        named |= {f"rings[{i}].{name}": part for name, part in own_parts(ring).items()}
    return {**named, "rings.start": rings[0].start, "rings.count": rings[0].count}


def check_apart(states: Sequence[Layer], others: Mapping[str, Tensor]) -> None:
    """Raise where tensors of layers, their seed and other tensors of a pool, by name, share memory."""
    places: list[Place] = []
    for i, layer in enumerate(states):
        own = {part: Place.of(tensor) for part, tensor in parts_of(layer).items()}
        for one, other in combinations(own, 2):
            if own[one].overlaps(own[other]):
                words = f"must not share memory between its tensors, but {one} and {other} overlap"
                raise ValueError(f"states[{i}] {words}")
        if any(place.overlaps(other) for place, other in product(own.values(), places)):
            raise ValueError(f"states[{i}] must not share the memory of another layer")
        places += own.values()
    seeds = {seed.data_ptr(): seed for layer in states if (seed := ssm_of(layer).seed) is not None}
    if len(seeds) > 1:
        raise ValueError(f"states must share one seed tensor, from which all layers draw, got {len(seeds)}")
    shared = [i for i, layer in enumerate(states) if ssm_of(layer).shares_seed]
    if shared:
        words = "must have a seed for every slot, which requests take with them, got one for all"
        raise ValueError(f"states[{shared[0]}] {words}")
    refused = [(seed, "states must not share the memory of their seed") for seed in seeds.values()]
    refused += [(t, f"{name} must not share the memory of another layer or of a state") for name, t in others.items()]
    for tensor, words in refused:
        place = Place.of(tensor)
        if any(place.overlaps(other) for other in places):
            raise ValueError(words)
        places.append(place)


def with_history(window: Tensor, values: Tensor, drafts: int, count: int) -> Tensor:
    """Windows for so many slots that end with these inputs, (slots, channels, n): as long as `window`, zeros before
    them, and after them where drafts go. Raises unless `values` can be stored as they are."""
    exact = ACTIVATION_DTYPES if window.dtype is torch.float32 else (window.dtype,)
    sizes = (count, window.shape[1], None)
    check_tensor("windows", values, ("slots", "channels", "n"), sizes, dtypes=exact, device=window.device)
    history = window.shape[2] - drafts
    if values.shape[2] > history:
        raise ValueError(f"windows must have {history} entries or fewer, got shape {tuple(values.shape)}")
    return torch.nn.functional.pad(values.to(window.dtype), (history - values.shape[2], drafts))


def as_kept(layer: Mamba3State, count: int, k: Tensor, v: Tensor, angle: Tensor | None) -> list[Tensor]:
    """What so many slots of k, v and, if the layer has them, angles will hold, in their dtypes. Raises unless all
    fit."""
    if angle is not None and layer.angle is None:
        raise ValueError("angle is not for a layer without angles")
    if angle is None and layer.angle is not None:
        shape = describe_shape(KV_AXES["angle"], (count, *layer.angle.shape[1:]))
        raise ValueError(f"a layer with angles needs angle: {shape} float32")
    kept = own_parts(layer)
    given: dict[str, Any] = {"k": k, "v": v, "angle": angle}
    for name, part in kept.items():
        dtypes = (torch.float32,) if name == "angle" else ACTIVATION_DTYPES
        check_tensor(name, given[name], KV_AXES[name], (count, *part.shape[1:]), dtypes=dtypes, device=part.device)
    if angle is not None:
        within = torch.remainder(angle.double(), TURN).float()
        given["angle"] = within.masked_fill(within >= TURN, 0.0)  # what rounds up to 2π in float32
    return [given[name].to(part.dtype) for name, part in kept.items()]
