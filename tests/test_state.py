"""State and Slots, seeds that move, and faults that show."""

import copy
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
import torch
from refusals import (
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
)

import flashstate
from flashstate import Slots, State, StatePool
from flashstate.proof import Case
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
    sizes, shape = {"slots": 8, "layers": 1, "heads": 4, "rows": 64, "cols": 128}, "of 4 x 64 x 128, int8 stochastic"
    pool = StatePool.mamba2(**sizes, dtype=torch.int8, rounding="stochastic", window=16, conv_channels=8)
    pool.acquire(2)
    three = StatePool.mamba3(slots=2, layers=1, heads=4, rows=8, cols=16, angles=8)
    empty = torch.empty(2, 3, 4, 8, 16, device=META)  # memory of which nothing can be read
    for told, words in (
        (pool, f"StatePool(mamba2, 8 slots, 6 free, 1 layer {shape}, windows, rings, 46.1 KiB per slot, cpu)"),
        (pool.resized(9).free, "7"),
        (pool.layer(0), f"State(8 slots {shape}, 33 KiB per slot, cpu)"),
        (three.layer(0), "Mamba3State(2 slots of 4 x 8 x 16, float32, rank 1, 8 angles, 2.31 KiB per slot, cpu)"),
        (State(empty), "State(2 rows of 3 snapshots of 4 x 8 x 16, float32, 6 KiB per row, meta)"),
        (State(empty[0].mT), "State(3 slots of 4 x 16 x 8, float32, transposed, 2 KiB per slot, meta)"),
    ):
        assert repr(told) == words


def test_slots_know_the_longest_row_from_max_len_or_from_a_table() -> None:
    read, table, bounds = torch.tensor([1, 2]), torch.zeros(2, 5, dtype=torch.int64), torch.tensor([0, 3, 4])
    for tables, longest in (
        ({}, None), ({"cu_seqlens": bounds}, None), ({"cu_seqlens": bounds, "max_len": 7}, 7), ({"write": read}, None),
        ({"cu_seqlens": bounds, "write": table}, 5), ({"parents": table}, 5),
    ):  # fmt: skip
        slots = Slots(read, **tables)
        assert (slots.longest, slots.per_token) == (longest, tables.get("write") is table)


Layouts = list[tuple[tuple[int, ...], tuple[int, ...]]]  # sizes and strides
STRIDES: Layouts = [
    ((3, 2, 4, 8), (100, 32, 8, 1)),  # slots with gaps
    ((1, 2, 4, 8), (1, 32, 8, 1)),  # one slot with any stride
    ((3, 1, 4, 1), (4, 9, 1, 9)),  # any strides along axes of one
    ((3, 2, 8, 1), (16, 8, 1, 8)),  # one column
    ((2, 3, 2, 4, 8), (64, 128, 32, 8, 1)),  # snapshots with rows inside tokens
    ((0, 3, 2, 4, 8), (192, 64, 32, 8, 1)),  # snapshots of an empty batch
]
APART: Layouts = [
    ((3, 2, 4, 8), (100, 40, 8, 1)),  # heads with gaps
    ((3, 2, 4, 8), (32, 96, 8, 1)),  # slots inside heads
    ((2, 3, 2, 4, 8), (300, 100, 40, 8, 1)),
]
TRANSPOSED: Layouts = [
    ((3, 2, 4, 8), (100, 32, 1, 4)),
    ((3, 2, 4, 4), (32, 16, 1, 4)),  # square
    ((3, 1, 4, 8), (32, 9, 1, 4)),  # one head with any stride
    ((3, 2, 4, 8), (100, 40, 1, 4)),
    ((2, 3, 2, 4, 8), (64, 128, 32, 1, 4)),
]


def test_state_takes_strides_that_do_not_overlap_and_knows_whether_slots_are_transposed() -> None:
    cases = [*((False, *one) for one in (*STRIDES, *APART)), *((True, *one) for one in TRANSPOSED)]
    for transposed, shape, strides in cases:
        state = State(torch.zeros(1000).as_strided(shape, strides))
        assert (state.transposed, state.data.stride()) == (transposed, strides)
        assert state.bytes_per_slot == torch.Size(shape[1:]).numel() * 4
    largest = torch.zeros(1, 1, (1 << 31) - 1, 1, dtype=torch.float16, device=META)
    assert State(largest, rounds=16, stream=(1 << 32) - 1).bytes_per_slot == (1 << 32) - 2
    for shape, strides in STRIDES:
        data, scale = torch.zeros(1000, dtype=torch.int8).as_strided(shape, strides), torch.zeros(shape[:-1])
        scale = scale.flatten().as_strided(shape[:-1], strides[:-1]) if shape[-1] == 1 else scale
        assert State(data, scale).scale is scale


@pytest.mark.parametrize("dtype", [torch.float16, torch.int16], ids=str)
def test_bytes_per_slot_counts_state_scales_and_seed_but_not_gaps(dtype: torch.dtype) -> None:
    data = torch.zeros(3, 100, dtype=dtype)[:, :64].unflatten(1, (2, 4, 8))
    scale = torch.zeros(3, 50)[:, :8].unflatten(1, (2, 4)) if FORMATS[dtype].scaled else None
    size = 64 * dtype.itemsize + (0 if scale is None else 8 * 4)
    assert State(data, scale).bytes_per_slot == size
    assert State(data, scale, seed=torch.zeros(3, dtype=torch.int64)).bytes_per_slot == size + 8
    snapshots = data[:, None].repeat(1, 5, 1, 1, 1), None if scale is None else scale[:, None].repeat(1, 5, 1, 1)
    assert State(*snapshots).bytes_per_slot == 5 * size


