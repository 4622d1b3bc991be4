"""The cases of mamba3_step: their inputs, what they move, and their tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flashstate.launch import Problem
from flashstate.ops.mamba3 import MAMBA3_STEP, mamba3_kind
from flashstate.proof.case import CASES, Cases, StateCase, by_turns, in_every_format
from flashstate.proof.inputs import BesideStates, Inputs, ProvenOp, Source, dtype, first_axis_innermost, in_projection
from flashstate.reference.mamba3 import FourStates, Parameters, mamba3_token, rotated, wrapped
from flashstate.state.formats import PORTABLE_FORMATS, encode
from flashstate.state.mamba3 import Mamba3State, Rotary


@dataclass(frozen=True, eq=False, kw_only=True)
class Mamba3Pool(BesideStates):
    """The four states of a layer, as laws see them: side by side."""

    k: Tensor
    v: Tensor
    angle: Tensor | None

    @cached_property
    def state(self) -> Mamba3State:
        return Mamba3State(super().state, self.k, self.v, self.angle)


def _pairs(pairing: str | None, rank: int) -> str:
    """Which columns are turned together."""
    return Rotary(torch.empty(0), pairing=pairing).pairing_of(rank)


def _with_rotary(pool: Mamba3Pool, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of mamba3_step: a Mamba3State, and what turns B and C in a Rotary, if there are angles."""
    names = ("angle", "bias_B", "bias_C", "pairing")
    turning = {name: given[name] for name in names if name in given}
    rest = {name: value for name, value in given.items() if name not in names}
    return {"state": pool.state, **rest, "rotary": None if turning.get("angle") is None else Rotary(**turning)}


