"""What the doors of replay share: their slots and checks, the kernels that a call starts, and what these are given."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from flashstate.basics import LARGEST_WINDOW
from flashstate.launch.arguments import row_stride
from flashstate.launch.call import Given
from flashstate.launch.config import TiledProblem, next_power_of_2
from flashstate.launch.environment import Machine, replaced
from flashstate.launch.table import Config
from flashstate.ops.debug import check_committed, check_cursors, check_debugged, debugging
from flashstate.state.ring import AnyRing, Plan, check_call_length, check_plan, refuse_tables
from flashstate.state.slots import Slots, as_slots

FEWEST_PARTED = 2048  # batch x heads from which on rows that fold have a kernel of their own
MOST_PER_PROCESSOR = 16  # programs of a kernel that walks along a plan
_parted = False


def parted() -> AbstractContextManager[None]:
    """Let calls with a plan inside, small ones too, use two kernels, of few programs that walk along it. For proofs."""
    return replaced(globals(), "_parted", True)


def slots_of(given: Given) -> Slots | None:
    """The slots of a call: those of its plan, if it has one."""
    plan, slots = given.plan, given.slots
    if plan is None:
        return as_slots(slots)
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a Plan, got {type(plan).__name__}")
    if slots is not None and slots is not plan.slots and getattr(plan.slots, "read", None) is not slots:
        raise ValueError("slots must be left out with a plan, which has those that it was made for")
    return plan.slots


def check_replay(given: Given, main: str = "x") -> None:
    """Raise where the plan, the slots and the tokens of a call, those of `main`, do not go with its ring."""
    ring, plan, tokens = given.ring, given.plan, given.tokens
    refuse_tables(given.slots, "replay")
    longest = check_call_length(ring, tokens.longest)
    if plan is not None:
        check_plan(plan, ring)
        if (plan.batch, plan.tokens) != (tokens.batch, longest):
            made, got = f"{plan.batch} rows of up to {plan.tokens} tokens", f"{tokens.batch} of up to {longest}"
            raise ValueError(f"plan is for {made}, but {main} has {got}")


def check_debugged_ring(given: Given, check_inputs: Callable[[Given], None]) -> None:
    """Inside debug(), raise where numbers in slots or cursors of rings are out of range, where inputs are wrong, and
    where a step before was not committed."""
    check_debugged(given)
    if debugging():
        check_inputs(given)
        check_cursors(given.ring, given.slots, given.tokens.batch, given.tokens.longest or 0)
        check_committed(given)


@dataclass(frozen=True)
class AnyReplay(TiledProblem):
    """What a config of replay is chosen for. A program has so many tiles as the config says, of one head or of several
    of a group: all share what has a value for every column. The last word of its op says what rows do: "keep" what they
    have, "fold", or "either"."""

    heads_per_group: int = 1
    most_programs: int = 0  # that walk along a plan; 0: as many as there are tiles for

    @property
    def fewest_parted(self) -> int:
        """Batch x heads from which on rows that fold have a kernel of their own where a plan tells them apart."""
        return FEWEST_PARTED // 2 if self.itemsize == 1 else FEWEST_PARTED

    def tiles(self, config: Config) -> int:
        """Tiles of a program: as the config says, as far as the tiles of a group can be shared out so."""
        return math.gcd(config.tiles, self.heads_per_group * -(-self.rows // config.block_rows))

    def programs(self, config: Config) -> int:
        """How many programs share the tiles of all heads."""
        tiles = self.batch_heads * -(-self.rows // config.block_rows)
        programs = tiles // self.tiles(config)
        return min(programs, self.most_programs) if self.most_programs else programs


P = TypeVar("P", bound=AnyReplay)


def forms_of(problem: P, planned: bool) -> tuple[P, ...]:
    """The kernels that a call starts, one after the other: one that decides for every row, or with a plan, and rows
    enough, one for those that do not fold and one for those that do."""
    enough = _parted or problem.batch_heads >= problem.fewest_parted
    forms = ("keep", "fold") if planned and enough else ("either",)
    return tuple(replace(problem, op=f"{problem.op} {form}") for form in forms)


def walking(problem: P, given: Given) -> tuple[P, ...]:
    """The kernels that a call starts; where there are two, each of so few programs that these walk along its plan."""
    forms = forms_of(problem, given.plan is not None)
    most = (1 if _parted else MOST_PER_PROCESSOR) * given.machine.processors if len(forms) > 1 else 0
    return tuple(replace(form, most_programs=most) for form in forms)


def rows_do(problem: AnyReplay) -> str:
    """What rows are for the kernel of this problem: those that "keep" what they have, that "fold", or "either"."""
    return problem.op.split()[-1]


def place_of(problem: AnyReplay, machine: Machine) -> str:
    """The place of a kernel among those of a call: "first" and "second" run side by side, as both have other rows."""
    if rows_do(problem) == "either" or not machine.overlaps:
        return "alone"
    return "first" if rows_do(problem) == "keep" else "second"


def far_apart(tensor: Tensor | None, token_axes: int) -> bool:
    """Whether offsets between the tokens of a window need 64 bits."""
    return tensor is not None and tensor.stride(token_axes - 1) * LARGEST_WINDOW >= 1 << 31


def plan_values(plan: Plan | None) -> dict[str, Any]:
    """The tensors of a plan."""
    return {"rows_ptr": None if plan is None else plan.rows, "parts_ptr": None if plan is None else plan.parts}


def ring_values(ring: AnyRing) -> dict[str, Any]:
    """The tensors of a ring, strides between slots, and between heads that are apart, and how many rows it has, live or
    not, and room for."""
    kept = {f"ring_{name}": getattr(ring, name) for name in ring.written}
    return {
        **{f"{name}_ptr": tensor for name, tensor in kept.items()},
        **{f"{name}_stride": row_stride(tensor) for name, tensor in kept.items()},
        **{f"RING_{name.upper()}_H": stride for name, stride in ring.head_strides.items()},
        "start_ptr": ring.start, "count_ptr": ring.count, "L": ring.length, "WINDOW": ring.window,
        "ROOM": max(16, next_power_of_2(ring.window)),
    }  # fmt: skip
