"""What a State and a Ring can be asked to do, and ops do for them.

Ops are above this room, so they put their functions here when they are imported, as importing flashstate does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

advance_seeds: Callable[..., None]
make_plan: Callable[..., None]
commit_plan: Callable[..., None]
drop_folded: Callable[..., None]


def provide(action: Callable[..., Any]) -> Callable[..., Any]:
    """Put a function here, under its name. Decorates it."""
    globals()[action.__name__] = action
    return action
