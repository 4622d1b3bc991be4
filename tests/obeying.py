"""Which laws are tried with which cases: the same choice for every op."""

from collections.abc import Callable, Iterable, Sequence

from flashstate.laws import LAWS, SCOPES, pairs
from flashstate.testing import AnyCase

Pairs = list[tuple[str, AnyCase]]
ALL_CONFIGS = "the launch config does not change a byte"
ACCURACY = "output and state are as close to float64 as float32 and the format allow"


def laws(*needs: str) -> list[str]:
    return [words for words in LAWS if SCOPES[words].needs in needs]


def reference_pairs(cases: Iterable[AnyCase]) -> Pairs:
    """Every law with every case."""
    return pairs(laws(""), cases)


def interpreted_pairs(groups: Sequence[Sequence[AnyCase]]) -> Pairs:
    """Accuracy for all cases; every other law with one case of each group, by turns, if it speaks of any."""
    chosen: Pairs = [(ACCURACY, case) for group in groups for case in group]
    for w, words in enumerate(words for words in laws("", "kernels") if words != ACCURACY):
        for k, group in enumerate(groups):
            spoken_of = [case for _, case in pairs([words], group)]
            chosen += [(words, spoken_of[(w + k) % len(spoken_of)])] if spoken_of else []
    return chosen


def gpu_pairs(cases: Iterable[AnyCase], tries_configs: Callable[[AnyCase], bool]) -> Pairs:
    """Every law with every case, but all configs only for some: each config is a compilation."""
    chosen = pairs(laws("", "kernels", "cuda"), cases)
    return [(words, case) for words, case in chosen if words != ALL_CONFIGS or tries_configs(case)]
