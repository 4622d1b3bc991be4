"""What a user of vLLM chooses of flashstate: `additional_config={"flashstate": {...}}`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flashstate.basics import ROUNDINGS
from flashstate.errors import check_choice, check_int
from flashstate.state.formats import DTYPES, FORMATS, Format
from flashstate.state.state import MOST_ROUNDS, State

KEYS = ("state", "rounding", "rounds")


@dataclass(frozen=True)
class Options:
    """How states are stored.

    dtype: the format of states; None is the dtype that vLLM decides.
    rounding, rounds: as in a State.
    """

    dtype: torch.dtype | None = None
    rounding: str = "nearest"
    rounds: int = State.rounds

    @property
    def format(self) -> Format | None:
        return None if self.dtype is None else FORMATS[self.dtype]

    @property
    def scaled(self) -> bool:
        """Whether rows of a state have a scale, which their page then holds too."""
        return self.format is not None and self.format.scaled


def parse(given: Any, stochastic: bool = False, rounds: int = 0) -> Options:
    """The options in `given`, a mapping. stochastic, rounds: what vLLM's own flags say where `given` says nothing; 0
    rounds are as many as a State has."""
    if not isinstance(given, Mapping):
        raise TypeError(f'additional_config["flashstate"] must be a mapping, got {given!r}')
    for key in given:
        if key not in KEYS:
            raise ValueError(f'additional_config["flashstate"] may have {", ".join(KEYS)}, got {key!r}')
    state = given.get("state")
    check_choice("state", state, (None, *DTYPES))
    rounding = given.get("rounding", "stochastic" if stochastic else "nearest")
    check_choice("rounding", rounding, ROUNDINGS)
    rounds = given.get("rounds", rounds or State.rounds)
    check_int("rounds", rounds, 1, MOST_ROUNDS)
    options = Options(None if state is None else DTYPES[state], rounding, rounds)
    if options.format is not None and rounding not in options.format.roundings:
        known = ", ".join(options.format.roundings)
        raise ValueError(f"rounding={rounding!r} is not for {options.format.name}, which has {known}")
    return options
