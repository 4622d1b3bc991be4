"""Where laws are kept, and which of them speak of a case and a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, NamedTuple

import torch

from flashstate.launch import uses_kernels
from flashstate.proof import AnyCase

Law = Callable[[Any, torch.device], None]  # of a case
LAWS: dict[str, Law] = {}
SCOPES: dict[str, Scope] = {}


class Scope(NamedTuple):
    """What a law speaks of: every implementation, "kernels" or "cuda" only, and which cases."""

    needs: str
    includes: Callable[[Any], bool]


class LawBroken(AssertionError):  # noqa: N818  (a verdict, not an error)
    """A law does not hold."""


def law(
    words: str, *, needs: str = "", includes: Callable[[Any], bool] = lambda case: True
) -> Callable[[Callable[..., None]], Law]:
    """Add a function of a case, a device and the case's inputs there to LAWS, under the words that say what holds."""

    def add(check: Callable[..., None]) -> Law:
        @wraps(check)
        def holds(case: AnyCase, device: torch.device) -> None:
            check(case, device, case.make_inputs(device))

        LAWS[words], SCOPES[words] = holds, Scope(needs, includes)
        return holds

    return add


def laws_for(device: torch.device) -> dict[str, Law]:
    """The laws that say something on this device: the reference has no configs, and a CPU no graphs and streams."""
    there = {"", "cuda", "kernels"} if device.type == "cuda" else {"", "kernels"} if uses_kernels(device) else {""}
    return {words: check for words, check in LAWS.items() if SCOPES[words].needs in there}


def speaks_of(words: str, case: AnyCase) -> bool:
    """Whether a law says something of a case."""
    return SCOPES[words].includes(case)


def pairs(laws: Iterable[str], cases: Iterable[AnyCase]) -> list[tuple[str, AnyCase]]:
    """Every law with every case it speaks of, in one form of a call each."""
    cases = list(cases)
    return in_turn([(words, case) for words in laws for case in cases if speaks_of(words, case)])


def in_turn(found: Iterable[tuple[str, AnyCase]]) -> list[tuple[str, AnyCase]]:
    """Pairs in which the cases of every law take turns in the forms of their calls."""
    turns: dict[str, int] = {}
    chosen = []
    for words, case in found:
        turns[words] = turns.get(words, len(turns)) + 1
        chosen.append((words, case.forms[turns[words] % len(case.forms)]))
    return chosen
