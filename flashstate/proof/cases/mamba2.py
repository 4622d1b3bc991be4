"""The cases of mamba2_step: their inputs, what they move, and their tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashstate.launch import Problem
from flashstate.ops.mamba2 import MAMBA2_STEP, mamba2_kind
from flashstate.proof.case import CASES, Cases, StateCase, by_turns, in_every_format
from flashstate.proof.inputs import ProvenOp, dtype
from flashstate.proof.oracle import two_terms
from flashstate.reference.mamba2 import mamba2_token
from flashstate.state.formats import FORMATS, PORTABLE_FORMATS


def _token(s: Tensor, exact: bool, **arguments: Any) -> tuple[Tensor, Tensor]:
    """mamba2_token, which is always exact."""
    return mamba2_token(s, **arguments)


def _token_of_terms(s: Tensor, exact: bool, **arguments: Any) -> tuple[Tensor, Tensor]:
    """mamba2_token in float64, and in float32 as operands of tensor cores allow it."""
    terms: dict[str, Any] = {} if s.dtype == torch.float64 else {"operand": two_terms}
    return mamba2_token(s, **arguments, **terms)


MAMBA2 = ProvenOp(MAMBA2_STEP, _token, remembered=("x", "dt", "B"), sizes={"groups": "groups"})


@dataclass(frozen=True)
class Case(StateCase):
    """One problem for mamba2_step. `x` is the dtype of x and z, `parameters` that of A, D and dt_bias."""

    heads: int = 4
    groups: int = 2
    rows: int = 16
    cols: int = 16
    bc: str = "float32"  # dtype of B and C
    dt: str = "float32"  # dtype of dt
    D: str | None = "head"  # "head", "row" or None
    z: bool = True
    dt_bias: bool = True
    dt_softplus: bool = True
    dt_limit: tuple[float, float] | None = None
    mamba1: bool = False  # dt and dt_bias have a value for each row, A for each element
    exact: bool = True  # else several tokens go through tensor cores at once

    @property
    def kind(self) -> tuple[Callable[..., Problem], str]:
        return mamba2_kind(self.several and not self.exact, self.tokens)

    def same_when_packed(self, tokens: int) -> bool:
        return self.exact  # else a short row takes part in what the longest one needs

    @property
    def op(self) -> ProvenOp:
        """A scale is multiplied with the decay, so that the last bits of several tokens differ; formats but float32 add
        up a row in another order. With tensor cores, an output that is to be finer than 16 bits is measured against
        operands of two terms."""
        exact, scaled = self.exact, FORMATS[dtype(self.format)].scaled
        token = _token_of_terms if self.several and not exact and self.x == "float32" else _token
        op = replace(MAMBA2, token=token, one_order=exact, between_tokens=exact, every_token=exact)
        return replace(op, exact_at_once=exact and self.format == "float32", stored_at_once=exact and not scaled)

    @property
    def dtypes(self) -> dict[str, Any]:
        shared = self.parameters
        needed = {"x": self.x, "dt": self.dt, "A": shared, "B": self.bc, "C": self.bc}
        return needed | {"D": self.D and shared, "z": self.z and self.x, "dt_bias": self.dt_bias and shared}

    def is_whole(self, name: str) -> bool:
        return self.D == "row" if name == "D" else self.mamba1

    def adjust(self, arguments: dict[str, Any]) -> None:
        """Time steps are positive."""
        arguments["A"] = -arguments["A"].abs()
        if not self.dt_softplus:
            arguments["dt"] = arguments["dt"].abs()
        if self.dt_bias:
            bias = arguments["dt_bias"]
            arguments["dt_bias"] = bias - 1 if self.dt_softplus else bias.abs()


_SHAPES = {
    "one token": (
        Case(3, 2, 1, 5, 20, x="float16", index="int64"),
        Case(1, 1, 1, 1, 1, D=None, z=False, dt_bias=False, slots=2),
        Case(3, 2, 1, 2, 256, x="float16", bc="float16", dt="float16"),
    ),
    "several tokens": (
        Case(2, 2, 2, 16, 16, tokens=4, D="row"),
        Case(2, 1, 1, 4, 33, tokens=5, dt_softplus=False, dt_limit=(0.3, 0.9), index="int64"),
    ),
    "packed tokens": (
        Case(4, 1, 1, 3, 96, tokens=3, packed=True, bc="float16", parameters="float16", z=False),
        Case(3, 2, 1, 4, 64, tokens=2, packed=True, parameters="float16", index="int64"),
    ),
    "Mamba-1": (Case(3, 2, 2, 20, 16, mamba1=True, D="row", dt="float16", dt_bias=False, slots=5),),
    "Mamba-1, several tokens": (Case(2, 1, 1, 9, 7, mamba1=True, tokens=3, D=None),),
    "at once": (
        Case(2, 2, 1, 16, 16, exact=False, tokens=4, x="float16", bc="float16", D="row"),
        Case(2, 2, 1, 5, 20, exact=False, tokens=9, bc="float16"),
        Case(3, 2, 1, 5, 20, exact=False, tokens=2, packed=True, x="float16", bc="float16", D=None),
        Case(2, 1, 1, 33, 40, exact=False, tokens=9, x="float16", bc="float16", dt_limit=(0.3, 0.9), index="int64"),
        Case(3, 1, 1, 4, 33, exact=False, tokens=16, packed=True, x="float16", bc="float16", dt="float16"),
        Case(2, 2, 2, 20, 12, exact=False, tokens=2, bc="float16", z=False, dt_softplus=False),
    ),
}
# Shapes of real models and of none, mixed dtypes.
_HALF = Case(4, 16, 1, 64, 128, x="bfloat16", bc="bfloat16", dt="bfloat16", slots=16)
_REAL = (
    _HALF,
    replace(_HALF, batch=64, slots=200, tokens=4),
    replace(_HALF, batch=5, heads=128, groups=8, slots=9, index="int64", tokens=3, packed=True),
    replace(_HALF, batch=6, exact=False, tokens=6),
    replace(_HALF, batch=5, heads=8, exact=False, tokens=16, packed=True, dt_bias=False),
    Case(3, 6, 2, 33, 20, x="float16", bc="float16", exact=False, tokens=9, D="row", slots=9),
    Case(3, 6, 2, 48, 20, bc="float16", exact=False, tokens=6, slots=9),
    Case(5, 80, 1, 64, 128, x="float16", bc="float16", dt="float16", slots=12, D="row"),
    Case(3, 6, 2, 48, 16, x="bfloat16", bc="float16", dt="float32", D=None, slots=9, tokens=8),
    Case(7, 8, 4, 80, 20, x="float16", dt="bfloat16", parameters="bfloat16", slots=8, tokens=5, packed=True),
    Case(6, 12, 12, 96, 96, bc="bfloat16", dt="float16", parameters="float16", z=False, slots=30, tokens=3),
    replace(_HALF, batch=2, heads=4, rows=128, cols=256, dt_softplus=False, slots=5),
    Case(9, 3, 1, 33, 7, x="bfloat16", dt_bias=False, slots=10, tokens=2),
    replace(_HALF, batch=3, heads=1, rows=1536, cols=16, slots=5, D="row", mamba1=True),
)
CASES["mamba2_step"] = Cases(in_every_format(_SHAPES), by_turns(_REAL, PORTABLE_FORMATS, len(PORTABLE_FORMATS)))
