"""The laws every op obeys, as functions of a case and a device. tests/ and `flashstate check` run the same ones."""

from flashstate.proof.laws import replay, seeds, steps, tokens  # each adds its laws to LAWS
from flashstate.proof.laws.registry import LAWS, SCOPES, Law, LawBroken, in_turn, laws_for, pairs, speaks_of

__all__ = [
    "LAWS", "SCOPES", "Law", "LawBroken", "in_turn", "laws_for", "pairs", "replay", "seeds", "speaks_of", "steps",
    "tokens",
]  # fmt: skip
