"""The search behind `flashstate tune`: coordinate descent over configs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Protocol

from flashstate.launch.config import Problem, choose, measured_sizes, mode_key, table_key, valid_configs
from flashstate.launch.environment import Gpu
from flashstate.launch.table import Config, Configs

WORTHWHILE = 0.995  # of a time: what is not this much faster is noise

Point = tuple[Problem, Config]


class Stopwatch(Protocol):
    """What measures a config."""

    def prepare(self, points: Sequence[Point]) -> None:
        """Told which points may be measured next, so that they can be compiled side by side."""

    def microseconds(self, problem: Problem, config: Config) -> float:
        """The time of one call."""


def search(problems: Iterable[Problem], stopwatch: Stopwatch, gpu: Gpu, known: Configs) -> Iterator[Point]:
    """The best config of every problem that is not in `known`, from small sizes to large ones: each begins where the
    one before ended, or at the config it has now with any value of its knob."""
    for sizes in _by_mode(problems):
        measured = dict(measured_sizes(known, sizes[0]))
        missing = [problem for problem in sizes if problem.batch_heads not in measured]
        starts = {problem: with_any_knob(problem, choose(problem, gpu)) for problem in missing}
        around = {problem: neighbours(problem, configs[0]) for problem, configs in starts.items()}
        stopwatch.prepare([(p, config) for p in missing for config in dict.fromkeys([*starts[p], *around[p]])])
        before: list[Config] = []
        for problem in sizes:
            if problem in starts:
                best = descend(problem, [*before, *starts[problem]], stopwatch)
                yield problem, best
            else:
                best = measured[problem.batch_heads]
            before = [best]


def _by_mode(problems: Iterable[Problem]) -> list[list[Problem]]:
    """Problems that differ in their size alone, from the smallest to the largest."""
    modes: dict[tuple[str, str], list[Problem]] = {}
    for problem in sorted(problems, key=lambda problem: problem.batch_heads):
        modes.setdefault((table_key(problem), mode_key(problem)), []).append(problem)
    return list(modes.values())


def descend(problem: Problem, starts: Iterable[Config], stopwatch: Stopwatch) -> Config:
    """From the fastest of some configs to the first neighbour that is worth while, until there is none."""

    @cache
    def time(config: Config) -> float:
        return stopwatch.microseconds(problem, config)

    best = min(starts, key=time)
    while True:
        around = neighbours(problem, best)
        stopwatch.prepare([(problem, config) for config in around])
        better = next((config for config in around if time(config) < WORTHWHILE * time(best)), None)
        if better is None:
            return best
        best = better


def with_any_knob(problem: Problem, config: Config) -> list[Config]:
    """The config, then the valid ones that differ in the problem's knob alone: what more tiles gain, neighbours may
    hide, as two of them can be slower than one and eight faster."""
    others = [problem.turned(config, n) for n in problem.knob_choices if n != getattr(config, problem.knob)]
    return [config, *(other for other in others if other in valid_set(problem))]


def neighbours(problem: Problem, config: Config) -> list[Config]:
    """The valid configs that are one step away: twice or half the rows, the lanes, the warps, the warps with their
    rows; the next value of the knob; more or fewer registers. Fewer lanes than there are rows for bring rows."""
    rows, warps, lanes, knobs = config.block_rows, config.num_warps, config.lanes, problem.knob_choices
    place = knobs.index(getattr(config, problem.knob)) if getattr(config, problem.knob) in knobs else 0
    steps = [
        replace(config, block_rows=2 * rows),
        replace(config, block_rows=rows // 2),
        replace(config, lanes=2 * lanes),
        replace(config, lanes=lanes // 2, block_rows=max(rows, 2 * warps * problem.warp // lanes)),
        replace(config, num_warps=2 * warps, block_rows=2 * rows),
        replace(config, num_warps=warps // 2, block_rows=rows // 2),
        replace(config, num_warps=2 * warps),
        replace(config, num_warps=warps // 2),
        *(problem.turned(config, n) for n in (*knobs[place + 1 : place + 2], *knobs[:place][-1:])),
        *(replace(config, registers=most) for most in problem.register_choices if most != config.registers),
    ]
    return [step for step in steps if step in valid_set(problem)]


@lru_cache(maxsize=64)
def valid_set(problem: Problem) -> frozenset[Config]:
    """Return the valid configs of a problem. Cached, since making them took three quarters of a search."""
    return frozenset(valid_configs(problem))
