"""Tables of measured configs: one JSON file per GPU, read when a config is looked up and written by `flashstate tune`.

A file says which GPU, torch and Triton it was measured with and when, and under "configs", for each op, shape and
format, how many lanes share a row, then for each mode and batch x heads the other numbers of a config:

    "mamba2_step 64x128 float32 vector 4": {
      "lanes": 32,
      "nearest, one token": {"16": [4, 1], "256": [8, 1]}
    }
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

COLUMNS = "batch x heads: [rows per program, warps]"
HEADER = ("gpu", "torch", "triton", "measured", "columns")


class FormatTable(NamedTuple):
    """The configs of one op, shape and format: their lanes; by mode, then by batch x heads, their other numbers."""

    lanes: int
    modes: dict[str, dict[int, tuple[int, ...]]]


class TableFile(NamedTuple):
    """A file: where it was measured, and the tables by op, shape and format."""

    header: dict[str, str]
    configs: dict[str, FormatTable]


@functools.cache
def load_table(gpu: str) -> dict[str, FormatTable]:
    """The measured configs of a GPU, by op, shape and format; empty if there are none."""
    file = resources.files("flashstate.launch") / "tables" / table_name(gpu)
    return parse_table(json.loads(file.read_text())).configs if file.is_file() else {}


def table_name(gpu: str) -> str:
    return gpu.lower().replace(" ", "-") + ".json"


def parse_table(content: Mapping[str, Any]) -> TableFile:
    """What a file holds, parsed as JSON."""
    configs = {}
    for key, entries in content["configs"].items():
        modes = {
            mode: {int(size): tuple(numbers) for size, numbers in sizes.items()}
            for mode, sizes in entries.items()
            if mode != "lanes"
        }
        configs[key] = FormatTable(entries["lanes"], modes)
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
    formats = ",\n".join(_format_text(key, table.configs[key]) for key in table.configs)
    return "{\n" + "".join(header) + '  "configs": {\n' + formats + "\n  }\n}\n"


def _format_text(key: str, entries: FormatTable) -> str:
    modes = [f'      "lanes": {entries.lanes}']
    for mode, sizes in entries.modes.items():
        listed = {str(size): list(sizes[size]) for size in sorted(sizes)}
        modes.append(f"      {json.dumps(mode)}: {json.dumps(listed)}")
    return f"    {json.dumps(key)}: {{\n" + ",\n".join(modes) + "\n    }"
