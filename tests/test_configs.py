"""Launch configs: tables and their files, the nearest entry, the heuristic, overrides."""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import astuple, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tables import H200_TABLE, TABLES, case_of, configs_by_mode, entries_of
from torch import Tensor

import flashstate
from flashstate.cli import main
from flashstate.errors import dtype_name
from flashstate.launch import Config, Gpu, Problem, choose, choose_with_reason, interpreted, override
from flashstate.launch import config as launch_config
from flashstate.launch.config import KNOBS, mode_key, table_key, valid_configs
from flashstate.launch.table import NOT_MEASURED, read_table_file, table_text
from flashstate.ops.at_once import AtOnceProblem
from flashstate.ops.conv1d import ChannelProblem
from flashstate.ops.gated_delta import DeltaProblem, DeltaTokensProblem, delta_kind
from flashstate.ops.gated_delta_replay import DeltaReplayProblem
from flashstate.ops.mamba2 import mamba2_kind
from flashstate.ops.mamba2_replay import ReplayProblem, ReplayTokenProblem, replay_kind
from flashstate.ops.mamba3 import HeadProblem, RankProblem
from flashstate.ops.replaying import AnyReplay, parted
from flashstate.proof import (
    AnyCase,
    Case,
    ConvCase,
    DeltaCase,
    DeltaReplayCase,
    Inputs,
    Mamba3Case,
    Pool,
    ReplayCase,
    make_inputs,
)
from flashstate.proof.laws import require
from flashstate.proof.laws.steps import close_to_float64, make_snapshots
from flashstate.state.formats import FORMATS, PORTABLE_FORMATS
from flashstate.state.signature import ACCESS_BYTES

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
H200 = Gpu("NVIDIA H200", (9, 0))
UNKNOWN, UNKNOWN_BLACKWELL = (Gpu("a GPU nobody measured", (major, 0)) for major in (9, 10))
BY_NAME = {fmt.name: fmt for fmt in FORMATS.values()}
PROBLEM = Problem("mamba2_step", 64, 128, "float32", "nearest", 4, 1024)
every_table = pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)


