"""Ring and DeltaRing: what tokens brought since a checkpoint, for replay; Plan: which rows of a batch fold theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from flashstate.basics import LARGEST_WINDOW
from flashstate.errors import (
    ACTIVATION_DTYPES,
    check_contiguous,
    check_device,
    check_flag,
    check_int,
    check_list,
    check_tensor,
)
from flashstate.state import actions
from flashstate.state.signature import Describes, describe, describe_aligned, signature_of, unless_known
from flashstate.state.slots import Slots, as_slots
from flashstate.state.state import State, check_slots_of

FIELDS = 8  # numbers that a plan has of a row
_generations = WeakTensorKeyDictionary()  # by the counts of a ring, which all its layers share
UNUSED = {  # tables of slots, and why
    "replay": (("write", "accepted", "parents", "snapshot_rows"), "keeps tokens in the slot it reads"),
    "folding": (("accepted", "parents", "snapshot_rows", "cu_seqlens"), "has no new tokens"),
}


class AnyRing(Describes):
    """What rings of all ops share: tensors of tokens since a checkpoint, cursors into them, and a window. Its classes
    are dataclasses, which name the tensors that ops append to in `written`."""

    start: Tensor
    count: Tensor
    window: int
    folds_by_hand: bool

    axes: ClassVar[Mapping[str, tuple[str, ...]]]  # of every tensor that is written
    of_rows: ClassVar[str]  # the tensor with a value for every row of a state
    of_cols: ClassVar[str]  # the tensor with one for every column, which heads share
    words: ClassVar[Mapping[str, str]] = {}  # what errors call axes whose names are letters

    def __post_init__(self) -> None:
        check_int("window", self.window, 1, LARGEST_WINDOW)
        check_flag("folds_by_hand", self.folds_by_hand)
        self._check_tensors()
        if self.start is self.count:
            raise ValueError("start and count must be two tensors, got one")

    def axes_of(self, name: str) -> tuple[str, ...]:
        """The axes of one of its tensors."""
        return self.axes[name]

    def dtypes_of(self, name: str) -> tuple[torch.dtype, ...]:
        """The dtypes that one of its tensors may have."""
        return ACTIVATION_DTYPES

    @unless_known
    def _check_tensors(self) -> None:
        first = self.written[0]
        sizes: dict[str, int] = {}
        for name in self.written:
            axes, tensor = self.axes_of(name), getattr(self, name)
            check_tensor(name, tensor, axes, tuple(sizes.get(axis) for axis in axes), dtypes=self.dtypes_of(name))
            sizes = dict(zip(axes, tensor.shape, strict=True)) | sizes
        for name in ("start", "count"):
            check_tensor(name, getattr(self, name), ("slots",), (sizes["slots"],), dtypes=(torch.int32,))
            check_contiguous(name, getattr(self, name))
        for name in (*self.written[1:], "start", "count"):
            check_device(name, getattr(self, name), getattr(self, first).device, first)
        for name in self.written:
            self._check_slots_of(name)
        self._check_divides(sizes)
        if self.length < self.window + (not self.folds_by_hand):
            least = f"the window, {self.window}, and the tokens of the longest call"
            got = tuple(getattr(self, first).shape)
            raise ValueError(f"{first} must have a length of {least}, got shape {got}")

    def _check_slots_of(self, name: str) -> None:
        """Raise unless slots of a tensor, and heads in them, lie apart, and none reaches too far."""
        tensor = getattr(self, name)
        if tensor.numel() == 0:
            raise ValueError(f"{name} must not be empty, got shape {tuple(tensor.shape)}")
        reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
        if reach >= 1 << 31:
            raise ValueError(f"{name} must have fewer than 2^31 elements per slot, got {reach}")
        check_slots_of(name, tensor, tensor.shape[2:], "group" if self.axes_of(name)[1] == "groups" else "head")

    def _check_divides(self, sizes: Mapping[str, int]) -> None:
        """Raise unless what heads share has a number that divides theirs."""
        few, many = self.axes[self.of_cols][1], self.axes[self.of_rows][1]
        if sizes[many] % sizes[few]:
            divisors, whole = (self.words.get(axis, axis) for axis in (few, many))
            found = f"divides the {sizes[many]} {whole}, got {sizes[few]}"
            raise ValueError(f"{self.of_cols} must have a number of {divisors} that {found}")

    @property
    def length(self) -> int:
        """Rows there are, live or not."""
        first: Tensor = getattr(self, self.written[0])
        return first.shape[2]

    @cached_property
    def head_strides(self) -> dict[str, int]:
        """From head to head, or group to group, of the tensors that are written, each 0 where these lie side by
        side."""
        found = {name: getattr(self, name) for name in self.written}
        dense = {name: t.shape[1] == 1 or t.stride(1) == t.shape[2:].numel() for name, t in found.items()}
        return {name: 0 if dense[name] else t.stride(1) for name, t in found.items()}

    @cached_property
    def signature(self) -> int:
        """Stands for all that a launch depends on but the addresses."""
        tensors = [getattr(self, name) for name in self.written]
        wide = [describe_aligned(tensor) if tensor.dim() == 4 else describe(tensor) for tensor in tensors]
        cursors = describe(self.start), describe(self.count)
        return signature_of(type(self).__name__, *wide, *cursors, self.window, self.folds_by_hand)

    @property
    def longest_call(self) -> int:
        """The most tokens a row may have in a call: appended rows must not meet live ones."""
        return min(self.window, self.length - self.window) or self.window

    def plan(self, slots: Slots | Tensor | None = None, tokens: int | None = None) -> Plan:
        """Which rows of a batch fold, for one step of a model: shared by all layers whose rings share these cursors.

        slots: where the rows live; None: row b is slot b. With cu_seqlens, and then max_len, tokens are packed.
        tokens: per row and call; of packed tokens left out.

        One small launch, which a CUDA graph captures; the host does not wait.
        """
        return plan_of(self, slots, tokens)

    def commit(self, plan: Plan, accepted: Tensor | None = None) -> None:
        """Keep the first `accepted` tokens of every row of the step that was planned; call it once, after all layers.

        accepted: (batch,) int32 or int64, from 0 to the tokens of a row; None: all. A row that folded drops what it
        folded. Numbers out of range keep none, or all, and set the flag that `flashstate.check_faults()` reports. Of a
        plan of a pool, slots that the pool has cleared, copied to or written since are left alone.

        One small launch, which a CUDA graph captures; the host does not wait.
        """
        check_plan(plan, self)
        check_list("accepted", accepted, plan.batch, device=self.count.device)
        actions.commit(self, plan, accepted)

    def folded(self, slots: Slots | Tensor | None = None, tokens: Tensor | int | None = None) -> None:
        """Drop live rows that were folded in place, by `mamba2_fold` or `gated_delta_fold`, in all layers: the first
        `tokens`, None: all.

        slots, tokens: as the folds had them. One small launch, which a CUDA graph captures.
        """
        where = as_slots(slots)
        refuse_tables(where, "folding")
        each, most = tokens_to_fold(tokens, self, self.check_slots(where))
        actions.drop_folded(self.start, self.count, self.length, where, each, most)

    def check_slots(self, slots: Slots | None) -> int:
        """How many rows these slots have; raises where they are not for a ring."""
        refuse_tables(slots, "replay")
        if slots is None:
            return len(self.count)
        slots.check_device(self.count.device, "ring")
        return len(slots.read)


@dataclass(frozen=True, eq=False)
class Ring(AnyRing):
    """The inputs of one layer since its checkpoint, for all slots. `mamba2_replay` appends to x, B and dt in place,
    `commit` moves start and count on; this object only describes them.

    x: (slots, heads, length, rows) float32, bfloat16 or float16, the dtype of the x of calls.
    B: (slots, groups, length, cols), the dtype of their B.
    dt: (slots, heads, length) float32, after bias and softplus.
    start, count: (slots,) int32 each: the oldest live row, and how many rows from there on, with a wrap at `length`,
        are live. Shared by all layers; contiguous.
    window: the most live rows, 1 to 64; a call has at most as many tokens, and `length` must have room for both.
    folds_by_hand: True lets `length` be the window itself. Then the caller folds with `mamba2_fold` before live and new
        rows are more than that: `debug()` finds where it did not, and nothing else does.

    The slot, head and group axes of x, B and dt may have any stride; the rows of a head or group are contiguous, and a
    slot reaches over fewer than 2^31 elements. Rows that are not live may hold anything. The tensors stay what they
    are: their dtypes, shapes and strides must not change in place.
    """

    written: ClassVar = ("x", "B", "dt")  # by ops
    axes: ClassVar = {
        "x": ("slots", "heads", "length", "rows"), "B": ("slots", "groups", "length", "cols"),
        "dt": ("slots", "heads", "length"),
    }  # fmt: skip
    of_rows, of_cols = "x", "B"

    x: Tensor
    B: Tensor
    dt: Tensor
    start: Tensor
    count: Tensor
    window: int
    folds_by_hand: bool = False

    def dtypes_of(self, name: str) -> tuple[torch.dtype, ...]:
        return (torch.float32,) if name == "dt" else ACTIVATION_DTYPES


@dataclass(frozen=True, eq=False)
class DeltaRing(AnyRing):
    """What the delta rule has added to one layer since its checkpoint, for all slots. `gated_delta_replay` appends to
    k, u and decay in place, `commit` moves start and count on; this object only describes them.

    k: (slots, H, length, K) float32, bfloat16 or float16: keys as calls bring them, and in their dtype.
    u: (slots, HV, length, V) float32, bfloat16 or float16: corrected values, rounded to its dtype before anything uses
        them. float16 saturates at 65504, and has fewer bits below 6e-5.
    decay: (slots, HV, length) float32: the logarithm of alpha. With a decay per channel, as KDA has it,
        (slots, HV, length, K): a as calls bring it, and in its dtype.
    start, count: (slots,) int32 each: the oldest live row, and how many rows from there on, with a wrap at `length`,
        are live. Shared by all layers, also those with a Ring; contiguous.
    window: the most live rows, 1 to 64; a call has at most as many tokens, and `length` must have room for both.
    folds_by_hand: True lets `length` be the window itself. Then the caller folds with `gated_delta_fold` before live
        and new rows are more than that: `debug()` finds where it did not, and nothing else does.

    The slot and head axes of k, u and decay may have any stride; the rows of a head are contiguous, and a slot reaches
    over fewer than 2^31 elements. Rows that are not live may hold anything. The tensors stay what they are: their
    dtypes, shapes and strides must not change in place.
    """

    written: ClassVar = ("k", "u", "decay")  # by ops
    axes: ClassVar = {
        "k": ("slots", "H", "length", "K"), "u": ("slots", "HV", "length", "V"), "decay": ("slots", "HV", "length"),
    }  # fmt: skip
    of_rows, of_cols = "u", "k"
    words: ClassVar = {"H": "heads", "HV": "value heads"}

    k: Tensor
    u: Tensor
    decay: Tensor
    start: Tensor
    count: Tensor
    window: int
    folds_by_hand: bool = False

    @property
    def per_channel(self) -> bool:
        """Whether every column of a state has a decay of its own."""
        return self.decay.dim() == 4

    def axes_of(self, name: str) -> tuple[str, ...]:
        channels = name == "decay" and isinstance(self.decay, Tensor) and self.per_channel
        return (*self.axes[name], "K") if channels else self.axes[name]

    def dtypes_of(self, name: str) -> tuple[torch.dtype, ...]:
        scalar = name == "decay" and isinstance(self.decay, Tensor) and not self.per_channel
        return (torch.float32,) if scalar else ACTIVATION_DTYPES


@dataclass(frozen=True, eq=False)
class Plan(Describes):
    """What one step of a model does with every row of its batch; made by `StatePool.plan`, or by `plan`
    of a Ring or a DeltaRing.

    slots: where the rows live, and which tokens they have; None: row b is slot b.
    tokens: the most that a row has.
    rows: (batch, 8) int32, rows that fold first, then those that do not, then those that are padding or have no tokens.
        Of each its place in the batch, its slot (-1: none), the start and count of its ring, its first token on the
        token axis, how many it has, the generation of its slot, and a zero.
    parts: (2,) int32: how many rows fold, and how many have tokens and a slot.
    count, window: of the rings that it was made for, and that it is for alone.
    generation: (slots,) int32, of the pool that made it: how often slots got another request. None: of a ring alone.

    The tensors are on the device, and filled when the plan is made: a CUDA graph that captured it fills them anew.
    """

    slots: Slots | None
    tokens: int
    rows: Tensor
    parts: Tensor
    count: Tensor
    window: int
    generation: Tensor | None = None

    def __post_init__(self) -> None:
        if self.slots is not None and not isinstance(self.slots, Slots):
            raise TypeError(f"slots must be a Slots or None, got {type(self.slots).__name__}")
        check_int("window", self.window, 1, LARGEST_WINDOW)
        check_int("tokens", self.tokens, 0, self.window)
        check_tensor("count", self.count, ("slots",), (None,), dtypes=(torch.int32,))
        batch = len(self.count) if self.slots is None else len(self.slots.read)
        check_tensor("rows", self.rows, ("batch", "numbers"), (batch, FIELDS), dtypes=(torch.int32,))
        check_tensor("parts", self.parts, ("numbers",), (2,), dtypes=(torch.int32,))
        for name in ("rows", "parts"):
            check_contiguous(name, getattr(self, name))
            check_device(name, getattr(self, name), self.count.device, "count")

    @property
    def batch(self) -> int:
        return self.rows.shape[0]

    @cached_property
    def signature(self) -> int:
        """Stands for all that a launch depends on but the addresses."""
        of_slots = None if self.slots is None else self.slots.signature
        return signature_of("plan", of_slots, self.tokens, describe(self.rows))


def generation_of(ring: AnyRing) -> Tensor:
    """Return the tensor, (slots,) int32, that counts for all pools of a ring how often slots were given away."""
    if ring.count not in _generations:
        with torch.inference_mode(False):  # else only inference mode could count on
            _generations[ring.count] = torch.zeros_like(ring.count)
    return _generations[ring.count]


def plan_of(ring: AnyRing, slots: Slots | Tensor | None, tokens: int | None, generation: Tensor | None = None) -> Plan:
    """Plan a step of these slots. `Ring.plan` has the arguments; generation: (slots,) int32, of a pool."""
    where = as_slots(slots)
    batch, longest = ring.check_slots(where), tokens
    if where is not None and where.cu_seqlens is not None:
        if tokens is not None:
            raise ValueError(f"tokens is not for packed tokens, whose number slots.cu_seqlens says, got {tokens}")
        longest = where.max_len
    else:
        check_int("tokens", tokens, 1, ring.window)
    longest = check_call_length(ring, longest)
    with torch.inference_mode(False):  # else only inference mode could fill them again
        rows = torch.empty(batch, FIELDS, dtype=torch.int32, device=ring.count.device)
        parts = torch.empty(2, dtype=torch.int32, device=ring.count.device)
    actions.make_plan(rows, parts, ring.start, ring.count, ring.window, where, longest, generation)
    return Plan(where, longest, rows, parts, ring.count, ring.window, generation)


def check_ring(ring: AnyRing, state: State, name: str = "ring", kind: type[AnyRing] = Ring) -> None:
    """Raise unless a ring is for the states of a layer."""
    if not isinstance(ring, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, got {type(ring).__name__}")
    slots, heads, rows, cols = state.data.shape
    of_rows, of_cols = (slots, heads, ring.length, rows), (slots, None, ring.length, cols)
    for kept, sizes in ((ring.of_rows, of_rows), (ring.of_cols, of_cols)):
        check_tensor(f"{name}.{kept}", getattr(ring, kept), ring.axes[kept], sizes, device=state.data.device)


def check_call_length(ring: AnyRing, longest: int | None) -> int:
    """The most tokens a row of a call has, if there is room for them."""
    if longest is None:
        raise ValueError("packed tokens need slots.max_len, the most tokens a row has")
    if longest > ring.window:
        raise ValueError(f"a call may have as many tokens per row as the window, {ring.window}, got {longest}")
    if longest > ring.longest_call:
        room = f"the ring has {ring.length} rows, so beside its window of {ring.window}"
        raise ValueError(f"{room} a call may have {ring.longest_call} tokens per row, got {longest}")
    return longest


def refuse_tables(slots: Slots | None, use: str) -> None:
    """Raise where slots have tables that replay or folding has no use for."""
    names, why = UNUSED[use]
    for name in names:
        if slots is not None and getattr(slots, name) is not None:
            raise ValueError(f"slots.{name} is not for {use}, which {why}")


def check_plan(plan: Plan, ring: AnyRing) -> None:
    """Raise unless a plan was made for this ring, or for one that shares its cursors."""
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a Plan, got {type(plan).__name__}")
    if plan.window != ring.window:
        raise ValueError(f"plan was made for rings with a window of {plan.window}, but this one has {ring.window}")
    if torch.compiler.is_compiling():  # then tensors have no addresses
        return
    if (plan.count.device, plan.count.data_ptr()) != (ring.count.device, ring.count.data_ptr()):
        raise ValueError("plan was made for rings of other slots: their start and count are not those of this ring")


def tokens_to_fold(tokens: Tensor | int | None, ring: AnyRing, batch: int) -> tuple[Tensor | None, int]:
    """How many live rows to fold, if it can say that: of each row, or the same of all; -1: as many as there are."""
    if isinstance(tokens, Tensor):
        check_list("tokens", tokens, batch, device=ring.count.device)
        return tokens, -1
    if tokens is not None:
        check_int("tokens", tokens, 0, ring.window)
    return None, -1 if tokens is None else tokens
