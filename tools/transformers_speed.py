"""Time models of Transformers with and without flashstate: `python -m tools.transformers_speed --model mamba2`.

Models have their full size and random weights. Every way to decode is checked before it is timed. A row is printed and
written as soon as it is measured, so that a run which is cut off leaves what it has done. Where mamba_ssm or fla can be
imported, Transformers uses their kernels, and rows say so. `--draw` draws the rows of a CSV instead.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from flashstate.bench.results import provenance_of, require_folder
from flashstate.commands import find_device
from tools.transformers_models import MODELS, kernels_of, make_model, weight_bytes, weights_read
from tools.transformers_plot import draw_speed
from tools.transformers_rows import (
    Machine,
    SpeedRow,
    add_rows,
    line_of,
    measured_row,
    profile_table,
    read_speed,
    speed_table,
)
from tools.transformers_timing import Gate, copy_speed, free, measure, memory_of, profile, random_tokens
from tools.transformers_ways import WAYS, Prompt, Way

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHORT, CHUNK = 32, 256  # a prompt that fits where one does not, and the pieces that are tried before it
OUT_OF_MEMORY = "out of memory"
CSV = Path("results/transformers-speed.csv")


def main(argv: list[str] | None = None) -> None:
    """Time what the options say, or draw what was timed."""
    options = parser().parse_args(argv)
    require_folder(options.csv)
    if options.draw is not None:
        require_folder(options.draw)
        provenance, rows = read_speed(options.csv)
        draw_speed(rows, provenance, options.draw)
        return
    device = find_device(options.device)
    ways = chosen(options.ways, WAYS, "way")
    for name in chosen(options.model, MODELS, "model"):
        timed = Timed.prepare(name, device, options)
        for batch in map(int, options.batches.split(",")):
            for way in (way for way in ways if applies(way, batch)):
                timed.show_profile(way, batch) if options.profile else timed.add_row(way, batch)
        if timed.rows:
            say(speed_table(timed.rows))


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(prog="python -m tools.transformers_speed", description="Time models that generate.")
    made.add_argument("--csv", type=Path, metavar="FILE", default=CSV, help=f"rows are added there (default: {CSV})")
    made.add_argument("--model", metavar="NAMES", default=",".join(MODELS), help=f"of {', '.join(MODELS)}")
    made.add_argument("--ways", metavar="NAMES", default=",".join(WAYS), help=f"of {', '.join(WAYS)}")
    made.add_argument("--batches", metavar="NUMBERS", default="1,16,64,256", help="(default: %(default)s)")
    made.add_argument("--prompt", type=int, metavar="TOKENS", default=2048, help="(default: %(default)s)")
    made.add_argument("--tokens", type=int, metavar="N", default=81, help="to generate (default: %(default)s)")
    made.add_argument("--stock-tokens", type=int, metavar="N", default=33, help="without flashstate (%(default)s)")
    made.add_argument("--references", type=Path, metavar="FOLDER", help="keep there what ways are checked by")
    made.add_argument("--profile", action="store_true", help="show where the time goes instead")
    made.add_argument("--tiny", action="store_true", help="tiny models of the same families, to try this program")
    made.add_argument("--device", metavar="DEVICE", help="cpu, cuda or cuda:N (default: cuda if there is one)")
    made.add_argument("--commit", metavar="TEXT", help="what the CSV says of the sources where git cannot tell")
    made.add_argument("--draw", type=Path, metavar="PNG", help="draw the rows of the CSV, and time nothing")
    return made


def chosen(text: str, known: Mapping[str, object], what: str) -> list[str]:
    """Names that commas part; ValueError for one that is not known."""
    found = text.split(",")
    for name in found:
        if name not in known:
            raise ValueError(f"there is no {what} {name!r}, only {', '.join(known)}")
    return found


def applies(way: str, batch: int) -> bool:
    """Whether there is such a way: drafts are for batch 1."""
    return not WAYS[way].drafts or batch == 1


@dataclass
class Timed:
    """A model that is timed, and its rows so far."""

    name: str
    model: PreTrainedModel
    device: torch.device
    options: argparse.Namespace
    bytes_per_second: float
    provenance: dict[str, str]
    verdicts: dict[str, str] = field(default_factory=dict)  # why ways are wrong or fail; "": they are right
    rows: list[SpeedRow] = field(default_factory=list)

    @classmethod
    def prepare(cls, name: str, device: torch.device, options: argparse.Namespace) -> Timed:
        """Make a model, and measure the speed of the memory."""
        start = time.perf_counter()
        speed = copy_speed(device)
        free()
        model = make_model(name, device, options.tiny)
        size = weight_bytes(model) / 2**30
        say(f"{name}: {size:.3g} GiB of weights after {seconds_since(start)}; a copy moves {speed / 1e9:,.0f} GB/s")
        provenance = {
            **provenance_of(device, options.commit), "transformers": version("transformers"),
            f"{name} is": MODELS[name].title, "copy": f"{speed / 1e9:.0f} GB/s",
        }  # fmt: skip
        if kernels := kernels_of(name):
            provenance[kernels] = str(getattr(__import__(kernels), "__version__", "unknown version"))
        return cls(name, model, device, options, speed, provenance)

    @cached_property
    def gate(self) -> Gate:
        """What ways are checked by."""
        folder: Path | None = self.options.references
        return Gate(self.model, self.device, None if folder is None else folder / f"{self.name}.pt")

    def label(self, way: str) -> str:
        """A way, with the package whose kernels Transformers has for it."""
        return "+".join(filter(None, (way, kernels_of(self.name))))

    def add_row(self, way: str, batch: int) -> None:
        """Time a way at a batch size, and keep and print its row."""
        start = time.perf_counter()
        row = self.first_that_fits(way, batch)
        self.rows.append(row)
        add_rows(self.options.csv, [row], self.provenance)
        say(f"{' | '.join(filter(None, line_of(row)))}  [{seconds_since(start)}]")

    def first_that_fits(self, way: str, batch: int) -> SpeedRow:
        """The row of the longest prompt that the memory is enough for, or one that says why there is none."""
        place = SpeedRow(self.name, self.label(way), batch, self.options.prompt, 0)
        note = self.verdict(way)
        for length, chunk in () if note else self.prompts():
            place = replace(place, prompt=length, chunk=chunk)
            try:
                return self.time(place, WAYS[way])
            except Exception as error:  # whatever another library raises must not end the run
                note = reason_of(error)
            free()
            if note != OUT_OF_MEMORY:
                break
        return replace(place, note=note)

    def prompts(self) -> Iterator[tuple[int, int]]:
        """Lengths of prompts to try, and in pieces of how many tokens; Transformers cuts none for pure Mamba."""
        length = self.options.prompt
        yield length, 0
        if "mamba" not in type(self.model).__name__.lower() and length > CHUNK:
            yield length, CHUNK
        if length > SHORT:
            yield SHORT, 0

    def verdict(self, way: str) -> str:
        """Why a way must not be timed, which is found out once; "" where it is right."""
        if way not in self.verdicts:
            try:
                say(f"{self.name} | {self.label(way)}: {self.gate.check(self.model, WAYS[way])}")
                self.verdicts[way] = ""
            except Exception as error:
                self.verdicts[way] = reason_of(error)
            free()
        return self.verdicts[way]

    def time(self, place: SpeedRow, way: Way) -> SpeedRow:
        """The row of a way for a prompt."""
        prompt = Prompt(random_tokens(self.model, place.batch, place.prompt, self.device), place.chunk)
        tokens = self.options.stock_tokens if way.is_stock else self.options.tokens
        measured = measure(self.model, way, prompt, tokens)
        free()
        return measured_row(place, measured, way.written, self.machine(place.batch))

    def machine(self, batch: int) -> Machine:
        """What the roof of a batch depends on."""
        weights = weight_bytes(self.model), weights_read(self.model, batch)
        return Machine(self.bytes_per_second, memory_of(self.device), *weights)

    def show_profile(self, way: str, batch: int) -> None:
        """Print where the time of a decode step goes."""
        prompt = Prompt(random_tokens(self.model, batch, self.options.prompt, self.device))
        print(f"\n{self.name}, {self.label(way)}, batch {batch}:\n")
        print(profile_table(*profile(self.model, WAYS[way], prompt)), flush=True)
        free()


def reason_of(error: Exception) -> str:
    """A short reason why a way was not timed; what is no lack of memory is printed whole."""
    if isinstance(error, torch.OutOfMemoryError):
        return OUT_OF_MEMORY
    say("".join(traceback.format_exception(error)))
    first, *_ = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first}"


def say(text: str) -> None:
    print(text, flush=True)


def seconds_since(start: float) -> str:
    return f"{time.perf_counter() - start:.1f} s"


if __name__ == "__main__":
    main()
