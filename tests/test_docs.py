"""Every Python example in the documents runs, every relative link leads somewhere, and laws are listed once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flashstate.launch.call import OPS
from flashstate.proof.laws import LAWS

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])
PARTS = (  # of an op's page, in this order
    "What it computes",
    "A recipe",
    "Arguments",
    "Several tokens and rollback",
    "Formats: what they cost",
    "Pitfalls",
    "Why this is so",
)
FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
HEADING = re.compile(r"^#+ (?P<words>.+)$", re.MULTILINE)


def name(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


def examples() -> list[tuple[Path, int, str]]:
    """(document, line of the first line of code, code) of every fenced block marked python."""
    found = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for block in FENCE.finditer(text):
            if block["language"] == "python":
                found.append((document, text.count("\n", 0, block.start("body")) + 1, block["body"]))
    return found


def links() -> list[tuple[Path, str, str]]:
    """(document, path, anchor) of every link that is no address; in its own document it has no path."""
    found = []
    for document in DOCUMENTS:
        prose = FENCE.sub("", document.read_text(encoding="utf-8"))
        targets = (match["target"] for match in LINK.finditer(prose) if not re.match(r"[a-z]+:", match["target"]))
        found += [(document, *target.partition("#")[::2]) for target in targets]
    return found


def anchors(document: Path) -> set[str]:
    """What links can lead to in a document: its headings, as hosts and the site name them."""
    prose = FENCE.sub("", document.read_text(encoding="utf-8"))
    words = (re.sub(r"[^\w\- ]", "", match["words"].lower()) for match in HEADING.finditer(prose))
    return {word.strip().replace(" ", "-") for word in words}


@pytest.mark.parametrize(
    ("document", "line", "code"), [pytest.param(*e, id=f"{name(e[0])}:{e[1]}") for e in examples()]
)
def test_every_example_runs_by_itself(document: Path, line: int, code: str) -> None:
    padded = "\n" * (line - 1) + code  # so that a traceback names the document's own lines
    exec(compile(padded, str(document), "exec"), {"__name__": "__main__"})


def test_every_fence_is_closed_and_names_its_language() -> None:
    assert len(examples()) > 30
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        fences = len(re.findall(r"^\s*```", text, re.MULTILINE))
        blocks = list(FENCE.finditer(text))
        assert fences == 2 * len(blocks), f"{name(document)} has a fence this test cannot read"
        assert all(block["language"] for block in blocks), f"{name(document)} has a block without a language"


def test_every_relative_link_leads_to_a_file_and_a_heading() -> None:
    assert links()
    broken = []
    for document, path, anchor in links():
        target = (document.parent / path).resolve() if path else document
        there = target.exists() and (not anchor or anchor in anchors(target))
        broken += [] if there else [f"{name(document)}: {path}#{anchor}"]
    assert not broken


def test_documents_of_the_site_link_to_nothing_outside_it() -> None:
    inside = ROOT / "docs"
    outside = [
        f"{name(document)}: {path}"
        for document, path, _ in links()
        if inside in document.parents and path and inside not in (document.parent / path).resolve().parents
    ]
    assert not outside


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_a_page_with_the_same_parts(op: str) -> None:
    text = FENCE.sub("", (ROOT / "docs" / "ops" / f"{op}.md").read_text(encoding="utf-8"))
    assert tuple(re.findall(r"^## (.+)$", text, re.MULTILINE)) == PARTS
    assert f"<!-- arguments of {op}; make figures" in text


def test_every_law_is_listed_once_in_its_words() -> None:
    texts = {name(document): document.read_text(encoding="utf-8") for document in DOCUMENTS}
    listed = re.findall(r"^\| (?P<words>[^|]+) \| [^|]+ \|$", texts["docs/numerics.md"], re.MULTILINE)
    assert [words for words in LAWS if listed.count(words) != 1] == []
    twice = [f"{place}: {words}" for place, text in texts.items() for words in LAWS if words in text]
    assert len(twice) == len(LAWS), sorted(entry for entry in twice if not entry.startswith("docs/numerics.md"))
