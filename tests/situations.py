"""Random problems for mamba2_step, and what follows from their numbers alone: which tokens run, and what is stored."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from hypothesis import strategies as st

from flashstate.proof import Case
from flashstate.state.formats import PORTABLE_FORMATS

NOWHERE = 1 << 30  # past every pool
FORMS = ("one token", "several tokens", "packed")
Numbers = tuple[int, ...]
Table = tuple[Numbers, ...]
RowAndToken = tuple[int, int]


@dataclass(frozen=True)
class Situation:
    """A problem, and where everything lies: the pool inside a larger buffer, the rows on its slots, their tokens."""

    case: Case  # with the number of rows, and not their tokens
    form: str  # "one token", "several tokens" or "packed"
    lengths: Numbers  # tokens of every row
    before: int  # packed tokens that no row has, before those of the first
    after: int  # and after those of the last
    longest: int  # entries that tables and snapshots have for the tokens of a row
    per_row: tuple[bool, bool, bool]  # whether dt, A and dt_bias are more than one value per head
    seed: int
    offset: int  # elements before the pool
    gap: int  # elements between slots
    read: Table
    accepted: Numbers | None
    write: Table | None
    every: bool  # whether the state after every token is written
    update: bool
    null: int
    padding: str
    parents: Table | None
    max_len: int | None
    snapshots: tuple[str, str] | None  # a format and its rounding
    snapshot_rows: Numbers | None
    spare: int  # rows and tokens that snapshots have more than needed
    out: str  # "new", "given" or "x"

    @property
    def tokens(self) -> int:
        """The length of the token axis."""
        return self.before + sum(self.lengths) + self.after

    @property
    def snapshot_size(self) -> tuple[int, int]:
        return self.case.batch + self.spare, self.longest + self.spare

    def at(self, row: int, token: int) -> int:
        """Where a token is on the token axis."""
        return self.before + sum(self.lengths[:row]) + token

    def inside(self, slot: int) -> bool:
        return 0 <= slot < self.case.slots and slot != self.null

    def past(self, slot: int) -> bool:
        return slot >= self.case.slots and slot != self.null

    def slot(self, row: int) -> int:
        """What a row reads; -1 where `accepted` names none."""
        column = 0 if self.accepted is None else self.accepted[row] - 1
        return self.read[row][column] if 0 <= column < len(self.read[row]) else -1

    def live(self, row: int) -> bool:
        return self.inside(self.slot(row))

    def snapshot_row(self, row: int) -> int:
        return row if self.snapshot_rows is None else self.snapshot_rows[row]

    @property
    def running(self) -> dict[RowAndToken, int]:
        """The tokens that give an output, and the token each continues from: -1 for where its row starts."""
        found: dict[RowAndToken, int] = {}
        for row, length in enumerate(self.lengths):
            for t in range(length if self.live(row) or self.padding == "fresh" else 0):
                parent = t - 1 if self.parents is None else self.parents[row][t] if t < self.longest else -2
                if parent == -1 or (row, parent) in found:
                    found[row, t] = parent
        return found

    @property
    def kept(self) -> list[int]:
        """The places on the token axis whose outputs stay as they were: all tokens of padding, if it keeps them."""
        rows = [row for row in range(self.case.batch) if self.padding == "keep" and not self.live(row)]
        return [self.at(row, t) for row in rows for t in range(self.lengths[row])]

    @property
    def stores(self) -> list[tuple[str, Numbers, RowAndToken]]:
        """What is written: to the state or the snapshots, at which entry, and after which token."""
        found: list[tuple[str, Numbers, RowAndToken]] = []
        for row, t in filter(lambda token: self.live(token[0]), self.running):
            table = self.write or [[self.slot(row)]] * self.case.batch
            if self.every and t < self.longest and self.inside(table[row][t]):
                found.append(("state", (table[row][t],), (row, t)))
            if self.update and not self.every and t == self.lengths[row] - 1 and self.inside(table[row][0]):
                found.append(("state", (table[row][0],), (row, t)))
            if self.snapshots and t < self.longest and 0 <= self.snapshot_row(row) < self.snapshot_size[0]:
                found.append(("snapshots", (self.snapshot_row(row), t), (row, t)))
        return found

    @property
    def faults(self) -> set[str]:
        """Kinds of numbers out of range among those that are used."""
        found = {"accepted" for numbers, k in zip(self.read, self.accepted or (), strict=False) if k > len(numbers)}
        found |= {"read slot" for row in range(self.case.batch) if self.past(self.slot(row))}
        for row, t in filter(lambda token: self.live(token[0]), self.running):
            if self.write is not None and t < (self.longest if self.every else 1):
                found |= {"write slot"} if self.past(self.write[row][t]) else set()
            if self.snapshots and t < self.longest and self.snapshot_row(row) >= self.snapshot_size[0]:
                found.add("snapshot row")
        return found


@st.composite
def cases(draw: st.DrawFn, most_heads: int, rows: int, cols: int, dtypes: tuple[str, ...]) -> Case:
    """A problem without its slots and tokens."""
    name, rounding = draw(st.sampled_from(PORTABLE_FORMATS))
    dtype, groups = st.sampled_from(dtypes), draw(st.integers(1, most_heads))
    return Case(
        batch=draw(st.integers(1, 4)),
        heads=groups * draw(st.integers(1, most_heads)),
        groups=groups,
        rows=draw(st.integers(1, rows)),
        cols=draw(st.integers(1, cols)),
        format=name,
        rounding=rounding,
        x=draw(dtype),
        bc=draw(dtype),
        dt=draw(dtype),
        parameters=draw(dtype),
        D=draw(st.sampled_from([None, "head", "row"])),
        z=draw(st.booleans()),
        dt_bias=draw(st.booleans()),
        dt_softplus=draw(st.booleans()),
        index=draw(st.sampled_from(["int32", "int64"])),
        mamba1=True,
    )


def mostly(right: Sequence[int], wrong: Sequence[int]) -> st.SearchStrategy[int]:
    """One of the right numbers, in few cases one of the wrong ones."""
    return st.sampled_from([*right] * (1 + 6 * len(wrong) // len(right)) + [*wrong])


def parents_of(tokens: int) -> st.SearchStrategy[Numbers]:
    return st.tuples(*[mostly(range(-1, t), [t, t + 1, -2, NOWHERE]) for t in range(tokens)])


@st.composite
def situations(draw: st.DrawFn, form: str, tree: bool, of_case: st.SearchStrategy[Case]) -> Situation:
    """Situations with tokens of a form, as a draft tree or not."""
    case, flag, packed = draw(of_case), st.booleans(), form == "packed"
    stores = draw(st.sampled_from(["every", "none", "in place", "elsewhere"][: 2 if tree else 4]))
    batch, before, after = case.batch, 0, 0
    lengths: Numbers = (1 if form == "one token" else draw(mostly([1, 2, 3, 4], [0])),) * batch
    longest = max(lengths)
    if packed:
        lengths = draw(st.tuples(*[st.integers(0, 4)] * batch))
        before, after = draw(st.integers(0, 1)), draw(st.integers(0, 2))
        longest = max(0, max(lengths) + draw(st.sampled_from([0, 0, 1, -1])))  # -1: wrong, and harmless

    seed, slots = draw(st.integers(0, 1 << 16)), batch * (1 + max(longest, 1)) + 1 + draw(st.integers(0, 2))
    order = Random(seed).sample(range(slots), slots)
    null = draw(st.sampled_from([-1, order[-1], 1 << 20]))
    no_slot = (null, -1, -5, slots, slots + 4, NOWHERE)
    read = [[draw(mostly([own], no_slot))] for own in order[:batch]]
    accepted, n = None, draw(st.sampled_from([0, 0, 1, 2, 3]))
    if n:
        accepted = draw(st.tuples(*[mostly(range(1, n + 1), [0, -1, n + 1])] * batch))
        others = [order[-1], NOWHERE, order[0]][:n]
        read = [[own if i == k - 1 else others[i] for i in range(n)] for (own,), k in zip(read, accepted, strict=True)]
    write = None
    if stores in ("elsewhere", "every"):
        own = [order[batch + row :: batch][: longest if stores == "every" else 1] for row in range(batch)]
        if draw(flag):  # a row may write where it reads, at one of its tokens
            own = [[order[row], *numbers[1:]] if numbers else [] for row, numbers in enumerate(own)]
        write = tuple(draw(st.tuples(*[mostly([slot], no_slot) for slot in numbers])) for numbers in own)
    snapshots, spare = draw(st.none() | st.sampled_from(PORTABLE_FORMATS)), draw(st.integers(0, 1))
    own_rows = Random(seed).sample(range(batch + spare), batch)
    no_row = (-1, -9, batch + spare, NOWHERE)
    needs_max_len = snapshots is not None and stores != "every" and not tree
    outs = ["new", "given"] if tree else ["new", "given", "x"]
    return Situation(
        case=replace(case, slots=slots),
        form=form,
        lengths=lengths,
        before=before,
        after=after,
        longest=longest,
        per_row=draw(st.tuples(flag, flag, flag)),
        seed=seed,
        offset=draw(st.integers(0, 3)),
        gap=draw(st.integers(0, 9)),
        read=tuple(map(tuple, read)),
        accepted=accepted,
        write=write,
        every=stores == "every",
        update=stores != "none",
        null=null,
        padding=draw(st.sampled_from(["zero", "fresh", "keep"])),
        parents=draw(st.tuples(*[parents_of(longest)] * batch)) if tree else None,
        max_len=longest if packed and (needs_max_len or draw(flag)) else None,
        snapshots=snapshots,
        snapshot_rows=draw(st.none() | st.tuples(*[mostly([row], no_row) for row in own_rows])),
        spare=spare,
        out=draw(st.sampled_from(outs)),
    )
