"""Pools with rings, of Mamba-2, of the delta rule, or of both."""

from dataclasses import replace
from typing import Any

import torch

from flashstate import DeltaRing, Ring, StatePool
from flashstate.state.ring import AnyRing

SLOTS, LAYERS, HEADS, ROWS, COLS, GROUPS = 6, 2, 4, 3, 5, 2
WINDOW, TOKENS = 4, 3
LENGTH = WINDOW + TOKENS
X, B, HEADWISE = (HEADS, LENGTH, ROWS), (GROUPS, LENGTH, COLS), (HEADS, LENGTH)
SHAPES = {  # of a slot, by what rings are for
    "mamba2": {"x": X, "B": B, "dt": HEADWISE},
    "gated_delta": {"k": B, "u": X, "decay": HEADWISE},
    "per channel": {"k": B, "u": X, "decay": (*HEADWISE, COLS)},
}


def make_pool(rule: str = "mamba2", **options: Any) -> StatePool:
    """A pool for a rule, or of "both": Mamba-2 in one layer, the delta rule in the next."""
    if rule == "both":
        return pool_of_both(**options)
    kinds = {"window": WINDOW, "tokens": TOKENS, "ring_dtype": torch.float32, "stream": 7, "seed": 1}
    given = {"slots": SLOTS, "layers": LAYERS, "heads": HEADS, **kinds, **options}
    if rule == "mamba2":
        return StatePool.mamba2(**{"rows": ROWS, "cols": COLS, "groups": GROUPS, **given})
    delta = {"value_dim": ROWS, "key_dim": COLS, "key_heads": GROUPS, "per_channel": rule == "per channel"}
    return StatePool.gated_delta(**{**delta, "u_dtype": torch.float32, **given})


def pool_of_both(**options: Any) -> StatePool:
    """A pool over memory of two others, whose slots are all free."""
    one, other = (
        make_pool(rule, **{**options, "layers": 1, "stream": 7 + i}) for i, rule in enumerate(list(SHAPES)[:2])
    )
    rings = [one.ring(0), replace(other.ring(0), start=one.ring(0).start, count=one.ring(0).count)]
    states = [one.layer(0), replace(other.layer(0), seed=one.layer(0).seed)]
    windows = [pool.window(0) for pool in (one, other)] if one.has_windows else None
    pool = StatePool.wrap(states, rings=rings, windows=windows, drafts=one.drafts, null=one.null, seed=1)
    pool.release([slot for slot in range(SLOTS) if slot != one.null])
    return pool


def in_format(name: str, rounding: str, rule: str = "mamba2", **options: Any) -> StatePool:
    return make_pool(rule, dtype=getattr(torch, name), rounding=rounding, **options)


def rings_of(rule: str, layers: int = LAYERS) -> list[AnyRing]:
    """Rings for layers, each with memory of its own but for the cursors."""
    start, count = (torch.zeros(SLOTS, dtype=torch.int32) for _ in range(2))
    kind = Ring if rule == "mamba2" else DeltaRing
    return [
        kind(**{part: torch.zeros(SLOTS, *shape) for part, shape in SHAPES[rule].items()},
             start=start, count=count, window=WINDOW)
        for _ in range(layers)
    ]  # fmt: skip
