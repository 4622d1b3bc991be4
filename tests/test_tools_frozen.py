"""tools.frozen_launches: it freezes what calls launch, and tells where that has changed."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.compiled
A_FEW, ONE = ", a tree", "pool 5x20 float16 nearest, read"  # names of calls
Main = Callable[..., int]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Main:
    """The command, whose module changes the environment where it is imported."""
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")
    tool = importlib.import_module("tools.frozen_launches")
    return lambda *given: tool.main(list(map(str, given)))


def launches_in(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text(encoding="utf-8"))["launches"]


def change(file: Path, field: str, **values: Any) -> None:
    """Make the first launch of a file, and it alone, another one."""
    content = json.loads(file.read_text(encoding="utf-8"))
    content["launches"][0][field].update(values)
    file.write_text(json.dumps(content), encoding="utf-8")


def test_launches_equal_their_own_file_until_one_changes(
    main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "launches.json"
    assert main("write", file, "--no-compile", "--only", A_FEW) == 0
    first, *others = launches_in(file)
    assert len(others) > 3
    assert all(A_FEW in line["call"] and line["kernel"] and line["constants"] for line in (first, *others))
    assert main("compare", file, "--no-compile", "--only", A_FEW) == 0
    assert capsys.readouterr().out == f"{1 + len(others)} launches are equal, 0 differ\n"

    rows = first["constants"]["BLOCK_ROWS"]
    change(file, "constants", BLOCK_ROWS=rows + 1)
    assert main("compare", file, "--no-compile", "--only", A_FEW) == 1
    told = f"{first['call']}: constants: BLOCK_ROWS {rows + 1} -> {rows}\n{len(others)} launches are equal, 1 differ\n"
    assert capsys.readouterr().out == told


def test_a_call_is_compiled_on_one_architecture_and_hashed(
    main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "launches.json"
    assert main("write", file, "--jobs", 1, "--only", ONE) == 0
    (hashed,) = [line for line in launches_in(file) if "ptx" in line]
    assert len(hashed["ttir"]) == len(hashed["ptx"]) == 64
    assert main("compare", file, "--jobs", 1, "--only", ONE) == 0
    assert capsys.readouterr().out == "2 launches are equal, 0 differ\n"
