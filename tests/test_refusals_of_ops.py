"""The ops: what a declaration says is refused by name where a call does not keep to it, and harms nothing."""

import functools
import math
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
    refuses_change,
    resized,
    step_arguments,
    tensors_of,
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
WIDE = {  # calls whose parameters have the axes that they may have
    MAMBA2_STEP: replace(CASE, mamba1=True, D="row"),
    GATED_DELTA_STEP: replace(DELTA, per_channel=True),
    MAMBA2_REPLAY: replace(REPLAY, D="row"),
    GATED_DELTA_REPLAY: replace(DELTA_REPLAY, per_channel=True),
}
NARROW: dict[Op, AnyCase] = {  # of ops that are not named here, the first small case in this shape
    **{cases.odd[0].op.declared: shaped(cases.odd[0], **SHAPE, cols=5) for cases in CASES.values()},
    MAMBA2_STEP: CASE, GATED_DELTA_STEP: DELTA, MAMBA3_STEP: MAMBA3, CONV1D_STEP: CONV, MAMBA2_REPLAY: REPLAY,
    GATED_DELTA_REPLAY: DELTA_REPLAY,
}  # fmt: skip
CALLS: dict[str, tuple[Op, AnyCase]] = {
    **{f"{op.name}, {form}": (op, case) for op in NARROW for form, case in forms_of(NARROW[op]).items()},
    **{f"{op.name} per row, {form}": (op, case) for op in WIDE for form, case in forms_of(WIDE[op]).items()},
}
TOKEN_AXES = {"one token": ("batch",), "several tokens": ("batch", "T"), "packed": ("tokens",)}
right_call = functools.cache(step_arguments)  # refusals leave it as it is, which is proved of each


def form_of(case: AnyCase) -> str:
    return "packed" if case.packed else "several tokens" if case.tokens else "one token"


# What a declaration says


def described(op: Op, case: AnyCase) -> Iterator[Described]:
    """The tensors of a right call, as its op declares them; the output last."""
    arguments, lead = right_call(case), TOKEN_AXES[form_of(case)]
    state, *_ = op.hints
    sizes = dict(zip(op.inner, next(tensors_of(arguments[state])).shape[1:], strict=True))
    known = {*sizes, *op.sizes(arguments[state])}
    for name, axes in op.tensors.items():
        if arguments.get(name) is None:
            continue
        named = (*(lead if axes.tokens else ()), *axes.names, *axes.optional)[: arguments[name].dim()]
        free = named if name == state else set(named) - known
        rows = axes.dense or named[-1] in axes.optional
        layout = "whole" if not axes.tokens and not axes.strided else "rows" if rows else "any"
        elsewhere = f"^{op.main} is on cpu, but the state is on meta" if name == state else "^{name} is on meta, but "
        tied = {axis: sizes[axis] for axis in axes.optional}
        yield Described(name, named, free, axes.dtypes, layout, tied, elsewhere=elsewhere)
        known |= {*named, "batch"}
    main = op.tensors[op.main]
    yield Described("out", (*lead, *main.names), (), layout="rows" if main.dense else "any")


def tensor_refusals(op: Op, case: AnyCase) -> Iterator[Refusal]:
    """Of wide calls there are only those of tensors that are wider there, of parameters only those with one token."""
    form, wide = form_of(case), case not in forms_of(NARROW[op]).values()
    for d in described(op, case):
        if (wide and d.axes[-1] not in d.tied) or (form != "one token" and d.axes[0] not in TOKEN_AXES[form]):
            continue
        for what, change, message, *error in wrong(d):
            yield what, change, others(op) if what == f"{op.main} {OTHER_FORM[form]}" else message, *error
        for axis in op.divides.keys() & {*d.free}:
            yield from wrong_divisors(op, d, axis, op.divides[axis])
    if not wide:
        yield from wrong_outputs(d)
        for axis, word in enumerate(TOKEN_AXES[form]):  # of the main argument, whose tokens others must have
            for by in (-1, 1):
                change = only(op.main, lambda t, axis=axis, by=by: resized(t, axis, by))
                yield f"{op.main} with {word} {by:+}", change, others(op)
        for name in op.tensors:
            if name not in op.optional:
                yield f"{name} missing", given(**{name: None}), f"^{name} must be a tensor, got NoneType", TypeError


