"""The cases of gated_delta_step: their inputs, what they move, and their tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from flashstate.launch import Problem
from flashstate.ops.gated_delta import GATED_DELTA_STEP, delta_kind
from flashstate.proof.case import CASES, Cases, StateCase, by_turns, in_every_format
from flashstate.proof.inputs import ProvenOp, dtype
from flashstate.proof.oracle import two_terms
from flashstate.reference.gated_delta import gated_delta_token
from flashstate.state.formats import FORMATS, PORTABLE_FORMATS


def _token(s: Tensor, exact: bool, **arguments: Any) -> tuple[Tensor, Tensor]:
    """gated_delta_token, which is always exact."""
    return gated_delta_token(s, **arguments)


def _token_of_terms(s: Tensor, exact: bool, **arguments: Any) -> tuple[Tensor, Tensor]:
    """gated_delta_token in float64, and in float32 as operands of tensor cores allow it."""
    terms: dict[str, Any] = {} if s.dtype == torch.float64 else {"operand": two_terms}
    return gated_delta_token(s, **arguments, **terms)


GATED_DELTA = ProvenOp(GATED_DELTA_STEP, _token, remembered=("k", "v", "a", "b"), sizes={"H": "key_heads"}, sums=True)


@dataclass(frozen=True)
class DeltaCase(StateCase):
    """One problem for gated_delta_step. `x` is the dtype of v and of the output, `parameters` that of A_log and
    dt_bias."""

    heads: int = 4  # HV, of values
    key_heads: int = 2  # H
    rows: int = 16  # V
    cols: int = 16  # K
    qk: str = "float32"  # dtype of q and k
    gates: str = "float32"  # dtype of a and b
    raw: bool = True  # A_log is given; else a is the log-decay, and b is beta
    per_channel: bool = False  # a and dt_bias have a value for each column, as KDA has them
    dt_bias: bool = True  # only if raw
    b_logit: bool | None = None  # None: if raw
    qk_l2norm: bool = True
    scale: float | None = None
    exact: bool = True  # else several tokens go through tensor cores at once
    transposed: bool = False  # states are (cols, rows) in memory; only in formats without scales
    sizes: ClassVar[Mapping[str, str]] = {**StateCase.sizes, "groups": "key_heads"}

    def in_format(self, name: str, rounding: str) -> DeltaCase:
        """The case in a format; rows that have scales are not transposed."""
        transposed = self.transposed and not FORMATS[dtype(name)].scaled
        return replace(self, format=name, rounding=rounding, transposed=transposed)

    @property
    def kind(self) -> tuple[Callable[..., Problem], str]:
        kind, op = delta_kind(self.several, self.several and not self.exact, self.tokens)
        return partial(kind, transposed=self.transposed), op

    def same_when_packed(self, tokens: int) -> bool:
        return self.exact  # else a short row takes part in what the longest one needs

    @property
    def op(self) -> ProvenOp:
        """With tensor cores, a result that is to be finer than 16 bits is measured against operands of two terms. Other
        states are exact sums of such operands, as q and k are, and lose nothing to them. Formats but float32 add up a
        row in another order, and such sums reach the state."""
        fine = self.x == "float32" or self.format in ("float32", "int16")
        token = _token_of_terms if self.several and not self.exact and fine else _token
        exact, alike = self.exact, self.exact and self.format == "float32"
        op = replace(GATED_DELTA, token=token, one_order=exact, between_tokens=exact, every_token=exact)
        return replace(op, exact_at_once=alike, stored_at_once=alike)

    @property
    def dtypes(self) -> dict[str, Any]:
        needed, shared = {"q": self.qk, "k": self.qk, "v": self.x, "a": self.gates, "b": self.gates}, self.parameters
        return needed | {"A_log": self.raw and shared, "dt_bias": self.raw and self.dt_bias and shared}

    def is_whole(self, name: str) -> bool:
        return self.per_channel

    def adjust(self, arguments: dict[str, Any]) -> None:
        if not self.qk_l2norm:
            arguments["k"] *= self.cols**-0.5  # so that u stays as large as v
        if not self.raw:
            arguments["a"] = -arguments["a"].abs()
        if not (self.raw if self.b_logit is None else self.b_logit):
            arguments["b"] = arguments["b"].sigmoid()
        if arguments["dt_bias"] is not None:
            arguments["dt_bias"] -= 2


_SHAPES = {
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
        DeltaCase(3, 2, 1, 2, 8, tokens=2, packed=True, gates="float16", raw=False, b_logit=True, index="int64"),
    ),
    "KDA": (
        DeltaCase(2, 2, 2, 9, 7, per_channel=True, gates="float16", parameters="float16", slots=5),
        DeltaCase(2, 1, 1, 33, 40, per_channel=True, dt_bias=False, b_logit=False),
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
        DeltaCase(2, 1, 1, 33, 40, exact=False, tokens=9, x="float16", qk="float16", b_logit=False, index="int64"),
        DeltaCase(2, 2, 2, 20, 12, exact=False, tokens=2, x="float16", qk="float16", qk_l2norm=False, scale=0.3),
    ),
    "at once, packed": (
        DeltaCase(3, 2, 1, 5, 20, exact=False, tokens=2, packed=True, x="float16", qk="float16", dt_bias=False),
        DeltaCase(3, 1, 1, 4, 33, exact=False, tokens=16, packed=True, x="float16", qk="float16", gates="float16"),
    ),
}

_HALF = DeltaCase(x="bfloat16", qk="bfloat16", gates="bfloat16", rows=128, cols=128)
_FLOATS = tuple((name, rounding) for name, rounding in PORTABLE_FORMATS if not FORMATS[dtype(name)].scaled)
# Shapes of real models: one token in every format, other forms in some, by turns.
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
    replace(_HALF, batch=3, heads=8, transposed=True),
    DeltaCase(3, 4, 2, 96, 64, transposed=True, x="float16", qk="bfloat16", per_channel=True),
    DeltaCase(3, 4, 2, 96, 64, transposed=True, x="bfloat16", qk="bfloat16", per_channel=True, tokens=2),
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
_REAL = (
    *by_turns((_ONE_TOKEN,), PORTABLE_FORMATS, len(PORTABLE_FORMATS)),
    *by_turns(_SEVERAL_TOKENS, PORTABLE_FORMATS, 4),
    *by_turns(_ODD_REAL_SHAPES, PORTABLE_FORMATS, 2),
    *by_turns(_TRANSPOSED_SHAPES, _FLOATS, 2),
    *_NAMED_CASES,
)
CASES["gated_delta_step"] = Cases(in_every_format(_SHAPES), _REAL)
