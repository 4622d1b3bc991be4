"""debug(): what it finds, before anything is written; what it lets through, unchanged; and where it has no effect."""

import contextlib
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from calls import FORMS
from implementations import NO_INTERPRETER
from pools import memory_of
from refusals import (
    CPU,
    DELTA,
    MAMBA3,
    REPLAY,
    SMALL_FORMS,
    Arguments,
    Change,
    Refusal,
    at,
    of_tensor,
    only,
    other,
    refuses,
    refuses_all,
    step_arguments,
    tensors_of,
)
from torch import Tensor

import flashstate
from flashstate import Slots
from flashstate.proof import DeltaReplayCase

Changes = dict[str, Any]  # fields of Slots, and arguments of the call


def arguments_of(form: str, changes: Changes, device: torch.device = CPU) -> Arguments:
    """A call on a pool of 7 slots: 3 rows of 3 tokens, or packed of 3, 2 and 1 tokens and two more that no row has."""
    arguments = step_arguments(SMALL_FORMS[form], device)
    slots = arguments["slots"] if isinstance(arguments["slots"], Slots) else Slots(arguments["slots"])
    fields = {name: value for name, value in changes.items() if name not in arguments}
    tables = {name: torch.tensor(v, device=device) if isinstance(v, list) else v for name, v in fields.items()}
    slots = replace(slots, **{"read": torch.tensor([0, 1, 2], device=device), **tables})
    return {**arguments, "slots": slots, **{name: v for name, v in changes.items() if name in arguments}}


ONE, SEVERAL, PACKED = SMALL_FORMS
PAIRS = [[0, 1], [2, 3], [4, 5]]
TREE = [[-1, 0, 0], [-1, -1, 1], [-1, 0, 1]]
FIRST_WRONG = [[9, 9, 9], [-1, -1, 1], [-1, 0, 1]]
LAST_WRONG = [[-1, 0, 0], [-1, 0, 9], [-1, 9, 9]]
STORED = [[3, -1, 4], [5, -1, 6], [-1, -1, -1]]  # per token
STAYS = {"update": False}
BOUNDS = "slots.cu_seqlens must start at 0, never fall, and end at 8 or before, got "


def twice(slot: int, *rows: int) -> str:
    return f"slots write slot {slot} more than once: rows {', '.join(map(str, rows))}"


def invalid(parent: int, token: int, row: int) -> str:
    return f"slots.parents must be from -1 to t - 1, got {parent} for token {token} of row {row}"


def with_parent(parent: int, token: int, row: int) -> list[list[int]]:
    return [[parent if (b, t) == (row, token) else p for t, p in enumerate(r)] for b, r in enumerate(TREE)]


