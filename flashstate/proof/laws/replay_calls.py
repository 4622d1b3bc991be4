"""Laws of calls of replay: packed rows, padding, slots, outputs, strides, pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashstate.ops.mamba2_replay import ReplayTokenProblem, replay_kind
from flashstate.proof import ReplayCase, ReplayInputs, slotted
from flashstate.proof.laws.replay import CURSORS, FORMS, call, forms_on, law, require_close
from flashstate.proof.laws.require import (
    poison,
    require,
    require_equal_bytes,
    require_equal_states,
    require_fault,
    rest_of,
)
from flashstate.proof.laws.steps import PAGE_FILL, in_pages
from flashstate.state.formats import bits_of


@law(
    "packed rows of a replay, none among them, equal the same rows alone; tokens no row has give zero",
    includes=lambda case: case.packed,
)
def packed_equals_dense(case: ReplayCase, device: torch.device) -> None:
    """One token stays packed where a dense call of it is not summed in the order of others."""
    inputs = case.make_inputs(device)
    for form in forms_on(device):
        packed = inputs.fresh()
        y = call(form, packed)
        require(bool((y[sum(case.lengths) :] == 0).all()), f"the output of a token that no row has is not zero, {form}")
        for row, got in enumerate(packed.per_row(y)):
            if form == FORMS[row % len(FORMS)]:
                alone, slot = inputs.fresh(), inputs.slots[row : row + 1].long()
                if replay_kind(case.lengths[row], case.format, False, case.window) is ReplayTokenProblem:
                    want = alone.of_rows(torch.tensor([row], device=device)).step()
                else:
                    want = alone.dense_row(row).step()[0]
                require_equal_bytes(f"output of row {row}, {form}", got, want)
                require_equal_states(f"row {row}, {form}", packed.state, alone.state, slot)


def _holes(case: ReplayCase) -> Iterator[tuple[str, int, int]]:
    """Of every form a number that means no slot, and a slot that a padding row has: negative, that number, or past the
    pool."""
    yield from zip(FORMS, (-1, case.slots, 1 << 40), (-7, case.slots, case.slots + 3), strict=True)


def _padded(case: ReplayCase, hole: int, device: torch.device) -> tuple[ReplayInputs, Tensor]:
    """Inputs whose first row is in a slot full of NaN, and slots to read that have none for it."""
    inputs = case.make_inputs(device)
    poison(inputs.state, inputs.slots[:1].long())
    read = inputs.slots.clone()
    read[0] = hole
    return inputs, read


@law("a padding row of a replay gives zero and touches nothing")
def padding(case: ReplayCase, device: torch.device) -> None:
    for form, null, hole in _holes(case):
        inputs, read = _padded(case, hole, device)
        clean = case.make_inputs(device)
        want = clean.step()
        clean.per_row(want)[0].zero_()
        for activation in inputs.activations.values():
            inputs.per_row(activation)[0].fill_(torch.nan)
        run = inputs.fresh()
        require_equal_bytes(f"output (slot {hole}, null {null}), {form}", call(form, run, read=read, null=null), want)
        _require_only_others(run, inputs, clean)
        require_fault("read" if hole >= case.slots and hole != null else None)


def _require_only_others(run: ReplayInputs, before: ReplayInputs, clean: ReplayInputs) -> None:
    """The slot of the first row is as it was, all others as in a run in which it was no padding."""
    slots = before.slots.long()
    require_equal_states("the slot of a padding row", run.state, before.state, slots[:1])
    require_equal_states("the other rows", run.state, clean.state, slots[1:])


@law('with padding="fresh" a padding row of a replay gives what a zero state and an empty ring give')
def fresh_padding(case: ReplayCase, device: torch.device) -> None:
    for form, null, hole in _holes(case):
        inputs, read = _padded(case, hole, device)
        run, empty = inputs.fresh(), case.make_inputs(device)
        for tensor in slotted(empty.state).values():
            bits_of(tensor)[inputs.slots[:1].long()] = 0
        y = call(form, run, read=read, null=null, padding="fresh")
        require_equal_bytes(f"output (slot {hole}, null {null}), {form}", y, empty.step())
        _require_only_others(run, inputs, empty)
        require_fault("read" if hole >= case.slots and hole != null else None)


@law('with padding="keep" a padding row of a replay leaves its output as it was')
def kept_padding(case: ReplayCase, device: torch.device) -> None:
    for form, null, hole in _holes(case):
        inputs, read = _padded(case, hole, device)
        zeroed, kept = inputs.fresh(), inputs.fresh()
        want = call(form, zeroed, read=read, null=null)
        of_slots: dict[str, Any] = {"read": read, "null": null, "padding": "keep"}
        if form == "decided":
            require_equal_bytes("allocated output", call(form, inputs.fresh(), **of_slots), want)
        inputs.per_row(want)[0].fill_(torch.inf)
        y = call(form, kept, {"out": torch.full_like(want, torch.inf)}, **of_slots)
        require_equal_bytes(f"output (slot {hole}, null {null}), {form}", y, want)
        require_equal_states(f"the pool, {form}", kept.state, zeroed.state)
        require_fault("read" if hole >= case.slots and hole != null else None)


@law("NaN in a row's tokens shows in that row of a replay and nowhere else")
def nan_is_local(case: ReplayCase, device: torch.device) -> None:
    clean = case.make_inputs(device)
    y_clean = clean.per_row(call("parted", clean))
    for name in clean.activations:
        inputs = case.make_inputs(device)
        inputs.per_row(inputs.activations[name])[0].fill_(torch.nan)
        y = inputs.per_row(call("parted", inputs))
        require(bool(y[0].isnan().all()), f"NaN in {name} was hidden")
        for row, row_clean in zip(y[1:], y_clean[1:], strict=True):
            require_equal_bytes("the other rows", row, row_clean)
        others = rest_of(replace(inputs, slots=inputs.slots[:1]))
        require_equal_states("the other slots", inputs.state, clean.state, others)


@law("replay with update=False gives the same output and leaves checkpoints and rings as they are")
def update_false(case: ReplayCase, device: torch.device) -> None:
    inputs = case.make_inputs(device)
    y = inputs.fresh().step()
    for form in forms_on(device):
        run = inputs.fresh()
        require_equal_bytes(f"output, {form}", call(form, run, {"update": False}), y)
        require_equal_states(f"the pool, {form}", run.state, inputs.state)


@law("replay without slots has row b in slot b", includes=lambda case: not case.packed)
def default_slots(case: ReplayCase, device: torch.device) -> None:
    inputs = case.make_inputs(device)
    given, left_out = (replace(inputs.fresh(), slots=torch.arange(case.batch, device=device)) for _ in range(2))
    require_equal_bytes("output", left_out.step(slots=None), given.step())
    require_equal_states("the pool", left_out.state, given.state)


@law("`out` of a replay is filled and returned, whatever its strides")
def given_out(case: ReplayCase, device: torch.device) -> None:
    inputs = case.make_inputs(device)
    want, tokens = inputs.fresh().step(), len(case.token_axes)
    for form in forms_on(device):
        wide = (*case.token_axes, 2, case.heads, case.rows + 3)
        buffer = torch.full(wide, torch.nan, dtype=want.dtype, device=device)
        out = buffer.select(tokens, 1)[..., 1 : case.rows + 1]
        require(call(form, inputs.fresh(), {"out": out}) is out, "the result is not `out`")
        require_equal_bytes(f"out, {form}", out, want)
        around = buffer.select(tokens, 0).isnan().all() and buffer[..., case.rows + 1 :].isnan().all()
        require(bool(around), "memory around out changed")


@law("strided activations and expanded parameters change nothing in a replay")
def strided_activations(case: ReplayCase, device: torch.device) -> None:
    inputs = case.make_inputs(device)
    views = case.as_views(inputs.fresh())
    table = torch.stack([views.slots, views.slots.flip(0)], dim=1)
    require_equal_bytes("output", views.step(slots=views.at(read=table[:, 0])), inputs.step())
    require_equal_states("the pool", views.state, inputs.state)


@law("page-strided and unaligned checkpoints and rings are replayed, and nothing between the pages is touched")
def paged_pool(case: ReplayCase, device: torch.device) -> None:
    inputs = case.make_inputs(device)
    dense = inputs.fresh()
    dense.step()
    for offset, gap in ((0, 16), (0, 5), (1, 3)):
        of_pages = {n: in_pages(t, offset, gap) for n, t in slotted(inputs.state).items() if n not in CURSORS}
        views: dict[str, Any] = {name: view for name, (view, _) in of_pages.items()}
        paged = replace(inputs, state=replace(inputs.state, **views))
        require_close(f" with offset {offset}, gap {gap}", inputs, paged)
        require_equal_states("the rings", paged.state, dense.state, besides=("data", "scale"))
        for name, (_, memory) in of_pages.items():
            between = memory[offset:].view(case.slots, -1)[:, -gap:]
            around = bool((between == PAGE_FILL).all() and (memory[:offset] == PAGE_FILL).all())
            require(around, f"memory between slots of {name} was written")
