"""Slots: which slot of the pool every row of a batch reads and writes."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from torch import Tensor

from flashstate.errors import INDEX_DTYPES, check_int, check_tensor


@dataclass(frozen=True, eq=False)
class Slots:
    """Where the rows of a batch live in the pool; built once per model step and shared by all layers.

    read: (batch,) int32 or int64, the slot each row continues from. A row whose slot is `null`, negative or past the
        pool is padding: its output is zero and no memory of the pool is touched.
    write: (batch,), where the new state goes; None writes where it was read. A row whose write slot is `null`, negative
        or past the pool is not written.
    null: the slot number that means "no request"; negatives always do.

    Slots past the pool also set a flag that `flashstate.check_faults()` reports. The tensors are read when an op runs,
    not when this object is made, so a CUDA graph can be replayed with other slots in them. Two rows that write one
    slot, or a row that writes what another row reads, are the caller's error.
    """

    read: Tensor
    _: KW_ONLY
    write: Tensor | None = None
    null: int = -1

    def __post_init__(self) -> None:
        read, write = self.read, self.write
        check_tensor("read", read, ("batch",), (None,), dtypes=INDEX_DTYPES)
        if write is not None:
            check_tensor("write", write, ("batch",), tuple(read.shape), dtypes=INDEX_DTYPES)
            if write.device != read.device:
                raise ValueError(f"write is on {write.device}, read on {read.device}")
        check_int("null", self.null, -(1 << 63), (1 << 63) - 1)


def as_slots(slots: Slots | Tensor | None) -> Slots | None:
    """What ops accept as `slots`: a Slots, an index tensor, or None for "row b is slot b"."""
    if slots is None or isinstance(slots, Slots):
        return slots
    if isinstance(slots, Tensor):
        check_tensor("slots", slots, ("batch",), (None,), dtypes=INDEX_DTYPES)
        return Slots(slots)
    raise TypeError(f"slots must be a Slots, an index tensor or None, got {type(slots).__name__}")
