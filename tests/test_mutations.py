"""Every law can fail: a reference, or a kernel, with one deliberate mistake breaks the law that speaks of it."""

import pkgutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from obeying import laws
from torch import Tensor

from flashstate.proof import AnyCase, Case, DeltaReplayCase, ReplayCase, interpreted
from flashstate.proof.laws import LAWS, LawBroken, speaks_of

CPU = torch.device("cpu")
ONE = Case(3, 2, 1, 4, 16)
SEVERAL = Case(2, 2, 1, 4, 16, tokens=4, format="float16", rounding="stochastic")
PACKED = replace(SEVERAL, batch=3, packed=True)
RINGS = ReplayCase(4, 1, 1, 4, 16, tokens=2, window=4)
DELTA_RINGS = DeltaReplayCase(4, 1, 1, 4, 16, tokens=2, window=4, format="float16")
Function = Callable[..., Any]
MAMBA2, STEPS, REPLAY = (f"flashstate.reference.{name}" for name in ("mamba2", "steps", "mamba2_replay"))
DELTA_REPLAY = "flashstate.reference.gated_delta_replay"
TOKEN, PARENT = f"{MAMBA2}.mamba2_token", "flashstate.reference.tree.column"


class Mistake(NamedTuple):
    """What is wrong, which law speaks of it, by its first words, on which case; and the function that is replaced."""

    what: str
    law: str
    case: AnyCase
    where: str
    made: Callable[[Function], Function]  # of the right function


def in_output(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Function], Function]:
    """A token function whose output is what `change` makes of it and of x."""

    def made(token: Function) -> Function:
        def wrong(s: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
            y, after = token(s, x, *rest)
            return change(y, x), after

        return wrong

    return made


def of_kind(kind: str, change: Callable[[Tensor, int], Tensor]) -> Callable[[Function], Function]:
    """Slots of a kind that are not looked at: taken as `change` has them, of numbers and how many there are."""

    def made(resolve: Function) -> Function:
        def wrong(what: str, numbers: Tensor, goes: Tensor, limit: int, null: int = -1) -> Tensor:
            return change(numbers.long(), limit) if what == kind else resolve(what, numbers, goes, limit, null)

        return wrong

    return made


def everywhere(tensor: Tensor) -> Tensor:
    """The memory of a tensor as if it were contiguous."""
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape).stride())


def beside(state: Any) -> None:
    """One element behind the first slot is written."""
    state.data.as_strided((1,), (1,), state.data.storage_offset() + state.data[0].numel()).zero_()


