"""Which laws meet which cases: few meetings, in which all pairs of what may matter are met."""

import math
import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest

from flashstate.launch import Gpu, Problem
from flashstate.launch import config as launch_config
from flashstate.launch.config import Choice, valid_configs
from flashstate.launch.environment import replaced
from flashstate.ops.mamba2_replay import ReplayTokenProblem
from flashstate.proof import CASES, AnyCase, Case, Cases, ConvCase, DeltaCase, Mamba3Case, ReplayCase, dtype
from flashstate.proof.case import StateCase
from flashstate.proof.laws import LAWS, SCOPES, speaks_of
from flashstate.state.formats import FORMATS

ACCURACY = "output and state are as close to float64 as float32 and the format allow"
OF_CONFIGS = "the launch config does not change a byte"
# Laws whose verdict depends on the shape: budgets of few numbers are a matter of luck, and small states have few
# configs. On a GPU these laws meet shapes of real models; the others meet small ones too, which compile faster.
OF_SHAPES = (ACCURACY, OF_CONFIGS, "page-strided", "packed rows", "T tokens at once", "steps of a replay")
CONFIGS = ("as chosen", "smallest", "largest")  # of the valid configs
SAMPLE = 24  # candidates that are compared for every meeting
# Meetings that interpreted kernels have whatever is drawn: mistakes in kernels are known that no other meeting finds.
BESIDES: Sequence[tuple[str, AnyCase]] = (
    # one token finds its slot by a check of its own where float states are rounded to nearest
    ("a padding row gives zero", Case(3, 2, 1, 4, 16)),
    # bits of the last token are drawn before the first one is stepped, and of others after each
    ("a state written after every token", DeltaCase(2, 1, 1, 3, 5, tokens=3, format="float16", rounding="stochastic")),
    ("a state written after every token", Mamba3Case(2, 1, 1, 3, 8, tokens=3, format="float16", rounding="stochastic")),
    # rows past the first tile: rates of Mamba-1, and columns of transposed states
    (ACCURACY, Case(batch=2, heads=1, groups=1, rows=40, cols=7, mamba1=True)),
    (ACCURACY, DeltaCase(2, 1, 1, 40, 5, transposed=True)),
    # rows of a state that several warps share, in several heads; and outputs of every rank
    (ACCURACY, Mamba3Case(2, 2, 1, 64, 16)),
    ("packed rows", Mamba3Case(3, 1, 1, 3, 8, rank=2, tokens=2, packed=True, Wo=False)),
    # windows: a row without tokens stores none, and channels of x may lie apart
    ("a separate write slot", ConvCase(3, 5, 4, tokens=2, packed=True)),
    ("strided activations", ConvCase(2, 5, 4, tokens=2)),
    # a fold without scales, by a call that stores nothing
    ("update=False", ReplayCase(3, 1, 1, 5, 16, tokens=2, window=4, x="float16", format="float16")),
)


class Meeting(NamedTuple):
    """A law, a case, and the config that all kernels of the case get."""

    law: str
    case: AnyCase
    config: str = CONFIGS[0]

    def __str__(self) -> str:
        return f"{self.law}-{self.case}" + (f"-{self.config} config" if self.config != CONFIGS[0] else "")


class Place(NamedTuple):
    """Where laws are tried: which of them, on which cases and configs, and which values must meet."""

    needs: Sequence[str]
    cases_for: Callable[[str, Cases], Iterable[AnyCase]]  # of a law and an op
    with_laws: Sequence[str]  # every law meets every value of these dimensions
    together: list[tuple[str, ...]]  # accuracy meets all values that these have together
    configs: Sequence[str] = CONFIGS[:1]  # what config a meeting gets is drawn from these
    besides: Sequence[tuple[str, AnyCase]] = ()  # meetings that are always there: first words of the law, and the case


def small_cases(words: str, cases: Cases) -> Iterable[AnyCase]:
    return (*cases.odd, *cases.besides)


def cases_on_a_gpu(words: str, cases: Cases) -> Iterable[AnyCase]:
    if words == OF_CONFIGS:
        # With odd rows the compiler lays out the window of one token in fewer threads than share a row of state.
        # Products of B and C in bfloat16 are nearly all exact, and their sums equal in any order.
        return [replace(case, rows=5, bc="float16") if is_alone(case) else case for case in cases.real]
    return cases.real if words.startswith(OF_SHAPES) else (*small_cases(words, cases), *cases.real)


def is_alone(case: AnyCase) -> bool:
    """Whether a case is one token of replay without tensor cores, which has a kernel of its own."""
    return isinstance(case.problem, ReplayTokenProblem)


PLACES = {
    "reference": Place(
        ("",), small_cases, ("kernel", "tokens", "format", "way"), [("kernel", "format"), ("kernel", "tokens")]
    ),
    "interpreter": Place(
        ("", "kernels"), small_cases, ("code", "scales", "format"), [("kernel", "tokens", "way"), ("op", "format")],
        besides=BESIDES,
    ),
    "gpu": Place(
        ("", "kernels", "cuda"), cases_on_a_gpu, ("tokens", "format", "way", "config"),
        [("kernel", "tokens", "way"), *product(("kernel", "way", "config"), ("format",)), ("kernel", "config"),
         ("shape",)], (*CONFIGS[:1] * 6, *CONFIGS[1:]),
    ),
}  # fmt: skip
OPS = {type(cases.odd[0]): op for op, cases in CASES.items()}