FINDINGS: dict[str, list[tuple[Changes, str]]] = {
    ONE: [
        ({"write": [3, 5, 3]}, twice(3, 0, 2)),
        ({"read": [1, 1, 2], "write": [3, 1, 4]}, "slots let row 1 write slot 1, which row 0 reads"),
        ({"write": [3, 4, 88]}, "out of range: write slot 88 on "),
        ({"read": PAIRS, "accepted": [2, 1, 3], **STAYS}, "out of range: accepted 3 on "),
    ],
    SEVERAL: [
        ({"read": [4, 1, 4]}, twice(4, 0, 2)),
        ({"write": [[3, -1, 4], [5, -1, 3], [-1, -1, 6]]}, twice(3, 0, 1)),
        ({"write": [[3, -1, 4], [5, -1, 5], [-1, -1, 6]]}, twice(5, 1, 1)),
        ({"write": [3, 2, 4]}, "slots let row 1 write slot 2, which row 2 reads"),
        ({"write": [[3, -1, 4], [5, 0, -1], [-1] * 3]}, "slots let row 1 write slot 0, which row 0 reads"),
        ({"read": PAIRS, "accepted": [2, 1, 2], "write": [1, 5, 6]}, "slots let row 1 write slot 5, which row 2 reads"),
        ({"snapshot_rows": [1, 0, 1]}, "slots fill snapshot row 1 more than once: rows 0, 2"),
        *[({"parents": with_parent(*wrong), **STAYS}, invalid(*wrong))
          for wrong in ((-2, 0, 0), (0, 0, 1), (1, 1, 0), (3, 2, 1))],
        ({"read": [-1, 1, 2], "parents": [[5, 5, 5], [-1, 0, 7], [-1, 0, 0]], **STAYS}, invalid(7, 2, 1)),
        ({"parents": [[-1, 0, 0], [-1, 1, 1], [-1, 0, 0]], "write": STORED}, invalid(1, 1, 1)),
        ({"read": [0, 77, 1]}, "out of range: read slot 77 on "),
        ({"snapshot_rows": [0, 1, 5]}, "out of range: snapshot row 5 on "),
        ({"read": [0, 77, 0], "write": [3, 3, 3]}, "out of range: read slot 77 on "),  # faults first
    ],
    PACKED: [
        ({"write": [6, 4, 4]}, twice(4, 1, 2)),
        ({"write": [[3, -1, 4], [5, 6, 0], [4, 0, 0]]}, twice(4, 0, 2)),
        ({"snapshot_rows": [1, 4, 4], **STAYS}, "slots fill snapshot row 4 more than once: rows 1, 2"),
        *[({"cu_seqlens": bounds}, f"{BOUNDS}{bounds}")
          for bounds in ([1, 3, 5, 6], [-1, 2, 3, 4], [0, 3, 2, 5], [0, 3, 3, 9], [0, 9, 9, 9], [0, 3, 8, 2])],
        ({"cu_seqlens": [0, 1, 5, 7]}, "slots.cu_seqlens has a row of 4 tokens, but max_len is 3"),
        ({"write": [[3, 4], [5, 6], [-1, -1]], "max_len": None},
         "slots.cu_seqlens has a row of 3 tokens, but max_len is 2"),
        ({"parents": [[-1, 0, 1], [-1, 1, 9], [9, 9, 9]], "write": STORED}, invalid(1, 1, 1)),
        ({"write": [[3, -1, 88], [5, 6, 0], [4, 0, 0]]}, "out of range: write slot 88 on "),
    ],
}  # fmt: skip


@pytest.mark.parametrize("form", FINDINGS)
@pytest.mark.parametrize("device", NO_INTERPRETER, indirect=True)
def test_debug_finds_and_nothing_changes(device: torch.device, form: str) -> None:
    for changes, message in FINDINGS[form]:
        arguments, fault = arguments_of(form, changes, device), message.startswith("out of range")
        error, whole = (IndexError, "") if fault else (ValueError, "$")
        with flashstate.debug():
            refuses(lambda a=arguments: flashstate.mamba2_step(**a), error, f"^{re.escape(message)}{whole}", arguments)
        flashstate.check_faults()  # nothing is left behind


RIGHT: dict[str, list[Changes]] = {
    ONE: [
        {},
        {"read": PAIRS, "accepted": [1, 0, -3], "write": [4, 4, 4]},  # rows that were not accepted
        {"read": [-1, 1, -1], "write": [4, 4, 99]},  # padding writes anywhere
        {"read": [-1, 1, -1], "snapshot_rows": [0, 0, 99]},
    ],
    SEVERAL: [
        {},
        {"write": [0, 1, 2]},
        {"write": [[0, 3, -1], [4, 1, 5], [6, -1, 2]]},
        {"read": [1, 1, 2], "write": [3, 4, 5]},  # a fork
        {"read": [1, 1, 1], **STAYS},
        {"read": PAIRS, "accepted": [2, 1, 2], "write": [4, 0, 6]},  # slots that were not accepted
        {"write": [-1, -1, -7]},
        {"write": [3, 3, 4], "null": 3},
        {"read": [3, 1, 3], "null": 3},
        {"read": [-1, 1, 2], "parents": FIRST_WRONG, **STAYS},
        {"parents": TREE, **STAYS},
        {"parents": TREE, "write": STORED},
        {"snapshot_rows": [-1, 4, -1]},
        {"snapshot_rows": [1, 1, 1], "snapshots": None},
        {"slots": None},
    ],
    PACKED: [
        {},
        {"cu_seqlens": [0, 0, 0, 0]},
        {"cu_seqlens": [0, 3, 3, 3], "read": [4, 4, 4]},
        {"cu_seqlens": [0, 0, 3, 3], "write": [4, 4, 1]},
        {"cu_seqlens": [0, 0, 3, 3], "snapshot_rows": [2, 2, 2]},
        {"write": [[3, 4, 5], [6, -1, 3], [2, 3, 3]]},  # slots of tokens there are not
        {"parents": LAST_WRONG, **STAYS},
        {"max_len": None, "snapshots": None},
    ],
}


