"""Pages of the documentation site that are not under docs/: a hook of MkDocs, which `make docs` runs.

The documents at the root become pages under other names, with their links turned. The API has a page per room of the
package that exports public names, and one for compat, filled from docstrings.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGES = {  # documents at the root, and what they are called on the site
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "LICENSE": "license.md",
}
FIRST = (  # on their pages, before what else is exported
    "mamba2_step", "mamba2_replay", "mamba2_fold", "mamba3_step", "gated_delta_step", "gated_delta_replay",
    "gated_delta_fold", "conv1d_step",
    "State", "Slots", "Ring", "DeltaRing", "Plan",
)  # fmt: skip
TITLES = {
    "ops": "Ops",
    "pool": "Pools",
    "state": "States, slots, rings",
    "warming": "Warmup",
    "compat": "Other libraries' signatures",
}


def on_files(files: Any, config: Any) -> Any:
    """Add every page that is made to those that were found."""
    from mkdocs.structure.files import File

    for path, content in {**root_pages(), **api_pages()}.items():
        files.append(File.generated(config, path, content=content))
    return files


def root_pages() -> dict[str, str]:
    """The documents at the root, by their paths on the site."""
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in PAGES}
    texts["LICENSE"] = f"# License\n\n```text\n{texts['LICENSE']}\n```\n"
    return {PAGES[name]: turned(text) for name, text in texts.items()}


def turned(text: str) -> str:
    """A document of the root with its links as they are from the top of the site."""
    for name, page in PAGES.items():
        text = re.sub(rf"\]\({re.escape(name)}(?=[)#])", f"]({page}", text)
    return text.replace("](docs/", "](")


def api_pages() -> dict[str, str]:
    """The pages of the API, by their paths on the site: of what each room exports, and of every module of compat."""
    rooms = exports()
    compat = (ROOT / "docs" / "compat.md").read_text(encoding="utf-8")
    rooms["compat"] = sorted(set(re.findall(r"\| `flashstate\.(compat\.\w+)` \|", compat)))  # that one imports from
    return {f"api/{room}.md": _page(room, sorted(names, key=_place)) for room, names in rooms.items()}


def exports() -> dict[str, list[str]]:
    """The public names of the package by the room that they come from, in the order of their imports."""
    tree = ast.parse((ROOT / "flashstate" / "public.py").read_text(encoding="utf-8"))
    found: dict[str, list[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [alias.name for alias in node.names]
            found.setdefault(node.module.split(".")[1], []).extend(names)
    return found


def _place(name: str) -> int:
    return FIRST.index(name) if name in FIRST else len(FIRST)


def _page(room: str, names: list[str]) -> str:
    """A page with a part for each of these names."""
    whole = str(room == "compat").lower()  # modules go by their whole names
    parts = [f"::: flashstate.{name}\n    options: {{show_root_full_path: {whole}}}\n" for name in names]
    return "\n".join([f"# {TITLES.get(room, room)}\n", *parts])
