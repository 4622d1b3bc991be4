"""Where laws are kept, and which of them speak of a case and a device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from flashstate.launch import uses_kernels
from flashstate.proof import AnyCase, ReplayCase

Law = Callable[[Any, torch.device], None]  # of a case: an AnyCase, or of laws of replay a ReplayCase
LAWS: dict[str, Law] = {}  # of steps
REPLAY_LAWS: dict[str, Law] = {}
SCOPES: dict[str, Scope] = {}


@dataclass(frozen=True)
class Scope:
    """What a law speaks of: every implementation, "kernels" or "cuda" only, and which cases."""

    needs: str
    includes: Callable[[Any], bool]


class LawBroken(AssertionError):  # noqa: N818  (a verdict, not an error)
    """A law does not hold."""


def law(
    words: str, *, needs: str = "", includes: Callable[[Any], bool] = lambda case: True, among: dict[str, Law] = LAWS
) -> Callable[[Law], Law]:
    """Add a function to LAWS, or to others, under the words that say what holds."""

    def add(check: Law) -> Law:
        among[words], SCOPES[words] = check, Scope(needs, includes)
        return check

    return add


def laws_for(device: torch.device) -> dict[str, Law]:
    """The laws that say something on this device: the reference has no configs, and a CPU no graphs and streams."""
    there = {"", "cuda", "kernels"} if device.type == "cuda" else {"", "kernels"} if uses_kernels(device) else {""}
    return {words: check for words, check in (LAWS | REPLAY_LAWS).items() if SCOPES[words].needs in there}


def pairs(laws: Iterable[str], cases: Iterable[AnyCase]) -> list[tuple[str, AnyCase]]:
    """Every law with every case it speaks of: laws of replay with cases of replay."""
    alike = [
        (words, case)
        for words, case in itertools.product(laws, cases)
        if (words in REPLAY_LAWS) == isinstance(case, ReplayCase)
    ]
    return [(words, case) for words, case in alike if SCOPES[words].includes(case)]
