"""Which tests can run in this process, an interpreter that does not repeat itself, a test on every implementation, and
memory that shows when nobody wrote it."""

import gc
import os
import re
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from importlib import metadata

import implementations
import pytest
import torch

import flashstate
from flashstate.proof import interpreted

gc.disable()  # until tests are collected, which then takes 12 s instead of 15
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
REASONS = {
    "gpu": (torch.cuda.is_available() and not INTERPRETING, "needs a GPU (make test-gpu)"),
    "interpreted": (INTERPRETING, "needs TRITON_INTERPRET=1 (make test)"),
    "compiled": (not INTERPRETING, "needs TRITON_INTERPRET unset (make test)"),
}


def lacks_transformers() -> str | None:
    """Why tests with Transformers cannot be imported, if they cannot: dev has it, machines with a GPU may not."""
    try:
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return "transformers is not installed"
    old = tuple(map(int, re.findall(r"\d+", version)[:2])) < (5, 21)
    return f"transformers {version} is older than 5.21" if old else None


# Files that a run names are collected all the same: those of models are skipped by needs_transformers.py.
collect_ignore_glob = ["test_transformers_*.py", "test_tools_transformers.py"] if lacks_transformers() else []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="which cases laws meet: another seed shows others")
    parser.addoption("--minutes", type=float, default=0, help="hand out no test after so many minutes (0: no limit)")


def pytest_configure(config: pytest.Config) -> None:
    if torch.cuda.is_available() and not INTERPRETING:
        config.pluginmanager.import_plugin("accounting")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if reason := lacks_transformers():
        terminalreporter.line(f"no tests with Transformers: {reason}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker, (possible, reason) in REASONS.items():
            if item.get_closest_marker(marker) and not possible:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Tests and what they import stay to the end: looking through them for garbage took a tenth of many small tests."""
    gc.enable()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # bindings tell of what is not given back at the end


if INTERPRETING:
    from interpreting import spare_the_interpreter

    spare_the_interpreter()


@pytest.fixture(params=implementations.ALL)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where a call runs on each implementation."""
    with interpreted() if request.param == "interpreter" else nullcontext():
        yield torch.device("cuda" if request.param == "gpu" else "cpu")


@pytest.fixture(autouse=True)
def no_faults_of_another_test() -> None:
    """A test that lets slots out of range go unnoticed leaves them in the fault flag."""
    with suppress(IndexError):
        flashstate.check_faults()


@pytest.fixture(autouse=True)
def fresh_memory_holds_nan() -> Iterator[None]:
    """torch.empty gives NaN (or the largest integer), so that a result nobody wrote does not look like one."""
    torch.set_deterministic_debug_mode("warn")  # use_deterministic_algorithms would import all of torch.compile
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.set_deterministic_debug_mode("default")