# A main argument that lacks or has a token axis is of the other dense form.
OTHER_FORM = {"one token": "of higher rank", "several tokens": "of lower rank", "packed": None}


def others(op: Op) -> str:
    """The message of an argument that has not the tokens of the main one."""
    return rf"^(?!{op.main} )(\w+ must have shape \((batch|tokens)=|slots must have \d+ rows, as the batch has)"


def wrong_divisors(op: Op, d: Described, axis: str, of: str) -> Iterator[Refusal]:
    """Sizes that do not divide that of another axis, in the first argument that has it."""
    along, words = d.axes.index(axis), [op.words.get(name, name) for name in (axis, of)]
    for n in (0, 3, 8):
        change = only(d.name, lambda t, n=n: t.narrow(along, 0, 1).repeat_interleave(n, along))
        message = f"^{d.name} must have a number of {words[0]} that divides the 4 {words[1]}, got {n}"
        yield f"{d.name} with {n} {axis}", change, message


def wrong_outputs(d: Described) -> Iterator[Refusal]:
    """Outputs that overlap themselves."""
    message = r"^out must not overlap itself, got strides \("
    for axis, word in enumerate(d.axes if d.layout == "any" else d.axes[:-1]):
        yield f"out one {word} for all", only("out", lambda t, axis=axis: expanded(t, axis)), message
    yield "out overlapping", only("out", lambda t: t.as_strided(t.shape, (*t.stride()[:-2], 3, 1))), message


def option_refusals(op: Op) -> Iterator[Refusal]:
    for name in op.flags:
        for value in (1, 0, "yes", *(() if name in op.optional else (None,))):
            message = f"^{name} must be True or False, got {value!r}"
            yield f"{name} {value!r}", given(**{name: value}), message, TypeError
    for name in op.numbers:
        for value in (True, "1", [1.0], torch.ones(1)):
            yield f"{name} {value!r}", given(**{name: value}), f"^{name} must be a number, got ", TypeError
        for value in (math.inf, -math.inf, math.nan, 1e39, 10**40):
            yield f"{name} {value!r}", given(**{name: value}), f"^{name} must be finite in float32, got "
    for name in op.ranges:
        for value in (1.0, True, "01", (1.0,), (0.0, 1.0, 2.0), (True, 2.0), (0.0, "1"), (None, 1.0), torch.ones(2)):
            message = rf"^{name} must be two numbers, \(lo, hi\), got "
            yield f"{name} {value!r}", given(**{name: value}), message, TypeError
        for value in ((1.0, 0.5), [1, 0], (math.nan, 1.0), (0.0, math.nan)):
            yield f"{name} {value!r}", given(**{name: value}), rf"^{name} must be \(lo, hi\) with lo <= hi, got "
        for value in ((0.0, 1e39), (-(10**400), 1.0)):
            yield f"{name} {value!r:.20}", given(**{name: value}), f"^{name} must be of numbers that are finite in fl"


# Slots, states and snapshots

NO_WRITE = "^update=False writes no state, so slots must not have write|^slots.write is not for replay"
NO_TREE = (
    r"^slots.parents .* needs update=False, or write \(batch, T\)|^slots must not have parents|^slots.parents is n"
)
NO_ENTRY = "^slots.{} (must have an entry for each of the {} tokens, got shape|is not for replay)|^slots must not have"
NO_TABLE = r"^slots.accepted (needs read \(batch, n\) to choose from, got read \(3,\)|is not for replay)"
FEW = "^slots must have 3 rows, as the batch has, got "


