"""Every Python example in the documents runs, relative links lead somewhere, what is said to be in a file is there,
and laws are listed once."""

import re
from pathlib import Path

import pytest

from flashstate.launch.call import OPS
from flashstate.proof.laws import LAWS

ROOT = Path(__file__).parent.parent
TEXTS = {path: path.read_text(encoding="utf-8") for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])}
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


def links() -> list[tuple[Path, str, str]]:
    """(document, path, anchor) of every link that is no address; in its own document it has no path."""
    return [
        (document, *match["target"].partition("#")[::2])
        for document, text in TEXTS.items()
        for match in LINK.finditer(FENCE.sub("", text))
        if not re.match(r"[a-z]+:", match["target"])
    ]


def anchors(document: Path) -> set[str]:
    """What links can lead to in a document: its headings, as hosts and the site name them."""
    prose = FENCE.sub("", document.read_text(encoding="utf-8"))
    words = (re.sub(r"[^\w\- ]", "", match["words"].lower()) for match in HEADING.finditer(prose))
    return {word.strip().replace(" ", "-") for word in words}


EXAMPLES = {  # by document and line of the first line of code
    f"{name(document)}:{len(text[: block.start('body')].splitlines()) + 1}": block["body"]
    for document, text in TEXTS.items()
    for block in FENCE.finditer(text)
    if block["language"] == "python"
}


@pytest.mark.parametrize("place", EXAMPLES)
def test_every_example_runs_by_itself(place: str) -> None:
    document, _, line = place.rpartition(":")
    padded = "\n" * (int(line) - 1) + EXAMPLES[place]  # so that a traceback names the document's own lines
    exec(compile(padded, document, "exec"), {"__name__": "__main__"})


def test_every_fence_is_closed_and_names_its_language() -> None:
    assert len(EXAMPLES) > 30
    for document, text in TEXTS.items():
        blocks = list(FENCE.finditer(text))
        assert len(re.findall(r"^\s*```", text, re.MULTILINE)) == 2 * len(blocks), f"{name(document)}: a fence is open"
        assert all(block["language"] for block in blocks), f"{name(document)} has a block without a language"


def test_every_relative_link_leads_to_a_file_and_a_heading_and_of_the_site_to_nothing_outside_it() -> None:
    broken, site = [], ROOT / "docs"
    for document, path, anchor in links():
        target = (document.parent / path).resolve() if path else document
        there = target.exists() and (not anchor or anchor in anchors(target))
        inside = site in target.parents or site not in document.parents
        broken += [] if there and inside else [f"{name(document)}: {path}#{anchor}"]
    assert links()
    assert not broken


def test_what_documents_name_in_a_file_is_there() -> None:
    named = [
        (name(document), *match)
        for document, text in TEXTS.items()
        for match in re.findall(r"`(\w+)` (?:of|in) `([\w/]+\.py)`", " ".join(text.split()))
        if document.name != "log.md"  # which tells of commits that were
    ]
    files = [(ROOT / path if (ROOT / path).exists() else ROOT / "flashstate" / path) for _, _, path in named]
    assert named
    assert [at for at, file in zip(named, files, strict=True) if not re.search(rf"\b{at[1]}\b", file.read_text())] == []


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_a_page_with_the_same_parts(op: str) -> None:
    text = FENCE.sub("", (ROOT / "docs" / "ops" / f"{op}.md").read_text(encoding="utf-8"))
    assert tuple(re.findall(r"^## (.+)$", text, re.MULTILINE)) == PARTS
    assert f"<!-- arguments of {op}; make figures" in text


def test_every_law_is_listed_once_in_its_words() -> None:
    listed = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", TEXTS[ROOT / "docs" / "numerics.md"], re.MULTILINE)
    assert [words for words in LAWS if listed.count(words) != 1] == []
    twice = [f"{name(place)}: {words}" for place, text in TEXTS.items() for words in LAWS if words in text]
    assert len(twice) == len(LAWS), sorted(entry for entry in twice if not entry.startswith("docs/numerics.md"))
