"""The ops: what a declaration says is refused by name where a call does not keep to it, and harms nothing."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from calls import shaped
from refusals import (
    CASE,
    DELTA,
    MAMBA3,
    OTHER_RING,
    REPLAY,
    SHAPE,
    SLOTS,
    STANDS,
    TRANSPOSED,
    Change,
    Described,
    Refusal,
    T,
    at,
    both,
    columns,
    cut,
    expanded,
    forms_of,
    given,
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
    wrong_rings,
)  # fmt: skip
from torch import Tensor

from flashstate import DeltaRing, Mamba3State, Ring, Slots, State
from flashstate.errors import INDEX_DTYPES
from flashstate.launch.call import Op
from flashstate.ops.conv1d import CONV1D_STEP
from flashstate.ops.gated_delta import GATED_DELTA_STEP
from flashstate.ops.gated_delta_replay import GATED_DELTA_REPLAY
from flashstate.ops.mamba2 import MAMBA2_STEP
from flashstate.ops.mamba2_replay import MAMBA2_REPLAY
from flashstate.ops.mamba3 import MAMBA3_STEP
from flashstate.proof import CASES, AnyCase, ConvCase, DeltaReplayCase
from flashstate.state.formats import FORMATS
from flashstate.state.ring import AnyRing
from flashstate.state.state import POOL_AXES, SNAPSHOT_AXES

CONV = ConvCase(3, 5, 4, x="float16")
DELTA_REPLAY = DeltaReplayCase(
    3, 4, 2, 6, 8, format="float16", rounding="stochastic", x="float16", qk="float16", window=4
)  # fmt: skip
NARROW: dict[Op, AnyCase] = {  # of ops that are not named here, the first small case in this shape
    **{cases.odd[0].op.declared: shaped(cases.odd[0], **SHAPE, cols=5) for cases in CASES.values()},
    MAMBA2_STEP: CASE, GATED_DELTA_STEP: DELTA, MAMBA3_STEP: MAMBA3, CONV1D_STEP: CONV, MAMBA2_REPLAY: REPLAY,
    GATED_DELTA_REPLAY: DELTA_REPLAY,
}  # fmt: skip
CALLS: dict[str, tuple[Op, AnyCase]] = {
    f"{op.name}, {form}": (op, case) for op in NARROW for form, case in forms_of(NARROW[op]).items()
}
TOKEN_AXES = {"one token": ("batch",), "several tokens": ("batch", "T"), "packed": ("tokens",)}
right_call = functools.cache(step_arguments)  # refusals leave it as it is, which is proved of each


def form_of(case: AnyCase) -> str:
    return "packed" if case.packed else "several tokens" if case.tokens else "one token"


# What a declaration says


def declared_refusals(op: Op, case: AnyCase) -> Iterator[Refusal]:
    """One of every check that follows from a declaration; tests/test_axes.py has what declarations say, and every
    check of each kind of axes."""
    arguments, lead, (state, *_) = right_call(case), TOKEN_AXES[form_of(case)], op.hints
    known = {*lead, "batch", *op.inner, *op.sizes(arguments[state])}
    for name, axes in (*op.tensors.items(), ("out", op.tensors[op.main])):
        if arguments.get(name) is None:
            continue
        yield f"{name} float64", only(name, Tensor.double), f"^{name} must be .*, got float64", TypeError
        where = f"{op.main} is on cpu, but the state is on meta" if name == state else f"{name} is on meta, but the sta"
        yield f"{name} elsewhere", only(name, on_meta), f"^{where}"
        for axis, word in enumerate((*(lead if axes.tokens else ()), *axes.names) if name != state else ()):
            if word in known:
                message = others(op) if name == op.main and word in lead else f"^{name} must have shape .*, got"
                yield f"{name} with {word} + 1", only(name, lambda t, axis=axis: resized(t, axis, 1)), message
        if name not in op.optional:
            yield f"{name} missing", given(**{name: None}), f"^{name} must be a tensor, got NoneType", TypeError
    yield "out one row for all", only("out", expanded), r"^out must not overlap itself, got strides \("
    if op.tensors[op.main].dense:
        yield "out strided", only("out", strided), "^out must be contiguous along its last axis"
    for axis, of in op.divides.items():  # sizes that do not divide that of another axis
        name = next(name for name, axes in op.tensors.items() if axis in axes.names)
        few, whole = (op.words.get(one, one) for one in (axis, of))
        for n in (0, 3):
            message = f"^{name} must have a number of {few} that divides the 4 {whole}, got {n}"
            yield f"{n} {axis}", only(name, lambda t, n=n: t.narrow(-2, 0, 1).repeat_interleave(n, -2)), message
    for name in op.flags:
        for value in (1, *(() if name in op.optional else (None,))):
            yield f"{name} {value}", given(**{name: value}), f"^{name} must be True or False, got {value}", TypeError
    for name in (*op.numbers, *op.ranges):
        yield f"{name} True", given(**{name: True}), f"^{name} must be (a|two) numbers?, .*got True", TypeError


def others(op: Op) -> str:
    """The message of an argument that has not the tokens of the main one."""
    return rf"^(?!{op.main} )(\w+ must have shape \((batch|tokens)=|slots must have \d+ rows, as the batch has)"


# Slots, states and snapshots

FEW = "^slots must have 3 rows, as the batch has, got 2"
NO_TREE = r"^slots.parents makes a tree, which has no last state: it needs update=False, or write \(batch, T\)"


def slots_refusals(op: Op, case: AnyCase) -> Iterator[Refusal]:
    """Of every op slots that are not for its batch; what their tables must not be, of one op for all."""
    tokens, no_update = max(case.tokens, 1), given(update=False)
    yield "slots a Slots elsewhere", both(at(), only("slots", on_meta)), "^slots are on meta, but the state is on cpu"
    if not case.packed:
        yield "slots 1", given(slots=1), "^slots must be a Slots, an index tensor or None, got int", TypeError
        yield "slots too short", only("slots", lambda t: t[:2]), FEW
        pool = lambda a: {"slots": None} | {name: cut(a[name]) for name in ("state", "window", "ring") if name in a}  # noqa: E731
        yield "no slots for a larger batch", pool, "^slots must be given for a batch of 3 on a pool of 2 slots"
    if op is not MAMBA2_STEP:
        return
    everything = lambda a: {name: on_meta(value) for name, value in a.items()}  # noqa: E731
    yield "everything elsewhere", everything, "^state is on meta; flashstate runs on cuda and cpu"
    no_write, tree = "^update=False writes no state, so slots must not have write", at(parents=columns(tokens))
    yield "update=False with write", both(no_update, at(write=torch.clone)), no_write
    yield "a tree in place", tree, NO_TREE
    yield "a tree with an end", at(parents=columns(tokens), write=torch.clone), NO_TREE
    in_place = both(no_update, tree, lambda a: {"out": a["x"]})
    yield "a tree over its inputs", in_place, "^out must not be x with slots.parents"
    no_table = r"^slots.accepted needs read \(batch, n\) to choose from, got read \(3,\)"
    yield "accepted without a table", at(accepted=torch.ones_like), no_table
    if not case.packed:
        entry = f"must have an entry for each of the {tokens} tokens, got shape"
        yield "write for few tokens", at(write=columns(tokens - 1)), f"^slots.write {entry}"
        yield "parents for many tokens", both(no_update, at(parents=columns(tokens + 1))), f"^slots.parents {entry}"
        yield from wrong(SLOTS)


def state_refusals(op: Op) -> Iterator[Refusal]:
    """Of a State, or a tensor that stands for one."""
    elsewhere = f"^{op.main} is on cpu, but the state is on meta"
    yield from without_scales(Described("state", POOL_AXES, POOL_AXES, FORMATS, "slot", {}, STANDS, elsewhere))
    yield "state of snapshots", of_tensor("state", lambda t: State(t[None])), r"^state must have data \(slots, "


def without_scales(d: Described) -> Iterator[Refusal]:
    """Of a tensor that stands for a State, also a dtype that needs scales, and transposed States."""
    yield from wrong(d)
    yield f"{d.name} int8", of_tensor(d.name, Tensor.char), rf"^{d.name} of dtype int8 needs a scale: pass State\(data,"
    yield f"{d.name} a transposed State", of_tensor(d.name, lambda t: State(transposed(t))), TRANSPOSED


def snapshots_refusals(case: AnyCase) -> Iterator[Refusal]:
    """Of a State, or a tensor that stands for one."""
    tokens = max(case.tokens, 1)
    room = r"^snapshots must have room for {} {}, got shape \("
    yield from without_scales(Described("snapshots", SNAPSHOT_AXES, SNAPSHOT_AXES, FORMATS, "slot", {}, STANDS))
    longer = of_tensor("snapshots", lambda t: State(resized(t, 4, 1)))
    yield "snapshots of other states", longer, r"^snapshots must be of states \(4, 6, 5\), got \(4, 6, 6\)"
    yield "snapshots a pool", lambda a: {"snapshots": a["state"]}, r"^snapshots must have data \(batch, T, heads, rows,"
    yield "snapshots of few rows", only("snapshots", lambda t: t[:2]), room.format(3, "rows")
    short = only("snapshots", lambda t: t[:, : tokens - 1])
    yield "snapshots of few tokens", both(short, at(snapshot_rows=torch.zeros_like)), room.format(tokens, "tokens")
    rounded = only("snapshots", lambda t: State(t, rounding="stochastic"))
    no_seeds = only("state", lambda s: replace(s, rounding="nearest", seed=None))
    yield "snapshots without seeds", both(rounded, no_seeds), "^snapshots .* need a state with a seed"
    if case.packed:
        message = "^snapshots of packed tokens need slots.max_len, the most tokens a row has"
        yield "snapshots without max_len", at(max_len=None), message


# What an op alone says


def of_each(names: Iterable[str], change: Callable[[Any], Any]) -> Change:
    return lambda a: {name: change(a[name]) for name in names}


def wrong_gates(cols: int) -> list[Refusal]:
    one_value = rf"^dt_bias must have shape \(HV=4\) where a has one value per head, got \(4, {cols}\)"
    return [
        ("dt_bias without A_log", given(A_log=None), "^dt_bias must come with A_log"),
        ("dt_bias alone per channel", only("dt_bias", lambda t: t[:, None].repeat(1, cols)), one_value),
    ]


def at_once_refusals(case: AnyCase, halves: str, wider: Mapping[str, Change]) -> list[Refusal]:
    """Tokens that cannot go at once. `halves`: what states are multiplied with; `wider`: what must have one value per
    head, and what gives it more."""
    if not case.tokens:
        return []
    first, second = halves
    wrong_halves = f"^exact=False needs {first} and {second} that are both bfloat16 or both float16, got "
    no_states = "^exact=False has no states between tokens, so "
    most = "^exact=False is for up to 16 tokens per row, got 17"
    unknown = "^exact=False with packed tokens needs slots.max_len, the most"
    refusals: list[Refusal] = [
        ("float32", of_each(halves, Tensor.float), f"{wrong_halves}float32 and float32"),
        ("mixed", only(first, Tensor.bfloat16), f"{wrong_halves}bfloat16 and float16"),
        *((f"{n} not per head", change, rf"^exact=False needs .*\b{n}\b.*per head") for n, change in wider.items()),
        ("snapshots", lambda a: {"snapshots": a["snapshots"]}, f"{no_states}there are no snapshots"),
        ("a slot per token", at(write=columns(T)), f"{no_states}slots must not have write"),
        ("a tree", both(given(update=False), at(parents=columns(T))), f"{no_states}slots must not have parents"),
        ("17 tokens", at(max_len=17) if case.packed else with_tokens(17), most),
        *([("no max_len", at(max_len=None), unknown)] if case.packed else []),
    ]
    last = given(exact=False, snapshots=None)
    return [(f"at once: {what}", both(last, change), message) for what, change, message in refusals]


def mamba2_refusals(case: AnyCase) -> list[Refusal]:
    """Tokens that cannot go at once, from a call with B and C of 16 bits."""
    wider = {
        "dt": only("dt", lambda t: torch.stack([t] * 6, -1)),
        "A": only("A", lambda t: t[:, None, None].repeat(1, 6, 5)),
        "dt_bias": only("dt_bias", lambda t: t[:, None].repeat(1, 6)),
    }
    halves = of_each("BC", Tensor.half)
    return [
        (what, lambda a, change=change: {**halves(a), **change({**a, **halves(a)})}, message)
        for what, change, message in at_once_refusals(case, "BC", wider)
    ]


def delta_refusals(case: AnyCase) -> list[Refusal]:
    """Gates that do not go together, and tokens that cannot go at once."""
    wider = {"a": only("a", lambda t: torch.stack([t] * 5, -1))}
    return wrong_gates(5) + at_once_refusals(case, "qk", wider)


def mamba3_refusals(case: AnyCase) -> list[Refusal]:
    """States, outputs per rank and angles."""
    lead = TOKEN_AXES[form_of(case)]
    rank, no_state = len(lead), "^state must be a Mamba3State, got "
    holders = [Described("rotary.angle", (*lead, "S"), layout="rows")]
    if not case.tokens:
        holders += [Described(f"rotary.{name}", ("R", "H", "N"), layout="whole") for name in ("bias_B", "bias_C")]
    no_rotary = "^rotary must be a Rotary or None, got "
    return [
        *[refusal for d in holders for refusal in wrong(d)],
        ("state a State", only("state", lambda s: s.ssm), f"{no_state}State", TypeError),
        ("state elsewhere", only("state", on_meta), "^x is on cpu, but the state is on meta"),
        ("state of other heads", only("state", three_heads), r"^x must have shape \(.*H=3, D=6\)"),
        ("state of rank 2", other("state", k=lambda t: t[:, :2].clone()), r"^B must have shape \(.*R=2, G, N=8\)"),
        ("state without angles", other("state", angle=lambda t: None), "^rotary needs a state with angle: Mamba3State"),
        ("state of 2 angles", other("state", angle=lambda t: t[..., :2].clone()), "^rotary.angle must have .* S=2"),
        ("angles of 3 heads", of_tensor("rotary.angle", lambda t: torch.stack([t] * 3, -2)), "^rotary.angle .*H=4,"),
        ("no angles", of_tensor("rotary.angle", lambda t: None), "^rotary.angle must be a tensor, got", TypeError),
        ("rotary a tensor", only("rotary", lambda r: r.angle), f"{no_rotary}Tensor", TypeError),
        (
            "a tree",
            both(given(update=False), at(parents=columns(max(case.tokens, 1)))),
            "^slots must not have parents",
        ),
        ("Wz without z", given(z=None), "^Wz must come with z"),
        ("out x, without Wo", lambda a: {"Wo": None, "out": a["x"]}, r"^out must have shape \(.*R=3, H=4, D=6\)"),
        ("out per rank, with Wo", only("out", lambda t: torch.stack([t] * 3, rank)), r"^out must have shape \(.*\d,"),
        ("snapshots", given(snapshots=torch.zeros(3, 1, 4, 6, 8)), "unexpected keyword argument", TypeError),
    ]


def three_heads(state: Mamba3State) -> Mamba3State:
    heads = ((state.ssm.data, 1), (state.k, 2), (state.v, 1))
    return Mamba3State(*(tensor.narrow(axis, 0, 3).clone() for tensor, axis in heads))


def conv_refusals(case: AnyCase) -> list[Refusal]:
    """Windows, widths, and places in a window."""
    tokens = max(case.tokens, 1)
    rollback, ring = at(accepted=torch.zeros_like), given(positions=torch.tensor([1, 2, 3]))
    longer, per_token = only("window", lambda t: resized(t, 2, 3)), at(write=columns(tokens))
    of_tokens = r"^slots.write \(batch, T\) needs windows of 3 entries, not rolled back, got 6 entries"
    unknown = both(at(max_len=None, accepted=torch.zeros_like), given(snapshots=None))
    no_ring, positions = "^positions make a ring, ", {"positions": torch.tensor([1, 2, 3])}
    return [
        (
            "window of rank 2",
            only("window", lambda t: t[0]),
            r"^window must have shape \(slots, channels, length\), got",
        ),
        ("window empty", only("window", lambda t: t[:0]), r"^window must not be empty, got shape \(0"),
        ("window one for all", only("window", expanded), "^window must not overlap itself"),
        ("window short", only("window", lambda t: t[..., :2]), "^window must have 3 entries or more .*2"),
        ("window bfloat16", only("window", Tensor.bfloat16), "^window must be float16 or float32, so", TypeError),
        ("width 1", only("weight", lambda t: resized(t, 1, -3)), "^weight must have a width from 2 to 8, got 1"),
        ("width 9", only("weight", lambda t: resized(t, 1, 5)), "^weight must have a width from 2 to 8, got 9"),
        ("activation gelu", given(activation="gelu"), "^activation must be one of silu, None, got 'gelu'"),
        ("snapshots float32", only("snapshots", Tensor.float), "^snapshots must be float16, got float32", TypeError),
        ("few snapshots", only("snapshots", lambda t: t[:2]), "^snapshots must have room for 3 rows"),
        ("short snapshots", only("snapshots", lambda t: t[:, : tokens - 1]), f"^snapshots .* room for {tokens} tokens"),
        ("narrow snapshots", only("snapshots", lambda t: t[..., :2]), r"^snapshots must be of states \(5, 3\), got \("),
        ("snapshots one for all", only("snapshots", expanded), "^snapshots must not overlap itself"),
        ("history not used", given(history=3), "^history is for windows that roll back"),
        ("no room to roll back", rollback, f"^window must have {3 + tokens} entries or more to roll back {tokens} tok"),
        ("history 4", both(rollback, longer, given(history=4)), "^history must be from 2 to 3, got 4"),
        *[
            (what, both(given(**positions), lambda a, c=change: c({**a, **positions})), *rest)
            for what, change, *rest in wrong(Described("positions", ("batch",), (), INDEX_DTYPES, "whole"))
        ],
        ("a ring that rolls back", both(rollback, ring), f"{no_ring}which rolls back by lower"),
        ("a ring that moves", both(at(write=torch.clone), ring), f"{no_ring}which is kept where it is"),
        ("a ring per token", both(per_token, ring), f"{no_ring}which is kept where it is"),
        ("longer windows per token", both(per_token, longer), of_tokens),
        *([("rolling back", unknown, "^windows that roll back need slots.max_len")] if case.packed else []),
    ]


# Rings and plans

LEFT_OUT = "^slots must be left out with a plan"
OF_RING = "^{} must have the dtype of ring.{}, {}, got {}"


def ring_refusals(op: Op, case: AnyCase, kind: type[AnyRing]) -> list[Refusal]:
    """What no op that replays takes."""
    tables = {"write": torch.clone, "accepted": torch.ones_like, "snapshot_rows": torch.clone}
    tables["parents"] = columns(max(case.tokens, 1))
    return [
        *[(f"slots.{n}", at(**{n: t}), f"^slots.{n} is not for replay, which keeps") for n, t in tables.items()],
        *(packed_plans(op) if case.packed else long_calls(op) if case.tokens else [*plans(op), *wrong_rings(kind)]),
    ]


def replay_refusals(case: AnyCase) -> list[Refusal]:
    per_head = r"must have one value per head, as Mamba-2 has, or be expanded from such, got shape \(.*not for Mamba-1"
    per_row: dict[str, Any] = dict.fromkeys(("dt", "dt_bias"), lambda t: torch.stack([t] * 6, -1))
    per_row["A"] = lambda t: t[:, None, None].repeat(1, 6, 8)
    return [
        *[(f"{n} per row", only(n, change), f"^{n} {per_head}") for n, change in per_row.items()],
        ("x of float32", only("x", Tensor.float), OF_RING.format("x", "x", "float16", "float32"), TypeError),
        ("B of bfloat16", only("B", Tensor.bfloat16), OF_RING.format("B", "B", "float16", "bfloat16"), TypeError),
        *other_numbers("BC", "groups", "B"),
        *ring_refusals(MAMBA2_REPLAY, case, Ring),
    ]


def delta_replay_refusals(case: AnyCase) -> list[Refusal]:
    of_k, of_a = OF_RING.format("{}", "k", "float16", "{}"), OF_RING.format("a", "decay", "float16", "float32")
    per_channel = r"^ring.decay must have shape \(slots, HV, length, K\) where a has one value per channel, got \(7"
    own = "^a must have a value of its own for every channel, as ring.decay has, got one per head, or one that is expan"
    tied = only("a", lambda t: t.half()[..., None].expand(*t.shape, 8))
    wide = only("a", lambda t: torch.stack([t] * 8, -1))
    with_channels = other("ring", decay=lambda t: torch.stack([t.half()] * 8, -1))
    return [
        *wrong_gates(8),
        *[(f"{n} of float32", only(n, Tensor.float), of_k.format(n, "float32"), TypeError) for n in "qk"],
        ("a per channel", wide, per_channel),
        ("ring.decay per channel", with_channels, own),
        ("a expanded over channels", both(tied, with_channels), own),
        ("a of another dtype", both(wide, with_channels), of_a, TypeError),
        *other_numbers("qk", "heads", "k"),
        *ring_refusals(GATED_DELTA_REPLAY, case, DeltaRing),
    ]


def other_numbers(names: str, word: str, kept: str) -> list[Refusal]:
    """Heads or groups that a ring does not have."""
    return [
        (f"{n} {word}", of_each(names, change), f"^{kept} must have the {word} of ring.{kept}, 2, got {n}")
        for n in (1, 4)
        for change in [lambda t, n=n: t[..., :1, :].repeat_interleave(n, -2)]
    ]


def planned(tokens: int | None = 1, read: Callable[[Any], Any] = lambda s: s, beside: Any = lambda s: None) -> Change:
    """A plan of the ring of the call, and these slots beside it."""
    return lambda a: {"plan": a["ring"].plan(read(a["slots"]), tokens), "slots": beside(a["slots"])}


def plans(op: Op) -> list[Refusal]:
    """Of one token."""
    rows, a_list = f"rows of up to 1 tokens, but {op.main} has 3 of up to 1", "^plan must be a Plan, got list"
    return [
        ("plan a list", lambda a: {"plan": [a["ring"].plan(a["slots"], 1)]}, a_list, TypeError),
        ("plan of fewer rows", planned(read=lambda t: t[:2]), f"^plan is for 2 {rows}"),
        ("plan and other slots", planned(beside=torch.clone), LEFT_OUT),
        ("plan of another ring", both(planned(), other("ring", count=torch.clone)), OTHER_RING),
    ]


BOUNDED = Slots(torch.tensor([5, 0, 3]), cu_seqlens=torch.tensor([0, 2, 2, 5]), max_len=3)


def with_tokens(n: int) -> Change:
    """A call of so many tokens."""
    names = ("x", "dt", "B", "C", "z", "q", "k", "v", "a", "b", "out")
    return lambda a: {name: a[name][:, :1].repeat_interleave(n, 1) for name in names if name in a}


def long_calls(op: Op) -> list[Refusal]:
    """Of several tokens, or of too many."""
    return [
        (
            "4 tokens",
            with_tokens(4),
            "^the ring has 7 rows, so beside its window of 4 a call may have 3 tokens per row, ",
        ),
        ("plan of one token", planned(1), f"^plan is for 3 rows of up to 1 tokens, but {op.main} has 3 of up to 3"),
        ("plan of packed tokens", planned(None, lambda t: BOUNDED), rf"^{op.main} must have shape \(tokens, "),
    ]


def packed_plans(op: Op) -> list[Refusal]:
    return [
        ("no max_len", at(max_len=None), "^packed tokens need slots.max_len, the most tokens a row has"),
        ("max_len 5", at(max_len=5), "^a call may have as many tokens per row as the window, 4, got 5"),
        ("plan and slots", planned(None, beside=lambda s: replace(s, max_len=2)), LEFT_OUT),
        ("plan of dense tokens", planned(2, lambda s: s.read), f"^plan is for 3 rows of up to 2 tokens, but {op.main}"),
    ]


OWN: dict[str, Callable[[AnyCase], list[Refusal]]] = {
    "mamba2_step": mamba2_refusals,
    "gated_delta_step": delta_refusals,
    "mamba3_step": mamba3_refusals,
    "conv1d_step": conv_refusals,
    "mamba2_replay": replay_refusals,
    "gated_delta_replay": delta_replay_refusals,
}


# All of it


def topics(op: Op, case: AnyCase) -> Iterator[tuple[str, list[Refusal]]]:
    """All that is wrong, by what it is about."""
    yield "as declared", [*declared_refusals(op, case)]
    yield "slots", [*slots_refusals(op, case)]
    states = [*snapshots_refusals(case)] if op.takes_snapshots else []
    states += state_refusals(op) if op.takes_state and not case.tokens else ()
    yield "states", [refusal for refusal in states if not (op.transposed and "transposed" in refusal[0])]
    yield "its own", OWN.get(op.name, lambda case: [])(case)


WRONG = {
    f"{call}: {topic}": (call, refusals)
    for call, (op, case) in CALLS.items() for topic, refusals in topics(op, case) if refusals
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("wrong_calls", WRONG)
def test_wrong_calls_are_refused_by_name_and_change_nothing(wrong_calls: str) -> None:
    call, refusals = WRONG[wrong_calls]
    op, case = CALLS[call]
    refuses_all(op.function, right_call(case), refusals)


def test_an_odd_number_of_columns_cannot_be_turned_in_pairs() -> None:
    arguments, message = step_arguments(replace(MAMBA3, cols=7)), "^rotary needs an even number of columns, got N = 7"
    refuses_all(
        MAMBA3_STEP.function,
        {**arguments, "rotary": None},
        [("odd columns", given(rotary=arguments["rotary"]), message)],
    )