def slots_refusals(op: Op, case: AnyCase) -> Iterator[Refusal]:
    tokens, no_update = T if case.tokens else 1, given(update=False)
    tree, stored, all_stored = at(parents=columns(tokens)), at(write=torch.clone), at(write=columns(tokens))
    yield "slots a Slots elsewhere", both(at(), only("slots", on_meta)), "^slots are on meta, but the state is on cpu"
    yield "update=False with write", both(no_update, stored), NO_WRITE
    yield "update=False with a slot per token", both(no_update, all_stored), NO_WRITE
    yield "a tree in place", tree, NO_TREE
    yield "a tree with an end", at(parents=columns(tokens), write=torch.clone), f"{NO_TREE}|{NO_WRITE}"
    in_place = both(no_update, tree, lambda a: {"out": a[op.main]})
    yield "a tree over its inputs", in_place, f"^out must not be {op.main} with slots.parents|{NO_TREE}"
    everything = lambda a: {name: on_meta(value) for name, value in a.items()}  # noqa: E731
    yield "everything elsewhere", everything, "^state is on meta; flashstate runs on cuda and cpu"
    if not op.rolls_back:
        yield "accepted without a table", at(accepted=torch.ones_like), NO_TABLE
    if case.packed:
        return
    for n in (tokens - 1, tokens + 1):
        yield f"write for {n} tokens", at(write=columns(n)), NO_ENTRY.format("write", tokens)
        yield f"parents for {n} tokens", both(no_update, at(parents=columns(n))), NO_ENTRY.format("parents", tokens)
    yield from wrong(SLOTS)
    for value in (1, True, "0", State(torch.ones(1, 1, 1, 1))):
        yield f"slots {value!r:.5}", given(slots=value), "^slots must be a Slots, an index tensor or None,", TypeError
    yield "slots too short", only("slots", lambda t: t[:2]), f"{FEW}2"
    yield "slots too long", only("slots", lambda t: resized(t, 0, 1)), f"{FEW}4"
    yield "slots a Slots too short", only("slots", lambda t: Slots(t[:2], write=t[:2])), f"{FEW}2|^slots.write is not"
    yield (
        "slots a table too short",
        only("slots", lambda t: Slots(columns(2)(t[:2]), accepted=t[:2])),
        f"{FEW}2|{NO_TABLE}",
    )
    pool = lambda a: {"slots": None} | {name: cut(a[name]) for name in ("state", "window", "ring") if name in a}  # noqa: E731
    yield "no slots for a larger batch", pool, "^slots must be given for a batch of 3 on a pool of 2 slots"


def state_refusals(op: Op) -> Iterator[Refusal]:
    """Of a State, or a tensor that stands for one."""
    elsewhere = f"^{op.main} is on cpu, but the state is on meta"
    yield from without_scales(Described("state", POOL_AXES, POOL_AXES, FORMATS, "slot", {}, STANDS, elsewhere))
    yield "state missing", given(state=None), "^state must be a State or a tensor, got NoneType", TypeError
    yield "state of snapshots", of_tensor("state", lambda t: State(t[None])), r"^state must have data \(slots, "
    yield "state empty", of_tensor("state", lambda t: t[:0]), "^state must not be empty"
    heads_last = of_tensor("state", lambda t: t.movedim(1, -1).contiguous().movedim(-1, 1))
    yield "state with heads last", heads_last, "^state must be contiguous within a head"


def without_scales(d: Described) -> Iterator[Refusal]:
    """Of a tensor that stands for a State, also dtypes that need scales, and transposed States."""
    yield from wrong(d)
    for dtype in (torch.int16, torch.int8, torch.float8_e4m3fn):
        change = of_tensor(d.name, lambda t, dtype=dtype: t.to(dtype))
        yield f"{d.name} {dtype}", change, rf"^{d.name} of dtype \w+ needs a scale: pass State\(data, scale\)"
    yield f"{d.name} a transposed State", of_tensor(d.name, lambda t: State(transposed(t))), TRANSPOSED


