"""Flags of vLLM that select flashstate, and configurations that travel to processes which have loaded no plugin yet."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

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
config = EngineArgs.from_cli_args(parser.parse_args(sys.argv[1:])).create_engine_config()
print(config.mamba_config.backend.name, config.additional_config)
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
    chosen = ("--model", model, "--skip-tokenizer-init", "--additional-config", options)
    printed = ran(PARSES, *chosen, "--mamba-backend", "flashstate")
    assert printed == "FLASHSTATE {'flashstate': {'state': 'int8'}}"
    with pytest.raises(AssertionError, match="Unknown Mamba SSU backend"):
        ran(PARSES, *chosen, "--mamba-backend", "flashlight")
