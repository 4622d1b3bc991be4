"""tools.reasoned_table: what it reads from machine code, and that what it reckons from that has sense."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from flashstate.launch import Config, Problem
from flashstate.launch.table import NOT_MEASURED, read_table_file

pytestmark = pytest.mark.compiled
PROBLEM = Problem("mamba2_step", 64, 128, "float32", "nearest", 4, 4096)
CONFIG = Config(8, 1, 16)

SASS = """Function:some_kernel
--:-:1:-:1\tLDC R1, c[0x0][0x37c];
LBB0:
--:-:-:Y:4\tFADD R2, R2, R3;
--:-:-:-:a\t@!P1 MUFU.EX2 R2, R2;
02:-:-:-:5\t@P1 BRA LBB0;
--:-:-:-:5\tEXIT;
LBB1:
--:-:-:Y:0\tBRA LBB1;
"""


def test_instructions_of_a_loop_count_as_often_as_it_runs_and_those_behind_the_end_not_at_all() -> None:
    from tools.reasoned_table import cycles_of

    assert cycles_of(SASS, 1) == (8, 1 + 4 + 10 + 5)
    assert cycles_of(SASS, 3) == (3 * 8, 1 + 3 * (4 + 10) + 5)


def test_a_time_grows_with_what_a_launch_has_to_do_and_falls_with_what_there_is_room_for() -> None:
    from tools.reasoned_table import B200, Code, reckoned

    code = Code(registers=64, spilled=0, shared=0, access=16, issue=200, alone=600)
    assert code.programs_at_once(1) == 32
    times = [reckoned(replace(PROBLEM, batch_heads=size), CONFIG, code, B200) for size in (16, 4096, 16384)]
    assert times == sorted(times)
    moved = 2 * 16384 * 64 * 128 * 4
    assert times[-1] > 1e6 * moved / B200.memory_rate


def test_a_table_is_written_from_code_and_says_that_it_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tools import reasoned_table

    few = [Config(4, 1, 8), Config(8, 1, 16)]
    monkeypatch.setattr(reasoned_table, "candidates", lambda problem, gpu: few)
    in_this_process = Mock(Pool=lambda jobs: nullcontext(Mock(imap=map)))
    monkeypatch.setattr("multiprocessing.get_context", lambda how: in_this_process)
    path = tmp_path / "table.json"
    options = ["write", "--only", "mamba2_step 64x128 bfloat16 vector 8, nearest", "--output", str(path)]
    assert reasoned_table.main(options) == 0
    header, configs = read_table_file(path)
    assert (header["gpu"], header["torch"]) == ("NVIDIA B200", torch.__version__)
    assert header["measured"].startswith(NOT_MEASURED)
    assert configs.keys() == {"mamba2_step 64x128 bfloat16 vector 8"}
    (sizes,) = configs["mamba2_step 64x128 bfloat16 vector 8"].values()
    assert sizes.keys() == {16, 64, 256, 1024, 4096, 16384}
    assert set(sizes.values()) <= set(few)
