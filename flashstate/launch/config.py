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
from dataclasses import dataclass, replace
from itertools import product, starmap
from typing import ClassVar, NamedTuple

import torch

from flashstate.launch.suspension import suspended
from flashstate.launch.table import Config, Configs, load_table
from flashstate.state.signature import ACCESS_BYTES
from flashstate.state.state import is_transposed

WARP = 32 if torch.version.hip is None else 64  # threads; those AMD GPUs that have 32 are content with rows for 64
CALL_COLUMNS = 8  # that one Philox call serves: a thread needs the bits of all of them side by side
TOGETHER = (1, 2, 4, 8, 16)  # tokens whose inputs are loaded together, or tiles of a program
MOST_UNROLLED = 128  # elements of state in a thread, times tokens loaded together
MOST_STAGED = 16 << 10  # bytes of a tile of which two or three are in shared memory
MOST_OF_A_ROW = 64  # elements in a thread, and
MOST_CHUNKS = 32  # of a row, unless it is so wide that a whole warp has more: unrolled code that takes long to compile
FEW = 64  # batch x heads below which a GPU is mostly idle
LARGE = 512  # batch x heads from which on there are programs enough, however many rows each has
FEW_AT_ONCE, MOST_AT_ONCE = 8, 16  # tokens that kernels of tokens at once have room for
WIDEST_IN_TILES = 128  # columns: of wider rows several tiles at once spill registers
TILES = 8  # of a program of the gated delta rule where arithmetic, or what tokens bring, is the bottleneck, and
MANY = 1024  # batch x heads from which on there are programs enough with so many
FEW_REPLAYED = 512  # batch x heads below which a program of replay has one tile, and
MANY_REPLAYED = 2048  # from which on there are programs enough with many
LONGEST_ALONE = 16  # window of replay up to which one token needs no tensor cores
AHEAD = 32  # programs of Mamba-3, times `together`, behind the one that asks for the states of one more
WALKING_CAPABILITY = (10, 0)  # from here on sums over lanes are the bottleneck


