"""Draft trees as SGLang has them: first children and next siblings, or parents, where that of the root says nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashstate.compat import shapes


def parents_of(name: str, table: Any, batch: int, tokens: int, device: torch.device) -> Tensor | None:
    """Parents (batch, tokens) as Slots has them, -1 for the root, of a table that may have more rows and columns."""
    if table is None:
        return None
    shapes.check_indices(name, table, "batch", "T")
    table = shapes.table_of(name, table, batch, tokens, device=device)[:, :tokens]
    return torch.where(numbers_of(table) > 0, table, -1)


def numbers_of(table: Tensor) -> Tensor:
    """The numbers of the tokens that a table (batch, tokens) has columns for."""
    return shapes.slot_numbers(table.mT)


def parents_from(child: Tensor, sibling: Tensor) -> Tensor:
    """The parent of every token (batch, tokens), of its first child and its next sibling in such tables, or -1.

    A token's place in its row of siblings is found by doubling: each of them points to the one before it, then to the
    one two before it, and so on up to the first, whose parent names it. The root, and what nothing names, have 0.
    """
    tokens = child.shape[1]
    here = numbers_of(child).expand(child.shape)  # (batch, tokens)
    first = _pointing(sibling, here, here)
    for _ in range(max(tokens - 1, 1).bit_length()):
        first = first.gather(1, first)
    return _pointing(child, here, torch.zeros_like(here)).gather(1, first)


def _pointing(to: Tensor, here: Tensor, otherwise: Tensor) -> Tensor:
    """For every token the one that points to it, else what is in `otherwise`; negative pointers point nowhere."""
    nowhere = to.shape[1]  # a column more, cut off again
    there = torch.where((to >= 0) & (to < nowhere), to, nowhere).long()
    room = torch.cat([otherwise, otherwise[:, :1]], 1)
    return room.scatter_(1, there, here)[:, :nowhere]
