"""Slots: which slots of the pool every row of a batch reads and writes, and which tokens it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property

import torch
from torch import Tensor

from flashstate.errors import (
    INDEX_DTYPES,
    INT64,
    LARGEST_INT32,
    check_choice,
    check_flag,
    check_int,
    check_list,
    check_row_contiguous,
    check_tensor,
    no_tensor,
)
from flashstate.state.signature import Describes, describe, signature_of, unless_known

MOST_TOKENS = LARGEST_INT32  # on a token axis
PADDINGS = ("zero", "fresh", "keep")
SlotNumbers = int | Sequence[int] | Tensor  # what names slots where no op steps them
TABLES = ("read", "accepted", "write", "parents", "cu_seqlens", "snapshot_rows")  # in the order of kernels


@dataclass(frozen=True, eq=False)
class Slots(Describes):
    """Where the rows of a batch live, and how many tokens each has; built once per model step, shared by all layers.

    read: (batch,) int32 or int64, the slot each row continues from; or (batch, n) with `accepted`. A row whose slot is
        `null`, negative or past the pool is padding: its output is what `padding` says, and no memory of the pool is
        touched.
    write: (batch,), where the state after the last token goes; None: where it was read. Or (batch, T): where the state
        after every token goes, and nothing else is written. A slot that is `null`, negative or past the pool skips
        that write.
    accepted: (batch,) numbers from 1 to n: row b reads read[b, accepted[b] - 1]. Any other number makes it padding.
        With read (batch,) it is for `conv1d_step` alone: how many tokens of the call before row b keeps.
    at_least_one: True takes counts below 1, of a table read (batch, n), as 1: such rows read their first slot.
    snapshot_rows: (batch,), the row of `snapshots` that a batch row fills; None: its own. Negative: none.
    cu_seqlens: (batch + 1,), for packed tokens: row b has the tokens from cu_seqlens[b] up to cu_seqlens[b + 1].
    max_len: the largest number of tokens a packed row has; needed for snapshots of packed tokens, and
        for their replay.
    parents: (batch, T), a draft tree: token t continues from the state after token parents[b, t] < t, or with -1 from
        the slot that was read. A token whose parent is anything else gives zero, and so do those that follow from it.
    null: the slot number that means "no request"; negatives always do.
    padding: the output of padding rows: "zero"; "fresh": what their tokens give from a zero state; or "keep": what is
        in `out`, zero where the op allocates it.

    With packed tokens the second axis of `write` and `parents` has max_len entries. Numbers past the pool, past n or
    past the snapshots also set a flag that `flashstate.check_faults()` reports. The tensors are read when an op runs,
    not when this object is made, so a CUDA graph can be replayed with other contents. Two rows that write one slot, or
    a row that writes what another row reads, are the caller's error; inside `flashstate.debug()` they are found. What a
    row reads itself it may write.
    """

    read: Tensor
    _: KW_ONLY
    write: Tensor | None = None
    accepted: Tensor | None = None
    snapshot_rows: Tensor | None = None
    cu_seqlens: Tensor | None = None
    max_len: int | None = None
    parents: Tensor | None = None
    null: int = -1
    padding: str = "zero"
    at_least_one: bool = False

    def __post_init__(self) -> None:
        if self.max_len is not None:
            check_int("max_len", self.max_len, 0, MOST_TOKENS)
        check_int("null", self.null, *INT64)
        check_flag("at_least_one", self.at_least_one)
        self._check_tables()

    @unless_known
    def _check_tables(self) -> None:
        self._check_read()
        batch = self.read.shape[0]
        _check_table("write", self.write, batch, (1, 2))
        _check_table("parents", self.parents, batch, (2,))
        check_list("accepted", self.accepted, batch)
        check_list("snapshot_rows", self.snapshot_rows, batch)
        check_list("cu_seqlens", self.cu_seqlens, batch + 1, "batch + 1")
        if self.max_len is not None and self.cu_seqlens is None:
            raise ValueError("max_len is for packed tokens: give it with cu_seqlens")
        self.check_entries(self.longest)
        check_choice("padding", self.padding, PADDINGS)
        if self.at_least_one and self.read.dim() == 1:
            raise ValueError("at_least_one is for accepted counts of read (batch, n), got read (batch,)")
        for name in ("write", "accepted", "snapshot_rows", "cu_seqlens", "parents"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.device != self.read.device:
                raise ValueError(f"{name} is on {tensor.device}, read on {self.read.device}")

    def _check_read(self) -> None:
        if isinstance(self.read, Tensor) and self.read.dim() == 2:
            check_tensor("read", self.read, ("batch", "n"), (None, None), dtypes=INDEX_DTYPES)
            check_row_contiguous("read", self.read)
            if self.accepted is None:
                raise ValueError("accepted must be given for read (batch, n): it says which of the n slots to read")
        else:
            check_tensor("read", self.read, ("batch",), (None,), dtypes=INDEX_DTYPES)

    def check_entries(self, longest: int | None, prefix: str = "") -> None:
        """Raise unless tables of numbers per token have as many as the longest row has tokens."""
        for name, table in (("write", self.write), ("parents", self.parents)):
            if table is not None and table.dim() == 2 and table.shape[1] != longest:
                words = f"must have an entry for each of the {longest} tokens, got shape {tuple(table.shape)}"
                raise ValueError(f"{prefix}{name} {words}")

    def check_device(self, device: torch.device, of: str = "state") -> None:
        """Raise unless the tables are on the device of what they are for."""
        if self.read.device != device:
            raise ValueError(f"slots are on {self.read.device}, but the {of} is on {device}")

    @cached_property
    def tables(self) -> tuple[Tensor, ...]:
        """All tensors there are, in the order in which kernels take them."""
        return tuple(table for name in TABLES if (table := getattr(self, name)) is not None)

    @cached_property
    def signature(self) -> int:
        """Stands for all that a launch depends on but the addresses."""
        described = (describe(getattr(self, name)) for name in TABLES)
        return signature_of("slots", *described, self.max_len, self.null, self.padding, self.at_least_one)

    @property
    def longest(self) -> int | None:
        """The most tokens a row has, as far as this object knows."""
        if self.max_len is not None:
            return self.max_len
        tables = [t for t in (self.write, self.parents) if t is not None and t.dim() == 2]
        return tables[0].shape[1] if tables else None

    @property
    def rolls_back(self) -> bool:
        """Whether rows continue from an offset in their own slot, not from a slot of a table."""
        return self.accepted is not None and self.read.dim() == 1

    @property
    def per_token(self) -> bool:
        """Whether the state after every token is written, each to its own slot."""
        return self.write is not None and self.write.dim() == 2


def _check_table(name: str, table: Tensor | None, batch: int, ranks: tuple[int, ...]) -> None:
    """A tensor of numbers per batch row, or per batch row and token."""
    if table is None:
        return
    rank = table.dim() if isinstance(table, Tensor) and table.dim() in ranks else ranks[0]
    check_tensor(name, table, ("batch", "T")[:rank], (batch, None)[:rank], dtypes=INDEX_DTYPES)
    if rank == 2:
        check_row_contiguous(name, table)


def as_slots(slots: Slots | Tensor | None) -> Slots | None:
    """What ops accept as `slots`: a Slots, an index tensor, or None for "row b is slot b"."""
    if slots is None or isinstance(slots, Slots):
        return slots
    if isinstance(slots, Tensor):
        check_tensor("slots", slots, ("batch",), (None,), dtypes=INDEX_DTYPES)
        return Slots(slots)
    raise TypeError(f"slots must be a Slots, an index tensor or None, got {no_tensor(slots)}")
