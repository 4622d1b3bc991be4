"""Tables of measured configs: one JSON file per GPU, read when a config is looked up and written by `flashstate tune`.

A file says which GPU, torch and Triton it was measured with and when, and under "configs", for each op, shape and
format, then for each mode and batch x heads, a config: rows per tile, warps, lanes per row, and those of its other
fields that are not as in a plain one.

    "mamba2_step 64x128 float32 vector 4": {
      "nearest, one token": {"16": [4, 1, 8], "4096": [8, 1, 32]},
      "nearest, several tokens": {"16": [4, 1, 8, {"tokens_together": 4}]}
    }
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import resources
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple

from flashstate.errors import LARGEST_INT32, check_int

TABLES = Path(str(resources.files("flashstate.launch") / "tables"))
COLUMNS = "batch x heads: [rows per tile, warps, lanes per row, other fields of the config that are not plain]"
HEADER = ("gpu", "torch", "triton", "measured", "columns")
LIMITS = {  # the least and the most that a field of a config may be
    "block_rows": (1, 4096),
    "num_warps": (1, 32),  # programs have at most 1024 threads
    "lanes": (1, 64),
    "tokens_together": (1, 64),
    "tiles": (1, 64),
    "ahead": (0, LARGEST_INT32),
    "registers": (0, 255),
}
NOT_MEASURED = "not measured"  # what "measured" begins with, where others have a date: such a table was reasoned


@dataclass(frozen=True)
class Config:
    """How one kernel is launched."""

    block_rows: int  # rows of the state in a tile, which a program has in registers
    num_warps: int  # per program
    lanes: int  # threads side by side in a row; the fewer, the longer each walks along it, and the fewer sum it up
    tokens_together: int = 1  # tokens of a row whose inputs are loaded before the first is used, if there are so many
    tiles: int = 1  # that a program steps one after the other, of one head, or in replay of several heads of a group
    ahead: int = 0  # how many programs behind this one the one is whose states it asks for to the cache; 0: none
    registers: int = 0  # the most that a thread may have, so that more threads run at once; 0: the compiler's choice

    @property
    def unusual(self) -> dict[str, int]:
        """What is not as in a plain config, beside rows, warps and lanes."""
        return {f.name: getattr(self, f.name) for f in fields(self)[3:] if getattr(self, f.name) != f.default}


Configs = dict[str, dict[str, dict[int, Config]]]  # by op, shape and format, then by mode, then by batch x heads


class TableFile(NamedTuple):
    """A file: where it was measured, and what."""

    header: dict[str, str]
    configs: Configs


@functools.cache
def _file_of(gpu: str) -> TableFile:
    """The table of a GPU; one of nothing, if there is none."""
    file = TABLES / table_name(gpu)
    return read_table_file(file) if file.is_file() else TableFile({}, {})


def load_table(gpu: str) -> Configs:
    """The configs of a GPU, measured or not; empty if there are none."""
    return _file_of(gpu).configs


def is_measured(gpu: str) -> bool:
    """Whether the configs of a GPU were measured on it, and not only reasoned from compiled code."""
    return not _file_of(gpu).header.get("measured", "").startswith(NOT_MEASURED)


def table_name(gpu: str) -> str:
    return gpu.lower().replace(" ", "-") + ".json"


def parse_table(content: Mapping[str, Any]) -> TableFile:
    """Return the table that a JSON file holds; KeyError, TypeError, ValueError or AttributeError where it is wrong."""
    header = {name: content[name] for name in HEADER}
    for name, value in header.items():
        if not isinstance(value, str):
            raise TypeError(f"{name} must be text, got {value!r}")
    configs = {
        key: {mode: dict(starmap(_entry, sizes.items())) for mode, sizes in modes.items()}
        for key, modes in content["configs"].items()
    }
    return TableFile(header, configs)


def _entry(size: str, columns: Sequence[Any]) -> tuple[int, Config]:
    """Return the batch x heads and the config of an entry."""
    check_int("batch x heads", int(size), 1, LARGEST_INT32)
    if len(columns) not in (3, 4):
        raise ValueError(f"entries are {COLUMNS}, got {columns}")
    config = Config(*columns[:3], **dict(*columns[3:]))
    for name, (least, most) in LIMITS.items():
        check_int(name, getattr(config, name), least, most)
    return int(size), config


def read_table_file(path: Path) -> TableFile:
    """Return the table in a file; ValueError that names the file if it holds something else."""
    try:
        return parse_table(json.loads(path.read_text(encoding="utf-8")))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        mend = "write it anew with flashstate tune, or delete it"
        raise ValueError(f"{path} is not a table of launch configs ({why}): {mend}") from error


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
        listed = {str(size): _entry_of(sizes[size]) for size in sorted(sizes)}
        lines.append(f"      {json.dumps(mode)}: {json.dumps(listed)}")
    return f"    {json.dumps(key)}: {{\n" + ",\n".join(lines) + "\n    }"


def _entry_of(config: Config) -> list[Any]:
    return [config.block_rows, config.num_warps, config.lanes, *([config.unusual] if config.unusual else [])]