def snapshots_refusals(case: AnyCase) -> Iterator[Refusal]:
    """Of a State, or a tensor that stands for one."""
    tokens = T if case.tokens else 1
    room = r"^snapshots must have room for {} {}, got shape \("
    yield from without_scales(Described("snapshots", SNAPSHOT_AXES, SNAPSHOT_AXES, FORMATS, "slot", {}, STANDS))
    for axis, word in enumerate(SNAPSHOT_AXES[2:], 2):
        for by in (-1, 1):
            tensor = only("snapshots", lambda t, axis=axis, by=by: resized(t, axis, by))
            state = both(tensor, lambda a, tensor=tensor: {"snapshots": State(tensor(a)["snapshots"])})
            yield f"snapshots with {word} {by:+}", tensor, r"^snapshots must be of states \(4, 6, 5\), got \("
            yield f"snapshots a State with {word} {by:+}", state, r"^snapshots must be of states \(4, 6, 5\), got \("
    yield "snapshots a pool", lambda a: {"snapshots": a["state"]}, r"^snapshots must have data \(batch, T, heads, rows,"
    yield "snapshots of few rows", only("snapshots", lambda t: t[:2]), room.format(3, "rows")
    short = only("snapshots", lambda t: t[:2, : tokens - 1])
    yield "snapshots of few tokens", only("snapshots", lambda t: t[:, : tokens - 1]), room.format(tokens, "tokens")
    yield "snapshots too short", both(short, at(snapshot_rows=torch.zeros_like)), room.format(tokens, "tokens")
    yield "snapshots one for all tokens", only("snapshots", lambda t: expanded(t, 1)), "^snapshots has overlapping"
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


def at_once_refusals(case: AnyCase, halves: str, activations: str, wider: Mapping[str, Change]) -> list[Refusal]:
    """Tokens that cannot go at once. `halves`: what states are multiplied with; `activations`: these and others;
    `wider`: what must have one value per head, and what gives it more."""
    if not case.tokens:
        return []
    first, second = halves
    wrong_halves = f"^exact=False needs {first} and {second} that are both bfloat16 or both float16, got "
    no_states = "^exact=False has no states between tokens, so "
    most = "^exact=False is for up to 16 tokens per row, got 17"
    many = of_each((*activations.split(), "out"), lambda t: t[:, :1].repeat_interleave(17, 1))
    unknown = "^exact=False with packed tokens needs slots.max_len, the most"
    refusals: list[Refusal] = [
        ("float32", of_each(halves, Tensor.float), f"{wrong_halves}float32 and float32"),
        ("one float32", only(second, Tensor.float), f"{wrong_halves}float16 and float32"),
        ("mixed", only(first, Tensor.bfloat16), f"{wrong_halves}bfloat16 and float16"),
        *(
            (f"{name} not per head", change, rf"^exact=False needs .*\b{name}\b.*per head")
            for name, change in wider.items()
        ),
        ("snapshots", lambda a: {"snapshots": a["snapshots"]}, f"{no_states}there are no snapshots"),
        ("a slot per token", at(write=columns(T)), f"{no_states}slots must not have write"),
        ("a tree", both(given(update=False), at(parents=columns(T))), f"{no_states}slots must not have parents"),
        ("17 tokens", at(max_len=17) if case.packed else many, most),
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
        for what, change, message in at_once_refusals(case, "BC", "x dt B C z", wider)
    ]


