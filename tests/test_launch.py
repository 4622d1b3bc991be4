"""Launch configs: tables, the heuristic, overrides; how wide a pool is accessed; what a kernel is given; which runs."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib import resources
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

import flashstate
from flashstate.launch import (
    Config,
    Problem,
    choose,
    choose_with_reason,
    interpreted,
    kernel_target,
    override,
    valid_configs,
)
from flashstate.launch import config as launch_config
from flashstate.launch.arguments import read_table, snapshots_view, state_view, table, token_view
from flashstate.launch.backend import uses_kernels
from flashstate.launch.config import ACCESS_BYTES, access_width, load_table
from flashstate.ops import mamba2
from flashstate.state.formats import FORMATS, PORTABLE_FORMATS
from flashstate.testing import ODD_CASES, Case, make_inputs

CPU, META, CUDA = (torch.device(name) for name in ("cpu", "meta", "cuda"))
NO_GPU = "a GPU nobody measured"
BY_NAME = {fmt.name: fmt for fmt in FORMATS.values()}
KEY = re.compile(
    r"(?P<op>\w+) (?P<rows>\d+)x(?P<cols>\d+) (?P<format>\w+) (?P<rounding>\w+) vector (?P<vector>\d+) "
    r"tokens (?P<tokens>one|several)"
)
FOLDER = Path(str(resources.files("flashstate.launch") / "tables"))
TABLES = sorted({FOLDER / "nvidia-h200.json", *FOLDER.glob("*.json")})
PROBLEM = Problem("mamba2_step", 64, 128, "float32", "nearest", 4, 1024)


def widest(cols: int, name: str) -> int:
    """Elements per access of an aligned, dense pool."""
    return math.gcd(cols, ACCESS_BYTES // BY_NAME[name].dtype.itemsize)


def problems_of(path: Path) -> Iterator[tuple[Problem, list[int]]]:
    """Every entry of a table file as its key describes it, read without the library's own loader."""
    for key, entries in json.loads(path.read_text())["configs"].items():
        found = KEY.fullmatch(key)
        assert found, f"{key!r} is not a key"
        rows, cols, vector = (int(found[name]) for name in ("rows", "cols", "vector"))
        assert entries, f"{key!r} has no entries"
        for size, config in entries.items():
            named = (found["op"], rows, cols, found["format"], found["rounding"], vector)
            yield Problem(*named, int(size), several_tokens=found["tokens"] == "several"), config


def test_the_table_of_the_h200_has_every_format_with_one_token_and_with_several() -> None:
    for (name, rounding), several in product(PORTABLE_FORMATS, (False, True)):
        problem = Problem("mamba2_step", 64, 128, name, rounding, widest(128, name), 1024, several)
        assert choose_with_reason(problem, "NVIDIA H200")[1].startswith("table"), problem


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_every_entry_of_a_table_is_valid_for_an_op_and_a_format_that_exist(path: Path) -> None:
    assert path.stem == path.stem.lower().replace(" ", "-")
    for problem, config in problems_of(path):
        assert callable(getattr(flashstate, problem.op)), problem
        assert problem.rounding in BY_NAME[problem.format].roundings, problem
        assert widest(problem.cols, problem.format) % problem.vector == 0, problem
        assert problem.batch_heads >= 1, problem
        assert len(config) == 2, problem
        assert all(type(number) is int and number >= 1 for number in config), problem
        assert problem.valid(Config(*config)), (problem, config)


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_every_entry_of_a_table_is_what_its_problem_gets(path: Path) -> None:
    gpu = path.stem.replace("-", " ")
    for problem, config in problems_of(path):
        got, reason = choose_with_reason(problem, gpu)
        assert got == Config(*config)
        assert reason.startswith("table")
        assert str(problem.batch_heads) in reason


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Config]]:
    """A table for one GPU with entries for PROBLEM's key at three sizes."""
    entries = {16: Config(4, 1), 256: Config(8, 2), 4096: Config(16, 4)}
    key = "mamba2_step 64x128 float32 nearest vector 4 tokens one"
    tables = {"measured": {key: entries}, "of another form": {key.removesuffix(" tokens one"): entries}}
    monkeypatch.setattr(launch_config, "load_table", lambda gpu: tables.get(gpu, {}))
    launch_config._look_up.cache_clear()
    yield entries
    launch_config._look_up.cache_clear()


