"""How long measuring may take: what keeps `--quick` quick."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class TimeLimit:
    """Seconds that measuring may take from now on. Nothing new is begun once they are used up."""

    seconds: float
    clock: Callable[[], float] = time.monotonic
    start: float = field(init=False)

    def __post_init__(self) -> None:
        self.start = self.clock()

    @property
    def used(self) -> float:
        """Seconds since it began."""
        return self.clock() - self.start

    @property
    def over(self) -> bool:
        """Whether they are used up."""
        return self.used >= self.seconds
