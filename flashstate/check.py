"""`flashstate check`: the laws of flashstate.proof.laws, proved on the user's own device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Verdict:
    """How one law fared: over how many cases, and what each case that broke it had to say."""

    law: str
    cases: int
    failures: dict[str, str]  # case -> message


def run_check(device: torch.device, quick: bool) -> int:
    """Prove the laws, print the verdicts, and return the exit status: 0 if all hold, 1 otherwise."""
    laws = laws_for(device)
    tracked = track(
        pairs(laws, cases_on(device, quick)), description="proving", console=Console(stderr=True), transient=True
    )
    return show_verdicts(prove(laws, tracked, device), device)


def cases_on(device: torch.device, quick: bool) -> list[AnyCase]:
    """The cases of all ops for a device: small and odd ones, if `quick` one per format. On a GPU, where every case is a
    compilation, the quick ones, and real ones, one per format; `make test-gpu TURNS=1` has them all."""
    on_gpu, found = device.type == "cuda", list[AnyCase]()
    for cases in CASES.values():
        found += cases.real[: len(PORTABLE_FORMATS)] if on_gpu and not quick else ()
        found += cases.quick if on_gpu or quick else cases.odd
    return found


def prove(laws: Mapping[str, Law], tried_pairs: Iterable[tuple[str, AnyCase]], device: torch.device) -> list[Verdict]:
    """Try every pair of a law's name and a case; one verdict per law, in their order."""
    tried = dict.fromkeys(laws, 0)
    failures: dict[str, dict[str, str]] = {words: {} for words in laws}
    for words, case in tried_pairs:
        tried[words] += 1
        complaint = complaint_of(laws[words], case, device)
        if complaint is not None:
            failures[words][str(case)] = complaint
    return [Verdict(words, tried[words], failures[words]) for words in laws]


def complaint_of(law: Law, case: AnyCase, device: torch.device) -> str | None:
    """What the law says against this case; None if it holds. A crash is a complaint too."""
    try:
        law(case, device)
    except LawBroken as broken:
        return str(broken)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def show_verdicts(verdicts: Sequence[Verdict], device: torch.device) -> int:
    console, who = Console(), implementation(device)
    table = Table("law", "cases", "verdict", title=f"Laws, proved for {who}", title_justify="left", box=SIMPLE_HEAD)
    for verdict in verdicts:
        word = Text("holds", "green") if verdict.cases else Text("not tried", "yellow")
        if verdict.failures:
            word = Text(f"broken by {len(verdict.failures)}", "red")
        table.add_row(Text(verdict.law), str(verdict.cases), word)
    console.print(table)
    broken = [verdict for verdict in verdicts if verdict.failures]
    for verdict in broken:
        _show_failures(console, verdict)
    if broken:
        console.print(f"{len(broken)} of {len(verdicts)} laws are broken by {who}.", style="red")
        return 1
    console.print(f"All {len(verdicts)} laws hold for {who}.", style="green")
    return 0


def _show_failures(console: Console, verdict: Verdict) -> None:
    console.print(Text(f"\nbroken: {verdict.law}", "red"))
    for case, message in list(verdict.failures.items())[:SHOWN_FAILURES]:
        console.print(Text(f"  {case}\n    {message}"), soft_wrap=True)
    more = len(verdict.failures) - SHOWN_FAILURES
    if more > 0:
        console.print(f"  and {more} more cases")


def implementation(device: torch.device) -> str:
    """What runs a call on this device, in words."""
    if device.type == "cuda":
        return f"the kernels on {torch.cuda.get_device_name(device)}"
    return "the kernels in Triton's interpreter" if uses_kernels(device) else "the reference on the CPU"
