"""What a benchmark measures: jobs, and what it knows of the op they belong to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Literal, NamedTuple, TypeVar

from flashstate.bench.binding import Binder, Binding, Storing
from flashstate.bench.peers import Peer
from flashstate.bench.timing import Timing
from flashstate.launch import Problem
from flashstate.proof import AnyCase, Inputs, StateCase
from flashstate.state.formats import PORTABLE_FORMATS
from flashstate.state.slots import Slots

SPARE_SLOTS = 3  # of the small pool results are checked on
WORD = 4  # bytes
BATCHES = (1, 4, 16, 64, 256, 1024)
FLOAT32, BFLOAT16 = ("float32", "nearest"), ("bfloat16", "nearest")
Live = Literal["none folds", "stationary", "uniform", "all fold", "a 16th folds"]  # rows of the rings of a batch
Stored = Literal["last", "every", "none", Live, "plan and commit"]
Formats = Sequence[tuple[str, str]]  # of format and rounding
CaseT = TypeVar("CaseT", bound=StateCase)


class Shape(NamedTuple):
    """The shape of a state, as measurements list it."""

    heads: int
    groups: int
    rows: int
    cols: int


def grouped_case(
    common: CaseT, shape: Shape, name: str, rounding: str, tokens: int, batch: int, groups: str = "groups"
) -> CaseT:
    """The case of a job, else like `common`, whose groups are the field `groups`; ValueError where there is none."""
    if shape.heads % shape.groups:
        raise ValueError(f"the number of groups must divide the {shape.heads} heads, got {shape.groups}")
    sizes: dict[str, Any] = {"heads": shape.heads, groups: shape.groups, "rows": shape.rows, "cols": shape.cols}
    sizes |= {"tokens": tokens, "batch": batch, "slots": batch + SPARE_SLOTS}
    return replace(common, format=name, rounding=rounding, **sizes)


@dataclass(frozen=True)
class Job:
    """One measurement: a case of an op, and what it stores.

    stored: the "last" state of a row, in place; or, while the pool is only read, "every" state, as snapshots of every
        token, or "none". Jobs of replay store the states of rows that fold (RingJob).
    """

    op: str
    case: AnyCase
    stored: Stored = "last"

    @property
    def stores(self) -> int:
        """States stored per row."""
        return {"every": self.case.tokens or 1, "none": 0}.get(self.stored, 1)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What the configs of all kernels are chosen for that it may start."""
        problem = self.case.problem
        return (replace(problem, stored=self.stored if problem.several_tokens else "last"),)

    @property
    def problem(self) -> Problem:
        """What the config of its kernel is chosen for."""
        return self.problems[-1]

    @property
    def counted_bytes(self) -> int:
        """Bytes that any implementation must move."""
        return self.case.counted_bytes(self.stores)

    @property
    def read_bytes(self) -> int:
        """Bytes of the states that are read, without scales."""
        return self.case.batch * self.case.slot_bytes

    @property
    def touched_bytes(self) -> int:
        """Bytes of the states that are read and stored, without scales, and of tokens where roofs count them."""
        return (1 + self.stores) * self.read_bytes + self.case.token_bytes

    @property
    def touched(self) -> tuple[object, ...]:
        """What `touch` and `read` depend on: which rows of a ring are live changes no state that is touched."""
        case = self.case
        return type(self), case.format, case.rounding, case.batch, case.measured_axes, case.tokens, self.stores

    def roof_of_both(self, touch: Timing, read: Timing) -> Timing | None:
        """The roof of a job that stores some of the states it reads; None where `touch` is the roof, or `read`."""
        return None


def check_words(jobs: Sequence[Job]) -> None:
    """Raise ValueError where a state, or what a roof copies beside it, is not whole 32-bit words: roofs move these."""
    for case in (job.case for job in jobs):
        if case.slot_bytes % WORD or case.token_bytes // (2 * case.batch) % WORD:
            shape = " x ".join(map(str, case.state_axes))
            raise ValueError(f"a state of {shape} in {case.format}, or its tokens, are not whole 32-bit words")