@pytest.mark.parametrize(
    ("batch_heads", "nearest"),
    [(1, 16), (16, 16), (63, 16), (65, 256), (256, 256), (1023, 256), (1025, 4096), (4096, 4096), (1 << 20, 4096)],
)
def test_the_nearest_entry_in_ratio_is_chosen(measured: dict[int, Config], batch_heads: int, nearest: int) -> None:
    config, reason = choose_with_reason(replace(PROBLEM, batch_heads=batch_heads), "measured")
    assert config == measured[nearest]
    assert reason.startswith("table of measured")
    assert reason.endswith(f"= {nearest}")


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    "change",
    [
        {"op": "pool_write"},
        {"rows": 32},
        {"cols": 64},
        {"format": "float16", "vector": 8},
        {"rounding": "stochastic"},
        {"vector": 2},
        {"several_tokens": True},
    ],
    ids=str,
)
def test_a_table_speaks_only_for_its_own_problem(change: dict[str, int | str]) -> None:
    assert choose_with_reason(replace(PROBLEM, **change), "measured")[1].startswith("heuristic")
    for gpu in ("another", "of another form"):
        assert choose_with_reason(PROBLEM, gpu)[1].startswith("heuristic")


@pytest.mark.usefixtures("measured")
def test_the_reason_says_where_a_config_comes_from() -> None:
    assert choose_with_reason(PROBLEM, "measured")[1].startswith("table")
    assert choose_with_reason(PROBLEM, NO_GPU)[1].startswith("heuristic")
    with override(Config(4, 4)):
        assert choose_with_reason(PROBLEM, "measured") == (Config(4, 4), "override")
        assert choose(PROBLEM, NO_GPU) == Config(4, 4)


def test_a_gpu_without_a_table_has_an_empty_one() -> None:
    assert load_table(NO_GPU) == {}


AROUND_POWERS = sorted({n for k in range(9) for n in ((1 << k) - 1, 1 << k, (1 << k) + 1, 3 << k) if 1 <= n <= 512})
SHAPES = sorted({*product(AROUND_POWERS, (*AROUND_POWERS, 20, 80)), *product((5, 64), range(1, 513))})
SIZES = (1, 511, 512, 1 << 20)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8"])  # 4, 2 and 1 bytes: vectors up to 4, 8 and 16
def test_the_heuristic_gives_a_valid_config_for_every_shape(name: str) -> None:
    for (rows, cols), vector, size in product(SHAPES, (1, 2, 4, 8, 16), SIZES):
        if widest(cols, name) % vector == 0:
            problem = Problem("mamba2_step", rows, cols, name, "nearest", vector, size)
            config, reason = choose_with_reason(problem, NO_GPU)
            assert problem.valid(config), (problem, config)
            assert config.num_warps >= 1, (problem, config)
            assert reason.startswith("heuristic")


@pytest.mark.parametrize("name", BY_NAME)
def test_a_table_can_hold_what_the_heuristic_gives_and_more(name: str) -> None:
    for cols, size in product((16, 64, 128, 256), (16, 1 << 14)):
        problem = Problem("mamba2_step", 64, cols, name, "nearest", widest(cols, name), size)
        configs = valid_configs(problem)
        assert len(configs) == len(set(configs)) > 2
        assert all(map(problem.valid, configs))
        assert choose(problem, NO_GPU) in configs


