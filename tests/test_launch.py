"""What a kernel is given: how wide a pool is accessed, tensors with their strides, and on what machine it runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from compiling import CPU, machine_with

from flashstate import State
from flashstate.launch import Problem, access_width, environment, interpreted, machine_of, uses_kernels
from flashstate.launch.arguments import aligned, snapshots_values
from flashstate.launch.environment import INTERPRETER, Gpu, Machine, pretending, warp_size
from flashstate.proof import AnyCase, Case, ConvCase, DeltaCase, Mamba3Case, ReplayCase, make_inputs
from flashstate.state.signature import ACCESS_BYTES

META, CUDA = torch.device("meta"), torch.device("cuda")
ASKED: tuple[AnyCase, ...] = (
    Case(2, 2, 1, 5, 20, format="int8", rounding="stochastic"),
    Case(2, 1, 1, 4, 33, format="float16", tokens=3),
    DeltaCase(2, 1, 1, 16, 16, tokens=3, transposed=True),
    *(DeltaCase(2, 1, 1, 5, 20, tokens=tokens, exact=False, qk="float16") for tokens in (8, 9)),
    Mamba3Case(2, 1, 1, 16, 36, rank=3, angles=0, tokens=2, format="int16"),
    ConvCase(3, 5, 3, tokens=2),
    ReplayCase(4, 2, 1, 5, 20, tokens=3, format="int8", rounding="stochastic"),
)


@contextmanager
def asked() -> Iterator[list[Problem]]:
    """The problems that a call asks a config for, which starts nothing then."""
    found: list[Problem] = []
    choose = mock.patch("flashstate.launch.call.choose", lambda problem, gpu: found.append(problem) or 1 / 0)
    with choose, interpreted(), pytest.raises(ZeroDivisionError):
        yield found


@pytest.mark.interpreted
@pytest.mark.parametrize("case", ASKED, ids=str)
def test_a_call_asks_for_the_config_of_its_cases_problem(case: AnyCase) -> None:
    with asked() as found:
        make_inputs(case, CPU).step()
    more = {"heads_per_group": 2} if isinstance(case, ReplayCase) else {}  # of which a case says nothing
    assert found == [replace(case.problem, **more)]


@pytest.mark.interpreted
def test_a_call_says_what_it_stores_of_several_tokens() -> None:
    for tokens, stored in ((0, ("last", "last", "last")), (4, ("every", "every", "none"))):
        inputs = make_inputs(case := Case(2, 1, 1, 4, 16, tokens=tokens, slots=16), CPU)
        snapshots, write = torch.zeros(2, max(1, tokens), 1, 4, 16), torch.arange(8).reshape(2, 4)
        forms = {"snapshots": snapshots}, {"slots": inputs.at(write=write[:, : tokens or 1])}, {"update": False}
        for options, wanted in zip(forms, stored, strict=True):
            with asked() as found:
                inputs.step(**options)
            assert found == [replace(case.problem, stored=wanted)]


F16, I8 = torch.float16, torch.int8
WIDTHS: list[tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int, int]] = [  # sizes, strides, offset, elements
    (F16, (3, 2, 4, 128), (1024, 512, 128, 1), 0, 8),
    (torch.float8_e4m3fn, (3, 2, 4, 128), (1024, 512, 128, 1), 0, 16),
    (I8, (3, 2, 4, 24), (192, 96, 24, 1), 0, 8),
    (F16, (3, 2, 4, 33), (264, 132, 33, 1), 0, 1),
    (F16, (3, 2, 4, 128), (1024, 512, 128, 1), 4, 1),  # beside a boundary of 16 bytes
    (F16, (3, 2, 4, 128), (1028, 512, 128, 1), 0, 4),  # pages between slots
    (I8, (2, 4, 2, 4, 32), (1040, 260, 128, 32, 1), 0, 4),  # snapshots
    (F16, (4, 2, 2, 4, 32), (258, 1032, 128, 32, 1), 0, 2),
    (torch.bfloat16, (3, 2, 64, 3), (192, 192, 1, 64), 0, 8),  # transposed: every column
    (F16, (3, 2, 6, 128), (1536, 768, 1, 6), 0, 2),
    (F16, (3, 2, 64, 128), (16388, 8192, 1, 64), 0, 4),
    (F16, (3, 2, 64, 1), (128, 64, 1, 1), 0, 1),  # one column: as it is contiguous
]


@pytest.mark.parametrize(("dtype", "sizes", "strides", "offset", "width"), WIDTHS)
def test_an_access_is_as_wide_as_every_row_of_every_slot_is_aligned(
    dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int, width: int
) -> None:
    memory = torch.empty(1 << 16, dtype=dtype)
    assert memory.data_ptr() % ACCESS_BYTES == 0
    data = memory.as_strided(sizes, strides, offset)
    assert access_width(data) == width
    rows = (data.mT if sizes[-1] > 1 and strides[-1] > 1 else data).flatten(0, -4)
    assert all(row.data_ptr() % (width * data.element_size()) == 0 for slot in rows for h in slot for row in h)


def test_snapshots_have_strides_of_rows_and_of_tokens_in_the_data_and_in_the_scales() -> None:
    data = torch.empty(2072, dtype=torch.float8_e4m3fn).as_strided((2, 4, 2, 4, 32), (1036, 259, 128, 32, 1))
    state, scale = State(torch.zeros(1, 2, 4, 32)), torch.ones(4, 2, 2, 4).transpose(0, 1)
    for snapshots, of_scale in ((State(data, scale), [8, 16]), (State(data.half()), [0, 0])):
        found, strides = snapshots_values(snapshots, state, 4), snapshots.data.stride()
        assert [found[name] for name in ("copy_b", "copy_t", "copy_scale_b", "copy_scale_t")] == [
            *strides[:2],
            *of_scale,
        ]
        assert found["num_copies"] == 2


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
