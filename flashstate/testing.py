"""The one table of cases, and what tests, `flashstate check` and the benchmark need of each: inputs, bytes, budgets."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashstate.launch import Problem, interpreted
from flashstate.launch.config import ACCESS_BYTES
from flashstate.ops.mamba2 import mamba2_step
from flashstate.reference.mamba2 import mamba2_token
from flashstate.state.formats import PORTABLE_FORMATS, decode, encode
from flashstate.state.rounding import random_bits
from flashstate.state.state import State

__all__ = ["ODD_CASES", "REAL_CASES", "Case", "Inputs", "error_ratio", "interpreted", "make_inputs", "oracle"]

# A kernel may be this many times as wrong as the same computation in plain float32 and the format. exp and log of GPUs
# and of the interpreter are a few ulp off where torch's are one: the largest seen is 1.7 on an H200, 2.8 interpreted.
BUDGET = 4.0


@dataclass(frozen=True)
class Case:
    """One problem for mamba2_step: a shape, a format, and which optional arguments it has."""

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

    def __str__(self) -> str:
        shape = f"b{self.batch}-h{self.heads}g{self.groups}-{self.rows}x{self.cols}"
        dtypes = "-".join(dict.fromkeys((self.x, self.bc, self.dt, self.parameters)))
        options = [name for name, on in (("z", self.z), ("bias", self.dt_bias), ("softplus", self.dt_softplus)) if on]
        skip = [] if self.D is None else [f"D{self.D}"]
        return "-".join([shape, self.format, self.rounding, dtypes, self.index, *skip, *options])

    @property
    def problem(self) -> Problem:
        vector = math.gcd(self.cols, ACCESS_BYTES // dtype(self.format).itemsize)
        return Problem("mamba2_step", self.rows, self.cols, self.format, self.rounding, vector, self.batch * self.heads)

    @property
    def slot_bytes(self) -> int:
        """Bytes of state in one slot."""
        return self.heads * self.rows * self.cols * dtype(self.format).itemsize

    @property
    def counted_bytes(self) -> int:
        """Bytes one call must move at least: the state twice, everything else once."""
        x = self.batch * self.heads * self.rows * dtype(self.x).itemsize * (3 if self.z else 2)
        bc = 2 * self.batch * self.groups * self.cols * dtype(self.bc).itemsize
        dt = self.batch * self.heads * dtype(self.dt).itemsize
        per_head = 1 + (self.dt_bias) + (0 if self.D is None else self.rows if self.D == "row" else 1)
        parameters = self.heads * per_head * dtype(self.parameters).itemsize
        index = self.batch * (dtype(self.index).itemsize + (8 if self.rounding != "nearest" else 0))
        return 2 * self.batch * self.slot_bytes + x + bc + dt + parameters + index


def dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


@dataclass
class Inputs:
    """A state pool and the arguments of one call on it."""

    state: State
    arguments: dict[str, Tensor]  # x, dt, A, B, C
    options: dict[str, Any]  # the keyword arguments
    slots: Tensor

    def step(self, **changes: Any) -> Tensor:
        """Call mamba2_step, with some arguments changed or added."""
        arguments = {"state": self.state, **self.arguments, **self.options, "slots": self.slots, **changes}
        return mamba2_step(**arguments)

    def fresh(self) -> Inputs:
        """The same inputs on a copy of the pool and its seeds, with the same strides."""
        old = self.state.data
        data = torch.empty_strided(old.size(), old.stride(), dtype=old.dtype, device=old.device).copy_(old)
        seed = None if self.state.seed is None else self.state.seed.clone()
        return replace(self, state=replace(self.state, data=data, seed=seed))


def make_inputs(case: Case, device: torch.device, seed: int = 0) -> Inputs:
    """Random inputs: the scales of a trained model, every slot filled, the batch on distinct slots in random order."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int, dtype_name: str) -> Tensor:
        return torch.randn(*size, generator=generator).to(dtype(dtype_name)).to(device)

    batch, heads, groups, rows, cols = case.batch, case.heads, case.groups, case.rows, case.cols
    data = normal(case.slots, heads, rows, cols, dtype_name=case.format)
    seeds = torch.randint(-(1 << 62), 1 << 62, (case.slots,), generator=generator).to(device)
    state = State(data, rounding=case.rounding, seed=seeds, stream=3)
    arguments = {
        "x": normal(batch, heads, rows, dtype_name=case.x),
        "dt": normal(batch, heads, dtype_name=case.dt),
        "A": -normal(heads, dtype_name=case.parameters).abs(),
        "B": normal(batch, groups, cols, dtype_name=case.bc),
        "C": normal(batch, groups, cols, dtype_name=case.bc),
    }
    skip = {"head": (heads,), "row": (heads, rows)}
    options: dict[str, Any] = {"dt_softplus": case.dt_softplus}
    if not case.dt_softplus:
        arguments["dt"] = arguments["dt"].abs()
    if case.D is not None:
        options["D"] = normal(*skip[case.D], dtype_name=case.parameters)
    if case.z:
        options["z"] = normal(batch, heads, rows, dtype_name=case.x)
    if case.dt_bias:
        bias = normal(heads, dtype_name=case.parameters)
        options["dt_bias"] = bias - 1 if case.dt_softplus else bias.abs()  # time steps are positive
    slots = torch.randperm(case.slots, generator=generator)[:batch].to(dtype(case.index)).to(device)
    return Inputs(state, arguments, options, slots)


