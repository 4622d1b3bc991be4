"""Holding: who has which slot of a pool, known on the host, and the seeds that requests get."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashstate.errors import INDEX_DTYPES, INT64, check_int, check_tensor
from flashstate.ops.moving import draw_seeds
from flashstate.ops.numbers import as_numbers, check_distinct, check_in_range, slots_on, uploaded
from flashstate.state.slots import SlotNumbers

Seeds = int | Sequence[int] | Tensor | None


class Holding:
    """Which slots are free and which are held, and what draws seeds: a generator for slots that the host names, and a
    counter on the device for those that only the device knows."""

    def __init__(self, slots: int, null: int, device: torch.device, seed: int | None, held: bool) -> None:
        check_int("null", null, *INT64)
        self.slots, self.null, self.device = slots, null, device
        self.generator = torch.Generator("cpu")
        if seed is None:
            self.generator.seed()  # from entropy
        else:
            check_int("seed", seed, *INT64)
            self.generator.manual_seed(seed)
        key = self.generator.initial_seed()
        with torch.inference_mode(False):  # else only inference mode could count on
            self.draws = torch.tensor([key - (key >> 63 << 64), 0], device=device)
        usable = [slot for slot in range(slots) if slot != null]
        self.held = set(usable) if held else set()
        self.free = [] if held else usable[::-1]  # the last is the next to be acquired

    def next(self, n: int) -> list[int]:
        """The slots that would be acquired next."""
        return self.free[: -n - 1 : -1]

    def hold(self, slots: list[int]) -> None:
        """Take the slots that come next."""
        del self.free[len(self.free) - len(slots) :]
        self.held.update(slots)

    def release(self, slots: SlotNumbers) -> None:
        numbers = as_numbers("slots", slots)
        self.check_each_held("slots", numbers)
        self.held.difference_update(numbers)
        self.free += numbers[::-1]

    def resized(self, slots: int) -> Holding:
        """The same for another number of slots, for the same requests; both draw their seeds from one source."""
        largest = max(self.held, default=-1)
        if largest >= slots:
            raise ValueError(f"slots must be more than {largest}, the largest slot that is held, got {slots}")
        other = Holding(slots, self.null, self.device, 0, held=False)
        other.generator, other.draws = self.generator, self.draws
        other.held = set(self.held)
        released = [slot for slot in self.free if slot < slots]
        known = {*released, *other.held}
        other.free = [slot for slot in other.free if slot not in known] + released
        return other

    def on_device(self, name: str, slots: SlotNumbers, unique: bool = False) -> Tensor:
        """Slots on the device, (n,) int32 or int64. Those that the host names must be held, and distinct if unique."""
        return slots_on(self.device, name, slots, self.check_each_held if unique else self.check_held, self.null)

    def check_held(self, name: str, numbers: list[int]) -> None:
        """Raise unless all these slots are held."""
        check_in_range(name, numbers, self.slots)
        for slot in numbers:
            if slot not in self.held:
                why = "the null slot" if slot == self.null else "free"
                raise ValueError(f"{name} must be held, but slot {slot} is {why}")

    def check_each_held(self, name: str, numbers: list[int]) -> None:
        """Raise unless all these slots are held, each named once."""
        self.check_held(name, numbers)
        check_distinct(name, numbers)

    def on_host(self, slots: SlotNumbers) -> bool:
        """Whether the host knows which slots these are."""
        return not isinstance(slots, Tensor) or slots.device != self.device

    def seeds(self, seed: Seeds, n: int, on_host: bool = True) -> Tensor:
        """A seed for each of n slots, (n,) int64 on the device: as given, or drawn, on_host or there."""
        if seed is None and not on_host:
            return draw_seeds(self.draws, n)
        if seed is None:
            drawn = torch.empty(n, dtype=torch.int64, device="cpu").random_(INT64[0], None, generator=self.generator)
            return uploaded(drawn, self.device)
        if isinstance(seed, Tensor):
            of_host = seed.device.type == "cpu"
            check_tensor("seed", seed, ("slots",), (n,), dtypes=INDEX_DTYPES, device=None if of_host else self.device)
            seeds = seed.to(torch.int64, copy=True)  # the upload of a pinned tensor would see later changes
            return seeds if seeds.device == self.device else uploaded(seeds, self.device)
        numbers = as_numbers("seed", seed)
        for number in numbers:
            check_int("seed", number, *INT64)
        if isinstance(seed, int):
            return torch.full((n,), seed, dtype=torch.int64, device=self.device)
        if len(numbers) != n:
            raise ValueError(f"seed must be one int, or one for each of {n} slots, got {len(numbers)}")
        return uploaded(numbers, self.device, torch.int64)
