"""Which tests can run in this process, an interpreter that does not repeat itself, and memory that shows when nobody
wrote it."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
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


def spare_the_interpreter() -> None:
    """Have Triton's interpreter do less of what takes most of its time, and changes nothing: at every call of a device
    function it looks for what is left of its language to replace, though it did so when the kernel started; and of
    every sum and product of integers it works out whether it overflows, and tells nobody."""
    from triton.runtime import interpreter

    language, patch, builder = interpreter.tl, interpreter._patch_lang, interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)

    @cache
    def modules_of(fn: Callable[..., Any]) -> list[Any]:
        return [module for module in (language, language.core) if any(module is x for x in fn.__globals__.values())]

    def patch_what_is_left(fn: Callable[..., Any]) -> Any:
        left = any(language.core.is_builtin(module.load) for module in modules_of(fn))
        return patch(fn) if left else interpreter._LangPatchScope()

    interpreter._patch_lang = patch_what_is_left


if INTERPRETING:
    spare_the_interpreter()


@pytest.fixture(autouse=True)
def fresh_memory_holds_nan() -> Iterator[None]:
    """torch.empty gives NaN (or the largest integer), so that a result nobody wrote does not look like one."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
