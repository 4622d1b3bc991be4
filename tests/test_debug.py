"""debug(): what it finds, before anything is written; what it lets through, unchanged; and where it has no effect."""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from calls import FORMS
from pools import memory_of
from refusals import CPU, SMALL_FORMS, Arguments, refuses, step_arguments, tensors_of
from torch import Tensor

import flashstate
from flashstate import Slots

Changes = dict[str, Any]  # fields of Slots, and arguments of the call


@pytest.fixture(autouse=True)
def no_faults() -> Iterator[None]:
    flashstate.check_faults()
    yield
    with contextlib.suppress(IndexError):
        flashstate.check_faults()


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


FINDINGS: dict[str, tuple[str, Changes, str]] = {
    "two rows in one slot": (SEVERAL, {"read": [4, 1, 4]}, twice(4, 0, 2)),
    "two rows in one slot, by write": (ONE, {"write": [3, 5, 3]}, twice(3, 0, 2)),
    "tokens of two rows in one slot": (SEVERAL, {"write": [[3, -1, 4], [5, -1, 3], [-1, -1, 6]]}, twice(3, 0, 1)),
    "two tokens of a row in one slot": (SEVERAL, {"write": [[3, -1, 4], [5, -1, 5], [-1, -1, 6]]}, twice(5, 1, 1)),
    "packed rows in one slot": (PACKED, {"write": [6, 4, 4]}, twice(4, 1, 2)),
    "packed tokens in one slot": (PACKED, {"write": [[3, -1, 4], [5, 6, 0], [4, 0, 0]]}, twice(4, 0, 2)),
    "writing what another row reads": (
        SEVERAL, {"write": [3, 2, 4]}, "slots let row 1 write slot 2, which row 2 reads",
    ),
    "a fork that writes what it was made from": (
        ONE, {"read": [1, 1, 2], "write": [3, 1, 4]}, "slots let row 1 write slot 1, which row 0 reads",
    ),
    "a token that writes what another row reads": (
        SEVERAL, {"write": [[3, -1, 4], [5, 0, -1], [-1] * 3]}, "slots let row 1 write slot 0, which row 0 reads",
    ),
    "writing what another row reads, as accepted": (
        SEVERAL, {"read": PAIRS, "accepted": [2, 1, 2], "write": [1, 5, 6]},
        "slots let row 1 write slot 5, which row 2 reads",
    ),
    "a snapshot row twice": (
        SEVERAL, {"snapshot_rows": [1, 0, 1]}, "slots fill snapshot row 1 more than once: rows 0, 2",
    ),
    "a snapshot row twice, without update": (
        PACKED, {"snapshot_rows": [1, 4, 4], **STAYS}, "slots fill snapshot row 4 more than once: rows 1, 2",
    ),
    **{
        f"boundaries {bounds}": (PACKED, {"cu_seqlens": bounds}, f"{BOUNDS}{bounds}")
        for bounds in ([1, 3, 5, 6], [-1, 2, 3, 4], [0, 3, 2, 5], [0, 3, 3, 9], [0, 9, 9, 9], [0, 3, 8, 2])
    },
    "rows longer than max_len": (
        PACKED, {"cu_seqlens": [0, 1, 5, 7]}, "slots.cu_seqlens has a row of 4 tokens, but max_len is 3",
    ),
    "rows longer than the table of write slots": (
        PACKED, {"write": [[3, 4], [5, 6], [-1, -1]], "max_len": None},
        "slots.cu_seqlens has a row of 3 tokens, but max_len is 2",
    ),
    **{
        f"parent {wrong[0]} of token {wrong[1]} of row {wrong[2]}": (
            SEVERAL, {"parents": with_parent(*wrong), **STAYS}, invalid(*wrong),
        )
        for wrong in ((-2, 0, 0), (0, 0, 1), (1, 1, 0), (2, 1, 2), (2, 2, 2), (3, 2, 1), (99, 1, 0))
    },
    "a parent below padding": (
        SEVERAL, {"read": [-1, 1, 2], "parents": [[5, 5, 5], [-1, 0, 7], [-1, 0, 0]], **STAYS}, invalid(7, 2, 1),
    ),
    "a parent where states are stored": (
        SEVERAL, {"parents": [[-1, 0, 0], [-1, 1, 1], [-1, 0, 0]], "write": STORED}, invalid(1, 1, 1),
    ),
    "a packed parent": (
        PACKED, {"parents": [[-1, 0, 1], [-1, 1, 9], [9, 9, 9]], "write": STORED}, invalid(1, 1, 1),
    ),
    "a read slot": (SEVERAL, {"read": [0, 77, 1]}, "out of range: read slot 77 on "),
    "a write slot": (ONE, {"write": [3, 4, 88]}, "out of range: write slot 88 on "),
    "a write slot of a token": (
        PACKED, {"write": [[3, -1, 88], [5, 6, 0], [4, 0, 0]]}, "out of range: write slot 88 on ",
    ),
    "an accepted count": (ONE, {"read": PAIRS, "accepted": [2, 1, 3], **STAYS}, "out of range: accepted 3 on "),
    "a snapshot row": (SEVERAL, {"snapshot_rows": [0, 1, 5]}, "out of range: snapshot row 5 on "),
    "faults first": (SEVERAL, {"read": [0, 77, 0], "write": [3, 3, 3]}, "out of range: read slot 77 on "),
}  # fmt: skip


