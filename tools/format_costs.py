"""The tables of what a format costs in one op, and of flashstate beside other libraries, for the documents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from flashstate.bench.results import Row
from flashstate.state.formats import FORMATS, label_of

BATCHES = (1, 16, 256)
# Tokens of the calls shown, and what these store, if not the last state in place of one.
CALLS = {"mamba2_replay": (6, "stationary"), "gated_delta_replay": (1, "a 16th folds")}
HEADS = {"gated_delta": 64, "gated_delta_replay": 64}  # of the rows shown, where several numbers were measured
BESIDE = (1, 16, 256)  # batch sizes of the table beside other libraries
PEERS = ("vllm", "mamba_ssm", "fla")
SHOWN = (  # (op, label of its rows, implementation of ours, what the line is called)
    ("mamba2", "float32", "flashstate", "`mamba2_step`, float32"),
    ("mamba2", "bfloat16", "flashstate", "`mamba2_step`, bfloat16"),
    ("mamba2", "int8", "flashstate", "`mamba2_step`, int8"),
    ("gated_delta", "64 heads, bfloat16", "flashstate", "`gated_delta_step`, bfloat16"),
    ("gated_delta", "64 heads, int8", "flashstate", "`gated_delta_step`, int8"),
    (
        "gated_delta",
        "64 heads, bfloat16, 4 tokens",
        "flashstate, at once",
        "`gated_delta_step`, bfloat16, 4 tokens, `exact=False`",
    ),
    ("conv1d", "10240 channels, bfloat16", "flashstate", "`conv1d_step`, bfloat16"),
)


def costs_table(op: str, rows: Sequence[Row], errors: Mapping[tuple[str, str], tuple[float, float]]) -> list[str]:
    """The lines of a table of an op: formats down; bytes of a state, errors of states and outputs, times across.

    errors: by format and rounding. A format that was not timed has no times.
    """
    shown = [row for row in rows if _is_shown(op, row)]
    (size,) = {(row.heads, row.rows, row.cols) for row in shown}
    lines = []
    for fmt, wrong in errors.items():
        times = {row.batch: shown_time(row) for row in shown if (row.format, row.rounding) == fmt}
        cells = [f"{state_bytes(fmt[0], *size) / 1024:.4g}", *(f"{error:.1e}" for error in wrong)]
        lines.append([label_of(*fmt), *cells, *(times.get(batch, "") for batch in BATCHES)])
    head = ["format", "KiB of a state", "error of states", "error of outputs"]
    return table_of([*head, *(f"µs, batch {batch}" for batch in BATCHES)], lines)


def state_bytes(name: str, heads: int, rows: int, cols: int) -> int:
    """Bytes of the state of a layer in one slot, scales among them."""
    dtype: torch.dtype = getattr(torch, name)
    scale = 4 if FORMATS[dtype].scaled else 0  # of every row
    return heads * rows * (cols * dtype.itemsize + scale)


def peers_table(measured: Mapping[str, Sequence[Row]]) -> list[str]:
    """The lines of a table of flashstate beside other libraries: a few calls down, libraries across."""
    lines = []
    for op, label, ours, name in SHOWN:
        rows = [row for row in measured[op] if row.label == label]
        lines.append([name, *(_at_batches(rows, library) for library in (ours, *PEERS))])
    batches = ", ".join(map(str, BESIDE[:-1])) + f" and {BESIDE[-1]}"
    return table_of([f"µs at batch {batches}", "flashstate", *PEERS], lines)


def shown_time(row: Row) -> str:
    """Microseconds with three digits."""
    digits = 2 if row.microseconds < 10 else 1 if row.microseconds < 100 else 0
    return f"{row.microseconds:.{digits}f}"


def table_of(head: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines)]


def _is_shown(op: str, row: Row) -> bool:
    heads, call = HEADS.get(op, row.heads), CALLS.get(op, (1, "last"))
    return row.implementation == "flashstate" and row.heads == heads and (row.tokens, row.stored) == call


def _at_batches(rows: Sequence[Row], implementation: str) -> str:
    found = {row.batch: shown_time(row) for row in rows if row.implementation == implementation}
    return " / ".join(found[batch] for batch in BESIDE) if found else ""
