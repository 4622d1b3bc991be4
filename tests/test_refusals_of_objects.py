"""State, Slots, Mamba3State, Rotary, rings, Plan and calls on them: wrong input is refused by name, harms nothing."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from refusals import (
    CASE,
    DELTA,
    MAMBA3,
    META,
    OTHER_RING,
    REPLAY,
    SLOTS,
    STANDS,
    TRANSPOSED,
    Arguments,
    Change,
    Described,
    Refusal,
    at,
    both,
    columns,
    cut,
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
    tensors_of,
    transposed,
    wrong,
    wrong_rings,
)
from torch import Tensor

from flashstate import (
    DeltaRing,
    Mamba3State,
    Plan,
    Ring,
    Rotary,
    Slots,
    State,
    debug,
    gated_delta_fold,
    gated_delta_step,
    mamba2_fold,
    mamba2_replay,
    mamba3_step,
)
from flashstate.errors import ACTIVATION_DTYPES, INDEX_DTYPES
from flashstate.proof import Case, DeltaCase
from flashstate.state.formats import FORMATS
from flashstate.state.ring import AnyRing
from flashstate.state.state import POOL_AXES

WITHIN, OVERLAP = "^data must be contiguous within a head: strides", "^data has overlapping {}: an axis of stride"
REACH = r"^data must have slots that reach over fewer than 2\^31 elements, got 2147483648"
SLOTS_OVERLAP = (
    ((3, 2, 4, 8), (63, 32, 8, 1), 63, 64),
    ((3, 2, 4, 8), (63, 32, 1, 4), 63, 64),
    ((3, 5, 2, 4, 8), (64, 0, 32, 8, 1), 0, 64),
    ((3, 5, 2, 4, 8), (319, 64, 32, 8, 1), 319, 320),
    ((3, 5, 2, 4, 8), (64, 191, 32, 8, 1), 191, 192),
)
HEADS_OVERLAP = (
    ((3, 2, 4, 8), (64, 31, 8, 1), 31, 32),
    ((3, 2, 4, 8), (72, 41, 8, 1), 72, 73),
    ((3, 2, 4, 8), (64, 31, 1, 4), 31, 32),
    ((3, 5, 2, 4, 8), (400, 71, 40, 8, 1), 71, 72),
)


def zeros(*shape: int, strides: tuple[int, ...] | None = None) -> Change:
    """Other data: zeros of this shape; with strides, in a memory that has room for them."""
    return given(data=torch.zeros(shape) if strides is None else torch.zeros(4000).as_strided(shape, strides))


def wrong_ints(name: str, allowed: str, *values: int) -> list[Refusal]:
    """What is no int, and ints that are not allowed."""
    outside = [(f"{name} {v}", given(**{name: v}), f"^{name} must be from {allowed}, got {v}") for v in values]
    return [(f"{name} 4.0", given(**{name: 4.0}), f"^{name} must be an int, got 4.0", TypeError), *outside]


# State and Slots

DATA = Described("data", POOL_AXES, POOL_AXES, FORMATS, "slot", elsewhere="^seed is on cpu, but the state is on meta")
STATES: list[Refusal] = [
    *[refusal for refusal in wrong(DATA) if refusal[0] not in ("data transposed", "data of higher rank")],
    *[refusal for refusal in wrong(Described("seed", ["slots"], (), (torch.int64,), "whole"))
      if refusal[0] != "seed with slots 1"],  # one number for all slots
    *[(f"data empty along {i}", zeros(*(2 * (j != i) for j in range(4))), "^data must not be empty") for i in range(4)],
    ("data of rank 3", only("data", lambda t: t[0]), r"^data must have shape \(slots, heads, rows, cols\), got \("),
    ("data of snapshots empty", zeros(2, 2, 0, 2, 2), "^data must not be empty"),
    *[(f"data with axes {i} and {j} swapped", given(data=torch.zeros(3, 4, 4, 4).transpose(i, j)), WITHIN)
      for i, j in ((1, 2), (1, 3), (0, 3))],
    *[(f"gaps {strides}", zeros(*shape, strides=strides), rf"{WITHIN} \((any, )+any, 8, 1\), got \(")
      for shape, strides in (
          ((3, 2, 4, 8), (72, 36, 9, 1)), ((3, 2, 4, 8), (80, 40, 1, 5)), ((2, 3, 2, 4, 8), (300, 100, 40, 9, 1)))],
    *[(f"overlap {strides}", zeros(*shape, strides=strides), f"{OVERLAP.format(who)} {got}, which must be {want} ")
      for who, some in (("slots or heads", HEADS_OVERLAP), ("slots", SLOTS_OVERLAP))
      for shape, strides, got, want in some],
    ("reach", given(data=torch.zeros(4, device=META).as_strided((1, 2, 1, 2), (1, (1 << 31) - 2, 2, 1))), REACH),
    ("huge", given(data=torch.zeros(3, 1 << 11, 1 << 10, 1 << 10, device=META)), REACH),
    ("scale for float16", given(scale=torch.ones(3, 2, 4)), "^scale is not for float16"),
    ("rounding up", given(rounding="up"), "^rounding must be one of nearest, .* got 'up'"),
    ("stochastic on float32", only("data", Tensor.float), "^rounding='stochastic' is not for float32, which has"),
    ("stochastic_hw on bfloat16", both(only("data", Tensor.bfloat16), given(rounding="stochastic_hw")),
     "^rounding='stochastic_hw' is not for bfloat16"),
    ("stochastic_hw on a CPU", given(rounding="stochastic_hw"), "^rounding='stochastic_hw' needs an NVIDIA GPU .* cpu"),
    ("no seed", given(seed=None), r"^rounding='stochastic' needs seed: \(slots,\) int64"),
    ("seed for snapshots", only("data", lambda t: t[None]), "^seed is not for snapshots"),
    *wrong_ints("rounds", "1 to 16", 0, 17),
    *wrong_ints("stream", "0 to 4294967295", -1, 1 << 32),
]  # fmt: skip


@pytest.mark.parametrize("axes", [(3,), (3, 2)], ids=["pool", "snapshots"])
@pytest.mark.parametrize("dtype", [torch.int16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_wrong_scales_are_refused_by_name(dtype: torch.dtype, axes: tuple[int, ...]) -> None:
    arguments, outer = scaled_arguments(dtype, *axes), ("slots",) if len(axes) == 1 else ("batch", "T")
    bits = arguments["data"].view(torch.uint8 if dtype.itemsize == 1 else dtype)
    needs = rf"^\w+ needs scale: \({', '.join(outer)}, heads, rows\) float32, one per row"
    overlapping = only("scale", lambda t: t.as_strided(t.shape, (7,) * len(axes) + (4, 1)))
    refuses_all(State, arguments, [
        *wrong(Described("scale", (*outer, "heads", "rows"), (), (torch.float32,), "slot")),
        ("overlapping", overlapping, "^scale has overlapping slots: an axis of stride 7, which must be 8 or more"),
        ("transposed", given(data=transposed(bits).view(dtype)), r"^data of dtype \w+ must not be transposed"),
        ("missing", given(scale=None), needs),
    ])  # fmt: skip


ENTRIES = "must have an entry for each of the 4 tokens, got shape"
TABLES, UNLIKE = ("write", "parents"), f"^parents {ENTRIES}"
READ = "^{name} is on meta, read on cpu"
NUMBERS = [
    Described("read", ("batch", "T"), ("batch", "T"), INDEX_DTYPES, "rows", elsewhere="^write is on cpu, read on meta"),
    *[Described(n, ("batch", "T"), ("T",), INDEX_DTYPES, "rows", elsewhere=READ) for n in ("write", "parents")],
    *[Described(n, ["batch"], (), INDEX_DTYPES, "whole", elsewhere=READ) for n in ("accepted", "snapshot_rows")],
    Described("cu_seqlens", ["batch + 1"], (), INDEX_DTYPES, "whole", elsewhere=READ),
]
MAY_BE_LOWER = ("read of lower rank", "write of lower rank")
SLOTS_REFUSALS: list[Refusal] = [
    *[refusal for d in NUMBERS for refusal in wrong(d) if refusal[0] not in MAY_BE_LOWER],
    ("read without accepted", given(accepted=None), r"^accepted must be given for read \(batch, n\)"),
    *[(f"{name} for 3 tokens", only(name, lambda t: t[:, :3]), rf"^{name} {ENTRIES} \(3, 3\)") for name in TABLES],
    ("parents unlike write", both(given(max_len=None, cu_seqlens=None), only("parents", lambda t: t[:, :3])), UNLIKE),
    ("max_len without cu_seqlens", given(cu_seqlens=None), "^max_len is for packed .* with cu_seqlens"),
    *wrong_ints("max_len", "0 to 2147483647", -1, 1 << 31),
    *wrong_ints("null", "-9223372036854775808 to .*", 1 << 63, -(1 << 63) - 1),
    ("padding ones", given(padding="ones"), "^padding must be one of zero, fresh, keep, got 'ones'"),
]


ADVANCED: list[Refusal] = [
    *wrong(SLOTS),
    ("state without seed", only("state", lambda s: State(s.data)), "^advance needs a state with a seed"),
    ("state elsewhere", both(only("state", on_meta), given(slots=None)), "^state is on meta; flashstate runs on cuda"),
]


@pytest.mark.parametrize(("kind", "most"), [(State, 2), (Slots, 1), (Rotary, 1)])
def test_options_are_given_by_their_names(kind: Any, most: int) -> None:
    with pytest.raises(TypeError, match="positional"):
        kind(*[torch.zeros(1)] * (most + 1))


# Mamba3State and Rotary

MAMBA3_STATES: list[Refusal] = [
    *wrong(Described("ssm", POOL_AXES, POOL_AXES, FORMATS, "slot", {}, STANDS, "^k is on cpu, but the state is on m")),
    *wrong(Described("k", ["slots", "R", "H", "N"], "R", layout="slot")),
    *wrong(Described("v", ["slots", "H", "D"], layout="slot")),
    *wrong(Described("angle", ["slots", "H", "S"], "S", (torch.float32,), "slot")),
    ("k of no rank", only("k", lambda t: t[:, :0]), r"^k must have a rank of 1 or more, got shape \(7, 0, 4"),
    ("k with ranks last", only("k", lambda t: t.movedim(1, 3).contiguous().movedim(3, 1)), "^k must be contiguous wit"),
    *[
        (f"{n} angles", given(angle=torch.zeros(7, 4, n)), f"^angle must have 1 to .* 4 .* per head, got {n}$")
        for n in (0, 5)
    ],
    ("ssm int8 without scales", of_tensor("ssm", Tensor.char), "^ssm of dtype int8 needs a scale"),
    ("ssm of snapshots", of_tensor("ssm", lambda t: State(t[None])), r"^ssm must have data \(slots, "),
    ("ssm a State, transposed", of_tensor("ssm", lambda t: State(transposed(t))), TRANSPOSED),
]


# Ring and Plan

HUGE, INT32 = torch.zeros(7, 4, 7, 1 << 27, device=META), (torch.int32,)


def of_ring(kind: type[AnyRing], per_channel: bool = False) -> list[Refusal]:
    """What rings (7, 2 or 4, 7, 6 or 8) of this class cannot be made of."""
    (first, second, last), rows, cols = kind.written, kind.of_rows, kind.of_cols
    axes = {**kind.axes, **({last: (*kind.axes[last], "K")} if per_channel else {})}
    other_axes = [axis for axis in axes[second] if axis not in axes[first]]
    dtypes = ACTIVATION_DTYPES if per_channel else (torch.float32,)
    here = f"^{{name}} is on meta, but {first} is on cpu"
    return [
        *wrong(
            Described(first, axes[first], axes[first], layout="slot", elsewhere=f"^{second} is on cpu, but {first}")
        ),
        *wrong(Described(second, axes[second], other_axes, layout="slot", elsewhere=here)),
        *wrong(Described(last, axes[last], (), dtypes, "slot", elsewhere=here)),
        *[r for n in ("start", "count") for r in wrong(Described(n, ["slots"], (), INT32, "whole", elsewhere=here))],
        (
            f"3 of {cols}",
            only(cols, lambda t: resized(t, 1, 1)),
            f"^{cols} must .* divides the 4 (value )?heads, got 3",
        ),
        ("one cursor twice", lambda a: {"start": a["count"]}, "^start and count must be two tensors, got one"),
        ("huge", lambda a: {n: HUGE if n == rows else on_meta(t) for n, t in a.items()}, r"fewer than 2\^31"),
        (f"{cols} of no heads", only(cols, lambda t: t[:, :0]), f"^{cols} must not be empty, got shape"),
        ("no rows", only(rows, lambda t: t[..., :0]), f"^{rows} must not be empty"),
        *wrong_ints("window", "1 to 64", 0, 65),
        ("window 7 of 7 rows", given(window=7), f"^{first} must have a length of the window, 7, and the tokens of "),
    ]


OF_COUNT = "^{name} is on meta, but count is on cpu"
PLANS: list[Refusal] = [
    *wrong(Described("rows", ("batch", "numbers"), (), INT32, "whole", elsewhere=OF_COUNT)),
    *wrong(Described("parts", ["numbers"], (), INT32, "whole", elsewhere=OF_COUNT)),
    *wrong(Described("count", ["slots"], ["slots"], INT32, elsewhere="^rows is on cpu, but count is on meta")),
    ("slots a tensor", only("slots", lambda s: s.read), "^slots must be a Slots or None, got Tensor", TypeError),
    ("no slots for a batch of 3", given(slots=None), r"^rows must have shape \(batch=7, numbers=8\)"),
    *wrong_ints("tokens", "0 to 4", -1, 5),
    *wrong_ints("window", "1 to 64", 0, 65),
]


def layer_call(kind: type[AnyRing] = Ring, per_channel: bool = False) -> Arguments:
    """A layer with a ring of 7 rows, of this class, and slots of it."""
    call = step_arguments(replace(REPLAY, tokens=3))
    ring = call["ring"]
    if kind is DeltaRing:
        decay = torch.full((7, 4, 7, 8), 0.5) if per_channel else torch.full((7, 4, 7), -0.5)
        call["ring"] = DeltaRing(ring.B, ring.x, decay, ring.start, ring.count, ring.window)
        call |= {"A_log": torch.zeros(4), "dt_bias": torch.zeros(4)}
    taken = ("A",) if kind is Ring else ("A_log", "dt_bias")
    return {name: call[name] for name in ("state", "ring", "slots", *taken)}


def ring_call(kind: type[AnyRing] = Ring, per_channel: bool = False) -> Arguments:
    """A ring of 7 rows, and what its methods take."""
    call = layer_call(kind, per_channel)
    ring, read = call["ring"], call["slots"]
    numbers = {"accepted": torch.tensor([1, 0, 2]), "tokens": torch.tensor([1, 2, 0])}
    return {"ring": ring, "slots": read, "plan": ring.plan(read, 2), **numbers}


def fold_call(kind: type[AnyRing] = Ring, per_channel: bool = False) -> Arguments:
    """What mamba2_fold or gated_delta_fold takes."""
    call = layer_call(kind, per_channel)
    into = State(torch.zeros_like(call["state"].data, dtype=torch.float32))
    return {**call, "tokens": torch.tensor([1, 2, 0]), "into": into}


def seeded(data: Tensor) -> State:
    return State(data.half(), rounding="stochastic", seed=torch.arange(len(data)))


# plan, commit and folded of a ring, and folds

BOUNDS = torch.tensor([0, 2, 2, 5])
NOT_KEPT, NO_TOKENS = "is not for replay, which keeps tokens in", "is not for folding, which has no new tokens"
OF_RING = wrong(SLOTS._replace(elsewhere="^slots are on meta, but the ring is on cpu"))
PLANNED: list[Refusal] = [
    *OF_RING,
    *wrong_ints("tokens", "1 to 4", 0, 5),
    ("4 tokens", given(tokens=4), "^the ring has 7 rows, so beside its window of 4 a call may have 3 tokens per row"),
    ("tokens of packed", at(cu_seqlens=BOUNDS, max_len=2), "^tokens is not for packed tokens, whose number slots.cu"),
    ("slots.write", at(write=torch.clone), f"^slots.write {NOT_KEPT}"),
    *[
        (f"max_len {n}", both(at(cu_seqlens=BOUNDS, max_len=n), given(tokens=None)), message)
        for n, message in ((None, "^packed tokens need slots.max_l"), (4, "^the ring has 7 rows, so"), (5, "4, got 5"))
    ],
    ("elsewhere", both(only("ring", on_meta), given(slots=None)), "^state is on meta; flashstate runs on cuda and cpu"),
]
COMMITTED: list[Refusal] = [
    *wrong(Described("accepted", ["batch"], (), INDEX_DTYPES, "whole")),
    ("plan a tensor", only("plan", lambda p: p.rows), "^plan must be a Plan, got Tensor", TypeError),
    ("plan of another ring", only("plan", lambda p: replace(p, count=p.count.clone())), OTHER_RING),
    ("plan elsewhere", only("plan", on_meta), OTHER_RING),
    ("plan of another window", other("ring", window=3), "^plan was made for .* of 4, "),
]
TO_FOLD: list[Refusal] = [
    *wrong(Described("tokens", ["batch"], (), INDEX_DTYPES, "whole"))[1:],  # but a list
    *wrong_ints("tokens", "0 to 4", -1, 5),
    ("slots.accepted", at(accepted=torch.ones_like), f"^slots.accepted {NO_TOKENS}"),
    ("slots.cu_seqlens", at(cu_seqlens=BOUNDS), f"^slots.cu_seqlens {NO_TOKENS}"),
]
FOLDED: list[Refusal] = [
    *OF_RING, *TO_FOLD,
    ("tokens of all slots", given(slots=None), r"^tokens must have shape \(batch=7\), got \(3,\)"),
    ("slots.write", at(write=torch.clone), f"^slots.write {NOT_KEPT}"),
]  # fmt: skip


SHARED: dict[str, Callable[[State], State | Tensor]] = {
    "the state": lambda s: s,
    "some of its slots": lambda s: s.data[3:],
}


def of_fold(op: str, kind: type[AnyRing]) -> list[Refusal]:
    """What the fold of rings of this class refuses."""
    one_each = f"^slots.write is for {op} with into, whose slots it names, one per row"
    here = f"^ring.{kind.of_rows} is on cpu, but the state is"
    states = r"^into must have states \(4, 6, 8\), got"
    return [
        *wrong(SLOTS),
        *TO_FOLD,
        *wrong_rings(kind),
        *wrong(Described("state", POOL_AXES, POOL_AXES, FORMATS, "slot", {}, STANDS, here)),
        *wrong(Described("into", POOL_AXES, POOL_AXES, FORMATS, "slot", {}, STANDS)),
        ("write in place", both(given(into=None), at(write=torch.clone)), one_each),
        ("write per token", at(write=columns(2)), one_each),
        ("slots.parents", at(parents=columns(1)), f"^slots.parents {NO_TOKENS}"),
        ("slots.snapshot_rows", at(snapshot_rows=torch.clone), f"^slots.snapshot_rows {NO_TOKENS}"),
        ("into of snapshots", of_tensor("into", lambda t: State(t[None])), r"^into must have data \(slots, "),
        ("into int8, no scales", of_tensor("into", Tensor.char), "^into of dtype int8 needs a scale"),
        ("into of other rows", of_tensor("into", lambda t: resized(t, 2, 1)), states),
        ("into of fewer slots", only("into", cut), "^into must have 7 slots as the state has, or slots.write to say"),
        *[
            (
                f"into {what}",
                lambda a, view=view: {"into": view(a["state"])},
                "^into must not share memory with the state",
            )
            for what, view in SHARED.items()
        ],
        (
            "into without seeds",
            both(only("state", lambda s: State(s.data)), of_tensor("into", seeded)),
            "^into with rounding='stochastic' needs a state with a seed, got seed=None",
        ),
    ]


FOLDS: list[Refusal] = [
    *of_fold("mamba2_fold", Ring),
    *wrong(Described("A", ["heads"], (), layout="whole", tied={"rows": 6, "cols": 8})),
    ("A missing", given(A=None), "^A must be a tensor, got NoneType", TypeError),
    ("A per element", only("A", lambda t: t[:, None, None].repeat(1, 6, 8)), "^A must have one value per head, "),
]
GATES: list[Refusal] = [
    *wrong(Described("A_log", ["HV"], (), layout="whole")),
    *wrong(Described("dt_bias", ["HV"], (), layout="whole", tied={"K": 8})),
    ("dt_bias alone", given(A_log=None), "^dt_bias must come with A_log: without it a is the logarithm of the decay"),
    *[(f"qk_l2norm {v!r}", given(qk_l2norm=v), "^qk_l2norm must be True or False, got", TypeError) for v in (1, None)],
]
PER_HEAD: Refusal = (
    "dt_bias alone per channel", only("dt_bias", lambda t: t[:, None].repeat(1, 8)),
    r"^dt_bias must have shape \(HV=4\) where a ring has one decay per head, got \(4, 8\)",
)  # fmt: skip
RINGS: dict[str, tuple[type[AnyRing], bool]] = {
    "Ring": (Ring, False), "DeltaRing": (DeltaRing, False), "DeltaRing per channel": (DeltaRing, True)
}  # fmt: skip


# All of it

Call = tuple[Callable[..., Any], Callable[[], Arguments], list[Refusal]]
CALLS: dict[str, Call] = {
    "State": (State, state_arguments, STATES),
    "Slots": (Slots, slots_arguments, SLOTS_REFUSALS),
    "Rotary": (
        lambda **a: Rotary(torch.zeros(1, 3), **a),
        lambda: {"pairing": None},
        [("pairing both", given(pairing="both"), "^pairing must be one of interleaved, halved, got 'both'")],
    ),
    "Mamba3State": (Mamba3State, lambda: fields_of(step_arguments(MAMBA3)["state"]), MAMBA3_STATES),
    **{name: (of[0], lambda of=of: fields_of(ring_call(*of)["ring"]), of_ring(*of)) for name, of in RINGS.items()},
    "Plan": (Plan, lambda: fields_of(ring_call()["plan"]), PLANS),
    "advance": (lambda **a: a["state"].advance(a["slots"]), step_arguments, ADVANCED),
    **{
        f"{method} of {kind.__name__}": (call, lambda kind=kind, more=more: {**ring_call(kind), **more}, refusals)
        for kind in (Ring, DeltaRing)
        for method, call, more, refusals in (
            ("plan", lambda **a: a["ring"].plan(a["slots"], a["tokens"]), {"tokens": 2}, PLANNED),
            ("commit", lambda **a: a["ring"].commit(a["plan"], a["accepted"]), {}, COMMITTED),
            ("folded", lambda **a: a["ring"].folded(a["slots"], a["tokens"]), {}, FOLDED),
        )
    },
    "mamba2_fold": (mamba2_fold, fold_call, FOLDS),
    "gated_delta_fold": (
        gated_delta_fold,
        lambda: fold_call(DeltaRing),
        [*of_fold("gated_delta_fold", DeltaRing), *GATES, PER_HEAD],
    ),
    "gated_delta_fold per channel": (gated_delta_fold, lambda: fold_call(DeltaRing, True), GATES),
}


@pytest.mark.parametrize("name", CALLS)
def test_wrong_input_is_refused_by_name_and_changes_nothing(name: str) -> None:
    call, arguments, refusals = CALLS[name]
    refuses_all(call, arguments(), refusals)


# What debug() finds, and calls that are right


def with_cursor(name: str, value: int) -> Change:
    """A ring with another number in slot 0."""
    return other("ring", **{name: lambda t: t.index_fill(0, torch.tensor([0]), value)})


MEET: list[Refusal] = [
    ("two rows", only("slots", lambda t: t[[0, 1, 1]]), r"^slots write slot \d more than once: rows 1, 2"),
    ("a slot past the pool", only("slots", lambda t: t + 7), r"read slot \d+", IndexError),
]
CURSORS: list[Refusal] = [
    (f"{name} {value}", with_cursor(name, value), r"^ring.start must be below .* slot \d")
    for name in ("start", "count")
    for value in (-1, 99)
]
ELSEWHERE: list[Refusal] = [
    ("two rows elsewhere", at(write=lambda t: t * 0 + 1), "^slots write slot 1 more than once: rows 0, 1, 2"),
    ("another row's", at(write=lambda t: t.flip(0)), r"^slots let row 0 write slot \d, which row 2 reads"),
]
FIRST_SLOTS = {"slots": torch.arange(3)}
DEBUGGED: dict[str, Call] = {
    "mamba3_step": (mamba3_step, lambda: step_arguments(MAMBA3), [*MEET, *ELSEWHERE]),
    "mamba2_replay": (mamba2_replay, lambda: {**step_arguments(REPLAY), **FIRST_SLOTS}, [*MEET, *CURSORS]),
    **{
        op.__name__: (op, lambda kind=kind: {**fold_call(kind), **FIRST_SLOTS, "into": None}, [*MEET, *CURSORS])
        for op, kind in ((mamba2_fold, Ring), (gated_delta_fold, DeltaRing))
    },
}


@pytest.mark.parametrize("name", DEBUGGED)
def test_rows_that_meet_are_found_by_debug(name: str) -> None:
    call, arguments, refusals = DEBUGGED[name]
    with debug():
        refuses_all(call, arguments(), refusals)
        call(**arguments())


def test_packed_rows_of_wrong_lengths_are_found_by_debug() -> None:
    mamba3, delta = (step_arguments(replace(case, tokens=3, packed=True)) for case in (MAMBA3, DELTA))
    falling = at(cu_seqlens=mamba3["slots"].cu_seqlens.flip(0))
    with debug():
        refuses_all(mamba3_step, mamba3, [("falling", falling, "^slots.cu_seqlens ")])
        at_once, cut_off = {**delta, "exact": False, "snapshots": None}, "^slots.cu_seqlens has a row of 3 tokens"
        refuses_all(gated_delta_step, at_once, [("too short", at(max_len=2), cut_off)])


KDA, MAMBA1 = replace(DELTA, per_channel=True), replace(CASE, mamba1=True, D="row")


@pytest.mark.parametrize("case", [DELTA, replace(DELTA, tokens=1), KDA, CASE, replace(CASE, tokens=1), MAMBA1], ids=str)
def test_one_token_does_not_care_whether_tokens_may_go_at_once(case: Case | DeltaCase) -> None:
    # dtypes that several tokens at once must not have
    wide = replace(case, qk="float32") if isinstance(case, DeltaCase) else case
    exact, at_once = (step_arguments(replace(wide, exact=exact)) for exact in (True, False))
    for arguments in (exact, at_once):
        case.op.step(**arguments)
    for name in ("out", "snapshots", "state"):
        assert all(map(torch.equal, tensors_of(exact[name]), tensors_of(at_once[name])))
