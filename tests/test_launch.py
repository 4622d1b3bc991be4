"""What a kernel is given: how wide a pool is accessed, tensors with their strides, and on what machine it runs."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from compiling import CPU, machine_with
from torch import Tensor

from flashstate import State
from flashstate.launch import access_width, environment, interpreted, machine_of, uses_kernels
from flashstate.launch.arguments import aligned, as_bytes, row_stride, slots_values, snapshots_values, token_strides
from flashstate.launch.environment import INTERPRETER, Gpu, Machine, pretending, warp_size
from flashstate.launch.registered import registered
from flashstate.proof import AnyCase, Case, ConvCase, DeltaCase, Mamba3Case, ReplayCase, make_inputs
from flashstate.state.formats import FORMATS
from flashstate.state.signature import ACCESS_BYTES
from flashstate.state.slots import Slots

META, CUDA = torch.device("meta"), torch.device("cuda")
ASKED: tuple[AnyCase, ...] = (
    Case(2, 2, 1, 5, 20, format="int8", rounding="stochastic"),
    Case(2, 1, 1, 4, 33, format="float16", tokens=3),
    Case(3, 1, 1, 16, 16, tokens=2, packed=True),
    DeltaCase(2, 2, 1, 5, 20, format="bfloat16"),
    DeltaCase(2, 1, 1, 16, 16, tokens=3, transposed=True),
    *(DeltaCase(2, 1, 1, 5, 20, tokens=tokens, exact=False, qk="float16") for tokens in (8, 9)),
    Mamba3Case(2, 2, 1, 5, 12, rank=1, angles=3),
    Mamba3Case(2, 1, 1, 16, 36, rank=3, angles=0, tokens=2, format="int16"),
    ConvCase(3, 40, 4),
    ConvCase(3, 5, 3, tokens=2),
    ReplayCase(4, 2, 1, 5, 20),
    ReplayCase(4, 2, 1, 5, 20, tokens=3, format="int8", rounding="stochastic"),
)


@pytest.mark.interpreted
@pytest.mark.parametrize("case", ASKED, ids=str)
def test_a_call_asks_for_the_config_of_its_cases_problem(case: AnyCase, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("flashstate.launch.call.choose", lambda problem, gpu: asked.append(problem) or 1 / 0)
    with interpreted(), pytest.raises(ZeroDivisionError):
        make_inputs(case, CPU).step()
    more = {"heads_per_group": 2} if isinstance(case, ReplayCase) else {}  # of which a case says nothing
    assert asked == [replace(case.problem, **more)]


@pytest.mark.interpreted
@pytest.mark.parametrize(("tokens", "form", "stored"), [
    (0, "snapshots", "last"), (4, "snapshots", "every"), (4, "slots", "every"), (4, "in place", "last"),
    (4, "nothing", "none"), (0, "nothing", "last"),
])  # fmt: skip
def test_a_call_says_what_it_stores_of_several_tokens(
    tokens: int, form: str, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(2, 1, 1, 4, 16, tokens=tokens, slots=16)
    inputs, asked = make_inputs(case, CPU), []
    monkeypatch.setattr("flashstate.launch.call.choose", lambda problem, gpu: asked.append(problem) or 1 / 0)
    options = {
        "snapshots": {"snapshots": torch.zeros(2, max(1, tokens), 1, 4, 16)},
        "slots": {"slots": inputs.at(write=torch.arange(8).reshape(2, 4))},
        "in place": {},
        "nothing": {"update": False},
    }[form]
    with interpreted(), pytest.raises(ZeroDivisionError):
        inputs.step(**options)
    assert asked == [replace(case.problem, stored=stored)]


def pool(dtype: torch.dtype, cols: int, offset: int = 0, gap: int = 0) -> Tensor:
    """Three slots of 2 x 4 x cols, `offset` elements after a 16-byte boundary, `gap` elements apart."""
    stride = 8 * cols + gap
    memory = torch.empty(offset + 3 * stride, dtype=dtype)
    assert memory.data_ptr() % ACCESS_BYTES == 0
    return memory.as_strided((3, 2, 4, cols), (stride, 4 * cols, cols, 1), offset)


def snapshots(dtype: torch.dtype, gap: int) -> Tensor:
    """Two rows of four tokens of 2 x 4 x 32, `gap` elements between tokens."""
    stride = 8 * 32 + gap
    return torch.empty(8 * stride, dtype=dtype).as_strided((2, 4, 2, 4, 32), (4 * stride, stride, 128, 32, 1))


def is_aligned(data: Tensor, width: int) -> bool:
    """Whether every row of every slot starts at a multiple of `width` elements."""
    return all(row.data_ptr() % (width * data.element_size()) == 0 for slot in data for row in slot.flatten(0, -2))


F32, F16, BF16, I16, I8, F8 = torch.float32, torch.float16, torch.bfloat16, torch.int16, torch.int8, torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("dtype", "cols", "offset", "gap", "width"),  # elements
    [
        (F32, 128, 0, 0, 4), (F16, 128, 0, 0, 8), (BF16, 128, 0, 0, 8), (I16, 128, 0, 0, 8),  # dense: 16 bytes
        (I8, 128, 0, 0, 16), (F8, 128, 0, 0, 16),
        (F32, 20, 0, 0, 4), (F16, 20, 0, 0, 4), (F16, 6, 0, 0, 2), (F16, 33, 0, 0, 1), (F32, 1, 0, 0, 1),  # narrow rows
        (I8, 24, 0, 0, 8), (F8, 20, 0, 0, 4),
        (F32, 128, 1, 0, 1), (F16, 128, 4, 0, 1), (F16, 128, 8, 0, 8), (I8, 128, 8, 0, 1),  # at offsets
        (F16, 128, 0, 16, 8), (F16, 128, 0, 4, 4), (F32, 128, 0, 2, 2), (F16, 128, 0, 5, 1),  # pages between slots
        (I8, 128, 0, 8, 8), (F8, 128, 0, 3, 1),
    ],
)  # fmt: skip
def test_an_access_is_as_wide_as_every_row_of_every_slot_is_aligned(
    dtype: torch.dtype, cols: int, offset: int, gap: int, width: int
) -> None:
    data = pool(dtype, cols, offset, gap)
    assert access_width(data) == width
    assert is_aligned(data, width)


@pytest.mark.parametrize(("dtype", "gap", "width"), [(F32, 0, 4), (I8, 16, 16), (I8, 4, 4), (F32, 1, 1), (F16, 2, 2)])
def test_an_access_to_snapshots_is_as_wide_as_every_token_is_aligned(dtype: torch.dtype, gap: int, width: int) -> None:
    for data in (snapshots(dtype, gap), snapshots(dtype, gap).transpose(0, 1)):
        assert access_width(data) == width
        assert is_aligned(data, width)


@pytest.mark.parametrize(
    ("dtype", "rows", "cols", "offset", "gap", "width"),
    [
        (BF16, 64, 3, 0, 0, 8), (F32, 64, 3, 0, 0, 4), (F16, 6, 128, 0, 0, 2), (F16, 5, 128, 0, 0, 1),
        (F16, 64, 128, 0, 4, 4), (F16, 64, 128, 1, 0, 1),
        (F16, 1, 128, 0, 0, 8), (F16, 64, 1, 0, 0, 1),  # one row, or one column: as it is contiguous
    ],
)  # fmt: skip
def test_an_access_to_a_transposed_state_is_as_wide_as_every_column_is_aligned(
    dtype: torch.dtype, rows: int, cols: int, offset: int, gap: int, width: int
) -> None:
    stride = 2 * rows * cols + gap
    memory = torch.empty(offset + 3 * stride, dtype=dtype)
    data = memory.as_strided((3, 2, cols, rows), (stride, rows * cols, rows, 1), offset)
    assert access_width(data.mT) == width
    assert rows == 1 or is_aligned(data, width)


@pytest.mark.parametrize("form", ["one token", "several tokens", "packed"])
@pytest.mark.parametrize("strided", [False, True])
def test_token_strides_lead_to_every_token_and_head(form: str, strided: bool) -> None:
    batch, tokens, heads, width = 3, 4, 2, 5
    axes = {"one token": (batch,), "several tokens": (batch, tokens), "packed": (tokens,)}[form]
    memory = torch.arange(2 * torch.Size(axes).numel() * heads * (width + 1)).reshape(*axes, 2 * heads, width + 1)
    tensor = memory[..., heads:, 1:] if strided else memory[..., heads:, 1:].contiguous()
    stride_b, stride_t, stride_h = token_strides(tensor, len(axes), form == "packed")
    for b, t, h in product(range(batch), range(tokens), range(heads)):
        offset = tensor.storage_offset() + b * stride_b + t * stride_t + h * stride_h
        index = {"one token": (b, h), "several tokens": (b, t, h), "packed": (t, h)}[form]
        assert torch.equal(tensor.as_strided((width,), (1,), offset), tensor[index])


def test_what_is_absent_has_no_strides() -> None:
    assert token_strides(None, 2, False) == (0, 0, 0)
    assert row_stride(None) == 0
    copies = snapshots_values(None, State(pool(torch.float32, 16)), 4)
    assert (copies.pop("copy_ptr"), copies.pop("copy_scale_ptr")) == (None, None)
    assert {value for name, value in copies.items() if name.islower()} == {0}
    slots = slots_values(None)
    assert (slots["read_stride"], slots["read_width"], slots["null"]) == (0, 1, -1)


def test_float8_is_passed_as_the_bytes_it_is() -> None:
    for dtype in FORMATS:
        data = pool(dtype, 16, gap=48)
        entries = as_bytes(data)
        assert entries.dtype == (torch.uint8 if dtype is torch.float8_e4m3fn else dtype)
        assert (entries.data_ptr(), entries.shape, entries.stride()) == (data.data_ptr(), data.shape, data.stride())


def test_snapshots_have_strides_of_rows_and_of_tokens_in_the_data_and_in_the_scales() -> None:
    data, scale = snapshots(torch.float8_e4m3fn, 3), torch.ones(4, 2, 2, 4).transpose(0, 1)
    state = State(pool(torch.float32, 16))
    found = snapshots_values(State(data, scale), state, 4)
    assert [found[name] for name in ("copy_b", "copy_t", "copy_scale_b", "copy_scale_t")] == [4 * 259, 259, 8, 16]
    assert found["num_copies"] == 2
    found = snapshots_values(State(snapshots(torch.float16, 3)), state, 4)
    assert [found[name] for name in ("copy_b", "copy_t", "copy_scale_b", "copy_scale_t")] == [4 * 259, 259, 0, 0]


def test_tables_have_a_row_stride_and_a_width() -> None:
    wide, accepted = torch.arange(30).reshape(3, 10), torch.ones(3, dtype=torch.int64)
    for table, stride, width in ((wide[:, 2], 10, 1), (wide[:, 2:5], 10, 3), (wide[:, 2].clone(), 1, 1)):
        found = slots_values(Slots(table, accepted=accepted))
        assert row_stride(table) == stride
        assert (found["read_stride"], found["read_width"]) == (stride, width)


def test_a_tensor_is_aligned_if_every_row_of_it_starts_at_a_multiple_of_16_bytes() -> None:
    memory = torch.zeros(2, 3, 64, dtype=torch.bfloat16)
    assert aligned(None)
    assert aligned(memory)
    assert aligned(memory[:, 1:, 8:40])
    assert aligned(memory.transpose(0, 1))
    assert not aligned(memory[:, :, 1:])
    assert not aligned(torch.zeros(2, 3, 60, dtype=torch.bfloat16))
    assert aligned(torch.zeros(2, 3, 60))


@pytest.mark.parametrize(
    ("cuda", "capability", "target"),
    [
        *(("13.0", capability, "sm_89") for capability in ((8, 9), (9, 0), (10, 0), (12, 1))),
        ("13.0", (7, 5), "portable"), ("13.0", (8, 0), "sm_80"), ("13.0", (8, 6), "sm_80"),
        (None, (9, 4), "portable"), (None, (11, 0), "portable"),  # AMD
    ],
)  # fmt: skip
def test_kernels_use_the_instructions_that_a_gpu_has(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, capability: tuple[int, int], target: str
) -> None:
    hip = None if cuda else "7.0"
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a name")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("", (), {"multi_processor_count": 7}))
    machine = environment._cuda_machine.__wrapped__(CUDA)  # not the cached one
    nvidia = cuda is not None
    early, warp = nvidia and capability >= (9, 0), 32 if hip is None else 64
    assert machine == Machine(Gpu("a name", capability), target, nvidia, warp=warp, overlaps=early, processors=7)
    assert warp_size() == warp


def test_the_device_decides_which_implementation_runs() -> None:
    assert uses_kernels(CUDA)
    assert uses_kernels(torch.device("cuda", 3))
    assert not uses_kernels(CPU)
    for device in (META, torch.device("xpu")):
        with pytest.raises(ValueError, match=rf"^state is on {device}; flashstate runs on cuda and cpu"):
            uses_kernels(device)


@pytest.mark.parametrize(
    ("context", "machine"),
    [
        (lambda: pretending(machine_with("gfx942")), machine_with("gfx942")),
        pytest.param(interpreted, INTERPRETER, marks=pytest.mark.interpreted),
    ],
)
def test_calls_on_cpu_tensors_run_where_a_context_says_until_it_ends(context: Any, machine: Machine) -> None:
    with pretending(machine_with(90)):
        with pytest.raises(KeyError), context():
            raise KeyError
        with context(), context():
            assert uses_kernels(CPU)
            assert machine_of(CPU) == machine
            assert warp_size() == machine.warp
        assert machine_of(CPU) == machine_with(90)
        with pytest.raises(ValueError, match=r"^state is on meta"):
            uses_kernels(META)
    assert not uses_kernels(CPU)


def test_a_registered_function_is_called_eagerly_and_an_op_of_torch() -> None:
    def add_one(x: Tensor, times: int) -> None:
        x.add_(times)

    add_one.__annotations__ = {"x": Tensor, "times": int, "return": type(None)}
    run, x = registered("x")(add_one), torch.zeros(2)
    run(x, 1)
    assert torch.ops.flashstate.add_one(x, 2) is None
    assert x.tolist() == [3, 3]
