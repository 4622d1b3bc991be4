"""What plugins of engines say: that a call failed, and that a version is not known."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def failure(call: str, layer: str, error: Exception) -> RuntimeError:
    """An error that says in which call of an engine flashstate failed, and for which layer.

    An OutOfMemoryError stays one, since engines catch it.
    """
    kind = torch.OutOfMemoryError if isinstance(error, torch.OutOfMemoryError) else RuntimeError
    return kind(f"flashstate failed in {call} of {layer}: {error}")


def unknown_version(engine: str, known: Sequence[str], found: str) -> str:
    """What is said where an engine has a version that flashstate was not made for."""
    return f"flashstate is not active: it knows {engine} {' and '.join(known)}, and this is {found}"
