"""State, Slots, Mamba3State, Rotary, rings and plans: what cannot be made of them is refused by name, and refused calls
change nothing."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from refusals import (
    CASE,
    ENTRIES,
    MAMBA3,
    META,
    OTHER_RING,
    REPLAY,
    SLOTS,
    STANDS,
    TRANSPOSED,
    Arguments,
    Change,
    Refusal,
    at,
    both,
    columns,
    fields_of,
    given,
    of_tensor,
    on_meta,
    only,
    other,
    refuses_all,
    resized,
    scaled_arguments,
    slots_arguments,
    state_arguments,
    step_arguments,
    transposed,
    wrong,
    wrong_ints,
)
from torch import Tensor

from flashstate import DeltaRing, Mamba3State, Plan, Ring, Rotary, Slots, State
from flashstate.errors import INDEX_DTYPES
from flashstate.state.formats import FORMATS

Strides = tuple[int, ...]
WITHIN, OVERLAP = "^data must be contiguous within a head: strides", "^data has overlapping {}: an axis of stride"
REACH = r"^data must have slots that reach over fewer than 2\^31 elements, got 2147483648"
GAPS: list[tuple[Strides, Strides]] = [((3, 2, 4, 8), (80, 40, 1, 5)), ((2, 3, 2, 4, 8), (300, 100, 40, 9, 1))]
SHORT: list[tuple[str, Strides, Strides, int, int]] = [  # strides, that which is too short, and what it must be
    ("slots", (3, 2, 4, 8), (63, 32, 8, 1), 63, 64),
    ("slots", (3, 5, 2, 4, 8), (64, 191, 32, 8, 1), 191, 192),
    ("slots or heads", (3, 2, 4, 8), (64, 31, 8, 1), 31, 32),
]


def laid_out(shape: Strides, strides: Strides) -> Change:
    """Other data: zeros of this shape, in a memory that has room for these strides."""
    return given(data=torch.zeros(4000).as_strided(shape, strides))


STATES: list[Refusal] = [
    (only("data", Tensor.tolist), "^data must be a tensor, got list", TypeError),
    (only("data", Tensor.double), "^data must be float32 or .* or float8_e4m3fn, got float64", TypeError),
    (only("data", on_meta), "^seed is on cpu, but the state is on meta"),
    (only("data", lambda t: t[0]), r"^data must have shape \(slots, heads, rows, cols\), got \("),
    *wrong("seed", "slots", "", (torch.int64,), "whole"),
    *[(given(data=torch.zeros(*(2 * (j != i) for j in range(4)))), "^data must not be empty") for i in range(4)],
    (given(data=torch.zeros(2, 2, 0, 2, 2)), "^data must not be empty"),
    *[(given(data=torch.zeros(3, 4, 4, 4).transpose(*axes)), WITHIN) for axes in ((1, 2), (1, 3), (0, 3))],
    *[(laid_out(*gaps), rf"{WITHIN} \((any, )+any, 8, 1\), got \(") for gaps in GAPS],
    *[(laid_out(*apart), f"{OVERLAP.format(what)} {got}, which must be {least}") for what, *apart, got, least in SHORT],
    (given(data=torch.zeros(4, device=META).as_strided((1, 2, 1, 2), (1, (1 << 31) - 2, 2, 1))), REACH),
    (given(scale=torch.ones(3, 2, 4)), "^scale is not for float16"),
    (given(rounding="up"), "^rounding must be one of nearest, .* got 'up'"),
    (only("data", Tensor.float), "^rounding='stochastic' is not for float32, which has"),
    (given(rounding="stochastic_hw"), "^rounding='stochastic_hw' needs an NVIDIA GPU .* cpu"),
    (given(seed=None), r"^rounding='stochastic' needs seed: \(slots,\) int64"),
    (only("data", lambda t: t[None]), "^seed is not for snapshots"),
    *wrong_ints("rounds", "1 to 16", 0, 17),
    *wrong_ints("stream", "0 to 4294967295", -1, 1 << 32),
]  # fmt: skip
SCALES: list[Refusal] = [
    *wrong("scale", "slots heads rows", "", (torch.float32,), "slot"),
    (only("scale", lambda t: t.as_strided(t.shape, (7, 4, 1))), "^scale has overlapping slots: an axis of stride 7, "),
    (only("data", transposed), r"^data of dtype int8 must not be transposed"),
    (given(data=torch.zeros(400, dtype=torch.int8).as_strided((3, 2, 4, 8), (100, 40, 8, 1))),
     "^data must be contiguous within a slot.*only heads of formats without sca"),
    (given(scale=None), r"^int8 needs scale: \(slots, heads, rows\) float32, one per row"),
]  # fmt: skip
ONE = torch.ones(1, 2, 3, 5)
TO_MOVE: list[Refusal] = [  # out of a State, and into one
    (given(call=lambda s: s.read([0, 4])), "^slots must be from 0 to 3, got 4"),
    (given(call=lambda s: s.read(None)), "^slots must be an int, a sequence of ints or", TypeError),
    (given(call=lambda s: s.read(torch.ones(1))), "^slots must be int32 or int64, got float32", TypeError),
    (given(call=lambda s: State(s.data[:, None]).read(0)), r"^state must have data \(slots, heads"),
    (given(call=lambda s: s.write(-1, ONE)), "^slots must be from 0 to 3, got -1"),
    (given(call=lambda s: s.write([1, 1], ONE.repeat(2, 1, 1, 1))), "^slots must be distinct, got slot 1"),
    (given(call=lambda s: s.write([1, 2], ONE)), r"^values must have shape \(slots=2, "),
    (given(call=lambda s: s.write(1, ONE.double())), "^values must be float32 or", TypeError),
]
ADVANCED: list[Refusal] = [
    *SLOTS,
    (only("state", lambda s: State(s.data)), "^advance needs a state with a seed"),
    (both(only("state", on_meta), given(slots=None)), "^state is on meta; flashstate runs on cuda"),
]

TABLES: list[Refusal] = [
    *wrong("read", "batch T", "batch T", INDEX_DTYPES, "rows", elsewhere="^write is on cpu, read on meta"),
    *[refusal for name, axes, layout in (
          ("write", "batch T", "rows"), ("parents", "batch T", "rows"), ("accepted", "batch", "whole"),
          ("snapshot_rows", "batch", "whole"), ("cu_seqlens", "batch", "whole"))
      for refusal in wrong(name, axes, "T", INDEX_DTYPES, layout, elsewhere="^{name} is on meta, read on cpu")],
    (given(accepted=None), r"^accepted must be given for read \(batch, n\)"),
    *[(only(name, lambda t: t[:, :3]), rf"^{name} {ENTRIES.format(4)} \(3, 3\)") for name in ("write", "parents")],
    (given(cu_seqlens=None), "^max_len is for packed .* with cu_seqlens"),
    *wrong_ints("max_len", "0 to 2147483647", -1, 1 << 31),
    *wrong_ints("null", "-9223372036854775808 to .*", 1 << 63, -(1 << 63) - 1),
    (given(padding="ones"), "^padding must be one of zero, fresh, keep, got 'ones'"),
    (given(at_least_one=1), "^at_least_one must be True or False, got 1", TypeError),
    (lambda a: {"at_least_one": True, "read": a["read"][:, 0]}, "^at_least_one is for accepted counts of read"),
]  # fmt: skip

KEPT: list[Refusal] = [  # of Mamba3State
    *[refusal for refusal in wrong("ssm", "slots", "slots", FORMATS, "slot", STANDS, "^k is on cpu, but the stat")
      if "have shape" not in refusal[1]],
    *wrong("k", "slots R H N", "R", layout="slot"),
    *wrong("v", "slots H D", layout="slot"),
    *wrong("angle", "slots H S", "S", (torch.float32,), "slot"),
    (only("k", lambda t: t[:, :0]), r"^k must have a rank of 1 or more, got shape \(7, 0, 4"),
    *[(given(angle=torch.zeros(7, 4, n)), f"^angle must have 1 to .* 4 .* per head, got {n}$") for n in (0, 5)],
    (of_tensor("ssm", Tensor.char), "^ssm of dtype int8 needs a scale"),
    (of_tensor("ssm", lambda t: State(t[None])), r"^ssm must have data \(slots, "),
    (of_tensor("ssm", lambda t: State(transposed(t))), TRANSPOSED),
]  # fmt: skip
PAIRING: list[Refusal] = [(given(pairing="both"), "^pairing must be one of interleaved, halved, got 'both'")]


HUGE, INT32 = torch.zeros(7, 4, 7, 1 << 27, device=META), (torch.int32,)
HERE, OF_COUNT = "^{name} is on meta, but x is on cpu", "^{name} is on meta, but count is on cpu"
RINGS: list[Refusal] = [
    *wrong("x", "slots heads length rows", "slots heads length rows", layout="slot", elsewhere="^B is on cpu, but x"),
    *wrong("B", "slots groups length cols", "groups cols", layout="slot", elsewhere=HERE),
    *wrong("dt", "slots heads length", "", (torch.float32,), "slot", elsewhere=HERE),
    *[refusal for name in ("start", "count") for refusal in wrong(name, "slots", "", INT32, "whole", elsewhere=HERE)],
    (only("B", lambda t: resized(t, 1, 1)), "^B must have a number of groups that divides the 4 heads, got 3"),
    (lambda a: {"start": a["count"]}, "^start and count must be two tensors, got one"),
    (lambda a: {n: HUGE if n == "x" else on_meta(t) for n, t in a.items()}, r"fewer than 2\^31"),
    (only("B", lambda t: t[:, :0]), "^B must not be empty, got shape"),
    *wrong_ints("window", "1 to 64", 0, 65),
    (given(window=7), "^x must have a length of the window, 7, and the tokens of "),
    (given(folds_by_hand=1), "^folds_by_hand must be True or False", TypeError),
]
DELTA_RINGS: list[Refusal] = [
    (only("u", lambda t: resized(t, 0, 1)), r"^u must have shape \(slots=7, HV, length=7, V\)"),
    (only("k", lambda t: resized(t, 1, 1)), "^k must have a number of heads that divides the 4 value heads, got 3"),
    (only("decay", Tensor.half), "^decay must be float32, got float16", TypeError),
    (only("decay", lambda t: t[:, :2].clone()), r"^decay must have shape \(slots=7, HV=4, length=7\)"),
    (given(decay=torch.ones(7, 4, 7, 9)), r"^decay must have shape \(slots=7, HV=4, length=7, K=8\)"),
]
PLANS: list[Refusal] = [
    *wrong("rows", "batch numbers", "", INT32, "whole", elsewhere=OF_COUNT),
    *wrong("parts", "numbers", "", INT32, "whole", elsewhere=OF_COUNT),
    *wrong("count", "slots", "slots", INT32, elsewhere="^rows is on cpu, but count is on meta"),
    (only("slots", lambda s: s.read), "^slots must be a Slots or None, got Tensor", TypeError),
    (given(slots=None), r"^rows must have shape \(batch=7, numbers=8\)"),
    *wrong_ints("tokens", "0 to 4", -1, 5),
    *wrong_ints("window", "1 to 64", 0, 65),
]


def ring_call(**more: Any) -> Arguments:
    """A ring of 7 rows, and what its methods take."""
    call = step_arguments(replace(REPLAY, tokens=3))
    return {"ring": call["ring"], "slots": call["slots"], **more}


def delta_ring() -> Arguments:
    ring = ring_call()["ring"]
    cursors = {"start": ring.start, "count": ring.count, "window": 4}
    return {"k": ring.B, "u": ring.x, "decay": torch.zeros(7, 4, 7), **cursors}


BOUNDS, NOT_KEPT = torch.tensor([0, 2, 2, 5]), "is not for replay, which keeps tokens in"
PLANNED: list[Refusal] = [
    *SLOTS,
    *wrong_ints("tokens", "1 to 4", 0, 5),
    (given(tokens=4), "^the ring has 7 rows, so beside its window of 4 a call may have 3 tokens per row"),
    (at(cu_seqlens=BOUNDS, max_len=2), "^tokens is not for packed tokens, whose number slots.cu"),
    (at(write=torch.clone), f"^slots.write {NOT_KEPT}"),
    (both(at(cu_seqlens=BOUNDS), given(tokens=None)), "^packed tokens need slots.max_l"),
    (both(only("ring", on_meta), given(slots=None)), "^state is on meta; flashstate runs on cuda and cpu"),
]
COMMITTED: list[Refusal] = [
    *wrong("accepted", "batch", "", INDEX_DTYPES, "whole"),
    (only("plan", lambda p: p.rows), "^plan must be a Plan, got Tensor", TypeError),
    (only("plan", lambda p: replace(p, count=p.count.clone())), OTHER_RING),
    (only("plan", on_meta), OTHER_RING),
    (other("ring", window=3), "^plan was made for .* of 4, "),
]
DROPPED: list[Refusal] = [
    (given(slots=None), r"^tokens must have shape \(batch=7\), got \(3,\)"),
    (at(write=torch.clone), f"^slots.write {NOT_KEPT}"),
    (at(parents=columns(1)), "^slots.parents is not for folding, which has no new tokens"),
    (only("slots", on_meta), "^slots are on meta, but the ring is on cpu"),
    *wrong_ints("tokens", "0 to 4", 5),
]


def state_call() -> Arguments:
    return {"state": State(torch.zeros(4, 2, 3, 5)), "call": lambda state: state.read(0)}


Called = tuple[Any, Any, list[Refusal]]  # a function, what makes the arguments of a right call, and what is wrong
CALLS: dict[str, Called] = {
    "State": (State, state_arguments, STATES),
    "State with scales": (State, scaled_arguments, SCALES),
    "read and write": (lambda state, call: call(state), state_call, TO_MOVE),
    "advance": (lambda state, slots, **_: state.advance(slots), lambda: step_arguments(CASE), ADVANCED),
    "Slots": (Slots, slots_arguments, TABLES),
    "Rotary": (lambda **a: Rotary(torch.zeros(1, 3), **a), lambda: {"pairing": None}, PAIRING),
    "Mamba3State": (Mamba3State, lambda: fields_of(step_arguments(MAMBA3)["state"]), KEPT),
    "Ring": (Ring, lambda: fields_of(ring_call()["ring"]), RINGS),
    "DeltaRing": (DeltaRing, delta_ring, DELTA_RINGS),
    "Plan": (Plan, lambda: fields_of(ring_call()["ring"].plan(torch.tensor([5, 0, 3]), 2)), PLANS),
    "plan": (lambda ring, **a: ring.plan(**a), lambda: ring_call(tokens=2), PLANNED),
    "commit": (
        lambda ring, **a: ring.commit(**a),
        lambda: {"ring": (ring := ring_call()["ring"]), "plan": ring.plan(torch.tensor([5, 0, 3]), 2),
                 "accepted": torch.tensor([1, 0, 2])},
        COMMITTED,
    ),
    "folded": (lambda ring, **a: ring.folded(**a), lambda: ring_call(tokens=torch.tensor([1, 2, 0])), DROPPED),
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("call", CALLS)
def test_wrong_calls_are_refused_by_name_and_change_nothing(call: str) -> None:
    function, right, refusals = CALLS[call]
    refuses_all(function, right(), refusals)


@pytest.mark.parametrize(("kind", "most"), [(State, 2), (Slots, 1), (Rotary, 1)])
def test_options_are_given_by_their_names(kind: Any, most: int) -> None:
    with pytest.raises(TypeError, match="positional"):
        kind(*[torch.zeros(1)] * (most + 1))
