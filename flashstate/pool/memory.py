"""The memory of pools: states allocated, layers apart from each other, slots by their numbers, copied."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flashstate.errors import INDEX_DTYPES, check_int, check_tensor, dtype_name
from flashstate.launch import uses_kernels
from flashstate.launch.arguments import as_bytes
from flashstate.pool.kv import Layer, kv_of, ssm_of
from flashstate.state.formats import FORMATS
from flashstate.state.mamba3 import Mamba3State
from flashstate.state.state import POOL_AXES, State

SlotNumbers = int | Sequence[int] | Tensor
Memory = list[tuple[Tensor, int]]  # tensors with the slots on their first axis, and what fills them in a clean slot


@torch.inference_mode(False)  # else only inference mode could change them
def allocate_states(
    slots: int,
    layers: int,
    sizes: dict[str, int],
    dtype: torch.dtype,
    rounding: str,
    rounds: int,
    stream: int,
    device: torch.device | str | None,
) -> tuple[list[State], Memory]:
    """States of zeros, one per layer, which share seeds if they need some; and their memory. `sizes`: of a slot."""
    for name, size in {"slots": slots, "layers": layers, **sizes}.items():
        check_int(name, size, 1, (1 << 31) - 1)
    check_int("stream", stream, 0, (1 << 32) - layers)
    if dtype not in FORMATS:
        got = dtype_name(dtype) if isinstance(dtype, torch.dtype) else repr(dtype)
        raise TypeError(f"dtype must be {' or '.join(f.name for f in FORMATS.values())}, got {got}")
    shape = (layers, slots, *sizes.values())
    data = torch.zeros(shape, dtype=dtype, device=device)
    uses_kernels(data.device)  # refuses devices that no op runs on
    scale = torch.ones(shape[:-1], dtype=torch.float32, device=device) if FORMATS[dtype].scaled else None
    seeds = None if rounding == "nearest" else torch.zeros(slots, dtype=torch.int64, device=device)
    states = [
        State(data[i], None if scale is None else scale[i],
              rounding=rounding, rounds=rounds, seed=seeds, stream=stream + i)
        for i in range(layers)
    ]  # fmt: skip
    memory = of_all_layers([data], 0)
    return states, memory if scale is None else memory + of_all_layers([scale], 1)


def of_all_layers(tensors: Iterable[Tensor], value: int) -> Memory:
    """The memory of tensors (layers, slots, ...), which this fills in a clean slot."""
    return [(as_bytes(tensor).transpose(0, 1), value) for tensor in tensors]


def memory_of(layer: Layer) -> Memory:
    """The memory of a layer."""
    return [(as_bytes(tensor), int(name == "scale")) for name, tensor in _parts(layer).items()]


def check_states(states: Sequence[Layer]) -> None:
    """Raise unless these can be the layers of one pool."""
    if not isinstance(states, Sequence):
        raise TypeError(f"states must be a sequence of States, got {type(states).__name__}")
    if not states:
        raise ValueError("states must have one State per layer, got none")
    places: list[Place] = []
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
        places += _places_apart(name, layer, places)
    seeds = {seed.data_ptr(): seed for layer in states if (seed := ssm_of(layer).seed) is not None}
    if len(seeds) > 1:
        raise ValueError(f"states must share one seed tensor, from which all layers draw, got {len(seeds)}")
    if any(_overlap(_place_of(seed), place) for seed in seeds.values() for place in places):
        raise ValueError("states must not share the memory of their seed")


def check_apart(states: Sequence[Layer], others: Mapping[str, Tensor]) -> None:
    """Raise where other tensors of a pool, by name, share memory with each other, with states or with their seed."""
    places = [_place_of(tensor) for layer in states for tensor in _parts(layer).values()]
    places += [_place_of(seed) for layer in states if (seed := ssm_of(layer).seed) is not None]
    for name, tensor in others.items():
        place = _place_of(tensor)
        if any(_overlap(place, other) for other in places):
            raise ValueError(f"{name} must not share the memory of another layer or of a state")
        places.append(place)


def _parts(layer: Layer) -> dict[str, Tensor]:
    """What a layer keeps for every slot alone, by name."""
    state = ssm_of(layer)
    scale = {} if state.scale is None else {"scale": state.scale}
    return {"data": state.data, **scale, **kv_of(layer)}


class Place(NamedTuple):
    """Where the slots of a tensor are, by their addresses."""

    first: int
    end: int
    page: int  # from slot to slot
    size: int  # of a slot


def _place_of(tensor: Tensor) -> Place:
    width = tensor.element_size()
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
    first, page, size = tensor.data_ptr(), tensor.stride(0) * width, reach * width
    return Place(first, first + (len(tensor) - 1) * page + size, max(page, 1), size)


def _places_apart(name: str, layer: Layer, others: list[Place]) -> list[Place]:
    """The places of a layer's tensors. Raises where they overlap, or overlap those of other layers."""
    own = {part: _place_of(tensor) for part, tensor in _parts(layer).items()}
    for one, other in itertools.combinations(own, 2):
        if _overlap(own[one], own[other]):
            raise ValueError(f"{name} must not share memory between its tensors, but {one} and {other} overlap")
    if any(_overlap(place, other) for place, other in itertools.product(own.values(), others)):
        raise ValueError(f"{name} must not share the memory of another layer")
    return list(own.values())


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether slots of two tensors on one device have bytes in common."""
    return _overlap(_place_of(one), _place_of(other))


def _overlap(a: Place, b: Place) -> bool:
    """Whether slots of two tensors overlap. Where they take turns, as in pages, they must have pages of one size, and
    are told apart by their places in a page."""
    if a.end <= b.first or b.end <= a.first:
        return False
    return a.page != b.page or (b.first - a.first) % a.page < a.size or (a.first - b.first) % a.page < b.size


def copy_slots(tensor: Tensor, sources: list[int], targets: list[int]) -> None:
    """Copy slots of a tensor that has them on its first axis; those that are also overwritten are read before."""
    put(tensor, targets, [tensor[slot].clone() if slot in targets else tensor[slot] for slot in sources])


def put(tensor: Tensor, slots: list[int], values: Sequence[Tensor]) -> None:
    """One launch per slot. Where deterministic algorithms are asked for, indexed assignment copies the whole of a
    strided tensor, and in some versions of torch it waits for the device."""
    for slot, value in zip(slots, values, strict=True):
        tensor[slot].copy_(value)


def as_numbers(name: str, numbers: SlotNumbers) -> list[int]:
    """What methods accept as numbers of slots, as a list; a tensor on a GPU is waited for."""
    if isinstance(numbers, Tensor):
        numbers = numbers[None] if numbers.dim() == 0 else numbers  # what a loop over acquired slots gives
        check_tensor(name, numbers, ("slots",), (None,), dtypes=INDEX_DTYPES)
        return numbers.tolist()
    if isinstance(numbers, Sequence) and not isinstance(numbers, (str, bytes)):
        return list(numbers)
    if isinstance(numbers, int):
        return [numbers]
    raise TypeError(f"{name} must be an int, a sequence of ints or an integer tensor, got {type(numbers).__name__}")
