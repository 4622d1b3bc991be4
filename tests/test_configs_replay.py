"""Entries of launch tables for replay: every one gives the bytes of another config, in the form it is for."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from tables import TABLES, configs_by_mode

from flashstate.errors import dtype_name
from flashstate.launch import (
    AnyReplay,
    Config,
    Gpu,
    ReplayProblem,
    ReplayTokenProblem,
    choose,
    interpreted,
    override,
    replay_kind,
    valid_configs,
)
from flashstate.launch.config import mode_key, table_key
from flashstate.ops import mamba2_replay as module
from flashstate.proof.cases.mamba2_replay import ReplayCase
from flashstate.proof.laws.require import require_equal_bytes, require_equal_states
from flashstate.state.formats import FORMATS

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
UNKNOWN = Gpu("unknown", (9, 0))
MODES = [
    (mode, configs) for path in TABLES for mode, configs in configs_by_mode(path).items() if isinstance(mode, AnyReplay)
]
every_mode = pytest.mark.parametrize(
    ("mode", "configs"), MODES, ids=[f"{table_key(mode)} {mode_key(mode)}" for mode, _ in MODES]
)


def test_the_tables_have_every_form_of_replay() -> None:
    for kind in (ReplayProblem, ReplayTokenProblem):
        ops = {mode.op for mode, _ in MODES if isinstance(mode, kind)}
        assert ops == {f"mamba2_replay {form}" for form in ("either", "keep", "fold")}


@pytest.mark.parametrize("form", ["either", "keep", "fold"])
def test_the_heuristic_gives_one_token_a_valid_config_for_every_shape(form: str) -> None:
    for rows, cols, vector, size in product(
        (1, 5, 16, 33, 64, 200), (1, 16, 20, 128, 500, 512), (1, 2, 4), (1, 1 << 20)
    ):
        problem = ReplayTokenProblem(f"mamba2_replay {form}", rows, cols, "float32", "nearest", vector, size)
        config = choose(problem, UNKNOWN)
        assert problem.valid(config), (problem, config)
        assert problem.manageable(config), (problem, config)
        assert (config.together > 1) == (form == "keep" and size > 1), (problem, config)


def test_tensor_cores_replay_all_but_one_token_of_dense_calls_on_float32_states_with_short_windows() -> None:
    calls = product((1, 2, 16), map(dtype_name, FORMATS), (False, True), (1, 16, 17, 64))
    assert {call for call in calls if replay_kind(*call) is ReplayTokenProblem} == {
        (1, "float32", False, window) for window in (1, 16)
    }


def require_one_result(mode: AnyReplay, configs: set[Config], device: torch.device, x: str) -> None:
    """Four rows, of which some fold and some do not, in two heads: with every config, and with the first other one; of
    as many lanes in the interpreter, which sums over them in numpy's order."""
    tokens = 3 if mode.several_tokens else 0
    case = ReplayCase(rows=mode.rows, cols=mode.cols, format=mode.format, rounding=mode.rounding, x=x, tokens=tokens)
    assert replace(case.problem, op=mode.op, batch_heads=1) == mode
    inputs = case.make_inputs(device)
    assert set(inputs.folds.tolist()) == {False, True}
    others = [config for config in valid_configs(mode) if config not in configs]
    for config in configs:
        got, want = inputs.fresh(), inputs.fresh()
        with override(next(other for other in others if device.type == "cuda" or other.lanes == config.lanes)):
            y_want = want.step(plan=want.plan())
        with override(config):
            y = got.step(plan=got.plan())
        require_equal_bytes(f"output with {config}", y, y_want)
        require_equal_states(f"the pool with {config}", got.state, want.state)


@pytest.fixture
def in_its_form(mode: AnyReplay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with a plan start the kernel that decides for every row, or the two others."""
    monkeypatch.setattr(module, "SMALL", 1 << 31 if mode.op.endswith("either") else 0)


@pytest.mark.interpreted
@pytest.mark.usefixtures("in_its_form")
@every_mode
def test_entries_of_a_table_change_no_byte(mode: AnyReplay, configs: set[Config]) -> None:
    with interpreted():
        require_one_result(
            replace(mode, rows=20, cols=32 if mode.cols % 32 == 0 else mode.cols), configs, CPU, "float32"
        )


@pytest.mark.gpu
@pytest.mark.usefixtures("in_its_form")
@every_mode
def test_entries_of_a_table_change_no_byte_on_a_gpu(mode: AnyReplay, configs: set[Config]) -> None:
    require_one_result(mode, configs, CUDA, "bfloat16")
