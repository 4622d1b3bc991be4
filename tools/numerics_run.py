"""How experiments on errors are run: their options, a progress bar, and where their rows go."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track

from flashstate.bench.results import provenance_of, write_csv
from flashstate.bench.run import Files
from flashstate.commands import find_device


class Run(NamedTuple):
    """A run of an experiment."""

    csv: Path
    device: torch.device
    commit: str | None

    def write(self, rows: Sequence[Any], setup: Mapping[str, str]) -> dict[str, str]:
        """Write rows, below where they come from and how they were made, which is given back."""
        provenance = {**provenance_of(self.device, self.commit), **setup}
        write_csv(self.csv, rows, provenance)
        return provenance


def run_of(module: str, description: str, argv: list[str] | None) -> Run:
    """The run that a command line asks for, whose file can be written."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--csv", type=Path, metavar="FILE", required=True, help="write the errors there")
    parser.add_argument("--device", metavar="DEVICE", help="cpu, cuda or cuda:N (default: cuda if there is one)")
    parser.add_argument("--commit", metavar="TEXT", help="what the CSV says of the sources where git cannot tell")
    options = parser.parse_args(argv)
    Files(options.csv).check()
    return Run(options.csv, find_device(options.device), options.commit)


def progress(description: str) -> Callable[[Iterable[Any]], Iterable[Any]]:
    """A progress bar for what is gone through."""
    return partial(track, description=description, console=Console(stderr=True), transient=True)
