"""The cases of mamba2_step: their inputs, what they move, and the tables of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashstate.launch import Problem
from flashstate.ops.mamba2 import mamba2_step
from flashstate.proof.inputs import AnyCase, Inputs, Op, Source, dtype, view_into_projection
from flashstate.reference.mamba2 import mamba2_token
from flashstate.state.formats import FORMATS, PORTABLE_FORMATS, encode
from flashstate.state.signature import ACCESS_BYTES
from flashstate.state.state import State


def _token(s: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
    """mamba2_token, whose optional arguments may be left out."""
    return mamba2_token(s, **{"D": None, "z": None, "dt_bias": None, **arguments})


MAMBA2 = Op(mamba2_step, _token, activations=("x", "dt", "B", "C", "z"), remembered=("x", "dt", "B"), widths=2)


@dataclass(frozen=True)
class Case(AnyCase):
    """One problem for mamba2_step: a shape, a format, its tokens, and which optional arguments it has."""

    batch: int = 3
    heads: int = 4
    groups: int = 2
    rows: int = 16
    cols: int = 16
    format: str = "float32"
    rounding: str = "nearest"
    x: str = "float32"  # dtype of x and z
    bc: str = "float32"  # dtype of B and C
    dt: str = "float32"  # dtype of dt
    parameters: str = "float32"  # dtype of A, D and dt_bias
    D: str | None = "head"  # "head", "row" or None
    z: bool = True
    dt_bias: bool = True
    dt_softplus: bool = True
    index: str = "int32"  # dtype of slot numbers
    slots: int = 7
    tokens: int = 0  # per row, on an axis of their own; 0: one, without that axis
    packed: bool = False  # rows of different lengths, up to `tokens`, one after the other
    mamba1: bool = False  # dt and dt_bias have a value for each row, A for each element

    def __str__(self) -> str:
        shape = f"b{self.batch}-h{self.heads}g{self.groups}-{self.rows}x{self.cols}"
        dtypes = "-".join(dict.fromkeys((self.x, self.bc, self.dt, self.parameters)))
        flags = (("z", self.z), ("bias", self.dt_bias), ("softplus", self.dt_softplus), ("mamba1", self.mamba1))
        options = [name for name, on in flags if on]
        skip = [] if self.D is None else [f"D{self.D}"]
        tokens = [f"T{self.tokens}{'packed' if self.packed else ''}"] if self.tokens else []
        return "-".join([shape, *tokens, self.format, self.rounding, dtypes, self.index, *skip, *options])

    @property
    def problem(self) -> Problem:
        vector = math.gcd(self.cols, ACCESS_BYTES // dtype(self.format).itemsize)
        several = self.packed or self.tokens > 1
        size = self.batch * self.heads
        return Problem("mamba2_step", self.rows, self.cols, self.format, self.rounding, vector, size, several)

    @property
    def state_axes(self) -> tuple[int, int, int]:
        return self.heads, self.rows, self.cols

    @property
    def snapshot_formats(self) -> list[tuple[str, str]]:
        return [("float32", "nearest"), (self.format, self.rounding), ("int8", "stochastic"), ("float16", "nearest")]

    @property
    def exact_at_once(self) -> bool:
        return self.format == "float32"  # other formats add up a row in another order

    @property
    def stored_at_once(self) -> bool:
        return not FORMATS[dtype(self.format)].scaled  # a scale is multiplied with the decay: the last bits differ

    @property
    def measured_axes(self) -> tuple[int, int, int, int]:
        return self.heads, self.groups, self.rows, self.cols

    def counted_bytes(self, stores: int = 1) -> int:
        tokens = sum(self.lengths)
        x = tokens * self.heads * self.rows * dtype(self.x).itemsize * (3 if self.z else 2)
        bc = 2 * tokens * self.groups * self.cols * dtype(self.bc).itemsize
        dt = tokens * self.heads * (self.rows if self.mamba1 else 1) * dtype(self.dt).itemsize
        per_row = self.rows if self.mamba1 else 1
        per_head = (self.rows * self.cols if self.mamba1 else 1) + self.dt_bias * per_row
        per_head += 0 if self.D is None else self.rows if self.D == "row" else 1
        parameters = self.heads * per_head * dtype(self.parameters).itemsize
        index = self.batch * (dtype(self.index).itemsize + (8 if self.rounding != "nearest" else 0))
        state = (1 + stores) * self.batch * (self.slot_bytes + self.scale_bytes)
        return state + x + bc + dt + parameters + index

    def make_inputs(self, device: torch.device, seed: int = 0) -> Inputs:
        source = Source(device, seed)
        normal, heads, rows, cols, lead = source.normal, self.heads, self.rows, self.cols, self.token_axes
        data, scale = encode(normal(self.slots, heads, rows, cols), dtype(self.format))
        state = State(data, scale, rounding=self.rounding, seed=source.seeds(self.slots), stream=3)
        per_row = (rows,) if self.mamba1 else ()
        arguments = {
            "x": normal(*lead, heads, rows, name=self.x),
            "dt": normal(*lead, heads, *per_row, name=self.dt),
            "A": -normal(heads, *((rows, cols) if self.mamba1 else ()), name=self.parameters).abs(),
            "B": normal(*lead, self.groups, cols, name=self.bc),
            "C": normal(*lead, self.groups, cols, name=self.bc),
        }
        options: dict[str, Any] = {"dt_softplus": self.dt_softplus}
        if not self.dt_softplus:
            arguments["dt"] = arguments["dt"].abs()
        if self.D is not None:
            options["D"] = normal(heads, *((rows,) if self.D == "row" else ()), name=self.parameters)
        if self.z:
            options["z"] = normal(*lead, heads, rows, name=self.x)
        if self.dt_bias:
            bias = normal(heads, *per_row, name=self.parameters)
            options["dt_bias"] = bias - 1 if self.dt_softplus else bias.abs()  # time steps are positive
        for name in ("x", "dt", "B", "C") if self.packed else ():
            arguments[name][sum(self.lengths) :] = torch.nan
        slots = source.slots_of(self)
        return Inputs(MAMBA2, state, arguments, options, slots, self.lengths if self.packed else None)

    def snapshots(self, rows: int, tokens: int, name: str, rounding: str, device: torch.device) -> State:
        data, scale = encode(torch.ones(rows, tokens, *self.state_axes, device=device), dtype(name))
        return State(data, scale, rounding=rounding)

    def as_views(self, inputs: Inputs) -> Inputs:
        views = inputs.changed(view_into_projection)
        if not self.mamba1:
            dt = inputs.arguments["dt"].transpose(0, -1).contiguous().transpose(0, -1)
            views.arguments["dt"] = dt[..., None].expand(*dt.shape, self.rows)
            views.arguments["A"] = inputs.arguments["A"][:, None, None].expand(-1, self.rows, self.cols)
        for name in ("D", "dt_bias"):
            if name in inputs.options and inputs.options[name].dim() == 1:
                views.options[name] = inputs.options[name][:, None].expand(-1, self.rows)
        return views


# Small and odd, for the interpreter, whose bfloat16 activations are wrong: float32 and float16 stand in for them. Every
# form in every format; the shapes of a form take turns.
ODD_SHAPES = {
    "one token": (
        Case(3, 2, 1, 5, 20, x="float16", index="int64"),
        Case(1, 1, 1, 1, 1, D=None, z=False, dt_bias=False, slots=2),
        Case(3, 2, 1, 2, 256, x="float16", bc="float16", dt="float16"),
    ),
    "several tokens": (
        Case(2, 2, 2, 16, 16, tokens=4, D="row"),
        Case(2, 1, 1, 4, 33, tokens=5, dt_softplus=False, index="int64"),
    ),
    "packed tokens": (
        Case(4, 1, 1, 3, 96, tokens=3, packed=True, bc="float16", parameters="float16", z=False),
        Case(3, 2, 1, 4, 64, tokens=2, packed=True, parameters="float16", index="int64"),
    ),
    "Mamba-1": (Case(3, 2, 2, 20, 16, mamba1=True, D="row", dt="float16", dt_bias=False, slots=5),),
    "Mamba-1, several tokens": (Case(2, 1, 1, 9, 7, mamba1=True, tokens=3, D=None),),
}
ODD_CASES = tuple(
    replace(shapes[i % len(shapes)], format=name, rounding=rounding)
    for i, (name, rounding) in enumerate(PORTABLE_FORMATS)
    for shapes in ODD_SHAPES.values()
)
# One case per format, the forms taking turns.
QUICK_CASES = tuple(ODD_CASES[len(ODD_SHAPES) * i + i % len(ODD_SHAPES)] for i in range(len(PORTABLE_FORMATS)))

# Shapes of real models and of none, mixed dtypes, for compiled kernels, in every format.
REAL_CASES = tuple(
    replace(case, format=name, rounding=rounding)
    for case in (
        Case(4, 16, 1, 64, 128, x="bfloat16", bc="bfloat16", dt="bfloat16", slots=16),
        Case(64, 16, 1, 64, 128, x="bfloat16", bc="bfloat16", dt="bfloat16", slots=200, tokens=4),
        Case(
            5,
            128,
            8,
            64,
            128,
            x="bfloat16",
            bc="bfloat16",
            dt="bfloat16",
            slots=9,
            index="int64",
            tokens=3,
            packed=True,
        ),
        Case(5, 80, 1, 64, 128, x="float16", bc="float16", dt="float16", slots=12, D="row"),
        Case(3, 6, 2, 48, 16, x="bfloat16", bc="float16", dt="float32", D=None, slots=9, tokens=8),
        Case(7, 8, 4, 80, 20, x="float16", dt="bfloat16", parameters="bfloat16", slots=8, tokens=5, packed=True),
        Case(6, 12, 12, 96, 96, bc="bfloat16", dt="float16", parameters="float16", z=False, slots=30, tokens=3),
        Case(2, 4, 1, 128, 256, x="bfloat16", bc="bfloat16", dt="bfloat16", dt_softplus=False, slots=5),
        Case(9, 3, 1, 33, 7, x="bfloat16", dt_bias=False, slots=10, tokens=2),
        Case(3, 1, 1, 1536, 16, x="bfloat16", bc="bfloat16", dt="bfloat16", slots=5, D="row", mamba1=True),
    )
    for name, rounding in PORTABLE_FORMATS
)
