"""Write the tables and draw the pictures of the repository from results/: `python -m tools.figures`.

A table of README.md or docs/ stands between two marks. The first one says what it shows:

    <!-- figures of OP; make figures writes this -->                    flashstate alone, by format
    <!-- figures of OP: LABEL | LABEL; make figures writes this -->     all implementations under these labels
    <!-- errors of long heads; make figures writes this -->             tools/numerics.py, at the end of its run
    <!-- sizes of states; make figures writes this -->                  the same
    <!-- errors of delta states; make figures writes this -->           tools/numerics_delta.py; and its other tables
    <!-- formats of OP; make figures writes this -->                    bytes, errors and times of its formats
    <!-- costs of formats; make figures writes this -->                 what formats cost in every family of ops
    <!-- where OP pays; make figures writes this -->                    tools/replay_pays.py, of an op that replays
    <!-- peers; make figures writes this -->                            a few calls beside other libraries
    <!-- speed of MODEL; make figures writes this -->                   tools/transformers_speed.py
    <!-- arguments of OP; make figures writes this -->                  its tensors, as it is declared
    <!-- end of figures -->
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from flashstate.bench.plot import draw
from flashstate.bench.results import HOST_COST, Row, is_roof, read_csv
from tools.arguments import arguments_table
from tools.format_choice import FAMILIES, choice_table, draw_choice
from tools.format_costs import SHOWN, costs_table, peers_table, shown_time
from tools.numerics import at_the_end, error_table, read_errors
from tools.numerics_delta import TABLES as DELTA_TABLES
from tools.numerics_delta import delta_table, read_delta_errors
from tools.numerics_ops import read_op_errors
from tools.numerics_plot import draw_errors
from tools.replay_pays import pays
from tools.transformers_plot import draw_speed
from tools.transformers_rows import by_batch, read_speed

ROOT = Path(__file__).parent.parent
RESULTS = {  # by the op that they are of
    "mamba2": ROOT / "results" / "h200.csv",
    "conv1d": ROOT / "results" / "h200-conv1d.csv",
    "conv1d + mamba2": ROOT / "results" / "h200-span.csv",
    "gated_delta": ROOT / "results" / "h200-gated-delta.csv",
    "mamba3": ROOT / "results" / "h200-mamba3.csv",
    "mamba2_replay": ROOT / "results" / "h200-replay.csv",
    "gated_delta_replay": ROOT / "results" / "h200-gated-delta-replay.csv",
}
ERRORS = ROOT / "results" / "numerics.csv"
ERRORS_OF_OPS = ROOT / "results" / "numerics-ops.csv"
ERRORS_OF_DELTA = ROOT / "results" / "numerics-delta.csv"
SPEEDS = ROOT / "results" / "transformers-speed.csv"
WAYS = {"mamba2": "plain", "mamba2_replay": "replay"}  # in ERRORS; other ops are in ERRORS_OF_OPS
OURS = "flashstate"
WIDE_SLOTS = "flashstate, int64 slots"  # stands in results alone
ORIGIN = ("torch", "triton", "commit", "date", "peers")  # of a provenance
END = "<!-- end of figures -->"
MARKED = re.compile(rf"(?P<mark><!-- (?P<table>[^;\n]+); make figures writes this -->\n).*?(?={END})", re.DOTALL)
ARGUMENTS, FORMATS, SPEED = "arguments of ", "formats of ", "speed of "
PEERS, CHOICE = "peers", "costs of formats"
PAYS = re.compile(r"where (?P<op>\w+) pays")
FIGURES = re.compile(r"figures of (?P<op>[^:]+)(: (?P<labels>.+))?")


def main() -> None:
    """Write every table into its document, and draw every picture."""
    for document in documents():
        document.write_text(with_tables(document.read_text(encoding="utf-8")), encoding="utf-8")
    provenance, rows = measured("mamba2")
    draw(rows, provenance, ROOT / "docs" / "h200.png")
    origin_of_errors, errors = read_errors(ERRORS)
    draw_errors(errors, origin_of_errors, ROOT / "docs" / "numerics.png")
    draw_choice(*of_families(), ROOT / "docs" / "choosing-a-format.png")
    of_models, generated = read_speed(SPEEDS)
    draw_speed(generated, of_models, ROOT / "docs" / "transformers.png")


def documents() -> list[Path]:
    """The documents that have a place for a table."""
    every = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
    return [document for document in every if MARKED.search(document.read_text(encoding="utf-8"))]


def with_tables(text: str) -> str:
    """A document with what results/ and declarations have now in the place of its tables."""
    return MARKED.sub(lambda found: found["mark"] + table(found["table"]), text)


def table(name: str) -> str:
    """The table that a mark asks for; ValueError where there is none."""
    if name.startswith(ARGUMENTS):
        return arguments_table(name.removeprefix(ARGUMENTS))
    if name.startswith(FORMATS):
        return formats(name.removeprefix(FORMATS))
    if name.startswith(SPEED):
        of_models, generated = read_speed(SPEEDS)
        return paragraphs(
            by_batch([row for row in generated if row.model == name.removeprefix(SPEED)]), _measured_on(of_models)
        )
    if name in DELTA_TABLES:
        origin_of_delta, of_delta = read_delta_errors(ERRORS_OF_DELTA)
        return delta_table(name, of_delta, origin(origin_of_delta))
    if name == PEERS:
        found = {op: measured(op) for op in dict.fromkeys(op for op, *_ in SHOWN)}
        origins = merged([provenance for provenance, _ in found.values()])
        return paragraphs(peers_table({op: rows for op, (_, rows) in found.items()}), _measured_on(origins))
    if where := PAYS.fullmatch(name):
        origin_of_replay, replayed = measured(where["op"])
        return paragraphs(pays(replayed), _measured_on(origin_of_replay))
    if name == CHOICE:
        ops = [family.op for family in FAMILIES]
        of_times, of_errors = (merged([read(op)[0] for op in ops]) for read in (measured, errors_of))
        return paragraphs(choice_table(*of_families()), f"{_measured_on(of_times)} Errors: {origin(of_errors)}.")
    asked = FIGURES.fullmatch(name)
    if asked is None:
        provenance, rows = read_errors(ERRORS)
        return error_table(name, rows, origin(provenance))
    origin_of_times, times = measured(asked["op"])
    return figures(times, origin_of_times, asked["labels"].split(" | ") if asked["labels"] else ())


def formats(op: str) -> str:
    """What the formats of an op cost."""
    provenance, rows = measured(op)
    origin_of_errors, errors = errors_of(op)
    below = f"{_measured_on(provenance)} Errors: {origin(origin_of_errors)}."
    return paragraphs(costs_table(op, rows, errors), below)


def errors_of(op: str) -> tuple[dict[str, str], dict[tuple[str, str], tuple[float, float]]]:
    """The provenance, and by format and rounding the errors of states and of outputs of an op at the end of a run."""
    if op in WAYS:
        provenance, found = read_errors(ERRORS)
        last = [row for row in at_the_end(found).values() if (row.way, row.memory) == (WAYS[op], "all")]
        return provenance, {(row.format, row.rounding): (row.state_error, row.output_error) for row in last}
    provenance, of_ops = read_op_errors(ERRORS_OF_OPS)
    here = [row for row in of_ops if row.op == op]
    return provenance, {(row.format, row.rounding): (row.state_error, row.output_error) for row in here}


def of_families() -> tuple[dict[str, list[Row]], dict[str, dict[tuple[str, str], tuple[float, float]]]]:
    """The rows of all families of ops, and their errors, by op."""
    ops = [family.op for family in FAMILIES]
    return {op: measured(op)[1] for op in ops}, {op: errors_of(op)[1] for op in ops}


@cache
def measured(op: str) -> tuple[dict[str, str], list[Row]]:
    """The provenance and the rows of an op; ValueError where it was not measured."""
    if op not in RESULTS:
        raise ValueError(f"there are no results of {op}, only of {', '.join(RESULTS)}")
    return read_csv(RESULTS[op])


def figures(rows: Sequence[Row], provenance: Mapping[str, str], labels: Sequence[str] = ()) -> str:
    """Microseconds and percent of the roof, if there is one, batch sizes across.

    Down are the formats and ways to call flashstate; with `labels` only these, and other libraries beside it.
    """
    shown = [row for row in rows if not is_roof(row.implementation) and row.implementation != WIDE_SLOTS]
    shown = [row for row in shown if (row.label in labels if labels else _is_ours(row))]
    found = {(_name(row, labels), row.batch): row for row in shown if row.percent_of_roof is not None or _is_ours(row)}
    if not any(_is_ours(row) for row in found.values()):
        raise ValueError("there are no figures of flashstate on a GPU to make a table of")
    names, batches = (list(dict.fromkeys(keys)) for keys in zip(*found, strict=True))
    head = " | ".join(["µs (percent of the roof), by batch size", *map(str, batches)])
    lines = [f"| {head} |", "|---" * (1 + len(batches)) + "|"]
    for name in names:
        cells = [_cell(found.get((name, batch))) for batch in batches]
        lines.append(f"| {' | '.join([name, *cells])} |")
    if not labels and pays(rows):
        lines += ["", *pays(rows)]
    if HOST_COST in provenance and not labels:
        lines += ["", f"Host cost of an eager call: {provenance[HOST_COST]}."]
    return paragraphs(lines, _measured_on(provenance))


def paragraphs(lines: Sequence[str], below: str) -> str:
    """Lines of a table, and what stands below it, apart from what is around them."""
    return "\n".join(["", *lines, "", below, "", ""])


def origin(provenance: Mapping[str, str]) -> str:
    """The device, and with their names the things that its figures depend on most."""
    named = [f"{name} {provenance[name]}" for name in ORIGIN if name in provenance]
    return ", ".join([provenance.get("device", "an unknown device"), *named])


def merged(provenances: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """One provenance of several: what they do not share stands side by side."""
    names = dict.fromkeys(name for provenance in provenances for name in provenance)
    values = {name: dict.fromkeys(p[name] for p in provenances if name in p) for name in names}
    return {name: " / ".join(found) for name, found in values.items()}


def _measured_on(provenance: Mapping[str, str]) -> str:
    return f"Measured on: {origin(provenance)}."


def _is_ours(row: Row) -> bool:
    return row.implementation.split(", ")[0] == OURS


def _name(row: Row, beside_others: Sequence[str]) -> str:
    """What a line is called: flashstate itself goes without saying where there is nothing else."""
    return f"{row.label}: {row.implementation}" if beside_others else row.label + row.implementation.removeprefix(OURS)


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    percent = "" if row.percent_of_roof is None else f" ({row.percent_of_roof:.0f})"
    return f"{shown_time(row)}{percent}"


if __name__ == "__main__":
    main()
