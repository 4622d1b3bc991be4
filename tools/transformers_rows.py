"""What timing models of Transformers leaves behind: rows, their roofs, the CSV that holds them, and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashstate.bench.results import read_rows, write_csv
from tools.format_costs import table_of
from tools.transformers_timing import Measured, Share

HEAD = (
    "model", "way", "batch", "prompt", "prompt ms", "peak GiB", "ms per token", "tokens/s", "tokens per step",
    "MiB of state", "roof ms", "times roof", "requests that fit",
)  # fmt: skip


@dataclass(frozen=True)
class SpeedRow:
    """One measurement; its fields are the columns of the CSV. What was not measured is empty, and `note` says why."""

    model: str
    way: str
    batch: int
    prompt: int  # tokens
    chunk: int  # tokens of the prompt that went through the model at a time; 0: all
    note: str = ""
    prompt_ms: float | None = None
    peak_gib: float | None = None
    ms_per_token: float | None = None
    spread: float | None = None
    tokens_per_second: float | None = None  # of all rows
    tokens_per_step: float | None = None  # of a row: more than one where drafts were right
    state_bytes: int | None = None  # of a row, recurrent
    attention_bytes: int | None = None  # of a row
    roof_ms: float | None = None  # what reading weights and reading and writing states takes at the speed of a copy
    fits: int | None = None  # rows that fit in memory beside the weights

    @property
    def key(self) -> tuple[str, str, int]:
        """What one row at most is kept of."""
        return self.model, self.way, self.batch

    @property
    def times_roof(self) -> float | None:
        """The time of a token as a multiple of its roof."""
        return self.ms_per_token / self.roof_ms if self.ms_per_token and self.roof_ms else None


@dataclass(frozen=True)
class Machine:
    """What a roof and the number of rows that fit depend on besides what was measured."""

    bytes_per_second: float
    memory: int
    weights: int
    weights_read: float  # in a decode step of this batch


def measured_row(place: SpeedRow, measured: Measured, written: float, machine: Machine) -> SpeedRow:
    """A row with the names, batch and prompt of `place`, and what was measured there.

    written: the share of its state that a row writes for every token. Drafts have no roof: a step has several tokens.
    """
    one_by_one = measured.tokens_per_step == 1
    return SpeedRow(
        place.model, place.way, place.batch, place.prompt, place.chunk, "",
        measured.prompt_ms, measured.peak_bytes / 2**30, measured.ms_per_token, measured.spread,
        place.batch / measured.ms_per_token * 1e3, measured.tokens_per_step,
        measured.state_bytes, measured.attention_bytes,
        roof_ms(measured, place.batch, written, machine) if one_by_one else None,
        requests_that_fit(measured, machine),
    )  # fmt: skip


def roof_ms(measured: Measured, batch: int, written: float, machine: Machine) -> float:
    """Milliseconds that memory needs for the bytes of a decode step, at the speed of a copy."""
    states = measured.state_bytes * (1 + written) + measured.attention_bytes
    return (machine.weights_read + batch * states) / machine.bytes_per_second * 1e3


def requests_that_fit(measured: Measured, machine: Machine) -> int:
    """Rows whose states, and keys and values of as many tokens as were measured, fit beside the weights."""
    return (machine.memory - machine.weights) // max(1, measured.state_bytes + measured.attention_bytes)


def read_speed(path: Path) -> tuple[dict[str, str], list[SpeedRow]]:
    """The provenance and the rows of a file that `python -m tools.transformers_speed` wrote; none if there is none."""
    return read_rows(path, SpeedRow, "tools.transformers_speed") if path.exists() else ({}, [])


def add_rows(path: Path, rows: Sequence[SpeedRow], provenance: Mapping[str, str]) -> None:
    """Write rows beside those of a file, in place of any of the same model, way and batch."""
    before, kept = read_speed(path)
    merged = {row.key: row for row in (*kept, *rows)}
    write_csv(path, list(merged.values()), merged_provenance(before, provenance))


def merged_provenance(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """What both say, and both in turn where they differ."""
    found = {**before}
    for name, value in now.items():
        known = found.get(name, "").split("; ") if name in found else []
        found[name] = "; ".join(dict.fromkeys([*known, *value.split("; ")]))
    return found


def line_of(row: SpeedRow) -> list[str]:
    """A row as a table shows it."""
    prompt = f"{row.prompt} by {row.chunk}" if row.chunk else str(row.prompt)
    start = [row.model, row.way, str(row.batch), prompt]
    if row.note:
        return [*start, row.note, *[""] * (len(HEAD) - len(start) - 1)]
    state = None if row.state_bytes is None else row.state_bytes / 2**20
    numbers = (
        row.prompt_ms, row.peak_gib, row.ms_per_token, row.tokens_per_second, row.tokens_per_step, state, row.roof_ms,
        row.times_roof, row.fits,
    )  # fmt: skip
    return [*start, *map(shown, numbers)]


def shown(number: float | None) -> str:
    """A number with three digits, or all that it has before its point."""
    if number is None:
        return ""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def speed_table(rows: Sequence[SpeedRow]) -> str:
    """All rows as a table in Markdown."""
    return "\n".join(table_of(HEAD, map(line_of, rows)))


def by_batch(rows: Sequence[SpeedRow]) -> list[str]:
    """The lines of a table of one model: ways down; across milliseconds of a token at every batch size and how many
    times faster than stock that is, the prompts of one of them, and what a request takes."""
    batches = sorted({row.batch for row in rows})
    found = {(row.way, row.batch): row for row in rows}
    middle = next(batch for batch in batches if batch > 1)
    lines = []
    for way in dict.fromkeys(row.way for row in rows):
        of_way = [row for row in rows if row.way == way]
        prompt = found.get((way, middle))
        of_prompt = ["", ""] if prompt is None else [shown(prompt.prompt_ms), shown(prompt.peak_gib)]
        state = (of_way[0].state_bytes or 0) / 2**20
        cells = [beside_stock(found.get((way, batch)), found.get(("stock", batch))) for batch in batches]
        lines.append([way, *cells, *of_prompt, shown(state), shown(of_way[0].fits)])
    (tokens,) = {row.prompt for row in rows if row.batch == middle}
    prompts = [f"{middle} prompts of {tokens}: ms", "peak GiB"]
    head = ["", *(f"ms per token, batch {batch}" for batch in batches), *prompts, "MiB of state", "requests that fit"]
    return table_of(head, lines)


def beside_stock(row: SpeedRow | None, stock: SpeedRow | None) -> str:
    """Milliseconds of a token, and how many times faster than stock that is."""
    if row is None or row.ms_per_token is None:
        return ""
    if row is stock or stock is None or stock.ms_per_token is None:
        return shown(row.ms_per_token)
    return f"{shown(row.ms_per_token)} ({shown(stock.ms_per_token / row.ms_per_token)} ×)"


def profile_table(milliseconds: float, shares: Sequence[Share]) -> str:
    """Where the time of a decode step goes, as a table in Markdown: groups of kernels, and what is none of them."""
    busy = sum(share.milliseconds for share in shares)
    idle = Share("no kernel", max(0.0, milliseconds - busy), 0)
    lines = [
        [share.group, f"{share.milliseconds:.3f}", f"{share.milliseconds / milliseconds:.0%}", f"{share.launches:.0f}"]
        for share in (*shares, idle)
    ]
    whole = ["a step", f"{milliseconds:.3f}", "", f"{sum(share.launches for share in shares):.0f}"]
    return "\n".join(table_of(["", "ms", "share", "launches"], [*lines, whole]))
