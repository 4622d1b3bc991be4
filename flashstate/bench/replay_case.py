"""The cases and jobs of replay: those of mamba2_step on pools with rings, of which some rows are live."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import cast

import torch
from torch import Tensor

from flashstate.bench.acceptance import accepted_tokens, live_counts, spread_counts
from flashstate.bench.jobs import SPARE_SLOTS, Job, Live, Stored
from flashstate.bench.timing import Timing
from flashstate.launch import Problem
from flashstate.ops.mamba2_replay import forms_of, replay_kind
from flashstate.proof import AnyCase, Case, ReplayInputs, dtype
from flashstate.proof.cases.mamba2_replay import REPLAY, ReplayPool
from flashstate.proof.inputs import MOST_DIFFERENT, Source
from flashstate.reference.mamba2 import softplus
from flashstate.state.formats import encode
from flashstate.state.ring import FIELDS

WINDOW = 16
LEAST_SLOTS = 256  # of the pool that a larger one repeats: as many as it takes to have every count as often as it comes


@dataclass(frozen=True)
class RingCase(Case):
    """A case of mamba2_replay with a window of 16, and how many rows are live."""

    live: Live = "stationary"

    def __post_init__(self) -> None:
        if self.tokens > WINDOW:
            raise ValueError(f"replay is measured with a window of {WINDOW}, and calls of no more, got {self.tokens}")

    def __str__(self) -> str:
        return f"{super().__str__()}-{self.live}"

    @property
    def length(self) -> int:
        """Tokens of every row."""
        return self.tokens or 1

    @property
    def problem(self) -> Problem:
        return self.problems[-1]

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What the configs of its kernels are chosen for, which are those of calls with a plan."""
        kind = replay_kind(self.length, self.format, False, WINDOW)
        return forms_of(kind(**{**vars(super().problem), "op": "mamba2_replay"}), planned=True)

    @property
    def counts(self) -> Tensor:
        """Live rows of requests: every count as often as it comes."""
        return live_counts(self.live, self.length, WINDOW)

    @property
    def folding(self) -> float:
        """The share of rows that fold."""
        return (self.counts + self.length > WINDOW).double().mean().item()

    @property
    def ring_row_bytes(self) -> int:
        """Bytes that a token has in a ring."""
        x, B = self.heads * self.rows * dtype(self.x).itemsize, self.groups * self.cols * dtype(self.bc).itemsize
        return x + B + 4 * self.heads

    def counted_bytes(self, stores: int = 1) -> int:
        """Bytes one call must move at least, however many states it stores: a state of every row that folds. All states
        are read, live rows of rings are read, new ones stored; everything else is moved once, cursors too."""
        stored = self.folding * self.batch * (self.slot_bytes + self.scale_bytes)
        rings = self.batch * (self.counts.double().mean().item() + self.length) * self.ring_row_bytes
        return super().counted_bytes(0) + round(stored + rings) + 2 * 4 * self.batch

    def make_inputs(self, device: torch.device, seed: int = 0) -> ReplayInputs:
        """Those of mamba2_step, on a pool with rings, whose slots have the live counts of this case in random order.
        Rows that are not live hold something too."""
        plain = Case.make_inputs(replace(self, slots=1), device, seed)
        source = Source(device, seed + 1)
        length, options = WINDOW + self.length, plain.state
        data, scale = encode(source.states_of(self), dtype(self.format))
        counts = spread_counts(self.live, self.length, WINDOW, self.slots)
        start = torch.randint(length, (self.slots,), generator=source.generator).int()
        order = torch.randperm(self.slots, generator=source.generator)
        pool = ReplayPool(
            data, scale, source.seeds(self.slots),
            self._for_slots(source.normal(MOST_DIFFERENT, self.heads, length, self.rows, name=self.x)),
            self._for_slots(source.normal(MOST_DIFFERENT, self.groups, length, self.cols, name=self.bc)),
            self._for_slots(softplus(source.normal(MOST_DIFFERENT, self.heads, length) - 1)),
            start.to(device), counts[order].to(device), WINDOW, self.rounding, options.rounds, options.stream,
        )  # fmt: skip
        return ReplayInputs(REPLAY, pool, plain.arguments, plain.options, source.slots_of(self), None)

    def _for_slots(self, values: Tensor) -> Tensor:
        """Values of some slots again and again, for all of them."""
        return values[torch.arange(self.slots, device=values.device) % len(values)]


@dataclass
class CursorInputs(ReplayInputs):
    """The inputs of a call of replay, and how many of its tokens are accepted."""

    accepted: Tensor  # (batch,)


@dataclass(frozen=True)
class CursorCase(RingCase):
    """What a model step has around its layers: a plan, its commit, and new random bits where states need some."""

    def make_inputs(self, device: torch.device, seed: int = 0) -> CursorInputs:
        inputs = vars(super().make_inputs(device, seed))
        accepted = accepted_tokens(self.batch, self.length, torch.Generator().manual_seed(seed)).int().to(device)
        return CursorInputs(**inputs, accepted=accepted)

    def counted_bytes(self, stores: int = 1) -> int:
        """The slot of every row, its cursors in and out, its row of the plan out and in, what it accepts, its seed."""
        of_row = dtype(self.index).itemsize + 2 * 2 * 4 + 2 * 4 * FIELDS + 4 + (0 if self.rounding == "nearest" else 16)
        return self.batch * of_row


@dataclass(frozen=True)
class RingJob(Job):
    """A measurement of replay. States are read, and those of rows that fold are stored."""

    case: RingCase

    @property
    def stores(self) -> int:
        return 1  # what `touch` does

    @property
    def problem(self) -> Problem:
        return self.case.problem

    @property
    def problems(self) -> tuple[Problem, ...]:
        return self.case.problems

    @property
    def has_roofs(self) -> bool:
        return not isinstance(self.case, CursorCase)

    @property
    def as_touched(self) -> Job:
        """That of `stationary`: which rows are live changes no state that is touched."""
        return replace(self, case=replace(self.case, live="stationary"), stored="stationary")

    def roof_of_both(self, touch: Timing, read: Timing) -> Timing:
        """What the counted bytes take, where states of rows that fold are as fast as `touch`, and others as `read`, and
        all else is as fast as these states are together."""
        folding = self.case.folding
        more = self.counted_bytes / ((1 + folding) * self.read_bytes)

        def together(touch: float, read: float) -> float:
            return more * (folding * touch + (1 - folding) * read)

        return Timing(*map(together, astuple(touch), astuple(read)))


def job_of(op: str, case: AnyCase, stored: Stored) -> Job:
    """The job of replay where live rows say what is stored; else that of mamba2_step, whose case this is."""
    if stored in ("last", "snapshots", "nothing"):
        return Job(op, case, stored)
    given = {**vars(case), "slots": max(case.slots, LEAST_SLOTS + SPARE_SLOTS)}
    if stored == "plan and commit":
        return RingJob(op, CursorCase(**given), stored)
    return RingJob(op, RingCase(**given, live=cast(Live, stored)), stored)
