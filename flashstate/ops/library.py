"""Ops as torch.compile sees them. Eager calls do not go through here."""

from __future__ import annotations

from collections.abc import Callable

import torch

_library = torch.library.Library("flashstate", "DEF")


def register(schema: str, run: Callable[..., None]) -> None:
    """Make `run` the op torch.ops.flashstate.<name>: it writes the arguments marked (a!) and returns nothing."""
    name = schema.split("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flashstate::{name}", lambda *args: None, lib=_library)