class Gpu(NamedTuple):
    """What decides a config: the name that tables are filed under, and the compute capability."""

    name: str
    capability: tuple[int, int]


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
    stored: str = "last"  # of several tokens: "last", "each", to snapshots or to slots of their own, or "nothing"
    transposed: bool = False  # neighbours in memory are of a column: an access takes rows, and one column of a chunk

    limits: ClassVar[tuple[int, ...]] = (0, 128)  # of registers in a thread: none, or so few that an SM has 16 warps

    @property
    def block_cols(self) -> int:
        """Columns of a tile: the whole row, padded to a power of two that holds whole Philox calls."""
        return max(2 * CALL_COLUMNS, next_power_of_2(self.cols))

    @property
    def row_choices(self) -> tuple[int, ...]:
        """How many rows a tile may have."""
        return 1, 2, 4, 8, 16, 32, 64

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
        return config.num_warps * (WARP // config.lanes) * (self.vector if self.transposed else 1)

    @property
    def most_together(self) -> int:
        """How many tokens may be loaded together."""
        return 4

    @property
    def together_choices(self) -> tuple[int, ...]:
        """How many of them are worth trying."""
        return tuple(n for n in TOGETHER if n <= self.most_together) if self.several_tokens else TOGETHER[:1]

    @property
    def register_choices(self) -> tuple[int, ...]:
        """Which limits of registers are worth trying: none, unless random bits take many and a compiler can be told."""
        return self.limits if self.rounding != "nearest" and torch.version.hip is None else self.limits[:1]

    def valid(self, config: Config) -> bool:
        """Whether a call may be launched so: threads share rows as a config says only where there are rows for all. Of
        transposed states one warp has no more rows than that either: else the compiler gives threads other columns."""
        powers_of_two = all(n == next_power_of_2(n) for n in (config.block_rows, config.num_warps, config.together))
        known = config.lanes in self.lane_choices and config.together <= self.most_together
        known = known and config.registers in self.limits
        fewest = self.fewest_rows(config)
        fits = (config.block_rows, config.num_warps) == (fewest, 1) if self.transposed else config.block_rows >= fewest
        return powers_of_two and known and fits

    def per_thread(self, config: Config) -> int:
        """Elements of state that a thread has."""
        return config.block_rows * self.block_cols // (config.num_warps * WARP)

    def manageable(self, config: Config) -> bool:
        """Whether a thread has at most 128 elements of state times what is loaded together, or one row of one tile."""
        smallest = config.together == 1 and config.block_rows == self.fewest_rows(config)
        return smallest or self.per_thread(config) * config.together <= MOST_UNROLLED

    def heuristic(self, gpu: Gpu) -> Config:
        """One warp; for small batches fewer rows, so that a head spreads over more programs, and more tokens together,
        as nothing else hides their loads."""
        lanes = heuristic_lanes(self, gpu)
        per_thread = 16 if self.batch_heads < LARGE else 32
        block_rows = 1 if self.transposed else min(next_power_of_2(self.rows), per_thread * WARP // self.block_cols)
        config = Config(max(block_rows, self.fewest_rows(Config(1, 1, lanes))), 1, lanes)
        if self.several_tokens and self.batch_heads < LARGE:
            most = MOST_UNROLLED // 2 // self.per_thread(config)
            config = replace(config, together=max(1, min(4 if self.batch_heads < FEW else 2, most)))
        return config


@dataclass(frozen=True)
class ChannelProblem(Problem):
    """What a config of a convolution is chosen for: `rows` are channels and `cols` the taps of each, all of which one
    thread has, so every config gives the same bytes. `batch_heads` is the batch, `vector` the channels of an access."""

    @property
    def most_together(self) -> int:
        return 8

    @property
    def row_choices(self) -> tuple[int, ...]:
        return 32, 64, 128, 256, 512, 1024, 2048, 4096

    @property
    def lane_choices(self) -> list[int]:
        return [1]

    def per_thread(self, config: Config) -> int:
        """Channels that a thread has."""
        return config.block_rows // (config.num_warps * WARP)

    def manageable(self, config: Config) -> bool:
        return self.per_thread(config) * max(config.together, self.cols) <= MOST_UNROLLED

    def heuristic(self, gpu: Gpu) -> Config:
        """Four channels per thread: more warps where all they do is move bytes, two tokens together where there are
        some."""
        warps = 1 if self.several_tokens else 4
        return Config(4 * WARP * warps, warps, 1, 2 if self.several_tokens else 1)


@dataclass(frozen=True)
class DeltaProblem(Problem):
    """What a config of the gated delta rule is chosen for. Programs may have several tiles of rows, except where tokens
    are stepped one after the other. With a limit of registers the compiler also issues its loads in another order,
    which is worth trying with any rounding."""

    @property
    def in_tiles(self) -> bool:
        """Whether `together` is how many tiles a program has, not how many tokens are loaded together."""
        return not self.several_tokens

    @property
    def most_together(self) -> int:
        return 16 if self.in_tiles else 4

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the state."""
        return getattr(torch, self.format).itemsize

    @property
    def together_choices(self) -> tuple[int, ...]:
        return tuple(n for n in TOGETHER if n <= self.most_together)

    @property
    def register_choices(self) -> tuple[int, ...]:
        return self.limits if torch.version.hip is None else self.limits[:1]

    def manageable(self, config: Config) -> bool:
        """Tiles count one by one. Several have no more rows than a head, padded, and wait in shared memory, which may
        be small."""
        if not self.in_tiles:
            return super().manageable(config)
        tile_bytes = config.block_rows * self.block_cols * self.itemsize
        fits = config.together * config.block_rows <= next_power_of_2(self.rows) and tile_bytes <= MOST_STAGED
        return (config.together == 1 or fits) and super().manageable(replace(config, together=1))

    def heuristic(self, gpu: Gpu) -> Config:
        """Several tiles where arithmetic is the bottleneck, so that they share what the token brings: 8-bit formats and
        stochastic rounding, in accesses so wide that tiles come through shared memory."""
        config = super().heuristic(gpu)
        wide = self.vector * self.itemsize == ACCESS_BYTES and not self.transposed
        arithmetic = self.itemsize == 1 or self.rounding != "nearest"
        return config if self.several_tokens or not (wide and arithmetic) else self.in_many_tiles(config)

    def in_many_tiles(self, config: Config) -> Config:
        """The config with as many tiles as a head has rows for, up to TILES, where there are programs enough."""
        tiles = min(TILES, next_power_of_2(self.rows) // config.block_rows) if self.batch_heads >= MANY else 1
        return replace(config, together=max(1, tiles))


@dataclass(frozen=True)
class TensorCoreProblem(DeltaProblem):
    """What a config is chosen for where tensor cores multiply states with all tokens of a row at once. Four threads
    side by side in a row have what an operand has there, and one warp multiplies alone, so that nothing moves between
    threads: two warps or four took about twice as long on an H200. Where accesses are narrow there are more threads in
    a row, because an operand has 16 columns."""

    limits: ClassVar[tuple[int, ...]] = (0, 128, 168)

    @property
    def block_cols(self) -> int:
        return max(super().block_cols, self.chunk(self.lane_choices[0]))

    @property
    def row_choices(self) -> tuple[int, ...]:
        return 16, 32, 64

    @property
    def lane_choices(self) -> list[int]:
        return [max(4, 16 // self.chunk(1))]

    @property
    def in_tiles(self) -> bool:
        return True

    def valid(self, config: Config) -> bool:
        rows = config.block_rows in self.row_choices and config.lanes in self.lane_choices
        known = config.together in self.together_choices and config.registers in self.limits
        return rows and known and config.num_warps == 1

    def heuristic(self, gpu: Gpu) -> Config:
        """Several tiles where there are programs enough: what the tokens are to each other is found once for all."""
        config = Config(16, 1, self.lane_choices[0])
        return config if self.block_cols > WIDEST_IN_TILES else self.in_many_tiles(config)


@dataclass(frozen=True)
class HeadProblem(Problem):
    """What a config of Mamba-3 of rank 1 is chosen for. A program has all rows of a head, tile by tile, because they
    share what it overwrites. `together` is how far ahead it asks for the states of another one, 1: not at all."""

    limits: ClassVar[tuple[int, ...]] = (0, 96, 128, 168)

    @property
    def most_together(self) -> int:
        return TOGETHER[-1]

    @property
    def together_choices(self) -> tuple[int, ...]:
        return TOGETHER

    @property
    def register_choices(self) -> tuple[int, ...]:
        return self.limits if torch.version.hip is None else self.limits[:1]

    def lanes_of(self, warps: int) -> list[int]:
        """How many threads may share a row of a tile that so many warps have. A chunk with a column for every thread
        makes the compiler give threads other rows than those they load: twice the instructions, or five times. The
        fewest, where all chunks have."""
        return [lanes for lanes in self.lane_choices if self.chunk(lanes) < warps * WARP] or self.lane_choices[:1]

    def manageable(self, config: Config) -> bool:
        return config.lanes in self.lanes_of(config.num_warps) and super().manageable(replace(config, together=1))

    def heuristic(self, gpu: Gpu) -> Config:
        """As few tiles as there can be, of 64 elements in a thread or fewer, and 8 warps at most."""
        rows = max(1, min(64, next_power_of_2(self.rows), 8 * 64 * WARP // self.block_cols))
        warps = min(8, max(1, rows * self.block_cols // (64 * WARP)))
        lanes = min(heuristic_lanes(self, gpu), self.lanes_of(warps)[-1])
        warps = min(warps, max(1, rows * lanes // WARP))
        return Config(max(rows, self.fewest_rows(Config(1, warps, lanes))), warps, lanes, 4)


@dataclass(frozen=True)
class RankProblem(TensorCoreProblem):
    """What a config of Mamba-3 of higher rank is chosen for, where tensor cores multiply with the vectors of all ranks.
    A program has all rows of a head, as that of rank 1; every warp has 16 rows of a tile, or a multiple."""

    limits: ClassVar[tuple[int, ...]] = HeadProblem.limits

    @property
    def together_choices(self) -> tuple[int, ...]:
        return TOGETHER

    def valid(self, config: Config) -> bool:
        known = config.lanes in self.lane_choices and config.together in TOGETHER and config.registers in self.limits
        return known and config.block_rows in self.row_choices and config.block_rows % (16 * config.num_warps) == 0

    def manageable(self, config: Config) -> bool:
        return self.per_thread(config) <= MOST_UNROLLED or (config.block_rows, config.num_warps) == (16, 1)

    def heuristic(self, gpu: Gpu) -> Config:
        """As few tiles as there can be, of 64 rows of 128 columns at most: float32 outputs need the tile in shared
        memory."""
        warps = min(4, max(1, next_power_of_2(self.rows) // 16), max(1, 512 // self.block_cols))
        return Config(16 * warps, warps, self.lane_choices[0], 4)


@dataclass(frozen=True)
class ReplayProblem(TensorCoreProblem):
    """What a config of replay is chosen for. A program has so many tiles, of one head or of several of a group, as
    `together` says: all share B and C."""

    @property
    def most_together(self) -> int:
        return 16

    def manageable(self, config: Config) -> bool:
        return config.block_rows < 64

    def heuristic(self, gpu: Gpu) -> Config:
        """More tiles for larger batches; where the state is only read, larger ones of 32 bits, and of less bits so few
        registers that an SM has 16 warps. As measured on an H200, with 16 heads of 64 x 128."""
        lanes, many = self.lane_choices[0], self.batch_heads >= MANY_REPLAYED
        most = self.batch_heads >= 4 * MANY_REPLAYED
        if self.op != "mamba2_replay keep":
            few = 1 if self.op != "mamba2_replay either" or self.batch_heads < FEW_REPLAYED else 4
            return Config(16, 1, lanes, 8 if most else 4 if many else few)
        if self.itemsize == 4:
            return Config(32, 1, lanes, 8 if many else 2)
        return Config(16, 1, lanes, 16 if most else 8 if many else 2, 128 if torch.version.hip is None else 0)


@dataclass(frozen=True)
class ReplayTokenProblem(DeltaProblem):
    """What a config of replay is chosen for where every row has one token, and no tensor cores are used. `together` is
    what it is for other calls."""

    limits: ClassVar[tuple[int, ...]] = (0, 96, 128)

    def manageable(self, config: Config) -> bool:
        return Problem.manageable(self, replace(config, together=1))

    def heuristic(self, gpu: Gpu) -> Config:
        """Four warps, or as many as there are rows for, and no more than 64 elements in a thread; several tiles where
        the state is only read and there are programs enough. As measured on an H200, with 16 heads of 64 x 128."""
        lanes = min(self.lane_choices, key=lambda lanes: abs(math.log2(lanes / 8)))
        rows = max(1, min(64, next_power_of_2(self.rows), 4 * 64 * WARP // self.block_cols))
        warps = max(1, min(4, rows * lanes // WARP))
        tiles = 8 if self.op == "mamba2_replay keep" and self.batch_heads >= MANY_REPLAYED else 1
        return Config(max(rows, self.fewest_rows(Config(1, warps, lanes))), warps, lanes, tiles)


AnyReplay = ReplayProblem | ReplayTokenProblem


def replay_kind(longest: int, format: str, packed: bool, window: int) -> type[AnyReplay]:
    """What a problem of replay is. Tensor cores are as fast for one token of states of less than 32 bits; without them
    long windows have too much arithmetic. In packed calls, where the longest row may change from step to step, a row
    with one token does not depend on that."""
    alone = longest == 1 and format == "float32" and not packed and window <= LONGEST_ALONE
    return ReplayTokenProblem if alone else ReplayProblem


def mamba3_kind(rank: int, turned: bool) -> tuple[type[Problem], str]:
    """What a problem of Mamba-3 is, and the op that tables have it under: where columns are turned, which takes
    registers, it needs other configs."""
    return HeadProblem if rank == 1 else RankProblem, f"mamba3_step rank {rank}{' turned' if turned else ''}"


def delta_kind(at_once: bool, longest: int) -> tuple[type[DeltaProblem], str]:
    """What a problem of the gated delta rule is, and the op that tables have it under: where a kernel has room for 16
    tokens at once it needs other configs than for 8."""
    if not at_once:
        return DeltaProblem, "gated_delta_step"
    few = room_at_once(longest) == FEW_AT_ONCE
    return TensorCoreProblem, "gated_delta_at_once" if few else f"gated_delta_at_once_{MOST_AT_ONCE}"


def room_at_once(longest: int) -> int:
    """How many tokens a kernel of tokens at once has room for."""
    return FEW_AT_ONCE if longest <= FEW_AT_ONCE else MOST_AT_ONCE


def valid_configs(problem: Problem) -> list[Config]:
    """Every config a table may hold for `problem`: valid, and not so large that code and registers get out of hand."""
    rows, warps = problem.row_choices, (1, 2, 4, 8)
    numbers = product(rows, warps, problem.lane_choices, problem.together_choices, problem.register_choices)
    configs = [config for config in starmap(Config, numbers) if problem.valid(config)]
    return [config for config in configs if problem.manageable(config)]


def tokens_together(config: Config, longest: int, packed: bool, tree: bool) -> int:
    """How many tokens a kernel loads together: no more than there are in a dense call, whose number is fixed while a
    server runs; as many as the config says of packed rows, however long the longest is. Trees load token by token."""
    if tree:
        return 1
    return config.together if packed else min(config.together, next_power_of_2(longest))


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def access_width(data: torch.Tensor) -> int:
    """Elements per access that the alignment of a state allows. Of a pointer, Triton knows only multiples of 16."""
    if data.data_ptr() % ACCESS_BYTES:
        return 1
    neighbours = data.shape[-2 if is_transposed(data) else -1]
    return math.gcd(neighbours, *data.stride()[:-3], ACCESS_BYTES // data.element_size())


_overridden: Config | None = None


@contextmanager
def override(config: Config) -> Iterator[None]:
    """Use `config` for every launch inside: for tuning and for tests."""
    global _overridden
    before, _overridden = _overridden, config
    try:
        with suspended():
            yield
    finally:
        _overridden = before


def choose(problem: Problem, gpu: Gpu) -> Config:
    """The config for `problem` on that GPU."""
    return choose_with_reason(problem, gpu)[0]


def choose_with_reason(problem: Problem, gpu: Gpu) -> tuple[Config, str]:
    """The config, and a few words on where it comes from."""
    if _overridden is not None:
        if not problem.valid(_overridden):
            raise ValueError(f"{_overridden} is not one of the valid configs of {problem}")
        return _overridden, "override"
    return _look_up(problem, gpu)


@functools.lru_cache(maxsize=4096)
def _look_up(problem: Problem, gpu: Gpu) -> tuple[Config, str]:
    for mode, what in ((problem, ""), (replace(problem, stored="last"), ", for calls that store one state")):
        sizes = measured_sizes(load_table(gpu.name), mode)
        if sizes:
            nearest = min(sizes, key=lambda size: abs(math.log(size / problem.batch_heads)))
            return sizes[nearest], f"table of {gpu.name}, measured at batch x heads = {nearest}{what}"
    return problem.heuristic(gpu), "heuristic: no table for this GPU, op, shape, format and mode"


def measured_sizes(configs: Configs, problem: Problem) -> Mapping[int, Config]:
    """What a table has for problems that differ in their size alone, by batch x heads."""
    return configs.get(table_key(problem), {}).get(mode_key(problem), {})


def heuristic_lanes(problem: Problem, gpu: Gpu) -> int:
    """Lanes that read 128 columns at once; fewer where their sums are the bottleneck: newer GPUs, several tokens."""
    wanted = 8 if problem.several_tokens else 128 // problem.vector
    if gpu.capability >= WALKING_CAPABILITY:
        wanted = min(wanted, 4)
    return min(problem.lane_choices, key=lambda lanes: abs(math.log2(lanes / wanted)))


def table_key(problem: Problem) -> str:
    """What a table is about."""
    layout = " transposed" if problem.transposed else ""
    return f"{problem.op} {problem.rows}x{problem.cols} {problem.format} vector {problem.vector}{layout}"


def mode_key(problem: Problem) -> str:
    """How the state is stepped, within a table."""
    several = "several tokens" if problem.stored == "last" else f"several tokens, {problem.stored} stored"
    return f"{problem.rounding}, {several if problem.several_tokens else 'one token'}"


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many a device has. An interpreted CPU has few, so that programs walk."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@functools.cache
def gpu_of(device: torch.device) -> Gpu:
    """The GPU of a device. An interpreted CPU stands for one without a table, and one whose lanes do not depend on the
    tokens: the interpreter sums over lanes as numpy does, and so not in the order of fewer lanes."""
    if device.type != "cuda":
        return Gpu("interpreter", WALKING_CAPABILITY)
    return Gpu(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
