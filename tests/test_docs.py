"""Every Python example in the documents runs, and every relative link leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flashstate.proof.laws import LAWS

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
FEWEST_EXAMPLES = {
    "README.md": 4,
    "docs/compat.md": 3,
    "docs/formats.md": 3,
    "docs/launching.md": 2,
    "docs/numerics.md": 4,
    "docs/ops.md": 5,
}
FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")


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


def relative_links() -> list[tuple[Path, str]]:
    """(document, path) of every link that is neither an address nor an anchor in its own document."""
    links = []
    for document in DOCUMENTS:
        prose = FENCE.sub("", document.read_text(encoding="utf-8"))
        targets = (match["target"].split("#")[0] for match in LINK.finditer(prose))
        links += [(document, target) for target in targets if target and not re.match(r"[a-z]+:", target)]
    return links


@pytest.mark.parametrize(
    ("document", "line", "code"), [pytest.param(*e, id=f"{name(e[0])}:{e[1]}") for e in examples()]
)
def test_every_example_runs_by_itself(document: Path, line: int, code: str) -> None:
    padded = "\n" * (line - 1) + code  # so that a traceback names the document's own lines
    exec(compile(padded, str(document), "exec"), {"__name__": "__main__"})


def test_the_examples_are_found() -> None:
    counts = {document: sum(name(d) == document for d, _, _ in examples()) for document in FEWEST_EXAMPLES}
    assert all(counts[document] >= fewest for document, fewest in FEWEST_EXAMPLES.items()), counts


def test_every_fence_is_closed_and_names_its_language() -> None:
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        fences = len(re.findall(r"^\s*```", text, re.MULTILINE))
        blocks = list(FENCE.finditer(text))
        assert fences == 2 * len(blocks), f"{name(document)} has a fence this test cannot read"
        assert all(block["language"] for block in blocks), f"{name(document)} has a block without a language"


def test_every_relative_link_leads_to_a_file() -> None:
    links = relative_links()
    assert links
    broken = [f"{name(document)}: {target}" for document, target in links if not (document.parent / target).exists()]
    assert not broken


@pytest.mark.parametrize("document", ["README.md", "docs/numerics.md"])
def test_every_law_is_listed(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    missing = [words for words in LAWS if words not in text]
    assert not missing