@pytest.mark.parametrize(("form", "changes", "message"), FINDINGS.values(), ids=FINDINGS)
def test_debug_finds_and_nothing_changes(device: torch.device, form: str, changes: Changes, message: str) -> None:
    arguments, fault = arguments_of(form, changes, device), message.startswith("out of range")
    error, whole = (IndexError, "") if fault else (ValueError, "$")
    with flashstate.debug():
        refuses(lambda: flashstate.mamba2_step(**arguments), error, f"^{re.escape(message)}{whole}", arguments)
    flashstate.check_faults()  # nothing is left behind


RIGHT: dict[str, tuple[str, Changes]] = {
    **{f"in place, {form}": (form, {}) for form in SMALL_FORMS},
    "its own read slot": (SEVERAL, {"write": [0, 1, 2]}),
    "its own read slot after a token": (SEVERAL, {"write": [[0, 3, -1], [4, 1, 5], [6, -1, 2]]}),
    "a fork": (SEVERAL, {"read": [1, 1, 2], "write": [3, 4, 5]}),
    "one slot for all, without update": (SEVERAL, {"read": [1, 1, 1], **STAYS}),
    "what was not accepted": (SEVERAL, {"read": PAIRS, "accepted": [2, 1, 2], "write": [4, 0, 6]}),
    "rows that were not accepted": (ONE, {"read": PAIRS, "accepted": [1, 0, -3], "write": [4, 4, 4]}),
    "write slots that are none": (SEVERAL, {"write": [-1, -1, -7]}),
    "write slots that are null": (SEVERAL, {"write": [3, 3, 4], "null": 3}),
    "padding that is null": (SEVERAL, {"read": [3, 1, 3], "null": 3}),
    "padding that writes anywhere": (ONE, {"read": [-1, 1, -1], "write": [4, 4, 99]}),
    "padding with any snapshot row": (ONE, {"read": [-1, 1, -1], "snapshot_rows": [0, 0, 99]}),
    "padding with any parents": (SEVERAL, {"read": [-1, 1, 2], "parents": FIRST_WRONG, **STAYS}),
    "a tree": (SEVERAL, {"parents": TREE, **STAYS}),
    "a tree that is stored": (SEVERAL, {"parents": TREE, "write": STORED}),
    "snapshot rows in any order": (SEVERAL, {"snapshot_rows": [4, 0, 2]}),
    "two rows without a snapshot": (SEVERAL, {"snapshot_rows": [-1, 4, -1]}),
    "clashing rows of no snapshots": (SEVERAL, {"snapshot_rows": [1, 1, 1], "snapshots": None}),
    "no slots": (SEVERAL, {"slots": None}),
    "no tokens": (PACKED, {"cu_seqlens": [0, 0, 0, 0]}),
    "rows without tokens in one slot": (PACKED, {"cu_seqlens": [0, 3, 3, 3], "read": [4, 4, 4]}),
    "rows without tokens that write": (PACKED, {"cu_seqlens": [0, 0, 3, 3], "write": [4, 4, 1]}),
    "rows without tokens in one snapshot": (PACKED, {"cu_seqlens": [0, 0, 3, 3], "snapshot_rows": [2, 2, 2]}),
    "slots of tokens there are not": (PACKED, {"write": [[3, 4, 5], [6, -1, 3], [2, 3, 3]]}),
    "parents of tokens there are not": (PACKED, {"parents": LAST_WRONG, **STAYS}),
    "packed without max_len": (PACKED, {"max_len": None, "snapshots": None}),
}


