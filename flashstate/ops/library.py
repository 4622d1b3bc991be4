"""Ops as torch.compile sees them. Eager calls do not go through here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("flashstate", "DEF")


def register(schema: str, run: Callable[..., object]) -> None:
    """Make `run` the op torch.ops.flashstate.<name>: it writes the arguments marked (a!). The op returns nothing, as
    torch demands, whatever `run` tells an eager caller."""
    name = schema.split("(")[0]

    def op(*args: Any) -> None:
        run(*args)

    _library.define(schema)
    _library.impl(name, op, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flashstate::{name}", lambda *args: None, lib=_library)
