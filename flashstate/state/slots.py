"""Slots: which slot of the pool every row of a batch reads and writes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flashstate.errors import INDEX_DTYPES, check_tensor


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
    write: Tensor | None = None
    null: int = -1

    def __init__(self, read: Tensor, *, write: Tensor | None = None, null: int = -1) -> None:
        check_tensor("read", read, ("batch",), (None,), dtypes=INDEX_DTYPES)
        if write is not None:
            check_tensor("write", write, ("batch",), tuple(read.shape), dtypes=INDEX_DTYPES)
            if write.device != read.device:
                raise ValueError(f"write is on {write.device}, read on {read.device}")
        if not isinstance(null, int) or isinstance(null, bool):
            raise TypeError(f"null must be an int, got {null!r}")
        if not -(1 << 63) <= null < 1 << 63:
            raise ValueError(f"null must fit in 64 bits, got {null}")
        object.__setattr__(self, "read", read)
        object.__setattr__(self, "write", write)
        object.__setattr__(self, "null", null)


def as_slots(slots: Slots | Tensor | None) -> Slots | None:
    """What ops accept as `slots`: a Slots, an index tensor, or None for "row b is slot b"."""
    if slots is None or isinstance(slots, Slots):
        return slots
    if isinstance(slots, Tensor):
        return Slots(slots)
    raise TypeError(f"slots must be a Slots, an index tensor or None, got {type(slots).__name__}")