@dataclass(frozen=True)
class Expected:
    """What a call must give: exactly, and as plain float32 arithmetic and the formats give it."""

    y: Tensor
    y_plain: Tensor
    state: Tensor
    state_plain: Tensor


def oracle(inputs: Inputs) -> Expected:
    """The output and the new states of the batch: in float64, and in float32 rounded to the output's and the format."""
    state, slots = inputs.state, inputs.slots.long()
    before = decode(state.data[slots])
    arguments: dict[str, Any] = {"D": None, "z": None, "dt_bias": None, **inputs.arguments, **inputs.options}

    def run(s: Tensor) -> tuple[Tensor, Tensor]:
        return mamba2_token(s, **arguments)

    y, after = run(before.double())
    y_plain, after_plain = run(before)
    random = None
    if state.rounding == "stochastic" and state.seed is not None:
        _, heads, rows, cols = before.shape
        random = random_bits(state.seed[slots], (heads, rows, cols), 0, state.stream, state.rounds)
    stored = decode(encode(after_plain, state.data.dtype, random))
    return Expected(y, y_plain.to(inputs.arguments["x"].dtype), after, stored)


def error_ratio(got: Tensor, exact: Tensor, plain: Tensor) -> float:
    """The error of `got` as a fraction of its budget: it passes at 1 and below. Inf where it is NaN and should not be.

    Both the largest error and the root mean square count. What the dtype of `plain` cannot resolve is not held against
    `got`: half a unit in the last place of the largest value.
    """
    resolution = torch.finfo(plain.dtype).eps / 2 * exact.abs().max().item()
    errors, plain_errors = (got.double() - exact).abs(), (plain.double() - exact).abs()
    largest = errors.max().item() / (BUDGET * max(plain_errors.max().item(), resolution))
    rms, plain_rms = errors.square().mean().sqrt().item(), plain_errors.square().mean().sqrt().item()
    mean = rms / (BUDGET * max(plain_rms, resolution / math.sqrt(exact.numel())))
    return math.inf if math.isnan(largest) else max(largest, mean)


# Small and odd, for the interpreter, whose bfloat16 activations are wrong: float32 and float16 stand in for them.
ODD_CASES = (
    Case(),
    Case(batch=1, heads=1, groups=1, rows=1, cols=1, D=None, z=False, dt_bias=False),
    Case(rows=5, cols=20, heads=6, groups=2, x="float16", index="int64"),
    Case(rows=48, cols=20, heads=3, groups=3, D="row", dt_softplus=False, format="bfloat16"),
    Case(rows=3, cols=96, heads=2, groups=1, bc="float16", parameters="float16", z=False, format="bfloat16"),
    Case(rows=9, cols=7, heads=5, groups=5, dt="float16", D=None, format="bfloat16", rounding="stochastic"),
    Case(rows=16, cols=64, heads=2, groups=2, index="int64", format="bfloat16", rounding="stochastic"),
    Case(rows=80, cols=16, heads=4, groups=1, x="float16", D="row", format="float16"),
    Case(rows=4, cols=33, heads=2, groups=2, dt_bias=False, format="float16"),
    Case(rows=7, cols=20, heads=6, groups=3, D="row", z=False, format="float16", rounding="stochastic"),
    Case(3, 2, 1, 2, 256, x="float16", bc="float16", dt="float16", format="float16", rounding="stochastic"),
)

# Shapes of real models and of none, mixed dtypes, for compiled kernels.
REAL_CASES = tuple(
    replace(case, format=name, rounding=rounding)
    for case in (
        Case(4, 16, 1, 64, 128, x="bfloat16", bc="bfloat16", dt="bfloat16", slots=16),
        Case(64, 16, 1, 64, 128, x="bfloat16", bc="bfloat16", dt="bfloat16", slots=200),
        Case(16, 128, 8, 64, 128, x="bfloat16", bc="bfloat16", dt="bfloat16", slots=40, index="int64"),
        Case(5, 80, 1, 64, 128, x="float16", bc="float16", dt="float16", slots=12, D="row"),
        Case(3, 6, 2, 48, 16, x="bfloat16", bc="float16", dt="float32", D=None, slots=9),
        Case(7, 8, 4, 80, 20, x="float16", bc="float32", dt="bfloat16", parameters="bfloat16", slots=8),
        Case(6, 12, 12, 96, 96, x="float32", bc="bfloat16", dt="float16", parameters="float16", z=False, slots=30),
        Case(2, 4, 1, 128, 256, x="bfloat16", bc="bfloat16", dt="bfloat16", dt_softplus=False, slots=5),
        Case(9, 3, 1, 33, 7, x="bfloat16", dt_bias=False, slots=10),
    )
    for name, rounding in PORTABLE_FORMATS
)
