"""The documentation site: its navigation, pages that are made for it, and docstrings as Markdown; without MkDocs."""

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import flashstate
from tools import site

ROOT = Path(__file__).parent.parent
CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def pages() -> set[str]:
    """Every page of the site: documents, and those that are made."""
    found = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").glob("**/*.md")}
    return found | site.root_pages().keys() | site.api_pages().keys()


def test_every_page_is_in_the_navigation_once() -> None:
    navigation = CONFIG.partition("\nnav:\n")[2].partition("\n\n")[0]
    named = re.findall(r"[\w/-]+\.md", navigation)
    assert sorted(named) == sorted(pages())


def test_links_are_turned_and_nothing_else() -> None:
    text = "[a](docs/ops/x.md#y) [b](LICENSE) `README.md` [c](https://x.org/README.md) [d](README.md#e)"
    assert site.turned(text) == (
        "[a](ops/x.md#y) [b](license.md) `README.md` [c](https://x.org/README.md) [d](index.md#e)"
    )


def test_every_public_name_and_every_module_of_compat_that_is_no_part_of_another_is_on_a_page_of_the_api() -> None:
    named = re.findall(r"^::: flashstate\.([\w.]+)$", "\n".join(site.api_pages().values()), re.MULTILINE)
    sources = {path.stem: path.read_text() for path in (ROOT / "flashstate" / "compat").glob("[!_]*.py")}
    parts = re.findall(r"flashstate\.compat(?:\.| import )([\w, ]+)", "".join(sources.values()))
    doors = [f"compat.{name}" for name in sources if name not in ", ".join(parts).replace(" import ", ", ").split(", ")]
    assert sorted(named) == sorted([*flashstate.__all__, *doors])
    assert site.api_pages().keys() == {f"api/{room}.md" for room in site.TITLES}


@pytest.fixture
def docstrings(monkeypatch: pytest.MonkeyPatch) -> Any:
    """tools.site_docstrings, whose base class may not be installed."""
    griffe = types.ModuleType("griffe")
    griffe.Extension, griffe.Object = object, object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "griffe", griffe)
    monkeypatch.delitem(sys.modules, "tools.site_docstrings", raising=False)
    from tools import site_docstrings

    return site_docstrings


def test_lines_that_describe_arguments_become_definitions(docstrings: Any) -> None:
    before = "Step it.\n\nPer row::\n\n    y = x\n\n"
    named = "q, k: keys,\n    and more: see docs/formats.md.\n*rest: others.\n\n"
    after = "Note: no name."
    assert docstrings.as_markdown(before + named + after, {"q", "k", "rest"}) == (
        "Step it.\n\nPer row:\n\n    y = x\n\n"
        "`q`, `k`\n:   keys,\n    and more: see [docs/formats.md](../formats.md).\n\n`*rest`\n:   others.\n\n"
        "Note: no name."
    )
