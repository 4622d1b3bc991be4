"""mamba2_step on random rows, tables and draft trees equals calls of one token of one row, bit by bit."""

from dataclasses import dataclass, replace
from itertools import product
from random import Random
from typing import Any

import implementations
import pytest
import torch
from torch import Tensor

import flashstate
from flashstate import Slots, State
from flashstate.launch import uses_kernels
from flashstate.proof import Case, encoded, make_inputs
from flashstate.proof.laws import require
from flashstate.reference.state_io import put
from flashstate.reference.steps import states_of
from flashstate.state.faults import KINDS
from flashstate.state.formats import PORTABLE_FORMATS
from flashstate.state.rounding import SEED_STEP

CPU = torch.device("cpu")
NOWHERE = 1 << 30  # past every pool
NOT_RUN = {"new": 0.0, "given": torch.nan, "x": torch.nan}  # what `out` holds of a token that does not run
Table = list[list[int]]


class Draw(Random):
    def mostly(self, right: Any, wrong: Any) -> int:
        """One of the right numbers, in few cases one of the wrong ones."""
        return self.choice([*right] * (1 + 6 * len(wrong) // len(right)) + [*wrong])


@dataclass(frozen=True)
class Situation:
    """The rows of a call, all their tokens on one axis, and what the numbers alone say: which tokens run, and what is
    stored."""

    form: str
    lengths: list[int]  # tokens of every row
    before: int  # packed tokens that no row has, before those of the first
    after: int  # and after those of the last
    longest: int  # entries that tables and snapshots have for the tokens of a row
    slots: int
    null: int
    read: Table
    accepted: list[int] | None
    write: Table | None
    stores: str  # "every" token, "none", the last one "in place" or "elsewhere"
    padding: str
    parents: Table | None
    max_len: int | None
    taken: tuple[int, int]  # rows and tokens of snapshots
    snapshot_rows: list[int]

    def at(self, row: int, token: int) -> int:
        """Where a token is on the token axis."""
        return self.before + sum(self.lengths[:row]) + token

    def inside(self, slot: int) -> bool:
        return 0 <= slot < self.slots and slot != self.null

    def slot(self, row: int) -> int:
        """What a row reads; -1 where `accepted` names none."""
        column = 0 if self.accepted is None else self.accepted[row] - 1
        return self.read[row][column] if 0 <= column < len(self.read[row]) else -1

    def live(self, row: int) -> bool:
        return self.inside(self.slot(row))

    def running(self) -> dict[tuple[int, int], int]:
        """The tokens that give an output, and the token each continues from: -1 for where its row starts."""
        found: dict[tuple[int, int], int] = {}
        for row, length in enumerate(self.lengths):
            for t in range(length if self.live(row) or self.padding == "fresh" else 0):
                parent = t - 1 if self.parents is None else self.parents[row][t] if t < self.longest else -2
                if parent == -1 or (row, parent) in found:
                    found[row, t] = parent
        return found

    def kept(self) -> list[int]:
        """The places on the token axis whose outputs stay as they were: all tokens of padding, if it keeps them."""
        rows = [row for row in range(len(self.lengths)) if self.padding == "keep" and not self.live(row)]
        return [self.at(row, t) for row in rows for t in range(self.lengths[row])]

    def named(self, row: int, t: int) -> tuple[int | None, int | None]:
        """The slot and the row of snapshots that are named for the state after a token."""
        last, table = t == self.lengths[row] - 1, self.write or [[self.slot(row)]] * len(self.lengths)
        stores = t < self.longest if self.stores == "every" else last and self.stores != "none"
        slot = table[row][t if self.stores == "every" else 0] if stores else None
        return slot, self.snapshot_rows[row] if self.taken[0] and t < self.longest else None

    def faults(self) -> set[str]:
        """Kinds of numbers out of range among those that are used."""
        found = {"accepted" for numbers, k in zip(self.read, self.accepted or (), strict=False) if k > len(numbers)}
        read = [self.slot(row) for row in range(len(self.lengths))]
        names = [self.named(*token) for token in self.running() if self.live(token[0])]
        for kind, numbers in (("read slot", read), ("write slot", [slot for slot, _ in names])):
            found |= {kind for n in numbers if n is not None and n >= self.slots and n != self.null}
        return found | {"snapshot row" for _, row in names if row is not None and row >= self.taken[0]}

    def tables(self, draw: Draw) -> Slots:
        """Each of either type of numbers, and those with columns in a view of a wider one."""

        def tensor(numbers: Any, columns: bool = True) -> Any:
            made = None if numbers is None else torch.tensor(numbers, dtype=draw.choice([torch.int32, torch.int64]))
            if made is None or made.dim() == 1:
                return made
            return torch.cat([made, made], 1)[:, : made.shape[1]] if columns else made[:, 0].contiguous()

        bounds = [self.at(row, 0) for row in range(len(self.lengths) + 1)] if self.form == "packed" else None
        return Slots(
            tensor(self.read, self.accepted is not None), write=tensor(self.write, self.stores == "every"),
            accepted=tensor(self.accepted), snapshot_rows=tensor(self.snapshot_rows), cu_seqlens=tensor(bounds),
            max_len=self.max_len, parents=tensor(self.parents), null=self.null, padding=self.padding,
        )  # fmt: skip


def situation(form: str, tree: bool, draw: Draw) -> Situation:
    batch, packed, before, after = draw.randint(1, 4), form == "packed", 0, 0
    stores = draw.choice(["every", "none", "in place", "elsewhere"][: 2 if tree else 4])
    lengths = [1 if form == "one token" else draw.mostly([1, 2, 3, 4], [0])] * batch
    longest = max(lengths)
    if packed:
        lengths, before, after = [draw.randint(0, 4) for _ in range(batch)], draw.randint(0, 1), draw.randint(0, 2)
        longest = max(0, max(lengths) + draw.choice([0, 0, 1, -1]))  # -1: wrong, and harmless
    slots = batch * (1 + max(longest, 1)) + 1 + draw.randint(0, 2)
    order = draw.sample(range(slots), slots)
    null = draw.choice([-1, order[-1], 1 << 20])
    no_slot = (null, -1, -5, slots, slots + 4, NOWHERE)
    read = [[draw.mostly([own], no_slot)] for own in order[:batch]]
    accepted, n = None, draw.choice([0, 0, 1, 2, 3])
    if n:
        accepted = [draw.mostly(range(1, n + 1), [0, -1, n + 1]) for _ in range(batch)]
        others = [order[-1], NOWHERE, order[0]][:n]
        read = [[own if i == k - 1 else others[i] for i in range(n)] for (own,), k in zip(read, accepted, strict=True)]
    write = None
    if stores in ("elsewhere", "every"):
        own = [order[batch + row :: batch][: longest if stores == "every" else 1] for row in range(batch)]
        if draw.random() < 0.5:  # a row may write where it reads, at one of its tokens
            own = [[order[row], *numbers[1:]] if numbers else [] for row, numbers in enumerate(own)]
        write = [[draw.mostly([slot], no_slot) for slot in numbers] for numbers in own]
    spare, snapshots = draw.randint(0, 1), draw.random() < 0.8
    rows = draw.sample(range(batch + spare), batch)
    told = packed and ((snapshots and stores != "every" and not tree) or draw.random() < 0.5)
    wrong = (-1, -9, batch + spare, NOWHERE)
    return Situation(
        form, lengths, before, after, longest, slots, null, read, accepted, write, stores,
        padding=draw.choice(["zero", "fresh", "keep"]),
        parents=[[draw.mostly(range(-1, t), [t, t + 1, -2, NOWHERE]) for t in range(longest)] for _ in lengths]
        if tree else None,
        max_len=longest if told else None,
        taken=(batch + spare, longest + spare) if snapshots else (0, 0),
        snapshot_rows=[draw.mostly([row], wrong) for row in rows],
    )  # fmt: skip


@pytest.mark.parametrize("device", implementations.ALL[:2], indirect=True)
@pytest.mark.parametrize(("form", "tree"), list(product(("one token", "several tokens", "packed"), (False, True))))
def test_a_call_equals_calls_of_one_token_of_one_row_bit_by_bit(device: torch.device, form: str, tree: bool) -> None:
    for seed in range(4 if uses_kernels(device) else 40):
        draw = Draw(seed)
        now = situation(form, tree, draw)
        case = Case(now.at(len(now.lengths), now.after), 2, 1, 3, draw.randint(1, 20), slots=now.slots)
        if not uses_kernels(device):  # whose sums have not every bit with other formats
            case = replace(case.in_format(*draw.choice(PORTABLE_FORMATS)), x=draw.choice(["float32", "float16"]))
        require_equal(now, case, draw)


def require_equal(now: Situation, case: Case, draw: Draw) -> None:
    inputs, running, known = make_inputs(case, CPU), now.running(), draw.choice(PORTABLE_FORMATS)
    inputs.state = replace(inputs.state, rounds=draw.choice([7, 10]))
    idle = sorted({*range(case.batch)} - {now.at(*token) for token in running})
    for tensor in inputs.activations.values():
        tensor[idle] = torch.nan
    taken, want_taken = (case.snapshots(*now.taken, *known, CPU) if now.taken[0] else None for _ in range(2))
    run, want, y_want = inputs.fresh(), inputs.fresh().state, torch.zeros_like(inputs.main)
    kind = draw.choice([*NOT_RUN][: 2 if now.parents else 3])  # of draft trees, outputs may not overwrite inputs
    y_want[now.kept()] = NOT_RUN[kind]

    after = dict[tuple[int, int], Tensor]()
    for (row, t), parent in running.items():
        p, live = now.at(row, t), now.live(row)
        read = torch.tensor([now.slot(row) if live else -1])
        one = State(after[row, parent].clone() if parent >= 0 else states_of(inputs.state, read))
        token = {name: tensor[p : p + 1] for name, tensor in inputs.activations.items()}
        y_want[p] = flashstate.mamba2_step(one, **{**inputs.arguments, **token})[0]
        after[row, t] = one.data
        for target, entry, limit in zip((want, want_taken), now.named(row, t), (now.slots, now.taken[0]), strict=True):
            if live and entry is not None and 0 <= entry < limit and (target is not want or entry != now.null):
                where = (torch.tensor([entry]),) if target is want else (torch.tensor([entry]), torch.tensor([t]))
                put(target, encoded(one.data, target, inputs.state, read, t), where)

    shape = (len(now.lengths), now.longest) if now.form == "several tokens" else (case.batch,)
    given = {name: tensor.unflatten(0, shape) for name, tensor in run.activations.items()}
    out = {"new": None, "given": torch.full_like(given["x"], torch.nan), "x": given["x"]}[kind]
    slots = now.tables(draw)
    run.arguments.update(given)
    y = run.step(slots=slots, snapshots=taken, update=now.stores != "none", out=out)
    assert out is None or y is out
    require.equal_bytes(f"{now}: output", y.flatten(0, len(shape) - 1), y_want)
    require.equal_states(f"{now}: the pool", run.state, want)
    if taken is not None:
        require.equal_states(f"{now}: snapshots", taken, want_taken)
    assert faults_found() in ([now.faults()] if case.batch else [now.faults(), set()])  # no tokens, no launch
    run.state.advance(slots)
    for row, length in enumerate(now.lengths):
        if now.live(row) and (length or now.form != "packed"):
            for slot in filter(now.inside, now.read[row]):
                want.seed[slot] += SEED_STEP
    assert torch.equal(run.state.seed, want.seed)
    assert faults_found() == now.faults() & {"read slot", "accepted"}


def faults_found() -> set[str]:
    try:
        flashstate.check_faults()
    except IndexError as error:
        return {kind for kind in ("read slot", "write slot", *KINDS[2:]) if kind in str(error)}
    return set()
