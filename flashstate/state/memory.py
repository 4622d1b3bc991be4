"""The memory of pools: whether layers lie apart in it, and slots copied within it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from flashstate.errors import check_tensor
from flashstate.launch import uses_kernels
from flashstate.state.formats import FORMATS
from flashstate.state.state import POOL_AXES, State


def check_states(states: Sequence[State]) -> None:
    """Raise unless these can be the layers of one pool."""
    if not isinstance(states, Sequence):
        raise TypeError(f"states must be a sequence of States, got {type(states).__name__}")
    if not states:
        raise ValueError("states must have one State per layer, got none")
    for i, state in enumerate(states):
        name = f"states[{i}]"
        if not isinstance(state, State):
            raise TypeError(f"{name} must be a State, got {type(state).__name__}")
        first = states[0].data
        check_tensor(f"{name}.data", state.data, POOL_AXES, (first.shape[0], None, None, None), dtypes=tuple(FORMATS))
        uses_kernels(state.data.device)  # refuses devices that no op runs on
        if state.data.device != first.device:
            raise ValueError(f"{name} is on {state.data.device}, but states[0] is on {first.device}")
        for other in states[:i]:
            for a, b in itertools.product(_slotted(state), _slotted(other)):
                if _share_memory(a, b):
                    raise ValueError(f"{name} must not share the memory of another layer")
    seeds = {state.seed.data_ptr() for state in states if state.seed is not None}
    if len(seeds) > 1:
        raise ValueError(f"states must share one seed tensor, from which all layers draw, got {len(seeds)}")


def check_apart(states: Sequence[State], windows: Sequence[Tensor]) -> None:
    """Raise where windows share memory with each other or with states."""
    for i, window in enumerate(windows):
        others = [tensor for state in states for tensor in _slotted(state)]
        if any(_share_memory(window, other) for other in (*others, *windows[:i])):
            raise ValueError(f"windows[{i}] must not share the memory of another layer or of a state")


def _slotted(state: State) -> list[Tensor]:
    """What a state keeps for every slot of its layer alone."""
    return [state.data] if state.scale is None else [state.data, state.scale]


def _share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether slots of two tensors overlap. Where they take turns, as in pages, they must have pages of one size, and
    are told apart by their places in a page."""
    (first, end, page, size), (other, other_end, other_page, other_size) = _place_of(a), _place_of(b)
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr() or end <= other or other_end <= first:
        return False
    return page != other_page or (other - first) % page < size or (first - other) % page < other_size


def _place_of(tensor: Tensor) -> tuple[int, int, int, int]:
    """In bytes of its storage: where a tensor starts and ends, from slot to slot, and how long a slot is."""
    width = tensor.element_size()
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
    first, page, size = int(tensor.storage_offset()) * width, tensor.stride(0) * width, reach * width
    return first, first + (len(tensor) - 1) * page + size, max(page, 1), size


def copy_slots(tensor: Tensor, sources: list[int], targets: list[int]) -> None:
    """Copy slots of a tensor that has them on its first axis; those that are also overwritten are read before."""
    put(tensor, targets, [tensor[slot].clone() if slot in targets else tensor[slot] for slot in sources])


def put(tensor: Tensor, slots: list[int], values: Sequence[Tensor]) -> None:
    """One launch per slot. Where deterministic algorithms are asked for, indexed assignment copies the whole of a
    strided tensor, and in some versions of torch it waits for the device."""
    for slot, value in zip(slots, values, strict=True):
        tensor[slot].copy_(value)