@pytest.mark.parametrize(
    ("problem", "config"),
    [
        pytest.param(PROBLEM, Config(2, 4), id="fewer rows than warps"),
        pytest.param(PROBLEM, Config(12, 4), id="rows not a power of two"),
        pytest.param(PROBLEM, Config(16, 3), id="warps not a power of two"),
        pytest.param(replace(PROBLEM, vector=1), Config(16, 2), id="a row wider than one access of a warp"),
        pytest.param(replace(PROBLEM, cols=16), Config(4, 1), id="a warp with fewer rows than it covers"),
        pytest.param(replace(PROBLEM, cols=16), Config(8, 2), id="warps with fewer rows than they cover"),
        pytest.param(replace(PROBLEM, vector=16), Config(2, 1), id="a warp with fewer rows of bytes than it covers"),
        pytest.param(replace(PROBLEM, cols=16, vector=16), Config(32, 2), id="warps with fewer rows of bytes"),
        pytest.param(replace(PROBLEM, cols=1024, vector=16), Config(16, 2), id="a row of bytes wider than an access"),
    ],
)
def test_override_refuses_a_config_that_would_change_the_order_of_sums(problem: Problem, config: Config) -> None:
    assert not problem.valid(config)
    with override(config), pytest.raises(ValueError, match=r"^Config.* would change the order of sums for Problem"):
        choose(problem, NO_GPU)


def test_one_warp_may_take_a_row_of_any_width() -> None:
    for cols, vector in product((1, 128, 512, 4096), (1, 2, 4, 8, 16)):
        assert replace(PROBLEM, cols=cols, vector=vector).valid(Config(64, 1))


def test_overrides_nest() -> None:
    before = choose(PROBLEM, NO_GPU)
    with override(Config(4, 4)):
        with override(Config(8, 2)):
            assert choose(PROBLEM, NO_GPU) == Config(8, 2)
        assert choose(PROBLEM, NO_GPU) == Config(4, 4)
    assert choose(PROBLEM, NO_GPU) == before


def test_overrides_are_undone_by_an_exception() -> None:
    before = choose(PROBLEM, NO_GPU)
    with override(Config(4, 4)):
        with pytest.raises(KeyError), override(Config(8, 2)):
            raise KeyError
        assert choose(PROBLEM, NO_GPU) == Config(4, 4)
    with pytest.raises(KeyError), override(Config(8, 2)):
        raise KeyError
    assert choose(PROBLEM, NO_GPU) == before


@pytest.mark.interpreted
def test_a_refused_override_leaves_the_state_and_out_as_they_are() -> None:
    inputs = make_inputs(Case(cols=128), CPU)
    before, out = inputs.state.data.clone(), torch.full_like(inputs.arguments["x"], 7.0)
    with interpreted(), override(Config(2, 4)), pytest.raises(ValueError, match="order of sums"):
        inputs.step(out=out)
    assert torch.equal(inputs.state.data, before)
    assert (out == 7.0).all()


@pytest.mark.interpreted
def test_a_call_asks_for_the_config_of_its_cases_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(mamba2, "choose", lambda problem, gpu: asked.append(problem) or 1 / 0)
    for case in ODD_CASES:
        with interpreted(), pytest.raises(ZeroDivisionError):
            make_inputs(case, CPU).step()
    assert asked == [case.problem for case in ODD_CASES]
    assert {problem.several_tokens for problem in asked} == {False, True}


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


