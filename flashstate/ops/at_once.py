"""Several tokens at once, on tensor cores: what `exact=False` allows, and what configs of such calls are chosen for."""

from __future__ import annotations

import torch

from flashstate.errors import dtype_name
from flashstate.launch.call import Given
from flashstate.launch.config import TensorCoreProblem
from flashstate.launch.environment import Gpu
from flashstate.launch.table import Config

HALVES = (torch.bfloat16, torch.float16)  # dtypes of operands that tensor cores take
FEW_AT_ONCE, MOST_AT_ONCE = 8, 16  # tokens that kernels of tokens at once have room for
WIDEST_IN_TILES = 128  # columns: of wider rows several tiles at once spill registers


class AtOnceProblem(TensorCoreProblem):
    """What a config is chosen for where all tokens of a row go through tensor cores at once."""

    def heuristic(self, gpu: Gpu) -> Config:
        """Several tiles where there are programs enough: what the tokens are to each other is found once for all."""
        config = Config(16, 1, self.lane_choices[0])
        return config if self.block_cols > WIDEST_IN_TILES else self.in_many_tiles(config)


def goes_at_once(given: Given) -> bool:
    """Whether tokens go through tensor cores at once: where dense rows have several, and packed ones may."""
    return not given.exact and given.tokens.longest != 1


def room_at_once(longest: int) -> int:
    """How many tokens a kernel of tokens at once has room for."""
    return FEW_AT_ONCE if longest <= FEW_AT_ONCE else MOST_AT_ONCE


def tabled_at_once(recurrence: str, longest: int) -> str:
    """The op that tables have tokens at once under: with room for 16 it needs other configs than with room for 8."""
    few = room_at_once(longest) == FEW_AT_ONCE
    return f"{recurrence}_at_once" if few else f"{recurrence}_at_once_{MOST_AT_ONCE}"


def check_at_once(given: Given, first: str, second: str) -> None:
    """Raise unless tokens can go through tensor cores at once, which multiply states with the tensors of these names;
    nothing may ask for states between tokens."""
    slots, longest = given.slots, given.tokens.longest
    one, other = getattr(given, first).dtype, getattr(given, second).dtype
    if one != other or one not in HALVES:
        got = f"{dtype_name(one)} and {dtype_name(other)}"
        raise ValueError(f"exact=False needs {first} and {second} that are both bfloat16 or both float16, got {got}")
    if longest is None:
        raise ValueError("exact=False with packed tokens needs slots.max_len, the most tokens a row has")
    if longest > MOST_AT_ONCE:
        raise ValueError(f"exact=False is for up to {MOST_AT_ONCE} tokens per row, got {longest}")
    if given.snapshots is not None:
        raise ValueError("exact=False has no states between tokens, so there are no snapshots")
    if slots is not None and (slots.per_token or slots.parents is not None):
        name = "write (batch, T)" if slots.per_token else "parents"
        raise ValueError(f"exact=False has no states between tokens, so slots must not have {name}")
