"""Flags of vLLM that select flashstate, and configurations that travel to processes which have loaded no plugin yet."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

PICKLES = """
import pickle, sys
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.config.mamba import MambaBackendEnum, MambaConfig
config = MambaConfig(backend="flashstate")
assert pickle.loads(pickle.dumps(MambaBackendEnum.TRITON)) is MambaBackendEnum.TRITON
print(pickle.dumps(config).hex())
"""
LOADS = """
import pickle, sys
print(pickle.loads(bytes.fromhex(sys.argv[1])).backend)
"""
PARSES = """
import sys
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
given = EngineArgs.from_cli_args(parser.parse_args(sys.argv[1:]))
print(given.mamba_backend, given.additional_config)
"""


def ran(program: str, *arguments: str) -> str:
    """The last line that a program prints."""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_a_configuration_travels_to_a_process_without_plugins() -> None:
    assert ran(LOADS, ran(PICKLES)) == "MambaBackendEnum.FLASHSTATE"


def test_the_command_line_selects_it(models: Callable[[str], Path]) -> None:
    options = '{"flashstate": {"state": "int8"}}'
    model = str(models("mamba2"))
    printed = ran(PARSES, "--model", model, "--mamba-backend", "flashstate", "--additional-config", options)
    assert printed == "flashstate {'flashstate': {'state': 'int8'}}"
