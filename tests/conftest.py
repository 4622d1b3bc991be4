"""Which tests can run in this process, an interpreter that does not repeat itself, and memory that shows when nobody
wrote it."""

import os
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
REASONS = {
    "gpu": (torch.cuda.is_available() and not INTERPRETING, "needs a GPU (make test-gpu)"),
    "interpreted": (INTERPRETING, "needs TRITON_INTERPRET=1 (make test)"),
    "compiled": (not INTERPRETING, "needs TRITON_INTERPRET unset (make test)"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker, (possible, reason) in REASONS.items():
            if item.get_closest_marker(marker) and not possible:
                item.add_marker(pytest.mark.skip(reason=reason))


def patch_the_language_once_per_launch() -> None:
    """Triton's interpreter replaces the functions of its language when a kernel starts, and looks for what is left of
    them at every call of a device function, which takes more time than all else it does."""
    from triton.runtime import interpreter

    language, patch = interpreter.tl, interpreter._patch_lang

    @cache
    def modules_of(fn: Callable[..., Any]) -> list[Any]:
        return [module for module in (language, language.core) if any(module is x for x in fn.__globals__.values())]

    def patch_what_is_left(fn: Callable[..., Any]) -> Any:
        left = any(language.core.is_builtin(module.load) for module in modules_of(fn))
        return patch(fn) if left else interpreter._LangPatchScope()

    interpreter._patch_lang = patch_what_is_left


if INTERPRETING:
    patch_the_language_once_per_launch()


@pytest.fixture(autouse=True)
def fresh_memory_holds_nan() -> Iterator[None]:
    """torch.empty gives NaN (or the largest integer), so that a result nobody wrote does not look like one."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