def everything(arguments: Arguments) -> list[Tensor]:
    """A copy of all memory a call can reach."""
    return [memory_of(tensor).clone() for value in arguments.values() for tensor in tensors_of(value)]


@pytest.mark.parametrize("form", RIGHT)
@pytest.mark.parametrize("device", NO_INTERPRETER, indirect=True)
def test_debug_lets_right_calls_through_unchanged(device: torch.device, form: str) -> None:
    for changes in RIGHT[form]:
        results = []
        for checks in (contextlib.nullcontext, flashstate.debug):
            arguments = arguments_of(form, changes, device)
            with checks():
                flashstate.mamba2_step(**arguments)
            results.append(everything(arguments))
        assert all(map(torch.equal, *results)), changes
    flashstate.check_faults()


# What other ops ask of it


def with_cursor(name: str, value: int) -> Change:
    """A ring with another number in slot 0."""
    return other("ring", **{name: lambda t: t.index_fill(0, torch.tensor([0]), value)})


def of_an_earlier_step(arguments: Arguments) -> Arguments:
    """A plan whose rows have gone on since."""
    ring = replace(arguments["ring"], count=torch.ones_like(arguments["ring"].count))
    plan = ring.plan(arguments["slots"], 1)
    ring.count.zero_()
    return {"ring": ring, "plan": plan, "slots": None}


def fold_call() -> Arguments:
    call = step_arguments(replace(REPLAY, tokens=3))
    return {name: call[name] for name in ("state", "ring", "A")} | FIRST_SLOTS


def channel_fold_call() -> Arguments:
    call = step_arguments(DeltaReplayCase(3, 2, 1, 5, 20, per_channel=True))
    return {name: call[name] for name in ("state", "ring", "A_log", "dt_bias")} | FIRST_SLOTS


FIRST_SLOTS = {"slots": torch.arange(3)}
MEET: list[Refusal] = [
    (only("slots", lambda t: t[[0, 1, 1]]), r"^slots write slot \d more than once: rows 1, 2"),
    (only("slots", lambda t: t + 7), r"read slot \d+", IndexError),
]
CURSORS: list[Refusal] = [
    (with_cursor(name, n), r"^ring.start must be below .* slot 0") for name in ("start", "count") for n in (-1, 99)
]


def not_finite(name: str) -> Refusal:
    """A tensor with a NaN at its end."""
    return of_tensor(
        name, lambda t: torch.where(t == t.flatten()[-1], torch.nan, t)
    ), f"^{name} must be finite, got nan"


