"""debug(): checks of what tensors hold, which ops leave out because the host would have to wait for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor

from flashstate.launch.call import Given
from flashstate.launch.environment import replaced, suspended
from flashstate.reference.state_io import resolve, resolve_read
from flashstate.state.faults import check_faults
from flashstate.state.ring import AnyRing
from flashstate.state.slots import Slots
from flashstate.state.state import State

_debugging = False


@contextmanager
def debug() -> Iterator[None]:
    """Check the contents of slots before every op inside: it waits for the device, and raises before writing anything.

    Found are two rows, or two tokens of a row, that write one slot; two rows that fill one row of the snapshots; a row
    that writes what another row reads; boundaries of packed tokens that are not in order; rows longer than max_len;
    invalid parents; cursors of rings out of range; and all that `check_faults` reports, from calls before it too. Not
    inside torch.compile; a CUDA graph cannot be captured inside.
    """
    with replaced(globals(), "_debugging", True), suspended():
        yield


def debugging() -> bool:
    return _debugging and not torch.compiler.is_compiling()


def check_debugged(given: Given, read: Callable[[Slots], Tensor] | None = None) -> None:
    """Inside debug(), raise where the numbers in slots would make an op lose or mix up a state. `read`: finds the slot
    of each row, where not the slots alone decide it."""
    num_slots, tokens, slots = len(given.pool), given.tokens, given.slots
    if slots is None or not debugging():
        return
    if slots.read.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("flashstate.debug() reads tensors on the host, which a CUDA graph cannot capture")
    if slots.cu_seqlens is not None:
        _check_boundaries(slots.cu_seqlens, tokens.sizes[0], slots.longest)
        length = slots.cu_seqlens.long().diff()
    else:
        length = torch.full((tokens.batch,), tokens.longest or 0, device=slots.read.device)
    found = resolve_read(slots, tokens.batch, num_slots, slots.read.device) if read is None else read(slots)
    reads = torch.where(length > 0, found, -1)  # a row without tokens does nothing
    write = _writes(slots, reads, length, num_slots)
    rows = _snapshot_rows(slots, reads, getattr(given, "snapshots", None))
    check_faults()  # of earlier calls too
    if slots.parents is not None:
        _check_parents(slots.parents, torch.where(reads >= 0, length, 0))
    if given.update:
        _check_unique("write slot", write)
        _check_others_reads(reads, write)
    _check_unique("fill snapshot row", rows)


def check_cursors(ring: AnyRing, slots: Slots | None, batch: int, tokens: int = 0) -> None:
    """Raise where rows of a ring would be looked for outside of it, or more of them than it can have. `tokens`: of the
    longest row, which a ring without room beside its window must have room for."""
    found = resolve_read(slots, batch, len(ring.count), ring.count.device)
    used = found[found >= 0]
    start, count = ring.start[used], ring.count[used]
    most = ring.window - (tokens if ring.length == ring.window else 0)
    wrong = ((start < 0) | (start >= ring.length) | (count < 0) | (count > most)).nonzero()
    if len(wrong):
        i = int(wrong[0])
        bounds = (
            f"ring.start must be below {ring.length}, and ring.count at most {most}, as the window has it, both from 0"
        )
        raise ValueError(f"{bounds}; in slot {int(used[i])} they are {int(start[i])} and {int(count[i])}")


def _writes(slots: Slots, read: Tensor, length: Tensor, num_slots: int) -> Tensor:
    """The slots that are written, (batch,) or (batch, T); -1 for none, as for tokens that a row does not have."""
    if slots.write is None:
        return read
    goes = read >= 0
    if slots.per_token:
        goes = goes[:, None] & (torch.arange(slots.write.shape[1], device=read.device) < length[:, None])
    return resolve("write", slots.write, goes, num_slots, slots.null)


def _snapshot_rows(slots: Slots, read: Tensor, snapshots: State | Tensor | None) -> Tensor:
    """The rows of snapshots that are filled, (batch,); -1 for none."""
    if snapshots is None:
        return torch.full_like(read, -1)
    rows = torch.arange(len(read), device=read.device) if slots.snapshot_rows is None else slots.snapshot_rows
    return resolve("snapshot row", rows, read >= 0, len(snapshots.data))


def _check_boundaries(cu_seqlens: Tensor, tokens: int, longest: int | None) -> None:
    bounds = cu_seqlens.tolist()
    lengths = [last - first for first, last in pairwise(bounds)]
    if bounds[0] != 0 or any(length < 0 for length in lengths) or bounds[-1] > tokens:
        raise ValueError(f"slots.cu_seqlens must start at 0, never fall, and end at {tokens} or before, got {bounds}")
    if longest is not None and max(lengths, default=0) > longest:
        raise ValueError(f"slots.cu_seqlens has a row of {max(lengths)} tokens, but max_len is {longest}")


def _check_parents(parents: Tensor, length: Tensor) -> None:
    """`length`: how many entries of every row are used."""
    index = torch.arange(parents.shape[1], device=parents.device)
    wrong = (((parents < -1) | (parents >= index)) & (index < length[:, None])).nonzero()
    if len(wrong):
        row, token = wrong[0].tolist()
        parent = int(parents[row, token])
        raise ValueError(f"slots.parents must be from -1 to t - 1, got {parent} for token {token} of row {row}")


def _check_unique(do: str, numbers: Tensor) -> None:
    values, counts = numbers[numbers >= 0].unique(return_counts=True)
    if (counts > 1).any():
        twice = int(values[counts > 1][0])
        rows = (numbers == twice).nonzero()[:, 0].tolist()
        raise ValueError(f"slots {do} {twice} more than once: rows {', '.join(map(str, rows))}")


def _check_others_reads(read: Tensor, write: Tensor) -> None:
    """No row may write a slot that another row reads; its own it may."""
    write = write if write.dim() == 2 else write[:, None]
    clash = (write[:, :, None] == read) & (write[:, :, None] >= 0)  # (batch, T, batch)
    clash &= ~torch.eye(len(read), dtype=torch.bool, device=read.device)[:, None, :]
    if clash.any():
        row, token, other = clash.nonzero()[0].tolist()
        raise ValueError(f"slots let row {row} write slot {int(write[row, token])}, which row {other} reads")
