"""What a State and a Ring ask of rooms above theirs: what ops do for them, and on what they are.

Those put their functions here when they are imported, as importing flashstate does.
"""

from __future__ import annotations

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
