"""What the ops that step a State share: what they store, constants of their kernels, and checks inside debug()."""

from __future__ import annotations

from typing import Any

from flashstate.launch.arguments import aligned
from flashstate.launch.call import Given
from flashstate.launch.config import Problem, access_width
from flashstate.launch.table import Config
from flashstate.ops.debug import check_contents, debugging
from flashstate.state.state import State


def stores_of(given: Given) -> str:
    """After which tokens a kernel writes the pool: "last", "every" or "none"."""
    return "none" if not given.update else "every" if given.slots is not None and given.slots.per_token else "last"


def stored_of(given: Given) -> str:
    """Which states after several tokens a config is chosen for: "last", "every", also as snapshots, or "none"."""
    stores = stores_of(given)
    if given.extent.one_token:
        return "last"
    return "every" if getattr(given, "snapshots", None) is not None else stores


def state_constants(given: Given, state: State, problem: Problem, config: Config) -> dict[str, Any]:
    """Constants of every kernel that steps states: their shape, their format, and the tile of a program."""
    _, heads, rows, cols = state.data.shape
    return {
        "H": heads, "ROWS": rows, "COLS": cols, "VECTOR": problem.vector, "PADDING": padding_of(given),
        "ROUNDING": state.rounding, "ROUNDS": state.rounds, "TARGET": given.machine.target,
        "BLOCK_ROWS": config.block_rows, "BLOCK_COLS": problem.block_cols, "CHUNK": problem.chunk(config.lanes),
    }  # fmt: skip


def snapshot_constants(given: Given, vector: int) -> dict[str, Any]:
    """Constants of kernels that take snapshots, whose accesses are no wider than those of the state."""
    if given.snapshots is None:
        return {"SNAPSHOT_VECTOR": 1, "SNAPSHOT_ROUNDING": "nearest"}
    width = min(vector, access_width(given.snapshots.data))
    return {"SNAPSHOT_VECTOR": width, "SNAPSHOT_ROUNDING": given.snapshots.rounding}


def padding_of(given: Given) -> str:
    """What padding rows give."""
    return "zero" if given.slots is None else given.slots.padding


def all_aligned(given: Given, *names: str) -> bool:
    """Whether all rows of these tensors, of which some may not be there, start at multiples of 16 bytes."""
    return all(aligned(getattr(given, name)) for name in names)


def check_debugged(given: Given) -> None:
    """Inside debug(), raise where the numbers in slots would lose or mix up a state."""
    if debugging():
        snapshots = getattr(given, "snapshots", None)
        rows = None if snapshots is None else len(snapshots.data)
        check_contents(len(state_of(given).data), given.tokens, given.slots, rows, given.update)


def state_of(given: Given) -> State:
    """The State that a call steps."""
    state = given.state
    return state if isinstance(state, State) else state.ssm
