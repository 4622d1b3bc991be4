"""tools.frozen_launches: it freezes what calls launch, and tells where that has changed."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.compiled
A_FEW, ONE = ", a tree", "pool 5x20 float16 nearest, read"  # names of calls


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command, whose module changes the environment where it is imported."""
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")
    tool = importlib.import_module("tools.frozen_launches")
    return lambda *given: tool.main(list(map(str, given)))


def test_launches_equal_their_own_file_until_one_changes(
    main: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "launches.json"
    assert main("write", file, "--no-compile", "--only", A_FEW) == 0
    content = json.loads(file.read_text(encoding="utf-8"))
    first, *others = content["launches"]
    assert len(others) > 3
    assert all(A_FEW in line["call"] and line["kernel"] and line["constants"] for line in (first, *others))
    assert main("compare", file, "--no-compile", "--only", A_FEW) == 0
    assert capsys.readouterr().out == f"{1 + len(others)} launches are equal, 0 differ\n"

    first["constants"]["BLOCK_ROWS"] += 1
    file.write_text(json.dumps(content), encoding="utf-8")
    rows = first["constants"]["BLOCK_ROWS"]
    assert main("compare", file, "--no-compile", "--only", A_FEW) == 1
    told = f"{first['call']}: constants: BLOCK_ROWS {rows} -> {rows - 1}\n{len(others)} launches are equal, 1 differ\n"
    assert capsys.readouterr().out == told


def test_a_call_is_compiled_on_one_architecture_and_hashed(
    main: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "launches.json"
    assert main("write", file, "--jobs", 1, "--only", ONE) == 0
    (hashed,) = [line for line in json.loads(file.read_text(encoding="utf-8"))["launches"] if "ptx" in line]
    assert len(hashed["ttir"]) == len(hashed["ptx"]) == 64
    assert main("compare", file, "--jobs", 1, "--only", ONE) == 0
    assert capsys.readouterr().out == "2 launches are equal, 0 differ\n"
