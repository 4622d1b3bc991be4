"""Replay: checkpoints beside rings, calls on them, what they must give, and what the cases of all its ops share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from flashstate.ops.replaying import parted
from flashstate.proof.case import StateCase
from flashstate.proof.inputs import BesideStates, Inputs, ProvenOp, Source, repeated
from flashstate.proof.oracle import Expected, encoded
from flashstate.reference.rings import BEFORE_THE_FIRST_TOKEN
from flashstate.state.formats import decode
from flashstate.state.ring import AnyRing, Plan
from flashstate.state.slots import Slots

# How the op may go about a call: every row decides whether it folds, as a plan says, or one kernel has the rows that
# fold, and another one those that do not.
FORMS = ("decided", "planned", "parted")
CURSORS = ("start", "count")


@dataclass(frozen=True, eq=False, kw_only=True)
class ReplayPool(BesideStates):
    """The checkpoints and the rings of a layer, as laws see them: side by side. Its classes add the tensors that ops
    append to."""

    start: Tensor  # of the ring, as the three after it
    count: Tensor
    window: int
    folds_by_hand: bool = False
    kind: ClassVar[type[AnyRing]]  # of the ring

    @cached_property
    def ring(self) -> AnyRing:
        return self.kind(**{own.name: getattr(self, own.name) for own in fields(self.kind)})  # type: ignore[arg-type]

    @property
    def kept(self) -> dict[str, Tensor]:
        """What rings keep of tokens, by name: (slots, heads, length, ...)."""
        return {name: getattr(self, name) for name in self.kind.written}

    @property
    def live_rows(self) -> Tensor:
        """Which rows of every ring are live, (slots, length)."""
        return self.rows_of_rings(self.start, self.count)

    def rows_of_rings(self, first: Tensor, count: Tensor) -> Tensor:
        """Mark `count` rows of every ring, from `first` on: (slots, length)."""
        length = self.ring.length
        row = torch.arange(length, device=first.device)
        return (row - first[:, None].long()) % length < count[:, None]

    def spoil_dead_rows(self) -> None:
        """Put NaN into all rows of rings that are not live."""
        for tensor in self.kept.values():
            tensor.transpose(1, 2)[~self.live_rows] = torch.nan

    def fill_dead_rows(self) -> None:
        """Put numbers where rings hold NaN, so that any row may be live, and states do not grow without end."""
        for name, tensor in self.kept.items():
            tensor.nan_to_num_(-0.5 if name == "decay" else 0.5)


class Token(NamedTuple):
    """What a token gives: its output, the states after it, and what a ring keeps of it, by name."""

    y: Tensor
    s: Tensor
    kept: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class ProvenReplay(ProvenOp):
    """What inputs, the oracle and laws know of an op that replays."""

    fold: Callable[..., None]  # the public function that folds
    parameters: tuple[str, ...]  # arguments of a call that folds have too
    # States after live rows, exactly in float64, plainly in float32: of a ring, states, slots, starts, counts, and
    # these parameters.
    after: Callable[..., Tensor]
    # One token, exactly or plainly: of the inputs of a call, states, and the arguments of this token.
    stepped: Callable[[ReplayInputs, Tensor, dict[str, Any]], Token]
    measured: tuple[str, ...]  # what rings keep rounded; of the rest not a bit changes
    from_stored: bool = False  # new tokens go on from what a fold stored; else from the state that it rounded

    @classmethod
    def over(cls, op: ProvenOp, **changes: Any) -> ProvenReplay:
        """Replay of an op that steps: what differs."""
        given = {own.name: getattr(op, own.name) for own in fields(op)}
        alone = {"remembered": (), "sums": True, "rings": True, "between_tokens": False, "every_token": False}
        return cls(**{**given, **alone, "takes": _with_ring, "expects": _expected, **changes})


def _with_ring(pool: ReplayPool, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an op that replays, which has no slots where it has a plan."""
    unused = "slots" if given.get("plan") is not None else "plan"
    return {"state": pool.state, "ring": pool.ring, **{name: given[name] for name in given if name != unused}}


