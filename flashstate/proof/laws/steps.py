"""Laws of every call: accuracy, independence, slots, padding, strides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashstate.launch import Config, Problem, access_width, choose, machine_of, override, valid_configs
from flashstate.launch.environment import suspended
from flashstate.proof import AnyCase, Inputs, Pool, make_inputs, oracle, slotted
from flashstate.proof.laws import require
from flashstate.proof.laws.registry import law
from flashstate.proof.laws.require import poison, rest_of, restore
from flashstate.state.formats import bits_of
from flashstate.state.state import POOL_AXES


@law("output and state are as close to float64 as float32 and the format allow")
def close_to_float64(case: AnyCase, device: torch.device, inputs: Inputs) -> None:
    want = oracle(inputs)
    require.close("the call", inputs, inputs.step(), want)


@law("permuting the rows of a batch permutes the results")
def permutation(case: AnyCase, device: torch.device, inputs: Inputs) -> None:
    shuffled = inputs.fresh()
    order = torch.randperm(case.batch, generator=torch.Generator().manual_seed(1)).to(device)
    other = shuffled.of_rows(order)
    rows, rows_shuffled = inputs.per_row(inputs.step()), other.per_row(other.step())
    for position, row in enumerate(order.tolist()):
        require.equal_bytes(f"output of row {row}", rows_shuffled[position], rows[row])
    require.equal_states("the pool", shuffled.state, inputs.state)


@law("a row does not depend on its neighbours or on the batch size")
def independence(case: AnyCase, device: torch.device, together: Inputs) -> None:
    """A row does not depend on the form of the call either: every form of the case gives the same bytes."""
    rows, everyone = together.per_row(together.step()), list(range(case.batch))
    for form in case.forms:
        for some in ([0], [case.batch - 1], everyone) if form != case else ([0], [case.batch - 1]):
            run = make_inputs(form, device)
            part = run.of_rows(torch.tensor(some, device=device))
            for row, y in zip(some, part.per_row(part.step()), strict=True):
                require.equal_bytes(f"output of row {row} among {some} of {form}", y, rows[row])
            require.equal_states(f"rows {some} of {form}", run.state, together.state, part.slots.long())


@law("it does not matter which slots rows are in")
def which_slots(case: AnyCase, device: torch.device, inputs: Inputs) -> None:
    order = torch.arange(case.slots, device=device).roll(1)
    moved = replace(inputs.of_slots(order), slots=order.argsort()[inputs.slots.long()].to(inputs.slots))
    require.equal_bytes("output", moved.step(), inputs.step())
    require.equal_states("the pool", moved.state, inputs.state, wanted=order)


@law("the launch config does not change a byte", needs="kernels")
def configs_agree(case: AnyCase, device: torch.device, inputs: Inputs) -> None:
    case = replace(case, x="float32")  # so that the output shows every bit of a sum
    inputs, problem = make_inputs(case, device), case.problem
    chosen = choose(problem, machine_of(device).gpu)
    first = inputs.fresh()
    with override(chosen):
        y_first = first.step()
    # The interpreter sums over lanes as numpy does, in an order that depends on how many there are.
    lanes = problem.lane_choices if device.type == "cuda" else [chosen.lanes]
    one_order, want = device.type == "cuda" or inputs.op.one_order, oracle(inputs)
    for config in _some_configs(problem, lanes):
        again = inputs.fresh()
        with override(config):
            y = again.step()
        if one_order:
            require.alike(f" with {config}", again, y, first, y_first)
        else:
            require.close(f"the call with {config}", again, y, want)


def _some_configs(problem: Problem, lanes: Sequence[int]) -> Iterator[Config]:
    """Yield the first and the last valid config of each number of lanes, with the first value of the problem's knob,
    and one config with the last value of the knob."""
    configs = [config for config in valid_configs(problem) if config.lanes in lanes]
    for count in lanes:
        plain = [config for config in configs if getattr(config, problem.knob) == problem.knob_choices[0]]
        alike = [config for config in plain if config.lanes == count]
        yield from dict.fromkeys([alike[0], alike[-1]])
    for value in problem.knob_choices[1:][-1:]:
        yield from [config for config in configs if getattr(config, problem.knob) == value][:1]


@law("a call that repeats another, and so starts its kernel directly, gives the same bytes", needs="cuda")
def direct_launches(case: AnyCase, device: torch.device, inputs: Inputs) -> None:
    ordinary, repeated = inputs.fresh(), inputs.fresh()
    with suspended():
        y = ordinary.step()
    out, remembered = torch.empty_like(y), inputs.op.declared.launches
    remembered.clear()
    repeated.step(out=out)
    require.that(bool(remembered), "nothing was remembered of the first call")
    restore(repeated.state, inputs.state)
    repeated.step(out=out.zero_())
    require.alike("", repeated, out, ordinary, y)


@law("five launches on equal inputs give equal bytes")
def repeatable(case: AnyCase, device: torch.device, inputs: Inputs) -> None:
    first, *others = (inputs.fresh() for _ in range(5))
    y = first.step()
    for run in others:
        require.alike("", run, run.step(), first, y)


@law("slots that no row writes keep their bytes, and NaN in them stays there")
def untouched_slots(case: AnyCase, device: torch.device, inputs: Inputs) -> None:
    clean, rest = inputs.fresh(), rest_of(inputs)
    poison(inputs.state, rest)
    before = inputs.fresh()
    require.equal_bytes("output", inputs.step(), clean.step())
    require.equal_states("the batch", inputs.state, clean.state, inputs.slots.long())
    require.equal_states("slots outside the batch", inputs.state, before.state, rest)


@law("a padding row gives zero and touches nothing, even with a valid write slot")
def padding(case: AnyCase, device: torch.device, clean: Inputs) -> None:
    y_clean = clean.step()
    for null, hole in ((-1, -1), (-1, -7), (0, 0), (1 << 40, case.slots + 3)):
        inputs, want = make_inputs(case, device), y_clean.clone()
        dead = inputs.slots == null  # that slot is no request's where it is the null slot
        dead[0] = True
        for row in dead.nonzero()[:, 0].tolist():
            inputs.per_row(want)[row].zero_()
            for activation in inputs.activations.values():
                inputs.per_row(activation)[row].fill_(torch.nan)
        poison(inputs.state, inputs.slots[dead].long())
        before, read, free = inputs.fresh(), torch.where(dead, hole, inputs.slots), rest_of(inputs)
        write = read.clone()
        write[0] = free[0] if len(free) else hole
        y = inputs.step(slots=inputs.at(read=read, null=null, **{"write": write} if writes_elsewhere(case) else {}))
        require.equal_bytes(f"output (slot {hole}, null {null})", y, want)
        live = torch.isin(torch.arange(case.slots, device=device), inputs.slots[~dead])
        require.equal_states("the other rows", inputs.state, clean.state, live.nonzero()[:, 0])
        require.equal_states("slots outside the batch", inputs.state, before.state, (~live).nonzero()[:, 0])
        require.fault("read" if hole >= case.slots else None)


def writes_elsewhere(case: AnyCase) -> bool:
    """Whether a row may write another slot than it reads."""
    return not case.op.rings


def several(case: AnyCase) -> bool:
    """Whether rows have several tokens each, all the same number."""
    return case.tokens > 1 and not case.packed


def stores_every_token(case: AnyCase) -> bool:
    """Whether rows of the case have several tokens, and the state after each of them may have a slot of its own."""
    return several(case) and case.op.every_token


def _with_hole(
    case: AnyCase, clean: Inputs, padding: str
) -> Iterator[tuple[Inputs, dict[str, Any], dict[str, Pool], str]]:
    """Inputs whose first row is in a slot full of NaN, fields of Slots that make it padding, snapshots of which it must
    leave its own alone, and what the fields say of it: a negative slot, the null slot, or one past the pool."""
    for null, hole in ((-1, -7), (case.slots, case.slots), (1 << 40, case.slots + 3)):
        inputs, first = clean.fresh(), torch.zeros(1, dtype=torch.int64, device=clean.slots.device)
        poison(inputs.state, inputs.slots[:1].long())
        fields: dict[str, Any] = {"read": inputs.slots.index_fill(0, first, hole), "null": null, "padding": padding}
        fields |= {"write": inputs.slots} if writes_elsewhere(case) else {}
        if stores_every_token(case) and null == -1:  # the last of them in a table
            fields["write"] = torch.nn.functional.pad(inputs.slots[:, None], (case.tokens - 1, 0), value=-1)
        some = (make_snapshots(case, *case.snapshot_formats[0], first.device) for _ in range(2))
        taken, before = ({"snapshots": pool} if case.op.between_tokens else {} for pool in some)
        yield inputs, fields, taken, f"a padding row (slot {hole}, null {null})"
        require.fault("read" if hole >= case.slots and hole != null else None)
        for name in taken:
            require.equal_states(f"{name} of a padding row", taken[name], before[name], first)


@law('with padding="fresh" a padding row gives what a zero state gives, and touches nothing')
def fresh_padding(case: AnyCase, device: torch.device, clean: Inputs) -> None:
    for inputs, fields, taken, what in _with_hole(case, clean, "fresh"):
        zeroed, padded, slots = clean.fresh(), inputs.fresh(), inputs.slots.long()
        for tensor in slotted(zeroed.state).values():
            bits_of(tensor)[slots[:1]] = 0
        y = padded.step(slots=padded.at(**fields), **taken)
        require.equal_bytes(f"output of {what}", y, zeroed.step())
        require.equal_states("the other rows", padded.state, zeroed.state, slots[1:])
        require.equal_states("the padding row's write slot", padded.state, inputs.state, slots[:1])


@law('with padding="keep" a padding row leaves its output as it was, and touches nothing')
def kept_padding(case: AnyCase, device: torch.device, clean: Inputs) -> None:
    for activation in clean.activations.values():
        clean.per_row(activation)[0].fill_(torch.nan)
    for inputs, fields, taken, what in _with_hole(case, clean, "keep"):
        zeroed, allocated, padded = inputs.fresh(), inputs.fresh(), inputs.fresh()
        want = zeroed.step(slots=zeroed.at(read=fields["read"], null=fields["null"]))
        require.equal_bytes(f"allocated output of {what}", allocated.step(slots=allocated.at(**fields)), want)
        y = padded.step(slots=padded.at(**fields), **taken, out=torch.full_like(want, torch.inf))
        padded.per_row(want)[0].fill_(torch.inf)
        require.equal_bytes(f"given output of {what}", y, want)
        require.equal_states("the pool", padded.state, zeroed.state)
        require.equal_states("the padding row's write slot", padded.state, inputs.state, inputs.slots[:1].long())


def make_snapshots(case: AnyCase, name: str, rounding: str, device: torch.device) -> Pool:
    """Snapshots with two rows and a token more than the case needs, filled with something."""
    return case.snapshots(case.batch + 2, (case.tokens or 1) + 1, name, rounding, device)


@law("NaN in a row's input shows in that row and nowhere else")
def nan_is_local(case: AnyCase, device: torch.device, clean: Inputs) -> None:
    y_clean = clean.per_row(clean.step())
    for name in clean.activations:
        inputs = make_inputs(case, device)
        inputs.per_row(inputs.activations[name])[0].fill_(torch.nan)
        y = inputs.per_row(inputs.step())
        require.that(bool(y[0].isnan().all()), f"NaN in {name} was hidden")
        for row, row_clean in zip(y[1:], y_clean[1:], strict=True):
            require.equal_bytes("the other rows", row, row_clean)
        others = rest_of(replace(inputs, slots=inputs.slots[:1]))
        require.equal_states("the other slots", inputs.state, clean.state, others)
        if name in inputs.op.remembered:
            reached = bool(case.newest_of(inputs.states[0]).isnan().all())
            require.that(reached, f"NaN in {name} did not reach the state")


@law("a separate write slot receives the state, and the read slot keeps its own", includes=writes_elsewhere)
def separate_write(case: AnyCase, device: torch.device, inputs: Inputs) -> None:
    in_place, moved = inputs.fresh(extra=case.batch), inputs.fresh(extra=case.batch)
    free = torch.arange(case.slots, case.slots + case.batch, device=device)
    y, y_moved = in_place.step(), moved.step(slots=moved.at(write=free))
    require.equal_bytes("output", y_moved, y)
    read, stored, kept = inputs.slots.long(), inputs.stores, inputs.op.left_alone
    require.equal_states("written slots", moved.state, in_place.state, free[stored], read[stored], besides=kept)
    require.equal_states("write slots of rows without tokens", moved.state, in_place.state, free[~stored])
    require.equal_states("read slots", moved.state, inputs.state, read)


@law("a write slot that is null, negative or past the pool is not written", includes=writes_elsewhere)
def skipped_write(case: AnyCase, device: torch.device, inputs: Inputs) -> None:
    want = inputs.fresh().step()
    for null, hole in ((-1, -1), (-1, -9), (1 << 40, 1 << 40), (-1, case.slots)):
        kept, write = inputs.fresh(), torch.full_like(inputs.slots.long(), hole)
        y = kept.step(slots=kept.at(write=write, null=null))
        require.alike(f" (write slot {hole}, null {null})", kept, y, inputs, want)
        require.fault("write" if hole == case.slots else None)


@law("update=False gives the same output and leaves the pool as it is")
def update_false(case: AnyCase, device: torch.device, inputs: Inputs) -> None:
    before = inputs.fresh()
    y_kept = inputs.step(update=False)
    require.equal_states("the pool", inputs.state, before.state)
    require.equal_bytes("output", y_kept, inputs.step())


@law("without slots, row b is slot b", includes=lambda case: not case.packed)
def default_slots(case: AnyCase, device: torch.device, inputs: Inputs) -> None:
    given = replace(inputs, slots=torch.arange(case.batch, device=device))
    left_out = given.fresh()
    require.alike("", left_out, left_out.step(slots=None), given, given.step())


@law("`out` is filled and returned, whatever its strides")
def given_out(case: AnyCase, device: torch.device, inputs: Inputs) -> None:
    want = inputs.fresh().step()
    tokens, lead = len(case.token_axes), case.token_axes
    *heads, width = want.shape[tokens:]
    buffer = torch.full((*lead, 2, *heads, width + 3), torch.nan, dtype=want.dtype, device=device)
    out = buffer.select(tokens, 1)[..., 1 : width + 1]
    require.that(inputs.step(out=out) is out, "the result is not `out`")
    require.equal_bytes("out", out, want)
    around = buffer.select(tokens, 0).isnan().all() and buffer[..., width + 1 :].isnan().all()
    require.that(bool(around), "memory around out changed")


@law("strided activations and expanded parameters change nothing")
def strided_activations(case: AnyCase, device: torch.device, inputs: Inputs) -> None:
    views = case.as_views(inputs.fresh())
    table = torch.stack([views.slots, views.slots.flip(0)], dim=1)
    require.alike("", views, views.step(slots=views.at(read=table[:, 0])), inputs, inputs.step())


@law("page-strided and unaligned pools work, and nothing between the pages is touched")
def paged_pool(case: AnyCase, device: torch.device, inputs: Inputs) -> None:
    """Nor between heads, which may be apart from each other where there are no scales."""
    want, dense = oracle(inputs), inputs.fresh()
    dense.step()
    stored = {name: tensor for name, tensor in slotted(inputs.state).items() if tensor.dim() > 1}  # no cursors
    has_heads = inputs.state.data.dim() == len(POOL_AXES) and inputs.state.scale is None
    for offset, gap, between in ((0, 16, 0), (0, 5, 0), (1, 3, 0), *([(0, 16, 8)] if has_heads else [])):
        pages = {name: in_pages(t, offset, gap, between if name == "data" else 0) for name, t in stored.items()}
        fresh = inputs.fresh()
        paged = replace(fresh, state=replace(fresh.state, **{name: views for name, (views, _) in pages.items()}))
        pool = f"the pool with offset {offset}, gap {gap}, {between} between heads"
        require.close(pool, paged, paged.step(), want)
        narrower = access_width(paged.state.data) != access_width(dense.state.data)
        summed = inputs.op.sums and (narrower or inputs.op.rings)
        others = ("data", "scale", *inputs.op.summed) if summed else ()
        require.equal_states(pool, paged.state, dense.state, besides=others)
        for name, (views, memory) in pages.items():
            bits_of(views).fill_(PAGE_FILL)
            require.that(bool((memory == PAGE_FILL).all()), f"memory between slots or heads of {name} was written")


PAGE_FILL = 77


def in_pages(tensor: Tensor, offset: int, gap: int, between: int = 0) -> tuple[Tensor, Tensor]:
    """These values in pages `gap` elements longer than a slot, `offset` elements into the memory, with so many between
    heads; and its bits. A head, or a slot without heads, is laid out as it was."""
    slots, strides = tensor.shape[0], tensor.stride()[1:]
    if between:
        strides = (strides[0] + between, *strides[1:])
    size = tensor[0].numel() + tensor.shape[1] * between + gap
    bits = bits_of(tensor)
    pages = torch.full((slots * size + offset,), PAGE_FILL, dtype=bits.dtype, device=tensor.device)
    view = pages.as_strided(tensor.shape, (size, *strides), offset)
    view.copy_(bits)
    return view.view(tensor.dtype), pages
