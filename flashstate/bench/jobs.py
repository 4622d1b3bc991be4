"""What a benchmark measures: jobs, and what it knows of the op they belong to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any, Literal

from flashstate.bench.binding import Binding, Step, Storing, bind_op
from flashstate.bench.peers import Peer
from flashstate.bench.timing import Timing
from flashstate.launch import Problem
from flashstate.proof import CASES, AnyCase, Inputs
from flashstate.state.slots import Slots

SPARE_SLOTS = 3  # of the small pool results are checked on
WORD = 4  # bytes
BATCHES = (1, 4, 16, 64, 256, 1024)
HOST_BATCH = 4  # of the small call whose cost on the host is measured
FLOAT32, BFLOAT16 = ("float32", "nearest"), ("bfloat16", "nearest")
Live = Literal["none folds", "stationary", "uniform", "all fold", "a 16th folds"]  # rows of the rings of a batch
Stored = Literal["last", "every", "none", Live, "plan and commit"]


@dataclass(frozen=True)
class Job:
    """One measurement: a case of an op, and what it stores."""

    op: str
    case: AnyCase
    # The last state of a row, in place; or, while the pool is only read, every state, as snapshots of every token, or
    # none. Jobs of replay store the states of rows that fold (RingJob).
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
    """Jobs: every combination of sizes, formats, tokens per row, what these store, and batch sizes."""

    formats: Sequence[tuple[str, str]]  # with their roundings
    tokens: Sequence[int] = (1,)
    stored: Sequence[Stored] = ("last", "every")  # by several tokens
    batches: Sequence[int] = BATCHES
    by_one: Sequence[Stored] = ("last",)  # stored by one token
    sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)  # that are others than those of the op's case


@dataclass(frozen=True)
class Way:
    """Another way to call flashstate, or another library."""

    bind: Binding
    # The job as it then is, whose budget and config may be others; MeasurementError where there is no such call.
    job: Callable[[Job], Job] = lambda job: job
    inputs: Callable[[Inputs], Inputs] = lambda inputs: inputs  # as they then lie in memory
    fresh: bool = False  # whether the job as it then is has inputs of its own


def with_int64(slots: Slots) -> Slots:
    """Slots as `StatePool.acquire` gives them: of int64, where graphs of launches have int32."""
    rows = None if slots.snapshot_rows is None else slots.snapshot_rows.long()
    return replace(slots, read=slots.read.long(), snapshot_rows=rows)


def bind_with_int64(bind: Binding, inputs: Inputs, storing: Storing) -> Step:
    """Make a step whose slots are of int64."""
    step = bind(inputs, storing)
    return lambda slots: step(with_int64(slots))


@dataclass(frozen=True)
class BenchedOp:
    """An op as the benchmark knows it; its inputs, bytes and budgets come with its cases, from proof/cases/."""

    name: str  # in measurements
    case: AnyCase  # what all jobs are like, but for what grids say
    grids: tuple[Grid, ...]  # that are measured, as far as options do not change them
    peers: Mapping[str, Peer] = field(default_factory=dict)
    variants: Mapping[str, Way] = field(default_factory=dict)  # ways to call it with results or memory of their own
    # Grids that configs are found for; none: those that are measured, with 1 and 4 tokens. None: it cannot be tuned.
    tuned: tuple[Grid, ...] | None = ()
    bind: Callable[..., Step] = bind_op  # a Binding; with `bare=True` the step is given plain tensors
    job: Callable[[str, AnyCase, Stored], Job] = Job
    check: Callable[[Binding, Inputs, Storing], object] | None = None  # of results; None: that of bench/measure.py
    shown: tuple[Stored, ...] = ()  # what `flashstate info` shows configs of; none: what its options say
    # Of replay: the batch size from which on it was faster than a step in place, on an H200, by what was measured; 0:
    # at none. `flashstate info` shows it.
    pays: Mapping[str, int] = field(default_factory=dict)

    @property
    def ways(self) -> dict[str, Way]:
        """All other ways to call flashstate: with slots of the other index type, and the variants of the op."""
        return {"int64 slots": Way(partial(bind_with_int64, self.bind)), **self.variants}

    def jobs(self, grids: Sequence[Grid]) -> list[Job]:
        """The jobs of these grids, each once."""
        found = [
            self.job(self.name, self._case(dict(zip(grid.sizes, sizes, strict=True)), *known, count, batch), stored)
            for grid in grids
            for sizes in product(*grid.sizes.values())
            for known in grid.formats
            for count in grid.tokens
            for stored in (grid.stored if count > 1 else grid.by_one)
            for batch in grid.batches
        ]
        return list(dict.fromkeys(found))

    def _case(self, sizes: Mapping[str, int], name: str, rounding: str, tokens: int, batch: int) -> AnyCase:
        """The case of a job; ValueError where there is none."""
        changes: dict[str, Any] = {self.case.sizes[size]: number for size, number in sizes.items()}
        changes |= {"tokens": 0 if tokens == 1 else tokens, "batch": batch, "slots": batch + SPARE_SLOTS}
        case = replace(self.case.in_format(name, rounding), **changes)
        heads, groups, *_ = case.measured_axes
        if heads % groups:
            field = case.sizes["groups"].replace("_", " ")
            which = "" if field == "groups" else f", which are {field},"
            raise ValueError(f"the number of groups{which} must divide the {heads} heads, got {groups}")
        return case

    def small_grid(self, *stored: Stored) -> Grid:
        """What is measured first, in one shape; `stored`: by any tokens."""
        first = self.grids[0]
        sizes = {name: numbers[:1] for name, numbers in first.sizes.items()}
        return replace(first, sizes=sizes, stored=stored, by_one=stored)

    @property
    def host_case(self) -> AnyCase:
        """A small call of one token, whose cost on the host is measured."""
        grid = self.small_grid(*(self.shown or ("last",)))
        return self.jobs([replace(grid, formats=grid.formats[:1], tokens=(1,), batches=(HOST_BATCH,))])[0].case

    @property
    def tuned_grids(self) -> tuple[Grid, ...]:
        """The grids of jobs that `flashstate tune` finds configs for."""
        if self.tuned is None:
            raise ValueError(f"tune finds no configs of {self.name} yet")
        return self.tuned or tuple(replace(grid, tokens=(1, 4)) for grid in self.grids)


def benched(op: str, changes: Mapping[str, Any] = MappingProxyType({}), **special: Any) -> BenchedOp:
    """The benchmark of an op, from its cases: the first shape of a real model, in all formats that there are cases of,
    with changes of fields of this case, and with special fields of BenchedOp."""
    real = CASES[op].real
    formats = tuple(dict.fromkeys((case.format, case.rounding) for case in real))
    grid = Grid(formats) if real[0].op.between_tokens else Grid(formats, stored=("last",))
    usual = {"case": replace(real[0], **changes), "grids": (grid,)}
    return BenchedOp(op.removesuffix("_step"), **{**usual, **special})
