"""What a benchmark measures: jobs, and what it knows of the op they belong to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from flashstate.bench.peers import Binding, Peer, Step
from flashstate.launch import Problem
from flashstate.state.formats import PORTABLE_FORMATS
from flashstate.testing import AnyCase, Inputs, Pool

SPARE_SLOTS = 3  # of the small pool results are checked on
Formats = Sequence[tuple[str, str]]  # of format and rounding
Shape = tuple[int, int, int, int]  # heads, groups, rows, cols


@dataclass(frozen=True)
class Job:
    """One measurement: a case of an op, updated in place, or with snapshots of every token and the pool only read."""

    op: str
    case: AnyCase
    snapshots: bool = False

    @property
    def stores(self) -> int:
        """States stored per row."""
        return (self.case.tokens or 1) if self.snapshots else 1

    @property
    def problem(self) -> Problem:
        """What its config is chosen for."""
        problem = self.case.problem
        return replace(problem, each_stored=self.snapshots and problem.several_tokens)

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


class Binder(Protocol):
    """Makes a step of flashstate; with `bare` it is given the pool as a plain tensor instead of a State."""

    def __call__(self, inputs: Inputs, snapshots: Pool | None = None, *, bare: bool = False) -> Step: ...


@dataclass(frozen=True)
class BenchedOp:
    """An op as the benchmark knows it; its inputs, bytes and budgets come with its cases, from testing/."""

    bind: Binder
    jobs: Callable[[Formats, Sequence[int], Sequence[int], Shape], list[Job]]  # of formats, batches, tokens, shape
    peers: Mapping[str, Peer]
    host_case: AnyCase  # a small call, whose cost on the host is measured
    formats: Formats = PORTABLE_FORMATS  # that are measured unless others are asked for
    variants: Mapping[str, Binding] = field(default_factory=dict)  # other ways to call flashstate, by what tells them
