"""`flashstate check`: the laws of flashstate.proof.laws, proved on the user's own device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from flashstate.launch import uses_kernels
from flashstate.proof import CASES, AnyCase
from flashstate.proof.laws import Law, LawBroken, laws_for, pairs
from flashstate.state.formats import PORTABLE_FORMATS

SHOWN_FAILURES = 3  # per law


class Verdict(NamedTuple):
    """How one law fared: over how many cases, and what each case that broke it had to say."""

    cases: int
    failures: dict[str, str]  # case -> message


def run_check(device: torch.device, quick: bool) -> int:
    """Prove the laws, print the verdicts, and return the exit status: 0 if all hold, 1 otherwise."""
    laws = laws_for(device)
    tried = pairs(laws, cases_on(device, quick))
    tracked = track(tried, description="proving", console=Console(stderr=True), transient=True)
    return show_verdicts(prove(laws, tracked, device), device)


def cases_on(device: torch.device, quick: bool) -> list[AnyCase]:
    """List the cases of all ops for a device: small and odd ones, if `quick` one per format. On a GPU, where every case
    is a compilation, list the quick ones, and real ones, one per format."""
    on_gpu, found = device.type == "cuda", list[AnyCase]()
    for cases in CASES.values():
        found += cases.real[: len(PORTABLE_FORMATS)] if on_gpu and not quick else ()
        found += cases.quick if on_gpu or quick else cases.odd
    return found


def prove(laws: Mapping[str, Law], tried: Iterable[tuple[str, AnyCase]], device: torch.device) -> dict[str, Verdict]:
    """Try every pair of a law's name and a case; the verdicts by laws, in their order. A crash breaks a law too."""
    verdicts = {words: Verdict(0, {}) for words in laws}
    for words, case in tried:
        cases, failures = verdicts[words]
        verdicts[words] = Verdict(cases + 1, failures)
        try:
            laws[words](case, device)
        except LawBroken as broken:
            failures[str(case)] = str(broken)
        except Exception as error:
            failures[str(case)] = f"{type(error).__name__}: {error}"
    return verdicts


def show_verdicts(verdicts: Mapping[str, Verdict], device: torch.device) -> int:
    console, who = Console(), implementation(device)
    table = Table("law", "cases", "verdict", title=f"Laws, proved for {who}", title_justify="left", box=SIMPLE_HEAD)
    for law, (cases, failures) in verdicts.items():
        word = Text("holds", "green") if cases else Text("not tried", "yellow")
        table.add_row(Text(law), str(cases), Text(f"broken by {len(failures)}", "red") if failures else word)
    console.print(table)
    broken = {law: failures for law, (_, failures) in verdicts.items() if failures}
    for law, failures in broken.items():
        console.print(Text(f"\nbroken: {law}", "red"))
        for case, message in list(failures.items())[:SHOWN_FAILURES]:
            console.print(Text(f"  {case}\n    {message}"), soft_wrap=True)
        if len(failures) > SHOWN_FAILURES:
            console.print(f"  and {len(failures) - SHOWN_FAILURES} more cases")
    if broken:
        console.print(f"{len(broken)} of {len(verdicts)} laws are broken by {who}.", style="red")
        return 1
    tried = sum(bool(cases) for cases, _ in verdicts.values())
    console.print(f"All {tried} laws hold for {who}.", style="green")
    return 0


def implementation(device: torch.device) -> str:
    """What runs a call on this device, in words."""
    if device.type == "cuda":
        return f"the kernels on {torch.cuda.get_device_name(device)}"
    return "the kernels in Triton's interpreter" if uses_kernels(device) else "the reference on the CPU"