@pytest.mark.parametrize(
    ("dtype", "cols", "offset", "gap", "width"),
    [
        pytest.param(torch.float32, 128, 0, 0, 4, id="dense float32: 16 bytes"),
        pytest.param(torch.float16, 128, 0, 0, 8, id="dense float16: 16 bytes"),
        pytest.param(torch.bfloat16, 128, 0, 0, 8, id="dense bfloat16: 16 bytes"),
        pytest.param(torch.float32, 20, 0, 0, 4, id="20 float32 columns: 16 bytes"),
        pytest.param(torch.float16, 20, 0, 0, 4, id="20 float16 columns: 8 bytes"),
        pytest.param(torch.float16, 6, 0, 0, 2, id="6 columns: two elements"),
        pytest.param(torch.float16, 33, 0, 0, 1, id="odd columns: one element"),
        pytest.param(torch.float32, 1, 0, 0, 1, id="one column: one element"),
        pytest.param(torch.float32, 128, 1, 0, 1, id="odd offset: one element"),
        pytest.param(torch.float16, 128, 4, 0, 1, id="offset of 8 bytes: one element"),
        pytest.param(torch.float16, 128, 8, 0, 8, id="offset of 16 bytes: 16 bytes"),
        pytest.param(torch.float16, 128, 0, 16, 8, id="aligned pages: 16 bytes"),
        pytest.param(torch.float16, 128, 0, 4, 4, id="pages aligned to 8 bytes: 8 bytes"),
        pytest.param(torch.float32, 128, 0, 2, 2, id="pages aligned to 8 bytes: two float32"),
        pytest.param(torch.float16, 128, 0, 5, 1, id="odd pages: one element"),
        pytest.param(torch.int16, 128, 0, 0, 8, id="dense int16: 16 bytes"),
        pytest.param(torch.int8, 128, 0, 0, 16, id="dense int8: 16 bytes"),
        pytest.param(torch.float8_e4m3fn, 128, 0, 0, 16, id="dense float8: 16 bytes"),
        pytest.param(torch.int8, 24, 0, 0, 8, id="24 int8 columns: 8 bytes"),
        pytest.param(torch.float8_e4m3fn, 20, 0, 0, 4, id="20 float8 columns: 4 bytes"),
        pytest.param(torch.int8, 128, 8, 0, 1, id="int8 at an offset of 8 bytes: one element"),
        pytest.param(torch.int8, 128, 0, 8, 8, id="int8 pages aligned to 8 bytes: 8 bytes"),
        pytest.param(torch.float8_e4m3fn, 128, 0, 3, 1, id="odd pages of float8: one element"),
    ],
)
def test_an_access_is_as_wide_as_every_row_of_every_slot_is_aligned(
    dtype: torch.dtype, cols: int, offset: int, gap: int, width: int
) -> None:
    data = pool(dtype, cols, offset, gap)
    assert access_width(data) == width
    assert is_aligned(data, width)


@pytest.mark.parametrize(
    ("dtype", "gap", "width"),
    [(torch.float32, 0, 4), (torch.int8, 16, 16), (torch.int8, 4, 4), (torch.float32, 1, 1), (torch.float16, 2, 2)],
)
def test_an_access_to_snapshots_is_as_wide_as_every_token_is_aligned(dtype: torch.dtype, gap: int, width: int) -> None:
    for data in (snapshots(dtype, gap), snapshots(dtype, gap).transpose(0, 1)):
        assert access_width(data) == width
        assert is_aligned(data, width)


@pytest.mark.parametrize("form", ["one token", "several tokens", "packed"])
@pytest.mark.parametrize("strided", [False, True])
def test_the_strides_of_a_token_view_lead_to_every_token_and_head(form: str, strided: bool) -> None:
    batch, tokens, heads, width = 3, 4, 2, 5
    axes = {"one token": (batch,), "several tokens": (batch, tokens), "packed": (tokens,)}[form]
    memory = torch.arange(2 * torch.Size(axes).numel() * heads * (width + 1)).reshape(*axes, 2 * heads, width + 1)
    tensor = memory[..., heads:, 1:] if strided else memory[..., heads:, 1:].contiguous()
    view, stride_b, stride_t, stride_h = token_view(tensor, len(axes), form == "packed")
    assert view is tensor
    for b, t, h in product(range(batch), range(tokens), range(heads)):
        offset = tensor.storage_offset() + b * stride_b + t * stride_t + h * stride_h
        index = {"one token": (b, h), "several tokens": (b, t, h), "packed": (t, h)}[form]
        assert torch.equal(tensor.as_strided((width,), (1,), offset), tensor[index])


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_state_views_have_the_strides_of_data_and_scales_and_float8_as_bytes(dtype: torch.dtype) -> None:
    data, scale = pool(dtype, 16, gap=48), torch.empty(3, 20)[:, :8].unflatten(1, (2, 4))
    entries, scales, *strides = state_view(data, scale if FORMATS[dtype].scaled else None)
    assert entries.data_ptr() == data.data_ptr()
    assert entries.dtype == (torch.uint8 if dtype is torch.float8_e4m3fn else dtype)
    assert (entries.shape, entries.stride()) == (data.shape, data.stride())
    assert scales is (scale if FORMATS[dtype].scaled else None)
    assert strides == [176, 20 if FORMATS[dtype].scaled else 0]


