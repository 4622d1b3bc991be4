"""The search behind `flashstate tune`: coordinate descent over configs that sum a row in the same order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from flashstate.launch.config import (
    Config,
    Gpu,
    Problem,
    choose,
    config_at,
    coordinates,
    heuristic,
    mode_key,
    table_key,
    valid_configs,
)
from flashstate.launch.table import FormatTable

WORTHWHILE = 0.99  # of a time: what is not this much faster is noise
FINALISTS = 2  # numbers of lanes that are compared at their best configs,
CLOSE = 1.1  # if their times are this close where the search starts

Point = tuple[Problem, Config]


class Stopwatch(Protocol):
    """What measures a config."""

    def prepare(self, points: Sequence[Point]) -> None:
        """Told which points may be measured next, so that they can be compiled side by side."""

    def microseconds(self, problem: Problem, config: Config) -> float:
        """The time of one call."""


def search(
    problems: Iterable[Problem], stopwatch: Stopwatch, gpu: Gpu, known: Mapping[str, FormatTable]
) -> Iterator[Point]:
    """The best config of every problem that is not in `known`, one after the other.

    Lanes decide the order of sums, so they are chosen once for all modes and sizes of a format; then every mode and
    size gets rows and warps of its own.
    """
    times = _Times(stopwatch)
    for key, of_format in _grouped(problems, table_key):
        lanes = known[key].lanes if key in known else best_lanes(of_format, times, gpu)
        measured = known[key].modes if key in known else {}
        modes = _grouped(of_format, mode_key)
        times.prepare([(sizes[0], c) for _, sizes in modes for c in _with_neighbours(sizes[0], lanes, gpu)])
        for mode, sizes in modes:
            found: list[Config] = []  # for smaller sizes
            for problem in sorted(sizes, key=lambda problem: problem.batch_heads):
                entry = measured.get(mode, {}).get(problem.batch_heads)
                if entry is None:
                    starts = [*found[-1:], *_starts(problem, lanes, gpu)]
                    found.append(descend(problem, starts, times))
                    yield problem, found[-1]
                else:
                    found.append(config_at(entry, lanes))


def best_lanes(problems: Sequence[Problem], times: _Times, gpu: Gpu) -> int:
    """The lanes with the smallest mean time over modes and every other size: those that start well, compared at the
    best configs they have."""
    probes = [problem for _, sizes in _grouped(problems, mode_key) for problem in sizes[1::2] or sizes]
    starts = {
        lanes: list(dict.fromkeys(config for probe in probes for config in _starts(probe, lanes, gpu)))
        for lanes in problems[0].lane_choices
    }
    times.prepare([(probe, config) for configs in starts.values() for config in configs for probe in probes])
    at_start = {
        lanes: _mean([min(times.of(probe, config) for config in configs) for probe in probes])
        for lanes, configs in starts.items()
    }
    ranked = sorted(at_start, key=at_start.__getitem__)
    finalists = [lanes for lanes in ranked[:FINALISTS] if at_start[lanes] <= CLOSE * at_start[ranked[0]]]
    if len(finalists) == 1:
        return finalists[0]
    around = [
        (probe, near) for lanes in finalists for c in starts[lanes] for probe in probes for near in neighbours(probe, c)
    ]
    times.prepare(around)
    at_best = {
        lanes: _mean([times.of(probe, descend(probe, starts[lanes], times)) for probe in probes]) for lanes in finalists
    }
    return min(at_best, key=at_best.__getitem__)


def _mean(times: Sequence[float]) -> float:
    """The geometric mean: a microsecond counts more where there are few."""
    return math.exp(sum(map(math.log, times)) / len(times))


def descend(problem: Problem, starts: Sequence[Config], times: _Times) -> Config:
    """From the fastest of some configs to faster neighbours, until none of them is worth while."""
    best = min(starts, key=lambda config: times.of(problem, config))
    while True:
        around = neighbours(problem, best)
        times.prepare([(problem, config) for config in around])
        nearest = min(around, key=lambda config: times.of(problem, config), default=best)
        if times.of(problem, nearest) >= WORTHWHILE * times.of(problem, best):
            return best
        best = nearest


def neighbours(problem: Problem, config: Config) -> list[Config]:
    """The valid configs with equal lanes that are one step away: a factor of two along one coordinate, or more or fewer
    warps of equally many rows each."""
    return [
        other for other in valid_configs(problem, config.lanes) if _is_step(coordinates(config), coordinates(other))
    ]


def _is_step(here: Sequence[int], there: Sequence[int]) -> bool:
    rows, warps, *rest = (abs(math.log2(b / a)) for a, b in zip(here, there, strict=True))
    together = rows == warps == 1 and here[0] * there[1] == there[0] * here[1] and not any(rest)
    return rows + warps + sum(rest) == 1 or together


def _starts(problem: Problem, lanes: int, gpu: Gpu) -> list[Config]:
    """Where to begin: at what the heuristic gives these lanes, and what the table has now if it has these lanes."""
    current = choose(problem, gpu)
    return list(dict.fromkeys([heuristic(problem, lanes), *([current] if current.lanes == lanes else [])]))


def _with_neighbours(problem: Problem, lanes: int, gpu: Gpu) -> set[Config]:
    starts = _starts(problem, lanes, gpu)
    return {*starts, *(neighbour for start in starts for neighbour in neighbours(problem, start))}


def _grouped(problems: Iterable[Problem], key: Callable[[Problem], str]) -> list[tuple[str, list[Problem]]]:
    """Problems with equal keys together, in the order in which the keys come first."""
    groups: dict[str, list[Problem]] = {}
    for problem in problems:
        groups.setdefault(key(problem), []).append(problem)
    return list(groups.items())


class _Times:
    """Times that were measured, so that none is measured twice."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._known: dict[Point, float] = {}

    def prepare(self, points: Sequence[Point]) -> None:
        missing = [point for point in points if point not in self._known]
        if missing:
            self._stopwatch.prepare(missing)

    def of(self, problem: Problem, config: Config) -> float:
        if (problem, config) not in self._known:
            self._known[problem, config] = self._stopwatch.microseconds(problem, config)
        return self._known[problem, config]
