"""State and Slots, seeds that move, and faults that show."""

import copy
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from itertools import cycle
from typing import Any

import pytest
import torch
from refusals import (
    CPU,
    META,
    SMALL_FORMS,
    Arguments,
    Change,
    at,
    both,
    columns,
    given,
    only,
    scaled_arguments,
    slots_arguments,
    state_arguments,
    step_arguments,
    strided,
)
from torch import Tensor

import flashstate
from flashstate import Slots, State, StatePool
from flashstate.proof import Case
from flashstate.state.faults import KINDS, fault_flag
from flashstate.state.formats import FORMATS
from flashstate.state.state import as_snapshots

SEED_STEP = 0x9E3779B97F4A7C15


@pytest.mark.parametrize(
    ("make", "arguments"),
    [(State, state_arguments()), (State, scaled_arguments()), (Slots, slots_arguments())],
    ids=["State", "State with scales", "Slots"],
)
def test_state_and_slots_keep_what_they_are_given_and_are_frozen(
    make: Callable[..., Any], arguments: Arguments
) -> None:
    value = make(**arguments)
    assert all(getattr(value, name) is argument for name, argument in arguments.items())
    for field in fields(value):
        with pytest.raises(FrozenInstanceError):
            setattr(value, field.name, getattr(value, field.name))


def test_states_and_pools_describe_themselves_without_reading_memory() -> None:
    sizes = {"slots": 8, "layers": 1, "heads": 4, "rows": 64, "cols": 128}
    pool = StatePool.mamba2(**sizes, dtype=torch.int8, rounding="stochastic", window=16, conv_channels=8)
    pool.acquire(2)
    shape = "of 4 x 64 x 128, int8 stochastic"
    assert repr(pool) == (
        f"StatePool(mamba2, 8 slots, 6 free, 1 layer {shape}, windows, rings, 46.1 KiB per slot, cpu)"
    )
    assert repr(pool.layer(0)) == f"State(8 slots {shape}, 33 KiB per slot, cpu)"
    assert "mamba2, 9 slots, 7 free" in repr(pool.resized(9))
    empty = torch.empty(2, 3, 4, 8, 16, device=META)  # memory of which nothing can be read
    assert repr(State(empty)) == "State(2 rows of 3 snapshots of 4 x 8 x 16, float32, 6 KiB per row, meta)"
    three = StatePool.mamba3(slots=2, layers=1, heads=4, rows=8, cols=16, angles=8).layer(0)
    said = "Mamba3State(2 slots of 4 x 8 x 16, float32, rank 1, 8 angles, 2.31 KiB per slot, cpu)"
    assert repr(three) == said
    one, other = State(empty[0]), State(torch.empty(3, 2, 16, 8, device=META).mT)
    assert repr(one) == "State(3 slots of 4 x 8 x 16, float32, 2 KiB per slot, meta)"
    assert "2 x 8 x 16, float32, transposed" in repr(other)


def test_slots_of_read_alone_have_nothing_else() -> None:
    slots = Slots(torch.tensor([1]))
    assert (slots.null, slots.padding, slots.longest, slots.per_token) == (-1, "zero", None, False)
    others = ("write", "accepted", "snapshot_rows", "cu_seqlens", "max_len", "parents")
    assert all(getattr(slots, name) is None for name in others)


def test_slots_know_the_longest_row_from_max_len_or_from_a_table() -> None:
    read, table, bounds = torch.tensor([1, 2]), torch.zeros(2, 5, dtype=torch.int64), torch.tensor([0, 3, 4])
    assert Slots(read, cu_seqlens=bounds).longest is None
    assert Slots(read, cu_seqlens=bounds, max_len=7).longest == 7
    assert Slots(read, cu_seqlens=bounds, write=table).longest == 5
    assert Slots(read, parents=table).longest == 5
    assert Slots(read, write=read).longest is None
    assert [Slots(read, write=write).per_token for write in (read, table)] == [False, True]


