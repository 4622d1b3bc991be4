"""Tokens of a batch on a pool, for ops whose states are State: every one by its token function, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from flashstate.reference.state_io import load_state, resolve, resolve_read, store_output, store_state, token_positions
from flashstate.reference.tree import Tree, column
from flashstate.state.slots import Slots
from flashstate.state.state import State

# Of states (rows, heads, rows, cols) and what a token of each brings: its output and the states after it, unrounded.
TokenFunction = Callable[..., tuple[Tensor, Tensor]]


class Rows(NamedTuple):
    """The rows of a batch, and a place for the outputs of their tokens."""

    at: Tensor  # (batch, T): where their tokens are on one axis of all tokens; -1 where a row has ended
    y: Tensor  # (tokens, ...), float32: zeros
    read: Tensor  # (batch,): the slots they read; -1 for padding
    live: Tensor  # (batch,): whether there is one
    gives: Tensor  # (batch,): whether they have outputs of their own


def rows_of(slots: Slots | None, num_slots: int, out: Tensor, lead: int) -> Rows:
    """The rows of a call whose `out` has so many token axes: (batch, T), (batch,) or packed (tokens,)."""
    batch = out.shape[0] if slots is None else slots.read.shape[0]
    y = out.new_zeros(out.shape[:lead].numel(), *out.shape[lead:], dtype=torch.float32)
    read = resolve_read(slots, batch, num_slots, out.device)
    live = read >= 0
    gives = torch.ones_like(live) if slots is not None and slots.padding == "fresh" else live
    return Rows(token_positions(slots, batch, len(y), out.device), y, read, live, gives)


def flat_tokens(activations: Mapping[str, Tensor | None], lead: int) -> dict[str, Tensor | None]:
    """Activations with all tokens on one axis, of so many token axes."""
    return {name: None if t is None else t.flatten(0, lead - 1) for name, t in activations.items()}


def step_tokens(
    state: State,
    activations: Mapping[str, Tensor | None],  # by the names that `token` has for them
    token: TokenFunction,
    slots: Slots | None,
    snapshots: State | None,
    update: bool,
    out: Tensor,
) -> None:
    """Every token of every row of the batch, on the pool: fills `out`, `snapshots` and, with `update`, the pool."""
    num_slots, lead = state.data.shape[0], out.dim() - 2
    activations = flat_tokens(activations, lead)
    at, y, read, live, gives = rows_of(slots, num_slots, out, lead)
    write, null = (None, -1) if slots is None else (slots.write, slots.null)
    rows = None if slots is None else slots.snapshot_rows
    seed = state.seeds_of(read)
    parents = None if slots is None else slots.parents
    longest = at.shape[1] if slots is None or slots.longest is None else slots.longest

    s = states_of(state, read)  # (batch, heads, rows, cols): the state after the last token
    after = Tree(s, parents) if parents is not None else None
    for t in range(at.shape[1]):
        runs = gives & (at[:, t] >= 0)
        if after is not None:
            s, runs = after.continues_from(t, runs)
        here = at[runs, t]
        brought = {name: None if tensor is None else tensor[here] for name, tensor in activations.items()}
        y[here], s[runs] = token(s[runs], **brought)
        if after is not None:
            after.append(s)
        index = torch.full_like(read, t)
        if update and write is not None and write.dim() == 2:
            to = resolve("write", column(write, t), runs & live, num_slots, null)
            store_state(state, s, (to,), seed, index)
        if snapshots is not None and t < longest:
            to = torch.arange(len(read), device=out.device) if rows is None else rows
            to = resolve("snapshot row", to, runs & live, snapshots.data.shape[0])
            store_state(snapshots, s, (to, index), seed, index)
    store_output(out, y, at, live, slots)
    if update and (write is None or write.dim() == 1):
        store_last(state, s, slots, read, seed, (at >= 0).sum(1))


def step_at_once(
    state: State,
    activations: Mapping[str, Tensor | None],  # by the names that `tokens` has for them
    tokens: TokenFunction,  # of the states of rows, all their tokens, (batch, T, ...), and which of these exist
    slots: Slots | None,
    update: bool,
    out: Tensor,
) -> None:
    """All tokens of every row of the batch at once, on the pool: fills `out` and, with `update`, the pool."""
    flat = flat_tokens(activations, out.dim() - 2)
    at, y, read, live, gives = rows_of(slots, state.data.shape[0], out, out.dim() - 2)
    within = at if slots is None else at[:, : slots.longest]  # packed rows are cut at max_len
    if within.shape[1] == 0:  # no row has a token
        store_output(out, y, at, live, slots)
        return
    exists = (within >= 0) & gives[:, None]
    rows = {name: t[within.clamp(min=0)] for name, t in flat.items() if t is not None}  # (batch, T, ...)
    outputs, s = tokens(states_of(state, read), **rows, exists=exists)
    y[within[exists]] = outputs[exists]
    store_output(out, y, at, live, slots)
    if update:
        store_last(state, s, slots, read, state.seeds_of(read), (within >= 0).sum(1))


def states_of(state: State, read: Tensor) -> Tensor:
    """The states in these slots, (batch, heads, rows, cols) float32; zeros where there is none."""
    s = torch.zeros(len(read), *state.data.shape[1:], dtype=torch.float32, device=read.device)
    s[read >= 0] = load_state(state, read[read >= 0])
    return s


def store_last(state: State, s: Tensor, slots: Slots | None, read: Tensor, seed: Tensor | None, length: Tensor) -> None:
    """Store the states after the last tokens of rows that have some, where they were read or where `slots` says."""
    write, null = (None, -1) if slots is None else (slots.write, slots.null)
    goes = (read >= 0) & (length > 0)
    to = resolve("write", read if write is None else write, goes, state.data.shape[0], null)
    store_state(state, s, (to,), seed, length - 1)
