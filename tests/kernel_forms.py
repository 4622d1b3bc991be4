"""Forms of calls whose kernels are compiled without a GPU: every op, by what a call brings and stores."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from compiling import CPU, Call, by_the_reference, plain

from flashstate.launch import Problem
from flashstate.ops.replaying import parted
from flashstate.proof import (
    AnyCase,
    AnyReplayCase,
    Case,
    ConvCase,
    DeltaCase,
    DeltaReplayCase,
    Inputs,
    Mamba3Case,
    ReplayCase,
)
from flashstate.proof.laws.steps import make_snapshots
from flashstate.proof.laws.tokens import TREE

BFLOAT16 = {"x": "bfloat16", "slots": 4}
MAMBA2 = Case(2, 16, 1, 64, 64, bc="bfloat16", dt="bfloat16", **BFLOAT16)
MAMBA2_AT_ONCE = replace(MAMBA2, tokens=6, exact=False)
DELTA = DeltaCase(2, 64, 16, 128, 64, qk="bfloat16", gates="bfloat16", **BFLOAT16)
AT_ONCE = replace(DELTA, tokens=4, exact=False)
MIMO = Mamba3Case(2, 48, 1, 64, 64, rank=4, angles=0, bc="bfloat16", kv="bfloat16", **BFLOAT16)
SISO = replace(MIMO, rank=1)
CONV = ConvCase(2, 1280, 4, parameters="bfloat16", **BFLOAT16)
REPLAY = ReplayCase(2, 16, 1, 64, 64, x="bfloat16", dt="bfloat16", slots=3)
DELTA_REPLAY = DeltaReplayCase(2, 64, 16, 128, 64, qk="bfloat16", gates="bfloat16", **{**BFLOAT16, "slots": 3})


def kept(case: AnyCase, inputs: Inputs) -> object:
    return inputs.step(update=False)


def early(case: AnyCase, inputs: Inputs) -> object:
    return inputs.step(early=True)


def paged(case: AnyCase, inputs: Inputs) -> object:
    """Separate write slots, 64-bit slot numbers and a slot stride past 32 bits."""
    data = inputs.state.data
    far = data[:1].as_strided((1, *data.shape[1:]), ((1 << 31) + 16, *data.stride()[1:]))
    inputs.state = replace(inputs.state, data=far, seed=None)
    slots = inputs.slots.long()
    return inputs.step(slots=inputs.at(read=slots, write=slots))


def written_per_token(case: AnyCase, inputs: Inputs) -> object:
    read = inputs.slots[:, None].expand(-1, 3).contiguous()
    write = torch.arange(case.batch * case.tokens).reshape(case.batch, case.tokens)
    return inputs.step(slots=inputs.at(read=read, accepted=inputs.slots, write=write))


def with_snapshots(case: AnyCase, inputs: Inputs) -> object:
    """In another format."""
    snapshots = make_snapshots(case, "int8", "stochastic", CPU)
    return inputs.step(slots=inputs.at(snapshot_rows=inputs.slots), snapshots=snapshots)


def with_snapshots_alike(case: AnyCase, inputs: Inputs) -> object:
    """In the format and the rounding of the states."""
    snapshots = make_snapshots(case, case.format, case.rounding, CPU)
    return inputs.step(slots=inputs.at(snapshot_rows=inputs.slots), snapshots=snapshots)


def with_other_snapshots(case: DeltaCase, inputs: Inputs) -> object:
    """In the other layout."""
    other = replace(case, transposed=not case.transposed)
    return inputs.step(snapshots=make_snapshots(other, case.format, "nearest", CPU))


def with_a_tree(case: AnyCase, inputs: Inputs) -> object:
    parents = torch.tensor(TREE[: case.tokens]).repeat(case.batch, 1)
    return inputs.step(slots=inputs.at(parents=parents), update=False)


def a_tree_of_one_token(case: AnyCase, inputs: Inputs) -> object:
    """A slot of its own and a snapshot in another format beside it."""
    numbers = inputs.slots[:, None]
    slots = inputs.at(write=numbers.contiguous(), parents=torch.full_like(numbers, -1), padding="fresh")
    return inputs.step(slots=slots, snapshots=make_snapshots(replace(case, tokens=1), "int8", "stochastic", CPU))


def with_fresh_padding(case: AnyCase, inputs: Inputs) -> object:
    return inputs.step(slots=inputs.at(padding="fresh"))


def with_kept_padding(case: AnyCase, inputs: Inputs) -> object:
    return inputs.step(slots=inputs.at(padding="keep"))


def rolled_back(case: ConvCase, inputs: Inputs) -> object:
    return inputs.step(slots=inputs.at(accepted=torch.zeros_like(inputs.slots)))


def in_a_ring(case: ConvCase, inputs: Inputs) -> object:
    return inputs.step(positions=inputs.slots + 0)


def planned(case: AnyReplayCase, inputs: Any) -> object:
    """Every row does what a plan says, in one kernel."""
    with by_the_reference():
        plan = inputs.plan()
    return inputs.step(plan=plan)


def keep(case: AnyReplayCase, inputs: Any) -> object:
    """Rows of a plan in a kernel for those that do not fold, beside one for others."""
    with parted():
        return planned(case, inputs)


def fold(case: AnyReplayCase, inputs: Any) -> object:
    """Rows of a plan in a kernel for those that fold, beside one for others."""
    return keep(case, inputs)


def folded(case: AnyReplayCase, inputs: Any) -> object:
    return inputs.fold()


STORES_NOTHING = (kept, with_a_tree, keep)


class Form(NamedTuple):
    """A call, and how many bytes its kernel may spill."""

    case: AnyCase
    call: Call = plain
    spills: int = 0

    def __str__(self) -> str:
        return f"{self.case}-{self.call.__name__}"


def of(case: AnyCase, call: Call = plain, spills: int = 0, **fields: Any) -> Form:
    """A call with a case that has these fields."""
    return Form(replace(case, **fields), call, spills)


STOCHASTIC = {"rounding": "stochastic"}
HALF = {"format": "float16", **STOCHASTIC}
TWO = {"tokens": 2}  # of more the slowest forms take several times as long to compile
WIDE = {"cols": 128}  # as models have; with 64 columns a kernel takes half as long to compile
FORMS: dict[str, dict[str, Form]] = {  # of every op in every format; of the first, formats with all their roundings
    "mamba2": {
        "plain": of(MAMBA2, **WIDE),
        "bfloat16": of(MAMBA2, format="bfloat16"),
        "int16": of(MAMBA2, format="int16", **STOCHASTIC),
        "int8": of(MAMBA2, format="int8", **STOCHASTIC),
        "float8": of(MAMBA2, format="float8_e4m3fn", **STOCHASTIC),
        "paged": of(MAMBA2, paged, format="float16"),
        "without update": of(MAMBA2, kept, D="row", **HALF),
        "several tokens": of(MAMBA2, tokens=4, D="row", **HALF, **WIDE),
        "packed tokens": of(MAMBA2, with_kept_padding, tokens=4, packed=True, format="bfloat16", **STOCHASTIC),
        "a slot for every token": of(MAMBA2, written_per_token, **TWO, format="int8", **STOCHASTIC),
        "snapshots": of(MAMBA2, with_snapshots, **TWO),
        "a tree": of(MAMBA2, with_a_tree, tokens=4, format="float8_e4m3fn"),
        "fresh padding": of(MAMBA2, with_fresh_padding, tokens=4, format="int16"),
        "Mamba-1": of(MAMBA2, heads=1, rows=256, cols=16, mamba1=True, D="row", format="int8"),
    },
    "mamba2 at once": {
        "bfloat16": of(MAMBA2_AT_ONCE, format="bfloat16", **WIDE),
        "float8": of(MAMBA2_AT_ONCE, format="float8_e4m3fn", **STOCHASTIC),
        "16 tokens, a D for every row": of(MAMBA2_AT_ONCE, tokens=16, D="row", **HALF),
        "without update": of(MAMBA2_AT_ONCE, kept),
        "packed": of(MAMBA2_AT_ONCE, with_kept_padding, tokens=16, packed=True, format="int16"),
        "fresh padding": of(MAMBA2_AT_ONCE, with_fresh_padding, format="int8", **STOCHASTIC, z=False),
    },
    "gated delta": {
        "plain": of(DELTA, **WIDE),
        "bfloat16": of(DELTA, format="bfloat16"),
        "paged": of(DELTA, paged, format="float16"),
        "KDA": of(DELTA, per_channel=True, format="float8_e4m3fn", **STOCHASTIC),
        "log-decay": of(DELTA, raw=False, qk_l2norm=False, format="bfloat16", **STOCHASTIC),
        "one token of a tree": of(DELTA, a_tree_of_one_token, **HALF),
        "one token, kept padding": of(DELTA, with_kept_padding, format="int8", **STOCHASTIC),
        "one token, fresh padding": of(DELTA, with_fresh_padding, format="int16", **STOCHASTIC),
        "one token, transposed": of(DELTA, transposed=True),
        "several tokens": of(DELTA, tokens=4, **HALF, **WIDE),
        "several tokens, packed": of(DELTA, with_kept_padding, tokens=4, packed=True, format="bfloat16"),
        "several tokens, KDA": of(DELTA, tokens=4, per_channel=True, raw=False, format="int8"),
        "a slot for every token": of(DELTA, written_per_token, **TWO, format="int8", **STOCHASTIC),
        "snapshots": of(DELTA, with_snapshots, **TWO),
        "a tree": of(DELTA, with_a_tree, tokens=4, format="int8"),
        "transposed": of(DELTA, **TWO, format="bfloat16", **STOCHASTIC, transposed=True),
        "transposed snapshots": of(DELTA, with_other_snapshots, **TWO),
    },
    "gated delta at once": {
        "plain": of(AT_ONCE, **WIDE),
        "bfloat16": of(AT_ONCE, format="bfloat16"),
        "float8": of(AT_ONCE, format="float8_e4m3fn", **STOCHASTIC),
        "16 tokens": of(AT_ONCE, tokens=16),
        "without update": of(AT_ONCE, kept, format="bfloat16"),
        "packed": of(AT_ONCE, with_kept_padding, tokens=16, packed=True, format="int16"),
        "fresh padding": of(AT_ONCE, with_fresh_padding, format="int8", **STOCHASTIC, raw=False),
        "float16, transposed": of(AT_ONCE, **HALF, transposed=True),
    },
    "mamba3": {
        "plain": of(MIMO, spills=64, **WIDE),
        "turned": of(MIMO, angles=32, spills=64, format="bfloat16", **STOCHASTIC),
        "rank 1": of(SISO, spills=64, **HALF, **WIDE),
        "float8": of(SISO, angles=32, spills=64, format="float8_e4m3fn", **STOCHASTIC),
    },
    "mamba3 elsewhere": {  # than on the GPU that has a table
        "plain": of(MIMO),
        "rank 1": of(SISO, **HALF),
        "rank 1, turned": of(SISO, angles=32, format="int16", **STOCHASTIC),
        "int8": of(MIMO, format="int8", **STOCHASTIC),
    },
    "convolution": {
        "plain": of(CONV),
        "several tokens": of(CONV, tokens=4),
        "float32 windows": of(CONV, window="float32"),
        "packed": of(CONV, with_kept_padding, tokens=4, packed=True),
        "longer windows": of(CONV, extra=2),
        "rolled back": of(CONV, rolled_back, tokens=4, extra=4),
        "a ring": of(CONV, in_a_ring, tokens=4, extra=1),
        "snapshots": of(CONV, with_snapshots_alike, tokens=4),
        "a tree": of(CONV, with_a_tree, tokens=4),
        "a slot for every token": of(CONV, written_per_token, tokens=4),
        "width 8, no bias": of(CONV, width=8, bias=False, activation=None),
        "width 7, rolled back": of(CONV, rolled_back, tokens=4, extra=4, width=7),
        "width 3": of(CONV, tokens=4, width=3, parameters="float32"),
    },
    "replay": {
        "one token": of(REPLAY, spills=64, **WIDE),
        "one token, planned": of(REPLAY, planned, 64),
        "one token, keep": of(REPLAY, keep, 64),
        "one token, fold": of(REPLAY, fold, 64),
        "keep": of(REPLAY, keep, 128, **TWO, **WIDE),
        "keep, float16": of(REPLAY, keep, 128, format="float16", **TWO),
        "two tokens, fresh padding": of(REPLAY, with_fresh_padding, 128, cols=32, **TWO),
    },
    "replay elsewhere": {  # than on the GPU that has a table
        "fold": of(REPLAY, fold, format="int8", **STOCHASTIC),
        "keep": of(REPLAY, keep, format="bfloat16", tokens=6),
        "either": of(REPLAY, cols=32, format="int16", x="float32"),
        "fold, 16 tokens": of(REPLAY, fold, cols=32, tokens=16, **HALF),
        "mamba2_fold": of(REPLAY, folded),
    },
    "delta replay": {
        "one token": of(DELTA_REPLAY, keep),
        "one token, planned": of(DELTA_REPLAY, planned, 64, format="int8", **STOCHASTIC),
        "one token, keep": of(DELTA_REPLAY, keep, format="bfloat16"),
        "one token, fold": of(DELTA_REPLAY, fold, 64, format="bfloat16"),  # a few, so that more programs run at once
        "KDA, keep": of(DELTA_REPLAY, keep, 128, per_channel=True, format="float8_e4m3fn"),
        "keep": of(DELTA_REPLAY, keep, **TWO, **WIDE, format="bfloat16"),
        "two tokens, fresh padding": of(DELTA_REPLAY, with_fresh_padding, 64, cols=32, **TWO, **HALF),
        "gated_delta_fold": of(DELTA_REPLAY, folded, format="bfloat16"),
    },
    "delta replay elsewhere": {  # than on the GPU that has a table
        "fold, nine tokens": of(DELTA_REPLAY, fold, cols=32, tokens=9, format="int8", **STOCHASTIC),
        "KDA, two tokens": of(DELTA_REPLAY, keep, cols=32, **TWO, per_channel=True, format="bfloat16"),
        "either": of(DELTA_REPLAY, cols=32, format="int16", qk="float32", u="float32"),
        "gated_delta_fold of KDA": of(DELTA_REPLAY, folded, per_channel=True, format="float16"),
    },
}
ODD: dict[str, Form] = {  # shapes whose rows are no multiple of an access, or wide
    "mamba2 48x16": of(MAMBA2, heads=6, groups=2, rows=48, cols=16, tokens=2, D=None, format="int8", **STOCHASTIC),
    "mamba2 80x20": of(MAMBA2, heads=8, groups=4, rows=80, cols=20, tokens=2, packed=True, format="int16"),
    "mamba2 96x96": of(MAMBA2, heads=12, groups=12, rows=96, cols=96, tokens=2, format="bfloat16", **STOCHASTIC),
    "mamba2 128x256": of(MAMBA2, heads=4, rows=128, cols=256, dt_softplus=False, format="int8"),
    "mamba2 33x7": of(MAMBA2, heads=3, rows=33, cols=7, tokens=2, dt_bias=False, **HALF),
    "Mamba-1 1536x16": of(MAMBA2, heads=1, rows=1536, cols=16, mamba1=True, D="row", format="float8_e4m3fn"),
    "mamba2 64x512": of(MAMBA2, heads=2, cols=512),
    "mamba2 at once 33x20": of(MAMBA2_AT_ONCE, heads=6, groups=2, rows=33, cols=20, tokens=9, format="int8"),
    "gated delta 96x64": of(DELTA, heads=12, key_heads=4, rows=96, cols=64, tokens=3, qk_l2norm=False, scale=0.125),
    "gated delta 256x256": of(DELTA, heads=4, key_heads=2, rows=256, cols=256, format="bfloat16", **STOCHASTIC),
    "gated delta at once 33x20": of(AT_ONCE, heads=6, key_heads=2, rows=33, cols=20, tokens=9, format="int8"),
    "transposed 96x64": of(
        DELTA, heads=4, key_heads=2, rows=96, cols=64, transposed=True, per_channel=True, format="float16"
    ),
    "transposed 33x20": of(
        DELTA, heads=4, key_heads=1, rows=33, cols=20, transposed=True, tokens=3, packed=True, format="bfloat16"
    ),
}  # fmt: skip
ODD_REPLAY = ReplayCase(3, 4, 2, 33, 20, x="float16", D="row", spare=1)
ODD_DELTA_REPLAY = DeltaReplayCase(3, 4, 2, 33, 20, x="float16", qk="float16", spare=1)
ODD_MAMBA3 = Mamba3Case(3, 4, 2, 33, 20, rank=3, angles=7, tokens=2, x="float16", kv="float16")
ODD_WITH_TENSOR_CORES = (
    Form(ODD_MAMBA3),
    of(ODD_REPLAY, plain, 64, window=9),
    of(ODD_REPLAY, tokens=2, packed=True, window=9, **HALF),
    of(ODD_MAMBA3, rows=40, cols=36, rank=1, angles=18, packed=True, trap_logit=True, x="float32"),
    of(ODD_REPLAY, keep, 64, window=9),
    of(ODD_REPLAY, fold, tokens=2, packed=True, window=17, format="float8_e4m3fn"),
    of(ODD_REPLAY, fold, 64, window=9),
    of(ODD_DELTA_REPLAY, keep, window=9),
    of(ODD_DELTA_REPLAY, fold, tokens=2, packed=True, window=17, format="int8"),
)
BASES = {
    "mamba2_step": MAMBA2, "mamba2_at_once": MAMBA2, "gated_delta": DELTA, "mamba3": MIMO, "conv1d": CONV,
    "mamba2_replay": REPLAY, "gated_delta_replay": DELTA_REPLAY,
}  # fmt: skip


def calls_of(mode: Problem) -> tuple[Call, ...]:
    """Calls that a table has such entries for. Of several tokens by replay there are none here: they take longest."""
    if "_replay" in mode.op:
        forms = {"either": plain, "keep": keep, "fold": fold}
        return () if mode.several_tokens else (forms[mode.op.split()[-1]],)
    return {"last": (plain,), "every": (written_per_token, with_snapshots_alike), "none": (kept,)}[mode.stored]
