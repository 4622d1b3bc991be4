"""Which laws are tried with which cases: one choice for every op."""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import pytest

from flashstate.proof import CASES, AnyCase, Cases
from flashstate.proof.case import StateCase
from flashstate.proof.laws import LAWS, SCOPES, in_turn, speaks_of

Pairs = list[tuple[str, AnyCase]]
TURNS = int(os.environ.get("FLASHSTATE_TURNS", "3"))  # in which the formats of a shape meet a law on a GPU
ACCURACY = "output and state are as close to float64 as float32 and the format allow"
MEASURING = (ACCURACY, "page-strided", "packed rows", "steps of a replay")  # laws that may ask for budgets


def laws(*needs: str) -> list[str]:
    return [words for words in LAWS if SCOPES[words].needs in needs]


def by_turns(spoken: Iterable[str], groups: Sequence[Sequence[AnyCase]], turns: int = 1) -> Pairs:
    """These laws with one case of one group in so many, by turns, of the groups they speak of; each with the places in
    their groups that it met least, and with the groups of another turn where that lets it meet more of them."""
    chosen: Pairs = []
    for w, words in enumerate(spoken):
        spoken_of = [group for group in groups if any(speaks_of(words, case) for case in group)]
        shifted = [places_of(words, spoken_of[(w + shift) % turns :: turns], w // turns) for shift in range(turns)]
        possible = len({place for group in spoken_of for place, case in enumerate(group) if speaks_of(words, case)})
        varied = [met for met in shifted if len({place for place, _ in met}) == min(possible, len(met))]
        chosen += [(words, case) for _, case in (varied or shifted)[0]]
    return chosen


def places_of(words: str, groups: Sequence[Sequence[AnyCase]], turn: int) -> list[tuple[int, AnyCase]]:
    """One case of each group, with its place there: of those that a law speaks of, the place that it met least."""
    met: list[tuple[int, AnyCase]] = []
    for k, group in enumerate(groups):
        times = Counter(place for place, _ in met)
        there = [place for place, case in enumerate(group) if speaks_of(words, case)]
        place = min(there, key=lambda place: (times[place], (place - turn - k) % len(group)))
        met.append((place, group[place]))
    return met


def on_the_reference(cases: Cases) -> Pairs:
    """Accuracy for all cases, every other law with one of each group."""
    others = [words for words in laws("") if words != ACCURACY]
    return in_turn([(ACCURACY, case) for case in cases.odd] + by_turns(others, cases.groups))


def in_the_interpreter(cases: Cases) -> Pairs:
    """As on the reference, with fewer groups of those that there are; laws of kernels alone with more of them."""
    met = [words for words in laws("") if words != ACCURACY]
    chosen = [(ACCURACY, case) for case in cases.odd] + by_turns(met, cases.groups, cases.turns)
    chosen += by_turns(laws("kernels"), cases.groups, (cases.turns + 1) // 2)
    others = by_turns([*met, *laws("kernels")], [cases.besides] if cases.besides else [])
    return in_turn(chosen + [pair for pair in others if pair not in chosen])


def on_a_gpu(cases: Cases) -> Pairs:
    """Accuracy for all cases; every other law with one in TURNS of each shape, by turns, and with one of every format
    that it did not meet so. Nearly all of the time goes into compiling. Of an op that has cases besides, these are the
    small ones, for laws that compare bytes: budgets of few numbers are a matter of luck."""
    every = [*cases.real, *(() if cases.besides else cases.quick)]
    groups: dict[AnyCase, list[AnyCase]] = {}
    for case in every:
        groups.setdefault(shape_of(case), []).append(case)
    chosen: Pairs = [(ACCURACY, case) for case in every]
    rest = [words for words in laws("", "kernels", "cuda") if words != ACCURACY]
    for w, words in enumerate(rest):
        met: list[AnyCase] = []
        for k, group in enumerate(groups.values()):
            spoken_of = [case for case in group if speaks_of(words, case)]
            met += spoken_of[(w + k) % min(TURNS, len(spoken_of)) :: TURNS] if spoken_of else []
        formats = set(map(format_of, met))
        others = {format_of(case): case for case in every if speaks_of(words, case) and format_of(case) not in formats}
        chosen += [(words, case) for case in (*met, *others.values())]
    of_bytes = [words for words in rest if not words.startswith(MEASURING)]
    return in_turn(chosen + by_turns(of_bytes, [cases.besides] if cases.besides else []))


def smallest_first(chosen: Pairs) -> Iterable[object]:
    """Parameters of a test: of every law the smallest case is marked as quick."""
    smallest: dict[str, AnyCase] = {}
    for words, case in chosen:
        smallest[words] = min(smallest.get(words, case), case, key=work_of)
    for words, case in chosen:
        yield pytest.param(words, case, marks=[pytest.mark.quick] if smallest[words] is case else [])


def work_of(case: AnyCase) -> tuple[int, int]:
    """About how long it takes in the interpreter: programs times tokens, and then elements."""
    return (sum(case.lengths) + case.batch) * case.state_axes[0], math.prod(case.state_axes)


def require_all_met(
    spoken: Iterable[str], chosen: Pairs, cases: Sequence[AnyCase], kind_of: Callable[[AnyCase], object],
    at_turns: bool = False,
) -> None:  # fmt: skip
    """These laws meet every kind of the cases that they speak of; `at_turns`: as many kinds as they meet cases."""
    for words in spoken:
        possible = {kind_of(case) for case in cases if speaks_of(words, case)}
        met = [kind_of(case) for law, case in chosen if law == words]
        assert met or not possible, words
        assert len(possible & set(met)) >= (min(len(possible), len(met)) if at_turns else len(possible)), words


def silent_on(op: str) -> list[str]:
    """The laws that speak of no case of an op."""
    cases = (*CASES[op].odd, *CASES[op].real)
    return [words for words in LAWS if not any(speaks_of(words, case) for case in cases)]


def format_of(case: AnyCase) -> tuple[str, str]:
    return case.format, case.rounding


def shape_of(case: AnyCase) -> AnyCase:
    """The case in another format: of an op that has formats, the same for all cases of a shape."""
    return case.in_format("float32", "nearest") if isinstance(case, StateCase) else case