# fmt: off
MISTAKES = (
    Mistake("x is added once more", "output and state", ONE, TOKEN, in_output(lambda y, x: y + x)),
    Mistake("the decay is forgotten", "output and state", ONE, TOKEN,
            lambda f: lambda s, x, dt, A, *rest: f(s, x, dt, 0 * A, *rest)),
    Mistake("a row counts its place", "permuting", ONE, TOKEN,
            in_output(lambda y, x: y + torch.arange(len(y))[:, None, None])),
    Mistake("a row counts its neighbours", "a row does not depend", ONE, TOKEN, in_output(lambda y, x: y + len(y))),
    Mistake("a state counts its slot", "it does not matter", ONE, f"{STEPS}.states_of",
            lambda f: lambda state, read: f(state, read) + read[:, None, None, None]),
    Mistake("chance", "five launches", ONE, TOKEN, in_output(lambda y, x: y + torch.rand(()))),
    Mistake("other slots are looked at", "slots that no row writes", ONE, f"{STEPS}.states_of",
            lambda f: lambda state, read: f(state, read) + 0 * state.data.sum()),
    Mistake("padding is written", "a padding row gives zero", ONE, f"{STEPS}.resolve",
            of_kind("write", lambda numbers, limit: numbers)),
    Mistake("the null slot is a slot", "a padding row gives zero", ONE, f"{STEPS}.resolve_read",
            lambda f: lambda slots, *rest: f(replace(slots, null=-1), *rest)),
    Mistake("padding starts from ones", 'with padding="fresh"', ONE, f"{STEPS}.states_of",
            lambda f: lambda state, read: f(state, read) + (read < 0)[:, None, None, None]),
    Mistake("padding is not kept", 'with padding="keep"', ONE, f"{STEPS}.store_output",
            lambda f: lambda *given: f(*given[:-1], None)),
    Mistake("NaN spreads", "NaN in a row's input", ONE, TOKEN, in_output(lambda y, x: y + 0 * x.sum())),
    Mistake("NaN is hidden", "NaN in a row's input", ONE, TOKEN, in_output(lambda y, x: y.nan_to_num())),
    Mistake("the read slot is written", "a separate write slot", ONE, f"{STEPS}.store_last",
            lambda f: lambda state, s, slots, *rest: f(state, s, None, *rest)),
    Mistake("the last slot is written for those past it", "a write slot that is null", ONE, f"{STEPS}.resolve",
            of_kind("write", lambda numbers, limit: numbers.clamp(0, limit - 1))),
    Mistake("no fault is noted", "a write slot that is null", ONE, "flashstate.reference.state_io.note_fault",
            lambda f: lambda kind, outside: None),
    Mistake("update is not looked at", "update=False", ONE, f"{MAMBA2}.step_tokens",
            lambda f: lambda *given: f(*given[:-2], True, given[-1])),
    Mistake("slots are counted from the end", "without slots", ONE, f"{STEPS}.resolve_read",
            lambda f: lambda slots, *rest: f(slots, *rest).flip(0) if slots is None else f(slots, *rest)),
    Mistake("out is copied where it is strided", "`out` is filled", ONE, f"{MAMBA2}.mamba2_step",
            lambda f: lambda *given: f(*given[:-1], given[-1].contiguous())),
    Mistake("strides are not looked at", "strided activations", ONE, f"{STEPS}.flat_tokens",
            lambda f: lambda given, out: f({n: t if t is None else everywhere(t) for n, t in given.items()}, out)),
    Mistake("the gap behind a slot is written", "page-strided", ONE, f"{STEPS}.store_last",
            lambda f: lambda state, *rest: (f(state, *rest), beside(state))),
    Mistake("all seeds move on", "stochastic rounding draws", SEVERAL, "flashstate.reference.state_io.advance_seeds",
            lambda f: lambda seed, slots: f(seed, None)),
    Mistake("streams draw the same bits", "stochastic rounding draws", SEVERAL,
            "flashstate.reference.state_io.random_bits",
            lambda f: lambda seed, shape, token, stream, *rest: f(seed, shape, token, 0, *rest)),
    Mistake("bits of the first token are drawn for the last", "T tokens at once", SEVERAL, f"{STEPS}.store_last",
            lambda f: lambda *given: f(*given[:-1], given[-1].clamp(max=1))),
    Mistake("the last token of the longest row is lost", "packed rows", PACKED, f"{STEPS}.token_positions",
            lambda f: lambda slots, *rest: f(slots, *rest)[:, : None if slots.cu_seqlens is None else -1]),
    Mistake("all tokens have the slot of the first", "a state written after every token", SEVERAL, f"{STEPS}.column",
            lambda f: lambda table, t: f(table, 0)),
    Mistake("rows of snapshots are not looked at", "snapshots hold", SEVERAL, f"{STEPS}.resolve",
            of_kind("snapshot row", lambda numbers, limit: torch.arange(len(numbers)))),
    Mistake("none accepted is one accepted", "a row with n slots", ONE, f"{STEPS}.resolve_read",
            lambda f: lambda slots, *rest: f(
                slots if slots.accepted is None else replace(slots, accepted=slots.accepted.clamp(min=1)), *rest)),
    Mistake("a tree is a chain", "a token of a draft tree", SEVERAL, PARENT,
            lambda f: lambda parents, t: torch.full_like(f(parents, t), t - 1)),
    Mistake("an invalid parent is the root", "a token whose parent is invalid", SEVERAL, PARENT,
            lambda f: lambda parents, t: torch.where(f(parents, t) < t, f(parents, t), -1)),
    Mistake("tokens are appended a row too late", "replay writes no state", RINGS, f"{REPLAY}.append",
            lambda f: lambda ring, slot, row, *rest: f(ring, slot, (row + 1) % ring.length, *rest)),
    Mistake("a row that is not live is replayed", "NaN in rows of a ring", RINGS, f"{REPLAY}.replayed",
            lambda f: lambda ring, s, slot, start, live, A: f(ring, s, slot, start, live + 1, A)),
    Mistake("tokens go on from what was not stored", "a ring that is folded before", DELTA_RINGS,
            f"{DELTA_REPLAY}.decode", lambda f: lambda *stored: 2 * f(*stored)),
    Mistake("u is not kept as it was used", "replay writes no state", DELTA_RINGS, f"{DELTA_REPLAY}.append",
            lambda f: lambda ring, slot, row, k, u, *rest: f(ring, slot, row, k, 0 * u, *rest)),
    Mistake("all tokens are accepted", "steps of a replay", RINGS, "flashstate.reference.rings.commit_plan",
            lambda f: lambda *given: f(*given[:5], None, *given[6:])),
)
KERNEL = "flashstate.kernels.mamba2"
DOT_ROWS = "flashstate.kernels.tiles.dot_rows"
IN_KERNELS = (
    Mistake("the null slot is a slot", "a padding row gives zero", ONE, f"{KERNEL}.slot_and_life",
            lambda f: lambda number, slots: f(number, (slots[0], -1, slots[2]))),
    Mistake("the null slot of several tokens is a slot", "a padding row gives zero", SEVERAL, f"{KERNEL}.read_slot",
            lambda f: lambda read, b, slots, *rest: f(read, b, (slots[0], -1, slots[2]), *rest)),
    Mistake("bits of the first token are drawn for the last", "T tokens at once", SEVERAL, f"{KERNEL}.random_bits",
            lambda f: lambda drawing, *rest: f((drawing[0], drawing[1] * 0, drawing[2]), *rest)),
    Mistake("a sum is a little too small", "output and state", ONE, DOT_ROWS,
            lambda f: lambda s, C, VECTOR: f(s, C, VECTOR) * 0.9999),
    Mistake("a sum counts the rows of its tile", "the launch config", ONE, DOT_ROWS,
            lambda f: lambda s, C, VECTOR: f(s, C, VECTOR) + s[0].shape[0]),
)
# fmt: on


def require_broken(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    (words,) = (words for words in LAWS if words.startswith(mistake.law))
    assert speaks_of(words, mistake.case)
    LAWS[words](mistake.case, CPU)
    monkeypatch.setattr(mistake.where, mistake.made(pkgutil.resolve_name(mistake.where)))
    with pytest.raises(LawBroken):
        LAWS[words](mistake.case, CPU)


@pytest.mark.quick
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.what)
def test_a_mistake_in_the_reference_breaks_its_law(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    require_broken(mistake, monkeypatch)


@pytest.mark.quick
@pytest.mark.interpreted
@pytest.mark.parametrize("mistake", IN_KERNELS, ids=lambda mistake: mistake.what)
def test_a_mistake_in_a_kernel_breaks_its_law(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    with interpreted():
        require_broken(mistake, monkeypatch)


def test_there_is_a_mistake_for_every_law_of_the_reference() -> None:
    assert [words for words in laws("") if not any(words.startswith(mistake.law) for mistake in MISTAKES)] == []
