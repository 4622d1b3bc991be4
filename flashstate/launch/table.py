"""Tables of measured configs: one JSON file per GPU, read when a config is looked up and written by `flashstate tune`.

A file says which GPU, torch and Triton it was measured with and when, and under "configs", for each op, shape and
format, then for each mode and batch x heads, the numbers of a config: rows per tile, warps, lanes per row, tokens
loaded together or tiles of a program, most registers.

    "mamba2_step 64x128 float32 vector 4": {
      "nearest, one token": {"16": [4, 1, 8, 1, 0], "4096": [8, 1, 32, 1, 0]}
    }
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

COLUMNS = "batch x heads: [rows per tile, warps, lanes per row, tokens together or tiles of a program, most registers]"
HEADER = ("gpu", "torch", "triton", "measured", "columns")


@dataclass(frozen=True)
class Config:
    """How one kernel is launched.

    block_rows: rows of the state in a tile, which a program has in registers.
    num_warps: warps per program.
    lanes: threads side by side in a row; the fewer, the longer each walks along it, and the fewer are left to sum over.
    together: tokens of a row whose inputs are loaded before the first of them is used, if there are so many; where
        `gated_delta_step` has one token, or all at once, tiles that a program steps one after the other; of
        `mamba3_step` how far ahead a program asks for the states of another one: 32 programs each, 1: not at all; of
        `mamba2_replay` tiles of a program, of one head or of several of a group.
    registers: the most that a thread may have, so that more threads run at once; 0 leaves it to the compiler.
    """

    block_rows: int
    num_warps: int
    lanes: int
    together: int = 1
    registers: int = 0


Configs = dict[str, dict[str, dict[int, Config]]]  # by op, shape and format, then by mode, then by batch x heads


class TableFile(NamedTuple):
    """A file: where it was measured, and what."""

    header: dict[str, str]
    configs: Configs


@functools.cache
def load_table(gpu: str) -> Configs:
    """The measured configs of a GPU; empty if there are none."""
    file = resources.files("flashstate.launch") / "tables" / table_name(gpu)
    return parse_table(json.loads(file.read_text())).configs if file.is_file() else {}


def table_name(gpu: str) -> str:
    return gpu.lower().replace(" ", "-") + ".json"


def parse_table(content: Mapping[str, Any]) -> TableFile:
    """What a file holds, parsed as JSON."""
    configs = {
        key: {mode: {int(size): Config(*entry) for size, entry in sizes.items()} for mode, sizes in modes.items()}
        for key, modes in content["configs"].items()
    }
    return TableFile({name: content[name] for name in HEADER}, configs)


def read_table_file(path: Path) -> TableFile:
    """A file that `flashstate tune` wrote; ValueError if it is something else."""
    try:
        return parse_table(json.loads(path.read_text(encoding="utf-8")))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a table of launch configs") from error


def write_table_file(path: Path, table: TableFile) -> None:
    """Write a table so that whoever reads the file meets either the old one or the new one."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(table_text(table), encoding="utf-8")
    beside.replace(path)


def table_text(table: TableFile) -> str:
    """A table as JSON, a mode per line."""
    header = [f"  {json.dumps(name)}: {json.dumps(table.header[name])},\n" for name in HEADER]
    formats = ",\n".join(_format_text(key, modes) for key, modes in table.configs.items())
    return "{\n" + "".join(header) + '  "configs": {\n' + formats + "\n  }\n}\n"


def _format_text(key: str, modes: Mapping[str, Mapping[int, Config]]) -> str:
    lines = []
    for mode, sizes in sorted(modes.items()):
        listed = {str(size): astuple(sizes[size]) for size in sorted(sizes)}
        lines.append(f"      {json.dumps(mode)}: {json.dumps(listed)}")
    return f"    {json.dumps(key)}: {{\n" + ",\n".join(lines) + "\n    }"
