"""Draft trees: the states that tokens continue from."""

from __future__ import annotations

import torch
from torch import Tensor


def column(table: Tensor, t: int) -> Tensor:
    """The entries (batch,) for token t; past the table, which only a row longer than max_len has, an invalid number."""
    return table[:, t] if t < table.shape[1] else table.new_full((len(table),), -2)


class Tree:
    """The states after every token so far, for rows whose tokens form a tree. A state is anything with the batch on its
    first axis."""

    def __init__(self, s: Tensor, parents: Tensor) -> None:
        self.states = [s]  # after token -1, 0, 1, ...; each (batch, ...)
        self.valid = [s.new_ones(len(s), dtype=torch.bool)]  # whether there is a state, (batch,)
        self.parents = parents.long()

    def continues_from(self, t: int, runs: Tensor) -> tuple[Tensor, Tensor]:
        """The states that the rows' token t continues from, and which rows have it: (batch, ...), (batch,)."""
        parent = column(self.parents, t)
        inside = (parent >= -1) & (parent < t)
        index = torch.where(inside, parent + 1, 0)
        row = torch.arange(len(index), device=index.device)
        runs = runs & inside & torch.stack(self.valid)[index, row]
        self.valid.append(runs)
        return torch.stack(self.states)[index, row], runs

    def append(self, s: Tensor) -> None:
        self.states.append(s)
