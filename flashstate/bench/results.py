"""What a benchmark leaves behind: rows, where they come from, and the CSV that holds both."""

from __future__ import annotations

import csv
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from flashstate.errors import counted
from flashstate.info import versions
from flashstate.state.formats import label_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

HOST_COST = "host cost"  # the entry of the provenance that has it
PLAIN_SLOTS = "int32 slots in random order"  # that everything is measured on where nothing else is said
ROOFS = ("roof", "touch", "read")  # implementations that are none; `roof` is made of the two others


def is_roof(implementation: str) -> bool:
    """Whether an implementation is a roof, maybe of memory that is laid out as a name behind it says."""
    return implementation.split(", ")[0] in ROOFS


@dataclass(frozen=True)
class Row:
    """One measurement; its fields are the columns of the CSV."""

    op: str
    implementation: str
    format: str
    rounding: str
    batch: int
    heads: int
    groups: int
    rows: int
    cols: int
    tokens: int  # per row of the batch and call
    stored: str  # Stored of bench/jobs.py
    microseconds: float  # per call, median
    spread: float  # slowest minus fastest, relative to the median
    gigabytes_per_second: float  # of the bytes a call must move at least
    percent_of_roof: float | None  # None where there is no roof: on a CPU

    @property
    def label(self) -> str:
        """What tells rows of a run apart: sizes that they do not share, format, and what is not one token in place."""
        heads = counted(self.heads, "head")
        apart = {"conv1d": f"{self.rows} channels", "gated_delta": heads, "gated_delta_replay": heads}
        tokens = f"{self.tokens} tokens" if self.tokens > 1 else ""
        last = "in place" if self.op.endswith("_replay") else ""  # elsewhere that goes without saying
        stored = {"last": last, "every": "every stored", "none": "none stored"}.get(self.stored, self.stored)
        parts = (apart.get(self.op, ""), label_of(self.format, self.rounding), tokens, stored)
        return ", ".join(filter(None, parts))

    @property
    def shape(self) -> str:
        """The op and the shape, as far as all rows of a run share it."""
        size = f"{self.rows} x {self.cols}"
        usual = f"{counted(self.heads, 'head')}, {counted(self.groups, 'group')}, {size}"
        special = {
            "conv1d": f"width {self.cols}", "gated_delta": f"{counted(self.groups, 'key head')}, {size}",
            "gated_delta_replay": size,
        }  # fmt: skip
        return f"{self.op}, {special.get(self.op, usual)}"


AnyRow = TypeVar("AnyRow", bound="DataclassInstance")  # its fields are the columns of a CSV
PARSERS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "float | None": lambda text: float(text) if text else None,
    "int | None": lambda text: int(text) if text else None,
}


def require_folder(path: Path) -> None:
    """Find out before measuring that a file cannot be written."""
    if not path.absolute().parent.is_dir():
        raise ValueError(f"there is no folder {path.absolute().parent} to write {path.name} to")


def write_csv(path: Path, rows: Sequence[AnyRow], provenance: Mapping[str, str]) -> None:
    """Write comment lines that say where the numbers come from, a header, and the rows, of which there are some."""
    with path.open("w", newline="", encoding="utf-8") as file:
        file.writelines(f"# {name}: {value}\n" for name, value in provenance.items())
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(field.name for field in fields(rows[0]))
        for row in rows:
            writer.writerow(f"{value:.5g}" if isinstance(value, float) else value for value in astuple(row))


def read_rows(path: Path, kind: type[AnyRow], command: str) -> tuple[dict[str, str], list[AnyRow]]:
    """The provenance and the rows, of this kind, of a file that this command wrote."""
    columns = {field.name: PARSERS[str(field.type)] for field in fields(kind)}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        comments = [line[2:].partition(": ") for line in lines if line.startswith("# ")]
        records = list(csv.DictReader(line for line in lines if not line.startswith("#")))
        if not records or list(records[0]) != list(columns):
            raise ValueError
        rows = [kind(**{name: parse(record[name]) for name, parse in columns.items()}) for record in records]
    except (ValueError, TypeError) as error:  # bytes that are no text, or a cell that is no number
        wanted = f"it wants the columns {', '.join(columns)}"
        raise ValueError(f"{path} is not a file that {command} wrote: {wanted}") from error
    return {name: value for name, _, value in comments}, rows


read_csv = partial(read_rows, kind=Row, command="flashstate bench")  # of a file that a benchmark of an op wrote


def provenance_of(device: torch.device, commit: str | None = None) -> dict[str, str]:
    """Everything that a number depends on and that the rows do not say; `commit` where git cannot tell it."""
    found = {**versions(), "commit": commit or _commit(), "date": datetime.now(timezone.utc).date().isoformat()}
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["driver"] = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
        found["CUDA"] = str(torch.version.cuda or torch.version.hip)
    else:
        found["device"] = f"CPU, {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    return found


def _commit() -> str:
    """The commit of the sources, with "-dirty" where they differ from it; "unknown" where git does not track them."""
    here = ("git", "-C", str(Path(__file__).parent))
    if _output_of(*here, "ls-files", Path(__file__).name) == "unknown":
        return "unknown"
    return _output_of(*here, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def _output_of(*command: str) -> str:
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return output or "unknown"
