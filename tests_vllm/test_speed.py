"""The tool that measures the speed of an engine checks them, and prints a line for each number of requests."""

from __future__ import annotations

import csv
import os
import subprocess
import sys

import pytest

from tests_vllm.oldest import is_installed
from tools.vllm_speed import COLUMNS_OF_CSV


@pytest.mark.skipif(is_installed(), reason="the tool does not import what stands in for what is compiled")
def test_a_speed_is_printed_with_the_share_of_tokens_that_a_prefill_finds() -> None:
    small = ["--layers", "1", "--hidden", "128", "--requests", "2", "--eager", "--state", "float16"]
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, "-m", "tools.vllm_speed", *small]
    ran = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    lines = ran.stdout.splitlines()
    lines = lines[lines.index(COLUMNS_OF_CSV) :]
    (row,) = csv.DictReader(line for line in lines if line.count(",") == COLUMNS_OF_CSV.count(","))
    assert (row["states"], row["requests"]) == ("float16", "2")
    assert 0.5 < float(row["as_prefill"]) <= 1
    assert float(row["ms_per_decode_step"]) > 0