@dataclass
class ReplayInputs(Inputs):
    """Checkpoints, rings, and the arguments of one call on them, in one of FORMS."""

    op: ProvenReplay
    state: Any  # a ReplayPool
    form: str = field(default="decided", kw_only=True)

    def step(self, **changes: Any) -> Tensor:
        """Call the op, with some arguments changed or added; `plan`: by that one, made for the call before."""
        if self.form != "decided" and "plan" not in changes:
            changes["plan"] = self.plan(changes.pop("slots", None))
        if "plan" in changes:
            changes["slots"] = None  # the plan has them; made again they would be copied from the host
        with parted() if self.form == "parted" else nullcontext():
            return super().step(**changes)

    def plan(self, slots: Slots | Tensor | None = None) -> Plan:
        """A plan of this call, on these slots or on those of its rows."""
        tokens = self.main.shape[1] if self.has_token_axis else 1
        ring: AnyRing = self.state.ring
        return ring.plan(self.at() if slots is None else slots, tokens if self.lengths is None else None)

    def fold(self, **options: Any) -> None:
        """Call the op that folds, on all slots or as options say."""
        self.op.fold(self.state.state, self.state.ring, **self._parameters, **options)

    @property
    def _parameters(self) -> dict[str, Any]:
        return {name: self.arguments[name] for name in self.op.parameters}

    def after(self, s: Tensor, count: Tensor) -> Tensor:
        """The states of all slots after so many rows of their rings, of what they hold, in its dtype."""
        slots = torch.arange(len(s), device=s.device)
        start: Tensor = self.state.start
        return self.op.after(self.state.ring, s, slots, start.long(), count.long(), **self._parameters)

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
        rows: Tensor = self.state.rows_of_rings(self.state.start + self.state.count, tokens)
        return rows

    def token(self, rows: Tensor, t: int) -> dict[str, Any]:
        """The arguments of token t of these rows of the batch, which have one."""
        at = (self.tokens.cumsum(0) - self.tokens)[rows] + t
        tokens = {name: tensor.flatten(0, self.token_axes - 1)[at] for name, tensor in self.activations.items()}
        return {**self.arguments, **tokens}

    def stepped(self, s: Tensor, count: Tensor) -> Iterator[tuple[int, Tensor, Token]]:
        """The first `count` tokens of every row, from these states of the batch, which change: the number of a token,
        the rows that have one, and what it gives."""
        for t in range(int(count.max()) if len(count) else 0):
            rows = (count > t).nonzero()[:, 0]
            token = self.op.stepped(self, s[rows], self.token(rows, t))
            s[rows] = token.s
            yield t, rows, token

    @property
    def alone(self: R) -> R:
        """The batch on a pool that has no other slots."""
        slots = self.slots.long()
        return replace(self.of_slots(slots), slots=torch.arange(len(slots), device=slots.device))


R = TypeVar("R", bound=ReplayInputs)


