"""The one table of cases, and what tests, `flashstate check` and the benchmark need of each: inputs, bytes, budgets."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashstate.launch import Problem, interpreted
from flashstate.ops.mamba2 import mamba2_step
from flashstate.reference.mamba2 import mamba2_token
from flashstate.reference.state_io import load_state
from flashstate.state.formats import FORMATS, PORTABLE_FORMATS, Encoded, decode, encode
from flashstate.state.rounding import random_bits
from flashstate.state.signature import ACCESS_BYTES
from flashstate.state.slots import Slots
from flashstate.state.state import State

__all__ = [
    "ODD_CASES",
    "QUICK_CASES",
    "REAL_CASES",
    "Case",
    "Inputs",
    "error_ratio",
    "interpreted",
    "make_inputs",
    "oracle",
]

# A kernel may be this many times as wrong as the same computation in plain float32 and the format. exp and log of GPUs
# and of the interpreter are a few ulp off where torch's are one: the largest seen is 1.7 on an H200, 2.8 interpreted.
BUDGET = 4.0


@dataclass(frozen=True)
class Case:
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
    def lengths(self) -> list[int]:
        """Tokens of every row. Packed rows count down from `tokens` to none, and start again."""
        if not self.packed:
            return [self.tokens or 1] * self.batch
        return [self.tokens - row % (self.tokens + 1) for row in range(self.batch)]

    @property
    def token_axes(self) -> tuple[int, ...]:
        """Sizes of the leading axes of activations. Packed tokens have two more than there are rows for."""
        if self.packed:
            return (sum(self.lengths) + 2,)
        return (self.batch, self.tokens) if self.tokens else (self.batch,)

    @property
    def slot_bytes(self) -> int:
        """Bytes of state in one slot, without its scales."""
        return self.heads * self.rows * self.cols * dtype(self.format).itemsize

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales in one slot."""
        return 4 * self.heads * self.rows if FORMATS[dtype(self.format)].scaled else 0

    def counted_bytes(self, stores: int = 1) -> int:
        """Bytes one call must move at least: the state of every row read once and stored `stores` times (once in place;
        with snapshots once per token), everything else once."""
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
    slots: Tensor  # (batch,)
    lengths: list[int] | None  # of packed rows

    def step(self, **changes: Any) -> Tensor:
        """Call mamba2_step, with some arguments changed or added."""
        if "slots" not in changes:
            changes["slots"] = self.slots if self.lengths is None else self.at()
        return mamba2_step(**{"state": self.state, **self.arguments, **self.options, **changes})

    def at(self, **fields: Any) -> Slots:
        """The slots of the batch with more fields of Slots, or others."""
        if self.lengths is not None:
            bounds = torch.tensor([0, *self.lengths]).cumsum(0).to(self.slots)
            fields = {"cu_seqlens": bounds, "max_len": max(self.lengths, default=0), **fields}
        return Slots(fields.pop("read", self.slots), **fields)

    def fresh(self, extra: int = 0) -> Inputs:
        """The same inputs on a copy of the pool and its seeds, with the same strides; or with `extra` more slots."""

        def copied(tensor: Tensor) -> Tensor:
            if extra:
                return torch.cat([tensor, tensor[:1].expand(extra, *tensor.shape[1:])])
            new = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            return new.copy_(tensor)

        state = self.state
        scale = None if state.scale is None else copied(state.scale)
        seed = None if state.seed is None else copied(state.seed)
        return replace(self, state=replace(state, data=copied(state.data), scale=scale, seed=seed))

    def of_rows(self, rows: Tensor) -> Inputs:
        """The same pool with some rows of the batch, in some order."""
        if self.lengths is None:
            index, lengths = rows, None
        else:
            lengths = [self.lengths[row] for row in rows.tolist()]
            pieces = torch.arange(sum(self.lengths)).split(self.lengths)
            index = torch.cat([pieces[row] for row in rows.tolist()]).to(rows.device)
        arguments = {name: t if name == "A" else t[index] for name, t in self.arguments.items()}
        options = {name: t[index] if name == "z" else t for name, t in self.options.items()}
        return replace(self, arguments=arguments, options=options, slots=self.slots[rows], lengths=lengths)

    def of_tokens(self, tokens: slice | list[int] | int) -> Inputs:
        """The same pool and rows, which are not packed, with some of the tokens; with an int one, without its axis."""
        assert self.lengths is None
        arguments = {name: t if name == "A" else t[:, tokens] for name, t in self.arguments.items()}
        options = {name: t[:, tokens] if name == "z" else t for name, t in self.options.items()}
        return replace(self, arguments=arguments, options=options)

    def dense_row(self, row: int) -> Inputs:
        """One row of a packed batch alone, its tokens on an axis of their own."""
        alone = self.of_rows(torch.tensor([row], device=self.slots.device))
        arguments = {name: t if name == "A" else t[None] for name, t in alone.arguments.items()}
        options = {name: t[None] if name == "z" else t for name, t in alone.options.items()}
        return replace(alone, arguments=arguments, options=options, lengths=None)

    @property
    def row_lengths(self) -> list[int]:
        """Tokens of every row."""
        x = self.arguments["x"]
        return self.lengths or [x.shape[1] if x.dim() == 4 else 1] * x.shape[0]

    def per_row(self, y: Tensor) -> list[Tensor]:
        """The outputs of every row."""
        return list(y) if self.lengths is None else list(y[: sum(self.lengths)].split(self.lengths))