def widest(cols: int, name: str) -> int:
    """Elements per access of an aligned, dense pool."""
    return math.gcd(cols, ACCESS_BYTES // BY_NAME[name].dtype.itemsize)


def test_the_table_of_the_h200_has_every_format_and_every_form_of_replay() -> None:
    for (name, rounding), several in product(PORTABLE_FORMATS, (False, True)):
        problem = Problem("mamba2_step", 64, 128, name, rounding, widest(128, name), 1024, several)
        assert choose_with_reason(problem, H200)[1].startswith("table"), problem
    for kind in (ReplayProblem, ReplayTokenProblem):
        assert len({mode.op for mode in configs_by_mode(H200_TABLE) if isinstance(mode, kind)}) == 3


@every_table
def test_every_entry_of_a_table_is_valid_and_what_its_problem_gets(path: Path) -> None:
    for mode, configs in configs_by_mode(path).items():
        name = re.sub("at_once(_16)?$|step rank .*", "step", mode.op).split()[0]
        assert callable(getattr(flashstate, name)), mode
        assert mode.rounding in BY_NAME[mode.format].roundings, mode
        along_rows = isinstance(mode, ChannelProblem) or mode.transposed
        assert widest(mode.rows if along_rows else mode.cols, mode.format) % mode.vector == 0, mode
        assert all(type(number) is int for config in configs for number in astuple(config)), mode
        assert configs <= set(valid_configs(mode)), mode
    for problem, config in entries_of(path):
        found = choose_with_reason(problem, Gpu(path.stem.replace("-", " "), (9, 0)))
        assert (found.config, found.reason[:5], found.measured_at) == (config, "table", problem.batch_heads)


@every_table
def test_a_table_says_where_and_when_it_was_measured_if_it_was_and_is_written_a_mode_per_line(
    path: Path,
) -> None:
    table = read_table_file(path)
    assert path.stem == table.header["gpu"].lower().replace(" ", "-")
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d(, .+)?|{NOT_MEASURED}: .+", table.header["measured"])
    assert all(re.match(r"\d+\.\d+", table.header[name]) for name in ("torch", "triton"))
    assert path.read_text() == table_text(table)
    assert len(re.findall("(?m)^.*(?:one|several) token", table_text(table))) == sum(map(len, table.configs.values()))


def test_a_config_of_a_table_that_is_not_measured_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    b200 = Gpu("NVIDIA B200", (10, 0))
    words = {gpu: choose_with_reason(PROBLEM, gpu).reason for gpu in (b200, H200)}
    assert words == {b200: "table of NVIDIA B200, which is not measured", H200: "table of NVIDIA H200"}
    assert main(["info", "--gpu", b200.name, "--capability", "10.0"]) == 0
    assert "Why: table of NVIDIA B200, which is not measured." in " ".join(capsys.readouterr().out.split())


def test_the_example_in_the_document_is_part_of_a_table() -> None:
    document = (Path(__file__).parent.parent / "docs" / "launching.md").read_text(encoding="utf-8")
    key, modes = re.search(r'```text\n"(.+)": \{\n(.+?)```', document, re.DOTALL).groups()
    table = json.loads(H200_TABLE.read_text())["configs"][key]
    shown = json.loads("{" + modes + "}")
    assert len(shown) == len(table)
    for mode, sizes in shown.items():
        assert sizes.items() <= table[mode].items()


def test_every_lookup_in_a_broken_table_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashstate.launch.table.TABLES", tmp_path)
    for old, new, why in (
        (r".*", "[]", "list indices must be"),
        (r".{40}$", "", "Invalid control character"),  # truncated
        (r'"configs"', '"others"', "it has no 'configs'"),
        (r'"measured": "[^"]*"', '"measured": 5', "measured must be text, got 5"),
        (r'"16": \[4,', '"0": [4,', "batch x heads must be from 1 to 2147483647, got 0"),
        (r"\[4, 1, 8\]", "[4, 1]", "entries are batch x heads: [rows per tile, "),
        (r"\[4, 1, 8\]", "[4.0, 1, 8]", "block_rows must be an int, got 4.0"),
    ):
        (tmp_path / "gpu.json").write_text(re.sub(old, new, H200_TABLE.read_text(), count=1, flags=re.DOTALL))
        with pytest.raises(ValueError, match=rf"gpu\.json is not a table of launch configs \({re.escape(why)}"):
            choose_with_reason(PROBLEM, Gpu("GPU", (9, 0)))


MODES = [(mode, configs) for path in TABLES for mode, configs in configs_by_mode(path).items()]


def of_modes(modes: Iterable[tuple[Problem, set[Config]]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("mode", "configs"), [pytest.param(*each, id=f"{table_key(each[0])} {mode_key(each[0])}") for each in modes]
    )


@pytest.mark.interpreted
@of_modes({mode.op: (mode, configs) for mode, configs in MODES}.values())
def test_entries_of_a_table_change_no_byte(mode: Problem, configs: set[Config]) -> None:
    """Of every op a mode, of few rows, which take less time, and of channels whole accesses; on a GPU all of them."""
    small = {"rows": 40 if isinstance(mode, ChannelProblem) else 5}
    if isinstance(mode, AnyReplay):
        small = {"rows": 20, "cols": 32 if mode.cols % 32 == 0 else mode.cols}
    with interpreted():
        require_one_result(replace(mode, **small), configs, CPU)


@pytest.mark.gpu
@of_modes(MODES)
def test_entries_of_a_table_change_no_byte_on_a_gpu(mode: Problem, configs: set[Config]) -> None:
    require_one_result(mode, configs, CUDA)


Stored = tuple[Tensor, Pool]  # the output, and where states were stored


def in_place(inputs: Any, case: AnyCase) -> Stored:
    """A step; of replay by a plan, of four rows, of which some fold and some do not."""
    if isinstance(case.problem, AnyReplay):
        assert set(inputs.folds.tolist()) == {False, True}
    return inputs.step(**{"plan": inputs.plan()} if isinstance(case.problem, AnyReplay) else {}), inputs.state


def without_update(inputs: Inputs, case: AnyCase) -> Stored:
    return inputs.step(update=False), inputs.state


def to_slots(inputs: Inputs, case: AnyCase) -> Stored:
    unread = sorted({*range(case.slots)} - {*inputs.slots.tolist()})
    write = torch.tensor(unread[: case.tokens]).to(inputs.slots)[None]
    return inputs.step(slots=inputs.at(write=write)), inputs.state


def to_snapshots(inputs: Inputs, case: AnyCase) -> Stored:
    snapshots = make_snapshots(case, case.format, case.rounding, inputs.slots.device)
    first_row = torch.zeros_like(inputs.slots)
    return inputs.step(slots=inputs.at(snapshot_rows=first_row), snapshots=snapshots), snapshots


CALLS = {"last": (in_place,), "every": (to_slots, to_snapshots), "none": (without_update,)}


def require_one_result(mode: Problem, configs: set[Config], device: torch.device) -> None:
    """Calls with every config give the bytes of another one; of one with as many lanes in the interpreter, which sums
    over them in numpy's order."""
    x = "bfloat16" if device.type == "cuda" else "float32"
    bases: dict[str, AnyCase] = {
        "mamba2_step": Case(1, 1, 1), "mamba2_at_once": Case(1, 1, 1, bc="float16"),
        "gated_delta": DeltaCase(1, 1, 1, qk="float16"),
        "mamba3": Mamba3Case(1, 1, 1, kv="float16"), "mamba2_replay": ReplayCase(x=x),
        "gated_delta_replay": DeltaReplayCase(qk=x if device.type == "cuda" else "float16"),
        "conv1d": ConvCase(1, parameters=mode.format),
    }  # fmt: skip
    case = case_of(mode, bases, 3)
    assert replace(case.problem, stored=mode.stored, op=mode.op, batch_heads=1) == mode
    inputs, others = make_inputs(case, device), [config for config in valid_configs(mode) if config not in configs]

    @cache
    def result(call: Callable[[Any, AnyCase], Stored], config: Config) -> Stored:
        with override(config), parted() if mode.op.endswith(("keep", "fold")) else nullcontext():
            return call(inputs.fresh(), case)

    for config, call in product(configs, CALLS[mode.stored]):
        other = next(other for other in others if device.type == "cuda" or other.lanes == config.lanes)
        (y, stored), (other_y, other_stored) = result(call, config), result(call, other)
        require.equal_bytes(f"output with {config}, {call.__name__}", y, other_y)
        require.equal_states(f"states stored with {config}, {call.__name__}", stored, other_stored)


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The modes in the table of a GPU, UNKNOWN, under PROBLEM's key: one with entries at three sizes."""
    modes = {mode_key(PROBLEM): {16: Config(4, 1, 32), 256: Config(8, 2, 16), 4096: Config(16, 1, 2)}}
    monkeypatch.setattr(
        launch_config, "load_table", lambda gpu: {table_key(PROBLEM): modes} if gpu == UNKNOWN.name else {}
    )
    launch_config._look_up.cache_clear()
    yield modes
    launch_config._look_up.cache_clear()


TABLE = f"table of {UNKNOWN.name}"


def test_the_nearest_entry_in_ratio_is_chosen(modes: dict[str, Any]) -> None:
    for batch_heads, nearest in ((1, 16), (63, 16), (65, 256), (1023, 256), (1025, 4096), (1 << 20, 4096)):
        found = choose_with_reason(replace(PROBLEM, batch_heads=batch_heads), UNKNOWN)
        assert found == (modes[mode_key(PROBLEM)][nearest], TABLE, nearest)


@pytest.mark.usefixtures("modes")
def test_a_table_speaks_only_for_its_own_gpu_problem_and_mode() -> None:
    assert choose_with_reason(PROBLEM, Gpu("another", (9, 0))).reason.startswith("heuristic: no table")
    for change in (
        {"op": "pool_write"}, {"rows": 32}, {"cols": 64}, {"format": "float16", "vector": 8}, {"vector": 2},
        {"rounding": "stochastic"}, {"several_tokens": True}, {"transposed": True},
    ):  # fmt: skip
        assert choose_with_reason(replace(PROBLEM, **change), UNKNOWN).reason.startswith("heuristic: no table"), change


def test_calls_that_store_every_state_get_entries_of_their_own_or_those_of_calls_that_do_not(
    modes: dict[str, Any],
) -> None:
    several = replace(PROBLEM, several_tokens=True)
    stored, one, other = replace(several, stored="every"), Config(4, 1, 32), Config(8, 2, 32)
    modes[mode_key(several)] = {1024: one}
    assert choose_with_reason(several, UNKNOWN) == (one, TABLE, 1024)
    assert choose_with_reason(stored, UNKNOWN) == (one, f"{TABLE}, for calls that store one state", 1024)
    launch_config._look_up.cache_clear()
    modes[mode_key(stored)] = {1024: other}
    assert choose(several, UNKNOWN) == one
    assert choose_with_reason(stored, UNKNOWN) == (other, TABLE, 1024)


def test_entries_that_no_call_of_their_problem_may_have_are_left_out_and_the_reason_says_so(
    modes: dict[str, Any],
) -> None:
    good = Config(4, 1, 32)
    for bad in (Config(3, 1, 32), Config(4, 1, 3), replace(good, registers=200), Config(64, 1, 32)):
        launch_config._look_up.cache_clear()
        modes[mode_key(PROBLEM)] = {1024: bad, 4096: good}
        assert choose_with_reason(PROBLEM, UNKNOWN) == (good, f"{TABLE}, 1 of its 2 entries unusable", 4096)
        modes[mode_key(PROBLEM)] = {1024: bad}
        launch_config._look_up.cache_clear()
        config, reason, _ = choose_with_reason(PROBLEM, UNKNOWN)
        assert (config, reason[:40]) == (PROBLEM.heuristic(UNKNOWN), "heuristic: no usable entry in the table "), bad


SHAPES = list(product((1, 5, 33, 64, 512), (1, 20, 128, 512)))
SMALL = [shape for shape in SHAPES if max(shape) <= 128]
NEAREST = 0, 0, "int8", "nearest", 1, 1
KINDS = [  # problems of every shape, and of every access that a format may have
    *((replace(PROBLEM, format=name, several_tokens=several), SHAPES)
      for name, several in product(("float32", "int8"), (False, True))),
    (replace(PROBLEM, warp=64), SHAPES),
    (Problem("pool_write", 0, 0, "bfloat16", "nearest", 1, 1, True, transposed=True), SHAPES),
    (DeltaProblem("gated_delta_step", 0, 0, "bfloat16", "stochastic", 1, 1), SHAPES),
    (AtOnceProblem("gated_delta_at_once", *NEAREST, True), SMALL),
    (ReplayTokenProblem("mamba2_replay either", 0, 0, "float32", "nearest", 1, 1), SHAPES),
    *((DeltaReplayProblem(f"gated_delta_replay {form}", *NEAREST, per_channel=form != "fold"), SMALL)
      for form in ("keep", "fold", "either")),
]  # fmt: skip


def test_the_heuristic_gives_a_config_for_every_shape_that_a_table_could_hold() -> None:
    """Fewer programs get smaller tiles, and more tokens loaded together."""
    sizes = (1, 63, 64, 511, 512, 1023, 1024, 1 << 20)
    for (kind, shapes), vector, gpu in product(KINDS, (1, 2, 4, 8, 16), (UNKNOWN, UNKNOWN_BLACKWELL)):
        for rows, cols in shapes:
            if widest(rows if kind.transposed else cols, kind.format) % vector:
                continue
            sized = [replace(kind, rows=rows, cols=cols, vector=vector, batch_heads=size) for size in sizes]
            configs = [choose(problem, gpu) for problem in sized]
            for problem, config in zip(sized, configs, strict=True):
                assert problem.valid(config), (problem, config)
                assert problem.manageable(config), (problem, config)
                assert config.tiles <= 8, (problem, config)
            if type(kind) is Problem:
                grown = [(config.block_rows, -config.tokens_together) for config in configs]
                assert grown == sorted(grown), (sized[0], configs)


def test_the_heuristic_takes_many_tiles_or_few_tokens_where_programs_are_enough_and_lanes_as_sums_cost() -> None:
    shape = 128, 128, "bfloat16", "stochastic", 8
    for kind, op in ((DeltaProblem, "gated_delta_step"), (AtOnceProblem, "gated_delta_at_once")):
        assert [choose(kind(op, *shape, size), UNKNOWN).tiles > 1 for size in (1023, 1024)] == [False, True]
    for several, together in ((False, [1] * 6), (True, [4, 4, 2, 2, 1, 1])):
        sized = (replace(PROBLEM, several_tokens=several, batch_heads=n) for n in (1, 63, 64, 511, 512, 1 << 20))
        assert [choose(problem, UNKNOWN).tokens_together for problem in sized] == together
    for (name, one), several in product((("float32", 32), ("int16", 16), ("int8", 8)), (False, True)):
        problem = replace(PROBLEM, format=name, vector=widest(128, name), several_tokens=several)
        gpus = (UNKNOWN, UNKNOWN_BLACKWELL, UNKNOWN._replace(capability=(12, 0)))
        assert [choose(problem, gpu).lanes for gpu in gpus] == [8 if several else one, 4, 4]


@pytest.mark.parametrize(
    ("change", "config"),
    [
        pytest.param({}, Config(2, 4, 32), id="fewer rows than warps"),
        pytest.param({}, Config(12, 4, 32), id="rows not a power of two"),
        pytest.param({}, Config(16, 1, 12), id="lanes not a power of two"),
        pytest.param({}, Config(16, 2, 2), id="warps with fewer rows than they cover"),
        pytest.param({}, Config(4096, 1, 32), id="more rows than any tile"),
        pytest.param({}, Config(64, 16, 32), id="more warps than any program"),
        pytest.param({"cols": 16}, Config(8, 1, 8), id="more lanes than a row has accesses"),
        pytest.param({"vector": 16}, Config(2, 1, 8), id="a warp with fewer rows of bytes than it covers"),
        pytest.param({"transposed": True}, Config(8, 1, 8), id="a warp with fewer rows than it accesses"),
        pytest.param({"transposed": True}, Config(32, 1, 8), id="a warp with more rows than it accesses"),
        pytest.param({"transposed": True}, Config(64, 1, 4), id="fewer columns than a Philox call needs"),
    ],
)
def test_override_refuses_a_config_that_would_change_the_order_of_sums(change: dict[str, Any], config: Config) -> None:
    problem = replace(PROBLEM, **change)
    assert not problem.valid(config)
    with override(config), pytest.raises(ValueError, match=r"^Config.* is not one of the valid configs of Problem"):
        choose(problem, UNKNOWN)


SHAPE = 128, 128, "bfloat16", "nearest", 8, 64
KNOBS_OF: dict[str, tuple[Problem, str, set[int]]] = {  # what a program does several of at once, and how many
    "one token": (Problem("mamba2_step", *SHAPE), "tokens_together", {1}),
    "several": (Problem("mamba2_step", *SHAPE, True), "tokens_together", {1, 2, 4}),
    "channels": (ChannelProblem("conv1d_step", *SHAPE, True), "tokens_together", {1, 2, 4, 8}),
    "delta": (DeltaProblem("gated_delta_step", *SHAPE), "tiles", {1, 2, 4, 8, 16}),
    "delta, several": (DeltaTokensProblem("gated_delta_step", *SHAPE, True), "tokens_together", {1, 2}),
    "at once": (AtOnceProblem("gated_delta_at_once", *SHAPE, True), "tiles", {1, 2, 4, 8}),
    "rank 1": (HeadProblem("mamba3_step rank 1", *SHAPE), "ahead", {0, 64, 128, 256, 512}),
    "rank 4": (RankProblem("mamba3_step rank 4", *SHAPE), "ahead", {0, 64, 128, 256, 512}),
    "replay": (ReplayProblem("mamba2_replay keep", *SHAPE, True), "tiles", {1, 2, 4, 8, 16}),
    "delta replay": (DeltaReplayProblem("gated_delta_replay keep", *SHAPE, True), "tiles", {1, 2, 4, 8, 16}),
    "replay of one token": (ReplayTokenProblem("mamba2_replay keep", *SHAPE), "tiles", {1, 2, 4, 8, 16}),
}


def test_configs_of_a_problem_have_one_knob_and_no_other() -> None:
    for what, (problem, knob, values) in KNOBS_OF.items():
        configs = valid_configs(problem)
        assert problem.knob == knob
        assert {getattr(config, knob) for config in configs} == values, what
        if isinstance(problem, DeltaProblem | AtOnceProblem) and knob == "tiles":
            assert all(config.tiles * config.block_rows <= 128 for config in configs)
        for other in KNOBS.keys() - {knob}:
            assert not any(problem.valid(replace(config, **{other: 4})) for config in configs), (what, other)


def test_overrides_nest_and_are_undone_by_an_exception() -> None:
    before = choose(PROBLEM, UNKNOWN)
    with override(Config(4, 4, 32)):
        with override(Config(8, 2, 32)):
            assert choose(PROBLEM, UNKNOWN) == Config(8, 2, 32)
        assert choose_with_reason(PROBLEM, UNKNOWN) == (Config(4, 4, 32), "override", None)
        with pytest.raises(KeyError), override(Config(8, 2, 32)):
            raise KeyError
        assert choose(PROBLEM, UNKNOWN) == Config(4, 4, 32)
    assert choose(PROBLEM, UNKNOWN) == before


@pytest.mark.interpreted
@pytest.mark.parametrize(("name", "cols"), [("float32", 1024), ("int8", 60)])
def test_results_are_as_accurate_however_many_lanes_share_a_row(name: str, cols: int) -> None:
    """The interpreter sums over lanes in numpy's order, so they differ in their last bits there."""
    case = Case(batch=1, heads=1, groups=1, rows=5, cols=cols, format=name)
    for lanes in case.problem.lane_choices:
        config = next(config for config in valid_configs(case.problem) if config.lanes == lanes)
        with interpreted(), override(config):
            close_to_float64(case, CPU)


@pytest.mark.parametrize(
    "implementation",
    [pytest.param("interpreter", marks=pytest.mark.interpreted), pytest.param("gpu", marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_a_place_without_a_token_leaves_every_kind_of_value_as_it_is(packed: bool, implementation: str) -> None:
    """At most three tokens in groups of four: what the others do must not show."""
    on_gpu, specials = implementation == "gpu", [-0.0, torch.inf, torch.nan]
    case = Case(4, *((16, 1, 64, 128) if on_gpu else (1, 1, 4, 16)), tokens=3, packed=packed)
    inputs = make_inputs(case, CUDA if on_gpu else CPU)
    for i, slot in enumerate(inputs.slots.tolist()):
        inputs.state.data[slot] = specials[i % 3]
    inputs.arguments["x"].zero_()
    inputs.arguments["B"].fill_(-1.0)  # adds -0.0, which leaves -0.0
    config = next(config for config in valid_configs(case.problem) if config.tokens_together == 4)
    results = []
    for together in (1, 4):
        run = inputs.fresh()
        with nullcontext() if on_gpu else interpreted(), override(replace(config, tokens_together=together)):
            run.step()
        results.append(run.state.data.view(torch.int32))
    assert torch.equal(*results)
    assert (results[0][inputs.slots[0]] == -(1 << 31)).all()


def test_tables_hold_limits_of_registers_only_where_they_make_a_difference() -> None:
    for rounding, several in product(("nearest", "stochastic"), (False, True)):
        problem = replace(PROBLEM, format="float16", vector=8, rounding=rounding, several_tokens=several)
        limits = {config.registers for config in valid_configs(problem)}
        assert limits == ({0, 128} if rounding == "stochastic" else {0})
        limited = Config(16, 1, 8, tokens_together=4, registers=128)
        assert problem.valid(limited)  # an override may be around other calls
        assert not problem.valid(replace(limited, tokens_together=3))
        assert not problem.valid(replace(limited, registers=100))


def test_rank_one_of_mamba3_has_no_chunks_with_a_column_for_every_thread_but_the_narrowest() -> None:
    for name in ("float32", "bfloat16", "int8"):
        problem = Mamba3Case(1, 1, 1, 64, 128, rank=1, format=name).problem
        configs = [problem.heuristic(H200), *valid_configs(problem)]
        wide = [config for config in configs if problem.chunk(config.lanes) >= 32 * config.num_warps]
        assert all(config.lanes == problem.lane_choices[0] and config.num_warps == 1 for config in wide)
        assert len({config.lanes for config in configs}) > 2


def test_more_than_eight_tokens_at_once_have_configs_of_their_own() -> None:
    assert mamba2_kind(True, 8) == (AtOnceProblem, "mamba2_at_once")
    assert mamba2_kind(True, 9) == (AtOnceProblem, "mamba2_at_once_16")
    assert delta_kind(True, True, 8) == (AtOnceProblem, "gated_delta_at_once")
    assert delta_kind(True, True, 9) == (AtOnceProblem, "gated_delta_at_once_16")


def test_tensor_cores_replay_all_but_one_token_of_dense_calls_on_float32_states_with_short_windows() -> None:
    calls = product((1, 2, 16), map(dtype_name, FORMATS), (False, True), (1, 16, 17, 64))
    assert {call for call in calls if replay_kind(*call) is ReplayTokenProblem} == {
        (1, "float32", False, window) for window in (1, 16)
    }


def test_an_entry_of_another_kind_under_the_same_key_is_passed_over() -> None:
    """One token of float32 states goes through tensor cores where the window is long; entries are of those without."""
    for form, kind in product(("either", "keep", "fold"), (ReplayProblem, ReplayTokenProblem)):
        problem = kind(f"mamba2_replay {form}", 64, 128, "float32", "nearest", 4, 640)
        assert problem.valid(choose(problem, H200))
