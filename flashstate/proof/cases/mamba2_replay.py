"""The cases of mamba2_replay: a checkpoint and a ring, what calls must give, and their tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from flashstate.errors import dtype_name
from flashstate.launch import Problem
from flashstate.ops.mamba2_fold import mamba2_fold
from flashstate.ops.mamba2_replay import MAMBA2_REPLAY, ReplayProblem, ReplayTokenProblem, replay_kind
from flashstate.proof.case import CASES, Cases, by_turns, in_every_format
from flashstate.proof.cases.mamba2 import MAMBA2, Case
from flashstate.proof.inputs import Source, dtype
from flashstate.proof.oracle import two_terms
from flashstate.proof.replaying import AnyReplayCase, ProvenReplay, ReplayInputs, ReplayPool, Token
from flashstate.reference.mamba2 import mamba2_token, softplus, time_steps
from flashstate.reference.mamba2_replay import replayed
from flashstate.state.formats import PORTABLE_FORMATS
from flashstate.state.ring import Ring


@dataclass(frozen=True, eq=False, kw_only=True)
class Mamba2ReplayPool(ReplayPool):
    """The checkpoints and the rings of a layer of Mamba-2, side by side."""

    x: Tensor  # of the ring, as the two after it
    B: Tensor
    dt: Tensor
    kind: ClassVar = Ring


def operand(values: Tensor, x: torch.dtype) -> Tensor:
    """Float32 as an operand of products, where tokens have x of that dtype: of 8 bits for bfloat16, as the sum of two
    such for float16, as it is for float32."""
    if x == torch.float32:
        return values
    return values.bfloat16().float() if x == torch.bfloat16 else two_terms(values)


def _stepped(inputs: ReplayInputs, s: Tensor, token: dict[str, Any]) -> Token:
    """One token. Where x has 16 bits, operands of products may be bfloat16, or for float16 two of them: so the state
    and C are rounded before a plain output is made of them. Nothing else is, so for bfloat16 the budget is about that
    of two roundings to bfloat16."""
    y, after = mamba2_token(s, **token)
    bias = None if token["dt_bias"] is None else token["dt_bias"].to(s.dtype)
    dt = time_steps(token["dt"].to(s.dtype), bias, token["dt_softplus"], token["dt_limit"])
    call = max(inputs.row_lengths, default=1), dtype_name(inputs.state.data.dtype), inputs.lengths is not None
    if s.dtype == torch.float32 and replay_kind(*call, inputs.state.window) is ReplayProblem:
        # A token whose time step is 0 gives what is read of the state.
        standing = {"dt": torch.zeros_like(token["dt"]), "dt_bias": None, "dt_softplus": False, "dt_limit": None}
        x = inputs.main.dtype
        y, _ = mamba2_token(operand(after, x), **token | standing | {"C": operand(token["C"].float(), x)})
    return Token(y, after, {"x": token["x"], "B": token["B"], "dt": dt})


REPLAY = ProvenReplay.over(
    MAMBA2, declared=MAMBA2_REPLAY, fold=mamba2_fold, parameters=("A",), after=replayed, stepped=_stepped,
    measured=("dt",),
)  # fmt: skip


@dataclass(frozen=True)
class ReplayCase(AnyReplayCase, Case):
    """One problem for mamba2_replay: one for mamba2_step, with a window, and the form of the call."""

    heads: int = 2
    groups: int = 1
    bc: str = ""  # dtype of B and C; "": that of x
    pool: ClassVar = Mamba2ReplayPool

    def __post_init__(self) -> None:
        object.__setattr__(self, "bc", self.bc or self.x)

    @property
    def kind(self) -> tuple[Callable[..., Problem], str]:
        return replay_kind(self.tokens or 1, self.format, self.packed, self.window), "mamba2_replay either"

    @property
    def op(self) -> ProvenReplay:
        return REPLAY

    def same_when_packed(self, tokens: int) -> bool:
        """One token alone is not summed in the order of others."""
        alone = replay_kind(tokens, self.format, False, self.window) is ReplayTokenProblem
        return super().same_when_packed(tokens) and not alone

    @property
    def kept_bytes(self) -> int:
        kept = self.heads * self.rows * dtype(self.x).itemsize
        return kept + self.groups * self.cols * dtype(self.bc).itemsize + 4 * self.heads

    def slow_down(self, arguments: dict[str, Any]) -> None:
        arguments["A"] *= min(1.0, 8 / self.window)

    def kept_tokens(self, source: Source, length: int) -> Mapping[str, Tensor]:
        x = source.normal(self.slots, self.heads, length, self.rows, name=self.x)
        B = source.normal(self.slots, self.groups, length, self.cols, name=self.bc)
        dt = source.normal(self.slots, self.heads, length)
        return {"x": x, "B": B, "dt": softplus(dt - 1) if self.dt_softplus else dt.abs()}


_SHAPES = {
    "one token": (
        ReplayCase(4, 2, 1, 5, 20, x="float16", index="int64", window=8),
        ReplayCase(4, 2, 2, 17, 16, D="row", z=False, spare=5),
        ReplayCase(2, 1, 1, 1, 1, x="float16", D=None, z=False, dt_bias=False, slots=3, window=1),
        ReplayCase(3, 2, 1, 3, 96, x="float16", bc="float32", dt="float16", window=20),
    ),
    "several tokens": (
        ReplayCase(4, 1, 1, 16, 16, tokens=4, D="row", window=8),
        ReplayCase(4, 1, 1, 4, 33, tokens=5, x="float16", dt_softplus=False, index="int64", window=20, spare=1),
        ReplayCase(3, 2, 2, 5, 8, tokens=8, D=None, dt_limit=(0.1, 0.6), window=8),
    ),
    "packed tokens": (
        ReplayCase(5, 1, 1, 3, 96, tokens=3, packed=True, bc="float16", parameters="float16", z=False),
        ReplayCase(4, 2, 1, 20, 16, tokens=2, packed=True, x="float16", dt_bias=False, index="int64", window=8),
    ),
    "a long window": (
        ReplayCase(3, 1, 1, 16, 16, x="float16", window=64),
        ReplayCase(3, 1, 1, 16, 20, tokens=6, window=64, spare=2),
        ReplayCase(
            4, 1, 1, 3, 16, tokens=3, packed=True, x="float16", parameters="float16", dt_limit=(0.1, 0.6), window=33
        ),
    ),
}
# One token of float32 states has a way of its own, without tensor cores; not so with a long window, or packed.
_ONE_TOKEN = (
    *_SHAPES["one token"],
    ReplayCase(5, 4, 2, 33, 20, tokens=1, x="float16", D="row"),
    ReplayCase(3, 2, 1, 16, 96, bc="float16", dt_limit=(0.1, 0.6), index="int64", window=15, spare=1),
    ReplayCase(5, 1, 1, 17, 16, tokens=1, packed=True, x="float16", D="row", window=8),
)

_HALF = ReplayCase(4, 16, 1, 64, 128, x="bfloat16", dt="bfloat16", slots=9)
# Shapes of real models: one token in every format, other forms in some, by turns.
_REAL_SHAPES = (
    replace(_HALF, batch=130, tokens=6, slots=140),  # so large that two kernels share the rows of a plan
    replace(_HALF, batch=64, tokens=16, slots=80, index="int64"),
    replace(_HALF, batch=3, tokens=64, window=64),
    replace(_HALF, batch=40, window=64, slots=44, spare=3),
    replace(_HALF, batch=5, heads=128, groups=8, tokens=6, packed=True, index="int64"),
    replace(_HALF, batch=5, heads=80, tokens=2, x="float16", dt="float16", D="row", window=20),
)
# Shapes of none, mixed dtypes, options.
_ODD_REAL_SHAPES = (
    ReplayCase(4, 6, 2, 48, 16, tokens=5, x="bfloat16", bc="float16", D=None, window=8),
    ReplayCase(7, 8, 4, 80, 20, tokens=5, packed=True, x="float16", dt="bfloat16", parameters="bfloat16", window=20),
    ReplayCase(6, 12, 12, 96, 96, tokens=2, bc="bfloat16", dt="float16", parameters="float16", z=False, slots=30),
    ReplayCase(4, 4, 1, 128, 256, x="bfloat16", dt="bfloat16", dt_softplus=False, window=8),
    ReplayCase(9, 3, 1, 33, 7, tokens=2, x="bfloat16", bc="float32", dt_bias=False, slots=10, window=24, spare=7),
    ReplayCase(5, 4, 2, 64, 64, tokens=16, packed=True, window=33),
)
_REAL = (
    *by_turns((_HALF,), PORTABLE_FORMATS, len(PORTABLE_FORMATS)),
    *by_turns(_REAL_SHAPES, PORTABLE_FORMATS, 3),
    *by_turns(_ODD_REAL_SHAPES, PORTABLE_FORMATS, 2),
)
CASES["mamba2_replay"] = Cases(in_every_format(_SHAPES), _REAL, besides=_ONE_TOKEN)