def make_inputs(case: Case, device: torch.device, seed: int = 0) -> Inputs:
    """Random inputs: the scales of a trained model, every slot filled, the batch on distinct slots in random order.
    NaN in tokens that no row has."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int, dtype_name: str = "float32") -> Tensor:
        return torch.randn(*size, generator=generator).to(dtype(dtype_name)).to(device)

    heads, groups, rows, cols, lead = case.heads, case.groups, case.rows, case.cols, case.token_axes
    data, scale = encode(normal(case.slots, heads, rows, cols), dtype(case.format))
    seeds = torch.randint(-(1 << 62), 1 << 62, (case.slots,), generator=generator).to(device)
    state = State(data, scale, rounding=case.rounding, seed=seeds, stream=3)
    per_row = (rows,) if case.mamba1 else ()
    arguments = {
        "x": normal(*lead, heads, rows, dtype_name=case.x),
        "dt": normal(*lead, heads, *per_row, dtype_name=case.dt),
        "A": -normal(heads, *((rows, cols) if case.mamba1 else ()), dtype_name=case.parameters).abs(),
        "B": normal(*lead, groups, cols, dtype_name=case.bc),
        "C": normal(*lead, groups, cols, dtype_name=case.bc),
    }
    skip = {"head": (heads,), "row": (heads, rows)}
    options: dict[str, Any] = {"dt_softplus": case.dt_softplus}
    if not case.dt_softplus:
        arguments["dt"] = arguments["dt"].abs()
    if case.D is not None:
        options["D"] = normal(*skip[case.D], dtype_name=case.parameters)
    if case.z:
        options["z"] = normal(*lead, heads, rows, dtype_name=case.x)
    if case.dt_bias:
        bias = normal(heads, *per_row, dtype_name=case.parameters)
        options["dt_bias"] = bias - 1 if case.dt_softplus else bias.abs()  # time steps are positive
    slots = torch.randperm(case.slots, generator=generator)[: case.batch].to(dtype(case.index)).to(device)
    if case.packed:
        for tensor in (arguments["x"], arguments["dt"], arguments["B"], arguments["C"]):
            tensor[sum(case.lengths) :] = torch.nan
    return Inputs(state, arguments, options, slots, case.lengths if case.packed else None)


@dataclass(frozen=True)
class Expected:
    """What a call must give: exactly, and as plain float32 arithmetic and the formats give it."""

    y: Tensor  # of all tokens that a row has, one after the other
    y_plain: Tensor
    state: Tensor  # of the batch
    state_plain: Tensor


def oracle(inputs: Inputs) -> Expected:
    """Outputs and new states of the batch: in float64, and in float32 rounded to the output's dtype and the format."""
    state, slots = inputs.state, inputs.slots.long()
    before = load_state(state, slots)
    y, after = _recurrence(inputs, before.double())
    y_plain, after_plain = _recurrence(inputs, before)
    lengths = torch.tensor(inputs.row_lengths, device=slots.device)
    stored = decode(*encoded(after_plain, state, state, slots, lengths - 1))
    stored = torch.where((lengths > 0)[:, None, None, None], stored, before)  # rows without tokens keep theirs
    return Expected(y, y_plain.to(inputs.arguments["x"].dtype), after, stored)


def encoded(values: Tensor, into: State, keyed: State, read: Tensor, token: Tensor | int) -> Encoded:
    """float32 states as `into` stores them, with the random bits of the slots `read` of `keyed` at this token."""
    random = None
    if into.rounding == "stochastic" and keyed.seed is not None:
        _, heads, rows, cols = values.shape
        random = random_bits(keyed.seed[read], (heads, rows, cols), token, keyed.stream, keyed.rounds)
    return encode(values, into.data.dtype, random)


def _recurrence(inputs: Inputs, s: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs (tokens, H, D) of all rows and the states after them, computed in the dtype of `s`."""
    if inputs.lengths is not None:
        rows = [_recurrence(inputs.dense_row(row), s[row : row + 1]) for row in range(len(s))]
        return torch.cat([y for y, _ in rows]), torch.cat([state for _, state in rows])
    parameters = {"D": None, "z": None, "dt_bias": None, **inputs.options, "A": inputs.arguments["A"]}
    x = inputs.arguments["x"]
    outputs = []
    for run in [inputs] if x.dim() == 3 else [inputs.of_tokens(t) for t in range(x.shape[1])]:
        y, s = mamba2_token(s, **{**parameters, **run.options, **run.arguments})
        outputs.append(y)
    y = torch.stack(outputs, 1) if outputs else x.to(s.dtype)  # (batch, T, H, D)
    return y.flatten(0, 1), s


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
        Case(4, 2, 1, 3, 96, tokens=3, packed=True, bc="float16", parameters="float16", z=False),
        Case(4, 2, 2, 4, 64, tokens=2, packed=True, parameters="float16", index="int64"),
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
