"""The laws every op obeys, as functions of a case and a device. tests/ and `flashstate check` run the same ones."""

from flashstate.laws import seeds, steps, tokens  # each adds its laws to LAWS
from flashstate.laws.registry import LAWS, SCOPES, Law, LawBroken, laws_for, pairs

__all__ = ["LAWS", "SCOPES", "Law", "LawBroken", "laws_for", "pairs", "seeds", "steps", "tokens"]