@dataclass(frozen=True)
class Grid:
    """Jobs: every combination of shapes, formats, tokens per row, what these store, and batch sizes."""

    shapes: tuple[Shape, ...]
    formats: Formats = PORTABLE_FORMATS
    tokens: Sequence[int] = (1,)
    stored: Sequence[Stored] = ("last", "every")  # by several tokens
    batches: Sequence[int] = BATCHES
    by_one: Sequence[Stored] = ("last",)  # stored by one token

    def with_sizes(self, sizes: Mapping[str, Sequence[int]]) -> Grid:
        """A grid with all combinations of these sizes in its shapes."""
        changes = [dict(zip(sizes, values, strict=True)) for values in product(*sizes.values())]
        shapes = dict.fromkeys(shape._replace(**change) for shape in self.shapes for change in changes)
        return replace(self, shapes=tuple(shapes))


@dataclass(frozen=True)
class Way:
    """Another way to call flashstate, or another library.

    job: the job as it then is, whose budget and config may be others; MeasurementError where there is no such call.
    inputs: the inputs of the job as they then lie in memory.
    fresh: whether the job as it then is has inputs of its own.
    slots: the slots of a call as they then are.
    """

    bind: Binding
    job: Callable[[Job], Job] = lambda job: job
    inputs: Callable[[Inputs], Inputs] = lambda inputs: inputs
    fresh: bool = False
    slots: Callable[[Slots], Slots] = lambda slots: slots


def with_int64(slots: Slots) -> Slots:
    """Slots as `StatePool.acquire` gives them: of int64, where graphs of launches have int32."""
    rows = None if slots.snapshot_rows is None else slots.snapshot_rows.long()
    return replace(slots, read=slots.read.long(), snapshot_rows=rows)


@dataclass(frozen=True)
class BenchedOp:
    """An op as the benchmark knows it; its inputs, bytes and budgets come with its cases, from proof/cases/."""

    name: str  # in measurements
    bind: Binder
    case: Callable[[Shape, str, str, int, int], AnyCase]  # of shape, format, rounding, tokens, batch
    grids: tuple[Grid, ...]  # that are measured, as far as options do not change them
    peers: Mapping[str, Peer]
    host_case: AnyCase  # a small call, whose cost on the host is measured
    variants: Mapping[str, Way] = field(default_factory=dict)  # ways to call it with results or memory of their own
    # Grids that configs are found for; none: those that are measured, with 1 and 4 tokens. None: it cannot be tuned.
    tuned: tuple[Grid, ...] | None = ()
    sizes: Mapping[str, str] = field(default_factory=lambda: {name: name for name in Shape._fields})  # option -> axis
    job: Callable[[str, AnyCase, Stored], Job] = Job
    check: Callable[[Binding, Inputs, Storing], None] | None = None  # of results; None: that of bench/measure.py
    shown: tuple[Stored, ...] = ()  # what `flashstate info` shows configs of; none: what its options say

    @property
    def ways(self) -> dict[str, Way]:
        """All other ways to call flashstate: with slots of the other index type, and the variants of the op."""
        return {"int64 slots": Way(self.bind, slots=with_int64), **self.variants}

    def jobs(self, grids: Sequence[Grid]) -> list[Job]:
        """The jobs of these grids, each once."""
        found = [
            self.job(self.name, self.case(shape, name, rounding, 0 if count == 1 else count, batch), stored)
            for grid in grids
            for shape in grid.shapes
            for name, rounding in grid.formats
            for count in grid.tokens
            for stored in (grid.stored if count > 1 else grid.by_one)
            for batch in grid.batches
        ]
        return list(dict.fromkeys(found))

    @property
    def tuned_grids(self) -> tuple[Grid, ...]:
        """The grids of jobs that `flashstate tune` finds configs for."""
        if self.tuned is None:
            raise ValueError(f"tune finds no configs of {self.name} yet")
        return self.tuned or tuple(replace(grid, tokens=(1, 4)) for grid in self.grids)