def delta_refusals(case: AnyCase) -> list[Refusal]:
    """Gates that do not go together, and tokens that cannot go at once."""
    wider = {"a": only("a", lambda t: torch.stack([t] * 5, -1))}
    return wrong_gates(5) + at_once_refusals(case, "qk", "q k v a b", wider)


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
        ("state missing", given(state=None), f"{no_state}NoneType", TypeError),
        ("state a State", only("state", lambda s: s.ssm), f"{no_state}State", TypeError),
        ("state a tensor", only("state", lambda s: s.ssm.data), f"{no_state}Tensor", TypeError),
        ("state a tuple", only("state", lambda s: (s.ssm, s.k, s.v)), f"{no_state}tuple", TypeError),
        ("state elsewhere", only("state", on_meta), "^x is on cpu, but the state is on meta"),
        ("state of other heads", only("state", three_heads), r"^x must have shape \(.*H=3, D=6\)"),
        ("state of rank 2", other("state", k=lambda t: t[:, :2].clone()), r"^B must have shape \(.*R=2, G, N=8\)"),
        ("state without angles", other("state", angle=lambda t: None), "^rotary needs a state with angle: Mamba3State"),
        ("state of 2 angles", other("state", angle=lambda t: t[..., :2].clone()), "^rotary.angle must have .* S=2"),
        (
            "angles of 3 heads",
            of_tensor("rotary.angle", lambda t: torch.stack([t] * 3, -2)),
            r"^rotary.angle .*H=4, S=3\) or",
        ),
        ("no angles", of_tensor("rotary.angle", lambda t: None), "^rotary.angle must be a tensor, got", TypeError),
        ("rotary a tensor", only("rotary", lambda r: r.angle), f"{no_rotary}Tensor", TypeError),
        ("rotary True", given(rotary=True), f"{no_rotary}bool", TypeError),
        ("Wz without z", given(z=None), "^Wz must come with z"),
        ("out summed, without Wo", given(Wo=None), r"^out must have shape \(.*R=3, H=4, D=6\)"),
        ("out x, without Wo", lambda a: {"Wo": None, "out": a["x"]}, r"^out must have shape \(.*R=3, H=4, D=6\)"),
        ("out per rank, with Wo", only("out", lambda t: torch.stack([t] * 3, rank)), r"^out must have shape \(.*\d,"),
        (
            "out one rank for all",
            lambda a: {"Wo": None, "out": expanded(torch.stack([a["out"]] * 3, rank), rank)},
            "^out must not overlap itself",
        ),
        ("snapshots", given(snapshots=torch.zeros(3, 1, 4, 6, 8)), "unexpected keyword argument", TypeError),
    ]


def three_heads(state: Mamba3State) -> Mamba3State:
    heads = ((state.ssm.data, 1), (state.k, 2), (state.v, 1))
    return Mamba3State(*(tensor.narrow(axis, 0, 3).clone() for tensor, axis in heads))


