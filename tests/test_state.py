"""State and Slots, seeds that move, and faults that show."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, fields

import pytest
import torch
from refusals import state_arguments, step_arguments

import flashstate
from flashstate import Slots, State
from flashstate.state.faults import fault_flag
from flashstate.testing import interpreted

CPU = torch.device("cpu")
META = torch.device("meta")
SEED_STEP = 0x9E3779B97F4A7C15


def test_state_and_slots_are_frozen() -> None:
    for value in (State(**state_arguments()), Slots(torch.tensor([1]), write=torch.tensor([2]))):
        for field in fields(value):
            with pytest.raises(FrozenInstanceError):
                setattr(value, field.name, getattr(value, field.name))


def test_state_and_slots_keep_the_tensors_they_are_given() -> None:
    arguments = state_arguments()
    state = State(**arguments)
    assert state.data is arguments["data"]
    assert state.seed is arguments["seed"]
    read, write = torch.tensor([1]), torch.tensor([2])
    slots = Slots(read, write=write)
    assert slots.read is read
    assert slots.write is write
    assert Slots(read).write is None
    assert Slots(read).null == -1


def test_a_bare_tensor_is_a_state_and_an_index_tensor_is_slots() -> None:
    runs = []
    for wrap, wrap_slots in ((State, Slots), (lambda t: t, lambda t: t)):
        arguments = step_arguments()
        data = arguments["state"].data
        y = flashstate.mamba2_step(**{**arguments, "state": wrap(data), "slots": wrap_slots(arguments["slots"])})
        runs.append((y, data))
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2), (torch.float16, 2)], ids=str)
def test_bytes_per_slot_counts_state_and_seed_but_not_gaps(dtype: torch.dtype, size: int) -> None:
    data = torch.zeros(3, 100, dtype=dtype)[:, :64].unflatten(1, (2, 4, 8))
    assert State(data).bytes_per_slot == 64 * size
    assert State(data, seed=torch.zeros(3, dtype=torch.int64)).bytes_per_slot == 64 * size + 8


@pytest.fixture
def no_faults() -> Iterator[None]:
    with contextlib.suppress(IndexError):
        flashstate.check_faults()
    yield
    with contextlib.suppress(IndexError):
        flashstate.check_faults()


EVERYWHERE = pytest.mark.parametrize(
    ("device", "implementation"),
    [
        pytest.param(CPU, contextlib.nullcontext, id="reference"),
        pytest.param(CPU, interpreted, id="interpreter", marks=pytest.mark.interpreted),
        pytest.param(torch.device("cuda"), contextlib.nullcontext, id="gpu", marks=pytest.mark.gpu),
    ],
)
Implementation = Callable[[], contextlib.AbstractContextManager[None]]

SEEDS = (0, -1, 1 << 62, -(1 << 63), (1 << 63) - 1, 12345)


def advanced(times: dict[int, int]) -> list[int]:
    """SEEDS after so many steps of each slot, in arithmetic modulo 2^64."""
    words = [(seed + times.get(slot, 0) * SEED_STEP) % (1 << 64) for slot, seed in enumerate(SEEDS)]
    return [word - (1 << 64) if word >> 63 else word for word in words]


def state_with_seeds(device: torch.device) -> State:
    data = torch.full((len(SEEDS), 1, 1, 8), 1.5, dtype=torch.float16, device=device)
    return State(data, rounding="stochastic", seed=torch.tensor(SEEDS, device=device))


@pytest.mark.usefixtures("no_faults")
@EVERYWHERE
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
    device: torch.device,
    implementation: Implementation,
    index: torch.dtype,
    read: list[int],
    null: int,
    times: dict[int, int],
) -> None:
    state = state_with_seeds(device)
    with implementation():
        state.advance(Slots(torch.tensor(read, dtype=index, device=device), null=null))
    assert state.seed is not None
    assert state.seed.tolist() == advanced(times)
    assert (state.data == 1.5).all()
    flashstate.check_faults()


@EVERYWHERE
def test_advance_takes_an_index_tensor_strided_slots_or_none_for_all(
    device: torch.device, implementation: Implementation
) -> None:
    table = torch.tensor([[3, 0], [1, 0]], device=device)
    for slots, times in ((table[0, :1], {3: 1}), (table[:, 0], {3: 1, 1: 1}), (None, dict.fromkeys(range(6), 1))):
        state = state_with_seeds(device)
        with implementation():
            state.advance(slots)
        assert state.seed is not None
        assert state.seed.tolist() == advanced(times)


@pytest.mark.usefixtures("no_faults")
@EVERYWHERE
@pytest.mark.parametrize("past", [len(SEEDS), 1 << 30])
def test_advance_skips_and_reports_a_slot_past_the_pool(
    device: torch.device, implementation: Implementation, past: int
) -> None:
    state = state_with_seeds(device)
    with implementation():
        state.advance(torch.tensor([2, past, 3], device=device))
    assert state.seed is not None
    assert state.seed.tolist() == advanced({2: 1, 3: 1})
    with pytest.raises(IndexError, match=rf"read slot {past} on {device.type}"):
        flashstate.check_faults()
    flashstate.check_faults()


@EVERYWHERE
def test_a_step_reads_seeds_and_leaves_them(device: torch.device, implementation: Implementation) -> None:
    state, one = state_with_seeds(device), torch.ones(6, 1, 1, device=device)
    cols = torch.ones(6, 1, 8, device=device)
    with implementation():
        flashstate.mamba2_step(state, one, one[..., 0], -one[0, 0], cols, cols)
    assert state.seed is not None
    assert state.seed.tolist() == list(SEEDS)
    assert not (state.data == 1.5).any()


@pytest.mark.usefixtures("no_faults")
@EVERYWHERE
def test_check_faults_raises_once_and_names_what_it_found(device: torch.device, implementation: Implementation) -> None:
    one, cols = torch.ones(3, 1, 1, device=device), torch.ones(3, 1, 8, device=device)
    flashstate.check_faults()
    for read, write, found in (
        ([0, 77, 1], [2, 3, 4], ["read slot 77"]),
        ([0, 2, 1], [5, 3, 88], ["write slot 88"]),
        ([0, 77, 1], [2, 3, 88], ["read slot 77", "write slot 88"]),
        ([-1, 77, -1], [2, 99, 3], ["read slot 77"]),
    ):
        slots = Slots(torch.tensor(read, device=device), write=torch.tensor(write, device=device))
        with implementation():
            flashstate.mamba2_step(state_with_seeds(device), one, one[..., 0], -one[0, 0], cols, cols, slots=slots)
        with pytest.raises(IndexError) as error:
            flashstate.check_faults()
        assert [kind for kind in ("read slot 77", "write slot 88") if kind in str(error.value)] == found
        assert "99" not in str(error.value)
        flashstate.check_faults()


@pytest.mark.usefixtures("no_faults")
def test_the_fault_flag_of_a_cpu_is_one_tensor_that_sticks() -> None:
    flag = fault_flag(CPU)
    assert flag is fault_flag(torch.device("cpu"))
    assert (flag.dtype, flag.tolist()) == (torch.int64, [0, 0])
    state = state_with_seeds(CPU)
    state.advance(torch.tensor([50]))
    state.advance(torch.tensor([1]))
    assert flag.tolist() == [50, 0]
    with pytest.raises(IndexError, match="read slot 50 on cpu"):
        flashstate.check_faults()
    assert flag.tolist() == [0, 0]
