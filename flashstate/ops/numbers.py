"""Numbers of slots, from wherever they come: those of the host are checked, those on the device are left there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flashstate.errors import INDEX_DTYPES, check_int, check_tensor, no_tensor
from flashstate.ops.debug import debugging, refuse_capture
from flashstate.state.slots import SlotNumbers

Check = Callable[[str, list[int]], None]  # of numbers of the host, by the name of their argument


def slots_on(device: torch.device, name: str, slots: SlotNumbers, check: Check, null: int = -1) -> Tensor:
    """Slots as (n,) int32 or int64 on `device`. A tensor there stays as it is, and only inside debug() its numbers, but
    for those that mean "no request", are checked; others are checked, and brought there."""
    if not isinstance(slots, Tensor) or slots.device != device:
        numbers = as_numbers(name, slots)
        check(name, numbers)
        return uploaded(numbers, device)
    slots = slots.reshape(1) if slots.dim() == 0 else slots
    check_tensor(name, slots, ("slots",), (None,), dtypes=INDEX_DTYPES)
    if debugging():
        refuse_capture(slots)
        check(name, [slot for slot in slots.tolist() if slot >= 0 and slot != null])
    return slots.contiguous()


def as_numbers(name: str, numbers: SlotNumbers) -> list[int]:
    """What methods accept as numbers of slots, as a list; a tensor on a GPU is waited for."""
    if isinstance(numbers, Tensor):
        numbers = numbers[None] if numbers.dim() == 0 else numbers  # what a loop over acquired slots gives
        check_tensor(name, numbers, ("slots",), (None,), dtypes=INDEX_DTYPES)
        return numbers.tolist()
    if isinstance(numbers, Sequence) and not isinstance(numbers, (str, bytes)):
        return [number.tolist() if isinstance(number, Tensor) and number.dim() == 0 else number for number in numbers]
    if isinstance(numbers, int):
        return [numbers]
    raise TypeError(f"{name} must be an int, a sequence of ints or an integer tensor, got {no_tensor(numbers)}")


def uploaded(numbers: list[int] | Tensor, device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    """Whole numbers of the host on `device`; the host does not wait."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("numbers of the host are copied to the device, which a CUDA graph cannot capture")
    with torch.inference_mode(False):  # else only inference mode could change what acquire returns
        host = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers, dtype=dtype, device="cpu")
        if host.device == device:
            return host
        return host.pin_memory().to(device, non_blocking=True)


def check_in_range(name: str, numbers: Sequence[int], count: int) -> None:
    """Raise unless there are slots of all these numbers."""
    for number in numbers:
        check_int(name, number, 0, count - 1)


def check_distinct(name: str, numbers: Sequence[int]) -> None:
    """Raise where a slot is named twice."""
    if len(set(numbers)) < len(numbers):
        twice = next(number for number in numbers if numbers.count(number) > 1)
        raise ValueError(f"{name} must be distinct, got slot {twice} more than once")
