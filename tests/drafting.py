"""What became of the candidates that a cache was given."""

from __future__ import annotations

from typing import Any


class Steps(list[tuple[int, int]]):
    """The candidates of every call of a cache, and how many of them were taken back."""

    def __init__(self, cache: Any) -> None:
        super().__init__()
        self.cache, self.crop = cache, cache.crop
        cache.crop = self.note

    def note(self, tokens_to_remove: int) -> None:
        self.append((self.cache.croppable, -tokens_to_remove))
        self.crop(tokens_to_remove)

    def check(self, most: int) -> None:
        """Assert that calls had up to `most` candidates, and that some of them were right and some wrong."""
        assert max(candidates for candidates, _ in self) == most
        assert 0 < sum(back for _, back in self) < sum(candidates for candidates, _ in self)
