"""conv1d_step: the short causal convolution before a recurrence. docs/ops/ derives it; this file defines it."""

from __future__ import annotations

import torch
from torch import Tensor

from flashstate.reference.mamba2 import silu
from flashstate.reference.state_io import note_fault, resolve, resolve_read, store_output, token_positions
from flashstate.reference.tree import Tree, column
from flashstate.state.formats import bits_of
from flashstate.state.slots import Slots


def conv1d_token(
    u: Tensor,  # (batch, C, K), float32 or float64: the last K inputs, the token's own among them
    weight: Tensor,  # (C, K)
    bias: Tensor | None,  # (C,)
    activation: str | None,
) -> Tensor:
    """The output (batch, C) of one token."""
    weight = weight.to(u.dtype)
    y = u.new_zeros(u.shape[:2]) if bias is None else bias.to(u.dtype).expand(u.shape[:2])
    for i in range(u.shape[2]):
        y = y + weight[:, i] * u[..., i]
    return silu(y) if activation == "silu" else y


@torch.no_grad()
def conv1d_step(
    window: Tensor,  # (slots, C, L)
    x: Tensor,  # (batch, T, C), (batch, C), or packed (tokens, C)
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    history: int,  # entries before the tokens, where slots.accepted is an offset
    positions: Tensor | None,  # (batch,), where the window is a ring
    slots: Slots,
    snapshots: Tensor | None,  # (rows, T, C, K - 1)
    update: bool,
    out: Tensor,
) -> None:
    """Every token of every row of the batch: fills `out`, `snapshots` and, with `update`, the windows."""
    (num_slots, channels, length), width, batch = window.shape, weight.shape[1], slots.read.shape[0]
    x = bits_of(x.flatten(0, -2).to(window.dtype))  # windows are copied, bit by bit
    stored, copies = bits_of(window), None if snapshots is None else bits_of(snapshots)
    at = token_positions(slots, batch, x.shape[0], x.device)  # (batch, T)
    read, first = first_entries(width, length, history, positions, slots, num_slots)
    longest = at.shape[1] if slots.longest is None else slots.longest
    live = read >= 0
    gives = torch.ones_like(live) if slots.padding == "fresh" else live

    old = x.new_zeros(batch, channels, length)
    old[live] = stored[read[live]]
    entries = (first[:, None] + torch.arange(width - 1, device=x.device)) % length  # (batch, K - 1)
    recent = take(old, entries)  # (batch, C, K - 1): the inputs before a token
    after = None if slots.parents is None else Tree(recent, slots.parents)
    y = x.new_zeros(x.shape, dtype=torch.float32)
    for t in range(at.shape[1]):
        runs = gives & (at[:, t] >= 0)
        if after is not None:
            recent, runs = after.continues_from(t, runs)
        token = at[runs, t]
        u = torch.cat([recent[runs], x[token, :, None]], 2)  # (rows, C, K)
        y[token] = conv1d_token(u.view(window.dtype).float(), weight, bias, activation)
        recent = recent.index_put((runs,), u[..., 1:])
        if after is not None:
            after.append(recent)
        if update and slots.per_token and slots.write is not None:
            to = resolve("write", column(slots.write, t), runs & live, num_slots, slots.null)
            stored[to[to >= 0]] = recent[to >= 0]
        if copies is not None and t < longest:
            rows = torch.arange(batch, device=x.device) if slots.snapshot_rows is None else slots.snapshot_rows
            to = resolve("snapshot row", rows, runs & live, len(copies))
            copies[to[to >= 0], t] = recent[to >= 0]
    if update and not slots.per_token:
        count = (at >= 0).sum(1)
        to = resolve("write", read if slots.write is None else slots.write, live & (count > 0), num_slots, slots.null)
        tokens = x[at.clamp(min=0)].transpose(1, 2)  # (batch, C, T); what is past a row is not used
        source = entry_sources(width, length, history, positions, slots, first, count)  # (batch, L)
        new, kept = take(torch.cat([old, tokens], 2), source.clamp(min=0)), source[:, None] < 0
        goes = to >= 0
        stored[to[goes]] = torch.where(kept[goes], stored[to[goes]], new[goes])
    store_output(out, y, at, live, slots)


def first_entries(
    width: int, length: int, history: int, positions: Tensor | None, slots: Slots, num_slots: int
) -> tuple[Tensor, Tensor]:
    """The slot that every row reads, -1 for padding, and the first of the K - 1 entries that it reads there: (batch,)
    each. The others follow, in a ring round its end."""
    read = resolve_read(slots, slots.read.shape[0], num_slots, slots.read.device)
    if positions is not None:
        return read, positions.long() - (width - 1)
    if not slots.rolls_back or slots.accepted is None:
        return read, torch.full_like(read, length - (width - 1))
    first = slots.accepted.long() - (width - 1 - history)
    past = first > length - (width - 1)
    note_fault("accepted", slots.accepted[past & (read >= 0)])
    outside = past | (first < 0)
    return torch.where(outside, -1, read), torch.where(outside, 0, first)


def slots_read(places: tuple[int, int, int, Tensor | None], num_slots: int, slots: Slots) -> Tensor:
    """The slot that every row reads, -1 for padding, (batch,); `places`: what first_entries knows of windows."""
    return first_entries(*places, slots, num_slots)[0]


def entry_sources(
    width: int, length: int, history: int, positions: Tensor | None, slots: Slots, first: Tensor, count: Tensor
) -> Tensor:
    """Where every entry of a row's window comes from, (batch, L): an entry of the old one, or `length` + t for token t;
    -1 where it stays."""
    entry, count = torch.arange(length, device=first.device), count[:, None]
    if positions is not None:  # a ring: the last token that falls on an entry
        t = count - 1 - (positions.long()[:, None] + count - 1 - entry) % length
        return torch.where(t >= 0, length + t, -1)
    if not slots.rolls_back:  # the last L inputs
        return count + entry
    t = entry - history
    kept = first[:, None] + (width - 1 - history) + entry
    return torch.where(t < 0, kept, torch.where(t < count, length + t, -1))


def take(values: Tensor, index: Tensor) -> Tensor:
    """Entries of the last axis, other ones for every row: (batch, C, n) and (batch, m) to (batch, C, m)."""
    return values.gather(2, index[:, None].expand(-1, values.shape[1], -1))