def test_snapshots_are_rounded_as_they_say_or_as_the_pool_if_they_can_be_and_take_its_rounds_and_stream() -> None:
    scaled = scaled_arguments(torch.int8, 2, 3)
    for pool in ("nearest", "stochastic"):
        state = State(**{**state_arguments(), "rounding": pool, "rounds": 7})
        for one, rounding in (
            (torch.zeros(2, 3, 2, 4, 8), "nearest"), (torch.zeros(2, 3, 2, 4, 8).bfloat16(), pool),
            (State(**scaled, rounding="nearest", rounds=4, stream=9), "nearest"),
            (State(**scaled, rounding="stochastic", rounds=4, stream=9), "stochastic"),
        ):  # fmt: skip
            snapshots, data = as_snapshots(one, state), one.data if isinstance(one, State) else one
            assert (snapshots.rounding, snapshots.rounds, snapshots.stream) == (rounding, 7, state.stream)
            assert snapshots.data.data_ptr() == data.data_ptr()
            assert snapshots.seed is None
            assert snapshots.scale is getattr(one, "scale", None)


# Seeds, tables and faults; tests/test_properties.py has them in random situations

SEEDS = (0, -1, 1 << 62, -(1 << 63), (1 << 63) - 1, 12345)


def test_advance_moves_every_seed_on_by_the_same_word(device: torch.device) -> None:
    data, seed = torch.zeros(6, 1, 1, 8, device=device), torch.tensor(SEEDS, device=device)
    state = State(data, seed=seed)
    state.advance()
    state.advance(torch.tensor([[9, 2], [9, 4], [9, 2]], device=device)[:, 1])  # a slot once for every row
    table, accepted = torch.tensor([[1, 3], [0, 2]], device=device), torch.tensor([2, 1], device=device)
    state.advance(Slots(table, accepted=accepted))  # all slots of a row
    for slot, (before, after) in enumerate(zip(SEEDS, seed.tolist(), strict=True)):
        assert after % (1 << 64) == (before + {2: 4, 5: 1}.get(slot, 2) * SEED_STEP) % (1 << 64)


def tokens_cut(arguments: Arguments) -> Arguments:
    return {name: arguments[name][:, :0] for name in ("x", "dt", "B", "C", "z", "out")}


NO_BOUNDS, NO_ROWS = {"cu_seqlens": lambda t: torch.zeros(4).to(t)}, only("snapshots", lambda t: t[:0])
EMPTY: list[tuple[Case, Change]] = [
    *[(replace(case, batch=0), change) for case in SMALL_FORMS.values() for change in (given(), NO_ROWS)],
    (SMALL_FORMS["several tokens"], tokens_cut),
    (SMALL_FORMS["several tokens"], both(tokens_cut, at(write=columns(0)))),
    (SMALL_FORMS["packed"], at(**NO_BOUNDS)),
    (SMALL_FORMS["packed"], at(**NO_BOUNDS, max_len=0)),
]


def test_nothing_is_written_for_an_empty_batch_or_no_tokens_also_inside_debug(device: torch.device) -> None:
    for case, change in EMPTY:
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


def test_check_faults_raises_once_and_names_one_of_each_kind(device: torch.device) -> None:
    tables = {"read": [[0, 77], [2, 3], [4, 5]], "accepted": [2, 7, 1], "write": [1, 2, 88], "snapshot_rows": [0, 0, 9]}
    slots = Slots(**{name: torch.tensor(table, device=device) for name, table in tables.items()})
    x, B = torch.ones(3, 1, 1, device=device), torch.ones(3, 1, 8, device=device)
    state, snapshots = (torch.zeros(*sizes, 1, 1, 8, device=device) for sizes in ((6,), (3, 2)))
    flashstate.mamba2_step(state, x, x[..., 0], -x[0, 0], B, B, slots=slots, snapshots=snapshots)
    with pytest.raises(IndexError) as error:
        flashstate.check_faults()
    found = [f"{what} on {x.device}" for what in ("read slot 77", "write slot 88", "accepted 7", "snapshot row 9")]
    assert str(error.value) == f"out of range: {', '.join(found)} (one example of each kind)"
    flashstate.check_faults()


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
    for same in (values, values.mT.contiguous().mT):
        alone.data.zero_()
        alone.write([3, 1], same)
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


def test_inside_debug_slots_of_a_state_on_the_device_are_checked() -> None:
    state, values = State(torch.zeros(4, 2, 3, 5)), torch.ones(2, 2, 3, 5)
    with flashstate.debug():
        with pytest.raises(ValueError, match=r"^slots must be from 0 to 3, got 4"):
            state.read(torch.tensor([4, -1]))
        with pytest.raises(ValueError, match=r"^slots must be distinct, got slot 2 more than once"):
            state.write(torch.tensor([2, 2]), values)
        state.write(torch.tensor([-1, 2]), values)
    assert state.data.sum() == 30
