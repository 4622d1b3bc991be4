"""The cases of mamba2_replay: a checkpoint and a ring, what calls must give, and their tables."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flashstate.errors import dtype_name
from flashstate.launch import Problem
from flashstate.ops.mamba2_replay import MAMBA2_REPLAY, ReplayProblem, ReplayTokenProblem, replay_kind
from flashstate.ops.replaying import parted
from flashstate.proof.case import CASES, Cases, by_turns, in_every_format
from flashstate.proof.cases.mamba2 import MAMBA2, Case
from flashstate.proof.inputs import BesideStates, Inputs, ProvenOp, Source, dtype
from flashstate.proof.oracle import Expected, encoded, two_terms
from flashstate.reference.mamba2 import mamba2_token, softplus
from flashstate.reference.mamba2_replay import BEFORE_THE_FIRST_TOKEN, replayed
from flashstate.state.formats import PORTABLE_FORMATS, decode
from flashstate.state.ring import Plan, Ring
from flashstate.state.slots import Slots

# How the op may go about a call: every row decides whether it folds, as a plan says, or one kernel has the rows that
# fold, and another one those that do not.
FORMS = ("decided", "planned", "parted")


@dataclass(frozen=True, eq=False, kw_only=True)
class ReplayPool(BesideStates):
    """The checkpoints and the rings of a layer, as laws see them: side by side."""

    x: Tensor  # of the ring, as the six after it
    B: Tensor
    dt: Tensor
    start: Tensor
    count: Tensor
    window: int
    folds_by_hand: bool = False

    @cached_property
    def ring(self) -> Ring:
        return Ring(**{own.name: getattr(self, own.name) for own in fields(Ring)})

    @property
    def live_rows(self) -> Tensor:
        """Which rows of every ring are live, (slots, length)."""
        return self.rows_of_rings(self.start, self.count)

    def rows_of_rings(self, first: Tensor, count: Tensor) -> Tensor:
        """Mark `count` rows of every ring, from `first` on: (slots, length)."""
        length = self.ring.length
        row = torch.arange(length, device=first.device)
        return (row - first[:, None].long()) % length < count[:, None]


def _with_ring(pool: ReplayPool, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of mamba2_replay, which has no slots where it has a plan."""
    unused = "slots" if given.get("plan") is not None else "plan"
    return {"state": pool.state, "ring": pool.ring, **{name: given[name] for name in given if name != unused}}


@dataclass
class ReplayInputs(Inputs):
    """Checkpoints, rings, and the arguments of one call on them, in one of FORMS."""

    state: ReplayPool
    form: str = field(default="decided", kw_only=True)

    def step(self, **changes: Any) -> Tensor:
        """Call mamba2_replay, with some arguments changed or added; `plan`: by that one, made for the call before."""
        if self.form != "decided" and "plan" not in changes:
            changes["plan"] = self.plan(changes.pop("slots", None))
        if "plan" in changes:
            changes["slots"] = None  # the plan has them; made again they would be copied from the host
        with parted() if self.form == "parted" else nullcontext():
            return super().step(**changes)

    def plan(self, slots: Slots | Tensor | None = None) -> Plan:
        """A plan of this call, on these slots or on those of its rows."""
        tokens = self.main.shape[1] if self.has_token_axis else 1
        return self.state.ring.plan(self.at() if slots is None else slots, tokens if self.lengths is None else None)

    @property
    def folds(self) -> Tensor:
        """Which rows fold, (batch,)."""
        live = self.state.count[self.slots.long()].long()
        return (self.tokens > 0) & (live + self.tokens > self.state.window)

    stores = folds  # no other row stores its state

    @property
    def appended_rows(self) -> Tensor:
        """Rows of every ring that the call fills, (slots, length)."""
        tokens = torch.zeros_like(self.state.count).long()
        tokens[self.slots.long()] = self.tokens
        return self.state.rows_of_rings(self.state.start + self.state.count, tokens)

    def token(self, rows: Tensor, t: int) -> dict[str, Any]:
        """The arguments of mamba2_token for token t of these rows of the batch, which have one."""
        at = (self.tokens.cumsum(0) - self.tokens)[rows] + t
        tokens = {name: tensor.flatten(0, self.token_axes - 1)[at] for name, tensor in self.activations.items()}
        return {**self.arguments, **tokens}


