"""Calls of all ops, by their forms: what they are given, stored and told."""

from dataclasses import fields, replace
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch
from compiling import by_the_reference
from refusals import Arguments, Change, at, both, given, of_tensor, only

from flashstate import State
from flashstate.launch.call import Op
from flashstate.ops.conv1d import CONV1D_STEP
from flashstate.ops.gated_delta import GATED_DELTA_STEP
from flashstate.ops.gated_delta_replay import GATED_DELTA_REPLAY
from flashstate.ops.mamba2 import MAMBA2_STEP
from flashstate.ops.mamba2_replay import MAMBA2_REPLAY
from flashstate.ops.mamba3 import MAMBA3_STEP
from flashstate.proof import (
    CASES,
    AnyCase,
    Case,
    ConvCase,
    DeltaCase,
    DeltaReplayCase,
    Inputs,
    Mamba3Case,
    ReplayCase,
    make_inputs,
)
from flashstate.proof.case import StateCase

CPU = torch.device("cpu")
C = TypeVar("C", bound=AnyCase)

MAMBA2 = Case(2, 4, 2, 16, 32, slots=12)
DELTA = DeltaCase(2, 4, 2, 16, 32, x="float16", qk="float16", slots=12)
CONV = ConvCase(2, 16, 4, slots=12)
MAMBA3 = Mamba3Case(2, 4, 2, 16, 32, rank=4, angles=8, x="bfloat16", bc="bfloat16", slots=12)
REPLAY = ReplayCase(2, 4, 2, 16, 32, x="bfloat16", window=8, slots=12)
DELTA_REPLAY = DeltaReplayCase(2, 4, 2, 16, 32, x="bfloat16", qk="bfloat16", window=8, slots=12)


def arguments_of(op: Op, inputs: Inputs, **given: Any) -> Arguments:
    """All arguments of a call of an op, by their names; these of them are changed."""
    with by_the_reference(), mock.patch.object(op, "call", lambda *values: values):
        return {**dict(zip(op.hints, inputs.step(), strict=True)), **given}


class Form(NamedTuple):
    """A call: of this op, with inputs of this case, and changed so. bare: its states also come as a tensor."""

    op: Op
    case: AnyCase
    change: Change = lambda a: {}
    bare: bool = True

    @property
    def arguments(self) -> Arguments:
        """All arguments of the call, by their names: with `out`, and on tensors of its own."""
        inputs = make_inputs(self.case, CPU)
        with by_the_reference():
            found = arguments_of(self.op, inputs, slots=inputs.at(), out=torch.empty_like(inputs.main))
            return {**found, **self.change(found)}


def on(op: Op, case: AnyCase, change: Change = lambda a: {}, bare: bool = True, **fields: Any) -> Form:
    """A call of an op, with inputs of a case with these fields."""
    return Form(op, replace(case, **fields), change, bare)


def shaped(case: C, **sizes: Any) -> C:
    """A case with those of these sizes that it has."""
    return replace(case, **{field.name: sizes[field.name] for field in fields(case) if field.name in sizes})


def in_place(a: Arguments) -> Arguments:
    return {"out": a["v" if "v" in a else "x"]}


def with_snapshots(name: str, rounding: str) -> Change:
    def change(a: Arguments) -> Arguments:
        data = torch.zeros(4, 4, *a["state"].data.shape[1:], dtype=getattr(torch, name))
        return {"snapshots": State(data, torch.ones(data.shape[:-1]) if name == "int8" else None, rounding=rounding)}

    return change


def planned(a: Arguments) -> Arguments:
    """A plan for its slots in the place of these."""
    main = a["v" if "v" in a else "x"]
    tokens = None if a["slots"].cu_seqlens is not None else 1 if main.dim() == 3 else main.shape[1]
    return {"slots": None, "plan": a["ring"].plan(a["slots"], tokens)}


PER_TOKEN = torch.arange(6).reshape(2, 3)
TREE = both(at(parents=torch.tensor([[-1, 0, 0]] * 2)), given(update=False))
CHOSEN = at(read=PER_TOKEN, accepted=torch.tensor([1, 3]), write=torch.clone)
STORED = both(at(snapshot_rows=torch.tensor([1, 0])), with_snapshots("int8", "nearest"))


def forms_of_states(op: Op, case: AnyCase) -> dict[str, Form]:
    """Forms that all ops on states have."""
    return {
        "plain": on(op, case),
        "float16": on(op, case, bare=False, format="float16", rounding="stochastic"),
        "int8": on(op, case, bare=False, format="int8", rounding="stochastic"),
        "float8": on(op, case, bare=False, format="float8_e4m3fn"),
        "a tensor of slots": on(op, case, only("slots", lambda slots: slots.read)),
        "several tokens": on(op, case, tokens=3),
        "packed": on(op, case, tokens=3, packed=True),
    }


def forms_of_rings(op: Op, case: AnyCase) -> dict[str, Form]:
    """Forms that ops have which replay."""
    return {
        **forms_of_states(op, case),
        "a plan": on(op, case, planned, tokens=3),
        "a plan of packed tokens": on(op, case, planned, tokens=3, packed=True),
    }


