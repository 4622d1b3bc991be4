"""Fingerprints of source code that change with its statements, and not with its layout."""

from __future__ import annotations

import hashlib
import io
import tokenize
from collections.abc import Iterable, Iterator

# Tokens that change nothing but the looks of a statement.
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT)


def fingerprint_of(lines: Iterable[str]) -> str:
    """Return a short hash of these lines."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def statements(source: str) -> Iterator[str]:
    """Yield the statements of a source, each behind its depth, without comments, docstrings and whitespace.

    They are made of tokens, since all versions of Python have the same; their trees differ.
    """
    depth = 0
    line: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        depth += (token.type == tokenize.INDENT) - (token.type == tokenize.DEDENT)
        if token.type == tokenize.NEWLINE:
            if any(token.type != tokenize.STRING for token in line):
                yield f"{depth} {''.join(''.join(token.string for token in line).split())}"
            line.clear()
        elif token.type not in LAYOUT:
            line.append(token)
