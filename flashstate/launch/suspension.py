"""Suspending the direct way to a kernel, where calls are to be checked, collected or configured otherwise."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

depth = 0  # above 0 every call takes the ordinary way
_lock = threading.Lock()


@contextmanager
def suspended() -> Iterator[None]:
    """Let every call inside take the ordinary way, those of other threads too."""
    _change(1)
    try:
        yield
    finally:
        _change(-1)


def _change(by: int) -> None:
    global depth
    with _lock:
        depth += by
