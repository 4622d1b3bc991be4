"""What the benchmarks of replay share: cases, of which as many rows are live as requests have that draft tokens; their
jobs; how a call has its plan; and what is checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from functools import cache
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from flashstate.bench.binding import IN_PLACE, Binding, Step, Storing, TimedCall, arguments_of, bind_op
from flashstate.bench.jobs import SPARE_SLOTS, Job, Live, Stored
from flashstate.bench.measure import check as check_step
from flashstate.bench.measure import require_within_budgets
from flashstate.bench.peers import MeasurementError
from flashstate.bench.timing import Timing
from flashstate.launch import Problem
from flashstate.ops.replaying import forms_of
from flashstate.proof import AnyCase, AnyReplayCase, Inputs, ReplayInputs, ReplayPool, error_ratio, slotted
from flashstate.proof.inputs import Source
from flashstate.proof.replaying import rings_after
from flashstate.state.formats import bits_of
from flashstate.state.ring import AnyRing
from flashstate.state.slots import Slots

LIVE_BY_ONE: tuple[Live, ...] = ("none folds", "a 16th folds")  # what rows of one token do, as a server has them
WINDOW = 16
LEAST_SLOTS = 256  # of the pool that a larger one repeats: as many as it takes to have every count as often as it comes
ACCEPTANCE = 0.7  # the probability that a draft token is right, if those before it are
REQUESTS, STEPS = 1 << 14, 64  # that are simulated; after so many steps nothing is left of how they began
LEAST_UNIFORM = 3  # live rows


def accepted_tokens(requests: int, tokens: int, generator: torch.Generator) -> Tensor:
    """How many tokens of a step each request keeps, (requests,): one, and drafts up to the first that is wrong."""
    right = torch.rand(requests, tokens - 1, generator=generator) < ACCEPTANCE
    return 1 + right.long().cumprod(1).sum(1)


@cache
def stationary_counts(tokens: int) -> Tensor:
    """Live rows of many requests between two steps of so many tokens each, simulated; sorted."""
    generator = torch.Generator().manual_seed(0)
    count = torch.randint(1, WINDOW + 1, (REQUESTS,), generator=generator)
    for _ in range(STEPS):
        kept = torch.where(count + tokens > WINDOW, 0, count)  # what is not folded
        count = kept + accepted_tokens(REQUESTS, tokens, generator)
    return count.sort().values


@cache
def live_counts(live: Live, tokens: int) -> Tensor:
    """Live rows of many requests as a measurement has them, sorted."""
    if live == "uniform":
        return torch.arange(LEAST_UNIFORM, WINDOW + 1)
    counts = stationary_counts(tokens)
    folds = counts + tokens > WINDOW
    if live == "none folds":  # where all would, rings are empty
        return counts[~folds] if not folds.all() else torch.zeros(1, dtype=torch.int64)
    return counts[folds] if live == "all fold" else counts


def spread_counts(live: Live, tokens: int, slots: int) -> Tensor:
    """Live rows of so many slots, (slots,) int32, sorted: every count as often as among many requests, nearly."""
    counts = live_counts(live, tokens)
    return counts[(2 * torch.arange(slots) + 1) * len(counts) // (2 * slots)].int()


@dataclass(frozen=True)
class RingCase(AnyReplayCase):
    """A case of replay whose rings have as many live rows as a measurement wants. The case of an op goes with it. Few
    states and rings are different: so many numbers take longer to draw than all that is measured."""

    live_rows: Live = "stationary"
    different: ClassVar[int] = 8

    @property
    def counts(self) -> Tensor:
        """Live rows of requests: every count as often as it comes."""
        return live_counts(self.live_rows, self.tokens or 1)

    @property
    def folding(self) -> float:
        """The share of rows that fold."""
        return (self.counts + (self.tokens or 1) > WINDOW).double().mean().item()

    @property
    def moved(self) -> tuple[float, float]:
        """What a batch has on average: its slots are any of the pool."""
        return self.batch * self.folding, self.batch * (self.counts.double().mean().item() + (self.tokens or 1))

    def _ring(self, source: Source, slots: Tensor) -> AnyRing:
        """Rings whose slots have the live counts of this case in random order."""
        ring = super()._ring(source, slots)
        order = torch.randperm(self.slots, generator=source.generator)
        ring.count.copy_(spread_counts(self.live_rows, self.tokens or 1, self.slots)[order])
        return ring


@dataclass(frozen=True)
class RingJob(Job):
    """A measurement of replay. States are read, and those of rows that fold are stored."""

    case: RingCase

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What calls with a plan launch."""
        problem = self.case.problem
        return forms_of(cast(Any, replace(problem, op=problem.op.removesuffix(" either"))), planned=True)

    def roof_of_both(self, touch: Timing, read: Timing) -> Timing:
        """What the counted bytes take, where states of rows that fold are as fast as `touch`, and others as `read`. All
        else is as fast as these states are together."""
        folding = self.case.folding
        more = self.counted_bytes / ((1 + folding) * self.read_bytes)
        both = zip(astuple(touch), astuple(read), strict=True)
        return Timing(*(more * (folding * touched + (1 - folding) * only_read) for touched, only_read in both))