def _token(
    s: Tensor, k: Tensor, v: Tensor, theta: Tensor | None = None, *, pairing: str | None, trap_logit: bool,
    update_kv: bool, **arguments: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """mamba3_token, which has parameters of all tokens in one place."""
    given = {name: arguments.pop(name) for name in ("Wx", "Wz", "Wo", "D", "bias_B", "bias_C")}
    parameters = Parameters(**given, pairing=_pairs(pairing, k.shape[1]), trap_logit=trap_logit)
    y, memory = mamba3_token(FourStates(s, k, v, theta), **arguments, parameters=parameters)
    return y, *(tensor for tensor in memory if tensor is not None)


MAMBA3 = ProvenOp(
    MAMBA3_STEP, _token, remembered=("x", "A", "dt", "trap", "B"),
    sizes={"R": "rank", "G": "groups", "S": "angles"}, carried=("k", "v", "angle"), angles=("angle",),
    between_tokens=False, takes=_with_rotary,
)  # fmt: skip
MOST_DRAWS = 100  # of B, until nothing is in doubt


@dataclass(frozen=True)
class Mamba3Case(StateCase):
    """One problem for mamba3_step. `x` is the dtype of x and z, `parameters` that of Wx, Wz, Wo, D and the biases."""

    heads: int = 4
    groups: int = 2
    rows: int = 16
    cols: int = 16
    rank: int = 4
    angles: int = 4  # of a head; 0: B and C come turned
    pairing: str | None = None  # of Rotary
    bc: str = "float32"  # dtype of B and C, and of the angles that tokens bring
    kv: str = "float32"  # dtype of the states k and v
    scalars: str = "float32"  # dtype of A, dt and trap
    Wx: bool = True
    Wz: bool = True  # only with z
    Wo: bool = True
    D: bool = True
    z: bool = True
    bias: bool = True  # only with angles
    angle_per_head: bool = False
    trap_logit: bool = False
    update_kv: bool = True

    @property
    def kind(self) -> tuple[Callable[..., Problem], str]:
        return mamba3_kind(self.rank, self.angles > 0)

    def counted_bytes(self, stores: int = 1) -> int:
        angles = 4 * (1 + stores) * self.angles
        kv = (1 + stores * self.update_kv) * (self.rank * self.cols + self.rows) * dtype(self.kv).itemsize
        more = 0 if self.Wo else sum(self.lengths) * (self.rank - 1) * self.rows * dtype(self.x).itemsize  # outputs
        return super().counted_bytes(stores) + self.heads * (self.batch * (angles + kv) + more)

    @property
    def op(self) -> ProvenOp:
        """Where all columns are turned, what turns them reaches all of the state. Formats but float32 need fewer terms
        of operands."""
        carried = MAMBA3.carried if self.angles else ("k", "v")
        remembered = (*MAMBA3.remembered, "angle") if 2 * self.angles == self.cols else MAMBA3.remembered
        op = replace(MAMBA3, carried=carried, remembered=remembered, left_alone=() if self.update_kv else ("k", "v"))
        alike, angle = self.format == "float32", "tokens H | S" if self.angle_per_head else "tokens | S"
        op = replace(op, exact_at_once=alike, stored_at_once=alike, one_order=self.rank == 1)
        more = {"angle": angle, "bias_B": "| R H N", "bias_C": "| R H N"}  # of a Rotary
        return replace(op, more=more, uniform=("dt",) if self.trap_logit else ("dt", "trap"))

    @property
    def dtypes(self) -> dict[str, Any]:
        shared, scalars, turned = self.parameters, self.scalars, self.angles > 0
        weights = {"Wx": self.Wx and shared, "Wz": self.Wz and self.z and shared, "Wo": self.Wo and shared}
        biases = dict.fromkeys(("bias_B", "bias_C"), turned and self.bias and shared)
        tokens = {"x": self.x, "A": scalars, "dt": scalars, "trap": scalars, "z": self.z and self.x}
        turns = {"angle": turned and self.bc, "B": self.bc, "C": self.bc}
        return {**weights, "D": self.D and shared, **biases, **tokens, **turns}

    def adjust(self, arguments: dict[str, Any]) -> None:
        arguments |= {"A": -arguments["A"].abs(), "dt": 0.1 * arguments["dt"], "pairing": self.pairing}

    def make_inputs(self, device: torch.device, seed: int = 0) -> Inputs:
        source = Source(device, seed)
        slots, pool, arguments = source.slots_of(self), self.make_pool(source), self.draw(source)
        if pool.angle is not None and self.kv != "float32":
            arguments["B"] = self._without_doubt(source, pool.angle[slots.long()].cpu(), arguments)
        return self.inputs_of(pool, arguments, slots)

    def make_pool(self, source: Source) -> Mamba3Pool:
        data, scale = encode(source.states_of(self), dtype(self.format))
        k = source.normal(self.slots, self.rank, self.heads, self.cols, name=self.kv)
        v = source.normal(self.slots, self.heads, self.rows, name=self.kv)
        angle = wrapped(math.tau * source.uniform(self.slots, self.heads, self.angles)) if self.angles else None
        seed = source.seeds(self.slots)
        return Mamba3Pool(data, scale, rounding=self.rounding, seed=seed, stream=3, k=k, v=v, angle=angle)

    def _without_doubt(self, source: Source, theta: Tensor, arguments: dict[str, Any]) -> Tensor:
        """B that float32 and float64, turned, round to the same numbers of the dtype they are kept in. Else one of them
        would take another neighbour, which moves the state by far more than float32 is wrong. theta: of the rows."""
        last = len(self.token_axes) - 1
        B, dt, angle = (arguments[name].cpu().flatten(0, last) for name in ("B", "dt", "angle"))
        theta = self._angles_of_tokens(theta, angle, dt)
        bias = torch.zeros(()) if arguments["bias_B"] is None else arguments["bias_B"].cpu()
        pairs, columns = _pairs(self.pairing, self.rank), torch.arange(self.cols)
        heads_per_group = self.heads // self.groups
        pair = columns // 2 if pairs == "interleaved" else columns % (self.cols // 2)
        for _ in range(MOST_DRAWS):
            of_heads = B.repeat_interleave(heads_per_group, dim=2)  # (tokens, R, H, N)
            u, rough = of_heads.double() + bias.double(), of_heads.float() + bias.float()
            length = u.abs() + rotated(u, torch.full_like(theta, math.pi / 2), pairs).abs()  # of a pair, or more
            unsure = torch.where((pair < self.angles) | (rough != u), length * 2.0**-19, 0.0)
            turned = rotated(u, theta, pairs)
            doubtful = (turned - unsure).to(dtype(self.kv)) != (turned + unsure).to(dtype(self.kv))
            again = doubtful.unflatten(2, (self.groups, heads_per_group)).any(3)  # (tokens, R, G, N)
            if not again.any():
                return B.reshape(arguments["B"].shape).to(source.device)
            B = torch.where(again, source.normal(*B.shape, name=self.bc).cpu(), B)
        raise AssertionError(f"B stays in doubt: {self}")

    def _angles_of_tokens(self, theta: Tensor, angle: Tensor, dt: Tensor) -> Tensor:
        """What every token is turned by, (tokens, H, S) float64; theta: of the rows, before their first."""
        lengths = torch.tensor(self.lengths)
        first, theta = lengths.cumsum(0) - lengths, theta.double()
        turns = torch.tanh(angle.double().reshape(len(dt), -1, self.angles)) * dt.double()[..., None] * math.pi
        found = turns.clone()
        for t in range(max(self.lengths)):
            goes = lengths > t
            theta[goes] = found[first[goes] + t] = wrapped(theta[goes] + turns[first[goes] + t])
        return found

    def as_views(self, inputs: Inputs) -> Inputs:
        """B and C with their groups outside of their ranks."""
        views = super().as_views(inputs)
        for name in ("B", "C"):
            views.arguments[name] = in_projection(inputs.arguments[name].transpose(-3, -2)).transpose(-3, -2)
        views.arguments["dt"] = first_axis_innermost(inputs.arguments["dt"])
        return views


_SHAPES = {
    "one token": (
        Mamba3Case(2, 2, 1, 5, 12, 4, angles=3, x="float16", kv="float16", index="int64"),
        Mamba3Case(2, 1, 1, 33, 20, 1, angles=10, bc="float16", kv="float16", trap_logit=True, scalars="float16"),
        Mamba3Case(2, 1, 1, 16, 16, 4, angles=8, pairing="interleaved", kv="float16", bias=False, slots=5),
        Mamba3Case(2, 1, 1, 5, 40, 1, angles=7, pairing="halved", kv="float16", parameters="float16", Wz=False),
    ),
    "plain": (
        Mamba3Case(2, 1, 1, 16, 36, 3, angles=0, Wo=False, z=False, bc="float16"),
        Mamba3Case(2, 1, 1, 48, 7, 2, angles=0, Wo=False, Wx=False, kv="float16", trap_logit=True, index="int64"),
        Mamba3Case(2, 1, 1, 5, 16, 1, angles=0, Wo=False, z=False, D=False, x="float16", bc="float16", kv="float16"),
    ),
    "several tokens": (
        Mamba3Case(2, 1, 1, 5, 20, 2, angles=5, tokens=2, kv="float16", x="float16"),
        Mamba3Case(2, 1, 1, 16, 16, 1, angles=8, tokens=3, kv="float16", trap_logit=True, index="int64"),
        Mamba3Case(2, 1, 1, 33, 12, 3, angles=0, tokens=2, Wo=False, bc="float16", kv="float16", parameters="float16"),
    ),
    "packed tokens": (
        Mamba3Case(3, 1, 1, 16, 12, 2, angles=6, tokens=2, packed=True, Wo=False, z=False, kv="float16"),
        Mamba3Case(3, 1, 1, 5, 36, 1, angles=4, tokens=2, packed=True, x="float16", kv="float16", index="int64"),
        Mamba3Case(3, 1, 1, 20, 16, 4, angles=8, tokens=2, packed=True, bc="float16", D=False),
    ),
    "k and v left alone": (
        Mamba3Case(2, 2, 2, 5, 20, 2, angles=10, update_kv=False, kv="float16", bc="float16", angle_per_head=True),
        Mamba3Case(3, 1, 1, 16, 16, 3, angles=2, update_kv=False, tokens=2, packed=True, x="float16"),
        Mamba3Case(2, 1, 1, 16, 12, 1, angles=6, update_kv=False, kv="float16", Wx=False, index="int64"),
    ),
}
_HALF = Mamba3Case(4, 48, 1, 64, 128, 4, x="bfloat16", bc="bfloat16", kv="bfloat16", slots=9)
_SINGLE = replace(_HALF, heads=8, rows=128, cols=64, rank=1, angles=16)
# Shapes of real models: one token in every format, other forms in some, by turns.
_REAL_SHAPES = (
    replace(_HALF, angles=64, tokens=3),
    replace(_HALF, angles=17, tokens=3, packed=True, batch=5, index="int64"),
    replace(_SINGLE, batch=6, Wx=False, Wz=False, Wo=False),
    replace(_SINGLE, angles=32, tokens=3, trap_logit=True),
    replace(_SINGLE, groups=8, tokens=3, packed=True, batch=5, Wo=False, z=False),
    replace(_HALF, heads=8, groups=8, angles=32, angle_per_head=True, update_kv=False, scalars="bfloat16"),
)
# Shapes of none, mixed dtypes, options.
_ODD_REAL_SHAPES = (
    Mamba3Case(5, 6, 2, 80, 48, 2, angles=24, x="float16", bc="float16", kv="float16", slots=9),
    Mamba3Case(3, 6, 3, 80, 48, 2, angles=0, x="bfloat16", bc="float16", kv="float32", Wo=False, tokens=3),
    Mamba3Case(9, 3, 1, 33, 20, 3, angles=10, x="bfloat16", kv="float16", packed=True, tokens=2, Wo=False, slots=12),
    Mamba3Case(4, 4, 4, 48, 256, 8, angles=100, bc="bfloat16", kv="bfloat16", parameters="bfloat16", bias=False),
    Mamba3Case(4, 4, 1, 16, 36, 5, angles=3, pairing="interleaved", x="float16", scalars="bfloat16", tokens=2),
    Mamba3Case(3, 4, 2, 200, 40, 1, angles=20, pairing="halved", x="float16", bc="bfloat16", kv="float16", z=False),
    Mamba3Case(4, 3, 1, 5, 7, 1, angles=0, x="bfloat16", bc="bfloat16", kv="bfloat16", D=False, Wo=False, tokens=3),
)
_REAL = (
    *by_turns((replace(_HALF, angles=32),), PORTABLE_FORMATS, len(PORTABLE_FORMATS)),
    *by_turns(_REAL_SHAPES, PORTABLE_FORMATS, 4),
    *by_turns(_ODD_REAL_SHAPES, PORTABLE_FORMATS, 2),
)
CASES["mamba3_step"] = Cases(in_every_format(_SHAPES), _REAL)
