"""Every mutant edits a text that is there, and names a test, or a law and an op, that is there."""

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest
from mutants import Mutant
from obeying import laws

from flashstate.proof import CASES
from flashstate.proof.laws import LAWS
from tools.mutants import LAW, ROOT, every_mutant

TEST = re.compile(r"^def (test_\w+)\(", re.MULTILINE)


@cache
def text_of(path: str) -> str:
    return (ROOT / path).read_text() if (ROOT / path).is_file() else ""


def law_and_op(mutant: Mutant) -> tuple[str, str, str]:
    """Where a killer that is a law is tried, its first words, and its op; nothing of a killer that is a test."""
    found = LAW.fullmatch(mutant.killed_by)
    return tuple((part or "").strip() for part in found.groups()) if found else ("", "", "")


def wrong(mutant: Mutant) -> Iterator[str]:
    """What a mutant names that is not there."""
    if text_of(f"flashstate/{mutant.where}").count(mutant.old) != 1 or mutant.old == mutant.new:
        yield f"the text that it edits in {mutant.where}"
    place, words, op = law_and_op(mutant)
    if place:
        if not any(law.startswith(words) for law in LAWS):
            yield f"the law {words}"
        if op not in ("", *CASES) and not op.endswith(")"):
            yield f"the op {op}"
        return
    target, _, words = mutant.killed_by.removeprefix("compiled: ").partition(" -k ")
    path, _, test = target.partition("::")
    tests = TEST.findall(text_of(f"tests/{path}"))
    name = (test or words.partition(" ")[0]).partition("[")[0]
    if not name or not any(name == each if test else name in each for each in tests):
        yield f"the test {target} {words}"


@pytest.mark.quick
def test_mutants_name_what_is_there() -> None:
    assert {(mutant.what, what) for mutant in every_mutant() for what in wrong(mutant)} == set()


@pytest.mark.quick
def test_there_are_mutants_of_every_law_and_every_room_and_each_has_a_name_of_its_own() -> None:
    mutants = every_mutant()
    named = [words for place, words, _ in map(law_and_op, mutants) if place == "reference" and words]
    assert [law for law in laws("") if not any(law.startswith(words) for words in named)] == []
    rooms = Counter(mutant.where.split("/")[0] for mutant in mutants)
    assert rooms["reference"] >= 35
    assert rooms["kernels"] >= 40
    assert rooms.total() >= 120
    names = Counter((mutant.where, mutant.what) for mutant in mutants)
    assert [name for name, times in names.items() if times > 1] == []
