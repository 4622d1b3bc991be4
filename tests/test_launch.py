"""Launch configs: tables, the heuristic, overrides; how wide a pool is accessed; which implementation runs."""

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
    backend,
    choose,
    choose_with_reason,
    interpreted,
    kernel_rounding,
    override,
)
from flashstate.launch import config as launch_config
from flashstate.launch.backend import uses_kernels
from flashstate.launch.config import ACCESS_BYTES, access_width, load_table
from flashstate.state.formats import FORMATS
from flashstate.testing import Case, make_inputs

CPU, META, CUDA = (torch.device(name) for name in ("cpu", "meta", "cuda"))
NO_GPU = "a GPU nobody measured"
BY_NAME = {fmt.name: fmt for fmt in FORMATS.values()}
KEY = re.compile(r"(?P<op>\w+) (?P<rows>\d+)x(?P<cols>\d+) (?P<format>\w+) (?P<rounding>\w+) vector (?P<vector>\d+)")
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
            yield Problem(found["op"], rows, cols, found["format"], found["rounding"], vector, int(size)), config


def test_there_is_a_table_for_the_h200() -> None:
    assert load_table("NVIDIA H200")


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
    key = "mamba2_step 64x128 float32 nearest vector 4"
    monkeypatch.setattr(launch_config, "load_table", lambda gpu: {key: entries} if gpu == "measured" else {})
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
    [{"rows": 32}, {"cols": 64}, {"format": "float16", "vector": 8}, {"rounding": "stochastic"}, {"vector": 2}],
)
def test_a_table_speaks_only_for_its_own_problem(change: dict[str, int | str]) -> None:
    assert choose_with_reason(replace(PROBLEM, **change), "measured")[1].startswith("heuristic")
    assert choose_with_reason(PROBLEM, "another")[1].startswith("heuristic")


@pytest.mark.usefixtures("measured")
def test_the_reason_says_where_a_config_comes_from() -> None:
    assert choose_with_reason(PROBLEM, "measured")[1].startswith("table")
    assert choose_with_reason(PROBLEM, NO_GPU)[1].startswith("heuristic")
    with override(Config(4, 4)):
        assert choose_with_reason(PROBLEM, "measured") == (Config(4, 4), "override")
        assert choose(PROBLEM, NO_GPU) == Config(4, 4)


def test_a_gpu_without_a_table_has_an_empty_one() -> None:
    assert load_table(NO_GPU) == {}


ROWS = sorted({*range(1, 257, 2), *(1 << n for n in range(9))})
COLS = sorted({n for k in range(10) for n in ((1 << k) - 1, 1 << k, (1 << k) + 1, 3 << k) if 1 <= n <= 512} | {20, 80})
SHAPES = sorted({*product(ROWS, COLS), *product((1, 5, 64, 256), range(1, 513))})
SIZES = (1, 2, 7, 16, 100, 1024, 2047, 2048, 1 << 15, 1 << 20)


@pytest.mark.parametrize("name", BY_NAME)
def test_the_heuristic_gives_a_valid_config_for_every_shape(name: str) -> None:
    for (rows, cols), vector, size in product(SHAPES, (1, 2, 4, 8), SIZES):
        if widest(cols, name) % vector == 0:
            problem = Problem("mamba2_step", rows, cols, name, "nearest", vector, size)
            config, reason = choose_with_reason(problem, NO_GPU)
            assert problem.valid(config), (problem, config)
            assert config.num_warps >= 1, (problem, config)
            assert reason.startswith("heuristic")


@pytest.mark.parametrize(
    ("problem", "config"),
    [
        pytest.param(PROBLEM, Config(2, 4), id="fewer rows than warps"),
        pytest.param(PROBLEM, Config(12, 4), id="rows not a power of two"),
        pytest.param(PROBLEM, Config(16, 3), id="warps not a power of two"),
        pytest.param(replace(PROBLEM, vector=1), Config(16, 2), id="a row wider than one access of a warp"),
        pytest.param(replace(PROBLEM, cols=16), Config(4, 1), id="a warp with fewer rows than it covers"),
        pytest.param(replace(PROBLEM, cols=16), Config(8, 2), id="warps with fewer rows than they cover"),
    ],
)
def test_override_refuses_a_config_that_would_change_the_order_of_sums(problem: Problem, config: Config) -> None:
    assert not problem.valid(config)
    with override(config), pytest.raises(ValueError, match=r"^Config.* would change the order of sums for Problem"):
        choose(problem, NO_GPU)


def test_one_warp_may_take_a_row_of_any_width() -> None:
    for cols in (1, 128, 512, 4096):
        for vector in (1, 2, 4):
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


def pool(dtype: torch.dtype, cols: int, offset: int = 0, gap: int = 0) -> Tensor:
    """Three slots of 2 x 4 x cols, `offset` elements after a 16-byte boundary, `gap` elements apart."""
    stride = 8 * cols + gap
    memory = torch.zeros(offset + 3 * stride, dtype=dtype)
    assert memory.data_ptr() % ACCESS_BYTES == 0
    return memory.as_strided((3, 2, 4, cols), (stride, 4 * cols, cols, 1), offset)


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
    ],
)
def test_an_access_is_as_wide_as_every_row_of_every_slot_is_aligned(
    dtype: torch.dtype, cols: int, offset: int, gap: int, width: int
) -> None:
    data = pool(dtype, cols, offset, gap)
    assert access_width(data) == width
    bytes_wide = width * data.element_size()
    assert all(row.data_ptr() % bytes_wide == 0 for slot in data for head in slot for row in head)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "stochastic_hw"])
@pytest.mark.parametrize(
    ("cuda", "capability", "on_gpu"),
    [("13.0", (8, 0), "stochastic_ptx"), ("13.0", (7, 5), "stochastic"), (None, (9, 4), "stochastic")],
    ids=["NVIDIA", "old NVIDIA", "AMD"],
)
def test_only_stochastic_rounding_on_nvidia_gpus_has_another_name_in_kernels(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, capability: tuple[int, int], on_gpu: str, rounding: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(backend, "_has_packed_float16", backend._has_packed_float16.__wrapped__)  # not the cached one
    assert kernel_rounding(rounding, CPU) == rounding
    assert kernel_rounding(rounding, CUDA) == (on_gpu if rounding == "stochastic" else rounding)


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
