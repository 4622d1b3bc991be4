"""One compilation of every kernel variant, however many processes want it."""

import fcntl
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from triton import compiler, knobs


def share_compilations() -> None:
    """Let one process at a time compile a kernel variant, so that others find it in Triton's cache."""
    compiler.compile = _one_at_a_time(compiler.compile)


def _one_at_a_time(compile_variant: Callable[..., Any]) -> Callable[..., Any]:
    def waiting(src: Any, target: Any = None, options: Any = None, **more: Any) -> Any:
        variant = repr((src.hash(), target, sorted((options or {}).items())))
        locks = Path(knobs.cache.dir) / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        with open(locks / hashlib.sha256(variant.encode()).hexdigest(), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return compile_variant(src, target=target, options=options, **more)

    return waiting