@dataclass
class Recurrence:
    """The states of slots as if every token that was accepted had been stepped, and so what replay must give.

    exact: (slots, heads, rows, cols) in float64, nothing rounded.
    plain: as plain float32 arithmetic has them, rounded to the format where a ring is folded, with the random bits of
        the slot: the distance between both is what budgets are made of. Operands of products, outputs, and what a ring
        keeps of a token, are rounded as the op may round them.
    live: (slots,): tokens since the last fold.
    """

    exact: Tensor
    plain: Tensor
    live: Tensor

    @classmethod
    def of(cls, inputs: ReplayInputs) -> Recurrence:
        """Begin with what checkpoints and rings hold."""
        pool = inputs.state
        states, live = decode(pool.data, pool.scale), pool.count.long()
        return cls(inputs.after(states.double(), live), inputs.after(states, live), live)

    def forget(self, slots: Tensor) -> None:
        """Slots whose next request begins."""
        for tensor in (self.exact, self.plain, self.live):
            tensor[slots.long()] = 0

    def begin(self, inputs: ReplayInputs) -> dict[str, tuple[Tensor, Tensor]]:
        """The states that the tokens of every row go on from, and those that tokens go on from which were accepted:
        exactly and plainly."""
        slots, fold, found = inputs.slots.long(), self._folds(inputs)[:, None, None, None], {}
        for name, stored in (("exact", self.exact[slots]), ("plain", self.stored(inputs))):
            unrounded = getattr(self, name)[slots]
            folded = torch.where(fold, stored, unrounded)
            found[name] = folded if inputs.op.from_stored else unrounded, folded
        return found

    def _folds(self, inputs: ReplayInputs) -> Tensor:
        return (inputs.tokens > 0) & (self.live[inputs.slots.long()] + inputs.tokens > inputs.state.window)

    def step(self, inputs: ReplayInputs, accepted: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of all tokens of a call, exactly and plainly; then so many tokens of every row were accepted."""
        slots, fold, outputs = inputs.slots.long(), self._folds(inputs), []
        for name, (s, folded) in self.begin(inputs).items():
            outputs.append(_outputs(inputs, s.clone()))
            after = folded.clone()
            for _ in inputs.stepped(after, accepted):
                pass
            getattr(self, name)[slots] = after
        self.live[slots] = torch.where(fold, 0, self.live[slots]) + accepted
        return outputs[0], outputs[1].to(inputs.main.dtype)

    def stored(self, inputs: ReplayInputs) -> Tensor:
        """What a fold would store for the rows of the batch, decoded."""
        slots, pool = inputs.slots.long(), inputs.state
        return decode(*encoded(self.plain[slots], pool, pool, slots, BEFORE_THE_FIRST_TOKEN))


def _outputs(inputs: ReplayInputs, s: Tensor) -> Tensor:
    """The outputs of all tokens, row by row, from these states of the batch, which change."""
    tokens = inputs.tokens
    longest = int(tokens.max()) if len(tokens) else 0
    y = s.new_zeros(len(s), longest, *s.shape[1:3])
    for t, rows, token in inputs.stepped(s, tokens):
        y[rows, t] = token.y
    return y[torch.arange(longest, device=s.device) < tokens[:, None]]


def _expected(inputs: ReplayInputs) -> Expected:
    """What a call must give by the recurrence: outputs, and the states of rows that fold; others stay."""
    batch = inputs.alone
    model, folds = Recurrence.of(batch), inputs.folds[:, None, None, None]
    state = torch.where(folds, model.exact, inputs.states.double())
    plain = torch.where(folds, model.stored(batch), inputs.states)
    return Expected(*model.step(batch, inputs.tokens), state, plain, {})


def rings_after(inputs: ReplayInputs) -> tuple[ReplayInputs, dict[str, Tensor]]:
    """Inputs with their tokens in their rings, as plain arithmetic has them, and in float64 what is kept rounded."""
    found, batch = inputs.fresh(), inputs.alone
    pool, begun = found.state, Recurrence.of(batch).begin(batch)
    exact = {name: tensor.double() for name, tensor in pool.kept.items() if name in inputs.op.measured}
    for name, tensors in (("exact", exact), ("plain", pool.kept)):
        for t, rows, token in batch.stepped(begun[name][0].clone(), inputs.tokens):
            slot = inputs.slots[rows].long()
            row = (pool.start + pool.count + t)[slot].long() % pool.ring.length
            for kept, tensor in tensors.items():
                tensor[slot, :, row] = token.kept[kept].to(tensor.dtype)
    return found, exact


@dataclass(frozen=True)
class AnyReplayCase(StateCase):
    """One problem for an op that replays: one for an op that steps, with a window, and the form of the call."""

    batch: int = 4
    _: KW_ONLY
    window: int = 16
    spare: int = 0  # rows that the ring has beside those it needs
    form: str = "decided"
    pool: ClassVar[type[ReplayPool]]

    @property
    def forms(self: C) -> tuple[C, ...]:
        return tuple(replace(self, form=form) for form in FORMS)

    @property
    @abstractmethod
    def op(self) -> ProvenReplay: ...

    @property
    @abstractmethod
    def kept_bytes(self) -> int: ...  # of a token in the ring of a slot

    @abstractmethod
    def kept_tokens(self, source: Source, length: int) -> Mapping[str, Tensor]: ...  # of all slots

    @abstractmethod
    def slow_down(self, arguments: dict[str, Any]) -> None:
        """Make decays so slow that a state is still seen behind a window."""

    @property
    def several(self) -> bool:
        return self.tokens > 1

    def same_when_packed(self, tokens: int) -> bool:
        return tokens > 0  # there is no plan for none

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
        stored = stores * folding * (self.slot_bytes + self.scale_bytes)
        return super().counted_bytes(0) + round(stored + rows * self.kept_bytes) + 8 * self.batch

    def make_inputs(self, device: torch.device, seed: int = 0) -> ReplayInputs:
        """Random inputs. Rings that fold and rings that do not, of which the first wraps; NaN in all rows of rings that
        are not live."""
        step = super().make_inputs(device, seed)
        self.slow_down(step.arguments)
        pool = self.pool.of(step.state, self._ring(Source(device, seed + (1 << 40)), step.slots.long()))
        pool.spoil_dead_rows()
        return ReplayInputs(self.op, pool, step.arguments, step.slots, step.lengths, form=self.form)

    def _ring(self, source: Source, slots: Tensor) -> AnyRing:
        length = self.window + max(1, self.tokens) + self.spare
        few = replace(self, slots=min(self.slots, self.different)).kept_tokens(source, length)
        kept = {name: repeated(tensor, self.slots) for name, tensor in few.items()}
        start = (length * source.uniform(self.slots)).int()
        count = ((self.window + 1) * source.uniform(self.slots)).int()
        start[slots[:1]] = length - 1
        count[slots] = torch.tensor(self.live, dtype=torch.int32, device=slots.device)
        return self.pool.kind(**kept, start=start, count=count, window=self.window)  # type: ignore[call-arg]


C = TypeVar("C", bound=AnyReplayCase)