def job_of(kind: Callable[..., RingCase], op: str, case: AnyCase, stored: Stored) -> Job:
    """The job of replay, with a case of this kind, where live rows say what is stored; else that of the op that steps,
    whose case this is."""
    if stored in ("last", "every", "none"):
        return Job(op, case, stored)
    return RingJob(op, kind(**given_to_rings(case), live_rows=stored), stored)


def given_to_rings(case: AnyCase) -> dict[str, Any]:
    """The fields of a case of the op that steps, for one of replay, which has slots enough; ValueError where there is
    no such call."""
    if case.tokens > WINDOW:
        raise ValueError(f"replay is measured with a window of {WINDOW}, and calls of no more, got {case.tokens}")
    return {**vars(case), "slots": max(case.slots, LEAST_SLOTS + SPARE_SLOTS)}


def bind_flashstate(inputs: Inputs, storing: Storing = IN_PLACE, *, bare: bool = False) -> Step:
    """Make a step with a plan that was made before, as all layers of a model but the first have it; `bare`: with none.
    On a pool without rings it is a step of the op that steps."""
    if bare or not isinstance(inputs, ReplayInputs):
        return bind_op(inputs, storing, bare=bare)
    replayed, op, given = inputs, inputs.op.step, arguments_of(inputs)

    def step(slots: Slots) -> TimedCall:
        plan = replayed.plan(slots)
        return lambda: op(**given, plan=plan)

    return step


def check(bind: Binding, inputs: Inputs, storing: Storing = IN_PLACE) -> None:
    """Raise MeasurementError unless a call on a copy of `inputs` gives what it must, and leaves it in the pool."""
    after = check_step(bind, inputs, storing)
    if isinstance(inputs, ReplayInputs):
        require_appended(inputs, after.state)


def require_appended(inputs: ReplayInputs, got: ReplayPool) -> None:
    """Raise MeasurementError unless rings have the new tokens, what is rounded of them within its budget, and the pool
    has all else but folded states, bit for bit, as it was."""
    filled, exact = rings_after(inputs)
    want, rows, folded = filled.state, inputs.appended_rows, inputs.slots[inputs.folds].long()
    for name, finely in exact.items():
        new, *expected = (kept.transpose(1, 2)[rows] for kept in (got.kept[name], finely, want.kept[name]))
        require_within_budgets({f"{name} in the ring": error_ratio(new, *expected)})
        want.kept[name].transpose(1, 2)[rows] = new
    for name, tensor in slotted(want).items():
        if name in ("data", "scale"):
            bits_of(tensor)[folded] = bits_of(slotted(got)[name])[folded]
    require_equal(slotted(want), slotted(got))


def require_equal(want: dict[str, Tensor], got: dict[str, Tensor]) -> None:
    """Raise MeasurementError where bytes differ."""
    for name, tensor in want.items():
        if not torch.equal(bits_of(tensor), bits_of(got[name])):
            raise MeasurementError(f"wrong: it leaves {name} other than it must be")
