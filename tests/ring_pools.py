"""Pools with rings, of Mamba-2, of the delta rule or of both, and steps of a model on them."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import flashstate
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
A = -torch.linspace(0.5, 2.0, HEADS)
DELTA = {"A_log": torch.linspace(-1.0, 0.5, HEADS), "dt_bias": torch.linspace(-0.5, 0.5, HEADS)}


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


def tokens_for(rows: int, tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Activations of so many tokens for so many rows, of all ops; a per channel."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(rows, tokens, *sizes, generator=generator).to(dtype)

    of_head, of_group = (HEADS, ROWS), (GROUPS, COLS)
    mamba2 = {"x": normal(*of_head), "dt": normal(HEADS), "B": normal(*of_group), "C": normal(*of_group)}
    delta = {"q": normal(*of_group), "k": normal(*of_group), "v": normal(*of_head), "a": normal(HEADS, COLS)}
    return {**mamba2, **delta, "b": normal(HEADS)}


def step(pool: StatePool, i: int, tokens: dict[str, Tensor], **options: Any) -> Tensor:
    """The outputs of layer i for tokens, by the op that its ring is for."""
    state, ring = pool.layer(i), pool.ring(i)
    if isinstance(ring, DeltaRing):
        given = {name: tokens[name] for name in ("q", "k", "v", "b")}
        given["a"] = tokens["a"] if ring.per_channel else tokens["a"][..., 0].contiguous()
        given |= {name: parameter.to(ring.k.device) for name, parameter in DELTA.items()}
        return flashstate.gated_delta_replay(state, ring, **given, **options)
    given = {name: tokens[name] for name in ("x", "dt", "B", "C")}
    return flashstate.mamba2_replay(state, ring, **given, A=A.to(ring.x.device), **options)


def fold(pool: StatePool, i: int, **options: Any) -> None:
    """Fold the ring of layer i, by the op that it is for."""
    state, ring = pool.layer(i), pool.ring(i)
    if isinstance(ring, DeltaRing):
        flashstate.gated_delta_fold(state, ring, **DELTA, **options)
    else:
        flashstate.mamba2_fold(state, ring, A, **options)


def replay(pool: StatePool, slots: Any, tokens: dict[str, Tensor], accepted: list[int] | None = None) -> list[Tensor]:
    """One step of a model: the outputs of its layers, whose inputs are those of the first, turned around."""
    device = pool.ring(0).start.device
    tokens = {name: tensor.to(device) for name, tensor in tokens.items()}
    plan = pool.plan(torch.as_tensor(slots, device=device), tokens["x"].shape[1])
    turned = {**tokens, **{name: tokens[name].flip(-1) for name in ("x", "v")}}
    outputs = [step(pool, i, turned if i else tokens, plan=plan) for i in range(pool.layers)]
    pool.commit(plan, None if accepted is None else torch.tensor(accepted, device=device))
    return outputs


def rings_of(rule: str, layers: int = LAYERS) -> list[AnyRing]:
    """Rings for layers, each with memory of its own but for the cursors."""
    start, count = (torch.zeros(SLOTS, dtype=torch.int32) for _ in range(2))
    kind = Ring if rule == "mamba2" else DeltaRing
    return [
        kind(**{part: torch.zeros(SLOTS, *shape) for part, shape in SHAPES[rule].items()},
             start=start, count=count, window=WINDOW)
        for _ in range(layers)
    ]  # fmt: skip
