"""The cases of mamba2_step: their inputs, what they move, and their tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from flashstate.launch import Problem
from flashstate.ops.mamba2 import MAMBA2_STEP
from flashstate.proof.case import CASES, Cases, StateCase, by_turns, in_every_format
from flashstate.proof.inputs import ProvenOp, dtype
from flashstate.reference.mamba2 import mamba2_token
from flashstate.state.formats import FORMATS, PORTABLE_FORMATS

MAMBA2 = ProvenOp(MAMBA2_STEP, mamba2_token, remembered=("x", "dt", "B"), sizes={"groups": "groups"})


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

    @property
    def kind(self) -> tuple[Callable[..., Problem], str]:
        return Problem, "mamba2_step"

    @property
    def op(self) -> ProvenOp:
        """A scale is multiplied with the decay, so that the last bits of several tokens differ; formats but float32 add
        up a row in another order."""
        scaled = FORMATS[dtype(self.format)].scaled
        return replace(MAMBA2, exact_at_once=self.format == "float32", stored_at_once=not scaled)

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
}
# Shapes of real models and of none, mixed dtypes.
_HALF = Case(4, 16, 1, 64, 128, x="bfloat16", bc="bfloat16", dt="bfloat16", slots=16)
_REAL = (
    _HALF,
    replace(_HALF, batch=64, slots=200, tokens=4),
    replace(_HALF, batch=5, heads=128, groups=8, slots=9, index="int64", tokens=3, packed=True),
    Case(5, 80, 1, 64, 128, x="float16", bc="float16", dt="float16", slots=12, D="row"),
    Case(3, 6, 2, 48, 16, x="bfloat16", bc="float16", dt="float32", D=None, slots=9, tokens=8),
    Case(7, 8, 4, 80, 20, x="float16", dt="bfloat16", parameters="bfloat16", slots=8, tokens=5, packed=True),
    Case(6, 12, 12, 96, 96, bc="bfloat16", dt="float16", parameters="float16", z=False, slots=30, tokens=3),
    replace(_HALF, batch=2, heads=4, rows=128, cols=256, dt_softplus=False, slots=5),
    Case(9, 3, 1, 33, 7, x="bfloat16", dt_bias=False, slots=10, tokens=2),
    replace(_HALF, batch=3, heads=1, rows=1536, cols=16, slots=5, D="row", mamba1=True),
)
CASES["mamba2_step"] = Cases(
    in_every_format(_SHAPES), by_turns(_REAL, PORTABLE_FORMATS, len(PORTABLE_FORMATS)), turns=7
)