def everything(arguments: Arguments) -> list[Tensor]:
    """A copy of all memory a call can reach."""
    return [memory_of(tensor).clone() for value in arguments.values() for tensor in tensors_of(value)]


@pytest.mark.parametrize(("form", "changes"), RIGHT.values(), ids=RIGHT)
def test_debug_lets_right_calls_through_unchanged(device: torch.device, form: str, changes: Changes) -> None:
    results = []
    for checks in (contextlib.nullcontext, flashstate.debug):
        arguments = arguments_of(form, changes, device)
        with checks():
            flashstate.mamba2_step(**arguments)
        results.append(everything(arguments))
    assert all(map(torch.equal, *results))
    flashstate.check_faults()


def clashing() -> None:
    """A call that debug() refuses and that nothing else does."""
    flashstate.mamba2_step(**arguments_of("one token", {"read": [4, 1, 4]}))


def refuses_clashing() -> bool:
    try:
        clashing()
    except ValueError:
        return True
    return False


def test_debug_has_no_effect_outside_and_can_be_nested() -> None:
    assert not refuses_clashing()
    with flashstate.debug():
        assert refuses_clashing()
        with flashstate.debug():
            assert refuses_clashing()
        assert refuses_clashing()
    assert not refuses_clashing()


def test_an_exception_undoes_debug() -> None:
    with pytest.raises(ValueError, match="more than once"), flashstate.debug():
        clashing()
    assert not refuses_clashing()
    with flashstate.debug():
        with pytest.raises(ValueError, match="more than once"), flashstate.debug():
            clashing()
        assert refuses_clashing()


def test_debug_that_is_not_entered_does_nothing() -> None:
    checks = flashstate.debug()
    assert not refuses_clashing()
    with checks:
        assert refuses_clashing()


def test_debug_decorates_a_function() -> None:
    checked = flashstate.debug()(refuses_clashing)
    assert [checked(), checked(), refuses_clashing()] == [True, True, False]


def test_debug_reports_faults_of_calls_before_it_and_writes_nothing_then() -> None:
    flashstate.mamba2_step(**arguments_of("one token", {"read": [0, 77, 1]}))
    arguments = arguments_of("one token", {})
    with flashstate.debug():
        refuses(lambda: flashstate.mamba2_step(**arguments), IndexError, "read slot 77", arguments)
        flashstate.mamba2_step(**arguments)


def test_torch_compile_skips_debug_and_leaves_it_on() -> None:
    arguments = arguments_of("one token", {"read": [4, 1, 4]})
    data, x = arguments["state"].data, arguments["x"]
    rest = {name: value for name, value in arguments.items() if name not in ("state", "x", "slots", "snapshots", "out")}

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(data: Tensor, x: Tensor, read: Tensor) -> Tensor:
        return flashstate.mamba2_step(data, x, **rest, slots=read)

    eager = flashstate.mamba2_step(data.clone(), x, **rest, slots=arguments["slots"].read)
    with flashstate.debug():
        assert torch.equal(step(data.clone(), x, arguments["slots"].read), eager)
        assert refuses_clashing()
    assert torch.equal(step(data.clone(), x, arguments["slots"].read), eager)


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
