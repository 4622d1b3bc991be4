"""Calls of mamba3_step that repeat earlier ones reach their kernel directly, and only those."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from launchers import Arguments, Form, Launcher, at, given, launcher, plain, require_started_again, unaligned
from torch import Tensor

from flashstate import Mamba3State, Rotary, Slots, State, StatePool, mamba3_step
from flashstate.ops.mamba3 import POINTERS

__all__ = ["launcher"]  # a fixture
BATCH, H, G, D, N, R, S, SLOTS = 2, 4, 2, 16, 32, 4, 8, 12
PER_TOKEN = torch.arange(6).reshape(2, 3)
PACKED = torch.tensor([0, 4, 6])


def make_state(dtype: torch.dtype = torch.float32, rounding: str = "nearest", rank: int = R) -> Mamba3State:
    sizes = {"slots": SLOTS, "heads": H, "rows": D, "cols": N, "rank": rank, "angles": S}
    return StatePool.mamba3(**sizes, layers=1, dtype=dtype, rounding=rounding, stream=3).layer(0)


def arguments_of(state: Mamba3State | None = None, *tokens: int) -> Arguments:
    """Of a call with `out` and all else, on tensors of its own; `tokens`: the axis behind the batch, or none."""
    state, leading = state or make_state(), (BATCH, *tokens)
    rank = state.rank
    x, z = (torch.randn(*leading, H, D).bfloat16() for _ in range(2))
    B, C = (torch.randn(*leading, rank, G, N).bfloat16() for _ in range(2))
    A, dt, trap = (torch.rand(*leading, H) for _ in range(3))
    weights = {name: torch.randn(rank, H, D) for name in ("Wx", "Wz", "Wo")}
    biases = {name: torch.randn(rank, H, N) for name in ("bias_B", "bias_C")}
    rotary = Rotary(torch.randn(*leading, S).bfloat16(), **biases)
    found = {"state": state, "x": x, "A": -A, "dt": dt, "trap": trap, "B": B, "C": C, **weights, "D": torch.randn(H)}
    slots = Slots(torch.tensor([7, 2], dtype=torch.int32))
    return {**found, "z": z, "rotary": rotary, "slots": slots, "out": torch.empty_like(x)}


def turned(**fields: Any) -> Form:
    """With other fields of Rotary: values, or what becomes of what is there."""

    def change(a: Arguments) -> Arguments:
        old = a["rotary"]
        changed = {name: value(getattr(old, name)) if callable(value) else value for name, value in fields.items()}
        return {**a, "rotary": replace(old, **changed)}

    return change


def packed(a: Arguments) -> Arguments:
    """The tokens of all rows on one axis."""
    names = ("x", "A", "dt", "trap", "B", "C", "z", "out")
    flat = {name: a[name].flatten(0, 1) for name in names}
    return turned(angle=lambda t: t.flatten(0, 1))({**at(cu_seqlens=PACKED)(a), **flat})


def per_rank(a: Arguments) -> Arguments:
    return {**a, "Wo": None, "out": torch.empty(BATCH, R, H, D).bfloat16()}


STATES: dict[str, Callable[[], Mamba3State]] = {
    "float32": make_state,
    "float16 stochastic": lambda: make_state(torch.float16, "stochastic"),
    "int8 stochastic": lambda: make_state(torch.int8, "stochastic"),
    "float8": lambda: make_state(torch.float8_e4m3fn),
    "rank 1": lambda: make_state(rank=1),
}
FORMS: dict[str, tuple[str, tuple[int, ...], Form]] = {
    **{name: (name, (), plain) for name in STATES},
    "without rotary": ("float32", (), given(rotary=None)),
    "without biases": ("float32", (), turned(bias_B=None, bias_C=None)),
    "an angle for every head": ("float32", (), turned(angle=lambda t: t[:, None].repeat(1, H, 1))),
    "without weights": ("rank 1", (), given(Wx=None, Wz=None, Wo=None, D=None, z=None)),
    "per rank": ("float32", (), per_rank),
    "a logit": ("float32", (), given(trap_logit=True)),
    "k and v stay": ("float32", (), given(update_kv=False)),
    "nothing is stored": ("float32", (), given(update=False)),
    "a tensor of slots": ("float32", (), lambda a: {**a, "slots": a["slots"].read}),
    "no slots": ("float32", (), given(slots=None)),
    "in place": ("float32", (), lambda a: {**a, "out": a["x"]}),
    "several tokens": ("float16 stochastic", (3,), plain),
    "packed": ("float32", (3,), packed),
    "a slot for every token": ("int8 stochastic", (3,), at(write=PER_TOKEN)),
    "slots to choose from": (
        "float32",
        (3,),
        at(read=PER_TOKEN, accepted=torch.tensor([1, 3]), write=lambda read: read.clone()),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_repeated_call_starts_the_kernel_directly_with_the_arguments_of_an_ordinary_launch(
    form: str, launcher: Launcher
) -> None:
    name, tokens, change = FORMS[form]
    state = STATES[name]()
    first, again = (change(arguments_of(state, *tokens)) for _ in range(2))
    require_started_again(launcher, mamba3_step, first, again)


def test_the_stream_of_a_layer_is_passed_on(launcher: Launcher) -> None:
    arguments = arguments_of()
    for _ in range(2):
        mamba3_step(**arguments)
    pointers = [at for at in launcher.ordinary[0].launch.arguments[:POINTERS] if at is not None]
    assert all(isinstance(pointer, Tensor) for pointer in pointers)
    assert launcher.directly[0][len(pointers)] == arguments["state"].ssm.stream == 3


def with_state(change: Callable[[Mamba3State], Mamba3State]) -> Form:
    return lambda a: {**a, "state": change(a["state"])}


UNLIKE: dict[str, Form] = {
    "no rotary": given(rotary=None),
    "another pairing": turned(pairing="interleaved"),
    "the default pairing, given": turned(pairing="halved"),
    "no bias of B": turned(bias_B=None),
    "no bias of C": turned(bias_C=None),
    "a bias of another dtype": turned(bias_B=Tensor.half),
    "an angle for every head": turned(angle=lambda t: t[:, None].repeat(1, H, 1)),
    "an angle of another dtype": turned(angle=Tensor.float),
    "a logit": given(trap_logit=True),
    "k and v stay": given(update_kv=False),
    "no update": given(update=False),
    **{f"no {name}": given(**{name: None}) for name in ("Wx", "Wz", "D")},
    "no z": given(z=None, Wz=None),
    "an output per rank": per_rank,
    "C of another dtype": lambda a: {**a, "C": a["C"].float()},
    "dt of another dtype": lambda a: {**a, "dt": a["dt"].bfloat16()},
    "fewer groups": lambda a: {**a, "B": a["B"][..., :1, :], "C": a["C"][..., :1, :]},
    "B with other strides": lambda a: {**a, "B": torch.cat([a["B"], a["B"]], -1)[..., :N]},
    "out is x": lambda a: {**a, "out": a["x"]},
    "no out": given(out=None),
    "no slots": given(slots=None),
    "slots as a tensor": lambda a: {**a, "slots": a["slots"].read},
    "64-bit slots": at(read=Tensor.long),
    "slots to write": at(write=lambda read: read),
    "a slot for every token": at(write=lambda read: read[:, None].clone()),
    "another padding": at(padding="fresh"),
    "another null": at(null=0),
    "rows of snapshots": at(snapshot_rows=torch.tensor([1, 0])),
    "another Mamba3State of the same tensors": with_state(lambda s: Mamba3State(s.ssm, s.k, s.v, s.angle)),
    "k of another dtype": with_state(lambda s: Mamba3State(s.ssm, s.k.half(), s.v, s.angle)),
    "an unaligned ssm": with_state(lambda s: Mamba3State(State(unaligned(s.ssm.data)), s.k, s.v, s.angle)),
}  # fmt: skip


@pytest.mark.parametrize("change", UNLIKE)
def test_a_call_that_differs_takes_the_ordinary_way(change: str, launcher: Launcher) -> None:
    first = arguments_of()
    second = UNLIKE[change](first)
    mamba3_step(**first)
    mamba3_step(**second)
    assert (len(launcher.ordinary), len(launcher.directly)) == (2, 0)
    mamba3_step(**first)
    assert len(launcher.directly) == 1


def test_calls_with_rows_of_snapshots_never_start_directly(launcher: Launcher) -> None:
    """A kernel without snapshots has no place for their address."""
    arguments = at(snapshot_rows=torch.tensor([1, 0]))(arguments_of())
    for _ in range(3):
        mamba3_step(**arguments)
    assert (len(launcher.ordinary), len(launcher.directly)) == (3, 0)


@pytest.mark.parametrize(
    "change",
    [
        *(lambda a, n=name: {**a, n: unaligned(a[n])} for name in ("x", "B", "C", "z", "out", "Wx", "Wz", "Wo", "D")),
        *(turned(**{name: unaligned}) for name in ("angle", "bias_B", "bias_C")),
    ],
)
def test_one_kernel_takes_aligned_tensors_and_unaligned_ones(change: Form, launcher: Launcher) -> None:
    """Only of the pool it makes wide accesses."""
    arguments = arguments_of()
    for _ in range(2):
        mamba3_step(**change(arguments))
        mamba3_step(**arguments)
    assert (len(launcher.ordinary), len(launcher.directly)) == (1, 3)


WRONG: dict[str, Form] = {
    "state must be a Mamba3State": lambda a: {**a, "state": a["state"].ssm},
    "x must be a tensor": given(x=[1.0]),
    "D must have shape": given(D=torch.zeros(3)),
    "Wo must be contiguous": lambda a: {**a, "Wo": a["Wo"].mT.contiguous().mT},
    "rotary must be a Rotary": lambda a: {**a, "rotary": a["rotary"].angle},
    "rotary.angle must be a tensor": turned(angle=None),
    "rotary.angle must have shape": turned(angle=lambda t: t[:, :3].clone()),
    "rotary needs a state with angle": with_state(lambda s: Mamba3State(s.ssm, s.k, s.v)),
    "trap_logit must be": given(trap_logit=1),
    "update_kv must be": given(update_kv=None),
    "update must be": given(update=0),
    "slots must be a Slots": given(slots="all"),
    "slots must not have parents": at(parents=torch.tensor([[-1], [-1]])),
    "update=False writes no state": lambda a: {**at(write=lambda read: read)(a), "update": False},
    "out must be bfloat16": given(out=torch.zeros(BATCH, H, D)),
    "out must have shape": given(Wo=None),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_input_is_refused_also_after_calls_that_were_right(message: str, launcher: Launcher) -> None:
    arguments = arguments_of()
    for _ in range(2):
        mamba3_step(**arguments)
    with pytest.raises((TypeError, ValueError), match=message):
        mamba3_step(**WRONG[message](arguments))
    assert (len(launcher.ordinary), len(launcher.directly)) == (1, 1)


def test_what_a_server_makes_anew_for_every_call_repeats_it(launcher: Launcher) -> None:
    arguments = arguments_of()
    for _ in range(2):
        slots, rotary = Slots(arguments["slots"].read.clone()), replace(arguments["rotary"])
        mamba3_step(**{**arguments, "slots": slots, "rotary": rotary})
    assert (len(launcher.ordinary), len(launcher.directly)) == (1, 1)