def conv_refusals(case: AnyCase) -> list[Refusal]:
    """Windows, widths, and places in a window."""
    tokens = T if case.tokens else 1
    rollback, ring = at(accepted=torch.zeros_like), given(positions=torch.tensor([1, 2, 3]))
    longer, per_token = only("window", lambda t: resized(t, 2, 3)), at(write=columns(tokens))
    of_tokens = r"^slots.write \(batch, T\) needs windows of 3 entries, not rolled back, got 6 entries"
    unknown, no_ring = (
        both(at(max_len=None, accepted=torch.zeros_like), given(snapshots=None)),
        "^positions make a ring, ",
    )
    positions = {"positions": torch.tensor([1, 2, 3])}
    return [
        ("window empty", only("window", lambda t: t[:0]), r"^window must not be empty, got shape \(0"),
        ("window one for all", only("window", expanded), "^window must not overlap itself"),
        ("window short", only("window", lambda t: t[..., :2]), "^window must have 3 entries or more .*2"),
        ("window bfloat16", only("window", Tensor.bfloat16), "^window must be float16 or float32, so", TypeError),
        ("window of 6 channels", only("window", lambda t: resized(t, 1, 1)), "^x must have shape .*channels=6"),
        ("width 1", only("weight", lambda t: resized(t, 1, -3)), "^weight must have a width from 2 to 8, got 1"),
        ("width 9", only("weight", lambda t: resized(t, 1, 5)), "^weight must have a width from 2 to 8, got 9"),
        *[
            (f"activation {value!r}", given(activation=value), "^activation must be one of silu, None, got ")
            for value in ("gelu", "", True, 1)
        ],
        ("snapshots float32", only("snapshots", Tensor.float), "^snapshots must be float16, got float32", TypeError),
        ("few snapshots", only("snapshots", lambda t: t[:2]), "^snapshots must have room for 3 rows"),
        ("short snapshots", only("snapshots", lambda t: t[:, : tokens - 1]), f"^snapshots .* room for {tokens} tokens"),
        ("narrow snapshots", only("snapshots", lambda t: t[..., :2]), r"^snapshots must be of states \(5, 3\), got \("),
        ("snapshots one for all", only("snapshots", expanded), "^snapshots must not overlap itself"),
        ("history not used", given(history=3), "^history is for windows that roll back"),
        ("no room to roll back", rollback, f"^window must have {3 + tokens} entries or more to roll back {tokens} tok"),
        ("history 1", both(rollback, longer, given(history=1)), "^history must be from 2 to 3, got 1"),
        ("history 4", both(rollback, longer, given(history=4)), "^history must be from 2 to 3, got 4"),
        ("history 3.0", both(rollback, longer, given(history=3.0)), "^history must be an int, got 3.0", TypeError),
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

LEFT_OUT, ROOM = "^slots must be left out with a plan", "^the ring has 7 rows, so beside its window of"
MOST = "^a call may have as many tokens per row as the window, "
OF_RING = "^{} must have the dtype of ring.{}, {}, got {}"


def ring_refusals(op: Op, case: AnyCase, kind: type[AnyRing]) -> list[Refusal]:
    """What no op that replays takes."""
    tables = {"write": torch.clone, "accepted": torch.ones_like, "snapshot_rows": torch.clone}
    tables["parents"] = columns(T if case.tokens else 1)
    return [
        *[(f"slots.{n}", at(**{n: t}), f"^slots.{n} is not for replay, which keeps") for n, t in tables.items()],
        ("snapshots", given(snapshots=torch.zeros(3, 1, 4, 6, 8)), "unexpected keyword argument", TypeError),
        *(packed_plans(op) if case.packed else long_calls(op) if case.tokens else [*plans(op), *wrong_rings(kind)]),
    ]


def replay_refusals(case: AnyCase) -> list[Refusal]:
    per_head = r"must have one value per head, as Mamba-2 has, or be expanded from such, got shape \(.*not for Mamba-1"
    per_row: dict[str, Any] = dict.fromkeys(("dt", "dt_bias"), lambda t: torch.stack([t] * 6, -1))
    per_row["A"] = lambda t: t[:, None, None].repeat(1, 6, 8)
    of_x = OF_RING.format("x", "x", "bfloat16", "float16")
    return [
        *[(f"{n} per row", only(n, change), f"^{n} {per_head}") for n, change in per_row.items()],
        ("x of float32", only("x", Tensor.float), OF_RING.format("x", "x", "float16", "float32"), TypeError),
        ("B of bfloat16", only("B", Tensor.bfloat16), OF_RING.format("B", "B", "float16", "bfloat16"), TypeError),
        ("ring.x bfloat16", other("ring", x=Tensor.bfloat16), of_x, TypeError),
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
        ("q of bfloat16", only("q", Tensor.bfloat16), of_k.format("q", "bfloat16"), TypeError),
        ("ring.k bfloat16", other("ring", k=Tensor.bfloat16), "^q must have the dtype of ring.k, bfloat16", TypeError),
        ("a per channel", wide, per_channel),
        ("ring.decay per channel", with_channels, own),
        ("a expanded over channels", both(tied, with_channels), own),
        (
            "a expanded, with dt_bias per channel",
            both(both(tied, with_channels), only("dt_bias", lambda t: t[:, None].repeat(1, 8))),
            own,
        ),
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
        ("plan True", given(plan=True, slots=None), "^plan must be a Plan, got bool", TypeError),
        ("plan of fewer rows", planned(read=lambda t: t[:2]), f"^plan is for 2 {rows}"),
        ("plan of all slots", planned(read=lambda t: None), f"^plan is for 7 {rows}"),
        ("plan and other slots", planned(beside=torch.clone), LEFT_OUT),
        ("plan and a Slots", planned(beside=Slots), LEFT_OUT),
        ("plan of all and slots", planned(read=lambda t: None, beside=torch.clone), LEFT_OUT),
        ("plan of another ring", both(planned(), other("ring", count=torch.clone)), OTHER_RING),
    ]


def with_tokens(n: int) -> Change:
    """A call of so many tokens."""

    def change(a: dict[str, Any]) -> dict[str, Any]:
        named = [name for name in ("x", "dt", "B", "C", "z", "q", "k", "v", "a", "b", "out") if name in a]
        return {name: a[name][:, :1].repeat_interleave(n, 1) for name in named}

    return change


def in_window(window: int, length: int) -> Change:
    """A ring with another window, and so many rows."""

    def change(a: dict[str, Any]) -> dict[str, Any]:
        rows = torch.arange(length) % 7
        kept = {name: getattr(a["ring"], name)[:, :, rows] for name in a["ring"].written}
        return {"ring": replace(a["ring"], window=window, **kept)}

    return change


BOUNDED = Slots(torch.tensor([5, 0, 3]), cu_seqlens=torch.tensor([0, 2, 2, 5]), max_len=3)


def long_calls(op: Op) -> list[Refusal]:
    """Of several tokens, or of too many."""
    return [
        ("5 tokens", both(in_window(4, 10), with_tokens(5)), f"{MOST}4, got 5"),
        ("65 tokens", both(in_window(64, 129), with_tokens(65)), f"{MOST}64, got 65"),
        ("4 tokens", with_tokens(4), f"{ROOM} 4 a call may have 3 tokens per row, got 4"),
        ("a window of 6", in_window(6, 7), f"{ROOM} 6 a call may have 1 tokens per row, got 3"),
        ("plan of one token", planned(1), f"^plan is for 3 rows of up to 1 tokens, but {op.main} has 3 of up to 3"),
        ("plan of packed tokens", planned(None, lambda t: BOUNDED), rf"^{op.main} must have shape \(tokens, "),
    ]


def packed_plans(op: Op) -> list[Refusal]:
    return [
        ("no max_len", at(max_len=None), "^packed tokens need slots.max_len, the most tokens a row has"),
        ("max_len 4", at(max_len=4), f"{ROOM} 4 a call may have 3 tokens per row, got 4"),
        ("max_len 5", at(max_len=5), f"{MOST}4, got 5"),
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


def refusals_of(op: Op, case: AnyCase) -> Iterator[Refusal]:
    """All that is wrong; of wide calls only what is wider there, and what has no tokens only with one token."""
    yield from tensor_refusals(op, case)
    if case not in forms_of(NARROW[op]).values():
        return
    yield from slots_refusals(op, case)
    yield from OWN.get(op.name, lambda case: [])(case)
    states = [*snapshots_refusals(case)] if op.takes_snapshots else []
    if not case.tokens:
        yield from option_refusals(op)
        states += state_refusals(op) if op.takes_state else ()
    yield from (refusal for refusal in states if not (op.transposed and "transposed" in refusal[0]))


def calls() -> Iterator[Any]:
    """All wrong calls; those of one op in one form are quick."""
    for call, (op, case) in CALLS.items():
        marks = [pytest.mark.quick] if call == "mamba2_step, one token" else []
        for what, change, message, *error in refusals_of(op, case):
            yield pytest.param(call, change, message, *(error or [ValueError]), id=f"{call}: {what}", marks=marks)


@pytest.mark.parametrize(("call", "change", "message", "error"), list(calls()))
def test_a_wrong_call_is_refused_by_name(call: str, change: Change, message: str, error: type[Exception]) -> None:
    op, case = CALLS[call]
    refuses_change(op.function, right_call(case), change, message, error)


@pytest.mark.parametrize("call", CALLS)
def test_the_call_that_refusals_start_from_is_right(call: str) -> None:
    """A right call writes outputs, states and snapshots."""
    op, case = CALLS[call]
    arguments = step_arguments(case)
    written = {name: tensors_of(arguments[name]) for name in (next(iter(op.hints)), "snapshots") if name in arguments}
    before = {name: next(tensors).clone() for name, tensors in written.items()}
    assert op.function(**arguments) is arguments["out"]
    assert not (arguments["out"] == 7.0).any()
    for name, values in before.items():
        assert not torch.equal(next(tensors_of(arguments[name])), values), name


def test_an_odd_number_of_columns_cannot_be_turned_in_pairs() -> None:
    arguments, message = step_arguments(replace(MAMBA3, cols=7)), "^rotary needs an even number of columns, got N = 7"
    refuses_change(MAMBA3_STEP.function, arguments, given(), message, ValueError)
    MAMBA3_STEP.function(**{**arguments, "rotary": None})
