"""Docstrings as Markdown: an extension of griffe, which reads them for the API pages of the documentation site.

A paragraph of `name: description` lines, each of an argument or an attribute, becomes a list of definitions. A line
that ends with two colons, as before an indented block, ends with one. A document that is named becomes a link.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

DOCUMENT = re.compile(r"\bdocs/([\w/-]+)\.md\b")
NAMED = re.compile(r"(?P<names>\*{0,2}\w+(?:, \*{0,2}\w+)*): (?P<words>.*)")


class Definitions(Extension):  # type: ignore[misc]
    """Turns the docstring of every object that griffe has loaded."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value, known_names(obj))


def known_names(obj: Object) -> set[str]:
    """What a docstring may describe: arguments of a function, and attributes and arguments of a class."""
    parameters = list(getattr(obj, "parameters", ()))
    members = obj.members if obj.is_class else {}
    if "__init__" in members:
        parameters += list(getattr(members["__init__"], "parameters", ()))
    return {parameter.name.lstrip("*") for parameter in parameters} | set(members)


def as_markdown(text: str, known: set[str]) -> str:
    """A docstring with its paragraphs of names turned into definitions."""
    text = DOCUMENT.sub(r"[docs/\1.md](../\1.md)", re.sub(r"::$", ":", text, flags=re.MULTILINE))
    paragraphs = re.split(r"\n\s*\n", text)
    return "\n\n".join(_definitions(paragraph, known) or paragraph for paragraph in paragraphs)


def _definitions(paragraph: str, known: set[str]) -> str | None:
    """A list of definitions, or None where a paragraph is something else."""
    found: list[str] = []
    for line in paragraph.split("\n"):
        match = NAMED.match(line)
        if match and set(re.findall(r"\w+", match["names"])) <= known:
            names = ", ".join(f"`{name}`" for name in match["names"].split(", "))
            found.append(f"{names}\n:   {match['words']}")
        elif found and line.startswith("    "):
            found[-1] += f"\n{line}"
        else:
            return None
    return "\n\n".join(found)
