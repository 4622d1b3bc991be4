"""What the doors of folds share: checks of a call, and what its kernel is given."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashstate.errors import check_device
from flashstate.launch import access_width, choose, machine_of
from flashstate.launch.arguments import slots_values, state_values, tile_values
from flashstate.launch.axes import Tokens
from flashstate.launch.call import Given
from flashstate.launch.start import Launch, check_programs, kernel_in, start
from flashstate.ops.debug import check_cursors, check_debugged, debugging, refuse_capture
from flashstate.ops.replaying import AnyReplay, ring_values
from flashstate.state.faults import fault_flag
from flashstate.state.places import Place
from flashstate.state.ring import AnyRing, refuse_tables, tokens_to_fold
from flashstate.state.slots import Slots, as_slots
from flashstate.state.state import State, as_state, refuse_transposed


class Fold(NamedTuple):
    """Which rows of a call fold, and where to."""

    slots: Slots | None
    tokens: Tensor | None  # how many live tokens of each row
    most: int  # of every row, where `tokens` does not say it; -1: all
    into: State | None  # None: in place


def checked_fold(
    op: str,
    state: State,
    ring: AnyRing,
    slots: Slots | Tensor | None,
    tokens: Tensor | int | None,
    into: State | Tensor | None,
) -> Fold:
    """What a call of this op folds, if slots, tokens and the State to store in go with its state and its ring."""
    where = as_slots(slots)
    target = None if into is None else _check_into(as_state(into, "into"), state)
    if where is not None:
        where.check_device(state.data.device)
        if where.write is not None and (into is None or where.per_token):
            raise ValueError(f"slots.write is for {op} with into, whose slots it names, one per row: (batch,)")
        refuse_tables(where, "folding")
    if target is not None and len(target.data) < len(state.data) and (where is None or where.write is None):
        need, got = len(state.data), len(target.data)
        raise ValueError(f"into must have {need} slots as the state has, or slots.write to say where, got {got}")
    batch = len(state.data) if where is None else len(where.read)
    each, most = tokens_to_fold(tokens, ring, batch)
    if debugging():
        refuse_capture(state.data)
        if into is None:  # which may have other slots
            names, tokens_of_rows = ("pool", "tokens", "slots", "update"), Tokens(("batch",), (batch,), batch, 1)
            check_debugged(Given((*names, "ring"), (state.data, tokens_of_rows, where, True, ring)))
        check_cursors(ring, where, batch)
    return Fold(where, each, most, target)


def _check_into(into: State, state: State) -> State:
    """The State to store in, if its slots are like those of a layer; it draws the random bits of that."""
    refuse_transposed("into", into)
    if into.data.shape[1:] != state.data.shape[1:]:
        raise ValueError(f"into must have states {tuple(state.data.shape[1:])}, got {tuple(into.data.shape[1:])}")
    check_device("into", into.data, state.data.device)
    if into.rounding != "nearest" and state.seed is None:
        raise ValueError(f"into with rounding={into.rounding!r} needs a state with a seed, got seed=None")
    _refuse_shared(into, state)
    return replace(into, rounds=state.rounds, stream=state.stream)


def _refuse_shared(into: State, state: State) -> None:
    """Raise where the slots of two States have memory in common: a row could write what another one still reads."""
    if torch.compiler.is_compiling():  # then tensors have no addresses
        return
    here, there = ([Place.of(part) for part in (s.data, s.scale) if part is not None] for s in (state, into))
    if any(one.overlaps(other) for one, other in product(here, there)):
        instead = "within a pool, copy the slot and fold the copy in place"
        raise ValueError(f"into must not share memory with the state, of which rows are still read; {instead}")


def start_fold(kernel: str, state: State, ring: AnyRing, fold: Fold, problem: AnyReplay, more: dict[str, Any]) -> None:
    """Start the kernel of a fold, with what only its op knows."""
    slots, tokens, most, into = fold
    machine = machine_of(state.data.device)
    config = choose(problem, machine.gpu)
    other, target = ({}, state) if into is None else (state_values(into), into)
    programs = problem.batch_heads * -(-problem.rows // config.block_rows)
    check_programs("slots", programs, f"shape {tuple(state.data.shape)}")
    values = {
        **state_values(state), **slots_values(slots), **ring_values(ring), **tile_values(machine, problem, config),
        "fault_ptr": fault_flag(state.data.device), "tokens_ptr": tokens, "most": most,
        "into_ptr": other.get("data_ptr"), "into_scale_ptr": other.get("scale_ptr"),
        "into_stride": other.get("slot_stride", 0), "into_scale_stride": other.get("scale_stride", 0),
        "INTO_HEAD_STRIDE": other.get("HEAD_STRIDE"), "num_targets": len(target.data),
        "HEADS_PER_GROUP": problem.heads_per_group, "ROUNDING": target.rounding,
        "INTO_VECTOR": min(problem.vector, access_width(target.data)), **more,
    }  # fmt: skip
    start(Launch(kernel_in(kernel), (programs,), state.data.device, values, num_warps=1))
