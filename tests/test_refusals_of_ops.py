"""Ops and what they take: every check that follows from a declaration once, then what an op alone refuses. Refused
calls do no harm."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from refusals import (
    CASE,
    DELTA,
    ENTRIES,
    MAMBA3,
    OTHER_RING,
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
    given,
    of_each,
    of_tensor,
    on_meta,
    only,
    other,
    refuses_all,
    resized,
    step_arguments,
    strided,
    transposed,
    wrong,
    wrong_ints,
)
from torch import Tensor

from flashstate import DeltaRing, Ring, Slots, State, mamba2_fold
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
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("call", CALLS)
def test_wrong_calls_are_refused_by_name_and_change_nothing(call: str) -> None:
    op, right, refusals = CALLS[call]
    arguments = right() if callable(right) else step_arguments(right)
    if refusals and "at once" in call:
        arguments["snapshots"] = None
    refuses_all(OPS[op].function if isinstance(op, str) else op, arguments, refusals)