@cache
def values_of(case: AnyCase) -> Mapping[str, Hashable]:
    """The value of a case in every dimension but the law and the config; most values belong to one op."""
    op, tokens = OPS[type(case)], "packed" if case.packed else "several" if case.several else "one"
    tokens = "alone" if is_alone(case) else tokens
    special = tuple(name for name in ("per_channel", "transposed", "mamba1") if getattr(case, name, False))
    return {
        "op": op, "code": (op, type(case.problem)), "scales": (op, FORMATS[dtype(case.format)].scaled),
        "kernel": (op, type(case.problem).__name__, case.problem.op.split(" rank")[0], *special),
        "tokens": (op, tokens), "format": (case.format, case.rounding), "way": (op, getattr(case, "form", "")),
        "shape": case.forms[0].in_format("float32", "nearest") if isinstance(case, StateCase) else case,
    }  # fmt: skip


def laws(*needs: str) -> list[str]:
    return [words for words in LAWS if SCOPES[words].needs in needs]


@cache
def meetings(place: str, seed: int = 0) -> tuple[Meeting, ...]:
    """Meetings in which every law meets every value of some dimensions, and accuracy pairs of values too. Each is the
    one of a sample that brings most that is new, and of equals the cheapest."""
    where, draw = PLACES[place], random.Random(seed)
    spoken_of = {
        words: [of_form for op in CASES for of_form in _forms(place, op, of_the_kind(words))
                if speaks_of(words, of_form["case"])]
        for words in laws(*where.needs)
    }  # fmt: skip
    chosen, met = dict[Meeting, None](), set[object]()

    def brings(meeting: Meeting) -> set[object]:
        values = {**values_of(meeting.case), "config": meeting.config}
        met_by_law = [(name,) for name in where.with_laws] + (where.together if meeting.law == ACCURACY else [])
        return {(meeting.law, *(values[name] for name in names)) for names in met_by_law}

    def meet(words: str, names: Sequence[str], wanted: Sequence[Hashable]) -> None:
        of_case = [(name, value) for name, value in zip(names, wanted, strict=True) if name != "config"]
        configs = [wanted[names.index("config")]] if "config" in names else where.configs
        possible = [form["case"] for form in spoken_of[words] if all(form[name] == value for name, value in of_case)]
        some = draw.sample(possible, min(SAMPLE, len(possible)))
        candidates = [Meeting(words, case, str(draw.choice(configs))) for case in some]
        add(max(candidates, key=lambda meeting: (len(brings(meeting) - met), -work_of(meeting.case))))

    def add(meeting: Meeting) -> None:
        chosen[meeting] = None
        met.update(brings(meeting))

    def values(words: str, *names: str) -> Iterable[tuple[Hashable, ...]]:
        """All that a law can meet in these dimensions."""
        of_cases = {tuple(form.get(name, name) for name in names): None for form in spoken_of[words]}
        each = [[set(where.configs) if name == "config" else {value} for name, value in zip(names, found, strict=True)]
                for found in of_cases]  # fmt: skip
        return sorted((whole for choices in each for whole in product(*choices)), key=str)

    for first_words, case in where.besides:
        add(next(Meeting(words, case) for words in spoken_of if words.startswith(first_words)))
    wanted = [(words, (name,)) for words, name in product(spoken_of, where.with_laws)]
    for words, names in [*((ACCURACY, names) for names in where.together), *wanted]:
        for found in values(words, *names):
            if (words, *found) not in met:
                meet(words, names, found)
    return tuple(chosen)


def of_the_kind(words: str) -> str:
    """A law that meets the same cases as this one, the same for all that do."""
    return words if words == OF_CONFIGS else ACCURACY if words.startswith(OF_SHAPES) else ""


@cache
def _forms(place: str, op: str, words: str) -> Sequence[Mapping[str, Any]]:
    """The forms of all cases of an op that such a law meets, with their values."""
    forms = (form for case in PLACES[place].cases_for(words, CASES[op]) for form in case.forms)
    return [{**values_of(form), "case": form} for form in forms]


def work_of(case: AnyCase) -> int:
    """About how much there is to compute and to compile: elements of state times tokens, and times a ring's window."""
    return math.prod(case.state_axes) * (sum(case.lengths) + case.batch) * (case.window if case.op.rings else 1)


def parameters(place: str, seed: int) -> Iterator[object]:
    """Meetings as parameters of a test: of every law with every op the cheapest one is marked as quick."""
    cheapest: dict[tuple[str, Hashable], Meeting] = {}
    for meeting in meetings(place, seed):
        key = meeting.law, OPS[type(meeting.case)]
        cheapest[key] = min(cheapest.get(key, meeting), meeting, key=lambda each: work_of(each.case))
    quick = set(cheapest.values())
    # Neighbours share kernels, so that a process which gets some of them compiles few.
    for meeting in sorted(meetings(place, seed), key=lambda each: str((*values_of(each.case).values(), each.config))):
        yield pytest.param(meeting, marks=[pytest.mark.quick] if meeting in quick else [])


@contextmanager
def every_config(which: str, case: AnyCase) -> Iterator[None]:
    """Give every launch inside the smallest or the largest of its valid configs, or the one that is chosen for it."""

    def extreme(problem: Problem, gpu: Gpu) -> Choice:
        return Choice(_valid(problem)[0 if which == "smallest" else -1], which)

    if which == CONFIGS[0]:
        yield
    else:
        remembered = case.op.declared.launches
        remembered.clear()
        with replaced(vars(launch_config), "_look_up", extreme):
            yield
        remembered.clear()


_valid = cache(valid_configs)