def forms_of_steps(op: Op, case: AnyCase) -> dict[str, Form]:
    """Forms that ops have which store a state after every token."""
    return {
        **forms_of_states(op, case),
        "in place": on(op, case, in_place),
        "slots to write": on(op, case, at(write=lambda read: read.flip(0))),
        "a slot for every token": on(op, case, at(write=PER_TOKEN), tokens=3),
        "slots to choose from": on(op, case, CHOSEN, tokens=3),
    }


def forms_of_trees(op: Op, case: AnyCase) -> dict[str, Form]:
    """Forms that ops have which take snapshots and draft trees, and start early."""
    return {
        **forms_of_steps(op, case),
        "snapshots": on(op, case, STORED, tokens=3),
        "stochastic snapshots": on(op, case, with_snapshots("float16", "stochastic"), bare=False, tokens=3),
        "a tree": on(op, case, TREE, tokens=3),
    }


AT_ONCE = {"tokens": 3, "exact": False}
SIZES = {"batch": 2, "heads": 4, "groups": 2, "rows": 16, "cols": 32, "slots": 12, "index": "int32"}
SMALL = {name: shaped(cases.odd[0], **SIZES) for name, cases in CASES.items()}
OPS = tuple(case.op.declared for case in SMALL.values())
BY_NAME = {op.name: op for op in OPS}
FORMS: dict[str, dict[str, Form]] = {  # of ops that are not named here, those that all on states have
    **{name: forms_of_states(case.op.declared, case) for name, case in SMALL.items() if isinstance(case, StateCase)},
    "mamba2_step": {
        **forms_of_trees(MAMBA2_STEP, MAMBA2),
        "Mamba-1": on(MAMBA2_STEP, MAMBA2, heads=1, groups=1, mamba1=True, D="row"),
        "limited time steps": on(MAMBA2_STEP, MAMBA2, dt_limit=(0.25, 2.0)),
        "at once": on(MAMBA2_STEP, MAMBA2, **AT_ONCE, bc="float16"),
        "at once, packed": on(MAMBA2_STEP, MAMBA2, **AT_ONCE, bc="float16", packed=True),
        "at once, packed, longer": on(MAMBA2_STEP, MAMBA2, at(max_len=9), **AT_ONCE, bc="float16", packed=True),
    },
    "gated_delta_step": {
        **forms_of_trees(GATED_DELTA_STEP, DELTA),
        "without A_log": on(GATED_DELTA_STEP, DELTA, raw=False),
        "KDA": on(GATED_DELTA_STEP, DELTA, per_channel=True),
        "a scale": on(GATED_DELTA_STEP, DELTA, scale=0.7),
        "transposed": on(GATED_DELTA_STEP, DELTA, transposed=True),
        "transposed snapshots": on(
            GATED_DELTA_STEP, DELTA, given(snapshots=State(torch.zeros(4, 4, 4, 32, 16).mT)), tokens=3
        ),
        "at once": on(GATED_DELTA_STEP, DELTA, **AT_ONCE),
        "at once, packed": on(GATED_DELTA_STEP, DELTA, **AT_ONCE, packed=True),
        "at once, packed, longer": on(GATED_DELTA_STEP, DELTA, at(max_len=9), **AT_ONCE, packed=True),
    },
    "mamba3_step": {
        **forms_of_steps(MAMBA3_STEP, MAMBA3),
        "rank 1": on(MAMBA3_STEP, MAMBA3, rank=1),
        "an angle for every head": on(
            MAMBA3_STEP, MAMBA3, of_tensor("rotary.angle", lambda angle: angle[:, None].repeat(1, 4, 1))
        ),
        "without weights": on(MAMBA3_STEP, MAMBA3, rank=1, Wx=False, Wz=False, Wo=False, D=False, z=False),
        "an output per rank": on(
            MAMBA3_STEP, MAMBA3, given(Wo=None, out=torch.empty(2, 4, 4, 16, dtype=torch.bfloat16))
        ),
    },
    "conv1d_step": {
        "plain": on(CONV1D_STEP, CONV),
        "a tensor of slots": on(CONV1D_STEP, CONV, only("slots", lambda slots: slots.read)),
        "in place": on(CONV1D_STEP, CONV, in_place),
        "several tokens": on(CONV1D_STEP, CONV, tokens=3),
        "packed": on(CONV1D_STEP, CONV, tokens=3, packed=True),
        "rolled back": on(CONV1D_STEP, CONV, at(accepted=torch.tensor([1, 2])), tokens=3, extra=3),
        "a ring": on(CONV1D_STEP, CONV, given(positions=torch.tensor([4, 5])), tokens=3),
        "snapshots": on(
            CONV1D_STEP, CONV, given(snapshots=torch.zeros(2, 3, 16, 3), update=False), tokens=3
        ),
        "a tree": on(CONV1D_STEP, CONV, TREE, tokens=3),
    },
    "mamba2_replay": forms_of_rings(MAMBA2_REPLAY, REPLAY),
    "gated_delta_replay": {
        **forms_of_rings(GATED_DELTA_REPLAY, DELTA_REPLAY),
        "without A_log": on(GATED_DELTA_REPLAY, DELTA_REPLAY, raw=False),
        "KDA": on(GATED_DELTA_REPLAY, DELTA_REPLAY, per_channel=True),
        "a scale": on(GATED_DELTA_REPLAY, DELTA_REPLAY, scale=0.7),
    },
}  # fmt: skip