def test_snapshot_views_have_the_row_strides_and_then_the_token_strides() -> None:
    data, scale = snapshots(torch.float8_e4m3fn, 3), torch.empty(4, 2, 2, 4).transpose(0, 1)
    assert snapshots_view(None, None) == (None, None, 0, 0, 0, 0)
    view, scales, *strides = snapshots_view(data, scale)
    assert (view.data_ptr(), view.dtype, view.stride()) == (data.data_ptr(), torch.uint8, data.stride())
    assert scales is scale
    assert strides == [4 * 259, 8, 259, 16]
    assert snapshots_view(data, None)[1:] == (None, 4 * 259, 0, 259, 0)


def test_tables_have_their_row_stride_and_what_is_absent_has_none() -> None:
    wide, accepted = torch.arange(30).reshape(3, 10), torch.tensor([1, 2, 1])
    assert table(None) is None
    for entries, stride in ((wide[:, 2], 10), (wide[:, 2:5], 10), (wide[:, 2].clone(), 1)):
        assert table(entries) == (entries, stride)
    assert read_table(None, None) == (None, 0, 1, None)
    assert read_table(wide[:, 0], None)[1:] == (10, 1, None)
    assert read_table(accepted, None)[1:] == (1, 1, None)
    read = wide[:, 3:6]
    assert read_table(read, accepted) == (read, 10, 3, accepted)


@pytest.mark.parametrize(
    ("cuda", "capability", "target"),
    [
        ("13.0", (7, 5), "portable"),
        ("13.0", (8, 0), "sm_80"),
        ("13.0", (8, 6), "sm_80"),
        ("13.0", (8, 9), "sm_89"),
        ("13.0", (9, 0), "sm_89"),
        ("13.0", (10, 0), "sm_89"),
        ("13.0", (12, 1), "sm_89"),
        (None, (9, 4), "portable"),  # AMD
        (None, (11, 0), "portable"),
    ],
)
def test_kernels_use_the_instructions_that_a_gpu_has(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, capability: tuple[int, int], target: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for device in (CUDA, torch.device("cuda", 1)):
        assert kernel_target.__wrapped__(device) == target  # not the cached one
    assert kernel_target.__wrapped__(CPU) == "interpreter"


def test_the_device_decides_which_implementation_runs() -> None:
    assert uses_kernels(CUDA)
    assert uses_kernels(torch.device("cuda", 3))
    assert not uses_kernels(CPU)
    for device in (META, torch.device("xpu")):
        with pytest.raises(ValueError, match=rf"^state is on {device}; flashstate runs on cuda and cpu"):
            uses_kernels(device)


@pytest.mark.interpreted
def test_interpreted_nests_and_is_undone_by_an_exception() -> None:
    with interpreted():
        with interpreted():
            assert uses_kernels(CPU)
        assert uses_kernels(CPU)
        with pytest.raises(ValueError, match=r"^state is on meta"):
            uses_kernels(META)
    with pytest.raises(KeyError), interpreted():
        raise KeyError
    assert not uses_kernels(CPU)
