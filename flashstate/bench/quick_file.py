"""The one file that `flashstate bench --quick` leaves: where it ran, and of every cell its verdict, times and configs.

    {"what": "flashstate bench --quick", "version": 1,
     "where": {"flashstate": …, "torch": …, "device": …, "capability": …, "processors": …, …},
     "seconds": {"limit": 300, "used": 241.3}, "wanted": 90, "complete": true,
     "roofs": {"touch": 4120.0, "read": 4390.0},
     "cells": [{"op": "mamba2", …, "verdict": "correct", "microseconds": 2.36, …, "roofs": [{…}, {…}],
                "configs": [{"of": "mamba2_step 64x128 float32 vector 4", …, "from": "table of …"}]}, …]}

A cell has the fields of a Row; without times, where its verdict is not "correct".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from flashstate.bench.results import Row, is_roof

WHAT = "flashstate bench --quick"
VERSION = 1  # of the format of the file
CORRECT = "correct"
NO_TIME = "not measured: the time was used up"
TIMES = ("microseconds", "spread", "gigabytes_per_second", "percent_of_roof")  # fields of a Row that are measured
Entry = dict[str, Any]  # a cell, as the file has it


@dataclass
class QuickFile:
    """What is in the file."""

    where: dict[str, Any]  # everything numbers depend on and cells do not say
    limit: float  # seconds
    wanted: int  # cells of a whole run
    used: float = 0.0
    cells: list[Entry] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether every cell was reached: the run was not cut off, and had time for all."""
        return len(self.cells) == self.wanted and all(entry["verdict"] != NO_TIME for entry in self.cells)

    @property
    def rows(self) -> list[Row]:
        """All measurements, roofs before what they are roofs of, each once."""
        measured = [entry for entry in self.cells if entry["verdict"] == CORRECT]
        return list(dict.fromkeys(row for entry in measured for row in rows_of(entry)))

    @property
    def roofs(self) -> dict[str, float]:
        """The most GB/s that each roof reached, over all cells: what the memory can do."""
        best: dict[str, float] = {}
        for row in self.rows:
            if is_roof(row.implementation):
                best[row.implementation] = max(row.gigabytes_per_second, best.get(row.implementation, 0.0))
        return best

    def write(self, path: Path) -> None:
        """Write the file so that whoever reads it meets either the old one or the new one."""
        seconds = {"limit": self.limit, "used": self.used}
        content = {
            "what": WHAT, "version": VERSION, "where": self.where, "seconds": seconds, "wanted": self.wanted,
            "complete": self.complete, "roofs": self.roofs,
        }  # fmt: skip
        head = "".join(f"  {json.dumps(name)}: {json.dumps(value)},\n" for name, value in content.items())
        cells = ",\n".join(f"    {json.dumps(entry)}" for entry in self.cells)
        beside = path.with_name(path.name + ".new")
        beside.write_text(f'{{\n{head}  "cells": [\n{cells}\n  ]\n}}\n', encoding="utf-8")
        beside.replace(path)


def entry_of(identity: Mapping[str, Any], verdict: str, configs: Sequence[Entry], rows: Iterable[Row] = ()) -> Entry:
    """A cell for the file: what it is, how its result was, what it was launched with, and its rows, its own last."""
    *roofs, own = rows or (None,)
    entry = {**identity, "verdict": verdict}
    if own is not None:
        timed = ("implementation", *TIMES)
        entry |= rounded({name: getattr(own, name) for name in TIMES})
        entry["roofs"] = [rounded({name: getattr(roof, name) for name in timed}) for roof in roofs]
    return {**entry, "configs": list(configs)}


def rows_of(entry: Entry) -> list[Row]:
    """The roofs of a cell, and the cell."""
    own = {field.name: entry[field.name] for field in fields(Row)}
    return [*(Row(**{**own, **roof}) for roof in entry["roofs"]), Row(**own)]


def identity_of(row: Row) -> Entry:
    """What tells a cell apart: the fields of a Row that are not measured."""
    return {name: value for name, value in asdict(row).items() if name not in TIMES}


def rounded(numbers: Mapping[str, Any]) -> Entry:
    """Five digits of each float."""
    return {name: float(f"{n:.5g}") if isinstance(n, float) else n for name, n in numbers.items()}


def read_quick(path: Path) -> QuickFile:
    """A file that `flashstate bench --quick` wrote; ValueError if it is something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if (content["what"], content["version"]) != (WHAT, VERSION):
            raise ValueError
        seconds = content["seconds"]
        found = QuickFile(content["where"], seconds["limit"], content["wanted"], seconds["used"], content["cells"])
        assert found.rows is not None  # every cell can be read
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a file that {WHAT} wrote") from error
    return found
