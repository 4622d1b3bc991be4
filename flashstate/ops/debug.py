"""debug(): checks of what tensors hold, which ops leave out because the host would have to wait for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor

from flashstate.launch.call import Given
from flashstate.launch.environment import replaced, suspended
from flashstate.reference.state_io import resolve, resolve_read, token_positions
from flashstate.state.faults import check_faults
from flashstate.state.ring import AnyRing, Plan
from flashstate.state.slots import Slots
from flashstate.state.state import State

FINITE = "be finite"
_debugging = False
_rings: WeakKeyDictionary[State, ReferenceType[AnyRing]] = WeakKeyDictionary()  # of layers of pools
# Cursors of slots, as they were when a ring replayed a step there that was not committed yet.
_open_steps: WeakKeyDictionary[AnyRing, dict[int, tuple[int, int]]] = WeakKeyDictionary()


@contextmanager
def debug() -> Iterator[None]:
    """Check the contents of slots before every op inside: it waits for the device, and raises before writing anything.

    Found are two rows, or two tokens of a row, that write one slot; two rows that fill one row of the snapshots; a row
    that writes what another row reads; boundaries of packed tokens that are not in order; rows longer than max_len;
    invalid parents; inputs of live rows that are not finite, an A above 0, time steps below 0, and a decay above 1;
    cursors of rings out of range; plans of an earlier step; a step of a slot whose replay before was not committed;
    steps without replay on slots of a pool whose rings have live rows; and all that `check_faults` reports, from calls
    before it too. Not inside torch.compile; a CUDA graph cannot be captured inside.
    """
    if not _debugging:
        _open_steps.clear()
    with replaced(globals(), "_debugging", True), suspended():
        yield


def debugging() -> bool:
    return _debugging and not torch.compiler.is_compiling()


def note_rings(states: Sequence[State], rings: Sequence[AnyRing]) -> None:
    """Remember the ring of every state of a pool, for `debug()`."""
    _rings.update({state: ref(ring) for state, ring in zip(states, rings, strict=True)})


def check_debugged(given: Given, read: Callable[[Slots], Tensor] | None = None) -> None:
    """Inside debug(), raise where the numbers in slots would make an op lose or mix up a state, and where inputs are
    not finite. `read` finds the slot of each row, for ops whose slots alone do not decide it."""
    num_slots, tokens, slots = len(given.pool), given.tokens, given.slots
    if not debugging():
        return
    refuse_capture(given.pool)
    if slots is None:
        reads = write = torch.arange(tokens.batch, device=given.pool.device)
        check_faults()
    else:
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
    if getattr(given, "ring", None) is None:
        _check_no_live_rows(given.pool, torch.cat([reads, write.flatten()]))
    given.reads = reads
    for name, axes in getattr(given, "inputs", {}).items():
        check_each(name, getattr(given, name), torch.isfinite, FINITE, given if axes.tokens else None)


def refuse_capture(tensor: Tensor) -> None:
    """Raise while a CUDA graph is captured on the device of a tensor that is to be read on the host."""
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("flashstate.debug() reads tensors on the host, which a CUDA graph cannot capture")


def _check_no_live_rows(pool: Tensor, slots: Tensor) -> None:
    """Raise where an op without replay steps states whose ring has live rows, or tokens that were not committed."""
    for state, known in _rings.items():
        ring = known()
        if ring is not None and state.data.data_ptr() == pool.data_ptr():
            used = slots[slots >= 0].unique()
            live = used[ring.count[used] > 0].tolist()
            if live:
                remedy = "fold them and call `folded`, or go on by replay"
                raise ValueError(f"state lags behind its ring, which has live rows in {named(live)}: {remedy}")
            _check_none_open(ring, used.tolist(), "commit its plan, and then fold the ring, or go on by replay")


def _check_none_open(ring: AnyRing, slots: Sequence[int], remedy: str) -> None:
    """Raise where the step before, of the layer that has this ring, was not committed."""
    steps = _open_steps.get(ring, {})
    left = [slot for slot in slots if slot in steps and steps[slot] == _cursors(ring, slot)]
    if left:
        raise ValueError(f"the step before was not committed, and this layer has it in {named(left)}: {remedy}")


def _cursors(ring: AnyRing, slot: int) -> tuple[int, int]:
    return int(ring.start[slot]), int(ring.count[slot])


def named(slots: Sequence[int]) -> str:
    """Return these slots in words."""
    return f"slot{'s' if len(slots) > 1 else ''} {', '.join(map(str, slots))}"


def check_each(
    name: str, tensor: Tensor | None, right: Callable[[Tensor], Tensor], must: str, given: Given | None = None
) -> None:
    """Raise unless all numbers in a tensor are right.

    must: the end of the message, such as "be finite".
    given: the call whose activation the tensor is, of which only tokens count whose row has a slot; None: a parameter.
    """
    if tensor is None or not tensor.is_floating_point():
        return
    index, where = None, ""
    if given is not None:
        slots, token_axes = given.slots, len(given.tokens.axes)
        tensor = tensor.flatten(0, token_axes - 1)
        at = token_positions(slots, given.tokens.batch, len(tensor), tensor.device)
        index = (at >= 0) & (given.reads >= 0)[:, None]
        tensor, index = tensor[at[index]], index.nonzero()
    wrong = (~right(tensor.float())).nonzero()
    if len(wrong):
        first = wrong[0].tolist()
        if index is not None:
            row, token = index[first[0]].tolist()
            where = f" in token {token} of row {row}"
        raise ValueError(f"{name} must {must}, got {float(tensor[tuple(first)]):.6g}{where}")


def check_finite(parameters: Mapping[str, Tensor | None]) -> None:
    """Raise unless all numbers in these parameters are finite."""
    for name, tensor in parameters.items():
        check_each(name, tensor, torch.isfinite, FINITE)


def check_plan_of_now(ring: AnyRing, plan: Plan, committed: bool = False) -> None:
    """Raise unless the requests and cursors of all slots are those in the plan. committed: the cursors may also be
    those after an earlier commit of this plan."""
    refuse_capture(plan.rows)
    rows = plan.rows[plan.rows[:, 1] >= 0].long()
    slot, was_start, was_live, tokens, was = (rows[:, i] for i in (1, 2, 3, 5, 6))
    if plan.generation is not None:
        others = slot[plan.generation[slot] != was].tolist()
        if others:
            what = "which were reset, copied to, loaded or written since"
            raise ValueError(f"plan is of requests that are no longer in {named(others)}, {what}")
    start, count = ring.start[slot].long(), ring.count[slot].long()
    same = (start == was_start) & (count == was_live)
    if committed:
        folds = was_live + tokens > plan.window
        kept = torch.where(folds, count, count - was_live)
        then = torch.where(folds, (was_start + was_live) % ring.length, was_start)
        same |= (start == then) & (kept >= 0) & (kept <= tokens)
    wrong = (~same).nonzero()[:, 0].tolist()
    if wrong:
        i = wrong[0]
        before, now = (f"{int(at[i])} and {int(live[i])}" for at, live in ((was_start, was_live), (start, count)))
        words = f"start and count of slot {int(slot[i])} were {before}, and are {now}"
        raise ValueError(f"plan is of an earlier step: {words}; a plan is made anew for every step")


def check_commit(ring: AnyRing, plan: Plan) -> None:
    """Inside debug(), raise where a plan is not of this step, and note that the step ends."""
    if debugging():
        check_plan_of_now(ring, plan, committed=True)
        planned = {slot: (start, live) for _, slot, start, live, *_ in plan.rows.tolist()}
        for steps in _steps_of(ring.count):
            for slot, cursors in steps.items():
                if planned.get(slot, cursors) != cursors == _cursors(ring, slot):  # else the step was given up
                    step = f"the step in slot {slot} began at start and count {cursors[0]} and {cursors[1]}"
                    had = "{} and {}".format(*planned[slot])
                    raise ValueError(f"plan is of an earlier step: {step}, and the plan has {had}; commit its own plan")
        settle(ring.count, plan.rows[:, 1])


def settle(count: Tensor, slots: Tensor) -> None:
    """Forget the uncommitted steps in these slots, of all rings that share these counts."""
    if debugging():
        for steps in _steps_of(count):
            for slot in slots.tolist():
                steps.pop(slot, None)


def _steps_of(count: Tensor) -> list[dict[int, tuple[int, int]]]:
    """Return the uncommitted steps of every ring that has these counts."""
    return [steps for ring, steps in _open_steps.items() if ring.count.data_ptr() == count.data_ptr()]


def check_committed(given: Given) -> None:
    """Raise where a slot is replayed again before its last step was committed; remember the steps of this call."""
    ring, slots, plan = given.ring, given.slots, given.plan
    if plan is not None:
        check_plan_of_now(ring, plan)
    if not given.update:
        return
    read = resolve_read(slots, given.tokens.batch, len(ring.count), ring.count.device)
    used = [slot for slot in read.tolist() if slot >= 0]
    _check_none_open(ring, used, "commit the plan of a step once, after all layers")
    _open_steps.setdefault(ring, {}).update({slot: _cursors(ring, slot) for slot in used})


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
