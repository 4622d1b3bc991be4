"""Ops and what they take: every check that follows from a declaration once, then what an op or an object alone refuses.
Refused calls do no harm."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from refusals import (
    CASE,
    DELTA,
    MAMBA3,
    META,
    REPLAY,
    SLOTS,
    STANDS,
    TRANSPOSED,
    Arguments,
    Change,
    Refusal,
    T,
    at,
    both,
    columns,
    cut,
    expanded,
    fields_of,
    given,
    of_each,
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
    strided,
    transposed,
    wrong,
    wrong_ints,
)
from torch import Tensor

from flashstate import DeltaRing, Mamba3State, Plan, Ring, Rotary, Slots, State, mamba2_fold
from flashstate import gated_delta_fold as delta_fold
from flashstate.errors import INDEX_DTYPES
from flashstate.launch.call import OPS
from flashstate.proof import ConvCase, DeltaReplayCase
from flashstate.state.formats import FORMATS

CONV = ConvCase(3, 5, 4, x="float16")
HALVES = {"format": "float16", "rounding": "stochastic", "x": "float16", "qk": "float16"}
DELTA_REPLAY = DeltaReplayCase(3, 4, 2, 6, 8, **HALVES, window=4)
SEVERAL, PACKED = {"tokens": T}, {"tokens": T, "packed": True}
NO_UPDATE, STOCHASTIC = given(update=False), {"rounding": "stochastic"}


def states(name: str, elsewhere: str) -> list[Refusal]:
    """Of a tensor that stands for a State, or for snapshots."""
    axes = {"snapshots": "batch T heads rows cols"}.get(name, "slots heads rows cols")
    of_all = wrong(name, axes, axes, FORMATS, "slot", STANDS, elsewhere)
    return [
        *(refusal for refusal in of_all if "have shape" not in refusal[1]),
        (of_tensor(name, lambda t: t[0]), rf"^{name} must have shape \({axes.split()[0]}, "),
        (of_tensor(name, Tensor.char), rf"^{name} of dtype int8 needs a scale: pass State\(data,"),
        (of_tensor(name, lambda t: State(transposed(t))), TRANSPOSED),
    ]


# What follows from a declaration, and slots, states and snapshots: of one op for all

DECLARED: list[Refusal] = [
    (only("x", Tensor.double), "^x must be float32 or bfloat16 or float16, got float64", TypeError),
    (only("x", lambda t: resized(t, 1, 1)), r"^x must have shape \(batch, heads=4, rows=6\)"),
    (only("x", on_meta), "^x is on meta, but the state is on cpu"),
    (only("x", lambda t: resized(t, 0, 1)), r"^\w+ must have shape \(batch=4, "),
    (given(dt=None), "^dt must be a tensor, got NoneType", TypeError),
    (only("C", lambda t: resized(t, 1, 2)), r"^C must have shape \(batch=3, groups=2, cols=5\)"),
    *[(only("B", lambda t, n=n: t[:, :1].repeat(1, n, 1)), f"^B must have a number of groups that divides .* 4 .*{n}$")
      for n in (0, 3)],
    (given(dt_softplus=1), "^dt_softplus must be True or False, got 1", TypeError),
    (given(update=None), "^update must be True or False, got None", TypeError),
    (given(dt_limit=True), r"^dt_limit must be two numbers, \(lo, hi\), got True", TypeError),
    (only("out", Tensor.double), "^out must be .*, got float64", TypeError),
    (only("out", on_meta), "^out is on meta, but the state is on cpu"),
    (only("out", lambda t: t[:, :, :5].clone()), r"^out must have shape \(batch=3, heads=4, rows=6\)"),
    (only("out", expanded), r"^out must not overlap itself, got strides \("),
    (only("out", strided), "^out must be contiguous along its last axis"),
]  # fmt: skip
NO_TREE = r"^slots.parents makes a tree, which has no last state: it needs update=False, or write \(batch, T\)"
OF_SLOTS: list[Refusal] = [
    *SLOTS,
    (both(at(), only("slots", on_meta)), "^slots are on meta, but the state is on cpu"),
    (only("slots", lambda t: t[:2]), "^slots must have 3 rows, as the batch has, got 2"),
    (lambda a: {"slots": None, "state": cut(a["state"])}, "^slots must be given for a batch of 3 on a pool of 2 slots"),
    (both(NO_UPDATE, at(write=torch.clone)), "^update=False writes no state, so slots must not have write"),
    (at(parents=columns(1)), NO_TREE),
    (at(parents=columns(1), write=torch.clone), NO_TREE),
    (both(NO_UPDATE, at(parents=columns(1)), lambda a: {"out": a["x"]}), "^out must not be x with slots.parents"),
    (at(accepted=torch.ones_like), r"^slots.accepted needs read \(batch, n\) to choose from, got read \(3,\)"),
    (lambda a: {name: on_meta(value) for name, value in a.items()}, "^state is on meta; flashstate runs on cuda and"),
]
NEAREST: dict[str, Any] = {"rounding": "nearest", "seed": None}
ROOM = r"^snapshots must have room for {} {}, got shape \("
OF_STATES: list[Refusal] = [
    *states("state", "^x is on cpu, but the state is on meta"),
    (of_tensor("state", lambda t: State(t[None])), r"^state must have data \(slots, "),
    *states("snapshots", "^snapshots is on meta, but the state is on cpu"),
    (of_tensor("snapshots", lambda t: State(resized(t, 4, 1))), r"^snapshots must be of .* \(4, 6, 5\), got shape \("),
    (lambda a: {"snapshots": a["state"]}, r"^snapshots must have data \(batch, T, heads, rows,"),
    (only("snapshots", lambda t: t[:2]), ROOM.format(3, "rows")),
    (both(only("snapshots", lambda t: State(t, **STOCHASTIC)), only("state", lambda s: replace(s, **NEAREST))),
     "^snapshots .* need a state with a seed"),
]  # fmt: skip
ENTRIES = "must have an entry for each of the {} tokens, got shape"
OF_TOKENS: list[Refusal] = [
    (at(write=columns(2)), f"^slots.write {ENTRIES.format(3)}"),
    (both(NO_UPDATE, at(parents=columns(4))), f"^slots.parents {ENTRIES.format(3)}"),
    (only("snapshots", lambda t: t[:, :2]), ROOM.format(3, "tokens")),
]
OF_PACKED: list[Refusal] = [(at(max_len=None), "^snapshots of packed tokens need slots.max_len, the most tokens a row")]


# Tokens at once

NEEDS, BOTH = "^exact=False needs ", "that are both bfloat16 or both float16, got "
NO_STATES = "^exact=False has no states between tokens, so "
MOST, UNKNOWN = "^exact=False is for up to 16 tokens per row, got 17", "^exact=False with packed tokens needs slots.max"


def with_tokens(n: int) -> Change:
    """A call of so many tokens."""
    names = ("x", "dt", "B", "C", "z", "q", "k", "v", "a", "b", "out")
    return lambda a: {name: a[name][:, :1].repeat_interleave(n, 1) for name in names if name in a}


OF_AT_ONCE: list[Refusal] = [
    (of_each("BC", Tensor.float), f"{NEEDS}B and C {BOTH}float32 and float32"),
    (only("dt", lambda t: torch.stack([t] * 6, -1)), "^exact=False needs dt with one value per head"),
    (only("A", lambda t: t[:, None, None].repeat(1, 6, 5)), "^exact=False needs A with one value per head"),
    (only("dt_bias", lambda t: t[:, None].repeat(1, 6)), "^exact=False needs dt_bias with one value per head"),
    (given(snapshots=torch.zeros(3, T, 4, 6, 5)), f"{NO_STATES}there are no snapshots"),
    (at(write=columns(T)), f"{NO_STATES}slots must not have write"),
    (both(NO_UPDATE, at(parents=columns(T))), f"{NO_STATES}slots must not have parents"),
    (with_tokens(17), MOST),
]
OF_LENGTHS: list[Refusal] = [(at(max_len=17), MOST), (at(max_len=None), UNKNOWN)]


# What an op alone refuses


def gates(cols: int) -> list[Refusal]:
    """Gates of the delta rule that do not go together."""
    one_value = rf"^dt_bias must have shape \(HV=4\) where .* one (value|decay) per head, got \(4, {cols}\)"
    return [
        (given(A_log=None), "^dt_bias must come with A_log"),
        (only("dt_bias", lambda t: t[:, None].repeat(1, cols)), one_value),
    ]


OF_DELTA: list[Refusal] = [
    *gates(5),
    (given(scale=True), "^scale must be a number, got True", TypeError),
    (given(b_logit=1), "^b_logit must be True or False, got 1", TypeError),
    (only("k", lambda t: t[:, :1].repeat(1, 3, 1)), "^k must have shape"),
    (of_each("qk", lambda t: t[:, :1].repeat(1, 3, 1)), "^q must have .*heads that divides the 4 value hea"),
]
OF_MAMBA3: list[Refusal] = [
    *wrong("rotary.angle", "batch S", "", layout="rows"),
    *[refusal for name in "BC" for refusal in wrong(f"rotary.bias_{name}", "R H N", layout="whole")],
    (only("state", lambda s: s.ssm), "^state must be a Mamba3State, got State", TypeError),
    (only("state", on_meta), "^x is on cpu, but the state is on meta"),
    (other("state", k=lambda t: t[:, :2].clone()), r"^B must have shape \(.*R=2, G, N=8\)"),
    (other("state", angle=lambda t: None), "^rotary needs a state with angle: Mamba3State"),
    (other("state", angle=lambda t: t[..., :2].clone()), "^rotary.angle must have .* S=2"),
    (of_tensor("rotary.angle", lambda t: torch.stack([t] * 3, -2)), "^rotary.angle .*H=4,"),
    (only("rotary", lambda r: r.angle), "^rotary must be a Rotary or None, got Tensor", TypeError),
    (of_tensor("rotary.angle", lambda t: t.clone().requires_grad_()), "^rotary.angle must not require grad"),
    (both(NO_UPDATE, at(parents=columns(1))), "^slots must not have parents"),
    (given(z=None), "^Wz must come with z"),
    (lambda a: {"Wo": None, "out": a["x"]}, r"^out must have shape \(.*R=3, H=4, D=6\)"),
    (only("out", lambda t: torch.stack([t] * 3, 1)), r"^out must have shape \(.*\d,"),
]
ODD_COLUMNS = replace(MAMBA3, cols=7)
ODD: list[Refusal] = [
    (given(rotary=step_arguments(ODD_COLUMNS)["rotary"]), "^rotary needs an even number of columns, .* 7"),
]

ROLLBACK, RING = at(accepted=torch.zeros_like), given(positions=torch.tensor([1, 2, 3]))
LONGER, NO_RING = only("window", lambda t: resized(t, 2, 3)), "^positions make a ring, "
OF_WINDOW: list[Refusal] = [
    (only("window", lambda t: t[0]), r"^window must have shape \(slots, channels, length\), got"),
    (only("window", lambda t: t[:0]), r"^window must not be empty, got shape \(0"),
    (only("window", expanded), "^window must not overlap itself"),
    (only("window", lambda t: t[..., :2]), "^window must have 3 entries or more .*2"),
    (only("window", Tensor.bfloat16), "^window must be float16 or float32, so", TypeError),
    (only("weight", lambda t: resized(t, 1, 5)), "^weight must have a width from 2 to 8, got 9"),
    (given(activation="gelu"), "^activation must be one of silu, None, got 'gelu'"),
    (only("snapshots", Tensor.float), "^snapshots must be float16, got float32", TypeError),
    (only("snapshots", lambda t: t[..., :2]), r"^snapshots must be of states \(5, 3\), got shape \("),
    (only("snapshots", expanded), "^snapshots must not overlap itself"),
    (given(history=3), "^history is for windows that roll back"),
    (ROLLBACK, "^window must have 4 entries or more to roll back 1 tok"),
    (both(ROLLBACK, LONGER, given(history=4)), "^history must be from 2 to 3, got 4"),
    (both(RING, given(positions=torch.ones(3))), "^positions must be int32 or int64, got float32", TypeError),
    (both(ROLLBACK, RING), f"{NO_RING}which rolls back by lower"),
    (both(at(write=torch.clone), RING), f"{NO_RING}which is kept where it is"),
    (both(at(write=columns(1)), LONGER), r"^slots.write \(batch, T\) needs windows of 3 entries, not rolled back, got"),
    (lambda a: {"slots": None, "window": cut(a["window"])}, "^slots must be given for a batch of 3 on a pool of 2 slo"),
]
NO_LENGTH: list[Refusal] = [
    (both(at(max_len=None, accepted=torch.zeros_like), given(snapshots=None)), "^windows that roll back need slots"),
]


# Replay, and folds

LEFT_OUT, OF_RING = "^slots must be left out with a plan", "^{} must have the dtype of ring.{}, float16, got {}"
OTHER_RING = "^plan was made for rings of other slots: their start and count are not those of this ring"
BOUNDED = Slots(torch.tensor([5, 0, 3]), cu_seqlens=torch.tensor([0, 2, 2, 5]), max_len=3)


def planned(tokens: int | None = 1, read: Any = lambda s: s, beside: Any = lambda s: None) -> Change:
    """A plan of the ring of the call, and these slots beside it."""
    return lambda a: {"plan": a["ring"].plan(read(a["slots"]), tokens), "slots": beside(a["slots"])}


def other_numbers(names: str, word: str, kept: str) -> Refusal:
    """Another number of heads or groups than a ring has."""
    return of_each(names, lambda t: t[:, :1]), f"^{kept} must have the {word} of ring.{kept}, 2, got 1"


OF_A_RING: list[Refusal] = [  # that is not for the states of a layer: of one op for all
    (given(ring=None), "^ring must be a Ring, got NoneType", TypeError),
    (only("ring", on_meta), "^ring.x is on meta, but the state is on cpu"),
    (only("ring", cut), r"^ring.x must have shape \(slots=7, "),
    (other("ring", x=lambda t: resized(t, 3, 1)), r"^ring.x must have shape \(.* rows=6\), got"),
    (other("ring", **dict.fromkeys(("x", "dt"), lambda t: t[:, :2].clone())), r"^ring.x must have .*heads=4, "),
]
REPLAYED: list[Refusal] = [
    *OF_A_RING,
    *[(at(**{name: table}), f"^slots.{name} is not for replay, which keeps tokens in the slot it reads")
      for name, table in (("write", torch.clone), ("accepted", torch.ones_like), ("snapshot_rows", torch.clone),
                          ("parents", columns(1)))],
    (only("dt", lambda t: torch.stack([t] * 6, -1)), "^dt must have one value per head, as .*not for Mamb"),
    (only("A", lambda t: t[:, None, None].repeat(1, 6, 8)), "^A must have one value per head"),
    (only("dt_bias", lambda t: torch.stack([t] * 6, -1)), "^dt_bias must have one value per head"),
    *[(only(name, Tensor.float), OF_RING.format(name, name, "float32"), TypeError) for name in "xB"],
    other_numbers("BC", "groups", "B"),
    (lambda a: {"plan": [a["ring"].plan(a["slots"], 1)]}, "^plan must be a Plan, got list", TypeError),
    (planned(read=lambda t: t[:2]), "^plan is for 2 rows of up to 1 tokens, but x has 3 of up to 1"),
    (planned(beside=torch.clone), LEFT_OUT),
    (both(planned(), other("ring", count=torch.clone)), OTHER_RING),
]  # fmt: skip
SEVERAL_REPLAYED: list[Refusal] = [
    (planned(None, lambda t: BOUNDED), r"^x must have shape \(tokens, "),
]
PACKED_REPLAYED: list[Refusal] = [
    (at(max_len=None), "^packed tokens need slots.max_len, the most tokens a row has"),
    (at(max_len=5), "^a call may have as many tokens per row as the window, 4, got 5"),
    (planned(None, beside=lambda s: replace(s, max_len=2)), LEFT_OUT),
    (planned(2, lambda s: s.read), "^plan is for 3 rows of up to 2 tokens, but x"),
]


def of_mamba2(ring: DeltaRing) -> Ring:
    return Ring(ring.u, ring.k, ring.decay, ring.start, ring.count, ring.window)


PER_CHANNEL_RING = other("ring", decay=lambda t: torch.stack([t.half()] * 8, -1))
WIDE = only("a", lambda t: torch.stack([t] * 8, -1))
DELTA_REPLAYED: list[Refusal] = [
    *gates(8),
    (only("ring", of_mamba2), "^ring must be a DeltaRing, got Ring", TypeError),
    *[(only(name, Tensor.float), OF_RING.format(name, "k", "float32"), TypeError) for name in "qk"],
    other_numbers("qk", "heads", "k"),
    (WIDE, r"^ring.decay must have shape \(slots, HV, length, K\) where a has one value per channel, got \(7"),
    (PER_CHANNEL_RING, "^a must have a value of its own for every channel, as ring.decay has, got one per head, or"),
    (both(only("a", lambda t: t.half()[..., None].expand(*t.shape, 8)), PER_CHANNEL_RING), "^a must have a value"),
    (both(WIDE, PER_CHANNEL_RING), "^a must have the dtype of ring.decay, float16, got float32", TypeError),
    (planned(read=lambda t: t[:2]), "^plan is for 2 rows of up to 1 tokens, but v has 3 of up to 1"),
]


def fold_call(delta: bool = False) -> Arguments:
    """What mamba2_fold or gated_delta_fold takes."""
    call = step_arguments(replace(REPLAY, tokens=3))
    ring, taken = call["ring"], {"A": call["A"]}
    if delta:
        ring = DeltaRing(ring.B, ring.x, torch.full((7, 4, 7), -0.5), ring.start, ring.count, ring.window)
        taken = {"A_log": torch.zeros(4), "dt_bias": torch.zeros(4), "qk_l2norm": True}
    into = State(torch.zeros_like(call["state"].data, dtype=torch.float32))
    return {"state": call["state"], "ring": ring, "slots": call["slots"], **taken,
            "tokens": torch.tensor([1, 2, 0]), "into": into}  # fmt: skip


def seeded(data: Tensor) -> State:
    return State(data.half(), **STOCHASTIC, seed=torch.arange(len(data)))


ONE_EACH = "^slots.write is for mamba2_fold with into, whose slots it names, one per row"
FOLDED: list[Refusal] = [
    *OF_A_RING,
    *SLOTS,
    *wrong("tokens", "batch", "", INDEX_DTYPES, "whole")[1:],  # a list is no int
    *wrong_ints("tokens", "0 to 4", -1, 5),
    *states("state", "^ring.x is on cpu, but the state is on meta"),
    *states("into", "^into is on meta, but the state is on cpu"),
    *wrong("A", "heads", layout="whole"),
    (only("A", lambda t: t[:, None, None].repeat(1, 6, 8)), "^A must have one value per head, "),
    (both(given(into=None), at(write=torch.clone)), ONE_EACH),
    (at(write=columns(2)), ONE_EACH),
    *[(at(**{name: table}), f"^slots.{name} is not for folding, which has no new tokens")
      for name, table in (("accepted", torch.ones_like), ("parents", columns(1)), ("snapshot_rows", torch.clone),
                          ("cu_seqlens", lambda t: torch.tensor([0, 2, 2, 5])))],
    (of_tensor("into", lambda t: State(t[None])), r"^into must have data \(slots, "),
    (of_tensor("into", lambda t: resized(t, 2, 1)), r"^into must have states \(4, 6, 8\), got"),
    (only("into", cut), "^into must have 7 slots as the state has, or slots.write to say"),
    (lambda a: {"into": a["state"]}, "^into must not share memory with the state"),
    (lambda a: {"into": a["state"].data[3:]}, "^into must (not share memory with|have 7 slots as) the state"),
    (both(only("state", lambda s: State(s.data)), of_tensor("into", seeded)), "^into with .* needs a state with"),
]  # fmt: skip
DELTA_FOLDED: list[Refusal] = [
    *gates(8),
    (only("ring", of_mamba2), "^ring must be a DeltaRing, got Ring", TypeError),
    *wrong("A_log", "HV", layout="whole"),
    *wrong("dt_bias", "HV", layout="whole"),
    (given(qk_l2norm=1), "^qk_l2norm must be True or False, got", TypeError),
    (at(write=columns(2)), ONE_EACH.replace("mamba2", "gated_delta")),
]

# State, Slots, Mamba3State, rings and plans

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


Called = tuple[Any, Any, list[Refusal]]  # a function, the case or the arguments of a right call, and what is wrong
CALLS: dict[str, Called] = {
    "mamba2_step": ("mamba2_step", CASE, [*DECLARED, *OF_SLOTS, *OF_STATES]),
    "mamba2_step, several tokens": ("mamba2_step", replace(CASE, **SEVERAL), OF_TOKENS),
    "mamba2_step, packed": ("mamba2_step", replace(CASE, **PACKED), OF_PACKED),
    "mamba2_step, at once": ("mamba2_step", replace(CASE, **SEVERAL, exact=False, bc="float16"), OF_AT_ONCE),
    "mamba2_step, at once, packed": ("mamba2_step", replace(CASE, **PACKED, exact=False, bc="float16"), OF_LENGTHS),
    "gated_delta_step": ("gated_delta_step", DELTA, OF_DELTA),
    "gated_delta_step, at once": (
        "gated_delta_step", replace(DELTA, **SEVERAL, exact=False), [
            (only("q", Tensor.bfloat16), f"{NEEDS}q and k {BOTH}bfloat16 and float16"),
            (only("a", lambda t: torch.stack([t] * 5, -1)), "^exact=False needs one a per head, not one per channel"),
        ],
    ),
    **{  # one token does not care whether tokens may go at once, nor what of it could not
        f"{case.op.declared.name}, at once, {what}": (case.op.declared.name, replace(case, exact=False), [])
        for what, case in (("T = 1", replace(DELTA, tokens=1, qk="float32")), ("KDA", replace(DELTA, per_channel=True)),
                           ("one token", replace(CASE, tokens=1)), ("Mamba-1", replace(CASE, mamba1=True, D="row")))
    },
    "mamba3_step": ("mamba3_step", MAMBA3, OF_MAMBA3),
    "mamba3_step, odd columns": ("mamba3_step", lambda: {**step_arguments(ODD_COLUMNS), "rotary": None}, ODD),
    "conv1d_step": ("conv1d_step", CONV, OF_WINDOW),
    "conv1d_step, packed": ("conv1d_step", replace(CONV, **PACKED), NO_LENGTH),
    "mamba2_replay": ("mamba2_replay", REPLAY, REPLAYED),
    "mamba2_replay, several tokens": ("mamba2_replay", replace(REPLAY, **SEVERAL), SEVERAL_REPLAYED),
    "mamba2_replay, packed": ("mamba2_replay", replace(REPLAY, **PACKED), PACKED_REPLAYED),
    "gated_delta_replay": ("gated_delta_replay", DELTA_REPLAY, DELTA_REPLAYED),
    "mamba2_fold": (mamba2_fold, fold_call, FOLDED),
    "gated_delta_fold": (delta_fold, lambda: fold_call(delta=True), DELTA_FOLDED),
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
    op, right, refusals = CALLS[call]
    arguments = right() if callable(right) else step_arguments(right)
    if refusals and "at once" in call:
        arguments["snapshots"] = None
    refuses_all(OPS[op].function if isinstance(op, str) else op, arguments, refusals)


@pytest.mark.parametrize(("kind", "most"), [(State, 2), (Slots, 1), (Rotary, 1)])
def test_options_are_given_by_their_names(kind: Any, most: int) -> None:
    with pytest.raises(TypeError, match="positional"):
        kind(*[torch.zeros(1)] * (most + 1))
