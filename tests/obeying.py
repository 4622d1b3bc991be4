"""Which laws are tried with which cases: the same choice for every op."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from flashstate.proof import AnyCase
from flashstate.proof.laws import LAWS, SCOPES, Law, pairs
from flashstate.state.formats import PORTABLE_FORMATS

Pairs = list[tuple[str, AnyCase]]
TURNS = int(os.environ.get("FLASHSTATE_TURNS", "3"))  # in which the formats of a shape meet a law on a GPU
ALL_CONFIGS = "the launch config does not change a byte"
ACCURACY = "output and state are as close to float64 as float32 and the format allow"


def laws(*needs: str, among: Mapping[str, Law] = LAWS) -> list[str]:
    return [words for words in among if SCOPES[words].needs in needs]


def reference_pairs(cases: Iterable[AnyCase]) -> Pairs:
    """Every law with every case."""
    return pairs(laws(""), cases)


def interpreted_pairs(groups: Sequence[Sequence[AnyCase]], turns: int = 1) -> Pairs:
    """Accuracy for all cases; every other law with one case of each group, by turns, if it speaks of any. Laws that the
    reference meets too may take more turns, each with one group in so many."""
    chosen: Pairs = [(ACCURACY, case) for group in groups for case in group]
    for w, words in enumerate(words for words in laws("", "kernels") if words != ACCURACY):
        step = turns if words in laws("") else 1
        for k, group in enumerate(groups[w % step :: step]):
            spoken_of = [case for _, case in pairs([words], group)]
            chosen += [(words, spoken_of[(w + k) % len(spoken_of)])] if spoken_of else []
    return chosen


def by_turns(spoken: Iterable[str], groups: Sequence[Sequence[AnyCase]], turns: int = 1) -> Pairs:
    """These laws with one case of one group in so many, by turns, of the groups they speak of."""
    chosen: Pairs = []
    for w, words in enumerate(spoken):
        spoken_of = [found for group in groups if (found := pairs([words], group))]
        chosen += [found[(w // turns + k) % len(found)] for k, found in enumerate(spoken_of[w % turns :: turns])]
    return chosen


def require_half(whole: Pairs, half: Pairs, kind_of: Callable[[AnyCase], object]) -> None:
    """Of the kinds of cases that a law meets in a whole, and of the laws that a kind meets, about half are left."""
    for by in (lambda words, kind: (words, kind), lambda words, kind: (kind, words)):
        met: list[dict[object, set[object]]] = [{}, {}]
        for found, chosen in zip(met, (whole, half), strict=True):
            for words, case in chosen:
                key, other = by(words, kind_of(case))
                found.setdefault(key, set()).add(other)
        assert met[0].keys() == met[1].keys()
        assert all(2 * len(met[1][key]) >= len(met[0][key]) - 1 for key in met[0])


def by_shape(cases: Iterable[AnyCase]) -> list[list[AnyCase]]:
    """Groups of cases that differ in their formats alone."""
    groups: dict[AnyCase, list[AnyCase]] = {}
    for case in cases:
        groups.setdefault(shape_of(case), []).append(case)
    return list(groups.values())


def gpu_pairs(
    groups: Sequence[Sequence[AnyCase]],
    tries_configs: Callable[[AnyCase], bool],
    among: Mapping[str, Law] = LAWS,
    first: tuple[str, str] = (ACCURACY, ALL_CONFIGS),
) -> Pairs:
    """Accuracy for all cases; every other law with one in TURNS of each group, by turns, and with one of every format
    that it did not meet so; all configs for some cases. Nearly all of the time goes into compiling."""
    cases = [case for group in groups for case in group]
    chosen = pairs(first[:1], cases) + pairs(first[1:], filter(tries_configs, cases))
    rest = [words for words in laws("", "kernels", "cuda", among=among) if words not in first]
    for w, words in enumerate(rest):
        met: Pairs = []
        for k, group in enumerate(groups):
            spoken_of = pairs([words], group)
            met += spoken_of[(w + k) % min(TURNS, len(spoken_of)) :: TURNS] if spoken_of else []
        formats = {format_of(case) for _, case in met}
        others = {format_of(case): case for _, case in pairs([words], cases) if format_of(case) not in formats}
        chosen += met + pairs([words], others.values())
    return chosen


class Choice:
    """Pairs for an op whose odd cases have every form in every format, format by format: with every format and form
    once per law, and with half of them in the interpreter, which is slow; and pairs for a GPU."""

    def __init__(self, odd: Sequence[AnyCase], forms: Iterable[str], real: Sequence[AnyCase]) -> None:
        forms = list(forms)
        self.odd, self.real = odd, real
        self.groups = [odd[i : i + len(forms)] for i in range(0, len(odd), len(forms))]  # a format each
        self.form_of = {case: form for group in self.groups for case, form in zip(group, forms, strict=True)}
        self.by_turns = interpreted_pairs(self.groups)
        self.in_the_interpreter = interpreted_pairs(self.groups, turns=2)
        self.on_a_gpu = gpu_pairs(by_shape(real), lambda case: case.heads <= 8 and case.rounding == "nearest")

    def require_half_in_the_interpreter(self) -> None:
        for kind_of in (format_of, self.form_of.__getitem__):
            require_half(self.by_turns, self.in_the_interpreter, kind_of)

    def require_all_without_a_gpu(self) -> None:
        """Of those a law speaks of: the one about seeds only of stochastic rounding, which leaves it some forms."""
        assert [set(map(format_of, group)) for group in self.groups] == [{known} for known in PORTABLE_FORMATS]
        kinds = (format_of, self.form_of.__getitem__)
        require_all_met(laws("", "kernels"), self.by_turns, self.odd, *kinds, fewest=len(PORTABLE_FORMATS))

    def require_all_on_a_gpu(self) -> None:
        spoken = [words for words in laws("", "kernels", "cuda") if words != ALL_CONFIGS]
        require_all_met(spoken, self.on_a_gpu, self.real, format_of, shape_of)
        assert len(self.on_a_gpu) == len(set(self.on_a_gpu))


def format_of(case: AnyCase) -> tuple[str, str]:
    return case.format, case.rounding


def require_all_met(
    spoken: Iterable[str], chosen: Pairs, cases: Sequence[AnyCase], *kinds: Callable[[AnyCase], object], fewest: int = 0
) -> None:
    """These laws meet every kind of the cases that they speak of; a law that meets fewer cases, every first kind."""
    for words in spoken:
        met = [case for law, case in chosen if law == words]
        possible = [case for _, case in pairs([words], cases)]
        for kind_of in kinds if len(met) >= fewest else kinds[:1]:
            assert set(map(kind_of, met)) == set(map(kind_of, possible))


def shape_of(case: AnyCase) -> AnyCase:
    return replace(case, format="float32", rounding="nearest")