def operand(values: Tensor, x: torch.dtype) -> Tensor:
    """Float32 as an operand of products, where tokens have x of that dtype: of 8 bits for bfloat16, as the sum of two
    such for float16, as it is for float32."""
    if x == torch.float32:
        return values
    return values.bfloat16().float() if x == torch.bfloat16 else two_terms(values)


@dataclass
class Recurrence:
    """The states of slots as if every token that was accepted had been stepped, and so what replay must give.

    exact: (slots, heads, rows, cols) in float64, nothing rounded.
    plain: as plain float32 arithmetic has them, rounded to the format where a ring is folded, with the random bits of
        the slot: the distance between both is what budgets are made of. Where x has 16 bits, operands of products may
        be bfloat16, or for float16 two of them: so the state and C are rounded before a plain output is made of them,
        and then the output. Nothing else is, so for bfloat16 the budget is about that of two roundings to bfloat16.
    live: (slots,): tokens since the last fold.
    """

    exact: Tensor
    plain: Tensor
    live: Tensor

    @classmethod
    def of(cls, inputs: ReplayInputs) -> Recurrence:
        """Begin with what checkpoints and rings hold."""
        pool = inputs.state
        slots = torch.arange(len(pool.count), device=pool.count.device)
        states, live = decode(pool.data, pool.scale), pool.count.long()
        given = (slots, pool.start.long(), live, inputs.arguments["A"])
        exact, plain = (replayed(pool.ring, s, *given) for s in (states.double(), states))
        return cls(exact, plain, live)

    def forget(self, slots: Tensor) -> None:
        """Slots whose next request begins."""
        for tensor in (self.exact, self.plain, self.live):
            tensor[slots.long()] = 0

    def step(self, inputs: ReplayInputs, accepted: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of all tokens of a call, exactly and plainly; then so many tokens of every row were accepted."""
        slots, tokens = inputs.slots.long(), inputs.tokens
        fold = (tokens > 0) & (self.live[slots] + tokens > inputs.state.window)
        outputs = []
        for states, stored in ((self.exact, self.exact[slots]), (self.plain, self.stored(inputs))):
            outputs.append(_stepped(inputs, states[slots], tokens)[0])
            folded = torch.where(fold[:, None, None, None], stored, states[slots])
            states[slots] = _stepped(inputs, folded, accepted)[1]
        self.live[slots] = torch.where(fold, 0, self.live[slots]) + accepted
        return outputs[0], outputs[1].to(inputs.main.dtype)

    def stored(self, inputs: ReplayInputs) -> Tensor:
        """What a fold would store for the rows of the batch, decoded."""
        slots, pool = inputs.slots.long(), inputs.state
        return decode(*encoded(self.plain[slots], pool, pool, slots, BEFORE_THE_FIRST_TOKEN))


def _stepped(inputs: ReplayInputs, s: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs of the first `count` tokens of every row, row by row, and the states after them."""
    longest = int(count.max()) if len(count) else 0
    s, outputs, x = s.clone(), s.new_zeros(len(s), longest, *s.shape[1:3]), inputs.main.dtype
    call = max(inputs.row_lengths, default=1), dtype_name(inputs.state.data.dtype), inputs.lengths is not None
    rounds = s.dtype == torch.float32 and replay_kind(*call, inputs.state.window) is ReplayProblem
    for t in range(longest):
        rows = (count > t).nonzero()[:, 0]
        token = inputs.token(rows, t)
        y, s[rows] = mamba2_token(s[rows], **token)
        if rounds:  # a token whose time step is 0 gives what is read of the state
            standing = {"dt": torch.zeros_like(token["dt"]), "dt_bias": None, "dt_softplus": False, "dt_limit": None}
            y, _ = mamba2_token(operand(s[rows], x), **token | standing | {"C": operand(token["C"].float(), x)})
        outputs[rows, t] = y
    return outputs[torch.arange(longest, device=count.device) < count[:, None]], s


def _expected(inputs: ReplayInputs) -> Expected:
    """What a call must give by the recurrence: outputs, and the states of rows that fold; others stay."""
    slots = inputs.slots.long()
    batch = replace(inputs.of_slots(slots), slots=torch.arange(len(slots), device=slots.device))  # in a pool
    model, folds = Recurrence.of(batch), inputs.folds[:, None, None, None]
    state = torch.where(folds, model.exact, inputs.states.double())
    plain = torch.where(folds, model.stored(batch), inputs.states)
    return Expected(*model.step(batch, inputs.tokens), state, plain, {})


REPLAY = replace(
    MAMBA2, declared=MAMBA2_REPLAY, takes=_with_ring, remembered=(), sums=True, expects=_expected, rings=True,
    between_tokens=False, every_token=False,
)  # fmt: skip


@dataclass(frozen=True)
class ReplayCase(Case):
    """One problem for mamba2_replay: one for mamba2_step, with a window, and the form of the call."""

    batch: int = 4
    heads: int = 2
    groups: int = 1
    bc: str = ""  # dtype of B and C; "": that of x
    window: int = 16
    spare: int = 0  # rows that the ring has beside those it needs
    form: str = "decided"

    def __post_init__(self) -> None:
        object.__setattr__(self, "bc", self.bc or self.x)

    @property
    def forms(self) -> tuple[ReplayCase, ...]:
        return tuple(replace(self, form=form) for form in FORMS)

    @property
    def kind(self) -> tuple[Callable[..., Problem], str]:
        return replay_kind(self.tokens or 1, self.format, self.packed, self.window), "mamba2_replay either"

    @property
    def several(self) -> bool:
        return self.tokens > 1

    @property
    def op(self) -> ProvenOp:
        return REPLAY

    def same_when_packed(self, tokens: int) -> bool:
        """One token alone is not summed in the order of others, and there is no plan for none."""
        return tokens > 0 and replay_kind(tokens, self.format, False, self.window) is not ReplayTokenProblem

    @property
    def live(self) -> list[int]:
        """Live rows of the rings of the batch: all, as many as there is room for beside the new tokens, one more, none,
        and then any."""
        edges = (lambda n: self.window, lambda n: self.window - n, lambda n: self.window - n + 1, lambda n: 0)
        counts = [edges[b](n) if b < len(edges) else 5 * b % (self.window + 1) for b, n in enumerate(self.lengths)]
        return [min(max(count, 0), self.window) for count in counts]

    @property
    def moved(self) -> tuple[float, float]:
        """Rows that fold, and rows of rings that are read or appended."""
        both = [(live, n) for live, n in zip(self.live, self.lengths, strict=True) if n]
        return sum(live + n > self.window for live, n in both), sum(live + n for live, n in both)

    def counted_bytes(self, stores: int = 1) -> int:
        folding, rows = self.moved
        kept = self.heads * self.rows * dtype(self.x).itemsize
        kept += self.groups * self.cols * dtype(self.bc).itemsize + 4 * self.heads
        stored = stores * folding * (self.slot_bytes + self.scale_bytes)
        return super().counted_bytes(0) + round(stored + rows * kept) + 8 * self.batch

    def make_inputs(self, device: torch.device, seed: int = 0) -> ReplayInputs:
        """Random inputs. Rings that fold and rings that do not, of which the first wraps; NaN in all rows of rings that
        are not live. Decays are so slow that a state is still seen behind a window."""
        step = super().make_inputs(device, seed)
        step.arguments["A"] *= min(1.0, 8 / self.window)
        pool = ReplayPool.of(step.state, self._ring(Source(device, seed + (1 << 40)), step.slots.long()))
        for tensor in (pool.x, pool.B, pool.dt):
            tensor.transpose(1, 2)[~pool.live_rows] = torch.nan
        return ReplayInputs(REPLAY, pool, step.arguments, step.slots, step.lengths, form=self.form)

    def _ring(self, source: Source, slots: Tensor) -> Ring:
        length = self.window + max(1, self.tokens) + self.spare
        x = source.normal(self.slots, self.heads, length, self.rows, name=self.x)
        B = source.normal(self.slots, self.groups, length, self.cols, name=self.bc)
        dt = source.normal(self.slots, self.heads, length)
        start = (length * source.uniform(self.slots)).int()
        count = ((self.window + 1) * source.uniform(self.slots)).int()
        start[slots[:1]] = length - 1
        count[slots] = torch.tensor(self.live, dtype=torch.int32, device=slots.device)
        return Ring(x, B, softplus(dt - 1) if self.dt_softplus else dt.abs(), start, count, self.window)


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
        ReplayCase(4, 1, 1, 3, 16, tokens=3, packed=True, x="float16", parameters="float16", window=33),
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
CASES["mamba2_replay"] = Cases(in_every_format(_SHAPES), _REAL, besides=_ONE_TOKEN, turns=4)
