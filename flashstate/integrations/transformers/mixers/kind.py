"""Kind: how mixers of one recurrence are run on flashstate's ops."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from flashstate.integrations.transformers.memory import Memory, Sizes


class Kind(Protocol):
    """How mixers of one recurrence are run on flashstate's ops, whatever model they are in."""

    def sizes(self, mixer: Any) -> Sizes:
        """What the mixer keeps for every row."""

    def view(self, recurrent: Tensor) -> Tensor:
        """A recurrent state of Transformers, (batch, ...), as a view with the axes that ops have: (batch, heads, rows,
        columns)."""

    def forward(self, mixer: Any, hidden: Tensor, memory: Memory, mask: Tensor | None, prompt: bool) -> Tensor:
        """What the mixer's own forward gives for tokens `hidden`, (batch, T, hidden size), that continue `memory`.

        mask: (batch, T), 0 where a token is padding; None: no token is.
        prompt: whether these are tokens of a prompt, where Transformers clamps time steps; it does not while decoding.
        """
