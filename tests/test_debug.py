"""debug(): what it finds, before anything is written; what it lets through, unchanged; and where it has no effect."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from refusals import CPU, SMALL_FORMS, Arguments, memory_of, refuses, step_arguments, tensors_of
from torch import Tensor

import flashstate
from flashstate import Slots
from flashstate.launch import interpreted

Implementation = Callable[[], contextlib.AbstractContextManager[None]]
EVERYWHERE = pytest.mark.parametrize(
    ("device", "implementation"),
    [
        pytest.param(CPU, contextlib.nullcontext, id="reference"),
        pytest.param(CPU, interpreted, id="interpreter", marks=pytest.mark.interpreted),
        pytest.param(torch.device("cuda"), contextlib.nullcontext, id="gpu", marks=pytest.mark.gpu),
    ],
)


@pytest.fixture(autouse=True)
def no_faults() -> Iterator[None]:
    flashstate.check_faults()
    yield
    with contextlib.suppress(IndexError):
        flashstate.check_faults()


def arguments_of(form: str, fields: dict[str, Any], device: torch.device, **options: Any) -> Arguments:
    """A call on a pool of 7 slots: 3 rows of 3 tokens, or packed of 3, 2 and 1 tokens and two more that no row has."""
    arguments = {**step_arguments(SMALL_FORMS[form], device), **options}
    slots = arguments["slots"] if isinstance(arguments["slots"], Slots) else Slots(arguments["slots"])
    tables = {name: torch.tensor(v, device=device) if isinstance(v, list) else v for name, v in fields.items()}
    return {**arguments, "slots": replace(slots, **{"read": torch.tensor([0, 1, 2], device=device), **tables})}


PAIRS = [[0, 1], [2, 3], [4, 5]]
TREE = [[-1, 0, 0], [-1, -1, 1], [-1, 0, 1]]
FIRST_WRONG = [[9, 9, 9], [-1, -1, 1], [-1, 0, 1]]
LAST_WRONG = [[-1, 0, 0], [-1, 0, 9], [-1, 9, 9]]
STORED = [[3, -1, 4], [5, -1, 6], [-1, -1, -1]]  # per token
Finding = tuple[str, str, dict[str, Any], dict[str, Any], type[Exception], str]


def twice(slot: int, *rows: int) -> str:
    return rf"^slots write slot {slot} more than once: rows {', '.join(map(str, rows))}$"


def invalid(parent: int, token: int, row: int) -> str:
    return rf"^slots.parents must be from -1 to t - 1, got {parent} for token {token} of row {row}$"


BOUNDS = r"^slots.cu_seqlens must start at 0, never fall, and end at 8 or before, got "
FINDINGS: list[Finding] = [
    ("two rows in one slot", "several tokens", {"read": [4, 1, 4]}, {}, ValueError, twice(4, 0, 2)),
    ("two rows in one slot, by write", "one token", {"write": [3, 5, 3]}, {}, ValueError, twice(3, 0, 2)),
    (
        "tokens of two rows in one slot",
        "several tokens",
        {"write": [[3, -1, 4], [5, -1, 3], [-1, -1, 6]]},
        {},
        ValueError,
        twice(3, 0, 1),
    ),
    (
        "two tokens of a row in one slot",
        "several tokens",
        {"write": [[3, -1, 4], [5, -1, 5], [-1, -1, 6]]},
        {},
        ValueError,
        twice(5, 1, 1),
    ),
    ("packed rows in one slot", "packed", {"write": [6, 4, 4]}, {}, ValueError, twice(4, 1, 2)),
    (
        "packed tokens in one slot",
        "packed",
        {"write": [[3, -1, 4], [5, 6, 0], [4, 0, 0]]},
        {},
        ValueError,
        twice(4, 0, 2),
    ),
    (
        "writing what another row reads",
        "several tokens",
        {"write": [3, 2, 4]},
        {},
        ValueError,
        r"^slots let row 1 write slot 2, which row 2 reads$",
    ),
    (
        "a fork that writes what it was made from",
        "one token",
        {"read": [1, 1, 2], "write": [3, 1, 4]},
        {},
        ValueError,
        r"^slots let row 1 write slot 1, which row 0 reads$",
    ),
    (
        "a token that writes what another row reads",
        "several tokens",
        {"write": [[3, -1, 4], [5, 0, -1], [-1, -1, -1]]},
        {},
        ValueError,
        r"^slots let row 1 write slot 0, which row 0 reads$",
    ),
    (
        "writing what another row reads, as accepted",
        "several tokens",
        {"read": PAIRS, "accepted": [2, 1, 2], "write": [1, 5, 6]},
        {},
        ValueError,
        r"^slots let row 1 write slot 5, which row 2 reads$",
    ),
    (
        "a snapshot row twice",
        "several tokens",
        {"snapshot_rows": [1, 0, 1]},
        {},
        ValueError,
        r"^slots fill snapshot row 1 more than once: rows 0, 2$",
    ),
    (
        "a snapshot row twice, without update",
        "packed",
        {"snapshot_rows": [1, 4, 4]},
        {"update": False},
        ValueError,
        r"^slots fill snapshot row 4 more than once: rows 1, 2$",
    ),
    *[
        (f"boundaries {bounds}", "packed", {"cu_seqlens": bounds}, {}, ValueError, rf"{BOUNDS}\[{bounds[0]}, ")
        for bounds in ([1, 3, 5, 6], [-1, 2, 3, 4], [0, 3, 2, 5], [0, 3, 3, 9], [0, 9, 9, 9], [0, 3, 8, 2])
    ],
    (
        "rows longer than max_len",
        "packed",
        {"cu_seqlens": [0, 1, 5, 7]},
        {},
        ValueError,
        r"^slots.cu_seqlens has a row of 4 tokens, but max_len is 3$",
    ),
    (
        "rows longer than the table of write slots",
        "packed",
        {"write": [[3, 4], [5, 6], [-1, -1]], "max_len": None},
        {},
        ValueError,
        r"^slots.cu_seqlens has a row of 3 tokens, but max_len is 2$",
    ),
    *[
        (
            f"parent {parent} of token {token} of row {row}",
            "several tokens",
            {
                "parents": [
                    [parent if (b, t) == (row, token) else p for t, p in enumerate(r)] for b, r in enumerate(TREE)
                ]
            },
            {"update": False},
            ValueError,
            invalid(parent, token, row),
        )
        for parent, token, row in ((-2, 0, 0), (0, 0, 1), (1, 1, 0), (2, 1, 2), (2, 2, 2), (3, 2, 1), (99, 1, 0))
    ],
    (
        "a parent below padding",
        "several tokens",
        {"read": [-1, 1, 2], "parents": [[5, 5, 5], [-1, 0, 7], [-1, 0, 0]]},
        {"update": False},
        ValueError,
        invalid(7, 2, 1),
    ),
    (
        "a parent where states are stored",
        "several tokens",
        {"parents": [[-1, 0, 0], [-1, 1, 1], [-1, 0, 0]], "write": STORED},
        {},
        ValueError,
        invalid(1, 1, 1),
    ),
    (
        "a packed parent",
        "packed",
        {"parents": [[-1, 0, 1], [-1, 1, 9], [9, 9, 9]], "write": STORED},
        {},
        ValueError,
        invalid(1, 1, 1),
    ),
    ("a read slot", "several tokens", {"read": [0, 77, 1]}, {}, IndexError, r"^out of range: read slot 77 on "),
    ("a write slot", "one token", {"write": [3, 4, 88]}, {}, IndexError, r"^out of range: write slot 88 on "),
    (
        "a write slot of a token",
        "packed",
        {"write": [[3, -1, 88], [5, 6, 0], [4, 0, 0]]},
        {},
        IndexError,
        r"^out of range: write slot 88 on ",
    ),
    (
        "an accepted count",
        "one token",
        {"read": PAIRS, "accepted": [2, 1, 3]},
        {"update": False},
        IndexError,
        r"^out of range: accepted 3 on ",
    ),
    (
        "a snapshot row",
        "several tokens",
        {"snapshot_rows": [0, 1, 5]},
        {},
        IndexError,
        r"^out of range: snapshot row 5 on ",
    ),
    (
        "faults first",
        "several tokens",
        {"read": [0, 77, 0], "write": [3, 3, 3]},
        {},
        IndexError,
        r"^out of range: read slot 77 on ",
    ),
]


@EVERYWHERE
@pytest.mark.parametrize(
    ("form", "fields", "options", "error", "message"), [f[1:] for f in FINDINGS], ids=[f[0] for f in FINDINGS]
)
def test_debug_finds_and_nothing_changes(
    device: torch.device,
    implementation: Implementation,
    form: str,
    fields: dict[str, Any],
    options: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    arguments = arguments_of(form, fields, device, **options)
    with implementation(), flashstate.debug():
        refuses(lambda: flashstate.mamba2_step(**arguments), error, message, arguments)
    flashstate.check_faults()  # nothing is left behind


Right = tuple[str, str, dict[str, Any], dict[str, Any]]
RIGHT: list[Right] = [
    *[(f"in place, {form}", form, {}, {}) for form in SMALL_FORMS],
    ("its own read slot", "several tokens", {"write": [0, 1, 2]}, {}),
    ("its own read slot after a token", "several tokens", {"write": [[0, 3, -1], [4, 1, 5], [6, -1, 2]]}, {}),
    ("a fork", "several tokens", {"read": [1, 1, 2], "write": [3, 4, 5]}, {}),
    ("one slot for all, without update", "several tokens", {"read": [1, 1, 1]}, {"update": False}),
    ("what was not accepted", "several tokens", {"read": PAIRS, "accepted": [2, 1, 2], "write": [4, 0, 6]}, {}),
    ("rows that were not accepted", "one token", {"read": PAIRS, "accepted": [1, 0, -3], "write": [4, 4, 4]}, {}),
    ("write slots that are none", "several tokens", {"write": [-1, -1, -7]}, {}),
    ("write slots that are null", "several tokens", {"write": [3, 3, 4], "null": 3}, {}),
    ("padding that is null", "several tokens", {"read": [3, 1, 3], "null": 3}, {}),
    ("padding that writes anywhere", "one token", {"read": [-1, 1, -1], "write": [4, 4, 99]}, {}),
    ("padding with any snapshot row", "one token", {"read": [-1, 1, -1], "snapshot_rows": [0, 0, 99]}, {}),
    ("padding with any parents", "several tokens", {"read": [-1, 1, 2], "parents": FIRST_WRONG}, {"update": False}),
    ("a tree", "several tokens", {"parents": TREE}, {"update": False}),
    ("a tree that is stored", "several tokens", {"parents": TREE, "write": STORED}, {}),
    ("snapshot rows in any order", "several tokens", {"snapshot_rows": [4, 0, 2]}, {}),
    ("two rows without a snapshot", "several tokens", {"snapshot_rows": [-1, 4, -1]}, {}),
    ("clashing rows of no snapshots", "several tokens", {"snapshot_rows": [1, 1, 1]}, {"snapshots": None}),
    ("no slots", "several tokens", {}, {"slots": None}),
    ("no tokens", "packed", {"cu_seqlens": [0, 0, 0, 0]}, {}),
    ("rows without tokens in one slot", "packed", {"cu_seqlens": [0, 3, 3, 3], "read": [4, 4, 4]}, {}),
    ("rows without tokens that write", "packed", {"cu_seqlens": [0, 0, 3, 3], "write": [4, 4, 1]}, {}),
    ("rows without tokens in one snapshot", "packed", {"cu_seqlens": [0, 0, 3, 3], "snapshot_rows": [2, 2, 2]}, {}),
    ("slots of tokens there are not", "packed", {"write": [[3, 4, 5], [6, -1, 3], [2, 3, 3]]}, {}),
    ("parents of tokens there are not", "packed", {"parents": LAST_WRONG}, {"update": False}),
    ("packed without max_len", "packed", {"max_len": None}, {"snapshots": None}),
]


def everything(arguments: Arguments) -> list[Tensor]:
    """A copy of all memory a call can reach."""
    return [memory_of(tensor).clone() for value in arguments.values() for tensor in tensors_of(value)]


@EVERYWHERE
@pytest.mark.parametrize(
    ("form", "fields", "options"), [right[1:] for right in RIGHT], ids=[right[0] for right in RIGHT]
)
def test_debug_lets_right_calls_through_unchanged(
    device: torch.device, implementation: Implementation, form: str, fields: dict[str, Any], options: dict[str, Any]
) -> None:
    results = []
    for checks in (contextlib.nullcontext, flashstate.debug):
        arguments = {**arguments_of(form, fields, device), **options}
        with implementation(), checks():
            flashstate.mamba2_step(**arguments)
        results.append(everything(arguments))
    assert all(map(torch.equal, *results))
    flashstate.check_faults()


def clashing() -> None:
    """A call that debug() refuses and that nothing else does."""
    flashstate.mamba2_step(**arguments_of("one token", {"read": [4, 1, 4]}, CPU))


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
    flashstate.mamba2_step(**arguments_of("one token", {"read": [0, 77, 1]}, CPU))
    arguments = arguments_of("one token", {}, CPU)
    with flashstate.debug():
        refuses(lambda: flashstate.mamba2_step(**arguments), IndexError, "read slot 77", arguments)
        flashstate.mamba2_step(**arguments)


def test_torch_compile_skips_debug_and_leaves_it_on() -> None:
    arguments = arguments_of("one token", {"read": [4, 1, 4]}, CPU)
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
