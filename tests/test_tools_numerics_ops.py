"""tools.numerics_ops: what it decodes, measures and leaves behind; and that every format of every op is in the tree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashstate.state.formats import PORTABLE_FORMATS
from tools import numerics_ops as tool
from tools.figures import ERRORS_OF_OPS
from tools.numerics_ops import MODELS, measure_op, read_op_errors

FORMATS = [("float32", "nearest"), ("float16", "nearest"), ("int8", "stochastic")]


@pytest.mark.parametrize("op", MODELS)
def test_errors_are_those_of_the_format(op: str) -> None:
    fine, middle, coarse = measure_op(op, torch.device("cpu"), 40, FORMATS)
    assert [(row.op, row.format, row.rounding, row.tokens) for row in (fine, coarse)] == [
        (op, "float32", "nearest", 40),
        (op, "int8", "stochastic", 40),
    ]
    for found in ([row.state_error for row in (fine, middle, coarse)], [row.output_error for row in (fine, coarse)]):
        assert found == sorted(found)
    assert fine.state_error < (2**-11 if op == "gated_delta_replay" else 2**-20)  # its ring is float16
    assert 2**-13 < middle.state_error < 2**-9 < 2**-7 < coarse.state_error < 2**-3


def test_the_command_writes_what_the_tables_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tool, "measure_op", lambda op, *_, **__: [tool.OpErrorRow(op, "int8", "nearest", 4, 0.5, 0.25)])
    tool.main(["--csv", str(tmp_path / "errors.csv"), "--device", "cpu", "--commit", "abc"], tokens=4)
    provenance, rows = read_op_errors(tmp_path / "errors.csv")
    assert provenance["commit"] == "abc"
    assert [(row.op, row.state_error) for row in rows] == [(op, 0.5) for op in MODELS]


def test_the_tree_shows_what_the_document_says() -> None:
    errors = {(row.op, row.format, row.rounding): row.output_error for row in read_op_errors(ERRORS_OF_OPS)[1]}
    ratios = {key[:2]: errors[key] / errors[(*key[:2], "nearest")] for key in errors if key[2] == "stochastic"}
    assert all(1.3 < ratio < 1.5 for (op, _), ratio in ratios.items() if op == "gated_delta")
    by_replay = {name: ratio for (op, name), ratio in ratios.items() if op == "gated_delta_replay"}
    assert all(1.3 < by_replay[name] < 1.5 for name in ("bfloat16", "int8", "float8_e4m3fn"))
    replayed, stepped = (errors[op, "int8", "nearest"] for op in ("gated_delta_replay", "gated_delta"))
    assert replayed == pytest.approx(stepped / 4, rel=0.05) == errors["gated_delta", "bfloat16", "nearest"]
    of_u = errors["gated_delta_replay", "float32", "nearest"]
    assert 1.5e-4 < of_u < errors["gated_delta_replay", "int16", "nearest"] < 1.05 * of_u
    of_mamba3 = {name: ratio for (op, name), ratio in ratios.items() if op == "mamba3"}
    assert all(1 / 5 < of_mamba3[name] < 1 / 2.8 for name in ("bfloat16", "float8_e4m3fn"))
    assert 0.95 < of_mamba3["int8"] < 1.05
    assert min(of_mamba3["float16"], of_mamba3["int16"]) > 1.3


def test_the_tree_has_errors_of_every_op_in_every_format() -> None:
    _, rows = read_op_errors(ERRORS_OF_OPS)
    found = [(row.op, row.format, row.rounding) for row in rows]
    assert found == [(op, *fmt) for op in MODELS for fmt in PORTABLE_FORMATS]
