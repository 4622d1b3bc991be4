"""Kind: how mixers of one recurrence are run on flashstate's ops; Replays: a kind whose tokens rings can keep."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from flashstate.integrations.transformers.memory import Memory, Sizes
from flashstate.pool.pool import StatePool
from flashstate.state.state import State


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


@runtime_checkable
class Replays(Kind, Protocol):
    """A kind that can keep what tokens bring in rings, and let states lag behind."""

    def pool(self, mixer: Any, dtype: torch.dtype, **given: Any) -> StatePool:
        """A pool of states like the mixer's, stored in this dtype, with rings.

        given: what pools of all recurrences take, the window of rings and the dtype of what tokens bring among it.
        """

    def fold(self, mixer: Any, state: State, ring: Any, slots: Tensor) -> None:
        """Make the states of these slots those after all tokens in their rings; `StatePool.folded` comes after it."""
