"""Functions of higher rooms that a State and a Ring call: the ops put them here when they are imported."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

read_slots: Callable[..., Tensor]
write_slots: Callable[..., None]
advance_seeds: Callable[..., None]
make_plan: Callable[..., None]
commit: Callable[..., None]
drop_folded: Callable[..., None]
nvidia_capability: Callable[[torch.device], tuple[int, int] | None]


def provide(action: Callable[..., Any]) -> Callable[..., Any]:
    """Put a function here, under its name. Decorates it."""
    globals()[action.__name__] = action
    return action


def __getattr__(name: str) -> Any:
    """Import the ops: a process that has unpickled a State, and nothing else, is without them."""
    if not name.startswith("__"):
        importlib.import_module("flashstate.public")
    if name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]
