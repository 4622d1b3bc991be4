"""`flashstate bench --numerics`: measures errors, shows them, and keeps them in a CSV, a picture and documents."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from flashstate.bench.figures import END, origin
from flashstate.bench.numerics import MEMORIES, TOKENS, ErrorRow, measure_errors, setup_of
from flashstate.bench.numerics_plot import draw_errors
from flashstate.bench.results import provenance_of, read_rows, write_rows
from flashstate.bench.run import Files
from flashstate.state.formats import label_of

TABLE = rf"errors of (?P<memory>{'|'.join(MEMORIES)}) heads|sizes of states"
MARKED = re.compile(rf"(?P<start><!-- ({TABLE}); make figures writes this -->\n).*?(?={END})", re.DOTALL)
WAYS = ("plain", "replay")
HEAD = ("format", *(f"{part}: {what}" for part in (*WAYS, "plain / replay") for what in ("state", "output")))


def run_numerics(device: torch.device, files: Files, commit: str | None = None, tokens: int = TOKENS) -> int:
    """Measure with a progress bar, then print, write and draw."""
    check_files(files)
    bar = partial(track, description="decoding", console=Console(stderr=True), transient=True)
    rows = measure_errors(device, tokens, tracked=bar)
    report(rows, {**provenance_of(device, commit), **setup_of(device, tokens)}, files)
    return 0


def redraw_numerics(csv_path: Path, files: Files) -> int:
    """Print a file that an earlier run wrote, and draw it."""
    provenance, rows = read_errors(csv_path)
    check_files(files)
    report(rows, provenance, files)
    return 0


def read_errors(path: Path) -> tuple[dict[str, str], list[ErrorRow]]:
    """The provenance and the rows of a file that `report` wrote."""
    return read_rows(path, ErrorRow, "flashstate bench --numerics")


def check_files(files: Files) -> None:
    """Find out before measuring that something cannot be written."""
    files.check_paths()
    for document in files.documents:
        if not MARKED.search(document.read_text(encoding="utf-8")):
            raise ValueError(
                f"{document} has no place for errors: it wants the lines {start_of('errors of all heads')} and {END}"
            )


def start_of(table: str) -> str:
    """The mark in front of a table, such as "errors of long heads" or "sizes of states"."""
    return f"<!-- {table}; make figures writes this -->"


def report(rows: Sequence[ErrorRow], provenance: Mapping[str, str], files: Files) -> None:
    """Print errors, and write them wherever they are wanted."""
    console = Console()
    measured = f"{last_period(rows)}, on {provenance.get('device', 'an unknown device')}"
    console.print(f"Errors relative to float64, {measured}.", markup=False, highlight=False)
    for memory in MEMORIES:
        console.print(console_table(rows, memory))
    if files.csv is not None:
        write_rows(files.csv, ErrorRow, rows, provenance)
    if files.plot is not None:
        draw_errors(rows, provenance, files.plot)
    for document in files.documents:
        document.write_text(with_errors(document, rows, provenance), encoding="utf-8")


def console_table(rows: Sequence[ErrorRow], memory: str) -> Table:
    """The end of a run, for heads of one memory."""
    names = (name.replace(": ", ":\n").replace(" / ", " /\n") for name in HEAD[1:])
    numbers = (Column(name, justify="right", no_wrap=True) for name in names)
    title = "All heads" if memory == "all" else f"Heads of {memory} memory"
    table = Table(HEAD[0], *numbers, title=title, title_justify="left", box=SIMPLE_HEAD)
    for line in lines_of(rows, memory):
        table.add_row(*line)
    return table


def markdown_table(head: Sequence[str], lines: Sequence[Sequence[str]], below: str) -> str:
    """A table as it stands in a document, and a line below it."""
    table = [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines)]
    return "\n".join(["", *table, "", below, "", ""])


def lines_of(rows: Sequence[ErrorRow], memory: str) -> list[list[str]]:
    """What a table of errors says of every format."""
    last = at_the_end(rows)
    lines = []
    for name, rounding in formats_of(rows):
        plain, replay = (last[name, rounding, way, memory] for way in WAYS)
        errors = (plain.state_error, plain.output_error, replay.state_error, replay.output_error)
        ratios = (plain.state_error / replay.state_error, plain.output_error / replay.output_error)
        cells = [*(f"{error:.1e}" for error in errors), *(f"{ratio:.1f}" for ratio in ratios)]
        lines.append([label_of(name, rounding), *cells])
    return lines


def sizes_of(rows: Sequence[ErrorRow]) -> tuple[list[str], list[list[str]]]:
    """The head and the lines of a table of the sizes of states."""
    last = at_the_end(rows)
    columns = [(way, memory) for way in WAYS for memory in MEMORIES if memory != "all"]
    lines = []
    for name, rounding in formats_of(rows):
        sizes = (last[name, rounding, way, memory].state_size for way, memory in columns)
        lines.append([label_of(name, rounding), *(f"{size:.3f}" for size in sizes)])
    return ["format", *(f"{way}: {memory}" for way, memory in columns)], lines


def at_the_end(rows: Sequence[ErrorRow]) -> dict[tuple[str, str, str, str], ErrorRow]:
    """The rows of the last period, by format, rounding, way and memory."""
    end = max(row.tokens for row in rows)
    return {(row.format, row.rounding, row.way, row.memory): row for row in rows if row.tokens == end}


def formats_of(rows: Sequence[ErrorRow]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((row.format, row.rounding) for row in rows))


def last_period(rows: Sequence[ErrorRow]) -> str:
    """Which tokens tables are of."""
    *before, end = sorted({0, *(row.tokens for row in rows)})
    return f"tokens {before[-1] + 1} to {end}"


def with_errors(document: Path, rows: Sequence[ErrorRow], provenance: Mapping[str, str]) -> str:
    """What the document holds with the tables of these rows in their places."""
    below = f"Averages of {last_period(rows)}. Measured on: {', '.join(origin(provenance))}."

    def filled(mark: re.Match[str]) -> str:
        head, lines = (HEAD, lines_of(rows, mark["memory"])) if mark["memory"] else sizes_of(rows)
        return mark["start"] + markdown_table(head, lines, below)

    return MARKED.sub(filled, document.read_text(encoding="utf-8"))
