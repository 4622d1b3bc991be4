"""flashstate tune: what the search asks, finds and keeps, with a stopwatch that needs no GPU."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from flashstate.bench.ops import OPS
from flashstate.bench.timing import MIN_LAUNCHES, Timing
from flashstate.cli import main
from flashstate.launch import Config, Gpu, Problem, choose, interpreted, valid_configs
from flashstate.launch.config import mode_key, table_key
from flashstate.launch.search import Point, neighbours
from flashstate.launch.table import read_table_file
from flashstate.laws import LawBroken
from flashstate.state.formats import PORTABLE_FORMATS
from flashstate.tune import GpuStopwatch, cases_by_problem, tune

GPU = Gpu("a GPU nobody measured", (9, 0))
SHAPE = (16, 1, 64, 128)  # heads, groups, rows, cols
BATCHES = (1, 16, 256)
FORMATS = [("float32", "nearest"), ("float16", "nearest"), ("float16", "stochastic")]
PROBLEMS = list(cases_by_problem(OPS["mamba2"].jobs(FORMATS, BATCHES, (1, 4), SHAPE)))
QUIET = Console(quiet=True)


def lanes_wanted(problem: Problem) -> int:
    return 4 if problem.format == "float32" else 16


def best(problem: Problem) -> Config:
    """The config that the stopwatch below makes fastest: more rows for larger batches, two warps for several tokens."""
    lanes = lanes_wanted(problem)
    warps = 2 if problem.several_tokens else 1
    return Config({16: 1, 256: 2, 4096: 4}[problem.batch_heads] * warps * (32 // lanes), warps, lanes)


def bowl(problem: Problem, config: Config) -> float:
    """A time that grows with the distance from the best config, in steps of a factor of two along every coordinate."""
    goal = best(problem)
    steps = [math.log2(a / b) for a, b in zip(vars(config).values(), vars(goal).values(), strict=True)]
    return 10.0 + sum(map(abs, steps))


class FakeStopwatch:
    """Times by a function, and remembers what it was asked."""

    def __init__(self, time: Callable[[Problem, Config], float] = bowl, last: int | None = None) -> None:
        self.time = time
        self.last = last  # after so many measurements somebody interrupts
        self.prepared: set[Point] = set()
        self.asked: list[Point] = []

    def prepare(self, points: Sequence[Point]) -> None:
        self.prepared.update(points)

    def microseconds(self, problem: Problem, config: Config) -> float:
        if len(self.asked) == self.last:
            raise KeyboardInterrupt
        self.asked.append((problem, config))
        return self.time(problem, config)


def tuned(path: Path, stopwatch: FakeStopwatch, problems: Sequence[Problem] = PROBLEMS, resume: bool = False) -> None:
    tune(problems, stopwatch, GPU, path, resume, QUIET)


def configs_in(path: Path) -> dict[tuple[str, str, int], Config]:
    """Every entry of a table, by key, mode and size."""
    return {
        (key, mode, size): config_at(entry, table.lanes)
        for key, table in read_table_file(path).configs.items()
        for mode, sizes in table.modes.items()
        for size, entry in sizes.items()
    }


def place_of(problem: Problem) -> tuple[str, str, int]:
    return table_key(problem), mode_key(problem), problem.batch_heads


def test_the_search_finds_the_best_config_of_every_mode_and_size(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    tuned(path, FakeStopwatch())
    assert configs_in(path) == {place_of(problem): best(problem) for problem in PROBLEMS}


def test_lanes_serve_all_modes_and_sizes_of_a_format_best_even_where_some_want_others(tmp_path: Path) -> None:
    def time(problem: Problem, config: Config) -> float:
        wanted = 16 if problem.rounding == "stochastic" and problem.batch_heads == 256 else 4
        return 10.0 + abs(math.log2(config.lanes / wanted))

    path = tmp_path / "table.json"
    tuned(path, FakeStopwatch(time))
    assert {config.lanes for config in configs_in(path).values()} == {4}


def test_only_valid_configs_are_measured_each_once_and_after_they_were_prepared(tmp_path: Path) -> None:
    stopwatch = FakeStopwatch()
    tuned(tmp_path / "table.json", stopwatch)
    assert (
        len(stopwatch.asked)
        == len(set(stopwatch.asked))
        < 0.6 * sum(len(valid_configs(problem, lanes)) for problem in PROBLEMS for lanes in problem.lane_choices)
    )
    for problem, config in stopwatch.asked:
        assert config in valid_configs(problem, config.lanes), (problem, config)
        mode = {(table_key(p), mode_key(p), c) for p, c in stopwatch.prepared}
        assert (table_key(problem), mode_key(problem), config) in mode


def test_once_lanes_are_chosen_no_others_are_measured_for_a_format(tmp_path: Path) -> None:
    stopwatch = FakeStopwatch()
    tuned(tmp_path / "table.json", stopwatch)
    for name in ("float32", "float16"):
        asked = [config.lanes for problem, config in stopwatch.asked if problem.format == name]
        chosen = asked[-1]
        last = max(i for i, lanes in enumerate(asked) if lanes != chosen)
        assert chosen == lanes_wanted(next(problem for problem in PROBLEMS if problem.format == name))
        assert set(asked[last + 1 :]) == {chosen}
        assert len(asked) - last > len(PROBLEMS) // 2


def test_differences_that_are_noise_do_not_move_the_search(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    one = [problem for problem in PROBLEMS if problem.format == "float32"]
    stopwatch = FakeStopwatch(lambda problem, config: 10.0 - 0.001 * config.block_rows)
    tuned(path, stopwatch, one)
    lanes = read_table_file(path).configs[table_key(one[0])].lanes
    if lanes == choose(one[0], GPU).lanes:
        assert configs_in(path)[place_of(one[0])] == choose(one[0], GPU)
    assert len(stopwatch.asked) < 20 * len(one)


def test_an_interrupted_run_is_resumed_and_ends_with_the_same_table(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.json", tmp_path / "parts.json"
    everything = FakeStopwatch()
    tuned(whole, everything)
    first = FakeStopwatch(last=2 * len(everything.asked) // 3)
    with pytest.raises(KeyboardInterrupt):
        tuned(parts, first)
    done = configs_in(parts)
    assert 0 < len(done) < len(PROBLEMS)
    second = FakeStopwatch()
    tuned(parts, second, resume=True)
    assert parts.read_text() == whole.read_text()
    assert not {place_of(problem) for problem, _ in second.asked} & done.keys()
    third = FakeStopwatch()
    tuned(parts, third, resume=True)
    assert not third.asked


def test_without_resuming_a_format_is_measured_again_and_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    tuned(path, FakeStopwatch())
    of_format = [problem for problem in PROBLEMS if problem.format == "float32"]
    again = FakeStopwatch(lambda problem, config: float(config.lanes))
    tuned(path, again, of_format)
    assert {problem.format for problem, _ in again.asked} == {"float32"}
    found = configs_in(path)
    assert {found[place_of(problem)].lanes for problem in of_format} == {2}
    others = [problem for problem in PROBLEMS if problem.format != "float32"]
    assert all(found[place_of(problem)] == best(problem) for problem in others)


@pytest.mark.parametrize(("name", "value"), [("gpu", "another GPU"), ("triton", "1.0")])
def test_a_table_measured_elsewhere_is_not_added_to(name: str, value: str, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    tuned(path, FakeStopwatch())
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, name: value}))
    with pytest.raises(ValueError, match=rf"table\.json was measured with {name} {value}, and here is"):
        tuned(path, FakeStopwatch(), resume=True)
    tuned(path, FakeStopwatch())  # replaces all it has
    assert read_table_file(path).header[name] == content[name]


def test_neighbours_are_valid_have_equal_lanes_and_reach_every_config() -> None:
    for problem in PROBLEMS[::4]:
        for lanes in problem.lane_choices:
            valid = valid_configs(problem, lanes)
            reached = {valid[0]}
            for _ in valid:
                reached |= {near for config in reached for near in neighbours(problem, config)}
            assert reached == set(valid)


def test_the_cases_of_the_command_are_every_format_mode_and_size_without_snapshots() -> None:
    jobs = OPS["mamba2"].jobs(PORTABLE_FORMATS, (1, 4), (1, 4), SHAPE)
    cases = cases_by_problem(jobs)
    assert len(cases) == len(PORTABLE_FORMATS) * 2 * 2
    assert all(case.problem == problem for problem, case in cases.items())


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--device", "cpu"], "tune measures kernels on a GPU, and there is none"),
        (["--formats", "float7"], "there is no format 'float7'"),
    ],
)
def test_what_cannot_be_tuned_is_one_line_and_exits_with_2(
    options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *options]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1


@pytest.mark.interpreted
def test_the_stopwatch_times_steps_on_distinct_slots_and_refuses_configs_that_change_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed: list[int] = []

    def run_them(launches: Sequence[Callable[[], object]], replays: int) -> Timing:
        for launch in launches[:2]:
            launch()
        timed.append(len(launches))
        return Timing.of([7.0] * replays)

    monkeypatch.setattr("flashstate.tune.time_launches", run_them)
    monkeypatch.setattr("flashstate.tune.CHECKED_ROWS", 2)
    monkeypatch.setattr("flashstate.bench.timing.COLD_BYTES", 1 << 11)
    cases = cases_by_problem(OPS["mamba2"].jobs([("int8", "stochastic")], (1, 2), (1, 2), (2, 1, 4, 16)))
    cases = {problem: replace(case, x="float32", bc="float32", dt="float32") for problem, case in cases.items()}
    stopwatch = GpuStopwatch(OPS["mamba2"], cases, torch.device("cpu"))
    with interpreted():
        for problem in cases:
            assert stopwatch.microseconds(problem, Config(32, 1, 1)) == 7.0
            assert stopwatch.microseconds(problem, Config(64, 1, 1)) == 7.0
        assert timed == [MIN_LAUNCHES] * 2 * len(cases)
        monkeypatch.setattr(stopwatch._mode(problem)._inputs, "slots", torch.tensor([1, 0], dtype=torch.int32))
        with pytest.raises(LawBroken, match=r"^output with Config\(block_rows=64, num_warps=2"):
            stopwatch.microseconds(problem, Config(64, 2, 1))


@pytest.mark.gpu
def test_a_gpu_is_tuned(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    options = ["--formats", "float32", "int8:stochastic", "--batches", "1", "16", "--output", str(path)]
    assert main(["tune", *options]) == 0
    found = configs_in(path)
    assert len(found) == 2 * 2 * 2
    assert main(["tune", *options, "--resume"]) == 0
    assert configs_in(path) == found


def test_two_numbers_of_several_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="one entry for several tokens"):
        cases_by_problem(OPS["mamba2"].jobs(FORMATS, BATCHES, (2, 4), SHAPE))


def test_a_folder_that_is_not_there_is_refused_before_measuring(tmp_path: Path) -> None:
    stopwatch = FakeStopwatch()
    with pytest.raises(ValueError, match=r"there is no folder .*missing to write table\.json to"):
        tuned(tmp_path / "missing" / "table.json", stopwatch)
    assert not stopwatch.asked
