"""Launch configs: looked up in a table per GPU, else made by a heuristic; never tuned on live state.

All valid configs of a problem sum a row of the state in the same order: a row is never split over warps, and however
many threads share it, neighbours are summed first and then halves of the row onto each other. So a result depends
neither on the config nor on the batch that it was chosen for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, ClassVar, NamedTuple

import torch

from flashstate.errors import dtype_name
from flashstate.launch.environment import WALKING_CAPABILITY, Gpu, replaced, suspended, warp_size
from flashstate.launch.table import NOT_MEASURED, Config, Configs, is_measured, load_table
from flashstate.state.signature import ACCESS_BYTES
from flashstate.state.state import State, head_stride, is_transposed

CALL_COLUMNS = 8  # that one Philox call serves, or half of one in 8 bits: threads need their bits side by side
KNOBS = {"tokens_together": 1, "tiles": 1, "ahead": 0}  # fields of a config of which a problem has one; plain values
WARP_CHOICES = (1, 2, 4, 8)  # of a program
POWERS = (1, 2, 4, 8, 16)  # tokens whose inputs are loaded together, or tiles of a program
MOST_UNROLLED = 128  # elements of state in a thread, times tokens loaded together
MOST_STAGED = 16 << 10  # bytes of a tile of which two or three are in shared memory
MOST_OF_A_ROW = 64  # elements in a thread, and
MOST_CHUNKS = 32  # of a row, unless it is so wide that a whole warp has more: unrolled code that takes long to compile
MOST_CHUNKS_TOGETHER = 16  # of a row, times tokens loaded together: time to compile grows with the cube of both
NARROW = 4  # elements per access, below which a row has many chunks
FEW = 64  # batch x heads below which a GPU is mostly idle
LARGE = 512  # batch x heads from which on there are programs enough, however many rows each has
TILES = 8  # of a program where arithmetic, or what tokens bring, is the bottleneck, and
MANY = 1024  # batch x heads from which on there are programs enough with so many
NVIDIA_WARP = 32  # of all GPUs that are not AMD's


@dataclass(frozen=True)
class Problem:
    """What a config is chosen for."""

    op: str
    rows: int
    cols: int
    format: str
    rounding: str
    vector: int  # neighbours in memory that one access of a thread takes: 16 bytes of state where alignment allows
    batch_heads: int
    several_tokens: bool = False  # per row and call
    stored: str = "last"  # states after several tokens: "last", "every", to snapshots or slots of their own, or "none"
    transposed: bool = False  # neighbours in memory are of a column: an access takes rows, and one column of a chunk
    warp: int = field(default_factory=warp_size)  # threads

    limits: ClassVar[tuple[int, ...]] = (0, 128)  # of registers in a thread: none, or so few that an SM has 16 warps
    row_choices: ClassVar[tuple[int, ...]] = (1, 2, 4, 8, 16, 32, 64)  # how many rows a tile may have
    limits_always: ClassVar[bool] = False  # whether these are worth trying without random bits, which take registers
    knob: ClassVar[str] = "tokens_together"  # the one field of KNOBS that configs of this problem have
    knob_values: ClassVar[tuple[int, ...]] = POWERS[:3]  # that are worth trying, the plain one first

    @classmethod
    def of(cls, op: str, state: State, batch: int, **more: Any) -> Any:
        """What a config is chosen for, of an op on so many rows of a state."""
        _, heads, rows, cols = state.data.shape
        format, vector = dtype_name(state.data.dtype), access_width(state.data)
        return cls(op, rows, cols, format, state.rounding, vector, batch * heads, transposed=state.transposed, **more)

    @property
    def block_cols(self) -> int:
        """Columns of a tile: the whole row, padded to a power of two that holds whole Philox calls."""
        return max(2 * CALL_COLUMNS, next_power_of_2(self.cols))

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the state."""
        return getattr(torch, self.format).itemsize

    @property
    def lane_choices(self) -> list[int]:
        """How many threads may share a row: those that a warp has, and a row of whole Philox calls needs, and so many
        that none has too much of it. Of transposed states as few as that, so that a warp takes more of each column, and
        with random bits, which take registers, twice as many."""
        most = min(MOST_OF_A_ROW, MOST_CHUNKS * self.vector)  # elements
        if self.transposed:
            most = min(MOST_CHUNKS, MOST_UNROLLED // self.vector)
        columns = self.chunk(1)
        fewest = max(1, CALL_COLUMNS // columns, min(self.block_cols // most, 32))
        choices = [lanes for lanes in (1, 2, 4, 8, 16, 32) if fewest <= lanes <= self.block_cols // columns]
        if self.transposed:
            return choices[:1] if self.rounding == "nearest" else choices[:2][-1:]
        return choices

    def chunk(self, lanes: int) -> int:
        """Columns that the threads of a row access at once; they walk along it in such chunks."""
        return lanes if self.transposed else lanes * self.vector

    def fewest_rows(self, config: Config) -> int:
        """Rows that the threads of a program access at once, side by side as a config says."""
        return config.num_warps * (self.warp // config.lanes) * (self.vector if self.transposed else 1)

    @property
    def knob_choices(self) -> tuple[int, ...]:
        """Values of the knob that are worth trying, the plain one first: one token has no others beside it."""
        alone = self.knob == "tokens_together" and not self.several_tokens
        return self.knob_values[:1] if alone else self.knob_values

    def turned(self, config: Config, value: int) -> Config:
        """The config with another value of the knob."""
        return replace(config, **{self.knob: value})

    @property
    def register_choices(self) -> tuple[int, ...]:
        """Which limits of registers are worth trying, where a compiler can be told."""
        worth = self.warp == NVIDIA_WARP and (self.limits_always or self.rounding != "nearest")
        return self.limits if worth else self.limits[:1]

    def knows(self, config: Config) -> bool:
        """Whether a config has lanes, registers and a knob of this problem, and no other knob."""
        others = all(getattr(config, name) == plain for name, plain in KNOBS.items() if name != self.knob)
        value = getattr(config, self.knob)
        in_range = value in self.knob_choices or value == next_power_of_2(value) <= self.knob_values[-1]
        return others and in_range and config.lanes in self.lane_choices and config.registers in self.limits

    def valid(self, config: Config) -> bool:
        """Whether a call may be launched so: threads share rows as a config says only where there are rows for all. Of
        transposed states one warp has no more rows than that either: else the compiler gives threads other columns."""
        choosable = config.block_rows in self.row_choices and config.num_warps in WARP_CHOICES
        fewest = self.fewest_rows(config)
        fits = (config.block_rows, config.num_warps) == (fewest, 1) if self.transposed else config.block_rows >= fewest
        return choosable and self.knows(config) and fits

    def usable(self, config: Config) -> bool:
        """Return whether a table may hold a config: it is valid, and its code and registers do not get out of hand."""
        return self.valid(config) and self.manageable(config)

    def per_thread(self, config: Config) -> int:
        """Elements of state that a thread has."""
        return config.block_rows * self.block_cols // (config.num_warps * self.warp)

    def manageable(self, config: Config) -> bool:
        """Whether a thread has at most 128 elements of state times what is loaded together, or one row of one tile; and
        whether no more tokens are loaded together than compile soon."""
        smallest = config.tokens_together == 1 and config.block_rows == self.fewest_rows(config)
        fits = smallest or self.per_thread(config) * config.tokens_together <= MOST_UNROLLED
        return fits and config.tokens_together <= self.most_together(config)

    def most_together(self, config: Config) -> int:
        """How many tokens may be loaded together, by the chunks that a row has."""
        return max(1, MOST_CHUNKS_TOGETHER * self.chunk(config.lanes) // self.block_cols)

    def programs(self, config: Config) -> int:
        """How many programs a launch has: each takes tiles of rows of a head."""
        return self.batch_heads * -(-self.rows // (config.tiles * config.block_rows))

    def heuristic(self, gpu: Gpu) -> Config:
        """One warp; for small batches fewer rows, so that a head spreads over more programs, and more tokens together,
        as nothing else hides their loads."""
        lanes = self.heuristic_lanes(gpu)
        per_thread = 16 if self.batch_heads < LARGE else 32
        rows = min(next_power_of_2(self.rows), self.row_choices[-1], per_thread * self.warp // self.block_cols)
        least = 1 if self.transposed else rows
        config = Config(max(least, self.fewest_rows(Config(1, 1, lanes))), 1, lanes)
        if self.several_tokens and self.batch_heads < LARGE:
            most = min(self.knob_values[-1], self.most_together(config), MOST_UNROLLED // 2 // self.per_thread(config))
            config = replace(config, tokens_together=max(1, min(4 if self.batch_heads < FEW else 2, most)))
        return config

    def heuristic_lanes(self, gpu: Gpu) -> int:
        """Lanes that read 128 columns at once; fewer where sums over them take longest: newer GPUs, several tokens; but
        where accesses are narrow so many that several tokens compile soon."""
        wanted = 8 if self.several_tokens else 128 // self.vector
        if gpu.capability >= WALKING_CAPABILITY:
            wanted = min(wanted, 4)
        if self.several_tokens and self.vector < NARROW:
            wanted = max(wanted, 2 * self.block_cols // (MOST_CHUNKS_TOGETHER * self.chunk(1)))
        return min(self.lane_choices, key=lambda lanes: abs(math.log2(lanes / wanted)))


class TiledProblem(Problem):
    """What a config is chosen for where programs have several tiles of rows. With a limit of registers the compiler
    also issues its loads in another order, which is worth trying with any rounding."""

    limits_always: ClassVar[bool] = True
    knob: ClassVar[str] = "tiles"
    knob_values: ClassVar[tuple[int, ...]] = POWERS

    def manageable(self, config: Config) -> bool:
        """Tiles count one by one. Several have no more rows than a head, padded, and wait in shared memory, which may
        be small."""
        tile_bytes = config.block_rows * self.block_cols * self.itemsize
        fits = config.tiles * config.block_rows <= next_power_of_2(self.rows) and tile_bytes <= MOST_STAGED
        return (config.tiles == 1 or fits) and super().manageable(config)

    def in_many_tiles(self, config: Config) -> Config:
        """The config with as many tiles as a head has rows for, up to TILES, where there are programs enough."""
        tiles = min(TILES, next_power_of_2(self.rows) // config.block_rows) if self.batch_heads >= MANY else 1
        return replace(config, tiles=max(1, tiles))


class TensorCoreProblem(TiledProblem):
    """What a config is chosen for where tensor cores multiply states with all tokens of a row at once. Four threads
    side by side in a row have what an operand has there, and one warp multiplies alone, so that nothing moves between
    threads: two warps or four took about twice as long on an H200. Where accesses are narrow there are more threads in
    a row, because an operand has 16 columns."""

    limits: ClassVar[tuple[int, ...]] = (0, 128, 168)
    row_choices: ClassVar[tuple[int, ...]] = (16, 32, 64)

    @property
    def block_cols(self) -> int:
        return max(super().block_cols, self.chunk(self.lane_choices[0]))

    @property
    def lane_choices(self) -> list[int]:
        return [max(4, 16 // self.chunk(1))]

    def valid(self, config: Config) -> bool:
        return self.knows(config) and config.block_rows in self.row_choices and config.num_warps == 1


def valid_configs(problem: Problem) -> list[Config]:
    """Return every config that is worth trying for `problem` and that a table may hold."""
    choices = product(
        problem.row_choices, WARP_CHOICES, problem.lane_choices, problem.knob_choices, problem.register_choices
    )
    configs = [problem.turned(Config(r, w, lanes, registers=most), n) for r, w, lanes, n, most in choices]
    return [config for config in configs if problem.usable(config)]


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def access_width(data: torch.Tensor) -> int:
    """Elements per access that the alignment of a state allows. Of a pointer, Triton knows only multiples of 16."""
    if data.data_ptr() % ACCESS_BYTES:
        return 1
    neighbours = data.shape[-2 if is_transposed(data) else -1]
    return math.gcd(neighbours, *data.stride()[:-3], head_stride(data) or 0, ACCESS_BYTES // data.element_size())


_overridden: Config | None = None


@contextmanager
def override(config: Config) -> Iterator[None]:
    """Use `config` for every launch inside: for tuning and for tests."""
    with replaced(globals(), "_overridden", config), suspended():
        yield


def choose(problem: Problem, gpu: Gpu) -> Config:
    """The config for `problem` on that GPU."""
    return choose_with_reason(problem, gpu).config


class Choice(NamedTuple):
    """A config, a few words on where it comes from, and of a table's the batch x heads that its entry is for."""

    config: Config
    reason: str
    measured_at: int | None = None


def choose_with_reason(problem: Problem, gpu: Gpu) -> Choice:
    """The config for `problem` on that GPU, and where it comes from."""
    if _overridden is not None:
        if not problem.valid(_overridden):
            raise ValueError(f"{_overridden} is not one of the valid configs of {problem}")
        return Choice(_overridden, "override")
    return _look_up(problem, gpu)


@functools.lru_cache(maxsize=4096)
def _look_up(problem: Problem, gpu: Gpu) -> Choice:
    why = "no table"
    for mode, what in ((problem, ""), (replace(problem, stored="last"), ", for calls that store one state")):
        measured = measured_sizes(load_table(gpu.name), mode)
        sizes = {size: config for size, config in measured.items() if problem.usable(config)}  # kinds may share a key
        unusable = len(measured) - len(sizes)
        if sizes:
            nearest = min(sizes, key=lambda size: abs(math.log(size / problem.batch_heads)))
            marked = "" if is_measured(gpu.name) else f", which is {NOT_MEASURED}"
            left_out = f", {unusable} of its {len(measured)} entries unusable" if unusable else ""
            return Choice(sizes[nearest], f"table of {gpu.name}{marked}{what}{left_out}", nearest)
        why = "no usable entry in the table" if unusable else why
    return Choice(problem.heuristic(gpu), f"heuristic: {why} for this GPU, op, shape, format and mode")


def measured_sizes(configs: Configs, problem: Problem) -> Mapping[int, Config]:
    """What a table has for problems that differ in their size alone, by batch x heads."""
    return configs.get(table_key(problem), {}).get(mode_key(problem), {})


def table_key(problem: Problem) -> str:
    """What a table is about."""
    layout = " transposed" if problem.transposed else ""
    return f"{problem.op} {problem.rows}x{problem.cols} {problem.format} vector {problem.vector}{layout}"


def mode_key(problem: Problem) -> str:
    """How the state is stepped, within a table."""
    several = "several tokens" if problem.stored == "last" else f"several tokens, {problem.stored} stored"
    return f"{problem.rounding}, {several if problem.several_tokens else 'one token'}"
