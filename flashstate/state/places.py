"""Where slots of a tensor lie in memory, and whether those of two tensors lie apart."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from flashstate.state.state import POOL_AXES, head_stride


class Place(NamedTuple):
    """Where the slots of a tensor are, by their addresses, and where the heads of a slot are."""

    first: int
    end: int
    page: int  # from slot to slot
    size: int  # of a slot
    step: int  # from head to head, where these are apart; else 0, and a slot is one head
    head: int  # its size

    @classmethod
    def of(cls, tensor: Tensor) -> Place:
        """Return where a tensor is, with the axis of the largest stride for its slots."""
        width, tensor = tensor.element_size(), tensor if tensor.dim() else tensor[None]
        # Tokens or heads of an activation may lie further apart than its rows. A single slot has its page too.
        furthest = max(range(tensor.dim()), key=lambda axis: (axis == 0 or tensor.shape[axis] > 1, tensor.stride(axis)))
        tensor = tensor.movedim(furthest, 0)
        first, page, size = tensor.data_ptr(), tensor.stride(0) * width, reach_of(tensor, 1) * width
        apart = tensor.dim() == len(POOL_AXES) and head_stride(tensor) is not None
        step, head = (tensor.stride(1) * width, reach_of(tensor, 2) * width) if apart else (0, size)
        return cls(first, first + (len(tensor) - 1) * page + size, max(page, 1), size, step, head)

    def overlaps(self, other: Place) -> bool:
        """Whether slots of two tensors on one device have bytes in common. Where they take turns, as in pages, they
        must have pages of one size, and are told apart by their places in a page; where heads take turns, so are
        they."""
        if self.end <= other.first or other.end <= self.first:
            return False
        if self.page != other.page or max(self.size, other.size) > self.page:
            return True
        apart = (other.first - self.first) % self.page
        shared = [by for by in (apart, apart - self.page) if -other.size < by < self.size]
        step = max(self.step, other.step)
        if step == 0 or not {self.step, other.step} <= {step, 0}:
            return bool(shared)
        return any(by % step < self.head or -by % step < other.head for by in shared)


def reach_of(tensor: Tensor, axis: int) -> int:
    """Elements from the first to the last of axes from this one on."""
    return 1 + sum((size - 1) * by for size, by in zip(tensor.shape[axis:], tensor.stride()[axis:], strict=True))
