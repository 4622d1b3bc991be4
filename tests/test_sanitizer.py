"""compute-sanitizer finds nothing in kernels whose programs share what they overwrite."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SANITIZER = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"]))
TESTS = Path(__file__).parent


@pytest.mark.gpu
@pytest.mark.skipif(SANITIZER is None, reason="needs compute-sanitizer, which comes with CUDA")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_mamba3_step_is_clean(tool: str) -> None:
    assert SANITIZER is not None
    command = [SANITIZER, "--tool", tool, "--error-exitcode", "9", sys.executable, str(TESTS / "sanitized_mamba3.py")]
    path = os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "0 errors" in done.stdout or "0 hazards" in done.stdout, done.stdout[-4000:]
