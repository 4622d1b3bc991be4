"""flashstate tune: what the search asks, finds and keeps, with a stopwatch that needs no GPU."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path

import pytest
import torch
from benching import Clock
from rich.console import Console

from flashstate import Slots
from flashstate.bench.jobs import BenchedOp, Grid, Job, Stored
from flashstate.bench.limit import TimeLimit
from flashstate.bench.ops import OPS
from flashstate.bench.quick import quick_cells
from flashstate.bench.timing import MIN_LAUNCHES, Timing
from flashstate.cli import main
from flashstate.launch import Config, Gpu, Machine, Problem, choose, interpreted, valid_configs
from flashstate.launch.config import TensorCoreProblem, mode_key, table_key
from flashstate.launch.environment import pretending
from flashstate.launch.search import Point, neighbours, valid_set
from flashstate.launch.table import NOT_MEASURED, read_table_file, table_name
from flashstate.proof import Case
from flashstate.proof.laws import LawBroken
from flashstate.state.formats import PORTABLE_FORMATS
from flashstate.tune import GpuStopwatch, jobs_by_problem, quick_groups, today, tune, tune_quick, with_variants

GPU = Gpu("a GPU nobody measured", (9, 0))
BATCHES = (1, 16, 256)
FORMATS = [("float32", "nearest"), ("float16", "nearest"), ("float16", "stochastic")]
GRID = Grid(FORMATS, (1, 4), batches=BATCHES)
PROBLEMS = list(jobs_by_problem(OPS["mamba2"].jobs([GRID])))
FEW = [problem for problem in PROBLEMS if problem.batch_heads == 256]
QUIET = Console(quiet=True)


def best(problem: Problem) -> Config:
    """The config that the stopwatch below makes fastest: more rows for larger batches, fewer lanes, two warps and two
    tokens together for several, fewer registers for stochastic rounding."""
    lanes, warps, together = (8, 2, 2) if problem.several_tokens else (16, 1, 1)
    rows = {16: 1, 256: 2, 4096: 4}[problem.batch_heads] * warps * (32 // lanes)
    return Config(rows, warps, lanes, together, registers=0 if problem.rounding == "nearest" else 128)


def steps_between(one: Config, other: Config) -> float:
    """Factors of two along every coordinate; registers are one step apart."""
    pairs = zip(astuple(one)[:-2], astuple(other)[:-2], strict=True)
    return sum(abs(math.log2(a / b)) for a, b in pairs) + (one.registers != other.registers)


def bowl(problem: Problem, config: Config) -> float:
    """A time that grows with the distance from the best config."""
    return 10.0 + steps_between(config, best(problem))


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
        (key, mode, size): config
        for key, modes in read_table_file(path).configs.items()
        for mode, sizes in modes.items()
        for size, config in sizes.items()
    }


def place_of(problem: Problem) -> tuple[str, str, int]:
    return table_key(problem), mode_key(problem), problem.batch_heads


def test_the_search_finds_the_best_configs_with_few_measurements_of_valid_ones_that_were_prepared(
    tmp_path: Path,
) -> None:
    path, stopwatch = tmp_path / "table.json", FakeStopwatch()
    tuned(path, stopwatch)
    assert configs_in(path) == {place_of(problem): best(problem) for problem in PROBLEMS}
    assert len(stopwatch.asked) == len(set(stopwatch.asked)) < 12 * len(PROBLEMS)
    assert all(config in valid_set(problem) for problem, config in stopwatch.asked)
    asked, prepared = ({(*place_of(p)[:2], config) for p, config in of} for of in (stopwatch.asked, stopwatch.prepared))
    assert asked <= prepared
    assert len(prepared) < 1.3 * len(asked), "little is compiled in vain"


def test_differences_that_are_noise_do_not_move_the_search(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    tuned(path, FakeStopwatch(lambda problem, config: 10.0 - 0.0005 * config.block_rows))
    smallest = [problem for problem in PROBLEMS if problem.batch_heads == 16]
    assert all(configs_in(path)[place_of(problem)] == choose(problem, GPU) for problem in smallest)


def test_a_size_starts_where_the_smaller_one_ended(tmp_path: Path) -> None:
    path, goal = tmp_path / "table.json", Config(64, 8, 4)
    of_mode = [problem for problem in PROBLEMS if place_of(problem)[1] == "nearest, several tokens"]
    of_mode = [problem for problem in of_mode if problem.format == "float32"]

    def time(problem: Problem, config: Config) -> float:
        """A slope leads the smallest size to the goal, and none the others."""
        return 10.0 + min(steps_between(config, goal), 100.0 if problem == of_mode[0] else 1.0)

    assert all(steps_between(choose(problem, GPU), goal) > 2 for problem in of_mode)
    tuned(path, FakeStopwatch(time), of_mode)
    assert set(configs_in(path).values()) == {goal}


def test_many_tiles_are_found_where_few_are_slower_than_one(tmp_path: Path) -> None:
    path, grid = tmp_path / "table.json", Grid([("int8", "nearest")], (1,), batches=(4,))
    (problem,) = jobs_by_problem(OPS["gated_delta"].jobs([grid]))
    now = choose(problem, GPU)
    assert now.tiles == 1

    def time(problem: Problem, config: Config) -> float:
        return {1: 10.0, 2: 12.0, 4: 11.0, 8: 9.0, 16: 9.5}[config.tiles] + (replace(config, tiles=1) != now)

    tuned(path, FakeStopwatch(time), [problem])
    assert configs_in(path)[place_of(problem)] == replace(now, tiles=8)


def test_an_interrupted_run_is_resumed_and_ends_with_the_same_table(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.json", tmp_path / "parts.json"
    everything, first, second = FakeStopwatch(), FakeStopwatch(), FakeStopwatch()
    tuned(whole, everything, FEW)
    first.last = 2 * len(everything.asked) // 3
    with pytest.raises(KeyboardInterrupt):
        tuned(parts, first, FEW)
    done = configs_in(parts)
    assert 0 < len(done) < len(FEW)
    tuned(parts, second, FEW, resume=True)
    assert parts.read_text() == whole.read_text()
    assert not {place_of(problem) for problem, _ in second.asked} & done.keys()


def test_without_resuming_entries_are_measured_again_and_others_stay(tmp_path: Path) -> None:
    path, again = tmp_path / "table.json", FakeStopwatch(lambda problem, config: float(config.lanes))
    tuned(path, FakeStopwatch(), FEW[:3])
    tuned(path, again, FEW[:1])
    assert {problem for problem, _ in again.asked} == {FEW[0]}
    first, *others = (configs_in(path)[place_of(problem)] for problem in FEW[:3])
    assert first.lanes == min(FEW[0].lane_choices)
    assert others == list(map(best, FEW[1:3]))


def test_a_table_measured_elsewhere_is_not_added_to_and_nothing_stays_of_one_that_is_not_measured(
    tmp_path: Path,
) -> None:
    path = tmp_path / "table.json"
    tuned(path, FakeStopwatch(), FEW[:2])
    content = json.loads(path.read_text())
    for name, value in (("gpu", "another GPU"), ("triton", "1.0")):
        path.write_text(json.dumps({**content, name: value}))
        with pytest.raises(ValueError, match=rf"table\.json was measured with {name} {value}, and here is"):
            tuned(path, FakeStopwatch(), FEW[:2], resume=True)
    path.write_text(json.dumps({**content, "measured": f"{NOT_MEASURED}: reasoned", "triton": "1.0"}))
    tuned(path, FakeStopwatch(), FEW[:1], resume=True)
    assert configs_in(path).keys() == {place_of(FEW[0])}
    assert read_table_file(path).header["measured"] == today()
    with pytest.raises(ValueError, match=r"there is no folder .*missing to write table\.json to"):
        tuned(tmp_path / "missing" / "table.json", FakeStopwatch())


def test_a_quick_run_keeps_its_time_says_how_far_it_came_and_goes_on_there(tmp_path: Path) -> None:
    path, asked = tmp_path / "table.json", list[Problem]()

    def stopwatch(op: BenchedOp, jobs: Mapping[Problem, Job]) -> FakeStopwatch:
        return FakeStopwatch(lambda problem, config: (asked.append(problem), float(config.lanes))[1])

    def run(seconds: float) -> str:
        return tune_quick(groups, stopwatch, GPU, path, TimeLimit(seconds, Clock()))

    with pretending(Machine(GPU, "sm_89")):
        of_ops = quick_groups(quick_cells(torch.device("cpu")))
    assert {op.name for op, _ in of_ops} == {"mamba2", "gated_delta", "conv1d", "mamba3"}, "those that can be tuned"
    groups = [of_ops[0], *(group for group in of_ops if group[0].name == "conv1d")]
    entries = len({place_of(problem) for _, by_problem in groups for problem in by_problem})
    assert run(2.5).startswith(f"2 of {entries} entries of --quick are there, after ")
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d, 2 of {entries} entries.*", read_table_file(path).header["measured"])
    assert configs_in(path).keys() == {*map(place_of, list(groups[0][1])[:2])} == {*map(place_of, asked)}
    before = asked.copy()
    asked.clear()
    assert run(1e6).startswith(f"{entries} of {entries} entries")
    assert not {*map(place_of, before)} & {*map(place_of, asked)}
    assert len(configs_in(path)) == entries
    content = path.read_text().replace(today(), "2001-02-03")
    path.write_text(content)
    run(1e6)
    assert path.read_text() == content, "nothing was found, so nothing was measured today"


def test_a_quick_run_writes_the_table_where_the_library_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(GPU, "sm_89")
    monkeypatch.setattr("flashstate.commands.find_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: pretending(machine))
    monkeypatch.setattr("flashstate.tune.machine_of", lambda device: machine)
    monkeypatch.setattr("flashstate.bench.quick.uses_kernels", lambda device: True)
    monkeypatch.setattr("flashstate.tune.TABLES", tmp_path)
    monkeypatch.setattr("flashstate.tune.GpuStopwatch", lambda op, jobs, device: FakeStopwatch(lambda *point: 1.0))
    assert main(["tune", "conv1d", "--quick"]) == 0
    assert {key.split()[0] for key, *_ in configs_in(tmp_path / table_name(GPU.name))} == {"conv1d_step"}
    assert "6 of 6 entries of --quick are there" in " ".join(capsys.readouterr().out.split())
    assert main(["tune", "mamba2_replay", "--quick"]) == 2
    assert "mamba2_replay has no configs to tune" in " ".join(capsys.readouterr().err.split())
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert main(["tune", "conv1d", "--quick"]) == 2
    assert "cannot be written to: --output FILE writes the table elsewhere" in " ".join(capsys.readouterr().err.split())


def test_neighbours_are_valid_and_reach_every_config_from_every_other() -> None:
    for problem in (FEW[0], FEW[-1]):
        around = {config: neighbours(problem, config) for config in valid_configs(problem)}
        back = {config: [other for other, near in around.items() if config in near] for config in around}
        for ways in (around, back):  # one reaches all, and all reach that one
            reached = new = {next(iter(around))}
            while new:
                new = {near for config in new for near in ways[config]} - reached
                reached = reached | new
            assert reached == around.keys()


def test_jobs_of_all_ways_to_call_an_op_are_tuned_once_per_entry() -> None:
    op = OPS["gated_delta"]
    jobs = with_variants(op, op.jobs(op.tuned_grids))
    assert len(jobs_by_problem(jobs)) == len(jobs) == len(PORTABLE_FORMATS) * 6 * 5  # modes, and batch sizes
    assert {isinstance(problem, TensorCoreProblem) for problem in jobs_by_problem(jobs)} == {False, True}
    with pytest.raises(ValueError, match="one entry for several tokens"):
        jobs_by_problem(OPS["mamba2"].jobs([replace(GRID, tokens=(2, 4))]))


@pytest.mark.interpreted
def test_the_stopwatch_times_both_index_types_and_refuses_configs_that_change_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index_types: list[torch.dtype] = []

    def run_two(launches: Sequence[Callable[[], object]], replays: int, flush: bool) -> Timing:
        assert len(launches) == MIN_LAUNCHES
        for launch in launches[:2]:
            launch()
            (slots,) = (cell.cell_contents for cell in launch.__closure__ if isinstance(cell.cell_contents, Slots))
            index_types.append(slots.read.dtype)
        return Timing.of([7.0] * replays)

    monkeypatch.setattr("flashstate.tune.time_launches", run_two)
    monkeypatch.setattr("flashstate.tune.CHECKED_ROWS", 2)
    for module in ("timing", "measure"):
        monkeypatch.setattr(f"flashstate.bench.{module}.COLD_BYTES", 1 << 10)
    case = Case(1, 1, 1, 4, 16, format="int8", rounding="stochastic", slots=4)
    forms: list[tuple[int, Stored]] = [(0, "last"), (2, "every")]
    jobs = jobs_by_problem([Job("mamba2", replace(case, tokens=tokens), stored) for tokens, stored in forms])
    stopwatch = GpuStopwatch(OPS["mamba2"], jobs, torch.device("cpu"))
    with interpreted():
        for problem in jobs:
            assert stopwatch.microseconds(problem, Config(32, 1, 1)) == 7.0
            assert stopwatch.microseconds(problem, Config(64, 1, 1)) == 7.0
            inputs = stopwatch._mode(problem)._inputs
            assert inputs.state.seed is not None
            inputs.state.seed.add_(1)  # other random bits change stored states and no output
            with pytest.raises(LawBroken, match=r"^data of states stored with Config\(block_rows=64, num_warps=2"):
                stopwatch.microseconds(problem, Config(64, 2, 1))
            inputs.slots = inputs.slots.flip(0)
            with pytest.raises(LawBroken, match=r"^output with Config\(block_rows=64, num_warps=2"):
                stopwatch.microseconds(problem, Config(64, 2, 1))
    assert index_types == [torch.int32, torch.int64] * 2 * len(jobs)


@pytest.mark.gpu
def test_a_gpu_is_tuned(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    options = ["--formats", "int8:stochastic", "--tokens", "1", "--batches", "16", "--output", str(path)]
    assert main(["tune", *options]) == 0
    found = configs_in(path)
    assert len(found) == 1
    assert main(["tune", *options, "--resume"]) == 0
    assert configs_in(path) == found
    assert main(["tune", "mamba2", "--quick", "--seconds", "5", "--output", str(path)]) == 0
    assert configs_in(path).keys() > found.keys()
    assert re.search(r", \d+ of \d+ entries of --quick are there", read_table_file(path).header["measured"])
