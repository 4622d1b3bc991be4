"""What all ops check about the tokens of a call, the slots they run in, and their snapshots."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashstate.errors import check_flag, check_tensor
from flashstate.state.slots import Slots
from flashstate.state.state import State


class Tokens(NamedTuple):
    """The token axes of a call's activations, by name and by size, and the rows and tokens they hold."""

    axes: tuple[str, ...]  # ("batch",), ("batch", "T") or packed ("tokens",)
    sizes: tuple[int, ...]
    batch: int
    longest: int | None  # the most tokens a row has; None where only the device knows

    @property
    def packed(self) -> bool:
        return self.axes == ("tokens",)


def tokens_of(name: str, x: Tensor, widths: dict[str, int], device: torch.device, slots: Slots | None) -> Tokens:
    """The tokens of `x` (..., *widths), an op's first argument that has some; checks its shape, dtype and device."""
    packed = slots is not None and slots.cu_seqlens is not None
    one = isinstance(x, Tensor) and x.dim() == 1 + len(widths)
    axes = ("tokens",) if packed else ("batch",) if one else ("batch", "T")
    names, sizes = tuple(widths), tuple(widths.values())
    other = None if packed else ("batch", "T") if one else ("batch",)
    check_tensor(
        name, x, axes + names, (None,) * len(axes) + sizes, device=device,
        also=None if other is None else (other + names, (None,) * len(other) + sizes),
    )  # fmt: skip
    lead = tuple(x.shape[: len(axes)])
    if slots is not None and packed:
        return Tokens(axes, lead, slots.read.shape[0], slots.longest)
    return Tokens(axes, lead, lead[0], 1 if one else lead[1])


def check_slots(num_slots: int, device: torch.device, tokens: Tokens, slots: Slots | None, update: bool) -> None:
    """Raise unless the slots are for these tokens, on the state's device, and write what `update` allows."""
    check_flag("update", update)
    if slots is None:
        if tokens.batch > num_slots:
            raise ValueError(f"slots must be given for a batch of {tokens.batch} on a pool of {num_slots} slots")
        return
    if slots.read.device != device:
        raise ValueError(f"slots are on {slots.read.device}, but the state is on {device}")
    if slots.read.shape[0] != tokens.batch:
        raise ValueError(f"slots must have {tokens.batch} rows, as the batch has, got {slots.read.shape[0]}")
    for name, table in (("write", slots.write), ("parents", slots.parents)):
        if table is not None and table.dim() == 2 and table.shape[1] != tokens.longest:
            longest, got = tokens.longest, tuple(table.shape)
            raise ValueError(f"slots.{name} must have an entry for each of the {longest} tokens, got shape {got}")
    if slots.write is not None and not update:
        raise ValueError("update=False writes no state, so slots must not have write")
    if slots.parents is not None and update and not slots.per_token:
        raise ValueError(
            "slots.parents makes a tree, which has no last state: it needs update=False, or write (batch, T)"
        )


def check_table_of_slots(slots: Slots | None) -> None:
    """Raise where accepted counts are offsets, for an op whose states have none."""
    if slots is not None and slots.rolls_back:
        raise ValueError(
            f"slots.accepted needs read (batch, n) to choose from, got read {tuple(slots.read.shape)}: only "
            "windows of conv1d_step can be read at an offset"
        )


def check_snapshots(
    snapshots: Tensor, of: tuple[int, ...], device: torch.device, tokens: Tokens, slots: Slots | None
) -> None:
    """Raise unless the snapshots, of states of this shape, have room for every token of every row."""
    if tokens.longest is None:
        raise ValueError("snapshots of packed tokens need slots.max_len, the most tokens a row has")
    shape = tuple(snapshots.shape)
    if shape[2:] != of:
        raise ValueError(f"snapshots must be of states {of}, got {shape[2:]}")
    if snapshots.device != device:
        raise ValueError(f"snapshots is on {snapshots.device}, but the state is on {device}")
    if shape[1] < tokens.longest:
        raise ValueError(f"snapshots must have room for {tokens.longest} tokens, got shape {shape}")
    if shape[0] < tokens.batch and (slots is None or slots.snapshot_rows is None):
        raise ValueError(f"snapshots must have room for {tokens.batch} rows, got shape {shape}")


def new_out(x: Tensor, slots: Slots | None) -> Tensor:
    """An output for these tokens; zeros where padding rows keep what is in it."""
    allocate = torch.zeros if slots is not None and slots.padding == "keep" else torch.empty
    return allocate(x.shape, dtype=x.dtype, device=x.device)


SLOTS_SCHEMA = (
    "Tensor? read, Tensor? write, Tensor? accepted, Tensor? snapshot_rows, Tensor? cu_seqlens, SymInt? max_len, "
    "Tensor? parents, SymInt null, str padding"
)
SNAPSHOTS_SCHEMA = "Tensor({0}!)? snapshot_data, Tensor({1}!)? snapshot_scale, str snapshot_rounding"


FlatSlots = tuple[
    Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, int | None, Tensor | None, int, str
]


def flat_slots(slots: Slots | None) -> FlatSlots:
    """The fields of a Slots in the order of SLOTS_SCHEMA."""
    if slots is None:
        return None, None, None, None, None, None, None, -1, "zero"
    return (
        slots.read, slots.write, slots.accepted, slots.snapshot_rows, slots.cu_seqlens, slots.longest, slots.parents,
        slots.null, slots.padding,
    )  # fmt: skip


def slots_of(
    read: Tensor,
    write: Tensor | None,
    accepted: Tensor | None,
    snapshot_rows: Tensor | None,
    cu_seqlens: Tensor | None,
    max_len: int | None,
    parents: Tensor | None,
    null: int,
    padding: str,
) -> Slots:
    """The Slots that has these fields, of which flat_slots made a list."""
    max_len = None if cu_seqlens is None else max_len
    return Slots(
        read, write=write, accepted=accepted, snapshot_rows=snapshot_rows, cu_seqlens=cu_seqlens, max_len=max_len,
        parents=parents, null=null, padding=padding,
    )  # fmt: skip


def flat_snapshots(snapshots: State | None) -> tuple[Tensor | None, Tensor | None, str]:
    """The fields of snapshots in the order of SNAPSHOTS_SCHEMA."""
    return (None, None, "nearest") if snapshots is None else (snapshots.data, snapshots.scale, snapshots.rounding)
