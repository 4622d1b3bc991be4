"""Measure errors of the delta rule over many tokens, in place and by replay, and print them:
`python -m tools.numerics_delta --csv results/numerics-delta.csv`.

That takes minutes on a CPU. `make figures` then writes the tables of docs/numerics.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import torch

from flashstate.bench.results import read_rows
from flashstate.state.formats import FORMATS, PORTABLE_FORMATS, label_of
from tools.format_costs import table_of
from tools.numerics_delta_experiment import (
    BLOCK,
    COLS,
    DECAYS,
    KEYS,
    REQUESTS,
    RING,
    ROWS,
    SHARE,
    TOKENS,
    WINDOW,
    DeltaErrorRow,
    Way,
    measure_delta,
)
from tools.numerics_run import progress, run_of

LENGTH = WINDOW + 4  # rows of a ring that bytes are counted for: calls have up to four tokens
BITS = {"int8, residual of 2 bits": 2, "int8, residual of 4 bits": 4}
MODELS = {"GDN": (4, False), "KDA": (1, True)}  # value heads per key head, and whether every column has a decay
SERVED = "float16"  # the dtype of u where a table shows one
SHOWN = (  # ways of the tables of tokens and of trials
    Way("bfloat16", "nearest"), Way("float16", "nearest"), Way("int8", "nearest"), Way("bfloat16", "nearest", SERVED),
    Way("float16", "nearest", SERVED), Way("int8", "nearest", SERVED),
)  # fmt: skip
TRIED = (
    Way("bfloat16", "nearest"), Way("float16", "nearest"), Way("int8", "nearest"),
    Way("int8, scale per 32", "nearest"), *(Way(name, "nearest") for name in BITS),
    Way("bfloat16", "nearest", SERVED), Way("float16", "nearest", SERVED), Way("int8", "nearest", SERVED),
    Way("int8, scale per 32", "nearest", SERVED),
)  # fmt: skip


def main(argv: list[str] | None = None, tokens: int = TOKENS) -> None:
    """Decode so many tokens with a progress bar, then print every table and write the rows."""
    run = run_of("tools.numerics_delta", "Measure the delta rule.", argv)
    rows = measure_delta(run.device, tokens, tracked=progress("decoding"))
    decoded = f"{tokens} tokens of {REQUESTS} requests, one per call; replay with a window of {WINDOW}"
    heads = f"{len({group_of(row) for row in rows})} of {ROWS} x {COLS}, one for each kind of token"
    provenance = run.write(rows, {"decoded": decoded, "heads": heads})
    for name in TABLES:
        print(f"{name}:\n{delta_table(name, rows, provenance['device'])}")


def read_delta_errors(path: Path) -> tuple[dict[str, str], list[DeltaErrorRow]]:
    """The provenance and the rows of a file that `python -m tools.numerics_delta` wrote."""
    return read_rows(path, DeltaErrorRow, "tools.numerics_delta")


def delta_table(name: str, rows: Sequence[DeltaErrorRow], measured_on: str) -> str:
    """One of TABLES, with what it is an average of below it."""
    ends = sorted({row.tokens for row in rows})
    shown = ends if TABLES[name] is over_tokens else ends[-1:]
    averaged = " and of ".join(f"tokens {end - end // SHARE + 1} to {end}" for end in shown)
    return "\n".join(["", *TABLES[name](rows), "", f"Averages of {averaged}. Measured on: {measured_on}.", "", ""])


def by_format(what: str, rows: Sequence[DeltaErrorRow]) -> list[str]:
    """Errors over all kinds of tokens: formats down; in place, and replay with each dtype of u, across."""
    lines = []
    for fmt in PORTABLE_FORMATS:
        cells = (f"{error_of(what, rows, Way(*fmt, u)):.1e}" for u in ("", *RING))
        lines.append([label_of(*fmt), *cells])
    return table_of(["checkpoint", "in place", *(f"replay, u {u}" for u in RING)], lines)


def by_tokens(rows: Sequence[DeltaErrorRow]) -> list[str]:
    """Errors of outputs by keys and decays: some ways across."""
    lines = []
    for keys, decay in product(KEYS, DECAYS):
        here = [row for row in rows if (row.keys, row.decay) == (keys, decay)]
        lines.append([keys, decay, *(f"{error_of('output', here, way):.1e}" for way in SHOWN)])
    return table_of(["keys", "decays", *map(name_of, SHOWN)], lines)


def over_tokens(rows: Sequence[DeltaErrorRow]) -> list[str]:
    """Errors of states early and late in the run: some ways down."""
    ends = sorted({row.tokens for row in rows})
    lines = [[name_of(way), *(f"{error_of('state', rows, way, end):.1e}" for end in ends)] for way in SHOWN]
    return table_of(["checkpoint", *(f"after {end} tokens" for end in ends)], lines)


def trials(rows: Sequence[DeltaErrorRow]) -> list[str]:
    """What formats beside those of the library cost: bytes that are kept and moved, and errors."""
    lines = []
    for way in TRIED:
        kept = [f"{bytes_kept(way, *model):.2f}" for model in MODELS.values()]
        moved = [f"{bytes_moved(way, *model):.2f}" for model in MODELS.values()]
        wrong = [error_of(what, rows, way) for what in ("state", "output")]
        lines.append([name_of(way), *kept, *moved, *(f"{error:.1e}" for error in wrong)])
    across = [f"{what}, {model}" for what in ("bytes kept", "bytes moved") for model in MODELS]
    return table_of(["state", *across, "error of states", "error of outputs"], lines)


TABLES: dict[str, Callable[[Sequence[DeltaErrorRow]], list[str]]] = {
    "errors of delta states": partial(by_format, "state"),
    "errors of delta outputs": partial(by_format, "output"),
    "errors of delta tokens": by_tokens,
    "errors of delta lengths": over_tokens,
    "errors of delta trials": trials,
}


def name_of(way: Way) -> str:
    return f"{label_of(way.format, way.rounding)} {'by replay' if way.folds else 'in place'}"


def group_of(row: DeltaErrorRow) -> tuple[str, str, str]:
    return row.keys, row.decay, row.beta


def error_of(what: str, rows: Sequence[DeltaErrorRow], way: Way, end: int | None = None) -> float:
    """The root mean square over kinds of tokens of relative errors, of states or outputs, before an end; None: the
    last."""
    end = end or max(row.tokens for row in rows)
    here = [row for row in rows if Way(row.format, row.rounding, row.u) == way and row.tokens == end]
    return root_mean_square(getattr(row, f"{what}_error") for row in here)


def root_mean_square(values: Iterable[float]) -> float:
    squares = [value * value for value in values]
    return math.sqrt(sum(squares) / len(squares))


def bytes_kept(way: Way, heads_per_key: int, per_channel: bool) -> float:
    """Bytes per element of a state of COLS x COLS, with its scales and its ring."""
    return bytes_of_state(way.format) + LENGTH * bytes_of_ring(way, heads_per_key, per_channel)


def bytes_moved(way: Way, heads_per_key: int, per_channel: bool) -> float:
    """Bytes per element that a call of one token reads and writes, on average over a window: in place the state twice;
    by replay once, and once per window again, live rows of the ring, and a new one."""
    state, rows = bytes_of_state(way.format), (WINDOW + 1) / 2 + 1
    ring = rows * bytes_of_ring(way, heads_per_key, per_channel)
    return state * (1 + 1 / WINDOW) + ring if way.folds else 2 * state


def bytes_of_state(name: str) -> float:
    """Bytes per element of a state whose rows have COLS columns: its bits, and its float32 scales."""
    plain = name.partition(",")[0]
    dtype: torch.dtype = getattr(torch, plain)
    columns = COLS if name == plain or name in BITS else BLOCK  # that share a scale
    return dtype.itemsize + BITS.get(name, 0) / 8 + (4 / columns if FORMATS[dtype].scaled else 0)


def bytes_of_ring(way: Way, heads_per_key: int, per_channel: bool) -> float:
    """Bytes of one row of a ring, per element of a state of COLS x COLS; 16-bit keys and decays per channel."""
    if not way.folds:
        return 0.0
    u_dtype: torch.dtype = getattr(torch, way.u)
    decay = 2 * COLS if per_channel else 4
    return (u_dtype.itemsize * COLS + 2 * COLS / heads_per_key + decay) / COLS**2


if __name__ == "__main__":
    main()
