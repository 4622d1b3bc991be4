"""Calls of mamba2_replay that repeat earlier ones reach their kernels directly, and only those."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from launchers import (
    Arguments,
    Form,
    Launcher,
    at,
    given,
    launcher,
    parameters,
    plain,
    require_started_again,
    unaligned,
)
from torch import Tensor

from flashstate import Ring, Slots, State, StatePool, mamba2_replay
from flashstate.launch.suspension import suspended
from flashstate.ops import mamba2_replay as module
from flashstate.ops.mamba2_replay import POINTERS

__all__ = ["launcher"]  # a fixture
BATCH, H, G, D, N, SLOTS, WINDOW, TOKENS = 2, 4, 2, 16, 32, 12, 8, 4
PACKED = torch.tensor([0, 3, 6])


def make_pool(dtype: torch.dtype = torch.float32, rounding: str = "nearest") -> StatePool:
    sizes = {"slots": SLOTS, "heads": H, "rows": D, "cols": N, "groups": G, "window": WINDOW, "tokens": TOKENS}
    return StatePool.mamba2(**sizes, layers=1, dtype=dtype, rounding=rounding, stream=3)


def arguments_of(pool: StatePool | None = None, *tokens: int) -> Arguments:
    """Of a call with `out` and all else, on tensors of its own; `tokens`: the axis behind the batch, or none."""
    pool, leading = pool or make_pool(), (BATCH, *tokens)
    x, z = (torch.randn(*leading, H, D).bfloat16() for _ in range(2))
    B, C = (torch.randn(*leading, G, N).bfloat16() for _ in range(2))
    found = {"state": pool.layer(0), "ring": pool.ring(0), "x": x, "dt": torch.rand(*leading, H), "A": -torch.rand(H)}
    found |= {"B": B, "C": C, "D": torch.randn(H), "z": z, "dt_bias": torch.randn(H)}
    return {**found, "slots": Slots(torch.tensor([7, 2], dtype=torch.int32)), "out": torch.empty_like(x)}


def planned(a: Arguments) -> Arguments:
    """With a plan for its slots in the place of these."""
    tokens = None if a["slots"].cu_seqlens is not None else 1 if a["x"].dim() == 3 else a["x"].shape[1]
    return {**a, "slots": None, "plan": a["ring"].plan(a["slots"], tokens)}


def packed(a: Arguments) -> Arguments:
    """The tokens of all rows on one axis."""
    flat = {name: a[name].flatten(0, 1) for name in ("x", "dt", "B", "C", "z", "out")}
    return {**at(cu_seqlens=PACKED, max_len=3)(a), **flat}


STATES: dict[str, Callable[[], StatePool]] = {
    "float32": make_pool,
    "float16 stochastic": lambda: make_pool(torch.float16, "stochastic"),
    "int8 stochastic": lambda: make_pool(torch.int8, "stochastic"),
    "float8": lambda: make_pool(torch.float8_e4m3fn),
}
FORMS: dict[str, tuple[str, tuple[int, ...], Form]] = {
    **{name: (name, (3,), plain) for name in STATES},
    "one token": ("float32", (), plain),
    "without options": ("float32", (3,), given(D=None, z=None, dt_bias=None)),
    "no softplus": ("float32", (3,), given(dt_softplus=False)),
    "nothing is stored": ("float32", (3,), given(update=False)),
    "a tensor of slots": ("float32", (3,), lambda a: {**a, "slots": a["slots"].read}),
    "no slots": ("float32", (3,), given(slots=None)),
    "a plan": ("float32", (3,), planned),
    "a plan of packed tokens": ("int8 stochastic", (3,), lambda a: planned(packed(a))),
    "packed": ("float32", (3,), packed),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_repeated_call_starts_the_kernel_directly_with_the_arguments_of_an_ordinary_launch(
    form: str, launcher: Launcher
) -> None:
    name, tokens, change = FORMS[form]
    pool = STATES[name]()
    first, again = (change(arguments_of(pool, *tokens)) for _ in range(2))
    require_started_again(launcher, mamba2_replay, first, again)


@pytest.mark.parametrize("name", STATES)
def test_both_kernels_of_a_large_batch_are_started_again(
    name: str, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SMALL", 0)
    pool = STATES[name]()
    first, again = (planned(arguments_of(pool, 3)) for _ in range(2))
    mamba2_replay(**first)
    mamba2_replay(**again)
    assert (len(launcher.ordinary), len(launcher.directly)) == (2, 2)
    assert [len(attributes) for attributes in launcher.attributes] == [0, 1]  # the second does not wait for the first
    with suspended():
        mamba2_replay(**again)
    assert launcher.directly == [parameters(want.launch.arguments) for want in launcher.ordinary[2:]]
    kinds = [started.launch.constants["ROWS_DO"] for started in launcher.ordinary[:2]]
    assert set(kinds) == {"keep", "fold"}
    assert [started.launch.constants["PLACE"] for started in launcher.ordinary[:2]] == ["first", "second"]


def test_the_stream_of_a_layer_is_passed_on(launcher: Launcher) -> None:
    arguments = arguments_of()
    for _ in range(2):
        mamba2_replay(**arguments)
    pointers = [at for at in launcher.ordinary[0].launch.arguments[:POINTERS] if at is not None]
    assert all(isinstance(pointer, Tensor) for pointer in pointers)
    assert launcher.directly[0][len(pointers)] == arguments["state"].stream == 3


def with_ring(change: Callable[[Ring], Ring]) -> Form:
    return lambda a: {**a, "ring": change(a["ring"])}


UNLIKE: dict[str, Form] = {
    "no update": given(update=False),
    "no softplus": given(dt_softplus=False),
    **{f"no {name}": given(**{name: None}) for name in ("D", "z", "dt_bias")},
    "C of another dtype": lambda a: {**a, "C": a["C"].float()},
    "dt of another dtype": lambda a: {**a, "dt": a["dt"].bfloat16()},
    "B with other strides": lambda a: {**a, "B": torch.cat([a["B"], a["B"]], -1)[..., :N]},
    "x at another alignment": lambda a: {**a, "x": unaligned(a["x"])},
    "no out": given(out=None),
    "no slots": given(slots=None),
    "a plan": planned,
    "slots as a tensor": lambda a: {**a, "slots": a["slots"].read},
    "64-bit slots": at(read=Tensor.long),
    "another padding": at(padding="fresh"),
    "another null": at(null=0),
    "another window": with_ring(lambda ring: replace(ring, window=7)),
    "an unaligned ring": with_ring(lambda ring: replace(ring, x=unaligned(ring.x))),
    "a State of its own": lambda a: {**a, "state": State(a["state"].data)},
}


@pytest.mark.parametrize("change", UNLIKE)
def test_a_call_that_differs_takes_the_ordinary_way(change: str, launcher: Launcher) -> None:
    first = arguments_of(None, 3)
    second = UNLIKE[change](first)
    mamba2_replay(**first)
    mamba2_replay(**second)
    assert (len(launcher.ordinary), len(launcher.directly)) == (2, 0)
    mamba2_replay(**first)
    assert len(launcher.directly) == 1


WRONG: dict[str, Form] = {
    "ring must be a Ring": given(ring=None),
    "x must be a tensor": given(x=[1.0]),
    "D must have shape": given(D=torch.zeros(3)),
    "dt_softplus must be": given(dt_softplus=1),
    "update must be": given(update=0),
    "slots must be a Slots": given(slots="all"),
    "slots.write is not for replay": at(write=lambda read: read),
    "plan must be a Plan": given(plan=1, slots=None),
    "plan was made for rings of other slots": lambda a: {**a, "slots": None, "plan": make_pool().plan(a["slots"], 3)},
    "plan was made for rings with a window of 7": lambda a: {
        **a,
        "slots": None,
        "plan": replace(a["ring"], window=7).plan(a["slots"], 3),
    },
    "slots must be left out with a plan": lambda a: {**planned(a), "slots": a["slots"].read.clone()},
    "out must be bfloat16": given(out=torch.zeros(BATCH, 3, H, D)),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_input_is_refused_also_after_calls_that_were_right(message: str, launcher: Launcher) -> None:
    arguments = arguments_of(None, 3)
    for right in (arguments, planned(arguments)):
        for _ in range(2):
            mamba2_replay(**right)
    with pytest.raises((TypeError, ValueError), match=message):
        mamba2_replay(**WRONG[message](arguments))
    assert (len(launcher.ordinary), len(launcher.directly)) == (2, 2)


def test_what_a_server_makes_anew_for_every_call_repeats_it(launcher: Launcher) -> None:
    arguments = arguments_of(None, 3)
    for _ in range(2):
        mamba2_replay(**planned({**arguments, "slots": Slots(arguments["slots"].read.clone())}))
    assert (len(launcher.ordinary), len(launcher.directly)) == (1, 1)
