"""Fixtures of the tests that need vLLM (make test-vllm)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests_vllm.engine import RESULTS
from tests_vllm.models import checkpoint

Engine = dict[str, Any]  # of which family, with which settings, for which work


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoints of tiny models, by family."""
    folder = tmp_path_factory.mktemp("models")
    return lambda family: checkpoint(family, folder)


@pytest.fixture(scope="session")
def serve(models: Callable[[str], Path]) -> Callable[..., tuple[list[dict[str, Any]], str]]:
    """Start engines in a process of their own; what each gave, and what was logged."""
    known: dict[str, tuple[list[dict[str, Any]], str]] = {}

    def serve(*engines: Engine, **environment: str) -> tuple[list[dict[str, Any]], str]:
        given = [{**engine, "model": str(models(engine["model"]))} for engine in engines]
        order = json.dumps(given)
        key = order + json.dumps(environment)
        if key not in known:
            known[key] = _served(order, environment)
        return known[key]

    return serve


def _served(order: str, environment: dict[str, str]) -> tuple[list[dict[str, Any]], str]:
    command = [sys.executable, "-m", "tests_vllm.engine", order]
    ran = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=900, check=False
    )
    log = ran.stdout + ran.stderr
    lines = [line for line in ran.stdout.splitlines() if line.startswith(RESULTS)]
    return (json.loads(lines[-1].removeprefix(RESULTS)) if lines else []), log
