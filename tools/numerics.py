"""Measure errors over many tokens, and print them: `python -m tools.numerics --csv results/numerics.csv`.

That takes minutes on a CPU. `make figures` then draws the picture and writes the tables of docs/numerics.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flashstate.bench.results import read_rows
from flashstate.state.formats import label_of
from tools.numerics_experiment import MEMORIES, TOKENS, ErrorRow, measure_errors, setup_of
from tools.numerics_run import progress, run_of

WAYS = ("plain", "replay")
HEAD = ("format", *(f"{part}: {what}" for part in (*WAYS, "plain / replay") for what in ("state", "output")))
TABLES = {**{f"errors of {memory} heads": memory for memory in MEMORIES}, "sizes of states": None}


def main(argv: list[str] | None = None, tokens: int = TOKENS) -> None:
    """Decode so many tokens with a progress bar, then print every table and write the rows."""
    run = run_of("tools.numerics", "Measure errors over many tokens.", argv)
    rows = measure_errors(run.device, tokens, tracked=progress("decoding"))
    provenance = run.write(rows, setup_of(run.device, tokens))
    for name in TABLES:
        print(f"{name}:\n{error_table(name, rows, provenance['device'])}")


def read_errors(path: Path) -> tuple[dict[str, str], list[ErrorRow]]:
    """The provenance and the rows of a file that `python -m tools.numerics` wrote."""
    return read_rows(path, ErrorRow, "tools.numerics")


def error_table(name: str, rows: Sequence[ErrorRow], measured_on: str) -> str:
    """One of TABLES, with what it is an average of below it; ValueError for another name."""
    if name not in TABLES:
        raise ValueError(f"there is no table {name!r}, only {', '.join(TABLES)}")
    memory = TABLES[name]
    head, lines = (HEAD, lines_of(rows, memory)) if memory else sizes_of(rows)
    table = [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines)]
    below = f"Averages of {last_period(rows)}. Measured on: {measured_on}."
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


if __name__ == "__main__":
    main()
