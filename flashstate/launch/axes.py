"""The axes of a tensor argument in words, as an op declares them, and the checks that follow.

    tokens heads | rows      one or two token axes, heads at any stride, rows that are neighbours in memory
    tokens heads | [rows]    the same, or one value per head; rows may also be expanded from that (stride 0)
    | heads [rows cols]      contiguous, or expanded from contiguous values per head

Axes behind | lie side by side in memory. `tokens` stands for (batch,), (batch, T) or packed (tokens,).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashstate.errors import ACTIVATION_DTYPES, check_contiguous, check_row_contiguous, check_tensor, tied
from flashstate.state.slots import Slots

OR_EXPANDED = ", or expanded from contiguous values per head"


class Tokens(NamedTuple):
    """The token axes of a call's activations, by name and by size, and the rows and tokens they hold."""

    axes: tuple[str, ...]  # ("batch",), ("batch", "T") or packed ("tokens",)
    sizes: tuple[int, ...]
    batch: int
    longest: int | None  # the most tokens a row has; None where only the device knows

    @property
    def packed(self) -> bool:
        return self.axes == ("tokens",)

    @property
    def num_tokens(self) -> int:
        """The length of the token axis."""
        return 1 if self.axes == ("batch",) else self.sizes[-1]

    @property
    def one_token(self) -> bool:
        """Whether every row has one token, as the host knows."""
        return self.num_tokens == 1 and not self.packed


@dataclass(frozen=True)
class Axes:
    """The axes of a tensor: token axes, if it has them, then named ones, of which the last may be left out."""

    tokens: bool
    strided: tuple[str, ...]  # of any stride
    dense: tuple[str, ...]  # side by side in memory
    optional: tuple[str, ...]  # behind all others, side by side too
    dtypes: tuple[torch.dtype, ...]
    names: tuple[str, ...]  # all that must be there, without token axes

    @classmethod
    def parse(cls, words: str, dtypes: tuple[torch.dtype, ...] = ACTIVATION_DTYPES) -> Axes:
        """The axes that a declaration says."""
        before, _, behind = words.partition("|")
        needed, _, optional = behind.rstrip(" ]").partition("[")
        strided = tuple(before.split())
        tokens = strided[:1] == ("tokens",)
        strided, dense = strided[1:] if tokens else strided, tuple(needed.split())
        return cls(tokens, strided, dense, tuple(optional.split()), dtypes, strided + dense)

    def check(self, name: str, tensor: Any, tokens: Tokens, sizes: Mapping[str, int], device: torch.device) -> Tensor:
        """Raise unless a tensor has these axes; returned without those it was expanded along."""
        named, sized = self.names, tuple([sizes.get(axis) for axis in self.names])  # None: of any size
        if self.tokens:
            named, sized = tokens.axes + named, tokens.sizes + sized
        if self.optional:
            more = tuple(sizes[axis] for axis in self.optional)
            tensor = tied(name, tensor, (named, sized), (self.optional, more), device, self.dtypes)
        else:
            check_tensor(name, tensor, named, sized, dtypes=self.dtypes, device=device)
        if not self.tokens and not self.strided:
            check_contiguous(name, tensor, OR_EXPANDED if self.optional else "")
        elif tensor.dim() > len(named) - len(self.dense):
            check_row_contiguous(name, tensor)
        return tensor


def check_main(name: str, x: Any, axes: Axes, sizes: Mapping[str, int], device: torch.device, packed: bool) -> None:
    """Check shape, dtype and device of the argument that others must have the tokens of."""
    names, wanted = axes.names, tuple(sizes.get(axis) for axis in axes.names)
    leads = [("tokens",)] if packed else [("batch", "T"), ("batch",)]
    if isinstance(x, Tensor) and x.dim() == 1 + len(names):
        leads.reverse()
    first, *others = [((*lead, *names), (*(None for _ in lead), *wanted)) for lead in leads]
    check_tensor(name, x, *first, dtypes=axes.dtypes, device=device, also=others[0] if others else None)


def tokens_of(x: Tensor, axes: Axes, slots: Slots | None) -> Tokens:
    """The tokens of the argument that others must have the tokens of."""
    sizes = tuple(x.shape[: x.dim() - len(axes.names)])
    if slots is not None and slots.cu_seqlens is not None:
        return Tokens(("tokens",), sizes, slots.read.shape[0], slots.longest)
    return Tokens(("batch", "T")[: len(sizes)], sizes, sizes[0], sizes[1] if len(sizes) == 2 else 1)