def test_slots_take_both_index_types_and_every_64_bit_null() -> None:
    for null in (-(1 << 63), -1, 0, (1 << 63) - 1):
        slots = Slots(torch.tensor([1], dtype=torch.int32), write=torch.tensor([2]), null=null)
        assert slots.null == null


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_state_takes_the_extremes_it_allows(rounding: str) -> None:
    for rounds, stream in ((1, 0), (16, (1 << 32) - 1)):
        state = State(**{**state_arguments(), "rounding": rounding, "rounds": rounds, "stream": stream})
        assert (state.rounding, state.rounds, state.stream) == (rounding, rounds, stream)
    largest = torch.zeros(1, 1, (1 << 31) - 1, 1, dtype=torch.float16, device=META)
    assert State(largest).bytes_per_slot == (1 << 32) - 2


STRIDES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "slots with gaps": ((3, 2, 4, 8), (100, 32, 8, 1)),
    "one slot with any stride": ((1, 2, 4, 8), (1, 32, 8, 1)),
    "any strides along axes of one": ((3, 1, 4, 1), (4, 9, 1, 9)),
    "one row": ((3, 2, 1, 8), (16, 8, 1, 1)),
    "one column": ((3, 2, 8, 1), (16, 8, 1, 8)),
    "snapshots with rows inside tokens": ((2, 3, 2, 4, 8), (64, 128, 32, 8, 1)),
    "snapshots of one row with any stride": ((1, 3, 2, 4, 8), (5, 70, 32, 8, 1)),
    "snapshots of an empty batch": ((0, 3, 2, 4, 8), (192, 64, 32, 8, 1)),
}
APART: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "heads with gaps": ((3, 2, 4, 8), (100, 40, 8, 1)),
    "slots inside heads": ((3, 2, 4, 8), (32, 96, 8, 1)),
    "snapshots with gaps between heads": ((2, 3, 2, 4, 8), (300, 100, 40, 8, 1)),
}
TRANSPOSED: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "slots with gaps": ((3, 2, 4, 8), (100, 32, 1, 4)),
    "square": ((3, 2, 4, 4), (32, 16, 1, 4)),
    "one slot with any stride": ((1, 2, 4, 8), (1, 32, 1, 4)),
    "one head with any stride": ((3, 1, 4, 8), (32, 9, 1, 4)),
    "heads with gaps": ((3, 2, 4, 8), (100, 40, 1, 4)),
    "snapshots with rows inside tokens": ((2, 3, 2, 4, 8), (64, 128, 32, 1, 4)),
    "snapshots of an empty batch": ((0, 3, 2, 4, 8), (192, 64, 32, 1, 4)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_state_takes_strides_that_do_not_overlap_and_knows_whether_slots_are_transposed(
    transposed: bool, dtype: torch.dtype
) -> None:
    for what, (shape, strides) in (TRANSPOSED if transposed else STRIDES | APART).items():
        state = State(torch.zeros(1000, dtype=dtype).as_strided(shape, strides))
        assert (state.transposed, state.data.stride()) == (transposed, strides), what
        assert state.bytes_per_slot == state.data.shape[-3:].numel() * dtype.itemsize * (
            shape[1] if len(shape) > 4 else 1
        )


@pytest.mark.parametrize(("shape", "strides"), STRIDES.values(), ids=STRIDES)
def test_scales_take_strides_that_do_not_overlap(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    scale = torch.zeros(1000).as_strided(shape[:-1], strides[:-1]) if shape[-1] == 1 else torch.zeros(shape[:-1])
    assert State(torch.zeros(1000, dtype=torch.int8).as_strided(shape, strides), scale).scale is scale


@pytest.mark.parametrize(("shape", "strides"), APART.values(), ids=APART)
def test_heads_with_scales_lie_side_by_side(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    data = torch.zeros(1000, dtype=torch.int8).as_strided(shape, strides)
    with pytest.raises(ValueError, match=r"^data must be contiguous within a slot.*only heads of formats without sca"):
        State(data, torch.ones(shape[:-1]))


def test_a_bare_tensor_is_a_state_and_an_index_tensor_is_slots() -> None:
    runs = []
    for wrap, wrap_slots in ((State, Slots), (lambda t: t, lambda t: t)):
        arguments = step_arguments()
        data = arguments["state"].data
        y = flashstate.mamba2_step(**{**arguments, "state": wrap(data), "slots": wrap_slots(arguments["slots"])})
        runs.append((y, data))
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_bytes_per_slot_counts_state_scales_and_seed_but_not_gaps(dtype: torch.dtype) -> None:
    data = torch.zeros(3, 100, dtype=dtype)[:, :64].unflatten(1, (2, 4, 8))
    scale = torch.zeros(3, 50)[:, :8].unflatten(1, (2, 4)) if FORMATS[dtype].scaled else None
    size = 64 * dtype.itemsize + (0 if scale is None else 8 * 4)
    assert State(data, scale).bytes_per_slot == size
    assert State(data, scale, seed=torch.zeros(3, dtype=torch.int64)).bytes_per_slot == size + 8
    snapshots = data[:, None].repeat(1, 5, 1, 1, 1), None if scale is None else scale[:, None].repeat(1, 5, 1, 1)
    assert State(*snapshots).bytes_per_slot == 5 * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bare_snapshots_are_rounded_as_the_pool_if_they_can_be(dtype: torch.dtype) -> None:
    bare = torch.zeros(2, 3, 2, 4, 8, dtype=dtype)
    for pool in ("nearest", "stochastic"):
        rounding = "nearest" if dtype is torch.float32 else pool
        state = State(**{**state_arguments(), "rounding": pool, "rounds": 7})
        snapshots = as_snapshots(bare, state)
        assert (snapshots.rounding, snapshots.rounds, snapshots.stream) == (rounding, 7, state.stream)
        assert snapshots.data is bare
        assert snapshots.seed is None


def test_a_state_of_snapshots_keeps_its_rounding_and_takes_rounds_and_stream_of_the_pool() -> None:
    state = State(**{**state_arguments(), "rounds": 7})
    for rounding in ("nearest", "stochastic"):
        given = State(**scaled_arguments(torch.int8, 2, 3), rounding=rounding, rounds=4, stream=9)
        snapshots = as_snapshots(given, state)
        assert (snapshots.rounding, snapshots.rounds, snapshots.stream) == (rounding, 7, state.stream)
        assert snapshots.data is given.data
        assert snapshots.scale is given.scale


SEEDS = (0, -1, 1 << 62, -(1 << 63), (1 << 63) - 1, 12345)


def advanced(times: dict[int, int]) -> list[int]:
    """SEEDS after so many steps of each slot, in arithmetic modulo 2^64."""
    words = [(seed + times.get(slot, 0) * SEED_STEP) % (1 << 64) for slot, seed in enumerate(SEEDS)]
    return [word - (1 << 64) if word >> 63 else word for word in words]


def seeds_of(state: State) -> list[int]:
    assert state.seed is not None
    return state.seed.tolist()


def state_with_seeds(device: torch.device) -> State:
    data = torch.full((len(SEEDS), 1, 1, 8), 1.5, dtype=torch.float16, device=device)
    return State(data, rounding="stochastic", seed=torch.tensor(SEEDS, device=device))


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("read", "null", "times"),
    [
        pytest.param([4, 1], -1, {4: 1, 1: 1}, id="exactly the read slots"),
        pytest.param([2, 0, 5, 3, 1, 4], -1, dict.fromkeys(range(6), 1), id="every slot"),
        pytest.param([2, 3, 2, 2], -1, {2: 3, 3: 1}, id="a slot once for every row that reads it"),
        pytest.param([0, 3, 0], 0, {3: 1}, id="not the null slot"),
        pytest.param([-1, -7, 5], -1, {5: 1}, id="not a negative slot"),
        pytest.param([-1, -7, 5], 2, {5: 1}, id="not a negative slot where null is another"),
        pytest.param([1000, 5], 1000, {5: 1}, id="not a null slot past the pool"),
        pytest.param([], -1, {}, id="nothing"),
    ],
)
def test_advance_moves(
    device: torch.device, index: torch.dtype, read: list[int], null: int, times: dict[int, int]
) -> None:
    state = state_with_seeds(device)
    state.advance(Slots(torch.tensor(read, dtype=index, device=device), null=null))
    assert seeds_of(state) == advanced(times)
    assert (state.data == 1.5).all()
    flashstate.check_faults()


def test_advance_takes_an_index_tensor_strided_slots_or_none_for_all(device: torch.device) -> None:
    table = torch.tensor([[3, 0], [1, 0]], device=device)
    for slots, times in ((table[0, :1], {3: 1}), (table[:, 0], {3: 1, 1: 1}), (None, dict.fromkeys(range(6), 1))):
        state = state_with_seeds(device)
        state.advance(slots)
        assert seeds_of(state) == advanced(times)


@pytest.mark.parametrize("past", [len(SEEDS), 1 << 30])
def test_advance_skips_and_reports_a_slot_past_the_pool(device: torch.device, past: int) -> None:
    state = state_with_seeds(device)
    state.advance(torch.tensor([2, past, 3], device=device))
    assert seeds_of(state) == advanced({2: 1, 3: 1})
    with pytest.raises(IndexError, match=rf"read slot {past} on {device.type}"):
        flashstate.check_faults()
    flashstate.check_faults()


def test_advance_moves_all_slots_of_a_row(device: torch.device) -> None:
    read, accepted = torch.tensor([[0, 1], [2, 3], [4, 5]], device=device), torch.tensor([2, 0, 1], device=device)
    state = state_with_seeds(device)
    state.advance(Slots(read, accepted=accepted))
    assert seeds_of(state) == advanced({0: 1, 1: 1, 4: 1, 5: 1})


def test_a_step_reads_seeds_and_leaves_them(device: torch.device) -> None:
    state, one = state_with_seeds(device), torch.ones(6, 1, 1, device=device)
    cols = torch.ones(6, 1, 8, device=device)
    flashstate.mamba2_step(state, one, one[..., 0], -one[0, 0], cols, cols)
    assert seeds_of(state) == list(SEEDS)
    assert not (state.data == 1.5).any()


def wide(numbers: Tensor) -> Tensor:
    """The numbers in the second column of a table that is a view of a wider one."""
    return torch.stack([numbers + 90, numbers + 90, numbers, numbers + 90], 1)[:, 1:3]


def everything_at(*kinds: torch.dtype) -> Change:
    """Every table there is, of these types."""

    def change(arguments: Arguments) -> Arguments:
        read = arguments["slots"].read
        first_only = torch.stack([read, -1 - read, -1 - read], 1)
        tables = {
            "read": wide(read),
            "accepted": torch.full_like(read, 2),
            "write": first_only,
            "snapshot_rows": torch.arange(3).flip(0).to(read),
            "parents": torch.tensor([-1, 0, 0]).to(read).repeat(3, 1),
            "cu_seqlens": arguments["slots"].cu_seqlens,
        }
        typed = {name: table.to(kind) for (name, table), kind in zip(tables.items(), cycle(kinds), strict=False)}
        return at(**typed)(arguments)

    return change


def same_rows(numbers: Tensor) -> Tensor:
    return torch.arange(3).to(numbers)


def chain(numbers: Tensor) -> Tensor:
    return torch.tensor([-1, 0, 1]).to(numbers).repeat(3, 1)


INT32, INT64, AS_IT_IS = torch.int32, torch.int64, given()
EQUAL: dict[str, tuple[str, Change, Change]] = {
    "accepted slots of a wider table": ("several tokens", at(read=wide, accepted=lambda t: t * 0 + 2), AS_IT_IS),
    "slots that are every second entry": ("several tokens", at(read=strided, write=strided), AS_IT_IS),
    "tables of mixed types": ("packed", everything_at(INT32, INT64), everything_at(INT64)),
    "tables of other mixed types": ("packed", everything_at(INT64, INT32), everything_at(INT64)),
    "a slot to write for the one token": ("one token", at(write=columns(1)), AS_IT_IS),
    "snapshot rows that are the rows": ("several tokens", at(snapshot_rows=same_rows), AS_IT_IS),
    "parents that are the token before": ("packed", both(given(update=False), at(parents=chain)), given(update=False)),
    "a larger max_len": ("packed", at(max_len=6), AS_IT_IS),
    "the largest null": ("several tokens", at(null=(1 << 63) - 1), AS_IT_IS),
    "the smallest null": ("several tokens", at(null=-(1 << 63)), AS_IT_IS),
    "a State of snapshots": ("packed", only("snapshots", lambda t: State(t, rounding="stochastic")), AS_IT_IS),
}


@pytest.mark.parametrize(("form", "change", "same"), EQUAL.values(), ids=EQUAL)
def test_a_call_equals_a_plainer_one_with(device: torch.device, form: str, change: Change, same: Change) -> None:
    runs = []
    for change_it in (change, same):
        arguments = step_arguments(SMALL_FORMS[form], device)
        flashstate.mamba2_step(**{**arguments, **change_it(arguments)})
        runs.append([arguments["out"], arguments["state"].data, arguments["snapshots"]])
    assert all(map(torch.equal, *runs))
    assert not (arguments["snapshots"] == 7.0).all()
    flashstate.check_faults()


@pytest.mark.parametrize("form", SMALL_FORMS)
def test_snapshots_may_have_room_for_more(device: torch.device, form: str) -> None:
    case = SMALL_FORMS[form]
    runs = []
    for rows, tokens in ((3, case.tokens or 1), (5, 6)):
        arguments = step_arguments(case, device)
        snapshots = torch.full((rows, tokens, 1, 2, 3), 7.0, device=device)
        flashstate.mamba2_step(**{**arguments, "snapshots": snapshots})
        runs.append(snapshots)
    exact, larger = runs
    assert torch.equal(larger[: exact.shape[0], : exact.shape[1]], exact)
    larger[: exact.shape[0], : exact.shape[1]] = 7.0
    assert (larger == 7.0).all()


def tokens_cut(arguments: Arguments) -> Arguments:
    return {name: arguments[name][:, :0] for name in ("x", "dt", "B", "C", "z", "out")}


NO_BOUNDS = {"cu_seqlens": lambda t: torch.zeros(4).to(t)}
EMPTY: dict[str, tuple[Case, Change]] = {
    **{
        f"an empty batch{what}, {form}": (replace(case, batch=0), change)
        for form, case in SMALL_FORMS.items()
        for what, change in (("", AS_IT_IS), (" with empty snapshots", only("snapshots", lambda t: t[:0])))
    },
    "no tokens": (SMALL_FORMS["several tokens"], tokens_cut),
    "no tokens, with a table for them": (SMALL_FORMS["several tokens"], both(tokens_cut, at(write=columns(0)))),
    "no tokens, packed": (SMALL_FORMS["packed"], at(**NO_BOUNDS)),
    "no tokens, packed and with max_len 0": (SMALL_FORMS["packed"], at(**NO_BOUNDS, max_len=0)),
}


@pytest.mark.parametrize(("case", "change"), EMPTY.values(), ids=EMPTY)
def test_nothing_is_written_for(device: torch.device, case: Case, change: Change) -> None:
    arguments = step_arguments(case, device)
    arguments.update(change(arguments))
    pool, seed = arguments["state"].data.clone(), arguments["state"].seed.clone()
    with flashstate.debug():
        y = flashstate.mamba2_step(**arguments)
    assert y is arguments["out"]
    assert (y == 0).all()
    assert torch.equal(arguments["state"].data, pool)
    assert torch.equal(arguments["state"].seed, seed)
    assert (arguments["snapshots"] == 7.0).all()
    flashstate.check_faults()


def step(device: torch.device, slots: Slots, tokens: int, **options: Any) -> None:
    """Three rows of so many tokens on a pool of six slots."""
    lead = (3, tokens) if slots.cu_seqlens is None else (3 * tokens,)
    x, B = (torch.ones(*lead, 1, size, device=device) for size in (1, 8))
    flashstate.mamba2_step(state_with_seeds(device), x, x[..., 0], -x.flatten()[:1], B, B, slots=slots, **options)


FIRST = [0, 1, 2]
FAULTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "nothing": ({"read": [0, -1, 5], "write": [3, 77, -8]}, []),
    "a read slot": ({"read": [0, 77, 1]}, ["read slot 77"]),
    "a write slot": ({"read": FIRST, "write": [5, 3, 88]}, ["write slot 88"]),
    "both": ({"read": [0, 77, 1], "write": [2, 3, 88]}, ["read slot 77", "write slot 88"]),
    "not the write slot of padding": ({"read": [-1, 77, -1], "write": [2, 99, 3]}, ["read slot 77"]),
    "not a null past the pool": ({"read": [0, 77, 1], "write": [77, 3, 88], "null": 77}, ["write slot 88"]),
    "not null alone": ({"read": [77, 77, 1], "write": [3, 3, 77], "null": 77}, []),
    "the slot of a token": ({"read": FIRST, "write": [[3, 4], [-1, 88], [-1, 5]]}, ["write slot 88"]),
    "not a token's of padding": ({"read": [0, -1, 2], "write": [[3, 4], [88, 88], [-1, 5]]}, []),
    "accepted above n": ({"read": [[0, 1], [2, 3], [4, 5]], "accepted": [2, 3, 1]}, ["accepted 3"]),
    "not accepted below 1": ({"read": [[0, 1], [2, 3], [4, 5]], "accepted": [2, 0, -4]}, []),
    "a slot that was accepted": ({"read": [[0, 1], [2, 77], [4, 5]], "accepted": [2, 2, 1]}, ["read slot 77"]),
    "not one that was not": ({"read": [[0, 1], [2, 77], [77, 5]], "accepted": [2, 1, 2]}, []),
    "not what no count accepts": ({"read": [[0, 1], [77, 77], [4, 5]], "accepted": [2, 0, 1]}, []),
    "a snapshot row": ({"read": FIRST, "snapshot_rows": [1, 9, -1]}, ["snapshot row 9"]),
    "not a snapshot row of padding": ({"read": [0, -1, 2], "snapshot_rows": [1, 9, 0]}, []),
    "all of them": (
        {"read": [[0, 77], [2, 3], [4, 5]], "accepted": [2, 7, 1], "write": [1, 2, 88], "snapshot_rows": [0, 0, 9]},
        ["read slot 77", "write slot 88", "accepted 7", "snapshot row 9"],
    ),
}


@pytest.mark.parametrize(("tables", "found"), FAULTS.values(), ids=FAULTS)
def test_check_faults_raises_once_and_names(device: torch.device, tables: dict[str, Any], found: list[str]) -> None:
    null = tables.get("null", -1)
    slots = Slots(**{name: torch.tensor(t, device=device) for name, t in tables.items() if name != "null"}, null=null)
    flashstate.check_faults()
    step(device, slots, 2, snapshots=torch.zeros(3, 2, 1, 1, 8, device=device))
    if found:
        with pytest.raises(IndexError) as error:
            flashstate.check_faults()
        where = slots.read.device
        listed = ", ".join(f"{what} on {where}" for what in found)
        assert str(error.value) == f"out of range: {listed} (one example of each kind)"
    flashstate.check_faults()


UNUSED: dict[str, dict[str, Any]] = {
    "write slots of tokens": {"write": torch.tensor([[3, 88], [88, 88], [4, 5]])},
    "write slots of rows": {"write": torch.tensor([3, 88, 4])},
    "snapshot rows": {"snapshot_rows": torch.tensor([0, 9, 1])},
}


@pytest.mark.parametrize("tables", UNUSED.values(), ids=UNUSED)
def test_entries_for_tokens_that_a_row_does_not_have_are_no_faults(
    device: torch.device, tables: dict[str, Any]
) -> None:
    bounds = torch.tensor([0, 1, 1, 3], device=device)
    tables = {name: table.to(device) for name, table in tables.items()}
    slots = Slots(torch.tensor(FIRST, device=device), cu_seqlens=bounds, max_len=2, **tables)
    step(device, slots, 1, snapshots=torch.zeros(3, 2, 1, 1, 8, device=device))
    flashstate.check_faults()


def test_the_fault_flag_of_a_cpu_is_one_tensor_that_sticks() -> None:
    flag = fault_flag(CPU)
    assert flag is fault_flag(torch.device("cpu"))
    assert (flag.dtype, flag.tolist()) == (torch.int64, [0] * len(KINDS))
    state = state_with_seeds(CPU)
    state.advance(torch.tensor([50]))
    state.advance(torch.tensor([1]))
    assert flag.tolist() == [50] + [0] * (len(KINDS) - 1)
    with pytest.raises(IndexError, match="read slot 50 on cpu"):
        flashstate.check_faults()
    assert not flag.any()


# States that go in and out without a pool


@pytest.mark.parametrize(("name", "rounding"), [("float32", "nearest"), ("int8", "stochastic")])
def test_a_state_reads_and_writes_slots_as_a_pool_does(name: str, rounding: str, device: torch.device) -> None:
    options = {"dtype": getattr(torch, name), "rounding": rounding, "seed": 0, "device": device}
    pool = StatePool.mamba2(slots=4, layers=1, heads=2, rows=3, cols=5, **options)
    pool.acquire(4, seed=[1, 2, 3, 4])
    state = pool.layer(0)
    alone = copy.deepcopy(state)
    values = torch.randn(2, 2, 3, 5, generator=torch.Generator().manual_seed(0)).to(device)
    pool.write(0, [3, 1], values)
    alone.write([3, 1], values)
    for part in ("data", "scale"):
        assert getattr(state, part) is None or torch.equal(getattr(state, part), getattr(alone, part))
    assert torch.equal(alone.read((1, 3, 1)), pool.read(0, [1, 3, 1]))
    assert torch.equal(alone.read(1)[0], alone.read(torch.tensor([1, -1, 4], device=device, dtype=torch.int32))[0])
    assert not alone.read(torch.tensor([-1, 4], device=device)).any()
    with pytest.raises(IndexError, match=r"^out of range: read slot 4 on"):
        flashstate.check_faults()
    alone.write(torch.tensor([9, 2], device=device), values)
    pool.write(0, 2, values[1:])
    assert torch.equal(alone.read([2]), pool.read(0, 2))
    with pytest.raises(IndexError, match=r"^out of range: write slot 9 on"):
        flashstate.check_faults()


WRONG_SLOTS: list[tuple[Callable[[State], object], str, type[Exception]]] = [
    (lambda state: state.read([0, 4]), "^slots must be from 0 to 3, got 4", ValueError),
    (lambda state: state.write(-1, torch.ones(1, 2, 3, 5)), "^slots must be from 0 to 3, got -1", ValueError),
    (lambda state: state.write([1, 1], torch.ones(2, 2, 3, 5)), "^slots must be distinct, got slot 1", ValueError),
    (lambda state: state.write(1, torch.ones(2, 2, 3, 5)), r"^values must have shape \(slots=1, ", ValueError),
    (lambda state: state.write(1, torch.ones(1, 2, 3, 5).double()), "^values must be float32 or", TypeError),
    (lambda state: state.read(None), "^slots must be an int, a sequence of ints or", TypeError),
    (lambda state: state.read(torch.ones(1)), "^slots must be int32 or int64, got float32", TypeError),
    (lambda state: State(state.data[:, None]).read(0), r"^state must have data \(slots, heads", ValueError),
]


@pytest.mark.parametrize(("call", "message", "error"), WRONG_SLOTS)
def test_wrong_slots_of_a_state_are_refused_and_change_nothing(
    call: Callable[[State], object], message: str, error: type[Exception]
) -> None:
    state = State(torch.zeros(4, 2, 3, 5))
    with pytest.raises(error, match=message):
        call(state)
    assert not state.data.any()


def test_inside_debug_slots_of_a_state_on_the_device_are_checked() -> None:
    state, values = State(torch.zeros(4, 2, 3, 5)), torch.ones(2, 2, 3, 5)
    with flashstate.debug():
        with pytest.raises(ValueError, match=r"^slots must be from 0 to 3, got 4"):
            state.read(torch.tensor([4, -1]))
        with pytest.raises(ValueError, match=r"^slots must be distinct, got slot 2 more than once"):
            state.write(torch.tensor([2, 2]), values)
        state.write(torch.tensor([-1, 2]), values)
    assert state.data.sum() == 30
