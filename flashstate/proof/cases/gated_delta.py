"""The cases of gated_delta_step: their inputs, what they move, and the tables of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashstate.launch import Problem
from flashstate.ops.gated_delta import delta_kind, gated_delta_step
from flashstate.proof.inputs import AnyCase, Inputs, Op, Source, by_turns, dtype, view_into_projection
from flashstate.reference.gated_delta import gated_delta_token, gates, normalised
from flashstate.state.formats import FORMATS, PORTABLE_FORMATS, encode
from flashstate.state.signature import ACCESS_BYTES
from flashstate.state.state import State


def _token(s: Tensor, exact: bool, **arguments: Any) -> tuple[Tensor, Tensor]:
    """gated_delta_token, whose optional arguments may be left out."""
    return gated_delta_token(s, **{"A_log": None, "dt_bias": None, "scale": None, **arguments})


def _token_of_terms(s: Tensor, exact: bool, **arguments: Any) -> tuple[Tensor, Tensor]:
    """The same in float64. In float32 as operands of tensor cores allow it: states, and what is added to them, are sums
    of two bfloat16 numbers."""
    if s.dtype == torch.float64:
        return _token(s, exact, **arguments)

    def two_terms(x: Tensor) -> Tensor:
        high = x.bfloat16().to(x.dtype)
        return high + (x - high).bfloat16().to(x.dtype)

    q, k, v, a, b = (arguments[name].to(s.dtype) for name in ("q", "k", "v", "a", "b"))
    alpha, beta = gates(a, b, arguments.get("A_log"), arguments.get("dt_bias"))
    if arguments["qk_l2norm"]:
        q, k = normalised(q), normalised(k)
    scale = arguments.get("scale", q.shape[-1] ** -0.5)
    heads_per_key = s.shape[1] // q.shape[1]
    q, k = (t.repeat_interleave(heads_per_key, dim=1)[:, :, None, :] for t in (q * scale, k))

    s = s * alpha[:, :, None, :]  # (batch, HV, V, K)
    u = beta[..., None] * (v - (two_terms(s) * k).sum(-1))  # (batch, HV, V)
    o = (two_terms(s) * q).sum(-1) + u * (k * q).sum(-1)
    return o, s + two_terms(u)[..., None] * k


GATED_DELTA = Op(
    gated_delta_step, _token, ("q", "k", "v", "a", "b"), remembered=("k", "v", "a", "b"), widths=2, main="v", sums=True
)
ON_TENSOR_CORES = replace(GATED_DELTA, token=_token_of_terms)


@dataclass(frozen=True)
class DeltaCase(AnyCase):
    """One problem for gated_delta_step: a shape, a format, its tokens, and which optional arguments it has."""

    batch: int = 3
    heads: int = 4  # HV, of values
    key_heads: int = 2  # H
    rows: int = 16  # V
    cols: int = 16  # K
    format: str = "float32"
    rounding: str = "nearest"
    x: str = "float32"  # dtype of v and of the output
    qk: str = "float32"  # dtype of q and k
    gates: str = "float32"  # dtype of a and b
    parameters: str = "float32"  # dtype of A_log and dt_bias
    raw: bool = True  # A_log is given; else a is the log-decay, and b is beta
    per_channel: bool = False  # a and dt_bias have a value for each column, as KDA has them
    dt_bias: bool = True  # only if raw
    qk_l2norm: bool = True
    scale: float | None = None
    exact: bool = True  # else several tokens go through tensor cores at once
    transposed: bool = False  # states are (cols, rows) in memory; only in formats without scales
    index: str = "int32"  # dtype of slot numbers
    slots: int = 7
    tokens: int = 0  # per row, on an axis of their own; 0: one, without that axis
    packed: bool = False  # rows of different lengths, up to `tokens`, one after the other

    def __str__(self) -> str:
        shape = f"delta-b{self.batch}-h{self.heads}k{self.key_heads}-{self.rows}x{self.cols}"
        dtypes = "-".join(dict.fromkeys((self.x, self.qk, self.gates, self.parameters)))
        flags = (
            ("transposed", self.transposed), ("raw", self.raw), ("channel", self.per_channel), ("bias", self.has_bias),
            ("l2norm", self.qk_l2norm), (f"scale{self.scale}", self.scale is not None), ("inexact", not self.exact),
        )  # fmt: skip
        options = [name for name, on in flags if on]
        tokens = [f"T{self.tokens}{'packed' if self.packed else ''}"] if self.tokens else []
        return "-".join([shape, *tokens, self.format, self.rounding, dtypes, self.index, *options])

    @property
    def has_bias(self) -> bool:
        return self.raw and self.dt_bias

    @property
    def several(self) -> bool:
        return self.packed or self.tokens > 1

    @property
    def problem(self) -> Problem:
        neighbours = self.rows if self.transposed else self.cols
        vector = math.gcd(neighbours, ACCESS_BYTES // dtype(self.format).itemsize)
        kind, op = delta_kind(self.several, self.several and not self.exact, self.tokens)
        shape, size = (self.rows, self.cols, self.format, self.rounding, vector), self.batch * self.heads
        return kind(op, *shape, size, self.several, transposed=self.transposed)

    @property
    def state_axes(self) -> tuple[int, int, int]:
        return self.heads, self.rows, self.cols

    @property
    def snapshot_formats(self) -> list[tuple[str, str]]:
        return [("float32", "nearest"), (self.format, self.rounding), ("int8", "stochastic"), ("float16", "nearest")]

    @property
    def exact_at_once(self) -> bool:
        return self.exact and self.format == "float32"  # other formats add up a row in another order

    @property
    def stored_at_once(self) -> bool:
        return self.exact_at_once  # such sums reach the state

    @property
    def same_when_packed(self) -> bool:
        return self.exact  # else a short row takes part in what the longest one needs

    @property
    def has_states_between_tokens(self) -> bool:
        return self.exact

    @property
    def measured_axes(self) -> tuple[int, int, int, int]:
        return self.heads, self.key_heads, self.rows, self.cols

    def counted_bytes(self, stores: int = 1) -> int:
        tokens, per_head = sum(self.lengths), self.cols if self.per_channel else 1
        qk = 2 * tokens * self.key_heads * self.cols * dtype(self.qk).itemsize
        v = 2 * tokens * self.heads * self.rows * dtype(self.x).itemsize
        gates = tokens * self.heads * (per_head + 1) * dtype(self.gates).itemsize
        parameters = self.heads * (self.raw + self.has_bias * per_head) * dtype(self.parameters).itemsize
        index = self.batch * (dtype(self.index).itemsize + (8 if self.rounding != "nearest" else 0))
        state = (1 + stores) * self.batch * (self.slot_bytes + self.scale_bytes)
        return state + qk + v + gates + parameters + index

    @property
    def op(self) -> Op:
        """With tensor cores, a result that is to be finer than 16 bits is measured against operands of two terms. Other
        states are exact sums of such operands, as q and k are, and lose nothing to them."""
        fine = self.x == "float32" or self.format in ("float32", "int16")
        return ON_TENSOR_CORES if self.several and not self.exact and fine else GATED_DELTA

    def make_inputs(self, device: torch.device, seed: int = 0) -> Inputs:
        source = Source(device, seed)
        normal, lead, heads = source.normal, self.token_axes, self.heads
        data, scale = encode(source.states_of(self), dtype(self.format))
        seeds = source.seeds(self.slots)
        state = State(self._laid_out(data), scale, rounding=self.rounding, seed=seeds, stream=3)
        per_head = (self.cols,) if self.per_channel else ()
        length = 1.0 if self.qk_l2norm else self.cols**-0.5  # so that u stays as large as v
        arguments = {
            "q": normal(*lead, self.key_heads, self.cols, name=self.qk),
            "k": normal(*lead, self.key_heads, self.cols, name=self.qk) * length,
            "v": normal(*lead, heads, self.rows, name=self.x),
            "a": normal(*lead, heads, *per_head, name=self.gates),
            "b": normal(*lead, heads, name=self.gates),
        }
        options: dict[str, Any] = {"qk_l2norm": self.qk_l2norm, "exact": self.exact}
        if self.scale is not None:
            options["scale"] = self.scale
        if self.raw:
            options["A_log"] = normal(heads, name=self.parameters)
        else:
            arguments |= {"a": -arguments["a"].abs(), "b": arguments["b"].sigmoid()}
        if self.has_bias:
            options["dt_bias"] = normal(heads, *per_head, name=self.parameters) - 2
        for tensor in arguments.values() if self.packed else ():
            tensor[sum(self.lengths) :] = torch.nan
        slots = source.slots_of(self)
        return Inputs(self.op, state, arguments, options, slots, self.lengths if self.packed else None)

    def snapshots(self, rows: int, tokens: int, name: str, rounding: str, device: torch.device) -> State:
        """In the layout of the pool if they have its format."""
        data, scale = encode(torch.ones(rows, tokens, *self.state_axes, device=device), dtype(name))
        return State(self._laid_out(data) if name == self.format else data, scale, rounding=rounding)

    def _laid_out(self, states: Tensor) -> Tensor:
        """The same states in the memory layout of the case."""
        return states.mT.contiguous().mT if self.transposed else states

    def as_views(self, inputs: Inputs) -> Inputs:
        views = inputs.changed(view_into_projection)
        if not self.per_channel:
            a = inputs.arguments["a"].transpose(0, -1).contiguous().transpose(0, -1)
            views.arguments["a"] = a[..., None].expand(*a.shape, self.cols)
            if self.has_bias:
                views.options["dt_bias"] = inputs.options["dt_bias"][:, None].expand(-1, self.cols)
        return views


# Small and odd, for the interpreter, whose bfloat16 activations are wrong: float32 and float16 stand in for them. Every
# form in every format, but for transposed states only where there are no scales; the shapes of a form take turns.
ODD_DELTA_SHAPES = {
    "one token": (
        DeltaCase(2, 2, 1, 5, 20, x="float16", index="int64"),
        DeltaCase(1, 1, 1, 1, 1, dt_bias=False, slots=2),
        DeltaCase(2, 1, 1, 2, 256, qk="float16", gates="float16"),
    ),
    "several tokens": (
        DeltaCase(2, 2, 1, 16, 16, tokens=3, x="float16"),
        DeltaCase(2, 1, 1, 4, 33, tokens=4, qk_l2norm=False, scale=0.3, index="int64"),
    ),
    "packed tokens": (
        DeltaCase(3, 2, 1, 3, 40, tokens=2, packed=True, qk="float16", parameters="float16"),
        DeltaCase(3, 2, 1, 2, 8, tokens=2, packed=True, gates="float16", raw=False, index="int64"),
    ),
    "KDA": (
        DeltaCase(2, 2, 2, 9, 7, per_channel=True, gates="float16", parameters="float16", slots=5),
        DeltaCase(2, 1, 1, 33, 40, per_channel=True, dt_bias=False),
    ),
    "KDA, several tokens": (DeltaCase(2, 1, 1, 5, 24, per_channel=True, tokens=3, x="float16", qk="float16"),),
    "log-decay": (
        DeltaCase(2, 1, 1, 3, 96, raw=False, qk="float16"),
        DeltaCase(2, 2, 1, 5, 20, raw=False, per_channel=True, x="float16"),
    ),
    "transposed": (
        DeltaCase(2, 1, 1, 16, 24, transposed=True, tokens=3, x="float16"),
        DeltaCase(2, 2, 1, 20, 5, transposed=True, tokens=3, index="int64"),
        DeltaCase(2, 1, 1, 8, 40, transposed=True, per_channel=True, tokens=3),
        DeltaCase(2, 2, 1, 12, 9, transposed=True),
    ),
    "at once": (
        DeltaCase(2, 2, 1, 16, 16, exact=False, tokens=4, x="float16", qk="float16"),
        DeltaCase(2, 1, 1, 33, 40, exact=False, tokens=9, x="float16", qk="float16", raw=False, index="int64"),
        DeltaCase(2, 2, 2, 20, 12, exact=False, tokens=2, x="float16", qk="float16", qk_l2norm=False, scale=0.3),
    ),
    "at once, packed": (
        DeltaCase(3, 2, 1, 5, 20, exact=False, tokens=2, packed=True, x="float16", qk="float16", dt_bias=False),
        DeltaCase(3, 1, 1, 4, 33, exact=False, tokens=16, packed=True, x="float16", qk="float16", gates="float16"),
    ),
}


def _in_format(case: DeltaCase, name: str, rounding: str) -> DeltaCase:
    """The case in a format; rows that have scales are not transposed."""
    transposed = case.transposed and not FORMATS[dtype(name)].scaled
    return replace(case, format=name, rounding=rounding, transposed=transposed)


ODD_DELTA_CASES = tuple(
    _in_format(shapes[i % len(shapes)], name, rounding)
    for i, (name, rounding) in enumerate(PORTABLE_FORMATS)
    for shapes in ODD_DELTA_SHAPES.values()
)
# One case per format, the forms taking turns.
QUICK_DELTA_CASES = tuple(
    ODD_DELTA_CASES[len(ODD_DELTA_SHAPES) * i + i % len(ODD_DELTA_SHAPES)] for i in range(len(PORTABLE_FORMATS))
)

_HALF = DeltaCase(x="bfloat16", qk="bfloat16", gates="bfloat16", rows=128, cols=128)
_FLOATS = tuple((name, rounding) for name, rounding in PORTABLE_FORMATS if not FORMATS[dtype(name)].scaled)
# Shapes of real models, for compiled kernels: one token in every format, other forms in some, by turns.
_ONE_TOKEN = replace(_HALF, batch=4, heads=64, key_heads=16, slots=9)
_SEVERAL_TOKENS = (
    replace(_HALF, batch=20, heads=32, key_heads=16, slots=30, tokens=4),
    replace(_HALF, batch=5, heads=16, key_heads=16, per_channel=True, tokens=3, packed=True, index="int64"),
    replace(_HALF, batch=4, heads=32, key_heads=16, exact=False, tokens=4),
    replace(_HALF, batch=5, heads=8, key_heads=1, exact=False, tokens=16, packed=True),
)
# Shapes of none, mixed dtypes, options.
_ODD_REAL_SHAPES = (
    DeltaCase(5, 12, 4, 96, 64, x="float16", qk="float16", qk_l2norm=False, scale=0.125, tokens=3, slots=9),
    DeltaCase(2, 4, 2, 256, 256, x="bfloat16", qk="bfloat16", gates="float32", parameters="bfloat16"),
    DeltaCase(9, 3, 1, 33, 20, x="bfloat16", gates="float16", raw=False, tokens=2, packed=True, slots=12),
    DeltaCase(3, 8, 8, 64, 128, x="bfloat16", qk="bfloat16", per_channel=True, dt_bias=False, tokens=8),
    DeltaCase(4, 6, 2, 33, 20, x="float16", qk="float16", exact=False, raw=False, tokens=9, index="int64"),
    DeltaCase(2, 2, 1, 256, 256, x="bfloat16", qk="bfloat16", gates="bfloat16", exact=False, tokens=5),
)
_TRANSPOSED_SHAPES = (
    replace(_HALF, batch=4, heads=8, transposed=True, tokens=4),
    DeltaCase(3, 4, 2, 96, 64, transposed=True, x="float16", qk="bfloat16", per_channel=True),
    DeltaCase(4, 8, 2, 128, 128, transposed=True, x="bfloat16", qk="bfloat16", exact=False, tokens=8),
    DeltaCase(4, 4, 1, 33, 20, transposed=True, x="bfloat16", tokens=3, packed=True),
)


# What no turn brings together.
_NAMED_CASES = (
    replace(_ONE_TOKEN, format="bfloat16", index="int64"),
    replace(_HALF, batch=6, heads=16, key_heads=16, per_channel=True, tokens=4),
    replace(_HALF, batch=6, heads=64, key_heads=16, exact=False, tokens=4, format="bfloat16"),
    replace(_HALF, batch=3, heads=8, key_heads=4, exact=False, tokens=8, format="int16"),
    DeltaCase(2, 2, 1, 256, 256, qk="bfloat16", tokens=2),
)
REAL_DELTA_CASES = (
    *by_turns((_ONE_TOKEN,), PORTABLE_FORMATS, len(PORTABLE_FORMATS)),
    *by_turns(_SEVERAL_TOKENS, PORTABLE_FORMATS, 4),
    *by_turns(_ODD_REAL_SHAPES, PORTABLE_FORMATS, 2),
    *by_turns(_TRANSPOSED_SHAPES, _FLOATS, 2),
    *_NAMED_CASES,
)
