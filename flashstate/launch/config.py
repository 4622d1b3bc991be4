"""Launch configs: looked up in a table per GPU, else made by a heuristic; never tuned on live state.

All valid configs of one problem sum a row of the state in the same order: a row is never split over warps, and every
thread holds the same number of consecutive columns. So a result does not depend on the config.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources

import torch

ACCESS_BYTES = 16  # of state per thread and access
WARP = 32


@dataclass(frozen=True)
class Config:
    """How one kernel is launched: rows of the state per program, and warps per program."""

    block_rows: int
    num_warps: int


@dataclass(frozen=True)
class Problem:
    """What a config is chosen for. All fields but `batch_heads` name a table; that finds the entry in it."""

    op: str
    rows: int
    cols: int
    format: str
    rounding: str
    vector: int  # consecutive elements of state that one access of a thread takes: 16 bytes where alignment allows
    batch_heads: int
    several_tokens: bool = False  # per row and call

    @property
    def block_cols(self) -> int:
        """Columns of a tile: the whole row, padded to a power of two that holds whole Philox calls."""
        return max(16, next_power_of_2(self.cols))

    @property
    def rows_per_warp(self) -> int:
        """Rows that one access of a warp covers; a program has at least these for each of its warps."""
        return max(1, WARP * self.vector // self.block_cols)

    def valid(self, config: Config) -> bool:
        """Whether `config` keeps the reduction order. Triton splits a row that one access of a warp does not cover over
        the warps there are, so such rows get one warp."""
        powers_of_two = all(n == next_power_of_2(n) for n in (config.block_rows, config.num_warps))
        splits_rows = config.num_warps > 1 and WARP * self.vector < self.block_cols
        return powers_of_two and not splits_rows and config.block_rows >= config.num_warps * self.rows_per_warp


def valid_configs(problem: Problem) -> list[Config]:
    """Every config a table may hold for `problem`: valid, and up to 128 elements of state in a thread."""
    configs = [Config(block_rows, num_warps) for block_rows in (1, 2, 4, 8, 16, 32, 64) for num_warps in (1, 2, 4, 8)]
    most = 128 * WARP // problem.block_cols  # rows per warp
    return [c for c in configs if problem.valid(c) and c.block_rows <= most * c.num_warps]


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def access_width(data: torch.Tensor) -> int:
    """Elements per access that the alignment of a state allows. Of a pointer, Triton knows only multiples of 16."""
    if data.data_ptr() % ACCESS_BYTES:
        return 1
    return math.gcd(data.shape[-1], *data.stride()[:-3], ACCESS_BYTES // data.element_size())


_overridden: Config | None = None


@contextmanager
def override(config: Config) -> Iterator[None]:
    """Use `config` for every launch inside: for tuning and for tests."""
    global _overridden
    before, _overridden = _overridden, config
    try:
        yield
    finally:
        _overridden = before


def choose(problem: Problem, gpu: str) -> Config:
    """The config for `problem` on the GPU of that name."""
    return choose_with_reason(problem, gpu)[0]


def choose_with_reason(problem: Problem, gpu: str) -> tuple[Config, str]:
    """The config, and a few words on where it comes from."""
    if _overridden is not None:
        if not problem.valid(_overridden):
            raise ValueError(f"{_overridden} would change the order of sums for {problem}")
        return _overridden, "override"
    return _look_up(problem, gpu)


@functools.lru_cache(maxsize=4096)
def _look_up(problem: Problem, gpu: str) -> tuple[Config, str]:
    entries = load_table(gpu).get(_table_key(problem))
    if entries is None:
        return _heuristic(problem), "heuristic: no table for this GPU, op, shape and format"
    nearest = min(entries, key=lambda size: abs(math.log(size / problem.batch_heads)))
    return entries[nearest], f"table of {gpu}, measured at batch x heads = {nearest}"


def _heuristic(problem: Problem) -> Config:
    """One warp, which is always valid; fewer rows for small batches, so that a head spreads over more programs."""
    per_thread = 16 if problem.batch_heads < 512 else 32
    block_rows = min(next_power_of_2(problem.rows), per_thread * WARP // problem.block_cols)
    return Config(max(block_rows, problem.rows_per_warp), num_warps=1)


def _table_key(problem: Problem) -> str:
    tokens = "several" if problem.several_tokens else "one"
    return (
        f"{problem.op} {problem.rows}x{problem.cols} {problem.format} {problem.rounding} vector {problem.vector} "
        f"tokens {tokens}"
    )


@functools.cache
def load_table(gpu: str) -> dict[str, dict[int, Config]]:
    """The measured configs of a GPU, keyed by op, shape and format, then by batch x heads; empty if there are none."""
    name = gpu.lower().replace(" ", "-") + ".json"
    file = resources.files("flashstate.launch") / "tables" / name
    if not file.is_file():
        return {}
    table = json.loads(file.read_text())["configs"]
    return {key: {int(size): Config(*config) for size, config in entries.items()} for key, entries in table.items()}


@functools.cache
def gpu_name(device: torch.device) -> str:
    """The name tables are filed under; an interpreted CPU has none."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