TO_OTHERS: Refusal = (at(write=lambda t: t.flip(0)), r"^slots let row 0 write slot \d, which row 2 reads")
FALLING: Refusal = (at(cu_seqlens=torch.tensor([0, 3, 2, 5])), "^slots.cu_seqlens must start at 0, never fall")
AT_ONCE = {"exact": False, "snapshots": None}
OTHERS: dict[str, tuple[Any, Callable[[], Arguments], list[Refusal]]] = {
    "mamba3_step": (
        flashstate.mamba3_step, lambda: step_arguments(MAMBA3),
        [*MEET, TO_OTHERS, not_finite("rotary.angle"), not_finite("rotary.bias_B")],
    ),
    "mamba3_step, packed": (
        flashstate.mamba3_step, lambda: step_arguments(replace(MAMBA3, tokens=3, packed=True)), [FALLING],
    ),
    "gated_delta_step, at once": (
        flashstate.gated_delta_step, lambda: {**step_arguments(replace(DELTA, tokens=3, packed=True)), **AT_ONCE},
        [(at(max_len=2), "^slots.cu_seqlens has a row of 3 tokens")],
    ),
    "mamba2_replay": (
        flashstate.mamba2_replay, lambda: {**step_arguments(REPLAY), **FIRST_SLOTS},
        [*MEET, *CURSORS, (of_an_earlier_step, "^plan is of an earlier step: start and count of slot 0 were")],
    ),
    "mamba2_fold": (
        flashstate.mamba2_fold, fold_call,
        [*MEET, *CURSORS, (of_tensor("A", torch.neg), "^A must not be above 0"), not_finite("A")],
    ),
    "gated_delta_fold": (
        flashstate.gated_delta_fold, channel_fold_call, [not_finite("A_log"), not_finite("dt_bias")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_debug_looks_at_calls_of_all_ops(name: str) -> None:
    call, arguments, refusals = OTHERS[name]
    with flashstate.debug():
        refuses_all(lambda **a: flashstate.check_faults() or call(**a), arguments(), refusals)


def clashing() -> None:
    """A call that debug() refuses and that nothing else does."""
    flashstate.mamba2_step(**arguments_of("one token", {"read": [4, 1, 4]}))


def refuses_clashing() -> bool:
    try:
        clashing()
    except ValueError:
        return True
    return False


def test_debug_has_no_effect_outside_is_undone_by_exceptions_and_can_be_nested() -> None:
    checks = flashstate.debug()
    assert not refuses_clashing()
    with checks:
        with flashstate.debug():
            assert refuses_clashing()
        with pytest.raises(ValueError, match="more than once"), flashstate.debug():
            clashing()
        assert refuses_clashing()
    assert not refuses_clashing()
    assert flashstate.debug()(refuses_clashing)()


def test_debug_reports_faults_of_calls_before_it_and_writes_nothing_then() -> None:
    flashstate.mamba2_step(**arguments_of("one token", {"read": [0, 77, 1]}))
    arguments = arguments_of("one token", {})
    with flashstate.debug():
        refuses(lambda: flashstate.mamba2_step(**arguments), IndexError, "read slot 77", arguments)
        flashstate.mamba2_step(**arguments)


def test_debug_has_no_effect_where_torch_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    with flashstate.debug():
        assert refuses_clashing()
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert not refuses_clashing()


@pytest.mark.gpu
def test_debug_refuses_a_cuda_graph_capture_and_changes_nothing() -> None:
    arguments = arguments_of("several tokens", {}, torch.device("cuda"))
    flashstate.mamba2_step(**arguments)
    torch.cuda.synchronize()
    before = everything(arguments)
    with (
        pytest.raises(RuntimeError, match="which a CUDA graph cannot capture"),
        flashstate.debug(),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        flashstate.mamba2_step(**arguments)
    assert all(map(torch.equal, everything(arguments), before))


CAUGHT: dict[str, tuple[str, Callable[[Arguments], None], str]] = {
    "NaN": ("mamba2_step", lambda a: a["x"][1, 2].fill_(torch.nan), r"x must be finite, got nan in token 2 of row 1"),
    "infinity in a parameter": ("conv1d_step", lambda a: a["weight"][3].fill_(torch.inf), "weight must be finite, got"),
    "A_log for A": ("mamba2_step", lambda a: a["A"].neg_(), "A must not be above 0, as A = .*; A_log itself may"),
    "A_log for A, by replay": ("mamba2_replay", lambda a: a["A"].neg_(), "A must not be above 0"),
    "A_log for A of a token": ("mamba3_step", lambda a: a["A"].neg_(), r"A must not be above 0.* in token 0 of row 0"),
    "a decay above 1": ("gated_delta_step", lambda a: a["a"][1].fill_(0.5), "a must not be above 0 without A_log"),
    "a decay above 1, by replay": ("gated_delta_replay", lambda a: a["a"].fill_(1), "a must not be above 0 without"),
    "time steps": ("mamba2_step", lambda a: a["dt"][1, 0].fill_(-9), "dt must not be below 0 .*in token 0 of row 1"),
    "time steps of Mamba-3": ("mamba3_step", lambda a: a["dt"].neg_(), "dt must not be below 0"),
}


@pytest.mark.parametrize(("name", "spoil", "message"), CAUGHT.values(), ids=CAUGHT)
def test_debug_finds_wrong_inputs_of_rows_that_have_a_slot(
    name: str, spoil: Callable[[Arguments], None], message: str
) -> None:
    form = FORMS[name]["without A_log" if name.startswith("gated_delta") else "several tokens"]
    arguments, op = form.arguments, getattr(flashstate, name)
    arguments |= {"dt_softplus": False, "dt_limit": None, "dt_bias": None} if name == "mamba2_step" else {}
    for tensor in (arguments.get("dt"), arguments.get("a")):
        if tensor is not None:
            tensor.copy_(tensor.abs() if tensor is arguments.get("dt") else -tensor.abs())
    nobody = {**arguments, "slots": replace(arguments["slots"], read=torch.full_like(arguments["slots"].read, -1))}
    with flashstate.debug():
        op(**arguments)
        spoil(arguments)
        refuses(lambda: op(**arguments), ValueError, f"^{message}", arguments)
        if "in token" in message:
            op(**nobody)
