"""Timing: on the GPU many launches in one CUDA graph, each on slots that are not in the cache; else the wall clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

COLD_BYTES = 256 << 20  # distinct state touched before any slot repeats: several times the cache of any GPU so far
MAX_LAUNCHES = 2048
MIN_LAUNCHES = 16
CPU_SECONDS = 0.3  # per measurement
CPU_CALLS = 5  # per measurement, at least


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: the median over repetitions, and the fastest and slowest of them."""

    median: float
    fastest: float
    slowest: float

    @classmethod
    def of(cls, times: Sequence[float]) -> Timing:
        return cls(statistics.median(times), min(times), max(times))

    @property
    def spread(self) -> float:
        """Slowest minus fastest, relative to the median."""
        return (self.slowest - self.fastest) / self.median


def cold_slots(
    batch: int, slot_bytes: int, device: torch.device, most: int = MAX_LAUNCHES, ascending: bool = False
) -> tuple[int, list[Tensor]]:
    """The size a pool needs, and slots for each launch of a graph: cold ones, in random order or as they lie in memory,
    and never 0, which may mean padding."""
    launches = min(most, max(MIN_LAUNCHES, -(-COLD_BYTES // (batch * slot_bytes))))
    pool = max(2 * batch, -(-COLD_BYTES // slot_bytes))
    order = 1 + (torch.arange(pool) if ascending else torch.randperm(pool, generator=torch.Generator().manual_seed(0)))
    flat = order.repeat(-(-batch * launches // pool))[: batch * launches]
    return 1 + pool, list(flat.to(torch.int32).to(device).split(batch))


def cold_rows(batch: int, rows: int, launches: int, device: torch.device) -> list[Tensor]:
    """Rows of the snapshots for each launch, one after the other, all of them before any comes again."""
    return list((torch.arange(batch * launches) % rows).to(torch.int32).to(device).split(batch))


def time_launches(launches: Sequence[Callable[[], object]], replays: int = 15, flush: bool = False) -> Timing:
    """Capture the launches into one graph and time its replays; `flush`: sweep the cache before each."""
    return time_by_turns([captured(launches)], replays, flush)[0]


@dataclass(frozen=True)
class Captured:
    """A CUDA graph of launches, which are kept: it has the addresses of what they hold."""

    graph: torch.cuda.CUDAGraph
    launches: Sequence[Callable[[], object]]


def captured(launches: Sequence[Callable[[], object]]) -> Captured:
    """Capture the launches into one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for launch in launches[:2]:  # compiles, and allocates what is allocated once
            launch()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    return Captured(graph, launches)


def time_by_turns(graphs: Sequence[Captured], replays: int = 15, flush: bool = False) -> list[Timing]:
    """Time replays of these graphs by turns, so that a clock that changes changes all of them; `flush`: sweep the cache
    before each. One of several is replayed before it is timed, so that it finds in the cache what it leaves there."""
    for known in graphs:
        for _ in range(3):
            known.graph.replay()
    swept = torch.empty(COLD_BYTES if flush else 0, dtype=torch.int8, device="cuda")
    turns = [[_replay_time(known, swept, again=len(graphs) > 1) for known in graphs] for _ in range(replays)]
    return [Timing.of(times) for times in zip(*turns, strict=True)]


def _replay_time(captured: Captured, swept: Tensor, again: bool) -> float:
    """Microseconds per launch of a replay, after this memory went through the cache; `again`: of a second one."""
    if again:
        captured.graph.replay()
        torch.cuda.synchronize()
    swept.zero_()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    captured.graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / len(captured.launches)


def time_on_cpu(call: Callable[[], object]) -> Timing:
    """Microseconds of a call by the wall clock, after one that is not counted."""
    call()
    times: list[float] = []
    while len(times) < CPU_CALLS or sum(times) < CPU_SECONDS * 1e6:
        times.append(seconds_of(call, 1) * 1e6)
    return Timing.of(times)


def seconds_of(call: Callable[[], object], calls: int) -> float:
    """Seconds that so many calls take the host."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - start
